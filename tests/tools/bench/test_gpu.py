"""The script for a GPU, on a device whose streams run late: every part at tiny sizes; and what becomes of bad ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hoist.tools.bench import gpu
from hoist.tools.bench.on_device import speed
from hoist.tools.bench.on_device.request import LARGE, SMALL, WHOLE, MakeDevice, Request, Row
from hoist.tools.bench.outcome import show
from tests.support.late_device import LateDevice

LATE: MakeDevice = partial(LateDevice, 3, late_seconds=0.0)


@pytest.fixture
def request_here(drive: Path) -> Request:
    return Request(directory=drive, scale=SMALL, io="direct")


def test_every_part_runs_on_a_device_of_its_own_memory(request_here: Request) -> None:
    """In this process, but for the run that is killed. What must hold holds; every number has its place."""
    found = gpu.run(request_here, LATE, launch=gpu.here)
    rows = {row["what"].strip(): row for row in found.rows}
    assert [row for row in found.rows if row["ok"] is False] == []
    assert {row["part"] for row in found.rows} == {task.name for task in gpu.TASKS}
    parity = [row for row in found.rows if row["part"] == "parity"]
    assert [row["same_bits"] and row["same_as_first"] for row in parity] == [True] * 4
    device = [row for row in found.rows if "device_budget_bytes" in row]
    assert [0 < row["device_peak_bytes"] <= row["device_budget_bytes"] for row in device] == [True, True]
    (resumed,) = [row for row in found.rows if row["part"] == "resume"]
    assert resumed["resumed_at_step"] in (2, 4)
    steps = [row for row in found.rows if "step_seconds" in row]
    for row in steps:
        assert row["read_bytes"] > 0 or row["part"] == "DRAM"
        assert row["up_bytes"] > 0 < row["down_bytes"]
        assert row["limit_seconds"].keys() == {"computing", "the bus", "the drive"}
        assert row["roofline_ratio"] > 0
        assert row["mfu_8n_share"] > row["mfu_6n_share"] > 0
    assert [row["part"] for row in steps if row["part"] in ("drive", "DRAM", "delay")] == ["drive", "DRAM", "delay"]
    assert rows["waits for the device in a step"]["found"].startswith("not looked at")
    compared = [row["found"] for row in found.rows if row["what"].startswith("  losses")]
    assert compared == ["the same bits"] * 3  # of DRAM, updates on the device and delay with those of the drive
    assert not torch.are_deterministic_algorithms_enabled()
    console = Console(width=100, record=True)
    show(found, console)
    assert "everything holds that must" in console.export_text()
    json.dumps(found.to_json(), allow_nan=False)


def test_a_part_that_fails_or_dies_takes_nothing_from_the_others(request_here: Request) -> None:
    """Rows that it had made are kept, and given to later parts."""
    tasks = [
        gpu.Task(name="failing", do=_failing, limit_seconds=60.0),
        gpu.Task(name="dying", do=_dying, limit_seconds=60.0, environment={"KVIKIO_COMPAT_MODE": "ON"}),
    ]

    def launch(task: gpu.Task, request: Request, make_device: MakeDevice, limit_seconds: float) -> Iterator[Row]:
        where = gpu.in_process if task.name == "dying" else gpu.here
        return where(task, request, make_device, limit_seconds)

    found = gpu.run(request_here, LATE, tasks=tasks, launch=launch)
    assert [(row["part"], row["found"]) for row in found.rows] == [
        ("failing", "one"),
        ("failing", "failed: internal error: ValueError: no; run with HOIST_TRACEBACK=1 for the traceback"),
        ("dying", "ON 7"),
        ("dying", "its process ended with code 3"),
    ]
    assert found.notes[0] == "2 of 2 things that must hold do not"


def test_what_runs_over_is_stopped_and_what_has_no_time_is_not_begun(request_here: Request) -> None:
    task = gpu.Task(name="hanging", do=_hanging, limit_seconds=60.0)
    (row,) = gpu.in_process(task, request_here, LATE, 0.0)
    assert row.found == "stopped: it ran over its 0 s"
    found = gpu.run(request_here, LATE, tasks=[task], all_seconds=0.0)
    assert [row["found"] for row in found.rows] == ["not begun: no time was left"]


def test_the_shape_is_that_of_the_published_figures() -> None:
    assert WHOLE.num_parameters == pytest.approx(1.159e9, rel=1e-3)
    assert WHOLE.tokens == 65536
    assert LARGE.whole is WHOLE
    request = Request(directory=Path(), scale=LARGE, peak_flops=1e15)
    with LATE() as device:
        assert speed._peak(request, device) == (1e15, "as told")
        device.describe = lambda: "cuda:0 (NVIDIA H200, 139.8 GiB)"  # type: ignore[method-assign]
        assert speed._peak(replace(request, peak_flops=None), device)[0] == 989.4e12


def _failing(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    yield Row(what="first", found="one", numbers={"seen": 7})
    raise ValueError("no")


def _dying(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    yield Row(what="environment", found=f"{os.environ['KVIKIO_COMPAT_MODE']} {request.found['seen']}")
    os._exit(3)


def _hanging(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    yield Row(what="first", found="one")
    while True:
        os.read(os.pipe()[0], 1)
