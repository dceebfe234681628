"""What `hoist train` can refuse before the data: place, lock, metrics file, model, budget, space and weights.

Creates nothing, and leaves a store that is there as it was. What comes after is `train.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hoist.scheduler import compiling
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import Source, initialised
from hoist.scheduler.errors import ConfigError, ModelError
from hoist.scheduler.freezing import choose_trained, train_only
from hoist.scheduler.isolation import check_isolation
from hoist.scheduler.memory import STATE_BYTES
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import Setup, check_slots, lay_out_stages, prepare
from hoist.scheduler.stages import StagedModel, split
from hoist.scheduler.trace_file import check_trace_path
from hoist.tiers import allocation, drives
from hoist.tiers.allocation import DirectoryState
from hoist.tiers.dealing import MeasuredDirectory, measure, measured_bytes
from hoist.tiers.device import Device
from hoist.tiers.device.choose import choose_device
from hoist.tiers.errors import RefusalError, StoreLockedError, StoreRefusedError
from hoist.tiers.footprint import warm_up
from hoist.tiers.format import LOCK_NAME, MODEL_DIRECTORY, SCRATCH_DIRECTORY, CommitRecord
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.layout import MAX_CHUNK_ELEMENTS, StageLayout
from hoist.tiers.lock import check_unlocked
from hoist.tiers.store import Store
from hoist.tools import devices
from hoist.tools.drives import follow
from hoist.tools.dtypes import resolve_dtype
from hoist.tools.import_weights import check_weights, checkpoint_dtypes, checkpoint_weights, stored_dtypes
from hoist.tools.lora import add_adapters, with_adapters
from hoist.tools.lora_options import LoraOptions
from hoist.tools.metrics_file import check_metrics_path
from hoist.tools.model_files import ADAPTER_KEY, config_difference, load_config, small_bytes, store_attributes
from hoist.tools.options import TrainOptions
from hoist.tools.presets import ModelSource, load_model_source
from hoist.tools.report import Reporter, Totals
from hoist.tools.snapshot import check_space_for_run
from hoist.tools.stop import Stop
from hoist.tools.tensorboard_log import check_tensorboard
from hoist.tools.wear import check_tbw, check_write_budget

#: Key of a commit's run record: the device that computed the step, as torch names it.
DEVICE_KEY = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
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
    num_slots: int
    """Of each chunk, in the store that is there or will be."""
    measuring_bytes: int
    """The most that the file has with which a drive is measured."""
    device: Device
    """What computes. Whoever has this record closes it, after everything that uses its memory."""
    device_memory_bytes: int | None
    """The budget for its memory, if that is not the host's."""

    @property
    def config(self) -> TrainerConfig:
        """The scheduler's configuration, the device's budget included."""
        return self.options.trainer_config(device_memory_bytes=self.device_memory_bytes)

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


def prepare_run(options: TrainOptions, engine: IoEngine, report: Reporter, stop: Stop) -> Prepared:
    """Check everything that can be checked without the data; what shows quickly comes first. Creates nothing.

    Opens the device: see :attr:`Prepared.device`.
    """
    directory, *further = (Path(os.path.abspath(place)) for place in options.store)  # noqa: PTH100 (links keep names)
    with ExitStack() as cleanup, named("--store", directory, *further):
        resume = _check_place(directory, further, options)
        if options.metrics is not None:
            check_metrics_path(Path(options.metrics), store=directory)
        if options.tensorboard is not None:
            check_tensorboard(Path(options.tensorboard))
        if options.trace is not None:
            check_trace_path(Path(options.trace), "--trace")
        _check_files(options, directory)
        found: CommitRecord | None = None
        layouts: tuple[StageLayout, ...] = ()
        num_slots = 0
        if resume:
            # Read-only, so that whatever is refused later leaves the store as it was.
            with Store.open(directory, engine=engine, writable=False) as store:
                found, layouts, num_slots = store.record, store.layouts, store.num_slots
                made_with = _made_with(store, options)
            assert found is not None
            remembered = found.run.get("options", made_with)
            name = options.device if "device" in options.given else remembered.get("device", options.device)
            device = _opened(name, cleanup)
            options, changed = _resolved(options, device).resuming(remembered)
            check_slots(directory, num_slots, options.trainer_config())
            if "options" not in found.run:
                report.notice(
                    f"--store {options.main_store}: was not trained by this command so far: its settings are not "
                    "recorded, and those that are not given have their defaults"
                )
            if changed:
                report.notice(f"changed since the last commit: {', '.join(changed)}")
        if not resume:
            device = _opened(options.device, cleanup)
        options = _resolved(options, device)
        device_memory_bytes = _device_memory(options, device)
        elsewhere = None if found is None else devices.moved(found.run.get(DEVICE_KEY), device)
        if elsewhere is not None:
            report.notice(elsewhere)
        config = options.trainer_config(device_memory_bytes=device_memory_bytes)
        source = _model_source(options, directory if resume else None)
        options.require_validation_data()
        _check_positions(options, source)
        report.progress("sizing the run", 0, 0)
        model, adapter = _staged(options, source, layouts)
        if options.isolate_documents:
            _check_isolation(options, model)
        stop.check()
        if not resume:
            layouts = lay_out_stages(model, max_chunk_elements=options.max_chunk_elements or MAX_CHUNK_ELEMENTS)
        if options.compile:
            report.progress("trying the compiler", 0, 0)
            compiling.check(config.backend_in_force, device)
            stop.check()
        baseline_bytes = warm_up()
        setup = prepare(model, layouts, config, device=device)
        check_tbw(options, directory, found)
        weights = initialised(options.seed)
        if options.snapshot_every:
            _check_snapshot_space(directory, options, found, layouts, setup)
        measured: tuple[MeasuredDirectory, ...] = ()
        if not resume:
            if further:
                report.progress("measuring the drives", 0, 0)
                measured = measure([directory, *further], engine, num_bytes=measured_bytes(layouts))
            Store.check_creation(
                directory,
                layouts=layouts,
                attributes=store_attributes(
                    source, attention=options.attention, dropout=options.dropout, adapter=adapter
                ),
                num_slots=setup.num_slots,
                scratch_bytes=setup.scratch_bytes + small_bytes(source),
                drives=measured,
                fresh=options.fresh,
            )
            if source.checkpoint is not None:
                weights = checkpoint_weights(source.checkpoint, model, engine)
                if allocation.directory_state(directory) is DirectoryState.COMMITTED:  # --fresh: there is one to lose
                    checking = checked("checking the weights", report, stop)
                    check_weights(source.checkpoint, model, engine, progress=checking)
        probed = sum(one.probed_bytes for one in measured)
        measuring_bytes = check_write_budget(
            options, directory, found, setup, engine, further_bytes=probed + small_bytes(source)
        )
        stop.check()
        cleanup.pop_all()  # the device is the caller's from here on
    return Prepared(
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
        num_slots=num_slots if resume else setup.num_slots,
        measuring_bytes=measuring_bytes,
        device=device,
        device_memory_bytes=device_memory_bytes,
    )


