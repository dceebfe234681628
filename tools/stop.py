"""Ctrl-C and SIGTERM: the first asks, and is heeded at the next place where stopping is safe; the second ends at once.

Nothing is ever interrupted in the middle: long work calls :meth:`Stop.check` now and then, the training loop asks
:meth:`Stop.before` each step. Ctrl-C is answered at once on stderr, since a step may take long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from hoist.tools.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2
#: Takes away the line that the cursor is on: a progress bar, or the terminal's ``^C``. A bar draws itself again below.
_CLEAR_LINE = "\r\x1b[2K"


class Stop:
    """Notes the first SIGINT or SIGTERM, from entering to leaving; from then on both have the system's own effect."""

    def __init__(self) -> None:
        #: Number of the signal that came; 0 as long as none did.
        self.signal = 0
        #: The step at work, or the last one; 0 before the first.
        self._step = 0
        #: When the signal came, the step after which to stop: the one that was told.
        self._last = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._last = self._step
        self.signal = number
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        if number == signal.SIGINT:
            after = f" after step {self._last}" if self._last else ""
            _tell(f"hoist: stopping{after}; press again to end at once\n")

    def check(self) -> None:
        """Raise StoppedError if a signal came."""
        if self.signal:
            raise StoppedError(self.signal)

    def before(self, step: int) -> bool:
        """Whether to stop instead of beginning step ``step``: a signal came, and no later step was told to be the last.

        A signal that comes from here on stops after ``step``, whichever instruction it hits.
        """
        self._step = step
        return bool(self.signal) and step > self._last

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _tell(line: str) -> None:
    """Write a line to stderr past Python's buffers, which the signal may have caught in the middle of a write."""
    with contextlib.suppress(OSError):  # closed, or nobody reads it
        os.write(_STDERR, ((_CLEAR_LINE if os.isatty(_STDERR) else "") + line).encode())
