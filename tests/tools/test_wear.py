"""`hoist train` and the drive's wear: what is said, the budget of writes and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hoist.scheduler.endurance import judge
from hoist.scheduler.status import RunStatus
from hoist.tiers.wear import DirectoryWear, WearRecord, read_wear
from hoist.tools.report import RunEnd
from hoist.tools.sizes import show_days, show_decimal, show_share
from hoist.tools.train import train
from hoist.tools.wear import ahead
from tests.support.commands import SEQ_LEN, Job, curve, hoist, make_job
from tests.support.models import VOCAB_SIZE
from tests.support.reporters import Recorder

NUM_STEPS = 7
TB = 10**12


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = make_job(tmp_path)
    rng = np.random.default_rng(9)
    np.save(tmp_path / "held-out.npy", rng.integers(3, VOCAB_SIZE, 5 * SEQ_LEN).astype(np.uint16))
    return made


def run(job: Job, **options: object) -> RunEnd:
    """Train, with metrics beside the store that are appended to."""
    return train(job.options(metrics=job.folder / "metrics.jsonl", **options), Recorder())


def written(store: Path) -> int:
    """What the ledger says."""
    found = read_wear(store)
    assert found is not None
    return found.written_bytes


SETTINGS: dict[str, dict[str, object]] = {
    "everything on NVMe": {"residency": 0, "commit_every": 2},
    "commits at the end": {"commit_every": 100},
    "kept, commits rare": {"host_memory": "64MiB", "commit_every": 100},
    "delayed": {"residency": 0, "delay": 0.5, "commit_every": 3},
    "made again": {"residency": 0.3, "clip_norm": 1e-3, "clip_mode": "speculative", "commit_every": 100},
    "snapshots": {"residency": 0, "snapshot_every": 2, "keep_snapshots": 1},
}
#: Some of them on every run of the tests; and those that must stop early.
IN_EVERY_RUN = ("made again", "snapshots")
STOPS = ("everything on NVMe", "delayed", "made again", "snapshots")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in SETTINGS],
)
def test_a_budget_is_not_exceeded_and_nearly_used(job: Job, name: str) -> None:
    """The last commit included; then the run goes on as if nothing had been."""
    settings = SETTINGS[name]
    run(job, steps=1, **settings)
    budget = written(job.store) + 12_000_000
    end = run(job, steps=NUM_STEPS, write_budget=str(budget), **settings)
    assert end.signal == 0
    assert end.step == json.loads((job.store / "COMMIT.json").read_text())["step"]
    assert written(job.store) <= budget
    if end.budget_end is None:
        assert end.step == NUM_STEPS
        assert name not in STOPS  # what is kept in memory is hardly written
    else:
        assert 1 < end.step < NUM_STEPS
        assert end.budget_end.written_bytes <= written(job.store)
        assert budget < end.budget_end.written_bytes + end.budget_end.next_bytes
    assert run(job, steps=NUM_STEPS, write_budget="0").step == NUM_STEPS
    whole = job.folder / "whole.jsonl"
    train(job.options(store=job.folder / "whole", metrics=whole, steps=NUM_STEPS, **settings), Recorder())
    assert curve(job.folder / "metrics.jsonl") == curve(whole)


def test_what_is_said_and_how_to_go_on(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"residency": 0, "steps": NUM_STEPS}
    run(job, residency=0, steps=1)
    budget = written(job.store) + 9_000_000
    done = hoist(capfd, *job.arguments("--write-budget", budget, "--tbw", "600TB", **settings))
    assert done.code == 0, done.err
    status = RunStatus.from_json(json.loads((job.store / "status.json").read_text()))
    assert status.wear is not None
    assert status.wear["tbw_bytes"] == 600 * TB
    assert status.wear["write_budget_bytes"] == budget
    assert 0 < status.wear["written_bytes"] <= written(job.store)
    assert f"--write-budget {show_decimal(budget)}, of which " in done.out
    (ahead_line,) = [line for line in done.out.splitlines() if line.startswith("wear     writes ")]
    assert ahead_line.endswith("last more than 100 years") or " of 600 TB; at this speed 600 TB last " in ahead_line
    assert "fewer bytes for the same tokens: " in done.out
    (stopped,) = [line for line in done.out.splitlines() if line.startswith("stopped")]
    assert "for --write-budget: " in stopped
    assert stopped.endswith("everything is committed")
    assert "ever written to the store's drive: " in done.out
    (go_on,) = [line for line in done.out.splitlines() if line.startswith("go on")]
    # The same command again is refused: the budget is remembered.
    again = hoist(capfd, *job.arguments(steps=NUM_STEPS))
    assert again.code == 2
    assert again.refusal().startswith(f"--write-budget: {budget} is too little: ")
    assert written(job.store) <= budget
    assert hoist(capfd, "train", *go_on.split(" train ")[1].split()).code == 0
    found = read_wear(job.store)
    assert found is not None
    assert [(each.tbw_bytes, each.tbw_source) for each in found.directories] == [(600 * TB, "--tbw")]
    # A smaller one than what is written is refused, too, and a done run is not.
    done = hoist(capfd, *job.arguments("--write-budget", "1MB", steps=100))
    assert done.code == 2
    assert done.refusal().startswith("--write-budget: 1MB is exceeded: ")


def test_a_dry_run_says_it_too_and_counts_nothing(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    done = hoist(capfd, *job.arguments("--dry-run", "--tbw", "600TB"))
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if " of 600 TB" in line]
    assert line.startswith("wear     writes ")
    assert not job.store.exists()


def test_a_store_is_not_made_for_a_budget_that_allows_no_step(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    done = hoist(capfd, *job.arguments("--write-budget", "2MB"))
    assert done.code == 2
    assert "making the store, a step and its commit may write " in done.refusal()
    assert not job.store.exists()
    least = int(done.refusal().split("give at least ")[1].split()[0])
    assert hoist(capfd, *job.arguments("--write-budget", least)).code == 0
    assert written(job.store) <= least


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (("--tbw", "many"), "--tbw: 'many' is not a size"),
        (("--tbw", "600"), "--tbw: '600' is 600 bytes, less than any drive is rated for; write for instance 600TB"),
        (("--tbw", "1TB", "--tbw", "2TB"), "--tbw: given 2 times, and the store has 1 drive; give it once"),
        (("--write-budget", "-3"), "--write-budget: '-3' is not a size"),
    ],
)
def test_refusals(job: Job, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], refusal: str) -> None:
    done = hoist(capfd, *job.arguments(*options))
    assert done.code == 2
    assert done.refusal().startswith(refusal)
    assert not job.store.exists()


def test_a_lost_ledger_goes_on_from_what_the_commit_knows(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    known = run(job, steps=2).totals.nvme_written_bytes
    (job.store / "wear.json").write_text("{")
    done = hoist(capfd, *job.arguments(steps=3))
    assert done.code == 0, done.err
    assert done.out.count("is missing or torn; what was written so far is taken from the last commit: ") == 1
    assert known < written(job.store)
    assert hoist(capfd, *job.arguments(steps=4)).out.count("missing or torn") == 0


def test_the_line_of_the_documentation() -> None:
    record = WearRecord(directories=(DirectoryWear(directory="/a", tbw_bytes=600 * TB, tbw_source="--tbw"),))
    wear = judge(record, bytes_per_step=1.4e9, seconds_per_step=43.2, steps_left=1000)
    assert ahead(wear, 1000) == (
        "writes 1.4 GB a step, 1.4 TB in 1,000 steps: 0.23% of 600 TB; at this speed 600 TB last 214 days"
    )
    unknown = judge(WearRecord(directories=(DirectoryWear(directory="/a"),)), bytes_per_step=7e6, steps_left=1)
    assert ahead(unknown, 1) == (
        "writes 7 MB a step, 7 MB in 1 step; what the drive is rated for is not known: --tbw 600TB, say"
    )


def test_numbers_as_people_read_them() -> None:
    assert [show_decimal(n) for n in (0, 999, 1000, 1.4e9, 173e6, 999.9e9, 6e14, 1.5e15)] == [
        "0 B", "999 B", "1 kB", "1.4 GB", "173 MB", "1 TB", "600 TB", "1,500 TB",
    ]  # fmt: skip
    assert [show_days(n) for n in (0.001, 0.5, 1.25, 214.3, 800, 1e6)] == [
        "1 minutes", "12.0 hours", "1.2 days", "214 days", "2.2 years", "more than 100 years",
    ]  # fmt: skip
    assert [show_share(n) for n in (None, 1.2e-6, 0.0023333, 0.5)] == ["0%", "0.00012%", "0.23%", "50%"]
