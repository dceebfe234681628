"""The status document: what is written is read, what is missing has its default, what is wrong is named."""

from __future__ import annotations

import json

import pytest

from hoist.scheduler.status import LaneStatus, Position, RunState, RunStatus, StateBytes, TierStatus

FULL = RunStatus(
    store_id="id", pid=7, state=RunState.FAILED, error="a drive went away", position=Position(step=3, phase="loss"),
    tiers={"host": TierStatus(budget_bytes=10, resident_bytes=4), "nvme": TierStatus()},
    lanes={"io": LaneStatus(current="read_states(stage 1)", in_flight=2, busy_share=0.25)},
    memory_parts={"weight buffers": 12}, stage_names=("embed", "head"),
    stages=((StateBytes(nvme=1, host=2),) * 4, (StateBytes(dirty=5, bound=6),) * 4), last_step={"loss": None},
)  # fmt: skip


def test_what_is_written_is_read() -> None:
    assert RunStatus.from_json(json.loads(json.dumps(FULL.to_json()))) == FULL
    assert RunStatus.from_json(RunStatus().to_json()) == RunStatus()


def test_missing_fields_have_their_defaults_and_unknown_ones_are_passed_over() -> None:
    assert RunStatus.from_json({"format_version": 1, "of_tomorrow": [1], "position": {"step": 4}}) == RunStatus(
        position=Position(step=4)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version: expected 1, saw 2"),
        ({"pid": "x"}, "pid: expected int, saw 'x'"),
        ({"position": {"step": True}}, "position.step: expected int, saw True"),
        ({"position": 3}, "position: expected an object, saw 3"),
        ({"tiers": {"host": {"peak_bytes": "?"}}}, "tiers.host.peak_bytes: expected int"),
        ({"state": "asleep"}, "state: 'asleep' is none of running, ended, failed"),
        ({"stages": [[[1, 2]]]}, "stages: not lists of 7 numbers"),
        ({"stage_names": 5}, "stage_names: expected a list, saw 5"),
    ],
)
def test_wrong_values_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunStatus.from_json({**FULL.to_json(), **change})
