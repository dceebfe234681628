"""A handler around another one that notes when its ops ran, for `trace.py`; the trainer says what is executed next.

It changes nothing of what ops do, nor of their order. What is written, and how, is decided in `trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from hoist.scheduler.annotate import OpNames
from hoist.scheduler.executor import Done, Handler
from hoist.scheduler.link import LinkedPlan, join
from hoist.scheduler.ops import Lane, Op
from hoist.scheduler.trace import OpNote, PlanNotes, RunNotes, SliceNote, Trace
from hoist.tiers.manager import Manager, Tier

#: Plans, and pairs of them, whose dependencies are kept.
_KEPT_PLANS = 4


class Traced:
    """A handler that notes when the ops of another one ran. The trainer says what is executed next."""

    def __init__(
        self, trace: Trace, handler: Handler, *, names: OpNames, io_bytes: Callable[[Op], int], manager: Manager
    ) -> None:
        self._trace = trace
        self._handler = handler
        self._names = names
        self._io_bytes = io_bytes
        self._manager = manager
        #: What is executed now, oldest first; replaced as a whole, under the trace's lock.
        self._runs: tuple[RunNotes, ...] = ()
        self._last: RunNotes | None = None
        self._plans: dict[int, PlanNotes] = {}
        self._joins: dict[tuple[int, int], tuple[PlanNotes, PlanNotes, dict[int, list[int]]]] = {}
        self._io_in_flight = self._io_bytes_in_flight = 0

    def begin(self, linked: LinkedPlan, step: int) -> None:
        """The executor is given this plan next."""
        plan = self._plan_notes(linked)
        run = RunNotes(plan, self._names, step)
        if self._last is not None:
            run.before, run.waits_before = self._last, self._join(self._last.plan, plan)
        self._last = run
        with self._trace.changed:
            self._runs = (*self._runs, run)

    def _plan_notes(self, linked: LinkedPlan) -> PlanNotes:
        found = self._plans.get(id(linked))
        if found is None:
            found = PlanNotes(linked)
            _keep(self._plans, id(linked), found)
        return found

    def _join(self, earlier: PlanNotes, later: PlanNotes) -> dict[int, list[int]]:
        """Per op of ``later``, those of ``earlier`` that it waits for."""
        key = id(earlier), id(later)
        if key not in self._joins:
            waits: dict[int, list[int]] = {}
            for before, after in join(earlier.linked, later.linked):
                waits.setdefault(after, []).append(before)
            _keep(self._joins, key, (earlier, later, waits))
        return self._joins[key][2]

    def _find(self, op: Op, step: int) -> tuple[RunNotes, int]:
        for run in self._runs:
            number = run.plan.numbers.get(id(op))
            if number is not None and run.step == step:
                return run, number
        raise RuntimeError(f"{op} of step {step} is in no plan that the trace was told of")

    def run(self, op: Op, step: int) -> None:
        """Carry out an op and note it."""
        trace = self._trace
        run, number = self._find(op, step)
        with trace.changed:
            track = trace.take_track(Lane.NONE) if op.lane is Lane.NONE else trace.thread_track(op.lane)
        start = perf_counter_ns()
        failed: str | None = None
        try:
            self._handler.run(op, step)
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            with trace.changed:
                self._note(OpNote(run, number, track, start, perf_counter_ns(), 0, failed))
                if op.lane is Lane.NONE:
                    trace.give_track(Lane.NONE, track)
                trace.wait_for_room()

    def start(self, op: Op, step: int, done: Done) -> None:
        """Begin an I/O op; it is noted when it ends."""
        trace = self._trace
        run, number = self._find(op, step)
        num_bytes = 0 if op.redo else self._io_bytes(op)  # whether what is made again is needed shows only then
        left = True
        with trace.changed:
            track = trace.take_track(Lane.IO)
            start = perf_counter_ns()
            self._count_io(start, 1, num_bytes)

        def note(error: BaseException | None) -> None:
            nonlocal left
            with trace.changed:
                if not left:
                    return
                left = False
                stop = perf_counter_ns()
                failed = None if error is None else type(error).__name__
                self._note(OpNote(run, number, track, start, stop, num_bytes, failed))
                self._count_io(stop, -1, -num_bytes)
                trace.give_track(Lane.IO, track)
                trace.wait_for_room()

        def ended(error: BaseException | None) -> None:
            note(error)
            done(error)

        try:
            self._handler.start(op, step, ended)
        except BaseException as error:
            note(error)
            raise

    def _note(self, note: OpNote) -> None:
        """An op has ended. The trace's lock is held."""
        trace, run = self._trace, note.run
        trace.put(note)
        held = self._manager.resident_bytes()
        for tier in Tier:
            trace.count(f"{tier.value} bytes", note.stop, held[tier])
        run.num_left -= 1
        if not run.num_left:
            self._runs = tuple(other for other in self._runs if other is not run)

    def _count_io(self, at: int, ops: int, num_bytes: int) -> None:
        self._io_in_flight += ops
        self._io_bytes_in_flight += num_bytes
        self._trace.count("i/o ops in flight", at, self._io_in_flight)
        self._trace.count("i/o bytes in flight", at, self._io_bytes_in_flight)

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
            trace = self._trace
            with trace.changed:
                trace.put(SliceNote(name, trace.steps_track(), start, perf_counter_ns(), args))
                trace.ask()
        trace.tell()

    @contextmanager
    def part(self, name: str) -> Iterator[dict[str, object]]:
        """Something within an op or a step, on the track of the calling thread."""
        args: dict[str, object] = {}
        start = perf_counter_ns()
        try:
            yield args
        finally:
            trace = self._trace
            with trace.changed:
                track = trace.thread_track(Lane.COMPUTE)
                trace.put(SliceNote(name, track, start, perf_counter_ns(), args))


def _keep(kept: dict[Any, Any], key: object, value: object) -> None:
    """Put it there in place of the oldest, if there are too many."""
    if len(kept) >= _KEPT_PLANS:
        del kept[next(iter(kept))]
    kept[key] = value
