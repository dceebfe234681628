"""What a run on a device promises: memory within both budgets, a resume after SIGKILL, one wait for the device a step.

Whether it computes the right numbers is `parity.py`'s part.
"""

from __future__ import annotations

import multiprocessing
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import hoist
from hoist.scheduler import memory
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import split
from hoist.tiers.device import Device
from hoist.tools.bench.on_device.parity import exact_arithmetic
from hoist.tools.bench.on_device.request import GIB, MakeDevice, Request, Row, shown_share
from hoist.tools.errors import BenchError
from hoist.tools.opening import open_trainer
from hoist.tools.sizes import show_bytes

#: Times the smallest budget that works: nearly everything streams, and much has room.
_FACTORS = (1.1, 3.0)
_PLENTY = 64 * GIB
#: The run that is killed: after so many steps, of so many, with a commit at every second one, which may end as late as
#: two steps later.
_KILLED_AFTER, _ALL_STEPS, _COMMIT_EVERY = 5, 7, 2
#: A step that has not ended after this hangs.
_STEP_SECONDS = 120.0


def peaks(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """The most that a run allocates on the device and in host memory, against budgets just large enough, and larger.

    A part (see `request.py`).
    """
    shape = request.scale.middle
    model = shape.save(request.directory / "promise-model")
    for number, factor in enumerate(_FACTORS):
        with make_device() as device:
            there = _PLENTY if device.is_separate else None
            plenty = shape.trainer_config(host_memory_bytes=_PLENTY, device_memory_bytes=there)
            staged = split(build_model(shape.config, dtype=getattr(torch, shape.dtype)))
            least = memory.smallest(prepare(staged, lay_out_stages(staged), plenty, device=device).memory.demand)
            config = replace(
                plenty,
                host_memory_bytes=int(factor * least.need_bytes),
                device_memory_bytes=int(factor * least.device_need_bytes) if device.is_separate else None,
            )
            store = request.directory / f"promise-{number}"
            device.reset_peak()
            with open_trainer(store, config=config, model=model, io=request.io, device=device) as trainer:
                for step in range(3):
                    metrics = trainer.step(shape.step(step))
                trainer.commit()
                host = trainer.statistics().host_peak_bytes
            reserved = _reserved_bytes(device)
        shutil.rmtree(store)  # the drive may have no room for all parts' at once
        promised = memory.promised_bytes(config.host_memory_bytes)
        yield Row(
            what=f"host memory beyond the start, {factor:g} times the least",
            found=f"{show_bytes(host)} of {show_bytes(config.host_memory_bytes)} (promised: {show_bytes(promised)})",
            ok=host <= promised,
            numbers={"host_peak_bytes": host, "host_budget_bytes": config.host_memory_bytes},
        )
        told = config.device_memory_bytes
        if told is None:
            yield Row(what="device memory", found="not looked at: the device computes in host memory")
            continue
        peak = metrics.device_peak_bytes
        beside = "" if reserved is None else f"; torch has reserved {show_bytes(reserved)}"
        yield Row(
            what=f"device memory that torch allocates, {factor:g} times the least",
            found=f"{show_bytes(peak)} of {show_bytes(told)}{beside}",
            ok=peak <= told,
            numbers={"device_peak_bytes": peak, "device_budget_bytes": told, "device_reserved_bytes": reserved},
        )


def _reserved_bytes(device: Device) -> int | None:
    """The most that torch's allocator has taken from the device; None where it does not tell."""
    tell = getattr(torch.get_device_module(device.torch_device), "max_memory_reserved", None)
    return None if tell is None else int(tell(device.torch_device))


def resuming(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """A run is killed within a step, as the kernel kills, and started again: its losses are those of one that was not.

    A part (see `request.py`).
    """
    shape = request.scale.middle
    shape.save(request.directory / "resumed-model")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_train_on, args=(request, make_device, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        seen: list[float] = []
        while len(seen) < _KILLED_AFTER:
            if not ours.poll(_STEP_SECONDS):
                raise BenchError(f"the run that was to be killed made no step within {_STEP_SECONDS:g} s")
            try:
                seen.append(ours.recv())
            except EOFError:
                raise BenchError("the run that was to be killed ended by itself") from None
    finally:
        process.kill()  # it is within its next step
        process.join()
        ours.close()
    with exact_arithmetic(), make_device() as device:
        config = _config(request, device)
        model = request.directory / "resumed-model"
        store = request.directory / "resumed"
        with open_trainer(store, config=config, model=model, io=request.io, device=device) as trainer:
            begun_at = trainer.step_number
            losses = [trainer.step(shape.step(step)).loss for step in range(begun_at, _ALL_STEPS)]
        store = request.directory / "never-killed"
        with open_trainer(store, config=config, model=model, io=request.io, device=device) as trainer:
            whole = [trainer.step(shape.step(step)).loss for step in range(_ALL_STEPS)]
    for name in ("resumed", "never-killed"):
        shutil.rmtree(request.directory / name)
    pairs = [*zip(seen, whole, strict=False), *zip(losses, whole[begun_at:], strict=True)]
    difference = max(abs(mine - other) / max(abs(other), 1e-30) for mine, other in pairs)
    yield Row(
        what=f"killed after step {_KILLED_AFTER}, resumed after step {begun_at}: losses",
        found="the same bits" if difference == 0.0 else f"differ by {shown_share(difference)}",
        ok=difference == 0.0 and begun_at >= _COMMIT_EVERY,
        numbers={"resumed_loss_ratio": difference, "resumed_at_step": begun_at},
    )


def _config(request: Request, device: Device) -> Any:
    return request.scale.middle.trainer_config(
        host_memory_bytes=2 * GIB, device_memory_bytes=request.device_budget(device), commit_every=_COMMIT_EVERY
    )


def _train_on(request: Request, make_device: MakeDevice, told: Connection) -> None:
    """What is killed: trains until then, and says every loss."""
    with exact_arithmetic(), make_device() as device:
        model, store = request.directory / "resumed-model", request.directory / "resumed"
        config = _config(request, device)
        with open_trainer(store, config=config, model=model, io=request.io, device=device) as trainer:
            for number in range(_ALL_STEPS):
                told.send(trainer.step(request.scale.middle.step(number)).loss)
            told.recv()  # nobody sends: it waits to be killed


def waits(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """How often a step has the host wait for the device, as CUDA's debugging counts: once, for the loss, in hoist.

    A part (see `request.py`).
    """
    with make_device() as device:
        module = torch.get_device_module(device.torch_device)
        if not hasattr(module, "set_sync_debug_mode"):
            yield Row(what="waits for the device in a step", found="not looked at: only CUDA counts them")
            return
        shape = request.scale.tiny
        model = shape.save(request.directory / "waits-model")
        config = shape.trainer_config(host_memory_bytes=GIB, device_memory_bytes=request.device_budget(device))
        store = request.directory / "waits"
        with open_trainer(store, config=config, model=model, io=request.io, device=device) as trainer:
            for number in range(2):
                trainer.step(shape.step(number))
            module.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    trainer.step(shape.step(2))
            finally:
                module.set_sync_debug_mode("default")
    where = [(warning.filename, warning.lineno) for warning in caught if "synchronizing" in str(warning.message)]
    own_folders = tuple(str(Path(folder)) for folder in hoist.__path__)
    own = [place for place in where if place[0].startswith(own_folders)]
    others = sorted({f"{Path(name).name}:{line}" for name, line in where if (name, line) not in own})
    ours = ", ".join(sorted({f"{Path(name).name}:{line}" for name, line in own}))
    yield Row(
        what="waits for the device in a step",
        found=f"{len(own)} of hoist's own ({ours or 'none'}), {len(where) - len(own)} of the model's"
        + (f" ({', '.join(others)})" if others else ""),
        ok=len(own) <= 1,
        numbers={"own_waits": len(own), "other_waits": len(where) - len(own), "own_places": ours},
    )
