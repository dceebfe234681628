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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

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


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSpeed:
    """How long a drive takes to read so much and write so much at the same time."""

    seconds: float
    """For all the bytes asked for: what was measured, times :attr:`scale`."""
    scale: float
    """Bytes asked for over bytes moved; near 1 where all of them were."""
    measured_bytes: int
    """What was moved while it was timed."""
    direct: bool
    """Nothing went through the page cache."""


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
    path = _make_file(directory, num_requests * request_bytes)
    try:
        ring = [_aligned_buffer(request_bytes) for _ in range(min(in_flight, num_requests))]
        for buffer in ring:
            buffer.random_(0, 256, generator=torch.Generator().manual_seed(1))

        def write(index: int, buffer: torch.Tensor) -> Future[None]:
            return engine.write(path, index * request_bytes, buffer)

        def read(index: int, buffer: torch.Tensor) -> Future[None]:
            return engine.read(path, index * request_bytes, buffer)

        def read_page(index: int, buffer: torch.Tensor) -> Future[None]:
            return engine.read(path, index * IO_ALIGN_BYTES, buffer[:IO_ALIGN_BYTES])

        num_requests = _stream(num_requests, ring, write, seconds=seconds)
        engine.flush(path).result()
        started, started_cpu = time.perf_counter(), time.process_time()
        num_written = _stream(num_requests, ring, write, seconds=seconds)
        engine.flush(path).result()
        written = time.perf_counter()
        num_read = _stream(num_requests, ring, read, seconds=seconds)
        finished, cpu = time.perf_counter(), time.process_time() - started_cpu
        num_alone = _stream(-(-num_requests // 4), ring[:1], read, seconds=seconds / 4)
        alone = time.perf_counter()
        num_pages = _stream(min(_PAGES, num_requests * request_bytes // IO_ALIGN_BYTES), ring[:1], read_page,
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


def measure_mixed(
    directory: Path,
    engine: IoEngine,
    *,
    read_bytes: int,
    written_bytes: int,
    request_bytes: int = 4 * 2**20,
    in_flight: int = 4,
    most_bytes: int = 512 * 2**20,
) -> MixedSpeed:
    """Read and write at once, in two temporary files in ``directory``, as many bytes as a step does: its I/O alone.

    A drive shares its bandwidth between reads and writes, or does not, so neither direction's own bandwidth tells how
    long both take. At most ``most_bytes`` are moved, in the same proportion, and the time is scaled up. Each direction
    has ``in_flight`` requests of ``request_bytes`` (less if there is less to move) until its bytes are moved. As in a
    store after its first steps, blocks that are written hold data already, and as in a step without a commit nothing
    is flushed while it is timed. Twice what is moved is written beforehand at most. Nothing is checked. Raises as
    :func:`measure_bandwidth` does.
    """
    asked = read_bytes + written_bytes
    share = min(1.0, most_bytes / max(1, asked))
    largest = -(-int(share * max(read_bytes, written_bytes)) // IO_ALIGN_BYTES) * IO_ALIGN_BYTES
    request_bytes = min(request_bytes, max(IO_ALIGN_BYTES, largest))
    counts = [
        _num_requests(int(share * num_bytes), request_bytes, in_flight) if num_bytes else 0
        for num_bytes in (read_bytes, written_bytes)
    ]
    if not asked:
        return MixedSpeed(seconds=0.0, scale=1.0, measured_bytes=0, direct=True)
    buffered_before = engine.statistics().buffered_bytes
    paths: list[Path] = []
    try:
        rings = []
        for count in counts:
            paths.append(_make_file(directory, max(1, count) * request_bytes))
            rings.append([_aligned_buffer(request_bytes) for _ in range(min(in_flight, max(1, count)))])
            for buffer in rings[-1]:
                buffer.random_(0, 256, generator=torch.Generator().manual_seed(1))

        def write(index: int, buffer: torch.Tensor, path: Path) -> Future[None]:
            return engine.write(path, index * request_bytes, buffer)

        def read(index: int, buffer: torch.Tensor) -> Future[None]:
            return engine.read(paths[0], index * request_bytes, buffer)

        for count, ring, path in zip(counts, rings, paths, strict=True):
            _stream(count, ring, partial(write, path=path))
            engine.flush(path).result()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hoist-probe") as reader:
            started = time.perf_counter()
            reads = reader.submit(_stream, counts[0], rings[0], read)
            _stream(counts[1], rings[1], partial(write, path=paths[1]))
            reads.result()
            seconds = time.perf_counter() - started
        moved = sum(counts) * request_bytes
        return MixedSpeed(
            seconds=seconds * asked / moved,
            scale=asked / moved,
            measured_bytes=moved,
            direct=engine.statistics().buffered_bytes == buffered_before,
        )
    finally:
        for path in paths:
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
) -> Bandwidth:
    """Write, flush, read and check a temporary file of about ``num_bytes`` in ``directory``; it is always removed.

    Requests are of ``request_bytes`` (a multiple of 4096), ``in_flight`` of them at once; host memory used is that many
    buffers and one more. The engine should do nothing else meanwhile. Raises StoreRefusedError where the file cannot be
    made, TransferError where a transfer fails.
    """
    num_requests = _num_requests(num_bytes, request_bytes, in_flight)
    path = _make_file(directory, num_requests * request_bytes)
    try:
        return _measure(path, engine, num_requests, request_bytes, in_flight)
    finally:
        engine.forget(path)
        path.unlink()


def _make_file(directory: Path, file_bytes: int) -> Path:
    """An empty file with its space allocated, as the store's chunk files are."""
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


def _measure(path: Path, engine: IoEngine, num_requests: int, request_bytes: int, in_flight: int) -> Bandwidth:
    buffered_before = engine.statistics().buffered_bytes
    ring = [_aligned_buffer(request_bytes) for _ in range(min(in_flight, num_requests))]
    pages = torch.arange(request_bytes // IO_ALIGN_BYTES, dtype=torch.int64)
    expected = torch.randint(0, 256, (request_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for buffer in ring:
        buffer.copy_(expected)

    def stamp(index: int, buffer: torch.Tensor) -> None:
        buffer.view(torch.int64)[::_STAMP_STRIDE] = pages + index * len(pages)

    def write(index: int, buffer: torch.Tensor) -> Future[None]:
        stamp(index, buffer)
        return engine.write(path, index * request_bytes, buffer)

    def read(index: int, buffer: torch.Tensor) -> Future[None]:
        return engine.read(path, index * request_bytes, buffer)

    def check(index: int, buffer: torch.Tensor) -> None:
        stamp(index, expected)
        if not torch.equal(buffer, expected):
            wrong.append(index)

    wrong: list[int] = []
    started, started_cpu = time.perf_counter(), time.process_time()
    _stream(num_requests, ring, write)
    engine.flush(path).result()
    written = time.perf_counter()
    _stream(num_requests, ring, read)
    finished, cpu = time.perf_counter(), time.process_time() - started_cpu
    # Checking takes as long as reading: it has a pass of its own, on buffers that hold nothing of the answer.
    for buffer in ring:
        buffer.fill_(0xAA)
    _stream(num_requests, ring, read, check)
    total = num_requests * request_bytes
    return Bandwidth(
        read_bytes_per_second=total / (finished - written),
        write_bytes_per_second=total / (written - started),
        verified=not wrong,
        direct=engine.statistics().buffered_bytes == buffered_before,
        probed_bytes=total,
        cpu_seconds_per_byte=cpu / (2 * total),
    )


def _stream(
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


def _aligned_buffer(num_bytes: int) -> torch.Tensor:
    whole = torch.empty(num_bytes + IO_ALIGN_BYTES, dtype=torch.uint8)
    skip = -whole.data_ptr() % IO_ALIGN_BYTES
    return whole[skip : skip + num_bytes]
