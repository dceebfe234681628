"""`hoist inspect` beside real runs, on real terminals: while one trains, after it was killed, and as it is watched."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hoist.scheduler.status import StateBytes
from hoist.tiers.format import COMMIT_NAME, LOCK_NAME, STATUS_NAME
from hoist.tiers.lock import StoreLock
from hoist.tools.inspection.looking import Condition, inspect_store
from hoist.tools.inspection.watch import ends
from tests.support.commands import hoist, make_job, process_arguments, tree
from tests.support.inspected import many_layouts, status_of, write_status, write_store

LAYOUTS = many_layouts(40)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A store in which a run seems to train: this process."""
    directory = tmp_path / "store"
    write_store(directory, LAYOUTS)
    write_status(directory, status_of(LAYOUTS, stage=20), interval_seconds=1000.0)
    lock = StoreLock(directory / LOCK_NAME)
    yield directory
    lock.release()


def test_a_run_is_seen_as_it_trains_dies_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path, num_steps=2000)
    arguments = job.arguments("--commit-every", "2", steps=1500)
    with subprocess.Popen(process_arguments(arguments), stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            next(line for line in run.stdout if line.split()[:1] == ["1/1500"])
            steps: set[int] = set()
            while len(steps) < 3:  # documents come once a second
                found = inspect_store(job.store)
                assert found.condition is Condition.RUNNING, found.message
                assert found.message.startswith(f"process {run.pid} on ")
                assert (found.notes, found.damage) == ((), ())
                assert found.status is not None
                assert found.view.record is not None
                steps.add(found.status.position.step)
                assert found.num_steps == 1500
                assert found.stages[0].name == "embed"
                assert all(stage.kinds[0] != StateBytes() for stage in found.stages)  # weights are somewhere
            result = hoist(capfd, "inspect", job.store)
            assert (result.code, result.err) == (0, "")
            assert "running" in result.out
            assert "direct: " in result.out
        finally:
            run.kill()
    before = tree(job.store)
    found = inspect_store(job.store)
    assert found.condition is Condition.DIED
    assert found.view.record is not None
    result = hoist(capfd, "inspect", job.store)
    assert tree(job.store) == before
    assert result.code == 0
    assert f"the store opens at step {found.view.record.step}" in result.out
    assert f"next     hoist train --store {job.store}" in result.out
    more = found.view.record.step + 1
    assert hoist(capfd, *job.arguments(steps=more)).code == 0
    found = inspect_store(job.store)
    assert found.condition is Condition.ENDED
    assert found.message.endswith(f"the store opens at step {more}")


def test_json_lines_go_on_whatever_becomes_of_the_store(store: Path) -> None:
    arguments = process_arguments(["inspect", store, "--watch", "--every", "0.1", "--json"])
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout is not None

            def until(name: str, value: str) -> None:
                for line in watch.stdout or ():
                    document = json.loads(line)
                    if value in str(document.get(name)):
                        return
                raise AssertionError((watch.stderr or watch.stdout).read())  # type: ignore[union-attr]  # both are pipes

            until("condition", "running")
            (store / STATUS_NAME).write_bytes(b'{"format_version": 1, "sto')
            until("notes", "not JSON")
            write_status(store, status_of(LAYOUTS), interval_seconds=1000.0)
            until("condition", "running")
            (store / COMMIT_NAME).rename(store / "away")
            until("condition", "creating")
            (store / "away").rename(store / COMMIT_NAME)
            until("condition", "running")
            store.rename(store.with_name("elsewhere"))
            until("error", "does not exist")
            store.with_name("elsewhere").rename(store)
            until("condition", "running")
            watch.send_signal(signal.SIGINT)
            assert watch.wait() == 130
            assert watch.stderr is not None
            assert watch.stderr.read() == ""
        finally:
            watch.kill()


# --- terminals ------------------------------------------------------------------------------------------------------


class Terminal:
    """A program on a terminal of its own, which this process reads and types on."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.descriptor = descriptor
        self.seen = b""

    def until(self, text: str) -> None:
        """Read until it has written ``text`` since the last call."""
        while text.encode() not in self.seen:
            assert select.select([self.descriptor], [], [], 60)[0], self.seen[-5000:]
            try:
                self.seen += os.read(self.descriptor, 65536)
            except OSError as error:  # it has ended
                raise AssertionError(self.seen.decode(errors="replace")) from error
        self.seen = self.seen[self.seen.index(text.encode()) :]

    def resize(self, columns: int, lines: int) -> None:
        """As if its window were dragged."""
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def terminal(*arguments: object, columns: int, lines: int, **environment: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    told = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        process_arguments(arguments), stdin=theirs, stdout=theirs, stderr=theirs,
        env={**told, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    try:
        yield Terminal(process, ours)
        process.wait()
        assert termios.tcgetattr(theirs)[3] == before[3]  # echo and lines are as they were
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_watching_in_place(store: Path) -> None:
    with terminal("inspect", store, "--watch", "--every", "0.1", columns=80, lines=30) as screen:
        screen.until("\x1b[?1049h")  # the alternate screen
        screen.until("layer.20")
        write_status(store, status_of(LAYOUTS, stage=7), interval_seconds=1000.0)
        screen.until("backward of layer.6")
        screen.resize(200, 60)
        screen.until("stages that are alike stand together, with their number and sum (--all: each alone)")
        store.rename(store.with_name("elsewhere"))
        screen.until("does not exist")
        store.with_name("elsewhere").rename(store)
        screen.until("q ends")
        os.write(screen.descriptor, b"q")
        screen.until("\x1b[?1049l")
        assert screen.process.wait() == 0


def test_which_keys_end_it() -> None:
    assert all(map(ends, (b"q", b"xQ", b"\x1b", b"\x04")))
    assert not any(map(ends, (b"", b"x", b"\x1b[A", b"\x1b[<65;10;10M", "\u00fc".encode())))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(store: Path, number: int, code: int) -> None:
    with terminal("inspect", store, "--watch", columns=80, lines=24) as screen:
        screen.until("q ends")
        screen.process.send_signal(number)
        screen.until("\x1b[?1049l")
        assert screen.process.wait() == code


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("columns", [80, 200])
def test_as_a_person_sees_it(store: Path, tmp_path: Path, columns: int, colour: bool) -> None:
    """What tmux, a real terminal, has on its screen: every part is there, no line is broken by the terminal."""
    socket = str(tmp_path / "tmux")
    told = "" if colour else "NO_COLOR=1 "
    command = f"{told}{' '.join(process_arguments(['inspect', store]))}; tmux -S {socket} wait-for -S done; cat"

    def tmux(*arguments: str) -> str:
        ended = subprocess.run(
            ["tmux", "-S", socket, "-f", "/dev/null", *arguments], check=True, capture_output=True, text=True,
            env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        return ended.stdout

    tmux("new-session", "-d", "-x", str(columns), "-y", "50", command)
    try:
        tmux("wait-for", "done")
        shown = tmux("capture-pane", "-p")
        escaped = tmux("capture-pane", "-p", "-e")
    finally:
        tmux("kill-server")
    lines = shown.splitlines()
    assert lines[0].startswith("store    running")
    (at_work,) = [line for line in lines if line.startswith("▶ layer.19")]
    assert "H 16" in at_work
    assert any(line.startswith("compute    90%      10%  ━━━") for line in lines)
    assert any(line.startswith("memory   40.0 MiB now") for line in lines)
    assert not [line for line in lines if line.strip() in ("use", "s", "B")]  # ends of lines that did not fit
    assert ("38;5;" in escaped) == colour
