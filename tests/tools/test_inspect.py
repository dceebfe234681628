"""`hoist inspect`: what it says of stores in every condition, whole and damaged. Nothing is ever changed."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hoist.scheduler.status import STATE_KINDS, RunState, StateBytes
from hoist.scheduler.status_file import read_status
from hoist.tiers.format import LOCK_NAME, STATUS_NAME, WEAR_NAME
from hoist.tiers.io.base import IoEngine
from hoist.tiers.lock import StoreLock
from hoist.tiers.small_files import Unusable
from hoist.tiers.snapshots import take
from hoist.tiers.wear import DirectoryWear, WearRecord
from hoist.tools.drives import change
from hoist.tools.durations import show_span
from hoist.tools.inspection.looking import Condition, Inspection, inspect_store
from hoist.tools.inspection.store_view import MAX_DAMAGE
from tests.support.commands import hoist, tree
from tests.support.damage import flip_a_bit, shorten
from tests.support.inspected import STORE_ID, many_layouts, status_of, write_status, write_store
from tests.support.stores import commit, committed, create, direct_engine, fill

LAYOUTS = many_layouts(3)
STATUS = status_of(LAYOUTS, stage=2)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", LAYOUTS)
    return tmp_path / "store"


@contextmanager
def held(store: Path) -> Iterator[None]:
    lock = StoreLock(store / LOCK_NAME)
    try:
        yield
    finally:
        lock.release()


def look(store: Path, later_seconds: float = 0.0) -> Inspection:
    """A look that must change nothing."""
    before = tree(store)
    found = inspect_store(store, now=STATUS.written_at + later_seconds)
    assert tree(store) == before
    return found


# --- what goes on ---------------------------------------------------------------------------------------------------


def test_a_run_that_trains(store: Path) -> None:
    write_status(store, STATUS)
    with held(store):
        found = look(store, 1.5)
    assert found.condition is Condition.RUNNING
    assert found.message == f"process {os.getpid()} on {STATUS.hostname} trains"
    assert found.status == STATUS
    assert found.is_live
    assert found.age_seconds == pytest.approx(1.5)
    assert [stage.name for stage in found.stages] == ["embed", "layer.0", "layer.1", "layer.2", "head"]
    assert tuple(stage.kinds for stage in found.stages) == STATUS.stages
    assert (found.num_steps, found.model, found.num_parameters) == (100, "tower", 5 * 64 * 64)
    assert (found.damage, found.notes) == ((), ())


def test_a_run_that_has_told_nothing_for_long(store: Path) -> None:
    write_status(store, STATUS)
    with held(store):
        assert look(store, 9.9).condition is Condition.RUNNING
        found = look(store, 61)
        assert found.condition is Condition.HANGING
        assert "holds the store and was last heard of 61 s ago, at " in found.message
        assert found.is_live
        for interval_seconds in (30.0, 0.0):  # 0: written when a program asks for it
            write_status(store, STATUS, interval_seconds=interval_seconds)
            assert look(store, 61).condition is Condition.RUNNING


def test_a_run_that_died(store: Path) -> None:
    write_status(store, STATUS, pid=2**22 + 5)  # more than Linux gives
    found = look(store, 0.1)
    assert found.condition is Condition.DIED
    assert "What was in memory is lost, and the store opens at step 7" in found.message
    assert found.notes == ()
    assert not found.is_live
    assert found.stages[2].kinds == (StateBytes(nvme=16384), StateBytes(nvme=32768), StateBytes(), StateBytes())
    write_status(store, STATUS)  # of this process, which is there: the number was given again, or this is a copy
    found = look(store, 0.1)
    assert found.condition is Condition.DIED
    assert f"a process {os.getpid()} is there all the same" in found.notes[0]


@pytest.mark.parametrize(
    ("state", "condition", "text"),
    [
        (RunState.ENDED, Condition.ENDED, "the last run ended 5 min ago"),
        (RunState.FAILED, Condition.FAILED, "the last run failed 5 min ago, at "),
    ],
)
def test_a_run_that_ended(store: Path, state: RunState, condition: Condition, text: str) -> None:
    write_status(store, STATUS, state=state, error="the drive went away")
    found = look(store, 300)
    assert found.condition is condition
    assert text in found.message
    assert ("the drive went away" in found.message) == (state is RunState.FAILED)
    assert found.message.endswith("the store opens at step 7")
    with held(store):
        assert look(store, 300).condition is Condition.HELD


def test_a_store_that_another_command_holds(store: Path) -> None:
    with held(store):
        found = look(store)
        assert found.condition is Condition.HELD
        assert f"process {os.getpid()} on " in found.message
        assert "holds the store and tells nothing of itself" in found.message
        write_status(store, STATUS, pid=2**22 + 5)
        found = look(store)
        assert found.condition is Condition.HELD
        assert f"the last run (process {2**22 + 5} on {STATUS.hostname}) has died" in found.message
        assert not found.is_live


def test_stores_without_a_document(store: Path, tmp_path: Path) -> None:
    """As an older hoist leaves them."""
    found = look(store)
    assert (found.condition, found.status) == (Condition.IDLE, None)
    assert found.message == "nobody trains in this store; it opens at step 7"
    assert found.num_steps == 100
    write_store(tmp_path / "new", LAYOUTS, step=0)
    assert look(tmp_path / "new").condition is Condition.UNTRAINED


def test_a_run_on_another_machine(store: Path) -> None:
    write_status(store, STATUS, hostname="elsewhere", pid=12)
    assert look(store, 3).condition is Condition.RUNNING
    found = look(store, 300)
    assert found.condition is Condition.ELSEWHERE
    assert found.message.startswith("process 12 on elsewhere trained and was last heard of 5 min ago")
    assert found.stages[2].kinds[2] == StateBytes()


def test_a_document_of_another_store(store: Path) -> None:
    write_status(store, STATUS, store_id="of another")
    found = look(store)
    assert (found.condition, found.status) == (Condition.IDLE, None)
    assert "is of the store 'of another'" in found.notes[0]


def test_a_document_that_is_cut_off_anywhere(store: Path) -> None:
    """At every byte: one line says so, and the rest is as the store itself has it."""
    data = json.dumps(replace(STATUS, stages=STATUS.stages[:1], lanes={}, memory_parts={}).to_json()).encode()
    before = None
    for length in range(len(data)):
        (store / STATUS_NAME).write_bytes(data[:length])
        assert isinstance(read_status(store, store_id=STORE_ID), Unusable), length
        if length % 40:
            continue
        found = before = inspect_store(store, before=before)
        assert found.status is None, length
        assert len(found.notes) == 1, length
        assert str(store / STATUS_NAME) in found.notes[0]
        assert found.condition is Condition.IDLE
    (store / STATUS_NAME).write_bytes(data)
    assert inspect_store(store).status is not None


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"{}", b'{"format_version": 9}', b"[" * 100_000])
def test_a_document_that_is_none(store: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    (store / STATUS_NAME).write_bytes(content)
    result = hoist(capfd, "inspect", store)
    assert result.code == 0
    (note,) = [line for line in result.out.splitlines() if line.startswith("note")]
    assert f"{store / STATUS_NAME}: " in note
    assert "  layer.0" in result.out or "  embed" in result.out


def test_what_the_store_counts_where_no_run_tells(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert look(store).wear is None
    written = DirectoryWear(
        directory=str(store), drive_id="a", written_bytes=3 << 40, tbw_bytes=int(600e12), tbw_source="smart"
    )
    (store / WEAR_NAME).write_text(json.dumps(WearRecord(store_id=STORE_ID, directories=(written,)).to_json()))
    shown = hoist(capfd, "inspect", store).out
    assert "wear     3.3 TB written so far; 0.55% of 600 TB (as the drive itself implies) are used\n" in shown
    write_status(store, STATUS, wear=None, last_step={"step": 41, "nvme_written_bytes": 2**30}, state=RunState.ENDED)
    shown = hoist(capfd, "inspect", store).out
    assert "far, 1.1 GB a step; 0.55% of 600 TB (as the drive itself implies) are used; 16 days are left" in shown
    (store / WEAR_NAME).write_text("{")
    assert f"{store / WEAR_NAME}: is torn" in look(store).notes[0]


def test_stages_that_do_not_fit_their_names(store: Path) -> None:
    write_status(store, STATUS, stage_names=("embed",))
    with held(store):
        found = look(store)
    assert found.condition is Condition.RUNNING
    assert len(found.stages) == 5


def test_snapshots_are_inspected_like_stores(tmp_path: Path, engine: IoEngine) -> None:
    with committed(tmp_path / "store", engine) as store:
        take(store, "kept", engine=engine)
        fill(store, engine, 2)
        commit(store, 5)
    snapshot = tmp_path / "store" / "snapshots" / "kept"
    found = look(snapshot)
    assert found.condition is Condition.SNAPSHOT
    assert found.message.startswith("snapshot 'kept' of step 0")
    assert found.damage == ()
    assert look(tmp_path / "store").view.snapshots == ("kept",)


def test_a_store_that_is_being_created(tmp_path: Path, engine: IoEngine, capfd: pytest.CaptureFixture[str]) -> None:
    with create(tmp_path / "store", engine):
        assert look(tmp_path / "store").condition is Condition.CREATING
        assert hoist(capfd, "inspect", tmp_path / "store").code == 0
    assert look(tmp_path / "store").condition is Condition.UNFINISHED
    assert "its creation never finished" in hoist(capfd, "inspect", tmp_path / "store").failure()


def test_where_there_is_no_store(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in hoist(capfd, "inspect", tmp_path / "none").refusal()
    assert "holds no hoist store" in hoist(capfd, "inspect", tmp_path).refusal()
    assert "does not exist" in hoist(capfd, "inspect", tmp_path / "none", "--watch").refusal()


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("zarr.json", "zarr.json"),
        ("COMMIT.json", "COMMIT.json"),
        ("crc/2.bin", "crc/2.bin"),
        ("stages/002-layer.1/zarr.json", "stages/002-layer.1/zarr.json"),
        ("stages/002-layer.1/exp_avg/c/1/0", "stage 'layer.1' array exp_avg chunk 0 slot 1"),
    ],
)
@pytest.mark.parametrize("how", ["shorten", "unlink", "empty"])
def test_damage_is_named_and_the_rest_is_shown(
    store: Path, capfd: pytest.CaptureFixture[str], name: str, seen: str, how: str
) -> None:
    path = store / name
    match how:
        case "shorten":
            shorten(path)
        case "unlink":
            path.unlink()
        case _:
            path.write_bytes(b"")
    result = hoist(capfd, "inspect", store)
    if (name, how) == ("COMMIT.json", "unlink"):
        assert "COMMIT.json was deleted" in result.failure()
        return
    assert seen in result.failure()
    assert seen in "".join(line for line in result.out.splitlines() if line.startswith("DAMAGED"))
    assert "5 stages" in result.out
    if name != "COMMIT.json":
        assert "head" in result.out
        assert "7 of 100 committed" in result.out
    as_json = hoist(capfd, "inspect", store, "--json")
    assert as_json.code == 1
    assert any(seen in line for line in json.loads(as_json.out)["damage"])


def test_a_changed_stage_is_noticed(store: Path) -> None:
    flip_a_bit(store / "stages/002-layer.1/zarr.json")
    assert look(store).damage


def test_much_damage_is_counted(store: Path) -> None:
    for path in store.glob("stages/*/*/c/1/0"):
        path.unlink()
    assert len(look(store).damage) == 20
    write_store(store.parent / "long", many_layouts(10))
    for path in (store.parent / "long").glob("stages/*/*/c/1/0"):
        path.unlink()
    damage = look(store.parent / "long").damage
    assert len(damage) == MAX_DAMAGE + 1
    assert damage[-1] == "28 more; hoist verify names them all"


def test_a_drive_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with direct_engine() as engine:
        with committed(tmp_path / "store", engine):
            pass
        change(tmp_path / "store", engine, add=[tmp_path / "second"], remove=[])
    assert hoist(capfd, "inspect", tmp_path / "store").code == 0
    (tmp_path / "second").rename(tmp_path / "away")
    result = hoist(capfd, "inspect", tmp_path / "store")
    assert f"{tmp_path / 'second'}: should be a drive of the store" in result.failure()
    assert "layer.0" in result.out


def test_commits_meanwhile_are_no_damage(tmp_path: Path, engine: IoEngine) -> None:
    """Looks between any two commits are of one of them."""
    with committed(tmp_path / "store", engine) as store:
        before = None
        for step in range(1, 6):
            fill(store, engine, step)
            commit(store, step)
            found = before = inspect_store(tmp_path / "store", before=before)
            assert found.view.record is not None
            assert (found.view.record.step, found.damage) == (step, ())


# --- JSON and speed -------------------------------------------------------------------------------------------------


def test_json(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_status(store, STATUS, written_at=time.time())
    with held(store):
        result = hoist(capfd, "inspect", store, "--json")
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out)
    assert document["condition"] == "running"
    assert document["store_id"] == STORE_ID
    assert document["commit"] == {"generation": 2, "step": 7, "num_slots": 2, "num_drives": 1}
    assert document["stages"][2]["gradients"]["dirty"] == 16384
    assert set(document["stages"][0]) == {"name", *STATE_KINDS}
    assert document["status"]["position"]["stage"] == "layer.1"


def names_in(document: Any, prefix: str = "") -> Iterator[str]:
    """Every name in a JSON document, those of maps whose keys are data left out."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield name
            if name not in ("memory_parts", "last_step", "prediction", "wear", "options"):
                yield from names_in(value)
    elif isinstance(document, list):
        for each in document:
            yield from names_in(each)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (12, "12 s"), (150, "2 min"), (7200, "2 h"), (400000, "5 days")]
)
def test_spans(seconds: float, text: str) -> None:
    assert show_span(seconds) == text


def test_every_name_of_the_json_is_in_the_docs(
    tmp_path: Path, engine: IoEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    """In backquotes; what the run tells is in docs/status.md, under its own test."""
    with committed(tmp_path / "store", engine) as store:
        take(store, "kept", engine=engine)
        seen = [
            json.loads(hoist(capfd, "inspect", tmp_path / "store", *more, "--json").out)
            for more in ([], ["--tensor", "*"], ["--diff", "kept"])
        ]
    names = {name for document in seen for name in names_in(document) if name != "status"}
    text = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")
    documented = {name for quoted in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"\w+", quoted)}
    assert not names - documented
    assert {f"`{condition.value}`" for condition in Condition} <= set(re.findall(r"`\w+`", text))
    assert len(names) > 50
