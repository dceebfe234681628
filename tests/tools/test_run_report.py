"""`hoist report` on real runs, running, dead, torn or never begun: what it reads, says, refuses, and writes."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hoist.scheduler.status import RunStatus
from hoist.tiers.errors import StoreRefusedError
from hoist.tools.run_report.bound import bound, roofline
from hoist.tools.run_report.bytes import memory, wear
from hoist.tools.run_report.facts import RunFacts, gather
from hoist.tools.run_report.making import report_of
from hoist.tools.run_report.parts import Report, Section
from hoist.tools.run_report.run import speed, training
from hoist.tools.run_report.step import lanes, residency
from tests.support.commands import Job, hoist, make_job, tree
from tests.support.run_files import written_run

RUN_FILES = ("status.json", "metrics.jsonl", "timeline.json", "wear.json")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of four steps that keeps nothing in memory, with two evaluations and a snapshot."""
    return written_run(make_job(tmp_path_factory.mktemp("run"), num_steps=30))


@pytest.fixture
def store(job: Job, tmp_path: Path) -> Path:
    """A copy of its store, to be broken."""
    copy = tmp_path / "store"
    shutil.copytree(job.store, copy, symlinks=True)
    return copy


def change(store: Path, name: str, **changed: Any) -> None:
    """Other values in one of the run's documents."""
    path = store / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def section(report: Report, key: str) -> tuple[list[str], str]:
    """The figures of a section, and its words."""
    (found,) = [section for section in report.sections if section.key == key]
    return [figure.key for figure in found.figures], " ".join(found.words)


def titles(report: Report) -> dict[str, str]:
    return {figure.key: figure.title for section in report.sections for figure in section.figures}


# --- the command ----------------------------------------------------------------------------------------------------


def test_both_files_are_written_whole_and_the_store_is_as_before(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = tree(job.store)
    html, png = tmp_path / "r.html", tmp_path / "r.png"
    html.write_text("what was there before")
    result = hoist(capfd, "report", job.store, "--html", html, "--png", png)
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(rf"wrote {html} \(.*iB\)\nwrote {png} \(.*iB\)\n", result.out)
    assert tree(job.store) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.png"]
    text = html.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and text.endswith("</html>\n")
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 1500


def test_what_cannot_be_written_is_refused_in_a_line(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    commit = (job.store / "COMMIT.json").read_bytes()
    for arguments, message in (
        ((), "nothing to write: give --html FILE, --png FILE or both"),
        (("--html", tmp_path), f"--html {tmp_path}: is a directory; name a file in it"),
        (("--png", tmp_path / "no" / "r"), f"--png {tmp_path}/no/r: {tmp_path}/no is not a directory; make it first"),
        (("--png", file / "r"), f"--png {file}/r: {file} is not a directory; make it first"),
        (("--html", "/dev/null"), "--html /dev/null: is no file; name one"),
        (("--html", tmp_path / "circle"), f"--html {tmp_path}/circle: cannot be written:"),
        (("--html", job.store / "COMMIT.json"), f"--html {job.store}/COMMIT.json: lies in the store;"),
        (("--html", file, "--png", file), f"--html and --png both name {file}; give each a file of its own"),
        (("--html", tmp_path / ("x" * 300)), "cannot be written: File name too long"),
    ):
        assert message in hoist(capfd, "report", job.store, *arguments).refusal()
    assert (job.store / "COMMIT.json").read_bytes() == commit
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "file"]


def test_what_is_no_store_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = hoist(capfd, "report", tmp_path / "none", "--html", tmp_path / "r.html").refusal()
    assert message == f"{tmp_path}/none: does not exist; create the store first, or look at its name"
    with pytest.raises(StoreRefusedError, match="holds no hoist store"):
        gather(tmp_path)
    assert not (tmp_path / "r.html").exists()


def test_a_file_that_is_a_link_is_replaced_where_it_leads(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "real.html").write_text("before")
    (tmp_path / "link.html").symlink_to("there/real.html")
    assert hoist(capfd, "report", job.store, "--html", tmp_path / "link.html").code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "there" / "real.html").read_text().startswith("<!DOCTYPE")


