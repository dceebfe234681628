"""Drives that fail under a training run: it stops with one line that names the place, and nothing wrong is ever kept.

After every fault the store opens at its last commit, bit for bit, and training from there gives what an undisturbed run
gives. What a damaged store does at a resume is in `test_damage_at_resume.py`, races in `test_disorder.py`.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.trainer import Trainer
from hoist.tiers.commit import CommitSequence
from hoist.tiers.errors import StoreRefusedError, TransferError
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.engines import Fail, FaultyEngine, RecordedRequest, RecordingEngine
from tests.support.faults import (
    NUM_STEPS,
    RARE,
    SETTINGS,
    Course,
    Job,
    Nth,
    copy_store,
    create,
    go_on,
    job,
    nothing_left_behind,
    quick_directory,
    snapshot,
)
from tests.support.training import torch_threads

NAMES = [pytest.param(name, marks=pytest.mark.slow if name in RARE else []) for name in SETTINGS]
OPERATIONS = ("read", "write", "flush")
#: EIO and ENOSPC at once, and a write that is torn: some of its bytes have reached the drive.
FAULTS = (Fail(code=errno.EIO), Fail(code=errno.ENOSPC), Fail(code=errno.EIO, after_bytes=4096))

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture
def quick_path() -> Iterator[Path]:
    with quick_directory() as folder:
        yield folder


def count_requests(what: Job, course: Course, directory: Path) -> dict[str, int]:
    """How many requests of each operation the whole run makes: the same each time."""
    with RecordingEngine(DirectEngine(num_threads=2)) as engine:
        go_on(what, copy_store(course.store, directory), engine)
    return {
        operation: sum(request.operation == operation for request in engine.requests) for operation in OPERATIONS
    }


@pytest.fixture(scope="module")
def counts(courses: dict[str, Course]) -> dict[str, dict[str, int]]:
    with quick_directory() as folder:
        return {name: count_requests(make(), courses[name], folder / name) for name, make in SETTINGS.items()}


def check_fault(what: Job, course: Course, directory: Path, rule: Nth) -> None:
    """Run the job with the fault, look at how it fails, then go on without and compare."""
    copy_store(course.store, directory)
    losses: list[float] = []
    with (
        nothing_left_behind(directory),
        FaultyEngine(DirectEngine(num_threads=2), rule) as engine,
        pytest.raises(TransferError) as raised,
    ):
        go_on(what, directory, engine, losses)
    check_message(raised.value, rule.failed)
    check_recovery(what, course, directory, losses)


def check_recovery(what: Job, course: Course, directory: Path, losses: list[float]) -> None:
    """What was reported before the fault was right; the store is at a commit; from there all goes as undisturbed."""
    assert losses == course.losses[: len(losses)]
    kept = snapshot(directory)
    assert kept == course.snapshots[kept.step]
    assert kept.step <= len(losses)
    with DirectEngine(num_threads=2) as engine:
        assert go_on(what, directory, engine) == course.losses[kept.step :]
    assert snapshot(directory) == course.snapshots[NUM_STEPS]


def check_message(error: TransferError, all_failed: list[RecordedRequest]) -> None:
    """One line, as the command line shows it, with what failed, whose bytes they were, and what to do."""
    text = str(error)
    assert "\n" not in text
    failed = next(request for request in all_failed if f"{request.path} failed: " in text)
    assert f"{failed.operation} of" in text
    assert error.errno is not None
    assert errno.errorcode[error.errno] in text
    if failed.operation == "flush":
        assert "the commit of step" in text
        assert "open the store again" in text
        return
    assert "stage '" in text
    assert "run again to go on from there" in text
    if failed.path.parent.name == "scratch":
        assert "activation of micro-batch" in text or "gradient" in text
    elif "/buffers/" in str(failed.path):
        assert "frozen tensors" in text
    else:
        assert f"chunk {failed.path.name}:" in text
    assert any(note.startswith("while executing ") for note in error.__notes__)


# ---------------------------------------------------------------------- transfers


@pytest.mark.parametrize("sample", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_a_transfer_fails(
    name: str, sample: int, courses: dict[str, Course], counts: dict[str, dict[str, int]], quick_path: Path
) -> None:
    chance = random.Random(sample)
    operation = ("read", "write")[sample % 2]
    number = chance.randint(1, counts[name][operation])
    rule = Nth(operation, number, chance.choice(FAULTS), for_good=chance.random() < 0.5)
    check_fault(SETTINGS[name](), courses[name], quick_path / "store", rule)


@pytest.mark.parametrize("end", ["first", "last"])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_and_the_last_transfer_fail(
    name: str,
    operation: str,
    end: str,
    courses: dict[str, Course],
    counts: dict[str, dict[str, int]],
    quick_path: Path,
) -> None:
    number = 1 if end == "first" else counts[name][operation]
    check_fault(SETTINGS[name](), courses[name], quick_path / "store", Nth(operation, number, FAULTS[0]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", range(len(FAULTS)))
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_transfer_fails(
    name: str,
    operation: str,
    fault: int,
    courses: dict[str, Course],
    counts: dict[str, dict[str, int]],
    quick_path: Path,
) -> None:
    for number in range(1, counts[name][operation] + 1):
        rule = Nth(operation, number, FAULTS[fault], for_good=bool(number % 2))
        check_fault(SETTINGS[name](), courses[name], quick_path / str(number), rule)


@pytest.mark.parametrize("name", NAMES)
def test_each_write_is_the_last_one_once(
    name: str, courses: dict[str, Course], counts: dict[str, dict[str, int]], quick_path: Path
) -> None:
    """A few of them: the drive dies within the write and takes no other one. All of them: the slow test below."""
    number = counts[name]["write"]
    for last in range(1 + len(name) % 7, number + 1, number // 4):
        rule = Nth("write", last, FAULTS[2], for_good=True)
        check_fault(SETTINGS[name](), courses[name], quick_path / str(last), rule)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETTINGS)
def test_each_write_is_the_last_one_once_all_of_them(
    name: str, courses: dict[str, Course], counts: dict[str, dict[str, int]], quick_path: Path
) -> None:
    for last in range(1, counts[name]["write"] + 1):
        rule = Nth("write", last, FAULTS[2], for_good=True)
        check_fault(SETTINGS[name](), courses[name], quick_path / str(last), rule)
        shutil.rmtree(quick_path / str(last))


@pytest.mark.parametrize(
    ("name", "where", "operation"),
    [
        ("vertical", "scratch/activations", "write"),
        ("vertical", "scratch/activations", "read"),
        ("horizontal", "scratch/gradients", "write"),
        ("horizontal", "scratch/gradients", "read"),
        ("vertical", "/buffers/", "read"),
        ("delayed", "scratch/waiting-gradients", "write"),
        ("delayed", "scratch/waiting-gradients", "read"),
        ("clipped", "scratch/waiting-gradients", "write"),
        ("clipped", "scratch/waiting-gradients", "read"),
    ],
)
def test_scratch_and_frozen_tensors(
    name: str, where: str, operation: str, courses: dict[str, Course], quick_path: Path
) -> None:
    """A bad place, and a drive on which the reserved space turns out not to be there."""
    for fail in FAULTS[:2] if operation == "write" else FAULTS[:1]:
        rule = Nth(operation, 2, fail, where=where)
        check_fault(SETTINGS[name](), courses[name], quick_path / errno.errorcode[fail.code], rule)


def test_after_a_fault_the_trainer_repeats_it_and_does_nothing_more(
    courses: dict[str, Course], quick_path: Path
) -> None:
    what = job("vertical")
    directory = copy_store(courses["vertical"].store, quick_path / "store")
    rule = Nth("read", 40, FAULTS[0])
    with (
        nothing_left_behind(directory),
        RecordingEngine(FaultyEngine(DirectEngine(num_threads=2), rule)) as engine,
        Store.open(directory, engine=engine) as store,
        Trainer(
            model=what.staged, store=store, engine=engine, config=what.settings, baseline_bytes=0, setup=what.setup
        ) as trainer,
    ):
        with pytest.raises(TransferError) as raised:
            for step in what.steps:
                trainer.step(step)
        for _ in range(2):
            with pytest.raises(TransferError) as again:
                trainer.step(what.steps[0])
            assert again.value is raised.value
            with pytest.raises(TransferError) as again:
                trainer.commit()
            assert again.value is raised.value
        assert len(raised.value.__notes__) == 1
        trainer.close()  # what was in flight has ended
        seen = len(engine.requests)
        with pytest.raises(ConfigError, match="closed"):
            trainer.step(what.steps[0])
        assert len(engine.requests) == seen
    check_recovery(what, courses["vertical"], directory, [])


# ---------------------------------------------------------------------- commits


@pytest.mark.parametrize("sample", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_a_flush_fails(
    name: str, sample: int, courses: dict[str, Course], counts: dict[str, dict[str, int]], quick_path: Path
) -> None:
    number = random.Random(sample).randint(1, counts[name]["flush"])
    check_fault(SETTINGS[name](), courses[name], quick_path / "store", Nth("flush", number, FAULTS[0]))


class FailingCommit(CommitSequence):
    """The second commit of the process fails at one of its steps, with its effect or without."""

    step = ""
    after = False
    commits_left = 2

    def run(self, **arguments: Any) -> float:
        type(self).commits_left -= 1
        return super().run(**arguments)

    def _fail(self, step: str, *, after: bool) -> None:
        if not self.commits_left and step == self.step and after == self.after:
            raise OSError(errno.EIO, "Input/output error", str(self._directory))

    def write_checksums(self, name: str, data: bytes) -> None:
        self._fail("write_checksums", after=False)
        super().write_checksums(name, data)
        self._fail("write_checksums", after=True)

    def sync_checksum_directory(self) -> None:
        self._fail("sync_checksum_directory", after=False)
        super().sync_checksum_directory()

    def write_record(self, data: bytes) -> None:
        self._fail("write_record", after=False)
        super().write_record(data)
        self._fail("write_record", after=True)

    def publish(self) -> None:
        self._fail("publish", after=False)
        super().publish()
        self._fail("publish", after=True)

    def settle(self) -> None:
        self._fail("settle", after=False)
        super().settle()

    def tidy(self, superseded: str) -> None:
        self._fail("tidy", after=False)
        super().tidy(superseded)


@pytest.mark.parametrize(
    ("step", "after", "expected"),
    [
        ("write_checksums", False, 1),
        ("write_checksums", True, 1),
        ("sync_checksum_directory", False, 1),
        ("write_record", False, 1),
        ("write_record", True, 1),
        ("publish", False, 1),
        ("publish", True, 2),
        ("settle", False, 2),
        ("tidy", False, 2),
    ],
)
def test_a_commit_fails_at_one_of_its_steps(
    step: str, after: bool, expected: int, courses: dict[str, Course], quick_path: Path
) -> None:
    class Sequence(FailingCommit):
        pass

    Sequence.step, Sequence.after = step, after

    class FailingStore(Store):
        commit_sequence = Sequence

    course = courses["vertical"]
    directory = copy_store(course.store, quick_path / "store")
    losses: list[float] = []
    with (
        nothing_left_behind(directory),
        DirectEngine(num_threads=2) as engine,
        pytest.raises(TransferError, match=r"the commit of step 2 failed: .*open the store again") as raised,
    ):
        go_on(job("vertical"), directory, engine, losses, store_kind=FailingStore)
    assert raised.value.errno == errno.EIO
    assert snapshot(directory).step == expected
    check_recovery(job("vertical"), course, directory, losses)


# ---------------------------------------------------------------------- creation


def test_every_write_of_a_creation_fails(quick_path: Path) -> None:
    what = job("vertical")
    with RecordingEngine(DirectEngine(num_threads=2)) as recording:
        create(what, quick_path / "whole", recording)
    for operation in ("write", "flush"):
        number = sum(request.operation == operation for request in recording.requests)
        assert number > 10
        for k in range(1, number + 1, 1 if operation == "write" else 7):
            directory = quick_path / f"{operation}-{k}"
            rule = Nth(operation, k, FAULTS[k % len(FAULTS)])
            with (
                nothing_left_behind(directory),
                FaultyEngine(DirectEngine(num_threads=2), rule) as engine,
                pytest.raises(TransferError, match=f"{operation} of .* failed"),
            ):
                create(what, directory, engine)
            assert not directory.exists()
            with DirectEngine(num_threads=1) as engine, pytest.raises(StoreRefusedError, match="does not exist"):
                Store.open(directory, engine=engine)


def test_a_creation_that_failed_can_be_made_again(courses: dict[str, Course], quick_path: Path) -> None:
    what, directory = job("vertical"), quick_path / "store"
    with FaultyEngine(DirectEngine(num_threads=2), Nth("write", 5, FAULTS[1])) as engine:
        with pytest.raises(TransferError, match="ENOSPC"):
            create(what, directory, engine)
        create(what, directory, engine)
    assert snapshot(directory) == courses["vertical"].snapshots[0]
