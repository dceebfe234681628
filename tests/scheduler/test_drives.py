"""Training in a store over several directories gives the same bits, as it goes on, is killed, or changes its drives."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hoist.tiers import drives, opening
from hoist.tiers.io.base import IoStatistics
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.redeal import change_drives
from hoist.tiers.store import Store
from tests.scheduler.test_kill import NEVER, train_until_killed
from tests.support.drives import chunk_files, directories, speeds, told
from tests.support.faults import NUM_STEPS, Course, create, go_on, job, snapshot, undisturbed
from tests.support.kills import Death
from tests.support.processes import run_in_process
from tests.support.training import torch_threads

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    with torch_threads(1):
        yield undisturbed(job("vertical"), tmp_path_factory.mktemp("course") / "vertical")


def make(folder: Path, num_drives: int) -> Path:
    """The job's store at step 0 over so many directories."""
    folder.mkdir(exist_ok=True)
    places = directories(folder, num_drives)
    with DirectEngine(num_threads=2) as engine:
        create(job("vertical"), places[0], engine, drives=told(places, [1.0, 2.0, 1.5][:num_drives]))
    assert all(chunk_files(place) for place in places)
    return places[0]


def moved(statistics: IoStatistics) -> tuple[int, int, int, int, int]:
    """What the traffic formulas speak of."""
    return (
        statistics.read_bytes, statistics.written_bytes, statistics.reads, statistics.writes, statistics.buffered_bytes
    )  # fmt: skip


def test_any_number_of_drives_gives_the_same_bits_and_the_same_traffic(course: Course, tmp_path: Path) -> None:
    traffic = set()
    for num_drives in (1, 2, 3):
        store = make(tmp_path / str(num_drives), num_drives)
        assert snapshot(store) == course.snapshots[0]
        with DirectEngine(num_threads=2) as engine:
            assert go_on(job("vertical"), store, engine, validate=True) == course.losses
            traffic.add(moved(engine.statistics()))
        assert snapshot(store) == course.snapshots[NUM_STEPS]
    assert len(traffic) == 1


def test_drives_join_and_leave_between_steps(course: Course, tmp_path: Path) -> None:
    store = make(tmp_path / "run", 1)
    losses: list[float] = []
    for number in range(1, NUM_STEPS + 1):
        with DirectEngine(num_threads=2) as engine:
            go_on(job("vertical"), store, engine, losses, upto=number)
            with Store.open(store, engine=engine) as opened:
                assert opened.record is not None
                further = [drive.directory(store) for drive in drives.registered(opened.record, store)[1:]]
                change_drives(
                    opened,
                    engine,
                    add=[tmp_path / f"joining{number}"],
                    remove=further,
                    measure=lambda places, engine, num_bytes: speeds(places),
                )
        assert snapshot(store) == course.snapshots[number]
        assert chunk_files(tmp_path / f"joining{number}")
    assert losses == course.losses
    assert len(drives.registered(opening.read(store).record, store)) == 2


@pytest.fixture(scope="module")
def counts(course: Course, tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How often each moment comes in an undisturbed run on two drives."""
    store = make(tmp_path_factory.mktemp("counted"), 2)
    code, counted = run_in_process(train_until_killed, "vertical", store, NEVER)
    assert code == 0
    return Counter(counted)


@pytest.mark.parametrize("seed", range(4))
def test_killed_on_two_drives(seed: int, counts: Counter[str], course: Course, tmp_path: Path) -> None:
    """At one of its moments each."""
    chance = random.Random(seed)
    moment = chance.choice(sorted(counts))
    death = Death(moment=moment, occurrence=chance.randint(1, counts[moment]))
    store = make(tmp_path / "run", 2)
    code, _ = run_in_process(train_until_killed, "vertical", store, death)
    assert code == -signal.SIGKILL
    kept = snapshot(store)
    assert kept == course.snapshots[kept.step]
    with DirectEngine(num_threads=2) as engine:
        assert go_on(job("vertical"), store, engine) == course.losses[kept.step :]
    assert snapshot(store) == course.snapshots[NUM_STEPS]
