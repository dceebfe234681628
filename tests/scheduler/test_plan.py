"""Plans against a simulator that knows contents: whatever order dependencies allow, every op finds what it needs.

The simulator is `tests/support/simulation.py`. Traffic is counted op by op and compared with DESIGN.md's formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.scheduler.activation_slots import MIN_ACTIVATION_SLOTS
from hoist.scheduler.link import LinkedPlan, link
from hoist.scheduler.ops import LANES, Kind, Lane, Part, Resource
from hoist.scheduler.plan import evaluation, flush, horizontal, vertical
from hoist.scheduler.plan_records import Buffers, Plan, StageShape
from tests.support.simulation import Simulation, WrongContentError

Maker = Callable[..., Plan]


@dataclass(frozen=True, kw_only=True, slots=True)
class Residency:
    """What stays in host memory from step to step, as :class:`Buffers` has it."""

    weights: tuple[frozenset[int], ...] = ()
    moments: tuple[frozenset[int], ...] = ()
    frozen: frozenset[int] = frozenset()


PLANS: tuple[Maker, ...] = (vertical, horizontal)


def buffers_for(
    num_stages: int,
    *,
    resident: int = 0,
    gradients: int = 2,
    kept: int = 0,
    delayed_from: tuple[int, ...] = (),
    staging: int = 2,
    states: int = 2,
    activations: int = MIN_ACTIVATION_SLOTS,
    speculative: bool = False,
    rereads_weights: bool = False,
    residency: Residency = Residency(),
    turns: int = 2,
) -> Buffers:
    """As `memory.MemoryPlan.buffers` numbers them: two or more that alternate, and the last stages' own."""
    streamed, shared = num_stages - resident, num_stages - kept
    first = 0 if turns == 2 else 2 + num_stages
    return Buffers(
        weights=tuple(first + stage % turns if stage < streamed else 2 + stage for stage in range(num_stages)),
        stages_ahead=turns - 1,
        gradients=tuple(stage % gradients if stage < shared else 2 + stage for stage in range(num_stages)),
        delayed_from=delayed_from,
        num_staging=staging,
        num_states=states,
        num_activations=activations,
        speculative=speculative,
        rereads_weights=rereads_weights,
        kept_weights=residency.weights,
        kept_moments=residency.moments,
        kept_frozen=residency.frozen,
    )


@st.composite
def residencies(draw: st.DrawFn, shapes: Sequence[StageShape], delayed_from: tuple[int, ...] | None) -> Residency:
    """Some chunks kept, with their moments or without; of those updated at once none, if ``delayed_from`` is given."""
    weights: list[frozenset[int]] = []
    moments: list[frozenset[int]] = []
    for stage, shape in enumerate(shapes):
        first = 0 if delayed_from is None else (delayed_from or (shape.num_pieces,) * len(shapes))[stage]
        chunks = sorted(set(shape.chunks[first:]))
        kept = draw(st.frozensets(st.sampled_from(chunks))) if chunks else frozenset()
        weights.append(kept)
        moments.append(draw(st.frozensets(st.sampled_from(sorted(kept)))) if kept else frozenset())
    with_frozen = [stage for stage, shape in enumerate(shapes) if shape.has_frozen]
    frozen = draw(st.frozensets(st.sampled_from(with_frozen))) if with_frozen else frozenset()
    return Residency(weights=tuple(weights), moments=tuple(moments), frozen=frozen)


