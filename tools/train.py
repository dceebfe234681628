"""`hoist train`: from options to a trained store. Opens or creates the store, feeds it steps, commits, reports.

Everything that can be refused is refused before anything is created: place, lock, metrics file, model, budget, space
and weights first, data last. Options are in `options.py`, what is told in `report.py`, the engine in `hoist.scheduler`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import Source, create_store, initialised
from hoist.scheduler.delay import SHARES, StepTimes, choose
from hoist.scheduler.errors import ConfigError, ModelError, NonFiniteGradientError
from hoist.scheduler.freezing import choose_trained
from hoist.scheduler.isolation import check_isolation
from hoist.scheduler.memory import STATE_BYTES
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import Setup, check_slots, lay_out_stages, prepare
from hoist.scheduler.stages import StagedModel, split
from hoist.scheduler.trainer import CommitTotals, StepMetrics, Trainer
from hoist.tiers import allocation, drives
from hoist.tiers.allocation import DirectoryState
from hoist.tiers.dealing import MeasuredDirectory, measure, measured_bytes
from hoist.tiers.errors import BudgetError, RefusalError, StoreLockedError, StoreRefusedError
from hoist.tiers.footprint import warm_up
from hoist.tiers.format import LOCK_NAME, MODEL_DIRECTORY, SCRATCH_DIRECTORY, CommitRecord
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.layout import MAX_CHUNK_ELEMENTS, StageLayout
from hoist.tiers.lock import check_unlocked
from hoist.tiers.store import Store
from hoist.tools import data as token_data
from hoist.tools.drives import follow, shares
from hoist.tools.errors import MetricsError, RunFailedError
from hoist.tools.evaluation import Evaluation, validation_numbers
from hoist.tools.import_weights import check_weights, checkpoint_dtypes, checkpoint_weights, stored_dtypes
from hoist.tools.invoked import command_name
from hoist.tools.lora import ADAPTER_KEY, add_adapters, with_adapters
from hoist.tools.metrics_file import MetricsFile, check_metrics_path
from hoist.tools.model_files import config_difference, load_config, save_model_files, small_bytes, weight_types
from hoist.tools.options import AUTO, TrainOptions
from hoist.tools.presets import PRESETS, ModelSource, load_model_source
from hoist.tools.report import Reporter, RunEnd, RunStart, Totals
from hoist.tools.rows import Rows
from hoist.tools.snapshot import AutomaticSnapshots, check_space_for_run
from hoist.tools.stop import Stop
from hoist.tools.text import ByteTokenizer, stdlib_sources

#: Where the ids of tokenized text are kept: next to the store, named after it.
CACHE_SUFFIX = ".tokens"
#: Steps after which a delay is picked: the first reads what others need not, the next two are like them.
MEASURED_STEPS = 3
#: A vocabulary beyond this was made for a tokenizer: bytes would leave nearly all of it unused.
_MANY_IDS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """A run that was not refused. Nothing is created yet."""

    options: TrainOptions
    directory: Path
    """The store's main directory, absolute."""
    drives: tuple[MeasuredDirectory, ...]
    """All directories of a new store that spans several, the main one first; else empty."""
    found: CommitRecord | None
    """The commit that the run goes on from; None for a new store."""
    source: ModelSource
    model: StagedModel
    layouts: tuple[StageLayout, ...]
    setup: Setup
    adapter: Mapping[str, Any] | None
    """peft's configuration of a new store's adapters; None if it has none."""
    weights: Source
    """Of a new store."""
    baseline_bytes: int

    @property
    def step(self) -> int:
        """Steps that are behind the run."""
        return 0 if self.found is None else self.found.step

    @property
    def totals(self) -> Totals:
        """What earlier calls have done."""
        if self.found is None:
            return Totals()
        recorded = self.found.run.get("totals")
        return Totals(since_step=self.found.step) if recorded is None else Totals.from_json(recorded)


def train(options: TrainOptions, report: Reporter) -> RunEnd:
    """Run training as told. Raises HoistError with one line; the store is then at its last commit, or as before."""
    with ExitStack() as cleanup:
        stop = cleanup.enter_context(Stop())
        with _engine(options.io) as engine:
            run = _prepare(options, engine, report, stop)
            options = run.options
            if run.found is not None and run.step >= options.steps:
                return _end(run, stop, step=run.step)
            rows = _data(run, report, stop)
            validation = None if rows is None else _validation_data(run, rows, report, stop)
            made = [each for each in (rows, validation) if each is not None]
            store = cleanup.enter_context(_store(run, engine, made, report, stop))
            if rows is None:
                return _end(run, stop, step=0, totals=Totals().with_io(engine.statistics()))
            data = _step_data(run, rows, report)
            evaluation = _evaluation(run, rows, validation, data)
            start = _start(run, engine, rows, data, store, evaluation)
            report.plan(start)
            metrics_file = None
            if options.metrics is not None:
                metrics_file = cleanup.enter_context(MetricsFile(Path(options.metrics)))
            return _Loop(run, store, data, start, engine, stop, report, metrics_file, evaluation).run_to_end()


