"""SIGINT and SIGTERM: the first ends a run where it is whole, the second at once; a resume goes on as if neither came."""

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

STEPS = 6
SCHEDULE = {"lr_schedule": "cosine", "warmup_steps": 2}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


def options(job: Job, *more: object, **changed: object) -> TrainOptions:
    words = [str(word) for word in job.arguments(*more, **{"steps": STEPS, **SCHEDULE, **changed})[1:]]
    told = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    return TrainOptions.make(config=None, command_line={**told, "data": (told["data"],)})


def committed_step(store: Path) -> int:
    with DirectEngine(num_threads=1) as engine, Store.open(store, engine=engine, writable=False, check="crc") as opened:
        assert opened.record is not None
        return opened.record.step


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".new")) or ".tmp" in path.name]


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
    with pytest.raises(StoppedError, match=f"stopped by {number.name} before the work was done; nothing") as stopped:
        stop(job, sending(number, moment), data=text)
    assert stopped.value.exit_code == 128 + number
    cache = Path(f"{job.store}.tokens")
    if moment == "reading data":
        assert tree(job.folder) == before
    else:  # the ids are whole, and of use to the next try
        assert tree(job.folder) == before | tree(job.folder, cache) and not job.store.exists()
        assert not temporary_files(job.folder)


@pytest.mark.parametrize(("number", "moment", "step"), [(signal.SIGTERM, "plan", 0), (signal.SIGINT, "step 3", 3)])
def test_in_the_run(
    job: Job, number: signal.Signals, moment: str, step: int, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, parts = job.folder / "whole.jsonl", job.folder / "parts.jsonl"
    end = stop(job, sending(number, moment), metrics=parts, commit_every=100)
    assert (end.signal, end.step, end.num_steps) == (number, step, step)
    assert committed_step(job.store) == step
    assert not temporary_files(job.folder)
    resumed = hoist(capfd, "train", "--store", job.store, "--metrics", parts)
    assert resumed.code == 0, resumed.err
    assert f"store    {job.store} (resumed at step {step})" in resumed.out
    uninterrupted = train(options(job, store=job.folder / "other", metrics=whole), Recorder())
    assert uninterrupted.signal == 0
    assert curve(parts) == curve(whole)
    assert len(curve(whole)) == STEPS


def test_in_the_last_step_nothing_is_cut_short(job: Job) -> None:
    assert stop(job, sending(signal.SIGINT, f"step {STEPS}")).signal == 0


def test_a_second_signal_ends_at_once(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    parts = job.folder / "parts.jsonl"
    program = f"""
import signal
from hoist.tools.train import train
from tests.support.reporters import sending
from tests.tools.test_cli_signals import make_job, options
from pathlib import Path
job = make_job(Path({str(job.folder)!r}))
train(options(job, commit_every=2, metrics={str(parts)!r}), sending(signal.SIGTERM, "step 4", times=2))
"""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ, "PYTHONPATH": path})
    assert ended.returncode == -signal.SIGTERM
    step = committed_step(job.store)
    assert step in (2, 4)  # 4 is committed in step 5, which never began
    assert step == 2
    rest = job.folder / "rest.jsonl"
    assert hoist(capfd, "train", "--store", job.store, "--metrics", rest).code == 0
    assert not temporary_files(job.folder)
    again = {line[0]: line for line in curve(rest)}
    assert [again[line[0]] for line in curve(parts) if line[0] in again] == [line for line in curve(parts) if line[0] > 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
    assert err == ""
    step = committed_step(job.store)
    assert step >= 1
    assert f"stopped  on request after step {step} of {many}; everything is committed" in out
    assert f"go on    hoist train --store {job.store}\n" in out
    assert not temporary_files(job.folder)