@st.composite
def beside_a_device(draw: st.DrawFn, buffers: Buffers) -> Buffers:
    """The same in a separate device's memory, with some in host memory."""
    count = len(buffers.weights)
    shared = draw(st.integers(0, count))
    turns = draw(st.sampled_from((1, 2)))
    return replace(
        buffers,
        separate=True,
        host_gradients=tuple(stage % turns if stage < shared else 2 + stage for stage in range(count)),
        num_host_activations=draw(st.integers(0, 12)),
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[StageShape, ...]:
    """2 to 6 stages of 0 to 4 pieces in chunks, at least one of them trained; some borrow pieces of earlier stages."""
    count = draw(st.integers(2, 6))
    frozen_below = draw(st.integers(0, count - 1))
    shapes: list[StageShape] = []
    for stage in range(count):
        chunks: list[int] = []
        for chunk in range(draw(st.integers(stage == frozen_below, 2 * (stage >= frozen_below)))):
            chunks += [chunk] * draw(st.integers(1, 3))
        lendable = [(owner, piece) for owner, shape in enumerate(shapes) for piece in range(shape.num_pieces)]
        lent = draw(st.lists(st.sampled_from(lendable), max_size=3, unique=True)) if lendable else []
        has_frozen = draw(st.booleans())
        widens = has_frozen and draw(st.booleans())
        shapes.append(
            StageShape(chunks=tuple(chunks), has_frozen=has_frozen, widens=widens, borrowed=tuple(sorted(lent)))
        )
    return tuple(shapes)


def delays(shapes: Sequence[StageShape]) -> st.SearchStrategy[tuple[int, ...]]:
    """For each stage the first piece of some chunk, or the number of its pieces."""
    starts = [
        [*(shape.chunks.index(chunk) for chunk in sorted(set(shape.chunks))), shape.num_pieces] for shape in shapes
    ]
    return st.tuples(*(st.sampled_from(choice) for choice in starts))


def delays_all(shapes: Sequence[StageShape]) -> tuple[int, ...]:
    return (0,) * len(shapes)


class Sequel:
    """Makes consecutive plans, as the trainer does: cold, then steady, with what each leaves to the next."""

    def __init__(self, make: Maker, shapes: Sequence[StageShape], buffers: Buffers) -> None:
        self.make, self.shapes, self.buffers = make, shapes, buffers
        self.delays = any(
            first < shape.num_pieces for first, shape in zip(buffers.delayed_from, shapes, strict=False)
        ) or (buffers.speculative and any(shape.num_pieces for shape in shapes))
        self.cold = True
        self.pending = False

    def plans(self, *counts: int) -> list[LinkedPlan]:
        """Plans by their numbers of micro-batches; 0 is a flush, where there is something to flush; -n evaluates n."""
        plans = []
        for count in counts:
            if count < 0:
                plans += self.plans(0) if self.pending else []
                order = "vertical" if self.make is vertical else "horizontal"
                made = evaluation(self.shapes, -count, self.buffers, cold=self.cold, order=order)
                self.cold = False
            elif count:
                made = self.make(self.shapes, count, self.buffers, cold=self.cold, pending=self.pending)
                self.cold, self.pending = False, self.delays
            elif self.pending or (not self.cold and any(self.buffers.kept_weights)):
                made = flush(self.shapes, self.buffers, pending=self.pending)
                self.pending = False
            else:
                continue
            plans.append(link(made))
        return plans


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shapes=models(), make=st.sampled_from(PLANS), seed=st.integers(0, 2**32))
def test_every_op_finds_what_it_needs(
    data: st.DataObject, shapes: tuple[StageShape, ...], make: Maker, seed: int
) -> None:
    """Steps with delayed updates or without, flushes and evaluations between some of them, commits at turns and
    between steps; some chunks kept in memory; some updates made before the norm is known, and made again where that
    was wrong.
    """
    count = len(shapes)
    speculative = data.draw(st.booleans(), label="speculative")
    delayed_from = data.draw(st.one_of(st.just(()), st.just(delays_all(shapes)), delays(shapes)), label="delayed")
    num_slots = data.draw(st.sampled_from((2, 3)), label="slots")
    buffers = buffers_for(
        count,
        resident=data.draw(st.integers(0, count), label="resident"),
        gradients=data.draw(st.sampled_from((1, 2)), label="gradients"),
        kept=data.draw(st.integers(0, count), label="kept"),
        delayed_from=delayed_from,
        staging=data.draw(st.integers(1, 4), label="staging"),
        states=data.draw(st.integers(1, 4), label="states"),
        activations=data.draw(st.integers(MIN_ACTIVATION_SLOTS, 12), label="activations"),
        speculative=speculative,
        rereads_weights=data.draw(st.booleans(), label="rereads weights"),
        residency=data.draw(residencies(shapes, delayed_from if speculative else None), label="residency"),
        turns=data.draw(st.sampled_from((2, 2, 3, 4)), label="turns"),
    )
    buffers = data.draw(st.one_of(st.just(buffers), beside_a_device(buffers)), label="buffers")
    sequel = Sequel(make, shapes, buffers)
    simulation = Simulation(shapes, buffers, seed=seed, num_slots=num_slots)
    for _ in range(data.draw(st.integers(1, 2), label="commits between steps")):
        counts = data.draw(st.lists(st.integers(-4, 4), min_size=1, max_size=5), label="counts")
        plans = sequel.plans(*counts)
        commits = data.draw(st.lists(st.booleans(), min_size=len(plans), max_size=len(plans)))
        # With two slots the version before the newest is there only if every step is committed.
        simulation.run(plans, commits=[True] * len(plans) if speculative and num_slots == 2 else commits)
        simulation.run(sequel.plans(0))
        simulation.commit()
    for step in range(simulation.number):
        for stage, shape in enumerate(shapes):
            assert simulation.counts[step, Kind.UPDATE, stage] == shape.num_pieces
            kept = buffers.kept_moments[stage] if buffers.kept_moments else ()
            num_stored = sum(chunk not in kept for chunk in shape.chunks)
            assert simulation.counts[step, Kind.WRITE_STATES, stage] == num_stored
            assert simulation.counts[step, Kind.READ_STATES, stage] >= num_stored  # more: gradients from scratch


