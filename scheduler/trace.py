"""What lanes note for `--trace`, and the thread that makes events of it and writes them.

Lanes note through `traced.py`; the file's format is `trace_file.py`'s. Without a trace none of this exists.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Self

from hoist.scheduler.annotate import OpNames
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.link import LinkedPlan
from hoist.scheduler.ops import Lane
from hoist.scheduler.trace_file import (
    TraceFile,
    check_trace_path,
    complete_event,
    counter_event,
    flow_events,
    name_events,
    process_events,
)

_log = logging.getLogger(__name__)

#: Notes after which the file is written within a step, and after which lanes wait until it is.
BATCH_NOTES, MOST_NOTES = 2048, 16384
#: Arrows begin so long before the end of an op, or where it begins: viewers round to more than nanoseconds.
_TAIL_NANOSECONDS = 1000
#: Numbers of tracks that stand for no thread: beyond any that Linux gives one.
_STEPS_TRACK, _BOOKKEEPING_TRACKS, _IO_TRACKS = 5_000_000, 5_010_000, 5_020_000
#: Of tracks from top to bottom; steps are above them all.
_ORDER = {Lane.COMPUTE: 1, Lane.OPTIM: 2, Lane.COPY: 3, Lane.COMMIT: 4, Lane.IO: 100, Lane.NONE: 10_000}


class PlanNotes:
    """What is needed of a plan to note its ops."""

    def __init__(self, linked: LinkedPlan) -> None:
        self.linked = linked  # kept, so that the ids below stay those of its ops
        self.numbers = {id(op): number for number, op in enumerate(linked.plan.ops)}
        waits_for: list[list[int]] = [[] for _ in linked.plan.ops]
        for earlier, dependents in enumerate(linked.dependents):
            for later in dependents:
                waits_for[later].append(earlier)
        #: Per op, the earlier ops of the plan that it waits for.
        self.waits_for = tuple(map(tuple, waits_for))


class RunNotes:
    """One plan that is being executed, and when its ops ran."""

    def __init__(self, plan: PlanNotes, names: OpNames, step: int) -> None:
        count = len(plan.numbers)
        self.plan = plan
        self.names = names
        self.step = step
        #: The run before, and per op what it waits for there; until everything of this run is written.
        self.before: RunNotes | None = None
        self.waits_before: Mapping[int, list[int]] = {}
        #: Ops that have not ended. Guarded by the trace's lock.
        self.num_left = count
        #: The writing thread's: ops that are not written; of those that are, ends (0: none), tracks, and where arrows
        #: begin.
        self.num_unwritten = count
        self.stops = array("q", bytes(8 * count))
        self.tracks = array("q", bytes(8 * count))
        self.tails = array("q", bytes(8 * count))


@dataclass(slots=True)
class OpNote:
    """An op has ended. Times are ``perf_counter_ns``."""

    run: RunNotes
    number: int
    track: int
    start: int
    stop: int
    num_bytes: int
    error: str | None


@dataclass(slots=True)
class SliceNote:
    """Something else has ended."""

    name: str
    track: int
    start: int
    stop: int
    args: Mapping[str, object]


@dataclass(slots=True)
class CounterNote:
    """A counter has changed."""

    name: str
    at: int
    value: int


@dataclass(slots=True)
class TrackNote:
    """A track begins."""

    track: int
    name: str
    order: int


class _Tracks:
    """Numbered tracks for what overlaps: each op takes the first one that is free. The trace's lock guards them."""

    def __init__(self, name: str, first: int, order: int) -> None:
        self.name, self.first, self.order = name, first, order
        self.count = 0
        self._free: list[int] = []

    def take(self) -> tuple[int, bool]:
        """A track, and whether it is new."""
        if self._free:
            return heapq.heappop(self._free), False
        self.count += 1
        return self.first + self.count - 1, True

    def give_back(self, track: int) -> None:
        """Nothing runs on it any more."""
        heapq.heappush(self._free, track)


