"""`hoist train`: from options to a trained store. Opens or creates the store, feeds it steps, commits, reports.

Everything that can be refused is refused before anything is created: what `preparing.py` looks at first, data last.
Options are in `options.py`, what is told in `report.py`, the engine in `hoist.scheduler`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hoist.scheduler import writes
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store
from hoist.scheduler.delay import SHARES, StepTimes, choose
from hoist.scheduler.endurance import Wear
from hoist.scheduler.errors import ConfigError, NonFiniteGradientError
from hoist.scheduler.metrics import CommitTotals, StepMetrics
from hoist.scheduler.setup import Setup, prepare
from hoist.scheduler.trace import Trace
from hoist.scheduler.trainer import Trainer
from hoist.scheduler.writes import Writes
from hoist.tiers import allocation
from hoist.tiers.errors import BudgetError, RefusalError, StoreLockedError, StoreRefusedError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store
from hoist.tools import data as token_data
from hoist.tools.drives import shares
from hoist.tools.errors import MetricsError, RunFailedError
from hoist.tools.evaluation import Evaluation, validation_numbers
from hoist.tools.forecast import Forecast
from hoist.tools.forecasting import make_forecast
from hoist.tools.invoked import command_name
from hoist.tools.metrics_file import MetricsFile
from hoist.tools.model_files import save_model_files, store_attributes
from hoist.tools.options import AUTO, TrainOptions
from hoist.tools.preparing import Prepared, checked, named, open_engine, prepare_run
from hoist.tools.presets import PRESETS, ModelSource
from hoist.tools.report import Reporter, RunEnd, RunStart, Totals
from hoist.tools.rows import Rows
from hoist.tools.sizes import show_decimal
from hoist.tools.snapshot import AutomaticSnapshots
from hoist.tools.stop import Stop
from hoist.tools.tensorboard_log import TensorboardLog
from hoist.tools.text import ByteTokenizer, stdlib_sources
from hoist.tools.wear import (
    BudgetEnd,
    WriteBudget,
    ahead,
    behind,
    count_measuring,
    foreseen,
    judged,
    lower,
    rate_drives,
    snapshot_bytes,
)

#: Where the ids of tokenized text are kept: next to the store, named after it.
CACHE_SUFFIX = ".tokens"
#: Steps after which a delay is picked: the first reads what others need not, the next two are like them.
MEASURED_STEPS = 3
#: Steps of a trainer that are not like the others: its first, and one that overlaps with that.
UNSTEADY_STEPS = 2
#: A vocabulary beyond this was made for a tokenizer: bytes would leave nearly all of it unused.
_MANY_IDS = 1024


def train(options: TrainOptions, report: Reporter) -> RunEnd:
    """Run training as told. Raises HoistError with one line; the store is then at its last commit, or as before."""
    with ExitStack() as cleanup:
        stop = cleanup.enter_context(Stop())
        with open_engine(options.io) as engine:
            run = prepare_run(options, engine, report, stop)
            options = run.options
            if run.found is not None and run.step >= options.steps:
                return _end(run, stop, step=run.step)
            rows = _data(run, report, stop)
            validation = None if rows is None else _validation_data(run, rows, report, stop)
            made = [each for each in (rows, validation) if each is not None]
            forecast = None if rows is None else make_forecast(run, report, stop)
            store = cleanup.enter_context(_store(run, engine, made, report, stop))
            if rows is None:
                return _end(run, stop, step=0, totals=Totals().with_io(engine.statistics()))
            rate_drives(options, store, run.found, report.notice)
            data = _step_data(run, rows, report)
            evaluation = _evaluation(run, rows, validation, data)
            prediction = None if forecast is None else forecast.prediction
            predicted_seconds = None if prediction is None else prediction.seconds
            start = _start(run, engine, rows, data, store, evaluation, predicted_seconds)
            report.plan(start)
            if forecast is not None:
                report.forecast(forecast)
            metrics_file = None
            if options.metrics is not None:
                metrics_file = cleanup.enter_context(MetricsFile(Path(options.metrics)))
            tensorboard = None
            if options.tensorboard is not None:
                tensorboard = TensorboardLog(Path(options.tensorboard), next_step=run.step + 1)
                cleanup.enter_context(tensorboard)
            trace = None
            if options.trace is not None:
                trace = cleanup.enter_context(Trace(options.trace, notice=report.notice, option="--trace"))
            sinks = [sink for sink in (metrics_file, tensorboard) if sink is not None]
            loop = _Loop(
                run, store, data, start, engine, stop, report, sinks, evaluation, trace=trace, forecast=forecast
            )
            return loop.run_to_end()


def preview(options: TrainOptions, report: Reporter) -> Forecast:
    """What :func:`train` would take. Refuses what that refuses, with nothing created or changed.

    The data is read as for training, since it can be refused; what that puts into the cache is removed again.
    """
    with Stop() as stop, open_engine(options.io) as engine:
        run = prepare_run(options, engine, report, stop)
        rows = _data(run, report, stop)
        made = [rows]
        try:
            made.append(None if rows is None else _validation_data(run, rows, report, stop))
            forecast = make_forecast(run, report, stop)
            seconds = None if forecast.prediction is None else forecast.prediction.seconds
            options = run.options
            report.notice(foreseen(options, run.directory, run.found, run.setup, predicted_seconds=seconds))
            return forecast
        finally:
            for each in made:
                if each is not None and each.source.made is not None:
                    each.source.made.remove()


# --- data -------------------------------------------------------------------------------------------------------------


def _data(run: Prepared, report: Reporter, stop: Stop) -> Rows | None:
    """The rows, ready; None for a run of no steps, which needs none. What a refusal has made is removed again."""
    options = run.options
    paths = tuple(Path(path) for path in options.data)
    if not options.steps and not paths:
        return None
    if not paths:
        if options.model != "tiny":
            raise ConfigError(
                "--data: nothing given; name text files, folders, records (.jsonl, .json, .parquet) or ids (.npy, .bin)"
            )
        paths = stdlib_sources()
    cache = _cache(run)
    writable = cache if cache.exists() else cache.parent
    if not os.access(writable, os.W_OK | os.X_OK):
        raise RefusalError(
            f"--store {options.main_store}: the ids of --data are kept beside it, in {cache}, and {writable} cannot be "
            "written; put the store into a folder that you may write"
        )
    rows = _rows(
        run, paths, checked("reading data", report, stop), micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.micro_batches, validation_share=options.validation_split, seed=options.seed,
    )  # fmt: skip
    if options.data:  # that a few of Python's own files are no UTF-8 concerns nobody
        for notice in rows.source.notices:
            report.notice(notice)
    vocab_size = run.source.vocab_size
    if rows.source.tokenizer is not None and run.source.tokenizer is None and vocab_size > _MANY_IDS:
        report.notice(
            f"text is taken as bytes, which use {ByteTokenizer.VOCABULARY} of the model's {vocab_size:,} ids; "
            "otherwise name a model directory with a tokenizer, or give token ids (.npy)"
        )
    return rows


def _rows(
    run: Prepared, paths: Sequence[Path], progress: Callable[[int, int], None], option: str = "--data", **more: Any
) -> Rows:
    """The rows of some data, made as the options say."""
    options = run.options
    return token_data.prepare(
        paths,
        tokenizer=run.source.tokenizer,
        vocab_size=run.source.vocab_size,
        cache_directory=_cache(run),
        rules=options.row_rules(pad_id=_pad_id(run.source)),
        truncate=options.truncate,
        token_bytes=options.token_bytes,
        option=option,
        progress=progress,
        **more,
    )


def _cache(run: Prepared) -> Path:
    return run.directory.with_name(run.directory.name + CACHE_SUFFIX)


def _validation_data(run: Prepared, rows: Rows, report: Reporter, stop: Stop) -> Rows | None:
    """Rows of ``--validation-data``; None without it. A refusal takes back what ``rows`` has put into the cache."""
    paths = tuple(Path(path) for path in run.options.validation_data)
    if not paths:
        return None
    with _undone([rows]):
        found = _rows(run, paths, checked("reading validation data", report, stop), option="--validation-data")
    for notice in found.source.notices:
        report.notice(notice)
    return found


def _evaluation(
    run: Prepared, rows: Rows, validation: Rows | None, data: token_data.StepData
) -> Evaluation | None:
    """Evaluations as the options say; None where there is nothing to evaluate with."""
    options = run.options
    held_out = data.held_out if validation is None else None
    if held_out is not None and not held_out.num_validation:
        return None
    batches = options.micro_batches if options.eval_batches is None else options.eval_batches
    source = rows if validation is None else validation
    return Evaluation(
        source,
        validation_numbers(held_out, source, batches * options.micro_batch_size),
        every=options.eval_every,
        last_step=options.steps,
        num_rows_there=len(validation_numbers(held_out, source, 0)),
        micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.micro_batches,
    )


def _pad_id(source: ModelSource) -> int:
    """The id that fills rows up: the model's own, if it has one."""
    found = getattr(source.config.get_text_config(decoder=True), "pad_token_id", None)
    return found if isinstance(found, int) and 0 <= found < source.vocab_size else 0