def test_the_simulator_sees_a_missing_dependency() -> None:
    """The check above can fail: without the weight buffers' hand-over, weights are overwritten while they are used."""
    shapes = (StageShape(chunks=(0,)),) * 4
    buffers = buffers_for(4)
    plan = vertical(shapes, 2, buffers, cold=True)
    careless = replace(plan, ops=tuple(op for op in plan.ops if op.kind is not Kind.ACQUIRE))
    with pytest.raises(WrongContentError):
        Simulation(shapes, buffers, seed=0).run([link(careless)])


def test_a_chunk_is_read_from_its_new_slot_only_once_all_of_it_is_written() -> None:
    """Few pieces, many slots: without OPEN_CHUNK, the next step reads states while the last piece is written."""
    shapes = (StageShape(chunks=()), StageShape(chunks=(0, 0, 0)))
    for delayed_from in ((), (0, 0)):
        buffers = buffers_for(2, states=4, delayed_from=delayed_from)
        for seed in range(40):
            plans = Sequel(vertical, shapes, buffers).plans(1, 1, 1, 1)
            Simulation(shapes, buffers, seed=seed).run(plans)


@pytest.mark.parametrize("make", PLANS)
def test_a_resident_borrower_gets_what_the_owner_has_learned(make: Maker) -> None:
    """Tied weights: the head stays in memory, and the embedding's update reaches its copy without another read."""
    shapes = (StageShape(chunks=(0, 0)), StageShape(chunks=(0,)), StageShape(chunks=(0,), borrowed=((0, 0), (0, 1))))
    buffers = buffers_for(3, resident=1)
    steady = make(shapes, 2, buffers, cold=False)
    assert not [op for op in steady.ops if op.kind is Kind.READ_WEIGHTS and op.stage == 2]
    assert [op.refresh for op in steady.ops if op.kind is Kind.UPDATE and op.stage == 0] == [(0, 2), (0, 2)]
    Simulation(shapes, buffers, seed=1).run(Sequel(make, shapes, buffers).plans(2, 2, 2))