class Trace:
    """Writes what trainers do to a file, from its creation until :meth:`close`. One trainer at a time.

    Lanes note; a thread of its own writes, at the end of each step, and within it whenever much has been noted. If the
    file cannot be written, the trace ends there with a notice and the run goes on.
    """

    def __init__(
        self, path: str | Path, *, notice: Callable[[str], None] | None = None, option: str = "trace:"
    ) -> None:
        """``notice`` is told, on the training thread, why a trace ends early; default: the log. ``option`` is what the
        user calls the path.

        Replaces a file that is there. Raises ConfigError if it cannot be made.
        """
        check_trace_path(Path(path), option)
        try:
            self._file = TraceFile(Path(path))
        except OSError as error:
            raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}; name another file") from error
        self._notice = notice or (lambda text: _log.warning("%s", text))
        self._process = os.getpid()
        #: What is added to a ``perf_counter_ns`` for nanoseconds since the file's base.
        self._offset = time.time_ns() - perf_counter_ns() - self._file.base_nanoseconds
        #: Guards everything below it, and what it says.
        self.changed = threading.Condition()
        self._notes: list[OpNote | SliceNote | CounterNote | TrackNote] = []
        self._tracks = {
            Lane.IO: _Tracks("i/o", _IO_TRACKS, _ORDER[Lane.IO]),
            Lane.NONE: _Tracks("bookkeeping", _BOOKKEEPING_TRACKS, _ORDER[Lane.NONE]),
        }
        self._named: set[int] = set()
        #: Counters' last values, by name.
        self._counters: dict[str, int] = {}
        self._asked = self._writing = self._closing = False
        #: Why nothing is written any more.
        self._failure: BaseException | None = None
        self._told = False
        #: Number of the next arrow; the writing thread's.
        self._next_flow = 1
        self._thread = threading.Thread(target=self._serve, name="hoist-trace", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Return when everything noted so far is in the file, or the trace has ended."""
        with self.changed:
            self.ask()
            while (self._notes or self._writing) and self._failure is None and not self._closing:
                self.changed.wait()

    def close(self) -> None:
        """Write what is left and end the file. Idempotent. Raises only what would be a fault of hoist itself."""
        with self.changed:
            if self._closing:
                return
            self._closing = True
            self.changed.notify_all()
        self._thread.join()
        if self._failure is None:
            try:
                self._file.close()
            except OSError as error:
                self._failure = error
        self.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def tell(self) -> None:
        """Say once if the trace has ended early."""
        failure = self._failure
        if failure is None or self._told:
            return
        self._told = True
        if not isinstance(failure, OSError):
            raise failure
        self._notice(f"the trace {self._file.path} ends here, it cannot be written: {failure.strerror or failure}")

    # ------------------------------------------------------------------ for `traced.py`, which holds the lock

    def put(self, note: OpNote | SliceNote | CounterNote | TrackNote) -> None:
        """Note it, unless the trace has ended."""
        if self._failure is None:
            self._notes.append(note)

    def count(self, name: str, at: int, value: int) -> None:
        """A counter's value from a time on."""
        if self._counters.get(name) != value:
            self._counters[name] = value
            self.put(CounterNote(name, at, value))

    def wait_for_room(self) -> None:
        """Let the writing thread catch up, if it is far behind."""
        if len(self._notes) >= BATCH_NOTES:
            self.changed.notify_all()
            while len(self._notes) >= MOST_NOTES and self._failure is None and not self._closing:
                self.changed.wait()

    def thread_track(self, lane: Lane) -> int:
        """The track of the calling thread, which serves a lane."""
        return self._named_track(threading.get_native_id(), lane.value, _ORDER[lane])

    def steps_track(self) -> int:
        """The track of whole steps, evaluations and so on."""
        return self._named_track(_STEPS_TRACK, "steps", 0)

    def _named_track(self, track: int, name: str, order: int) -> int:
        if track not in self._named:
            self._named.add(track)
            self.put(TrackNote(track, name, order))
        return track

    def take_track(self, lane: Lane) -> int:
        """A free track of a lane whose ops overlap."""
        tracks = self._tracks[lane]
        track, is_new = tracks.take()
        if is_new:
            self.put(TrackNote(track, f"{tracks.name} {tracks.count}", tracks.order + tracks.count))
        return track

    def give_track(self, lane: Lane, track: int) -> None:
        """Nothing runs any more on what :meth:`take_track` gave."""
        self._tracks[lane].give_back(track)

    def ask(self) -> None:
        """Have everything written that is noted."""
        self._asked = True
        self.changed.notify_all()

    # ------------------------------------------------------------------ the writing thread

    def _serve(self) -> None:
        try:
            self._file.write(process_events(self._process, "hoist", _clock_label(self._file.base_nanoseconds)))
            closing = False
            while not closing:
                with self.changed:
                    while not (self._closing or self._asked or len(self._notes) >= BATCH_NOTES):
                        self.changed.wait()
                    notes, self._notes = self._notes, []
                    self._asked, self._writing, closing = False, True, self._closing
                    self.changed.notify_all()
                events: list[str] = []
                for note in notes:
                    self._render(note, events)
                self._file.write(events)
                with self.changed:
                    self._writing = False
                    self.changed.notify_all()
        except BaseException as error:  # told by the next step, or when the trace is closed
            self._file.abandon()
            with self.changed:
                self._failure = error
                self._notes.clear()
                self.changed.notify_all()

    def _render(self, note: OpNote | SliceNote | CounterNote | TrackNote, events: list[str]) -> None:
        match note:
            case OpNote():
                self._render_op(note, events)
            case SliceNote():
                events.append(
                    complete_event(
                        name=json.dumps(note.name), category="step", process=self._process, track=note.track,
                        start=note.start + self._offset, duration=note.stop - note.start,
                        args=json.dumps({name: _plain(value) for name, value in note.args.items()}),
                    )
                )  # fmt: skip
            case CounterNote():
                events.append(
                    counter_event(name=note.name, process=self._process, at=note.at + self._offset, value=note.value)
                )
            case TrackNote():
                events.extend(name_events(self._process, note.track, note.name, note.order))

    def _render_op(self, note: OpNote, events: list[str]) -> None:
        run, op = note.run, note.run.plan.linked.plan.ops[note.number]
        args = f'"step":{run.step - op.delayed},"kind":"{op.kind.name.lower()}"'
        if note.num_bytes:
            args += f',"bytes":{note.num_bytes}'
        if op.delayed:
            args += ',"delayed":true'
        if note.error is not None:
            args += f',"error":{json.dumps(note.error)}'
        events.append(
            complete_event(
                name=json.dumps(run.names(op)), category=op.lane.value, process=self._process, track=note.track,
                start=note.start + self._offset, duration=note.stop - note.start, args=f"{{{args}}}",
            )
        )  # fmt: skip
        run.stops[note.number], run.tracks[note.number] = note.stop, note.track
        run.tails[note.number] = max(note.start, note.stop - _TAIL_NANOSECONDS)
        source, number = max(
            self._awaited(run, note.number), key=lambda pair: pair[0].stops[pair[1]], default=(run, note.number)
        )
        if number != note.number or source is not run:
            events.extend(
                flow_events(
                    number=self._next_flow,
                    process=self._process,
                    tail=(source.tracks[number], source.tails[number] + self._offset),
                    head=(note.track, note.start + self._offset),
                )
            )
            self._next_flow += 1
        run.num_unwritten -= 1
        if not run.num_unwritten:
            run.before, run.waits_before = None, {}

    @staticmethod
    def _awaited(run: RunNotes, number: int) -> Iterator[tuple[RunNotes, int]]:
        for earlier in run.plan.waits_for[number]:
            yield run, earlier
        if run.before is not None:
            for earlier in run.waits_before.get(number, ()):
                yield run.before, earlier


def _plain(value: object) -> object:
    """JSON has no word for what is infinite or no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _clock_label(base_nanoseconds: int) -> str:
    base = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(base_nanoseconds // 10**9))
    return f"times are since {base} UTC"