def _text_as(run: Prepared, rows: Rows) -> str | None:
    """How text became ids, for people; None if the data is all ids."""
    if rows.source.tokenizer is None:
        return None
    if run.source.tokenizer is not None:
        return f"with {rows.source.tokenizer}"
    return "as bytes" if run.options.model in PRESETS else "as bytes (the model directory has no tokenizer)"


def _step_data(run: Prepared, rows: Rows, report: Reporter) -> token_data.StepData:
    """The data from where the store's last commit stands."""
    options = run.options
    recorded = None if run.found is None else run.found.run.get("data")
    after = None if recorded is None else token_data.DataPosition.from_json(recorded)
    data = token_data.StepData(
        rows,
        order=options.order,
        seed=options.seed,
        micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.micro_batches,
        validation_share=options.validation_split,
        after=after,
    )
    if after is not None:
        for difference in data.differences(after):
            report.notice(difference)
    return data


# --- the store --------------------------------------------------------------------------------------------------------


@contextmanager
def _store(
    run: Prepared, engine: IoEngine, rows: Sequence[Rows], report: Reporter, stop: Stop
) -> Iterator[Store]:
    """The store, open for writing: the one that was found, or a new one at step 0."""
    options = run.options
    with named("--store", run.directory, *(one.directory for one in run.drives)), _undone(rows):
        if run.found is not None:
            checking = checked("checking the store", report, stop)
            check: Literal["sizes", "crc"] = "sizes" if options.verify == "never" else "crc"
            store = Store.open(run.directory, engine=engine, check=check, progress=checking)
            if store.record != run.found:
                store.close()
                raise StoreRefusedError(
                    f"{run.directory}: another process committed to it just now; run the same command again"
                )
        else:
            store = create_store(
                run.directory,
                model=run.model,
                setup=run.setup,
                engine=engine,
                source=run.weights,
                attributes=store_attributes(
                    run.source, attention=options.attention, dropout=options.dropout, adapter=run.adapter
                ),
                run={"options": options.remembered()},
                extras=lambda folder: save_model_files(run.source, folder),
                drives=run.drives,
                fresh=options.fresh,
                progress=lambda what, done, total: checked(what, report, stop)(done, total),
            )
    with store:
        yield store


