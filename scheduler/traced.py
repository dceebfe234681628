"""A handler around another one that notes when its ops ran, for `trace.py`; the trainer says what is executed next.

It changes nothing of what ops do, nor of their order. What becomes of the notes is decided in `trace_events.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_native_id
from time import perf_counter_ns

from hoist.scheduler.annotate import OpNames
from hoist.scheduler.executor import Done, Handler, Mark
from hoist.scheduler.link import LinkedPlan
from hoist.scheduler.ops import Op
from hoist.scheduler.trace import BATCH_NOTES, Trace
from hoist.scheduler.trace_events import KEPT_PLANS, BeginNote, PlanNotes, SliceNote, TrackNote


class Traced:
    """A handler that notes when the ops of another one ran. The trainer says what is executed next.

    A note is a tuple and an append, which need no lock: a lane must not wait for one that notes, nor for the writer.
    """

    def __init__(
        self,
        trace: Trace,
        handler: Handler,
        *,
        names: OpNames,
        io_bytes: Callable[[Op], int],
        held: Callable[[], tuple[int, ...]],
    ) -> None:
        """``io_bytes``: what an I/O op moves; ``held``: what each tier holds now, in the tiers' order."""
        self._trace = trace
        self._notes = trace.notes
        self._handler = handler
        self._names = names
        self._io_bytes = io_bytes
        self._held = held
        #: Held while the begin or end of an I/O op is timed and noted, so that both have the same order; the counters
        #: of I/O in flight need that.
        self._io_order = threading.Lock()
        #: By the identity of what is linked, which a plan's notes keep. The training thread's.
        self._plans: dict[int, PlanNotes] = {}
        self._follows = False
        #: Streams whose threads have told of an end, which makes each a track.
        self._streams: set[str] = set()

    def begin(self, linked: LinkedPlan, step: int) -> None:
        """The executor is given this plan next."""
        plan = self._plans.get(id(linked))
        if plan is None:
            if len(self._plans) >= KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[id(linked)] = PlanNotes(linked, self._names, self._io_bytes)
        self._notes.append(BeginNote(plan, step, self._follows))
        self._follows = True

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        """Carry out an op and note it; one that is put in a stream is noted by :meth:`ended`."""
        start = perf_counter_ns()
        try:
            mark = self._handler.run(op, step, after)
        except BaseException as error:
            stop = perf_counter_ns()
            self._notes.append((op, step, get_native_id(), start, stop, self._held(), type(error).__name__))
            raise
        if mark is not None:
            return mark
        stop = perf_counter_ns()
        self._notes.append((op, step, get_native_id(), start, stop, self._held(), None))
        if len(self._notes) >= BATCH_NOTES:
            self._trace.wait_for_room()
        return None

    def ended(
        self, op: Op, step: int, stream: str, start: float, stop: float, error: BaseException | None
    ) -> None:
        """Note an op that was in a stream: for the executor, whose thread of that stream calls it."""
        thread = get_native_id()
        if stream not in self._streams:
            self._streams.add(stream)
            self._notes.append(TrackNote(f"{stream} stream", thread, op.lane))
        failed = None if error is None else type(error).__name__
        self._notes.append((op, step, thread, round(1e9 * start), round(1e9 * stop), self._held(), failed))
        if len(self._notes) >= BATCH_NOTES:
            self._trace.wait_for_room()

    def start(self, op: Op, step: int, done: Done) -> None:
        """Begin an I/O op; it is noted when it ends."""
        left = True
        with self._io_order:
            start = perf_counter_ns()
            self._notes.append((op, step, 0, start, 0, (), None))

        def note(error: BaseException | None) -> None:
            nonlocal left
            with self._io_order:
                if not left:
                    return
                left = False
                stop = perf_counter_ns()
                failed = None if error is None else type(error).__name__
                self._notes.append((op, step, 0, start, stop, self._held(), failed))
            if len(self._notes) >= BATCH_NOTES:
                self._trace.wait_for_room()

        def ended(error: BaseException | None) -> None:
            note(error)
            done(error)

        try:
            self._handler.start(op, step, ended)
        except BaseException as error:
            note(error)
            raise

    @contextmanager
    def whole(self, name: str) -> Iterator[dict[str, object]]:
        """A step, an evaluation or what else the caller waits for, on a track of its own; what is yielded is told with
        it. At its end what was noted is written, and a trace that has ended early is told of.
        """
        args: dict[str, object] = {}
        start = perf_counter_ns()
        try:
            yield args
        finally:
            self._notes.append(SliceNote(name, 0, start, perf_counter_ns(), args, self._held()))
            self._trace.ask()
        self._trace.tell()

    @contextmanager
    def part(self, name: str) -> Iterator[dict[str, object]]:
        """Something within an op or a step, on the track of the calling thread."""
        args: dict[str, object] = {}
        start = perf_counter_ns()
        try:
            yield args
        finally:
            self._notes.append(SliceNote(name, get_native_id(), start, perf_counter_ns(), args, self._held()))
