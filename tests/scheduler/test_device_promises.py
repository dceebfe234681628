"""What a run on a separate device promises: one wait a step, its budgets, memory locked once, a store that survives.

On devices whose streams run late, see `tests/support/late_device.py`; failures are in `test_device_faults.py`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest

from hoist.scheduler.executor import Mark
from hoist.scheduler.memory import smallest
from hoist.scheduler.ops import Op
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.setup import prepare
from hoist.scheduler.status import RunStatus, StateBytes
from hoist.scheduler.status_file import read_status
from hoist.scheduler.trainer import Trainer
from hoist.tiers.errors import BudgetError
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.layout import round_up
from hoist.tiers.manager import Residency
from hoist.tiers.store import Store
from tests.support.faults import (
    NUM_STEPS,
    SETTINGS,
    Course,
    Job,
    copy_store,
    create,
    go_on,
    job,
    late_job,
    snapshot,
)
from tests.support.kills import Death, TickingEngine, TickingTrainer, ticking
from tests.support.late_device import LateDevice
from tests.support.processes import run_in_process
from tests.support.training import PLENTY_BYTES, torch_threads
from tests.support.watch import watching

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# ---------------------------------------------------------------------- waits and memory


@pytest.mark.parametrize("name", ["vertical", "delayed", "resident in part"])
def test_the_caller_waits_for_the_device_once_a_step(name: str, course: Course, quick_path: Path) -> None:
    """For the loss at its end, in an evaluation too. Finishing updates and committing wait for lanes alone.

    All device memory is one region of the size that was promised, all host memory one that is locked once.
    """
    what = late_job(name)
    memory = what.setup.memory
    directory = copy_store(course.store, quick_path / "store")
    with (
        LateDevice(len(name), capacity_bytes=memory.region_bytes) as device,
        DirectEngine(num_threads=2) as engine,
        Store.open(directory, engine=engine) as store,
    ):
        with Trainer(
            model=what.staged, store=store, engine=engine, config=what.settings, baseline_bytes=0, setup=what.setup,
            device=device,
        ) as trainer:  # fmt: skip
            waits = [device.num_waits]
            for step in what.steps:
                assert trainer.step(step).device_peak_bytes == memory.region_bytes
                waits.append(device.num_waits)
            assert [after - before for before, after in pairwise(waits)] == [1] * NUM_STEPS
            trainer.wait()
            trainer.commit()
            assert device.num_waits == waits[-1]
            trainer.evaluate(what.steps[0])
            assert device.num_waits == waits[-1] + 1
            assert list(device.pinned.values()) == [round_up(memory.arena_bytes, 4096)]
        assert device.num_pinned == 1
        assert device.pinned == {}
        assert device.allocated_bytes == 0
    assert memory.region_bytes + memory.workspace_bytes <= (what.settings.device_memory_bytes or 0)
    assert memory.need_bytes <= what.settings.host_memory_bytes


@pytest.mark.parametrize("name", ["vertical", "horizontal", "delayed"])
def test_a_byte_less_than_the_smallest_budget_is_refused_by_its_option(name: str) -> None:
    what = late_job(name)
    least = smallest(what.setup.memory.demand)
    for option, settings in (
        ("--host-memory", replace(what.settings, host_memory_bytes=least.need_bytes - 1)),
        ("--device-memory", replace(what.settings, device_memory_bytes=least.device_need_bytes - 1)),
    ):
        with (
            LateDevice() as device,
            pytest.raises(BudgetError, match=rf"^{option}: .* is too small; .*; give {option} \d+MiB") as raised,
        ):
            prepare(what.staged, what.setup.layouts, settings, device=device)
        assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------- killed, and gone on elsewhere


def train_until_killed(name: str, directory: Path, death: Death) -> None:
    """In a process of its own."""
    what = late_job(name)
    deadline, watcher = ticking(directory, death)
    with (
        torch_threads(1),
        watching(directory, watcher.seen),
        TickingEngine(DirectEngine(num_threads=2), deadline) as engine,
        LateDevice() as device,
    ):
        go_on(what, directory, engine, trainer_kind=TickingTrainer, device=device)


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("vertical", [("download", 5), ("inside a write to scratch", 9)]),
        ("delayed", [("refresh", 9)]),
        pytest.param("vertical", [("backward", 9), ("inside a chunk's write", 40)], marks=pytest.mark.slow),
        pytest.param("delayed", [("delayed update", 5), ("before the old CRC file goes", 2)], marks=pytest.mark.slow),
        pytest.param(
            "resident in part", [("forward", 17), ("update in the backward", 9), ("before a flush", 9)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "horizontal", [("loss", 5), ("before a read", 90), ("COMMIT.json: between fsync and rename", 2)],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_killed_on_a_device_and_gone_on_there_and_on_the_cpu(
    name: str, moments: Sequence[tuple[str, int]], course: Course, quick_path: Path
) -> None:
    for number, (moment, occurrence) in enumerate(moments):
        directory = copy_store(course.store, quick_path / str(number))
        death = Death(moment=moment, occurrence=occurrence)
        code, _ = run_in_process(train_until_killed, name, directory, death)
        assert code == -signal.SIGKILL, death
        kept = snapshot(directory)
        assert kept == course.snapshots[kept.step]
        assert kept.step < NUM_STEPS
        with DirectEngine(num_threads=2) as engine, LateDevice(number, late_seconds=0.0) as device:
            losses = go_on(SETTINGS[name](), directory, engine, upto=kept.step + number % 2)
            losses += go_on(late_job(name), directory, engine, device=device)
        assert losses == course.losses[kept.step :]
        assert snapshot(directory) == course.snapshots[NUM_STEPS]


# ---------------------------------------------------------------------- what is told of it


class LookingRuntime(Runtime):
    """Has the document written and compared after some ops, while the lane that issued the op is within it."""

    trainer: ClassVar[Trainer]
    num_looks = 0
    seen: ClassVar[set[str]]

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        mark = super().run(op, step, after)
        cls = type(self)
        cls.num_looks += 1
        if cls.num_looks % 7 == 0:
            check_told(cls.trainer, cls.seen)
        return mark


def check_told(trainer: Trainer, seen: set[str]) -> None:
    """The tiers' bytes are those of the table, and each within its budget. The table may move between two readings."""
    for _ in range(100):
        before = trainer.residency()
        trainer.publish()
        if trainer.residency() == before:
            break
    else:
        return
    status = read_status(trainer._store.directory)
    assert isinstance(status, RunStatus), status
    device, host = (tier_bytes(before, on_device=on_device) for on_device in (True, False))
    told = [[getattr(kind, tier) for stage in status.stages for kind in stage] for tier in ("device", "host")]
    assert [sum(each) for each in told] == [device, host]
    for tier, num_bytes, budget, region in (
        ("device", device, trainer.config.device_memory_bytes, trainer.memory.region_bytes),
        ("host", host, trainer.config.host_memory_bytes, trainer.memory.arena_bytes),
    ):
        assert status.tiers[tier].resident_bytes == num_bytes <= region
        assert status.tiers[tier].budget_bytes == budget
        seen.add(f"{tier} bytes" if num_bytes else "")
    seen.update(line.kind for line in before)
    seen.update(re.sub(r"\(.*", "", lane.current) for lane in status.lanes.values() if lane.current)
    assert all(isinstance(kind, StateBytes) for stage in status.stages for kind in stage)


