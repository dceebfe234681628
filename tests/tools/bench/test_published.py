"""docs/benchmarks.md shows what its files say, as `hoist bench show` does, and has every file that is kept there."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hoist.tools.bench.outcome import show
from hoist.tools.bench.reading import read
from tests.check_types import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
FILES = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
#: A block of output, with the comment before it that names its file.
_SHOWN = re.compile(r"^<!-- shown: (?P<name>\S+) -->\n```\n(?P<text>.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_table_is_what_its_file_says(path: Path) -> None:
    shown = {found["name"]: found["text"] for found in _SHOWN.finditer(PAGE.read_text(encoding="utf-8"))}
    told = StringIO()
    show(read(path), Console(file=told, width=100))
    lines = [line.rstrip() for line in told.getvalue().splitlines()]
    assert shown[path.name].splitlines() == lines


def test_every_table_has_a_file() -> None:
    names = [found["name"] for found in _SHOWN.finditer(PAGE.read_text(encoding="utf-8"))]
    assert sorted(names) == [path.name for path in FILES]
    assert names
