"""AdamW on a device whose streams run late and in an unlucky order: the bits of AdamW on the CPU, and marks in between.

There both are the same kernels. The rest of the parity suite is run so in `test_late_device_updates.py`, plans are
`test_plan.py`'s part, the kernels' `tests/optim/test_adamw.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from hoist.optim.adamw import AdamWHyperparameters, PieceUpdater, SegmentUpdate, UpdateScratch
from hoist.optim.split import split
from hoist.scheduler.config import ClipMode, OptimDevice, Order
from hoist.scheduler.creation import create_store
from hoist.scheduler.device_updates import DeviceUpdates
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.memory import UPDATE_BYTES
from hoist.scheduler.ops import Kind
from hoist.scheduler.places import StateSlot
from hoist.scheduler.setup import prepare
from hoist.scheduler.trainer import Trainer
from hoist.tiers.device import HereDevice
from hoist.tiers.format import StateArray
from hoist.tiers.io.direct import DirectEngine
from tests.scheduler.test_freezing import freezing
from tests.support.branching import even_steps_only, spoiling, with_branch
from tests.support.faults import quick_directory
from tests.support.late_device import LateDevice
from tests.support.late_runs import on_late_devices
from tests.support.models import tiny_config
from tests.support.sampling import thinned
from tests.support.training import (
    PLENTY_BYTES,
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    from_weights,
    initial_weights,
    layouts_of,
    make_steps,
    set_up,
    staged_model,
    torch_threads,
    train,
    trainer_config,
)

NUM_STEPS = 3
PLANS: tuple[Order, ...] = ("vertical", "horizontal")
MODES: tuple[ClipMode | None, ...] = (None, "exact", "speculative")
RECIPES = {
    "all": Recipe(),
    "clipped": Recipe(clip_norm=1.0),
    "idle": Recipe(alter=with_branch, before_step=even_steps_only),
    "not finite": Recipe(clip_norm=1e-2, alter=with_branch, before_step=spoiling({2: float("inf")})),
    "frozen": freezing("last layer"),
    "bfloat16": Recipe(dtype="bfloat16", clip_norm=1.0),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@cache
def on_the_cpu(name: str, *, tied: bool = False) -> Outcome:
    """Everything on the CPU, in memory that has room for all."""
    with quick_directory() as folder:
        config, engine = tiny_config("llama", tied=tied), Engine(budget_factor=50.0)
        return train(folder / "store", config, make_steps(NUM_STEPS, 2), RECIPES[name], engine)


def check(directory: Path, name: str, engine: Engine, *, seed: int, tied: bool = False) -> Outcome:
    expected = on_the_cpu(name, tied=tied)
    with on_late_devices(seed, optim_device="device"):
        got = train(directory, tiny_config("llama", tied=tied), make_steps(NUM_STEPS, 2), RECIPES[name], engine)
    assert_identical(got, expected)
    assert got.ops[Kind.DEVICE_UPDATE] > 0
    return got


@pytest.mark.parametrize(
    ("plan", "delay", "clip_mode", "residency", "budget_factor"),
    thinned(4, PLANS, (0.0, 0.5, 1.0), MODES, (0.0, 0.3, 1.0), (1.0, 50.0)),
)
def test_the_bits_of_updates_on_the_cpu(
    plan: Order, delay: float, clip_mode: ClipMode | None, residency: float, budget_factor: float, tmp_path: Path
) -> None:
    """Gradients from their buffer and from scratch, states from slots and from where they are kept."""
    engine = Engine(
        plan=plan, delay=delay, clip_mode=clip_mode or "exact", residency=residency, budget_factor=budget_factor,
        commit_every=3,
    )
    seed = sum(repr(engine).encode())
    check(tmp_path / "store", "all" if clip_mode is None else "clipped", engine, seed=seed)


def test_all_of_the_devices_memory_is_given_back(tmp_path: Path) -> None:
    """With the trainer still there."""
    steps, recipe, engine = make_steps(2, 1), Recipe(), Engine(delay=0.5)
    model = staged_model(tiny_config("llama"), recipe)
    with on_late_devices(optim_device="device"):
        config, setup = set_up(model, layouts_of(model, engine), recipe, engine, steps)
    source = from_weights(initial_weights(tiny_config("llama"), recipe))
    with (
        DirectEngine(num_threads=2) as files,
        create_store(tmp_path / "s", model=model, setup=setup, engine=files, source=source, attributes={}) as store,
        LateDevice() as device,
    ):
        with Trainer(
            model=model, store=store, engine=files, config=config, setup=setup, device=device, baseline_bytes=0
        ) as trainer:
            for step in steps:
                trainer.step(step)
            assert device.allocated_bytes == setup.memory.region_bytes
        assert device.allocated_bytes == 0


@pytest.mark.parametrize(
    ("name", "tied", "engine"),
    [
        ("all", True, Engine(delay=0.5)),
        pytest.param("idle", False, Engine(residency=0.3, budget_factor=3.0), marks=pytest.mark.slow),
        ("not finite", False, Engine(clip_mode="speculative", commit_every=1)),
        ("frozen", False, Engine(delay=0.5)),
        ("bfloat16", False, Engine(delay=0.25, residency=0.3, budget_factor=2.0)),
        pytest.param(
            "bfloat16", False, Engine(clip_mode="speculative", delay=0.25, budget_factor=2.0), marks=pytest.mark.slow
        ),
    ],
)
def test_also_where_not_everything_is_updated(name: str, tied: bool, engine: Engine, tmp_path: Path) -> None:
    check(tmp_path / "store", name, engine, seed=len(name), tied=tied)


# ---------------------------------------------------------------------- marks between the streams

PIECE = 4096


def a_piece(number: int) -> tuple[dict[StateArray, Tensor], Tensor]:
    """The arrays of a piece (uint8) and its gradient, in host memory."""
    generator = torch.Generator().manual_seed(number)
    weights, gradient = (torch.randn(PIECE, generator=generator) for _ in range(2))
    arrays = {array: torch.zeros(array.itemsize * PIECE, dtype=torch.uint8) for array in StateArray}
    split(weights, *(arrays[half].view(torch.int16) for half in (StateArray.WEIGHT_HI, StateArray.WEIGHT_LO)))
    return arrays, gradient


def put_into(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def segments_of(number: int) -> list[SegmentUpdate]:
    return [
        SegmentUpdate(start=start, stop=stop, adam_step=step + number, lr=1e-2, weight_decay=0.1)
        for start, stop, step in ((0, 1000, 1), (1024, 2048, 1), (2048, PIECE, 3))
    ]


@pytest.mark.parametrize("seed", range(8))
def test_pieces_follow_one_another_through_the_slots(seed: int) -> None:
    """More pieces than slots, each behind work that is to make its gradient; a scale on some."""
    hyperparameters = AdamWHyperparameters(lr=1e-2)
    pieces = [a_piece(number) for number in range(7)]
    gradients = [torch.full((PIECE,), float("nan")) for _ in pieces]
    with LateDevice(seed, checks_placement=True) as device:

        def there(num_bytes: int) -> Tensor:
            return device.allocate(num_bytes, "test")

        scratch = UpdateScratch(
            weights=there(4 * PIECE).view(torch.float32),
            patterns=there(4 * PIECE).view(torch.int32),
            steps=there(4 * (PIECE // 64)).view(torch.float32),
        )
        slots = [StateSlot(there(UPDATE_BYTES * PIECE), PIECE) for _ in range(2)]
        updates = DeviceUpdates(device, slots, PieceUpdater(hyperparameters, scratch=scratch))
        marks = []
        for number, (arrays, gradient) in enumerate(pieces):
            made = device.stream("compute").put(partial(put_into, gradients[number], gradient))
            marks.append(
                updates.put(arrays, gradients[number], 0.5 if number % 2 else 1.0, segments_of(number), [made])
            )
        for mark in marks:
            mark.wait()
    updater = PieceUpdater(hyperparameters)
    for number, (arrays, _) in enumerate(pieces):
        expected, gradient = a_piece(number)
        updater.update(
            weight_hi=expected[StateArray.WEIGHT_HI].view(torch.int16),
            weight_lo=expected[StateArray.WEIGHT_LO].view(torch.int16),
            exp_avg=expected[StateArray.EXP_AVG].view(torch.float32),
            exp_avg_sq=expected[StateArray.EXP_AVG_SQ].view(torch.float32),
            gradient=gradient.mul_(0.5) if number % 2 else gradient,
            segments=segments_of(number),
        )
        for array in StateArray:
            assert torch.equal(arrays[array], expected[array]), f"piece {number}: {array}"


# ---------------------------------------------------------------------- refusals and memory


def test_where_there_is_no_such_device() -> None:
    model = staged_model(tiny_config("llama"), Recipe())
    config = trainer_config(Recipe(), Engine(), make_steps(1, 1), PLENTY_BYTES)
    with pytest.raises(ConfigError, match=r"optim_device: 'device', but cpu has no memory of its own.*give 'cpu'"):
        prepare(model, layouts_of(model, Engine()), replace(config, optim_device="device"), device=HereDevice())
    with pytest.raises(ConfigError, match="optim_device: 'gpu' is not one of cpu, device"):
        replace(config, optim_device=cast(Any, "gpu"))


def test_the_formula_has_its_memory() -> None:
    """Two pieces of states and gradients, 8 bytes of scratch, and a step count for each tensor that can begin there."""
    model = staged_model(tiny_config("llama"), Recipe())
    config = trainer_config(Recipe(), Engine(), make_steps(1, 1), PLENTY_BYTES)
    config, layouts = replace(config, device_memory_bytes=PLENTY_BYTES), layouts_of(model, Engine())
    with LateDevice() as device:
        plans = {
            where: prepare(model, layouts, replace(config, optim_device=where), device=device).memory
            for where in get_args(OptimDevice)
        }
        piece = plans["device"].piece_elements
        parts = dict(plans["device"].device_parts())
        assert parts["updates on the device"] == (2 * 16 + 8) * piece + -(-piece // 64 * 4 // 4096) * 4096
        assert sum(parts.values()) == plans["device"].device_need_bytes
        assert dict(plans["cpu"].device_parts())["updates on the device"] == 0
        assert plans["device"].parts() == plans["cpu"].parts(), "host memory is what it was"
