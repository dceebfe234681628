"""The kinds of charts of a report, as Vega-Lite specifications made with Altair: curves, bars, stretches.

Colours are names ("@blue"), which the page and the picture replace by theirs. What is drawn is said elsewhere:
`run.py` and `step.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair

#: A row of data; names are short, as each is written for every row.
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One view, without title and width."""

    spec: Mapping[str, Any]
    """Vega-Lite, its data by name."""
    datasets: Mapping[str, Sequence[Row]]
    height: int
    """Pixels, without the axes."""
    big: bool = False
    """It needs the width of the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One curve; a point without y is a gap."""

    label: str
    colour: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False
    """Something else than measured: a prediction, a limit."""
    dots: bool = False
    """Every point is marked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar, or a part of one."""

    label: str
    value: float
    part: str
    """What it is coloured by."""
    shown: str
    """The value with its unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stretch in a row of a chart over time."""

    row: str
    start: float
    stop: float
    what: str
    """What it is coloured by."""
    told: str = ""
    """More on it, when it is pointed at."""


def curves(
    name: str, found: Sequence[Curve], *, x_title: str, y_title: str, log_y: bool = False, log_x: bool = False,
    from_zero: bool = False, whole_x: bool = True, height: int = 220, big: bool = False,
    mark: tuple[float, float, str] | None = None,
) -> Chart:
    """Curves over a common axis. ``mark``: a point to be marked, with its label. ``whole_x``: x are step numbers."""
    found = [curve for curve in found if curve.points]
    rows: list[dict[str, Any]] = [
        {"x": x, "y": y, "s": curve.label, "d": int(curve.dots or len(curve.points) == 1)}
        for curve in found
        for x, y in curve.points
    ]
    labels = [curve.label for curve in found]
    x_scale = altair.Scale(type="log") if log_x else altair.Scale(nice=False, zero=False)
    x_axis = altair.Axis(tickMinStep=1, format="~d") if whole_x else altair.Axis(format="~s", tickCount=5)
    y_scale = altair.Scale(type="log") if log_y else altair.Scale(zero=from_zero)
    x = altair.X("x:Q", title=x_title, scale=x_scale, axis=x_axis)
    highest = max((abs(row["y"]) for row in rows if row["y"] is not None), default=0.0)
    y_axis = altair.Axis(format="~s" if highest >= 10_000 and not log_y else ",.4~r", tickCount=5)
    y = altair.Y("y:Q", title=y_title, scale=y_scale, axis=y_axis)
    legend = None if len(found) == 1 else altair.Legend(title=None, symbolType="stroke", symbolSize=300)
    colour = altair.Color(
        "s:N", scale=altair.Scale(domain=labels, range=[curve.colour for curve in found]), legend=legend
    )
    dash = altair.StrokeDash(
        "s:N",
        scale=altair.Scale(domain=labels, range=[[5, 4] if curve.dashed else [1, 0] for curve in found]),
        legend=legend,
    )
    tooltip = [
        altair.Tooltip("s:N", title="what"),
        altair.Tooltip("x:Q", title=x_title, format="~d" if whole_x else ",.4~g"),
        altair.Tooltip("y:Q", title=y_title, format=",.5~g"),
    ]
    near = altair.selection_point(
        name=f"{name}_near", nearest=True, on="pointerover", fields=["x"], empty=False, clear="pointerout"
    )
    base = altair.Chart(altair.NamedData(name=name)).encode(x=x, y=y, color=colour)
    line = base.mark_line(aria=False, clip=False).encode(strokeDash=dash)
    points = (
        base.mark_point(filled=True, size=36, aria=False)
        .encode(
            opacity=altair.condition(near, altair.value(1.0), altair.Opacity("d:Q", scale=None, legend=None)),
            tooltip=tooltip,
        )
        .transform_filter("isValid(datum.y)")
        .add_params(near)
    )
    layers: list[Any] = [line, points]
    datasets: dict[str, Sequence[Row]] = {name: rows}
    if mark is not None:
        datasets[f"{name}_mark"] = [{"x": mark[0], "y": mark[1], "t": mark[2]}]
        marked = altair.Chart(altair.NamedData(name=f"{name}_mark")).encode(x=x, y=y)
        layers.append(
            marked.mark_point(shape="diamond", size=130, filled=True, color="@ink", aria=False).encode(
                tooltip=[altair.Tooltip("t:N", title="marked")]
            )
        )
        # The label is on the side where the curve is not.
        _, nearest = min(((abs(x - mark[0]), y) for x, y in found[0].points if y is not None), default=(0.0, 0.0))
        above = mark[1] >= nearest
        layers.append(marked.mark_text(dy=-15 if above else 17, color="@ink", aria=False).encode(text="t:N"))
    return _chart(altair.layer(*layers), datasets, height=height, big=big)


