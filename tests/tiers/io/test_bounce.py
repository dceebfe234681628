"""Device memory through a ring of host buffers: conformance of either memory, failures, more than the ring holds."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from hoist.tiers.device.base import Device
from hoist.tiers.device.here import HereDevice
from hoist.tiers.errors import DeviceError, TransferError
from hoist.tiers.io import BounceEngine, DirectEngine, IoEngine, for_device, needs_ring
from hoist.tiers.io.alignment import cut_at_pages
from hoist.tiers.io.counted import CountedEngine
from tests.support.buffers import PAGE_BYTES as PAGE
from tests.support.buffers import DeviceMemory, Memory, buffer_bytes, empty_buffer, make_file
from tests.support.engines import Fail, FaultyEngine, Gate, Hold, RecordedRequest, RecordingEngine, WrapperEngine
from tests.support.late_device import LateDevice
from tests.tiers.io.conformance import EngineConformance


@pytest.fixture
def device() -> Iterator[LateDevice]:
    device = LateDevice(seed=3)
    yield device
    device.close()


class _OfHostsOnly(WrapperEngine):
    """Fails the test where device memory gets as far as the engine inside."""

    def __init__(self, inner: IoEngine, device: Device) -> None:
        super().__init__(inner)
        self.name = inner.name
        self._device = device

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        assert not self._device.owns(buffer)
        return super().read(path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        assert not self._device.owns(buffer)
        return super().write(path, offset, buffer)


def bounce(inner: IoEngine, device: Device, *, num_slots: int = 3, part_bytes: int = 2 * PAGE) -> BounceEngine:
    ring = empty_buffer(num_slots * part_bytes)
    return BounceEngine(inner, device=device, ring=ring, part_bytes=part_bytes, closes_inner=True)


class TestDeviceMemoryConforms(EngineConformance):
    @pytest.fixture
    def memory(self, device: Device) -> Memory:
        return DeviceMemory(device)

    @pytest.fixture
    def engine(self, device: Device) -> Iterator[IoEngine]:
        with bounce(_OfHostsOnly(DirectEngine(num_threads=2), device), device) as engine:
            yield engine


class TestHostMemoryConforms(EngineConformance):
    @pytest.fixture
    def engine(self, device: Device) -> Iterator[IoEngine]:
        with bounce(DirectEngine(num_threads=2), device) as engine:
            yield engine


@pytest.mark.parametrize("num_slots", [1, 4])
def test_much_more_than_the_ring_both_ways_at_once(device: LateDevice, tmp_path: Path, num_slots: int) -> None:
    memory = DeviceMemory(device)
    sizes = [40 * PAGE + 7, PAGE, 0, 9 * PAGE, 3]
    sources = [memory.random(num_bytes, seed=num_bytes) for num_bytes in sizes]
    old = [make_file(tmp_path / f"old{index}", buffer_bytes(source)) for index, source in enumerate(sources)]
    new = [make_file(tmp_path / f"new{index}", num_bytes) for index, num_bytes in enumerate(sizes)]
    backs = [memory.empty(num_bytes) for num_bytes in sizes]
    inner = RecordingEngine(DirectEngine(num_threads=2))
    with bounce(inner, device, num_slots=num_slots) as engine:
        futures = []
        for index in range(len(sizes)):
            futures.append(engine.write(new[index], 0, sources[index]))
            futures.append(engine.read(old[index], 0, backs[index]))
        for future in futures:
            future.result()
        seen = engine.statistics()
    assert all(torch.equal(back, source) for back, source in zip(backs, sources, strict=True))
    assert [path.read_bytes() for path in new] == [buffer_bytes(source) for source in sources]
    assert (seen.reads, seen.writes) == (len(sizes), len(sizes))
    assert seen.read_bytes == seen.written_bytes == sum(sizes)
    assert max(request.num_bytes for request in inner.requests) == 2 * PAGE


def test_what_is_passed_on_waits_for_no_slot(device: LateDevice, tmp_path: Path) -> None:
    gate = Gate()
    path = make_file(tmp_path / "file", b"\x07" * 2 * PAGE)

    def hold_slots(request: RecordedRequest) -> Hold | None:
        return Hold(gate=gate) if request.num_bytes == PAGE else None

    with bounce(FaultyEngine(DirectEngine(num_threads=1), hold_slots), device, num_slots=1, part_bytes=PAGE) as engine:
        held = [engine.read(path, 0, DeviceMemory(device).empty(2 * PAGE)) for _ in range(3)]
        gate.wait_for(1)
        buffer = empty_buffer(2 * PAGE)
        engine.read(path, 0, buffer).result()
        assert int(buffer[-1]) == 7
        assert not any(future.done() for future in held)
        gate.open()
        assert [future.exception() for future in held] == [None] * 3


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_part_that_fails_ends_its_request_alone(device: LateDevice, tmp_path: Path, operation: str) -> None:
    def fail_in_the_middle(request: RecordedRequest) -> Fail | None:
        return Fail() if request.offset == 2 * PAGE else None

    memory = DeviceMemory(device)
    path = make_file(tmp_path / "file", 8 * PAGE)
    inner = RecordingEngine(FaultyEngine(DirectEngine(num_threads=1), fail_in_the_middle))
    with bounce(inner, device, num_slots=1, part_bytes=PAGE) as engine:
        call = engine.read if operation == "read" else engine.write
        failed, other = call(path, 0, memory.empty(8 * PAGE)), call(path, 4 * PAGE, memory.empty(2 * PAGE))
        expected = rf"{operation} of {PAGE} bytes at offset {2 * PAGE} of .*EIO"
        with pytest.raises(TransferError, match=expected) as caught:
            failed.result()
        assert caught.value.errno == errno.EIO
        other.result()
    assert [request.offset // PAGE for request in inner.requests] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_lost_device_is_a_transfer_that_failed(device: LateDevice, tmp_path: Path, operation: str) -> None:
    def lose() -> None:
        raise DeviceError("it was lost")

    with pytest.raises(DeviceError):
        device.stream("compute").put(lose).wait()
    path = make_file(tmp_path / "file", b"\x01" * 2 * PAGE)
    with bounce(DirectEngine(num_threads=1), device) as engine:
        buffer = DeviceMemory(device).empty(2 * PAGE)
        call = engine.read if operation == "read" else engine.write
        expected = rf"^{operation} of {2 * PAGE} bytes at offset 0 of {path} failed: late device.*it was lost"
        with pytest.raises(TransferError, match=expected) as caught:
            call(path, 0, buffer).result()
        assert isinstance(caught.value.__cause__, DeviceError)
    assert path.read_bytes() == b"\x01" * 2 * PAGE


def test_a_ring_that_is_none_is_a_bug_at_once(device: LateDevice) -> None:
    with DirectEngine() as inner:
        for ring, part_bytes in (
            (empty_buffer(PAGE), 100),
            (empty_buffer(0), PAGE),
            (empty_buffer(3 * PAGE), 2 * PAGE),
            (empty_buffer(PAGE, skew=8), PAGE),
            (empty_buffer(PAGE).view(torch.int64), PAGE),
        ):
            with pytest.raises(ValueError, match=r"^(ring|part_bytes): got"):
                BounceEngine(inner, device=device, ring=ring, part_bytes=part_bytes)


def test_it_is_made_where_it_is_needed_and_leaves_the_engine_inside_open(device: LateDevice, tmp_path: Path) -> None:
    class Takes(WrapperEngine):
        def __init__(self, inner: IoEngine) -> None:
            super().__init__(inner)
            self.takes_device_memory = True

    class Ledger:
        def note(self, path: str, *, written_bytes: int = 0, read_bytes: int = 0) -> None:
            pass

    ring = empty_buffer(PAGE)
    path = make_file(tmp_path / "file", PAGE)
    with DirectEngine(num_threads=1) as inner:
        for engine, other in ((inner, HereDevice()), (CountedEngine(Takes(inner), Ledger()), device)):
            assert not needs_ring(engine, other)
            assert for_device(engine, other, ring=ring, part_bytes=PAGE) is engine
        made = for_device(CountedEngine(inner, Ledger()), device, ring=ring, part_bytes=PAGE)
        assert isinstance(made, BounceEngine)
        made.close()
        with pytest.raises(ValueError, match="closed"):
            made.read(path, 0, ring)
        with pytest.raises(ValueError, match="closed"):
            made.flush(path)
        inner.flush(path).result()


@pytest.mark.parametrize(
    ("offset", "num_bytes", "cuts"),
    [
        (0, 0, [(0, 0)]),
        (0, 8192, [(0, 8192)]),
        (0, 8193, [(0, 8192), (8192, 1)]),
        (4097, 8191, [(0, 8191)]),
        (4097, 20_000, [(0, 8191), (8191, 8192), (16_383, 3617)]),
    ],
)
def test_cuts_fit_slots_that_begin_where_a_page_does(offset: int, num_bytes: int, cuts: list[tuple[int, int]]) -> None:
    assert cut_at_pages(offset, num_bytes, 8192) == cuts
