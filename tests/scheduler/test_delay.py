"""Delayed updates change no bit: any share, plan, budget, moment of a commit or of a resume; and what they move.

The order of ops and the versions that each sees are tested in `test_plan.py`, kept gradients in `test_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from transformers.configuration_utils import PreTrainedConfig

from hoist.optim.schedules import Schedule
from hoist.scheduler.config import Order
from hoist.scheduler.creation import create_store
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.memory import GRADIENT_BYTES, STATE_BYTES
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.ops import Kind
from hoist.scheduler.trainer import Trainer
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.branching import BRANCH, NEVER, even_steps_only, with_branch
from tests.support.faults import quick_directory
from tests.support.models import tiny_config
from tests.support.sampling import in_pairs, thinned
from tests.support.training import (
    PLENTY_BYTES,
    Engine,
    Outcome,
    Recipe,
    Step,
    assert_identical,
    assert_identical_states,
    from_weights,
    initial_weights,
    layouts_of,
    make_steps,
    set_up,
    staged_model,
    torch_threads,
    train,
    train_reference,
    trainer_config,
)

NUM_STEPS = 4
SCHEDULE = Schedule(kind="cosine", lr=1e-2, warmup_steps=2, num_steps=6)
PLANS: tuple[Order, ...] = ("vertical", "horizontal")
#: Bytes of weight_hi and weight_lo, which fp32 computation reads.
WEIGHT_BYTES, MOMENT_BYTES = 4, 8


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def model_of(name: str) -> tuple[PreTrainedConfig, Recipe]:
    """A tiny Llama, with tied weights, with idle experts, or with parameters that have no gradient in some steps."""
    recipe = Recipe(schedule=SCHEDULE)
    if name == "idle":
        recipe = Recipe(schedule=SCHEDULE, alter=with_branch, before_step=even_steps_only)
    return tiny_config("mixtral" if name == "experts" else "llama", tied=name == "tied"), recipe


def steps_of(name: str, num_micro_batches: int, num_steps: int = NUM_STEPS) -> list[Step]:
    if name == "experts":  # two tokens for two of eight experts
        steps = make_steps(num_steps, num_micro_batches, rows=1, tokens=2)
        for step in steps:
            for batch in step:
                batch["labels"] = batch["input_ids"].clone()
        return list(steps)
    return list(make_steps(num_steps, num_micro_batches))


@cache
def at_once(name: str, num_micro_batches: int, num_steps: int = NUM_STEPS) -> Outcome:
    """Without delay; what torch gives wherever that is the same sum (tied weights: see `test_tied.py`)."""
    config, recipe = model_of(name)
    steps = steps_of(name, num_micro_batches, num_steps)
    with quick_directory() as folder:
        got = train(folder / "store", config, steps, recipe, Engine(budget_factor=50.0))
    if name != "tied" or num_micro_batches == 1:
        assert_identical(got, train_reference(config, steps, recipe))
    return got


# ---------------------------------------------------------------------- the same bits

#: Gradients that wait in scratch, in memory beside weights that stream, and in memory beside weights that stay.
ROOMS = {
    "scratch": Engine(budget_factor=1.0),
    "memory": Engine(budget_factor=50.0, resident_weights=False),
    "resident": Engine(budget_factor=50.0),
}


def check(directory: Path, name: str, num_micro_batches: int, plan: Order, delay: float, room: str) -> None:
    config, recipe = model_of(name)
    chosen = ROOMS[room]
    engine = Engine(
        plan=plan,
        delay=delay,
        budget_factor=chosen.budget_factor,
        resident_weights=chosen.resident_weights,
        max_chunk_elements=4096 if name == "idle" else 8192,
    )
    got = train(directory / "store", config, steps_of(name, num_micro_batches), recipe, engine)
    expected = at_once(name, num_micro_batches)
    assert_identical(got, expected)
    assert [done.grad_norm for done in got.metrics] == [done.grad_norm for done in expected.metrics]
    assert [done.lr for done in got.metrics] == [SCHEDULE.at(number) for number in range(1, NUM_STEPS + 1)]
    assert [(done.clip_scale, done.skipped_steps) for done in got.metrics] == [(1.0, 0)] * NUM_STEPS
    assert got.memory is not None
    num_stages = len(got.memory.demand.stages)
    assert (got.ops[Kind.STASH_GRADIENT] > 0) == (room == "scratch" and delay > 0)
    assert got.memory.num_resident == (num_stages if room == "resident" else 0)
    if delay or plan == "horizontal":
        num_kept = (got.memory.waiting_gradients if delay else got.memory.gradients).num_kept
        # Beside a separate device, filling a store needs more of host memory than training: the rest is used.
        few = num_kept < num_stages if got.memory.demand.separate else num_kept == 0
        assert few if room == "scratch" else num_kept == num_stages
    if name == "idle":
        assert got.states.adam_steps[BRANCH] == NUM_STEPS // 2
        assert got.states.adam_steps[NEVER] == 0


@pytest.mark.parametrize(
    ("plan", "num_micro_batches", "delay", "room"), in_pairs(PLANS, (1, 3), (0.25, 0.5, 1.0), tuple(ROOMS))
)
def test_any_delay_gives_the_same_bits(
    plan: Order, num_micro_batches: int, delay: float, room: str, tmp_path: Path
) -> None:
    """Losses, norms, weights, moments, step counts; and the rates are those of the steps that made the gradients."""
    check(tmp_path, "llama", num_micro_batches, plan, delay, room)


@pytest.mark.parametrize(
    ("plan", "name", "delay", "room"),
    in_pairs(PLANS, ("tied", "experts", "idle"), (0.0, 0.25, 1.0), tuple(ROOMS)),
)
def test_also_for_tied_idle_and_unused_weights(
    plan: Order, name: str, delay: float, room: str, tmp_path: Path
) -> None:
    check(tmp_path, name, 2, plan, delay, room)


@pytest.mark.parametrize("counts", [(3, 1, 2, 3), (1, 3, 3, 1)])
@pytest.mark.parametrize("delay", [0.25, 1.0])
def test_steps_of_different_numbers_of_micro_batches(counts: tuple[int, ...], delay: float, tmp_path: Path) -> None:
    config, recipe = model_of("llama")
    steps = [step[:count] for step, count in zip(steps_of("llama", 3), counts, strict=True)]
    got = train(tmp_path / "store", config, steps, recipe, Engine(delay=delay))
    assert_identical(got, train_reference(config, steps, recipe))


# ---------------------------------------------------------------------- commits and resumes


@pytest.mark.parametrize(("name", "delay", "budget_factor"), in_pairs(("tied", "idle"), (0.25, 1.0), (1.0, 50.0)))
def test_a_commit_between_steps_finishes_what_is_delayed(
    name: str, delay: float, budget_factor: float, tmp_path: Path
) -> None:
    """And training goes on from there: each step of the run is committed, its states those of the run without delay."""
    config, recipe = model_of(name)
    seen: list[int] = []

    def note(store: Store, files: IoEngine, done: StepMetrics) -> None:
        assert store.record is not None
        seen.append(store.record.step)

    engine = Engine(delay=delay, budget_factor=budget_factor)
    got = train(tmp_path / "store", config, steps_of(name, 2), recipe, engine, after_step=note)
    assert seen == [1, 2, 3, 4]
    assert_identical(got, at_once(name, 2))


@pytest.mark.parametrize(("commit_every", "delay", "plan"), in_pairs((1, 2), (0.25, 1.0), PLANS))
def test_a_commit_at_the_turn_has_the_step_before_and_nothing_of_this_one(
    commit_every: int, delay: float, plan: Order, tmp_path: Path
) -> None:
    """Without a last commit, the store opens at the newest turn's."""
    config, recipe = model_of("llama")
    steps = steps_of("llama", 2)
    engine = Engine(plan=plan, delay=delay, commit_every=commit_every, budget_factor=50.0, resident_weights=False)
    train(tmp_path / "store", config, steps, recipe, engine, commit_at_end=False)
    committed = 3 if commit_every == 1 else 2
    found = train(tmp_path / "store", config, steps[:committed], recipe, engine)
    assert found.metrics == []
    assert_identical_states(found.states, at_once("llama", 2, committed).states)


