"""Prices a linked plan without running it: a discrete-event simulation with the executor's rules. Pure, like `plan.py`.

What ops cost on a machine is given (:class:`Costs`, :class:`Machine`); `pricing.py` finds it from what `timing.py`
measured, `preflight.py` puts the results before people. Rules are those of `executor.py`; a change there belongs here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from hoist.scheduler.link import LinkedPlan, join
from hoist.scheduler.ops import Kind, Lane

#: Lanes that have a thread and need a core while an op of theirs runs.
CPU_LANES = (Lane.COMPUTE, Lane.COPY, Lane.OPTIM, Lane.COMMIT)
#: Lanes that :func:`bounds` takes away in turn.
PRICED_LANES = (Lane.COMPUTE, Lane.IO, Lane.OPTIM, Lane.COPY)
#: Steps before those that are averaged: the first has nothing to overlap with, and two may run ahead of their updates.
WARM_UP_STEPS = 3
#: Steps that are averaged, and the most ops that one simulation goes through while more than one is.
AVERAGED_STEPS = 4
MOST_OPS = 150_000
#: Seconds that two events may be apart and still be one.
_INSTANT = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What each op of a plan takes, in the plan's order."""

    seconds: Sequence[float]
    """Ops of lanes with a thread: alone on the machine. Others: 0."""
    read_bytes: Sequence[int]
    """I/O ops: bytes read. Others: 0."""
    written_bytes: Sequence[int]
    """I/O ops: bytes written. Others: 0."""
    parts: Sequence[int]
    """I/O ops: parts that the engine moves each on its own, at least 1. Others: 0."""

    def without(self, linked: LinkedPlan, lane: Lane) -> Costs:
        """The same with everything that a lane does for nothing."""
        ops = linked.plan.ops
        if lane is Lane.IO:
            nothing = (0,) * len(ops)
            return replace(self, read_bytes=nothing, written_bytes=nothing)
        return replace(
            self,
            seconds=tuple(
                0.0 if op.lane is lane else seconds for op, seconds in zip(ops, self.seconds, strict=True)
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What all ops share: a drive, and on a CPU-only machine the cores."""

    read_bytes_per_second: float
    """Of all drives together, with as many parts in flight as fill them."""
    write_bytes_per_second: float
    latency_seconds: float = 0.0
    """From a request to its first byte."""
    parts_at_once: int = 8
    """Parts that the engine has in flight; others wait in the order of their requests."""
    filling_parts: float = 1.0
    """Parts in flight that fill the drive; fewer use it in proportion."""
    shares_cores: bool = True
    """Computation, updates and merges compete for the same cores; False where an accelerator computes."""
    capacity: float = 1.0
    """What lanes at work at once do together, in relation to one alone: 1 where each of them keeps all cores busy."""
    compute_share: float = 0.5
    """Of that, computation's share beside one other lane (0 to 1)."""
    io_core_share: float = 0.0
    """Share of the cores that a busy drive takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A steady step."""

    seconds: float
    """From one step's end to the next one's."""
    busy_seconds: dict[Lane, float]
    """Per lane, time at work, as `executor.lane_times` has it."""
    stall_seconds: dict[Lane, float]
    """Per lane, time it waited before its last op of the step."""
    read_bytes: int
    written_bytes: int
    num_steps: int
    """Steps that are averaged."""


class _Run:
    """The state of one step under way."""

    __slots__ = ("done", "later", "num_awaited", "num_left", "position", "waiting")

    def __init__(self, linked: LinkedPlan, num_norms: int) -> None:
        self.waiting = list(linked.num_dependencies)
        self.done = bytearray(len(self.waiting))
        self.num_left = len(self.waiting)
        self.num_awaited = num_norms
        #: Index of the next compute op, among the plan's compute ops.
        self.position = 0
        self.later: dict[int, list[tuple[_Run, int]]] = {}


_Item = tuple[_Run, int]


class Simulation:
    """Runs one plan step after step. Time is simulated seconds since the first."""

    def __init__(self, linked: LinkedPlan, costs: Costs, machine: Machine) -> None:
        ops = linked.plan.ops
        self._linked = linked
        self._costs = costs
        self._machine = machine
        self._lanes = [op.lane for op in ops]
        self._ordered = [op.lane is Lane.OPTIM and op.kind is not Kind.NORM for op in ops]
        self._is_norm = [op.kind is Kind.NORM for op in ops]
        self._compute = [index for index, lane in enumerate(self._lanes) if lane is Lane.COMPUTE]
        self._updates = [index for index, ordered in enumerate(self._ordered) if ordered]
        self._joined = join(linked, linked)
        #: Drive seconds of each I/O op, if it had the drive for itself.
        self._drive_seconds = [
            read / machine.read_bytes_per_second + written / machine.write_bytes_per_second
            for read, written in zip(costs.read_bytes, costs.written_bytes, strict=True)
        ]
        self.now = 0.0
        self._runs: list[_Run] = []
        self._last: _Run | None = None
        #: The step whose compute ops the caller's thread goes through; None between two calls.
        self._current: _Run | None = None
        #: When each step returned.
        self.returns: list[float] = []
        self._ended: deque[_Item] = deque()
        self._queues: dict[Lane, deque[_Item]] = {lane: deque() for lane in (Lane.COPY, Lane.OPTIM, Lane.COMMIT)}
        self._optim_queue: deque[_Item] = deque()
        #: Per lane at work: op and the seconds that are left of it at full speed.
        self._at_work: dict[Lane, tuple[_Run, int]] = {}
        self._left: dict[Lane, float] = {}
        self._rates: dict[Lane, float] = {}
        self._io_queue: deque[_Item] = deque()
        self._io_in_flight = 0
        #: Requests that no byte of has come yet: (time of the first one, sequence number, weight, item).
        self._arriving: list[tuple[float, int, int, _Item]] = []
        #: Requests whose bytes flow: (drive time at which they are done, sequence number, weight, item).
        self._flowing: list[tuple[float, int, int, _Item]] = []
        self._parts_taken = 0
        self._parts_flowing = 0
        self._sequence = 0
        #: Drive seconds that each flowing part has got so far.
        self._drive_time = 0.0
        self.busy: dict[Lane, float] = dict.fromkeys((*CPU_LANES, Lane.IO), 0.0)
        #: When each lane was last at work.
        self.last_stop: dict[Lane, float] = dict.fromkeys((*CPU_LANES, Lane.IO), 0.0)

    def run(self, num_steps: int) -> None:
        """Go on until so many steps have returned. Raises RuntimeError if nothing can go on, which no plan should."""
        while True:
            self._settle(num_steps)
            if len(self.returns) >= num_steps:
                return
            self._advance()

    # ------------------------------------------------------------------ what happens in no time

    def _settle(self, num_steps: int) -> None:
        """Do everything that can be done now."""
        while True:
            while self._ended:
                self._finish(*self._ended.popleft())
            if not self._start_lanes(num_steps) and not self._ended:
                self._set_rates()
                return

    def _finish(self, run: _Run, index: int) -> None:
        run.done[index] = 1
        run.num_left -= 1
        if self._is_norm[index]:
            run.num_awaited -= 1
        if not run.num_left:
            self._runs.remove(run)
        waiting = run.waiting
        for later in self._linked.dependents[index]:
            waiting[later] -= 1
            if not waiting[later]:
                self._dispatch(run, later)
        if run.later:
            for other, later in run.later.pop(index, ()):
                other.waiting[later] -= 1
                if not other.waiting[later]:
                    self._dispatch(other, later)

    def _dispatch(self, run: _Run, index: int) -> None:
        lane = self._lanes[index]
        if lane is Lane.NONE:
            self._ended.append((run, index))
        elif lane is Lane.IO:
            if self._drive_seconds[index]:
                self._io_queue.append((run, index))
            else:
                self._ended.append((run, index))
        elif lane is not Lane.COMPUTE and not self._ordered[index]:
            self._queues[lane].append((run, index))

    def _start_lanes(self, num_steps: int) -> bool:
        """Give idle lanes work, and let the caller go on; whether anything changed."""
        changed = self._call(num_steps) if Lane.COMPUTE not in self._at_work else False
        for lane, queue in self._queues.items():
            if lane in self._at_work:
                continue
            if queue:
                self._begin(lane, queue.popleft())
                changed = True
            elif lane is Lane.OPTIM and self._optim_queue:
                run, index = self._optim_queue[0]
                if not run.waiting[index]:
                    self._begin(lane, self._optim_queue.popleft())
                    changed = True
        while self._io_queue and self._parts_taken < self._machine.parts_at_once:
            self._request(self._io_queue.popleft())
        return changed

    def _call(self, num_steps: int) -> bool:
        """What the caller's thread does: steps one after another, each op in the plan's order."""
        if self._current is None:
            if len(self.returns) >= num_steps or len(self._runs) > 1:
                return False
            self._register()
            return True
        run = self._current
        if run.position < len(self._compute):
            index = self._compute[run.position]
            if run.waiting[index]:
                return False
            run.position += 1
            self._begin(Lane.COMPUTE, (run, index))
            return True
        if run.num_awaited:
            return False
        self._current = None
        self.returns.append(self.now)
        return len(self.returns) < num_steps  # the last one's time is the end of the simulation

    def _register(self) -> None:
        run = _Run(self._linked, sum(self._is_norm))
        previous = self._last
        if previous is not None and previous.num_left:
            for earlier, later in self._joined:
                if not previous.done[earlier]:
                    previous.later.setdefault(earlier, []).append((run, later))
                    run.waiting[later] += 1
        self._runs.append(run)
        self._last = self._current = run
        self._optim_queue.extend((run, index) for index in self._updates)
        for index in [index for index, count in enumerate(run.waiting) if not count]:
            self._dispatch(run, index)

    def _begin(self, lane: Lane, item: _Item) -> None:
        seconds = self._costs.seconds[item[1]]
        if seconds <= 0.0:
            self._ended.append(item)
            return
        self._at_work[lane] = item
        self._left[lane] = seconds

    def _request(self, item: _Item) -> None:
        weight = min(self._costs.parts[item[1]], self._machine.parts_at_once)
        self._parts_taken += weight
        self._io_in_flight += 1
        self._sequence += 1
        if self._machine.latency_seconds:
            heappush(self._arriving, (self.now + self._machine.latency_seconds, self._sequence, weight, item))
        else:
            self._flow(weight, item)

    def _flow(self, weight: int, item: _Item) -> None:
        self._parts_flowing += weight
        self._sequence += 1
        due = self._drive_time + self._drive_seconds[item[1]] / weight
        heappush(self._flowing, (due, self._sequence, weight, item))

    # ------------------------------------------------------------------ time

    @property
    def _drive_use(self) -> float:
        """Share of the drive's bandwidth in use."""
        return min(1.0, self._parts_flowing / self._machine.filling_parts)

    def _set_rates(self) -> None:
        machine = self._machine
        if not machine.shares_cores:
            self._rates = dict.fromkeys(self._at_work, 1.0)
            return
        free = 1.0 - machine.io_core_share * self._drive_use
        count = len(self._at_work)
        if count < 2:
            self._rates = dict.fromkeys(self._at_work, free)
            return
        beside = 1.0 - machine.compute_share
        weights = {lane: machine.compute_share if lane is Lane.COMPUTE else beside for lane in self._at_work}
        total = sum(weights.values())
        self._rates = {
            lane: min(1.0, machine.capacity * weight / total) * free for lane, weight in weights.items()
        }

    def _advance(self) -> None:
        """Let time pass until something ends."""
        steps = [self._left[lane] / rate for lane, rate in self._rates.items()]
        flow = self._drive_use / self._parts_flowing if self._parts_flowing else 0.0
        if self._flowing:
            steps.append((self._flowing[0][0] - self._drive_time) / flow)
        if self._arriving:
            steps.append(self._arriving[0][0] - self.now)
        if not steps:
            raise RuntimeError(f"{self._linked.plan.name}: no op can go on after {len(self.returns)} steps")
        passed = max(0.0, min(steps))
        self.now += passed
        self._drive_time += passed * flow
        for lane, rate in self._rates.items():
            self._left[lane] -= passed * rate
            self.busy[lane] += passed
            self.last_stop[lane] = self.now
            if self._left[lane] <= _INSTANT:
                self._ended.append(self._at_work.pop(lane))
        if self._io_in_flight:
            self.busy[Lane.IO] += passed
            self.last_stop[Lane.IO] = self.now
        while self._flowing and (self._flowing[0][0] - self._drive_time) <= _INSTANT:
            _, _, weight, item = heappop(self._flowing)
            self._parts_flowing -= weight
            self._parts_taken -= weight
            self._io_in_flight -= 1
            self._ended.append(item)
        while self._arriving and self._arriving[0][0] - self.now <= _INSTANT:
            _, _, weight, item = heappop(self._arriving)
            self._flow(weight, item)


def averaged_steps(linked: LinkedPlan) -> int:
    """Steps that :func:`simulate` averages: fewer for plans of very many ops, where one is like another anyway."""
    room = MOST_OPS // max(1, len(linked.plan.ops)) - WARM_UP_STEPS
    return max(1, min(AVERAGED_STEPS, room))


def simulate(linked: LinkedPlan, costs: Costs, machine: Machine) -> Simulated:
    """A steady step of a plan that is run over and over (so not a cold one, whose reads others do not need).

    Takes a few microseconds an op. Raises ValueError unless costs are given for each op.
    """
    count = len(linked.plan.ops)
    if any(len(each) != count for each in (costs.seconds, costs.read_bytes, costs.written_bytes, costs.parts)):
        raise ValueError(f"costs: must have one entry for each of the plan's {count} ops")
    num_steps = averaged_steps(linked)
    simulation = Simulation(linked, costs, machine)
    simulation.run(WARM_UP_STEPS)
    before = dict(simulation.busy)
    simulation.run(WARM_UP_STEPS + num_steps - 1)
    until_last = dict(simulation.busy)
    simulation.run(WARM_UP_STEPS + num_steps)
    start, last_start, stop = (simulation.returns[index] for index in (WARM_UP_STEPS - 1, -2, -1))
    lanes = (*CPU_LANES, Lane.IO)
    return Simulated(
        seconds=(stop - start) / num_steps,
        busy_seconds={lane: (simulation.busy[lane] - before[lane]) / num_steps for lane in lanes},
        # of the last step alone: what a lane is idle after its last op is no stall
        stall_seconds={
            lane: max(
                0.0,
                max(simulation.last_stop[lane], last_start)
                - last_start
                - (simulation.busy[lane] - until_last[lane]),
            )
            for lane in lanes
        },
        read_bytes=sum(costs.read_bytes),
        written_bytes=sum(costs.written_bytes),
        num_steps=num_steps,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a step's time hangs on."""

    step: Simulated
    without: dict[Lane, float]
    """Per lane, seconds of a step in which its work took no time; lanes that could not save the most are left out."""
    bound_by: Lane
    """The lane without which a step is shortest."""
    next_bound: Lane
    """The lane that is busiest then."""

    @property
    def margin_seconds(self) -> float:
        """How much shorter a step would be without the work of the lane that bounds it."""
        return self.step.seconds - self.without[self.bound_by]


def bounds(
    linked: LinkedPlan, costs: Costs, machine: Machine, lanes: Collection[Lane] = PRICED_LANES
) -> Bounds:
    """Simulate a step, and again without the work of each lane that may bound it. Raises as :func:`simulate`."""
    step = simulate(linked, costs, machine)
    without: dict[Lane, Simulated] = {}
    saved = 0.0
    for lane in sorted(lanes, key=lambda lane: -step.busy_seconds[lane]):
        if without and step.busy_seconds[lane] <= saved:
            continue  # no lane can save more than the time it is at work
        without[lane] = simulate(linked, costs.without(linked, lane), machine)
        saved = max(saved, step.seconds - without[lane].seconds)
    bound_by = min(without, key=lambda lane: without[lane].seconds)
    others = [lane for lane in lanes if lane is not bound_by]
    left = without[bound_by]
    return Bounds(
        step=step,
        without={lane: each.seconds for lane, each in without.items()},
        bound_by=bound_by,
        next_bound=max(others, key=lambda lane: left.busy_seconds[lane]),
    )
