"""`hoist train`: from options to a trained store. Opens or creates the store, feeds it steps, commits, reports.

Everything that can be refused is refused before anything is created: what `preparing.py` looks at first, data last.
Options are in `options.py`, what is told in `report.py`, the engine in `hoist.scheduler`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store
from hoist.scheduler.setup import Setup
from hoist.scheduler.trace import Trace
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store
from hoist.tools import data as token_data
from hoist.tools.drives import shares
from hoist.tools.evaluation import Evaluation
from hoist.tools.forecast import Forecast
from hoist.tools.forecasting import make_forecast
from hoist.tools.loudness import is_quiet
from hoist.tools.metrics_file import MetricsFile
from hoist.tools.model_files import save_model_files, store_attributes
from hoist.tools.options import TrainOptions
from hoist.tools.preparing import Prepared, checked, named, open_engine, prepare_run
from hoist.tools.report import Reporter, RunEnd, RunStart, Totals
from hoist.tools.rows import Rows
from hoist.tools.run_data import evaluation_of, step_data, text_as, training_rows, undone, validation_rows
from hoist.tools.run_steps import Loop, run_end
from hoist.tools.run_wear import wear_ahead
from hoist.tools.stop import Stop
from hoist.tools.tensorboard_log import TensorboardLog
from hoist.tools.wear import (
    foreseen,
    rate_drives,
)

_log = logging.getLogger(__name__)


def train(options: TrainOptions, report: Reporter) -> RunEnd:
    """Run training as told. Raises HoistError with one line; the store is then at its last commit, or as before."""
    with ExitStack() as cleanup:
        stop = cleanup.enter_context(Stop())
        with open_engine(options.io) as engine:
            run = prepare_run(options, engine, report, stop)
            cleanup.callback(run.device.close)
            options = run.options
            if run.found is not None and run.step >= options.steps:
                return run_end(run, stop, step=run.step)
            rows = training_rows(run, report, stop)
            validation = None if rows is None else validation_rows(run, rows, report, stop)
            made = [each for each in (rows, validation) if each is not None]
            forecast = None if rows is None else make_forecast(run, report, stop)
            store = cleanup.enter_context(_store(run, engine, made, report, stop))
            if rows is None:
                return run_end(run, stop, step=0, totals=Totals().with_io(engine.statistics()))
            rate_drives(options, store, run.found, report.notice)
            data = step_data(run, rows, report)
            evaluation = evaluation_of(run, rows, validation, data)
            prediction = None if forecast is None else forecast.prediction
            predicted_seconds = None if prediction is None else prediction.seconds
            start = _start(run, engine, rows, data, store, evaluation)
            report.plan(start)
            if forecast is not None:
                forecast = replace(forecast, wear=wear_ahead(run, store, predicted_seconds))
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
                notice = _of_lost_trace(report)
                trace = cleanup.enter_context(Trace(options.trace, notice=notice, option="--trace"))
            sinks = [sink for sink in (metrics_file, tensorboard) if sink is not None]
            loop = Loop(
                run, store, data, start, engine, stop, report, sinks, evaluation, trace=trace, forecast=forecast
            )
            return loop.run_to_end()


def preview(options: TrainOptions, report: Reporter) -> Forecast:
    """What :func:`train` would take. Refuses what that refuses, with nothing created or changed.

    The data is read as for training, since it can be refused; what that puts into the cache is removed again.
    """
    with ExitStack() as cleanup:
        stop = cleanup.enter_context(Stop())
        engine = cleanup.enter_context(open_engine(options.io))
        run = prepare_run(options, engine, report, stop)
        cleanup.callback(run.device.close)
        rows = training_rows(run, report, stop)
        made = [rows]
        try:
            made.append(None if rows is None else validation_rows(run, rows, report, stop))
            forecast = make_forecast(run, report, stop)
            seconds = None if forecast.prediction is None else forecast.prediction.seconds
            options = run.options
            wear = foreseen(options, run.directory, run.found, run.setup, predicted_seconds=seconds)
            return replace(forecast, wear=wear)
        finally:
            for each in made:
                if each is not None and each.source.made is not None:
                    each.source.made.remove()


@contextmanager
def _store(
    run: Prepared, engine: IoEngine, rows: Sequence[Rows], report: Reporter, stop: Stop
) -> Iterator[Store]:
    """The store, open for writing: the one that was found, or a new one at step 0."""
    options = run.options
    with named("--store", run.directory, *(one.directory for one in run.drives)), undone(rows):
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


def _start(
    run: Prepared,
    engine: IoEngine,
    rows: Rows,
    data: token_data.StepData,
    store: Store,
    evaluation: Evaluation | None,
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
        text_as=text_as(run, rows),
        num_windows=data.held_out.num_training,
        num_validation_rows=0 if evaluation is None else evaluation.num_rows,
        num_validation_rows_there=0 if evaluation is None else evaluation.num_rows_there,
        windows_per_step=options.micro_batches * options.micro_batch_size,
        budget_bytes=options.host_memory_bytes(),
        baseline_bytes=run.baseline_bytes,
        engine=engine.describe(),
        device=run.device.describe(),
        device_budget_bytes=run.device_memory_bytes,
        layers_compiled=options.compile,
        drives=shares(store.record, store.directory),
        clips=options.clip_norm > 0.0,
        commits=_commit_rule(run.config, run.setup),
    )


def _of_lost_trace(report: Reporter) -> Callable[[str], None]:
    """Tells that the trace could not be written, which the run outlives: with `--quiet` too, since it was asked for."""
    return _log.error if is_quiet() else report.notice


def _commit_rule(config: TrainerConfig, setup: Setup) -> str:
    """When commits are due, for people."""
    every, minutes = config.commit_rule(keeps_states=setup.memory.kept.is_dirty_between_commits)
    rules = [] if every is None else ["step" if every == 1 else f"{every} steps"]
    rules += [] if minutes is None else [f"{minutes:g} minutes"]
    return f"every {' or '.join(rules)}, and at the end"
