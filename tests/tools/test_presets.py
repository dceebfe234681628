"""What ``--model`` may name, and what each wrong name says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hoist.tools.errors import CheckpointError, ModelSourceError
from hoist.tools.presets import PRESETS, load_model_source

#: Parameters of the published models, as their own pages or files count them; tiny is ours, the large GPTs are
#: 12 x layers x hidden^2 and what is small beside it.
PARAMETERS = {
    "tiny": 13_115_648,
    "smollm2-135m": 134_515_008,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "gpt-65b": 64_861_528_064,
    "gpt-175b": 174_604_259_328,
}


def small_config() -> LlamaConfig:
    return LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)


def test_every_preset_has_its_count_here() -> None:
    assert PRESETS.keys() == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_are_the_published_shapes(name: str) -> None:
    source = load_model_source(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert (source.directory, source.tokenizer, source.checkpoint, source.shards, source.dtype) == (
        None,
        None,
        None,
        (),
        None,
    )
    assert source.vocab_size >= 256  # text is taken as bytes
    assert PRESETS[name].make_config() is not PRESETS[name].make_config()


def test_rope_is_the_published_one() -> None:
    assert load_model_source("llama3-8b").config.rope_parameters["rope_theta"] == 500_000
    assert load_model_source("qwen3-8b").config.rope_parameters["rope_theta"] == 1_000_000
    assert load_model_source("llama2-7b").config.rope_parameters["rope_theta"] == 10_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_directory_with_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    model = LlamaForCausalLM(small_config())
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    source = load_model_source(str(tmp_path))
    assert source.directory == tmp_path
    assert (source.config.model_type, source.vocab_size, source.dtype) == ("llama", 300, dtype)
    assert source.checkpoint is not None
    assert source.shards == tuple(sorted(tmp_path.glob("*.safetensors")))
    assert source.tokenizer is None


def test_a_directory_with_config_only(tmp_path: Path) -> None:
    small_config().save_pretrained(tmp_path)
    (tmp_path / "training_args.bin").touch()
    source = load_model_source(str(tmp_path))
    assert (source.checkpoint, source.shards, source.dtype) == (None, (), None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert load_model_source(str(tmp_path)).dtype == torch.bfloat16


def test_a_preset_name_is_a_preset_whatever_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_config().save_pretrained(tmp_path / "tiny")
    assert load_model_source("tiny").directory is None
    assert load_model_source("./tiny").directory == tmp_path / "tiny"


def test_names_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ModelSourceError, match=r"--model tny: no such directory, and no preset; name a .* or one of tiny, smollm2"
    ):
        load_model_source("tny")
    with pytest.raises(
        ModelSourceError, match=r"gpt-175b; if .* hub, .* hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B$"
    ):
        load_model_source("Qwen/Qwen3-0.6B")
    for path in ("./a/b", "/a/b", "a/b/c", "a/"):
        with pytest.raises(ModelSourceError, match=r"gpt-175b$"):
            load_model_source(path)
    (tmp_path / "file").touch()
    with pytest.raises(ModelSourceError, match=r"is a file; name the directory that holds its config\.json"):
        load_model_source(str(tmp_path / "file"))
    with pytest.raises(
        ModelSourceError, match=r"has no config\.json; name a directory written by save_pretrained, or one of tiny"
    ):
        load_model_source(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": "llama",\n "x" 3}', r"no JSON at line 2, column 6 \(Expecting ':' delimiter\)"),
        (b'{"model_type": "\xff"}', "no UTF-8 at byte 16"),
        (b"[]", "must be a JSON object, is a list"),
        (b"{}", "model_type None is not a causal language model"),
        (b'{"model_type": "lama"}', r"model_type 'lama' is .*\(did you mean llama.*\?\); allowed are .*llama, "),
        (b'{"model_type": "t5"}', "model_type 't5' is not a causal language model that this transformers knows"),
        (b'{"model_type": ["llama"]}', "is not a causal language model"),
        (b'{"model_type": "llama", "hidden_size": "wide"}', "the llama config is refused"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelSourceError, match=message) as caught:
        load_model_source(str(tmp_path))
    assert str(caught.value).startswith(f"--model {tmp_path}/config.json: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "name", ["tf_model.h5", "pytorch_model-00001-of-00002.bin", "x.gguf", "model-00001-of-00002.safetensors"]
)
def test_weights_that_are_not_read_are_never_replaced_silently(tmp_path: Path, name: str) -> None:
    small_config().save_pretrained(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(
        ModelSourceError, match=rf"its weights \({name}\) are not read; allowed are model\.safetensors, "
    ):
        load_model_source(str(tmp_path))


def test_broken_weights_are_refused_at_once(tmp_path: Path) -> None:
    model = LlamaForCausalLM(small_config())
    model.save_pretrained(tmp_path)
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "copy.safetensors")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "copy.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated, expected \d+ bytes, found \d+"):
        load_model_source(str(tmp_path))
