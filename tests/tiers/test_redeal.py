"""Drives that join a store and leave it: everything is moved, nothing is lost, at whatever step a writer dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hoist.tiers import drives, opening
from hoist.tiers.dealing import MeasuredDirectory
from hoist.tiers.drives import Drive
from hoist.tiers.errors import CorruptChunkError, StoreRefusedError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.redeal import Move, Redeal, change_drives, moves
from hoist.tiers.snapshots import restore, take
from hoist.tiers.store import Store
from tests.support.drives import chunk_files, contents, directories, speeds, told
from tests.support.faults import quick_directory
from tests.support.processes import mount_small_drive, run_in_process
from tests.support.stores import commit, create, fill, read_version, write_chunk

CHUNKS = ((0, 0), (0, 1), (1, 0))
STEPS = ("copy", "secure", "switch", "settle", "remove")


class PowerCut(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, as the tests that kill make many stores."""
    with quick_directory() as made:
        yield made


@pytest.fixture
def store(tmp_path: Path, engine: IoEngine) -> Path:
    """A closed store in one directory, at step 1: chunks in both slots."""
    return make(tmp_path, engine, 1)


def make(folder: Path, engine: IoEngine, num_drives: int) -> Path:
    """The same over several directories."""
    places = directories(folder, num_drives)
    with create(places[0], engine, drives=told(places)) as made:
        fill(made, engine, 1)
        commit(made, 0)
        write_chunk(made, engine, 0, 1, seed=2)
        commit(made, 1)
    return places[0]


def check(store: Path, engine: IoEngine) -> None:
    """It opens as it was committed, every byte of it."""
    with Store.open(store, engine=engine, check="crc") as opened:
        assert opened.record is not None
        assert opened.record.step == 1
        assert opened.record.run == {"lr": 1e-4}
        assert [read_version(opened, engine, *chunk, range(1, 3)) for chunk in CHUNKS] == [1, 2, 1]


def change(
    store: Path,
    engine: IoEngine,
    *,
    add: Sequence[Path] = (),
    remove: Sequence[Path] = (),
    redeal: type[Redeal] | None = None,
) -> int:
    with Store.open(store, engine=engine) as opened:
        return change_drives(opened, engine, add=add, remove=remove, redeal=redeal, measure=alike)


def alike(places: Sequence[Path], engine: IoEngine, num_bytes: int) -> Sequence[MeasuredDirectory]:
    """All drives are equally fast, however busy the machine that runs the test is."""
    return speeds(places)


def numbers(store: Path, folder: Path) -> list[int]:
    """Chunk files in the store's own directory and in drive1, drive2, ... as far as they are there."""
    return [len(chunk_files(place)) for place in (store, *sorted(folder.glob("drive?")))]


def test_a_drive_joins_and_leaves(store: Path, engine: IoEngine, tmp_path: Path) -> None:
    before = contents(store / "stages")
    with Store.open(store, engine=engine) as opened:
        moved = change_drives(opened, engine, add=[tmp_path / "drive1"])
    check(store, engine)
    assert sum(numbers(store, tmp_path)) == 26
    assert numbers(store, tmp_path)[1] > 0
    listed = drives.registered(opening.read(store).record, store)
    assert [drive.path for drive in listed] == [".", "drives/1"]
    assert all(drive.read_bytes_per_second and drive.weight > 1 for drive in listed)
    assert moved == sum((tmp_path / "drive1" / path).stat().st_size for path in chunk_files(tmp_path / "drive1"))
    change(store, engine, remove=[tmp_path / "drive1"])
    check(store, engine)
    assert numbers(store, tmp_path) == [26, 0]
    assert list((tmp_path / "drive1").iterdir()) == []
    assert list((store / "drives").iterdir()) == []
    after = contents(store / "stages")
    assert {path for path, _ in after.items()} == {path for path, _ in before.items()}