@pytest.mark.parametrize("commit_at_end", [True, False])
def test_a_run_resumes_with_any_other_delay(commit_at_end: bool, tmp_path: Path) -> None:
    config, recipe = model_of("llama")
    steps = steps_of("llama", 2, 6)
    parts = [
        (2, Engine(delay=1.0, commit_every=1)),
        (4, Engine(delay=0.25, plan="horizontal", budget_factor=3.0, max_piece_elements=2**20, commit_every=1)),
        (5, Engine(delay=0.0, budget_factor=50.0, commit_every=1)),
        (6, Engine(delay=0.5, budget_factor=50.0, num_micro_batches=5)),
    ]
    losses: dict[int, float] = {}
    for stop, engine in parts:
        last = train(
            tmp_path / "store", config, steps[:stop], recipe, engine, commit_at_end=commit_at_end or stop == 6
        )
        for done in last.metrics:
            assert losses.setdefault(done.step, done.loss) == done.loss
            assert done.lr == SCHEDULE.at(done.step)
    expected = at_once("llama", 2, 6)
    assert [losses[number] for number in range(1, 7)] == expected.losses
    assert_identical_states(last.states, expected.states)


# ---------------------------------------------------------------------- traffic


@contextmanager
def trainer_on(directory: Path, steps: list[Step], engine: Engine) -> Iterator[Trainer]:
    """A trainer on a new store, which does not commit by itself."""
    config, recipe = model_of("llama")
    staged = staged_model(config, recipe)
    settings, setup = set_up(staged, layouts_of(staged, engine), recipe, engine, steps)
    source = from_weights(initial_weights(config, recipe))
    with (
        DirectEngine(num_threads=2) as files,
        create_store(directory, model=staged, setup=setup, engine=files, source=source, attributes={}) as store,
        Trainer(model=staged, store=store, engine=files, config=settings, setup=setup, baseline_bytes=0) as trainer,
    ):
        yield trainer


