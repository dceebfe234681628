"""The steps of one call of `hoist train`: feeds the trainer, tells of each step, evaluates, commits, and says how it
ended.

What comes before them is `train.py`'s; what is told are the records of `report.py`.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hoist.scheduler import writes
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.delay import SHARES, StepTimes, choose
from hoist.scheduler.endurance import Wear
from hoist.scheduler.errors import NonFiniteGradientError
from hoist.scheduler.metrics import CommitTotals, StepMetrics
from hoist.scheduler.setup import Setup, prepare
from hoist.scheduler.trace import Trace
from hoist.scheduler.trainer import Trainer
from hoist.scheduler.writes import Writes
from hoist.tiers import allocation
from hoist.tiers.errors import BudgetError, DeviceError, TransferError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store
from hoist.tools import data as token_data
from hoist.tools.errors import MetricsError, RunFailedError
from hoist.tools.evaluation import Evaluation
from hoist.tools.forecast import Forecast
from hoist.tools.invoked import command_name
from hoist.tools.metrics_file import MetricsFile
from hoist.tools.options import AUTO
from hoist.tools.preparing import DEVICE_KEY, Prepared
from hoist.tools.report import Reporter, RunEnd, RunStart, Totals
from hoist.tools.run_wear import judged_run, write_budget
from hoist.tools.snapshot import AutomaticSnapshots
from hoist.tools.stop import Stop
from hoist.tools.tensorboard_log import TensorboardLog
from hoist.tools.wear import (
    BudgetEnd,
    behind,
    count_measuring,
)

#: Steps after which a delay is picked: the first reads what others need not, the next two are like them.
MEASURED_STEPS = 3
#: Steps of a trainer that are not like the others: its first, and one that overlaps with that.
UNSTEADY_STEPS = 2


class Loop:
    """The steps of one call: feeds the trainer, tells of each step, commits at the end."""

    def __init__(
        self,
        run: Prepared,
        store: Store,
        data: token_data.StepData,
        start: RunStart,
        engine: IoEngine,
        stop: Stop,
        report: Reporter,
        sinks: Sequence[MetricsFile | TensorboardLog],
        evaluation: Evaluation | None,
        *,
        trace: Trace | None,
        forecast: Forecast | None,
    ) -> None:
        self._run = run
        self._forecast = forecast
        #: What measuring moved is in the store's ledger.
        self._counted = False
        #: Seconds of the steps that a trainer made, but for its first ones.
        self._seconds: list[float] = []
        self._store = store
        self._data = data
        self._start = start
        self._engine = engine
        self._stop = stop
        self._report = report
        self._sinks = sinks
        self._evaluation = evaluation
        self._trace = trace
        self._totals = run.totals
        self._last: StepMetrics | None = None
        self._step = run.step
        self._commits = CommitTotals()
        self._wear = ""
        self._budget_end: BudgetEnd | None = None

    def run_to_end(self) -> RunEnd:
        """All steps that are left, or until a signal."""
        began = time.perf_counter()
        options = self._run.options
        config, setup = self._run.config, self._run.setup
        times = self._train(config, setup, measure=options.delay == AUTO and not config.delay_in_force)
        if times is not None:
            config, setup = self._pick_delay(times, config)
            if self._forecast is not None:
                self._forecast = self._forecast.of(setup, config)
            self._train(config, setup)
        return run_end(
            self._run,
            self._stop,
            step=self._step,
            last=self._last,
            seconds=time.perf_counter() - began,
            totals=self._totals.with_io(self._engine.statistics()),
            commits=self._commits,
            wear=self._wear,
            budget_end=self._budget_end,
            predicted_seconds=self._predicted_seconds,
            measured_seconds=statistics.median(self._seconds) if self._seconds else None,
        )

    @property
    def _predicted_seconds(self) -> float | None:
        prediction = None if self._forecast is None else self._forecast.prediction
        return None if prediction is None else prediction.seconds

    def _train(self, config: TrainerConfig, setup: Setup, *, measure: bool = False) -> StepTimes | None:
        """All steps that are left, then a commit. With ``measure``, where the first few suggest a delay, the commit
        comes after them, and their times are returned: the other steps are still to be done.
        """
        run, suggestive = self._run, None
        counted = writes.count(setup, config, self._store.record)  # plans are long: not beside the trainer's own
        budget = write_budget(run, self._store, config, setup, counted, self._evaluation)
        first_steady = run.step + UNSTEADY_STEPS if self._last is None else self._last.step + UNSTEADY_STEPS
        prediction = None if self._forecast is None else self._forecast.prediction
        self._seconds.clear()
        with (
            Trainer(
                model=run.model,
                store=self._store,
                engine=self._engine,
                config=config,
                baseline_bytes=run.baseline_bytes,
                setup=setup,
                wear=lambda: self._wear_now(config, counted),
                trace=self._trace,
                prediction=None if prediction is None else prediction.to_json(),
                device=run.device,
            ) as trainer,
            _explained(run, trainer),
            AutomaticSnapshots(
                self._store, every=run.options.snapshot_every, keep=run.options.keep_snapshots,
                notice=self._report.notice,
            ) as snapshots,
        ):
            measured = run.step + MEASURED_STEPS if measure else -1
            while trainer.step_number < run.options.steps and not self._stop.before(step := trainer.step_number + 1):
                if trainer.step_number == measured:
                    times = trainer.step_times()
                    if choose(times, dict.fromkeys(SHARES, 0)):
                        suggestive = times
                        break
                    self._tell_delay(0.0, times)  # and gradients in scratch would not make one better
                if budget is not None and (ends := budget.stops(trainer)) is not None:
                    self._budget_end = ends
                    break
                self._last = trainer.step(self._data.step(step), run=self._kept)
                _require_finite(self._last)
                self._count_measuring()
                if self._last.step > first_steady:
                    self._seconds.append(self._last.seconds)
                for sink in self._sinks:
                    sink.write(self._last)
                self._report.step(self._last, self._start)
                snapshots.after_step(trainer)
                self._evaluate(trainer)
            self._report.progress("finishing updates and committing", 0, 0)
            trainer.commit()
            self._step = trainer.step_number
            self._commits.join(trainer.statistics().commits)
            if self._last is not None:
                self._wear = behind(self._judged(config, counted))
        return suggestive

    def _judged(self, config: TrainerConfig, counted: Writes) -> Wear:
        """What the run does to the drive, at the speed of all its steps so far."""
        step = self._run.step if self._last is None else self._last.step
        steps = step - self._totals.since_step
        seconds = self._totals.seconds / steps if steps > 0 and self._totals.seconds > 0.0 else None
        return judged_run(self._run, self._store, config, counted, seconds, step)

    def _wear_now(self, config: TrainerConfig, counted: Writes) -> Mapping[str, Any]:
        """For the status document, about once a second: so the store's own count is kept as often."""
        if self._store.wear is not None:
            self._store.wear.save()
        return self._judged(config, counted).to_json()

    def _count_measuring(self) -> None:
        """Once there is a step: a run that cannot begin leaves the ledger as it was."""
        if self._forecast is not None and not self._counted:
            self._counted = True
            count_measuring(
                self._store,
                read_bytes=self._forecast.measuring_read_bytes,
                written_bytes=self._forecast.measuring_written_bytes,
            )

    def _evaluate(self, trainer: Trainer) -> None:
        """Evaluate, if that is due after this step; a signal ends it."""
        if self._evaluation is None or not self._evaluation.is_due(trainer.step_number):
            return
        found = self._evaluation.run(
            trainer,
            lambda: bool(self._stop.signal),
            lambda done, total: self._report.progress("evaluating", done, total, "rows"),
        )
        if found is None:
            self._report.notice(
                f"the evaluation after step {trainer.step_number} was cut short by the signal, and is left out"
            )
        else:
            trainer.log(found.to_json())
            for sink in self._sinks:
                sink.write(found)
            self._report.evaluation(found)

    def _pick_delay(self, times: StepTimes, config: TrainerConfig) -> tuple[TrainerConfig, Setup]:
        """What goes with the share that fits the measured times, and that the budget and the drive have room for.

        Not beside a trainer: sizing a run calls the model's stages, whose weights are the trainer's as long as it is
        open.
        """
        run = self._run
        found = {0.0: (config, run.setup)}
        room = allocation.free_bytes(run.directory)
        for share in SHARES[1:]:
            with contextlib.suppress(BudgetError):
                delayed = replace(config, delay=share)
                setup = prepare(run.model, run.layouts, delayed, device=run.device)
                if setup.stash_bytes <= room:
                    found[share] = (delayed, setup)
        picked = choose(times, {share: setup.stash_bytes for share, (_, setup) in found.items()})
        self._tell_delay(picked, times)
        return found[picked]

    def _tell_delay(self, share: float, times: StepTimes) -> None:
        self._report.notice(
            f"--delay auto: {share:g} of the updates go into the next forward. Measured a step: forward "
            f"{times.forward_seconds:.2f} s beside {times.forward_io_seconds:.2f} s of i/o, backward "
            f"{times.backward_seconds:.2f} s beside {times.backward_io_seconds:.2f} s, updates "
            f"{times.updates_seconds:.2f} s with {times.states_io_seconds:.2f} s of i/o"
        )

    def _kept(self, metrics: StepMetrics) -> Mapping[str, Any]:
        """What a commit says about the step."""
        self._totals = self._totals.with_step(metrics)
        return {
            "data": self._data.position(metrics.step),
            "options": self._run.options.remembered(),
            DEVICE_KEY: str(self._run.device.torch_device),
            "totals": self._totals.with_io(self._engine.statistics()).to_json(),
        }


