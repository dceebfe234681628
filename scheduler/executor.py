"""Runs any plan: hands each op to its lane once what it waits for is done. Knows nothing of models, tensors or files.

What an op does is the handler's business (`runtime.py`). The caller's thread is the compute lane; copy, optim and
commit have a thread each; I/O ops only start requests, whose completion comes from the I/O engine's threads. Ops of a
device are only issued by their lanes; what has been issued is in `issued.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from hoist.scheduler.issued import Issued, Passing, Streams, latest
from hoist.scheduler.link import LinkedPlan, join
from hoist.scheduler.ops import Kind, Lane, Op
from hoist.scheduler.spans import Span

#: Calls back when an I/O op has ended, with the error if it failed.
Done = Callable[[BaseException | None], None]


class Mark(Protocol):
    """A place in a stream of a device, behind the work of one op."""

    @property
    def stream(self) -> str:
        """The stream's name. Marks of one stream are reached in the order in which they were made."""

    def wait(self) -> None:
        """Return when the mark is reached, or raise what the work before it raised. From any thread, many times."""


class Handler(Protocol):
    """What ops do. ``run`` is called on the op's lane; ``start`` must not block."""

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        """Carry out a copy, compute, optim or commit op of a step, or keep the books of an op without a lane.

        The latter is called by whichever thread ended what the op waited for, and must not block.

        None: the op has ended. A mark: its work has been put in a stream, and the op ends when the mark is reached;
        of a kind that is not among the executor's ``device_kinds``, its lane waits for that.
        ``after`` are marks that this work must come after; only ops of ``device_kinds`` get any. An op that gets some
        and returns None may leave them alone: it has not ended for others until they are reached. If it raises, what it
        has put in a stream already is for the handler to wait for.
        """

    def start(self, op: Op, step: int, done: Done) -> None:
        """Begin an I/O op; ``done`` is called exactly once, from any thread."""


@dataclass(frozen=True, slots=True)
class Work:
    """One op and the step in whose plan it is."""

    op: Op
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What an executor is doing at one moment."""

    current: Mapping[Lane, Work | None]
    """Per lane, the op at work; None if it waits. For I/O, the oldest in flight; where ops of the lane are in streams,
    the oldest of them."""
    num_io: int
    """I/O ops in flight."""
    turn: Work | None
    """The compute op whose turn it is, whether at work or waited for; None if no step computes. Where compute ops are
    in streams, the oldest of them."""
    ahead: Work | None
    """From ``turn`` on, the first op that passes a micro-batch through a stage."""
    steps: tuple[int, ...]
    """Steps that have not ended, the oldest first."""
    error: BaseException | None
    """What ended it."""
    failed_op: Op | None
    """The op that raised it; None if no op did."""


class _Run:
    """The state of one step that is being executed."""

    def __init__(self, linked: LinkedPlan, step: int, device_kinds: frozenset[Kind]) -> None:
        self.linked = linked
        self.step = step
        self.ops = linked.plan.ops
        self.waiting = list(linked.num_dependencies)
        self.done = [False] * len(self.ops)
        self.num_left = len(self.ops)
        #: Ops that :meth:`Executor.run` waits for the ends of: what says the step's loss and measures its gradients.
        self.num_awaited = sum(op.kind in _AWAITED for op in self.ops)
        #: Ops of the next step that wait for an op of this one.
        self.later: dict[int, list[tuple[_Run, int]]] = {}
        #: Per op, whether its kind is the device's; empty if there are no such kinds.
        self.of_device = [op.kind in device_kinds for op in self.ops] if device_kinds else []
        #: Per op of the device that has not been issued, what has been that it comes after.
        self.after: dict[int, list[_Issued]] = {}
        #: Per op that has been issued and has not ended, what ops of the device that follow it come after. Those that
        #: were known wait for it no longer.
        self.behind: dict[int, tuple[_Issued, ...]] = {}

    def shares_device(self, index: int, other: _Run, later: int) -> bool:
        """Both ops are the device's: the second may be issued when the first has been."""
        return bool(self.of_device) and self.of_device[index] and other.of_device[later]


#: One runnable op of a run.
_Item = tuple[_Run, int]
_Issued = Issued[_Item]
#: Is told, before anything that waits for it begins, that an op in a stream has ended: op, step, stream, start, stop
#: (``time.perf_counter()`` seconds), and the error if it failed. Called by the stream's thread, of any op after those
#: that it came after; must not block.
Ended = Callable[[Op, int, str, float, float, BaseException | None], None]


