"""What each op of a plan moves and takes, from a run's buffers and what was measured: the simulator's input.

Bytes are `op_bytes.py`'s; seconds are as good as `timing.py`'s measurements. Nothing is measured here, and no result of
a run depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hoist.scheduler.link import LinkedPlan
from hoist.scheduler.op_bytes import Moved, OpBytes
from hoist.scheduler.ops import Kind, Lane, Op
from hoist.scheduler.setup import Setup
from hoist.scheduler.simulate import Costs
from hoist.tiers.layout import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one stage's ops on a micro-batch of the largest shape, alone on the machine."""

    forward: float = 0.0
    """Forward without autograd. 0 for the last stage, which has none of its own."""
    first_forward: float = 0.0
    """The same for the first micro-batch of a visit, which finds nothing of the stage in the processor's caches."""
    backward: float = 0.0
    """Recomputation and backward, for the last stage its forward, loss and backward; gradients are added to sums."""
    first_backward: float = 0.0
    """The same for a step's first micro-batch: nothing is in the caches, and its gradients replace what was there."""
    bind: float = 0.0
    """Giving its modules their weights, and taking them away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """What `timing.py` has measured. Rates are of one lane alone on the machine."""

    stages: tuple[StageTimes, ...]
    update_seconds: float
    """AdamW and splitting, an element."""
    checksum_seconds: float
    """An updated byte that is written."""
    norm_seconds: float
    """Sum of squares, an element."""
    merge_seconds: float
    """Both halves of a weight together, an element."""
    op_seconds: float
    """Handing over any op, without what it does."""
    capacity: float
    """What computation and updates do at once, in relation to one of them alone (`simulate.Machine`)."""
    compute_share: float
    """Of that, computation's share."""


_NOTHING = Moved()


class Prices:
    """Prices the ops of one run."""

    def __init__(self, setup: Setup, *, part_bytes: int) -> None:
        """``part_bytes``: longer requests are cut into parts by the engine."""
        self._setup = setup
        self._part_bytes = part_bytes
        self._op_bytes = OpBytes(setup)

    def costs(self, linked: LinkedPlan, times: Times) -> Costs:
        """What each op of a plan takes."""
        ops = linked.plan.ops
        moved = [self._moved(op) for op in ops]
        first: set[int] = set()
        seconds: list[float] = []
        begins = False  # the visit's first computation is still to come
        for op in ops:
            if op.kind is Kind.BIND:
                begins = True
            if op.lane in (Lane.IO, Lane.NONE):
                seconds.append(0.0)
                continue
            handing_over = 0.0 if op.lane is Lane.COMMIT else times.op_seconds  # which does nothing between commits
            work = self._work_seconds(op, times, first)
            if op.kind is Kind.FORWARD and begins:
                work = times.stages[op.stage].first_forward
            begins = op.kind is Kind.BIND or (begins and op.lane is not Lane.COMPUTE)
            seconds.append(work + handing_over)
        return Costs(
            seconds=seconds,
            read_bytes=[each.read_bytes for each in moved],
            written_bytes=[each.written_bytes for each in moved],
            parts=[sum(-(-size // self._part_bytes) for size in each.request_bytes) for each in moved],
        )

    def bytes_of(self, ops: Sequence[Op]) -> tuple[int, int]:
        """Bytes that some ops read and write, if every tensor gets a gradient and no update is made again."""
        moved = [self._moved(op) for op in ops]
        return sum(each.read_bytes for each in moved), sum(each.written_bytes for each in moved)

    def _moved(self, op: Op) -> Moved:
        """What an op moves; updates that may have to be made again are taken as not needed."""
        return _NOTHING if op.redo or op.lane is not Lane.IO else self._op_bytes.of(op)

    # ------------------------------------------------------------------ seconds

    def _work_seconds(self, op: Op, times: Times, first: set[int]) -> float:
        """What the op itself takes. ``first``: stages whose first backward of the step has been priced."""
        stage = times.stages[op.stage] if op.stage >= 0 else StageTimes()
        if op.kind is Kind.FORWARD:
            return stage.forward
        if op.kind in (Kind.LOSS, Kind.BACKWARD):
            if op.stage in first:
                return stage.backward
            first.add(op.stage)
            return stage.first_backward
        if op.kind is Kind.BIND:
            return stage.bind
        if op.kind is Kind.NORM:
            return times.norm_seconds * self._setup.layouts[op.stage].num_elements
        if op.kind is Kind.MERGE:
            return times.merge_seconds * self._merged(op.stage, op.owner, self._op_bytes.piece(op))
        if op.kind is Kind.WIDEN:
            return times.merge_seconds * sum(
                tensor.placed.spec.num_elements for tensor in self._setup.frozen[op.stage].tensors
            )
        if op.kind is Kind.UPDATE and not op.redo:
            piece = self._op_bytes.piece(op)
            written = sum(array.itemsize for array in self._op_bytes.stored_arrays(op.stage, piece.chunk))
            merged = sum(
                self._merged(user, op.stage, piece) for user in op.refresh if not (op.loaded and user == op.stage)
            )
            # An update whose weights are not loaded merges them; in bfloat16 it always does, and was timed so.
            straight = self._setup.memory.demand.straight
            merged += piece.num_elements * (op.fill + (not op.loaded and not straight))
            update_seconds = times.update_seconds
            if self._setup.memory.demand.updates_on_device:  # which only checksums are left of
                merged, update_seconds = 0, 0.0
            return (
                update_seconds + written * times.checksum_seconds
            ) * piece.num_elements + times.merge_seconds * merged
        return 0.0

    def _merged(self, stage: int, owner: int, piece: Piece) -> int:
        """Elements of an owner's piece that a stage puts into its weight buffer."""
        if stage == owner:
            return piece.num_elements
        return sum(
            max(
                0,
                min(piece.stop, lent.placed.offset + lent.placed.spec.num_elements)
                - max(piece.start, lent.placed.offset),
            )
            for lent in self._setup.borrowed[stage]
            if lent.owner == owner
        )
