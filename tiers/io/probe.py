"""How fast a directory's drive is through an engine, measured by a real write, flush, read and check.

For `hoist doctor`, benchmarks, predictions, and the dealing of chunks over several drives. Nothing is remembered here,
and no result of a run depends on these numbers.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hoist.tiers.device.base import Device
from hoist.tiers.device.here import HereDevice
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine

_PREFIX = ".hoist-probe-"
#: A temporary file that nobody has written to for so long is left over from a process that was killed.
LEFT_SECONDS = 3600.0
#: One 8-byte stamp a page makes every page of the file different.
_STAMP_STRIDE = IO_ALIGN_BYTES // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """What one measurement saw."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    """The final fdatasync included."""
    verified: bool
    """Every byte read back was the byte written."""
    direct: bool
    """Nothing went through the page cache."""
    probed_bytes: int = 0
    """What was written, and read back twice."""
    cpu_seconds_per_byte: float = 0.0
    """Processor time of the whole process for a byte, written or read; little else should run in it meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadySpeed:
    """How fast a drive is with what was written before, as the slots of a store's chunks are after the first steps."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    """Over blocks that hold data already; the final fdatasync included."""
    alone_read_bytes_per_second: float
    """With one request at a time."""
    page_read_seconds: float
    """Of a request of one page, through the engine's threads and back."""
    cpu_seconds_per_byte: float
    """Processor time of the whole process for a byte, written or read; little else should run in it meanwhile."""
    measured_bytes: int
    """What was written a first time: all of the file, or as much as there was time for."""


#: Requests of a page that :func:`measure_steady` times.
_PAGES = 32


