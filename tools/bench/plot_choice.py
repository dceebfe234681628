"""What a chart of an outcome shows, where its benchmark has not said so: chosen by the columns.

Lines where something is measured over a number (block size, depth, micro-batches), else bars. How it looks is
`plot.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hoist.tools.bench.outcome import Outcome, Plot

#: Ends of keys that are measured; what stands in the table before the first of them says what a row is.
_MEASURED = ("_seconds", "_per_second", "_ratio")
#: So many values of a number, and it is an axis; fewer are groups of bars.
_AXIS_VALUES = 3


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
    return Plot(
        y=tuple(key for key in measured if _unit(key) == _unit(measured[0])),
        x=x,
        series=tuple(key for key in about if key not in numbers),
        panels=tuple(key for key in numbers if key != x),
    )


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