@pytest.mark.parametrize("module", ["altair", "vl_convert"])
def test_without_what_draws_it(
    module: str, job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what importing something that is not installed finds
    message = hoist(capfd, "report", job.store, "--html", tmp_path / "r.html").refusal()
    assert message.startswith(f"a report needs {module}, which is not installed: ")
    assert message.endswith("-m pip install altair vl-convert-python")


# --- what is read ---------------------------------------------------------------------------------------------------


def test_a_real_run_has_every_section(job: Job) -> None:
    facts = gather(job.store)
    report = report_of(facts)
    assert facts.problems == {} or set(facts.problems) <= {"wear.json"}
    assert {each.key: len(each.figures) for each in report.sections} == {
        "training": 3, "speed": 2, "residency": 5, "lanes": 2, "roofline": 2, "traffic": 2, "memory": 3, "wear": 1,
    }  # fmt: skip
    lines = [json.loads(line) for line in (job.store / "metrics.jsonl").read_text().splitlines()]
    assert [step.loss for step in facts.steps] == [line["loss"] for line in lines if "loss" in line]
    assert [one.loss for one in facts.evaluations] == [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert dict(report.cards)["step"] == "4 of 4"
    assert dict(report.cards)["state"] == "ended"
    first, last = facts.steps[0], facts.steps[-1]
    assert f" from {first.loss:.4f} at step 1 to {last.loss:.4f} at step 4; best " in titles(report)["loss"]
    assert len({figure.key for each in report.sections for figure in each.figures}) == 20


@pytest.mark.parametrize(
    ("name", "make", "left"),
    [
        ("status.json", memory, ["peak"]),
        ("metrics.jsonl", training, []),
        ("timeline.json", residency, []),
        ("timeline.json", lanes, ["lanes"]),
        ("wear.json", wear, []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["missing", "torn", "empty", "binary", "a list"])
def test_what_is_missing_or_torn_leaves_its_sentence(
    name: str, make: Callable[[RunFacts], Section], left: list[str], how: str, store: Path
) -> None:
    path = store / name
    whole = path.read_bytes()
    match how:
        case "missing":
            path.unlink()
        case "torn":
            path.write_bytes(whole[: min(len(whole) // 3, 40)])
        case "empty":
            path.write_bytes(b"")
        case "binary":
            path.write_bytes(b"\xff\x00" * 100)
        case _:
            path.write_bytes(b"[1]\n")
    made = make(gather(store))
    assert [figure.key for figure in made.figures] == left
    assert name in " ".join(made.words)


def test_a_store_that_never_trained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    assert hoist(capfd, *job.arguments(steps=0)).code == 0
    result = hoist(capfd, "report", job.store, "--html", tmp_path / "r.html", "--png", tmp_path / "r.png")
    assert result.code == 0, result.err
    report = report_of(gather(job.store))
    for each in report.sections:
        assert each.figures or each.words, each.key
    assert section(report, "training")[0] == []


def test_one_step_is_enough(job: Job, store: Path) -> None:
    lines = (store / "metrics.jsonl").read_text().splitlines()
    (store / "metrics.jsonl").write_text(lines[0] + "\n")
    facts = gather(store)
    assert training(facts).figures[0].title.endswith("at step 1, the only step so far")
    assert bound(facts) is not None


def test_a_snapshot_says_what_it_is(job: Job) -> None:
    report = report_of(gather(job.store / "snapshots" / "kept"))
    assert dict(report.cards)["state"] == "snapshot"
    for each in report.sections:
        assert not each.figures
        assert "This is a snapshot" in " ".join(each.words), each.key


def test_steps_that_came_again_count_once(store: Path) -> None:
    """After a crash at step 4 the run went on from step 2: lines of 3 and 4 are there twice, 5 is yet to come."""
    path = store / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (third,) = [line for line in lines if line["step"] == 3 and "loss" in line]
    with path.open("a") as file:
        file.write(json.dumps({**third, "loss": 1.25}) + "\n")
        file.write('{"step": 4, "loss": 1.0, "grad')  # the process was killed while it wrote
    facts = gather(store)
    assert [step.step for step in facts.steps] == [1, 2, 3]
    assert facts.steps[-1].loss == 1.25
    assert [one.step for one in facts.evaluations] == [2]
    assert "metrics.jsonl" not in facts.problems


def test_lines_that_are_broken_are_passed_over(store: Path) -> None:
    path = store / "metrics.jsonl"
    path.write_text('{"step": "one", "loss": 2}\n[]\n{"loss": 1}\n\x00\n' + path.read_text())
    assert [step.step for step in gather(store).steps] == [1, 2, 3, 4]


def test_steps_without_a_loss_are_gaps(store: Path) -> None:
    path = store / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == 3 and "loss" in line:
            line |= {"loss": None, "grad_norm": None, "clip_scale": 0.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loss, norm, _ = training(gather(store)).figures
    assert "1 step without a finite loss, left as gaps: 3." in loss.notes
    assert {"x": 3, "y": None} in [{"x": row["x"], "y": row["y"]} for row in loss.chart.datasets["loss"]]
    assert norm.title.endswith("0 steps clipped, 1 skipped")
    for line in lines:
        line |= {"loss": None, "grad_norm": None} if "loss" in line else {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = training(gather(store))
    assert [figure.key for figure in made.figures] == ["rate"]
    assert made.words == ["No step has a finite loss.", "No step has a finite grad_norm."]


def test_what_a_process_that_died_and_one_that_failed_left(store: Path) -> None:
    change(store, "status.json", state="running", pid=2**22 + 1)
    facts = gather(store)
    assert facts.state == "died"
    assert facts.message.startswith("process 4194305 on ")
    change(store, "status.json", state="failed", error="step 3: the loss is nan")
    assert gather(store).state == "failed"
    assert "step 3: the loss is nan" in gather(store).message


def test_a_status_of_another_store_or_version_is_passed_over(store: Path) -> None:
    change(store, "status.json", store_id="another")
    assert "is of the store 'another'" in gather(store).problems["status.json"]
    change(store, "status.json", format_version=99)
    assert "format_version: saw 99" in gather(store).problems["status.json"]
    change(store, "timeline.json", format_version=99)
    facts = gather(store)
    assert facts.timeline is None and "expected 1, saw 99" in facts.problems["timeline.json"]


# --- what is said ---------------------------------------------------------------------------------------------------


def predicted(facts: RunFacts, **numbers: Any) -> RunFacts:
    status = facts.status or RunStatus()
    return replace(facts, status=replace(status, prediction=numbers or None))


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ({"compute_seconds": 1.0, "io_seconds": 1.8}, "I/O-bound: the drive needs 1.8 times as long as compute"),
        ({"compute_seconds": 3.0, "io_seconds": 1.0}, "Compute-bound: computing takes 3 times as long as the drive"),
        ({"compute_seconds": 1.0, "io_seconds": 1.02}, "Balanced: the drive needs as long as compute"),
        (
            {"compute_seconds": 1.0, "io_seconds": 1.2, "optim_seconds": 2.5, "copy_seconds": 0.1},
            "Bound by optim: the optim lane needs 2.5 times as long as compute",
        ),
    ],
)
def test_what_bounds_a_step(numbers: dict[str, Any], verdict: str, job: Job) -> None:
    facts = predicted(gather(job.store), **numbers)
    found = bound(facts)
    assert found is not None and found.is_predicted
    assert found.verdict == verdict
    bars, roof = roofline(facts).figures
    assert bars.title.startswith(verdict)
    tokens, ridge = roof.table.rows[0][1], roof.table.rows[1][1]
    assert tokens == facts.steps[-1].tokens
    longest = max(seconds for name, seconds in numbers.items() if name != "compute_seconds")
    assert ridge == pytest.approx(tokens * longest / numbers["compute_seconds"])


def test_without_a_prediction_lanes_are_used_and_that_is_said(job: Job) -> None:
    facts = predicted(gather(job.store))
    facts = replace(facts, steps=tuple(replace(step, predicted_seconds=None) for step in facts.steps))
    found = bound(facts)
    assert found is not None and not found.is_predicted
    wrong = bound(predicted(facts, compute_seconds=50.0, io_seconds=90.0, seconds=95.0))
    assert wrong == replace(found, predicted_seconds=95.0)  # measured steps say that the prediction is wrong
    figure = roofline(facts).figures[0]
    assert "Nothing was predicted" in figure.notes[0] and "estimate" in figure.notes[0]
    assert "predicted" not in speed(facts).figures[0].title


def test_wear_is_projected_and_labelled(job: Job) -> None:
    facts = gather(job.store)
    assert facts.status is not None and facts.wear is not None
    drive = replace(facts.wear.directories[0], written_bytes=10**10, tbw_bytes=2 * 10**10, tbw_source="--tbw")
    facts = replace(
        facts,
        status=replace(facts.status, wear={"written_bytes_per_step": 1e9}),
        store=replace(facts.store, num_steps=104),
        wear=replace(facts.wear, directories=(drive,)),
    )
    (figure,) = wear(facts).figures
    title = "10 GB written so far, 110 GB by step 104 (estimated); 550% of what the drive is rated for"
    assert figure.title == title
    rows = {str(what): value for what, _, value in figure.table.rows}
    assert rows["still to be written, estimated"] == 1e11
    assert rows[f"{drive.directory}: rated for (--tbw)"] == 2e10
    assert rows[f"{drive.directory}: used of it"] == 0.5
    assert {row["s"] for row in figure.chart.datasets["wear"]} == {"written", "estimated"}


def test_a_broken_promise_is_shouted(job: Job) -> None:
    facts = gather(job.store)
    assert facts.status is not None
    steps = tuple(replace(step, host_peak_bytes=1001) for step in facts.steps)
    facts = replace(facts, steps=steps, status=replace(facts.status, promised_bytes=1000))
    assert "MORE THAN the promised 1000 B" in memory(facts).figures[1].title
