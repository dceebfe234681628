"""Makes a trace's events of what lanes noted: an op's slice, its track, the arrow from what it waited for, counters.

What is constant of an op is put into words once for its plan, so that its event is one format with its times. Threads
and files are `trace.py`'s business, the events' form `trace_file.py`'s.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hoist.scheduler.annotate import OpNames
from hoist.scheduler.link import LinkedPlan, join
from hoist.scheduler.ops import Lane, Op
from hoist.scheduler.trace_file import (
    arrow_form,
    complete_event,
    counters_form,
    micros,
    name_events,
    op_form,
)
from hoist.tiers.manager import Tier

#: Plans, and pairs of them, whose words and dependencies are kept.
KEPT_PLANS = 4
#: Arrows begin so long before the end of an op, or where it begins: viewers round to more than nanoseconds.
_TAIL_NANOSECONDS = 1000
#: Numbers of tracks that stand for no thread: beyond any that Linux gives one.
_STEPS_TRACK, _BOOKKEEPING_TRACKS, _IO_TRACKS = 5_000_000, 5_010_000, 5_020_000
#: Of tracks from top to bottom; steps are above them all.
_ORDER = {Lane.COMPUTE: 1, Lane.OPTIM: 2, Lane.COPY: 3, Lane.COMMIT: 4, Lane.IO: 100, Lane.NONE: 10_000}

#: An op has ended, or an I/O op begins: op, the step in whose plan it is, the thread that carried it out (0: I/O),
#: start, stop (0: it begins), what each tier holds (in their order; empty: not asked), the error's name. Times are
#: ``perf_counter_ns``. A bare tuple, since it is made on the lanes.
OpNote: TypeAlias = tuple[Op, int, int, int, int, tuple[int, ...], str | None]


class PlanNotes:
    """What is needed of a plan to make events of its ops."""

    def __init__(self, linked: LinkedPlan, names: OpNames, io_bytes: Callable[[Op], int]) -> None:
        self.linked = linked  # kept, so that the ids below stay those of its ops
        self.names = names
        self.numbers = {id(op): number for number, op in enumerate(linked.plan.ops)}
        #: Whether an op that makes something again moves any shows only when it runs.
        self.num_bytes = [io_bytes(op) if op.lane is Lane.IO and not op.redo else 0 for op in linked.plan.ops]
        #: Per op, its event but for track, start, duration and step; empty: not needed yet. The writing thread's.
        self.forms = [""] * len(self.numbers)
        #: Per op, the earlier ops of the plan that it waits for. The writing thread's, when it first needs it.
        self.waits_for: Sequence[Sequence[int]] = ()


@dataclass(slots=True)
class BeginNote:
    """A plan is given to the executor."""

    plan: PlanNotes
    step: int
    #: Between notes of one trainer alone there are dependencies.
    follows: bool


@dataclass(slots=True)
class SliceNote:
    """Something else has ended."""

    name: str
    thread: int
    """Whose track it is on; 0: that of steps."""
    start: int
    stop: int
    args: Mapping[str, object]
    held: tuple[int, ...]
    """What each tier holds, as in an :data:`OpNote`."""


@dataclass(slots=True)
class TrackNote:
    """A thread's track is that of a stream, not of a lane; before anything is noted of it."""

    name: str
    thread: int
    lane: Lane
    """Whose track it is beside."""


Note: TypeAlias = OpNote | BeginNote | SliceNote | TrackNote


@dataclass(slots=True)
class _Run:
    """A plan that is executed."""

    plan: PlanNotes
    step: int
    before: _Run | None
    """The run before it, until all of this one is written."""
    waits_before: Mapping[int, Sequence[int]]
    """Per op, what it waits for in ``before``."""
    num_left: int = field(init=False)
    """Ops that have not ended."""
    stops: list[int] = field(init=False)
    """Per op, its end; 0: it has not ended."""
    tracks: list[int] = field(init=False)
    """Per op that has ended, or of I/O that has begun."""
    begins: list[str] = field(init=False)
    """Per op that has begun, its start, as in events."""
    tails: list[int] = field(init=False)
    """Per op that has ended, where arrows from it begin."""

    def __post_init__(self) -> None:
        count = self.num_left = len(self.plan.numbers)
        self.stops, self.tracks, self.tails = [0] * count, [0] * count, [0] * count
        self.begins = [""] * count


