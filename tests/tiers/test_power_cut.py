"""Power cuts at any instant of a store's life: it opens at the last promised commit, or at one that was under way.

Every chunk then has the bytes of that commit, and the store can be written and committed again. That the simulation
(`tests/support/power.py`) finds a wrong order is tested with commit sequences that have one. Training:
`tests/scheduler/test_power_cut_in_training.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hoist.tiers.commit import CommitSequence
from hoist.tiers.errors import HoistError, StoreRefusedError
from hoist.tiers.format import COMMIT_NAME
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.faults import quick_directory
from tests.support.power import Drive, Event, Kind, RecordedEngine, Recording, places_to_cut, recording, write_tree
from tests.support.processes import run_in_process
from tests.support.stores import commit, committed, create, fill, read_version, write_chunk, write_pieces
from tests.support.wrong_commits import WRONG

pytestmark = pytest.mark.timeout(240)

NUM_COMMITS = 4
CHUNKS = ((0, 0), (0, 1), (1, 0))
#: What no version of a recorded run has.
LATER_SEED = 1000


# ---------------------------------------------------------------------- runs that are recorded


def plan_of_writes(seed: int) -> list[list[tuple[int, int, int]]]:
    """Per commit, what is written before it: stage, chunk, version. A chunk may come twice, or not at all."""
    chance = random.Random(seed)
    version = 1
    steps = []
    for _ in range(NUM_COMMITS):
        writes = []
        for stage, chunk in chance.choices(CHUNKS, k=chance.randint(1, 4)):
            version += 1
            writes.append((stage, chunk, version))
        steps.append(writes)
    return steps


def versions_at(seed: int, step: int) -> dict[tuple[int, int], int]:
    """What every chunk holds at a committed step."""
    versions = dict.fromkeys(CHUNKS, 1)
    for writes in plan_of_writes(seed)[:step]:
        versions |= {(stage, chunk): version for stage, chunk, version in writes}
    return versions


class Killed(BaseException):
    """Stands for the end of the process."""


class KilledBeforeSettling(CommitSequence):
    """The second commit of the process ends it between the rename and the directory's fsync."""

    commits = 0

    def settle(self) -> None:
        type(self).commits += 1
        if type(self).commits == 2:
            raise Killed
        super().settle()


def record_commits(folder: Path, seed: int, sequence: type[CommitSequence]) -> Recording:
    """In a process of its own: a store at step 0, then commits, then writes that no commit publishes."""
    directory = folder / "store"

    class WatchedStore(Store):
        commit_sequence = sequence

    with DirectEngine(num_threads=2) as plain, committed(directory, plain, seed=1):
        pass
    with recording(folder) as recorder, RecordedEngine(DirectEngine(num_threads=2), recorder) as engine:
        store = WatchedStore.open(directory, engine=engine)
        step = 0
        while step < NUM_COMMITS:
            for stage, chunk, version in plan_of_writes(seed)[step]:
                write_chunk(store, engine, stage, chunk, version)
            step += 1
            try:
                commit(store, step)
            except Killed:
                store.close()
                store = WatchedStore.open(directory, engine=engine)  # what the rename has done is seen, durable or not
                assert store.record is not None
                step = store.record.step
            recorder.promise(step)
        for stage, chunk in CHUNKS:
            write_pieces(store, engine, stage, chunk, LATER_SEED - 1)
        store.close()
        return recorder.finish()


def record_creation(folder: Path, fresh: bool) -> Recording:
    """In a process of its own: the creation of a store, up to its first commit; ``fresh``: over a committed one."""
    directory = folder / "store"
    if fresh:
        with DirectEngine(num_threads=2) as plain, committed(directory, plain, seed=7):
            pass
    with recording(folder) as recorder, RecordedEngine(DirectEngine(num_threads=2), recorder) as engine:
        with create(directory, engine, fresh=fresh) as store:
            fill(store, engine, 1)
            commit(store, 0)
            recorder.promise(0)
        return recorder.finish()


def record(function: Any, *arguments: Any) -> Recording:
    with quick_directory() as folder:
        code, recorded = run_in_process(function, folder, *arguments)
    assert code == 0
    assert isinstance(recorded, Recording)
    return recorded


# ---------------------------------------------------------------------- what must hold


def check_cut(recorded: Recording, place: int, seed: int, run: int) -> int:
    """After a power cut the store holds a commit, whole, and can be gone on with. Returns its step."""
    drive = Drive(recorded, place)
    with quick_directory() as folder, DirectEngine(num_threads=2) as engine:
        write_tree(drive.cut(seed), folder)
        directory = folder / "store"
        for _ in range(2):  # opening tidies: a second opening sees the same
            with Store.open(directory, engine=engine, check="crc") as store:
                assert store.record is not None
                step = store.record.step
                assert drive.promised <= step <= drive.published
                for (stage, chunk), version in versions_at(run, step).items():
                    assert read_version(store, engine, stage, chunk, range(version, version + 1)) == version
        with Store.open(directory, engine=engine) as store:
            fill(store, engine, LATER_SEED)
            commit(store, step + 1)
        with Store.open(directory, engine=engine, check="crc") as store:
            later = range(LATER_SEED, LATER_SEED + 1)
            assert {read_version(store, engine, *chunk, later) for chunk in CHUNKS} == {LATER_SEED}
    return step


