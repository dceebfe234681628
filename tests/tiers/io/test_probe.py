"""The bandwidth measurement: real transfers, a file that is always removed, and a check that can fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hoist.tiers.errors import StoreRefusedError, TransferError
from hoist.tiers.io import Bandwidth, DirectEngine, IoEngine, measure_bandwidth
from hoist.tiers.io.probe import measure_steady
from tests.support.engines import Fail, FaultyEngine, PoisoningEngine, RecordedRequest, RecordingEngine


def measure(directory: Path, engine: IoEngine, num_bytes: int = 2**20) -> Bandwidth:
    return measure_bandwidth(directory, engine, num_bytes=num_bytes, request_bytes=65536, in_flight=3)


def test_it_measures_checks_and_leaves_nothing(tmp_path: Path) -> None:
    with RecordingEngine(DirectEngine(num_threads=2)) as engine:
        seen = measure(tmp_path, engine)
        assert engine.unaligned == []
        assert engine.statistics().flushes == 1
        assert {request.num_bytes for request in engine.requests if request.operation != "flush"} == {65536}
    assert seen.read_bytes_per_second > 0
    assert seen.write_bytes_per_second > 0
    assert seen.verified
    assert seen.direct
    assert list(tmp_path.iterdir()) == []


def test_it_says_where_the_page_cache_was_used(tmp_path: Path) -> None:
    with DirectEngine(num_threads=2, direct=False) as engine:
        seen = measure(tmp_path, engine)
    assert seen.verified
    assert not seen.direct


def test_it_does_not_reuse_a_buffer_too_early(tmp_path: Path) -> None:
    with PoisoningEngine(DirectEngine(num_threads=2), poison_written=False) as engine:
        assert measure(tmp_path, engine).verified


def test_few_bytes_are_one_request(tmp_path: Path) -> None:
    with RecordingEngine(DirectEngine(num_threads=1)) as engine:
        assert measure(tmp_path, engine, num_bytes=1).verified
        assert [request.operation for request in engine.requests] == ["write", "flush", "read", "read"]


def test_one_wrong_byte_is_seen(tmp_path: Path) -> None:
    class OneBitFlips(DirectEngine):
        def _pread(self, descriptor: int, view: memoryview, offset: int) -> int:
            moved = super()._pread(descriptor, view, offset)
            if offset == 5 * 65536:
                view[4095] ^= 1
            return moved

    with OneBitFlips(num_threads=2) as engine:
        assert not measure(tmp_path, engine).verified


def test_swapped_pages_are_seen(tmp_path: Path) -> None:
    class Misplaces(DirectEngine):
        def _pwrite(self, descriptor: int, view: memoryview, offset: int) -> int:
            return super()._pwrite(descriptor, view, 65536 if offset == 2 * 65536 else offset)

    with Misplaces(num_threads=1) as engine:
        assert not measure(tmp_path, engine).verified


@pytest.mark.parametrize("operation", ["write", "flush", "read"])
def test_the_file_is_removed_when_a_transfer_fails(tmp_path: Path, operation: str) -> None:
    def rule(request: RecordedRequest) -> Fail | None:
        return Fail(code=errno.EIO) if request.operation == operation and request.offset in (0, 5 * 65536) else None

    with FaultyEngine(DirectEngine(num_threads=1), rule) as engine:
        with pytest.raises(TransferError, match=f"{operation} of .*injected EIO"):
            measure(tmp_path, engine)
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with DirectEngine(num_threads=1) as engine:
        with pytest.raises(StoreRefusedError, match="missing: cannot make a file there: No such file"):
            measure(tmp_path / "missing", engine)
        with pytest.raises(StoreRefusedError, match="cannot allocate"):
            measure(tmp_path, engine, num_bytes=2**60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"request_bytes": 1000}, "request_bytes: got 1000, must be a positive multiple"),
        ({"in_flight": 0}, "in_flight: got 0"),
    ],
)
def test_settings_are_checked(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    with DirectEngine(num_threads=1) as engine, pytest.raises(ValueError, match=message):
        measure_bandwidth(tmp_path, engine, **setting)


@pytest.mark.parametrize(("seconds", "num_requests"), [(60.0, 16), (0.0, 1)])
def test_steady_writes_go_where_data_is_already_and_a_slow_drive_gets_less(
    tmp_path: Path, seconds: float, num_requests: int
) -> None:
    """Without any time, one request of each kind."""
    with RecordingEngine(DirectEngine(num_threads=2)) as engine:
        seen = measure_steady(
            tmp_path, engine, num_bytes=2**20, request_bytes=65536, in_flight=3, seconds=seconds
        )
        done = [(request.operation, request.num_bytes) for request in engine.requests]
    assert seen.measured_bytes == num_requests * 65536
    assert done[: 2 * num_requests + 2] == 2 * ([("write", 65536)] * num_requests + [("flush", 0)])
    whole = -(-num_requests // 4) + num_requests
    pages = 1 if not seconds else 32
    assert done[2 * num_requests + 2 :] == [("read", 65536)] * whole + [("read", 4096)] * pages
    assert seen.page_read_seconds > 0
    assert min(seen.read_bytes_per_second, seen.write_bytes_per_second, seen.alone_read_bytes_per_second) > 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_another_one_measures_with_is_not(tmp_path: Path) -> None:
    left, used = tmp_path / ".hoist-probe-left", tmp_path / ".hoist-probe-used"
    for path in (left, used):
        path.write_bytes(b"x" * 4096)
    os.utime(left, (1.0, 1.0))
    with DirectEngine(num_threads=2) as engine:
        measure(tmp_path, engine)
    assert list(tmp_path.iterdir()) == [used]
