"""The ledger of a store's writes: it says what an engine really did, drive by drive, and outlives what may happen."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hoist.tiers.io.base import IoEngine
from hoist.tiers.redeal import change_drives
from hoist.tiers.snapshots import restore, take
from hoist.tiers.store import Store
from hoist.tiers.wear import WearLedger, WearRecord, read_wear
from tests.support.drives import directories, speeds, told
from tests.support.engines import WrapperEngine
from tests.support.processes import run_in_process
from tests.support.stores import commit, create, direct_engine, fill, write_chunk

#: What a few commits' small files take together, the ledger's own included.
SMALL_BYTES = 48_000


class TruthEngine(WrapperEngine):
    """Adds up what is moved, by the directory that a file really is in, links followed."""

    name = "truth"

    def __init__(self, inner: IoEngine, places: list[Path]) -> None:
        super().__init__(inner)
        self._places = [os.path.realpath(place) for place in places]
        self.written: Counter[int] = Counter()
        self.read_: Counter[int] = Counter()

    def _place(self, path: Path) -> int:
        real = os.path.realpath(path)
        return next((n for n, place in enumerate(self._places) if real.startswith(f"{place}/")), -1)

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        self.read_[self._place(path)] += buffer.nbytes
        return super().read(path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        self.written[self._place(path)] += buffer.nbytes
        return super().write(path, offset, buffer)


def train(store: Store, engine: IoEngine, seed: int, step: int) -> None:
    """Write every chunk as a trainer would, and commit."""
    fill(store, store.counted(engine), seed)
    commit(store, step)


def wear(directory: Path) -> WearRecord:
    """What the file says."""
    found = read_wear(directory)
    assert found is not None
    return found


def assert_true(found: WearRecord, truth: TruthEngine) -> None:
    """The further drives have what was moved there to the byte, the store's own its small files besides."""
    for number, each in enumerate(found.directories):
        extra = each.written_bytes - truth.written[number]
        assert 0 < extra < SMALL_BYTES if number == 0 else extra == 0
        assert each.read_bytes == truth.read_[number]
    assert found.written_bytes == sum(each.written_bytes for each in found.directories)


@pytest.mark.parametrize("num_drives", [1, 3])
def test_it_counts_what_is_moved_on_every_drive(tmp_path: Path, engine: IoEngine, num_drives: int) -> None:
    places = directories(tmp_path, num_drives)
    truth = TruthEngine(engine, places)
    with create(places[0], truth, drives=told(places)) as store:
        train(store, truth, 1, 0)
        train(store, truth, 2, 1)
    with Store.open(places[0], engine=truth, check="crc") as store:
        train(store, truth, 3, 2)
        found = store.wear
        assert found is not None
        assert found.written_bytes <= wear(places[0]).written_bytes
    assert all(truth.written[number] and truth.read_[number] for number in range(num_drives))
    assert truth.written[-1] == truth.read_[-1] == 0
    assert_true(wear(places[0]), truth)
    assert [each.directory for each in wear(places[0]).directories] == list(map(str, places))


def test_readers_and_other_files_do_not_count(tmp_path: Path, engine: IoEngine) -> None:
    with create(tmp_path / "store", engine) as store:
        train(store, engine, 1, 0)
        before = store.wear.record() if store.wear else None
        other = tmp_path / "store-other"
        other.write_bytes(bytes(4096))
        store.counted(engine).read(other, 0, torch.empty(4096, dtype=torch.uint8)).result()
        assert store.wear is not None
        assert store.wear.record() == before
    content = (tmp_path / "store" / "wear.json").read_bytes()
    with Store.open(tmp_path / "store", engine=engine, writable=False, check="crc") as store:
        assert store.wear is None
        assert store.counted(engine) is engine
    with Store.open(tmp_path / "store", engine=engine):
        pass
    assert (tmp_path / "store" / "wear.json").read_bytes() == content


def test_a_fresh_start_and_a_moved_store_keep_what_was_counted(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 2)
    truth = TruthEngine(engine, places)
    with create(places[0], truth, drives=told(places)) as store:
        train(store, truth, 1, 0)
        since = wear(places[0]).since
    with create(places[0], truth, drives=told(places), fresh=True) as store:
        train(store, truth, 1, 0)
        store_id = store.store_id
    assert_true(wear(places[0]), truth)
    assert wear(places[0]).since == since
    assert wear(places[0]).store_id == store_id
    moved = tmp_path / "moved"
    places[0].rename(moved)
    before = wear(moved)
    with Store.open(moved, engine=engine) as store:
        train(store, engine, 2, 1)
    after = wear(moved)
    assert [each.directory for each in after.directories] == [str(moved), str(places[1])]
    assert all(
        new.written_bytes > old.written_bytes for new, old in zip(after.directories, before.directories, strict=True)
    )


