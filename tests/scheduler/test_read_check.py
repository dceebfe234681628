"""`--verify always`: a bit that flips on the drive during a run is found before anything made of it is committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from hoist.scheduler.read_check import ReadCheck
from hoist.scheduler.setup import prepare
from hoist.scheduler.trainer import Trainer
from hoist.tiers import format as store_format
from hoist.tiers.errors import CorruptChunkError
from hoist.tiers.format import StateArray
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.faults import (
    Course,
    Job,
    copy_store,
    delayed_job,
    go_on,
    guessing_job,
    job,
    quick_directory,
    snapshot,
    undisturbed,
)
from tests.support.late_device import LateDevice
from tests.support.training import PLENTY_BYTES, torch_threads

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def course() -> Iterator[Course]:
    with quick_directory() as folder, torch_threads(1):
        yield undisturbed(job("vertical"), folder / "vertical")


@pytest.fixture
def directory(course: Course) -> Iterator[Path]:
    with quick_directory() as folder:
        yield copy_store(course.store, folder / "store")


def checked(what: Job) -> Job:
    return replace(what, settings=replace(what.settings, verify_reads=True))


JOBS = {
    "vertical": lambda: job("vertical"),
    "horizontal": lambda: job("horizontal"),
    "delayed": lambda: delayed_job("vertical", 0.5, kept=False),
}


def test_versions_that_are_read_a_second_time_pass_too() -> None:
    """Wrong guesses are made again from the version before the newest, which has checksums of its own."""
    what = guessing_job(kept=False)
    with quick_directory() as folder, torch_threads(1):
        expected = undisturbed(what, folder / "expected")
        with DirectEngine(num_threads=2) as engine:
            store = copy_store(expected.store, folder / "store")
            assert go_on(checked(what), store, engine) == expected.losses
        assert snapshot(store) == expected.snapshots[-1]


@pytest.mark.parametrize("kind", JOBS)
def test_a_whole_store_passes(kind: str, course: Course, directory: Path) -> None:
    """Every piece is compared, chunks of several pieces and a short last one among them; the results are the same."""
    with DirectEngine(num_threads=2) as engine, torch_threads(1):
        assert go_on(checked(JOBS[kind]()), directory, engine) == course.losses
    assert snapshot(directory) == course.snapshots[-1]


@pytest.mark.parametrize("residency", [0.4, 1.0])
def test_states_that_are_kept_in_memory(residency: float, course: Course, directory: Path) -> None:
    """They are checked when they are read, once; a bit that has flipped before is found then."""
    what = job("vertical")
    settings = replace(what.settings, host_memory_bytes=PLENTY_BYTES, residency=residency, verify_reads=True)
    what = replace(what, settings=settings, setup=prepare(what.staged, what.setup.layouts, settings))
    with DirectEngine(num_threads=2) as engine, torch_threads(1):
        assert go_on(what, directory, engine, upto=2) == course.losses[:2]
        assert snapshot(directory) == course.snapshots[2]
        with Store.open(directory, engine=engine, writable=False) as store:
            record = store.record
            assert record is not None
            paths = [
                directory / store_format.chunk_path(layout, StateArray.EXP_AVG, int(digit), chunk)
                for layout, digits in zip(store.layouts, record.slots, strict=True)
                for chunk, digit in enumerate(digits)
            ]
        for path in paths:
            flip(path, 77)
            with pytest.raises(CorruptChunkError, match=f"array exp_avg, chunk .* file {path} "):
                go_on(what, directory, engine)
            flip(path, 77)
        assert go_on(what, directory, engine) == course.losses[2:]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x20]))


def damaged_between_steps(what: Job, directory: Path, array: StateArray | None) -> None:
    """Train a step, commit, damage the last byte of a chunk that tensors use, train on."""
    settings = what.settings
    with (
        DirectEngine(num_threads=2) as engine,
        Store.open(directory, engine=engine) as store,
        Trainer(
            model=what.staged, store=store, engine=engine, config=settings, baseline_bytes=0, setup=what.setup
        ) as trainer,
    ):
        trainer.step(what.steps[0])
        trainer.commit()
        layout = store.layouts[0]
        assert layout.num_chunks > 1
        record = store.record
        assert record is not None
        if array is None:
            path = directory / store_format.frozen_path(next(layout for layout in store.layouts if layout.frozen_bytes))
        else:
            path = directory / store_format.chunk_path(layout, array, int(record.slots[0][0]), 0)
        flip(path, path.stat().st_size - 1 if array is not None else 5)
        for step in what.steps[1:]:
            trainer.step(step)
        trainer.commit()


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("array", [StateArray.EXP_AVG_SQ, StateArray.WEIGHT_LO])
def test_a_flipped_bit_ends_the_run(kind: str, array: StateArray, course: Course, directory: Path) -> None:
    what = JOBS[kind]()
    with torch_threads(1), pytest.raises(CorruptChunkError) as raised:
        damaged_between_steps(checked(what), directory, array)
    message = str(raised.value)
    assert f"stage 'embed', array {array.value}, chunk 0, file {directory}" in message
    assert "(tensors model.embed_tokens.weight)" in message
    assert "the store keeps step 1" in message
    assert raised.value.exit_code == 1
    with DirectEngine(num_threads=1) as engine, Store.open(directory, engine=engine, writable=False) as store:
        assert store.record is not None
        assert store.record.step == 1
        assert [bad.chunk.array for bad in store.verify()] == [array.value]


def test_a_flipped_bit_in_frozen_tensors(course: Course, directory: Path) -> None:
    with torch_threads(1), pytest.raises(CorruptChunkError, match=r"stage 'layer\.0', array buffers, .*up_proj"):
        damaged_between_steps(checked(job("vertical")), directory, None)


class FarAway(torch.Tensor):
    """Device memory, which the host cannot look into."""

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError("can't convert far:0 device type tensor to numpy")


def test_frozen_tensors_that_were_read_to_a_device(directory: Path) -> None:
    with (
        DirectEngine(num_threads=1) as engine,
        Store.open(directory, engine=engine, writable=False) as store,
        LateDevice(1) as device,
    ):
        stage = next(layout for layout in store.layouts if layout.frozen_bytes)
        read = torch.from_file(
            str(store.frozen_place(stage.index).path), size=stage.frozen_bytes, dtype=torch.uint8
        )
        there = device.allocate(stage.frozen_bytes, "weights").copy_(read).as_subclass(FarAway)
        check = ReadCheck(store, device)
        check.frozen(stage.index, there)
        there[5] ^= 0x20
        with pytest.raises(CorruptChunkError, match="array buffers"):
            check.frozen(stage.index, there)


def test_without_the_check_the_run_goes_on(course: Course, directory: Path) -> None:
    """What the check is for: the damage is committed over, with a checksum that fits."""
    with torch_threads(1):
        damaged_between_steps(job("vertical"), directory, StateArray.EXP_AVG_SQ)
    after = snapshot(directory)
    assert after.step == course.snapshots[-1].step
    assert after.checksums != course.snapshots[-1].checksums
