"""An engine around an engine that takes device memory too: through a ring of host buffers, part by part.

For engines that move host memory only (`direct.py`); kvikio has buffers of its own. The caller makes and pins the ring,
streams and copies are `tiers/device/`'s business, the contract is in `base.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from hoist.tiers.device.base import Device, Stream, copying
from hoist.tiers.errors import TransferError
from hoist.tiers.io.alignment import cut_at_pages
from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine, IoStatistics
from hoist.tiers.io.pool import WorkerPool
from hoist.tiers.io.requests import (
    Counters,
    check_buffer,
    check_path,
    check_request,
    short_file_error,
    started_future,
    transfer_error,
)

Moving = Literal["read", "write"]
#: Names of the streams that the copies are put into: nothing else is, so that none of them waits for a kernel.
UP, DOWN = "bounce-up", "bounce-down"


def needs_ring(engine: IoEngine, device: Device) -> bool:
    """Whether transfers of the device's memory need a ring: it is not the host's, and the engine takes only that."""
    return device.is_separate and not engine.takes_device_memory


def for_device(engine: IoEngine, device: Device, *, ring: torch.Tensor, part_bytes: int) -> IoEngine:
    """The engine itself where :func:`needs_ring` says no; else a :class:`BounceEngine` that leaves it open."""
    if not needs_ring(engine, device):
        return engine
    return BounceEngine(engine, device=device, ring=ring, part_bytes=part_bytes)


class BounceEngine(IoEngine):
    """Device buffers go through the ring, in parts; all else is passed on as it is.

    A device buffer must be ready when a request is made: what fills it, or reads what it held, has been waited for.
    A part of a read is read into a free slot of the ring, then copied to the device, and the copy is waited for; of a
    write the other way round. So a future that is done means what it always does, and no mark is needed behind it.

    Parts are begun in the order in which they were asked for, as many at once as there are slots: a short request waits
    behind a long one, as in the engine inside, and none waits for ever. What is passed on waits for no slot.

    A failed copy is a TransferError as well, which ends with what the device says: to the caller, the range has not
    been moved, whichever way it broke. After the first failure no part of that request is begun any more.
    """

    takes_device_memory = True

    def __init__(
        self, inner: IoEngine, *, device: Device, ring: torch.Tensor, part_bytes: int, closes_inner: bool = False
    ) -> None:
        """Starts a thread for each slot.

        ``ring`` is host memory, uint8 [num_slots * part_bytes], page-aligned, pinned where the device wants that, and
        nobody else's until :meth:`close`. ``part_bytes`` is a multiple of 4096. ``closes_inner``: :meth:`close` closes
        ``inner`` too; else that is its owner's to do, afterwards. Raises ValueError for a ring that is not so.
        """
        if part_bytes < 1 or part_bytes % IO_ALIGN_BYTES:
            raise ValueError(f"part_bytes: got {part_bytes}, must be a positive multiple of {IO_ALIGN_BYTES}")
        check_buffer(ring, "ring")
        if not ring.numel() or ring.numel() % part_bytes or ring.data_ptr() % IO_ALIGN_BYTES:
            raise ValueError(
                f"ring: got {ring.numel()} bytes at {ring.data_ptr():#x}, must be a positive multiple of {part_bytes} "
                f"bytes at a multiple of {IO_ALIGN_BYTES}"
            )
        self.inner = inner
        self.name = inner.name
        self.part_bytes = min(inner.part_bytes, part_bytes)
        self.parts_at_once = inner.parts_at_once
        self._device = device
        self._slot_bytes = part_bytes
        self._closes_inner = closes_inner
        self._up, self._down = device.stream(UP), device.stream(DOWN)
        #: Slots that no part uses. There are as many threads: one that has a part finds a slot here.
        self._slots: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        slots = ring.split(part_bytes)
        for slot in slots:
            self._slots.put(slot)
        #: Requests for device memory, while the engine inside counts their parts.
        self._counters = Counters()
        #: Guards _closed against a submit, each request's progress, and the two counts.
        self._lock = threading.Lock()
        self._closed = False
        #: Held while a copy is put into a stream: one thread at a time may.
        self._putting = threading.Lock()
        #: Parts that the engine inside has been through with, well or not.
        self._num_parts: dict[Moving, int] = {"read": 0, "write": 0}
        self._pool = WorkerPool(len(slots), name="hoist-wait-io")

    # The contract

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._submit("read", path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._submit("write", path, offset, buffer)

    def flush(self, path: Path) -> Future[None]:
        check_path(path)
        self._refuse_if_closed("flush", path)
        return self.inner.flush(path)

    def forget(self, path: Path) -> None:
        self.inner.forget(path)

    def describe(self) -> str:
        return f"{self.inner.describe()}; memory of {self._device.describe()} {self.describe_device_path()}"

    def describe_device_path(self) -> str:
        ring = f"{len(self._pool)} host buffers of {self._slot_bytes / 2**20:g} MiB"
        return f"through {ring}, because the engine {self.inner.name} takes host memory only"

    def statistics(self) -> IoStatistics:
        """The inner engine's, but that a request counts once and not once a part. Its time in flight is of I/O alone.

        Bytes of parts that were moved count even where another part of the request failed.
        """
        with self._lock:
            parts = dict(self._num_parts)
        mine, seen = self._counters.snapshot(), self.inner.statistics()
        return replace(
            seen, reads=seen.reads - parts["read"] + mine.reads, writes=seen.writes - parts["write"] + mine.writes
        )

    def close(self) -> None:
        """See `base.py`; leaves the inner engine open, and what was passed on in flight, unless it is to close it."""
        with self._lock:
            self._closed = True
        self._counters.wait_idle()
        self._pool.close()
        if self._closes_inner:
            self.inner.close()

    # Submission: the caller's thread

    def _submit(self, operation: Moving, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        check_request(path, offset, buffer)
        if not buffer.numel():  # nothing, wherever it lies
            buffer = torch.empty(0, dtype=torch.uint8)
        if not self._device.owns(buffer):
            self._refuse_if_closed(operation, path)
            return self._call(operation)(path, offset, buffer)
        request = _Request(operation=operation, path=path, offset=offset, buffer=buffer)
        cuts = cut_at_pages(offset, buffer.numel(), self._slot_bytes)
        request.parts_left = len(cuts)
        with self._lock:
            if self._closed:
                raise _closed_error(operation, path)
            self._counters.begin()
            for start, num_bytes in cuts:
                self._pool.put(partial(self._run, request, start, num_bytes))
        return request.future

    def _refuse_if_closed(self, operation: str, path: Path) -> None:
        with self._lock:
            if self._closed:
                raise _closed_error(operation, path)

    # Execution: the pool's threads

    def _run(self, request: _Request, start: int, num_bytes: int) -> None:
        failure: TransferError | None = None
        # The future waits for the parts that other threads still move: only then is the buffer the caller's again.
        if request.failure is None:
            try:
                slot = self._slots.get_nowait()
                try:
                    self._move(request, start, num_bytes, slot)
                finally:
                    self._slots.put(slot)
            except Exception as error:
                failure = self._failure(request, error)
        with self._lock:
            request.failure = request.failure or failure
            request.parts_left -= 1
            if request.parts_left:
                return
        failure, total = request.failure, request.buffer.numel()
        request.buffer = torch.empty(0, dtype=torch.uint8)
        self._counters.end(request.operation, num_bytes=total, buffered_bytes=0, failed=failure is not None)
        if failure is None:
            request.future.set_result(None)
        else:
            request.future.set_exception(failure)

    def _move(self, request: _Request, start: int, num_bytes: int, slot: torch.Tensor) -> None:
        """Move one part completely. Raises whatever the engine inside or the device does; the slot is free then."""
        offset = request.offset + start
        theirs = request.buffer[start : start + num_bytes]
        # As far into the slot's first page as the file range is into its own: direct I/O takes all but the ends then.
        skew = offset % IO_ALIGN_BYTES
        ours = slot[skew : skew + num_bytes]
        if request.operation == "read":
            self._through_inner(request, offset, ours)
            self._copy(self._up, theirs, ours)
        else:
            self._copy(self._down, ours, theirs)
            self._through_inner(request, offset, ours)

    def _through_inner(self, request: _Request, offset: int, ours: torch.Tensor) -> None:
        future = self._call(request.operation)(request.path, offset, ours)
        try:
            future.result()
        finally:
            with self._lock:
                self._num_parts[request.operation] += 1

    def _copy(self, stream: Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        with self._putting:
            mark = stream.put(copying(to, source))
        mark.wait()

    def _call(self, operation: Moving) -> Callable[[Path, int, torch.Tensor], Future[None]]:
        return self.inner.read if operation == "read" else self.inner.write

    def _failure(self, request: _Request, error: Exception) -> TransferError:
        path, num_bytes = str(request.path), request.buffer.numel()
        if not isinstance(error, TransferError):
            return transfer_error(request.operation, path, request.offset, num_bytes, cause=error)
        if request.operation == "read" and error.errno is None:
            # What is said of a part beyond the end would be less than what is wrong with the request.
            try:
                file_bytes = request.path.stat().st_size
            except OSError:
                return error
            if file_bytes < request.offset + num_bytes:
                return short_file_error(path, request.offset, num_bytes, file_bytes)
        return error


@dataclass(kw_only=True, slots=True)
class _Request:
    """A transfer of device memory on its way through the ring."""

    operation: Moving
    path: Path
    offset: int
    buffer: torch.Tensor
    """The caller's; let go of when the request is finished."""
    parts_left: int = 0
    """Guarded by the engine's lock, as is what follows."""
    failure: TransferError | None = None
    """The first of any part."""
    future: Future[None] = field(default_factory=started_future)


def _closed_error(operation: str, path: Path) -> ValueError:
    return ValueError(f"{operation} of {path}: this I/O engine is closed")
