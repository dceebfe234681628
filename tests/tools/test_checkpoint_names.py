"""Whatever transformers writes, under old names or cut in other ways, is found and read as the model has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hoist.tiers.io.direct import DirectEngine
from hoist.tools.checkpoint import CheckpointReader, Match
from hoist.tools.checkpoint_names import match_model
from hoist.tools.errors import CheckpointError
from hoist.tools.safetensors_reader import SafetensorsReader

SIZES: dict[type[Any], dict[str, int]] = {
    LlamaConfig: {"intermediate_size": 24},
    Qwen3Config: {"intermediate_size": 24, "head_dim": 8, "num_key_value_heads": 1},
    MistralConfig: {"intermediate_size": 24, "num_key_value_heads": 1},
    GPT2Config: {"n_positions": 8},
    OPTConfig: {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 8},
    GPTNeoXConfig: {"intermediate_size": 24},
    Phi3Config: {"intermediate_size": 24},
    Gemma2Config: {"intermediate_size": 24, "head_dim": 8, "num_key_value_heads": 1},
    MixtralConfig: {"intermediate_size": 24, "num_key_value_heads": 1, "num_local_experts": 12},
    Qwen3MoeConfig: {"moe_intermediate_size": 8, "head_dim": 8, "num_key_value_heads": 1, "num_experts": 4},
}
CONFIGS: dict[str, PreTrainedConfig] = {
    kind.model_type: kind(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **sizes,
    )
    for kind, sizes in SIZES.items()
}


def build(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[model_type])
    assert isinstance(model, PreTrainedModel)
    return model


def fit(reader: CheckpointReader, model: PreTrainedModel) -> Match:
    tied = [(name, source) for name, source in model.all_tied_weights_keys.items()]
    return match_model(reader, model, {name: tuple(value.shape) for name, value in model.state_dict().items()}, tied)


def assert_reads_back(directory: Path, model: PreTrainedModel, engine: DirectEngine, staging: torch.Tensor) -> Match:
    reader = SafetensorsReader(directory)
    found = fit(reader, model)
    found.require()
    for name, value in model.state_dict().items():
        read = torch.zeros(value.numel())
        reader.read_into(found.sources[name], read, engine=engine, staging=staging)
        assert torch.equal(read, value.flatten()), name
    return found


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_save_pretrained_reads_back(
    tmp_path: Path, engine: DirectEngine, staging: torch.Tensor, model_type: str, original: bool
) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path, save_original_format=original)
    assert_reads_back(tmp_path, model, engine, staging)


def test_published_names_of_experts_are_laid_end_to_end(
    tmp_path: Path, engine: DirectEngine, staging: torch.Tensor
) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    found = assert_reads_back(tmp_path, model, engine, staging)
    names = [f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight" for e in range(12) for w in ("w1", "w3")]
    assert found.sources["model.layers.0.mlp.experts.gate_up_proj"] == tuple(names)


def test_a_bare_decoder_fits_without_its_prefix(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor) -> None:
    model = build("gpt2")
    old = {
        name.removeprefix("transformer."): value
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    old["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # the mask that old checkpoints carry
    save_file(old, tmp_path / "model.safetensors")
    found = assert_reads_back(tmp_path, model, engine, staging)
    assert found.sources["transformer.h.1.ln_1.weight"] == ("h.1.ln_1.weight",)
    assert found.sources["lm_head.weight"] == ("wte.weight",)


@pytest.mark.parametrize("change", ["drop", "reshape"])
def test_experts_that_do_not_fit_together_are_refused(tmp_path: Path, change: str) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.7.w3.weight"
    if change == "drop":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(23, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"the 2[34] tensors of 'model\.layers\.1\.mlp\.experts\.gate_up_proj' do not fit"
    ):
        fit(SafetensorsReader(tmp_path), model)


def test_a_missing_expert_is_a_wrong_shape(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for kind in ("w1", "w2", "w3"):
        del tensors[f"model.layers.0.block_sparse_moe.experts.11.{kind}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"2 of another shape \(.*gate_up_proj is \[11, 48, 16\], the model has \[12, 48, 16\]"
    ):
        fit(SafetensorsReader(tmp_path), model).require()


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    model = build("gpt_neox")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["embed_out.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"tensors 'embed_out\.weight' and 'lm_head\.weight' are both 'lm_head\.weight'"
    ):
        fit(SafetensorsReader(tmp_path), model)