def test_one_joins_as_another_leaves_and_training_goes_on(tmp_path: Path, engine: IoEngine) -> None:
    store = make(tmp_path, engine, 2)
    change(store, engine, add=[tmp_path / "drive2", tmp_path / "drive3"], remove=[tmp_path / "drive1"])
    check(store, engine)
    assert numbers(store, tmp_path)[1] == 0
    assert all(numbers(store, tmp_path)[number] for number in (0, 2, 3))
    with Store.open(store, engine=engine) as opened:
        fill(opened, engine, 3)
        commit(opened, 2)
    with Store.open(store, engine=engine, check="crc") as opened:
        assert [read_version(opened, engine, *chunk, range(1, 4)) for chunk in CHUNKS] == [3, 3, 3]


def test_the_engine_reads_the_moved_files_not_the_old_ones(store: Path, engine: IoEngine, tmp_path: Path) -> None:
    """One engine and one open store, before the move and after it: no handle of a removed file is used."""
    with Store.open(store, engine=engine, check="crc") as opened:
        change_drives(opened, engine, add=[tmp_path / "drive1"], measure=alike)
        write_chunk(opened, engine, 0, 0, seed=3)
        commit(opened, 2)
        assert list(opened.verify()) == []
    with DirectEngine(num_threads=1) as other, Store.open(store, engine=other, check="crc") as opened:
        assert read_version(opened, other, 0, 0, range(1, 4)) == 3


@pytest.mark.parametrize("join", [True, False])
def test_the_order_of_a_move(tmp_path: Path, engine: IoEngine, join: bool) -> None:
    """Stage by stage, each step for all of a stage's files before the next; the list of drives is right throughout."""
    store = make(tmp_path, engine, 1 if join else 2)
    log: list[tuple[str, str]] = []
    stage = ""

    class Logging(Redeal):
        def copy(self, move: Move, number: int) -> None:
            nonlocal stage
            stage = move.chunk.stage
            log.append(("copy", stage))
            listed = drives.registered(opening.read(store).record, store)
            assert [bool(drive.weight) for drive in listed] == [True, join]
            super().copy(move, number)
            assert move.chunk.path.is_symlink() != join  # still the old one

        def secure(self, batch: Sequence[Move]) -> None:
            log.append(("secure", stage))
            super().secure(batch)

        def switch(self, move: Move, number: int) -> None:
            log.append(("switch", move.chunk.stage))
            super().switch(move, number)
            assert move.chunk.path.is_symlink() == join

        def settle(self) -> None:
            log.append(("settle", stage))
            super().settle()

        def remove(self, move: Move) -> None:
            log.append(("remove", move.chunk.stage))
            super().remove(move)

    drive = [tmp_path / "drive1"]
    change(store, engine, add=drive if join else [], remove=[] if join else drive, redeal=Logging)
    assert [step for step, _ in groupby(log)] == [(step, name) for name in _stages(store) for step in STEPS]


def _stages(store: Path) -> list[str]:
    return [layout.name for layout in opening.read(store).layouts]


def test_nothing_to_do_moves_nothing(tmp_path: Path, engine: IoEngine) -> None:
    store = make(tmp_path, engine, 2)
    generation = opening.read(store).record.generation
    assert change(store, engine, add=[tmp_path / "drive1"]) == 0
    assert opening.read(store).record.generation == generation


def stopping(at: str, number: int, when: str) -> tuple[type[Redeal], list[int]]:
    """A Redeal that dies before or after the ``number``-th call of a step; and how often it was called."""
    count = [0]

    def step(name: str) -> Any:
        original = getattr(Redeal, name)

        def run(self: Redeal, *arguments: Any) -> None:
            if name != at:
                original(self, *arguments)
                return
            count[0] += 1
            if count[0] == number and when == "before":
                raise PowerCut
            original(self, *arguments)
            if count[0] == number:
                raise PowerCut

        return run

    return type("Stopping", (Redeal,), {name: step(name) for name in STEPS}), count


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", STEPS)
@pytest.mark.parametrize("what", ["join", "leave"])
def test_killed_at_each_step_of_each_move(memory: Path, engine: IoEngine, what: str, at: str, when: str) -> None:
    """Every call of the step is once the last one; then the same command finishes what was begun."""
    number = 0
    while True:
        number += 1
        folder = memory / str(number)
        folder.mkdir()
        store = make(folder, engine, 1 if what == "join" else 3)
        drive = folder / ("drive1" if what == "join" else "drive2")
        add, remove = ([drive], []) if what == "join" else ([], [drive])
        redeal, count = stopping(at, number, when)
        try:
            change(store, engine, add=add, remove=remove, redeal=redeal)
        except PowerCut:
            pass
        else:
            assert count[0] == number - 1
            break
        if number % 3 == 1:  # also straight from what the kill left, without an opening that tidies
            check(store, engine)
            assert sum(numbers(store, folder)) == 26
        change(store, engine, add=add, remove=remove)
        check(store, engine)
        assert sum(numbers(store, folder)) == 26
        assert (len(chunk_files(drive)) > 0) == (what == "join")
        assert [path.name for path in (store / "scratch").iterdir()] == []
    assert number > 2


