"""A report as one picture: the charts that say most, with their findings as titles, in light colours. No browser.

What it says is `parts.Report`; with every table and in both themes it is a page, by `page.py`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import vl_convert

from hoist.tools.run_report.charts import PALETTES, coloured, config
from hoist.tools.run_report.parts import Figure, Report

#: Pixels of a column's charts, without axes; a big one spans two.
_WIDTH = 500
#: Pixels that each chart leaves for its y axis, so that charts begin in line.
_AXIS = 140
#: Pixels from one column's chart to the next one's.
_GAP = _AXIS + 40
#: Most pixels of a small chart's height.
_HEIGHT = 180
#: Characters of a title's line over one column.
_TITLE_CHARACTERS = 72
#: Pixels of the picture for each of these.
_SCALE = 1.3
#: No chart's colours depend on another's.
_RESOLVE = {"scale": {"color": "independent", "strokeDash": "independent"}}


def picture(report: Report) -> bytes:
    """The picture, as PNG."""
    return vl_convert.vegalite_to_png(_whole(report), scale=_SCALE)


def _whole(report: Report) -> dict[str, Any]:
    figures = [figure for section in report.sections for figure in section.figures if figure.in_picture]
    views: list[Any] = [_view(figure) for figure in figures if figure.chart.big]
    small = [_view(figure) for figure in figures if not figure.chart.big]
    if small:
        views.append({"concat": small, "columns": 2, "align": "each", "spacing": 34, "resolve": _RESOLVE})
    document = {
        "title": {
            "text": report.title,
            "subtitle": _header(report.subtitle, report.cards),
            "fontSize": 22, "subtitleFontSize": 13, "anchor": "start", "offset": 22, "subtitlePadding": 8,
        },
        "vconcat": views or [_nothing(report)],
        "spacing": 34,
        "padding": 24,
        "config": {**config(), "background": "@paper", "axisY": {"minExtent": _AXIS, "titleX": -44}},
        "resolve": _RESOLVE,
    }  # fmt: skip
    found: dict[str, Any] = coloured(document, PALETTES["light"])
    datasets = {name: rows for figure in figures for name, rows in figure.chart.datasets.items()}
    return {**found, "datasets": datasets}


def _header(subtitle: str, cards: Sequence[tuple[str, str]]) -> list[str]:
    return [subtitle, *textwrap.wrap("; ".join(f"{what}: {value}" for what, value in cards), 150)]


def _view(figure: Figure) -> dict[str, Any]:
    characters = _TITLE_CHARACTERS * (2 if figure.chart.big else 1)
    return {
        **figure.chart.spec,
        "height": min(figure.chart.height, _HEIGHT) if not figure.chart.big else figure.chart.height,
        "width": 2 * _WIDTH + _GAP if figure.chart.big else _WIDTH,
        "title": {
            "text": textwrap.wrap(figure.title, characters), "fontSize": 13, "anchor": "start", "frame": "group",
            "offset": 10,
        },
    }  # fmt: skip


def _nothing(report: Report) -> dict[str, Any]:
    """Instead of charts, if there is none: why."""
    words = [word for section in report.sections for word in section.words]
    return {
        "data": {"values": [{}]},
        "mark": {"type": "text", "align": "left", "x": 0, "color": "@ink", "fontSize": 13},
        "encoding": {"text": {"value": list(dict.fromkeys(words)) or ["Nothing was recorded."]}},
        "width": 2 * _WIDTH,
        "height": 120,
    }
