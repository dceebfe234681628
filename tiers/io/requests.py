"""What the engines share around a transfer: checks of its arguments, its failure as an exception, the counters.

Bytes are moved in `direct.py` and `kvikio.py`, not here; the contract is in `base.py`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import torch

from hoist.tiers.errors import TransferError
from hoist.tiers.io.base import IoStatistics

Operation = Literal["read", "write", "flush"]


def started_future() -> Future[None]:
    """A future that cannot be cancelled: a transfer that was asked for uses its buffer until it is done."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def check_request(path: Path, offset: int, buffer: torch.Tensor) -> None:
    """Raise ValueError where the caller broke the contract of :class:`IoEngine`: a bug, not a failed transfer."""
    check_buffer(buffer, "buffer")
    if offset < 0:
        raise ValueError(f"offset: got {offset}, must be at least 0")
    check_path(path)


def check_buffer(buffer: torch.Tensor, label: str) -> None:
    """Raise ValueError, naming ``label``, where a tensor is not plain bytes in a row."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"{label}: got {buffer.dtype} of shape {tuple(buffer.shape)}, must be uint8, 1-D and contiguous; "
            "use tensor.view(torch.uint8)"
        )


def check_path(path: Path) -> None:
    """Raise ValueError where ``path`` is relative: it would mean another file after a chdir."""
    if not path.is_absolute():
        raise ValueError(f"path: got {str(path)!r}, must be absolute")


def transfer_error(operation: Operation, path: str, offset: int, num_bytes: int, cause: BaseException) -> TransferError:
    """The failure of a transfer, naming operation, file, offset, length (bytes) and cause; ``errno`` is the cause's."""
    where = path if operation == "flush" else f"{num_bytes} bytes at offset {offset} of {path}"
    code = cause.errno if isinstance(cause, OSError) else None
    if code is None:
        # One line, whatever a library adds below its first.
        why = str(cause).strip().partition("\n")[0] or type(cause).__name__
    else:
        why = f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"
    error = TransferError(f"{operation} of {where} failed: {why}")
    error.errno = code
    error.__cause__ = cause
    return error


def short_file_error(path: str, offset: int, num_bytes: int, file_bytes: int) -> TransferError:
    """A read that goes past the end of a file of ``file_bytes``."""
    got = max(0, file_bytes - offset)
    return TransferError(
        f"read of {num_bytes} bytes at offset {offset} of {path} failed: end of file, "
        f"wanted {num_bytes} bytes, got {got} (the file has {file_bytes})"
    )


def no_readahead(descriptor: int) -> None:
    """Make buffered reads of this descriptor bring in what they ask for, and no pages that nobody would drop again."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def drop_cache(descriptor: int, offset: int, num_bytes: int) -> None:
    """Drop the page cache's copy of a file range (bytes). Dirty pages stay: write them back before."""
    # Only whole pages are dropped, so name the pages at the ends; a neighbour's dirty bytes on them keep them.
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    start = offset - offset % page_bytes
    stop = -(-(offset + num_bytes) // page_bytes) * page_bytes
    os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


class Counters:
    """The numbers behind :class:`IoStatistics`, and the wait for "nothing in flight". Safe from several threads."""

    def __init__(self) -> None:
        self._idle = threading.Condition()
        self._in_flight = 0
        #: When the engine last went from idle to busy (monotonic seconds); means nothing while idle.
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._bytes: dict[Operation, int] = {"read": 0, "write": 0, "flush": 0}
        self._requests: dict[Operation, int] = {"read": 0, "write": 0, "flush": 0}
        self._buffered_bytes = 0

    def begin(self) -> None:
        """A request is now in flight."""
        with self._idle:
            if not self._in_flight:
                self._busy_since = time.monotonic()
            self._in_flight += 1

    def end(self, operation: Operation, *, num_bytes: int, buffered_bytes: int, failed: bool) -> None:
        """It no longer is. Call it before the future is resolved, so that who waits for that sees these numbers."""
        with self._idle:
            self._requests[operation] += 1
            if not failed:
                self._bytes[operation] += num_bytes
                self._buffered_bytes += buffered_bytes
            self._in_flight -= 1
            if not self._in_flight:
                self._busy_seconds += time.monotonic() - self._busy_since
                self._idle.notify_all()

    def wait_idle(self) -> None:
        """Block until nothing is in flight."""
        with self._idle:
            self._idle.wait_for(lambda: not self._in_flight)

    def snapshot(self) -> IoStatistics:
        """The counters now; time in flight goes up to now."""
        with self._idle:
            running = time.monotonic() - self._busy_since if self._in_flight else 0.0
            return IoStatistics(
                read_bytes=self._bytes["read"],
                written_bytes=self._bytes["write"],
                reads=self._requests["read"],
                writes=self._requests["write"],
                flushes=self._requests["flush"],
                busy_seconds=self._busy_seconds + running,
                buffered_bytes=self._buffered_bytes,
            )
