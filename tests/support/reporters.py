"""Reporters that record what a run tells, and that send signals at a chosen moment."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from hoist.scheduler.metrics import StepMetrics
from hoist.tools.evaluation import EvalRecord
from hoist.tools.forecast import Forecast
from hoist.tools.report import RunStart


@dataclass(kw_only=True, slots=True)
class Recorder:
    """A `Reporter` that keeps everything; ``at`` is called with each moment's name, like ``step 3`` or ``plan``."""

    at: Callable[[str], None] = lambda moment: None
    notices: list[str] = field(default_factory=list)
    preparations: list[str] = field(default_factory=list)
    starts: list[RunStart] = field(default_factory=list)
    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvalRecord] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        assert 0 <= done <= total or not total
        # Files of a few bytes are read in tests; whatever else is so little is a count that lacks its unit.
        assert unit or total >= 1024 or not total or what.startswith("reading"), f"{what}: {total} of what?"
        if what not in self.preparations:
            self.preparations.append(what)
            self.at(what)

    def plan(self, start: RunStart) -> None:
        self.starts.append(start)
        self.at("plan")

    def forecast(self, forecast: Forecast) -> None:
        self.forecasts.append(forecast)

    def step(self, metrics: StepMetrics, start: RunStart) -> None:
        self.steps.append(metrics)
        self.at(f"step {metrics.step}")

    def evaluation(self, found: EvalRecord) -> None:
        self.evaluations.append(found)
        self.at(f"evaluation {found.step}")


def sending(number: signal.Signals, moment: str, *, times: int = 1) -> Recorder:
    """A recorder that sends this process a signal at one moment."""

    def send(now: str) -> None:
        if now == moment:
            for _ in range(times):
                signal.raise_signal(number)

    return Recorder(at=send)
