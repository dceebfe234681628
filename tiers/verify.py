"""Re-reads files through an engine and compares their CRC32C, two reads in flight and a fixed buffer. Changes nothing.

Which files, and what their checksums should be, `store.py` says.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch

from hoist.tiers import checksum
from hoist.tiers.allocation import Progress
from hoist.tiers.errors import TransferError
from hoist.tiers.inventory import BadChunk, StoredChunk, check_size
from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine

#: Default buffer of a verification.
BUFFER_BYTES = 8 << 20


def verify_chunks(
    chunks: Sequence[StoredChunk],
    engine: IoEngine,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    progress: Progress | None = None,
) -> Iterator[BadChunk]:
    """Read every chunk and yield those that are missing, of the wrong size, unreadable or fail their checksum.

    Uses ``buffer_bytes`` of memory (two halves, each a multiple of 4 KiB). ``progress`` gets done and total bytes.
    """
    half = buffer_bytes // 2 // IO_ALIGN_BYTES * IO_ALIGN_BYTES
    if half <= 0:
        raise ValueError(f"buffer_bytes: {buffer_bytes} is less than {2 * IO_ALIGN_BYTES}")
    memory = mmap.mmap(-1, 2 * half, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # page-aligned; freed with the tensor
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    halves = (buffer[:half], buffer[half:])
    done, total = 0, sum(chunk.num_bytes for chunk in chunks)
    for chunk in chunks:
        bad = check_size(chunk) or _verify_content(chunk, engine, halves)
        if bad is not None:
            yield bad
        done += chunk.num_bytes
        if progress is not None:
            progress(done, total)


def _verify_content(chunk: StoredChunk, engine: IoEngine, halves: tuple[torch.Tensor, torch.Tensor]) -> BadChunk | None:
    length = halves[0].numel()
    spans = [(start, min(length, chunk.num_bytes - start)) for start in range(0, chunk.num_bytes, length)]

    def read(index: int) -> tuple[Future[None], torch.Tensor]:
        start, count = spans[index]
        view = halves[index % 2][:count]
        return engine.read(chunk.path, start, view), view

    found = 0
    pending = read(0)
    try:
        for index in range(len(spans)):
            future, view = pending
            future.result()
            if index + 1 < len(spans):
                pending = read(index + 1)
            found = checksum.extend(found, view)
    except TransferError as error:
        return BadChunk(chunk=chunk, reason=f"cannot be read: {error}")
    finally:
        pending[0].exception()  # nothing may be in flight into the buffer when it is used again
    if chunk.crc32c is not None and found != chunk.crc32c:
        return BadChunk(chunk=chunk, reason=f"checksum: committed {chunk.crc32c:08x}, the file gives {found:08x}")
    return None
