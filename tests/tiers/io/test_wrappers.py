"""The wrappers of tests/support are engines too, and each of them hurts where it should."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hoist.tiers.errors import TransferError
from hoist.tiers.io import DirectEngine, IoEngine
from tests.support.buffers import buffer_bytes, empty_buffer, make_file, random_buffer
from tests.support.engines import (
    POISON,
    Fail,
    FaultyEngine,
    Gate,
    Hold,
    PoisoningEngine,
    RecordedRequest,
    RecordingEngine,
)
from tests.tiers.io.conformance import EngineConformance


class TestPoisoningConforms(EngineConformance):
    @pytest.fixture
    def engine(self) -> Iterator[IoEngine]:
        with PoisoningEngine(DirectEngine(num_threads=2), seed=1) as engine:
            yield engine


class TestHarmlessRuleConforms(EngineConformance):
    @pytest.fixture
    def engine(self) -> Iterator[IoEngine]:
        opened = Gate()
        opened.open()
        with FaultyEngine(RecordingEngine(DirectEngine(num_threads=2)), lambda request: Hold(gate=opened)) as engine:
            yield engine


def test_poisoning_takes_a_write_late(tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4096)
    with PoisoningEngine(DirectEngine(num_threads=1), automatic=False) as engine:
        buffer = empty_buffer(4096).fill_(1)
        future = engine.write(path, 0, buffer)
        buffer.fill_(2)  # the caller's mistake: the future is not done
        engine.serve_all()
        future.result()
    assert path.read_bytes() == b"\x02" * 4096


def test_poisoning_shows_a_read_looked_at_early(tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4096)
    with PoisoningEngine(DirectEngine(num_threads=1), automatic=False) as engine:
        buffer = empty_buffer(4096)
        future = engine.read(path, 0, buffer)
        assert int(buffer[0]) == POISON
        buffer.fill_(2)
        engine.serve_all()
        future.result()
        assert int(buffer.sum()) == 0


def test_poisoning_can_fill_written_buffers(tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4096)
    with PoisoningEngine(DirectEngine(num_threads=1), poison_written=True) as engine:
        buffer = empty_buffer(4096).fill_(1)
        engine.write(path, 0, buffer).result()
        assert int(buffer[0]) == POISON
    assert path.read_bytes() == b"\x01" * 4096


def test_poisoning_completes_in_another_order(tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 16 * 4096)
    order: list[int] = []
    with PoisoningEngine(DirectEngine(num_threads=1), seed=3, automatic=False) as engine:
        for page in range(16):
            future = engine.read(path, page * 4096, empty_buffer(4096))
            future.add_done_callback(lambda done, page=page: order.append(page))  # type: ignore[misc]  # bound early
        engine.serve_all()
    assert sorted(order) == list(range(16))
    assert order != list(range(16))


def test_recording_tells_aligned_from_unaligned(tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 5 * 4096)
    with RecordingEngine(DirectEngine(num_threads=1)) as engine:
        engine.write(path, 4096, empty_buffer(4096)).result()
        engine.flush(path).result()
        engine.read(path, 4096, empty_buffer(4096)).result()
        assert engine.unaligned == []
        engine.read(path, 512, empty_buffer(4096)).result()
        engine.read(path, 0, empty_buffer(512)).result()
        engine.read(path, 0, empty_buffer(4096, skew=512)).result()
        seen = [(request.offset, request.num_bytes) for request in engine.unaligned]
        assert seen == [(512, 4096), (0, 512), (0, 4096)]
        assert [request.operation for request in engine.requests] == ["write", "flush", "read", "read", "read", "read"]


def test_a_failing_write_may_have_written_a_part(tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 8192)
    source = random_buffer(8192, seed=0)

    def rule(request: RecordedRequest) -> Fail | None:
        return Fail(code=errno.ENOSPC, after_bytes=4096) if request.operation == "write" else None

    with FaultyEngine(DirectEngine(num_threads=1), rule) as engine:
        with pytest.raises(TransferError, match=r"write of 8192 bytes at offset 0 of .*ENOSPC") as caught:
            engine.write(path, 0, source).result()
        assert caught.value.errno == errno.ENOSPC
        engine.flush(path).result()
    assert path.read_bytes() == buffer_bytes(source[:4096]) + bytes(4096)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_gate_forces_an_order(tmp_path: Path, when: str) -> None:
    path = make_file(tmp_path / "file", b"\x01" * 4096)
    gate = Gate()

    def rule(request: RecordedRequest) -> Hold | None:
        if request.operation != "write":
            return None
        return Hold(gate=gate, when="before" if when == "before" else "after")

    with FaultyEngine(DirectEngine(num_threads=1), rule) as engine:
        write = engine.write(path, 0, empty_buffer(4096).fill_(2))
        gate.wait_for(1)
        back = empty_buffer(4096)
        engine.read(path, 0, back).result()
        assert not write.done()
        assert torch.all(back == (1 if when == "before" else 2))
        gate.open()
        write.result()
    assert path.read_bytes() == b"\x02" * 4096
