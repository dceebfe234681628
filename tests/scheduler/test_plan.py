"""Plans against a simulator that knows contents: whatever order dependencies allow, every op finds what it needs.

The simulator is `tests/support/simulation.py`. Traffic is counted op by op and compared with DESIGN.md's formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.scheduler.link import link
from hoist.scheduler.plan import (
    LANES,
    MIN_ACTIVATION_SLOTS,
    Buffers,
    Kind,
    Lane,
    Plan,
    StageShape,
    horizontal,
    vertical,
)
from tests.support.simulation import Simulation, WrongContentError

Maker = Callable[..., Plan]
PLANS: tuple[Maker, ...] = (vertical, horizontal)


def buffers_for(
    num_stages: int,
    *,
    resident: int = 0,
    gradients: int = 2,
    staging: int = 2,
    states: int = 2,
    activations: int = MIN_ACTIVATION_SLOTS,
) -> Buffers:
    """As `memory.MemoryPlan.buffers` numbers them: two that alternate, and the resident stages' own."""
    streamed = num_stages - resident
    return Buffers(
        weights=tuple(stage % 2 if stage < streamed else 2 + stage for stage in range(num_stages)),
        gradients=tuple(stage % gradients for stage in range(num_stages)),
        num_staging=staging,
        num_states=states,
        num_activations=activations,
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[StageShape, ...]:
    """2 to 6 stages of 0 to 4 pieces in chunks; some borrow pieces of earlier stages."""
    count = draw(st.integers(2, 6))
    shapes: list[StageShape] = []
    for _ in range(count):
        chunks: list[int] = []
        for chunk in range(draw(st.integers(0, 2))):
            chunks += [chunk] * draw(st.integers(1, 3))
        lendable = [(owner, piece) for owner, shape in enumerate(shapes) for piece in range(shape.num_pieces)]
        lent = draw(st.lists(st.sampled_from(lendable), max_size=3, unique=True)) if lendable else []
        shapes.append(StageShape(chunks=tuple(chunks), has_frozen=draw(st.booleans()), borrowed=tuple(sorted(lent))))
    return tuple(shapes)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shapes=models(), make=st.sampled_from(PLANS), seed=st.integers(0, 2**32))
def test_every_op_finds_what_it_needs(
    data: st.DataObject, shapes: tuple[StageShape, ...], make: Maker, seed: int
) -> None:
    count = len(shapes)
    buffers = buffers_for(
        count,
        resident=data.draw(st.integers(0, count), label="resident"),
        gradients=data.draw(st.sampled_from((1, 2, max(3, count))), label="gradients"),
        staging=data.draw(st.integers(1, 4), label="staging"),
        states=data.draw(st.integers(1, 4), label="states"),
        activations=data.draw(st.integers(MIN_ACTIVATION_SLOTS, 12), label="activations"),
    )
    num_micro_batches = data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=4), label="micro-batches")
    simulation = Simulation(shapes, buffers, seed=seed)
    plans = [link(make(shapes, number, buffers, cold=step == 0)) for step, number in enumerate(num_micro_batches)]
    simulation.run(plans, commits=data.draw(st.lists(st.booleans(), min_size=len(plans), max_size=len(plans))))
    for step in range(len(plans)):
        for stage, shape in enumerate(shapes):
            for kind in (Kind.READ_STATES, Kind.UPDATE, Kind.WRITE_STATES):
                assert simulation.counts[step, kind, stage] == shape.num_pieces


def test_the_simulator_sees_a_missing_dependency() -> None:
    """The check above can fail: without the weight buffers' hand-over, weights are overwritten while they are used."""
    shapes = (StageShape(chunks=(0,)),) * 4
    buffers = buffers_for(4)
    plan = vertical(shapes, 2, buffers, cold=True)
    careless = Plan(
        name=plan.name,
        ops=tuple(op for op in plan.ops if op.kind is not Kind.ACQUIRE),
        num_micro_batches=2,
        cold=True,
        scratch_activations=(),
        scratch_gradients=(),
    )
    with pytest.raises(WrongContentError):
        Simulation(shapes, buffers, seed=0).run([link(careless)])


def test_a_chunk_is_read_from_its_new_slot_only_once_all_of_it_is_written() -> None:
    """Few pieces, many slots: without OPEN_CHUNK, the next step reads states while the last piece is written."""
    shapes = (StageShape(chunks=()), StageShape(chunks=(0, 0, 0)))
    buffers = buffers_for(2, states=4)
    for seed in range(40):
        plans = [link(vertical(shapes, 1, buffers, cold=step == 0)) for step in range(4)]
        Simulation(shapes, buffers, seed=seed).run(plans)


