"""Draws an outcome: one picture with its title, units, notes and the machine, as SVG, PNG or a page with the table.

What is drawn is chosen by `plot_choice.py`. Colours are those of `hoist report`; an SVG and a page follow the reader's
light or dark theme, a PNG is light. Needs the extra ``report``.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair
import vl_convert

from hoist.tools.bench.outcome import Outcome, Plot, shown
from hoist.tools.bench.plot_choice import by_side, chosen, spread
from hoist.tools.run_report.charts import PALETTES, coloured, config

#: Ends of files that can be written.
FORMATS = (".svg", ".png", ".html")
_WIDTH = 560
#: Pixels of the charts where there are several beside each other.
_PANEL_WIDTH = 260
_LINES_HEIGHT = 240
_BAR_HEIGHT = 24
#: Pixels of a PNG for each of these.
_SCALE = 1.5
_CHARACTERS = 120
_COLOURS = ("@blue", "@vermilion", "@green", "@amber", "@pink", "@sky", "@grey")
_DASHES = ([1, 0], [6, 3], [2, 2])


def drawn(outcome: Outcome, kind: str) -> bytes:
    """The outcome as a file that ends in ``kind``, one of :data:`FORMATS`."""
    document = specification(outcome)
    if kind == ".png":
        found: bytes = vl_convert.vegalite_to_png(document, scale=_SCALE)
        return found
    svg = _in_both_themes(vl_convert.vegalite_to_svg(document))
    return (_page(outcome, svg) if kind == ".html" else svg).encode()


def specification(outcome: Outcome) -> dict[str, Any]:
    """The picture in Vega-Lite, in light colours."""
    outcome = by_side(outcome)
    plot = chosen(outcome)
    datasets: dict[str, Any] = {}
    views = [] if plot is None else _views(outcome, plot, datasets)
    beside = len(_panels(outcome, plot)) if plot is not None else 1
    width = max(_WIDTH, beside * _PANEL_WIDTH)
    document = {
        "$schema": altair.SCHEMA_URL,
        "title": {
            "text": f"hoist bench {outcome.name}",
            "subtitle": _header(outcome, _CHARACTERS * width // _WIDTH),
            "fontSize": 18, "subtitleFontSize": 11, "anchor": "start", "offset": 18, "subtitlePadding": 8,
        },
        "vconcat": views or [_nothing()],
        "spacing": 26,
        "padding": 20,
        "config": {**config(), "background": "@paper"},
        "resolve": {"scale": {"color": "shared"}},
    }  # fmt: skip
    found: dict[str, Any] = coloured(document, PALETTES["light"])
    return found | {"datasets": datasets}


def _header(outcome: Outcome, characters: int) -> list[str]:
    told = (outcome.about, *outcome.notes, outcome.machine.in_words)
    return [line for words in told for line in textwrap.wrap(words, characters)]


def _nothing() -> dict[str, Any]:
    return {
        "data": {"values": [{}]},
        "mark": {"type": "text", "align": "left", "x": 0, "color": "@ink", "fontSize": 13},
        "encoding": {"text": {"value": "Nothing was measured."}},
        "width": _WIDTH, "height": 60,
    }  # fmt: skip


# --- charts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """How a column's numbers stand on an axis."""

    name: str
    divisor: float

    @classmethod
    def of(cls, key: str, largest: float) -> _Unit:
        steps: Sequence[tuple[float, str]]
        if key.endswith("_bytes_per_second"):
            steps = ((1e9, "GB/s"), (1e6, "MB/s"))
        elif key.endswith("_per_second"):
            steps = ((1e9, "G/s"), (1e6, "M/s"), (1.0, "/s"))
        elif key.endswith("_bytes"):
            steps = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
        elif key.endswith("_seconds"):
            steps = ((1.0, "s"), (1e-3, "ms"))
        else:
            return cls(name="", divisor=1.0)
        divisor, name = next((step for step in steps if largest >= step[0]), steps[-1])
        return cls(name=name, divisor=divisor)


def _panels(outcome: Outcome, plot: Plot) -> list[tuple[Any, ...]]:
    """What tells the charts of one measured thing apart, each once."""
    return list(dict.fromkeys(tuple(row.get(key) for key in plot.panels) for row in outcome.rows))


