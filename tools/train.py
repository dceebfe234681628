"""`hoist train`: from options to a trained store. Opens or creates the store, feeds it steps, commits, reports.

Options are in `options.py`, the engine in `hoist.scheduler`. Everything that can be refused is refused before a byte of
the store is changed.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from hoist.scheduler.creation import create_store, initialised
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import Setup, lay_out_stages, prepare
from hoist.scheduler.stages import StagedModel, split
from hoist.scheduler.trainer import StepMetrics, Trainer
from hoist.tiers.allocation import DirectoryState, directory_state
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.footprint import warm_up
from hoist.tiers.format import MODEL_DIRECTORY
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.layout import MAX_CHUNK_ELEMENTS
from hoist.tiers.store import Store
from hoist.tools import data as token_data
from hoist.tools.import_weights import checkpoint_weights
from hoist.tools.model_files import load_config, save_model_files
from hoist.tools.options import TrainOptions
from hoist.tools.presets import ModelSource, load_model_source
from hoist.tools.text import stdlib_sources
from hoist.tools.tokens import TokenSource

#: Where the ids of tokenized text are kept: next to the store, so that several stores can share them.
CACHE_SUFFIX = ".tokens"


class Reporter(Protocol):
    """What a run tells while it goes on; `cli.py` shows it."""

    def notice(self, text: str) -> None:
        """One line that the user should see."""

    def progress(self, what: str, done: int, total: int) -> None:
        """How far a long preparation is."""

    def plan(self, start: RunStart) -> None:
        """What is about to run."""

    def step(self, metrics: StepMetrics, start: RunStart) -> None:
        """A step has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """What is known before the first step."""

    store: Path
    resumed_at: int
    """Steps that the store already carries."""
    steps: int
    """Steps of the whole run."""
    setup: Setup
    num_parameters: int
    budget_bytes: int
    engine: str
    """The I/O engine's description of itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended."""

    store: Path
    step: int
    """Steps that the store now carries, committed."""
    steps: int
    signal: int
    """Signal that ended it early; 0 if none did."""
    seconds: float
    last: StepMetrics | None


class Stop:
    """Notes the first SIGINT or SIGTERM, for the loop to end after its step; a second one has its usual effect."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(options: TrainOptions, report: Reporter) -> RunEnd:
    """Run training as told. Raises HoistError with one line; the store is then at its last commit, or as before."""
    with ExitStack() as cleanup:
        stop = cleanup.enter_context(Stop())
        directory = Path(options.store).absolute()
        state = _check_directory(directory, options)
        resume = state is DirectoryState.COMMITTED and not options.fresh
        engine = cleanup.enter_context(choose_engine(options.io))
        source = _model_source(options, directory if resume else None)
        model = split(build_model(source.config, attention=options.attention, dropout=options.dropout))
        baseline_bytes = warm_up()
        config = options.trainer_config()
        if resume:
            store = cleanup.enter_context(Store.open(directory, engine=engine))
            layouts = store.layouts
        else:
            layouts = lay_out_stages(model, max_chunk_elements=options.max_chunk_elements or MAX_CHUNK_ELEMENTS)
        setup = prepare(model, layouts, config)
        tokens = _data(options, source, directory, report)
        sampler = token_data.WindowSampler(
            tokens.num_tokens // options.seq_len, order=options.order, seed=options.seed
        )
        if not resume:
            weights = (
                initialised(options.seed)
                if source.checkpoint is None
                else checkpoint_weights(source.checkpoint, model, engine)
            )
            store = cleanup.enter_context(
                create_store(
                    directory,
                    model=model,
                    setup=setup,
                    engine=engine,
                    source=weights,
                    attributes=_attributes(options, source),
                    extras=lambda folder: save_model_files(source, folder),
                    fresh=options.fresh,
                    progress=report.progress,
                )
            )
        data = _step_data(options, tokens, sampler, store, report)
        start = RunStart(
            store=directory,
            resumed_at=_committed_step(store),
            steps=options.steps,
            setup=setup,
            num_parameters=sum(placed.spec.num_elements for layout in layouts for placed in layout.trainable),
            budget_bytes=config.host_memory_bytes,
            engine=engine.describe(),
        )
        report.plan(start)
        metrics_file = cleanup.enter_context(_metrics_file(options.metrics))
        trainer = cleanup.enter_context(
            Trainer(
                model=model, store=store, engine=engine, config=config, baseline_bytes=baseline_bytes, setup=setup
            )
        )
        return _loop(options, trainer, data, start, stop, report, metrics_file)


def _loop(
    options: TrainOptions,
    trainer: Trainer,
    data: token_data.StepData,
    start: RunStart,
    stop: Stop,
    report: Reporter,
    metrics_file: IO[str] | None,
) -> RunEnd:
    began = time.perf_counter()
    last: StepMetrics | None = None
    while trainer.step_number < options.steps and not stop.signal:
        step = trainer.step_number + 1
        last = trainer.step(data.step(step), run={"data": data.position(step), "options": _recorded(options)})
        if metrics_file is not None:
            metrics_file.write(json.dumps(last.to_json()) + "\n")
            metrics_file.flush()
        report.step(last, start)
    trainer.commit()
    return RunEnd(
        store=start.store,
        step=trainer.step_number,
        steps=options.steps,
        signal=stop.signal,
        seconds=time.perf_counter() - began,
        last=last,
    )


def _check_directory(directory: Path, options: TrainOptions) -> DirectoryState:
    state = directory_state(directory)
    if state is DirectoryState.FOREIGN:
        raise StoreRefusedError(f"--store {directory}: is not a hoist store; name a new or an empty directory")
    if state is not DirectoryState.COMMITTED and not directory.parent.is_dir():
        raise StoreRefusedError(f"--store {directory}: {directory.parent} is not a directory; make it first")
    return state


def _model_source(options: TrainOptions, store: Path | None) -> ModelSource:
    """The model that is named, or, to resume a store without naming one, the store's own."""
    if store is not None and "model" not in options.given:
        folder = store / MODEL_DIRECTORY
        config = load_config(folder)
        found = load_model_source(str(folder))
        return ModelSource(
            name=str(store), config=config, directory=folder, tokenizer=found.tokenizer, checkpoint=None
        )
    return load_model_source(options.model)


