"""How runs look on a terminal, and in a log: progress, the plan, steps, the end. All printing of `hoist train` is here.

What is told comes as the records of `report.py`. A line fits 80 columns where its content allows; in a log none is cut.
"""

from __future__ import annotations

import shlex
import textwrap
import time

from rich.console import Console

from hoist.scheduler.memory import STATE_BYTES, promised_bytes
from hoist.scheduler.metrics import StepMetrics
from hoist.tools.durations import show_clock
from hoist.tools.evaluation import EvalRecord
from hoist.tools.forecast import Forecast
from hoist.tools.invoked import command_name
from hoist.tools.loudness import is_quiet
from hoist.tools.preflight_view import render
from hoist.tools.progress import LongWork
from hoist.tools.report import RunEnd, RunStart
from hoist.tools.sizes import show_bytes, show_decimal
from hoist.tools.wear import BudgetEnd

#: In a log, at most one line in so many seconds, besides the first and the last step.
LOG_SECONDS = 5.0
#: On a terminal, the columns' names again after so many steps.
HEADING_STEPS = 40
_LABEL_WIDTH = 9
#: Steps whose mean speed tells how long the rest will take: not the first, which also warms up.
_SPEED_STEPS = 20


class Display:
    """Shows a run on a console; a `Reporter`. Use as a context manager, so that a progress bar is taken away."""

    def __init__(self, console: Console, work: LongWork | None = None, *, quiet: bool | None = None) -> None:
        """``work``: shows how far long work is; by default on stderr. ``quiet``: nothing is told; by default as the
        command line says.
        """
        self._quiet = is_quiet() if quiet is None else quiet
        self._console = console
        self._work = work or LongWork(Console(stderr=True), quiet=self._quiet)
        self._shown_at = 0.0
        self._steps = 0
        self._recent_seconds: list[float] = []

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.end()

    def notice(self, text: str) -> None:
        """One line that the user should see."""
        self._work.end()
        self._field("note", text, style="yellow")

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        """How far long work is, in bytes or as many ``unit``; without a total (0) that is not known."""
        self._work.progress(what, done, total, unit)

    def plan(self, start: RunStart) -> None:
        """What is about to run: model, data, store, and how the budget is divided."""
        self._work.end()
        states = STATE_BYTES * start.num_parameters
        frozen, frozen_bytes = "", 0
        if start.num_frozen:
            frozen_bytes = sum(layout.frozen_bytes for layout in start.setup.layouts)
            frozen = f"; {start.num_frozen:,} more are frozen, {show_bytes(frozen_bytes)}"
        self._field(
            "model",
            f"{start.model}: {start.num_parameters:,} parameters in {len(start.setup.layouts)} stages; "
            f"weights and Adam moments are {show_bytes(states)}{frozen}",
        )
        epoch = start.num_windows / start.windows_per_step
        text_as = "" if start.text_as is None else f"; its text is read {start.text_as}"
        self._field(
            "data",
            f"{start.num_tokens:,} tokens, {start.num_windows:,} rows; a step takes {start.windows_per_step}, "
            f"so {epoch:,.{1 if epoch < 100 else 0}f} steps are one epoch{text_as}",
        )
        taken, there = start.num_validation_rows, start.num_validation_rows_there
        if taken:
            which = f"all {there:,}" if taken == there else f"{taken:,} of the {there:,}"
            more = "" if taken == there else " (--eval-batches 0: all)"
            self._field("", f"an evaluation takes {which} validation rows{more}")
        where = f"resumed at step {start.step}" if start.resumed else "new"
        self._field("store", f"{start.store} ({where}); commits {start.commits}")
        if start.drives:
            spread = ", ".join(f"{directory} {share:.0%}" for directory, share in start.drives)
            self._field("drives", f"chunks are spread over {len(start.drives)}: {spread}")
        self._field("i/o", start.engine)
        computing = [start.device]
        if start.device_budget_bytes is not None:
            computing.append(f"budget {show_bytes(start.device_budget_bytes)} of its memory")
        if start.setup.memory.demand.updates_on_device:
            computing.append("updates run there, too")
        if start.layers_compiled:
            computing.append("decoder layers are compiled when they first run")
        if len(computing) > 1:
            self._field("device", "; ".join(computing))
        budget = start.budget_bytes
        ratio = (states + frozen_bytes) / budget
        times = f"{ratio:.0%} of that" if ratio < 1 else f"{ratio:.{1 if ratio < 10 else 0}f} times as large"
        what = "states and frozen weights" if frozen_bytes else "states"
        self._field(
            "memory",
            f"budget {show_bytes(budget)}; the {what} are {times}. The process may hold "
            f"{show_bytes(promised_bytes(budget))} (1.1 x budget + 32 MiB) beyond the "
            f"{show_bytes(start.baseline_bytes)} of Python and its libraries",
        )
        memory = start.setup.memory
        if memory.kept_bytes:
            share = 100.0 * memory.kept_bytes / max(1, sum(each.num_bytes for each in memory.demand.keepable))
            self._field("", f"{share:.0f}% of the states stay in memory from step to step")
        self._line("")

    def forecast(self, forecast: Forecast) -> None:
        """What the run is expected to take."""
        self._work.end()
        if not self._quiet:
            render(forecast, self._console)
        self._line("")

    def step(self, metrics: StepMetrics, start: RunStart) -> None:
        """A step: one row, on a terminal each, in a log every few seconds."""
        self._work.end()
        self._recent_seconds = [*self._recent_seconds[1 - _SPEED_STEPS :], metrics.seconds]
        if self._steps == 1:
            del self._recent_seconds[0]
        self._steps += 1
        now = time.monotonic()
        last = metrics.step == start.steps
        first = self._steps == 1
        if not self._console.is_terminal and not first and not last and now - self._shown_at < LOG_SECONDS:
            return
        self._shown_at = now
        width = max(9, 2 * len(str(start.steps)) + 1)
        if first or (self._console.is_terminal and self._steps % HEADING_STEPS == 1):
            what = "clip" if start.clips else "host peak"
            names = ("step", "loss", "norm", "lr", "tokens/s", "read", "written", what, "left")
            self._line(_row(width, *names, *(["dev peak"] if metrics.device_peak_bytes else [])))
        remaining = (start.steps - metrics.step) * sum(self._recent_seconds) / len(self._recent_seconds)
        self._line(
            _row(
                width,
                f"{metrics.step}/{start.steps}",
                f"{metrics.loss:.4f}",
                f"{metrics.grad_norm:.3g}",
                f"{metrics.lr:.1e}",
                f"{metrics.tokens / metrics.seconds:,.0f}",
                show_bytes(metrics.nvme_read_bytes),
                show_bytes(metrics.nvme_written_bytes),
                _clipped(metrics) if start.clips else show_bytes(metrics.host_peak_bytes),
                show_clock(remaining, days=False),
                *([show_bytes(metrics.device_peak_bytes)] if metrics.device_peak_bytes else []),
            )
        )

    def evaluation(self, found: EvalRecord) -> None:
        """An evaluation: a line of its own."""
        self._work.end()
        self._field(
            "eval",
            f"step {found.step}: loss {found.eval_loss:.4f} over {found.eval_counted:,} labels; "
            f"{found.eval_tokens:,} tokens in {found.eval_seconds:.1f} s, "
            f"{show_bytes(found.eval_nvme_read_bytes)} read",
        )

    def end(self, end: RunEnd) -> None:
        """How it ended, and what to run next."""
        self._work.end()
        store = shlex.quote(end.store)
        hoist = command_name()
        if end.num_steps:
            self._line("")
        self._field("stopped" if end.signal or end.budget_end else "done", _outcome(end))
        if end.last is not None:
            self._results(end, end.last)
        if end.step < end.steps:
            more = "" if end.budget_end is None else f" --write-budget {_next_budget(end.budget_end)}"
            self._field("go on", f"{hoist} train --store {store}{more}", command=True)
        else:
            steps = 2 * max(end.step, end.steps) or 100
            self._field("go on", f"{hoist} train --store {store} --steps {steps}", command=True)
        exported = shlex.quote(end.store.rstrip("/") + "-model")
        self._field("export", f"{hoist} export {store} {exported}", command=True)

    def _results(self, end: RunEnd, last: StepMetrics) -> None:
        first = end.totals.first_loss
        if first is not None and end.step > end.totals.since_step + 1:
            first_step = end.totals.since_step + 1
            self._field("loss", f"{first:.4f} at step {first_step}, {last.loss:.4f} at step {last.step}")
        self._field(
            "nvme",
            f"{show_bytes(end.totals.nvme_read_bytes)} read and {show_bytes(end.totals.nvme_written_bytes)} written "
            + (f"since step {end.totals.since_step}" if end.totals.since_step else "since the store was made"),
        )
        if end.totals.nvme_read_saved_bytes:
            self._field(
                "",
                f"{show_bytes(end.totals.nvme_read_saved_bytes)} more would have been read and "
                f"{show_bytes(max(0, end.totals.nvme_written_saved_bytes))} more written without the states in memory",
            )
        if end.wear:
            self._field("wear", end.wear)
        if end.predicted_seconds and end.measured_seconds:
            error = end.predicted_seconds / end.measured_seconds - 1.0
            self._field(
                "step",
                f"predicted {end.predicted_seconds:.3g} s, measured median {end.measured_seconds:.3g} s, "
                f"error {error:+.0%}",
            )
        commits = "1 commit" if end.commits.num_commits == 1 else f"{end.commits.num_commits} commits"
        self._field(
            "commits",
            f"{commits} took {end.commits.seconds:.1f} s, mostly beside computation "
            f"({end.commits.flush_seconds:.1f} s until the drive had everything)",
        )
        promise = promised_bytes(end.budget_bytes)
        verdict = "within" if last.host_peak_bytes <= promise else "MORE THAN"
        self._field(
            "memory", f"host peak {show_bytes(last.host_peak_bytes)}, {verdict} the promised {show_bytes(promise)}"
        )
        if last.device_peak_bytes:
            budget = end.device_budget_bytes
            verdict = "within" if budget is None or last.device_peak_bytes <= budget else "MORE THAN"
            of = "" if budget is None else f", {verdict} the budget {show_bytes(budget)}"
            self._field("", f"device peak {show_bytes(last.device_peak_bytes)}{of}")

    def _field(self, label: str, text: str, *, command: bool = False, style: str | None = None) -> None:
        """A label and what there is to say; on a terminal wrapped under itself, but never a command to be pasted."""
        lines = [text]
        if self._console.is_terminal and not command:
            lines = textwrap.wrap(
                text, max(20, self._console.width - _LABEL_WIDTH), break_long_words=False, break_on_hyphens=False
            )
        for number, line in enumerate(lines):
            self._line(f"{'' if number else label:<{_LABEL_WIDTH}}{line}".rstrip(), style)

    def _line(self, text: str, style: str | None = None) -> None:
        if self._quiet:
            return
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _outcome(end: RunEnd) -> str:
    if end.signal:
        return f"on request after step {end.step} of {end.steps}; everything is committed"
    if end.budget_end is not None:
        budget = end.budget_end
        return (
            f"after step {end.step} of {end.steps}, for --write-budget: {show_decimal(budget.written_bytes)} of "
            f"{show_decimal(budget.budget_bytes)} are written, and the next step may write "
            f"{show_decimal(budget.next_bytes)}; everything is committed"
        )
    if end.num_steps:
        steps = "1 step" if end.num_steps == 1 else f"{end.num_steps} steps"
        return f"{steps} in {show_clock(end.seconds, days=False)}; step {end.step} of {end.steps} is committed"
    if end.created:
        return "the store is made and holds the initial weights, step 0"
    return f"nothing to do: the store is at step {end.step}, and --steps is {end.steps}; nothing was changed"


def _next_budget(end: BudgetEnd) -> str:
    """A budget with which a run goes on: twice as much, and one step at least; with a unit that is read as it is."""
    return f"{-(-max(2 * end.budget_bytes, end.written_bytes + 2 * end.next_bytes) // 10**6)}MB"


def _clipped(metrics: StepMetrics) -> str:
    """What became of the gradients: nothing, scaled, or skipped, with how many steps of the run have been so far."""
    if metrics.clip_scale == 0.0:
        return f"skipped {metrics.skipped_steps}"
    return "" if metrics.clip_scale == 1.0 else f"x {metrics.clip_scale:.2g}"


def _row(step_width: int, *cells: str) -> str:
    widths = (step_width, 7, 7, 7, 8, 9, 9, 9, 7, 9)  # the last one is for a device with memory of its own
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)).rstrip()
