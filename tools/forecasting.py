"""Makes the forecast of a run of `hoist train`: measures, predicts, and sums up tiers and drives. Creates nothing.

The record is in `forecast.py`, what is predicted from what in `hoist.scheduler.preflight`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hoist.scheduler.errors import CompileError
from hoist.scheduler.memory import MemoryPlan
from hoist.scheduler.preflight import DrivePlace, Measured, Prediction, predict, step_bytes
from hoist.scheduler.residency import MOMENT_BYTES, WEIGHT_BYTES, Keep
from hoist.scheduler.setup import Setup
from hoist.tiers import allocation, drives
from hoist.tiers.errors import HoistError
from hoist.tiers.format import SCRATCH_DIRECTORY
from hoist.tiers.io.base import IoStatistics
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.layout import StageLayout
from hoist.tools.errors import StoppedError
from hoist.tools.forecast import KINDS, DriveNeed, Forecast
from hoist.tools.preparing import Prepared
from hoist.tools.stop import Stop

logger = logging.getLogger(__name__)

#: Why nothing is predicted where the CPU does not compute.
NO_DEVICE_PREDICTION = "what a device takes is not measured yet"
#: What is in the label of a part of a budget, and the kind that it is of; the first that fits counts.
_KIND_OF = (("gradient", "gradients"), ("weight", "weights"), ("activation", "activations"))


class Told(Protocol):
    """Where progress goes: a part of `report.py`'s `Reporter`."""

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        """How far a long preparation is."""


def make_forecast(run: Prepared, report: Told, stop: Stop) -> Forecast:
    """Measure and predict. Where that fails, the forecast says why, since the run itself may well go on.

    The drive is measured through an engine like the run's own, whose counters are for what the run moves.
    Raises StoppedError on a signal.
    """
    config, setup = run.config, run.setup
    places = _places(run)
    prediction: Prediction | None = None
    measured: Measured | None = None
    why_not: str | None = None
    moved: IoStatistics | None = None

    def progress(what: str, done: int, total: int) -> None:
        stop.check()
        report.progress(what, done, total, "parts")

    if run.device.is_separate:
        return _forecast(run, why_not=NO_DEVICE_PREDICTION)
    try:
        with choose_engine(run.options.io) as engine:
            try:
                prediction, measured = predict(
                    run.model,
                    setup,
                    config,
                    engine=engine,
                    drives=[DrivePlace(directory=_probed(place), share=share) for place, share in places],
                    progress=progress,
                    most_bytes=run.measuring_bytes,
                )
            finally:
                moved = engine.statistics()
    except (StoppedError, CompileError):
        raise
    except (HoistError, RuntimeError, ValueError, OSError) as error:
        logger.debug("no prediction", exc_info=True)
        why_not = str(error).partition("\n")[0]
    return _forecast(run, prediction=prediction, why_not=why_not, measured=measured, moved=moved)


def _forecast(
    run: Prepared,
    *,
    prediction: Prediction | None = None,
    why_not: str | None = None,
    measured: Measured | None = None,
    moved: IoStatistics | None = None,
) -> Forecast:
    config, setup = run.config, run.setup
    host, device = setup.memory.parts(), setup.memory.device_parts()
    return Forecast(
        prediction=prediction,
        why_not=why_not,
        measured=measured,
        host=by_kind(host, setup.memory),
        host_budget_bytes=config.host_memory_bytes,
        device=by_kind(device, setup.memory) if device else {},
        device_name=str(run.device.torch_device),
        device_budget_bytes=run.device_memory_bytes,
        step_bytes=step_bytes(setup, config) if run.device.is_separate else None,
        nvme=_nvme(run.layouts, run.num_slots, setup),
        drives=_needs(run, _places(run)),
        num_parameters=sum(placed.spec.num_elements for layout in run.layouts for placed in layout.trainable),
        steps_left=max(0, run.options.steps - run.step),
        measuring_read_bytes=0 if moved is None else moved.read_bytes,
        measuring_written_bytes=0 if moved is None else moved.written_bytes,
        tokens_of_micro_batch=run.model.batches.num_tokens(run.model.batches.largest(config)),
    )


def _places(run: Prepared) -> list[tuple[Path, float]]:
    """Directory and share of each of the store's drives."""
    if run.found is not None:
        known = drives.registered(run.found, run.directory)
        found = [(drive.directory(run.directory), drive.weight) for drive in known]
    else:
        found = [(drive.directory, drive.weight) for drive in run.drives] or [(run.directory, 1.0)]
    total = sum(weight for _, weight in found)
    return [(directory, weight / total) for directory, weight in found]


def _existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    return next(place for place in (directory, *directory.parents) if place.is_dir())


def _probed(directory: Path) -> Path:
    """Where on a directory's file system a temporary file is made: beside it if possible, so that it stays as it is."""
    found = _existing(directory)
    beside = found.parent
    if found == directory and beside.stat().st_dev == found.stat().st_dev and os.access(beside, os.W_OK | os.X_OK):
        return beside
    return found


def by_kind(parts: Sequence[tuple[str, int]], memory: MemoryPlan) -> dict[str, int]:
    """What lies in a tier, by kind: the parts of a budget, as `memory.py` calls them. What moves through is scratch."""
    kept = memory.demand.keepable[: memory.num_kept]
    kept_moments = sum(candidate.num_bytes for candidate in kept if candidate.keep is Keep.MOMENTS)
    found = dict.fromkeys(KINDS, 0)
    for label, num_bytes in parts:
        if label.startswith("states kept"):
            found["moments"] += kept_moments
            found["weights"] += num_bytes - kept_moments
        else:
            found[next((kind for word, kind in _KIND_OF if word in label), "scratch")] += num_bytes
    return found


def _nvme(layouts: Sequence[StageLayout], num_slots: int, setup: Setup) -> dict[str, int]:
    padded = num_slots * sum(layout.padded_elements for layout in layouts)
    return dict(
        zip(
            KINDS,
            (
                WEIGHT_BYTES * padded + sum(layout.frozen_bytes for layout in layouts),
                MOMENT_BYTES * padded,
                setup.scratch_gradient_bytes + setup.stash_bytes,
                setup.scratch_activation_bytes,
                0,
            ),
            strict=True,
        )
    )


def _needs(run: Prepared, places: Sequence[tuple[Path, float]]) -> tuple[DriveNeed, ...]:
    """Scratch is on the main drive; the rest of a new store is dealt out."""
    scratch = run.setup.scratch_bytes
    store_bytes = 0
    if run.found is None:
        nvme = _nvme(run.layouts, run.num_slots, run.setup)
        store_bytes = nvme["weights"] + nvme["moments"]
    else:
        scratch = max(0, scratch - allocation.tree_bytes(run.directory / SCRATCH_DIRECTORY))
    return tuple(
        DriveNeed(
            directory=str(directory),
            need_bytes=int(share * store_bytes) + (0 if number else scratch),
            free_bytes=allocation.free_bytes(_existing(directory)),
        )
        for number, (directory, share) in enumerate(places)
    )