def measure_steady(
    directory: Path, engine: IoEngine, *, num_bytes: int, request_bytes: int, in_flight: int, seconds: float = 0.4
) -> SteadySpeed:
    """Write a temporary file of about ``num_bytes`` in ``directory`` twice, and time the second time; then read it.

    The first write into blocks that are only reserved is slower than those of a run, as the file system must note each
    extent as written: two fifths on ext4. The first write, the second and the reads take ``seconds`` each at most, and
    what flushing then takes; what is beyond that is not written, nor read. Otherwise as :func:`measure_bandwidth`,
    but that nothing is checked.
    """
    num_requests = _num_requests(num_bytes, request_bytes, in_flight)
    path = make_file(directory, num_requests * request_bytes)
    try:
        ring = [aligned_buffer(request_bytes) for _ in range(min(in_flight, num_requests))]
        for buffer in ring:
            buffer.random_(0, 256, generator=torch.Generator().manual_seed(1))

        def write(index: int, buffer: torch.Tensor) -> Future[None]:
            return engine.write(path, index * request_bytes, buffer)

        def read(index: int, buffer: torch.Tensor) -> Future[None]:
            return engine.read(path, index * request_bytes, buffer)

        def read_page(index: int, buffer: torch.Tensor) -> Future[None]:
            return engine.read(path, index * IO_ALIGN_BYTES, buffer[:IO_ALIGN_BYTES])

        num_requests = stream(num_requests, ring, write, seconds=seconds)
        engine.flush(path).result()
        started, started_cpu = time.perf_counter(), time.process_time()
        num_written = stream(num_requests, ring, write, seconds=seconds)
        engine.flush(path).result()
        written = time.perf_counter()
        num_read = stream(num_requests, ring, read, seconds=seconds)
        finished, cpu = time.perf_counter(), time.process_time() - started_cpu
        num_alone = stream(-(-num_requests // 4), ring[:1], read, seconds=seconds / 4)
        alone = time.perf_counter()
        num_pages = stream(min(_PAGES, num_requests * request_bytes // IO_ALIGN_BYTES), ring[:1], read_page,
                            seconds=seconds / 4)  # fmt: skip
        return SteadySpeed(
            read_bytes_per_second=num_read * request_bytes / (finished - written),
            write_bytes_per_second=num_written * request_bytes / (written - started),
            alone_read_bytes_per_second=num_alone * request_bytes / (alone - finished),
            page_read_seconds=(time.perf_counter() - alone) / num_pages,
            cpu_seconds_per_byte=cpu / ((num_written + num_read) * request_bytes),
            measured_bytes=num_requests * request_bytes,
        )
    finally:
        engine.forget(path)
        path.unlink()


def _num_requests(num_bytes: int, request_bytes: int, in_flight: int) -> int:
    """Raises ValueError."""
    if request_bytes < 1 or request_bytes % IO_ALIGN_BYTES:
        raise ValueError(f"request_bytes: got {request_bytes}, must be a positive multiple of {IO_ALIGN_BYTES}")
    if in_flight < 1:
        raise ValueError(f"in_flight: got {in_flight}, must be at least 1")
    return max(1, -(-num_bytes // request_bytes))


def measure_bandwidth(
    directory: Path,
    engine: IoEngine,
    *,
    num_bytes: int = 256 * 2**20,
    request_bytes: int = 4 * 2**20,
    in_flight: int = 4,
    device: Device | None = None,
) -> Bandwidth:
    """Write, flush, read and check a temporary file of about ``num_bytes`` in ``directory``; it is always removed.

    Requests are of ``request_bytes`` (a multiple of 4096), ``in_flight`` of them at once; host memory used is that many
    buffers and one more. With ``device`` the buffers lie in its memory, which the engine must take then. The engine
    should do nothing else meanwhile. Raises StoreRefusedError where the file cannot be made, TransferError where a
    transfer fails.
    """
    num_requests = _num_requests(num_bytes, request_bytes, in_flight)
    path = make_file(directory, num_requests * request_bytes)
    try:
        return _measure(path, engine, num_requests, request_bytes, in_flight, device or HereDevice())
    finally:
        engine.forget(path)
        path.unlink()


def make_file(directory: Path, file_bytes: int) -> Path:
    """An empty file in ``directory`` with its space allocated, as the store's chunk files are; the caller removes it.

    Raises StoreRefusedError where that cannot be, and leaves nothing then.
    """
    _remove_left(directory)
    try:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory.absolute())
    except OSError as error:
        raise StoreRefusedError(f"{directory}: cannot make a file there: {error.strerror}") from error
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
    except OSError as error:
        Path(name).unlink()
        raise StoreRefusedError(
            f"{directory}: cannot allocate {file_bytes / 2**20:g} MiB to measure with: {error.strerror}"
        ) from error
    finally:
        os.close(descriptor)
    return Path(name)


def _remove_left(directory: Path) -> None:
    """Remove files of processes that were killed while they measured: none takes so long. Raises nothing."""
    with contextlib.suppress(OSError):
        for path in directory.glob(f"{_PREFIX}*"):
            if time.time() - path.stat().st_mtime > LEFT_SECONDS:
                path.unlink()


def _measure(
    path: Path, engine: IoEngine, num_requests: int, request_bytes: int, in_flight: int, device: Device
) -> Bandwidth:
    buffered_before = engine.statistics().buffered_bytes
    ring = [aligned_buffer(request_bytes, device) for _ in range(min(in_flight, num_requests))]
    contents = Contents(request_bytes)
    compute = device.stream("compute")
    for buffer in ring:
        compute.put(partial(contents.fill, buffer)).wait()

    def write(index: int, buffer: torch.Tensor) -> Future[None]:
        compute.put(partial(contents.stamp, index, buffer)).wait()
        return engine.write(path, index * request_bytes, buffer)

    def read(index: int, buffer: torch.Tensor) -> Future[None]:
        return engine.read(path, index * request_bytes, buffer)

    def check(index: int, buffer: torch.Tensor) -> None:
        if not contents.is_whole(index, buffer):
            wrong.append(index)

    wrong: list[int] = []
    started, started_cpu = time.perf_counter(), time.process_time()
    stream(num_requests, ring, write)
    engine.flush(path).result()
    written = time.perf_counter()
    stream(num_requests, ring, read)
    finished, cpu = time.perf_counter(), time.process_time() - started_cpu
    # Checking takes as long as reading: it has a pass of its own, on buffers that hold nothing of the answer.
    for buffer in ring:
        compute.put(partial(_spoil, buffer)).wait()
    stream(num_requests, ring, read, check)
    total = num_requests * request_bytes
    return Bandwidth(
        read_bytes_per_second=total / (finished - written),
        write_bytes_per_second=total / (written - started),
        verified=not wrong,
        direct=engine.statistics().buffered_bytes == buffered_before,
        probed_bytes=total,
        cpu_seconds_per_byte=cpu / (2 * total),
    )


class Contents:
    """What requests of ``request_bytes`` are filled with: noise, and in each page a stamp that no other page has."""

    def __init__(self, request_bytes: int) -> None:
        self._pages = torch.arange(request_bytes // IO_ALIGN_BYTES, dtype=torch.int64)
        generator = torch.Generator().manual_seed(1)
        self._expected = torch.randint(0, 256, (request_bytes,), dtype=torch.uint8, generator=generator)

    def fill(self, buffer: torch.Tensor) -> None:
        """Put the noise into ``buffer``; once is enough."""
        buffer.copy_(self._expected)

    def stamp(self, index: int, buffer: torch.Tensor) -> None:
        """Make a filled buffer that of request ``index``."""
        buffer.view(torch.int64)[::_STAMP_STRIDE] = self._pages + index * len(self._pages)

    def has_stamps(self, index: int, buffer: torch.Tensor) -> bool:
        """Whether each page carries request ``index``'s stamp: quick enough to ask between transfers that are timed."""
        stamps = buffer.view(torch.int64)[::_STAMP_STRIDE]
        return bool(torch.equal(stamps, self._pages + index * len(self._pages)))

    def is_whole(self, index: int, buffer: torch.Tensor) -> bool:
        """Whether every byte is request ``index``'s, wherever it lies. Not from several threads at once."""
        self.stamp(index, self._expected)
        return bool(torch.equal(buffer.cpu(), self._expected))


def stream(
    num_requests: int,
    ring: list[torch.Tensor],
    start: Callable[[int, torch.Tensor], Future[None]],
    use: Callable[[int, torch.Tensor], None] = lambda index, buffer: None,
    *,
    seconds: float = math.inf,
) -> int:
    """Keep the ring's buffers in flight until all requests are done. Leaves none in flight, whatever is raised.

    After ``seconds`` no more are started. Returns how many were, one at least.
    """
    flying: dict[int, Future[None]] = {}
    until = time.perf_counter() + seconds
    stop = num_requests
    try:
        for index in range(num_requests + len(ring)):
            done = index - len(ring)
            if done in flying:
                flying.pop(done).result()
                use(done, ring[done % len(ring)])
            if index < stop:
                flying[index] = start(index, ring[index % len(ring)])
                if time.perf_counter() > until:
                    stop = index + 1
            elif not flying:
                break
    finally:
        wait(flying.values())
    return stop


def _spoil(buffer: torch.Tensor) -> None:
    buffer.fill_(0xAA)


def aligned_buffer(num_bytes: int, device: Device | None = None) -> torch.Tensor:
    """uint8 on the CPU, or the device, at an address that direct I/O takes; its content is undefined."""
    whole = (device or HereDevice()).allocate(num_bytes + IO_ALIGN_BYTES, "measuring")
    skip = -whole.data_ptr() % IO_ALIGN_BYTES
    return whole[skip : skip + num_bytes]