def test_moves_between_drives_count_and_one_that_left_stays_known(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 3)
    truth = TruthEngine(engine, places)
    with create(places[0], truth, drives=told(places[:2])) as store:
        train(store, truth, 1, 0)
        change_drives(store, truth, add=[places[2]], measure=lambda found, *_: speeds(found))
        moved = dict(truth.written)
        assert moved[2] > 0
        assert_true(store.wear.record() if store.wear else WearRecord(), truth)
        change_drives(store, truth, remove=[places[1]])
    found = wear(places[0])
    by_directory = {each.directory: each for each in found.directories}
    assert {str(place): by_directory[str(place)].in_use for place in places} == {
        str(places[0]): True, str(places[1]): False, str(places[2]): True,
    }  # fmt: skip
    for number in (1, 2):
        assert by_directory[str(places[number])].written_bytes == truth.written[number]
        assert by_directory[str(places[number])].read_bytes == truth.read_[number]


def test_what_measuring_writes_counts(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 2)
    with create(places[0], engine, drives=[replace(one, probed_bytes=4096) for one in told(places)]) as store:
        assert store.wear is not None
        probed = store.wear.record().directories
    assert [each.read_bytes for each in probed] == [8192, 8192]
    assert probed[0].written_bytes > probed[1].written_bytes == 4096


