"""A DirectEngine whose system calls can be shortened, interrupted, refused, failed, held and recorded. They are real.

What happens to whole requests, with any engine underneath, is in `engines.py`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hoist.tiers.io import DirectEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemCall:
    """A call that the engine is about to make."""

    name: str
    """open, pread, pwrite, fdatasync, write_back"""
    direct: bool = False
    """The descriptor has (open: is to have) O_DIRECT."""
    path: str = ""
    offset: int = 0
    num_bytes: int = 0
    address: int = 0


class FaultyDirectEngine(DirectEngine):
    """``before(call)`` runs ahead of each system call, on the engine's thread: it may raise OSError, or wait.

    ``cap_bytes`` is the most that one pread or pwrite moves. ``alignment`` replaces what the kernel says of direct I/O.
    """

    def __init__(
        self,
        *,
        before: Callable[[SystemCall], None] = lambda call: None,
        cap_bytes: int | None = None,
        alignment: tuple[int, int] | None = None,
        num_threads: int = 4,
        part_bytes: int = 4 * 2**20,
        max_open_files: int = 512,
    ) -> None:
        self._before = before
        self._cap_bytes = cap_bytes
        self._alignment = alignment
        self._calls_lock = threading.Lock()
        #: Every call made so far, failed ones included.
        self.calls: list[SystemCall] = []
        super().__init__(num_threads=num_threads, part_bytes=part_bytes, max_open_files=max_open_files)

    def calls_of(self, *names: str) -> list[SystemCall]:
        """The calls of these names, in the order they began."""
        with self._calls_lock:
            return [call for call in self.calls if call.name in names]

    def _note(self, call: SystemCall) -> None:
        with self._calls_lock:
            self.calls.append(call)
        self._before(call)

    def _open(self, path: str, flags: int) -> int:
        self._note(SystemCall(name="open", path=path, direct=bool(flags & os.O_DIRECT)))
        return super()._open(path, flags)

    def _pread(self, descriptor: int, view: memoryview, offset: int) -> int:
        self._note(_transfer("pread", descriptor, view, offset))
        if self._cap_bytes is None or self._cap_bytes >= len(view):
            return super()._pread(descriptor, view, offset)
        with _uncounted(descriptor) as plain:
            return super()._pread(plain, view[: self._cap_bytes], offset)

    def _pwrite(self, descriptor: int, view: memoryview, offset: int) -> int:
        self._note(_transfer("pwrite", descriptor, view, offset))
        if self._cap_bytes is None or self._cap_bytes >= len(view):
            return super()._pwrite(descriptor, view, offset)
        with _uncounted(descriptor) as plain:
            return super()._pwrite(plain, view[: self._cap_bytes], offset)

    def _fdatasync(self, descriptor: int) -> None:
        self._note(SystemCall(name="fdatasync", path=_path_of(descriptor), direct=_is_direct(descriptor)))
        super()._fdatasync(descriptor)

    def _write_back(self, descriptor: int, offset: int, num_bytes: int) -> None:
        self._note(
            SystemCall(name="write_back", path=_path_of(descriptor), offset=offset, num_bytes=num_bytes)
        )
        super()._write_back(descriptor, offset, num_bytes)

    def _probe_alignment(self, descriptor: int) -> tuple[int, int] | None:
        return super()._probe_alignment(descriptor) if self._alignment is None else self._alignment


@contextmanager
def _uncounted(descriptor: int) -> Iterator[int]:
    """A descriptor without O_DIRECT of the same file: a short transfer may end where O_DIRECT would not let it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    plain = os.open(f"/proc/self/fd/{descriptor}", flags)
    try:
        yield plain
    finally:
        os.close(plain)


def _transfer(name: str, descriptor: int, view: memoryview, offset: int) -> SystemCall:
    return SystemCall(
        name=name,
        direct=_is_direct(descriptor),
        path=_path_of(descriptor),
        offset=offset,
        num_bytes=len(view),
        address=np.frombuffer(view, dtype=np.uint8).ctypes.data,
    )


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