def tier_bytes(table: Sequence[Residency], *, on_device: bool) -> int:
    kinds = ("weights", "gradient", "activation")
    return sum(line.num_bytes for line in table if line.buffer >= 0 and (line.kind in kinds) == on_device)


def test_each_tier_is_told_with_its_own_bytes_and_budget(course: Course, quick_path: Path) -> None:
    what = late_job("delayed, kept")
    directory = copy_store(course.store, quick_path / "store")

    class Looking(LookingRuntime):
        seen: ClassVar[set[str]] = set()

    class LookingTrainer(Trainer):
        runtime_kind = Looking

    with (
        LateDevice(3) as device,
        DirectEngine(num_threads=2) as engine,
        Store.open(directory, engine=engine) as store,
        LookingTrainer(
            model=what.staged, store=store, engine=engine, config=replace(what.settings, status_seconds=0.0),
            baseline_bytes=0, setup=what.setup, device=device,
        ) as trainer,
    ):  # fmt: skip
        Looking.trainer = trainer
        for step in what.steps:
            trainer.step(step)
        trainer.commit()
        spans = {span.op.kind.name for span in trainer.last_spans}
    told = {"device bytes", "host bytes", "weights", "waiting gradient", "activation", "states"}
    assert told <= Looking.seen, Looking.seen
    assert {"DOWNLOAD", "REFRESH"} <= spans


# ---------------------------------------------------------------------- odd shapes


@pytest.mark.parametrize("num_micro_batches", [1, 6])
def test_one_micro_batch_and_more_than_there_are_slots(num_micro_batches: int, quick_path: Path) -> None:
    what = job("vertical", max(2, num_micro_batches))
    if num_micro_batches == 1:
        settings = replace(what.settings, num_micro_batches=1)
        setup = prepare(what.staged, what.setup.layouts, settings)
        what = replace(what, steps=[step[:1] for step in what.steps], settings=settings, setup=setup)
    on_device = smallest_on_device(what)
    with DirectEngine(num_threads=2) as engine, LateDevice(num_micro_batches) as device:
        create(what, quick_path / "store", engine)
        copy_store(quick_path / "store", quick_path / "other")
        losses = go_on(what, quick_path / "store", engine)
        assert go_on(on_device, quick_path / "other", engine, device=device, validate=True) == losses
    assert snapshot(quick_path / "other") == snapshot(quick_path / "store")


def smallest_on_device(what: Job) -> Job:
    """The job on the smallest budgets of both memories."""
    settings = replace(what.settings, host_memory_bytes=PLENTY_BYTES, device_memory_bytes=PLENTY_BYTES)
    with LateDevice() as device:
        least = smallest(prepare(what.staged, what.setup.layouts, settings, device=device).memory.demand)
        settings = replace(
            settings, host_memory_bytes=least.need_bytes, device_memory_bytes=least.device_need_bytes
        )
        return replace(what, settings=settings, setup=prepare(what.staged, what.setup.layouts, settings, device=device))
