"""Which rows a table of stages has: equal neighbours are one row, so that a thousand stages stay readable. Pure.

How a row looks is `view.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass

from hoist.scheduler.status import StateBytes
from hoist.tools.inspection.looking import StageStates

#: Rows of a table where nothing else limits them.
MAX_ROWS = 30
#: Fewer equal neighbours than this stay apart.
_MIN_ALIKE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One stage, or several that follow each other."""

    first: str
    last: str
    num_stages: int
    kinds: tuple[StateBytes, ...]
    """Sums over the stages, per kind of state."""
    at_work: bool
    """The stage that computes; always alone in its row."""


def rows(
    stages: Sequence[StageStates], *, at_work: str | None = None, every: bool = False, limit: int = MAX_ROWS
) -> tuple[Row, ...]:
    """The stages in order, in at most ``limit`` rows (and two more around the one at work), or ``every`` one alone.

    Neighbours with the same bytes are joined; where that leaves too many rows, those with bytes in the same tiers, in
    the same condition; and where that does not help either, as many as must be.
    """
    if every:
        return tuple(_row([stage], at_work) for stage in stages)
    for key in (_bytes, _pattern):
        found = _joined(stages, at_work, key, _MIN_ALIKE)
        if len(found) <= limit:
            return found
    number = {id(stage): index for index, stage in enumerate(stages)}
    block = -(-len(stages) // max(1, limit))
    return _joined(stages, at_work, lambda stage: number[id(stage)] // block, 2)


def total(stages: Sequence[StageStates]) -> Row:
    """All stages in one row."""
    return _row(stages, None)


def _joined(
    stages: Sequence[StageStates], at_work: str | None, key: Callable[[StageStates], Hashable], least: int
) -> tuple[Row, ...]:
    runs: list[list[StageStates]] = []
    before: Hashable = None
    for stage in stages:
        now = (stage.name == at_work, key(stage))
        if runs and now == before:
            runs[-1].append(stage)
        else:
            runs.append([stage])
        before = now
    found: list[Row] = []
    for run in runs:
        found += [_row(run, at_work)] if len(run) >= least else [_row([stage], at_work) for stage in run]
    return tuple(found)


def _row(run: Sequence[StageStates], at_work: str | None) -> Row:
    return Row(
        first=run[0].name,
        last=run[-1].name,
        num_stages=len(run),
        kinds=tuple(map(_sum, zip(*(stage.kinds for stage in run), strict=True))),
        at_work=run[0].name == at_work,
    )


def _sum(kinds: Sequence[StateBytes]) -> StateBytes:
    nvme, host, device, dirty, filling, writing, bound = map(sum, zip(*map(astuple, kinds), strict=True))
    return StateBytes(
        nvme=nvme, host=host, device=device, dirty=dirty, filling=filling, writing=writing, bound=bound
    )


def _bytes(stage: StageStates) -> Hashable:
    return stage.kinds


def _pattern(stage: StageStates) -> Hashable:
    return tuple(tuple(map(bool, astuple(kind))) for kind in stage.kinds)
