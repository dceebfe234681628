"""Children of a benchmark: they end with it, with all that they have started, and none hangs for ever."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hoist.tools.bench.children import in_words, run_child
from hoist.tools.errors import BenchError, StoppedError
from tests.check_types import ROOT

WAITS = [sys.executable, "-I", "-S", "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"]
#: Starts one that waits, and waits itself.
STARTS_ONE = [
    sys.executable, "-I", "-S", "-c",
    f"import signal, subprocess; subprocess.Popen({WAITS!r}); signal.pause()",
]  # fmt: skip


def ends(process: int) -> bool:
    """Whether a process is gone, or goes, within a time that is never reached otherwise."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


def test_what_a_child_says_and_how_it_ends_is_given_back(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w+b") as output:
        code = run_child(
            [sys.executable, "-c", "import os, sys; print(os.environ['A'], os.getcwd()); sys.exit(3)"], what="it",
            output=output, environment={"A": "b"}, limit_seconds=60, folder=tmp_path,
        )  # fmt: skip
    assert code == 3
    assert (tmp_path / "said").read_text() == f"b {tmp_path}\n"


def test_stopping_ends_what_a_child_has_started(tmp_path: Path) -> None:
    path = tmp_path / "said"

    def stop() -> None:
        if path.read_text().endswith("\n"):
            raise StoppedError(signal.SIGTERM)

    with path.open("wb") as output, pytest.raises(StoppedError):
        run_child(STARTS_ONE, what="it", output=output, environment=os.environ, limit_seconds=60, check=stop)
    assert ends(int(path.read_text()))


def test_one_that_hangs_is_ended_and_said(tmp_path: Path) -> None:
    path = tmp_path / "said"
    with path.open("wb") as output, pytest.raises(BenchError, match=r"^it: did not end within 0 minutes, so it was"):
        run_child(WAITS, what="it", output=output, environment=os.environ, limit_seconds=0.0)
    assert not path.read_text() or ends(int(path.read_text()))
    assert (in_words(900.0), in_words(4 * 3600.0)) == ("15 minutes", "4 hours")


def test_a_child_ends_with_a_benchmark_that_is_killed() -> None:
    """A second Ctrl-C leaves no time to end it."""
    parent = subprocess.Popen(
        [sys.executable, "-c", f"""\
import os, sys
from hoist.tools.bench.children import run_child
run_child({WAITS!r}, what="it", output=sys.stdout.buffer, environment=os.environ, limit_seconds=600)
"""],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, cwd=ROOT,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    assert ends(child)
