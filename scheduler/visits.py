"""Which stage sees which micro-batches in which order: a step before a plan says what each visit takes.

Pure functions of counts. `plan_builder.py` writes the ops of each visit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Phase(Enum):
    """What a visit to a stage does."""

    FORWARD = auto()
    LOSS = auto()
    BACKWARD = auto()
    EVALUATE = auto()


@dataclass(frozen=True, slots=True)
class Visit:
    """A stage with the micro-batches that pass through it while its weights are there."""

    stage: int
    phase: Phase
    micro_batches: tuple[int, ...]


def vertical_visits(num_stages: int, num_micro_batches: int, first: int = 0) -> tuple[Visit, ...]:
    """Layer-major order: every stage sees all micro-batches before the next stage does.

    The forward's micro-batch order turns round from stage to stage, so that the boundary micro-batch stays where it
    is; backward always accumulates in the order 0..M-1, since another order changes an fp32 sum. The last stage's
    forward and backward are one visit. Stages below ``first``, where nothing is trained, have no backward.
    """
    _check_counts(num_stages, num_micro_batches)
    ascending = tuple(range(num_micro_batches))
    last = num_stages - 1
    forward = [
        Visit(stage, Phase.FORWARD, ascending if (last - stage) % 2 == 0 else ascending[::-1]) for stage in range(last)
    ]
    backward = [Visit(stage, Phase.BACKWARD, ascending) for stage in reversed(range(first, last))]
    return (*forward, Visit(last, Phase.LOSS, ascending), *backward)


def horizontal_visits(num_stages: int, num_micro_batches: int, first: int = 0) -> tuple[Visit, ...]:
    """Micro-batch-major order, as ZeRO-Infinity has it: each micro-batch runs through the whole model and back.

    Back as far as stage ``first``: nothing below is trained.
    """
    _check_counts(num_stages, num_micro_batches)
    last = num_stages - 1
    visits: list[Visit] = []
    for micro_batch in range(num_micro_batches):
        visits += [Visit(stage, Phase.FORWARD, (micro_batch,)) for stage in range(last)]
        visits.append(Visit(last, Phase.LOSS, (micro_batch,)))
        visits += [Visit(stage, Phase.BACKWARD, (micro_batch,)) for stage in reversed(range(first, last))]
    return tuple(visits)


def _check_counts(num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 2:
        raise ValueError(f"stages: {num_stages} are too few; at least 2 are needed")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches: {num_micro_batches} is not positive")


def forward_visits(num_stages: int, num_micro_batches: int) -> tuple[Visit, ...]:
    """The forward of :func:`vertical_visits`, of the last stage too."""
    *forward, turn = (
        visit for visit in vertical_visits(num_stages, num_micro_batches) if visit.phase is not Phase.BACKWARD
    )
    return (*forward, Visit(turn.stage, Phase.EVALUATE, turn.micro_batches))


def computations(visits: Sequence[Visit]) -> Iterator[tuple[Visit, int]]:
    return ((visit, micro_batch) for visit in visits for micro_batch in visit.micro_batches)


def touched(visit: Visit, micro_batch: int) -> list[tuple[int, int]]:
    """Boundary activations that one computation reads or writes: its stage's input, then its output.

    Boundary (s, m) is stage s's output for micro-batch m; in backward the same slot carries its gradient.
    """
    boundaries = [(visit.stage - 1, micro_batch)] if visit.stage > 0 else []
    if visit.phase in (Phase.FORWARD, Phase.BACKWARD):
        boundaries.append((visit.stage, micro_batch))
    return boundaries
