"""From a model and a configuration to sizes: layouts, what tied tensors need, the memory plan. Nothing on disk changes.

Used before a store is created, so that what cannot fit is refused first, and again when one is opened.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hoist.scheduler import memory, residency, workspace
from hoist.scheduler.accumulate import block_elements
from hoist.scheduler.compiling import KEPT_BYTES
from hoist.scheduler.config import Dtype, TrainerConfig
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.frozen import FrozenLayout, lay_out_frozen
from hoist.scheduler.memory import PAGE_BYTES, Demand, MemoryPlan, StageBytes
from hoist.scheduler.places import (
    Borrowed,
    Places,
    lay_out_borrowed,
    loan_bytes,
    weight_bytes,
    weight_elements,
)
from hoist.scheduler.plan import horizontal, vertical
from hoist.scheduler.plan_records import Buffers, StageShape
from hoist.scheduler.residency import Candidate
from hoist.scheduler.stages import StagedModel
from hoist.tiers.device import Device, HereDevice
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.layout import DTYPE_BYTES, MAX_CHUNK_ELEMENTS, PlacedTensor, StageLayout, lay_out, round_up

_log = logging.getLogger(__name__)

FLOAT_BYTES = 4
#: A heap that hands out blocks of many sizes holds this part more than is in use: 2 is a half (docs/tuning.md).
HEAP_WASTE = 2
#: Matrix products keep packed copies of their operands' blocks: up to this much for each of torch's threads (measured
#: with MKL, docs/tuning.md), and never more than the largest weight takes.
PACKING_BYTES_PER_THREAD = 8 * 2**20
#: So much of that fits the 32 MiB that the promise has beside the budget: two threads' worth.
FREE_PACKING_BYTES = 2 * PACKING_BYTES_PER_THREAD


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Everything about a run that follows from model and configuration alone."""

    layouts: tuple[StageLayout, ...]
    borrowed: tuple[tuple[Borrowed, ...], ...]
    """Per stage, the trainable tensors it uses that an earlier stage owns."""
    frozen: tuple[FrozenLayout, ...]
    """Per stage, its frozen tensors, own and borrowed."""
    loans: dict[str, PlacedTensor]
    """Trainable tensors that some stage borrows, by name."""
    memory: MemoryPlan
    scratch_activation_bytes: int
    """NVMe scratch for boundary activations: all of a step's, or 0 if none is ever spilled."""
    scratch_gradient_bytes: int
    """NVMe scratch for gradients between micro-batches: all stages', or 0."""
    stash_bytes: int
    """NVMe scratch for gradients that wait for delayed updates: all stages', or 0."""
    delayed_from: tuple[int, ...]
    """Per stage, the first piece whose update is delayed."""
    num_slots: int
    """Slots that each chunk of a new store gets."""
    speculative: bool
    """Updates that are not delayed are made before the norm is known, and made again if it is too large."""
    host_memory_bytes: int
    """The budget of host memory that was divided."""
    dtype: Dtype = "float32"
    """What layers compute with."""

    @property
    def scratch_bytes(self) -> int:
        """All NVMe scratch of the run."""
        return self.scratch_activation_bytes + self.scratch_gradient_bytes + self.stash_bytes

    @property
    def leaves_updates(self) -> bool:
        """Every step leaves some updates to the next one."""
        return self.speculative or any(
            first < shape.num_pieces for first, shape in zip(self.delayed_from, self.shapes(), strict=True)
        )

    def buffers(self) -> Buffers:
        """What plans may use."""
        return self.memory.buffers(self.delayed_from, speculative=self.speculative)

    def places(self, device: Device | None = None) -> Places:
        """Allocate the buffers. ``device``: the one that the run was set up for; None: the CPU."""
        return Places(
            memory=self.memory,
            layouts=self.layouts,
            borrowed=self.borrowed,
            frozen=self.frozen,
            loans=self.loans,
            device=HereDevice() if device is None else device,
            dtype=self.dtype,
        )

    def for_creation(self) -> Setup:
        """The same for filling a store: its buffers hold weights as float32, in host memory."""
        if not self.memory.demand.separate:
            return self
        demand = memory.filling_demand(self.memory.demand)
        made = memory.divide(demand, budget_bytes=self.host_memory_bytes, resident_weights=False)
        return replace(self, memory=made, loans={})

    def shapes(self) -> tuple[StageShape, ...]:
        """What plans need to know of the stages."""
        return _shapes(self.layouts, self.borrowed, self.frozen, self.memory.piece_elements)


