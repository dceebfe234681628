"""Re-reads files through an engine and compares their CRC32C, reads in flight ahead of it. Changes nothing.

Which files, and what their checksums should be, `store.py` says.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from hoist.tiers import checksum
from hoist.tiers.allocation import Progress
from hoist.tiers.inventory import BadChunk, StoredChunk, check_size
from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine

#: Default buffer of a verification.
BUFFER_BYTES = 8 << 20
#: Reads in flight, over file borders; each has a part of the buffer. With parts of 2 MiB they fill an NVMe drive.
NUM_READS = 4


def verify_chunks(
    chunks: Sequence[StoredChunk],
    engine: IoEngine,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    progress: Progress | None = None,
) -> Iterator[BadChunk]:
    """Read every chunk and yield those that are missing, of the wrong size, unreadable or fail their checksum.

    Uses ``buffer_bytes`` of memory. ``progress`` gets done and total bytes.
    """
    for _, bad in check_chunks(chunks, engine, buffer_bytes=buffer_bytes, progress=progress):
        if bad is not None:
            yield bad


def check_chunks(
    chunks: Sequence[StoredChunk],
    engine: IoEngine,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    progress: Progress | None = None,
) -> Iterator[tuple[StoredChunk, BadChunk | None]]:
    """Read every chunk and yield each, in order, with what is wrong with it. Like :func:`verify_chunks`."""
    free = split_buffer(buffer_bytes, NUM_READS)
    waiting = _spans(chunks, free[0].numel())
    in_flight: deque[_Span] = deque()
    done, total = 0, sum(chunk.num_bytes for chunk in chunks)
    found = 0
    failure: BaseException | None = None
    try:
        while True:
            while free and (span := next(waiting, None)) is not None:
                if span.bad is None:
                    span.buffer = free.pop()
                    span.future = engine.read(span.chunk.path, span.start, span.buffer[: span.num_bytes])
                in_flight.append(span)
            if not in_flight:
                return
            span = in_flight[0]
            if span.future is not None and span.buffer is not None:
                failure = failure or span.future.exception()
                if failure is None:
                    found = checksum.extend(found, span.buffer[: span.num_bytes])
                free.append(span.buffer)
            in_flight.popleft()
            done += span.num_bytes
            if span.is_last:
                yield span.chunk, span.bad or _judge(span.chunk, found, failure)
                found, failure = 0, None
            if progress is not None:
                progress(done, total)
    finally:
        for span in in_flight:  # nothing may be in flight into the buffer when it is let go
            if span.future is not None:
                span.future.exception()


def split_buffer(buffer_bytes: int, num_parts: int) -> list[torch.Tensor]:
    """Page-aligned memory in ``num_parts`` equal parts, each a multiple of 4 KiB; in two where there is too little.

    Raises ValueError if there is not even room for two.
    """
    num_parts = min(num_parts, max(2, buffer_bytes // IO_ALIGN_BYTES))
    part_bytes = buffer_bytes // num_parts // IO_ALIGN_BYTES * IO_ALIGN_BYTES
    if part_bytes <= 0:
        raise ValueError(f"buffer_bytes: {buffer_bytes} is less than {2 * IO_ALIGN_BYTES}")
    memory = mmap.mmap(-1, num_parts * part_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with the tensor
    return list(torch.frombuffer(memory, dtype=torch.uint8).split(part_bytes))


@dataclass(kw_only=True, slots=True)
class _Span:
    """A read, or (``bad``) a chunk that is not read."""

    chunk: StoredChunk
    start: int = 0
    """First byte."""
    num_bytes: int
    is_last: bool = True
    """It ends the chunk."""
    bad: BadChunk | None = None
    buffer: torch.Tensor | None = None
    """At least ``num_bytes``; the span's own while it is in flight."""
    future: Future[None] | None = None


def _spans(chunks: Sequence[StoredChunk], length: int) -> Iterator[_Span]:
    """Every chunk cut into reads of at most ``length`` bytes; its size is looked at just before."""
    for chunk in chunks:
        bad = check_size(chunk)
        if bad is not None:
            yield _Span(chunk=chunk, num_bytes=chunk.num_bytes, bad=bad)
            continue
        for start in range(0, chunk.num_bytes, length):
            num_bytes = min(length, chunk.num_bytes - start)
            is_last = start + num_bytes == chunk.num_bytes
            yield _Span(chunk=chunk, start=start, num_bytes=num_bytes, is_last=is_last)


def _judge(chunk: StoredChunk, found: int, failure: BaseException | None) -> BadChunk | None:
    if failure is not None:
        return BadChunk(chunk=chunk, reason=f"cannot be read: {failure}")
    if chunk.crc32c is not None and found != chunk.crc32c:
        return BadChunk(chunk=chunk, reason=f"checksum: committed {chunk.crc32c:08x}, the file gives {found:08x}")
    return None
