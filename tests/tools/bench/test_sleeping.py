"""Sleeping layers: equal weights for everybody, whole forwards repeated under checkpointing, late calls noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hoist.tools.bench.sides.job import Sleep
from hoist.tools.bench.sides.sleeping import Watch, let_layers_sleep, sleeping_config, weight_shapes, write_checkpoint

LAYERS = 2


def _sleep(forward_seconds: float, backward_seconds: float) -> Sleep:
    return Sleep(
        num_layers=LAYERS, layer_elements=4096, forward_seconds=forward_seconds, backward_seconds=backward_seconds
    )


def _loaded(directory: Path, sleep: Sleep) -> tuple[PreTrainedModel, Watch]:
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(directory)).train()
    watch = let_layers_sleep(model, sleep, device="cpu")
    model.load_state_dict(load_file(directory / "model.safetensors"), strict=True)
    return model, watch


def _gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    ids = torch.arange(8).view(1, -1)
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


class TestCheckpoint:
    def test_is_the_whole_model_and_follows_from_its_seed(self, tmp_path: Path) -> None:
        sleep = _sleep(0.0, 0.0)
        for name, seed in (("first", 0), ("again", 0), ("other", 1)):
            (tmp_path / name).mkdir()
            write_checkpoint(tmp_path / name, sleep, seed=seed)
        first, again, other = (
            (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other")
        )
        assert first == again != other
        model, _ = _loaded(tmp_path / "first", sleep)
        assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == weight_shapes(sleep)

    def test_tensors_of_one_shape_differ(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, _sleep(0.0, 0.0))
        weights = load_file(tmp_path / "model.safetensors")
        assert not torch.equal(weights["model.layers.0.weight"], weights["model.layers.1.weight"])


class TestLayers:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_repeats_each_forward_and_changes_no_gradient(self, tmp_path: Path, reentrant: bool) -> None:
        sleep = _sleep(0.0001, 0.0002)
        write_checkpoint(tmp_path, sleep)
        model, watch = _loaded(tmp_path, sleep)
        plain = _gradients(model)
        assert set(plain) == set(weight_shapes(sleep))
        spent = watch.take()
        assert spent.num_calls == 2 * LAYERS
        assert spent.seconds >= LAYERS * (sleep.forward_seconds + sleep.backward_seconds)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        again = _gradients(model)
        spent = watch.take()
        assert spent.num_calls == 3 * LAYERS
        assert spent.seconds >= LAYERS * (2 * sleep.forward_seconds + sleep.backward_seconds)
        for name, gradient in plain.items():
            assert torch.equal(gradient, again[name]), name

    def test_calls_that_take_longer_than_the_layer_are_counted(self, tmp_path: Path) -> None:
        sleep = _sleep(1e-9, 1e-9)
        write_checkpoint(tmp_path, sleep)
        model, watch = _loaded(tmp_path, sleep)
        _gradients(model)
        spent = watch.take()
        assert spent.num_late == spent.num_calls == 2 * LAYERS
        assert 0.0 < spent.most_late_seconds <= spent.seconds
        assert watch.take().num_calls == 0

    def test_layers_that_take_no_time_are_never_late(self, tmp_path: Path) -> None:
        sleep = _sleep(0.0, 0.0)
        write_checkpoint(tmp_path, sleep)
        model, watch = _loaded(tmp_path, sleep)
        _gradients(model)
        assert watch.take().num_late == 0

    def test_models_without_decoder_layers_are_refused(self) -> None:
        model = AutoModelForCausalLM.from_config(sleeping_config(_sleep(0.0, 0.0)))
        model.get_submodule("model").layers = torch.nn.Identity()
        with pytest.raises(TypeError, match=r"model\.layers is a Identity"):
            let_layers_sleep(model, _sleep(0.0, 0.0))
