"""Copies whole chunk files through an engine, reads ahead of writes, with the CRC32C of what passed. Flushes nothing.

What is copied where is `snapshots.py`'s business; a checksum alone is `verify.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from hoist.tiers import checksum
from hoist.tiers.allocation import Progress
from hoist.tiers.inventory import StoredChunk
from hoist.tiers.io.base import IoEngine
from hoist.tiers.verify import BUFFER_BYTES, split_buffer

#: Parts of the buffer: half of them are read into ahead while the others are written.
NUM_PARTS = 4


def copy_chunks(
    jobs: Sequence[tuple[StoredChunk, Path]],
    engine: IoEngine,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    progress: Progress | None = None,
) -> Iterator[tuple[int, int]]:
    """Copy each chunk file to the existing file of its size beside it; yield job number and CRC32C as each is done.

    Uses ``buffer_bytes`` of memory. ``progress`` gets done and total bytes. Raises TransferError; whatever ends the
    iteration, nothing is in flight then.
    """
    buffers = split_buffer(buffer_bytes, NUM_PARTS)
    length, ahead = buffers[0].numel(), len(buffers) // 2
    spans = [
        (number, start, min(length, chunk.num_bytes - start))
        for number, (chunk, _) in enumerate(jobs)
        for start in range(0, chunk.num_bytes, length)
    ]
    done, total = 0, sum(chunk.num_bytes for chunk, _ in jobs)
    reads: dict[int, Future[None]] = {}
    writes: dict[int, Future[None]] = {}
    found = 0
    try:
        for turn in range(len(spans) + ahead):
            if turn < len(spans):
                if turn >= len(buffers) and (future := writes.pop(turn - len(buffers), None)) is not None:
                    future.result()  # the buffer's former content is on its way no more
                number, start, num_bytes = spans[turn]
                buffer = buffers[turn % len(buffers)][:num_bytes]
                reads[turn] = engine.read(jobs[number][0].path, start, buffer)
            current = turn - ahead
            if current < 0:
                continue
            number, start, num_bytes = spans[current]
            buffer = buffers[current % len(buffers)][:num_bytes]
            reads.pop(current).result()
            found = checksum.extend(found, buffer)
            writes[current] = engine.write(jobs[number][1], start, buffer)
            done += num_bytes
            if start + num_bytes == jobs[number][0].num_bytes:
                while writes:
                    writes.pop(next(iter(writes))).result()
                yield number, found
                found = 0
            if progress is not None:
                progress(done, total)
    finally:
        for future in (*reads.values(), *writes.values()):
            future.exception()
