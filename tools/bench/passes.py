"""What both sides of `hoist bench io` do to a file, hoist's side of it, and the proof that a drive did the work.

fio's side is in `fio.py`, the table in `io.py`. The file, and the stream of requests, are those of
`hoist.tiers.io.probe`.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.probe import Contents, aligned_buffer, make_file, stream
from hoist.tools.errors import BenchError

#: What the kernel counts blocks of a process in.
_COUNTED_BYTES = 512


class Way(StrEnum):
    """One pass over a file; a side makes them in this order, and each write ends with a flush that is timed too."""

    FIRST_WRITE = "first write"
    """Into space that is only reserved: a store's first step. Slower where a file system notes each extent."""
    REWRITE = "rewrite"
    """Over blocks that hold data: every later step."""
    READ = "read"
    BOTH = "read + write"
    """The first half is read while the second is written over, each with the depth of its own: what a step does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveWork:
    """The work of a pass."""

    num_blocks: int
    """Even."""
    block_bytes: int
    """A multiple of 4096."""
    depth: int
    """Blocks in flight, at least 1; in :attr:`Way.BOTH` twice as many."""

    @property
    def num_bytes(self) -> int:
        """Of the file, and moved by each pass."""
        return self.num_blocks * self.block_bytes


def measure_engine(directory: Path, engine: IoEngine, work: DriveWork) -> dict[Way, float]:
    """Bytes a second of each pass through ``engine``, over a file that is always removed.

    Host memory: twice ``depth`` blocks and two more. Raises BenchError where bytes came back wrong or the page cache
    answered, StoreRefusedError where the file cannot be made, TransferError where a transfer fails.
    """
    with reserved_file(directory, work) as path:
        try:
            return _Passes(path, engine, work).run()
        finally:
            engine.forget(path)


@contextmanager
def reserved_file(directory: Path, work: DriveWork) -> Iterator[Path]:
    """A file with its space reserved on the drive, so that no pass pays for that; it is always removed."""
    path = make_file(directory, work.num_bytes)
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield path
    finally:
        path.unlink()


class KernelCount:
    """What drives moved for this process or its ended children, as the kernel counts it: no cache is in there."""

    def __init__(self, *, children: bool = False) -> None:
        """Starts counting. ``children``: those that have ended and were waited for."""
        self._who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
        self._before = self._now()

    def check(self, who: str, *, read_bytes: int, written_bytes: int) -> None:
        """Raise BenchError if less was read from drives, or written to them, than ``who`` says it moved."""
        for before, now, moved, how in zip(
            self._before, self._now(), (read_bytes, written_bytes), ("read from", "written to"), strict=True
        ):
            if now - before < moved:
                raise BenchError(
                    f"{who}: {moved / 2**20:.1f} MiB were to be {how} a drive, the kernel counted "
                    f"{(now - before) / 2**20:.1f}: the page cache or a file system in memory did the rest; "
                    "give a directory on a local drive (hoist doctor says what it is on)"
                )

    def _now(self) -> tuple[int, int]:
        usage = resource.getrusage(self._who)
        return usage.ru_inblock * _COUNTED_BYTES, usage.ru_oublock * _COUNTED_BYTES


class _Passes:
    """hoist's side: passes over one file. Each write has stamps of its own, so that a lost one is seen."""

    def __init__(self, path: Path, engine: IoEngine, work: DriveWork) -> None:
        self._path = path
        self._engine = engine
        self._work = work
        self._contents = Contents(work.block_bytes)
        #: Each filled with the noise; a stream of reads and one of writes may run at once.
        self._read_ring = self._ring()
        self._write_ring = self._ring()
        #: Blocks that came back wrong.
        self._wrong: list[int] = []

    def _ring(self) -> list[torch.Tensor]:
        ring = [aligned_buffer(self._work.block_bytes) for _ in range(min(self._work.depth, self._work.num_blocks))]
        for buffer in ring:
            self._contents.fill(buffer)
        return ring

    def run(self) -> dict[Way, float]:
        """All passes, and a check of every byte of the file at the end, which is not timed."""
        whole, half = self._work.num_blocks, self._work.num_blocks // 2
        half_bytes = self._work.num_bytes // 2
        rates = {
            Way.FIRST_WRITE: self._rate(Way.FIRST_WRITE, lambda: self._write(0, whole, 0), 0, 2 * half_bytes),
            Way.REWRITE: self._rate(Way.REWRITE, lambda: self._write(0, whole, 1), 0, 2 * half_bytes),
            Way.READ: self._rate(Way.READ, lambda: self._read(0, whole, 1), 2 * half_bytes, 0),
            Way.BOTH: self._rate(Way.BOTH, lambda: self._both(half), half_bytes, half_bytes),
        }
        self._read(0, half, 1, whole=True)
        self._read(half, whole, 2, whole=True)
        if self._wrong:
            raise BenchError(
                f"{self._engine.name}: {len(self._wrong)} blocks that were read are not what was written, block "
                f"{self._wrong[0]} of {self._path} first; look at hoist doctor"
            )
        return rates

    def _rate(self, way: Way, do: Callable[[], None], read_bytes: int, written_bytes: int) -> float:
        counted = KernelCount()
        started = time.perf_counter()
        do()
        seconds = time.perf_counter() - started
        counted.check(f"{self._engine.name}, {way}", read_bytes=read_bytes, written_bytes=written_bytes)
        return self._work.num_bytes / seconds

    def _write(self, first: int, last: int, generation: int) -> None:
        def start(index: int, buffer: torch.Tensor) -> Future[None]:
            block = first + index
            self._contents.stamp(self._stamp(block, generation), buffer)
            return self._engine.write(self._path, block * self._work.block_bytes, buffer)

        stream(last - first, self._write_ring, start)
        self._engine.flush(self._path).result()

    def _read(self, first: int, last: int, generation: int, *, whole: bool = False) -> None:
        """With a check of every page's stamp, or of every byte."""
        same = self._contents.is_whole if whole else self._contents.has_stamps

        def start(index: int, buffer: torch.Tensor) -> Future[None]:
            return self._engine.read(self._path, (first + index) * self._work.block_bytes, buffer)

        def check(index: int, buffer: torch.Tensor) -> None:
            if not same(self._stamp(first + index, generation), buffer):
                self._wrong.append(first + index)

        if whole:  # nothing that was right before may be taken for what is read now
            for buffer in self._read_ring:
                buffer.fill_(0xAA)
        stream(last - first, self._read_ring, start, check)

    def _both(self, half: int) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="hoist-bench") as threads:
            passes = [
                threads.submit(self._read, 0, half, 1),
                threads.submit(self._write, half, self._work.num_blocks, 2),
            ]
        for one in passes:
            one.result()

    def _stamp(self, block: int, generation: int) -> int:
        return block + generation * self._work.num_blocks
