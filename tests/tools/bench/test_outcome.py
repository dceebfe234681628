"""Outcomes as people and programs see them: units a column, no number ever cut, a stable document."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from hoist.tools.bench.machine import Machine, load_note, look
from hoist.tools.bench.outcome import Column, Outcome, column_texts, show, write
from hoist.tools.errors import BenchError


@pytest.fixture(scope="module")
def machine() -> Machine:
    return look(Path())


def outcome(machine: Machine, num_columns: int, value: float = 1234.0) -> Outcome:
    keys = [f"k{number}_seconds" for number in range(num_columns)]
    return Outcome(
        name="x", about="One thing with another.", command="hoist bench x", machine=machine, settings={"a": 1},
        columns=(Column(key="what", title="what"), *(Column(key=key, title=f"title {key}") for key in keys)),
        rows=({"what": "a side of two words", **{key: value + number for number, key in enumerate(keys)}},),
        notes=("long " * 40,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "values", "unit", "texts"),
    [
        ("block_bytes", [2**20, 16 * 2**20, None], "MiB", ["1", "16", ""]),
        ("peak_bytes", [300 * 2**20, 5 * 2**30], "GiB", ["0.293", "5.000"]),
        ("tiny_bytes", [512, 2**30], "MiB", ["0.000", "1,024.000"]),
        ("read_bytes_per_second", [0.84e9, 2.1e9], "GB/s", ["0.840", "2.100"]),
        ("bytes_per_second", [64e6, 2.1e9], "MB/s", ["64.0", "2,100.0"]),
        ("parameters_per_second", [0.65e9, 1.8e9], "G/s", ["0.650", "1.800"]),
        ("tokens_per_second", [1234, 150_000.4], "/s", ["1,234", "150,000"]),
        ("step_seconds", [5.8, 0.42], "s", ["5.800", "0.420"]),
        ("stall_seconds", [0.0, 0.0042], "ms", ["0.00", "4.20"]),
        ("fio_ratio", [0.9512, 1], "", ["0.951", "1.000"]),
        ("threads", [1, 16], "", ["1", "16"]),
        ("same", [True, None], "", ["yes", ""]),
        ("nothing_seconds", [None], "µs", [""]),
    ],
)
def test_a_column_has_one_unit(key: str, values: list[float | None], unit: str, texts: list[str]) -> None:
    assert column_texts(key, values) == (unit, texts)


@pytest.mark.parametrize("num_columns", [3, 20])
def test_no_number_is_cut_in_a_pipe(machine: Machine, num_columns: int) -> None:
    written = io.StringIO()
    show(outcome(machine, num_columns), Console(file=written, width=80))
    text = written.getvalue()
    for number in range(num_columns):
        assert f" {1234 + number:,}" in text
    assert "…" not in text
    if num_columns == 3:
        assert max(len(line) for line in text.splitlines()) <= 80


def test_the_document_has_what_the_docstring_says(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    found = outcome(machine, 2)
    write(found, path)
    document = json.loads(path.read_text())
    assert document["format_version"] == 1
    assert set(document) == {"format_version", *(field.name for field in dataclasses.fields(Outcome))}
    assert document["rows"] == [dict(found.rows[0])]
    assert document["columns"][0] == {"key": "what", "title": "what"}
    assert document["machine"]["drives"] == list(machine.drives)
    with pytest.raises(BenchError, match=r"--output .*: Is a directory"):
        write(found, tmp_path)


def test_what_is_no_number_is_not_written(machine: Machine) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        outcome(machine, 1, math.nan).to_text()


@pytest.mark.parametrize(("load", "noted"), [(0.5, False), (0.6, True)])
def test_a_busy_machine_is_told(machine: Machine, load: float, noted: bool) -> None:
    notes = load_note(dataclasses.replace(machine, load=load))
    assert bool(notes) == noted
    assert all("load 0.6" in note for note in notes)
