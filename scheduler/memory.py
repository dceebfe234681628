"""From a host-memory budget to buffers: how many of each kind, how large, and what the smallest workable budget is.

Pure arithmetic on bytes. The formula is written once, in `need_bytes`; refusals, docs and tests use it. The arena that
is carved up accordingly is `tiers/arena.py`; the plan that uses the buffers is `plan.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hoist.scheduler.activation_slots import MIN_ACTIVATION_SLOTS
from hoist.scheduler.plan_records import Buffers
from hoist.scheduler.residency import MOMENT_BYTES, WEIGHT_BYTES, Candidate, Kept, kept_of
from hoist.tiers.errors import BudgetError
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, round_up

#: Bytes an element takes in a staging slot: weight_hi and weight_lo.
STAGING_BYTES = 4
#: Bytes an element takes in a state slot: weight_hi, weight_lo, exp_avg, exp_avg_sq.
STATE_BYTES = WEIGHT_BYTES + MOMENT_BYTES
#: Bytes an element of a gradient takes.
GRADIENT_BYTES = 4
#: Smallest piece that is chosen (elements): below this, requests are too small for a drive.
MIN_PIECE_ELEMENTS = 16 * 4096
#: Most pieces that the largest stage is cut into while pieces are smaller than this (elements): each costs some 5 KB of
#: ops in the plan, which lie beside the buffers.
MAX_PIECES_OF_STAGE = 32
SMALL_PIECE_ELEMENTS = 64 * 4096
#: Slots of each kind: fewest that work with overlap, and most that are of use.
MIN_SLOTS = 2
MAX_SLOTS = 8
#: Rings of slots (staging and states) grow while they take at most this share of the budget.
RING_SHARE = 1 / 3
#: Bytes of traffic that a byte of room for waiting gradients or boundary activations saves: one write, one read.
SPILL_VALUE = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """Bytes of one stage in host memory, each a multiple of 4096."""

    name: str
    weights: int
    """Compute weights, own and borrowed, in the dtype of the computation, and frozen tensors."""
    gradients: int
    """fp32 gradients of its own trainable tensors; 0 if it has none."""
    workspace: int
    """Most bytes that its forward, recomputation and backward on one micro-batch hold outside the arena."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a run needs room for, whatever the budget."""

    stages: tuple[StageBytes, ...]
    loan_bytes: int
    """fp32 gradients of tied tensors, kept from the borrower's backward to the owner's."""
    block_bytes: int
    """Scratch for one block of a weight's gradient (`accumulate.py`)."""
    activation_bytes: int
    """One boundary activation (multiple of 4096)."""
    num_boundaries: int
    """Boundary activations that a step has at once: micro-batches x (stages - 1), or where the first ones are not
    trained, x the stages from the first trained one on."""
    context_bytes: int
    """Masks, positions and rotary tables of a step's micro-batches, batches included."""
    max_piece_elements: int
    """Largest piece that is of use, in elements: see :func:`piece_limit`."""
    delayed: bool
    """Some gradients must wait for the next step: their updates are delayed, or may have to be made again."""
    horizontal: bool
    """Micro-batch-major order: gradients of all stages are carried from micro-batch to micro-batch."""
    straight: bool = False
    """Weights are computed with in bfloat16 and read straight into their buffers: nothing is staged."""
    keepable: tuple[Candidate, ...] = ()
    """What may stay in host memory from step to step, the best first, after those that must stay."""
    num_pinned: int = 0
    """How many of them must stay, whatever the budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """A budget, divided. Made by :func:`divide`."""

    demand: Demand
    piece_elements: int
    """Unit of I/O and update."""
    num_staging: int
    num_states: int
    num_activations: int
    num_gradient_buffers: int
    """1 or 2, which the stages without a buffer of their own share."""
    num_kept_gradients: int
    """Stages, counted from the last, with a gradient buffer of their own, where gradients can wait."""
    num_resident: int
    """Stages, counted from the last, whose compute weights stay in their buffers from step to step."""
    num_kept: int = 0
    """Candidates, counted from the best, that stay in host memory from step to step."""

    @property
    def kept(self) -> Kept:
        """What stays in host memory from step to step."""
        return kept_of(self.demand.keepable[: self.num_kept], len(self.demand.stages))

    @property
    def kept_bytes(self) -> int:
        """Region of what stays there."""
        return sum(candidate.num_bytes for candidate in self.demand.keepable[: self.num_kept])

    @property
    def weight_bytes(self) -> int:
        """Region of the two weight buffers, one at each end, and of the resident stages' own."""
        return self._streamed_bytes + sum(stage.weights for stage in self._resident)

    @property
    def _streamed(self) -> tuple[StageBytes, ...]:
        return self.demand.stages[: len(self.demand.stages) - self.num_resident]

    @property
    def _resident(self) -> tuple[StageBytes, ...]:
        return self.demand.stages[len(self.demand.stages) - self.num_resident :]

    @property
    def _streamed_bytes(self) -> int:
        return _pair_bytes([stage.weights for stage in self._streamed])

    @property
    def _shared_gradients(self) -> list[int]:
        """Stages that share the gradient buffers: those with gradients that have no buffer of their own."""
        shared = len(self.demand.stages) - self.num_kept_gradients
        return [stage for stage in range(shared) if self.demand.stages[stage].gradients]

    @property
    def _shared_gradient_bytes(self) -> int:
        sizes = [self.demand.stages[stage].gradients for stage in self._shared_gradients]
        return max(sizes, default=0) if self.num_gradient_buffers == 1 else _pair_bytes(sizes)

    @property
    def gradient_bytes(self) -> int:
        """Region of the gradient buffers: the shared ones, then each stage's own."""
        kept = self.demand.stages[len(self.demand.stages) - self.num_kept_gradients :]
        return self._shared_gradient_bytes + sum(stage.gradients for stage in kept)

    @property
    def state_bytes(self) -> int:
        """Bytes an element takes in a state slot: the four arrays, and its gradient if some come back from scratch."""
        return STATE_BYTES + (GRADIENT_BYTES if self.demand.delayed and len(self._shared_gradients) > 1 else 0)

    @property
    def ring_bytes(self) -> int:
        """Staging and state slots."""
        return self.piece_elements * (self.num_staging * STAGING_BYTES + self.num_states * self.state_bytes)

    @property
    def activation_bytes(self) -> int:
        """Activation slots."""
        return self.num_activations * self.demand.activation_bytes

    @property
    def arena_bytes(self) -> int:
        """The arena: everything that is leased."""
        fixed = self.demand.loan_bytes + self.demand.block_bytes
        spilled = self.ring_bytes + self.activation_bytes
        return self.weight_bytes + self.gradient_bytes + fixed + spilled + self.kept_bytes

    @property
    def workspace_bytes(self) -> int:
        """Reserved outside the arena: one stage's forward and backward, and the contexts."""
        return max(stage.workspace for stage in self.demand.stages) + self.demand.context_bytes

    @property
    def need_bytes(self) -> int:
        """The formula: weights, gradients, loans, block, rings, activations, kept states, workspace and contexts."""
        return self.arena_bytes + self.workspace_bytes

    def parts(self) -> tuple[tuple[str, int], ...]:
        """The formula's terms, for people: (label, bytes)."""
        return (
            ("weight buffers", self.weight_bytes),
            ("gradient buffers", self.gradient_bytes),
            ("gradients of tied tensors", self.demand.loan_bytes),
            ("a block of a gradient", self.demand.block_bytes),
            ("staging and optimizer pieces", self.ring_bytes),
            ("boundary activations", self.activation_bytes),
            ("states kept from step to step", self.kept_bytes),
            ("workspace of a stage", max(stage.workspace for stage in self.demand.stages)),
            ("masks, positions, batches", self.demand.context_bytes),
        )

    def buffers(self, delayed_from: Sequence[int] = (), *, speculative: bool = False) -> Buffers:
        """What a plan may use. Buffers 0 and 1 alternate between streamed stages; the others have their own.

        ``delayed_from``, ``speculative``: see :class:`Buffers`.
        """
        kept = self.kept
        count = len(self.demand.stages)
        streamed = count - self.num_resident
        weights = tuple(stage % 2 if stage < streamed else 2 + stage for stage in range(count))
        turns = {stage: turn % self.num_gradient_buffers for turn, stage in enumerate(self._shared_gradients)}
        gradients = tuple(turns.get(stage, 2 + stage) for stage in range(count))
        return Buffers(
            weights=weights,
            gradients=gradients,
            delayed_from=tuple(delayed_from),
            num_staging=self.num_staging,
            num_states=self.num_states,
            num_activations=self.num_activations,
            speculative=speculative,
            straight_weights=self.demand.straight,
            rereads_weights=self.demand.straight,
            kept_weights=kept.weights,
            kept_moments=kept.moments,
            kept_frozen=kept.frozen,
        )

    def weight_offset(self, stage: int) -> int:
        """First byte of a stage's weights in the weight region.

        Streamed stages with even index start at the region's low end, odd ones end at its high end: neighbours always
        fit together, since the region is as large as the largest two neighbours.
        """
        streamed = len(self._streamed)
        if stage >= streamed:
            return self._streamed_bytes + sum(stage_bytes.weights for stage_bytes in self._resident[: stage - streamed])
        return 0 if stage % 2 == 0 else self._streamed_bytes - self.demand.stages[stage].weights

    def gradient_offset(self, stage: int) -> int:
        """First byte of a stage's gradients in the gradient region."""
        shared = self._shared_gradients
        streamed = len(self.demand.stages) - self.num_kept_gradients
        if stage >= streamed:
            before = self.demand.stages[streamed:stage]
            return self._shared_gradient_bytes + sum(other.gradients for other in before)
        if stage not in shared or self.num_gradient_buffers == 1 or shared.index(stage) % 2 == 0:
            return 0
        return self._shared_gradient_bytes - self.demand.stages[stage].gradients


