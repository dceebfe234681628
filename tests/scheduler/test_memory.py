"""The budget's arithmetic: the formula term by term, promises kept for any demand, and what a refusal says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.scheduler.activation_slots import MIN_ACTIVATION_SLOTS
from hoist.scheduler.memory import (
    GRADIENT_BYTES,
    MIN_PIECE_ELEMENTS,
    MIN_SLOTS,
    RING_SHARE,
    STAGING_BYTES,
    STATE_BYTES,
    Demand,
    GradientBuffers,
    MemoryPlan,
    StageBytes,
    divide,
    piece_limit,
    smallest,
)
from hoist.scheduler.plan_records import FROZEN_PIECE
from hoist.scheduler.residency import Candidate, Keep
from hoist.tiers.errors import BudgetError

PAGE = 4096
MIB = 2**20


def pages(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high).map(lambda count: PAGE * count)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    count = draw(st.integers(2, 9))
    stages = tuple(
        StageBytes(
            name=f"stage {index}",
            weights=draw(pages(0, 3000)),
            gradients=draw(pages(0, 3000)),
            workspace=draw(st.integers(0, 8 * MIB)),
        )
        for index in range(count)
    )
    return Demand(
        stages=stages,
        loan_bytes=draw(pages(0, 500)),
        block_bytes=draw(pages(0, 1000)),
        activation_bytes=draw(pages(1, 300)),
        num_boundaries=(count - 1) * draw(st.integers(1, 20)),
        context_bytes=draw(st.integers(0, MIB)),
        max_piece_elements=4096 * draw(st.integers(1, 512)),
        delayed=draw(st.booleans()),
        horizontal=draw(st.booleans()),
        separate=draw(st.booleans()),
        num_weight_buffers=draw(st.sampled_from((2, 2, 3, 5))),
    )


def uniform(
    num_layers: int, *, num_micro_batches: int = 4, horizontal: bool = False, delayed: bool = False
) -> Demand:
    """embed, equal layers and head, as a language model has them."""
    ends = StageBytes(name="embed", weights=9 * MIB, gradients=9 * MIB, workspace=3 * MIB)
    layer = StageBytes(name="layer", weights=6 * MIB, gradients=6 * MIB, workspace=5 * MIB)
    stages = (ends, *(layer,) * num_layers, ends)
    return Demand(
        stages=stages,
        loan_bytes=9 * MIB,
        block_bytes=2 * MIB,
        activation_bytes=256 * 1024,
        num_boundaries=(len(stages) - 1) * num_micro_batches,
        context_bytes=123_456,
        max_piece_elements=2**20,
        delayed=delayed,
        horizontal=horizontal,
    )


# ---------------------------------------------------------------------- the smallest budget


def test_the_smallest_need_is_the_formula() -> None:
    """Two neighbours' weights, one gradient, loans, a block, two slots of each ring, four activations, workspace."""
    plan = smallest(uniform(4))
    assert plan.weight_bytes == (9 + 6) * MIB
    assert plan.gradients.num_bytes == 9 * MIB
    # 9 MiB of float32 are 36 of the smallest pieces, more than 32: pieces are twice as large.
    assert plan.ring_bytes == 2 * MIN_PIECE_ELEMENTS * MIN_SLOTS * (STAGING_BYTES + STATE_BYTES)
    assert plan.activation_bytes == MIN_ACTIVATION_SLOTS * 256 * 1024
    assert plan.workspace_bytes == 5 * MIB + 123_456
    assert plan.need_bytes == (15 + 9 + 9 + 2 + 4 + 1 + 5) * MIB + 123_456
    assert (STAGING_BYTES, STATE_BYTES) == (2 + 2, 2 + 2 + 4 + 4)


@settings(deadline=None)
@given(demand=demands())
def test_the_parts_add_up_to_the_need(demand: Demand) -> None:
    plan = smallest(demand)
    assert sum(size for _, size in plan.parts()) == plan.need_bytes
    assert sum(size for _, size in plan.device_parts()) == plan.device_need_bytes
    if demand.separate:
        assert plan.need_bytes == plan.arena_bytes + plan.filling_bytes
        assert plan.device_need_bytes == plan.region_bytes + plan.workspace_bytes
    else:
        assert plan.need_bytes == plan.arena_bytes + plan.workspace_bytes
        assert plan.device_need_bytes == plan.region_bytes == 0


