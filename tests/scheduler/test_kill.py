"""A process killed at any instant, again and again: the store is at a commit, whole, and training goes on from it.

Kills are named (`tests/support/kills.py`) and drawn from seeds. Each chain is one store: processes are killed in it one
after another, until one may go to the end. Power cuts, which lose more: `test_power_cut_in_training.py`.
"""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.faults import (
    NUM_STEPS,
    RARE,
    SETTINGS,
    Course,
    Snapshot,
    copy_store,
    create,
    go_on,
    job,
    quick_directory,
    snapshot,
)
from tests.support.kills import (
    COMMIT_MOMENTS,
    CREATION_MOMENTS,
    STEP_MOMENTS,
    Death,
    TickingEngine,
    TickingTrainer,
    ticking,
)
from tests.support.processes import run_forked, run_in_process
from tests.support.training import torch_threads
from tests.support.watch import watching

pytestmark = pytest.mark.timeout(600)

#: After either of these the commit has taken place; three of them would be the whole run.
PUBLISHED = ("COMMIT.json: between rename and the directory's fsync", "before the old CRC file goes")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in RARE else []) for name in SETTINGS]
SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed else []) for seed in range(10)]
#: Kills in one chain.
CHAIN = 6
NEVER = Death(moment="", occurrence=0)


def train_until_killed(name: str, directory: Path, death: Death) -> Counter[str]:
    """In a process of its own. Returns how often each moment came, if it comes to an end."""
    what = SETTINGS[name]()
    deadline, watcher = ticking(directory, death)
    with watching(directory, watcher.seen), TickingEngine(DirectEngine(num_threads=2), deadline) as engine:
        go_on(what, directory, engine, trainer_kind=TickingTrainer)
    return deadline.counts


def killed_in_turn(name: str, directory: Path, deaths: list[Death]) -> list[tuple[int, Snapshot]]:
    """In a process of its own: training is begun and killed again and again. Exit codes and what each left."""
    SETTINGS[name]()  # made once
    return [(run_forked(train_until_killed, name, directory, death), snapshot(directory)) for death in deaths]


def create_until_killed(directory: Path, death: Death) -> Counter[str]:
    """In a process of its own: makes the job's store."""
    what = job("vertical")
    deadline, watcher = ticking(directory, death)
    with watching(directory, watcher.seen), TickingEngine(DirectEngine(num_threads=2), deadline) as engine:
        create(what, directory, engine)
    return deadline.counts


def created_in_turn(directory: Path, deaths: list[Death]) -> list[tuple[int, str | None]]:
    """In a process of its own: a creation is begun and killed again and again. Exit codes, and why none opens."""
    job("vertical")  # made once
    return [(run_forked(create_until_killed, directory, death), why_not_open(directory)) for death in deaths]


def why_not_open(directory: Path) -> str | None:
    try:
        with DirectEngine(num_threads=1) as engine, Store.open(directory, engine=engine, check="crc"):
            return None
    except StoreRefusedError as error:
        return str(error)


@pytest.fixture(scope="module")
def counts(courses: dict[str, Course]) -> Callable[[str], Counter[str]]:
    """How often each moment comes in a setting's last step alone, counted once: in a longer run it comes more often."""

    def count(name: str) -> Counter[str]:
        with quick_directory() as folder:
            directory = copy_store(courses[name].store, folder / "store")
            with DirectEngine(num_threads=2) as engine, torch_threads(1):
                go_on(SETTINGS[name](), directory, engine, upto=NUM_STEPS - 1)
            code, counted = run_in_process(train_until_killed, name, directory, NEVER)
        assert code == 0
        assert isinstance(counted, Counter)
        return counted

    return cache(count)


def deaths(counts: Counter[str], seed: int) -> list[list[Death]]:
    """Every moment once, in chains; the occurrence is one that comes in any step."""
    chance = random.Random(seed)
    moments = sorted(counts)
    chance.shuffle(moments)
    moments.sort(key=lambda moment: moment in PUBLISHED)  # so that chains have one at most, and none ends early
    num_chains = -(-len(moments) // CHAIN)
    found = [Death(moment=moment, occurrence=chance.randint(1, counts[moment])) for moment in moments]
    chains = [found[chain::num_chains] for chain in range(num_chains)]
    for chain in chains:
        chance.shuffle(chain)
    return chains


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_killed_again_and_again(
    name: str, seed: int, courses: dict[str, Course], counts: Callable[[str], Counter[str]], quick_path: Path
) -> None:
    """Every moment that the setting has, at a drawn occurrence. What was written outlives a process on any drive."""
    setup = SETTINGS[name]().setup
    expected = {*STEP_MOMENTS, *COMMIT_MOMENTS}
    if not any(setup.delayed_from):
        expected.remove("update in the backward")
    if not setup.speculative and all(
        first == shape.num_pieces for first, shape in zip(setup.delayed_from, setup.shapes(), strict=True)
    ):
        expected.remove("delayed update")
    if not setup.scratch_bytes:
        expected.remove("inside a write to scratch")
    assert counts(name).keys() == expected
    course = courses[name]
    for number, chain in enumerate(deaths(counts(name), seed)):
        directory = copy_store(course.store, quick_path / str(number))
        step = 0
        _, left = run_in_process(killed_in_turn, name, directory, chain)
        for death, (code, kept) in zip(chain, left, strict=True):
            assert code == -signal.SIGKILL, death
            assert kept == course.snapshots[kept.step]
            assert step + (death.moment in PUBLISHED) <= kept.step < NUM_STEPS
            step = kept.step
        with DirectEngine(num_threads=2) as engine, torch_threads(1):
            assert go_on(SETTINGS[name](), directory, engine) == course.losses[step:]
        assert snapshot(directory) == course.snapshots[NUM_STEPS]


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_in_the_first_creation(seed: int, courses: dict[str, Course], tmp_path: Path) -> None:
    """Nothing half-made opens, and the same call again makes the store; once there is a commit, it is that store."""
    _, counted = run_in_process(create_until_killed, tmp_path / "counting", NEVER)
    assert counted.keys() == {*CREATION_MOMENTS, *COMMIT_MOMENTS[:-1]}
    directory = tmp_path / "store"
    chance = random.Random(seed)
    moments = [*CREATION_MOMENTS[1:], *COMMIT_MOMENTS[:-2]]
    chance.shuffle(moments)
    moments = [CREATION_MOMENTS[0], *moments, PUBLISHED[0]]
    deaths = [Death(moment=moment, occurrence=chance.randint(1, counted[moment])) for moment in moments]
    _, left = run_in_process(created_in_turn, directory, deaths)
    for death, (code, refusal) in zip(deaths, left, strict=True):
        assert code == -signal.SIGKILL, death
        if death.moment in PUBLISHED:
            assert refusal is None
        else:
            assert re.search("does not exist; create the store|creation never finished|holds no hoist store", refusal)
    assert snapshot(directory) == courses["vertical"].snapshots[0]
    with DirectEngine(num_threads=2) as engine, torch_threads(1):
        assert go_on(job("vertical"), directory, engine) == courses["vertical"].losses