def bars(
    name: str, found: Sequence[Bar], *, title: str, colours: Mapping[str, str], legend: bool = True,
    top: float | None = None, format: str = "~s", labelled: bool = True,
) -> Chart:
    """Horizontal bars, a row a label, the parts of one after each other. ``top``: end of the axis."""
    labels = list(dict.fromkeys(bar.label for bar in found))
    parts = [part for part in colours if any(bar.part == part for bar in found)]
    rows = [
        {"l": bar.label, "v": bar.value, "p": bar.part, "t": bar.shown, "o": parts.index(bar.part)} for bar in found
    ]
    largest = max((bar.value for bar in found), default=0.0)
    scale = altair.Scale(domain=[0, top if top is not None else 1.55 * largest or 1.0], nice=False)
    base = altair.Chart(altair.NamedData(name=name)).encode(
        y=altair.Y("l:N", title=None, sort=labels, axis=altair.Axis(ticks=False, domain=False)),
        x=altair.X(
            "v:Q", title=title, scale=scale, stack="zero" if not labelled else None,
            axis=altair.Axis(format=format, tickCount=5),
        ),
        tooltip=[
            altair.Tooltip("l:N", title="what"), altair.Tooltip("p:N", title="part"),
            altair.Tooltip("t:N", title="amount"),
        ],
        order=altair.Order("o:Q"),
    )  # fmt: skip
    shown = base.mark_bar(height=altair.RelativeBandSize(0.66), aria=False).encode(
        color=altair.Color(
            "p:N",
            scale=altair.Scale(domain=parts, range=[colours[part] for part in parts]),
            legend=altair.Legend(title=None) if legend and len(parts) > 1 else None,
        )
    )
    layers = [shown]
    if labelled:
        layers.append(base.mark_text(align="left", dx=5, color="@ink", aria=False).encode(text="t:N"))
    return _chart(altair.layer(*layers), {name: rows}, height=26 * max(1, len(labels)))


