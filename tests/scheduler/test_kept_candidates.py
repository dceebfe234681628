"""What is worth keeping in memory, and how much of it a budget gets: the most traffic saved for a byte comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hoist.scheduler.memory import Demand, StageBytes, divide, smallest
from hoist.scheduler.plan import horizontal, vertical
from hoist.scheduler.plan_records import Plan, StageShape
from hoist.scheduler.residency import Candidate, Keep, candidates

CHUNK = 4096
MIB = 2**20
SHAPES = tuple(StageShape(chunks=(0, 0, 1), has_frozen=stage == 2) for stage in range(6))


def found(plan: Plan, shapes: tuple[StageShape, ...] = SHAPES) -> dict[tuple[Keep, int, int], Candidate]:
    elements = [[2 * CHUNK, CHUNK]] * len(shapes)
    frozen = [4096 if shape.has_frozen else 0 for shape in shapes]
    listed = candidates(plan, shapes, elements, frozen)
    assert [each.value for each in listed] == sorted((each.value for each in listed), reverse=True)
    return {(each.keep, each.stage, each.chunk): each for each in listed}


def steady(make: object, num_micro_batches: int, *, delayed: bool = False, speculative: bool = False) -> Plan:
    least = smallest(demand_of(SHAPES))
    buffers = least.buffers((0,) * len(SHAPES) if delayed else ())
    return make(SHAPES, num_micro_batches, buffers, cold=False, pending=delayed)  # type: ignore[operator, no-any-return]


def demand_of(shapes: tuple[StageShape, ...], keepable: tuple[Candidate, ...] = ()) -> Demand:
    return Demand(
        stages=tuple(
            StageBytes(name=f"layer.{stage}", weights=MIB, gradients=MIB, workspace=MIB) for stage in range(len(shapes))
        ),
        loan_bytes=0,
        block_bytes=0,
        activation_bytes=MIB,
        num_boundaries=2 * (len(shapes) - 1),
        context_bytes=0,
        max_piece_elements=CHUNK,
        delayed=False,
        horizontal=False,
        keepable=keepable,
    )


def test_weights_save_the_most_for_a_byte() -> None:
    """Read in the forward and the backward, and written: 12 bytes for 4. Moments: 16 bytes for 8."""
    kept = found(steady(vertical, 1))
    assert kept[Keep.WEIGHTS, 3, 0].value == 3.0
    assert kept[Keep.WEIGHTS, 3, 0].num_bytes == 4 * 2 * CHUNK
    assert kept[Keep.MOMENTS, 3, 1].value == 2.0
    assert kept[Keep.MOMENTS, 3, 1].num_bytes == 8 * CHUNK
    assert kept[Keep.FROZEN, 2, -1].value == 2.0
    # At the turns the buffers hold them still: they are read once a step less.
    assert {kept[Keep.WEIGHTS, stage, 0].value for stage in (0, 5)} == {2.0}


def test_a_delayed_update_fills_the_buffer_that_would_be_read() -> None:
    kept = found(steady(vertical, 1, delayed=True))
    assert kept[Keep.WEIGHTS, 3, 0].value == 3.0
    assert kept[Keep.MOMENTS, 3, 0].value == 2.0


@pytest.mark.parametrize("num_micro_batches", [2, 5])
def test_in_micro_batch_major_order_weights_are_worth_more(num_micro_batches: int) -> None:
    kept = found(steady(horizontal, num_micro_batches))
    assert kept[Keep.WEIGHTS, 3, 0].value == 1.0 + 2 * num_micro_batches
    assert kept[Keep.MOMENTS, 3, 0].value == 2.0


def test_a_lender_s_weights_count_for_its_borrowers_too() -> None:
    shapes = (*SHAPES[:5], replace(SHAPES[5], borrowed=((3, 0), (3, 1))))
    buffers = smallest(demand_of(shapes)).buffers()
    kept = found(vertical(shapes, 1, buffers, cold=False), shapes)
    assert kept[Keep.WEIGHTS, 3, 0].value == 4.0
    assert kept[Keep.WEIGHTS, 3, 1].value == 3.0


def test_a_budget_gets_the_best_first_and_fills_up() -> None:
    """Most weights, then activations that would be spilled, then those at the turns and moments, then compute weights;
    never more than it has.
    """
    elements = [[64 * CHUNK, 64 * CHUNK]] * len(SHAPES)
    listed = candidates(steady(vertical, 1), SHAPES, elements, [0] * len(SHAPES))
    demand = demand_of(SHAPES, listed)
    need = smallest(demand).need_bytes
    weights = [each for each in listed if each.keep is Keep.WEIGHTS and each.value > 2.0]
    history = []
    for extra in range(0, 80 * MIB, MIB // 4):
        plan = divide(demand, budget_bytes=need + extra)
        assert plan.need_bytes <= need + extra
        assert plan.kept_bytes == sum(each.num_bytes for each in listed[: plan.num_kept])
        history.append((plan.num_kept, plan.num_activations, plan.num_resident))
        if plan.num_activations > smallest(demand).num_activations:
            assert plan.num_kept >= len(weights)
        if plan.num_kept > len(weights):
            assert plan.num_activations == demand.num_boundaries
        if plan.num_resident and plan.num_kept < len(listed):  # the next one does not fit in the place of all of these
            more = replace(plan, num_resident=0, num_kept=plan.num_kept + 1)
            assert more.need_bytes > need + extra
    assert history[-1] == (len(listed), demand.num_boundaries, len(SHAPES))
    assert [kept for kept, _, _ in history] == sorted(kept for kept, _, _ in history)


def test_stages_take_turns() -> None:
    """What is left to be read and written is spread over the step: no stage has two chunks before others have one."""
    shapes = tuple(StageShape(chunks=(0, 1, 2, 3)) for _ in range(6))
    plan = vertical(shapes, 1, smallest(demand_of(shapes)).buffers(), cold=False)
    listed = candidates(plan, shapes, [[CHUNK] * 4] * 6, [0] * 6)
    best = [each for each in listed if each.value == 3.0]
    assert best
    assert [each.chunk for each in best] == sorted((each.chunk for each in best), reverse=True)


@pytest.mark.parametrize("limit", [0, MIB, 3 * MIB])
def test_the_share_that_is_kept_can_be_limited(limit: int) -> None:
    listed = candidates(steady(vertical, 1), SHAPES, [[64 * CHUNK, 64 * CHUNK]] * 6, [0] * 6)
    plan = divide(demand_of(SHAPES, listed), budget_bytes=2**30, max_kept_bytes=limit)
    assert plan.kept_bytes == limit
