"""A store is resumed as its run was, without naming anything again; what is told otherwise is said."""

from __future__ import annotations

import re
import shutil
import signal
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from hoist.tools.train import train
from tests.support.commands import Job, Result, curve, hoist, make_job, read_metrics, tree
from tests.support.reporters import sending


@dataclass(kw_only=True, slots=True)
class Runs:
    """Trains the same job in several stores."""

    job: Job
    capfd: pytest.CaptureFixture[str]

    def train(self, store: str, *more: object, **options: object) -> Result:
        """`hoist train` with all options, or with ``--store`` alone and ``more`` if there are no options."""
        place = self.job.folder / store
        arguments = self.job.arguments(*more, store=place, **options) if options else ["train", "--store", place, *more]
        result = hoist(self.capfd, *arguments, "--metrics", self.metrics(store))
        assert result.code == 0, result.err
        assert result.err == ""
        return result

    def metrics(self, store: str) -> Path:
        return self.job.folder / f"{store}.jsonl"

    def curve(self, store: str) -> list[tuple[int, float, float, float]]:
        return curve(self.metrics(store))


@pytest.fixture
def runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Runs:
    return Runs(job=make_job(tmp_path), capfd=capfd)


COSINE = {"lr_schedule": "cosine", "warmup_steps": 2, "steps": 5}


def stopped_at(runs: Runs, store: str, step: int, **options: object) -> None:
    """A run of ``options`` that was asked to stop after ``step`` steps."""
    told = runs.job.options(store=runs.job.folder / store, metrics=runs.metrics(store), **options)
    assert train(told, sending(signal.SIGINT, f"step {step}")).step == step


def test_delays_give_the_same_curve(runs: Runs) -> None:
    """Also in parts with different ones; and a resume needs no mention of them."""
    runs.train("whole", **COSINE)
    runs.train("delayed", delay=0.5, **COSINE)
    assert runs.curve("delayed") == runs.curve("whole")
    stopped_at(runs, "parts", 2, delay=1.0, **COSINE)
    assert "changed" not in runs.train("parts", "--delay", 0.25).out
    assert runs.curve("parts") == runs.curve("whole")


def test_what_is_computed_with_is_remembered_and_a_change_is_said(runs: Runs) -> None:
    """A store that was begun in float32 goes on in bfloat16, and after that without a word of it."""
    stopped_at(runs, "store", 1, **COSINE)
    told = runs.train("store", "--dtype", "bfloat16").out
    assert "changed since the last commit: --dtype bfloat16 (was float32)" in told
    assert "--dtype" not in runs.train("store", "--steps", 6).out
    with DirectEngine() as engine, Store.open(runs.job.folder / "store", engine=engine, writable=False) as store:
        assert store.record is not None
        assert store.record.run["options"]["dtype"] == "bfloat16"


def test_clipping_is_shown_and_remembered(runs: Runs) -> None:
    whole = runs.train("whole", clip_norm=0.01, **COSINE)
    heading, first = next(pair for pair in pairwise(whole.out.splitlines()) if pair[0].split()[:2] == ["step", "loss"])
    assert heading.split()[-2:] == ["clip", "left"]
    assert re.search(r" x 0\.\d+ ", first)
    for done in read_metrics(runs.metrics("whole")):
        assert done["grad_norm"] * done["clip_scale"] <= 0.01 * (1 + 1e-6)
        assert (done["clip_scale"] < 1.0, done["skipped_steps"]) == (True, 0)
    stopped_at(runs, "parts", 3, clip_norm=0.01, **COSINE)
    runs.train("parts")
    assert runs.curve("parts") == runs.curve("whole")


def test_a_delay_is_picked_and_said(runs: Runs) -> None:
    runs.train("whole", **COSINE)
    picked = runs.train("auto", delay="auto", **COSINE)
    assert re.search(r"note +--delay auto: (0|0\.25|0\.5|0\.75|1) of the updates go into the next forward", picked.out)
    assert runs.curve("auto") == runs.curve("whole")
    # Too few steps to measure, or all updates delayed anyway: there is nothing to pick.
    assert "--delay auto:" not in runs.train("short", delay="auto", steps=2).out
    assert "--delay auto:" not in runs.train("clipped", delay="auto", clip_norm=1.0, steps=5).out