@pytest.mark.parametrize("make", PLANS)
def test_delayed_updates_reach_the_borrowers_too(make: Maker) -> None:
    """As above, in the next step: before the owner's forward, and in a flush."""
    shapes = (StageShape(chunks=(0, 1)), StageShape(chunks=(0,)), StageShape(chunks=(0,), borrowed=((0, 0), (0, 1))))
    buffers = buffers_for(3, resident=1, kept=3, delayed_from=(1, 0, 0))
    steady = make(shapes, 2, buffers, cold=False, pending=True)
    updates = [op for op in steady.ops if op.kind is Kind.UPDATE and op.stage == 0]
    assert [(op.piece, op.delayed, op.refresh) for op in updates] == [(1, True, (0, 2)), (0, False, (0, 2))]
    assert [op.refresh for op in flush(shapes, buffers).ops if op.kind is Kind.UPDATE] == [(0, 2), (1,), (2,)]
    for seed in range(10):
        Simulation(shapes, buffers, seed=seed).run(Sequel(make, shapes, buffers).plans(2, 2, 0, 1, 2, 0))


def test_with_more_weight_buffers_more_stages_are_read_ahead() -> None:
    """Of six stages with three buffers: two ahead, in the forward and, the other way round, in the backward."""
    shapes = (StageShape(chunks=(0,)),) * 6
    plan = vertical(shapes, 1, buffers_for(6, turns=3), cold=True)
    visits = [index for index, op in enumerate(plan.ops) if op.kind is Kind.BIND]
    assert [plan.ops[index].stage for index in visits] == [0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0]
    acquired = [[op.stage for op in plan.ops[:index] if op.kind is Kind.ACQUIRE] for index in visits]
    # What is acquired by the time of each visit; 5, 4, 3 are there at the turn, and 2, 1, 0 are left for the next step.
    assert acquired[:4] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert acquired[-1] == [0, 1, 2, 3, 4, 5, 2, 1, 0]


# ---------------------------------------------------------------------- weights that are still there


def loaded(plan: Plan, kind: Kind) -> list[tuple[int, bool]]:
    """Stages of the plan's ops of a kind that take weights from a buffer, and whether they are delayed."""
    return list(dict.fromkeys((op.stage, op.delayed) for op in plan.ops if op.kind is kind and op.loaded))


@pytest.mark.parametrize("make", PLANS)
def test_updates_take_weights_from_where_the_backward_had_them(make: Maker) -> None:
    """At once always; of the delayed ones those of the first two stages, which the step before has left in memory."""
    shapes = (StageShape(chunks=(0, 1)),) * 5
    buffers = buffers_for(5, kept=5, delayed_from=(1,) * 5)
    plan = make(shapes, 2, buffers, cold=False, pending=True)
    expected = [(0, True), (1, True), *((stage, False) for stage in (4, 3, 2, 1, 0))]
    assert loaded(plan, Kind.UPDATE) == loaded(plan, Kind.READ_STATES) == expected
    assert not [op for op in plan.ops if op.loaded and op.fill]
    assert loaded(flush(shapes, buffers), Kind.UPDATE) == [(0, True), (1, True)]


def test_what_is_made_again_starts_from_the_drive() -> None:
    """The buffer holds the guess by then."""
    shapes = (StageShape(chunks=(0, 1)),) * 3
    plan = vertical(shapes, 1, buffers_for(3, delayed_from=(1,) * 3, speculative=True), cold=False, pending=True)
    assert [op for op in plan.ops if op.redo and op.kind is Kind.UPDATE]
    assert not [op for op in plan.ops if op.redo and op.loaded]


@pytest.mark.parametrize("make", PLANS)
def test_weights_are_read_again_for_who_checks_reads(make: Maker) -> None:
    shapes = (StageShape(chunks=(0, 1)),) * 4
    buffers = buffers_for(4, resident=1, delayed_from=(1,) * 4, rereads_weights=True)
    for plan in (make(shapes, 2, buffers, cold=False, pending=True), flush(shapes, buffers)):
        assert not [op for op in plan.ops if op.loaded]