def test_the_smallest_budget_does_not_depend_on_the_number_of_layers() -> None:
    needs = {num_layers: smallest(uniform(num_layers)).need_bytes for num_layers in (4, 16, 64)}
    assert len(set(needs.values())) == 1


def test_nor_on_the_number_of_micro_batches() -> None:
    """Given at least one boundary for each of the fewest slots; contexts and batches are the caller's to count."""
    assert len({smallest(uniform(4, num_micro_batches=count)).need_bytes for count in (1, 2, 7, 64)}) == 1


def test_few_boundaries_need_no_spare_slots() -> None:
    demand = replace(uniform(4), num_boundaries=2)
    assert smallest(demand).num_activations == 2


def test_a_small_model_has_small_pieces() -> None:
    assert smallest(replace(uniform(4), max_piece_elements=8192)).piece_elements == 8192


@settings(deadline=None)
@given(demand=demands(), missing=st.integers(1, 10**9), on_device=st.booleans())
def test_what_is_too_small_is_refused_with_what_works(demand: Demand, missing: int, on_device: bool) -> None:
    least = smallest(demand)
    host, device = least.need_bytes, least.device_need_bytes
    on_device = on_device and demand.separate
    option, need = ("--device-memory", device) if on_device else ("--host-memory", host)

    def divided(budget: int) -> MemoryPlan:
        return divide(
            demand,
            budget_bytes=host if on_device else budget,
            device_budget_bytes=budget if on_device else device,
        )

    with pytest.raises(BudgetError, match="is too small; at least") as caught:
        divided(max(0, need - missing))
    message = str(caught.value)
    assert "\n" not in message
    found = re.search(rf"give {option} (\d+)MiB or more", message)
    assert found is not None
    advised = int(found[1]) * MIB
    assert need <= advised < need + MIB
    divided(advised)
    divided(need)  # the formula is exact


def test_the_refusal_names_the_terms() -> None:
    with pytest.raises(BudgetError) as caught:
        divide(uniform(4), budget_bytes=20 * MIB)
    message = str(caught.value)
    assert message.startswith(
        "--host-memory: 20.0 MiB is too small; at least 45.1 MiB are needed (weight buffers 15.0 MiB, "
    )
    assert "workspace of a stage 5.0 MiB" in message


# ---------------------------------------------------------------------- any budget


@settings(max_examples=200, deadline=None)
@given(
    demand=demands(), extra=st.integers(0, 400 * MIB), other=st.integers(0, 400 * MIB), resident=st.booleans()
)
def test_a_division_keeps_its_promises(demand: Demand, extra: int, other: int, resident: bool) -> None:
    """Both of them, with a separate device."""
    least = smallest(demand)
    budget, device_budget = least.need_bytes + extra, least.device_need_bytes + other
    plan = divide(demand, budget_bytes=budget, device_budget_bytes=device_budget, resident_weights=resident)
    assert plan.need_bytes <= budget
    assert plan.device_need_bytes <= (device_budget if demand.separate else 0)
    assert plan.need_bytes == sum(size for _, size in plan.parts())
    assert plan.piece_elements <= demand.max_piece_elements
    assert plan.num_activations <= demand.num_boundaries
    if demand.separate:
        assert plan.states_bytes <= max(least.states_bytes, RING_SHARE * budget)
        assert plan.staging_bytes <= max(least.staging_bytes, RING_SHARE * device_budget)
    else:
        assert plan.ring_bytes <= max(least.ring_bytes, RING_SHARE * budget)
    assert plan.num_resident == 0 or resident
    check_regions(plan)
    plan.buffers()  # accepted: neighbours differ


def check_regions(plan: MemoryPlan) -> None:
    """No two stages that hold a buffer at the same time overlap, and everything lies within its region."""
    stages = plan.demand.stages
    buffers = plan.buffers()
    count = len(stages)
    weights = [(plan.weight_offset(index), stage.weights) for index, stage in enumerate(stages)]
    for start, size in weights:
        assert start % PAGE == 0 <= start
        assert start + size <= plan.weight_bytes
    check_gradients(plan.gradients, plan.buffers().gradients)
    if plan.demand.separate:
        check_gradients(plan.host_gradients, plan.buffers().host_gradients)
    for first in range(count):
        for second in range(first + 1, count):
            # Resident ones are there from step to step, and more than two that take turns lie apart.
            apart = buffers.weights[first] != buffers.weights[second] and buffers.weights[second] > 1
            if second == first + 1 or apart:
                assert disjoint(weights[first], weights[second])


