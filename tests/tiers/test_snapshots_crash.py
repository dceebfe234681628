"""A process killed at any name it makes, changes or removes while it makes, removes or restores a snapshot, or commits
over one: the next opening finds store and snapshots whole, each as before or as after. And drives that are really full.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hoist.tiers import snapshots
from hoist.tiers.allocation import OVERHEAD_BYTES
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.processes import fill_up, mount_small_drive, run_in_process
from tests.support.stores import commit, committed, direct_engine, fill, read_version, small_layouts, write_chunk

CHUNKS = [(layout.index, chunk) for layout in small_layouts() for chunk in range(layout.num_chunks)]
SEEDS = range(1, 9)
VERSION_BYTES = (2 * 8192 + 4096) * 12
#: What os.audit tells of names that are made, changed or removed.
EVENTS = frozenset({"os.link", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"})


def versions(store: Store, engine: IoEngine) -> list[int]:
    return [read_version(store, engine, *chunk, SEEDS) for chunk in CHUNKS]


def make(directory: Path) -> None:
    """At step 3, with a snapshot of step 2 that shares one chunk with the store, and one of step 3."""
    with direct_engine() as engine, committed(directory, engine) as store:
        fill(store, engine, 2)
        commit(store, 2)
        snapshots.take(store, "two", engine=engine)
        for chunk in CHUNKS[1:]:
            write_chunk(store, engine, *chunk, seed=3)
        commit(store, 3)
        snapshots.take(store, "three", engine=engine)


def copy(source: Path, target: Path) -> Path:
    """With the links between its files."""
    subprocess.run(["cp", "-a", source, target], check=True)
    return target


# --- what is killed ---------------------------------------------------------------------------------------------------


def take(store: Store, engine: IoEngine) -> None:
    snapshots.take(store, "new", engine=engine)


def remove(store: Store, engine: IoEngine) -> None:
    snapshots.remove(store, "three", engine=engine)


def restore(store: Store, engine: IoEngine) -> None:
    snapshots.restore(store, "two", engine=engine)


def go_on(store: Store, engine: IoEngine) -> None:
    """The commit that frees shared files, and the next write into the slots."""
    fill(store, engine, 4)
    commit(store, 4)
    fill(store, engine, 5)
    commit(store, 5)


def open_after_trouble(store: Store, engine: IoEngine) -> None:
    """A second opening, of a store whose free slots have links too."""
    store.close()
    Store.open(store.directory, engine=engine).close()


WORK: dict[str, Callable[[Store, IoEngine], None]] = {
    work.__name__: work for work in (take, remove, restore, go_on, open_after_trouble)
}


def work_until_killed(name: str, directory: Path, number: int) -> int:
    """In a process of its own: die before the ``number``-th event; returns how many there were if it does not."""
    count = 0
    armed = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if not armed or event not in EVENTS:
            return
        if event == "open" and not arguments[2] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            return
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with direct_engine() as engine, Store.open(directory, engine=engine) as store:
        if name == "open_after_trouble":
            folder = directory / "elsewhere"
            folder.mkdir()
            for index, path in enumerate(directory.glob("stages/*/*/c/*/*")):
                os.link(path, folder / str(index))
        sys.addaudithook(watch)
        armed = True
        WORK[name](store, engine)
        armed = False
    return count


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("origin") / "store"
    make(directory)
    return directory


@pytest.fixture(scope="module")
def num_events(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    counted = {}
    for name in WORK:
        code, counted[name] = run_in_process(
            work_until_killed, name, copy(origin, tmp_path_factory.mktemp("counting") / "store"), 0
        )
        assert code == 0
    return counted


def points() -> list[Any]:
    """Work and a tenth of its events; one in three at once, all of them with the slow tests."""
    return [
        pytest.param(name, tenth, marks=[] if (tenth + place) % 3 == 0 else pytest.mark.slow)
        for place, name in enumerate(WORK)
        for tenth in range(10)
    ]


@pytest.mark.parametrize(("name", "tenth"), points())
def test_killed(
    name: str, tenth: int, origin: Path, num_events: dict[str, int], tmp_path: Path, engine: IoEngine
) -> None:
    directory = copy(origin, tmp_path / "store")
    total = num_events[name]
    assert total >= 2
    number = 1 + (total * tenth + random.Random(f"{name} {tenth}").randrange(total)) // 10
    code, _ = run_in_process(work_until_killed, name, directory, number)
    assert code == -signal.SIGKILL
    expected = {"two": 2, "three": 3}
    for _ in range(2):  # a second opening sees the same
        with Store.open(directory, engine=engine, check="crc") as store:
            found, damaged = snapshots.list_snapshots(directory)
            assert not damaged
            names = {info.name for info in found}
            assert names <= {"two", "three", "new"}
            assert names >= {"two"}
            assert name == "remove" or "three" in names
            assert name == "take" or "new" not in names
            hidden = [path.name for path in (directory / "snapshots").iterdir() if path.name.startswith(".")]
            assert hidden in ([".replacements"], [])
            assert store.record is not None
            step = store.record.step
            assert step in {"restore": (2, 3), "go_on": (3, 4, 5)}.get(name, (3,))
            assert versions(store, engine) == ([2, 3, 3] if step == 3 else [step] * len(CHUNKS))
    for seed in (6, 7):
        with Store.open(directory, engine=engine) as store:
            fill(store, engine, seed)
            commit(store, seed)
    for info in found:
        with Store.open(info.directory, engine=engine, writable=False, check="crc") as kept:
            wanted = expected.get(info.name, 3)
            assert versions(kept, engine) == ([2, 3, 3] if wanted == 3 else [wanted] * len(CHUNKS))
    with Store.open(directory, engine=engine) as store:
        for info in found:
            snapshots.remove(store, info.name, engine=engine)
        assert versions(store, engine) == [7] * len(CHUNKS)
        assert not list((directory / "snapshots" / ".replacements").iterdir())


# --- durability -------------------------------------------------------------------------------------------------------


def names_and_syncs(directory: Path) -> list[tuple[str, str]]:
    """In a process of its own: what is renamed, linked and fsynced by a snapshot and the commit after it, in order."""
    log: list[tuple[str, str]] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.link", "os.rename"):
            log.append((event, str(Path(os.fsdecode(arguments[1])).relative_to(directory))))

    fsync = os.fsync

    def logged(fd: Any) -> None:
        fsync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        log.append(("fsync", str(path.relative_to(directory)) if path.is_relative_to(directory) else "?"))

    with direct_engine() as engine, Store.open(directory, engine=engine) as store:
        sys.addaudithook(watch)
        os.fsync = logged
        snapshots.take(store, "new", engine=engine)
        log.append(("mark", "commit"))
        go_on(store, engine)
    return log


def test_every_name_is_durable_before_it_is_relied_on(origin: Path, tmp_path: Path) -> None:
    code, log = run_in_process(names_and_syncs, copy(origin, tmp_path / "store"))
    assert code == 0
    mark = log.index(("mark", "commit"))
    published = log.index(("os.rename", "snapshots/new"))
    assert published < mark
    for place, (event, name) in enumerate(log[:published]):
        if event == "os.link":  # the directory that it was made in is synced before the snapshot gets its name
            folder = str(Path(name).parent)
            assert ("fsync", folder) in log[place:published]
            assert ("fsync", str(Path(folder).parent)) in log[place:published]
    assert ("fsync", "snapshots/new/COMMIT.json") in log[:published] or (
        "fsync", "snapshots/.making-new/COMMIT.json") in log[:published]  # fmt: skip
    assert ("fsync", "snapshots") in log[published:mark]
    first, second = (place for place, entry in enumerate(log) if entry == ("os.rename", "COMMIT.json"))
    replaced = [place for place, (event, name) in enumerate(log) if event == "os.rename" and "stages" in name]
    assert len(replaced) == 4 * len(CHUNKS)
    for place in replaced:
        assert first < place < second
        assert ("fsync", str(Path(log[place][1]).parent)) in log[place:second]


# --- full drives ------------------------------------------------------------------------------------------------------


def snapshot_on_small_drive(directory: Path, room_bytes: int, leave_bytes: int) -> str | None:
    """The message of the refusal; training goes on to the end of the drive all the same."""
    if not mount_small_drive(directory, room_bytes):
        return None
    with DirectEngine(num_threads=1) as engine, committed(directory / "store", engine) as store:
        before = sorted(str(path) for path in store.directory.rglob("*"))
        with pytest.raises(StoreRefusedError) as raised:
            snapshots.take(store, "kept", engine=engine, leave_bytes=leave_bytes)
        assert sorted(str(path) for path in store.directory.rglob("*")) == before
        for seed in (2, 3):
            fill(store, engine, seed)
            commit(store, seed)
    return str(raised.value)


@pytest.mark.parametrize(("versions_of_room", "leave_bytes"), [(2.9, 0), (8, 6 * VERSION_BYTES)])
def test_too_little_space(tmp_path: Path, versions_of_room: float, leave_bytes: int) -> None:
    room = int(versions_of_room * VERSION_BYTES) + OVERHEAD_BYTES
    code, message = run_in_process(snapshot_on_small_drive, tmp_path, room, leave_bytes)
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert code == 0
    assert "too little free space: a snapshot needs" in message
    assert "hoist snapshot STORE NAME --remove" in message


def train_to_the_last_byte(directory: Path, room_bytes: int) -> bool | None:
    """A snapshot, then a file that takes every byte that is left: commits need none. True if all was well."""
    if not mount_small_drive(directory, room_bytes):
        return None
    with DirectEngine(num_threads=1) as engine, committed(directory / "store", engine) as store:
        info = snapshots.take(store, "kept", engine=engine)
        (directory / "small").write_bytes(bytes(2**16))  # room for CRC files and COMMIT.json alone
        fill_up(directory / "filler")
        (directory / "small").unlink()
        for seed in (2, 3, 4):
            fill(store, engine, seed)
            commit(store, seed)
        with Store.open(info.directory, engine=engine, writable=False, check="crc") as kept:
            return versions(store, engine) == [4] * len(CHUNKS) and versions(kept, engine) == [1] * len(CHUNKS)


def test_what_a_snapshot_needs_later_is_reserved(tmp_path: Path) -> None:
    code, well = run_in_process(train_to_the_last_byte, tmp_path, 4 * VERSION_BYTES + 2 * OVERHEAD_BYTES)
    if well is None:
        pytest.skip("no small file system can be mounted here")
    assert (code, well) == (0, True)


def open_on_full_drive(directory: Path) -> str | None:
    """A store with a link to every chunk that nothing was reserved for, on a drive without room: the refusal."""
    if not mount_small_drive(directory, 3 * VERSION_BYTES + OVERHEAD_BYTES):
        return None
    with DirectEngine(num_threads=1) as engine:
        with committed(directory / "store", engine):
            pass
        for path in (directory / "store").glob("stages/*/*/c/*/*"):
            os.link(path, path.with_name(f"other-{path.name}"))
        fill_up(directory / "filler")
        with pytest.raises(StoreRefusedError) as raised:
            Store.open(directory / "store", engine=engine)
        with Store.open(directory / "store", engine=engine, writable=False, check="crc"):
            pass
    return str(raised.value)


def test_no_room_for_what_is_shared_is_refused_when_the_store_is_opened(tmp_path: Path) -> None:
    code, message = run_in_process(open_on_full_drive, tmp_path)
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert code == 0
    assert "No space left on device" in message
    assert "so room for its next version is needed: free some, or remove a snapshot" in message
