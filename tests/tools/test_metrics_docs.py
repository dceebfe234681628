"""docs/metrics.md has every name of a step's and an evaluation's metrics, and no other."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from hoist.scheduler.metrics import StepMetrics
from hoist.tools.evaluation import EvalRecord
from tests.check_types import ROOT


@pytest.mark.parametrize(("kind", "heading"), [(StepMetrics, "A step"), (EvalRecord, "An evaluation")])
def test_every_field_is_documented_with_its_unit(kind: Any, heading: str) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", section, re.M)
    assert [name for name, _, _ in rows] == [spec.name for spec in fields(kind)]
    for name, unit, _ in rows:
        ending = name.rpartition("_")[2]
        assert unit.strip() == {"bytes": "bytes", "seconds": "seconds", "loss": "nats"}.get(ending, unit.strip())
