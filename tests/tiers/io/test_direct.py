"""The direct engine in all weathers: short, interrupted, refused and failing system calls, full disks, many files."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hoist.tiers.errors import TransferError
from hoist.tiers.io import DirectEngine, IoEngine
from tests.support.buffers import (
    buffer_bytes,
    empty_buffer,
    make_file,
    num_cached_pages,
    open_descriptors,
    random_buffer,
)
from tests.support.systemcalls import FaultyDirectEngine, SystemCall
from tests.tiers.io.conformance import EngineConformance


class TestDirectConforms(EngineConformance):
    @pytest.fixture
    def engine(self) -> Iterator[IoEngine]:
        with DirectEngine() as engine:
            yield engine


class TestOneThreadAndTinyPartsConform(EngineConformance):
    @pytest.fixture
    def engine(self) -> Iterator[IoEngine]:
        with DirectEngine(num_threads=1, part_bytes=4096, max_open_files=1) as engine:
            yield engine


class TestUnknownAlignmentConforms(EngineConformance):
    """As on tmpfs, overlay or an old kernel: nothing is reported, 4096 is assumed."""

    @pytest.fixture
    def engine(self) -> Iterator[IoEngine]:
        class Untold(DirectEngine):
            def _probe_alignment(self, descriptor: int) -> tuple[int, int] | None:
                return None

        with Untold(num_threads=2) as engine:
            yield engine


def failing(code: int, *, when: Callable[[SystemCall], bool], times: int = 1_000_000) -> Callable[[SystemCall], None]:
    """Raise OSError(code) for the first ``times`` calls that ``when`` picks."""
    left = [times]

    def before(call: SystemCall) -> None:
        if left[0] > 0 and when(call):
            left[0] -= 1
            raise OSError(code, os.strerror(code))

    return before


def round_trip(engine: IoEngine, path: Path, num_bytes: int, *, skew: int = 0) -> None:
    source, back = random_buffer(num_bytes, seed=num_bytes, skew=skew), empty_buffer(num_bytes, skew=skew)
    engine.write(path, 0, source).result()
    engine.read(path, 0, back).result()
    assert torch.equal(back, source)
    assert path.read_bytes() == buffer_bytes(source)


class TestShortAndInterrupted:
    @pytest.mark.parametrize("cap_bytes", [4097, 4096, 8191, 5])
    def test_calls_that_move_little_move_all_in_the_end(self, tmp_path: Path, cap_bytes: int) -> None:
        num_bytes = 3 * 4096 + 77
        path = make_file(tmp_path / "file", num_bytes)
        seen = 0

        def interrupt_every_third(call: SystemCall) -> None:
            nonlocal seen
            seen += call.name in ("pread", "pwrite")
            if call.name in ("pread", "pwrite") and seen % 3 == 0:
                raise InterruptedError(errno.EINTR, "interrupted")

        with FaultyDirectEngine(before=interrupt_every_third, cap_bytes=cap_bytes, num_threads=1) as engine:
            round_trip(engine, path, num_bytes)
            assert len(engine.calls_of("pread", "pwrite")) > 6

    def test_a_short_direct_transfer_goes_on_aligned(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4 * 4096)
        with FaultyDirectEngine(cap_bytes=4097, num_threads=1) as engine:
            round_trip(engine, path, 4 * 4096)
            assert engine.statistics().buffered_bytes == 0
            assert all(call.direct and call.offset % 4096 == 0 for call in engine.calls_of("pread", "pwrite"))

    def test_an_interrupted_flush_is_tried_again(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4096)
        before = failing(errno.EINTR, when=lambda call: call.name == "fdatasync", times=2)
        with FaultyDirectEngine(before=before) as engine:
            engine.flush(path).result()
            assert len(engine.calls_of("fdatasync")) == 3


class TestErrors:
    @pytest.mark.parametrize(("code", "text"), [(errno.EIO, "EIO"), (errno.ENOSPC, "ENOSPC"), (errno.EDQUOT, "EDQUOT")])
    @pytest.mark.parametrize(("call_name", "operation"), [("pread", "read"), ("pwrite", "write")])
    def test_a_failed_call_is_named(
        self, tmp_path: Path, code: int, text: str, call_name: str, operation: str
    ) -> None:
        path = make_file(tmp_path / "file", 3 * 4096)
        before = failing(code, when=lambda call: call.name == call_name, times=1)
        with FaultyDirectEngine(before=before) as engine:
            request = engine.read if operation == "read" else engine.write
            with pytest.raises(
                TransferError, match=rf"^{operation} of 8192 bytes at offset 4096 of {path} failed: .* \({text}\)$"
            ) as caught:
                request(path, 4096, empty_buffer(8192)).result()
            assert caught.value.errno == code
            request(path, 4096, empty_buffer(8192)).result()
            assert engine.statistics().read_bytes + engine.statistics().written_bytes == 8192

    def test_a_failed_flush_is_named(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4096)
        before = failing(errno.EIO, when=lambda call: call.name == "fdatasync")
        with (
            FaultyDirectEngine(before=before) as engine,
            pytest.raises(TransferError, match=rf"^flush of {path} failed: .*EIO"),
        ):
            engine.flush(path).result()

    def test_a_failed_write_back_fails_the_buffered_write(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4096)
        before = failing(errno.EIO, when=lambda call: call.name == "write_back")
        with FaultyDirectEngine(before=before) as engine:
            engine.write(path, 0, empty_buffer(4096)).result()
            with pytest.raises(TransferError, match=r"write of 5 bytes at offset 1 of .*EIO"):
                engine.write(path, 1, empty_buffer(5)).result()

    def test_a_file_system_that_writes_nothing_is_an_error_not_a_loop(self, tmp_path: Path) -> None:
        class Stuck(DirectEngine):
            def _pwrite(self, descriptor: int, view: memoryview, offset: int) -> int:
                return 0

        path = make_file(tmp_path / "file", 4096)
        with Stuck() as engine, pytest.raises(TransferError, match=r"write of 4096 bytes .*EIO"):
            engine.write(path, 0, empty_buffer(4096)).result()

    def test_a_bug_in_a_call_reaches_the_future(self, tmp_path: Path) -> None:
        def before(call: SystemCall) -> None:
            if call.name == "pread":
                raise KeyError("a bug")

        path = make_file(tmp_path / "file", 4096)
        with FaultyDirectEngine(before=before) as engine:
            with pytest.raises(TransferError, match="failed: 'a bug'") as caught:
                engine.read(path, 0, empty_buffer(4096)).result()
            assert isinstance(caught.value.__cause__, KeyError)

    def test_the_future_waits_for_every_part_although_one_has_failed(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 2 * 65536)
        first_runs, second_may_end = threading.Event(), threading.Event()

        def before(call: SystemCall) -> None:
            if call.name != "pread":
                return
            if call.offset == 0:
                first_runs.wait()
                raise OSError(errno.EIO, "injected")
            first_runs.set()
            second_may_end.wait()

        with FaultyDirectEngine(before=before, num_threads=2, part_bytes=65536) as engine:
            future = engine.read(path, 0, empty_buffer(2 * 65536))
            # Of two threads one holds the second part, so a flush gets its turn when the failing part has ended.
            engine.flush(path).result()
            assert not future.done()
            second_may_end.set()
            assert isinstance(future.exception(), TransferError)

    def test_a_real_full_disk(self, tmp_path: Path) -> None:
        if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
            pytest.skip("unshare -rm is not permitted here")
        script = textwrap.dedent(
            """
            import os, sys, torch
            from pathlib import Path
            from hoist.tiers.io import DirectEngine
            from hoist.tiers.errors import TransferError
            path = Path(sys.argv[1]) / "file"
            path.touch()
            with DirectEngine() as engine:
                try:
                    engine.write(path, 0, torch.zeros(4 << 20, dtype=torch.uint8)).result()
                except TransferError as error:
                    print(error.errno, error)
            """
        )
        mount = tmp_path / "mount"
        mount.mkdir()
        command = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
        run = subprocess.run(
            ["unshare", "-rm", "sh", "-c", command, "sh", mount, sys.executable, script],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith(f"{errno.ENOSPC} write of 4194304 bytes at offset 0 of {mount}/file failed: ")

    def test_a_real_file_size_limit(self, tmp_path: Path) -> None:
        script = textwrap.dedent(
            """
            import resource, sys, torch
            from pathlib import Path
            from hoist.tiers.io import DirectEngine
            with DirectEngine() as engine:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
                error = engine.write(Path(sys.argv[1]), 4096, torch.zeros(8192, dtype=torch.uint8)).exception()
                print(error.errno)
            """
        )
        path = make_file(tmp_path / "file", 4096)
        run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
        assert int(run.stdout) == errno.EFBIG


class TestFallback:
    """P016: file systems without direct I/O."""

    REFUSALS = {  # noqa: RUF012  (read only)
        "open": lambda call: call.name == "open" and call.direct,
        "first write": lambda call: call.name == "pwrite" and call.direct,
        "first read": lambda call: call.name == "pread" and call.direct,
    }

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
    @pytest.mark.parametrize("refused", REFUSALS)
    def test_goes_through_the_page_cache_says_it_once_and_leaves_nothing_there(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str, code: int
    ) -> None:
        num_bytes = 5 * 65536 + 512
        paths = [make_file(tmp_path / f"file{index}", num_bytes) for index in range(3)]
        with (
            caplog.at_level(logging.WARNING),
            FaultyDirectEngine(before=failing(code, when=self.REFUSALS[refused]), part_bytes=65536) as engine,
        ):
            for path in paths:
                source, back = random_buffer(num_bytes, seed=1), empty_buffer(num_bytes)
                engine.write(path, 0, source).result()
                engine.read(path, 0, back).result()
                assert num_cached_pages(path) == 0
                assert torch.equal(back, source)
                assert path.read_bytes() == buffer_bytes(source)
                engine.flush(path).result()
                assert engine.mode_of(path).startswith("buffered: ")
            assert "buffered on device" in engine.describe()
            # Three writes and three reads; the first write went direct, but for its end, where only reads are refused.
            by_page_cache = 6 * num_bytes if refused != "first read" else 5 * num_bytes + 512
            assert engine.statistics().buffered_bytes == by_page_cache
        assert len(caplog.records) == 1
        assert os.strerror(code) in caplog.text

    def test_only_the_file_system_that_refuses(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        other = Path("/dev/shm")
        if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev or not os.access(other, os.W_OK):
            pytest.skip("there is no second file system in /dev/shm")
        here = make_file(tmp_path / "file", 4096)
        there = make_file(other / f"hoist-test-{os.getpid()}", 4096)
        try:
            refuses = failing(errno.EINVAL, when=lambda call: call.direct and call.path == str(there))
            with FaultyDirectEngine(before=refuses) as engine:
                round_trip(engine, there, 4096)
                round_trip(engine, here, 4096)
                assert engine.statistics().buffered_bytes == 2 * 4096
                assert engine.mode_of(here) == "direct, aligned to 4096 bytes"
                assert engine.mode_of(there).startswith("buffered: open of")
        finally:
            there.unlink()

    def test_a_file_that_the_kernel_says_has_none(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        paths = [make_file(tmp_path / f"file{index}", 8192) for index in range(2)]
        with caplog.at_level(logging.WARNING), FaultyDirectEngine(alignment=(0, 0)) as engine:
            for path in paths:
                round_trip(engine, path, 8192)
                assert engine.mode_of(path) == f"buffered: the kernel reports no direct I/O for {path}"
            assert engine.statistics().buffered_bytes == 4 * 8192
        assert len(caplog.records) == 1

    def test_buffered_io_can_be_asked_for(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = make_file(tmp_path / "file", 8192)
        with caplog.at_level(logging.WARNING), DirectEngine(direct=False) as engine:
            round_trip(engine, path, 8192)
            assert engine.statistics().buffered_bytes == 2 * 8192
            assert "direct=False" in engine.describe()
            assert engine.mode_of(path) == "buffered: direct=False was asked for"
        assert caplog.records == []


class TestAlignment:
    @pytest.mark.parametrize("reported", [512, 4096, 16384, 65536])
    def test_direct_calls_keep_what_the_kernel_reported(self, tmp_path: Path, reported: int) -> None:
        num_bytes = 5 * 65536 + 4096
        path = make_file(tmp_path / "file", num_bytes + 4096)
        source, back = random_buffer(num_bytes, seed=1), empty_buffer(num_bytes)
        with FaultyDirectEngine(alignment=(4096, reported), part_bytes=65536) as engine:
            engine.write(path, 4096, source).result()
            engine.read(path, 4096, back).result()
            assert torch.equal(back, source)
            direct = [call for call in engine.calls_of("pread", "pwrite") if call.direct]
            assert direct
            assert all(call.offset % reported == 0 and call.num_bytes % reported == 0 for call in direct)
            assert all(call.address % 4096 == 0 for call in direct)
            assert (engine.statistics().buffered_bytes == 0) == (reported <= 4096)

    def test_a_long_request_is_shared_by_threads(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4 * 65536)
        together = threading.Barrier(4)

        def before(call: SystemCall) -> None:
            if call.name == "pwrite":
                together.wait()  # passes only if four calls are under way at once

        with FaultyDirectEngine(before=before, num_threads=4, part_bytes=65536) as engine:
            engine.write(path, 0, random_buffer(4 * 65536, seed=0)).result()
            assert sorted(call.offset for call in engine.calls_of("pwrite")) == [0, 65536, 2 * 65536, 3 * 65536]


class TestResources:
    def test_idle_files_are_bounded(self, tmp_path: Path) -> None:
        paths = [make_file(tmp_path / f"file{index}", 4096) for index in range(20)]
        with DirectEngine(max_open_files=3, num_threads=2) as engine:
            for path in paths:
                round_trip(engine, path, 4096)
            assert len(open_descriptors(tmp_path)) == 3
            for path in paths:
                round_trip(engine, path, 4096)

    def test_running_out_of_descriptors_gives_back_idle_ones(self, tmp_path: Path) -> None:
        paths = [make_file(tmp_path / f"file{index}", 4096) for index in range(5)]
        before = failing(errno.EMFILE, when=lambda call: call.name == "open" and call.path == str(paths[4]), times=1)
        with FaultyDirectEngine(before=before) as engine:
            for path in paths:
                engine.read(path, 0, empty_buffer(4096)).result()
            assert open_descriptors(tmp_path) == [str(paths[4])]

    def test_a_done_request_keeps_no_buffer_alive(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4096)
        with DirectEngine(num_threads=2) as engine:
            buffer = empty_buffer(4096)
            gone = threading.Event()
            watched = weakref.ref(buffer, lambda reference: gone.set())
            engine.read(path, 0, buffer).result()
            del buffer
            gone.wait()  # an idle thread that kept it would hang here
            assert watched() is None

    def test_it_may_be_closed_from_a_callback(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4096)
        engine = DirectEngine(num_threads=2)
        closed = threading.Event()

        def close(future: object) -> None:
            engine.close()
            closed.set()

        engine.read(path, 0, empty_buffer(4096)).add_done_callback(close)
        closed.wait()
        with pytest.raises(ValueError, match="closed"):
            engine.flush(path)
        engine.close()

    def test_the_soft_limit_of_descriptors_is_raised_only_as_needed(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
            with DirectEngine(num_threads=1, max_open_files=100):
                assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400
            with DirectEngine(num_threads=1, max_open_files=300):
                assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300 * 2 + 128
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    @pytest.mark.parametrize("setting", ["num_threads", "part_bytes", "max_open_files"])
    def test_settings_are_checked(self, setting: str) -> None:
        with pytest.raises(ValueError, match=f"{setting}: got 0, must be at least 1"):
            DirectEngine(**{setting: 0})  # type: ignore[arg-type]  # one of three int settings

    def test_gpu_memory_is_refused(self, tmp_path: Path) -> None:
        with DirectEngine(num_threads=1) as engine, pytest.raises(ValueError, match="got a tensor on meta"):
            engine.read(tmp_path / "file", 0, torch.empty(4096, dtype=torch.uint8, device="meta"))


@pytest.mark.slow
def test_a_request_longer_than_one_system_call_can_move(tmp_path: Path) -> None:
    num_bytes = 2 * 2**30 + 200 * 2**20 + 4096 + 3
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, num_bytes)
    source, back = torch.arange(num_bytes // 8 + 1).view(torch.uint8)[:num_bytes], empty_buffer(num_bytes)
    try:
        with DirectEngine(part_bytes=2**33) as engine:
            engine.write(path, 0, source).result()
            engine.flush(path).result()
            engine.read(path, 0, back).result()
        assert torch.equal(back, source)
    finally:
        path.unlink()


class TestDrives:
    """Files on several file systems."""

    def test_a_slow_drive_keeps_no_thread_from_another(self, tmp_path: Path) -> None:
        """Every thread of one drive waits, and as many requests again: the other's requests are all carried out."""
        slow, fast = make_file(tmp_path / "slow", bytes(4096)), make_file(tmp_path / "fast", bytes(4096))
        go_on = threading.Event()

        def before(call: SystemCall) -> None:
            if call.name == "pread" and call.path == str(slow):
                go_on.wait()

        class TwoDrives(FaultyDirectEngine):
            def _device_of(self, path: str) -> int:
                return 1 if path == str(slow) else 2

        with TwoDrives(before=before, num_threads=2) as engine:
            held = [engine.read(slow, 0, empty_buffer(4096)) for _ in range(4)]
            for _ in range(4):
                engine.read(fast, 0, empty_buffer(4096)).result()
            assert not any(future.done() for future in held)
            assert "O_DIRECT from 2 threads for each of 2 drives, parts" in engine.describe()
            go_on.set()
            for future in held:
                future.result()

    def test_files_of_one_drive_share_its_threads(self, tmp_path: Path) -> None:
        before = threading.active_count()
        with DirectEngine(num_threads=3) as engine:
            for name in "abcd":
                engine.read(make_file(tmp_path / name, bytes(4096)), 0, empty_buffer(4096)).result()
            assert threading.active_count() == before + 3
            assert "O_DIRECT from 3 threads, parts" in engine.describe()
        assert threading.active_count() == before
