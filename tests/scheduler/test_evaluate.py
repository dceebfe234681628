"""Evaluation between steps: the plain loop's loss on the same weights, and training that does not notice it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hoist.optim.schedules import Schedule
from hoist.scheduler.config import ClipMode, Order
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.metrics import EvalMetrics, StepMetrics
from hoist.scheduler.trainer import Trainer
from tests.support.models import num_counted, reference_model, tiny_config
from tests.support.training import (
    Batch,
    Engine,
    Outcome,
    Recipe,
    Step,
    assert_identical_states,
    elements_of,
    make_steps,
    padded,
    read_states,
    torch_threads,
    train_reference,
    trainer_on,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def held_out(num_micro_batches: int = 3) -> list[Batch]:
    """Batches that no step has; one is padded, one has no counted label at all."""
    first, *others = make_steps(9, num_micro_batches)[-1]
    others[-1]["labels"] = torch.full_like(others[-1]["labels"], -100)
    return [padded(first, right=3), *others]


def loss_of(model: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """The plain loop's loss on some batches, without dropout."""
    num_items = sum(num_counted(batch) for batch in batches)
    model.eval()
    with torch.no_grad():
        parts = [model(**batch, num_items_in_batch=num_items, use_cache=False).loss for batch in batches]
    model.train()
    return float(torch.stack(parts).sum())


def run(
    directory: Path, family: str, steps: Sequence[Step], recipe: Recipe, engine: Engine, *, at: Sequence[int]
) -> tuple[list[float], list[StepMetrics], Outcome]:
    """Train, and evaluate after the steps ``at``; 0 is before the first."""
    batches = held_out()
    found: list[float] = []
    metrics: list[StepMetrics] = []
    with trainer_on(directory, tiny_config(family), [*steps, batches], engine, recipe) as trainer:
        for step in range(len(steps) + 1):
            if step:
                metrics.append(trainer.step(steps[step - 1]))
            found += [trainer.evaluate(batches).loss for _ in range(at.count(step))]
        trainer.commit()
        states = read_states(trainer._store, trainer._engine)
    return found, metrics, Outcome(losses=[done.loss for done in metrics], initial={}, states=states)


def reference(family: str, steps: Sequence[Step], recipe: Recipe) -> tuple[list[float], Outcome]:
    """The plain loop's losses on the held-out batches before the first step and after each, and what it comes to."""
    batches = held_out()
    found = [loss_of(reference_model(tiny_config(family), attention=recipe.attention), batches)]
    outcome = train_reference(
        tiny_config(family), steps, recipe, after_update=lambda model: found.append(loss_of(model, batches))
    )
    return found, outcome


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("llama", Engine()),
        ("llama", Engine(plan="horizontal")),
        pytest.param("llama", Engine(delay=0.5), marks=pytest.mark.slow),
        ("gpt2", Engine(delay=1.0, budget_factor=1.5)),
        ("gemma2", Engine(budget_factor=50.0, residency=1.0)),
        pytest.param(
            "llama", Engine(budget_factor=3.0, residency=0.5, plan="horizontal", delay=0.5), marks=pytest.mark.slow
        ),
    ],
)
def test_evaluations_are_exact_and_change_nothing(family: str, engine: Engine, tmp_path: Path) -> None:
    recipe = Recipe(attention="eager" if family == "gemma2" else "sdpa")
    steps = make_steps(3, 3)
    losses, expected = reference(family, steps, recipe)
    found, _, got = run(tmp_path / "store", family, steps, recipe, engine, at=(0, 2, 2, 3))
    assert found == [losses[step] for step in (0, 2, 2, 3)]
    assert len(set(losses)) == len(losses)
    assert got.losses == expected.losses
    assert_identical_states(got.states, expected.states)


@pytest.mark.parametrize("clip_mode", [pytest.param("exact", marks=pytest.mark.slow), "speculative"])
def test_clipped_steps_are_as_without_evaluations(clip_mode: ClipMode, tmp_path: Path) -> None:
    recipe = Recipe(clip_norm=0.05)
    engine = Engine(clip_mode=clip_mode, commit_every=1)
    steps = make_steps(3, 2)
    evaluated = run(tmp_path / "a", "llama", steps, recipe, engine, at=(0, 1, 2))
    plain = run(tmp_path / "b", "llama", steps, recipe, engine, at=())
    assert [done.clip_scale < 1 for done in plain[1]] == [True] * 3
    assert evaluated[2].losses == plain[2].losses
    assert_identical_states(evaluated[2].states, plain[2].states)


def layers_of(trainer: Trainer) -> list[nn.Module]:
    """A GPT-2's decoder layers."""
    named = trainer._model.model.named_modules()
    return [module for name, module in named if re.fullmatch(r"transformer\.h\.\d", name)]


def test_dropout_is_off_in_evaluations_alone(tmp_path: Path) -> None:
    config = tiny_config("gpt2", dropout=0.2)
    steps, batches = make_steps(3, 2), held_out(2)
    recipe = Recipe(schedule=Schedule(kind="constant", lr=1e-2, num_steps=9))
    with trainer_on(tmp_path / "a", config, [*steps, batches], Engine(), recipe) as trainer:
        layers_of(trainer)[1].eval()
        plain = [trainer.step(step).loss for step in steps]
    with trainer_on(tmp_path / "b", config, [*steps, batches], Engine(), recipe) as trainer:
        layers = layers_of(trainer)
        layers[1].eval()  # as somebody may have wanted
        first = trainer.evaluate(batches)
        assert [layer.training for layer in layers] == [True, False, True]
        assert first.loss == trainer.evaluate(batches).loss == loss_of(reference_model(config), batches)
        evaluated = [(trainer.step(step).loss, trainer.evaluate(batches).loss)[0] for step in steps]
    assert evaluated == plain


@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
def test_an_evaluation_reads_weights_once_and_writes_nothing(plan: Order, tmp_path: Path) -> None:
    """4 bytes an element, for all micro-batches at once or for each; what the next step holds is read again."""
    steps = make_steps(3, 3)
    engine = Engine(plan=plan, budget_factor=4.0, resident_weights=False)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, engine) as trainer:
        before = trainer.statistics().nvme.read_bytes
        first = trainer.step(steps[0])
        done = trainer.evaluate(steps[1])
        trainer.evaluate(steps[1])
        last = trainer.step(steps[2])
        read_bytes = trainer.statistics().nvme.read_bytes - before
        # What evaluations read is not among what steps say that they did.
        assert first.nvme_read_bytes + last.nvme_read_bytes <= read_bytes - 2 * done.nvme_read_bytes
        weights_bytes = 4 * sum(elements_of(trainer))
    assert isinstance(done, EvalMetrics)
    assert (done.counted, done.tokens) == (sum(num_counted(batch) for batch in steps[1]), 72)
    assert done.nvme_read_bytes == weights_bytes * (1 if plan == "vertical" else 3)
    assert done.nvme_written_bytes == 0


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    steps = make_steps(1, 2)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, Engine()) as trainer:
        with pytest.raises(ConfigError, match=r"micro_batches: 3 given, 1 to 2 \(num_micro_batches\) allowed"):
            trainer.evaluate([*steps[0], steps[0][0]])
        silent = {**steps[0][0], "labels": torch.full_like(steps[0][0]["labels"], -100)}
        with pytest.raises(ConfigError, match="labels: the step has no counted label to learn from; all are -100"):
            trainer.evaluate([silent])
        assert trainer.step(steps[0]).step == 1
    with pytest.raises(ConfigError, match="this trainer is closed"):
        trainer.evaluate(steps[0])