@pytest.mark.parametrize("snapshot_every", [1, 2])
def test_a_delay_is_picked_where_updates_are_guesses(runs: Runs, snapshot_every: int) -> None:
    """Whatever plan the measured step ran: after a snapshot there are no updates of the step before."""
    guessing = {"clip_norm": 0.01, "clip_mode": "speculative", **COSINE}
    picked = runs.train("auto", delay="auto", snapshot_every=snapshot_every, **guessing)
    found = re.search(r"--delay auto: .* Measured a step: forward (\d+\.\d+) s .* backward (\d+\.\d+) s", picked.out)
    assert found is not None
    assert float(found[2]) > 0


def test_what_stays_in_memory_changes_commits_but_no_results(runs: Runs) -> None:
    kept = runs.train("kept", host_memory="64MiB", **COSINE)
    assert "100% of the states stay in memory from step to step" in kept.out
    assert "; commits every 10 minutes, and at the end" in kept.out
    assert "more would have been read" in kept.out
    stored = runs.train("stored", host_memory="64MiB", residency=0, **COSINE)
    assert "stay in memory" not in stored.out
    assert "more would have been read" not in stored.out
    assert "; commits every 10 steps, and at the end" in stored.out
    assert "; commits every 2 steps or 5 minutes, and at the end" in (
        runs.train("told", host_memory="64MiB", commit_every=2, commit_minutes=5, **COSINE).out
    )
    assert runs.curve("kept") == runs.curve("stored") == runs.curve("told")
    silent = read_metrics(runs.metrics("kept"))[2]
    assert (silent["nvme_read_bytes"], silent["nvme_written_bytes"]) == (0, 0)
    # Per element updated: two moments are not read (its weights are in their buffer anyway), nothing is written.
    assert silent["nvme_read_saved_bytes"] * 12 == silent["nvme_written_saved_bytes"] * 8 > 0


def test_guessing_takes_a_third_slot_or_a_commit_at_every_step(runs: Runs) -> None:
    clipped = {"clip_norm": 0.01, **COSINE}
    runs.train("exact", **clipped)
    runs.train("guessed", clip_mode="speculative", **clipped)
    assert runs.curve("guessed") == runs.curve("exact")
    with DirectEngine() as engine, Store.open(runs.job.folder / "guessed", engine=engine, writable=False) as store:
        assert store.num_slots == 3
    before = tree(runs.job.folder / "exact")
    more = ("--clip-mode", "speculative", "--steps", 6)
    refused = hoist(runs.capfd, "train", "--store", runs.job.folder / "exact", *more)
    assert refused.code == 2
    assert "needs a store of 3 slots a chunk, this one has 2: commit every step (--commit-every 1)" in refused.err
    assert tree(runs.job.folder / "exact") == before
    runs.train("exact", "--clip-mode", "speculative", "--steps", 7, "--commit-every", 1)
    runs.train("guessed", "--steps", 7)
    assert runs.curve("guessed") == runs.curve("exact")


