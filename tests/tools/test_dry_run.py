"""`hoist train --dry-run`: what it tells, that it makes nothing, and that it refuses what a run refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hoist.scheduler.setup import Setup
from hoist.tools.forecast import Forecast
from hoist.tools.forecasting import make_forecast
from hoist.tools.preflight_view import lines
from hoist.tools.preparing import open_engine, prepare_run
from hoist.tools.stop import Stop
from hoist.tools.train import preview, train
from tests.support.commands import Job, hoist, make_job, read_metrics, tree
from tests.support.reporters import Recorder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder with a store at step 3, whose steps were predicted."""
    job = make_job(tmp_path_factory.mktemp("job"))
    recorder = Recorder()
    end = train(replace(job.options(), metrics=str(job.folder / "metrics.jsonl")), recorder)
    (forecast,) = recorder.forecasts
    assert forecast.prediction is not None
    assert end.predicted_seconds == forecast.prediction.seconds
    assert end.measured_seconds == recorder.steps[-1].seconds  # of three steps, the first two are unlike the others
    told = {line.get("predicted_seconds") for line in read_metrics(job.folder / "metrics.jsonl")}
    assert told == {forecast.prediction.seconds}
    return job.folder


def times(root: Path) -> dict[str, int]:
    """When each file below a directory was last changed, in nanoseconds."""
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def test_a_new_store_is_not_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    before = tree(tmp_path)
    told = hoist(capfd, *job.arguments("--dry-run", store=tmp_path / "not" / "there", steps=50))
    assert told.code == 2  # its parent is missing, which a run refuses too
    told = hoist(capfd, *job.arguments("--dry-run", steps=50))
    assert (told.code, told.err) == (0, "")
    assert "predicted, bound by" in told.out
    assert "50 steps in" in told.out
    assert "wear     writes " in told.out
    assert tree(tmp_path) == before


