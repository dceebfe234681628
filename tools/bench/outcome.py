"""What a benchmark found, as data: a table with units, the machine, the settings; as JSON, and on a terminal.

Nothing here measures. A comparison that must not be believed is never made into an outcome: its benchmark refuses it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hoist.tools.bench.machine import Machine
from hoist.tools.errors import BenchError

#: Raised by one when a reader of the version before would misread the document.
FORMAT_VERSION = 1

#: Units by the ending of a key, the first that fits: each unit with its size, ascending.
_UNITS: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = (
    ("_bytes_per_second", (("MB/s", 1e6), ("GB/s", 1e9))),
    ("_bytes", (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30))),
    ("_per_second", (("/s", 1.0), ("G/s", 1e9))),
    ("_seconds", (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))),
)
#: The smallest number of a column is at least this in the column's unit, if there is one like that.
_LEAST = 0.1
#: No number is longer than this in the column's unit, if there is one like that.
_MOST = 1e5


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of an outcome's table."""

    key: str
    """In the rows, and in JSON. Ends in its unit: ``_seconds``, ``_bytes``, ``_bytes_per_second``, ``_per_second``,
    ``_ratio``; a key of only that word will do too."""
    title: str
    """For people, without the unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """What a chart of an outcome shows, as keys of its rows."""

    y: tuple[str, ...]
    """What was measured: a chart each."""
    x: str | None = None
    """A number that lines are drawn over; None: bars."""
    series: tuple[str, ...] = ()
    """What tells lines or bars apart."""
    panels: tuple[str, ...] = ()
    """What there is one more chart for: a row's settings that are neither."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one benchmark found.

    As JSON: ``format_version`` and these fields by their names, ``machine`` as :class:`Machine`'s fields, ``columns``
    as a list of ``key`` and ``title``, ``rows`` as a list of objects whose values are numbers in the unit that the key
    ends in (never scaled), text, booleans, or null where nothing was measured. Fields, columns and keys of rows may be
    added in a version; what a field or key means changes only with the version.
    """

    name: str
    """Of the benchmark: the word after `hoist bench`."""
    about: str
    """One sentence: what is compared with what."""
    command: str
    """Makes it again."""
    machine: Machine
    settings: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    """A value a column; None where there is nothing to measure. May have more than the columns show."""
    notes: tuple[str, ...] = ()
    """What a reader must know: what was not measured, and why."""
    plot: Plot | None = None
    """What to draw; None: `plot_choice.py` looks for it."""

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    def to_text(self) -> str:
        """The outcome as a JSON document. Raises ValueError of a number that JSON has not: NaN and infinities."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False)


def show(outcome: Outcome, console: Console) -> None:
    """What it is about, the table, the notes and the machine.

    A table that is wider than the console goes past its edge: no number is ever cut.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    least = 0
    texts = [column_texts(column.key, [row.get(column.key) for row in outcome.rows]) for column in outcome.columns]
    for column, (unit, cells) in zip(outcome.columns, texts, strict=True):
        # Words may be wrapped, numbers are not; a title takes as many lines as its column's width wants.
        is_text = _is_text(outcome.rows, column.key)
        parts = [part for cell in cells for part in (cell.split() if is_text else [cell])]
        width = max(map(len, [*parts, *column.title.split(), unit, ""]))
        title = column.title if is_text else textwrap.fill(column.title, max(1, width), break_on_hyphens=False)
        table.add_column(
            Text("\n".join(filter(None, (title, unit)))), justify="left" if is_text else "right", no_wrap=not is_text
        )
        least += width + 2
    for row in zip(*(found for _, found in texts), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    console.print(Text(outcome.about))
    width = console.width
    console.width = max(least, width)  # print takes no table wider than the console
    console.print(table, crop=False)
    console.width = width
    for note in outcome.notes:
        console.print(Text(f"Note: {note}"))
    console.print(Text(outcome.machine.in_words, style="dim"))


def write(outcome: Outcome, path: Path) -> None:
    """The outcome as a JSON file. Raises BenchError if it cannot be written."""
    try:
        path.write_text(outcome.to_text() + "\n")
    except OSError as error:
        raise BenchError(f"--output {path}: {error.strerror}; --json prints the outcome instead") from error


def column_texts(key: str, values: Sequence[Any]) -> tuple[str, list[str]]:
    """The unit of a column, empty if it has none, and its values in it; None is an empty text."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    unit, size = _unit(key, [abs(value) for value in numbers if value])
    scaled = [value / size for value in numbers]
    whole = all(value == int(value) for value in scaled) and not key.endswith(("_ratio", "_per_second", "_seconds"))
    decimals = 0 if whole else 3 if key.endswith("_ratio") else _decimals(scaled)
    return unit, [_text(value, size, decimals) for value in values]


def shown(key: str, value: Any) -> str:
    """A value alone, with the unit that its key has; empty for None."""
    unit, (text,) = column_texts(key, [value])
    return f"{text} {unit}".strip()


def _unit(key: str, sizes: Sequence[float]) -> tuple[str, float]:
    """The unit in which a column's amounts, all above 0, read best, and its size."""
    for ending, units in _UNITS:
        if f"_{key}".endswith(ending):
            chosen = 0
            for number, (_, size) in enumerate(units):
                too_long = max(sizes, default=0.0) >= max(_MOST * units[chosen][1], _LEAST * size)
                if min(sizes, default=0.0) >= _LEAST * size or too_long:
                    chosen = number
            return units[chosen]
    return "", 1.0


def _decimals(scaled: Sequence[float]) -> int:
    """As many as give the smallest number three digits, at most three."""
    least = min((abs(value) for value in scaled if value), default=1.0)
    return 0 if least >= 100 else 1 if least >= 10 else 2 if least >= 1 else 3


def _text(value: Any, size: float, decimals: int) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value / size:,.{decimals}f}"
    return str(value)


def _is_text(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(isinstance(row.get(key), (str, bool)) for row in rows)