def _shapes(
    layouts: Sequence[StageLayout],
    borrowed: Sequence[Sequence[Borrowed]],
    frozen: Sequence[FrozenLayout],
    piece_elements: int,
) -> tuple[StageShape, ...]:
    pieces = [layout.pieces(piece_elements) for layout in layouts]
    shapes = []
    for own, lent, fixed in zip(pieces, borrowed, frozen, strict=True):
        needed: dict[tuple[int, int], None] = {}
        for tensor in lent:
            first, last = tensor.placed.offset, tensor.placed.offset + tensor.placed.spec.num_elements
            for piece in pieces[tensor.owner]:
                if piece.start < last and first < piece.stop:
                    needed[tensor.owner, piece.index] = None
        shapes.append(
            StageShape(
                chunks=tuple(piece.chunk for piece in own),
                has_frozen=bool(fixed.stored_bytes),
                widens=fixed.widens,
                borrowed=tuple(needed),
            )
        )
    return tuple(shapes)


def check_model(directory: Path, model: StagedModel, layouts: Sequence[StageLayout]) -> None:
    """Raise StoreRefusedError if the store with ``layouts`` does not hold exactly the tensors of ``model``."""
    expected = [sorted(map(repr, stage.tensors)) for stage in model.stages]
    stored = [sorted(repr(placed.spec) for placed in (*layout.trainable, *layout.frozen)) for layout in layouts]
    if expected != stored:
        raise StoreRefusedError(
            f"{directory}: the store holds another model, or trains other parts of it; give its own, name another, "
            "or start over (fresh)"
        )


def check_slots(directory: Path, num_slots: int, config: TrainerConfig) -> None:
    """Raise StoreRefusedError if a store of ``num_slots`` slots a chunk is too little for what is asked of it."""
    if config.speculates and num_slots < config.num_slots:
        raise StoreRefusedError(
            f"{directory}: speculative clipping between commits needs a store of {config.num_slots} slots a chunk, "
            f"this one has {num_slots}: commit every step (--commit-every 1), give --clip-mode exact, or make a new "
            "store with --clip-mode speculative"
        )


def lay_out_stages(model: StagedModel, *, max_chunk_elements: int = MAX_CHUNK_ELEMENTS) -> tuple[StageLayout, ...]:
    """Layouts of all stages of a new store."""
    return tuple(
        lay_out(index=stage.index, name=stage.name, tensors=stage.tensors, max_chunk_elements=max_chunk_elements)
        for stage in model.stages
    )