def _data(
    options: TrainOptions, source: ModelSource, store: Path, report: Reporter
) -> TokenSource:
    paths = tuple(Path(path) for path in options.data)
    if not paths:
        if options.model != "tiny":
            raise ConfigError("--data: nothing given; name .npy or .bin token files, text files or folders of text")
        paths = stdlib_sources()
    tokens = token_data.prepare(
        paths,
        tokenizer=source.tokenizer,
        vocab_size=source.vocab_size,
        cache_directory=store.with_name(store.name + CACHE_SUFFIX),
        seq_len=options.seq_len,
        micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.micro_batches,
        token_bytes=options.token_bytes,
        progress=lambda done, total: report.progress("reading text", done, total),
    )
    for notice in tokens.notices:
        report.notice(notice)
    return tokens


def _step_data(
    options: TrainOptions,
    tokens: TokenSource,
    sampler: token_data.WindowSampler,
    store: Store,
    report: Reporter,
) -> token_data.StepData:
    """The data from where the store's last commit stands."""
    after: token_data.DataPosition | None = None
    recorded = store.record.run.get("data") if store.record is not None else None
    if recorded is not None:
        after = token_data.DataPosition.from_json(recorded)
    data = token_data.StepData(
        tokens,
        sampler,
        seq_len=options.seq_len,
        micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.micro_batches,
        after=after,
    )
    if after is not None:
        for difference in data.differences(after):
            report.notice(difference)
        before = store.record.run.get("options", {}) if store.record is not None else {}
        for name, value in _recorded(options).items():
            if name in before and before[name] != value:
                report.notice(f"{name} is now {value} (was {before[name]})")
    return data


def _committed_step(store: Store) -> int:
    return 0 if store.record is None else store.record.step


def _recorded(options: TrainOptions) -> dict[str, Any]:
    """The options that a commit keeps, to say at a resume what has changed."""
    names = (
        "seq_len", "micro_batch_size", "micro_batches", "steps", "lr", "lr_schedule", "warmup_steps", "betas", "eps",
        "weight_decay", "no_decay_norms", "seed", "order", "dropout", "attention",
    )  # fmt: skip
    values = {name: getattr(options, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _attributes(options: TrainOptions, source: ModelSource) -> Mapping[str, Any]:
    return {
        "model": {"name": source.name, "type": source.config.model_type, "attention": options.attention},
        "optimizer": {"kind": "adamw"},
    }


@contextmanager
def _metrics_file(path: str | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
        return
    try:
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (closed below; only opening may be refused)
    except OSError as error:
        raise ConfigError(f"--metrics {path}: cannot be written: {error.strerror}") from error
    with file:
        yield file

