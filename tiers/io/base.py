"""The contract between the NVMe tier and what moves its bytes. Engines have files of their own; `choose.py` picks one.

A request is a path, a byte offset and a buffer; its answer is a future. Paths are absolute; engines keep their own
bounded cache of open files. Nothing here knows of stages, chunks or slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

#: Offset, length and address of every transfer on the hot path are multiples of this (bytes).
IO_ALIGN_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class IoStatistics:
    """Counters of one engine since it was made. Bytes count when their transfer has succeeded."""

    read_bytes: int
    written_bytes: int
    reads: int
    """Requests, not system calls."""
    writes: int
    flushes: int
    busy_seconds: float
    """Time during which at least one request was in flight."""
    buffered_bytes: int
    """Bytes that went through the page cache because a file system refused direct I/O; 0 is what one wants."""


class IoEngine(ABC):
    """Reads and writes file ranges asynchronously. Safe to call from several threads.

    Every method that returns a future raises nothing about the transfer itself: the future does, always as
    :class:`hoist.tiers.errors.TransferError` (operation, file, offset, length, cause). A transfer is complete or
    failed, never short. After a failed read the buffer's content is undefined; after a failed write the file range's
    is. The caller keeps the buffer alive and untouched until the future is done.
    """

    #: ``direct``, ``kvikio``, or the name of a wrapper around one.
    name: str
    #: Requests are cut into parts of at most so many bytes, and so many of them are in flight at once; others wait.
    part_bytes: int = 4 * 2**20
    parts_at_once: int = 8
    #: Buffers may lie in a device's own memory; else in the host's only (`bounce.py` is for those).
    takes_device_memory: bool = False

    @abstractmethod
    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        """Fill ``buffer`` (1-D contiguous uint8) from ``path`` at byte ``offset``. A short file is an error."""

    @abstractmethod
    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        """Write all of ``buffer`` (1-D contiguous uint8) to an existing file at ``offset``. Durable once flushed."""

    @abstractmethod
    def flush(self, path: Path) -> Future[None]:
        """Make every write to ``path`` that has completed before this call durable (fdatasync)."""

    @abstractmethod
    def forget(self, path: Path) -> None:
        """Close any cached handle of ``path`` (before it is removed or replaced). No request on it may be in flight."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people: the engine, its mode (direct, buffered, GDS, compatibility) and why."""

    def describe_device_path(self) -> str:
        """How device memory moves to and from files, and why so; for people. Empty where the engine takes none."""
        return ""

    @abstractmethod
    def statistics(self) -> IoStatistics:
        """A snapshot of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight, close files, end threads. Idempotent. Later requests raise ValueError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