def check_gradients(region: GradientBuffers, numbers: Sequence[int]) -> None:
    """Kept gradients wait from step to step; of two shared buffers, neighbours have one each at the same time."""
    places = [(region.offset(stage), size) for stage, size in enumerate(region.sizes)]
    for start, size in places:
        assert start % PAGE == 0 <= start
        assert start + size <= region.num_bytes
    for first in range(len(places)):
        for second in range(first + 1, len(places)):
            if numbers[second] > 1 or (second == first + 1 and region.num_shared > 1):
                assert disjoint(places[first], places[second])


def disjoint(left: tuple[int, int], right: tuple[int, int]) -> bool:
    return left[0] + left[1] <= right[0] or right[0] + right[1] <= left[0]


def ranks(plan: MemoryPlan) -> tuple[int, ...]:
    """What a division has got, the most important first."""
    return (
        int(plan.num_gradient_buffers > 1),
        int(plan.num_host_gradient_buffers > 1),
        plan.num_states,
        plan.num_staging,
        plan.piece_elements,
        plan.num_activations,
        plan.num_host_activations,
        plan.num_kept_gradients,
        plan.num_kept_host_gradients,
        plan.num_kept,
        plan.num_resident,
    )


@settings(max_examples=200, deadline=None)
@given(demand=demands(), first=st.integers(0, 200 * MIB), more=st.integers(0, 200 * MIB))
def test_more_memory_never_takes_away_what_matters_more(demand: Demand, first: int, more: int) -> None:
    """A larger budget gives more of the first thing in which the two divisions differ."""
    least = smallest(demand)
    need, other = least.need_bytes, least.device_need_bytes
    small = divide(demand, budget_bytes=need + first, device_budget_bytes=other)
    large = divide(demand, budget_bytes=need + first + more, device_budget_bytes=other)
    assert ranks(small) <= ranks(large)


def test_with_plenty_of_memory_nothing_is_spilled_or_read_twice() -> None:
    demand = uniform(6, horizontal=True)
    plan = divide(demand, budget_bytes=2**34)
    assert plan.num_resident == len(demand.stages)
    assert plan.num_activations == demand.num_boundaries
    assert plan.num_kept_gradients == len(demand.stages)
    assert plan.piece_elements == demand.max_piece_elements
    assert plan.weight_bytes == sum(stage.weights for stage in demand.stages)
    assert plan.gradients.num_bytes == sum(stage.gradients for stage in demand.stages)
    assert divide(demand, budget_bytes=2**34, resident_weights=False).num_resident == 0


# ---------------------------------------------------------------------- gradients that wait


def test_the_smallest_budget_with_delay_has_room_for_gradients_that_come_back() -> None:
    """Beside the same, 4 bytes an element of a state slot."""
    plan, at_once = smallest(uniform(4, delayed=True)), smallest(uniform(4))
    assert GRADIENT_BYTES == 4
    assert plan.need_bytes - at_once.need_bytes == MIN_SLOTS * plan.piece_elements * GRADIENT_BYTES
    assert plan.gradients.num_bytes == at_once.gradients.num_bytes


@pytest.mark.parametrize(("buffers", "kept", "expected"), [
    (1, 0, 9), (2, 0, 9 + 6), (1, 1, 9 + 9), (2, 1, 9 + 6 + 9), (2, 3, 9 + 6 + 9 + 6 + 6), (1, 5, 9 + 9 + 4 * 6),
    (1, 6, 9 + 9 + 4 * 6), (2, 6, 9 + 9 + 4 * 6),
])  # fmt: skip
def test_gradient_buffers_are_those_that_are_shared_and_each_kept_stages_own(
    buffers: int, kept: int, expected: int
) -> None:
    plan = replace(smallest(uniform(4, delayed=True)), num_gradient_buffers=buffers, num_kept_gradients=kept)
    assert plan.gradients.num_bytes == expected * MIB
    assert len(set(plan.buffers().gradients[6 - kept :])) == kept
    assert plan.state_bytes == STATE_BYTES + (GRADIENT_BYTES if kept < 5 else 0)
    check_regions(plan)


@pytest.mark.parametrize("budget_mib", [52, 60, 75, 90, 105, 120, 200])
@pytest.mark.parametrize("horizontal", [False, True])
def test_with_delay_as_many_gradients_are_kept_as_fit(budget_mib: int, horizontal: bool) -> None:
    """Before any weights are."""
    plan = divide(uniform(4, delayed=True, horizontal=horizontal), budget_bytes=budget_mib * MIB)
    if plan.num_kept_gradients < 6:
        more = replace(plan, num_kept_gradients=plan.num_kept_gradients + 1)
        assert more.need_bytes > budget_mib * MIB
        assert plan.num_resident == 0
    assert plan.num_kept_gradients == {52: 0, 200: 6}.get(budget_mib, plan.num_kept_gradients)


