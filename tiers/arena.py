"""The host tier's memory: one anonymous mapping of exactly the bytes planned, handed out as leases.

Nothing is allocated during a step: every lease is taken when a run is set up, at 4 KiB-aligned addresses, so that any
of it can be the target of direct I/O (and of cudaHostRegister, which wants one mapping). What autograd allocates lies
outside the arena; `scheduler/memory.py` reserves it from the same budget.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from hoist.tiers.errors import BudgetError
from hoist.tiers.layout import round_up

#: Leases start on multiples of this many bytes: the page size, and what direct I/O needs.
LEASE_ALIGN_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaStatistics:
    """A snapshot of one arena."""

    capacity_bytes: int
    """Bytes of the mapping."""
    leased_bytes: int
    """Bytes under lease now, alignment included."""
    peak_bytes: int
    """Most bytes that were under lease at once."""
    num_leases: int
    """Leases that are open now."""


class Lease:
    """The right to use a range of the arena until :meth:`close`. ``tensor`` is the range as 1-D uint8."""

    def __init__(self, arena: Arena, offset: int, num_bytes: int, label: str) -> None:
        self._arena = arena
        #: First byte within the arena; a multiple of 4096.
        self.offset = offset
        #: Bytes that were asked for (the lease occupies them rounded up to 4096).
        self.num_bytes = num_bytes
        #: What it is for, for people.
        self.label = label
        self._open = True

    @property
    def tensor(self) -> torch.Tensor:
        """The leased bytes, uint8 [num_bytes]. Raises ValueError once closed."""
        if not self._open:
            raise ValueError(f"lease {self.label!r} is closed")
        return self._arena.bytes_at(self.offset, self.num_bytes)

    def close(self) -> None:
        """Give the range back; idempotent. Views taken earlier must not be used any more."""
        if self._open:
            self._open = False
            self._arena._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Arena:
    """A fixed mapping with first-fit leases. Not thread-safe: the thread that sets a run up takes and closes them."""

    def __init__(self, capacity_bytes: int) -> None:
        """Map ``capacity_bytes`` (rounded up to 4096). Raises BudgetError if the system refuses the mapping."""
        if capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes: {capacity_bytes} is not positive")
        self._capacity_bytes = round_up(capacity_bytes, LEASE_ALIGN_BYTES)
        try:
            # Private: mmap.mmap(-1) alone is *shared* memory, which is accounted and swapped differently.
            mapping = mmap.mmap(-1, self._capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(
                f"host memory: the system refused a mapping of {self._capacity_bytes} bytes ({error.strerror}); "
                "give a smaller --host-memory or raise the process's address-space limit"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without huge pages refuses; only speed is lost
                mapping.madvise(mmap.MADV_HUGEPAGE)
        #: None once the arena is closed. Its address space stays as long as a view of it does.
        self._mapping: mmap.mmap | None = mapping
        #: All of it.
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        #: Open leases by offset, ascending.
        self._leases: list[Lease] = []
        self._leased_bytes = 0
        self._peak_bytes = 0

    def lease(self, num_bytes: int, label: str) -> Lease:
        """Take ``num_bytes`` at the first gap that fits. Raises BudgetError, and takes nothing, if there is none."""
        if num_bytes < 0:
            raise ValueError(f"lease {label!r}: num_bytes {num_bytes} is negative")
        wanted = round_up(num_bytes, LEASE_ALIGN_BYTES)
        start = 0
        position = 0
        for position, lease in enumerate(self._leases):  # noqa: B007 (position is used below)
            if lease.offset - start >= wanted:
                break
            start = lease.offset + round_up(lease.num_bytes, LEASE_ALIGN_BYTES)
        else:
            position = len(self._leases)
            if self._capacity_bytes - start < wanted:
                raise BudgetError(
                    f"host memory: {num_bytes} bytes for {label} do not fit: {self._leased_bytes} of "
                    f"{self._capacity_bytes} bytes are in use"
                )
        taken = Lease(self, start, num_bytes, label)
        self._leases.insert(position, taken)
        self._leased_bytes += wanted
        self._peak_bytes = max(self._peak_bytes, self._leased_bytes)
        return taken

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """A view of the mapping, uint8 [num_bytes]."""
        return self._bytes[offset : offset + num_bytes]

    def _release(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._leased_bytes -= round_up(lease.num_bytes, LEASE_ALIGN_BYTES)

    def statistics(self) -> ArenaStatistics:
        """A snapshot of what is leased."""
        return ArenaStatistics(
            capacity_bytes=self._capacity_bytes,
            leased_bytes=self._leased_bytes,
            peak_bytes=self._peak_bytes,
            num_leases=len(self._leases),
        )

    def close(self) -> None:
        """Give the memory back at once; views that are left read zeros. No lease may follow. Idempotent."""
        if self._mapping is not None:
            # Not with the last view, which a cycle of references may keep until some later collection: what comes next
            # has the same budget.
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._mapping = None
        self._leases.clear()
        self._leased_bytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
