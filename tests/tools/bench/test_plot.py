"""Plots of outcomes: what is drawn, that all of it is there, in which formats and colours; and outcomes read again."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair
import pytest
from typer.main import get_command

from hoist.tools.bench.machine import Machine
from hoist.tools.bench.outcome import Column, Outcome, Plot, write
from hoist.tools.bench.plot import FORMATS, drawn, specification
from hoist.tools.bench.plot_choice import chosen, spread
from hoist.tools.bench.reading import read
from hoist.tools.commands.bench import app
from hoist.tools.commands.bench.measuring import Telling, measured
from hoist.tools.errors import BenchError, OutcomeError
from hoist.tools.run_report.charts import PALETTES
from tests.support.commands import hoist

MACHINE = Machine(
    processor="A <fine> processor", cores=2, threads=2, memory_bytes=2**34, accelerators=(), kernel="6.1",
    directory="/", file_system="ext4", drives=(), versions={"hoist": "0"}, load=0.0, made="2026-01-01 00:00 UTC",
)  # fmt: skip
COLUMNS = {"engine": "engine", "depth": "in flight", "read_bytes_per_second": "read", "fio_ratio": "read / fio"}


def outcome(*rows: Mapping[str, Any], plot: Plot | None = None, columns: Mapping[str, str] = COLUMNS) -> Outcome:
    return Outcome(
        name="io", about="a < b", command="hoist bench io", machine=MACHINE, settings={"rounds": 2}, plot=plot,
        columns=tuple(Column(key=key, title=title) for key, title in columns.items()), rows=rows, notes=("a note",),
    )  # fmt: skip


def rows(depths: int) -> list[dict[str, Any]]:
    return [
        {
            "engine": engine, "depth": 2**depth, "read_bytes_per_second": rate * 1e9, "fio_ratio": None,
            "read_low_bytes_per_second": 0.9e9 * rate, "read_high_bytes_per_second": 1.1e9 * rate,
        }
        for depth in range(depths)
        for engine, rate in (("direct", 2.5 + depth), ("fio", 3.5 + depth))
    ]  # fmt: skip


def test_many_values_of_a_number_are_an_axis_and_few_are_panels() -> None:
    read = ("read_bytes_per_second",)
    assert chosen(outcome(*rows(3))) == Plot(y=read, x="depth", series=("engine",))
    assert chosen(outcome(*rows(2))) == Plot(y=read, x=None, series=("engine",), panels=("depth",))
    assert chosen(outcome(*rows(1))) == Plot(y=read, x=None, series=("engine",))


def test_the_benchmark_has_the_say_and_nothing_measured_is_nothing_drawn() -> None:
    plot = Plot(y=("fio_ratio",), series=("engine",))
    assert chosen(outcome(*rows(3), plot=plot)) is plot
    nothing = outcome({"engine": "direct", "depth": 1, "read_bytes_per_second": None})
    assert chosen(nothing) is None
    assert b"Nothing was measured" in drawn(nothing, ".svg")


def test_a_spread_stands_beside_its_median() -> None:
    assert spread(rows(1)[0], "read_bytes_per_second") == (0.9e9 * 2.5, 1.1e9 * 2.5)
    measured = {"step_seconds": 2.0, "step_low_seconds": 1.0, "step_high_seconds": 3.0}
    assert spread(measured, "step_seconds") == (1.0, 3.0)
    assert spread({"step_seconds": 2.0}, "step_seconds") is None


def shapes(svg: str, kind: str) -> int:
    """Marks of a kind that are data."""
    groups = re.findall(rf'<g class="mark-{kind} role-mark[^>]*>(.*?)</g>', svg, flags=re.DOTALL)
    return sum(group.count("<path") + group.count("<line") + group.count("<text") for group in groups)


def test_a_line_has_every_point_and_its_spread() -> None:
    svg = drawn(outcome(*rows(3)), ".svg").decode()
    assert (shapes(svg, "line"), shapes(svg, "symbol"), shapes(svg, "rule")) == (2, 6, 6)
    for text in ("hoist bench io", "a &lt; b", "a note", "A &lt;fine&gt; processor", "read (GB/s)", "in flight"):
        assert text in svg, text


def test_what_has_no_place_on_the_axis_lies_across() -> None:
    svg = drawn(outcome(*rows(3), {"engine": "a copy", "depth": None, "read_bytes_per_second": 3e9}), ".svg").decode()
    assert (shapes(svg, "line"), shapes(svg, "symbol"), shapes(svg, "rule")) == (2, 6, 7)


def test_every_bar_has_its_value_and_its_spread() -> None:
    svg = drawn(outcome(*rows(2)), ".svg").decode()
    assert (shapes(svg, "rect"), shapes(svg, "rule"), shapes(svg, "text")) == (4, 4, 4)
    for text in ("2.50 GB/s", "4.50 GB/s", "in flight 1", "in flight 2"):
        assert text in svg, text


def test_too_many_panels_are_series() -> None:
    columns = {"engine": "engine", "threads": "threads", "depth": "in flight", "read_bytes_per_second": "read"}
    for depths, series, panels in ((4, ("engine",), ("depth",)), (5, ("engine", "depth"), ())):
        many = [row | {"threads": threads} for row in rows(depths) for threads in range(6)]
        found = chosen(outcome(*many, columns=columns))
        assert found == Plot(y=("read_bytes_per_second",), x="threads", series=series, panels=panels)


def test_a_row_a_measure_becomes_a_bar_a_side() -> None:
    def measured(what: str, unit: str, *values: float) -> dict[str, Any]:
        spreads = {
            side: {"median": value, "low": 0.9 * value, "high": 1.1 * value, "count": 3}
            for side, value in zip(("hoist", "other"), values, strict=False)
        }
        return {"measure": what, "unit": unit, "hoist": "in words", "spreads": {"other": None} | spreads}

    turned = outcome(
        measured("step", "seconds", 2.0, 5.0), measured("peak memory", "bytes", 2**28, 2**30),
        measured("save", "seconds", 1.0), columns={"measure": "", "hoist": "hoist", "other": "The Other"},
    )  # fmt: skip
    svg = drawn(turned, ".svg").decode()
    assert (shapes(svg, "rect"), shapes(svg, "rule"), shapes(svg, "text")) == (5, 5, 5)
    for text in ("The Other", "5.00 s", "256", "GiB", "peak memory (GiB)", "save (s)"):
        assert text in svg, text


@pytest.mark.parametrize("depths", [2, 3])
def test_charts_are_valid(depths: int) -> None:
    altair.Chart.from_dict(specification(outcome(*rows(depths))), validate=True)


@pytest.mark.parametrize("depths", [2, 3])
def test_every_colour_has_another_in_the_dark(depths: int) -> None:
    svg = drawn(outcome(*rows(depths)), ".svg").decode()
    used = set(re.findall(r'[ "](fill|stroke)="(#[^"]+)"', svg))
    assert len(used) > 4
    for what, colour in used:
        assert f'[{what}="{colour}"]{{{what}:' in svg, colour
    for name, colour in PALETTES["light"].items():
        assert f'[fill="{colour}"]{{fill:{PALETTES["dark"][name]}}}' in svg


def test_a_page_has_the_picture_and_the_table_and_a_png_is_one() -> None:
    page = drawn(outcome(*rows(2)), ".html").decode()
    assert page.count("<tr>") == 5
    assert "<td>4.50 GB/s</td>" in page
    assert "<svg" in page
    assert "<script" not in page
    assert drawn(outcome(*rows(2)), ".png").startswith(b"\x89PNG")


# --- outcomes read again ----------------------------------------------------------------------------------------------


def test_what_was_written_is_read(tmp_path: Path) -> None:
    for number, plot in enumerate((None, Plot(y=("fio_ratio",), series=("engine",)))):
        path = tmp_path / f"{number}.json"
        write(outcome(*rows(2), plot=plot), path)
        assert read(path) == outcome(*rows(2), plot=plot)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("no JSON", "is no JSON"),
        ("[1]", "is no outcome of hoist bench: it has no format_version"),
        ('{"step": 1}', "is no outcome of hoist bench: it has no format_version"),
        ('{"format_version": 2}', "format_version is 2, and this hoist reads up to 1; update hoist"),
        ('{"format_version": 1, "rows": [{"a": NaN}]}', "is no JSON: NaN is no number of it"),
        ('{"format_version": 1}', "is no whole outcome of hoist bench: rows is no list of objects"),
        ('{"format_version": 1, "rows": [], "name": 1}', "is no whole outcome of hoist bench: name is no text"),
        (
            '{"format_version": 1, "rows": [], "name": "", "about": "", "command": "", "machine": {}}',
            "is no whole outcome of hoist bench: machine: missing",
        ),
    ],
)
def test_what_is_no_outcome_is_refused_in_a_line(
    tmp_path: Path, text: str | None, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OutcomeError, match=re.escape(message)):
        read(path)
    assert message in hoist(capfd, "bench", "show", path).refusal()


# --- commands ---------------------------------------------------------------------------------------------------------


def test_show_shows_and_draws_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(outcome(*rows(2)), tmp_path / "io.json")
    for kind in FORMATS:
        found = hoist(capfd, "bench", "show", tmp_path / "io.json", "--plot", tmp_path / f"io{kind}")
        assert (found.code, found.err) == (0, "")
        assert "4.50" in found.out
        assert (tmp_path / f"io{kind}").read_bytes() == drawn(outcome(*rows(2)), kind)


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*plot: object) -> str:
        return hoist(capfd, "bench", "io", tmp_path, *plot).refusal()

    assert "a plot is a file that ends in .svg, .png, .html" in refused("--plot", tmp_path / "a.jpg")
    assert "is not a directory; make it first" in refused("--plot", tmp_path / "none" / "a.png")
    assert "is not a directory; make it first" in refused("--output", tmp_path / "none" / "a.json")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert re.search("--plot needs vl_convert, which is not installed: .* install altair", refused("--plot", "a.png"))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_in_the_end_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What was looked at before may have changed, after an hour of measuring."""
    target = tmp_path / "found.json"

    def measure(telling: Telling) -> Outcome:
        target.mkdir()
        return outcome(*rows(1))

    with pytest.raises(BenchError, match=r"--output .*: Is a directory"):
        measured(measure, unit="runs", output=target, plot=None, as_json=True)
    assert json.loads(capfd.readouterr().out)["name"] == "io"


def test_an_outcome_that_is_none_of_its_name_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(replace(outcome(*rows(1)), name="step"), tmp_path / "step.json")
    found = hoist(capfd, "bench", "show", tmp_path / "step.json")
    assert found.code == 2
    assert "its rows have no 'how', as those of hoist bench step have" in found.err


def test_every_benchmark_can_be_drawn() -> None:
    commands = getattr(get_command(app), "commands")  # noqa: B009  # click's group has them, typer's type does not
    assert {"io", "optim", "show"} <= commands.keys()
    for name, command in commands.items():
        options = {option for each in command.params for option in each.opts}
        assert {"--plot", "--json"} <= options, name
        assert "Example" in command.epilog, name
