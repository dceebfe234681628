"""A trainer in one call, for Python programs: opens the store, or makes it, and closes everything afterwards.

`hoist train` (`train.py`) does the same with data, progress and signals around it; the trainer itself is
`hoist.scheduler.trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec

import torch
from torch import nn

from hoist.scheduler import compiling
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store, initialised
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.freezing import choose_trained, train_only, trained_names
from hoist.scheduler.models import build_model, training_modes
from hoist.scheduler.module_stages import ModuleModel
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import split
from hoist.scheduler.trace import Trace
from hoist.scheduler.trace_file import check_trace_path
from hoist.scheduler.trainer import Trainer
from hoist.tiers.allocation import DirectoryState, check_creatable, directory_state
from hoist.tiers.dealing import measure, measured_bytes
from hoist.tiers.device import Device
from hoist.tiers.drives import check_places, refuse_drive
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.footprint import warm_up
from hoist.tiers.format import MODEL_DIRECTORY
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.store import Store
from hoist.tools import devices
from hoist.tools.drives import follow
from hoist.tools.import_weights import check_weights, checkpoint_dtypes, checkpoint_weights, stored_dtypes
from hoist.tools.lora import add_adapters, with_adapters
from hoist.tools.lora_options import LoraOptions
from hoist.tools.model_files import (
    ADAPTER_KEY,
    config_difference,
    load_config,
    refuse_modules,
    save_model_files,
    store_attributes,
)
from hoist.tools.opening_modules import open_module_trainer
from hoist.tools.presets import load_model_source

_P = ParamSpec("_P")


def _opened_as_for_training(opening: Callable[_P, Iterator[Trainer]]) -> Callable[_P, Iterator[Trainer]]:
    """The same opening in the modes that training needs, whatever the caller's are; those are its own again inside."""

    @wraps(opening)
    def opened(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[Trainer]:
        with ExitStack() as stack:
            with training_modes(torch.device("cpu")):
                trainer = stack.enter_context(contextmanager(opening)(*args, **kwargs))
            yield trainer

    return opened


@contextmanager
@_opened_as_for_training
def open_trainer(
    store: str | Path | Sequence[str | Path],
    *,
    config: TrainerConfig,
    model: str | Path | ModuleModel | None = None,
    attention: Literal["sdpa", "eager"] = "sdpa",
    dropout: float | None = None,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    lora: LoraOptions | None = None,
    io: str = "auto",
    device: str | Device = "auto",
    fresh: bool = False,
    verify: Literal["resume", "always", "never"] = "resume",
    trace: str | Path | None = None,
) -> Iterator[Trainer]:
    """A trainer on the store in a directory: resumed from its last commit, or made, with ``model``'s weights.

    ``model`` is a Hugging Face directory or a preset's name, and may be left out where there is a store; or a list of
    modules (:func:`stage_modules`), which must be given each time and is trained as it was built. A directory
    without weights, and a preset, are initialised as transformers would, from ``config.seed``. ``dropout`` overrides
    every dropout probability. ``train`` and ``freeze`` are patterns over parameter names, for a new store: the first
    name all that is trained (none: everything is), the second what is not; ``lora`` trains adapters around the frozen
    model instead, whose states stay in host memory. A resumed store has its own of these. ``fresh`` starts over in an
    existing store. ``verify``: compare every checksum before a store is resumed, ``always`` also those of what is read
    for updates, ``never`` only sizes. Several directories, the main one first and one on each further drive, make a new
    store that is spread over them; an existing store needs its main one only. ``trace``: a file
    that gets what every lane did, op by op, for ui.perfetto.dev; compressed if its name ends in ``.gz``. A store may be
    opened with another ``config.dtype`` each time: what it keeps does not depend on what is computed with.

    ``device`` is what computes: ``auto`` (an accelerator, if there is one), ``cpu``, a device as torch names it, or one
    that the caller has made and closes. Without ``config.device_memory_bytes`` an accelerator gets 90% of what is free
    in its memory. ``config.compile`` is tried here.

    What was not committed (:meth:`Trainer.commit`) when the ``with`` block ends is lost. Raises HoistError, with the
    store as it was, for what cannot work: a budget too small, a model that cannot be split, a store of another model.
    """
    if verify not in ("resume", "always", "never"):
        raise ConfigError(f"verify: {verify!r} is not one of resume, always, never")
    if trace is not None:
        check_trace_path(Path(trace), "trace:")
    config = replace(config, verify_reads=config.verify_reads or verify == "always")
    directory, *further = (
        Path(place).absolute() for place in ([store] if isinstance(store, (str, Path)) else store)
    )
    refuse_drive(directory)
    present = directory_state(directory) is DirectoryState.COMMITTED
    resume = present and not fresh
    if resume and further:
        follow(directory, further)
    built: object = model
    if isinstance(built, nn.Module):
        how = "save it with save_pretrained and give that directory" if hasattr(built, "save_pretrained") else (
            "give hoist.stage_modules(its modules in order, loss=..., example=...)"
        )
        raise ConfigError(f"model: a {type(built).__name__} that is built in memory cannot be staged; {how}")
    if isinstance(model, ModuleModel):
        given = {"attention": attention != "sdpa", "dropout": dropout is not None, "train": train, "freeze": freeze}
        names = [name for name, value in {**given, "lora": lora is not None}.items() if value]
        if names:
            raise ConfigError(
                f"{', '.join(names)}: cannot go with a list of modules; build these as they are to be trained, with "
                "requires_grad off where they are frozen"
            )
        with open_module_trainer(
            directory, further, model=model, config=config, io=io, device=device, resume=resume, fresh=fresh,
            verify=verify, trace=trace,
        ) as trainer:
            yield trainer
        return
    if resume:
        refuse_modules(directory / MODEL_DIRECTORY)
    if model is None and not resume:
        raise ConfigError(f"model: nothing given, and {directory} holds no store to resume; name a directory or preset")
    source = load_model_source(str(directory / MODEL_DIRECTORY if model is None else model))
    if resume:
        difference = config_difference(source.config, load_config(directory / MODEL_DIRECTORY))
        if difference is not None:
            raise StoreRefusedError(
                f"{directory}: the store holds another model than {source.name}: {difference}; leave model out to go "
                "on with the store's own, name another store, or set fresh"
            )
    if lora is not None and (train or freeze):
        raise ConfigError("lora: cannot go with train or freeze; it trains its adapters alone")
    with ExitStack() as cleanup:
        computing = cleanup.enter_context(devices.opened(device))
        config = replace(config, device_memory_bytes=devices.budget_bytes(computing, config.device_memory_bytes))
        engine = cleanup.enter_context(choose_engine(io))
        opened: Store | None = None
        if resume:
            opened = cleanup.enter_context(
                Store.open(directory, engine=engine, check="sizes" if verify == "never" else "crc")
            )
            lora = _stored_lora(opened, lora)
        built = build_model(
            source.config, attention=attention, dropout=dropout, dtype=getattr(torch, config.dtype)
        )
        adapter: Mapping[str, Any] | None = None
        if lora is not None:
            config = replace(config, pin_trained=True)
            adapter = add_adapters(built, lora, base=str(source.directory or source.name))
        else:
            choose_trained(built, train=train, freeze=freeze)
        told = trained_names(built) if train or freeze else None
        if opened is not None:
            train_only(built, {placed.spec.name for layout in opened.layouts for placed in layout.trainable})
            if told not in (None, trained_names(built)):
                raise ConfigError(
                    f"train, freeze: {directory} was made to train other parameters, and what was frozen has no "
                    "moments to go on with; leave both out, or export the store and train the export in another"
                )
        staged = split(built)
        if opened is not None:
            staged.keep_frozen_as(stored_dtypes(opened.layouts))
        elif source.checkpoint is not None:
            staged.keep_frozen_as(checkpoint_dtypes(source.checkpoint, staged))
        compiling.check(config.backend_in_force, computing)
        baseline_bytes = warm_up()
        if opened is not None:
            setup = prepare(staged, opened.layouts, config, device=computing)
        else:
            setup = prepare(staged, lay_out_stages(staged), config, device=computing)
            checkpoint = source.checkpoint
            check_creatable(directory, fresh=fresh)
            check_places(directory, further, fresh=fresh)
            places = [directory, *further] if further else []
            measured = measure(places, engine, num_bytes=measured_bytes(setup.layouts))
            if checkpoint is not None and present:  # a store that is replaced is removed before weights are written
                check_weights(checkpoint, staged, engine)
            weights = checkpoint_weights(checkpoint, staged, engine) if checkpoint else initialised(config.seed)
            opened = cleanup.enter_context(
                create_store(
                    directory,
                    model=staged,
                    setup=setup,
                    engine=engine,
                    source=weights if adapter is None else with_adapters(weights, config.seed),
                    attributes=store_attributes(source, attention=attention, dropout=dropout, adapter=adapter),
                    extras=lambda folder: save_model_files(source, folder),
                    drives=measured,
                    fresh=fresh,
                )
            )
        yield cleanup.enter_context(
            Trainer(
                model=staged, store=opened, engine=engine, config=config, baseline_bytes=baseline_bytes, setup=setup,
                trace=None if trace is None else cleanup.enter_context(Trace(trace)), device=computing,
            )
        )


def _stored_lora(store: Store, told: LoraOptions | None) -> LoraOptions | None:
    """What a store's adapters were made with; None if it has none. Raises ConfigError if ``told`` is something else."""
    adapter = store.attributes.get(ADAPTER_KEY)
    stored = None if adapter is None else LoraOptions.of(adapter)
    if told is not None and (stored is None or not told.agrees(stored)):
        raise ConfigError(
            f"lora: {store.directory} was made with {stored or 'no adapters'}, not {told}; leave it out, or name "
            "another store"
        )
    return stored
