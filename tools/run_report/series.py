"""Curves and tables over a run's steps, thinned by rules that each figure states.

The rules themselves are in `reduce.py`; which curves there are, in `run.py` and
`bytes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hoist.tiers.format import METRICS_NAME
from hoist.tools.run_report.facts import StepFacts
from hoist.tools.run_report.parts import Cell, Table, Unit, columns
from hoist.tools.run_report.reduce import CURVE_POINTS, TABLE_ROWS, kept_indices, kept_rows

Values = Sequence[float | None]


def points(steps: Sequence[StepFacts], values: Values) -> list[tuple[float, float | None]]:
    """The points of a curve over steps, thinned."""
    return [(steps[index].step, values[index]) for index in kept_indices(values, most=CURVE_POINTS)]


def over(values: Values, scale: float) -> list[float | None]:
    """Each value divided by ``scale``."""
    return [None if value is None else value / scale for value in values]


def thinned(count: int) -> list[str]:
    """A sentence on what a curve over so many steps leaves out; nothing if it is whole."""
    if count <= CURVE_POINTS:
        return []
    return [
        f"Of {count:,} steps the curve shows the first, the last, and the lowest and highest of each of "
        f"{CURVE_POINTS // 2} equal parts."
    ]


def table(
    steps: Sequence[StepFacts],
    series: Sequence[tuple[str, Unit, Values]],
    *,
    keep: Callable[[int], bool] = lambda step: False,
) -> Table:
    """Step by step, thinned where there are too many; steps that ``keep`` says yes to stay."""
    chosen = set(kept_rows([values for _, _, values in series]))
    chosen |= {index for index, step in enumerate(steps) if keep(step.step)}
    rows: list[tuple[Cell, ...]] = [
        (steps[index].step, *(values[index] for _, _, values in series)) for index in sorted(chosen)
    ]
    note = ""
    if len(rows) < len(steps):
        every = -(-len(steps) // TABLE_ROWS)
        note = (
            f"{len(rows):,} of {len(steps):,} steps: every {every}th, the last, and those with the lowest and the "
            f"highest value of a column. All are in {METRICS_NAME}."
        )
    return Table(
        columns=columns(("step", Unit.COUNT), *((name, unit) for name, unit, _ in series)), rows=rows, note=note
    )