# --- refusing ---------------------------------------------------------------------------------------------------------


def _prepare(options: TrainOptions, engine: IoEngine, report: Reporter, stop: Stop) -> _Prepared:
    """Check everything that can be checked without the data; what shows quickly comes first. Creates nothing."""
    directory, *further = (Path(os.path.abspath(place)) for place in options.store)  # noqa: PTH100 (links keep names)
    with _named("--store", directory, *further):
        resume = _check_place(directory, further, options)
        if options.metrics is not None:
            check_metrics_path(Path(options.metrics))
        found: CommitRecord | None = None
        layouts: tuple[StageLayout, ...] = ()
        if resume:
            # Read-only, so that whatever is refused later leaves the store as it was.
            with Store.open(directory, engine=engine, writable=False) as store:
                found, layouts, num_slots = store.record, store.layouts, store.num_slots
            assert found is not None
            options, changed = options.resuming(found.run.get("options", {}))
            check_slots(directory, num_slots, options.trainer_config())
            if "options" not in found.run:
                report.notice(
                    f"--store {options.main_store}: was not trained by this command so far: its settings are not "
                    "recorded, and those that are not given have their defaults"
                )
            if changed:
                report.notice(f"changed since the last commit: {', '.join(changed)}")
        source = _model_source(options, directory if resume else None)
        options.require_validation_data()
        _check_positions(options, source)
        model, adapter = _staged(options, source, layouts)
        if options.isolate_documents:
            _check_isolation(options, model)
        stop.check()
        if not resume:
            layouts = lay_out_stages(model, max_chunk_elements=options.max_chunk_elements or MAX_CHUNK_ELEMENTS)
        baseline_bytes = warm_up()
        setup = prepare(model, layouts, options.trainer_config())
        weights = initialised(options.seed)
        if options.snapshot_every:
            _check_snapshot_space(directory, options, found, layouts, setup)
        measured: tuple[MeasuredDirectory, ...] = ()
        if not resume:
            if further:
                measured = measure([directory, *further], engine, num_bytes=measured_bytes(layouts))
            Store.check_creation(
                directory,
                layouts=layouts,
                attributes=_attributes(options, source, adapter),
                num_slots=setup.num_slots,
                scratch_bytes=setup.scratch_bytes + small_bytes(source),
                drives=measured,
                fresh=options.fresh,
            )
            if source.checkpoint is not None:
                weights = checkpoint_weights(source.checkpoint, model, engine)
                if allocation.directory_state(directory) is DirectoryState.COMMITTED:  # --fresh: there is one to lose
                    checking = _checked("checking the weights", report, stop)
                    check_weights(source.checkpoint, model, engine, progress=checking)
        stop.check()
    return _Prepared(
        options=options,
        directory=directory,
        drives=measured,
        found=found,
        source=source,
        model=model,
        layouts=layouts,
        setup=setup,
        adapter=adapter,
        weights=weights if adapter is None else with_adapters(weights, options.seed),
        baseline_bytes=baseline_bytes,
    )


def _check_snapshot_space(
    directory: Path, options: TrainOptions, found: CommitRecord | None, layouts: Sequence[StageLayout], setup: Setup
) -> None:
    """Refuse snapshots that the drive has no room for besides the store, which may have to be made, and its scratch."""
    bytes_each = sum(STATE_BYTES * layout.padded_elements for layout in layouts)
    # What is there already, the last run's scratch too, takes no more room.
    new_bytes = max(0, setup.scratch_bytes - allocation.tree_bytes(directory / SCRATCH_DIRECTORY))
    if allocation.directory_state(directory) is not DirectoryState.COMMITTED:
        new_bytes += setup.num_slots * bytes_each
    check_space_for_run(
        directory,
        every=options.snapshot_every,
        keep=options.keep_snapshots,
        step=0 if found is None else found.step,
        steps=options.steps,
        bytes_each=bytes_each,
        leave_bytes=new_bytes,
    )


@contextmanager
def _named(option: str, path: Path, *others: Path) -> Iterator[None]:
    """Put the option before refusals that name one of its values alone, and before others the first as well."""
    try:
        yield
    except (StoreRefusedError, StoreLockedError) as error:
        text = str(error)
        if text.startswith("--"):
            raise
        if any(text.startswith(f"{one}:") for one in (path, *others)):
            raise type(error)(f"{option} {text}") from error
        raise type(error)(f"{option} {path}: {text}") from error


def _engine(kind: str) -> IoEngine:
    try:
        return choose_engine(kind)
    except RefusalError as error:
        raise RefusalError(f"--io {kind}: {error}") from error


