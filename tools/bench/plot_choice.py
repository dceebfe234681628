"""What a chart of an outcome shows, where its benchmark has not said so: chosen by the columns.

Lines where something is measured over a number (block size, depth, micro-batches), else bars. How it looks is
`plot.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hoist.tools.bench.outcome import Column, Outcome, Plot

#: Ends of keys that are measured; what stands in the table before the first of them says what a row is.
_MEASURED = ("_seconds", "_per_second", "_ratio")
#: So many values of a number, and it is an axis; fewer are groups of bars.
_AXIS_VALUES = 3
#: More charts beside each other than this are too small; what tells them apart then tells lines or bars apart.
_MOST_PANELS = 4


def chosen(outcome: Outcome) -> Plot | None:
    """What the benchmark wants shown, else: each column of the first measured one's unit, over the number that has most
    values. None if there is nothing to draw."""
    if outcome.plot is not None:
        return outcome.plot
    keys = [column.key for column in outcome.columns]
    measured = [key for key in keys if key.endswith(_MEASURED) and any(_number(row.get(key)) for row in outcome.rows)]
    if not measured:
        return None
    about = [key for key in keys[: keys.index(measured[0])] if len(values(outcome, key)) > 1]
    numbers = [key for key in about if all(_number(value) for value in values(outcome, key))]
    x = max(numbers, key=lambda key: len(values(outcome, key)), default=None)
    if x is not None and len(values(outcome, x)) < _AXIS_VALUES:
        x = None
    panels = [key for key in numbers if key != x]
    if len({tuple(row.get(key) for key in panels) for row in outcome.rows}) > _MOST_PANELS:
        panels = []
    return Plot(
        y=tuple(key for key in measured if _unit(key) == _unit(measured[0])),
        x=x,
        series=tuple(key for key in about if key != x and key not in panels),
        panels=tuple(panels),
    )


def by_side(outcome: Outcome) -> Outcome:
    """A table that has a row a measure, and in its rows' ``spreads`` a spread a side, turned: a row a side. Others come
    back as they are."""
    if not outcome.rows or not all({"measure", "unit", "spreads"} <= row.keys() for row in outcome.rows):
        return outcome
    titles = {column.key: column.title for column in outcome.columns}
    columns = [Column(key="side", title="side")]
    sides: dict[str, dict[str, Any]] = {}
    for row in outcome.rows:
        what = str(row["measure"]).replace(" ", "_")
        columns.append(Column(key=f"{what}_{row['unit']}", title=str(row["measure"])))
        for side, found in row["spreads"].items():
            of_side = sides.setdefault(side, {"side": titles.get(side, side)})
            for end, value in (("", "median"), ("_low", "low"), ("_high", "high")):
                of_side[f"{what}{end}_{row['unit']}"] = None if found is None else found[value]
    shown = tuple(column.key for column in columns[1:])
    return replace(
        outcome, columns=tuple(columns), rows=tuple(sides.values()),
        plot=outcome.plot or Plot(y=shown, series=("side",)),
    )  # fmt: skip


def values(outcome: Outcome, key: str) -> list[Any]:
    """What a key has in the rows, each once, in their order; numbers in their own."""
    found = list(dict.fromkeys(row[key] for row in outcome.rows if row.get(key) is not None))
    return sorted(found) if all(_number(value) for value in found) else found


def spread(row: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """The smallest and the largest of what a row's value is the median of, if it has them.

    Those of ``read_bytes_per_second`` are ``read_low_bytes_per_second`` and ``read_high_bytes_per_second``.
    """
    words = key.split("_")
    for cut in range(1, len(words) + 1):
        before, after = words[:cut], words[cut:]
        low, high = (row.get("_".join([*before, end, *after])) for end in ("low", "high"))
        if _number(low) and _number(high):
            return float(low), float(high)  # type: ignore[arg-type]  # numbers, as was just seen
    return None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unit(key: str) -> str:
    ends = ("_bytes_per_second", "_per_second", "_seconds", "_ratio", "_bytes")
    return next((end for end in ends if key.endswith(end)), "")
