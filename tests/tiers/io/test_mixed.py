"""Reads and writes at once, measured: what is moved, when it is timed, and that nothing is left."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hoist.tiers.errors import TransferError
from hoist.tiers.io import DirectEngine
from hoist.tiers.io.mixed import measure_mixed
from tests.support.engines import Fail, FaultyEngine, RecordedRequest, RecordingEngine


@pytest.mark.parametrize(
    ("read_bytes", "written_bytes", "num_reads", "num_writes", "scale"),
    [
        (8 * 65536, 4 * 65536, 8, 4, 1.0),
        (0, 3 * 65536, 0, 3, 1.0),
        (5 * 65536, 0, 5, 0, 1.0),
        (64 * 65536, 32 * 65536, 16, 8, 4.0),  # more than may be moved: the same proportion
        (65536 + 1, 1, 2, 1, (65536 + 2) / (3 * 65536)),
    ],
)
def test_reads_and_writes_at_once_move_a_steps_own_mix(
    tmp_path: Path, read_bytes: int, written_bytes: int, num_reads: int, num_writes: int, scale: float
) -> None:
    with RecordingEngine(DirectEngine(num_threads=2)) as engine:
        seen = measure_mixed(
            tmp_path, engine, read_bytes=read_bytes, written_bytes=written_bytes, request_bytes=65536, in_flight=3,
            most_bytes=24 * 65536,
        )  # fmt: skip
        done = [(request.operation, request.num_bytes) for request in engine.requests]
        assert engine.unaligned == []
    timed = done[len(done) - num_reads - num_writes :]  # after both files were written and flushed
    assert sorted(timed) == [("read", 65536)] * num_reads + [("write", 65536)] * num_writes
    before = done[: len(done) - len(timed)]
    assert before == [("write", 65536)] * num_reads + [("flush", 0)] + [("write", 65536)] * num_writes + [("flush", 0)]
    assert seen.measured_bytes == (num_reads + num_writes) * 65536
    assert seen.scale == pytest.approx(scale)
    assert seen.seconds > 0
    assert seen.direct
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_moves_nothing_takes_no_io(tmp_path: Path) -> None:
    with RecordingEngine(DirectEngine(num_threads=1)) as engine:
        assert measure_mixed(tmp_path, engine, read_bytes=0, written_bytes=0).seconds == 0.0
        assert engine.requests == []


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_mixed_measurement_that_fails_leaves_no_file(tmp_path: Path, operation: str) -> None:
    """The last request of its kind fails; what is in flight has ended when the error is raised."""
    left = {"read": 4, "write": 4 + 4 + 4}

    def fail(request: RecordedRequest) -> Fail | None:
        if request.operation != operation:
            return None
        left[operation] -= 1
        return None if left[operation] else Fail(code=errno.EIO)

    with FaultyEngine(DirectEngine(num_threads=2), fail) as engine, pytest.raises(TransferError):
        measure_mixed(tmp_path, engine, read_bytes=4 * 65536, written_bytes=4 * 65536, request_bytes=65536)
    assert list(tmp_path.iterdir()) == []
