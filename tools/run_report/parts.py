"""What a report is made of: sections of figures, each a finding, a chart and a table of its numbers. And number forms.

Filled in by `run.py` and `step.py`; `page.py` and `picture.py` show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from hoist.tools.durations import show_seconds
from hoist.tools.run_report.charts import Chart
from hoist.tools.run_report.facts import RunFacts, StepFacts
from hoist.tools.sizes import show_bytes

#: Steps at the end of a run that stand for it, the first step of all apart, which also warms up.
STEADY_STEPS = 20

Cell = float | int | str | None


class Unit(Enum):
    """How a column's numbers are written."""

    TEXT = ""
    SHOWN = "shown"
    """Text of a number with its unit."""
    COUNT = "count"
    NUMBER = "number"
    BYTES = "bytes"
    SECONDS = "s"
    SHARE = "%"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    """With the unit, unless the cells have one."""
    unit: Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The numbers of a chart."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    """What was left out, and by which rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A chart with its finding, what it shows in words, and its numbers."""

    key: str
    """Unique in the report: letters and digits."""
    title: str
    """The finding."""
    alt: str
    """What the chart shows, for those who do not see it."""
    chart: Chart
    table: Table
    notes: Sequence[str] = ()
    """What is no measurement, what was thinned, what is left out."""
    in_picture: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of the report."""

    key: str
    title: str
    figures: Sequence[Figure]
    words: Sequence[str] = ()
    """Why something is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All of it."""

    title: str
    subtitle: str
    cards: Sequence[tuple[str, str]]
    """The run in a few numbers: what, value."""
    about: Sequence[tuple[str, str]]
    """Model, settings, machine: what, value."""
    sections: Sequence[Section]


def columns(*named: tuple[str, Unit]) -> tuple[Column, ...]:
    """Columns of a table, short."""
    return tuple(Column(name=name, unit=unit) for name, unit in named)


def shown(value: Cell, unit: Unit) -> str:
    """A cell's text; what is not known is a dash."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    match unit:
        case Unit.BYTES:
            return show_bytes(value)
        case Unit.COUNT:
            return f"{value:,.0f}"
        case Unit.SECONDS:
            return show_seconds(value)
        case Unit.SHARE:
            return show_share(value)
        case _:
            return f"{value:,.6g}"


def show_share(share: float) -> str:
    """A share of 1 in per cent; small ones with the digits that they need."""
    percent = 100 * share
    if percent == 0 or abs(percent) >= 9.95:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if abs(percent) >= 0.095 else f"{percent:.1g}%"


def show_rate(tokens_per_second: float) -> str:
    """Tokens a second."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.3g}"


def times(count: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


def steady(facts: RunFacts) -> tuple[StepFacts, ...]:
    """The steps that stand for the run: the last ones, without its first unless there is no other."""
    return (facts.steps[1:] or facts.steps)[-STEADY_STEPS:]


def middle(values: Sequence[float | None]) -> float | None:
    """Median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def decimal_scale(largest: float) -> tuple[float, str]:
    """The same in powers of 1000, as drives are rated."""
    for power, name in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if largest >= 10**power:
            return float(10**power), name
    return 1.0, "bytes"


def byte_scale(largest: float) -> tuple[float, str]:
    """What to divide bytes by for an axis, and the unit's name."""
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if largest >= 2**power:
            return float(2**power), name
    return 1.0, "bytes"


def against(value: float, expected: float, words: tuple[str, str]) -> str:
    """``12% longer than``, with ``words`` for more and less; ``the same as`` within half a per cent."""
    off = value / expected - 1
    return "the same as" if abs(off) < 0.005 else f"{show_share(abs(off))} {words[off < 0]} than"
