"""The executor with a toy handler: order, overlap across steps, errors of every lane, and what close() leaves behind.

Interleavings are forced with events: a gate holds an op until the test has seen what it wants to see.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hoist.scheduler.executor import Done, Executor, Mark
from hoist.scheduler.link import LinkedPlan, link
from hoist.scheduler.ops import Kind, Lane, Op, Part, Resource
from hoist.scheduler.plan import horizontal, vertical
from hoist.scheduler.plan_records import Buffers, Plan, StageShape
from hoist.scheduler.spans import LaneTime, Span, lane_times
from tests.support.simulation import Simulation

#: Longest that a forced order may take to come about (seconds); only a deadlock lasts so long.
PATIENCE = 60.0
#: A kind of op for every lane that can fail.
OF_LANE = {
    Lane.IO: Kind.READ_WEIGHTS,
    Lane.COPY: Kind.MERGE,
    Lane.COMPUTE: Kind.BIND,
    Lane.OPTIM: Kind.UPDATE,
    Lane.COMMIT: Kind.COMMIT,
    Lane.NONE: Kind.ACQUIRE,
}


class Gate:
    """Holds an op: the op says that it has begun and waits until the gate is opened."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def hold(self) -> None:
        self.begun.set()
        assert self._opened.wait(PATIENCE)


class Toy:
    """Notes when ops begin and end. ``gates`` and ``errors`` are by (step, number of the op): its ``piece``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.log: list[tuple[str, int, int]] = []
        self.gates: dict[tuple[int, int], Gate] = {}
        self.errors: dict[tuple[int, int], BaseException] = {}
        self.threads: dict[tuple[int, int], str] = {}
        self._io = ThreadPoolExecutor(4, thread_name_prefix="toy-io")

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> None:
        key = (step, op.piece)
        with self.lock:
            self.log.append(("begin", *key))
            self.threads[key] = threading.current_thread().name
        if key in self.gates:
            self.gates[key].hold()
        if key in self.errors:
            raise self.errors[key]
        with self.lock:
            self.log.append(("end", *key))

    def start(self, op: Op, step: int, done: Done) -> None:
        def work() -> None:
            try:
                self.run(op, step)
            except BaseException as error:
                done(error)
            else:
                done(None)

        self._io.submit(work)

    def began(self, step: int, piece: int) -> bool:
        with self.lock:
            return ("begin", step, piece) in self.log

    def order(self, *events: tuple[str, int, int]) -> list[int]:
        return [self.log.index(event) for event in events]

    def close(self) -> None:
        self._io.shutdown()


def plan_of(*ops: tuple[Kind, Sequence[str], Sequence[str]]) -> LinkedPlan:
    """Ops from (kind, what it reads, what it writes); letters name resources, ``piece`` numbers the op."""

    def resources(names: Sequence[str]) -> tuple[Resource, ...]:
        return tuple(Resource(Part.STAGING, ord(name)) for name in names)

    listed = tuple(
        Op(kind, resources(reads), resources(writes), stage=0, piece=number)
        for number, (kind, reads, writes) in enumerate(ops)
    )
    return link(
        Plan(
            name="toy",
            ops=listed,
            num_micro_batches=1,
            cold=True,
            pending=False,
            scratch_activations=(),
            scratch_gradients=(),
            stashed_gradients=(),
        )
    )


@pytest.fixture
def toy() -> Iterator[Toy]:
    toy = Toy()
    yield toy
    toy.close()


@pytest.fixture
def executor(toy: Toy) -> Iterator[Executor]:
    executor = Executor(toy)
    yield executor
    executor.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hoist-")]


class Caller:
    """Runs a function beside the test; :meth:`result` returns or raises what it did."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(function)
        self._pool.shutdown(wait=False)

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> object:
        return self._future.result(PATIENCE)


# ---------------------------------------------------------------------- order


def test_each_lane_has_its_thread_and_dependencies_order_them(toy: Toy, executor: Executor) -> None:
    plan = plan_of(
        (Kind.ACQUIRE, "", "a"),
        (Kind.READ_WEIGHTS, "", "b"),
        (Kind.MERGE, "ab", "c"),
        (Kind.BIND, "c", "d"),
        (Kind.UPDATE, "d", "e"),
        (Kind.COMMIT, "e", "f"),
    )
    spans = executor.run(plan, 1) + executor.drain()
    chain = [("begin", 1, 1), ("end", 1, 1), ("begin", 1, 2), ("end", 1, 2), ("begin", 1, 3), ("end", 1, 3)]
    chain += [("begin", 1, 4), ("end", 1, 4), ("begin", 1, 5), ("end", 1, 5)]
    positions = toy.order(*chain)
    assert positions == sorted(positions)
    lanes = {2: "hoist-copy", 3: threading.current_thread().name, 4: "hoist-optim", 5: "hoist-commit"}
    assert {piece: toy.threads[1, piece] for piece in lanes} == lanes
    assert {span.op.piece for span in spans} == {1, 2, 3, 4, 5}  # what has no lane takes no time


