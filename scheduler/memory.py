"""From memory budgets to buffers: how many of each kind, how large, and what the smallest workable budgets are.

Pure arithmetic on bytes. The formula is written once, in `parts`; refusals, docs and tests use it. A device with memory
of its own has a budget of its own, with its share of the parts. The arena that is carved up accordingly is
`tiers/arena.py`; the plan that uses the buffers is `plan.py`.
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
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, TENSOR_ALIGN_ELEMENTS, round_up

#: Bytes an element takes in a staging slot: weight_hi and weight_lo.
STAGING_BYTES = 4
#: Bytes an element takes on a separate device while its weight comes from host memory: two halves, and their merging.
UPLOAD_BYTES = 8
#: Bytes an element takes in a state slot: weight_hi, weight_lo, exp_avg, exp_avg_sq.
STATE_BYTES = WEIGHT_BYTES + MOMENT_BYTES
#: Bytes an element of a gradient takes.
GRADIENT_BYTES = 4
#: Pieces that a separate device updates at once: one comes up or goes down while another one is updated.
NUM_UPDATE_SLOTS = 2
#: Bytes an element takes in one of them, and once for all: the merged weight, and scratch for merging and splitting.
UPDATE_BYTES = STATE_BYTES + GRADIENT_BYTES
UPDATE_SCRATCH_BYTES = 8
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
PAGE_BYTES = 4096
#: Slots of the ring in host memory through which files and a separate device exchange bytes, and the most of one slot.
NUM_BOUNCE_SLOTS = 8
MAX_BOUNCE_BYTES = 4 * 2**20
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
    library_bytes: int = 0
    """On an accelerator, what libraries keep allocated from their first use on: cuBLAS a workspace for each stream and
    each thread that starts kernels, the backward's too (32 MiB each on Hopper). Measured, see `workspace.py`; with what
    the allocator may add to the one region of all buffers."""
    delayed: bool
    """Some gradients must wait for the next step: their updates are delayed, or may have to be made again."""
    horizontal: bool
    """Micro-batch-major order: gradients of all stages are carried from micro-batch to micro-batch."""
    separate: bool = False
    """What computes has memory of its own, with its own budget: weight and gradient buffers, loans, staging,
    activations and workspace are there; states, and gradients on their way to updates, in host memory."""
    updates_on_device: bool = False
    """If ``separate``: AdamW runs on the device."""
    straight: bool = False
    """Weights are computed with in bfloat16 and read straight into their buffers: nothing is staged."""
    compiler_bytes: int = 0
    """What compiling layers keeps in host memory: see `compiling.py`."""
    num_weight_buffers: int = 2
    """Buffers that stages whose weights do not stay take in turn; at least 2. With 2 they share one region."""
    keepable: tuple[Candidate, ...] = ()
    """What may stay in host memory from step to step, the best first, after those that must stay."""
    num_pinned: int = 0
    """How many of them must stay, whatever the budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientBuffers:
    """A region of gradient buffers: one or two that stages share, then each other stage's own."""

    sizes: tuple[int, ...]
    """Bytes of each stage's gradients; 0 if it has none."""
    num_shared: int
    """1 or 2, which the stages without a buffer of their own share."""
    num_kept: int
    """Stages, counted from the last, with a buffer of their own, where gradients can wait."""

    @property
    def _first_kept(self) -> int:
        return len(self.sizes) - self.num_kept

    @property
    def sharing(self) -> list[int]:
        """Stages that share buffers: those with gradients that have none of their own."""
        return [stage for stage in range(self._first_kept) if self.sizes[stage]]

    @property
    def _shared_bytes(self) -> int:
        sizes = [self.sizes[stage] for stage in self.sharing]
        return max(sizes, default=0) if self.num_shared == 1 else _pair_bytes(sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return self._shared_bytes + sum(self.sizes[self._first_kept :])

    def numbers(self) -> tuple[int, ...]:
        """The number of each stage's buffer: 0 and 1 are shared, the others one stage's."""
        turns = {stage: turn % self.num_shared for turn, stage in enumerate(self.sharing)}
        return tuple(turns.get(stage, 2 + stage) for stage in range(len(self.sizes)))

    def offset(self, stage: int) -> int:
        """First byte of a stage's gradients in the region."""
        if stage >= self._first_kept:
            return self._shared_bytes + sum(self.sizes[self._first_kept : stage])
        sharing = self.sharing
        if stage not in sharing or self.num_shared == 1 or sharing.index(stage) % 2 == 0:
            return 0
        return self._shared_bytes - self.sizes[stage]


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
    num_host_gradient_buffers: int = 0
    """With a separate device: 1 or 2 in host memory, which the stages without one of their own there share."""
    num_kept_host_gradients: int = 0
    """With a separate device: stages, counted from the last, with a gradient buffer of their own in host memory."""
    num_host_activations: int = 0
    """With a separate device: activation slots in host memory, beside the device's."""

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
        """Region of the weight buffers that stages take in turn, and of the resident stages' own."""
        return self._streamed_bytes + sum(stage.weights for stage in self._resident)

    @property
    def _streamed(self) -> tuple[StageBytes, ...]:
        return self.demand.stages[: len(self.demand.stages) - self.num_resident]

    @property
    def _resident(self) -> tuple[StageBytes, ...]:
        return self.demand.stages[len(self.demand.stages) - self.num_resident :]

    @property
    def _turn_bytes(self) -> list[int]:
        """More than two buffers lie apart: bytes of each, which is as large as the largest stage that takes it."""
        count = self.demand.num_weight_buffers
        return [max((stage.weights for stage in self._streamed[turn::count]), default=0) for turn in range(count)]

    @property
    def _streamed_bytes(self) -> int:
        if self.demand.num_weight_buffers > 2:
            return sum(self._turn_bytes)
        return _pair_bytes([stage.weights for stage in self._streamed])

    @property
    def gradients(self) -> GradientBuffers:
        """Those that backward passes fill."""
        return GradientBuffers(
            sizes=tuple(stage.gradients for stage in self.demand.stages),
            num_shared=self.num_gradient_buffers,
            num_kept=self.num_kept_gradients,
        )

    @property
    def host_gradients(self) -> GradientBuffers:
        """With a separate device: those that updates use."""
        return GradientBuffers(
            sizes=tuple(stage.gradients for stage in self.demand.stages),
            num_shared=self.num_host_gradient_buffers,
            num_kept=self.num_kept_host_gradients,
        )

    @property
    def waiting_gradients(self) -> GradientBuffers:
        """Those that norms and updates use, wherever they are."""
        return self.host_gradients if self.demand.separate else self.gradients

    @property
    def state_bytes(self) -> int:
        """Bytes an element takes in a state slot: the four arrays, and its gradient if some come back from scratch."""
        stashes = self.demand.delayed and len(self.waiting_gradients.sharing) > 1
        return STATE_BYTES + (GRADIENT_BYTES if stashes else 0)

    @property
    def staging_bytes(self) -> int:
        """Staging slots."""
        return self.piece_elements * self.num_staging * STAGING_BYTES

    @property
    def states_bytes(self) -> int:
        """State slots."""
        return self.piece_elements * self.num_states * self.state_bytes

    @property
    def ring_bytes(self) -> int:
        """Staging and state slots."""
        return self.staging_bytes + self.states_bytes

    @property
    def upload_bytes(self) -> int:
        """A piece on its way from host memory into a separate device's weight buffers; 0 without one."""
        return UPLOAD_BYTES * self.piece_elements if self.demand.separate else 0

    @property
    def updates_bytes(self) -> int:
        """Pieces that AdamW works on on a separate device, its scratch and step counts; 0 where it runs on the CPU."""
        if not self.demand.updates_on_device:
            return 0
        elements = self.piece_elements
        slots = (NUM_UPDATE_SLOTS * UPDATE_BYTES + UPDATE_SCRATCH_BYTES) * elements
        return slots + round_up(steps_bytes(elements), PAGE_BYTES)

    @property
    def bounce_slot_bytes(self) -> int:
        """One slot of the ring between files and a separate device; 0 without one."""
        if not self.demand.separate:
            return 0
        return min(MAX_BOUNCE_BYTES, STAGING_BYTES * self.piece_elements)

    @property
    def activation_bytes(self) -> int:
        """Activation slots."""
        return self.num_activations * self.demand.activation_bytes

    @property
    def host_activation_bytes(self) -> int:
        """With a separate device: activation slots in host memory."""
        return self.num_host_activations * self.demand.activation_bytes

    @property
    def _computing_bytes(self) -> int:
        """Regions of what computation touches, staging left out."""
        fixed = self.demand.loan_bytes + self.demand.block_bytes
        return self.weight_bytes + self.gradients.num_bytes + fixed + self.activation_bytes

    @property
    def arena_bytes(self) -> int:
        """The arena in host memory: everything that is leased there."""
        if not self.demand.separate:
            return self._computing_bytes + self.ring_bytes + self.kept_bytes
        bounced = NUM_BOUNCE_SLOTS * self.bounce_slot_bytes
        waiting = self.host_gradients.num_bytes + self.host_activation_bytes
        return waiting + self.states_bytes + bounced + self.kept_bytes

    @property
    def region_bytes(self) -> int:
        """The region in a separate device's memory; 0 without one."""
        if not self.demand.separate:
            return 0
        return self._computing_bytes + self.staging_bytes + self.upload_bytes + self.updates_bytes

    @property
    def workspace_bytes(self) -> int:
        """Reserved beside that where computation happens: one stage's forward and backward, what micro-batches need,
        and on an accelerator what its libraries keep.

        The promise there is about what torch's allocator counts as allocated, which are blocks: rounding is counted
        with each of these parts. What it has reserved from the device may be more, as its free blocks differ in size.
        """
        return sum(size for _, size in self._room_parts())

    @property
    def filling_bytes(self) -> int:
        """With a separate device: what filling a new store takes beyond the arena, as its weights are then here."""
        if not self.demand.separate:
            return 0
        return max(0, smallest(filling_demand(self.demand)).need_bytes - self.arena_bytes)

    @property
    def need_bytes(self) -> int:
        """The formula: the sum of :meth:`parts`. With a separate device, of those in host memory."""
        beside = self.filling_bytes if self.demand.separate else self.workspace_bytes
        return self.arena_bytes + self.demand.compiler_bytes + beside

    @property
    def device_need_bytes(self) -> int:
        """The same of a separate device's memory; 0 without one."""
        return self.region_bytes + self.workspace_bytes if self.demand.separate else 0

    def _computing_parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("weight buffers", self.weight_bytes),
            ("gradient buffers", self.gradients.num_bytes),
            ("gradients of tied tensors", self.demand.loan_bytes),
            ("a block of a gradient", self.demand.block_bytes),
        )

    def _room_parts(self) -> tuple[tuple[str, int], ...]:
        parts = (
            ("workspace of a stage", max(stage.workspace for stage in self.demand.stages)),
            ("masks, positions, batches", self.demand.context_bytes),
        )
        return (*parts, ("workspaces of libraries", self.demand.library_bytes)) if self.demand.separate else parts

    def parts(self) -> tuple[tuple[str, int], ...]:
        """The terms of the formula of host memory, for people: (label, bytes)."""
        if self.demand.separate:
            return (
                ("gradients for updates", self.host_gradients.num_bytes),
                ("optimizer pieces", self.states_bytes),
                ("boundary activations", self.host_activation_bytes),
                ("on the way between drive and device", NUM_BOUNCE_SLOTS * self.bounce_slot_bytes),
                ("states kept from step to step", self.kept_bytes),
                ("more while a store is filled", self.filling_bytes),
                ("graphs of compiled layers", self.demand.compiler_bytes),
            )
        return (
            *self._computing_parts(),
            ("staging and optimizer pieces", self.ring_bytes),
            ("boundary activations", self.activation_bytes),
            ("states kept from step to step", self.kept_bytes),
            *self._room_parts(),
            ("graphs of compiled layers", self.demand.compiler_bytes),
        )

    def device_parts(self) -> tuple[tuple[str, int], ...]:
        """The same of a separate device's memory; empty without one."""
        if not self.demand.separate:
            return ()
        return (
            *self._computing_parts(),
            ("staging pieces", self.staging_bytes + self.upload_bytes),
            ("updates on the device", self.updates_bytes),
            ("boundary activations", self.activation_bytes),
            *self._room_parts(),
        )

    def buffers(self, delayed_from: Sequence[int] = (), *, speculative: bool = False) -> Buffers:
        """What a plan may use. Streamed stages take turns: two buffers are 0 and 1, more have numbers after all others.

        ``delayed_from``, ``speculative``: see :class:`Buffers`.
        """
        kept = self.kept
        count = len(self.demand.stages)
        streamed = count - self.num_resident
        turns = self.demand.num_weight_buffers
        first = 0 if turns == 2 else 2 + count
        weights = tuple(first + stage % turns if stage < streamed else 2 + stage for stage in range(count))
        separate = self.demand.separate
        return Buffers(
            weights=weights,
            stages_ahead=turns - 1,
            gradients=self.gradients.numbers(),
            separate=separate,
            updates_on_device=self.demand.updates_on_device,
            host_gradients=self.host_gradients.numbers() if separate else (),
            delayed_from=tuple(delayed_from),
            num_staging=self.num_staging,
            num_states=self.num_states,
            num_activations=self.num_activations,
            num_host_activations=self.num_host_activations,
            speculative=speculative,
            straight_weights=self.demand.straight,
            rereads_weights=self.demand.straight,
            kept_weights=kept.weights,
            kept_moments=kept.moments,
            kept_frozen=kept.frozen,
        )

    def weight_offset(self, stage: int) -> int:
        """First byte of a stage's weights in the weight region.

        Of two buffers, streamed stages with even index start at the region's low end, odd ones end at its high end:
        neighbours always fit together, since the region is as large as the largest two neighbours.
        """
        streamed = len(self._streamed)
        if stage >= streamed:
            return self._streamed_bytes + sum(stage_bytes.weights for stage_bytes in self._resident[: stage - streamed])
        if self.demand.num_weight_buffers > 2:
            return sum(self._turn_bytes[: stage % self.demand.num_weight_buffers])
        return 0 if stage % 2 == 0 else self._streamed_bytes - self.demand.stages[stage].weights


