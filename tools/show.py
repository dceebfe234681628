"""How runs look on a terminal, and in a log: progress, the plan, steps, the end. All printing of `hoist train` is here."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from hoist.scheduler.trainer import StepMetrics
from hoist.tools.sizes import show_bytes
from hoist.tools.train import RunEnd, RunStart

#: In a log, at most one line in so many seconds, besides the first and the last step.
LOG_SECONDS = 5.0
STATE_BYTES = 12


class Display:
    """Shows a run on a console; a `Reporter`. Use as a context manager, so that a progress bar is taken away."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._what = ""
        self._shown_at = 0.0
        self._seconds = 0.0
        self._steps = 0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_bar()

    def notice(self, text: str) -> None:
        """One line that the user should see."""
        self._stop_bar()
        self._console.print(text, style="yellow", markup=False, highlight=False)

    def progress(self, what: str, done: int, total: int) -> None:
        """How far a long preparation is: a bar on a terminal, nothing in a log."""
        if not self._console.is_terminal:
            return
        if what != self._what:
            self._stop_bar()
            self._what = what
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"),
                TimeRemainingColumn(), console=self._console, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._task, self._what = None, None, ""

    def plan(self, start: RunStart) -> None:
        """What is about to run: model, store, and how the budget is divided."""
        self._stop_bar()
        states = STATE_BYTES * start.num_parameters
        self._line(
            f"model    {start.num_parameters:,} parameters in {len(start.setup.layouts)} stages; "
            f"weights and optimizer states {show_bytes(states)}"
        )
        where = f"resumed at step {start.resumed_at}" if start.resumed_at else "new"
        self._line(f"store    {start.store} ({where})")
        self._line(f"i/o      {start.engine}")
        ratio = states / start.budget_bytes
        self._line(
            f"memory   host budget {show_bytes(start.budget_bytes)}: the states are {ratio:.1f} times as large; "
            f"{show_bytes(start.setup.memory.need_bytes)} planned"
        )
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 9))
        for label, num_bytes in start.setup.memory.parts():
            if num_bytes:
                table.add_row(label, f"{show_bytes(num_bytes):>10}")
        self._console.print(table)

    def step(self, metrics: StepMetrics, start: RunStart) -> None:
        """A step: one line, on a terminal each, in a log every few seconds."""
        self._stop_bar()
        self._seconds += metrics.seconds
        self._steps += 1
        now = time.monotonic()
        last = metrics.step == start.steps
        if not self._console.is_terminal and self._steps > 1 and not last and now - self._shown_at < LOG_SECONDS:
            return
        self._shown_at = now
        remaining = (start.steps - metrics.step) * self._seconds / self._steps
        self._line(
            f"step {metrics.step:>{len(str(start.steps))}}/{start.steps}  loss {metrics.loss:.4f}  "
            f"norm {metrics.grad_norm:.3g}  lr {metrics.lr:.2e}  {metrics.tokens / metrics.seconds:,.0f} tok/s  "
            f"nvme {show_bytes(metrics.nvme_read_bytes)} read {show_bytes(metrics.nvme_written_bytes)} written  "
            f"host peak {show_bytes(metrics.host_peak_bytes)}  {_clock(remaining)} left"
        )

    def end(self, end: RunEnd) -> None:
        """How it ended, and what to run next."""
        self._stop_bar()
        if end.signal:
            self._line(f"stopped on request after step {end.step} of {end.steps}; everything is committed")
            self._line(f"continue: hoist train --store {end.store} --steps {end.steps}")
            return
        if end.last is None:
            self._line(f"the store is at step {end.step}; nothing to do (--steps {end.steps})")
        else:
            self._line(f"done: step {end.step} of {end.steps} in {_clock(end.seconds)}, committed to {end.store}")
        self._line(f"export:  hoist export {end.store} MODEL_DIRECTORY")
        self._line(f"go on:   hoist train --store {end.store} --steps {2 * max(end.steps, 1)}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