def test_nothing_needs_to_be_named(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_at(runs, "parts", 2, **COSINE)
    monkeypatch.chdir(runs.job.folder)
    shutil.rmtree(runs.job.model)  # the store has all of it
    resumed = runs.train("parts")
    assert "resumed at step 2" in resumed.out
    assert "note" not in resumed.out
    runs.job = make_job(runs.job.folder)
    runs.train("whole", **COSINE)
    assert runs.curve("parts") == runs.curve("whole")
    again = runs.train("parts")
    assert again.out.startswith("done     nothing to do: the store is at step 5, and --steps is 5; ")


def test_attention_and_dropout_are_remembered(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    runs.job = make_job(tmp_path / "gpt2", family="gpt2")
    settings = {"attention": "eager", "dropout": 0.3, "seed": 5, "order": "shuffle", "steps": 4}
    stopped_at(runs, "parts", 2, **settings)
    runs.train("parts")
    runs.train("whole", **settings)
    assert runs.curve("parts") == runs.curve("whole")
    with DirectEngine(num_threads=1) as engine, Store.open(
        tmp_path / "gpt2" / "parts", engine=engine, writable=False
    ) as store:
        assert store.attributes["model"]["attention"] == "eager"
        assert store.attributes["model"]["dropout"] == 0.3


def test_what_is_told_otherwise_is_said(runs: Runs) -> None:
    runs.train("store", steps=2)
    resumed = runs.train("store", "--steps", 4, "--lr", 0.02, "--order", "shuffle", "--host-memory", "20MiB")
    notes = [line for line in resumed.out.splitlines() if line.startswith("note")]
    assert notes == [
        "note     changed since the last commit: --steps 4 (was 2), --lr 0.02 (was 0.01), "
        "--order shuffle (was sequential)",
        "note     --order: shuffle, stored sequential; windows are numbered anew from place 8",
    ]
    assert [lr for *_, lr in runs.curve("store")] == [0.01, 0.01, 0.02, 0.02]


def test_another_budget_and_another_cut_of_the_same_step(runs: Runs) -> None:
    runs.train("whole", steps=4)
    runs.train("parts", steps=2)
    runs.train("parts", "--steps", 3, "--host-memory", "2MiB")
    assert runs.curve("parts") == runs.curve("whole")[:3]
    runs.train("parts", "--steps", 4, "--micro-batches", 1, "--micro-batch-size", 4)
    (*_, last), (*_, expected) = runs.curve("parts"), runs.curve("whole")
    assert last[0] == expected[0]
    assert last[1:] == pytest.approx(expected[1:], rel=1e-5)


def test_fresh(runs: Runs) -> None:
    runs.train("store", steps=3)
    first = runs.curve("store")
    runs.metrics("store").unlink()
    done = runs.train("store", "--fresh", steps=3)
    assert "(new)" in done.out
    assert runs.curve("store") == first


def test_no_steps_make_the_store(runs: Runs) -> None:
    made = runs.train("store", steps=0, data=None)
    assert made.out.startswith("done     the store is made and holds the initial weights, step 0\n")
    assert "hoist train --store " in made.out
    before = tree(runs.job.folder / "store")
    again = runs.train("store")
    assert "the store is at step 0, and --steps is 0" in again.out
    assert tree(runs.job.folder / "store") == before
    runs.train("store", "--data", runs.job.data, "--steps", 2)
    runs.train("whole", steps=2)
    assert runs.curve("store") == runs.curve("whole")


def test_totals_are_the_run_s_not_the_call_s(runs: Runs) -> None:
    runs.train("parts", steps=2)
    done = runs.train("parts", "--steps", 4)
    losses = [line["loss"] for line in read_metrics(runs.metrics("parts"))]
    assert f"loss     {losses[0]:.4f} at step 1, {losses[3]:.4f} at step 4\n" in done.out
    assert re.search(r"nvme     [\d.]+ MiB read and [\d.]+ MiB written since the store was made\n", done.out)
    assert "done     2 steps in 0:0" in done.out


def test_the_default_job(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of what `hoist train` does without arguments."""
    monkeypatch.chdir(tmp_path)
    first = hoist(capfd, "train", "--steps", 1)
    assert first.code == 0, first.err
    assert {path.name for path in tmp_path.iterdir()} == {"hoist-store", "hoist-store.tokens"}
    assert "model    tiny: 13,115,648 parameters in 18 stages; weights and Adam moments are 150.1 MiB\n" in first.out
    assert " steps are one epoch; its text is read as bytes\n" in first.out
    assert "note" not in first.out  # its vocabulary is made for bytes
    assert "budget 32.0 MiB; the states are 4.7 times as large" in first.out
    assert "the promised 67.2 MiB\n" in first.out
    assert "go on    hoist train --store hoist-store --steps 2\n" in first.out
    assert "export   hoist export hoist-store hoist-store-model\n" in first.out


@pytest.mark.slow
def test_the_default_job_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hoist(capfd, "train", "--steps", 1).code == 0
    resumed = hoist(capfd, "train", "--steps", 2)
    assert resumed.code == 0, resumed.err
    assert "resumed at step 1" in resumed.out
    exported = hoist(capfd, "export", "hoist-store", "hoist-store-model")
    assert exported.code == 0, exported.err