def test_the_simulator_sees_a_buffer_that_is_taken_under_an_update() -> None:
    """Its check of loaded weights can fail: without that read, the next stage but one takes the buffer."""
    shapes = (StageShape(chunks=(0, 0)),) * 5
    buffers = buffers_for(5, states=4)

    def careless(linked: LinkedPlan) -> LinkedPlan:
        ops = (
            replace(op, reads=tuple(each for each in op.reads if each.part is not Part.WEIGHTS))
            if op.kind is Kind.UPDATE else op
            for op in linked.plan.ops
        )  # fmt: skip
        return link(replace(linked.plan, ops=tuple(ops)))

    with pytest.raises(WrongContentError):
        for seed in range(20):
            plans = [careless(linked) for linked in Sequel(vertical, shapes, buffers).plans(1, 1)]
            Simulation(shapes, buffers, seed=seed).run(plans)


# ---------------------------------------------------------------------- delay


def test_delayed_updates_fill_the_buffer_that_would_be_read() -> None:
    """From the third stage on; the first two are in memory and refreshed; the rest of a stage is read as ever."""
    shapes = (StageShape(chunks=(0, 0, 1, 2)),) * 6
    buffers = buffers_for(6, kept=6, delayed_from=(2,) * 6)
    plan = vertical(shapes, 2, buffers, cold=False, pending=True)
    turn = next(index for index, op in enumerate(plan.ops) if op.kind is Kind.COMMIT)
    delayed = [op for op in plan.ops[:turn] if op.kind is Kind.UPDATE]
    assert [(op.stage, op.piece) for op in delayed] == [(stage, piece) for stage in range(6) for piece in (2, 3)]
    assert all(op.delayed for op in delayed)
    assert [op.stage for op in delayed if op.fill] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert [op.refresh for op in delayed if not op.fill] == [(0,), (0,), (1,), (1,)]
    reads = [(op.stage, op.piece) for op in plan.ops[:turn] if op.kind is Kind.READ_WEIGHTS]
    assert reads == [(stage, piece) for stage in range(2, 6) for piece in (0, 1)]
    at_once = [op for op in plan.ops[turn:] if op.kind is Kind.UPDATE]
    updated = [(op.stage, op.piece) for op in at_once]
    assert updated == [(stage, piece) for stage in (5, 4, 3, 2, 1, 0) for piece in (0, 1)]
    assert not any(op.delayed or op.fill or op.stashed for op in at_once)


def test_every_delayed_write_is_done_before_the_commit() -> None:
    """The turn's commit waits for them, and the updates of its own step wait for it."""
    shapes = (StageShape(chunks=(0, 1)),) * 4
    linked = link(vertical(shapes, 2, buffers_for(4, kept=4, delayed_from=(1,) * 4), cold=False, pending=True))
    ops = linked.plan.ops
    commit = next(index for index, op in enumerate(ops) if op.kind is Kind.COMMIT)
    writes = [index for index, op in enumerate(ops) if op.kind is Kind.WRITE_STATES]
    assert [index for index in writes if index < commit] == [index for index in writes if ops[index].delayed]
    assert all(commit in linked.dependents[index] for index in writes if index < commit)
    assert all(index in linked.dependents[commit] for index in writes if index > commit)


@pytest.mark.parametrize(("gradients", "kept", "stashed"), [(1, 0, 5), (2, 0, 5), (1, 2, 3), (1, 4, 0), (2, 3, 0)])
def test_gradients_wait_in_scratch_only_where_their_buffer_is_taken(gradients: int, kept: int, stashed: int) -> None:
    shapes = (StageShape(chunks=(0, 1)),) * 5
    buffers = buffers_for(5, gradients=gradients, kept=kept, delayed_from=(1,) * 5)
    plan = vertical(shapes, 2, buffers, cold=False, pending=True)
    kinds = Counter(op.kind for op in plan.ops)
    assert kinds[Kind.STASH_GRADIENT] == len(plan.stashed_gradients) == stashed
    assert {op.stage for op in plan.ops if op.stashed} == set(range(stashed))
    assert {stage for stage, _ in plan.stashed_gradients} == set(range(stashed))


def test_nothing_can_be_pending_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="delayed updates cannot be pending where nothing has run yet"):
        vertical((StageShape(chunks=(0,)),) * 3, 1, buffers_for(3, delayed_from=(0,) * 3), cold=True, pending=True)