def _views(outcome: Outcome, plot: Plot, datasets: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of charts for each measured thing; their data goes to ``datasets``."""
    titles = {column.key: column.title for column in outcome.columns}
    seen = [row for row in outcome.rows if any(row.get(key) is not None for key in plot.y)]
    labels = list(dict.fromkeys(_label(row, plot.series, titles) for row in seen))
    panels = _panels(outcome, plot)
    found = []
    for key in plot.y:
        measured = [float(row[key]) for row in outcome.rows if row.get(key) is not None]
        if not measured:
            continue
        unit = _Unit.of(key, max(abs(value) for value in measured))
        ends = [end for row in outcome.rows if (pair := spread(row, key)) is not None for end in pair]
        top = max([*measured, *ends, 0.0]) / unit.divisor
        title = f"{titles.get(key, key)} ({unit.name})" if unit.name else titles.get(key, key)
        beside = []
        for panel in panels:
            rows = [row for row in outcome.rows if tuple(row.get(each) for each in plot.panels) == panel]
            head = ", ".join(
                f"{titles.get(each, each)} {shown(each, value)}"
                for each, value in zip(plot.panels, panel, strict=True)
                if value is not None
            )
            data = [_datum(row, key, plot, unit, titles) for row in rows if row.get(key) is not None]
            name = f"data{len(datasets)}"
            datasets[name] = data
            if plot.x is None:
                chart = _bars(name, data, title=title, labels=labels, top=top)
            else:
                chart = _lines(name, data, title=title, labels=labels, top=top, x_title=titles.get(plot.x, plot.x))
            spec: dict[str, Any] = chart.to_dict(validate=False, format="vega-lite")
            for needless in ("$schema", "config"):
                spec.pop(needless, None)
            spec["width"] = _WIDTH if len(panels) == 1 else _PANEL_WIDTH
            if head:
                spec["title"] = {"text": head, "fontSize": 12, "anchor": "start", "fontWeight": "normal"}
            beside.append(spec)
        found.append(beside[0] if len(beside) == 1 else {"hconcat": beside, "spacing": 24})
    return found


def _label(row: Mapping[str, Any], keys: Sequence[str], titles: Mapping[str, str]) -> str:
    return ", ".join(
        value if isinstance(value := row[key], str) else f"{titles.get(key, key)} {shown(key, value)}"
        for key in keys
        if row.get(key) not in (None, "")
    )


def _datum(
    row: Mapping[str, Any], key: str, plot: Plot, unit: _Unit, titles: Mapping[str, str]
) -> dict[str, Any]:
    low, high = spread(row, key) or (row[key], row[key])
    x = None if plot.x is None else row.get(plot.x)
    return {
        "s": _label(row, plot.series, titles),
        "x": x,
        "xt": "" if x is None or plot.x is None else shown(plot.x, x),
        "y": float(row[key]) / unit.divisor,
        "a": float(low) / unit.divisor,
        "b": float(high) / unit.divisor,
        "t": shown(key, row[key]),
    }


def _colour(labels: Sequence[str], *, legend: bool) -> altair.Color:
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(labels))]
    return altair.Color(
        "s:N",
        scale=altair.Scale(domain=list(labels), range=colours),
        legend=altair.Legend(title=None, symbolType="stroke", symbolSize=300, columns=3) if legend else None,
    )


def _lines(
    name: str, data: Sequence[Mapping[str, Any]], *, title: str, labels: Sequence[str], top: float, x_title: str
) -> Any:
    """Lines over ``x``; what has none lies across. The spread is a stroke at each point."""
    base = altair.Chart(altair.NamedData(name=name))
    found = sorted({row["x"]: row["xt"] for row in data if row["x"] is not None}.items())
    texts = ", ".join(f"'{value}': '{text}'" for value, text in found)
    x = altair.X(
        "x:Q", title=x_title,
        scale=altair.Scale(type="log", base=2) if all(value > 0 for value, _ in found) else altair.Scale(),
        axis=altair.Axis(values=[value for value, _ in found], labelExpr=f"({{{texts}}})[datum.value]", grid=False),
    )
    scale = altair.Scale(domain=[0, 1.05 * top or 1.0], nice=False)
    y = altair.Y("y:Q", title=title, scale=scale, axis=altair.Axis(tickCount=5))
    legend = len(labels) > 1
    colour = _colour(labels, legend=legend)
    dash = altair.StrokeDash(
        "s:N",
        scale=altair.Scale(
            domain=list(labels),
            range=[_DASHES[number // len(_COLOURS) % len(_DASHES)] for number in range(len(labels))],
        ),
        legend=altair.Legend(title=None, symbolType="stroke", symbolSize=300, columns=3) if legend else None,
    )
    over = base.transform_filter("isValid(datum.x)")
    across = base.transform_filter("!isValid(datum.x)")
    layers = [
        over.mark_line(aria=False).encode(x=x, y=y, color=colour, strokeDash=dash),
        over.mark_rule(aria=False).encode(x=x, y=altair.Y("a:Q", scale=scale), y2="b:Q", color=colour),
        over.mark_point(filled=True, size=30, aria=False).encode(x=x, y=y, color=colour),
        across.mark_rule(aria=False, strokeWidth=1.5, strokeDash=[6, 4]).encode(y=y, color=colour),
    ]
    return altair.layer(*layers).properties(height=_LINES_HEIGHT)


def _bars(
    name: str, data: Sequence[Mapping[str, Any]], *, title: str, labels: Sequence[str], top: float
) -> Any:
    """A bar a row, with its value; the spread is a stroke over its end."""
    base = altair.Chart(altair.NamedData(name=name)).encode(
        y=altair.Y("s:N", title=None, sort=None, axis=altair.Axis(ticks=False, domain=False, labelLimit=260))
    )
    scale = altair.Scale(domain=[0, 1.3 * top or 1.0], nice=False)
    x = altair.X("y:Q", title=title, scale=scale, axis=altair.Axis(tickCount=5))
    colour = _colour(labels, legend=False)
    layers = [
        base.mark_bar(height=altair.RelativeBandSize(0.66), aria=False).encode(x=x, color=colour),
        base.mark_rule(aria=False, color="@ink", strokeWidth=1.5).encode(x=altair.X("a:Q", scale=scale), x2="b:Q"),
        base.mark_text(align="left", dx=6, color="@ink", aria=False).encode(
            x=altair.X("b:Q", scale=scale), text="t:N"
        ),
    ]
    return altair.layer(*layers).properties(height=_BAR_HEIGHT * max(1, len({row["s"] for row in data})))


# --- files ------------------------------------------------------------------------------------------------------------


def _in_both_themes(svg: str) -> str:
    """The picture with colours for a dark theme beside its own. Viewers that know no styles show the light ones."""
    light, dark = PALETTES["light"], PALETTES["dark"]
    rules = "".join(
        f'[{what}="{light[name]}"]{{{what}:{dark[name]}}}' for name in light for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    start = svg.index(">") + 1
    return svg[:start] + style + svg[start:]


def _page(outcome: Outcome, svg: str) -> str:
    """A page that needs nothing else: the picture, and every number of the table."""
    heads = "".join(f"<th>{html.escape(column.title)}</th>" for column in outcome.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(shown(each.key, row.get(each.key)))}</td>" for each in outcome.columns)
        + "</tr>"
        for row in outcome.rows
    )  # fmt: skip
    colours = {name: "".join(f"--{key}:{value};" for key, value in each.items()) for name, each in PALETTES.items()}
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>hoist bench {html.escape(outcome.name)}</title>
<link rel="icon" href="data:,">
<style>:root{{{colours["light"]}}}@media (prefers-color-scheme: dark){{:root{{{colours["dark"]}}}}}
body{{margin:0 auto;max-width:1000px;padding:12px;background:var(--paper);color:var(--ink);
font:14px/1.5 system-ui,sans-serif}}
svg{{display:block;max-width:100%;height:auto}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{padding:3px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}}
th:first-child,td:first-child{{text-align:left}}
pre{{white-space:pre-wrap}}</style>
</head>
<body>
{svg}
<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>
<pre>{html.escape(outcome.command)}</pre>
</body>
</html>
"""
