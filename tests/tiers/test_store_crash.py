"""A writer that dies at any step of a commit or a creation leaves the commit before or the new one, whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hoist.tiers.commit import CommitSequence
from hoist.tiers.errors import StoreRefusedError, TransferError
from hoist.tiers.format import StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.layout import StageLayout
from hoist.tiers.store import Store
from tests.support.stores import commit, committed, create, fill, read_version, write_chunk

#: The steps in their order, and whether the new commit shows when the writer dies right after the step.
STEPS = {
    "flush": False,
    "write_checksums": False,
    "sync_checksum_directory": False,
    "write_record": False,
    "publish": True,
    "settle": True,
    "tidy": True,
}


class PowerCut(BaseException):
    """Stands for the end of the process; nothing in the store may catch it for good."""


def sequence_that(at_step: Callable[[str, Callable[[], None]], None]) -> type[CommitSequence]:
    """A commit sequence whose steps go through ``at_step(name, do_it)``."""

    def wrapped(name: str) -> Any:
        original = getattr(CommitSequence, name)

        def step(self: CommitSequence, *arguments: Any) -> None:
            at_step(name, lambda: original(self, *arguments))

        return step

    return type("Watched", (CommitSequence,), {name: wrapped(name) for name in STEPS})


def store_with(sequence: type[CommitSequence]) -> type[Store]:
    return type("StoppableStore", (Store,), {"commit_sequence": sequence})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stop", STEPS)
def test_killed_at_each_step_of_a_commit(tmp_path: Path, engine: IoEngine, stop: str, when: str) -> None:
    directory = tmp_path / "store"
    armed = False

    def at_step(name: str, do_it: Callable[[], None]) -> None:
        if armed and name == stop and when == "before":
            raise PowerCut
        do_it()
        if armed and name == stop:
            raise PowerCut

    with committed(directory, engine, seed=1, kind=store_with(sequence_that(at_step))) as store:
        write_chunk(store, engine, 0, 1, seed=2)
        armed = True
        with pytest.raises(PowerCut):
            commit(store, 1)
        with pytest.raises(RuntimeError, match=r"a commit failed .*; open the store again to go on"):
            write_chunk(store, engine, 0, 0, seed=9)
    names = list(STEPS)
    published = STEPS[stop] if when == "after" else names.index(stop) > names.index("publish")
    for _ in range(2):  # opening tidies: a second opening sees the same
        with Store.open(directory, engine=engine, check="crc") as store:
            assert store.record is not None
            assert store.record.step == (1 if published else 0)
            assert read_version(store, engine, 0, 0, range(1, 3)) == 1
            assert read_version(store, engine, 0, 1, range(1, 3)) == (2 if published else 1)
            assert not (directory / "COMMIT.json.tmp").exists()
            assert [path.name for path in (directory / "crc").iterdir()] == [f"{store.record.generation}.bin"]
    with Store.open(directory, engine=engine) as store:  # and training goes on from there
        write_chunk(store, engine, 0, 1, seed=3)
        commit(store, 2)
    with Store.open(directory, engine=engine, writable=False, check="crc") as store:
        assert read_version(store, engine, 0, 1, range(1, 4)) == 3


@pytest.mark.parametrize("stop", ["flush", "write_checksums", "sync_checksum_directory", "write_record"])
def test_killed_during_the_first_commit(tmp_path: Path, engine: IoEngine, stop: str) -> None:
    directory = tmp_path / "store"

    def at_step(name: str, do_it: Callable[[], None]) -> None:
        do_it()
        if name == stop:
            raise PowerCut

    with create(directory, engine, kind=store_with(sequence_that(at_step))) as store:
        fill(store, engine, 1)
        with pytest.raises(PowerCut):
            commit(store, 0)
    with pytest.raises(StoreRefusedError, match="the store's creation never finished; create it again"):
        Store.open(directory, engine=engine)
    with create(directory, engine) as store:
        fill(store, engine, 2)
        commit(store, 0)


class RecordingEngine(DirectEngine):
    """Notes what is flushed, and can refuse to."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(num_threads=2)
        self.log = log
        self.fail = False

    def flush(self, path: Path) -> Future[None]:
        self.log.append("fdatasync chunk")
        if self.fail:
            failed: Future[None] = Future()
            failed.set_exception(TransferError(f"flush {path}: Input/output error"))
            return failed
        return super().flush(path)


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    log: list[str] = []
    directory = tmp_path / "store"

    def at_step(name: str, do_it: Callable[[], None]) -> None:
        log.append(name)
        do_it()

    with (
        RecordingEngine(log) as engine,
        committed(directory, engine, kind=store_with(sequence_that(at_step))) as store,
    ):
        write_chunk(store, engine, 1, 0, seed=2)
        log.clear()
        commit(store, 1)
        assert log == ["flush", *["fdatasync chunk"] * 4, *list(STEPS)[1:]]


