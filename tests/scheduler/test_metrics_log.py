"""Metrics files: lines whole or not at all, mended after a power cut, and read past crashes, restores and rubbish.

`--metrics FILE` of the command line is also `tests/tools/test_cli_faults.py`'s.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoist.scheduler import metrics_log
from hoist.scheduler.metrics_log import LineFile, MetricsLog, Recorded, read_metrics
from hoist.tiers.format import METRICS_NAME
from tests.support.models import tiny_config
from tests.support.training import Engine, make_steps, torch_threads, trainer_on


def step(number: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": number, "loss": loss}


def evaluation(number: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": number, "eval_loss": loss}


def numbers(found: Recorded) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    return (
        [(line["step"], line["loss"]) for line in found.steps],
        [(line["step"], line["eval_loss"]) for line in found.evaluations],
    )


def write(path: Path, *records: dict[str, Any]) -> None:
    with LineFile(path, cut_torn=True) as file:
        for record in records:
            file.write(record)


# ---------------------------------------------------------------------- a trainer's


def test_every_step_of_a_run_is_in_the_store_whoever_asked_and_goes_on_after_it(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(3, 1)
    with torch_threads(1):
        with trainer_on(directory, tiny_config("llama"), steps, Engine()) as trainer:
            told = [trainer.step(steps[0]).to_json()]
            trainer.log(evaluation(1, 3.5))
            trainer.commit()
            lost = trainer.step(steps[1]).to_json()
            assert read_metrics(directory / METRICS_NAME).steps == (told[0], lost)
        with trainer_on(directory, tiny_config("llama"), steps, Engine(), status_seconds=0.0) as trainer:
            told += [trainer.step(each).to_json() for each in steps[1:]]
            with pytest.raises(ValueError, match="JSON"):
                trainer.log({"step": 3, "eval_loss": math.nan})
    found = read_metrics(directory / METRICS_NAME)
    assert list(found.steps) == told
    assert found.evaluations == (evaluation(1, 3.5),)
    assert len((directory / METRICS_NAME).read_bytes().splitlines()) == 5


def test_nothing_that_was_written_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    child = os.fork()
    if not child:
        try:
            log = MetricsLog(path)
            for number in range(1, 50):
                log.write(step(number))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [line["step"] for line in read_metrics(path).steps] == list(range(1, 50))


# ---------------------------------------------------------------------- writing


def num_writes() -> int:
    """write(2) and the like that this process has made so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw:"))


def test_a_line_is_one_system_call(tmp_path: Path) -> None:
    with LineFile(tmp_path / "m") as file:
        before = num_writes()
        for number in range(5):
            file.write(step(number) | {"long": "x" * 100_000})
        assert num_writes() == before + 5


@contextmanager
def drive_full_at(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes; the call that would is cut short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("cut", [1, 10, 23, 24, 25])
def test_a_torn_last_line_of_the_stores_is_cut_and_a_whole_one_is_ended(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, step(1), step(2))
    data = path.read_bytes()
    whole = len(data) // 2
    path.write_bytes(data[: whole + cut])
    write(path, step(3))
    steps = [json.loads(line)["step"] for line in path.read_bytes().splitlines()]
    assert steps == ([1, 2, 3] if cut >= whole - 1 else [1, 3])


def test_a_torn_last_line_of_another_file_is_only_ended(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"somebody's notes")
    with LineFile(path) as file:
        file.write(step(1))
    assert path.read_bytes() == b'somebody\'s notes\n{"step": 1, "loss": 1.0}\n'
    assert [line["step"] for line in read_metrics(path).steps] == [1]


def test_a_long_torn_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, step(1))
    with path.open("ab") as file:
        file.write(b'{"step": 2, "' + b"x" * 200_000)
    write(path, step(3))
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 3]
    path.write_bytes(b"x" * 200_000)
    write(path, step(4))
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [4]


def test_a_full_drive_takes_lines_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m"
    log = MetricsLog(path)
    log.write(step(1))
    with drive_full_at(path.stat().st_size + 10), caplog.at_level(logging.WARNING):
        log.write(step(2))
        log.write(step(3))
    log.write(step(4))
    log.close()
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 4]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path}: cannot be written: File too large; the run goes on, steps will be missing there"
    )