@contextmanager
def _undone(rows: Sequence[Rows]) -> Iterator[None]:
    """Where a store cannot be made or opened, take back what its data put into the cache."""
    try:
        yield
    except StoreLockedError:
        raise  # whoever has the lock may be using the cache
    except RefusalError:
        for each in rows:
            if each.source.made is not None:
                each.source.made.remove()
        raise


# --- steps ------------------------------------------------------------------------------------------------------------


class _Loop:
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
        config, setup = options.trainer_config(), self._run.setup
        times = self._train(config, setup, measure=options.delay == AUTO and not config.delay_in_force)
        if times is not None:
            config, setup = self._pick_delay(times, config)
            if self._forecast is not None:
                self._forecast = self._forecast.of(setup, config)
            self._train(config, setup)
        return _end(
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
        budget = _write_budget(run, self._store, config, setup, counted, self._evaluation)
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
        return _judged(self._run, self._store, config, counted, seconds, step)

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
                setup = prepare(run.model, run.layouts, delayed)
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
    except (RunFailedError, NonFiniteGradientError, OSError) as error:  # TransferError is one
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


def _start(
    run: Prepared,
    engine: IoEngine,
    rows: Rows,
    data: token_data.StepData,
    store: Store,
    evaluation: Evaluation | None,
    predicted_seconds: float | None,
) -> RunStart:
    options = run.options
    assert store.record is not None
    return RunStart(
        model=options.model,
        store=options.main_store,
        resumed=run.found is not None,
        step=run.step,
        steps=options.steps,
        setup=run.setup,
        num_parameters=sum(placed.spec.num_elements for layout in run.layouts for placed in layout.trainable),
        num_frozen=sum(
            placed.spec.num_elements for layout in run.layouts for placed in layout.frozen if placed.spec.frozen_weight
        ),
        num_tokens=rows.source.num_tokens,
        text_as=_text_as(run, rows),
        num_windows=data.held_out.num_training,
        num_validation_rows=0 if evaluation is None else evaluation.num_rows,
        num_validation_rows_there=0 if evaluation is None else evaluation.num_rows_there,
        windows_per_step=options.micro_batches * options.micro_batch_size,
        budget_bytes=options.host_memory_bytes(),
        baseline_bytes=run.baseline_bytes,
        engine=engine.describe(),
        drives=shares(store.record, store.directory),
        clips=options.clip_norm > 0.0,
        commits=_commit_rule(options.trainer_config(), run.setup),
        wear=_wear_ahead(run, store, predicted_seconds),
    )


def _wear_ahead(run: Prepared, store: Store, predicted_seconds: float | None) -> tuple[str, ...]:
    """What the run will do to the drive: at the speed that is predicted, or else that it had so far, if it goes on."""
    config, totals = run.options.trainer_config(), run.totals
    steps_done = run.step - totals.since_step
    seconds = predicted_seconds
    if seconds is None and steps_done > 0 and totals.seconds > 0.0:
        seconds = totals.seconds / steps_done
    counted = writes.count(run.setup, config, store.record)
    lines = [ahead(_judged(run, store, config, counted, seconds, run.step), run.options.steps - run.step)]
    budget = run.options.write_budget_bytes()
    if budget is not None and store.wear is not None:
        so_far = show_decimal(store.wear.written_bytes)
        lines.append(f"--write-budget {show_decimal(budget)}, of which {so_far} are written so far")
    less = lower(run.setup, config)
    return (*lines, less) if less else tuple(lines)


def _judged(
    run: Prepared, store: Store, config: TrainerConfig, counted: Writes, seconds: float | None, step: int
) -> Wear:
    assert store.wear is not None
    return judged(
        store.wear,
        counted,
        config,
        seconds_per_step=seconds,
        steps_left=run.options.steps - step,
        write_budget_bytes=run.options.write_budget_bytes(),
    )


def _write_budget(
    run: Prepared, store: Store, config: TrainerConfig, setup: Setup, counted: Writes, evaluation: Evaluation | None
) -> WriteBudget | None:
    """What ``--write-budget`` allows; None without it."""
    budget_bytes = run.options.write_budget_bytes()
    if budget_bytes is None:
        return None
    assert store.wear is not None
    each = 0 if evaluation is None else writes.evaluation_bytes(setup, config)
    rows = config.micro_batch_size * config.num_micro_batches

    def evaluation_bytes(step: int) -> int:
        return 0 if evaluation is None or not evaluation.is_due(step) else -(-evaluation.num_rows // rows) * each

    return WriteBudget(
        budget_bytes=budget_bytes,
        ledger=store.wear,
        counted=counted,
        snapshot_bytes=snapshot_bytes(store) if run.options.snapshot_every else 0,
        snapshot_every=run.options.snapshot_every,
        evaluation_bytes=evaluation_bytes,
    )


def _commit_rule(config: TrainerConfig, setup: Setup) -> str:
    """When commits are due, for people."""
    every, minutes = config.commit_rule(keeps_states=setup.memory.kept.is_dirty_between_commits)
    rules = [] if every is None else ["step" if every == 1 else f"{every} steps"]
    rules += [] if minutes is None else [f"{minutes:g} minutes"]
    return f"every {' or '.join(rules)}, and at the end"


def _end(
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
    )
