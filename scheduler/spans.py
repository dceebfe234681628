"""When ops ran: spans, and what they make of a step's time, lane by lane.

Arithmetic on seconds alone. `executor.py` makes the spans; `timeline.py` and metrics show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hoist.scheduler.ops import Lane, Op


@dataclass(frozen=True, slots=True)
class Span:
    """When one op ran. Times are ``time.perf_counter()`` seconds; an I/O op's span is from request to completion.

    Of an op in a stream it begins when all that it came after had ended, and stops when its mark was reached.
    """

    op: Op
    start: float
    stop: float
    step: int = 0
    """Step in whose plan the op was; one that is ``delayed`` works for the step before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneTime:
    """How one lane spent a step, in seconds."""

    busy_seconds: float
    """Time with at least one of its ops running."""
    stall_seconds: float
    """Time it had ops left but had to wait for others."""


def lane_times(spans: list[Span], start: float, stop: float) -> dict[Lane, LaneTime]:
    """Busy and stalled seconds of every lane between two times. A lane that is idle before its last op is stalled."""
    times: dict[Lane, LaneTime] = {}
    for lane in (Lane.IO, Lane.COPY, Lane.COMPUTE, Lane.OPTIM, Lane.COMMIT):
        parts = [
            (max(span.start, start), min(span.stop, stop))
            for span in spans
            if span.op.lane is lane and max(span.start, start) < min(span.stop, stop)
        ]
        busy = union_seconds(parts)
        last_stop = max((last for _, last in parts), default=start)
        times[lane] = LaneTime(busy_seconds=busy, stall_seconds=max(0.0, last_stop - start - busy))
    return times


def busy_seconds(spans: Sequence[Span]) -> float:
    """Time during which at least one of the spans ran."""
    return union_seconds([(span.start, span.stop) for span in spans])


def union_seconds(parts: Sequence[tuple[float, float]]) -> float:
    """How long the union of some (start, stop) lasts."""
    total = 0.0
    reached = float("-inf")
    for start, stop in sorted(parts):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