@pytest.mark.parametrize("make", PLANS)
def test_a_resident_borrower_gets_what_the_owner_has_learned(make: Maker) -> None:
    """Tied weights: the head stays in memory, and the embedding's update reaches its copy without another read."""
    shapes = (StageShape(chunks=(0, 0)), StageShape(chunks=(0,)), StageShape(chunks=(0,), borrowed=((0, 0), (0, 1))))
    buffers = buffers_for(3, resident=1)
    steady = make(shapes, 2, buffers, cold=False)
    assert not [op for op in steady.ops if op.kind is Kind.READ_WEIGHTS and op.stage == 2]
    assert [op.refresh for op in steady.ops if op.kind is Kind.UPDATE and op.stage == 0] == [(0, 2), (0, 2)]
    Simulation(shapes, buffers, seed=1).run([link(make(shapes, 2, buffers, cold=step == 0)) for step in range(3)])


# ---------------------------------------------------------------------- traffic


def reads_of(plan: Plan) -> list[int]:
    """How often each stage's weights are read."""
    counts = Counter(op.stage for op in plan.ops if op.kind is Kind.READ_WEIGHTS and op.piece == 0)
    return [counts[stage] for stage in range(1 + max(op.stage for op in plan.ops))]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 7, 16])
@pytest.mark.parametrize("num_stages", [4, 5, 9, 18])
def test_vertical_traffic_does_not_depend_on_micro_batches(num_stages: int, num_micro_batches: int) -> None:
    """Each stage's weights are read twice, forward and backward, but for the four at the two turns: once."""
    shapes = (StageShape(chunks=(0, 0, 1)),) * num_stages
    boundaries = (num_stages - 1) * num_micro_batches
    plan = vertical(shapes, num_micro_batches, buffers_for(num_stages, activations=boundaries), cold=False)
    assert reads_of(plan) == [1, 1, *[2] * (num_stages - 4), 1, 1]
    kinds = Counter(op.kind for op in plan.ops)
    pieces = 3 * num_stages
    assert kinds[Kind.READ_WEIGHTS] == 2 * pieces - 4 * 3
    assert kinds[Kind.READ_STATES] == kinds[Kind.UPDATE] == kinds[Kind.WRITE_STATES] == pieces
    assert not any(kinds[kind] for kind in (Kind.SPILL_ACTIVATION, Kind.SPILL_GRADIENT))


def test_cold_start_reads_what_the_step_before_would_have_left() -> None:
    shapes = (StageShape(chunks=(0,)),) * 6
    buffers = buffers_for(6)
    assert reads_of(vertical(shapes, 3, buffers, cold=True)) == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("resident", [1, 3, 6])
def test_resident_stages_are_not_read_again(resident: int) -> None:
    shapes = (StageShape(chunks=(0,)),) * 6
    reads = reads_of(vertical(shapes, 2, buffers_for(6, resident=resident), cold=False))
    assert reads[6 - resident :] == [0] * resident


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_horizontal_traffic_grows_with_micro_batches(num_micro_batches: int) -> None:
    """Weights are read for every micro-batch; gradients travel between."""
    num_stages = 6
    shapes = (StageShape(chunks=(0,)),) * num_stages
    plan = horizontal(shapes, num_micro_batches, buffers_for(num_stages), cold=False)
    kinds = Counter(op.kind for op in plan.ops)
    assert kinds[Kind.READ_WEIGHTS] == num_micro_batches * (2 * num_stages - 4)
    assert kinds[Kind.SPILL_GRADIENT] == kinds[Kind.FETCH_GRADIENT] == num_stages * (num_micro_batches - 1)
    assert kinds[Kind.UPDATE] == num_stages


# ---------------------------------------------------------------------- shape of a step


def test_micro_batches_turn_round_in_forward_and_keep_their_order_in_backward() -> None:
    shapes = (StageShape(chunks=(0,)),) * 4
    plan = vertical(shapes, 3, buffers_for(4, activations=9), cold=True)
    order = {
        (kind, stage): [op.micro_batch for op in plan.ops if op.kind is kind and op.stage == stage]
        for kind in (Kind.FORWARD, Kind.LOSS, Kind.BACKWARD)
        for stage in range(4)
    }
    assert [order[Kind.FORWARD, stage] for stage in range(3)] == [[2, 1, 0], [0, 1, 2], [2, 1, 0]]
    assert order[Kind.LOSS, 3] == [0, 1, 2]
    assert [order[Kind.BACKWARD, stage] for stage in range(3)] == [[0, 1, 2]] * 3