@pytest.mark.parametrize("num_drives", [1, 2])
def test_snapshots_and_restores_count_what_they_copy(tmp_path: Path, engine: IoEngine, num_drives: int) -> None:
    places = directories(tmp_path, num_drives)
    truth = TruthEngine(engine, places)
    with create(places[0], truth, drives=told(places)) as store:
        train(store, truth, 1, 0)
        before = Counter(truth.written)
        take(store, "one", engine=truth)
        copied = truth.written - before
        assert bool(copied) == (num_drives > 1)  # what lies on another drive cannot be linked
        train(store, truth, 2, 1)
        restore(store, "one", engine=truth)
    assert_true(wear(places[0]), truth)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format_version":2}', b'{"format_version":1}', b"\xff\xfe", b'{"format_version":1,'
        b'"store_id":"","since":1,"updated":1,"directories":[{"written_bytes":-1}]}', b"[" * 100_000,
        b'{"format_version":1,"store_id":"","since":1,"updated":1,"directories":[{"tbw_bytes":0}]}',
        b'{"format_version":1,"store_id":"","since":1,"updated":1,"directories":[{"written_bytes":1%s}]}'
        % (b"0" * 400)],
    ids=lambda content: content[-24:].decode(errors="replace"),
)  # fmt: skip
def test_a_torn_file_refuses_nothing_and_is_told_once(
    tmp_path: Path, engine: IoEngine, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "store"
    with create(directory, engine) as store:
        train(store, engine, 1, 0)
    (directory / "wear.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"wear\.json: is torn or no count of hoist's"):
        read_wear(directory)
    with caplog.at_level(logging.WARNING), Store.open(directory, engine=engine) as store:
        assert store.wear is not None
        assert store.wear.began_anew
        write_chunk(store, store.counted(engine), 1, 0, seed=2)
        commit(store, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "begins again from 0" in caplog.text
    assert wear(directory).written_bytes > 0


def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, engine: IoEngine, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "store"
    with create(directory, engine) as store:
        (directory / "wear.json.tmp").mkdir()
        train(store, engine, 1, 0)
        train(store, engine, 2, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{directory}/wear.json: what is written to the drive cannot be kept: Is a directory"
    ]


def test_a_creation_that_fails_leaves_no_file_but_keeps_an_older_one(tmp_path: Path, engine: IoEngine) -> None:
    def stop(done: int, total: int) -> None:
        raise InterruptedError

    directory = tmp_path / "store"
    with pytest.raises(InterruptedError):
        create(directory, engine, progress=stop)
    assert not directory.exists()
    with create(directory, engine) as store:
        train(store, engine, 1, 0)
    before = wear(directory).written_bytes
    with pytest.raises(InterruptedError):
        create(directory, engine, fresh=True, progress=stop)
    assert before <= wear(directory).written_bytes
    shutil.rmtree(directory)
    store = create(directory, engine)
    store.discard()
    assert not directory.exists()


def test_it_is_written_as_counts_come_in(tmp_path: Path) -> None:
    ledger = WearLedger(tmp_path, store_id="a", drives={"1": tmp_path}, save_seconds=0.0)
    for number in range(1, 4):
        ledger.add(written_bytes=1000)
        assert 1000 * number <= wear(tmp_path).written_bytes == ledger.written_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["wear.json"]
    rare = WearLedger(tmp_path, store_id="a", drives={"1": tmp_path}, save_seconds=1e9)
    rare.add(written_bytes=1_000_000)
    assert wear(tmp_path).written_bytes < 1_000_000 < rare.written_bytes
    rare.save()
    assert wear(tmp_path).written_bytes == rare.written_bytes


def test_threads_lose_no_counts(tmp_path: Path) -> None:
    ledger = WearLedger(tmp_path, store_id="a", drives={"1": tmp_path}, save_seconds=0.0)
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait()
        for _ in range(200):
            ledger.note(str(tmp_path / "file"), read_bytes=7)

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(work) for _ in range(4)]:
            job.result()
    ledger.save()
    assert wear(tmp_path).read_bytes == 4 * 200 * 7


def _killed(directory: Path) -> None:
    with direct_engine() as engine, create(directory, engine) as store:
        train(store, engine, 1, 0)
        fill(store, store.counted(engine), 2)
        assert store.wear is not None
        store.wear.save()  # what happens about once a second
        directory.with_name("counted").write_text(str(store.wear.written_bytes))
        fill(store, store.counted(engine), 3)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_loses_what_came_in_since_the_last_time(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    pid = os.fork()
    if not pid:
        try:
            _killed(directory)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    before = wear(directory).written_bytes
    assert before == int((tmp_path / "counted").read_text())
    truth = TruthEngine(engine, [directory])
    with Store.open(directory, engine=truth) as store:
        train(store, truth, 2, 1)
    assert 0 < wear(directory).written_bytes - before - truth.written[0] < SMALL_BYTES


def _kernel_bytes() -> int:
    """What this process has written to drives, as the kernel counts it."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])


#: Steps after which it is no use to wait for one that no writing back has disturbed.
MOST_STEPS = 200


def _train_and_compare(directory: Path) -> list[tuple[int, int, int]]:
    """Of each step: bytes through the engine, what the ledger counts, and what the kernel does.

    Ends with a step whose difference is the small files' pages.
    """
    found: list[tuple[int, int, int]] = []
    with direct_engine() as engine:
        truth = TruthEngine(engine, [directory])
        with create(directory, truth) as store:
            assert store.wear is not None
            train(store, truth, 1, 0)
            for step in range(1, MOST_STEPS):
                before = truth.written[0], store.wear.written_bytes, _kernel_bytes()
                train(store, truth, 1 + step, step)
                after = truth.written[0], store.wear.written_bytes, _kernel_bytes()
                direct, counted, kernel = (late - early for late, early in zip(after, before, strict=True))
                found.append((direct, counted, kernel))
                if kernel == direct + SMALL_FILES * PAGE_BYTES:
                    break
    return found


#: A commit's small files: checksums, COMMIT.json and wear.json, each of them less than a page here.
SMALL_FILES, PAGE_BYTES = 3, 4096


def test_the_kernel_counts_the_same_but_for_whole_pages_and_the_file_systems_own(tmp_path: Path) -> None:
    """The kernel counts a page when it becomes dirty: of a small file a whole one, however short it is.

    So it does with blocks of the file system itself (inodes, directories, bitmaps), as many as this process is the
    first to change since they were last written back: none in a step during which nothing is written back, and
    otherwise whole ones, up to several hundred KB a step on a busy machine. A step without any has to come; then
    nothing is left to explain.
    """
    probe = tmp_path / "probe"
    before = _kernel_bytes()
    probe.write_bytes(bytes(65536))
    if _kernel_bytes() == before:
        pytest.skip("this file system writes nothing to a drive")
    code, found = run_in_process(_train_and_compare, tmp_path / "store")
    assert code == 0
    for direct, counted, kernel in found:
        assert 0 < counted - direct < SMALL_FILES * PAGE_BYTES
        assert (kernel - direct) % PAGE_BYTES == 0
        assert kernel > direct
    direct, _, kernel = found[-1]
    assert kernel - direct == SMALL_FILES * PAGE_BYTES
