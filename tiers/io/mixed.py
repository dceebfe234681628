"""How long a drive takes for reads and writes at once, in the proportion in which a training step makes them.

For benchmarks: the least that a step's I/O can take. What a drive does in one direction at a time is `probe.py`'s.
"""

from __future__ import annotations

import resource
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine
from hoist.tiers.io.probe import aligned_buffer, make_file, stream


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
    """Nothing went through the page cache, and the kernel counted every byte as a drive's: files in memory have none.
    """


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
    is flushed while it is timed. As much as is moved is written beforehand. Nothing is checked. The engine should do
    nothing else meanwhile. Raises StoreRefusedError where a file cannot be made, TransferError where a transfer fails;
    the files are always removed.
    """
    asked = read_bytes + written_bytes
    share = min(1.0, most_bytes / max(1, asked))
    largest = -(-int(share * max(read_bytes, written_bytes)) // IO_ALIGN_BYTES) * IO_ALIGN_BYTES
    request_bytes = min(request_bytes, max(IO_ALIGN_BYTES, largest))
    counts = [
        max(1, -(-int(share * num_bytes) // request_bytes)) if num_bytes else 0
        for num_bytes in (read_bytes, written_bytes)
    ]
    if not asked:
        return MixedSpeed(seconds=0.0, scale=1.0, measured_bytes=0, direct=True)
    buffered_before = engine.statistics().buffered_bytes
    paths: list[Path] = []
    try:
        rings = []
        for count in counts:
            paths.append(make_file(directory, max(1, count) * request_bytes))
            rings.append([aligned_buffer(request_bytes) for _ in range(min(in_flight, max(1, count)))])
            for buffer in rings[-1]:
                buffer.random_(0, 256, generator=torch.Generator().manual_seed(1))

        def write(index: int, buffer: torch.Tensor, path: Path) -> Future[None]:
            return engine.write(path, index * request_bytes, buffer)

        def read(index: int, buffer: torch.Tensor) -> Future[None]:
            return engine.read(paths[0], index * request_bytes, buffer)

        for count, ring, path in zip(counts, rings, paths, strict=True):
            stream(count, ring, partial(write, path=path))
            engine.flush(path).result()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hoist-probe") as reader:
            counted = _drive_bytes()
            started = time.perf_counter()
            reads = reader.submit(stream, counts[0], rings[0], read)
            stream(counts[1], rings[1], partial(write, path=paths[1]))
            reads.result()
            seconds = time.perf_counter() - started
            from_drives = [now - before for now, before in zip(_drive_bytes(), counted, strict=True)]
        moved = sum(counts) * request_bytes
        return MixedSpeed(
            seconds=seconds * asked / moved,
            scale=asked / moved,
            measured_bytes=moved,
            direct=engine.statistics().buffered_bytes == buffered_before
            and all(found >= count * request_bytes for found, count in zip(from_drives, counts, strict=True)),
        )
    finally:
        for path in paths:
            engine.forget(path)
            path.unlink()


def _drive_bytes() -> tuple[int, int]:
    """What drives have read and written for this process so far; the kernel counts blocks of 512 bytes."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 512 * usage.ru_inblock, 512 * usage.ru_oublock