def test_a_log_that_cannot_be_opened_is_opened_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m"
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        log = MetricsLog(path)
        log.write(step(1))
        log.sync()
    assert len(caplog.records) == 1
    path.rmdir()
    log.write(step(2))
    log.close()
    log.close()
    assert [line["step"] for line in read_metrics(path).steps] == [2]


# ---------------------------------------------------------------------- reading


def test_the_last_line_of_a_step_counts_and_what_came_after_it_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, step(1), step(2, 2.0), evaluation(2), step(3), step(4), evaluation(4))
    write(path, step(2, 2.5), evaluation(2, 7.0), evaluation(2, 8.0))  # brought back to step 1
    assert numbers(read_metrics(path)) == ([(1, 1.0), (2, 2.5)], [(2, 8.0)])
    write(path, step(3, 3.5))
    assert numbers(read_metrics(path)) == ([(1, 1.0), (2, 2.5), (3, 3.5)], [(2, 8.0)])


def test_a_pipe_holds_neither_a_run_nor_a_reader_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m"
    os.mkfifo(path)
    log = MetricsLog(path)
    log.write(step(1))
    path.unlink()
    log.write(step(2))
    log.close()
    assert numbers(read_metrics(path))[0] == [(2, 1.0)]
    assert f"{path}: cannot be written: is no regular file; the run goes on" in caplog.text
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is no regular file"):
        read_metrics(path)


def test_a_huge_file_is_read_at_its_end_and_a_huge_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, step(1))
    with path.open("r+b") as file:
        file.truncate(metrics_log.MAX_READ_BYTES)  # a gap takes no room, and reads as one line of zeros
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + json.dumps(step(7)).encode() + b"\n" + b"x" * (3 * 2**20))
    with LineFile(path, cut_torn=True) as file_of_lines:
        file_of_lines.write(step(8))
    found = read_metrics(path)
    assert numbers(found)[0] == [(7, 1.0), (8, 1.0)]
    assert found.unread_bytes == path.stat().st_size - metrics_log.MAX_READ_BYTES > 0


def test_a_number_that_json_has_no_word_for_is_none(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1e999}\n{"step": 1%s, "loss": 1}\n' % ("0" * 400))
    assert [line["loss"] for line in read_metrics(path).steps] == [None, None]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == Recorded(steps=(), evaluations=())


def test_lines_that_are_no_record_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m"
    rubbish = [b"", b"{", b"[1]", b"7", b'{"step": "x", "loss": 1}', b'{"step": true, "loss": 1}', b'{"step": 1}',
               b"\xff\xfe", b"\0\0\0\0", b"[" * 100_000]  # fmt: skip
    path.write_bytes(b"\n".join([*rubbish, b'{"step": 5, "loss": null}', *rubbish, b'{"step": 6, "lo']))
    assert [line["step"] for line in read_metrics(path).steps] == [5]


@given(
    runs=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=5),
    cuts=st.lists(st.integers(0, 30), min_size=5, max_size=5),
)
def test_of_any_history_the_last_attempt_at_each_step_is_read(
    runs: list[tuple[int, int]], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs that begin anywhere that the one before had come to, and end in a torn line."""
    path = tmp_path_factory.mktemp("log") / "m"
    expected: dict[int, float] = {}
    for attempt, ((start, count), cut) in enumerate(zip(runs, cuts, strict=False)):
        start = min(start, max(expected, default=0))
        expected = {number: loss for number, loss in expected.items() if number <= start}
        for number in range(start + 1, start + count + 1):
            write(path, step(number, float(attempt)))
            expected[number] = float(attempt)
        torn = (json.dumps(step(99)) + "\n").encode()[:-1][:cut]
        with path.open("ab") as file:
            file.write(torn if len(torn) < len(json.dumps(step(99))) else b"")
    assert numbers(read_metrics(path))[0] == sorted(expected.items())
