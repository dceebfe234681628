"""A report as one HTML file that needs nothing else: the charts' library, data, styles and tables are all within it.

What it says is `parts.Report`; the same charts as a picture are `picture.py`'s. A policy in the
page itself forbids every request and every script but the two that it was made with.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import vl_convert

from hoist.tools.run_report.charts import PALETTES, coloured, config
from hoist.tools.run_report.looks import SCRIPT, STYLE
from hoist.tools.run_report.parts import Cell, Figure, Report, Section, Table, Unit, shown


def page(report: Report) -> str:
    """The page. Every text of the report is escaped."""
    figures = [figure for section in report.sections for figure in section.figures]
    data = {
        "config": {**_in_variables(config()), "font": "system-ui, sans-serif"},
        "figures": {figure.key: _embedded(figure) for figure in figures},
    }
    scripts = (_library(), SCRIPT)
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    cards = "".join(f"<div><dt>{_text(what)}</dt><dd>{_text(value)}</dd></div>" for what, value in report.cards)
    about = "".join(f"<dt>{_text(what)}</dt><dd>{_text(value)}</dd>" for what, value in report.about)
    links = "".join(f'<a href="#{_text(section.key)}">{_text(section.title)}</a>' for section in report.sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{_text(report.title)}</title>
<link rel="icon" href="data:,">
<style>{_variables()}{STYLE}</style>
</head>
<body>
<header>
<div class="top"><h1>{_text(report.title)}</h1>
<button id="theme" type="button" aria-label="Switch between light and dark">light / dark</button></div>
<p class="sub">{_text(report.subtitle)}</p>
<dl class="cards">{cards}</dl>
<details class="about"><summary>Model, settings, machine</summary><dl>{about}</dl></details>
<nav aria-label="Sections">{links}</nav>
<noscript><p class="words">Charts need JavaScript; every table is here without it.</p></noscript>
</header>
<main>
{"".join(map(_section, report.sections))}
</main>
<script type="application/json" id="report">{_json(data)}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _json(document: Mapping[str, Any]) -> str:
    """JSON that no browser takes for markup."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


#: What the bundle leaves to other scripts of the page.
_GLOBALS = "window.vegaEmbed = vegaEmbed;"


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, in which nothing ends the element that it is in."""
    bundle: str = vl_convert.javascript_bundle(_GLOBALS)
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r", "")


def _variables() -> str:
    """The palettes as variables of the page: by the system's preference, by the button, and light on paper."""

    def rules(name: str) -> str:
        return f"color-scheme:{name};" + "".join(f"--{colour}:{value};" for colour, value in PALETTES[name].items())

    return (
        f":root{{{rules('light')}}}"
        f"@media (prefers-color-scheme: dark){{:root{{{rules('dark')}}}}}"
        f':root[data-theme="light"]{{{rules("light")}}}:root[data-theme="dark"]{{{rules("dark")}}}'
        f"@media print{{:root,:root[data-theme]{{{rules('light')}}}}}\n"
    )


def _in_variables(document: Mapping[str, Any]) -> Any:
    """The specification with colours that follow the page's."""
    return coloured(document, {name: f"var(--{name})" for name in PALETTES["light"]})


def _embedded(figure: Figure) -> dict[str, Any]:
    return {
        **_in_variables(figure.chart.spec),
        "description": figure.alt,
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "datasets": figure.chart.datasets,
    }


def _section(section: Section) -> str:
    words = "".join(f'<p class="words">{_text(word)}</p>' for word in section.words)
    figures = "".join(_figure(figure, wide=wide) for figure, wide in _placed(section))
    title = _text(section.title)
    return f'<section id="{_text(section.key)}"><h2>{title}</h2>{words}<div class="figures">{figures}</div></section>\n'


def _placed(section: Section) -> Iterator[tuple[Figure, bool]]:
    """The figures, and whether each takes the width of the page: big ones, and those that would stand alone."""
    is_left = True
    figures = section.figures
    for figure, after in zip(figures, [*figures[1:], None], strict=False):
        wide = figure.chart.big or (is_left and (after is None or after.chart.big))
        is_left = wide or not is_left
        yield figure, wide


def _figure(figure: Figure, *, wide: bool) -> str:
    notes = "".join(f"<li>{_text(note)}</li>" for note in figure.notes)
    key = _text(figure.key)
    return (
        f'<figure id="figure-{key}" class="{"big" if wide else "small"}">'
        f"<figcaption><h3>{_text(figure.title)}</h3></figcaption>"
        f'<div role="img" aria-label="{_text(figure.alt)}. {_text(figure.title)}."><div class="chart" id="chart-{key}" '
        f'style="min-height:{figure.chart.height + 60}px"></div></div>'
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}{_table(figure)}</figure>"
    )


def _table(figure: Figure) -> str:
    table: Table = figure.table
    many = "1 row" if len(table.rows) == 1 else f"{len(table.rows):,} rows"
    head = "".join(
        f'<th scope="col"{_alignment(column.unit)}>{_text(column.name)}</th>' for column in table.columns
    )
    units = [column.unit for column in table.columns]
    body = "".join(
        "<tr>" + "".join(_cell(value, unit) for value, unit in zip(row, units, strict=True)) + "</tr>"
        for row in table.rows
    )
    note = f'<p class="words">{_text(table.note)}</p>' if table.note else ""
    return (
        f"<details><summary>Numbers ({many})</summary>{note}"
        f'<div class="scroll" tabindex="0"><table id="table-{_text(figure.key)}">'
        f"<caption>{_text(figure.title)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _alignment(unit: Unit) -> str:
    return ' class="t"' if unit is Unit.TEXT else ""


def _cell(value: Cell, unit: Unit) -> str:
    """A cell; where the text is rounded, the number itself is an attribute of it."""
    text = shown(value, unit)
    exact = ""
    if isinstance(value, int | float) and text.replace(",", "") != repr(value):
        exact = f' data-value="{value!r}"'
    return f"<td{_alignment(unit)}{exact}>{_text(text)}</td>"
