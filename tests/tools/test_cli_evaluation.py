"""`hoist train` with validation data: what is evaluated and when, that training is as without, what is refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hoist.tools.train import train
from tests.support.commands import SEQ_LEN, Job, curve, hoist, make_job, read_metrics, tree
from tests.support.models import VOCAB_SIZE
from tests.support.reporters import Recorder, sending


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = make_job(tmp_path)
    rng = np.random.default_rng(9)
    np.save(tmp_path / "held-out.npy", rng.integers(3, VOCAB_SIZE, 5 * SEQ_LEN).astype(np.uint16))
    return made


def run(job: Job, store: str, *, report: Recorder | None = None, **options: object) -> Recorder:
    """Train in a store of its own, with its metrics beside it."""
    report = report or Recorder()
    told = job.options(store=job.folder / store, metrics=job.folder / f"{store}.jsonl", **options)
    train(told, report)
    return report


def lines(job: Job, store: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics' lines of steps, and those of evaluations."""
    found = read_metrics(job.folder / f"{store}.jsonl")
    return [line for line in found if "loss" in line], [line for line in found if "eval_loss" in line]


def test_evaluations_come_when_they_are_due_and_change_nothing(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    told = ["--validation-data", job.folder / "held-out.npy", "--eval-every", 2, "--metrics", job.folder / "m.jsonl"]
    done = hoist(capfd, *job.arguments(*told, steps=5))
    assert done.code == 0, done.err
    run(job, "plain", steps=5)
    found = read_metrics(job.folder / "m.jsonl")
    assert [line["step"] for line in found] == [1, 2, 2, 3, 4, 4, 5, 5]
    evaluations = [line for line in found if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 5]
    steps = [line for line in found if "loss" in line]
    assert [(line["loss"], line["grad_norm"]) for line in steps] == [
        (loss, norm) for _, loss, norm, _ in curve(job.folder / "plain.jsonl")
    ]
    last = evaluations[-1]
    # As many micro-batches as a step has: 2 of 2 rows, of the 5 there are.
    assert (last["eval_tokens"], last["eval_counted"]) == (4 * SEQ_LEN, 4 * (SEQ_LEN - 1))
    assert "         an evaluation takes 4 of the 5 validation rows (--eval-batches 0: all)\n" in done.out
    shown = [line for line in done.out.splitlines() if line.startswith("eval ")]
    assert [line.split(": loss ")[0] for line in shown] == ["eval     step 2", "eval     step 4", "eval     step 5"]
    assert f": loss {last['eval_loss']:.4f} over 60 labels; 64 tokens in " in shown[-1]


def test_the_loss_is_that_of_the_exported_model(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """All rows, in passes of as many as a step has; the last pass and its last micro-batch are smaller."""
    told = ["--validation-data", job.folder / "held-out.npy", "--eval-batches", 0]
    assert hoist(capfd, *job.arguments(*told, steps=2, metrics=job.folder / "store.jsonl")).code == 0
    (found,) = lines(job, "store")[1]
    assert hoist(capfd, "export", job.folder / "store", job.folder / "exported").code == 0
    model = AutoModelForCausalLM.from_pretrained(job.folder / "exported", dtype=torch.float32)
    ids = torch.from_numpy(np.load(job.folder / "held-out.npy").astype(np.int64)).view(5, SEQ_LEN)
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss)
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["eval_counted"] == 5 * (SEQ_LEN - 1)


def test_a_split_holds_rows_out(job: Job) -> None:
    split = run(job, "split", steps=4, validation_split=0.25, eval_every=4, eval_batches=0, order="shuffle")
    (start,) = split.starts
    assert (start.num_windows, start.num_validation_rows, start.num_validation_rows_there) == (36, 12, 12)
    (found,) = split.evaluations
    assert found.eval_tokens == 12 * SEQ_LEN
    # A resume goes on in the same split, and says where it is told another one.
    run(job, "parts", steps=2, validation_split=0.25, order="shuffle")
    run(job, "parts", steps=4, eval_batches=0, order="shuffle", validation_split=0.25)
    assert curve_of(job, "parts") == curve_of(job, "split")
    assert lines(job, "parts")[1][-1]["eval_loss"] == found.eval_loss
    other = run(job, "parts", steps=5, order="shuffle", validation_split=0.1)
    assert [notice for notice in other.notices if notice.startswith("--validation-split")] == [
        "--validation-split: 0.1, stored 0.25; windows are numbered anew from place 16"
    ]


def curve_of(job: Job, store: str) -> list[float]:
    return [line["loss"] for line in lines(job, store)[0]]


def test_options_of_evaluations_are_remembered(job: Job) -> None:
    run(job, "store", steps=2, validation_split=0.25, eval_every=1)
    told = job.options(
        store=job.folder / "store", metrics=job.folder / "store.jsonl", steps=3, model=None, seq_len=None, lr=None,
        host_memory=None, micro_batch_size=None, micro_batches=None,
    )  # fmt: skip
    report = Recorder()
    train(told, report)
    assert [line["step"] for line in lines(job, "store")[1]] == [1, 2, 3]
    assert not any("validation" in notice for notice in report.notices)


def test_a_signal_ends_an_evaluation(job: Job) -> None:
    """Of one that has not begun when it comes there is no line; the step is committed."""
    report = sending(signal.SIGTERM, "step 2")
    run(job, "store", report=report, steps=4, validation_split=0.25, eval_every=2)
    assert (len(report.steps), report.evaluations) == (2, [])
    assert "the evaluation after step 2 was cut short by the signal, and is left out" in report.notices
    again = run(job, "store", steps=4, validation_split=0.25, eval_every=2)
    assert [found.step for found in again.evaluations] == [4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--validation-split", "0.6"], "--validation-split: 0.6 is not allowed; give a share from 0 to 0.5"),
        (["--validation-split", "0.01"], "--validation-split: 0.01 of 48 rows is none; give more data or a"),
        (["--validation-split", "0.1", "--validation-data", "x"], "--validation-split: 0.1 is not allowed with --val"),
        (["--eval-every", "2"], "--eval-every: 2 is not allowed without data to evaluate with; give --validation-data"),
        (["--eval-batches", "2"], "--eval-batches: 2 is not allowed without data to evaluate with"),
        (["--validation-data", "absent"], "--validation-data absent: there is no such file or folder; look at"),
        (["--validation-split", "0.5", "--micro-batches", "13"], "--data "),
    ],
)  # fmt: skip
def test_what_is_refused(
    options: list[str], message: str, job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.folder)
    before = tree(job.folder)
    line = hoist(capfd, *job.arguments(*options)).refusal()
    assert line.startswith(message)
    assert tree(job.folder) == before


def test_bad_validation_data_is_told_by_its_option(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    bad = job.folder / "bad.jsonl"
    bad.write_text(json.dumps({"text": 3}) + "\n")
    line = hoist(capfd, *job.arguments("--validation-data", bad)).refusal()
    assert line == f"--validation-data {bad}: line 1: text is a number, must be a string"
    np.save(job.folder / "short.npy", np.arange(5))
    before = tree(job.folder)
    line = hoist(capfd, *job.arguments("--validation-data", job.folder / "short.npy")).refusal()
    assert line.startswith(f"--validation-data {job.folder / 'short.npy'}: has 5 tokens, an evaluation needs 16 (")
    assert tree(job.folder) == before