class _Now:
    """What a thread is at; written by that thread, read by any."""

    __slots__ = ("item", "start")

    def __init__(self) -> None:
        self.item: _Item | None = None
        #: Since when; may be the start of the op after ``item`` for a moment.
        self.start = 0.0


class Executor:
    """Executes steps one after another, letting the end of one overlap the start of the next.

    After an op has failed, nothing new is started; the error is raised by the next call, naming the op, and by every
    call after that. What is in flight or in a stream then still completes before :meth:`close` returns.

    An op waits for the ends of those before it. Between two ops of the device, it is enough that the first has been
    issued: the second gets its mark, so that the device orders them and no lane waits.
    """

    def __init__(
        self, handler: Handler, *, device_kinds: frozenset[Kind] = frozenset(), ended: Ended | None = None
    ) -> None:
        """``device_kinds``: those whose ops put their work in streams of a device. ``ended`` hears of their ends."""
        self._handler = handler
        self._device_kinds = device_kinds
        self._hear_end = ended
        self._lock = threading.Lock()
        self._streams: Streams[_Item] = Streams(self._lock, self._end)
        self._num_issued = 0
        #: One condition a lane, all on the same lock, so that an op's end wakes only whom it concerns.
        #: COMPUTE's also wakes for finished steps, I/O that has landed, and errors.
        self._wake = {lane: threading.Condition(self._lock) for lane in Lane}
        self._error: BaseException | None = None
        self._failed_op: Op | None = None
        #: :attr:`_failed_op` has been said.
        self._told = False
        self._closing = False
        #: Steps that are not finished yet, oldest first; at most two.
        self._runs: deque[_Run] = deque()
        self._last: _Run | None = None
        self._spans: list[Span] = []
        #: Ops that may be taken in any order: all of two lanes, and the measuring of gradients, which the optim lane
        #: takes first, since the end of a step and the scale of its updates wait for it.
        self._ready: dict[Lane, deque[_Item]] = {Lane.COPY: deque(), Lane.COMMIT: deque(), Lane.OPTIM: deque()}
        #: Updates, which the optim lane takes strictly in plan order.
        self._optim_queue: deque[_Item] = deque()
        #: I/O ops that have begun and not ended, the oldest first, each with its start.
        self._in_flight: dict[_Item, float] = {}
        #: Per lane with a thread, the op that it is at; changed by that thread alone, one assignment an op.
        self._at = {lane: _Now() for lane in (Lane.COPY, Lane.COMPUTE, Lane.OPTIM, Lane.COMMIT)}
        #: The compute op whose turn it is; changed by the compute lane alone.
        self._turn = _Now()
        #: By the identities of two plans, which are kept here too, so that no other object can get theirs.
        self._joins: dict[tuple[int, int], tuple[LinkedPlan, LinkedPlan, Sequence[tuple[int, int]]]] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"hoist-{lane.value}", daemon=True)
            for lane in (Lane.COPY, Lane.OPTIM, Lane.COMMIT)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, linked: LinkedPlan, step: int) -> list[Span]:
        """Execute a step; returns when its compute ops have been carried out or issued, its losses are there and its
        gradients measured (updates may still be under way).

        Returns the spans of everything that ended since the previous call returned. Raises what an op raised, and
        ValueError once closed.
        """
        self.check()
        try:
            self._compute(_Run(linked, step, self._device_kinds))
        except BaseException as error:  # an interrupt while it waits leaves the step half done, like any other error
            self._turn.item = None
            self.abandon(error)
            raise
        return self._take_spans()

    def _compute(self, run: _Run) -> None:
        """The caller's share of a step: its compute ops, and waiting."""
        with self._lock:
            while len(self._runs) > 1 and not self._stopped:
                self._wake[Lane.COMPUTE].wait()
            self._raise_error()
            ready = self._register(run)
        self._dispatch(ready)
        turn, at = self._turn, self._at[Lane.COMPUTE]
        for index, op in enumerate(run.ops):
            if op.lane is not Lane.COMPUTE:
                continue
            turn.item = (run, index)
            with self._lock:
                while run.waiting[index] and not self._stopped:
                    self._wake[Lane.COMPUTE].wait()
                self._raise_error()
            self._work(at, turn.item)
            with self._lock:
                self._raise_error()
        turn.item = None
        with self._lock:
            while run.num_awaited and not self._stopped:
                self._wake[Lane.COMPUTE].wait()
            self._raise_error()

    def abandon(self, error: BaseException) -> None:
        """Nothing new is started from now on; the first error is the one that later calls raise. From any thread."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._wake_all()

    def check(self) -> None:
        """Raise what an op raised, if any has, and ValueError once closed."""
        with self._lock:
            self._raise_error()

    def drain(self) -> list[Span]:
        """Wait until everything that was given has ended; returns the spans since the last call.

        Raises what an op raised, and ValueError once closed.
        """
        with self._lock:
            while self._runs and not self._stopped:
                self._wake[Lane.COMPUTE].wait()
            self._raise_error()
        return self._take_spans()

    def close(self) -> None:
        """Stop the lanes after the op that each is at, wait for I/O in flight and for all that is in streams.

        Idempotent; raises nothing.
        """
        with self._lock:
            self._closing = True
            self._wake_all()
            while self._in_flight:
                self._wake[Lane.COMPUTE].wait()
        for thread in self._threads:
            thread.join()
        self._streams.close()  # last: until here a lane may have issued something

    def unfinished(self) -> list[Span]:
        """Spans of the ops at work, up to now; from any thread. A lane without one waits."""
        with self._lock:
            found: list[tuple[_Item, float]] = list(self._in_flight.items())
            found += self._streams.at_work()
            ahead = {_lane(each.item) for each in self._streams.waiting()}
        for lane, now in self._at.items():
            item = now.item
            # A lane that issues ahead is not what is at work.
            if item is not None and not (lane in ahead and item[0].of_device and item[0].of_device[item[1]]):
                found.append((item, now.start))
        stop = perf_counter()
        return [
            Span(run.ops[index], start, stop, run.step) for (run, index), start in found if start < stop
        ]

    def activity(self) -> Activity:
        """What it is doing now; from any thread."""
        with self._lock:
            oldest = next(iter(self._in_flight), None)
            num_io = len(self._in_flight)
            steps = tuple(run.step for run in self._runs)
            error, failed_op = self._error, self._failed_op
            issued: dict[Lane, _Item] = {}
            for each in self._streams.waiting():
                issued.setdefault(_lane(each.item), each.item)
        turn = issued.get(Lane.COMPUTE, self._turn.item)
        ahead = None
        if turn is not None:
            run, index = turn
            passing = next((op for op in run.ops[index:] if op.kind in _PASSING), None)
            ahead = None if passing is None else Work(passing, run.step)
        return Activity(
            current={
                Lane.IO: _work(oldest),
                **{lane: _work(issued.get(lane, now.item)) for lane, now in self._at.items()},
            },
            num_io=num_io,
            turn=_work(turn),
            ahead=ahead,
            steps=steps,
            error=error,
            failed_op=failed_op,
        )

    # ------------------------------------------------------------------ dependencies

    def _register(self, run: _Run) -> list[_Item]:
        """Take a step in; returns what can start at once. The lock is held."""
        previous = self._last
        if previous is not None and previous.num_left:
            key = (id(previous.linked), id(run.linked))
            joined = self._joins.get(key) or (previous.linked, run.linked, join(previous.linked, run.linked))
            if not previous.linked.plan.cold:  # a cold plan runs once: kept here, it would never be freed
                self._joins[key] = joined
            for earlier, later in joined[2]:
                if previous.done[earlier]:
                    continue
                if earlier in previous.behind and previous.shares_device(earlier, run, later):
                    run.after.setdefault(later, []).extend(previous.behind[earlier])
                else:
                    previous.later.setdefault(earlier, []).append((run, later))
                    run.waiting[later] += 1
        self._runs.append(run)
        self._last = run
        self._optim_queue.extend((run, index) for index, op in enumerate(run.ops) if _is_ordered(op))
        return [(run, index) for index, count in enumerate(run.waiting) if not count]

    def _finish(self, item: _Item, start: float, error: BaseException | None) -> None:
        """Mark an op as ended and start what waited for it."""
        run, index = item
        op = run.ops[index]
        stop = perf_counter()
        with self._lock:
            if op.lane is Lane.IO:
                del self._in_flight[item]
                if self._closing:
                    self._wake[Lane.COMPUTE].notify()
            if error is not None:
                self._fail(op, error)
                return
            if op.lane is not Lane.NONE:
                self._spans.append(Span(op, start, stop, run.step))
            ready = self._complete(run, index)
        self._dispatch(ready)

    def _fail(self, op: Op, error: BaseException) -> None:
        """An op has failed. The lock is held."""
        if self._error is None:
            self._error, self._failed_op = error, op
        self._wake_all()

    def _complete(self, run: _Run, index: int) -> list[_Item]:
        """An op has ended; returns what can start now. The lock is held."""
        ready = self._release(run, index)
        run.num_left -= 1
        if run.num_awaited and run.ops[index].kind in _AWAITED:
            run.num_awaited -= 1
        if not run.num_left:
            self._runs.remove(run)
        if not run.num_left or not run.num_awaited:
            self._wake[Lane.COMPUTE].notify()
        return ready

    def _wake_all(self) -> None:
        for condition in self._wake.values():
            condition.notify_all()

    def _release(self, run: _Run, index: int) -> list[_Item]:
        """Those that waited for the op's end wait for it no longer. The lock is held."""
        run.done[index] = True
        followers = run.linked.dependents[index]
        if run.behind and run.behind.pop(index, None) is not None:  # the device's do not wait since it was issued
            followers = tuple(later for later in followers if not run.shares_device(index, run, later))
        ready = _let_go(run, followers)
        if run.later:
            for other, later in run.later.pop(index, ()):
                ready += _let_go(other, (later,))
        return ready

    def _dispatch(self, ready: list[_Item]) -> None:
        """Hand runnable ops to their lanes. The lock is not held."""
        for item in ready:
            run, index = item
            op = run.ops[index]
            lane = op.lane
            if lane is Lane.NONE:
                with self._lock:
                    stopped = self._stopped
                if not stopped:
                    self._execute(item)
            elif lane is Lane.IO:
                self._start_io(item)
            else:
                with self._lock:
                    if lane in self._ready and not _is_ordered(op):  # compute and updates have a queue of their own
                        self._ready[lane].append(item)
                    self._wake[lane].notify()

    def _start_io(self, item: _Item) -> None:
        run, index = item
        with self._lock:
            if self._stopped:
                return
            start = self._in_flight[item] = perf_counter()
        ended = threading.Lock()

        def done(error: BaseException | None) -> None:
            # An interrupt can hit the caller inside of start(), after the request is on its way: the op ends once.
            if ended.acquire(blocking=False):
                self._finish(item, start, error)

        try:
            self._handler.start(run.ops[index], run.step, done)
        except BaseException as error:  # a lane never swallows: the next call raises it
            done(error)

    # ------------------------------------------------------------------ lanes

    def _execute(self, item: _Item) -> None:
        run, index = item
        if run.of_device and run.of_device[index]:
            self._issue(item)
            return
        start = perf_counter()
        try:
            mark = self._handler.run(run.ops[index], run.step)
            if mark is not None:
                mark.wait()
        except BaseException as error:
            self._finish(item, start, error)
        else:
            self._finish(item, start, None)

    def _work(self, at: _Now, item: _Item) -> None:
        """Carry an op out in a lane's own thread, which says so in ``at``."""
        at.start = perf_counter()
        at.item = item
        try:
            self._execute(item)
        finally:  # an interrupt may come right after the op
            at.item = None

    def _serve(self, lane: Lane) -> None:
        at = self._at[lane]
        while True:
            with self._lock:
                item = self._next(lane)
                while item is None and not self._closing:
                    self._wake[lane].wait()
                    item = self._next(lane)
                if item is None:
                    return
            self._work(at, item)

    def _next(self, lane: Lane) -> _Item | None:
        """The op that a lane's thread takes now, if any. The lock is held."""
        if self._stopped:
            return None
        queue = self._ready[lane]
        if queue:
            return queue.popleft()
        if lane is Lane.OPTIM and self._optim_queue:
            run, index = self._optim_queue[0]
            if not run.waiting[index]:
                return self._optim_queue.popleft()
        return None

    # ------------------------------------------------------------------ the device

    def _issue(self, item: _Item) -> None:
        """Have an op of the device put in a stream, and let go what only waited for that."""
        run, index = item
        with self._lock:
            if self._error is not None:
                return
            after = latest(run.after.pop(index, ()))
            num_before = self._num_issued
        issued_at = perf_counter()
        try:
            mark = self._handler.run(run.ops[index], run.step, [each.mark for each in after])
        except BaseException as error:
            self._finish(item, issued_at, error)
            return
        if mark is None:
            self._end_after(item, issued_at, after)
            return
        with self._lock:
            self._num_issued += 1
            issued = Issued(
                item=item,
                mark=mark,
                number=self._num_issued,
                num_before=num_before,
                issued_at=issued_at,
                after=after,
            )
            is_watched = self._streams.add(issued)
            ready = self._lend(run, index, (issued,))
        self._dispatch(ready)
        if not is_watched:
            self._streams.see(issued)

    def _lend(self, run: _Run, index: int, behind: tuple[_Issued, ...]) -> list[_Item]:
        """Ops of the device that wait for an op come after ``behind`` instead; returns what can start.

        The lock is held.
        """
        run.behind[index] = behind
        followers = [(run, later) for later in run.linked.dependents[index]]
        if index in run.later:
            followers += run.later[index]
            run.later[index] = [item for item in run.later[index] if not run.shares_device(index, *item)]
        ready: list[_Item] = []
        for other, later in followers:
            if run.shares_device(index, other, later):
                other.after.setdefault(later, []).extend(behind)
                ready += _let_go(other, (later,))
        return ready

    def _end_after(self, item: _Item, start: float, after: Sequence[_Issued]) -> None:
        """An op of the device has returned without a mark: it has ended when those that it comes after have."""
        run, index = item
        stop = perf_counter()
        with self._lock:
            left = tuple(each for each in after if not each.has_ended)
            if left:
                if run.ops[index].lane is not Lane.NONE:
                    self._spans.append(Span(run.ops[index], start, stop, run.step))
                passing = Passing(item=item, num_left=len(left))
                for each in left:
                    each.passing.append(passing)
                ready = self._lend(run, index, left)
        if left:
            self._dispatch(ready)
        else:
            self._finish(item, start, None)

    def _end(self, issued: _Issued, start: float, stop: float, error: BaseException | None) -> None:
        """The mark of an op was reached, or waiting for it failed. Called by the stream's thread."""
        run, index = issued.item
        op = run.ops[index]
        if self._hear_end is not None:
            try:
                self._hear_end(op, run.step, issued.mark.stream, start, stop, error)
            except BaseException as raised:  # a lane never swallows: the next call raises it
                error = error or raised
        with self._lock:
            self._streams.settle(issued, start, stop)
            if error is not None:
                self._fail(op, error)
                return
            if op.lane is not Lane.NONE:
                self._spans.append(Span(op, start, stop, run.step))
            ready = self._complete(run, index)
            for passing in issued.passing:
                passing.num_left -= 1
                if not passing.num_left:
                    ready += self._complete(*passing.item)
        self._dispatch(ready)

    # ------------------------------------------------------------------ ends

    @property
    def _stopped(self) -> bool:
        """Nothing new may start. The lock is held."""
        return self._error is not None or self._closing

    def _raise_error(self) -> None:
        """Raise what a lane raised; ValueError after :meth:`close`. The lock is held."""
        if self._error is not None:
            if self._failed_op is not None and not self._told:
                self._error.add_note(f"while executing {self._failed_op}")
                self._told = True
            raise self._error
        if self._closing:
            raise ValueError("the executor is closed")

    def _take_spans(self) -> list[Span]:
        with self._lock:
            taken, self._spans = self._spans, []
        return sorted(taken, key=lambda span: span.start)


def _let_go(run: _Run, indices: Sequence[int]) -> list[_Item]:
    """Some ops wait for one thing less; returns those that can start."""
    ready: list[_Item] = []
    waiting = run.waiting
    for index in indices:
        waiting[index] -= 1
        if not waiting[index]:
            ready.append((run, index))
    return ready


#: Kinds whose ends :meth:`Executor.run` waits for.
_AWAITED = (Kind.NORM, Kind.LOSS)
#: Ops that pass a micro-batch through a stage.
_PASSING = frozenset({Kind.FORWARD, Kind.LOSS, Kind.BACKWARD, Kind.EVALUATE})


def _lane(item: _Item) -> Lane:
    return item[0].ops[item[1]].lane


def _work(item: _Item | None) -> Work | None:
    return None if item is None else Work(item[0].ops[item[1]], item[0].step)


def _is_ordered(op: Op) -> bool:
    """The optim lane takes the op strictly in plan order: checksums are extended piece after piece."""
    return op.lane is Lane.OPTIM and op.kind is not Kind.NORM
