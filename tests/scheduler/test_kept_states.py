"""States that stay in host memory from step to step: the same bits, less traffic, nothing lost at a commit.

What is worth keeping is `test_kept_candidates.py`'s part, plans with kept chunks `test_plan.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hoist.scheduler.config import ClipMode, Order
from hoist.scheduler.memory import STATE_BYTES
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.faults import quick_directory
from tests.support.models import tiny_config
from tests.support.sampling import thinned
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    assert_identical_states,
    elements_of,
    make_steps,
    read_states,
    torch_threads,
    train,
    train_reference,
    trainer_on,
)

PLANS: tuple[Order, ...] = ("vertical", "horizontal")
SHARES = (0.0, 0.3, 1.0)
#: Room for everything, or for what the share allows in a budget where activations and gradients are spilled.
ROOMY = 60.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@cache
def with_nothing_kept(plan: Order, recipe: Recipe) -> Outcome:
    with quick_directory() as folder:
        engine = Engine(plan=plan, budget_factor=ROOMY)
        return train(folder / "store", tiny_config("llama"), make_steps(4, 2), recipe, engine)


@pytest.mark.parametrize(
    ("plan", "share", "delay", "clip_mode"),
    thinned(12, PLANS, SHARES, (0.0, 0.5, 1.0), (None, "exact", "speculative")),
)
def test_the_result_does_not_depend_on_what_is_kept(
    plan: Order, share: float, delay: float, clip_mode: ClipMode | None, tmp_path: Path
) -> None:
    """Losses, weights and both moments; commits at some turns and at the end; in one room and in a narrow one."""
    steps = make_steps(4, 2)
    recipe = Recipe(clip_norm=0.0 if clip_mode is None else 1.0)
    outcomes = []
    for number, budget_factor in enumerate((ROOMY, 1.6)):
        engine = Engine(
            plan=plan, delay=delay, residency=share, budget_factor=budget_factor, clip_mode=clip_mode or "exact",
            resident_weights=share == 1.0, commit_every=3,
        )
        outcomes.append(train(tmp_path / f"store-{number}", tiny_config("llama"), steps, recipe, engine))
        memory = outcomes[-1].memory
        assert memory is not None
        assert (memory.kept_bytes > 0) == (share > 0)
    if clip_mode is None:
        assert_identical(outcomes[0], train_reference(tiny_config("llama"), steps, recipe))
    else:
        assert_identical(outcomes[0], with_nothing_kept(plan, recipe))
    assert_identical(outcomes[1], outcomes[0])


@pytest.mark.parametrize("plan", PLANS)
def test_with_everything_kept_the_drive_is_silent_between_commits(plan: Order, tmp_path: Path) -> None:
    steps = make_steps(7, 2)
    engine = Engine(plan=plan, residency=1.0, budget_factor=ROOMY, commit_every=4)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, engine) as trainer:
        assert trainer.memory.kept_bytes == STATE_BYTES * sum(elements_of(trainer))
        moved = []
        for step in steps:
            trainer.step(step)
            trainer.wait()
            nvme = trainer.statistics().nvme
            moved.append((nvme.read_bytes, nvme.written_bytes))
    everything = STATE_BYTES * sum(elements_of(trainer))
    assert moved[0] == moved[1] == moved[2]
    assert moved[3] == (moved[2][0], moved[2][1] + everything)  # step 4 is committed: written once it is updated
    assert moved[4] == moved[5] == moved[6] == moved[3]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0])
def test_a_steady_step_moves_what_the_formula_says(share: float, delay: float, tmp_path: Path) -> None:
    """12 bytes written by an update, 8 read for it, or 12 if it finds no weights in a buffer, and 4 for a visit that
    finds none: less what is kept, weights or moments. The manager's counters say how much was saved.
    """
    steps = make_steps(4, 2)
    engine = Engine(
        delay=delay, residency=share, budget_factor=ROOMY, commit_every=100, resident_weights=False, num_chunks=4
    )
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, engine) as trainer:
        for step in steps[:2]:
            trainer.step(step)
        trainer.wait()
        before = trainer.statistics()
        trainer.step(steps[2])
        trainer.wait()
        after = trainer.statistics()
        kept = trainer.memory.kept
        read = written = saved_read = saved_written = 0
        loads = [1, 1, 2, 1, 1]  # neighbours of the turns find their weights in the two buffers
        for stage, pieces in enumerate(trainer._runtime.pieces):
            for number, piece in enumerate(pieces):
                size = piece.num_elements
                # trainer.wait() has made the delayed updates when the first two stages were in the buffers.
                finds_weights = number < trainer._setup.delayed_from[stage] or stage < 2
                weights_read = (0 if finds_weights else 4) * size
                # In the forward, then, weights are read like the others.
                visits = 4 * size * loads[stage]
                weights_kept, moments_kept = piece.chunk in kept.weights[stage], piece.chunk in kept.moments[stage]
                saved = (4 * size if weights_kept else 0) + (8 * size if moments_kept else 0)
                saved_read += (8 * size if moments_kept else 0) + (visits + weights_read if weights_kept else 0)
                saved_written += saved
                read += (0 if moments_kept else 8 * size) + (0 if weights_kept else visits + weights_read)
                written += 12 * size - saved
    assert after.nvme.written_bytes - before.nvme.written_bytes == written
    assert after.nvme.read_bytes - before.nvme.read_bytes == read
    kinds = [(after.residency.kinds[name], before.residency.kinds[name]) for name in ("kept weights", "kept moments")]
    assert sum(later.saved_read_bytes - earlier.saved_read_bytes for later, earlier in kinds) == saved_read
    assert sum(later.saved_written_bytes - earlier.saved_written_bytes for later, earlier in kinds) == saved_written
    assert (saved_read > 0) == (share > 0)


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_run_goes_on_with_another_share(delay: float, tmp_path: Path) -> None:
    """Bit for bit, through commits that had to write what was kept, and after work that was lost."""
    steps = make_steps(8, 2)
    expected = train_reference(tiny_config("llama"), steps, Recipe())
    store = tmp_path / "store"
    losses: list[float] = []
    committed = 0
    for share, budget_factor, stop in ((1.0, ROOMY, 3), (0.3, 1.6, 5), (0.0, 1.0, 6), (0.7, 3.0, 8)):
        engine = Engine(delay=delay, residency=share, budget_factor=budget_factor, commit_every=2)
        with trainer_on(store, tiny_config("llama"), steps, engine) as trainer:
            assert trainer.step_number == committed
            losses += [trainer.step(step).loss for step in steps[committed : stop - 1]]
            trainer.commit()
            committed = stop - 1
            trainer.step(steps[stop - 1])  # never committed: the next trainer does it again
    assert losses == expected.losses[:7]
    with DirectEngine(num_threads=2) as files, Store.open(store, engine=files, check="crc") as opened:
        found = read_states(opened, files)
    seven = train_reference(tiny_config("llama"), steps[:7], Recipe())
    assert_identical_states(found, seven.states)


def test_commits_are_due_by_time_where_states_are_kept_and_by_steps_otherwise(tmp_path: Path) -> None:
    """Nobody has said when: ten minutes, of which this takes none, or ten steps. Said so: both count."""
    steps = make_steps(12, 1)
    cases = {
        "kept": (Engine(residency=1.0, budget_factor=ROOMY), None, None, 0),
        "not kept": (Engine(residency=0.0, budget_factor=ROOMY), None, None, 10),
        "minutes": (Engine(residency=1.0, budget_factor=ROOMY), None, 1e-9, 11),
        "steps": (Engine(residency=1.0, budget_factor=ROOMY), 4, None, 8),
        "either": (Engine(residency=0.0, budget_factor=ROOMY), 5, 1e9, 10),
    }
    for name, (engine, every, minutes, expected) in cases.items():
        with trainer_on(
            tmp_path / name, tiny_config("llama"), steps, engine, commit_every=every, commit_minutes=minutes
        ) as trainer:
            for step in steps:
                trainer.step(step)
            trainer.wait()
            assert trainer.committed_step == expected, name
            number = {"kept": 0, "not kept": 1, "minutes": 11, "steps": 2, "either": 2}[name]
            assert trainer.statistics().commits.num_commits == number, name