def test_the_commit_is_at_the_turn() -> None:
    shapes = (StageShape(chunks=(0,)),) * 3
    kinds = [op.kind for op in vertical(shapes, 2, buffers_for(3), cold=True).ops]
    commit = kinds.index(Kind.COMMIT)
    assert Kind.FORWARD not in kinds[commit:]
    assert not {Kind.LOSS, Kind.BACKWARD, Kind.UPDATE} & set(kinds[:commit])


def test_every_kind_has_a_lane() -> None:
    assert LANES.keys() == set(Kind)
    assert {LANES[kind] for kind in (Kind.FORWARD, Kind.LOSS, Kind.BACKWARD)} == {Lane.COMPUTE}


# ---------------------------------------------------------------------- refusals


def test_neighbours_must_not_share_a_weight_buffer() -> None:
    with pytest.raises(ValueError, match="neighbouring stages must have different weight buffers"):
        Buffers(weights=(0, 0), gradients=(0, 1), num_staging=1, num_states=1, num_activations=4)


@pytest.mark.parametrize("field", ["num_staging", "num_states"])
def test_at_least_one_slot(field: str) -> None:
    counts = {"num_staging": 1, "num_states": 1, field: 0}
    with pytest.raises(ValueError, match="at least one staging and one state slot"):
        Buffers(weights=(0, 1), gradients=(0, 1), num_activations=4, **counts)


def test_too_few_activation_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=f"1 are too few; at least {MIN_ACTIVATION_SLOTS} are needed"):
        vertical((StageShape(chunks=(0,)),) * 4, 4, buffers_for(4, activations=1), cold=True)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 2), (3, 0)])
def test_counts_are_checked(num_stages: int, num_micro_batches: int) -> None:
    with pytest.raises(ValueError, match=r"stages: 1 are too few|num_micro_batches: 0 is not positive"):
        vertical((StageShape(chunks=(0,)),) * num_stages, num_micro_batches, buffers_for(num_stages), cold=True)


# ---------------------------------------------------------------------- overlap


@pytest.mark.parametrize("make", PLANS)
@pytest.mark.parametrize("num_micro_batches", [2, 5, 8])
def test_activation_traffic_overlaps_the_computation_before_even_with_the_fewest_slots(
    make: Maker, num_micro_batches: int
) -> None:
    """What computation i waits for (a fetch, or a spill that frees its output's slot) waits for none later than i - 2.

    So it has the whole of computation i - 1 to end in.
    """
    shapes = (StageShape(chunks=(0,)),) * 6
    linked = link(make(shapes, num_micro_batches, buffers_for(6), cold=True))
    ops = linked.plan.ops
    waits_for: list[set[int]] = [set() for _ in ops]
    for earlier, dependents in enumerate(linked.dependents):
        for later in dependents:
            waits_for[later].add(earlier)
    number = {
        index: count
        for count, index in enumerate(
            index for index, op in enumerate(ops) if op.kind in (Kind.FORWARD, Kind.LOSS, Kind.BACKWARD)
        )
    }
    transfers = (Kind.FETCH_ACTIVATION, Kind.SPILL_ACTIVATION)
    assert any(op.kind is Kind.FETCH_ACTIVATION for op in ops)
    for index, count in number.items():
        pending = [earlier for earlier in waits_for[index] if ops[earlier].kind in transfers]
        while pending:
            transfer = pending.pop()
            for earlier in waits_for[transfer]:
                assert number.get(earlier, -1) <= count - 2, f"{ops[index]} waits for {ops[transfer]}"
                if ops[earlier].kind in transfers:
                    pending.append(earlier)


def test_an_activation_that_scratch_still_holds_is_not_written_again() -> None:
    """A boundary is written at most twice a step: as forward's output, and as backward's gradient."""
    shapes = (StageShape(chunks=(0,)),) * 6
    plan = vertical(shapes, 8, buffers_for(6), cold=True)
    spills = Counter((op.stage, op.micro_batch) for op in plan.ops if op.kind is Kind.SPILL_ACTIVATION)
    fetches = Counter((op.stage, op.micro_batch) for op in plan.ops if op.kind is Kind.FETCH_ACTIVATION)
    assert max(spills.values()) <= 2 < max(fetches.values())
    assert set(plan.scratch_activations) == spills.keys()