@contextmanager
def _explained(run: Prepared, trainer: Trainer) -> Iterator[None]:
    """Say of a failure where the store now stands, and what to do."""
    again = f"{command_name()} train --store {shlex.quote(run.options.main_store)}"
    try:
        yield
    except MetricsError as error:
        trainer.commit()
        raise MetricsError(
            f"{error}; step {trainer.step_number} is committed: make room or name another file, and go on with {again}"
        ) from error
    except (RunFailedError, NonFiniteGradientError, DeviceError, OSError) as error:  # TransferError is one
        if isinstance(error, DeviceError | TransferError):
            trainer.close()  # a commit that was begun may come to its end in this
        raise RunFailedError(
            f"{error}; --store {run.options.main_store} stays at its last commit, step {trainer.committed_step}: "
            f"remove the cause and go on with {again}"
        ) from error


def _require_finite(metrics: StepMetrics) -> None:
    """Raise RunFailedError before weights that are no numbers any more could be committed; a skipped step has none."""
    if metrics.clip_scale == 0.0:
        return
    for name, value in (("loss", metrics.loss), ("gradient norm", metrics.grad_norm)):
        if not math.isfinite(value):
            raise RunFailedError(f"step {metrics.step}: the {name} is {value}; a lower --lr may help")


def run_end(
    run: Prepared,
    stop: Stop,
    *,
    step: int,
    last: StepMetrics | None = None,
    seconds: float = 0.0,
    totals: Totals | None = None,
    commits: CommitTotals | None = None,
    wear: str = "",
    budget_end: BudgetEnd | None = None,
    predicted_seconds: float | None = None,
    measured_seconds: float | None = None,
) -> RunEnd:
    return RunEnd(
        store=run.options.main_store,
        created=run.found is None,
        step=step,
        steps=run.options.steps,
        # A signal during the last step or its commit has cut nothing short.
        signal=stop.signal if step < run.options.steps else 0,
        seconds=seconds,
        num_steps=step - run.step,
        last=last,
        totals=run.totals if totals is None else totals,
        commits=commits or CommitTotals(),
        wear=wear,
        budget_end=budget_end,
        predicted_seconds=predicted_seconds,
        measured_seconds=measured_seconds,
        budget_bytes=run.options.host_memory_bytes(),
        device_budget_bytes=run.device_memory_bytes,
    )
