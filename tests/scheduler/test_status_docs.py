"""docs/status.md names every field of what a run writes, and no other."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest

from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.status import IoStatus, LaneStatus, Position, RunStatus, Speed, StateBytes, TierStatus
from hoist.scheduler.timeline import Recorder, encode
from hoist.scheduler.whereabouts import Whereabouts
from hoist.tiers.manager import Manager
from hoist.tools.evaluation import EvalRecord
from tests.check_types import ROOT

PAGE = ROOT / "docs" / "status.md"
RECORDS: tuple[type[Any], ...] = (
    RunStatus, Position, Speed, TierStatus, LaneStatus, IoStatus, StateBytes, StepMetrics, EvalRecord,
)  # fmt: skip


def told_fields(name: str) -> list[str]:
    """The names in the first column of the table that the page marks with ``name``, in order."""
    text = PAGE.read_text(encoding="utf-8")
    _, found, rest = text.partition(f"<!-- fields: {name} -->\n")
    assert found, f"{PAGE}: no table of {name}"
    table = re.match(r"(?:\|.*\n)+", rest)
    assert table is not None
    rows = table.group().splitlines()[2:]
    return [each for row in rows for each in re.findall(r"`(\w+)`", row.split("|")[1])]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_is_told(kind: type[Any]) -> None:
    assert told_fields(kind.__name__) == [spec.name for spec in fields(kind)]


def test_every_field_of_a_timeline_is_told() -> None:
    recorder = Recorder(Manager())
    recorder.begin()
    recorder.end(1, 0.0, 1.0, [], [])
    assert recorder.last is not None
    document = json.loads(b"".join(encode(recorder.last, Whereabouts([], [], {}))))
    assert sorted(told_fields("timeline")) == sorted(document)


def test_every_mark_is_of_a_table_that_is_compared() -> None:
    marks = re.findall(r"<!-- fields: (\w+) -->", PAGE.read_text(encoding="utf-8"))
    assert sorted(marks) == sorted([*(kind.__name__ for kind in RECORDS), "timeline"])
