"""How the forecast of a run looks on a terminal, in 80 columns, and in a log. The record is `forecast.py`'s."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hoist.scheduler.preflight import Prediction
from hoist.tools.durations import show_clock
from hoist.tools.forecast import KINDS, TEXTBOOK, Forecast
from hoist.tools.inspection.view import LANES
from hoist.tools.invoked import shown_path
from hoist.tools.sizes import show_bytes

_LABEL_WIDTH = 9


def render(forecast: Forecast, console: Console) -> None:
    """Print the plan of a run: tiers, drives, traffic, the predicted step and what it hangs on."""
    for line in lines(forecast, console.width if console.is_terminal else 0):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def lines(forecast: Forecast, width: int) -> list[str]:
    """The lines of :func:`render`; text is wrapped to ``width`` columns, or not at all if that is 0."""
    found = _tiers(forecast)

    def field(label: str, text: str) -> None:
        parts = [text]
        if width:
            parts = textwrap.wrap(
                text, max(20, width - _LABEL_WIDTH), break_long_words=False, break_on_hyphens=False
            )
        found.extend(
            f"{'' if number else label:<{_LABEL_WIDTH}}{part}".rstrip() for number, part in enumerate(parts)
        )

    for number, drive in enumerate(forecast.drives):
        field(
            "" if number else "drive",
            f"{shown_path(Path(drive.directory))} needs {show_bytes(drive.need_bytes)} more, "
            f"{show_bytes(drive.free_bytes)} are free",
        )
    prediction = forecast.prediction
    if prediction is None:
        if forecast.step_bytes is not None:
            field("traffic", _traffic(forecast, *forecast.step_bytes))
        why = forecast.why_not if forecast.device else f"the machine could not be measured: {forecast.why_not}"
        field("a step", f"nothing is predicted: {why}")
        _wear(forecast, field)
        return found
    field("", _drive(forecast, prediction))
    field("traffic", _traffic(forecast, prediction.read_bytes, prediction.written_bytes))
    field("a step", _step(prediction))
    field("", _lanes(prediction))
    if forecast.run_seconds is not None:
        field(
            "the run",
            f"{forecast.steps_left:,} steps in {show_clock(forecast.run_seconds)}, at "
            f"{prediction.tokens / prediction.seconds:,.0f} tokens/s; commits and evaluations come on top",
        )
    if prediction.advice is not None:
        field("faster", prediction.advice)
    _wear(forecast, field)
    return found


def _wear(forecast: Forecast, field: Callable[[str, str], None]) -> None:
    for number, line in enumerate(forecast.wear):
        field("" if number else "wear", line)


def _tiers(forecast: Forecast) -> list[str]:
    """The table of bytes by tier and kind."""
    heading = ["", *KINDS, "total"]
    rows = [heading]
    for name, tier in (("device", forecast.device), ("host", forecast.host), ("nvme", forecast.nvme)):
        if tier:
            cells = (show_bytes(tier[kind]) if tier.get(kind) else "-" for kind in KINDS)
            rows.append([name, *cells, show_bytes(sum(tier.values()))])
    # Six columns of 12 and a name make 80.
    found = [f"{row[0]:<8}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
    text = f"{'':<{_LABEL_WIDTH}}host is within the budget of {show_bytes(forecast.host_budget_bytes)}"
    if forecast.device_budget_bytes is None:
        return [*found, f"{text}; the CPU computes: no device"]
    return [*found, f"{text}, {forecast.device_name} within {show_bytes(forecast.device_budget_bytes)}"]


def _drive(forecast: Forecast, prediction: Prediction) -> str:
    text = (
        f"measured {_speed(prediction.read_bytes_per_second)} read, {_speed(prediction.write_bytes_per_second)} written"
    )
    if forecast.measured is None:
        return text
    drive = forecast.measured.drive
    return (
        f"{text}: {show_bytes(drive.measured_bytes)} written twice and read, {drive.requests_in_flight} requests of "
        f"{show_bytes(drive.request_bytes)} at once"
    )


def _traffic(forecast: Forecast, read: int, written: int) -> str:
    count = max(1, forecast.num_parameters)
    return (
        f"a step reads {show_bytes(read)} and writes {show_bytes(written)}: {read / count:.1f} + {written / count:.1f} "
        f"bytes a parameter ({TEXTBOOK[0]} + {TEXTBOOK[1]} with nothing in memory)"
    )


def _step(prediction: Prediction) -> str:
    without = prediction.seconds - prediction.margin_seconds
    return (
        f"{_seconds(prediction.seconds)} predicted, bound by {LANES[prediction.bound_by]}; were that for nothing, "
        f"{_seconds(without)}, bound by {LANES[prediction.next_bound]}"
    )


def _lanes(prediction: Prediction) -> str:
    return (
        f"alone: computation {_seconds(prediction.compute_seconds)}, i/o {_seconds(prediction.io_seconds)}, "
        f"updates {_seconds(prediction.optim_seconds)}, merging {_seconds(prediction.copy_seconds)}"
    )


def _speed(bytes_per_second: float) -> str:
    return f"{show_bytes(bytes_per_second)}/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 100 else f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.3g} s"
