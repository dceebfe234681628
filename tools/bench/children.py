"""Runs a program as a child of a benchmark: in a group of its own, which ends with the benchmark, however that ends.

What is run, and what it says, is the caller's business.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from hoist.tools.errors import BenchError

#: Seconds between two looks at whether a signal has come.
_POLL_SECONDS = 0.2
#: Run by Python before the program, in its process: the kernel kills it when its parent is no more (PR_SET_PDEATHSIG),
#: also where a second Ctrl-C or SIGKILL left the parent no time. The parent may have ended before that was asked for.
_LAUNCH = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def run_child(
    command: Sequence[str],
    *,
    what: str,
    output: IO[bytes],
    environment: Mapping[str, str],
    limit_seconds: float,
    folder: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Run ``command``, whose first word is a path, to its end; what it says goes to ``output``. Returns its exit code.

    ``check`` is called now and then, and may raise: then the process is killed, with all that it has started. Raises
    BenchError, which names ``what``, if it has not ended after ``limit_seconds``; it is killed then, too.
    """
    until = time.monotonic() + limit_seconds
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command], stdin=subprocess.DEVNULL,
        stdout=output, stderr=subprocess.STDOUT, env=dict(environment), cwd=folder, start_new_session=True,
    )  # fmt: skip
    try:
        while True:
            try:
                return process.wait(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                check()
            if time.monotonic() > until:
                raise BenchError(f"{what}: did not end within {in_words(limit_seconds)}, so it was killed")
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of the group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def in_words(seconds: float) -> str:
    """A time limit, for people."""
    return f"{seconds / 3600:.3g} hours" if seconds >= 7200 else f"{seconds / 60:.3g} minutes"