def die_within_a_change(store: Path, drive: Path, join: bool, number: int) -> int:
    """In a process of its own: it ends at the ``number``-th event that names or removes a file. Returns the events."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in ("os.rename", "os.remove", "os.symlink", "os.mkdir", "os.rmdir", "shutil.rmtree"):
            count += 1
            if count == number:
                os._exit(9)

    with DirectEngine(num_threads=1) as engine, Store.open(store, engine=engine) as opened:
        sys.addaudithook(watch)
        change_drives(opened, engine, add=[drive] if join else [], remove=[] if join else [drive], measure=alike)
        return count


@pytest.fixture(scope="module")
def num_events() -> dict[bool, int]:
    """How many events an undisturbed change has, by whether a drive joins."""
    counted = {}
    for join in (True, False):
        with quick_directory() as folder, DirectEngine(num_threads=1) as engine:
            store = make(folder, engine, 1 if join else 2)
            code, counted[join] = run_in_process(die_within_a_change, store, folder / "drive1", join, 0)
            assert code == 0
    return counted


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("place", [*range(1, 11), *range(-10, 0)])
def test_killed_at_whatever_changes_a_name(
    memory: Path, engine: IoEngine, num_events: dict[bool, int], place: int, join: bool
) -> None:
    """The first events and the last: the drive's directory, link and marker, both commits of the list, the removal of
    what is left. Between them are the moves, at whose steps the test above stops."""
    number = place if place > 0 else num_events[join] + 1 + place
    store, drive = make(memory, engine, 1 if join else 2), memory / "drive1"
    assert run_in_process(die_within_a_change, store, drive, join, number)[0] == 9
    check(store, engine)
    change(store, engine, add=[drive] if join else [], remove=[] if join else _still(store, drive))
    check(store, engine)
    assert sum(numbers(store, memory)) == 26
    assert (len(chunk_files(drive)) > 0) == join
    assert (drive / "DRIVE.json").exists() == join


def _still(store: Path, drive: Path) -> list[Path]:
    """The drive, if the store has it still."""
    record = opening.read(store).record
    return [drive] if any(not one.is_main for one in drives.registered(record, store)) else []


def test_a_drive_that_was_leaving_can_come_back(tmp_path: Path, engine: IoEngine) -> None:
    store = make(tmp_path, engine, 2)
    redeal, _ = stopping("remove", 1, "before")
    with pytest.raises(PowerCut):
        change(store, engine, remove=[tmp_path / "drive1"], redeal=redeal)
    check(store, engine)  # it is trained on as it is
    leaving = drives.registered(opening.read(store).record, store)[1]
    assert leaving.weight == 0
    change(store, engine, add=[tmp_path / "drive1"])
    check(store, engine)
    assert min(numbers(store, tmp_path)) > 0
    assert sum(numbers(store, tmp_path)) == 26


def test_a_damaged_chunk_is_not_moved(store: Path, engine: IoEngine, tmp_path: Path) -> None:
    with Store.open(store, engine=engine) as opened:
        assert opened.record is not None
        main = drives.registered(opened.record, store)[0]
        known = [replace(main, weight=1.0), Drive(id="new", path="drives/1", weight=1.0)]
        bad = next(move.chunk for move in moves(opened.chunk_files(), store, known) if move.chunk.crc32c is not None)
    data = bytearray(bad.path.read_bytes())
    data[5] ^= 1
    bad.path.write_bytes(data)
    with pytest.raises(CorruptChunkError, match=r"stages/.*: stage '\S+' array \S+ chunk .*: checksum: committed"):
        change(store, engine, add=[tmp_path / "drive1"])
    assert bad.path.read_bytes() == data
    assert not bad.path.is_symlink()


def _further(store: Path) -> list[Path]:
    record = opening.read(store).record
    return [drive.directory(store) for drive in drives.registered(record, store) if not drive.is_main]


@pytest.mark.parametrize(
    ("add", "remove", "pattern"),
    [
        ([], ["store"], r"store: is the store's own directory, which cannot leave it"),
        ([], ["other"], r"other: is not a drive of the store .*store; its further drives: .*drive1$"),
        (["other"], [], r"other: is not empty and holds no drive of this store; name an empty or a new directory"),
        (["store/in"], [], r"store/in: lies within .*store, another of the store's directories"),
        (["new", "new"], [], r"new: is named twice"),
    ],
)
def test_changes_that_cannot_be(
    tmp_path: Path, engine: IoEngine, add: list[str], remove: list[str], pattern: str
) -> None:
    store = make(tmp_path, engine, 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(StoreRefusedError, match=pattern):
        change(store, engine, add=[tmp_path / name for name in add], remove=[tmp_path / name for name in remove])
    assert {**contents(tmp_path), str(store / "LOCK"): ""} == {**before, str(store / "LOCK"): ""}


def join_small_drive(store: Path, small: Path, num_bytes: int, late: bool) -> str | None:
    """In a process of its own, with a tmpfs that is too small, or that fills up meanwhile: the refusal."""
    small.mkdir()
    if not mount_small_drive(small, num_bytes):
        return None
    fill_up: type[Redeal] | None = None
    if late:

        class FillsUp(Redeal):
            def copy(self, move: Any, number: int) -> None:
                if number == 3:
                    free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
                    (small / "other").write_bytes(bytes(free))
                super().copy(move, number)

        fill_up = FillsUp
    with DirectEngine(num_threads=1) as engine:
        with pytest.raises(StoreRefusedError) as raised:
            change(store, engine, add=[small / "drive"], redeal=fill_up)
        check(store, engine)
        assert late or list(small.iterdir()) == []
        change(store, engine, remove=_further(store))
        check(store, engine)
    return str(raised.value)


def test_a_drive_that_is_too_small_does_not_join(store: Path, tmp_path: Path) -> None:
    code, message = run_in_process(join_small_drive, store, tmp_path / "small", 1 << 20, False)
    assert code == 0
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert f"{tmp_path}/small/drive: too little free space: the store needs" in message


def test_a_drive_that_fills_up_while_it_joins(store: Path, tmp_path: Path) -> None:
    code, message = run_in_process(join_small_drive, store, tmp_path / "small", 4 << 20, True)
    assert code == 0
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert "No space left on device" in message


def test_a_snapshot_stays_whole_while_drives_come_and_go(store: Path, engine: IoEngine, tmp_path: Path) -> None:
    """What is moved was linked by the snapshot; restored, the store has the snapshot's bytes, on any drives."""
    with Store.open(store, engine=engine) as opened:
        take(opened, "kept", engine=engine)
    drive = [tmp_path / "drive1"]
    for step in (2, 3):
        change(store, engine, add=drive if step == 2 else [], remove=drive if step == 3 else [])
        with Store.open(store, engine=engine, check="crc") as opened:
            for chunk in CHUNKS:
                write_chunk(opened, engine, *chunk, seed=7)
            commit(opened, step)
        with Store.open(store / "snapshots" / "kept", engine=engine, writable=False, check="crc") as snapshot:
            assert snapshot.record is not None
            assert snapshot.record.step == 1
        with Store.open(store, engine=engine, check="crc") as opened:
            restore(opened, "kept", engine=engine)
        check(store, engine)