def steps_bytes(piece_elements: int) -> int:
    """Bytes of the step counts of a piece's tensors on a device: float32, one for each place where one can begin."""
    return GRADIENT_BYTES * (-(-piece_elements // TENSOR_ALIGN_ELEMENTS))


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
        num_host_gradient_buffers=1 if demand.separate else 0,
    )


def filling_demand(demand: Demand) -> Demand:
    """What filling a new store takes: weight buffers in host memory, gradient buffers as staging, rings."""
    return replace(
        demand,
        stages=tuple(replace(stage, workspace=0) for stage in demand.stages),
        loan_bytes=0,
        block_bytes=0,
        num_boundaries=0,
        context_bytes=0,
        library_bytes=0,
        compiler_bytes=0,
        delayed=False,
        horizontal=False,
        separate=False,
        updates_on_device=False,
        keepable=(),
        num_pinned=0,
    )


def _smallest_piece(demand: Demand) -> int:
    """Elements of the smallest piece worth choosing, a power of two."""
    largest_stage = max(stage.gradients for stage in demand.stages) // 4
    piece = MIN_PIECE_ELEMENTS
    while piece < SMALL_PIECE_ELEMENTS and largest_stage > MAX_PIECES_OF_STAGE * piece:
        piece *= 2
    return piece


def divide(
    demand: Demand,
    *,
    budget_bytes: int,
    device_budget_bytes: int = 0,
    resident_weights: bool = True,
    max_kept_bytes: int | None = None,
) -> MemoryPlan:
    """Divide a budget, and that of a separate device, among the buffers: what overlap needs, then what saves most.

    From the smallest division upwards: a second gradient buffer (the optimizer overlaps the next stage's backward) and
    larger and more pieces; then states that stay from step to step, as long as a byte of them saves more than a byte of
    the next two; boundary activations that needn't be spilled, those of a separate device in its memory and then in the
    host's; gradients that wait (for the next micro-batch in
    micro-batch-major order, or for delayed updates); the other states; and last the compute weights of stages, which
    then needn't be put together from their halves again. ``max_kept_bytes`` limits the states, but for those that must
    stay.
    Raises BudgetError with the smallest budget that works.
    """
    plan = smallest(demand)
    for option, given, need, terms in (
        ("--host-memory", budget_bytes, plan.need_bytes, plan.parts()),
        ("--device-memory", device_budget_bytes, plan.device_need_bytes, plan.device_parts()),
    ):
        if need > given:
            parts = ", ".join(f"{label} {_mib(size)}" for label, size in terms if size)
            raise BudgetError(
                f"{option}: {_mib(given)} is too small; at least {_mib(need)} are needed ({parts}); "
                f"give {option} {-(-need // 2**20)}MiB or more, {_instead(demand, option)}"
            )

    def take(wanted: MemoryPlan) -> bool:
        nonlocal plan
        if wanted.need_bytes > budget_bytes or wanted.device_need_bytes > device_budget_bytes:
            return False
        plan = wanted
        return True

    take(replace(plan, num_gradient_buffers=2))
    if demand.separate:
        take(replace(plan, num_host_gradient_buffers=2))

    def in_share(wanted: MemoryPlan) -> bool:
        if not demand.separate:
            return wanted.ring_bytes <= RING_SHARE * budget_bytes
        in_host = wanted.states_bytes <= RING_SHARE * budget_bytes
        return in_host and wanted.staging_bytes + wanted.updates_bytes <= RING_SHARE * device_budget_bytes

    # One chain of enlargements, left at the first that does not fit: a larger budget only goes further along it.
    while (bigger := _next_ring(plan)) != plan and in_share(bigger) and take(bigger):
        pass

    sums = list(accumulate((candidate.num_bytes for candidate in demand.keepable), initial=0))

    def spare_bytes() -> int:
        """What is left of the host memory."""
        # What filling a store takes beyond the arena is less by as much as the arena grows.
        return budget_bytes - plan.need_bytes + plan.filling_bytes

    def keep(more_than: float) -> None:
        """Take candidates in order, while they are worth more and fit."""
        room = sums[plan.num_kept] + spare_bytes()
        fitting = bisect_right(sums, room if max_kept_bytes is None else min(room, max_kept_bytes)) - 1
        worthy = bisect_left(
            demand.keepable, -more_than, lo=demand.num_pinned, key=lambda candidate: -candidate.value
        )
        take(replace(plan, num_kept=max(plan.num_kept, min(fitting, worthy))))

    keep(more_than=SPILL_VALUE)
    if demand.activation_bytes:
        if demand.separate:
            spare = (device_budget_bytes - plan.device_need_bytes) // demand.activation_bytes
        else:
            spare = spare_bytes() // demand.activation_bytes
        take(replace(plan, num_activations=min(demand.num_boundaries, plan.num_activations + spare)))
        if demand.separate:
            spare = spare_bytes() // demand.activation_bytes
            take(replace(plan, num_host_activations=min(_most_waiting(plan), spare)))
    if demand.horizontal or (demand.delayed and not demand.separate):
        while plan.num_kept_gradients < len(demand.stages):
            if not take(replace(plan, num_kept_gradients=plan.num_kept_gradients + 1)):
                break
    if demand.separate and demand.delayed:
        while plan.num_kept_host_gradients < len(demand.stages):
            if not take(replace(plan, num_kept_host_gradients=plan.num_kept_host_gradients + 1)):
                break
    keep(more_than=0.0)
    while resident_weights and plan.num_resident < len(demand.stages):
        if not take(replace(plan, num_resident=plan.num_resident + 1)):
            break
    return plan


def _most_waiting(plan: MemoryPlan) -> int:
    """Boundary activations of a step that can be in no slot of a separate device at once.

    One more than find no room: a slot is given away before what needs it comes.
    """
    demand = plan.demand
    # In micro-batch-major order, those of one micro-batch.
    most = min(demand.num_boundaries, len(demand.stages) - 1) if demand.horizontal else demand.num_boundaries
    return 0 if most <= plan.num_activations else most - plan.num_activations + 1


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


def _instead(demand: Demand, option: str) -> str:
    """What takes less of the memory that an option bounds."""
    ways = []
    if demand.compiler_bytes and option == "--host-memory":
        ways.append("leave out --compile")
    if demand.num_weight_buffers > 2 and (option == "--device-memory" or not demand.separate):
        ways.append("fewer --weight-buffers")
    return "".join(f"or {way}, " for way in ways) + "or a smaller --micro-batch-size or --seq-len"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
