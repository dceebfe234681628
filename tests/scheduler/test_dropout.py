"""Dropout under recomputation: masks depend on seed, step, stage and micro-batch alone.

The reference keeps every activation, so nothing is recomputed there; it seeds torch before each stage, as hoist does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hoist.scheduler.config import Order
from hoist.scheduler.runtime import mask_seed
from tests.support.models import tiny_config
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    assert_identical_states,
    make_steps,
    torch_threads,
    train,
    train_reference,
)

#: Families with dropout in different places: embedding, attention, residual.
DROPPING = ("gpt2", "llama", "opt", "gpt_neox")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        yield


class SeededStages:
    """Seeds torch where each stage begins, by hooks on the model and on its layers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step, self._micro_batch = 0, 0
        self._hooked: PreTrainedModel | None = None

    def __call__(self, model: PreTrainedModel, step: int, micro_batch: int) -> None:
        """Before every micro-batch."""
        self._step, self._micro_batch = step, micro_batch
        if self._hooked is not model:
            self._hooked = model
            model.register_forward_pre_hook(partial(self._hook, 0))
            decoder = model.get_decoder()
            layers = decoder.h if hasattr(decoder, "h") else decoder.layers
            for index, layer in enumerate(layers, start=1):
                layer.register_forward_pre_hook(partial(self._hook, index))

    def _hook(self, stage: int, *_: Any) -> None:
        torch.manual_seed(mask_seed(self._seed, self._step, stage, self._micro_batch))


def reference(family: str, num_steps: int, num_micro_batches: int, seed: int = 0) -> Outcome:
    config = tiny_config(family, dropout=0.3)
    steps = make_steps(num_steps, num_micro_batches)
    return train_reference(config, steps, Recipe(seed=seed), before_micro_batch=SeededStages(seed))


@pytest.mark.parametrize(
    ("family", "plan"), [*((family, "vertical") for family in DROPPING), ("gpt2", "horizontal"), ("opt", "horizontal")]
)
def test_equals_the_model_that_keeps_its_activations(family: str, plan: Order, tmp_path: Path) -> None:
    config = tiny_config(family, dropout=0.3)
    got = train(tmp_path / "store", config, make_steps(3, 4), Recipe(), Engine(plan=plan))
    expected = reference(family, 3, 4)
    assert_identical(got, expected)
    assert expected.losses != train_reference(tiny_config(family), make_steps(3, 4), Recipe()).losses  # masks matter


class Wavering(nn.Module):
    """A layer that is skipped at random, and does something else for some hidden states."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if bool(torch.rand(()) < 0.5):
            return hidden_states
        output: torch.Tensor = self.inner(hidden_states, **kwargs)
        return output * self.scale if float(output.detach().sum()) > 0 else output


def wavering_layers(model: PreTrainedModel) -> None:
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    for number in range(len(layers)):
        layers[number] = Wavering(layers[number])


def test_layers_that_are_skipped_at_random_or_branch_on_what_they_compute(tmp_path: Path) -> None:
    recipe = Recipe(alter=wavering_layers)
    steps = make_steps(10, 1)
    got = train(tmp_path / "store", tiny_config("llama"), steps, recipe, Engine())
    expected = train_reference(tiny_config("llama"), steps, recipe, before_micro_batch=SeededStages(0))
    assert got.losses == expected.losses
    assert_identical_states(got.states, expected.states)
    counts = set(expected.states.adam_steps.values())
    assert min(counts) < 10  # some steps gave some layers no gradient
    assert max(counts) == 10


def test_the_seed_decides(tmp_path: Path) -> None:
    config = tiny_config("gpt2", dropout=0.3)
    outcomes = [
        train(tmp_path / str(number), config, make_steps(2, 2), Recipe(seed=seed), Engine())
        for number, seed in enumerate((7, 7, 8))
    ]
    assert_identical(outcomes[0], outcomes[1])
    assert outcomes[0].losses != outcomes[2].losses


def test_resume_repeats_the_masks(tmp_path: Path) -> None:
    config = tiny_config("gpt2", dropout=0.3)
    steps = make_steps(4, 3)
    torch.manual_seed(1)  # the caller's generator must not matter
    train(tmp_path / "store", config, steps[:2], Recipe(), Engine())
    torch.manual_seed(2)
    engine = Engine(plan="horizontal", budget_factor=2.0)
    second = train(tmp_path / "store", config, steps, Recipe(), engine)
    expected = reference("gpt2", 4, 3)
    assert second.losses == expected.losses[2:]
    assert_identical_states(second.states, expected.states)


def test_the_callers_generator_is_left_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(tmp_path / "store", tiny_config("gpt2", dropout=0.3), make_steps(1, 2), Recipe(), Engine())
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_differ_between_steps_stages_and_micro_batches() -> None:
    seeds = {
        mask_seed(seed, step, stage, micro_batch)
        for seed in range(3)
        for step in range(1, 4)
        for stage in range(4)
        for micro_batch in range(4)
    }
    assert len(seeds) == 3 * 3 * 4 * 4