def test_without_delay_the_vertical_order_keeps_none() -> None:
    assert divide(uniform(4), budget_bytes=2**34).num_kept_gradients == 0


@pytest.mark.parametrize(
    ("chunks", "configured", "expected"),
    [
        ((100, 5000), 2**20, 8192),
        ((2**22,), 2**20, 2**20),
        ((0,), 2**20, 4096),
        ((), 2**20, 4096),
        ((4096,), 4096, 4096),
    ],
)
def test_piece_limit(chunks: tuple[int, ...], configured: int, expected: int) -> None:
    assert piece_limit(chunks, configured) == expected


def test_pinned_states_stay_in_the_smallest_budget() -> None:
    """And count in it; a limit is for the others."""
    found = tuple(
        Candidate(keep=keep, stage=stage, chunk=chunk, num_bytes=MIB, saved_bytes=saved * MIB)
        for keep, stage, chunk, saved in (
            (Keep.WEIGHTS, 1, 0, 4), (Keep.MOMENTS, 1, 0, 2), (Keep.FROZEN, 0, FROZEN_PIECE, 8),
        )
    )  # fmt: skip
    plain = uniform(4)
    pinned = replace(plain, keepable=found, num_pinned=2)
    least = smallest(pinned)
    assert least.need_bytes == smallest(plain).need_bytes + 2 * MIB
    assert divide(pinned, budget_bytes=least.need_bytes, max_kept_bytes=0).num_kept == 2
    assert divide(pinned, budget_bytes=2**34, max_kept_bytes=2 * MIB).num_kept == 2
    assert divide(pinned, budget_bytes=2**34).num_kept == 3


# ---------------------------------------------------------------------- a device with memory of its own


@settings(deadline=None)
@given(
    demand=demands().map(lambda each: replace(each, separate=True)),
    host=st.integers(0, 200 * MIB),
    device=st.integers(0, 60 * MIB),
)
def test_activations_fill_the_device_first_and_then_host_memory(demand: Demand, host: int, device: int) -> None:
    least = smallest(demand)
    budgets = least.need_bytes + host, least.device_need_bytes + device
    plan = divide(demand, budget_bytes=budgets[0], device_budget_bytes=budgets[1])
    assert plan.need_bytes == sum(size for _, size in plan.parts()) <= budgets[0]
    assert plan.device_need_bytes == sum(size for _, size in plan.device_parts()) <= budgets[1]
    assert plan.buffers().num_host_activations == plan.num_host_activations
    at_once = min(demand.num_boundaries, len(demand.stages) - 1) if demand.horizontal else demand.num_boundaries
    if plan.num_host_activations:
        more = replace(plan, num_activations=plan.num_activations + 1, num_resident=0)
        assert more.device_need_bytes > budgets[1]
        assert plan.num_activations + plan.num_host_activations <= at_once + 1
    elif plan.num_activations < at_once:
        more = replace(plan, num_host_activations=1, num_kept_host_gradients=0)
        assert more.need_bytes > budgets[0]


def test_activations_in_host_memory_come_after_states_that_save_more_and_before_others() -> None:
    found = tuple(
        Candidate(keep=keep, stage=1, chunk=0, num_bytes=2 * MIB, saved_bytes=saved * MIB)
        for keep, saved in ((Keep.WEIGHTS, 6), (Keep.MOMENTS, 4))
    )
    demand = replace(uniform(4), separate=True, keepable=found, activation_bytes=2 * MIB)
    least = smallest(demand)
    waiting = demand.num_boundaries - least.num_activations + 1
    plans = [
        divide(demand, budget_bytes=least.need_bytes + extra, device_budget_bytes=least.device_need_bytes)
        for extra in range(0, 80 * MIB, MIB)
    ]
    history = [(plan.num_host_activations, plan.num_kept) for plan in plans]
    assert 0 < history[0][0] < waiting and history[-1] == (waiting, 2)
    assert history == sorted(history)
    assert {kept for slots, kept in history if slots < waiting} == {1}
    assert plans[-1].host_activation_bytes == waiting * demand.activation_bytes
    assert not divide(demand, budget_bytes=2**34, device_budget_bytes=2**34).num_host_activations