def test_text_leaves_no_cache(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("All work and no play. " * 200)
    before = tree(tmp_path)
    assert hoist(capfd, *job.arguments("--dry-run", data=text)).code == 0
    assert tree(tmp_path) == before


def test_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    told = hoist(capfd, *job.arguments("--dry-run", "--json", steps=7))
    assert told.code == 0, told.err
    document = json.loads(told.out)
    prediction = document["prediction"]
    assert document["steps_left"] == 7
    assert "in 7 steps" in document["wear"][0]
    assert document["run_seconds"] == pytest.approx(7 * prediction["seconds"])
    assert sum(document["host"].values()) <= document["host_budget_bytes"]
    (drive,) = document["drives"]
    assert drive["need_bytes"] >= document["nvme"]["weights"] + document["nvme"]["moments"]
    assert drive["free_bytes"] > drive["need_bytes"]


def test_an_existing_store_stays_as_it_is(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job.at(folder)
    before, changed_at = tree(folder), times(job.store)
    told = hoist(capfd, "train", "--store", job.store, "--steps", 10, "--dry-run", "--json")
    assert told.code == 0, told.err
    document = json.loads(told.out)
    assert document["steps_left"] == 7
    assert document["drives"][0]["need_bytes"] < document["nvme"]["weights"]  # the store is there already
    assert (tree(folder), times(job.store)) == (before, changed_at)


def test_a_finished_run_can_be_looked_at(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = hoist(capfd, "train", "--store", Job.at(folder).store, "--dry-run", "--json")
    assert json.loads(told.out)["steps_left"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"host_memory": "1MiB"},
        {"seq_len": 100_000},
        {"delay": "often"},
        {"data": "nowhere.npy"},
        {"model": "nothing"},
        {"metrics": "not/there/metrics.jsonl"},
    ],
    ids=str,
)
def test_refusals_are_those_of_a_run(
    arguments: dict[str, object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path)
    before = tree(tmp_path)
    told = hoist(capfd, *job.arguments("--dry-run", **arguments)).refusal()
    assert told == hoist(capfd, *job.arguments(**arguments)).refusal()
    assert tree(tmp_path) == before


def test_no_output_goes_into_the_stores_own_files(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job.at(folder)
    before = tree(folder)
    for option, name in (("--trace", "COMMIT.json"), ("--metrics", "wear.json"), ("--trace", "stages/new.json")):
        path = job.store / name
        told = hoist(capfd, "train", "--store", job.store, "--steps", 9, option, path).refusal()
        assert told == f"{option} {path}: is one of the store's own files; name a file in another place"
    both = job.folder / "metrics.jsonl"
    told = hoist(capfd, *job.arguments("--metrics", both, "--trace", both)).refusal()
    assert told == f"--trace {both}: is the file of --metrics, too; name another"
    assert tree(folder) == before


def test_json_without_a_dry_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job.at(tmp_path)
    assert hoist(capfd, *job.arguments("--json")).refusal().startswith("--json: goes with --dry-run")


def test_a_dry_run_is_not_remembered(folder: Path) -> None:
    job = Job.at(folder)
    options = replace(job.options(), dry_run=True)
    assert "dry_run" not in options.remembered()


def forecast(folder: Path) -> Forecast:
    return preview(Job.at(folder).options(store=folder / "other"), Recorder())


def test_the_view_fits_80_columns(folder: Path) -> None:
    found = forecast(folder)
    shown = lines(found, 80)
    assert max(map(len, shown)) <= 80, shown
    assert shown[0].split() == ["weights", "moments", "gradients", "activations", "scratch", "total"]
    assert not any(" 0 B" in line for line in shown[:3])  # what a tier does not hold is a dash
    assert found.prediction is not None
    wordy = replace(found, prediction=replace(found.prediction, advice="--micro-batches 40 (now 2) " * 6))
    assert max(map(len, lines(wordy, 80))) <= 80
    assert [line for line in lines(wordy, 0) if line.startswith("faster   --micro-batches 40")]


def test_the_view_says_why_nothing_is_predicted(folder: Path) -> None:
    found = replace(forecast(folder), prediction=None, measured=None, why_not="there: cannot make a file there")
    assert any(line.endswith("could not be measured: there: cannot make a file there") for line in lines(found, 0))


def test_every_drive_has_its_need_and_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    before = tree(tmp_path)
    further = tmp_path / "further"
    told = hoist(capfd, *job.arguments("--store", further, "--dry-run", "--json"))
    assert told.code == 0, told.err
    document = json.loads(told.out)
    assert [drive["directory"] for drive in document["drives"]] == [str(job.store), str(further)]
    assert all(drive["need_bytes"] > 0 for drive in document["drives"])
    stored = document["nvme"]["weights"] + document["nvme"]["moments"]
    assert sum(drive["need_bytes"] for drive in document["drives"]) >= stored - 2
    assert tree(tmp_path) == before


def test_a_delay_that_is_picked_is_predicted_from_the_same_measurements(folder: Path) -> None:
    found = forecast(folder)
    job = Job.at(folder)
    config = job.options(store=folder / "other").trainer_config()
    assert found.prediction is not None
    assert found.measured is not None
    setup = prepare_run_setup(job, folder)
    again = found.of(setup, config)
    assert again.prediction is not None
    assert again.prediction.seconds == pytest.approx(found.prediction.seconds)
    assert again.prediction.read_bytes == found.prediction.read_bytes


def prepare_run_setup(job: Job, folder: Path) -> Setup:
    """How the job's run in another store would be set up."""
    with open_engine("direct") as engine, Stop() as stop:
        return prepare_run(job.options(store=folder / "other"), engine, Recorder(), stop).setup


def test_a_run_goes_on_where_nothing_can_be_measured(tmp_path: Path) -> None:
    """Here another trainer has the model; a full drive is like that, though a store that is there needs no more."""
    job = make_job(tmp_path)
    with open_engine("direct") as engine, Stop() as stop:
        run = prepare_run(job.options(), engine, Recorder(), stop)
        run.model.take()
        found = make_forecast(run, Recorder(), stop)
    assert found.prediction is None
    assert found.why_not is not None
    assert found.run_seconds is None
    assert found.to_json()["prediction"] is None