def test_io_is_concurrent_and_compute_is_in_plan_order(toy: Toy, executor: Executor) -> None:
    """The second read may end first; the second computation still waits for the first one."""
    plan = plan_of(
        (Kind.READ_WEIGHTS, "", "a"), (Kind.READ_WEIGHTS, "", "b"), (Kind.BIND, "a", "c"), (Kind.BIND, "b", "d")
    )
    first = toy.gates[1, 0] = Gate()
    second = toy.gates[1, 1] = Gate()
    caller = Caller(lambda: executor.run(plan, 1))
    assert first.begun.wait(PATIENCE)
    assert second.begun.wait(PATIENCE)
    second.open()
    first.open()
    caller.result()
    assert toy.order(("end", 1, 2), ("begin", 1, 3)) == sorted(toy.order(("end", 1, 2), ("begin", 1, 3)))


def test_run_returns_when_gradients_are_measured_not_when_updates_are_done(toy: Toy, executor: Executor) -> None:
    plan = plan_of((Kind.BIND, "", "a"), (Kind.NORM, "a", "b"), (Kind.UPDATE, "b", "c"), (Kind.WRITE_STATES, "c", "d"))
    gate = toy.gates[1, 2] = Gate()
    executor.run(plan, 1)
    assert gate.begun.wait(PATIENCE)
    assert not toy.began(1, 3)
    gate.open()
    executor.drain()
    assert toy.began(1, 3)


def test_the_next_step_begins_where_dependencies_allow(toy: Toy, executor: Executor) -> None:
    """While step 1's update is held, step 2 computes what does not need it, and only that."""
    plan = plan_of((Kind.BIND, "", "a"), (Kind.UPDATE, "a", "w"), (Kind.UNBIND, "w", ""))
    other = plan_of((Kind.BIND, "", "z"), (Kind.UNBIND, "w", "y"))
    gate = toy.gates[1, 1] = Gate()
    seen = toy.gates[2, 0] = Gate()
    caller = Caller(lambda: (executor.run(plan_without_last(plan), 1), executor.run(other, 2)))
    assert gate.begun.wait(PATIENCE)
    assert seen.begun.wait(PATIENCE)  # overlaps the update
    seen.open()
    assert not toy.began(2, 1)
    gate.open()
    caller.result()
    executor.drain()
    assert toy.order(("end", 1, 1), ("begin", 2, 1)) == sorted(toy.order(("end", 1, 1), ("begin", 2, 1)))


def plan_without_last(linked: LinkedPlan) -> LinkedPlan:
    plan = linked.plan
    return link(replace(plan, ops=plan.ops[:-1]))


def test_a_third_step_waits_for_the_first(toy: Toy, executor: Executor) -> None:
    plan = plan_of((Kind.BIND, "", "a"), (Kind.COMMIT, "", "b"))
    gate = toy.gates[1, 1] = Gate()
    executor.run(plan, 1)
    assert gate.begun.wait(PATIENCE)
    executor.run(plan, 2)
    third = Caller(lambda: executor.run(plan, 3))
    assert not toy.began(3, 0)
    gate.open()
    third.result()
    executor.drain()
    positions = toy.order(("end", 1, 1), ("begin", 3, 0))
    assert positions == sorted(positions)


@pytest.mark.parametrize("make", [vertical, horizontal])
def test_real_plans_run_in_an_order_that_dependencies_allow(make: Callable[..., Plan]) -> None:
    """Three steps of a real plan through real threads, each op checked against symbolic contents."""
    shapes = (StageShape(chunks=(0, 0)), StageShape(chunks=(0,)), StageShape(chunks=(0,), borrowed=((0, 0),)))
    buffers = Buffers(weights=(0, 1, 0), gradients=(0, 1, 0), num_staging=1, num_states=2, num_activations=4)
    simulation = Checked(Simulation(shapes, buffers, seed=0))
    executor = Executor(simulation)
    plans = [link(make(shapes, 3, buffers, cold=step == 0)) for step in range(3)]
    try:
        for step, plan in enumerate(plans):
            simulation.plans[step] = plan
            executor.run(plan, step)
        executor.drain()
    finally:
        executor.close()
        simulation.pool.shutdown()
    assert sum(simulation.simulation.counts.values()) == sum(len(plan.plan.ops) for plan in plans)


