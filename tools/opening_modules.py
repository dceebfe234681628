"""A trainer on a list of modules, opened like one on a transformers model: what `hoist.open_trainer` does with those.

Such a store has no model files, so it is exported tensor by tensor, with `read_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hoist.scheduler import compiling
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store, initialised
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.module_stages import ModuleModel
from hoist.scheduler.setup import Setup, check_model, lay_out_stages, prepare
from hoist.scheduler.trace import Trace
from hoist.scheduler.trainer import Trainer
from hoist.tiers.allocation import check_creatable
from hoist.tiers.dealing import measure, measured_bytes
from hoist.tiers.device import Device
from hoist.tiers.drives import check_places
from hoist.tiers.errors import HoistError
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.layout import StageLayout
from hoist.tiers.store import Store
from hoist.tools import devices


@contextmanager
def open_module_trainer(
    directory: Path,
    further: Sequence[Path],
    *,
    model: ModuleModel,
    config: TrainerConfig,
    io: str,
    device: str | Device,
    resume: bool,
    fresh: bool,
    verify: Literal["resume", "always", "never"],
    trace: str | Path | None = None,
) -> Iterator[Trainer]:
    """A trainer on the store in ``directory``, resumed or made with the modules' values; see :func:`open_trainer`."""
    with ExitStack() as cleanup:
        computing = cleanup.enter_context(devices.opened(device))
        config = replace(config, device_memory_bytes=devices.budget_bytes(computing, config.device_memory_bytes))
        compiling.check(config.backend_in_force, computing)
        baseline_bytes = warm_up()
        engine = cleanup.enter_context(choose_engine(io))
        if resume:
            store = cleanup.enter_context(
                Store.open(directory, engine=engine, check="sizes" if verify == "never" else "crc")
            )
            check_model(directory, model, store.layouts)
            setup = _prepare(model, store.layouts, config, computing)
        else:
            model.require_initial_values()
            setup = _prepare(model, lay_out_stages(model), config, computing)
            check_creatable(directory, fresh=fresh)
            check_places(directory, further, fresh=fresh)
            places = [directory, *further] if further else []
            store = cleanup.enter_context(
                create_store(
                    directory,
                    model=model,
                    setup=setup,
                    engine=engine,
                    source=initialised(config.seed),
                    attributes={"model": {"name": "modules", "type": "modules"}, "optimizer": {"kind": "adamw"}},
                    drives=measure(places, engine, num_bytes=measured_bytes(setup.layouts)),
                    fresh=fresh,
                )
            )
        trainer = cleanup.enter_context(
            Trainer(
                model=model, store=store, engine=engine, config=config, baseline_bytes=baseline_bytes, setup=setup,
                trace=None if trace is None else cleanup.enter_context(Trace(trace)), device=computing,
            )
        )
        model.drop_initial_values()
        yield trainer


def _prepare(model: ModuleModel, layouts: Sequence[StageLayout], config: TrainerConfig, device: Device) -> Setup:
    """Size the run. Raises ConfigError where modules or loss fail on what the example says."""
    try:
        return prepare(model, layouts, config, device=device)
    except HoistError:
        raise
    except Exception as error:  # whatever code of the user's raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"example: modules and loss fail on {config.micro_batch_size} rows like it ({reason}); give a micro-batch "
            "as they will be given"
        ) from error
