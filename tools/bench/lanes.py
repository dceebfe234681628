"""What the lanes did during a step, for people: a drawing of a timeline, a table of busy and stalled seconds.

The spans come from the executor; a run's own timeline is shown by `hoist inspect` and drawn in full by a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hoist.scheduler.ops import Lane
from hoist.scheduler.spans import Span
from hoist.tools.sizes import show_bytes

#: Those of a step; commits run apart from it.
LANES = (Lane.COMPUTE, Lane.IO, Lane.OPTIM, Lane.COPY)


def idle_share(spans: Sequence[Span], start: float, stop: float) -> float:
    """Share of ``start`` to ``stop`` in which neither a compute nor an io op was running."""
    parts = sorted((span.start, span.stop) for span in spans if span.op.lane in (Lane.COMPUTE, Lane.IO))
    covered, reached = 0.0, start
    for first, last in parts:
        first, last = max(first, reached), min(last, stop)
        if last > first:
            covered += last - first
            reached = last
    return 1.0 - covered / (stop - start)


def draw_timeline(spans: Sequence[Span], start: float, stop: float, *, columns: int = 68) -> list[str]:
    """One line a lane: a block where it was busy for most of the column's time, a dot for some of it."""
    width = (stop - start) / columns
    lines = []
    for lane in LANES:
        busy = [0.0] * columns
        reached = start
        for first, last in sorted((span.start, span.stop) for span in spans if span.op.lane is lane):
            first, last = max(first, reached), min(last, stop)
            reached = max(reached, last)
            while first < last:
                column = min(columns - 1, int((first - start) / width))
                end = min(last, start + (column + 1) * width)
                if end <= first:  # rounding at a column's edge
                    break
                busy[column] += end - first
                first = end
        marks = "".join("#" if share > 0.5 * width else "." if share > 0.05 * width else " " for share in busy)
        lines.append(f"{lane.value:>8} |{marks}|")
    return lines


def show_lanes(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Busy and stalled seconds of each lane for rows of `hoist bench step`, what moved, and drawings where they are."""
    console.print(Text("a step of the same rows: busy + stalled seconds of each lane, bytes moved"))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # all of it has to fit 80 columns
    for title in ("plan", "MxSxB", *(lane.value for lane in LANES), "read", "written"):
        table.add_column(title, justify="left" if title in ("plan", "MxSxB") else "right", no_wrap=True)
    for row in rows:
        lanes = (
            "+".join(_short(row[f"{lane.value}_{what}_seconds"]) for what in ("busy", "stall")) for lane in LANES
        )
        moved = (show_bytes(row[key]).replace(" ", "") for key in ("read_bytes", "written_bytes"))
        table.add_row(row["how"], row["work"], *lanes, *moved)
    console.print(table)
    for row in rows:
        if "lanes" in row:
            budget = show_bytes(row["host_memory_bytes"])
            console.print(Text(f"\nlanes of a step, {row['plan']}, {row['work']}, delay {row['delay']:g}, {budget}"))
            for line in row["lanes"]:
                console.print(Text(line), soft_wrap=True)


def _short(seconds: float) -> str:
    """In at most four characters below a thousand."""
    return f"{seconds:.2f}" if seconds < 9.995 else f"{seconds:.1f}" if seconds < 99.95 else f"{seconds:.0f}"