class Events:
    """Turns notes into events, in the order in which they were noted. One thread at a time."""

    def __init__(self, process: int, offset: int) -> None:
        """``offset``: what is added to a ``perf_counter_ns`` for nanoseconds since the file's base."""
        self._process = process
        self._offset = offset
        #: Of plans that are executed, the oldest first.
        self._runs: list[_Run] = []
        self._last: _Run | None = None
        self._joins: dict[tuple[int, int], tuple[PlanNotes, PlanNotes, dict[int, list[int]]]] = {}
        #: Tracks that have a name.
        self._named: set[int] = set()
        self._free_io: list[int] = []
        self._num_io_tracks = 0
        #: Per track of bookkeeping, the end of the last op on it.
        self._bookkeeping: list[int] = []
        self._held: tuple[int, ...] = ()
        self._io_in_flight = self._io_bytes = 0
        self._next_arrow = 1
        self._arrow = arrow_form(process)
        self._io_counters = counters_form(process, ["i/o ops in flight", "i/o bytes in flight"])
        self._tier_counters = [counters_form(process, [f"{tier.value} bytes"]) for tier in Tier]
        self._out: list[str] = []

    def of(self, notes: Iterable[Note]) -> list[str]:
        """The events, as :meth:`~hoist.scheduler.trace_file.TraceFile.write` takes them."""
        for note in notes:
            if isinstance(note, tuple):
                self._op(note)
            elif isinstance(note, BeginNote):
                self._begin(note)
            elif isinstance(note, TrackNote):
                self._name(note.thread, note.name, _ORDER[note.lane])
            else:
                self._slice(note)
        events, self._out = self._out, []
        return events

    # ------------------------------------------------------------------ plans

    def _begin(self, note: BeginNote) -> None:
        plan, last = note.plan, self._last if note.follows else None
        if not plan.waits_for:
            waits_for: list[list[int]] = [[] for _ in plan.numbers]
            for earlier, dependents in enumerate(plan.linked.dependents):
                for later in dependents:
                    waits_for[later].append(earlier)
            plan.waits_for = waits_for
        run = _Run(plan, note.step, last, {} if last is None else self._join(last.plan, plan))
        self._runs.append(run)
        self._last = run

    def _join(self, earlier: PlanNotes, later: PlanNotes) -> dict[int, list[int]]:
        """Per op of ``later``, those of ``earlier`` that it waits for."""
        key = id(earlier), id(later)
        if key not in self._joins:
            waits: dict[int, list[int]] = {}
            for before, after in join(earlier.linked, later.linked):
                waits.setdefault(after, []).append(before)
            if len(self._joins) >= KEPT_PLANS:
                del self._joins[next(iter(self._joins))]
            self._joins[key] = earlier, later, waits
        return self._joins[key][2]

    def _find(self, op: Op, step: int) -> tuple[_Run, int]:
        for run in self._runs:
            if run.step == step:
                number = run.plan.numbers.get(id(op))
                if number is not None:
                    return run, number
        raise RuntimeError(f"{op} of step {step} is in no plan that the trace was told of")

    # ------------------------------------------------------------------ ops

    def _op(self, note: OpNote) -> None:
        op, step, thread, start, stop, held, error = note
        run, number = self._find(op, step)
        plan, lane = run.plan, op.lane
        if lane is Lane.IO:
            if not stop:
                begins = run.begins[number] = micros(start + self._offset)
                run.tracks[number] = self._io_track()
                self._count_io(begins, 1, plan.num_bytes[number])
                return
            begins, ends = run.begins[number], micros(stop + self._offset)
            track = run.tracks[number]
            heapq.heappush(self._free_io, track)
            self._count_io(ends, -1, -plan.num_bytes[number])
        else:
            begins = run.begins[number] = micros(start + self._offset)
            track = run.tracks[number] = thread if lane is not Lane.NONE else self._bookkeeping_track(start, stop)
            if track not in self._named:
                self._name(track, lane.value, _ORDER[lane])
        event = (plan.forms[number] or self._form(plan, number)) % (
            track, begins, micros(stop - start), step - op.delayed
        )  # fmt: skip
        if error is not None:
            event = f'{event[:-2]},"error":{json.dumps(error)}}}}}'
        self._out.append(event)
        self._add_arrow(run, number, track, begins)
        run.stops[number], run.tails[number] = stop, max(start, stop - _TAIL_NANOSECONDS)
        if held != self._held:
            self._count_held(stop, held)
        run.num_left -= 1
        if not run.num_left:
            self._runs.remove(run)
            run.before, run.waits_before = None, {}

    def _form(self, plan: PlanNotes, number: int) -> str:
        op = plan.linked.plan.ops[number]
        args = f'"kind":"{op.kind.name.lower()}"'
        if plan.num_bytes[number]:
            args += f',"bytes":{plan.num_bytes[number]}'
        if op.delayed:
            args += ',"delayed":true'
        form = plan.forms[number] = op_form(
            name=plan.names(op), category=op.lane.value, process=self._process, args=args
        )
        return form

    def _add_arrow(self, run: _Run, number: int, track: int, begins: str) -> None:
        """From what the op waited for last, if it waited. Not from what ends later: what ends at once where others are
        in streams has not waited.
        """
        source, stops, earlier = run, run.stops, run.plan.waits_for[number]
        last = max(earlier, key=stops.__getitem__) if earlier else -1
        before = run.before
        if before is not None and number in run.waits_before:
            other = max(run.waits_before[number], key=before.stops.__getitem__)
            if last < 0 or before.stops[other] > stops[last]:
                source, last = before, other
        if last >= 0 and source.stops[last]:
            arrow = self._next_arrow
            self._next_arrow += 1
            tail = micros(source.tails[last] + self._offset)
            self._out.append(self._arrow % (arrow, source.tracks[last], tail, arrow, track, begins))

    # ------------------------------------------------------------------ tracks

    def _name(self, track: int, name: str, order: int) -> None:
        self._named.add(track)
        self._out += name_events(self._process, track, name, order)

    def _io_track(self) -> int:
        """The first one that is free."""
        if self._free_io:
            return heapq.heappop(self._free_io)
        number, order = self._num_io_tracks, _ORDER[Lane.IO]
        self._num_io_tracks += 1
        self._name(_IO_TRACKS + number, f"i/o {number + 1}", order + number + 1)
        return _IO_TRACKS + number

    def _bookkeeping_track(self, start: int, stop: int) -> int:
        """The first one whose ops have ended before."""
        number = next((each for each, last in enumerate(self._bookkeeping) if last <= start), len(self._bookkeeping))
        if number == len(self._bookkeeping):
            self._bookkeeping.append(0)
            self._name(
                _BOOKKEEPING_TRACKS + number, f"bookkeeping {number + 1}", _ORDER[Lane.NONE] + number + 1
            )
        self._bookkeeping[number] = stop
        return _BOOKKEEPING_TRACKS + number

    # ------------------------------------------------------------------ counters, and what is no op

    def _count_io(self, at: str, ops: int, num_bytes: int) -> None:
        self._io_in_flight += ops
        self._io_bytes += num_bytes
        self._out.append(self._io_counters % (at, self._io_in_flight, at, self._io_bytes))

    def _count_held(self, at: int, held: tuple[int, ...]) -> None:
        """Of tiers that hold more or less than at the last note."""
        before = self._held or (-1,) * len(held)
        for form, value, last in zip(self._tier_counters, held, before, strict=True):
            if value != last:
                self._out.append(form % (micros(at + self._offset), value))
        self._held = held

    def _slice(self, note: SliceNote) -> None:
        track = note.thread or _STEPS_TRACK
        if track not in self._named:
            name, order = (Lane.COMPUTE.value, _ORDER[Lane.COMPUTE]) if note.thread else ("steps", 0)
            self._name(track, name, order)
        self._out.append(
            complete_event(
                name=json.dumps(note.name), category="step", process=self._process, track=track,
                start=note.start + self._offset, duration=note.stop - note.start,
                args=json.dumps({name: _plain(value) for name, value in note.args.items()}),
            )
        )  # fmt: skip
        if note.held != self._held:
            self._count_held(note.stop, note.held)


def _plain(value: object) -> object:
    """JSON has no word for what is infinite or no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