def promised_bytes(budget_bytes: int) -> int:
    """Most anonymous and shared memory beyond the baseline that a budget allows: 1.1 times as much and 32 MiB."""
    return budget_bytes * 11 // 10 + 32 * 2**20


def _pair_bytes(sizes: Sequence[int]) -> int:
    """The most that two neighbours take together (one alone, if there is only one)."""
    if len(sizes) < 2:
        return sum(sizes)
    return max(left + right for left, right in pairwise(sizes))


def smallest(demand: Demand) -> MemoryPlan:
    """The division that needs the least: all that may streams, one gradient buffer, spilled activations."""
    return MemoryPlan(
        demand=demand,
        piece_elements=min(_smallest_piece(demand), demand.max_piece_elements),
        num_staging=0 if demand.straight else MIN_SLOTS,
        num_states=MIN_SLOTS,
        num_activations=min(MIN_ACTIVATION_SLOTS, demand.num_boundaries),
        num_gradient_buffers=1,
        num_kept_gradients=0,
        num_resident=0,
        num_kept=demand.num_pinned,
    )


def _smallest_piece(demand: Demand) -> int:
    """Elements of the smallest piece worth choosing, a power of two."""
    largest_stage = max(stage.gradients for stage in demand.stages) // 4
    piece = MIN_PIECE_ELEMENTS
    while piece < SMALL_PIECE_ELEMENTS and largest_stage > MAX_PIECES_OF_STAGE * piece:
        piece *= 2
    return piece