def test_during_a_commit_reads_go_on_and_writes_wait(tmp_path: Path, engine: IoEngine) -> None:
    """A write that begins meanwhile gets the slot that this commit frees, not the one that it is publishing."""
    places: list[Path] = []
    writer: list[threading.Thread] = []

    def begin_write(store: Store) -> None:
        piece = store.layouts[1].pieces(4096)[0]
        places.append(store.place(1, StateArray.EXP_AVG, piece, write=True).path)

    def at_step(name: str, do_it: Callable[[], None]) -> None:
        if name == "write_checksums" and stores[0].record is not None:
            writer.append(threading.Thread(target=begin_write, args=stores))
            writer[0].start()
            assert read_version(stores[0], engine, 1, 0, range(1, 3)) == 2  # would hang if reads waited
        do_it()

    kind = store_with(sequence_that(at_step))
    with create(tmp_path / "store", engine, kind=kind) as store:
        stores = [store]
        fill(store, engine, 1)
        commit(store, 0)
        write_chunk(store, engine, 1, 0, seed=2)
        commit(store, 1)
        writer[0].join()
    assert [path.parent.name for path in places] == ["0"]  # version 2 is in slot 1


def test_a_failed_flush_stops_the_commit_and_the_store(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    with RecordingEngine([]) as engine, committed(directory, engine, seed=1) as store:
        write_chunk(store, engine, 1, 0, seed=2)
        engine.fail = True
        with pytest.raises(TransferError, match="Input/output error"):
            commit(store, 1)
        engine.fail = False
        with pytest.raises(RuntimeError, match=r"a commit failed .*Input/output error"):
            commit(store, 1)
    with DirectEngine(num_threads=2) as plain, Store.open(directory, engine=plain, check="crc") as store:
        assert read_version(store, plain, 1, 0, range(1, 3)) == 1


SYSTEM_CALLS = """
import os, sys
from pathlib import Path
from tests.support.stores import commit, committed, direct_engine, write_chunk

# The three calls that make names durable or change them, in the order that the process makes them.
log = []
def watch(event, arguments):
    if event == "os.rename":
        log.append("rename " + Path(os.fsdecode(arguments[0])).name)
    elif event in ("os.remove", "os.unlink"):
        log.append("remove " + Path(os.fsdecode(arguments[0])).name)
    elif event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & os.O_CREAT:
        log.append("write " + Path(os.fsdecode(arguments[0])).name)

with direct_engine() as engine, committed(Path(sys.argv[1]), engine) as store:
    write_chunk(store, engine, 1, 0, seed=2)
    fsync = os.fsync
    def logged_fsync(descriptor):
        log.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)
    os.fsync = logged_fsync
    sys.addaudithook(watch)
    commit(store, 1)
print("|".join(log))
"""


def run_python(source: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_order_of_system_calls_of_a_commit(tmp_path: Path) -> None:
    done = run_python(SYSTEM_CALLS, tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().split("|") == [
        "write wear.json.tmp",  # its name is made durable with the commit's
        "fsync wear.json.tmp",
        "rename wear.json.tmp",
        "write 2.bin",
        "fsync 2.bin",
        "fsync crc",
        "write COMMIT.json.tmp",
        "fsync COMMIT.json.tmp",
        "rename COMMIT.json.tmp",
        "fsync store",
        "remove 1.bin",
    ]


WRITER = """
import sys
from pathlib import Path
from hoist.tiers.store import Store
from tests.support.stores import commit, direct_engine, fill

engine = direct_engine()
store = Store.open(Path(sys.argv[1]), engine=engine)
step = store.record.step
while True:
    step += 1
    fill(store, engine, step)
    commit(store, step)
    print(step, flush=True)
"""


def test_a_killed_process_leaves_a_whole_commit(tmp_path: Path, engine: IoEngine) -> None:
    """SIGKILL after a number of printed commits: the store is at that commit or a later one, with no chunk mixed."""
    directory = tmp_path / "store"
    with committed(directory, engine, seed=0):
        pass
    step = 0
    for wanted in (1, 2, 5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        with writer.stdout as lines:
            printed = [int(lines.readline()) for _ in range(wanted)][-1]
            os.kill(writer.pid, signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        with Store.open(directory, engine=engine, check="crc") as store:  # the dead writer's LOCK is no obstacle
            assert store.record is not None
            step = store.record.step
            assert step >= printed
            chunks = [(0, 0), (0, 1), (1, 0)]
            assert [read_version(store, engine, *chunk, range(step + 1)) for chunk in chunks] == [step] * 3
    assert step >= 8


def test_fresh_removes_the_commit_before_it_touches_a_chunk(tmp_path: Path, engine: IoEngine) -> None:
    """Stopped while it removes the old chunks, the store is one that never committed: no half of it can be opened."""
    directory = tmp_path / "store"
    with committed(directory, engine):
        pass

    class Stopping(DirectEngine):
        def forget(self, path: Path) -> None:
            assert not (directory / "COMMIT.json").exists()
            raise PowerCut

    with Stopping(num_threads=1) as stopping, pytest.raises(PowerCut):
        create(directory, stopping, fresh=True)
    with pytest.raises(StoreRefusedError, match="creation never finished"):
        Store.open(directory, engine=engine)
    with create(directory, engine):
        pass


def test_layouts_are_those_of_the_commit(tmp_path: Path, engine: IoEngine) -> None:
    """A COMMIT.json over another store's metadata is noticed: two runs cannot be mixed by moving files."""
    layouts: list[Sequence[StageLayout]] = []
    for name in ("one", "two"):
        with committed(tmp_path / name, engine) as store:
            layouts.append(store.layouts)
    (tmp_path / "one" / "COMMIT.json").replace(tmp_path / "two" / "COMMIT.json")
    with pytest.raises(ValueError, match=r"COMMIT\.json: store_id: expected .*zarr\.json's"):
        Store.open(tmp_path / "two", engine=engine)
    assert layouts[0] == layouts[1]