def _opened(name: str, cleanup: ExitStack) -> Device:
    """The device of a name, closed by ``cleanup``.

    Not a generator's context: one that is dropped with :meth:`ExitStack.pop_all` ends, and would close the device.
    """
    device = choose_device(name)
    cleanup.callback(device.close)
    return device


def _device_memory(options: TrainOptions, device: Device) -> int | None:
    """The budget for the device's memory. One that a store remembers is for an accelerator alone."""
    told = options.device_memory_bytes()
    if not device.is_separate and "device_memory" not in options.given:
        told = None
    return devices.budget_bytes(device, told)


def _resolved(options: TrainOptions, device: Device) -> TrainOptions:
    """The same options with what ``auto`` and the names of devices mean here: a store remembers that, so that a resume
    computes alike. That updates ran on an accelerator is for a run on one alone.
    """
    optim_device = options.optim_device
    if not device.is_separate and "optim_device" not in options.given:
        optim_device = "cpu"
    return replace(
        options,
        dtype=resolve_dtype(options.dtype, device.torch_device),
        optim_device=devices.optim_device(optim_device, device),
    )


def _check_files(options: TrainOptions, store: Path) -> None:
    """Refuse to write over the store's own files, and two kinds of lines into one file."""
    for option, name in (("--metrics", options.metrics), ("--trace", options.trace)):
        if name is None:
            continue
        place, root = Path(name).resolve(), store.resolve()
        if place == root or (place.is_relative_to(root) and place.relative_to(root).parts[0] in allocation.OWN_NAMES):
            raise ConfigError(f"{option} {name}: is one of the store's own files; name a file in another place")
    metrics, trace = options.metrics, options.trace
    if metrics is not None and trace is not None and Path(metrics).resolve() == Path(trace).resolve():
        raise ConfigError(f"--trace {options.trace}: is the file of --metrics, too; name another")


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
def named(option: str, path: Path, *others: Path) -> Iterator[None]:
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


def open_engine(kind: str) -> IoEngine:
    """The I/O engine of a name. Raises RefusalError, which names the option, if the machine has none of it."""
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


def _made_with(store: Store, options: TrainOptions) -> Mapping[str, Any]:
    """Options of a store that this command never trained, as far as the store itself knows them."""
    adapter = store.attributes.get(ADAPTER_KEY)
    if adapter is None:
        return {}
    stored, told = LoraOptions.of(adapter), options.lora_options()
    return {"lora": options.lora if told is not None and told.agrees(stored) else str(stored)}


def _staged(
    options: TrainOptions, source: ModelSource, layouts: Sequence[StageLayout]
) -> tuple[StagedModel, Mapping[str, Any] | None]:
    """The model in stages, and peft's configuration of its adapters, if it is to have some.

    Frozen weights are kept as they are in the store (``layouts``), or in the checkpoint.
    """
    adapter: Mapping[str, Any] | None = None
    lora = options.lora_options()
    try:
        model = build_model(
            source.config,
            attention=options.attention,
            dropout=options.dropout,
            dtype=getattr(torch, options.trainer_config().dtype),
        )
        if lora is not None:
            adapter = add_adapters(model, lora, base=str(source.directory or source.name))
        else:
            choose_trained(model, train=options.train, freeze=options.freeze)
            if layouts and not (options.train or options.freeze):  # a store made by another program says so by itself
                train_only(model, {placed.spec.name for layout in layouts for placed in layout.trainable})
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


def checked(what: str, report: Reporter, stop: Stop) -> Callable[[int, int], None]:
    """A progress callback through which a signal ends the work."""

    def progress(done: int, total: int) -> None:
        stop.check()
        report.progress(what, done, total)

    return progress