def divide(
    demand: Demand, *, budget_bytes: int, resident_weights: bool = True, max_kept_bytes: int | None = None
) -> MemoryPlan:
    """Divide a budget among the buffers: first what overlap needs, then what saves the most traffic.

    From the smallest division upwards: a second gradient buffer (the optimizer overlaps the next stage's backward) and
    larger and more pieces; then states that stay from step to step, as long as a byte of them saves more than a byte of
    the next two; boundary activations that needn't be spilled; gradients that wait (for the next micro-batch in
    micro-batch-major order, or for delayed updates); the other states; and last the compute weights of stages, which
    then needn't be put together from their halves again. ``max_kept_bytes`` limits the states, but for those that must
    stay.
    Raises BudgetError with the smallest budget that works.
    """
    plan = smallest(demand)
    if plan.need_bytes > budget_bytes:
        parts = ", ".join(f"{label} {_mib(size)}" for label, size in plan.parts() if size)
        raise BudgetError(
            f"--host-memory: {_mib(budget_bytes)} is too small; at least {_mib(plan.need_bytes)} are needed ({parts}); "
            f"give --host-memory {-(-plan.need_bytes // 2**20)}MiB or more, "
            "or a smaller --micro-batch-size or --seq-len"
        )

    def take(wanted: MemoryPlan) -> bool:
        nonlocal plan
        if wanted.need_bytes > budget_bytes:
            return False
        plan = wanted
        return True

    take(replace(plan, num_gradient_buffers=2))
    ring_limit = RING_SHARE * budget_bytes
    # One chain of enlargements, left at the first that does not fit: a larger budget only goes further along it.
    while (bigger := _next_ring(plan)) != plan and bigger.ring_bytes <= ring_limit and take(bigger):
        pass

    sums = list(accumulate((candidate.num_bytes for candidate in demand.keepable), initial=0))

    def keep(more_than: float) -> None:
        """Take candidates in order, while they are worth more and fit."""
        room = sums[plan.num_kept] + budget_bytes - plan.need_bytes
        fitting = bisect_right(sums, room if max_kept_bytes is None else min(room, max_kept_bytes)) - 1
        worthy = bisect_left(
            demand.keepable, -more_than, lo=demand.num_pinned, key=lambda candidate: -candidate.value
        )
        take(replace(plan, num_kept=max(plan.num_kept, min(fitting, worthy))))

    keep(more_than=SPILL_VALUE)
    if demand.activation_bytes:
        spare = (budget_bytes - plan.need_bytes) // demand.activation_bytes
        take(replace(plan, num_activations=min(demand.num_boundaries, plan.num_activations + spare)))
    if demand.horizontal or demand.delayed:
        while plan.num_kept_gradients < len(demand.stages):
            if not take(replace(plan, num_kept_gradients=plan.num_kept_gradients + 1)):
                break
    keep(more_than=0.0)
    while resident_weights and plan.num_resident < len(demand.stages):
        if not take(replace(plan, num_resident=plan.num_resident + 1)):
            break
    return plan


def _next_ring(plan: MemoryPlan) -> MemoryPlan:
    """The next larger staging and state slots: one more of each and pieces of twice the size, in turn, up to the most.

    Slots come first: with more of them, reading, updating and writing overlap; larger pieces only save requests.
    """
    slots = min(MAX_SLOTS, max(plan.num_staging, plan.num_states) + 1)
    more = replace(plan, num_staging=0 if plan.demand.straight else slots, num_states=slots)
    larger = replace(plan, piece_elements=min(plan.demand.max_piece_elements, 2 * plan.piece_elements))
    enlarged = plan.piece_elements > smallest(plan.demand).piece_elements
    if larger == plan or (more != plan and (plan.num_states == MIN_SLOTS or enlarged)):
        return more
    return larger


def piece_limit(chunk_elements: Sequence[int], configured: int) -> int:
    """The largest piece of use: no larger than the largest chunk, rounded up to 4096, nor than configured."""
    largest = max((elements for elements in chunk_elements), default=CHUNK_QUANTUM_ELEMENTS)
    return min(configured, round_up(max(largest, 1), CHUNK_QUANTUM_ELEMENTS))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