@pytest.mark.parametrize("forgotten", [Kind.STASH_GRADIENT, Kind.NORM, Kind.OPEN_CHUNK])
def test_the_simulator_sees_what_delayed_updates_need(forgotten: Kind) -> None:
    """Its checks of stashes, of the whole step's norm and of delayed chunks can fail."""
    shapes = (StageShape(chunks=(0, 0)),) * 4
    buffers = buffers_for(4, gradients=1, states=4, delayed_from=(0,) * 4)
    with pytest.raises(WrongContentError):
        for seed in range(40):
            plans = [
                link(
                    replace(linked.plan, ops=tuple(
                        op if op.kind is not forgotten else replace(op, reads=(), writes=()) for op in linked.plan.ops
                    ))
                )
                for linked in Sequel(vertical, shapes, buffers).plans(1, 1, 1)
            ]  # fmt: skip
            Simulation(shapes, buffers, seed=seed).run(plans)


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


def weights_read(plan: Plan, stage: int, *, before_the_turn: bool) -> int:
    """Pieces of a stage's weights that one half of a step reads."""
    turn = next(index for index, op in enumerate(plan.ops) if op.kind is Kind.COMMIT)
    half = plan.ops[:turn] if before_the_turn else plan.ops[turn:]
    return sum(op.kind is Kind.READ_WEIGHTS and op.stage == stage for op in half)


