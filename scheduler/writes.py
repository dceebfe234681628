"""What steps and commits write to NVMe, in bytes, from plans: what a step writes, and the most that it can.

Pure arithmetic on what `op_bytes.py` says of ops. What was really written is in the store's ledger (`tiers/wear.py`);
what it means for a drive's life is `endurance.py`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.op_bytes import OpBytes
from hoist.scheduler.ops import Kind
from hoist.scheduler.plan import evaluation, flush
from hoist.scheduler.plan_records import Plan
from hoist.scheduler.residency import WEIGHT_BYTES
from hoist.scheduler.setup import Setup, divided
from hoist.scheduler.step_plans import steady_plan, step_plan
from hoist.tiers import format as store_format
from hoist.tiers.format import CommitRecord, StateArray
from hoist.tiers.layout import StageLayout

#: What COMMIT.json may grow by from one commit to the next: data position, totals, a step count of more digits.
RECORD_GROWTH_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Writes:
    """What a run writes to NVMe."""

    states_bytes: int
    """A step between commits: weights and moments that are not kept in memory."""
    activation_bytes: int
    """A step: boundary activations that do not fit."""
    gradient_bytes: int
    """A step: gradients that do not fit, and those that wait for delayed updates."""
    kept_bytes: int
    """A commit: what is kept in memory between commits."""
    record_bytes: int
    """A commit: its checksums and COMMIT.json."""
    most_step_bytes: int
    """The most that a step can write until all its updates are done: updates made again, delayed ones of the step
    before and its own. Without a commit."""

    @property
    def step_bytes(self) -> int:
        """A steady step between commits."""
        return self.states_bytes + self.activation_bytes + self.gradient_bytes

    @property
    def commit_bytes(self) -> int:
        """What a commit adds to it."""
        return self.kept_bytes + self.record_bytes

    def per_step(self, config: TrainerConfig, seconds_per_step: float | None = None) -> float:
        """A step's mean, its part of the commits included; of those that fall due by time, only with a step's time."""
        every, minutes = config.commit_rule(keeps_states=bool(self.kept_bytes))
        commits = 0.0 if every is None else 1.0 / every
        if minutes is not None and seconds_per_step is not None:
            commits = min(1.0, commits + seconds_per_step / (60.0 * minutes))
        return self.step_bytes + commits * self.commit_bytes

    def most_bytes(self) -> int:
        """The most that is written from before a step to a commit of it, everything done."""
        return self.most_step_bytes + self.commit_bytes


def count(setup: Setup, config: TrainerConfig, record: CommitRecord | None = None) -> Writes:
    """What a run with this setup writes. ``record``: the store's last commit, if it has one."""
    op_bytes = OpBytes(setup)
    plan = steady_plan(setup, config)
    states, activations, gradients = _written(plan, op_bytes)
    most = sum(_written(plan, op_bytes, redo=True))
    if setup.leaves_updates:  # plans are long: one at a time
        plan = step_plan(setup, config, cold=False, pending=False)
        most = max(most, sum(_written(plan, op_bytes, redo=True)))
        plan = flush(setup.shapes(), setup.buffers(), pending=True)
        most += sum(_written(plan, op_bytes, redo=True))
    return Writes(
        states_bytes=states,
        activation_bytes=activations,
        gradient_bytes=gradients,
        kept_bytes=_kept_bytes(op_bytes),
        record_bytes=_record_bytes(setup.layouts, record),
        most_step_bytes=most,
    )


def evaluation_bytes(setup: Setup, config: TrainerConfig) -> int:
    """What an evaluation of a step's micro-batches writes at most: activations that do not fit."""
    plan = evaluation(setup.shapes(), config.num_micro_batches, setup.buffers(), cold=True, order=config.plan)
    return sum(_written(plan, OpBytes(setup)))


def _written(plan: Plan, op_bytes: OpBytes, *, redo: bool = False) -> tuple[int, int, int]:
    """Bytes that a plan's ops write: states, activations, gradients; ``redo``: updates are all made again."""
    states = activations = gradients = 0
    for op in plan.ops:
        if op.kind is Kind.WRITE_STATES and (redo or not op.redo):
            states += op_bytes.of(op).written_bytes
        elif op.kind is Kind.SPILL_ACTIVATION:
            activations += op_bytes.of(op).written_bytes
        elif op.kind in (Kind.STASH_GRADIENT, Kind.SPILL_GRADIENT):
            gradients += op_bytes.of(op).written_bytes
    return states, activations, gradients


def _kept_bytes(op_bytes: OpBytes) -> int:
    return sum(
        array.itemsize * piece.num_elements
        for stage, pieces in enumerate(op_bytes.pieces)
        for piece in pieces
        for array in op_bytes.kept_arrays(stage, piece.chunk)
    )


def _record_bytes(layouts: Sequence[StageLayout], record: CommitRecord | None) -> int:
    """Checksums and COMMIT.json; at most, if the store has a commit."""
    checksums = sum(4 * (len(StateArray) * layout.num_chunks + bool(layout.frozen_bytes)) for layout in layouts)
    if record is None:
        named = sum(len(placed.spec.name) + 16 for layout in layouts for placed in layout.trainable)
        return checksums + named + RECORD_GROWTH_BYTES
    return checksums + len(store_format.encode_commit(record)) + RECORD_GROWTH_BYTES


def creation_bytes(setup: Setup) -> int:
    """What filling a new store writes, its small files apart: weights and frozen tensors; moments are only reserved."""
    weights = sum(WEIGHT_BYTES * piece.num_elements for own in OpBytes(setup).pieces for piece in own)
    return weights + sum(layout.frozen_bytes for layout in setup.layouts)


# --- what would lower it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A change that would lower what is written."""

    what: str
    """``memory``, ``micro_batches`` or ``states``."""
    saved_bytes: int
    """Bytes that would not be written, for as many tokens as a step has now."""
    value: int
    """What the change is: bytes of host memory, or micro-batches a step; 0 for ``states``."""


def savings(setup: Setup, config: TrainerConfig, *, frozen_possible: bool) -> tuple[Saving, ...]:
    """What would lower a step's writes, and by how much; only what applies, the most first.

    Twice the host memory, as :func:`hoist.scheduler.memory.divide` would divide it, and twice the micro-batches a step,
    with half the steps. ``frozen_possible``: all parameters are trained, so fewer could be.
    """
    writes = count(setup, config)
    now = writes.step_bytes
    found = []
    memory_bytes = 2 * config.host_memory_bytes
    larger = replace(config, host_memory_bytes=memory_bytes)
    found.append(Saving(what="memory", saved_bytes=now - count(divided(setup, larger), larger).step_bytes,
                        value=memory_bytes))  # fmt: skip
    more = replace(config, num_micro_batches=2 * config.num_micro_batches)
    try:
        twice = count(divided(setup, more), more).step_bytes
    except ValueError:  # BudgetError is one: there is no room for so many
        twice = 2 * now
    found.append(Saving(what="micro_batches", saved_bytes=now - twice // 2, value=more.num_micro_batches))
    if frozen_possible:
        found.append(Saving(what="states", saved_bytes=writes.states_bytes, value=0))
    worth = [saving for saving in found if saving.saved_bytes > now // 100]
    return tuple(sorted(worth, key=lambda saving: -saving.saved_bytes))
