"""The timeline of a step, as `timeline.json` has it: which op ran when, and what was where. Numbers alone.

`hoist.scheduler` writes it; what a report makes of it is in `reduce.py` and `step.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from hoist.scheduler.status import STATE_KINDS

TIMELINE_VERSION = 1


class TimedOp(NamedTuple):
    """When one op ran, in seconds since the step began (less than 0: it began before)."""

    lane: str
    kind: str
    stage: int
    """-1: of none."""
    micro_batch: int
    piece: int
    start: float
    stop: float

    def named(self, stage_names: Sequence[str]) -> str:
        """As ``backward(layer.3, micro-batch 2)``."""
        where = [stage_names[self.stage]] if 0 <= self.stage < len(stage_names) else []
        where += [f"micro-batch {self.micro_batch}"] if self.micro_batch >= 0 else []
        where += [f"piece {self.piece}"] if self.piece >= 0 else []
        return f"{self.kind}({', '.join(where)})" if where else self.kind


class Moment(NamedTuple):
    """From a time on, an item of a stage is in a state; at the step's start, whatever was somewhere then."""

    seconds: float
    """Since the step began."""
    kind: str
    """One of STATE_KINDS."""
    stage: int
    second: int
    """Piece, chunk or micro-batch: with the kind and the stage, which item."""
    state: str
    """As in the residency table: stored, absent, filling, clean, bound, dirty, writing."""
    tier: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The last full step that a run has recorded."""

    step: int
    start: float
    """Seconds since 1970."""
    seconds: float
    """How long it took."""
    lanes: tuple[str, ...]
    stage_names: tuple[str, ...]
    ops: tuple[TimedOp, ...]
    """By start; those of the steps before and after that ran within it are in it too."""
    moments: tuple[Moment, ...]
    """By time."""
    truncated: bool
    """There was more than the file may hold."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read the document. Raises KeyError, IndexError, TypeError or ValueError if it is none, or of another version.
        """
        if document["format_version"] != TIMELINE_VERSION:
            raise ValueError(f"format_version: expected {TIMELINE_VERSION}, saw {document['format_version']!r:.50}")
        lanes, kinds = [str(name) for name in document["lanes"]], [str(name) for name in document["kinds"]]
        states, tiers = [str(name) for name in document["states"]], [str(name) for name in document["tiers"]]
        names = tuple(str(name) for name in document["stage_names"])
        seconds = float(document["seconds"])
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds: expected more than 0, saw {seconds!r}")
        ops = [
            TimedOp(lanes[lane], kinds[kind], int(stage), int(micro), int(piece), float(start), float(stop))
            for lane, kind, stage, micro, piece, start, stop in document["ops"]
        ]
        kinds_of_state = [str(name) for name in document.get("state_kinds", STATE_KINDS)]
        moments = [
            Moment(float(at), kinds_of_state[kind], int(stage), int(second), states[state], tiers[tier], int(num_bytes))
            for at, kind, stage, second, state, tier, num_bytes in document["residency"]
        ]
        if any(not 0 <= moment.stage < len(names) for moment in moments):
            raise ValueError("residency: a stage that has no name")
        return cls(
            step=int(document["step"]),
            start=float(document["start"]),
            seconds=seconds,
            lanes=tuple(lanes),
            stage_names=names,
            ops=tuple(sorted(ops, key=lambda op: op.start)),
            moments=tuple(sorted(moments, key=lambda moment: moment.seconds)),
            truncated=bool(document.get("truncated", False)),
        )
