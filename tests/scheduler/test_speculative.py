"""Clipping by guessing: updates before the norm is known give what exact clipping gives, bit for bit.

Exact clipping against torch is `test_clip.py`'s part; plans under every order of events are `test_plan.py`'s.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hoist.scheduler.config import ClipMode, Order
from hoist.scheduler.executor import Mark
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.trainer import Trainer
from hoist.tiers.errors import StoreRefusedError
from tests.support.branching import even_steps_only, spoiling, with_branch
from tests.support.faults import quick_directory
from tests.support.models import tiny_config
from tests.support.sampling import in_pairs, thinned
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    make_steps,
    torch_threads,
    train,
    trainer_on,
)

PLANS: tuple[Order, ...] = ("vertical", "horizontal")
NUM_STEPS = 4
#: Every step committed, in a store of two slots, or some, in one of three.
COMMITS = (1, 3)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@cache
def exactly(recipe: Recipe) -> Outcome:
    with quick_directory() as folder:
        steps = make_steps(NUM_STEPS, 2)
        return train(folder / "store", tiny_config("llama"), steps, recipe, Engine(budget_factor=50.0))


@pytest.mark.parametrize(
    ("plan", "clip_norm", "delay", "commit_every", "budget_factor"),
    in_pairs(PLANS, (1e9, 1.0, 1e-3), (0.0, 0.25, 1.0), COMMITS, (1.0, 50.0)),
)
def test_guessing_gives_the_bits_of_exact_clipping(
    plan: Order, clip_norm: float, delay: float, commit_every: int, budget_factor: float, tmp_path: Path
) -> None:
    """Gradients kept in memory and in scratch; never wrong (1e9), sometimes, always (1e-3)."""
    recipe = Recipe(clip_norm=clip_norm)
    engine = Engine(
        plan=plan, delay=delay, clip_mode="speculative", commit_every=commit_every, budget_factor=budget_factor
    )
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(NUM_STEPS, 2), recipe, engine)
    expected = exactly(recipe)
    assert_identical(got, expected)
    for mine, other in zip(got.metrics, expected.metrics, strict=True):
        assert (mine.grad_norm, mine.clip_scale, mine.lr) == (other.grad_norm, other.clip_scale, other.lr)
    assert (min(done.clip_scale for done in got.metrics) < 1.0) == (clip_norm < 1e9)


def test_updates_are_made_in_the_backward_already(tmp_path: Path) -> None:
    """The last step of a run has no next forward: what was written when it returns was guessed in its backward."""
    steps = make_steps(1, 2)
    ops = {}
    modes: tuple[ClipMode, ...] = ("exact", "speculative")
    for mode in modes:
        engine = Engine(clip_mode=mode, commit_every=1)
        got = train(tmp_path / mode, tiny_config("llama"), steps, Recipe(clip_norm=1e9), engine, commit_at_end=False)
        ops[mode] = got.ops
    assert ops["exact"][Kind.UPDATE] == 0
    assert ops["speculative"][Kind.UPDATE] > 0


@pytest.mark.parametrize(
    ("factor", "commit_every", "budget_factor"), thinned(4, (math.inf, math.nan), COMMITS, (1.0, 50.0))
)
def test_guesses_from_gradients_that_are_not_finite_are_taken_back(
    factor: float, commit_every: int, budget_factor: float, tmp_path: Path
) -> None:
    """Weights, moments and step counts are those before the step; idle and unused tensors among them."""
    recipe = Recipe(clip_norm=1e-2, alter=with_branch, before_step=spoiling({2: factor}))
    engine = Engine(
        clip_mode="speculative", commit_every=commit_every, budget_factor=budget_factor, max_chunk_elements=4096
    )
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(NUM_STEPS, 2), recipe, engine)
    assert_identical(got, exactly(recipe))
    assert [done.skipped_steps for done in got.metrics] == [0, 1, 1, 1]


class LateUpdates(Runtime):
    """Holds the optim lane after the first piece that is updated at once, until the backward is computed: then all
    norms are measured before the chunk's next piece is updated.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._computed: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self._held: set[int] = set()

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        mark = super().run(op, step, after)
        if op.kind is Kind.BACKWARD and op.stage == 0 and op.micro_batch + 1 == len(self._steps[step].batches):
            self._computed[step].set()
        elif op.kind is Kind.UPDATE and not op.delayed and step not in self._held:
            self._held.add(step)
            computed = self._computed[step].wait(60)
            assert computed
        return mark


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_a_norm_that_is_known_in_the_middle_of_a_chunk_changes_nothing(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(clip_norm=1e-2, alter=with_branch, before_step=spoiling({2: factor}))
    expected = exactly(recipe)
    monkeypatch.setattr(Trainer, "runtime_kind", LateUpdates)
    engine = Engine(clip_mode="speculative", commit_every=1, budget_factor=50.0)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(NUM_STEPS, 2), recipe, engine)
    assert_identical(got, expected)
    assert [done.skipped_steps for done in got.metrics] == [0, *[int(math.isnan(factor))] * 3]


@pytest.mark.parametrize("tied", [True, False])
def test_borrowers_and_idle_tensors_get_what_was_made_again(tied: bool, tmp_path: Path) -> None:
    recipe = Recipe(clip_norm=1e-1, alter=with_branch, before_step=even_steps_only)
    config = tiny_config("llama", tied=tied)
    steps = make_steps(NUM_STEPS, 2)
    outcomes = [
        train(tmp_path / str(number), config, steps, recipe, engine)
        for number, engine in enumerate(
            (
                Engine(budget_factor=50.0),
                Engine(clip_mode="speculative", commit_every=1),
                Engine(clip_mode="speculative", budget_factor=50.0, commit_every=100),
            )
        )
    ]
    assert_identical(outcomes[1], outcomes[0])
    assert_identical(outcomes[2], outcomes[0])


@pytest.mark.parametrize("commit_every", COMMITS)
def test_a_run_in_parts_equals_the_uninterrupted_one(commit_every: int, tmp_path: Path) -> None:
    """Modes change from part to part; a store of three slots serves exact clipping too."""
    recipe = Recipe(clip_norm=1e-1)
    steps = make_steps(NUM_STEPS, 2)
    config = tiny_config("llama")
    engine = Engine(clip_mode="speculative", commit_every=commit_every)
    for stop, part in ((2, engine), (3, replace(engine, clip_mode="exact")), (4, engine)):
        last = train(tmp_path / "store", config, steps[:stop], recipe, part, commit_at_end=stop == 4)
    expected = exactly(recipe)
    assert last.losses == expected.losses[-len(last.losses) :]
    assert_identical(replace(last, losses=expected.losses, initial=expected.initial), expected)


def test_a_store_without_room_for_the_version_before_is_refused(tmp_path: Path) -> None:
    """Unless every step is committed: then that version is the committed one."""
    recipe, steps, config = Recipe(clip_norm=1.0), make_steps(2, 1), tiny_config("llama")
    with trainer_on(tmp_path / "store", config, steps, Engine(), recipe) as trainer:
        trainer.step(steps[0])
        trainer.commit()
    every_other = Engine(clip_mode="speculative", commit_every=2)
    with (
        pytest.raises(StoreRefusedError, match=r"a store of 3 slots a chunk, this one has 2: commit every step"),
        trainer_on(tmp_path / "store", config, steps, every_other, recipe),
    ):
        pass
    with trainer_on(tmp_path / "store", config, steps, replace(every_other, commit_every=1), recipe) as trainer:
        trainer.step(steps[1])
