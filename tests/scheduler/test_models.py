"""What a model built without weights is: absent parameters, real buffers, dropout as asked, initial values."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import BertConfig, Gemma3TextConfig, GemmaConfig, GPT2Config, LlamaConfig, Qwen2Config, T5Config
from transformers.configuration_utils import PreTrainedConfig

from hoist.scheduler.errors import ConfigError, ModelError
from hoist.scheduler.models import absent, build_model, stage_seed
from hoist.scheduler.stages import split
from tests.scheduler.test_stages import router_config
from tests.support.models import FAMILIES, batch_of, reference_model, tiny_config

#: More kinds of tables and scales than the families have.
MORE: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen2": Qwen2Config, "gemma": GemmaConfig, "gemma3": Gemma3TextConfig
}  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_every_non_persistent_buffer_equals_ordinary_construction(family: str) -> None:
    config = tiny_config("llama" if family in MORE else family)
    if family in MORE:
        sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
        config = MORE[family](
            **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0
        )
    built = build_model(config)
    reference = reference_model(config, attention="eager" if family == "gemma2" else "sdpa")
    expected = dict(reference.named_buffers())
    persistent = reference.state_dict().keys()
    assert dict(built.named_buffers()).keys() == expected.keys()
    for name, buffer in built.named_buffers():
        if name not in persistent:
            assert torch.equal(buffer, expected[name]), name
            assert buffer.dtype == expected[name].dtype, name


@pytest.mark.parametrize("family", ["llama", "gemma2", "router"])
def test_buffers_of_a_bfloat16_model(family: str) -> None:
    """As ordinary construction makes them, but for those that a store keeps: it keeps the same for any dtype."""
    config = router_config() if family == "router" else tiny_config(family)
    built = build_model(config, dtype=torch.bfloat16)
    reference = reference_model(config, attention="eager" if family == "gemma2" else "sdpa", dtype=torch.bfloat16)
    expected, persistent = dict(reference.named_buffers()), reference.state_dict().keys()
    kept = {name: buffer.dtype for name, buffer in built.named_buffers() if name in persistent}
    assert set(kept.values()) == ({torch.float32} if family == "router" else set())
    for name, buffer in built.named_buffers():
        if name not in persistent:
            assert buffer.dtype == expected[name].dtype, name
            assert torch.equal(buffer, expected[name]), name
    assert {parameter.dtype for parameter in built.parameters()} <= {torch.bfloat16, torch.float32}
    staged = split(built)
    assert staged.dtype == "bfloat16"
    assert {spec.dtype for stage in staged.stages for spec in stage.tensors} == {"float32"}


@pytest.mark.parametrize("rope", ["llama3", "linear", "yarn"])
def test_scaled_rotary_tables_equal_ordinary_construction(rope: str) -> None:
    parameters: dict[str, object] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0}
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if rope == "yarn":
        parameters |= {"original_max_position_embeddings": 16}
    config = LlamaConfig(**{**tiny_config("llama").to_dict(), "rope_parameters": parameters})
    expected = dict(reference_model(config).named_buffers())
    for name, buffer in build_model(config).named_buffers():
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_absent_and_cost_no_memory(family: str) -> None:
    for name, parameter in build_model(tiny_config(family)).named_parameters():
        assert not parameter.is_meta, name
        assert parameter.untyped_storage().nbytes() == parameter.itemsize, name
        assert bool(parameter.isnan().all()), name
        assert parameter.requires_grad, name


def test_using_an_absent_weight_gives_nan() -> None:
    model = build_model(tiny_config("llama"))
    with torch.no_grad():
        logits = model(input_ids=batch_of()["input_ids"], use_cache=False).logits
    assert bool(logits.isnan().all())


def test_an_absent_integer_is_no_index() -> None:
    with pytest.raises(IndexError):
        nn.functional.embedding(absent(torch.zeros(3, dtype=torch.int64)), torch.zeros(5, 2))


def test_shared_parameters_stay_shared() -> None:
    model = build_model(tiny_config("llama", tied=True))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_a_family_without_sdpa_is_built_with_eager_attention(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hoist.scheduler.models"):
        model = build_model(tiny_config("gemma2"))
    assert model.config._attn_implementation == "eager"
    assert "Gemma2Config has no sdpa attention, using eager" in caplog.text
    assert build_model(tiny_config("llama"), attention="sdpa").config._attn_implementation == "sdpa"


def test_the_given_config_is_not_changed() -> None:
    config = tiny_config("gpt2", dropout=0.1)
    before = config.to_dict()
    build_model(config, attention="eager", dropout=0.3)
    assert config.to_dict() == before


def test_dropout_is_honoured_or_overridden_everywhere() -> None:
    def probabilities(dropout: float | None) -> set[float]:
        model = build_model(GPT2Config(**{**tiny_config("gpt2").to_dict(), "resid_pdrop": 0.1}), dropout=dropout)
        return {module.p for module in model.modules() if isinstance(module, nn.Dropout)}

    assert probabilities(None) == {0.0, 0.1}
    assert probabilities(0.25) == {0.25}
    assert probabilities(0.0) == {0.0}
    attention = build_model(tiny_config("llama"), dropout=0.25).get_submodule("model.layers.0.self_attn")
    assert attention.attention_dropout == 0.25


def test_building_leaves_the_random_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    split(build_model(tiny_config("opt")))
    assert torch.equal(torch.get_rng_state(), expected)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dropout is 1\.0; allowed are probabilities from 0 to below 1"):
        build_model(tiny_config("llama"), dropout=1.0)
    with pytest.raises(ConfigError, match="attention is 'flash'; allowed are 'sdpa' and 'eager'"):
        build_model(tiny_config("llama"), attention="flash")  # type: ignore[arg-type]  # what a user may type


def test_models_of_another_kind_are_refused() -> None:
    with pytest.raises(ModelError, match="T5Config: an encoder-decoder"):
        build_model(T5Config(vocab_size=50, d_model=32, num_layers=1, num_heads=2))
    encoder = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(ModelError, match="BertLMHeadModel: its attention is not causal"):
        split(build_model(encoder))
    quantized = tiny_config("llama")
    quantized.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelError, match="quantized weights cannot be trained"):
        build_model(quantized)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_have_transformers_distributions(family: str, tied: bool) -> None:
    config = tiny_config(family, tied=tied)
    staged = split(build_model(config))
    eager = "eager" if family == "gemma2" else "sdpa"
    reference = reference_model(config, attention=eager).state_dict()
    for stage in staged.stages:
        values = {spec.name: torch.empty(spec.shape) for spec in stage.tensors}
        stage.initialise(values, seed=1)
        for name, value in values.items():
            expected = reference[name]
            assert bool(value.isfinite().all()), name
            if expected.numel() >= 1024 and float(expected.std()) > 0:
                assert float(value.std()) == pytest.approx(float(expected.std()), rel=0.15), name
                assert abs(float(value.mean())) < 0.01, name
                assert not torch.equal(value, expected), name
            elif float(expected.std()) == 0:
                assert torch.equal(value, expected), name  # biases and norms
    for parameter in staged.model.parameters():
        assert not getattr(parameter, "_is_hf_initialized", False)
        assert bool(parameter.isnan().all())


def test_initial_values_depend_on_seed_and_stage_alone() -> None:
    staged = split(build_model(tiny_config("gpt2")))
    layer = staged.layers[1]

    def draw(seed: int) -> dict[str, torch.Tensor]:
        values = {spec.name: torch.empty(spec.shape) for spec in layer.tensors}
        layer.initialise(values, seed=seed)
        return values

    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = draw(3)
    assert torch.equal(torch.get_rng_state(), state)
    staged.embed.initialise({spec.name: torch.empty(spec.shape) for spec in staged.embed.tensors}, seed=4)
    again = draw(3)
    assert all(torch.equal(first[name], again[name]) for name in first)
    weight = "transformer.h.1.mlp.c_fc.weight"
    assert not torch.equal(first[weight], draw(4)[weight])
    assert len({stage_seed(3, stage.name) for stage in staged.stages}) == len(staged.stages)


def test_residual_projections_get_their_smaller_spread() -> None:
    """GPT-2 sets these from the module around them, after the module itself was initialised."""
    layer = split(build_model(tiny_config("gpt2"))).layers[0]
    values = {spec.name: torch.empty(spec.shape) for spec in layer.tensors}
    layer.initialise(values, seed=0)
    assert float(values["transformer.h.0.mlp.c_proj.weight"].std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert float(values["transformer.h.0.mlp.c_fc.weight"].std()) == pytest.approx(0.02, rel=0.05)


def test_a_weight_that_nobody_initialises_is_refused() -> None:
    model = build_model(tiny_config("llama"))
    layer = model.get_submodule("model.layers.0")
    layer.scale = nn.Parameter(torch.ones(4))
    stage = split(model).layers[0]
    with pytest.raises(ModelError, match=r"gives no initial value to model\.layers\.0\.scale; start from a checkpoint"):
        stage.initialise({spec.name: torch.empty(spec.shape) for spec in stage.tensors}, seed=0)


def test_what_transformers_leaves_alone_gets_torchs_default() -> None:
    model = build_model(tiny_config("llama"))
    layer = model.get_submodule("model.layers.0")
    layer.extra = nn.Bilinear(3, 4, 5)
    stage = split(model).layers[0]
    values = {spec.name: torch.empty(spec.shape) for spec in stage.tensors}
    stage.initialise(values, seed=0)
    weight = values["model.layers.0.extra.weight"]
    assert 0 < float(weight.abs().max()) <= 3**-0.5
