"""Ctrl-C and SIGTERM: the first asks, and is heeded at the next place where stopping is safe; the second ends at once.

Nothing is ever interrupted in the middle: long work calls :meth:`Stop.check` now and then, the training loop looks at
:attr:`Stop.signal` after each step.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from hoist.tools.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Notes the first SIGINT or SIGTERM, from entering to leaving; from then on both have the system's own effect."""

    def __init__(self) -> None:
        #: Number of the signal that came; 0 as long as none did.
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)

    def check(self) -> None:
        """Raise StoppedError if a signal came."""
        if self.signal:
            raise StoppedError(self.signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