def spans(
    name: str, found: Sequence[Span], *, rows: Sequence[str], colours: Mapping[str, str], x_title: str, stop: float,
    row_height: int = 12, big: bool = True, y_title: str | None = None, narrow: bool = False,
) -> Chart:
    """Rows over time, each with coloured stretches; data is in order of ``rows``."""
    kinds = [kind for kind in colours if any(span.what == kind for span in found)]
    data = [
        {"r": span.row, "a": round(span.start, 6), "b": round(span.stop, 6), "k": span.what, "t": span.told}
        for span in found
    ]
    every = -(-len(rows) // 16) if row_height < 10 else 1
    axis = altair.Axis(
        ticks=False,
        domain=False,
        labelLimit=70 if narrow else 130,
        labelOverlap=False,
        values=[row for number, row in enumerate(rows) if number % every == 0],
    )
    chart = (
        altair.Chart(altair.NamedData(name=name))
        .mark_bar(aria=False, height=altair.RelativeBandSize(0.88))
        .encode(
            x=altair.X(
                "a:Q", title=x_title, scale=altair.Scale(domain=[0, stop], nice=False),
                axis=altair.Axis(tickCount=10 if big else 6, labelOverlap=True),
            ),
            x2=altair.X2("b:Q"),
            y=altair.Y("r:N", title=y_title, sort=None, scale=altair.Scale(domain=list(rows)), axis=axis),
            color=altair.Color(
                "k:N",
                scale=altair.Scale(domain=kinds, range=[colours[kind] for kind in kinds]),
                legend=altair.Legend(title=None),
            ),
            tooltip=[
                altair.Tooltip("r:N", title="row"), altair.Tooltip("k:N", title="what"),
                altair.Tooltip("a:Q", title="from (s)", format=".4f"),
                altair.Tooltip("b:Q", title="to (s)", format=".4f"), altair.Tooltip("t:N", title="more"),
            ],
        )
    )  # fmt: skip
    return _chart(chart, {name: data}, height=row_height * max(1, len(rows)), big=big)


def _chart(chart: Any, datasets: Mapping[str, Sequence[Row]], *, height: int, big: bool = False) -> Chart:
    spec = chart.to_dict(validate=False, format="vega-lite")  # tests validate; here it would take half the time
    for key in ("$schema", "config", "datasets"):
        spec.pop(key, None)
    return Chart(spec={**spec, "height": height}, datasets=datasets, height=height, big=big)


# --- looks ------------------------------------------------------------------------------------------------------------

#: Colours by name, light and dark. Hues are those of Okabe and Ito (2008), which colour-blind people can tell apart;
#: what must be told apart within a hue (where something is, whether it has changed) differs in lightness.
PALETTES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "paper": "#ffffff", "panel": "#f6f8fa", "ink": "#1c2128", "muted": "#57606a", "line": "#d5dae0",
        "grid": "#e8ebef", "pale": "#dfe4ea", "blue": "#0072b2", "sky": "#56b4e9", "mist": "#b5dcf5",
        "vermilion": "#d55e00", "amber": "#e69f00", "cream": "#f8dca0", "green": "#009e73", "pink": "#cc79a7",
        "grey": "#8c959f",
    },
    "dark": {
        "paper": "#11151a", "panel": "#1a2027", "ink": "#e8edf2", "muted": "#a3aeb9", "line": "#39424c",
        "grid": "#262e37", "pale": "#2f3842", "blue": "#2f8fd0", "sky": "#7cc6f2", "mist": "#35566e",
        "vermilion": "#f27d26", "amber": "#f0b429", "cream": "#6e5a2a", "green": "#23b88d", "pink": "#dd93bb",
        "grey": "#7d8792",
    },
}  # fmt: skip


def config() -> dict[str, Any]:
    """Vega-Lite's configuration for all charts, with colours by name."""
    return {
        "background": "transparent",
        "view": {"stroke": None},
        "axis": {
            "labelColor": "@muted", "titleColor": "@muted", "titleFontWeight": "normal", "gridColor": "@grid",
            "domainColor": "@line", "tickColor": "@line", "labelFontSize": 11, "titleFontSize": 11, "labelLimit": 190,
        },
        "legend": {
            "orient": "top", "direction": "horizontal", "labelColor": "@ink", "labelFontSize": 11, "columns": 4,
            "symbolStrokeWidth": 2, "labelLimit": 220, "offset": 8, "columnPadding": 14,
        },
        "title": {"color": "@ink", "subtitleColor": "@muted"},
        "text": {"fontSize": 11},
        "line": {"strokeWidth": 1.8, "strokeJoin": "round"},
    }  # fmt: skip


def coloured(document: Any, colours: Mapping[str, str]) -> Any:
    """The specification with each colour's name replaced; ``colours`` by name without the ``@``."""
    if isinstance(document, str):
        return colours[document[1:]] if document.startswith("@") and document[1:] in colours else document
    if isinstance(document, Mapping):
        return {key: coloured(value, colours) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [coloured(value, colours) for value in document]
    return document
