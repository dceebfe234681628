"""Engines around engines, for tests of whatever uses one: record requests, fail or hold them, punish early reuse.

They implement the same contract and change nothing else about the engine inside. Faults of single system calls are in
`systemcalls.py`. No wrapper sleeps: order is forced by gates.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hoist.tiers.errors import TransferError
from hoist.tiers.io import IO_ALIGN_BYTES, IoEngine, IoStatistics
from hoist.tiers.io.requests import check_request, started_future
from tests.support.buffers import PAGE_BYTES, empty_buffer

POISON = 0xAA


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRequest:
    """What an engine was asked to do."""

    operation: Literal["read", "write", "flush"]
    path: Path
    offset: int = 0
    num_bytes: int = 0
    aligned: bool = True
    """Offset, length and address are multiples of 4096."""


class WrapperEngine(IoEngine):
    """Passes everything on; :meth:`close` closes the engine inside too."""

    name = "wrapper"

    def __init__(self, inner: IoEngine) -> None:
        self.inner = inner
        self.takes_device_memory = inner.takes_device_memory

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self.inner.read(path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self.inner.write(path, offset, buffer)

    def flush(self, path: Path) -> Future[None]:
        return self.inner.flush(path)

    def forget(self, path: Path) -> None:
        self.inner.forget(path)

    def describe(self) -> str:
        return f"{self.name} around {self.inner.describe()}"

    def describe_device_path(self) -> str:
        return self.inner.describe_device_path()

    def statistics(self) -> IoStatistics:
        return self.inner.statistics()

    def close(self) -> None:
        self.inner.close()


class RecordingEngine(WrapperEngine):
    """Keeps a list of all requests, in the order they were made."""

    name = "recording"

    def __init__(self, inner: IoEngine) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._requests: list[RecordedRequest] = []

    @property
    def requests(self) -> list[RecordedRequest]:
        """A copy of the list."""
        with self._lock:
            return list(self._requests)

    @property
    def unaligned(self) -> list[RecordedRequest]:
        """Those of them that break the hot path's rule; empty is what one wants."""
        return [request for request in self.requests if not request.aligned]

    def forget_requests(self) -> None:
        """Start the list anew."""
        with self._lock:
            self._requests.clear()

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        self._note(_recorded("read", path, offset, buffer))
        return super().read(path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        self._note(_recorded("write", path, offset, buffer))
        return super().write(path, offset, buffer)

    def flush(self, path: Path) -> Future[None]:
        self._note(RecordedRequest(operation="flush", path=path))
        return super().flush(path)

    def _note(self, request: RecordedRequest) -> None:
        with self._lock:
            self._requests.append(request)


class Gate:
    """Requests that a rule holds wait here until the test opens it; what comes later passes at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[Callable[[], None]] = []
        self._open = False

    def pass_or_hold(self, go_on: Callable[[], None]) -> None:
        """Run ``go_on`` now, or from :meth:`open`."""
        with self._changed:
            if not self._open:
                self._held.append(go_on)
                self._changed.notify_all()
                return
        go_on()

    def open(self) -> None:
        """Let everything held go on, in the order it came, on the calling thread. Idempotent."""
        with self._changed:
            self._open = True
            held, self._held = self._held, []
        for go_on in held:
            go_on()

    def wait_for(self, num_requests: int) -> None:
        """Block until that many requests are held."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._held) >= num_requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    """The request fails with this errno; a write has written its first ``after_bytes`` bytes then."""

    code: int = errno.EIO
    after_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """The request waits at a gate: before it starts, or with its bytes moved and its future not yet done."""

    gate: Gate
    when: Literal["before", "after"] = "before"


Rule = Callable[[RecordedRequest], Fail | Hold | None]


class FaultyEngine(WrapperEngine):
    """``rule(request)`` says what befalls each request; None leaves it alone. It runs on the caller's thread.

    :meth:`close` opens every gate that holds something of this engine.
    """

    name = "faulty"

    def __init__(self, inner: IoEngine, rule: Rule) -> None:
        super().__init__(inner)
        self._rule = rule
        self._lock = threading.Lock()
        self._gates: list[Gate] = []

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._apply(_recorded("read", path, offset, buffer), lambda: self.inner.read(path, offset, buffer))

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        request = _recorded("write", path, offset, buffer)
        return self._apply(
            request,
            lambda: self.inner.write(path, offset, buffer),
            lambda num_bytes: self.inner.write(path, offset, buffer[:num_bytes]).result(),
        )

    def flush(self, path: Path) -> Future[None]:
        return self._apply(RecordedRequest(operation="flush", path=path), lambda: self.inner.flush(path))

    def close(self) -> None:
        with self._lock:
            gates = list(self._gates)
        for gate in gates:
            gate.open()
        super().close()

    def _apply(
        self,
        request: RecordedRequest,
        start: Callable[[], Future[None]],
        tear: Callable[[int], None] = lambda num_bytes: None,
    ) -> Future[None]:
        fate = self._rule(request)
        if fate is None:
            return start()
        outer = started_future()
        if isinstance(fate, Fail):
            if fate.after_bytes:
                tear(fate.after_bytes)
            outer.set_exception(_injected_error(request, fate.code))
            return outer
        with self._lock:
            self._gates.append(fate.gate)
        if fate.when == "before":
            fate.gate.pass_or_hold(lambda: _chain(start(), outer))
        else:
            gate = fate.gate
            start().add_done_callback(lambda inner: gate.pass_or_hold(lambda: _chain(inner, outer)))
        return outer


class PoisoningEngine(WrapperEngine):
    """Makes early use of a buffer show as wrong bytes.

    A write's bytes are taken from the buffer late, at a random moment just before its future is done: who refills the
    buffer too early finds the wrong bytes on disk. A read's buffer is filled with 0xAA at once: who looks too early
    finds poison, and who writes to it meanwhile loses that. Requests complete in random order (``seed``).
    With ``poison_written`` a written buffer is filled with 0xAA before its future is done, for callers that say that
    it is free then.

    Waiting requests are served by a thread of its own, one after the other; with ``automatic=False`` only by
    :meth:`serve_all`, on the caller's thread.
    """

    name = "poisoning"

    def __init__(
        self, inner: IoEngine, seed: int = 0, *, poison_written: bool = False, automatic: bool = True
    ) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._poison_written = poison_written
        self._changed = threading.Condition()
        #: Jobs not begun; each resolves its own future.
        self._waiting: list[Callable[[], None]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="hoist-io-poisoning", daemon=True)
        if automatic:
            self._thread.start()

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        check_request(path, offset, buffer)
        inside = empty_buffer(buffer.numel(), skew=buffer.data_ptr() % PAGE_BYTES)

        def job() -> None:
            self.inner.read(path, offset, inside).result()
            buffer.copy_(inside)

        buffer.fill_(POISON)
        return self._put(path, job)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        check_request(path, offset, buffer)
        inside = empty_buffer(buffer.numel(), skew=buffer.data_ptr() % PAGE_BYTES)

        def job() -> None:
            inside.copy_(buffer)
            self.inner.write(path, offset, inside).result()
            if self._poison_written:
                buffer.fill_(POISON)

        return self._put(path, job)

    def serve_all(self) -> None:
        """Serve everything that waits, in random order, on this thread."""
        while (job := self._draw()) is not None:
            job()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.serve_all()
        super().close()

    def _put(self, path: Path, job: Callable[[], None]) -> Future[None]:
        future = started_future()

        def run() -> None:
            try:
                job()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        with self._changed:
            if self._closed:
                raise ValueError(f"{path}: this I/O engine is closed")
            self._waiting.append(run)
            self._changed.notify_all()
        return future

    def _draw(self) -> Callable[[], None] | None:
        with self._changed:
            if not self._waiting:
                return None
            return self._waiting.pop(self._random.randrange(len(self._waiting)))

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                # Not a sleep that order depends on: a chance for more requests to come, so that there is a choice.
                self._changed.wait(timeout=self._random.choice((0.0, 0.0005, 0.002)))
            job = self._draw()
            if job is not None:
                job()


def _recorded(
    operation: Literal["read", "write"], path: Path, offset: int, buffer: torch.Tensor
) -> RecordedRequest:
    check_request(path, offset, buffer)
    aligned = not (offset | buffer.numel() | buffer.data_ptr()) % IO_ALIGN_BYTES
    return RecordedRequest(
        operation=operation, path=path, offset=offset, num_bytes=buffer.numel(), aligned=aligned
    )


def _injected_error(request: RecordedRequest, code: int) -> TransferError:
    error = TransferError(
        f"{request.operation} of {request.num_bytes} bytes at offset {request.offset} of {request.path} failed: "
        f"injected {errno.errorcode[code]}"
    )
    error.errno = code
    return error


def _resolve(future: Future[None], failure: BaseException | None) -> None:
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)


def _chain(inner: Future[None], outer: Future[None]) -> None:
    inner.add_done_callback(lambda done: _resolve(outer, done.exception()))
