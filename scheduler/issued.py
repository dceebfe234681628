"""What a device has been given and has not ended: marks in the order of streams, and the threads that wait for them.

Knows nothing of plans; `executor.py` says what follows an op's end. What streams and marks are: `tiers/device/base.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from hoist.scheduler.executor import Mark

_Item = TypeVar("_Item")


@dataclass(eq=False, kw_only=True, slots=True)
class Passing(Generic[_Item]):
    """An op that returned before what it was to come after had ended: until then it has not ended either."""

    item: _Item
    num_left: int
    """Marks that must still be reached."""


@dataclass(eq=False, kw_only=True, slots=True)
class Issued(Generic[_Item]):
    """An op whose work is in a stream. Times are ``time.perf_counter()`` seconds."""

    item: _Item
    mark: Mark
    number: int
    """How many had been issued with it."""
    num_before: int
    """How many had been issued when its issuing began: all of these lie before it, where they share its stream."""
    issued_at: float
    """When its issuing began."""
    after: tuple[Issued[_Item], ...]
    """What it comes after in other streams; empty once it has ended."""
    start: float = 0.0
    """When its turn came, at the earliest. Only once it has ended."""
    stop: float = 0.0
    """When its mark was seen to be reached; 0: it has not ended."""
    passing: list[Passing[_Item]] = field(default_factory=list)
    """Ops that have ended when this one has, if nothing else is left."""

    @property
    def has_ended(self) -> bool:
        """Its mark was reached, or waiting for it failed."""
        return self.stop > 0.0


def latest(issued: Iterable[Issued[_Item]]) -> tuple[Issued[_Item], ...]:
    """Those that have not ended, but none before which another one of the same stream makes sure of.

    Two that were being issued at the same time, on different threads, both stay: their order is not known.
    """
    left = sorted({each for each in issued if not each.has_ended}, key=lambda each: each.number)
    last = {each.mark.stream: each for each in left}
    return tuple(
        each for each in left if each is last[each.mark.stream] or each.number > last[each.mark.stream].num_before
    )


class Streams(Generic[_Item]):
    """Waits for marks, on one thread a stream, and tells of every end: of an op only after those that it came after."""

    def __init__(
        self, lock: threading.Lock, ended: Callable[[Issued[_Item], float, float, BaseException | None], None]
    ) -> None:
        """``lock`` guards everything here and is the caller's too.

        ``ended`` is called without it, on a stream's thread: with start and stop, and the error if waiting failed. It
        must call :meth:`settle`.
        """
        self._lock = lock
        self._ended = ended
        #: Somebody has ended.
        self._settled = threading.Condition(lock)
        #: Per stream, what has been issued and has not ended, in that order.
        self._queues: dict[str, deque[Issued[_Item]]] = {}
        self._filled: dict[str, threading.Condition] = {}
        self._threads: list[threading.Thread] = []
        #: Per stream, when its last op ended.
        self._last_stops: dict[str, float] = {}
        self._closing = False

    def add(self, issued: Issued[_Item]) -> bool:
        """Watch for its end. The lock is held. False after :meth:`close`: the caller must :meth:`see` to it itself."""
        if self._closing:
            return False
        stream = issued.mark.stream
        if stream not in self._queues:
            self._queues[stream] = deque()
            self._filled[stream] = threading.Condition(self._lock)
            thread = threading.Thread(target=self._watch, args=(stream,), name=f"hoist-wait-{stream}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[stream].append(issued)
        self._filled[stream].notify()
        return True

    def settle(self, issued: Issued[_Item], start: float, stop: float) -> None:
        """An op has ended. The lock is held."""
        issued.start, issued.stop, issued.after = start, stop, ()
        self._last_stops[issued.mark.stream] = stop
        queue = self._queues.get(issued.mark.stream)
        if queue and queue[0] is issued:
            queue.popleft()
        self._settled.notify_all()

    def see(self, issued: Issued[_Item]) -> None:
        """Wait for an op's mark and tell of its end. The lock is not held."""
        error: BaseException | None = None
        try:
            issued.mark.wait()
        except BaseException as raised:  # goes to whoever is told
            error = raised
        with self._lock:
            # They have been reached too, unless this one failed at once; whoever waits for them is about to say so.
            while not all(each.has_ended for each in issued.after):
                self._settled.wait()
            start, stop = self._start(issued), perf_counter()
        self._ended(issued, start, stop, error)

    def close(self) -> None:
        """Return when all that was issued has ended, and the threads with it. Idempotent."""
        with self._lock:
            self._closing = True
            for condition in self._filled.values():
                condition.notify()
        for thread in self._threads:
            thread.join()

    def waiting(self) -> Iterator[Issued[_Item]]:
        """What has not ended, in the order of issue. The lock is held."""
        return iter(sorted((each for queue in self._queues.values() for each in queue), key=lambda each: each.number))

    def at_work(self) -> list[tuple[_Item, float]]:
        """What the device is at, with its start: of each stream the next op, if it need not wait. The lock is held."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return [
            (each.item, self._start(each)) for each in heads if all(before.has_ended for before in each.after)
        ]

    def _start(self, issued: Issued[_Item]) -> float:
        """When the turn of the first op of a stream came: it was issued, and all before it had ended."""
        before = self._last_stops.get(issued.mark.stream, 0.0)
        return max([issued.issued_at, before, *(each.stop for each in issued.after)])

    def _watch(self, stream: str) -> None:
        queue, filled = self._queues[stream], self._filled[stream]
        while True:
            with self._lock:
                while not queue and not self._closing:
                    filled.wait()
                if not queue:
                    return
                issued = queue[0]
            self.see(issued)
