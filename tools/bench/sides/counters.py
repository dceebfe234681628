"""What a side's process takes from the machine, by the kernel's own counts: bytes of the drive, memory, page cache.

No side reports these itself. Standard library alone, so that any environment can run it; what is done with the numbers
is `judging.py`'s business.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

#: Seconds between two samples of memory.
SAMPLE_SECONDS = 0.02
_IO = Path("/proc/self/io")
_STATUS = Path("/proc/self/status")
_STAT = Path("/proc/self/stat")
#: Bytes of a file that are looked at in one go.
_WINDOW_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveBytes:
    """Bytes that this process, all its threads, made the kernel move between memory and drives."""

    read: int
    """From drives; what the page cache answered is not in it."""
    written: int
    """To drives, or into the page cache to be written later."""

    @classmethod
    def now(cls) -> Self:
        """Since the process began."""
        found = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return cls(read=int(found["read_bytes"]), written=int(found["write_bytes"]))


def resident_bytes() -> int:
    """Anonymous and shared memory of this process, now. Mapped files do not count: they are page cache."""
    lines = _STATUS.read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def process_seconds() -> float:
    """Since this process was started, what ran before Python's first line included; to a hundredth."""
    # The second field is the program's name in parentheses, which may have blanks.
    ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class PeakMemory:
    """Samples :func:`resident_bytes` from a thread, from entering to leaving."""

    def __init__(self) -> None:
        #: Most that was seen, bytes.
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-memory", daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, resident_bytes())

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._look()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()


class Steps:
    """Time and bytes of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.read_bytes: list[int] = []
        self.written_bytes: list[int] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """One step. One that raises is not noted."""
        before, began = DriveBytes.now(), time.perf_counter()
        yield
        seconds, after = time.perf_counter() - began, DriveBytes.now()
        self.seconds.append(seconds)
        self.read_bytes.append(after.read - before.read)
        self.written_bytes.append(after.written - before.written)


def files_below(directory: Path) -> list[Path]:
    """All regular files, links not followed."""
    return sorted(
        path
        for folder, _, names in os.walk(directory)
        for path in (Path(folder, name) for name in names)
        if path.is_file() and not path.is_symlink()
    )


def stored_bytes(files: Iterable[Path]) -> int:
    """Lengths of the files, all together; those that are gone are 0."""
    total = 0
    for path in files:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def cached_bytes(files: Iterable[Path]) -> int:
    """How much of the files is in the page cache; of those that are gone, or empty, nothing is."""
    total = 0
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            total += _cached_bytes(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
    return total


def _cached_bytes(descriptor: int, length: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    total = 0
    for begin in range(0, length, _WINDOW_BYTES):
        num_bytes = min(_WINDOW_BYTES, length - begin)
        # Python's own mmap hides its address unless it is writable; nothing is read through this one.
        address = libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, begin)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            pages = -(-num_bytes // mmap.PAGESIZE)
            found = ctypes.create_string_buffer(pages)
            if libc.mincore(address, num_bytes, found):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            # The lowest bit of each byte tells; the others are not defined.
            present = [byte & 1 for byte in found.raw]
            total += sum(present) * mmap.PAGESIZE
            if present[-1]:
                total -= pages * mmap.PAGESIZE - num_bytes
        finally:
            libc.munmap(address, num_bytes)
    return total


def make_durable(paths: Iterable[Path]) -> None:
    """Have the drive keep what was written to files and directories."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_cache(files: Iterable[Path]) -> None:
    """Put the files onto their drive and take them out of the page cache, so that whoever reads them reads the drive.

    Files that are gone, or that may not be opened, are passed over.
    """
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
