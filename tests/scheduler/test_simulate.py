"""The simulator: schedules worked out by hand, bounds that none may break, and a slow simulation that agrees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.scheduler.link import LinkedPlan, link
from hoist.scheduler.ops import Kind, Lane, Op, Part, Resource
from hoist.scheduler.plan import horizontal, vertical
from hoist.scheduler.plan_records import Buffers, Plan, StageShape
from hoist.scheduler.simulate import Costs, Machine, Simulation, bounds, simulate
from tests.support.slow_simulation import SlowSimulation

#: A drive that moves a byte a second, and cores that do one thing at full speed or two at half.
PLAIN = Machine(read_bytes_per_second=1.0, write_bytes_per_second=1.0)
ACCELERATED = replace(PLAIN, shares_cores=False)


def toy(*ops: tuple[Kind, Sequence[str], Sequence[str]]) -> LinkedPlan:
    """A plan of ops that read and write things by name."""
    names: dict[str, Resource] = {}

    def named(group: Sequence[str]) -> tuple[Resource, ...]:
        return tuple(names.setdefault(name, Resource(Part.KEPT, len(names))) for name in group)

    made = tuple(
        Op(kind, named(reads), named(writes), piece=number) for number, (kind, reads, writes) in enumerate(ops)
    )
    return link(
        Plan(
            name="toy",
            ops=made,
            num_micro_batches=1,
            cold=False,
            pending=False,
            scratch_activations=(),
            scratch_gradients=(),
            stashed_gradients=(),
        )
    )


def priced(linked: LinkedPlan, *prices: float, parts: int = 1) -> Costs:
    """Seconds of each op; of I/O ops, bytes read."""
    io = [op.lane is Lane.IO for op in linked.plan.ops]
    return Costs(
        seconds=[0.0 if moves else price for price, moves in zip(prices, io, strict=True)],
        read_bytes=[int(price) if moves else 0 for price, moves in zip(prices, io, strict=True)],
        written_bytes=[0] * len(prices),
        parts=[parts * moves for moves in io],
    )


#: A weight is read into a staging slot, put into a buffer, and computed with.
CHAIN = toy(
    (Kind.READ_WEIGHTS, (), ("slot",)), (Kind.MERGE, ("slot",), ("buffer",)), (Kind.FORWARD, ("buffer",), ())
)


@pytest.mark.parametrize(
    ("read", "merge", "compute", "seconds"),
    [
        (1, 0.5, 2.0, 3.5),  # a step is given to the lanes when the one before has been computed
        (4, 2.0, 0.5, 6.5),
        (0, 0.0, 3.0, 3.0),
    ],
)
def test_a_chain_worked_out_by_hand(read: int, merge: float, compute: float, seconds: float) -> None:
    step = simulate(CHAIN, priced(CHAIN, read, merge, compute), ACCELERATED)
    assert step.seconds == pytest.approx(seconds)
    assert step.busy_seconds[Lane.IO] == pytest.approx(read)
    assert step.busy_seconds[Lane.COPY] == pytest.approx(merge)
    assert step.busy_seconds[Lane.COMPUTE] == pytest.approx(compute)
    assert step.stall_seconds[Lane.COMPUTE] == pytest.approx(seconds - compute)


def test_what_the_next_stage_needs_comes_while_this_one_computes() -> None:
    """Two stages in two buffers, and the first one of the next step: each is loaded during the visit before its own."""
    linked = toy(
        (Kind.READ_WEIGHTS, (), ("slot",)),
        (Kind.MERGE, ("slot",), ("second",)),
        (Kind.FORWARD, ("first",), ()),
        (Kind.READ_WEIGHTS, (), ("slot",)),
        (Kind.MERGE, ("slot",), ("first",)),
        (Kind.BACKWARD, ("second",), ()),
    )
    hidden = simulate(linked, priced(linked, 1, 0.5, 2.0, 1, 0.5, 3.0), ACCELERATED)
    assert hidden.seconds == pytest.approx(5.0)
    # both reads, one after the other as they share a slot, and the merges between them; the second merge also waits
    # for the forward, which the first one's read does not
    shown = simulate(linked, priced(linked, 4, 0.5, 2.0, 4, 0.5, 3.0), ACCELERATED)
    assert shown.seconds == pytest.approx(4.5 + 4.5)


def test_lanes_share_the_cores_of_a_machine_that_has_nothing_else() -> None:
    """A forward of 2 s and an update of 2 s that nobody waits for."""
    linked = toy((Kind.FORWARD, (), ()), (Kind.UPDATE, (), ()))
    costs = priced(linked, 2.0, 2.0)
    assert simulate(linked, costs, PLAIN).seconds == pytest.approx(4.0)
    assert simulate(linked, costs, replace(PLAIN, capacity=1.6)).seconds == pytest.approx(2.5)
    assert simulate(linked, costs, replace(PLAIN, capacity=2.0)).seconds == pytest.approx(2.0)
    assert simulate(linked, costs, ACCELERATED).seconds == pytest.approx(2.0)


def test_a_busy_drive_takes_its_share_of_the_cores() -> None:
    linked = toy((Kind.FORWARD, (), ()), (Kind.READ_STATES, (), ("slot",)))
    slowed = replace(PLAIN, io_core_share=0.2)
    assert simulate(linked, priced(linked, 2.0, 10), slowed).seconds == pytest.approx(10.0)  # the read is longer
    # 2 s of computation: 1 s of them beside the read, at 0.8
    assert simulate(linked, priced(linked, 2.0, 1), slowed).seconds == pytest.approx(2.2)


@pytest.mark.parametrize(("filling", "alone", "together"), [(1.0, 2.0, 4.0), (2.0, 4.0, 4.0), (4.0, 8.0, 8.0)])
def test_requests_share_the_drive(filling: float, alone: float, together: float) -> None:
    one = toy((Kind.READ_WEIGHTS, (), ("a",)), (Kind.FORWARD, ("a",), ()))
    two = toy((Kind.READ_WEIGHTS, (), ("a",)), (Kind.READ_WEIGHTS, (), ("b",)), (Kind.FORWARD, ("a", "b"), ()))
    machine = replace(ACCELERATED, filling_parts=filling)
    assert simulate(one, priced(one, 2, 0.0), machine).seconds == pytest.approx(alone)
    assert simulate(two, priced(two, 2, 2, 0.0), machine).seconds == pytest.approx(together)


def test_requests_beyond_what_the_engine_has_in_flight_wait_their_turn() -> None:
    """Read 1 is what is computed with: behind 0 it comes later than beside it."""
    linked = toy((Kind.READ_WEIGHTS, (), ("a",)), (Kind.READ_WEIGHTS, (), ("b",)), (Kind.FORWARD, ("b",), ()))
    costs = priced(linked, 6, 2, 0.0)
    for at_once, first_return in ((8, 4.0), (1, 8.0)):
        simulation = Simulation(linked, costs, replace(ACCELERATED, parts_at_once=at_once))
        simulation.run(1)
        assert simulation.returns == [pytest.approx(first_return)]


def test_latency_comes_before_the_bytes() -> None:
    linked = toy((Kind.READ_WEIGHTS, (), ("a",)), (Kind.FORWARD, ("a",), ()))
    machine = replace(ACCELERATED, latency_seconds=0.25)
    assert simulate(linked, priced(linked, 2, 0.0), machine).seconds == pytest.approx(2.25)


def test_norms_come_before_updates_and_end_a_step() -> None:
    """The norm of the second stage is taken before the updates of the first, which were ready earlier."""
    linked = toy(
        (Kind.BACKWARD, (), ("g",)),
        (Kind.NORM, ("g",), ("n",)),
        (Kind.UPDATE, ("n",), ("u",)),
        (Kind.UPDATE, ("n",), ("v",)),
        (Kind.BACKWARD, (), ("h",)),
        (Kind.NORM, ("h",), ("m",)),
    )
    simulation = Simulation(linked, priced(linked, 1.0, 1.0, 4.0, 4.0, 3.0, 1.0), ACCELERATED)
    simulation.run(1)
    # backwards until 4; the first update runs from 2 to 6, the second norm from 6 to 7, before the other update
    assert simulation.returns == [pytest.approx(7.0)]


def test_a_step_begins_once_the_one_before_the_last_is_over() -> None:
    linked = toy((Kind.FORWARD, (), ()), (Kind.UPDATE, (), ()))
    simulation = Simulation(linked, priced(linked, 1.0, 5.0), ACCELERATED)
    simulation.run(4)
    # steps 0 and 1 return at once; step 2 waits for step 0's update, step 3 for step 1's
    assert simulation.returns == [pytest.approx(time) for time in (1.0, 2.0, 6.0, 11.0)]


def test_what_bounds_a_step() -> None:
    found = bounds(CHAIN, priced(CHAIN, 4, 0.5, 2.0), ACCELERATED)
    assert found.bound_by is Lane.IO
    assert found.without[Lane.IO] == pytest.approx(2.5)
    assert found.margin_seconds == pytest.approx(4.0)
    assert found.next_bound is Lane.COMPUTE


def test_every_op_needs_a_price() -> None:
    with pytest.raises(ValueError, match="one entry for each of the plan's 3 ops"):
        simulate(CHAIN, Costs(seconds=[0.0], read_bytes=[0], written_bytes=[0], parts=[0]), PLAIN)


# --- any plan ------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn, most_stages: int = 5) -> LinkedPlan:
    """Steady plans of small models."""
    count = draw(st.integers(2, most_stages))
    shapes = [StageShape(chunks=tuple(range(draw(st.integers(1, 3))))) for _ in range(count)]
    num_micro_batches = draw(st.integers(1, 3))
    delayed = [draw(st.integers(0, shape.num_pieces)) for shape in shapes]
    kept = tuple(frozenset(draw(st.sets(st.sampled_from(shape.chunks)))) for shape in shapes)
    buffers = Buffers(
        weights=tuple(stage % 2 for stage in range(count)),
        gradients=tuple(stage % 2 for stage in range(count)) if draw(st.booleans()) else tuple(range(count)),
        delayed_from=tuple(delayed),
        kept_weights=kept,
        kept_moments=tuple(each if draw(st.booleans()) else frozenset() for each in kept),
        num_staging=draw(st.integers(1, 3)),
        num_states=draw(st.integers(1, 3)),
        num_activations=draw(st.integers(4, 12)),
    )
    pending = any(first < shape.num_pieces for first, shape in zip(delayed, shapes, strict=True))
    make = draw(st.sampled_from([vertical, horizontal]))
    return link(make(shapes, num_micro_batches, buffers, cold=False, pending=pending))


def random_costs(linked: LinkedPlan, seed: int) -> Costs:
    """Prices at random; no two events then fall together by chance, so that there is one schedule."""
    generator = random.Random(seed)
    ops = linked.plan.ops
    moves = [op.lane is Lane.IO for op in ops]
    works = [op.lane in (Lane.COMPUTE, Lane.COPY, Lane.OPTIM) for op in ops]
    return Costs(
        seconds=[generator.uniform(0.1, 2.0) if each else 0.0 for each in works],
        read_bytes=[generator.randrange(1, 10**6) if each else 0 for each in moves],
        written_bytes=[generator.randrange(1, 10**6) if each else 0 for each in moves],
        parts=[generator.randrange(1, 4) if each else 0 for each in moves],
    )


machines = st.builds(
    Machine,
    read_bytes_per_second=st.just(1.1e6),
    write_bytes_per_second=st.just(0.7e6),
    parts_at_once=st.sampled_from([1, 4, 8]),
    filling_parts=st.sampled_from([1.0, 2.5]),
    shares_cores=st.booleans(),
    capacity=st.sampled_from([0.9, 1.0, 1.4]),
    compute_share=st.sampled_from([0.4, 0.7]),
    io_core_share=st.sampled_from([0.0, 0.15]),
)
seeds = st.integers(0, 2**32)


@given(linked=plans(most_stages=3), machine=machines, seed=seeds)
@settings(max_examples=25, deadline=None)
def test_a_slow_simulation_agrees(linked: LinkedPlan, machine: Machine, seed: int) -> None:
    costs = random_costs(linked, seed)
    simulation = Simulation(linked, costs, machine)
    simulation.run(3)
    assert simulation.returns == pytest.approx(SlowSimulation(linked, costs, machine, 3).returns, rel=1e-9)


@given(linked=plans(), seed=seeds, shares=st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_step_is_faster_than_can_be_nor_slower_than_one_op_after_another(
    linked: LinkedPlan, seed: int, shares: bool
) -> None:
    costs = random_costs(linked, seed)
    machine = Machine(read_bytes_per_second=1.1e6, write_bytes_per_second=0.7e6, shares_cores=shares)
    drive = [
        read / machine.read_bytes_per_second + written / machine.write_bytes_per_second
        for read, written in zip(costs.read_bytes, costs.written_bytes, strict=True)
    ]
    simulation = Simulation(linked, costs, machine)
    simulation.run(6)
    serial = sum(costs.seconds) + sum(drive)
    assert simulation.returns[-1] <= 6 * serial * (1 + 1e-9)
    each = [seconds + moving for seconds, moving in zip(costs.seconds, drive, strict=True)]
    assert simulation.returns[0] >= critical_path(linked, each) * (1 - 1e-9)
    step = simulate(linked, costs, machine)
    for lane in (Lane.COMPUTE, Lane.COPY):
        work = sum(seconds for op, seconds in zip(linked.plan.ops, costs.seconds, strict=True) if op.lane is lane)
        assert step.busy_seconds[lane] >= work * (1 - 1e-9) or step.num_steps < 4
    compute = sum(
        seconds for op, seconds in zip(linked.plan.ops, costs.seconds, strict=True) if op.lane is Lane.COMPUTE
    )
    assert step.seconds >= compute * (1 - 1e-9)
    # Two steps may be under way, so what one has left for the next is at most a step's work.
    assert 4 * step.seconds >= (4 - 1) * sum(drive) * (1 - 1e-9)
    assert (step.read_bytes, step.written_bytes) == (sum(costs.read_bytes), sum(costs.written_bytes))


def critical_path(linked: LinkedPlan, seconds: Sequence[float]) -> float:
    """The longest chain of ops that a step's last computation waits for."""
    begins = [0.0] * len(seconds)
    longest = 0.0
    for index, op in enumerate(linked.plan.ops):
        ends = begins[index] + seconds[index]
        if op.lane is Lane.COMPUTE:
            longest = max(longest, ends)
        for later in linked.dependents[index]:
            begins[later] = max(begins[later], ends)
    return longest
