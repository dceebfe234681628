"""Finds the fastest setting of DeepSpeed's knobs on a work: one knob after another, in short runs.

How a setting is run is the caller's; what the knobs mean is in `sides/deepspeed_side.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hoist.tools.bench.sides.job import SideResult
from hoist.tools.errors import BenchError

#: Settings to begin with; the first that works is. DeepSpeed runs out of buffers with some models, and with some asks
#: for a parameter that is already on its way.
STARTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"param_buffers": 24},
    {"param_buffers": 48},
    {"prefetch_elements": 0},
    {"prefetch_elements": 0, "param_buffers": 48},
)
#: What is tried then, in this order; what is best stays while the next is tried.
ALTERNATIVES: tuple[tuple[Mapping[str, Any], ...], ...] = (
    ({"pipeline_read": False, "pipeline_write": False}, {"pipeline_read": True, "pipeline_write": False}),
    ({"sub_group_elements": 5_000_000}, {"sub_group_elements": 100_000_000}),
    ({"prefetch_elements": 0}, {"prefetch_elements": 50_000_000}),
    ({"aio_block_bytes": 2**18}, {"aio_block_bytes": 2**23}),
    ({"aio_queue_depth": 32},),
    ({"aio_threads": 2}, {"aio_threads": 4}),
    ({"aio_single_submit": True},),
    ({"aio_overlap_events": False},),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One setting that was tried."""

    knobs: dict[str, Any]
    """Those that are not as DeepSpeed's side begins."""
    step_seconds: float | None
    """Median of its counted steps; None if it failed."""
    failure: str | None = None
    """What it said then."""


def sweep(
    run: Callable[[Mapping[str, Any]], SideResult],
    start: Mapping[str, Any],
    told: Callable[[str, int, int], None] = lambda what, done, total: None,
    *,
    alternatives: Sequence[Sequence[Mapping[str, Any]]] = ALTERNATIVES,
) -> tuple[dict[str, Any], list[Trial]]:
    """The fastest setting, and all that were tried. One that fails is passed over.

    Raises BenchError if none of :data:`STARTS` works.
    """
    trials: list[Trial] = []
    total = 1 + sum(len(choices) for choices in alternatives)

    def tried(knobs: dict[str, Any]) -> float | None:
        told("trying DeepSpeed's knobs", min(len(trials), total - 1), total)
        try:
            result = run(knobs)
        except BenchError as error:
            trials.append(Trial(knobs=knobs, step_seconds=None, failure=str(error)))
            return None
        seconds = statistics.median(result.step_seconds[1:])
        trials.append(Trial(knobs=knobs, step_seconds=seconds))
        return seconds

    best: dict[str, Any] = dict(start)
    fastest: float | None = None
    for more in STARTS:
        if more.keys() & start.keys():
            continue
        best = {**start, **more}
        fastest = tried(best)
        if fastest is not None:
            break
    if fastest is None:
        raise BenchError(f"none of DeepSpeed's settings works here; the last said: {trials[-1].failure}")
    for choices in alternatives:
        before = dict(best)
        for choice in choices:
            if all(before.get(name) == value for name, value in choice.items()):
                continue
            knobs = {**before, **choice}
            seconds = tried(knobs)
            if seconds is not None and seconds < fastest:
                best, fastest = knobs, seconds
    return best, trials
