"""SIGINT and SIGTERM: the first ends a run where it is whole, the second at once; a resume goes on as if none came."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from hoist.tools.errors import StoppedError
from hoist.tools.options import TrainOptions
from hoist.tools.report import RunEnd
from hoist.tools.train import train
from tests.support.commands import Job, curve, hoist, make_job, process_arguments, tree
from tests.support.reporters import Recorder, sending

STEPS = 5
SCHEDULE = {"lr_schedule": "cosine", "warmup_steps": 2, "steps": STEPS}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


def options(job: Job, **changed: object) -> TrainOptions:
    return job.options(**{**SCHEDULE, **changed})


def committed_step(store: Path) -> int:
    with DirectEngine(num_threads=1) as engine, Store.open(store, engine=engine, writable=False, check="crc") as opened:
        assert opened.record is not None
        return opened.record.step


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".tmp" in path.name]


def stop(job: Job, reporter: Recorder, **changed: object) -> RunEnd:
    """Train with the reporter; afterwards signals have their usual effect again."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        return train(options(job, **changed), reporter)
    finally:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "reading data"),
        (signal.SIGTERM, "reserving space"),
        (signal.SIGINT, "writing weights"),
    ],
)
def test_before_there_is_a_store(job: Job, number: signal.Signals, moment: str) -> None:
    text = job.folder / "text"
    text.mkdir()
    for name in "ab":
        (text / f"{name}.txt").write_text("a line of text\n" * 100)
    before = tree(job.folder)
    with pytest.raises(StoppedError, match=f"stopped by {number.name}; what was unfinished is removed") as stopped:
        stop(job, sending(number, moment), data=text)
    assert stopped.value.exit_code == 128 + number
    cache = Path(f"{job.store}.tokens")
    if moment == "reading data":
        assert tree(job.folder) == before
    else:  # the ids are whole, and of use to the next try
        assert tree(job.folder) == before | tree(job.folder, cache) and not job.store.exists()
        assert not temporary_files(job.folder)


def test_before_the_first_step(job: Job) -> None:
    end = stop(job, sending(signal.SIGTERM, "plan"))
    assert (end.signal, end.step, end.num_steps) == (signal.SIGTERM, 0, 0)
    assert committed_step(job.store) == 0


def test_in_the_run(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    whole, parts = job.folder / "whole.jsonl", job.folder / "parts.jsonl"
    end = stop(job, sending(signal.SIGINT, "step 3"), metrics=parts, commit_every=100)
    assert (end.signal, end.step, end.num_steps) == (signal.SIGINT, 3, 3)
    assert committed_step(job.store) == 3
    assert not temporary_files(job.folder)
    resumed = hoist(capfd, "train", "--store", job.store, "--metrics", parts)
    assert resumed.code == 0, resumed.err
    assert f"store    {job.store} (resumed at step 3)" in resumed.out
    # in the last step nothing is cut short
    uninterrupted = stop(job, sending(signal.SIGINT, f"step {STEPS}"), store=job.folder / "other", metrics=whole)
    assert uninterrupted.signal == 0
    assert curve(parts) == curve(whole)
    assert len(curve(whole)) == STEPS


def test_a_second_signal_ends_at_once(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    parts = job.folder / "parts.jsonl"
    program = f"""
import signal
from hoist.tools.train import train
from tests.support.reporters import sending
from tests.tools.test_cli_signals import Job, Path, options
job = Job.at(Path({str(job.folder)!r}))
train(options(job, commit_every=2, metrics={str(parts)!r}), sending(signal.SIGTERM, "step 4", times=2))
"""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ, "PYTHONPATH": path})
    assert ended.returncode == -signal.SIGTERM
    assert committed_step(job.store) == 2  # step 4 is committed in step 5, which never began
    rest = job.folder / "rest.jsonl"
    assert hoist(capfd, "train", "--store", job.store, "--metrics", rest).code == 0
    assert not temporary_files(job.folder)
    before, after = curve(parts), curve(rest)
    assert [line[0] for line in before] == [1, 2, 3, 4]
    assert after[:2] == before[2:]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_process(job: Job, number: signal.Signals) -> None:
    """The real thing: a signal from outside, at any moment of a step."""
    many = 100_000
    process = subprocess.Popen(
        process_arguments(job.arguments(steps=many, commit_every=many)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if f"1/{many}" in line:
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 128 + number, err
    step = committed_step(job.store)
    assert step >= 1
    told = f"hoist: stopping after step {step}; press again to end at once\n"
    assert err == (told if number == signal.SIGINT else "")
    assert f"stopped  on request after step {step} of {many}; everything is committed" in out
    assert f"go on    hoist train --store {job.store}\n" in out
    assert not temporary_files(job.folder)
