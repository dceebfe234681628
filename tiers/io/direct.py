"""The engine that needs nothing but Linux: O_DIRECT preadv/pwritev from a pool of threads, on host memory.

Where a file system refuses direct I/O, and for what is not aligned, it goes through the page cache and drops it
again. How requests are cut is in `alignment.py`, open files are kept by `files.py`, the contract is in `base.py`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from hoist.tiers.errors import TransferError
from hoist.tiers.io import syscalls
from hoist.tiers.io.alignment import DirectAlignment, cut_request, direct_range
from hoist.tiers.io.base import IoEngine, IoStatistics
from hoist.tiers.io.files import HandleCache, descriptor_capacity
from hoist.tiers.io.pool import WorkerPool
from hoist.tiers.io.requests import (
    Counters,
    Operation,
    check_path,
    check_request,
    drop_cache,
    no_readahead,
    short_file_error,
    started_future,
    transfer_error,
)

_log = logging.getLogger(__name__)

#: What open or a transfer answers where a file system has no direct I/O.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
#: A path has at most two descriptors: one direct, one through the page cache.
_DESCRIPTORS_PER_FILE = 2
#: Stands for the file system of a file that cannot be found; no real one has this number.
_NO_DEVICE = -1


class DirectEngine(IoEngine):
    """O_DIRECT from a thread pool; buffers are CPU tensors.

    The methods ``_open`` to ``_probe_alignment`` are the only ones that call the system: a subclass that overrides
    one shows the engine any weather.
    """

    name = "direct"

    def __init__(
        self,
        *,
        num_threads: int = 8,
        part_bytes: int = 4 * 2**20,
        max_open_files: int = 512,
        direct: bool = True,
        why: str = "",
    ) -> None:
        """Starts no thread yet: each file system's start with the first request for it.

        ``num_threads`` system calls run at once on each file system. Requests longer than ``part_bytes`` are cut, so
        that several threads share one. With the defaults, 2 to 6 requests of 2 to 12 MiB fill an NVMe drive at
        0.04-0.06 CPU seconds a GB (measured; parts of 1 MiB cost half as much again, of 256 KiB twice as much, and were
        no faster). At most ``max_open_files`` idle files stay open, fewer where the process may not have so many
        descriptors. ``direct=False`` sends everything through the page cache. ``why`` is what :meth:`describe` says of
        the choice.
        """
        for label, value in (
            ("num_threads", num_threads),
            ("part_bytes", part_bytes),
            ("max_open_files", max_open_files),
        ):
            if value < 1:
                raise ValueError(f"{label}: got {value}, must be at least 1")
        self.part_bytes = part_bytes
        self.parts_at_once = num_threads
        self._direct = direct
        self._why = why
        self._counters = Counters()
        #: Guards _closed against a submit, _refused, each request's progress, and files' second descriptor.
        self._lock = threading.Lock()
        self._closed = False
        #: Why a file system (st_dev) gets no direct I/O; only grows.
        self._refused: dict[int, str] = {}
        #: File systems about which a warning was logged.
        self._warned: set[int] = set()
        capacity = descriptor_capacity(max_open_files, descriptors_each=_DESCRIPTORS_PER_FILE)
        self._files: HandleCache[_OpenFile] = HandleCache(open_handle=self._open_file, capacity=capacity)
        self._num_threads = num_threads
        #: Threads of each file system (st_dev): a slow drive's requests keep none from a fast one. Guarded by _lock.
        self._pools: dict[int, WorkerPool] = {}

    # The contract

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._submit("read", path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._submit("write", path, offset, buffer)

    def flush(self, path: Path) -> Future[None]:
        check_path(path)
        return self._enqueue(_Request(operation="flush", path=str(path)), [(0, 0)])

    def forget(self, path: Path) -> None:
        self._files.forget(str(path))

    def describe(self) -> str:
        if self._direct:
            says = [f"direct: O_DIRECT from {self._num_threads} threads, parts of {self.part_bytes / 2**20:g} MiB"]
        else:
            says = [f"direct: buffered I/O from {self._num_threads} threads, because direct=False was asked for"]
        if len(self._pools) > 1:
            says[0] = says[0].replace(" threads", f" threads for each of {len(self._pools)} drives")
        if self._why:
            says.append(f"chosen because {self._why}")
        with self._lock:
            says += [f"buffered on device {_device_name(device)}: {why}" for device, why in self._refused.items()]
        return "; ".join(says)

    def mode_of(self, path: Path) -> str:
        """How transfers of an existing file go now: ``direct, ...`` or ``buffered: `` and why. Raises OSError."""
        check_path(path)
        with self._files.lease(str(path), writable=False) as file:
            why = self._why_buffered(file)
            if why is None:
                return f"direct, aligned to {file.alignment.offset_bytes} bytes"
            return f"buffered: {why}"

    def statistics(self) -> IoStatistics:
        return self._counters.snapshot()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._counters.wait_idle()
        for pool in self._pools.values():
            pool.close()
        self._files.close()

    # Submission: the caller's thread

    def _submit(self, operation: Operation, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        check_request(path, offset, buffer)
        if buffer.device.type != "cpu":
            raise ValueError(f"buffer: got a tensor on {buffer.device}, the direct engine moves host memory only")
        request = _Request(
            operation=operation,
            path=str(path),
            offset=offset,
            view=buffer.numpy().data,
            address=buffer.data_ptr(),
        )
        return self._enqueue(request, cut_request(offset, buffer.numel(), self.part_bytes))

    def _enqueue(self, request: _Request, cuts: list[tuple[int, int]]) -> Future[None]:
        request.parts_left = len(cuts)
        try:
            device = self._device_of(request.path)
        except OSError:
            device = _NO_DEVICE  # the transfer will say why
        with self._lock:
            if self._closed:
                raise ValueError(f"{request.operation} of {request.path}: this I/O engine is closed")
            pool = self._pools.get(device)
            if pool is None:
                pool = self._pools[device] = WorkerPool(self._num_threads)
            self._counters.begin()
            for start, num_bytes in cuts:
                pool.put(partial(self._run, _Part(request=request, start=start, num_bytes=num_bytes)))
        return request.future

    # Execution: the pool's threads

    def _run(self, part: _Part) -> None:
        request = part.request
        failure: TransferError | None = None
        buffered_bytes = 0
        # After a first failure the rest is not moved any more, but the future waits for the parts that other threads
        # still move: only then is the buffer the caller's again.
        if request.failure is None:
            try:
                if request.operation == "flush":
                    self._flush(request.path)
                else:
                    buffered_bytes = self._move(part)
            except TransferError as error:
                failure = error
            except Exception as error:
                failure = transfer_error(
                    request.operation, request.path, request.offset, len(request.view), cause=error
                )
        with self._lock:
            request.buffered_bytes += buffered_bytes
            request.failure = request.failure or failure
            request.parts_left -= 1
            if request.parts_left:
                return
        self._finish(request)

    def _finish(self, request: _Request) -> None:
        failure, future = request.failure, request.future
        num_bytes, request.view = len(request.view), memoryview(b"")
        self._counters.end(
            request.operation, num_bytes=num_bytes, buffered_bytes=request.buffered_bytes, failed=failure is not None
        )
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)

    def _flush(self, path: str) -> None:
        # fdatasync acts on the file, whatever descriptor it is given; no write fails because this one is read-only.
        with self._files.lease(path, writable=False) as file:
            while True:
                with suppress(InterruptedError):
                    return self._fdatasync(file.any_descriptor)

    def _move(self, part: _Part) -> int:
        """Transfer one part completely; how many of its bytes went through the page cache."""
        request = part.request
        if not part.num_bytes:
            return 0
        offset = request.offset + part.start
        view = request.view[part.start : part.start + part.num_bytes]
        with self._files.lease(request.path, writable=request.operation == "write") as file:
            start, stop = 0, 0
            if self._why_buffered(file) is None:
                start, stop = direct_range(offset, len(view), request.address + part.start, file.alignment)
            if stop:
                self._move_buffered(request, file, offset, view[:start])
                stop = start + self._move_direct(request, file, offset + start, view[start:stop])
            else:
                start = 0
            self._move_buffered(request, file, offset + stop, view[stop:])
        return start + len(view) - stop

    def _move_direct(self, request: _Request, file: _OpenFile, offset: int, view: memoryview) -> int:
        """Move from the front of ``view`` what direct I/O can: all, or less where it is refused or the file ends."""
        assert file.direct_descriptor is not None
        call = self._pread if request.operation == "read" else self._pwrite
        done = 0
        while done < len(view):
            try:
                moved = call(file.direct_descriptor, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._refuse(file.device, f"{request.operation} of {file.path} with O_DIRECT: {error.strerror}")
                return done
            if moved < len(view) - done:
                # Short. Go on from the last aligned byte; where that is no progress (the end of the file, mostly),
                # the page cache can do the rest.
                moved -= moved % file.alignment.offset_bytes
                if moved <= 0:
                    return done
            done += moved
        return done

    def _move_buffered(self, request: _Request, file: _OpenFile, offset: int, view: memoryview) -> None:
        """Move all of ``view`` through the page cache, and drop what it left there."""
        if not len(view):
            return
        descriptor = self._buffered_descriptor(file)
        call = self._pread if request.operation == "read" else self._pwrite
        done = 0
        while done < len(view):
            try:
                moved = call(descriptor, view[done:], offset + done)
            except InterruptedError:
                continue
            if moved == 0 and request.operation == "read":
                raise short_file_error(
                    request.path, request.offset, len(request.view), file_bytes=os.fstat(descriptor).st_size
                )
            if moved == 0:
                raise OSError(errno.EIO, "the file system wrote 0 bytes")
            done += moved
        if request.operation == "write":
            self._write_back(descriptor, offset, len(view))
        self._drop_cache(descriptor, offset, len(view))

    # Open files and what their file systems can do

    def _open_file(self, path: str, writable: bool) -> _OpenFile:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        device = self._device_of(path)
        file = _OpenFile(path=path, flags=flags, device=device)
        if self._direct and device not in self._refused:
            try:
                file.direct_descriptor = self._open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._refuse(device, f"open of {path} with O_DIRECT: {error.strerror}")
        if file.direct_descriptor is None:
            file.buffered_descriptor = self._open_buffered(path, flags)
            return file
        alignment = self._probe_alignment(file.direct_descriptor)
        if alignment is not None:
            memory_bytes, offset_bytes = alignment
            if memory_bytes and offset_bytes:
                file.alignment = DirectAlignment.from_kernel(memory_bytes, offset_bytes)
            else:
                file.why_buffered = f"the kernel reports no direct I/O for {path}"
                self._warn(device, file.why_buffered)
        return file

    def _buffered_descriptor(self, file: _OpenFile) -> int:
        with self._lock:
            if file.buffered_descriptor is None:
                file.buffered_descriptor = self._open_buffered(file.path, file.flags)
            return file.buffered_descriptor

    def _open_buffered(self, path: str, flags: int) -> int:
        descriptor = self._open(path, flags)
        no_readahead(descriptor)
        return descriptor

    def _why_buffered(self, file: _OpenFile) -> str | None:
        """None where the file gets direct I/O."""
        if not self._direct:
            return "direct=False was asked for"
        return self._refused.get(file.device) or file.why_buffered

    def _refuse(self, device: int, why: str) -> None:
        with self._lock:
            if device in self._refused:
                return
            self._refused[device] = why
        self._warn(device, why)

    def _warn(self, device: int, why: str) -> None:
        with self._lock:
            if device in self._warned:
                return
            self._warned.add(device)
        _log.warning("no direct I/O on device %s, using buffered I/O there: %s", _device_name(device), why)

    # System calls

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags)

    def _pread(self, descriptor: int, view: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [view], offset)

    def _pwrite(self, descriptor: int, view: memoryview, offset: int) -> int:
        return os.pwritev(descriptor, [view], offset)

    def _fdatasync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def _write_back(self, descriptor: int, offset: int, num_bytes: int) -> None:
        syscalls.write_back_range(descriptor, offset, num_bytes)

    def _drop_cache(self, descriptor: int, offset: int, num_bytes: int) -> None:
        drop_cache(descriptor, offset, num_bytes)

    def _device_of(self, path: str) -> int:
        return Path(path).stat().st_dev

    def _probe_alignment(self, descriptor: int) -> tuple[int, int] | None:
        return syscalls.direct_io_alignment(descriptor)


@dataclass(kw_only=True, slots=True)
class _Request:
    """A transfer on its way through the pool."""

    operation: Operation
    path: str
    offset: int = 0
    #: The caller's buffer; keeps its memory alive until the request is finished.
    view: memoryview = field(default_factory=lambda: memoryview(b""))
    #: Where the buffer starts in memory.
    address: int = 0
    #: The three below are guarded by the engine's lock.
    parts_left: int = 0
    buffered_bytes: int = 0
    failure: TransferError | None = None
    future: Future[None] = field(default_factory=started_future)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A run of bytes of a request, moved by one thread."""

    request: _Request
    start: int
    """First byte, relative to the request's."""
    num_bytes: int


@dataclass(kw_only=True, slots=True)
class _OpenFile:
    """The descriptors of one path; closed by the cache of open files."""

    path: str
    flags: int
    """Of open, without O_DIRECT."""
    device: int
    """st_dev: what a refusal of direct I/O is remembered for."""
    alignment: DirectAlignment = field(default_factory=DirectAlignment)
    why_buffered: str | None = None
    """Set where this file, not its file system, has no direct I/O."""
    direct_descriptor: int | None = None
    buffered_descriptor: int | None = None
    """Opened when first needed. At least one of the two is open."""

    @property
    def writable(self) -> bool:
        return bool(self.flags & os.O_RDWR)

    @property
    def any_descriptor(self) -> int:
        descriptor = self.direct_descriptor if self.buffered_descriptor is None else self.buffered_descriptor
        assert descriptor is not None
        return descriptor

    def close(self) -> None:
        descriptors = (self.direct_descriptor, self.buffered_descriptor)
        self.direct_descriptor = self.buffered_descriptor = None
        for descriptor in descriptors:
            if descriptor is not None:
                os.close(descriptor)


def _device_name(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"
