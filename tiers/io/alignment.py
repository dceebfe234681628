"""How a request is cut: into parts for several threads, and each part into a direct middle and buffered ends.

Pure arithmetic on bytes: no files, no threads. Asking the kernel is in `syscalls.py`, doing the I/O in `direct.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hoist.tiers.io.base import IO_ALIGN_BYTES

#: Cuts between the parts of one request fall on multiples of this file offset: no known file system wants more.
CUT_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectAlignment:
    """What direct I/O on a file must be aligned to."""

    memory_bytes: int = IO_ALIGN_BYTES
    """Multiple that a buffer's address must be of."""
    offset_bytes: int = IO_ALIGN_BYTES
    """Multiple that file offset and length must be of. At least 4096, even where the file system allows 512: direct
    and buffered transfers of one file then never touch the same page of the page cache."""

    def __post_init__(self) -> None:
        for name, value in (("memory_bytes", self.memory_bytes), ("offset_bytes", self.offset_bytes)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: got {value}, must be a power of two")

    @classmethod
    def from_kernel(cls, memory_bytes: int, offset_bytes: int) -> DirectAlignment:
        """From statx's answer (bytes, both positive)."""
        return cls(memory_bytes=memory_bytes, offset_bytes=max(offset_bytes, IO_ALIGN_BYTES))


def cut_request(offset: int, num_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Cut a file range into about equal parts of about ``part_bytes`` (at most 64 KiB more), as (start, length).

    Starts are relative to ``offset``; cuts fall on multiples of 64 KiB of the file, so cutting an aligned request
    makes no unaligned part. An empty range is one empty part.
    """
    if num_bytes <= part_bytes:
        return [(0, num_bytes)]
    base = offset - offset % CUT_BYTES
    num_parts = -(-num_bytes // part_bytes)
    step = -(-(offset + num_bytes - base) // num_parts)
    step = -(-step // CUT_BYTES) * CUT_BYTES
    cuts = [0, *range(base + step - offset, num_bytes, step), num_bytes]
    return [(start, stop - start) for start, stop in pairwise(cuts)]


def cut_at_pages(offset: int, num_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Cut a file range so that each part, its first page begun where the file's is, fits into ``part_bytes`` of memory.

    As (start, length) with starts relative to ``offset``; cuts fall on multiples of 4096 of the file, and all parts but
    the first and the last are ``part_bytes`` (a multiple of 4096) long. An empty range is one empty part.
    """
    first = part_bytes - offset % IO_ALIGN_BYTES
    if num_bytes <= first:
        return [(0, num_bytes)]
    return [(start, stop - start) for start, stop in pairwise([0, *range(first, num_bytes, part_bytes), num_bytes])]


def direct_range(offset: int, num_bytes: int, address: int, alignment: DirectAlignment) -> tuple[int, int]:
    """The part of a transfer that direct I/O can do: (start, stop) relative to ``offset``, empty as (0, 0).

    What lies before and after, less than one ``offset_bytes`` each, goes through the page cache; everything does where
    the buffer's address (bytes) does not fit the file offset.
    """
    start = -offset % alignment.offset_bytes
    stop = num_bytes - (offset + num_bytes) % alignment.offset_bytes
    if start >= stop or (address + start) % alignment.memory_bytes:
        return 0, 0
    return start, stop


def is_aligned(offset: int, num_bytes: int, address: int) -> bool:
    """Whether a transfer keeps the hot path's rule: offset, length and address are multiples of 4096."""
    return not (offset | num_bytes | address) % IO_ALIGN_BYTES