def bytes_moved(trainer: Trainer) -> tuple[int, int]:
    moved = trainer.statistics().nvme
    return moved.read_bytes, moved.written_bytes


def formula(trainer: Trainer) -> tuple[int, int]:
    """Bytes read and written in a vertical step, as docs/tuning.md has them."""
    memory, delayed_from = trainer.memory, trainer._setup.delayed_from
    num_stages = len(memory.demand.stages)
    streamed = num_stages - memory.num_resident
    buffers = memory.buffers(delayed_from).gradients
    read = written = 0
    for stage, pieces in enumerate(trainer._runtime.pieces):
        elements = sum(piece.num_elements for piece in pieces)
        delayed = sum(piece.num_elements for piece in pieces[delayed_from[stage] :])
        read += MOMENT_BYTES * elements
        written += STATE_BYTES * elements
        if 2 <= stage < streamed:
            read += WEIGHT_BYTES * elements  # forward, or a delayed update just before it
        if stage < streamed - 2:
            read += WEIGHT_BYTES * elements  # backward
        if buffers.count(buffers[stage]) > 1:
            read += GRADIENT_BYTES * delayed
            written += GRADIENT_BYTES * delayed
    return read, written


@pytest.mark.parametrize(
    ("delay", "room", "num_micro_batches"),
    thinned(18, (0.0, 0.25, 0.5, 1.0), ("scratch", "some", "memory", "half", "resident"), (1, 3)),
)
def test_a_steady_step_moves_what_the_formula_says(
    delay: float, room: str, num_micro_batches: int, tmp_path: Path
) -> None:
    """Counted as the difference between two steps and one, each with the flush after it."""
    factor = {"scratch": 1.6, "some": 1.75, "memory": 50.0, "half": 2.2, "resident": 50.0}[room]
    engine = Engine(delay=delay, budget_factor=factor, resident_weights=room != "memory", commit_every=100)
    steps = steps_of("llama", num_micro_batches, 4)
    with trainer_on(tmp_path / "store", steps, engine) as trainer:
        assert trainer.memory.num_activations == trainer.memory.demand.num_boundaries
        trainer.step(steps[0])
        trainer.wait()
        before = bytes_moved(trainer)
        trainer.step(steps[1])
        trainer.wait()
        one = bytes_moved(trainer)
        trainer.step(steps[2])
        trainer.step(steps[3])
        trainer.wait()
        two = bytes_moved(trainer)
        expected = formula(trainer)
        kept, resident = trainer.memory.waiting_gradients.num_kept, trainer.memory.num_resident
        elements = sum(piece.num_elements for pieces in trainer._runtime.pieces for piece in pieces)
    steady = tuple(two[way] - 2 * one[way] + before[way] for way in range(2))
    assert steady == expected
    if delay:
        assert (kept == 0, 0 < kept < 5, 0 < resident < 5) == (room == "scratch", room == "some", room == "half")
    if room == "resident":
        assert expected == (MOMENT_BYTES * elements, STATE_BYTES * elements)


# ---------------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("delay", "expected"), [(0.0, 0), (0.1, 0), (0.125, 1), (0.25, 1), (0.5, 2), (0.6, 2), (0.75, 3), (1.0, 4)]
)
def test_the_share_is_rounded_to_whole_chunks_of_each_stage(delay: float, expected: int) -> None:
    config, recipe = tiny_config("llama"), Recipe()
    staged = staged_model(config, recipe)
    engine = Engine(delay=delay, num_chunks=4, max_piece_elements=4096)
    layouts = layouts_of(staged, engine)
    _, setup = set_up(staged, layouts, recipe, engine, list(make_steps(1, 1)))
    for layout, first in zip(layouts, setup.delayed_from, strict=True):
        pieces = layout.pieces(setup.memory.piece_elements)
        assert layout.num_chunks == 4
        assert len({piece.chunk for piece in pieces[first:]}) == expected
        assert not {piece.chunk for piece in pieces[:first]} & {piece.chunk for piece in pieces[first:]}


@pytest.mark.parametrize("delay", [-0.01, 1.01, float("nan")])
def test_what_is_no_share_is_refused(delay: float) -> None:
    with pytest.raises(ConfigError, match=r"delay: \S+ is not a share from 0 to 1"):
        trainer_config(Recipe(), Engine(delay=delay), list(make_steps(1, 1)), PLENTY_BYTES)


def test_clipping_delays_everything() -> None:
    config = trainer_config(Recipe(clip_norm=1.0), Engine(delay=0.25), list(make_steps(1, 1)), PLENTY_BYTES)
    assert (config.delay, config.delay_in_force) == (0.25, 1.0)
