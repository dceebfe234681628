"""`hoist inspect --watch`: looks again and again, and shows it in place, or one after the other where that cannot be.

What is shown is `view.py`'s business. A store that goes away is said, and looked for again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from hoist.tiers.errors import HoistError
from hoist.tools.inspection.looking import Inspection, inspect_store
from hoist.tools.inspection.view import Canvas, render

#: How often keys, and the terminal's size, are looked at.
_POLL_SECONDS = 0.2
_QUIT_KEYS = b"qQ\x04"
_ESCAPE = b"\x1b"


class Screen:
    """The last look, as wide and as high as the terminal is when it is drawn."""

    def __init__(self, found: Inspection, *, every: bool) -> None:
        self._every = every
        self.found = found
        #: Why there is nothing newer to see; None as long as there is.
        self.trouble: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.max_height
        hint = "q ends"
        lines = render(
            self.found, width=options.max_width, ascii_only=options.ascii_only, every=self._every, height=height - 1
        )
        if self.trouble is not None:
            told = Canvas(width=options.max_width, ascii_only=options.ascii_only).plain(self.trouble)
            lines = [Text(told, style="bold #d55e00"), Text("below is what was seen last"), Text(""), *lines]
        if len(lines) > height - 1:
            hint = f"q ends; {len(lines) - height + 1} more lines need a higher terminal"
            lines = lines[: height - 1]
        for line in lines:
            line.truncate(options.max_width)
        yield Group(*lines, Text(hint[: options.max_width], style="dim"))


class Watch:
    """Looks at a store every so many seconds."""

    def __init__(self, directory: Path, every_seconds: float) -> None:
        """Raises StoreRefusedError where there is no store now."""
        self._directory = directory
        self._every_seconds = every_seconds
        self.found = inspect_store(directory)

    def look(self) -> str | None:
        """Look again; returns why that failed, if it did: then :attr:`found` is what was seen before."""
        try:
            self.found = inspect_store(self._directory, before=self.found)
        except (HoistError, OSError) as error:
            return str(error)
        return None

    def in_place(self, console: Console, keys: TextIO | None, *, every: bool) -> int:
        """On a terminal's alternate screen, until a key or a signal ends it. Returns the exit code."""
        screen = Screen(self.found, every=every)
        live = Live(screen, console=console, screen=True, auto_refresh=False)
        with _keys(keys) as key:
            try:  # not `with`: a signal while it draws for the first time would leave the alternate screen on
                live.start(refresh=True)
                size = console.size
                due = time.monotonic() + self._every_seconds
                while True:
                    pressed = key(max(0.0, min(_POLL_SECONDS, due - time.monotonic())))
                    if ends(pressed):
                        return 0
                    if time.monotonic() >= due:
                        due = time.monotonic() + self._every_seconds
                        screen.trouble = self.look()
                        screen.found = self.found
                    elif console.size == size:
                        continue
                    size = console.size
                    live.refresh()
            finally:
                live.stop()

    def in_turn(self, show: Callable[[Inspection, str | None], None]) -> int:
        """One after the other, until a signal or the pipe's reader ends it."""
        trouble: str | None = None
        with contextlib.suppress(BrokenPipeError):
            while True:
                show(self.found, trouble)
                time.sleep(self._every_seconds)
                trouble = self.look()
        with contextlib.suppress(BrokenPipeError):  # what is left in its buffer cannot be written either
            sys.stdout.close()
        return 0


@contextlib.contextmanager
def _keys(keys: TextIO | None) -> Iterator[Callable[[float], bytes]]:
    """A function that waits at most so many seconds for keys and returns what they send; it is not echoed meanwhile.

    SIGTERM ends the process only after the terminal is as it was.
    """
    terminal = keys.fileno() if keys is not None and keys.isatty() else None
    before = None if terminal is None else termios.tcgetattr(terminal)
    former = signal.signal(signal.SIGTERM, _end)
    gone = terminal is None

    def wait(seconds: float) -> bytes:
        nonlocal gone
        if terminal is None or gone:
            time.sleep(seconds)
            return b""
        ready, _, _ = select.select([terminal], [], [], seconds)
        pressed = os.read(terminal, 1024) if ready else b""
        gone = bool(ready) and not pressed  # the terminal has hung up
        return pressed

    try:
        if terminal is not None:
            tty.setcbreak(terminal, termios.TCSANOW)
        yield wait
    finally:
        signal.signal(signal.SIGTERM, former)
        if terminal is not None and before is not None:
            termios.tcsetattr(terminal, termios.TCSANOW, before)


def ends(pressed: bytes) -> bool:
    """Whether keys mean the end: q, Ctrl-D, or Escape itself; arrows and the like send Escape with more."""
    return pressed == _ESCAPE or (not pressed.startswith(_ESCAPE) and any(key in pressed for key in _QUIT_KEYS))


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