@pytest.mark.parametrize("num_delayed", [0, 1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_delayed_pieces_are_not_read_in_the_forward(num_delayed: int, num_micro_batches: int) -> None:
    """The update just before brings them. The backward reads all of a stage; two stages at each turn are there."""
    shapes = (StageShape(chunks=(0, 1, 2, 3)),) * 6
    buffers = buffers_for(6, kept=6, delayed_from=(4 - num_delayed,) * 6)
    plan = vertical(shapes, num_micro_batches, buffers, cold=False, pending=num_delayed > 0)
    forward = [weights_read(plan, stage, before_the_turn=True) for stage in range(6)]
    backward = [weights_read(plan, stage, before_the_turn=False) for stage in range(6)]
    assert forward == [0, 0, *[4 - num_delayed] * 4]
    assert backward == [4, 4, 4, 4, 0, 0]
    kinds = Counter(op.kind for op in plan.ops)
    assert kinds[Kind.READ_STATES] == kinds[Kind.UPDATE] == kinds[Kind.WRITE_STATES] == 4 * 6


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


@pytest.mark.parametrize(("staging", "states"), [(0, 1), (1, 0)])
def test_at_least_one_slot(staging: int, states: int) -> None:
    with pytest.raises(ValueError, match="at least one staging and one state slot"):
        Buffers(weights=(0, 1), gradients=(0, 1), num_staging=staging, num_states=states, num_activations=4)


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


@pytest.mark.parametrize("delayed", [False, True])
def test_no_computation_waits_for_the_updates_of_the_stage_before(delayed: bool) -> None:
    """A backward's buffers were freed by the stage before that one, whose own updates run beside it."""
    shapes = (StageShape(chunks=(0, 1)),) * 6
    buffers = buffers_for(6, staging=2, states=2, delayed_from=(1,) * 6 if delayed else ())
    linked = link(vertical(shapes, 2, buffers, cold=False, pending=delayed))
    ops = linked.plan.ops
    waits_for: list[set[int]] = [set() for _ in ops]
    for earlier, dependents in enumerate(linked.dependents):
        for later in dependents:
            waits_for[later] |= {earlier} | waits_for[earlier]
    computed = [index for index, op in enumerate(ops) if op.kind in (Kind.BACKWARD, Kind.LOSS)]
    assert computed
    for index in computed:
        updates = [op for op in map(ops.__getitem__, waits_for[index]) if op.kind is Kind.UPDATE and not op.delayed]
        assert ops[index].stage + 1 not in {op.stage for op in updates}, ops[index]


def test_an_activation_that_scratch_still_holds_is_not_written_again() -> None:
    """A boundary is written at most twice a step: as forward's output, and as backward's gradient."""
    shapes = (StageShape(chunks=(0,)),) * 6
    plan = vertical(shapes, 8, buffers_for(6), cold=True)
    spills = Counter((op.stage, op.micro_batch) for op in plan.ops if op.kind is Kind.SPILL_ACTIVATION)
    fetches = Counter((op.stage, op.micro_batch) for op in plan.ops if op.kind is Kind.FETCH_ACTIVATION)
    assert max(spills.values()) <= 2 < max(fetches.values())
    assert set(plan.scratch_activations) == spills.keys()


# ---------------------------------------------------------------------- updates on a device


@pytest.mark.parametrize("make", PLANS)
@pytest.mark.parametrize("speculative", [False, True])
def test_updates_on_a_device_begin_with_all_that_they_need_and_end_before_whoever_uses_them(
    make: Maker, speculative: bool
) -> None:
    """Of a piece: its states and measured gradient, all norms if it is delayed; then the books, and only then the rest.

    All of it is said without what other ops of the device are waited for: what is told the host must have ended.
    """
    shapes = (StageShape(chunks=(0, 1, 2)), StageShape(chunks=(0, 0)), StageShape(chunks=(0,), borrowed=((0, 0),)))
    at_once, delayed = (frozenset[int](),) * 3, (frozenset({2}), frozenset[int](), frozenset[int]())
    buffers = replace(
        buffers_for(3, delayed_from=(1, 2, 0), speculative=speculative, rereads_weights=True),
        separate=True, host_gradients=(0, 1, 0), updates_on_device=True, kept_weights=delayed,
        kept_moments=at_once if speculative else delayed,
    )  # fmt: skip
    linked = link(make(shapes, 2, buffers, cold=False, pending=True))
    ops = linked.plan.ops
    waits_for: list[set[int]] = [set() for _ in ops]
    for earlier, dependents in enumerate(linked.dependents):
        for later in dependents:
            waits_for[later].add(earlier)
    norms = [index for index, op in enumerate(ops) if op.kind is Kind.NORM]
    found = [index for index, op in enumerate(ops) if op.kind is Kind.DEVICE_UPDATE]
    assert [ops[index].redo for index in found].count(True) == (3 if speculative else 0)
    for index in found:
        op, books = ops[index], ops[index + 1]
        assert replace(books, kind=op.kind, writes=op.writes, refresh=()) == op
        assert index in waits_for[index + 1]
        before = {(ops[each].kind, ops[each].stage, ops[each].piece) for each in waits_for[index]}
        assert ((Kind.READ_STATES, op.stage, op.piece) in before) == (op.slot >= 0)
        if not op.delayed:
            assert (Kind.NORM, op.stage, -1) in before
        assert (Resource(Part.NORM, 0) in op.reads) == op.delayed, "of the step before: joined to its last norm"
        assert all(norm > index for norm in norms) or not op.delayed
        users = [each for each in ops if each.kind in (Kind.REFRESH, Kind.WRITE_STATES, Kind.WRITE_KEPT)]
        for user in users:
            is_same = (user.stage if user.owner < 0 else user.owner, user.piece) == (op.stage, op.piece)
            if is_same and (user.delayed, user.redo) == (op.delayed, op.redo):
                assert index + 1 in waits_for[ops.index(user)]


def test_the_cpu_updates_where_the_device_does_not() -> None:
    shapes = (StageShape(chunks=(0, 1)),) * 3
    separate = replace(buffers_for(3), separate=True, host_gradients=(0, 1, 0))
    kinds = Counter(op.kind for op in vertical(shapes, 1, separate, cold=False).ops)
    assert kinds[Kind.DEVICE_UPDATE] == 0
    on_device = replace(separate, updates_on_device=True)
    assert Counter(op.kind for op in vertical(shapes, 1, on_device, cold=False).ops) == {
        **kinds, Kind.DEVICE_UPDATE: kinds[Kind.UPDATE]
    }  # fmt: skip
    with pytest.raises(ValueError, match="updates on the device need one with memory of its own"):
        replace(on_device, separate=False)
