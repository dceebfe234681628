"""Which models keep the documents of a packed row apart is found by trying, and agrees with whole models' logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import pytest
import torch
from transformers import BloomConfig, Lfm2Config, LlamaConfig, PreTrainedConfig

from hoist.scheduler.errors import ModelError
from hoist.scheduler.freezing import choose_trained
from hoist.scheduler.isolation import check_isolation
from hoist.scheduler.models import build_model
from hoist.scheduler.stages import split
from hoist.tools.tiny_models import tiny_config as hints_config
from tests.support.models import FAMILIES, VOCAB_SIZE, reference_model, tiny_config

CONVOLUTIONS = Lfm2Config(
    vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, layer_types=["full_attention", "conv"],
)  # fmt: skip


def isolates(config: PreTrainedConfig, attention: Literal["sdpa", "eager"]) -> bool:
    """By transformers' logits of a whole model with real weights."""
    model = reference_model(config, attention=attention).eval()
    vocab_size = config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, vocab_size, (1, 14), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(6), torch.arange(8)])[None]
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 6:]
        alone = model(input_ids=ids[:, 6:], position_ids=positions[:, 6:], use_cache=False).logits
    return torch.allclose(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in ("llama", "gemma2", "opt", "mixtral") else pytest.mark.slow)
     for name in FAMILIES],
)  # fmt: skip
def test_what_is_found_is_what_a_whole_model_does(family: str) -> None:
    attention: Literal["sdpa", "eager"] = "eager" if family == "gemma2" else "sdpa"
    found = True
    try:
        check_isolation(split(build_model(tiny_config(family, dropout=0.2), attention=attention)))
    except ModelError as error:
        assert str(error).startswith("OPTForCausalLM: layer.0 mixes the documents of a packed row")
        found = False
    assert found is isolates(tiny_config(family), attention)
    assert found is (family != "opt")


@pytest.mark.parametrize(("model_type", "isolated"), [("gemma4_text", True), ("gpt_oss", False)])
def test_layers_that_are_handed_more_and_masks_without_positions(model_type: str, isolated: bool) -> None:
    """Gemma 4's layers share keys and values, so they run in turn; gpt-oss makes its masks without positions."""
    config = hints_config(model_type)
    attention: Literal["sdpa", "eager"] = "eager" if model_type == "gpt_oss" else "sdpa"
    staged = split(build_model(config, attention=attention))
    with nullcontext() if isolated else pytest.raises(ModelError, match="mixes the documents of a packed row"):
        check_isolation(staged)
    assert isolates(config, attention) is isolated


def test_frozen_weights_that_are_kept_in_16_bits_are_tried_in_float32() -> None:
    """As training has them, beside trained ones in one layer: adapters around a frozen base."""
    model = build_model(tiny_config("llama"))
    choose_trained(model, train=["*layers.1.self_attn*"])
    staged = split(model)
    frozen = [spec.name for stage in staged.stages for spec in stage.tensors if spec.frozen_weight]
    staged.keep_frozen_as(dict.fromkeys(frozen, "bfloat16"))
    check_isolation(staged)


def test_layers_that_mix_documents_are_named() -> None:
    assert not isolates(CONVOLUTIONS, "sdpa")
    with pytest.raises(ModelError, match=r"^Lfm2ForCausalLM: layer\.1 mixes the documents of a packed row"):
        check_isolation(split(build_model(CONVOLUTIONS)))
    bloom = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4)
    with pytest.raises(ModelError, match=r"^BloomForCausalLM takes no position_ids, by which documents are told apart"):
        check_isolation(split(build_model(bloom)))


def test_large_layers_take_little_memory_and_the_generators_stay_as_they_are() -> None:
    config = LlamaConfig(vocab_size=100_000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=40)
    staged = split(build_model(config))
    before = torch.get_rng_state()
    check_isolation(staged)  # 2.5 GB of weights
    assert torch.equal(torch.get_rng_state(), before)
    assert staged.model.training
