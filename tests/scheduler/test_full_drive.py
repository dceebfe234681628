"""Drives that are really full, and files that may really not grow: refused before step 1, with numbers.

Each test runs in a process of its own, which the limits go with. Injected ENOSPC is in `test_faults.py`.
"""

from __future__ import annotations

import re
import resource
import signal
from pathlib import Path

import pytest

from hoist.scheduler.trainer import Trainer
from hoist.tiers.errors import StoreRefusedError, TransferError
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.buffers import open_descriptors
from tests.support.faults import Course, Job, check_refusal, copy_store, create, go_on, job, snapshot, undisturbed
from tests.support.processes import mount_small_drive, run_in_process

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return undisturbed(job("vertical"), tmp_path_factory.mktemp("course") / "vertical")


def store_bytes(directory: Path) -> int:
    """What a store's files take on its drive."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def scratch_bytes(what: Job) -> int:
    """What the run needs besides."""
    return what.setup.scratch_bytes


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\b\d{4,}\b", text)]


# ---------------------------------------------------------------------- in the child


def create_on_small_drive(directory: Path, num_bytes: int) -> str | None:
    """The message of the refusal, or None where no drive can be mounted."""
    if not mount_small_drive(directory, num_bytes):
        return None
    with DirectEngine(num_threads=1) as engine, pytest.raises(StoreRefusedError) as raised:
        create(job("vertical"), directory / "store", engine)
    assert list(directory.iterdir()) == []
    return str(raised.value)


def train_on_small_drive(origin: Path, directory: Path, num_bytes: int) -> str | None:
    """The store fits on the drive, its scratch does not: the message of the refusal."""
    if not mount_small_drive(directory, num_bytes):
        return None
    store = copy_store(origin, directory / "store")
    before = snapshot(store)
    message = check_refusal(job("vertical"), store)
    assert open_descriptors(directory) == []
    assert snapshot(store) == before
    return message


def train_with_short_files(store: Path, num_bytes: int) -> str:
    """No file may be longer than ``num_bytes``, which is less than scratch needs: the message of the refusal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    return check_refusal(job("vertical"), store)


def train_until_files_may_not_be_written(store: Path, num_bytes: int) -> tuple[str, int | None]:
    """The limit comes once scratch is reserved and is shorter than a chunk file: the failure's message and errno."""
    what = job("vertical")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with (
        DirectEngine(num_threads=2) as engine,
        Store.open(store, engine=engine) as opened,
        Trainer(
            model=what.staged, store=opened, engine=engine, config=what.settings, baseline_bytes=0, setup=what.setup
        ) as trainer,
    ):
        trainer.step(what.steps[0])
        trainer.commit()
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
        with pytest.raises(TransferError) as raised:
            for step in what.steps[1:]:
                trainer.step(step)
    return str(raised.value), raised.value.errno


# ---------------------------------------------------------------------- the tests


def test_a_store_whose_scratch_does_not_fit_is_not_created(course: Course, tmp_path: Path) -> None:
    room = store_bytes(course.store) + scratch_bytes(job("vertical")) // 2
    code, message = run_in_process(create_on_small_drive, tmp_path, room)
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert code == 0
    assert "too little free space" in message
    need, free = numbers_in(message)
    assert need > free
    assert need >= sum(layout.padded_elements for layout in job("vertical").setup.layouts) * 2 * 12
    assert "name a place on a larger drive" in message


def test_a_run_whose_scratch_does_not_fit_is_refused_before_its_first_step(course: Course, tmp_path: Path) -> None:
    room = store_bytes(course.store) + scratch_bytes(job("vertical")) // 2
    code, message = run_in_process(train_on_small_drive, course.store, tmp_path, room)
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert code == 0
    assert f"cannot reserve {scratch_bytes(job('vertical'))} bytes: No space left on device" in message
    assert re.search(r"\d+ bytes are free", message)


def test_files_that_may_not_be_long_enough_are_refused_before_the_first_step(course: Course, tmp_path: Path) -> None:
    store = copy_store(course.store, tmp_path / "store")
    code, message = run_in_process(train_with_short_files, store, scratch_bytes(job("vertical")) - 4096)
    assert code == 0
    assert f"cannot reserve {scratch_bytes(job('vertical'))} bytes: File too large" in message
    assert snapshot(store) == course.snapshots[0]


def test_a_limit_that_comes_during_training(course: Course, tmp_path: Path) -> None:
    store = copy_store(course.store, tmp_path / "store")
    code, (message, number) = run_in_process(train_until_files_may_not_be_written, store, 8192)
    assert code == 0
    assert "File too large (EFBIG)" in message
    assert "the store keeps step 1" in message
    assert number == 27
    assert snapshot(store) == course.snapshots[1]
    with DirectEngine(num_threads=1) as engine:
        assert go_on(job("vertical"), store, engine) == course.losses[1:]
    assert snapshot(store) == course.snapshots[-1]
