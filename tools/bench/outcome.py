"""What a benchmark found, as data: a table with units, the machine, the settings; as JSON, on a terminal, as a plot.

Nothing here measures. A comparison that must not be believed is never made into an outcome: its benchmark refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hoist.tools.bench.machine import Machine
from hoist.tools.sizes import show_bytes

#: Raised by one when a reader of the version before would misread the document.
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of an outcome's table."""

    key: str
    """In the rows, and in JSON. Ends in its unit: ``_seconds``, ``_bytes``, ``_bytes_per_second``, ``_ratio``."""
    title: str
    """For people."""


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
    """What one benchmark found."""

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


def show(outcome: Outcome, console: Console) -> None:
    """The table, what it is about, and the machine."""
    table = Table(box=None, pad_edge=False)
    for column in outcome.columns:
        table.add_column(column.title, justify="left" if _is_text(outcome.rows, column.key) else "right", no_wrap=True)
    for row in outcome.rows:
        table.add_row(*(Text(shown(column.key, row.get(column.key))) for column in outcome.columns))
    console.print(Text(outcome.about))
    console.print(table)
    for note in outcome.notes:
        console.print(Text(note))
    console.print(Text(outcome.machine.in_words, style="dim"))


def write(outcome: Outcome, path: Path) -> None:
    """The outcome as a JSON file."""
    path.write_text(json.dumps(outcome.to_json(), indent=1) + "\n")


def shown(key: str, value: Any) -> str:
    """A value as its key's unit wants it; empty for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if key.endswith("_bytes_per_second"):
        return f"{value / 1e9:.2f} GB/s"
    if key.endswith("_bytes"):
        return show_bytes(int(value))
    if key.endswith("_seconds"):
        return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"
    if key.endswith("_ratio"):
        return f"{value:.3f}"
    if key.endswith("_per_second"):
        return f"{value / 1e9:.3f} G/s" if value >= 1e6 else f"{value:,.0f} /s"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _is_text(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(isinstance(row.get(key), str) for row in rows)