class Checked:
    """A handler that begins and ends the simulation's ops."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.plans: dict[int, LinkedPlan] = {}
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(4)

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> None:
        with self.lock:
            flight = self.simulation.begin(self.plans[step], step, op)
        with self.lock:
            self.simulation.end(flight)

    def start(self, op: Op, step: int, done: Done) -> None:
        def work() -> None:
            try:
                self.run(op, step)
            except BaseException as error:
                done(error)
            else:
                done(None)

        self.pool.submit(work)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("lane", OF_LANE)
def test_an_error_of_any_lane_reaches_the_next_call_with_the_op(toy: Toy, executor: Executor, lane: Lane) -> None:
    kind = OF_LANE[lane]
    assert Op(kind, (), ()).lane is lane
    plan = plan_of((kind, "", "a"), (Kind.BIND, "a", "b"))
    toy.errors[1, 0] = OSError("the drive is gone")
    with pytest.raises(OSError, match="the drive is gone") as caught:
        executor.run(plan, 1)
    assert caught.value.__notes__ == [f"while executing {kind.name.lower()}(stage 0, piece 0)"]
    assert not toy.began(1, 1)
    calls: tuple[Callable[[], object], ...] = (lambda: executor.run(plan, 2), executor.drain)
    for call in calls:
        with pytest.raises(OSError, match="the drive is gone") as again:
            call()
        assert len(again.value.__notes__) == 1
    assert not toy.began(2, 1)


def test_an_error_keeps_the_notes_that_it_came_with(toy: Toy, executor: Executor) -> None:
    error = toy.errors[1, 0] = ValueError("wrong")
    error.add_note("chunk 7")
    with pytest.raises(ValueError, match="wrong") as caught:
        executor.run(plan_of((Kind.UPDATE, "", "a"), (Kind.BIND, "a", "b")), 1)
    assert caught.value.__notes__ == ["chunk 7", "while executing update(stage 0, piece 0)"]


def test_an_error_while_starting_io_is_an_error_of_the_op(toy: Toy, executor: Executor) -> None:
    toy.close()  # its pool refuses what is submitted from now on
    with pytest.raises(RuntimeError, match="cannot schedule new futures") as caught:
        executor.run(plan_of((Kind.READ_WEIGHTS, "", "a"), (Kind.BIND, "a", "b")), 1)
    assert caught.value.__notes__ == ["while executing read_weights(stage 0, piece 0)"]


def test_nothing_new_starts_after_an_error(toy: Toy, executor: Executor) -> None:
    """What was held at the time of the error still ends; what waited for it does not begin, in no lane."""
    followers: list[tuple[Kind, str, str]] = [(kind, "a", str(number)) for number, kind in enumerate(OF_LANE.values())]
    plan = plan_of((Kind.READ_WEIGHTS, "", "a"), (Kind.MERGE, "", "f"), *followers, (Kind.BIND, "", "z"))
    held = toy.gates[1, 0] = Gate()
    toy.errors[1, 1] = RuntimeError("broken")
    caller = Caller(lambda: executor.run(plan, 1))
    assert held.begun.wait(PATIENCE)
    with pytest.raises(RuntimeError, match="broken"):
        caller.result()
    held.open()
    executor.close()
    assert ("end", 1, 0) in toy.log
    assert not [piece for piece in range(2, len(plan.plan.ops) - 1) if toy.began(1, piece)]


def test_an_error_of_the_updates_reaches_the_step_after(toy: Toy, executor: Executor) -> None:
    plan = plan_of((Kind.BIND, "", "a"), (Kind.NORM, "a", "b"), (Kind.UPDATE, "b", "c"))
    gate = toy.gates[1, 2] = Gate()
    toy.errors[1, 2] = MemoryError("no room")
    executor.run(plan, 1)
    gate.open()
    with pytest.raises(MemoryError, match="no room"):
        executor.drain()
    with pytest.raises(MemoryError, match="no room"):
        executor.run(plan, 2)
    assert not toy.began(2, 0)


def test_an_interrupt_during_a_computation_stops_everything(toy: Toy, executor: Executor) -> None:
    toy.errors[1, 0] = KeyboardInterrupt()
    plan = plan_of((Kind.BIND, "", "a"), (Kind.MERGE, "a", "b"))
    with pytest.raises(KeyboardInterrupt):
        executor.run(plan, 1)
    with pytest.raises(KeyboardInterrupt):
        executor.run(plan, 2)
    executor.close()
    assert not toy.began(1, 1)
    assert not toy.began(2, 0)


def test_an_interrupt_while_the_caller_waits_stops_everything(toy: Toy, executor: Executor) -> None:
    """The main thread waits for a read when a signal comes; the step is half done, and no later call may go on."""
    gate = toy.gates[1, 0] = Gate()
    caught = threading.Event()
    main = threading.get_ident()

    def interrupt(number: int, frame: object) -> None:
        if not caught.is_set():
            caught.set()
            raise KeyboardInterrupt

    def send() -> None:
        gate.begun.wait(PATIENCE)
        # A signal that comes just before the thread blocks is seen when it wakes: send until it has been.
        while not caught.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        sender = Caller(send)
        plan = plan_of((Kind.READ_WEIGHTS, "", "a"), (Kind.BIND, "a", "b"))
        with pytest.raises(KeyboardInterrupt):
            executor.run(plan, 1)
        sender.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(KeyboardInterrupt):
        executor.run(plan, 2)
    gate.open()
    executor.close()
    assert not toy.began(1, 1)


# ---------------------------------------------------------------------- close


def test_close_waits_for_io_in_flight_and_starts_nothing(toy: Toy, executor: Executor) -> None:
    plan = plan_of(
        (Kind.BIND, "", "z"), (Kind.WRITE_STATES, "", "a"), (Kind.WRITE_STATES, "a", "b"), (Kind.MERGE, "a", "c")
    )
    gate = toy.gates[1, 1] = Gate()
    executor.run(plan, 1)
    assert gate.begun.wait(PATIENCE)
    closing = Caller(executor.close)
    assert not closing.done
    gate.open()
    closing.result()
    assert ("end", 1, 1) in toy.log
    assert not toy.began(1, 2)
    assert not toy.began(1, 3)


def test_close_ends_the_lanes_after_the_op_that_they_are_at(toy: Toy, executor: Executor) -> None:
    plan = plan_of((Kind.BIND, "", "z"), (Kind.UPDATE, "", "a"), (Kind.UPDATE, "", "b"))
    gate = toy.gates[1, 1] = Gate()
    executor.run(plan, 1)
    assert gate.begun.wait(PATIENCE)
    closing = Caller(executor.close)
    wait_until_closed(executor)
    gate.open()
    closing.result()
    assert ("end", 1, 1) in toy.log
    assert not toy.began(1, 2)


def wait_until_closed(executor: Executor) -> None:
    """Returns once :meth:`Executor.close` has begun, which a drain is told while work is left."""
    with pytest.raises(ValueError, match="the executor is closed"):
        executor.drain()


def test_a_closed_executor_refuses_work(toy: Toy, executor: Executor) -> None:
    executor.close()
    executor.close()
    with pytest.raises(ValueError, match="the executor is closed"):
        executor.run(plan_of((Kind.BIND, "", "a")), 1)
    assert not toy.log


# ---------------------------------------------------------------------- spans


def test_lane_times_join_overlapping_spans_and_count_idle_time_before_the_last() -> None:
    def span(kind: Kind, start: float, stop: float) -> Span:
        return Span(Op(kind, (), ()), start, stop)

    times = lane_times(
        [
            span(Kind.READ_WEIGHTS, 0.0, 2.0),
            span(Kind.READ_WEIGHTS, 1.0, 3.0),
            span(Kind.WRITE_STATES, 5.0, 7.0),
            span(Kind.BIND, 4.0, 12.0),
        ],
        1.0,
        10.0,
    )
    assert times[Lane.IO] == LaneTime(busy_seconds=4.0, stall_seconds=2.0)
    assert times[Lane.COMPUTE] == LaneTime(busy_seconds=6.0, stall_seconds=3.0)
    assert times[Lane.COPY] == LaneTime(busy_seconds=0.0, stall_seconds=0.0)


def test_run_and_drain_return_each_span_once(toy: Toy, executor: Executor) -> None:
    plan = plan_of((Kind.BIND, "", "a"), (Kind.UPDATE, "a", "b"))
    spans = [*executor.run(plan, 1), *executor.drain(), *executor.drain()]
    assert sorted(span.op.piece for span in spans) == [0, 1]
    assert all(span.start <= span.stop for span in spans)
