"""How long work looks: a bar that fits any terminal, lines now and then in a log, nothing with --quiet."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path

import pytest
from rich.console import Console

from hoist.tools import cli
from hoist.tools.progress import LOG_SECONDS, LongWork
from tests.support.commands import Job, Result, hoist, make_job
from tests.support.processes import run_in_process

MIB = 2**20


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def in_a_log(clock: Clock, *, quiet: bool = False) -> tuple[LongWork, io.StringIO]:
    file = io.StringIO()
    return LongWork(Console(file=file, force_terminal=False, _environ={}), quiet=quiet, clock=clock), file


def test_a_log_gets_a_line_for_each_half_minute() -> None:
    clock = Clock()
    work, file = in_a_log(clock)
    for number in range(100):
        work.progress("importing", number * MIB, 100 * MIB)
        clock.now += 1.0
    lines = file.getvalue().splitlines()
    assert lines == ["importing 30% ...", "importing 60% ...", "importing 90% ..."]
    assert LOG_SECONDS == 30.0


def test_short_work_leaves_nothing_in_a_log() -> None:
    clock = Clock()
    work, file = in_a_log(clock)
    for what in ("reserving space", "writing weights", "checking"):
        for number in range(29):  # together much longer
            work.progress(what, number, 29)
            clock.now += 1.0
        work.end()
    assert not file.getvalue()


def test_quiet_work_leaves_nothing() -> None:
    clock = Clock()
    work, file = in_a_log(clock, quiet=True)
    for number in range(100):
        work.progress("importing", number, 100)
        clock.now += 10.0
    assert not file.getvalue()


class _Waking(io.StringIO):
    """A log that says when it has got a line."""

    def __init__(self) -> None:
        super().__init__()
        self.got = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.getvalue().endswith("\n"):
            self.got.set()
        return count


def test_work_of_unknown_length_says_in_a_log_that_it_goes_on() -> None:
    """Without being asked, as a commit tells nothing before it is over; and nothing after that."""
    file = _Waking()
    work = LongWork(Console(file=file, force_terminal=False, _environ={}), log_seconds=1e-3)
    with work.during("committing"):
        assert file.got.wait(60.0)
    told = file.getvalue()
    assert re.fullmatch(r"(committing, \d+ s so far \.\.\.\n)+", told)
    work.progress("exporting", 1, 2)
    assert "committing" not in file.getvalue().removeprefix(told)
    assert not [thread for thread in threading.enumerate() if thread.name == "hoist-progress"]


@pytest.mark.parametrize("width", [28, 40, 60, 80, 200])
def test_a_bar_fits_the_terminal(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, height=10, force_terminal=True, color_system=None, _environ={})
    with LongWork(console) as work:
        work.progress("reading validation data", 0, 5000 * MIB)
        work.progress("reading validation data", 2500 * MIB, 5000 * MIB)
        assert work._bar is not None
        work._bar.refresh()
    lines = [line.rstrip() for line in _plain(file.getvalue()).splitlines()]
    assert all(len(line) <= width for line in lines), lines
    last = next(line for line in reversed(lines) if "50%" in line)
    assert ("2.4 GiB of 4.9 GiB" in last) == (width >= 80)
    assert last.startswith("reading validation data")
    _assert_one_line(file.getvalue())


def test_a_bar_follows_the_terminal_that_changes() -> None:
    file = io.StringIO()
    console = Console(file=file, width=120, height=10, force_terminal=True, color_system=None, _environ={})
    with LongWork(console) as work:
        work.progress("exporting", MIB, 2 * MIB)
        assert work._bar is not None
        console.width = 40
        work._bar.refresh()
        narrow = _plain(file.getvalue()).splitlines()[-1]
    assert len(narrow.rstrip()) <= 40 and "50%" in narrow and "MiB" not in narrow


def test_counts_have_their_unit_and_work_of_unknown_length_its_time() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, height=10, force_terminal=True, color_system=None, _environ={})
    with LongWork(console) as work:
        work.progress("evaluating", 5, 12, "rows")
        with work.during("committing"):
            pass
    text = _plain(file.getvalue())
    assert "5 of 12 rows" in text and "committing" in text
    assert "0:00:00" in text


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def _assert_one_line(text: str) -> None:
    """The cursor never goes up: a bar of one line is drawn over itself."""
    assert not re.search(r"\x1b\[\d*A(?!\x1b\[2K$)", text.rpartition("\x1b[?25h")[0])


# --- whole commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Job:
    """A job whose store is trained, by a quiet command."""
    job = make_job(tmp_path)
    assert hoist(capfd, *job.arguments("--quiet", steps=1)) == Result(code=0, out="", err="")
    return job


def _at_terminal(name: str, arguments: list[str]) -> int:
    """In a process of its own: a command whose streams are a terminal."""
    terminal = os.open(name, os.O_RDWR)
    for stream in range(3):
        os.dup2(terminal, stream)
    os.environ["TERM"] = "xterm-256color"
    os.environ.pop("COLUMNS", None)
    return cli.run(arguments)


def on_terminal(*arguments: object, columns: int) -> tuple[int, str]:
    """Exit code of a command at a terminal of that width, and all that it wrote there."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that nobody has the terminal open any more
            while part := os.read(main, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    ended, code = run_in_process(_at_terminal, os.ttyname(terminal), [str(argument) for argument in arguments])
    os.close(terminal)
    reader.join()
    os.close(main)
    assert ended == 0
    return code, b"".join(parts).decode()


def test_quiet_tells_that_a_trace_was_lost(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """The run goes on, but what was asked for is not there."""
    ended = hoist(capfd, "train", "--store", job.store, "--steps", 2, "--trace", "/dev/full", "--quiet")
    told = "ERROR: the trace /dev/full ends here, it cannot be written: No space left on device\n"
    assert ended == Result(code=0, out="", err=told)


def test_a_narrow_terminal(job: Job) -> None:
    code, text = on_terminal("export", job.store, job.folder / "narrow", "--verify", columns=40)
    assert code == 0
    assert "exporting" in text and "checking the export" in text
    assert all(len(line) <= 40 for line in _plain(text).splitlines() if "exporting" in line)
    assert _plain(text).rstrip().endswith(")")  # the last line is what was done: no bar is left


def test_a_pipe_has_no_carriage_returns_and_no_bar(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["train", "--store", job.store, "--steps", 2],
        ["export", job.store, job.folder / "piped", "--verify"],
        ["verify", job.store],
    ):
        ended = hoist(capfd, *arguments)
        assert ended.code == 0 and ended.out and not ended.err
        assert "\r" not in ended.out and "\x1b" not in ended.out


@pytest.mark.parametrize("before", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_quiet_commands_say_what_was_asked_for(
    before: bool, job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> Result:
        return hoist(capfd, *(["--quiet", *arguments] if before else [*arguments, "--quiet"]))

    for arguments in (
        ["snapshot", job.store, "kept"],
        ["verify", job.store],
        ["export", job.store, tmp_path / "exported"],
        ["restore", job.store, "kept"],
        ["snapshot", job.store, "kept", "--remove"],
        ["train", "--store", job.store, "--steps", 2],
        ["report", job.store, "--html", tmp_path / "report.html"],
    ):
        assert run(*arguments) == Result(code=0, out="", err=""), arguments
    assert json.loads(run("verify", job.store, "--json").out)["ok"]
    assert run("drives", job.store).out
    refused = run("verify", tmp_path)
    assert refused.code == 2 and refused.line()
    assert hoist(capfd, "snapshot", job.store, "loud").out  # the next command is not


@pytest.mark.parametrize("before", [pytest.param(False, marks=pytest.mark.slow), True])
def test_log_levels(before: bool, job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    def run(level: str, *arguments: object) -> Result:
        option = ["--log-level", level]
        return hoist(capfd, *([*option, *arguments] if before else [*arguments, *option]))

    told = run("info", "train", "--store", job.store, "--steps", 2)
    assert told.code == 0
    for text in ("I/O engine direct", "opened at step", "memory for a budget of", "is committed as generation"):
        assert text in told.err
    assert "DEBUG" not in told.err
    assert re.search(r"DEBUG: plan .*: \d+ ops", run("debug", "train", "--store", job.store, "--steps", 3).err)
    assert not run("warning", "verify", job.store).err
    assert "'loud' is not one of debug, info, warning, error" in run("loud", "verify", job.store).refusal()
