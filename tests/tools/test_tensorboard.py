"""`--tensorboard`: TensorBoard's own reader finds in the event files what the metrics' lines say, each step once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoist.scheduler.metrics import StepMetrics
from hoist.tools.errors import MetricsError
from hoist.tools.tensorboard_log import TensorboardLog, scalars
from hoist.tools.train import train
from tests.support.commands import SEQ_LEN, Job, hoist, make_job, read_metrics
from tests.support.models import VOCAB_SIZE
from tests.support.processes import mount_small_drive, run_in_process
from tests.support.reporters import Recorder

pytest.importorskip("tensorboard")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = make_job(tmp_path)
    np.save(tmp_path / "held-out.npy", np.random.default_rng(9).integers(3, VOCAB_SIZE, 5 * SEQ_LEN).astype(np.uint16))
    return made


def read_back(directory: Path) -> dict[str, dict[int, float]]:
    """Every value by name and step, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make: Any = EventAccumulator  # without types
    found = make(str(directory), size_guidance={"scalars": 0})
    found.Reload()
    values: dict[str, dict[int, float]] = {}
    for name in found.Tags()["scalars"]:
        events = found.Scalars(name)
        assert [event.step for event in events] == sorted({event.step for event in events}), f"{name}: a step twice"
        assert all(event.wall_time > 1.7e9 for event in events)
        values[name] = {event.step: event.value for event in events}
    return values


def told(path: Path) -> dict[str, dict[int, float]]:
    """The same of a metrics file: of several lines for a step the last one counts."""
    values: dict[str, dict[int, float]] = {}
    for line in read_metrics(path):
        for name, value in scalars(line):
            values.setdefault(name, {})[line["step"]] = value
    return values


def assert_same(directory: Path, metrics: Path) -> None:
    """Names, steps and values, these as float32."""
    expected, found = told(metrics), read_back(directory)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].keys() == values.keys(), name
        assert list(found[name].values()) == [float(np.float32(value)) for value in values.values()], name


def test_all_numbers_are_there_and_a_step_that_comes_again_replaces_the_first(job: Job) -> None:
    options = {
        "tensorboard": job.folder / "board", "metrics": job.folder / "m.jsonl", "eval_every": 2,
        "validation_data": (str(job.folder / "held-out.npy"),),
    }  # fmt: skip

    def run(**changed: object) -> None:
        told_options = job.options(**{name: value for name, value in options.items() if name != "validation_data"},
                                   **changed)  # fmt: skip
        train(_with(told_options, validation_data=options["validation_data"]), Recorder())

    run(steps=4)
    found = read_back(job.folder / "board")
    assert {"loss", "lr", "nvme_written_bytes", "busy_seconds/io", "stall_seconds/commit", "eval_loss"} <= found.keys()
    assert "step" not in found
    assert list(found["loss"]) == [1, 2, 3, 4]
    assert list(found["eval_loss"]) == [2, 4]
    assert_same(job.folder / "board", job.folder / "m.jsonl")
    run(steps=6)
    assert_same(job.folder / "board", job.folder / "m.jsonl")
    run(steps=3, fresh=True)  # the steps come again, and later ones are no part of this run
    lines = (job.folder / "m.jsonl").read_text().splitlines()
    (job.folder / "m.jsonl").write_text("\n".join(lines[9:]) + "\n")
    assert_same(job.folder / "board", job.folder / "m.jsonl")


def _with(options: Any, **changed: Any) -> Any:
    from dataclasses import replace

    return replace(options, given=options.given | changed.keys(), **changed)


def test_places_that_cannot_be_are_refused_before_anything_is_made(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    (job.folder / "file").write_text("")
    done = hoist(capfd, *job.arguments("--tensorboard", job.folder / "file" / "board"))
    assert done.code == 2
    where = f"--tensorboard {job.folder / 'file' / 'board'}"
    assert done.refusal() == f"{where}: nothing can be written there: Not a directory; name another directory"
    done = hoist(capfd, *job.arguments("--tensorboard", "/proc/board"))
    assert done.code == 2
    assert done.refusal().startswith("--tensorboard /proc/board: nothing can be written there: ")
    wanted = job.folder / "new" / "board"
    assert hoist(capfd, *job.arguments("--tensorboard", wanted, "--host-memory", "1MiB")).code == 2
    assert not wanted.parent.exists()
    assert not job.store.exists()


def test_without_the_package_one_line_says_what_to_install(job: Job) -> None:
    program = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "from hoist.tools.cli import run\n"
        f"sys.exit(run({list(map(str, job.arguments('--tensorboard', job.folder / 'board')))!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--tensorboard: needs tensorboard" in done.stderr
    assert "pip install tensorboard, or hoist-engine[tensorboard]" in done.stderr
    assert not job.store.exists()


def _fill(directory: Path, metrics: Path) -> str | None:
    """In a process of its own: the same step again and again, until the drive is full. Who told of it."""
    if not mount_small_drive(directory, 64 * 1024):
        return None
    step = StepMetrics(**read_metrics(metrics)[0])
    with TensorboardLog(directory, next_step=1) as log, pytest.raises(MetricsError) as raised:
        assert threading.active_count() == 1
        while True:
            log.write(step)
    return str(raised.value)


def test_a_full_drive_is_told_by_the_step_that_meets_it_and_once(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """No thread of its own would print a traceback, and closing adds nothing."""
    metrics = job.folder / "m.jsonl"
    train(job.options(steps=1, metrics=metrics), Recorder())
    board = job.folder / "board"
    board.mkdir()
    code, answer = run_in_process(_fill, board, metrics)
    if answer is None:
        pytest.skip("no small file system can be mounted here")
    assert code == 0
    assert answer == f"--tensorboard {board}: cannot be written: No space left on device"
    assert capfd.readouterr().err == ""