def _check_positions(options: TrainOptions, source: ModelSource) -> None:
    """Refuse rows that are longer than what the model has positions for."""
    most = getattr(source.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < options.seq_len:
        raise ConfigError(
            f"--seq-len: {options.seq_len} is more than the {most} positions (max_position_embeddings) of --model "
            f"{options.model}; give at most {most}"
        )


def _staged(
    options: TrainOptions, source: ModelSource, layouts: Sequence[StageLayout]
) -> tuple[StagedModel, Mapping[str, Any] | None]:
    """The model in stages, and peft's configuration of its adapters, if it is to have some.

    Frozen weights are kept as they are in the store (``layouts``), or in the checkpoint.
    """
    adapter: Mapping[str, Any] | None = None
    lora = options.lora_options()
    try:
        model = build_model(source.config, attention=options.attention, dropout=options.dropout)
        if lora is not None:
            adapter = add_adapters(model, lora, base=str(source.directory or source.name))
        else:
            choose_trained(model, train=options.train, freeze=options.freeze)
        staged = split(model)
    except ModelError as error:
        advice = "" if ";" in str(error) else "; name another model"
        raise ModelError(f"--model {options.model}: {error}{advice}") from error
    if layouts:
        dtypes = stored_dtypes(layouts)
    else:
        dtypes = {} if source.checkpoint is None else checkpoint_dtypes(source.checkpoint, staged)
    staged.keep_frozen_as(dtypes)
    return staged, adapter


def _check_isolation(options: TrainOptions, model: StagedModel) -> None:
    try:
        check_isolation(model)
    except ModelError as error:
        raise ModelError(f"--isolate-documents: {error}; leave it out, or give --no-pack") from error


def _check_place(directory: Path, further: Sequence[Path], options: TrainOptions) -> bool:
    """True to resume the store at ``directory``, False to make one there. Refuses a place where neither can be.

    A store's drives that are mounted elsewhere now are found where ``further`` says.
    """
    drives.refuse_drive(directory)
    state = allocation.directory_state(directory)
    resume = state is DirectoryState.COMMITTED and not options.fresh
    if resume:
        allocation.check_no_snapshot(directory)
        allocation.check_writable(directory)
        if further:
            follow(directory, further)
    else:
        allocation.check_creatable(directory, fresh=options.fresh)
        drives.check_places(directory, further, fresh=options.fresh)
    check_unlocked(directory / LOCK_NAME)
    return resume


def _model_source(options: TrainOptions, store: Path | None) -> ModelSource:
    """The model that is named; to resume, the store's own, and a named one must have the same configuration."""
    if store is None:
        return load_model_source(options.model)
    folder = store / MODEL_DIRECTORY
    config = load_config(folder)
    if "model" in options.given:
        difference = config_difference(load_model_source(options.model).config, config)
        if difference is not None:
            raise StoreRefusedError(
                f"--model {options.model}: not the model of --store {options.main_store}: {difference}; leave --model "
                "out, name another --store, or start over with --fresh"
            )
    return ModelSource(
        name=options.model,
        config=config,
        directory=folder,
        tokenizer=load_model_source(str(folder)).tokenizer,
        checkpoint=None,
    )


# --- data -------------------------------------------------------------------------------------------------------------


def _data(run: _Prepared, report: Reporter, stop: Stop) -> Rows | None:
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
        run, paths, _checked("reading data", report, stop), micro_batch_size=options.micro_batch_size,
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
    run: _Prepared, paths: Sequence[Path], progress: Callable[[int, int], None], option: str = "--data", **more: Any
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


def _cache(run: _Prepared) -> Path:
    return run.directory.with_name(run.directory.name + CACHE_SUFFIX)


def _validation_data(run: _Prepared, rows: Rows, report: Reporter, stop: Stop) -> Rows | None:
    """Rows of ``--validation-data``; None without it. A refusal takes back what ``rows`` has put into the cache."""
    paths = tuple(Path(path) for path in run.options.validation_data)
    if not paths:
        return None
    with _undone([rows]):
        found = _rows(run, paths, _checked("reading validation data", report, stop), option="--validation-data")
    for notice in found.source.notices:
        report.notice(notice)
    return found


def _evaluation(
    run: _Prepared, rows: Rows, validation: Rows | None, data: token_data.StepData
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


def _text_as(run: _Prepared, rows: Rows) -> str | None:
    """How text became ids, for people; None if the data is all ids."""
    if rows.source.tokenizer is None:
        return None
    if run.source.tokenizer is not None:
        return f"with {rows.source.tokenizer}"
    return "as bytes" if run.options.model in PRESETS else "as bytes (the model directory has no tokenizer)"


def _checked(what: str, report: Reporter, stop: Stop) -> Callable[[int, int], None]:
    """A progress callback through which a signal ends the work."""

    def progress(done: int, total: int) -> None:
        stop.check()
        report.progress(what, done, total)

    return progress


def _step_data(run: _Prepared, rows: Rows, report: Reporter) -> token_data.StepData:
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
    run: _Prepared, engine: IoEngine, rows: Sequence[Rows], report: Reporter, stop: Stop
) -> Iterator[Store]:
    """The store, open for writing: the one that was found, or a new one at step 0."""
    options = run.options
    with _named("--store", run.directory, *(one.directory for one in run.drives)), _undone(rows):
        if run.found is not None:
            checking = _checked("checking the store", report, stop)
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
                attributes=_attributes(options, run.source, run.adapter),
                run={"options": options.remembered()},
                extras=lambda folder: save_model_files(run.source, folder),
                drives=run.drives,
                fresh=options.fresh,
                progress=lambda what, done, total: _checked(what, report, stop)(done, total),
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


def _attributes(options: TrainOptions, source: ModelSource, adapter: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {
        **({} if adapter is None else {ADAPTER_KEY: adapter}),
        "model": {
            "name": source.name,
            "type": source.config.model_type,
            "attention": options.attention,
            "dropout": options.dropout,
            "weights": weight_types(source).to_json(),
        },
        "optimizer": {"kind": "adamw"},
    }


# --- steps ------------------------------------------------------------------------------------------------------------


class _Loop:
    """The steps of one call: feeds the trainer, tells of each step, commits at the end."""

    def __init__(
        self,
        run: _Prepared,
        store: Store,
        data: token_data.StepData,
        start: RunStart,
        engine: IoEngine,
        stop: Stop,
        report: Reporter,
        metrics_file: MetricsFile | None,
        evaluation: Evaluation | None,
    ) -> None:
        self._run = run
        self._store = store
        self._data = data
        self._start = start
        self._engine = engine
        self._stop = stop
        self._report = report
        self._metrics_file = metrics_file
        self._evaluation = evaluation
        self._totals = run.totals
        self._last: StepMetrics | None = None
        self._step = run.step
        self._commits = CommitTotals()

    def run_to_end(self) -> RunEnd:
        """All steps that are left, or until a signal."""
        began = time.perf_counter()
        options = self._run.options
        config, setup = options.trainer_config(), self._run.setup
        times = self._train(config, setup, measure=options.delay == AUTO and not config.delay_in_force)
        if times is not None:
            self._train(*self._pick_delay(times, config))
        return _end(
            self._run,
            self._stop,
            step=self._step,
            last=self._last,
            seconds=time.perf_counter() - began,
            totals=self._totals.with_io(self._engine.statistics()),
            commits=self._commits,
        )

    def _train(self, config: TrainerConfig, setup: Setup, *, measure: bool = False) -> StepTimes | None:
        """All steps that are left, then a commit. With ``measure``, where the first few suggest a delay, the commit
        comes after them, and their times are returned: the other steps are still to be done.
        """
        run, suggestive = self._run, None
        with (
            Trainer(
                model=run.model,
                store=self._store,
                engine=self._engine,
                config=config,
                baseline_bytes=run.baseline_bytes,
                setup=setup,
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
                self._last = trainer.step(self._data.step(step), run=self._kept)
                _require_finite(self._last)
                if self._metrics_file is not None:
                    self._metrics_file.write(self._last)
                self._report.step(self._last, self._start)
                snapshots.after_step(trainer)
                self._evaluate(trainer)
            trainer.commit()
            self._step = trainer.step_number
            self._commits.join(trainer.statistics().commits)
        return suggestive

    def _evaluate(self, trainer: Trainer) -> None:
        """Evaluate, if that is due after this step; a signal ends it."""
        if self._evaluation is None or not self._evaluation.is_due(trainer.step_number):
            return
        found = self._evaluation.run(trainer, lambda: bool(self._stop.signal))
        if found is not None:
            if self._metrics_file is not None:
                self._metrics_file.write(found)
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
def _explained(run: _Prepared, trainer: Trainer) -> Iterator[None]:
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
    run: _Prepared,
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
    )


def _commit_rule(config: TrainerConfig, setup: Setup) -> str:
    """When commits are due, for people."""
    every, minutes = config.commit_rule(keeps_states=setup.memory.kept.is_dirty_between_commits)
    rules = [] if every is None else ["step" if every == 1 else f"{every} steps"]
    rules += [] if minutes is None else [f"{minutes:g} minutes"]
    return f"every {' or '.join(rules)}, and at the end"


def _end(
    run: _Prepared,
    stop: Stop,
    *,
    step: int,
    last: StepMetrics | None = None,
    seconds: float = 0.0,
    totals: Totals | None = None,
    commits: CommitTotals | None = None,
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
        budget_bytes=run.options.host_memory_bytes(),
    )
