"""How far long work is: a bar on a terminal, a plain line now and then in a log, nothing with `--quiet`. On stderr.

Who works calls a progress callback with done and total; `show.py` has one of these for all that a command does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from hoist.tools.loudness import is_quiet
from hoist.tools.sizes import show_bytes

#: In a log, a line for each so many seconds that work takes: nothing for what is over before.
LOG_SECONDS = 30.0
#: Widths from which there is room for the time that is left, the bar, bytes and their rate.
_TIME_WIDTH, _BAR_WIDTH, _BYTES_WIDTH, _RATE_WIDTH = 36, 46, 72, 86


class _Bytes(ProgressColumn):
    """Done and total bytes, or as many of what else is counted."""

    def __init__(self, unit: str, *, rate: bool) -> None:
        super().__init__(Column(no_wrap=True))
        self._unit, self._rate = unit, rate

    def render(self, task: Task) -> RenderableType:
        done, total = int(task.completed), int(task.total or 0)
        if self._unit:
            return Text(f"{done:,} of {total:,} {self._unit}")
        speed = task.finished_speed or task.speed
        rate = f"  {show_bytes(int(speed))}/s" if self._rate and speed else ""
        return Text(f"{show_bytes(done)} of {show_bytes(total)}{rate}")


class _Bar(Progress):
    """One line that fits the terminal, however wide it is at the moment."""

    def __init__(self, console: Console, unit: str) -> None:
        self._unit = unit
        #: Asked for its width each time; the base class draws before it has one.
        self._screen = console
        super().__init__(console=console, transient=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        self.columns = tuple(self._fitting(self._screen.width))
        yield self.make_tasks_table(self.tasks)

    def _fitting(self, width: int) -> Iterator[ProgressColumn]:
        yield TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        if any(task.total is None for task in self.tasks):
            yield SpinnerColumn()
            yield TimeElapsedColumn()
            return
        if width >= _BAR_WIDTH:
            yield BarColumn(bar_width=max(8, min(40, width - 64)))
        yield TextColumn("{task.percentage:3.0f}%", table_column=Column(no_wrap=True))
        if width >= _BYTES_WIDTH:
            yield _Bytes(self._unit, rate=width >= _RATE_WIDTH)
        if width >= _TIME_WIDTH:
            yield TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))


@contextmanager
def loading() -> Iterator[None]:
    """Imports of PyTorch and what goes with it: they take seconds on a machine that has not read it lately."""
    with LongWork(Console(stderr=True), quiet=is_quiet()).during("loading PyTorch"):
        yield


class LongWork:
    """Shows one piece of work at a time. Close it, or use it as a context manager, so that no bar stays."""

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        log_seconds: float = LOG_SECONDS,
    ) -> None:
        """``clock`` gives seconds, ``log_seconds`` lie between two lines in a log; for tests."""
        self._console = console
        self._log_seconds = log_seconds
        #: In a log, work that tells nothing of how far it is: says that it goes on.
        self._ticker: _Ticker | None = None
        self._quiet = quiet
        self._clock = clock
        self._bar: _Bar | None = None
        self._task: TaskID | None = None
        #: What is at work; "" for nothing.
        self._what = ""
        #: In a log: when the next line is due.
        self._due = 0.0

    def __enter__(self) -> LongWork:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        """How far it is: bytes, or as many ``unit``. Without a total (0) nobody knows."""
        if self._quiet:
            return
        if what != self._what:
            self.end()
            self._what = what
            self._due = self._clock() + self._log_seconds
        if self._console.is_terminal:
            self._draw(what, done, total, unit)
        elif not total:
            self._ticker = self._ticker or _Ticker(self._console, what, self._log_seconds)
        elif self._clock() >= self._due:
            self._due = self._clock() + self._log_seconds
            _tell(self._console, f"{what} {done / total:.0%} ...")

    def _draw(self, what: str, done: int, total: int, unit: str) -> None:
        if self._bar is None or self._task is None:
            self._bar = _Bar(self._console, unit)
            self._task = self._bar.add_task(what, total=total or None)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total or None)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Work that tells nothing of how far it is."""
        self.progress(what, 0, 0)
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Take the bar away, if there is one, and tell no more."""
        if self._ticker is not None:
            self._ticker.end()
            self._ticker = None
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._task, self._what = None, None, ""


class _Ticker:
    """Says in a log that work goes on which calls nobody meanwhile: a line after each so many seconds."""

    def __init__(self, console: Console, what: str, log_seconds: float) -> None:
        self._console = console
        self._what = what
        self._log_seconds = log_seconds
        self._ended = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hoist-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._log_seconds):
            try:
                _tell(self._console, f"{self._what}, {time.monotonic() - self._began:.0f} s so far ...")
            except (OSError, ValueError):  # nobody reads the log any more: whoever has results to tell meets that, too
                return

    def end(self) -> None:
        """No line comes after this."""
        self._ended.set()
        self._thread.join()


def _tell(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
