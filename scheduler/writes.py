"""What steps and commits write to NVMe, in bytes, from plans: what a step writes, and the most that it can.

Pure arithmetic. What was really written is in the store's ledger (`tiers/wear.py`); what it means for a drive's life is
`endurance.py`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.memory import GRADIENT_BYTES, STATE_BYTES
from hoist.scheduler.ops import Kind
from hoist.scheduler.plan import Plan, evaluation, flush, horizontal, vertical
from hoist.scheduler.residency import MOMENT_BYTES, WEIGHT_BYTES
from hoist.scheduler.setup import Setup, divided
from hoist.tiers import format as store_format
from hoist.tiers.format import CommitRecord, StateArray
from hoist.tiers.layout import Piece, StageLayout

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
    pieces = _pieces(setup)
    delays = config.speculates or any(
        first < shape.num_pieces for first, shape in zip(setup.delayed_from, setup.shapes(), strict=True)
    )
    steady = _step_plan(setup, config, pending=delays)
    states, activations, gradients = _written(steady, setup, pieces)
    most = sum(_written(steady, setup, pieces, redo=True))
    if delays:  # plans are long: one at a time
        steady = _step_plan(setup, config, pending=False)
        most = max(most, sum(_written(steady, setup, pieces, redo=True)))
        most += sum(_written(flush(setup.shapes(), setup.buffers(), pending=True), setup, pieces, redo=True))
    return Writes(
        states_bytes=states,
        activation_bytes=activations,
        gradient_bytes=gradients,
        kept_bytes=_kept_bytes(setup, pieces),
        record_bytes=_record_bytes(setup.layouts, record),
        most_step_bytes=most,
    )


def evaluation_bytes(setup: Setup, config: TrainerConfig) -> int:
    """What an evaluation of a step's micro-batches writes at most: activations that do not fit."""
    plan = evaluation(setup.shapes(), config.num_micro_batches, setup.buffers(), cold=True, order=config.plan)
    return sum(_written(plan, setup, _pieces(setup)))


def _step_plan(setup: Setup, config: TrainerConfig, *, pending: bool) -> Plan:
    make = vertical if config.plan == "vertical" else horizontal
    return make(setup.shapes(), config.num_micro_batches, setup.buffers(), cold=False, pending=pending)


def _pieces(setup: Setup) -> list[tuple[Piece, ...]]:
    return [tuple(layout.pieces(setup.memory.piece_elements)) for layout in setup.layouts]


def _written(
    plan: Plan, setup: Setup, pieces: Sequence[Sequence[Piece]], *, redo: bool = False
) -> tuple[int, int, int]:
    """Bytes that a plan's ops write: states, activations, gradients; ``redo``: updates are all made again."""
    kept = setup.memory.kept
    stages = setup.memory.demand.stages
    states = activations = gradients = 0
    for op in plan.ops:
        if op.kind is Kind.WRITE_STATES and (redo or not op.redo):
            piece = pieces[op.stage][op.piece]
            num_bytes = STATE_BYTES
            num_bytes -= WEIGHT_BYTES * (piece.chunk in kept.weights[op.stage])
            num_bytes -= MOMENT_BYTES * (piece.chunk in kept.moments[op.stage])
            states += num_bytes * piece.num_elements
        elif op.kind is Kind.SPILL_ACTIVATION:
            activations += setup.memory.demand.activation_bytes
        elif op.kind is Kind.STASH_GRADIENT:
            gradients += GRADIENT_BYTES * pieces[op.stage][op.piece].num_elements
        elif op.kind is Kind.SPILL_GRADIENT:
            gradients += stages[op.stage].gradients
    return states, activations, gradients


def _kept_bytes(setup: Setup, pieces: Sequence[Sequence[Piece]]) -> int:
    kept = setup.memory.kept
    return sum(
        (WEIGHT_BYTES * (piece.chunk in kept.weights[stage]) + MOMENT_BYTES * (piece.chunk in kept.moments[stage]))
        * piece.num_elements
        for stage, own in enumerate(pieces)
        for piece in own
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
    weights = sum(WEIGHT_BYTES * piece.num_elements for own in _pieces(setup) for piece in own)
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
    now = count(setup, config).step_bytes
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
        found.append(Saving(what="states", saved_bytes=count(setup, config).states_bytes, value=0))
    worth = [saving for saving in found if saving.saved_bytes > now // 100]
    return tuple(sorted(worth, key=lambda saving: -saving.saved_bytes))