def some_cut_is_wrong(recorded: Recording, run: int, num_seeds: int = 200) -> bool:
    for seed, place in places_to_cut(recorded, range(num_seeds)):
        try:
            check_cut(recorded, place, seed, run)
        except (AssertionError, HoistError):
            return True
    return False


RUNS = range(3)


@pytest.fixture(scope="module")
def recordings() -> dict[int, Recording]:
    return {run: record(record_commits, run, CommitSequence) for run in RUNS}


@pytest.fixture(scope="module")
def interrupted() -> Recording:
    """A run that is killed between rename and fsync, and goes on in a new process."""
    return record(record_commits, 0, KilledBeforeSettling)


@pytest.mark.parametrize("part", [pytest.param(part, marks=[] if not part else pytest.mark.slow) for part in range(20)])
@pytest.mark.parametrize("run", RUNS)
def test_a_power_cut_leaves_a_whole_commit(run: int, part: int, recordings: dict[int, Recording]) -> None:
    recorded = recordings[run]
    assert recorded.events[-1].kind is not Kind.PROMISED  # writes that no commit publishes are under way
    steps = {
        check_cut(recorded, place, seed, run)
        for seed, place in places_to_cut(recorded, range(part * 20, part * 20 + 20))
    }
    assert len(steps) > 1


def test_a_power_cut_after_a_kill_between_rename_and_fsync(interrupted: Recording) -> None:
    for seed, place in places_to_cut(interrupted, range(20)):
        check_cut(interrupted, place, seed, 0)


def check_creation_cut(recorded: Recording, place: int, seed: int, *, fresh: bool) -> None:
    """What opens is the new store whole, or the old one if there was one; if none opens, it can be made again."""
    drive = Drive(recorded, place)
    with quick_directory() as folder, DirectEngine(num_threads=2) as engine:
        write_tree(drive.cut(seed), folder)
        directory = folder / "store"
        try:
            with Store.open(directory, engine=engine, check="crc") as store:
                (version,) = {read_version(store, engine, *chunk, range(10)) for chunk in CHUNKS}
            assert version == 1 or (fresh and version == 7)
            assert version == 7 or drive.published == 0
            return
        except StoreRefusedError:
            assert fresh or drive.promised < 0
        with create(directory, engine) as store:
            fill(store, engine, 1)
            commit(store, 0)
        with Store.open(directory, engine=engine, check="crc") as store:
            assert {read_version(store, engine, *chunk, range(10)) for chunk in CHUNKS} == {1}


@pytest.fixture(scope="module", params=[False, True])
def creation(request: pytest.FixtureRequest) -> tuple[bool, Recording]:
    """Of a new store, and over an old one (fresh)."""
    return request.param, record(record_creation, request.param)


@pytest.mark.parametrize("part", [pytest.param(part, marks=[] if not part else pytest.mark.slow) for part in range(10)])
def test_a_power_cut_during_a_creation(part: int, creation: tuple[bool, Recording]) -> None:
    fresh, recorded = creation
    for seed, place in places_to_cut(recorded, range(part * 30, part * 30 + 30)):
        check_creation_cut(recorded, place, seed, fresh=fresh)


# ---------------------------------------------------------------------- the simulation can fail


@pytest.mark.parametrize("sequence", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_commit_is_found(sequence: type[CommitSequence]) -> None:
    assert some_cut_is_wrong(record(record_commits, 0, sequence), 0)


def test_opening_without_settling_is_found(interrupted: Recording) -> None:
    """Opening syncs the directory of COMMIT.json: otherwise the slots that this one frees are written too early."""
    commits = [place for place, event in enumerate(interrupted.events) if event.target.endswith(COMMIT_NAME)]

    def of_the_opening(place: int, event: Event) -> bool:
        return event.kind is Kind.SYNCED and event.path == "store" and commits[1] < place < commits[2]

    assert some_cut_is_wrong(interrupted.without(of_the_opening), 0)


def test_a_creation_that_is_not_marked_first_is_found(creation: tuple[bool, Recording]) -> None:
    """Chunk files without the zarr.json that says whose they are could be anybody's: they would be in the way."""
    fresh, recorded = creation
    filled = next(place for place, event in enumerate(recorded.events) if event.kind is Kind.ALL_SYNCED)

    def marks(place: int, event: Event) -> bool:
        return event.kind is Kind.SYNCED and event.path in ("store", "store/zarr.json") and place < filled

    def is_wrong(seed: int, place: int) -> bool:
        try:
            check_creation_cut(unmarked, place, seed, fresh=fresh)
        except (AssertionError, HoistError):
            return True
        return False

    unmarked = recorded.without(marks)
    assert any(is_wrong(seed, place) for seed, place in places_to_cut(unmarked, range(200)))