def prepare(
    model: StagedModel, layouts: Sequence[StageLayout], config: TrainerConfig, *, device: Device | None = None
) -> Setup:
    """Size everything for a budget, or two with a separate ``device`` (None: the CPU).

    Raises BudgetError, with nothing allocated, if one is too small, and ConfigError if a budget lacks or is too many.
    Raises ModelError if nothing is trainable, and ConfigError, with nothing changed, if an open trainer uses the model
    or it was built for another dtype.
    """
    model.check_free()
    device = HereDevice() if device is None else device
    if device.is_separate != (config.device_memory_bytes is not None):
        raise ConfigError(
            f"device_memory_bytes: {config.device_memory_bytes}, but {device.describe()} "
            + ("has memory of its own: give its budget" if device.is_separate else "computes in host memory: give None")
        )
    if config.optim_device == "device" and not device.is_separate:
        raise ConfigError(
            f"optim_device: 'device', but {device.describe()} has no memory of its own: its updates run on the CPU; "
            "give 'cpu'"
        )
    model.check_dtype(config.dtype)
    straight = config.dtype == "bfloat16"
    first = model.first_trained
    placed = {tensor.spec.name: tensor for layout in layouts for tensor in layout.trainable}
    fixed = {tensor.spec.name: tensor for layout in layouts for tensor in layout.frozen}
    owner_of = {tensor.spec.name: layout.index for layout in layouts for tensor in (*layout.trainable, *layout.frozen)}
    borrowed = tuple(
        lay_out_borrowed(
            layout, [(owner_of[name], placed[name]) for name in stage.borrowed if name in placed], straight=straight
        )
        for stage, layout in zip(model.stages, layouts, strict=True)
    )
    frozen = tuple(
        lay_out_frozen(
            layout, [(owner_of[name], fixed[name]) for name in stage.borrowed if name in fixed], dtype=config.dtype
        )
        for stage, layout in zip(model.stages, layouts, strict=True)
    )
    loans = {tensor.placed.spec.name: tensor.placed for stage in borrowed for tensor in stage}
    batch = model.batches.largest(config)
    found = workspace.measure(
        model, batch, loss_slice_tokens=config.loss_slice_tokens, layers_compiled=config.compile, device=device
    )
    context_bytes = _context_bytes(found, [tensor.nbytes for tensor in batch.values()], config, device)
    weights = [*placed.values(), *(tensor for tensor in fixed.values() if tensor.spec.frozen_weight)]
    largest_matrix = FLOAT_BYTES * max((tensor.spec.num_elements for tensor in weights), default=0)
    packing = max(0, min(PACKING_BYTES_PER_THREAD * torch.get_num_threads(), largest_matrix) - FREE_PACKING_BYTES)
    in_blocks = device.torch_device.type == "cpu"
    blocks = [block_elements(tensor.spec.shape) for tensor in placed.values()] if in_blocks else []
    heap_waste = [in_heap // HEAP_WASTE + packing for in_heap in found.in_heap]
    if device.counts_allocations:  # what it counted has all of that in it
        heap_waste = [0 for _ in heap_waste]
    largest_block = max(blocks, default=0)
    demand = Demand(
        stages=tuple(
            StageBytes(
                name=layout.name,
                weights=weight_bytes(layout, lent, kept, config.dtype),
                gradients=round_up(weight_elements(layout) * FLOAT_BYTES, PAGE_BYTES),
                workspace=space + waste,
            )
            for layout, lent, kept, space, waste in zip(
                layouts, borrowed, frozen, found.stages, heap_waste, strict=True
            )
        ),
        loan_bytes=loan_bytes(loans),
        block_bytes=round_up(DTYPE_BYTES[config.dtype] * largest_block, PAGE_BYTES),
        activation_bytes=round_up(found.boundary_bytes, PAGE_BYTES),
        num_boundaries=_most_boundaries(len(layouts), first, config.num_micro_batches),
        context_bytes=context_bytes,
        # The region's own block may be larger than asked for, too.
        library_bytes=found.kept_bytes + (workspace.BLOCK_WASTE_BYTES if device.counts_allocations else 0),
        max_piece_elements=memory.piece_limit([layout.chunk_elements for layout in layouts], config.max_piece_elements),
        delayed=config.delay_in_force > 0 or config.speculates,
        horizontal=config.plan == "horizontal",
        separate=device.is_separate,
        updates_on_device=config.optim_device == "device",
        straight=straight,
        compiler_bytes=KEPT_BYTES if config.compile else 0,
        num_weight_buffers=config.weight_buffers,
    )
    keepable = _keepable(demand, layouts, borrowed, frozen, config)
    num_pinned = 0
    if config.pin_trained:
        keepable, num_pinned = residency.pinned_first(keepable)
    demand = replace(demand, keepable=keepable, num_pinned=num_pinned)
    return _divide(demand, tuple(layouts), borrowed, frozen, loans, config)


def _context_bytes(
    found: workspace.Workspaces, batch_bytes: Sequence[int], config: TrainerConfig, device: Device
) -> int:
    """What the micro-batches of a step take where computation happens: inputs, contexts, losses."""
    count = config.num_micro_batches
    if device.is_separate:
        # Each has a context of its own: comparing two would wait for the device. Inputs are copied there for one step
        # at a time, and those of the step before are gone by then; so much for the batches themselves, in host memory.
        sizes = [*batch_bytes, FLOAT_BYTES]  # the loss
        if device.counts_allocations:
            sizes = [workspace.allocated_bytes(size) for size in sizes]
        return count * (found.context_bytes + sum(sizes))
    # Contexts are shared between micro-batches of one shape, and a second one exists while it is compared; where masks
    # follow from what each micro-batch is given, every one has its own. Batches are there for two steps: the caller's
    # next ones, too.
    return (1 + (count if config.extra_inputs else 1)) * found.context_bytes + 2 * sum(batch_bytes) * count


def _divide(
    demand: Demand,
    layouts: tuple[StageLayout, ...],
    borrowed: tuple[tuple[Borrowed, ...], ...],
    frozen: tuple[FrozenLayout, ...],
    loans: dict[str, PlacedTensor],
    config: TrainerConfig,
) -> Setup:
    """Divide the budget, and see what then is spilled. Raises BudgetError."""
    make = vertical if config.plan == "vertical" else horizontal
    max_kept_bytes = math.floor(config.residency * sum(candidate.num_bytes for candidate in demand.keepable))
    division = memory.divide(
        demand,
        budget_bytes=config.host_memory_bytes,
        device_budget_bytes=config.device_memory_bytes or 0,
        resident_weights=config.resident_weights,
        max_kept_bytes=max_kept_bytes,
    )
    _log.info(
        "memory for a budget of %d bytes: %s",
        config.host_memory_bytes,
        ", ".join(
            f"{name} {num_bytes}" for name, num_bytes in (*division.parts(), *division.device_parts()) if num_bytes
        ),
    )
    shapes = _shapes(layouts, borrowed, frozen, division.piece_elements)
    delayed_from = tuple(
        _first_delayed(shape, config.delay_in_force, kept if config.speculates else frozenset())
        for shape, kept in zip(shapes, division.kept.weights, strict=True)
    )
    # Fewer micro-batches have fewer boundaries: if the largest step spills nothing, no step does.
    buffers = division.buffers(delayed_from, speculative=config.speculates)
    all_boundaries = (len(layouts) - 1) * config.num_micro_batches
    largest = make(shapes, config.num_micro_batches, buffers, cold=True)
    return Setup(
        layouts=layouts,
        borrowed=borrowed,
        frozen=frozen,
        loans=loans,
        memory=division,
        scratch_activation_bytes=all_boundaries * demand.activation_bytes if largest.scratch_activations else 0,
        scratch_gradient_bytes=sum(stage.gradients for stage in demand.stages) if largest.scratch_gradients else 0,
        stash_bytes=sum(stage.gradients for stage in demand.stages) if largest.stashed_gradients else 0,
        delayed_from=delayed_from,
        num_slots=config.num_slots,
        speculative=config.speculates,
        host_memory_bytes=config.host_memory_bytes,
        dtype=config.dtype,
    )


def divided(setup: Setup, config: TrainerConfig) -> Setup:
    """The same run with another budget, or more micro-batches: an estimate, as it measures no stage again.

    Masks and positions of the additional micro-batches are left out. Raises BudgetError if it cannot be.
    """
    first = next((stage for stage, layout in enumerate(setup.layouts) if layout.trainable), 0)
    boundaries = _most_boundaries(len(setup.layouts), first, config.num_micro_batches)
    demand = replace(setup.memory.demand, num_boundaries=boundaries)
    return _divide(demand, setup.layouts, setup.borrowed, setup.frozen, setup.loans, config)


def _most_boundaries(num_stages: int, first: int, num_micro_batches: int) -> int:
    """Boundary activations that exist at once: the inputs of all stages with a backward, which begin at ``first``.

    Below it each goes when the next stage has used it, and the last stage's output is no boundary.
    """
    passing = num_micro_batches + 1 if first > 1 else 0
    return max((num_stages - max(first, 1)) * num_micro_batches, passing)


def _keepable(
    demand: Demand,
    layouts: Sequence[StageLayout],
    borrowed: Sequence[Sequence[Borrowed]],
    frozen: Sequence[FrozenLayout],
    config: TrainerConfig,
) -> tuple[Candidate, ...]:
    """What a run could keep from step to step, by what a steady step reads if nothing is kept."""
    least = memory.smallest(demand)
    shapes = _shapes(layouts, borrowed, frozen, least.piece_elements)
    delayed_from = tuple(_first_delayed(shape, config.delay_in_force) for shape in shapes)
    delays = any(first < shape.num_pieces for first, shape in zip(delayed_from, shapes, strict=True))
    buffers = least.buffers(delayed_from)
    buffers = replace(buffers, rereads_weights=buffers.rereads_weights or config.verify_reads)
    # In layer-major order loads do not depend on the number of micro-batches; then the fewest make the shortest plan.
    if config.plan == "vertical":
        plan = vertical(shapes, 1, buffers, cold=False, pending=delays)
    else:
        plan = horizontal(shapes, config.num_micro_batches, buffers, cold=False, pending=delays)
    return residency.candidates(
        plan,
        shapes,
        [layout.used_elements() for layout in layouts],
        [fixed.stored_bytes for fixed in frozen],
    )


def _first_delayed(shape: StageShape, delay: float, kept: frozenset[int] = frozenset()) -> int:
    """The first piece of the last chunks: as many as come nearest to the share ``delay``; all from ``kept`` ones on.

    A guess can be taken back only while the version before it is on NVMe, which that of a kept chunk is not; and there
    is nothing to win, since its update waits for no drive.
    """
    num_chunks = len(set(shape.chunks))
    at_once = min([num_chunks - math.floor(delay * num_chunks + 0.5), *kept])
    return sum(chunk < at_once for chunk in shape.chunks)
