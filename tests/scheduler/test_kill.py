"""A training process killed at a transfer or a step of a commit: the store is at its last commit and goes on from it.

A smoke test with a few seeds; that a commit is whole at every instant is `tests/tiers/test_store_crash.py`'s part.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from hoist.scheduler.config import Order
from hoist.tiers.commit import CommitSequence
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.engines import WrapperEngine
from tests.support.faults import NUM_STEPS, Course, copy_store, go_on, job, snapshot, undisturbed
from tests.support.processes import run_in_process
from tests.support.training import torch_threads

PLANS: tuple[Order, ...] = ("vertical", "horizontal")

pytestmark = pytest.mark.timeout(240)


class Deadline:
    """Kills this process at the ``number``-th event, as nothing in it can prevent; counts them for 0."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self.count = 0

    def tick(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == self._number:
                os.kill(os.getpid(), signal.SIGKILL)


class TickingEngine(WrapperEngine):
    """Every request and every completion is an event."""

    def __init__(self, inner: IoEngine, deadline: Deadline) -> None:
        super().__init__(inner)
        self._deadline = deadline

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._watched(lambda: super(TickingEngine, self).read(path, offset, buffer))

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._watched(lambda: super(TickingEngine, self).write(path, offset, buffer))

    def flush(self, path: Path) -> Future[None]:
        return self._watched(lambda: super(TickingEngine, self).flush(path))

    def _watched(self, request: Callable[[], Future[None]]) -> Future[None]:
        self._deadline.tick()
        future = request()
        future.add_done_callback(lambda _: self._deadline.tick())
        return future


class TickingCommit(CommitSequence):
    """Every step of a commit is an event."""

    deadline = Deadline(0)

    def write_checksums(self, name: str, data: bytes) -> None:
        self.deadline.tick()
        super().write_checksums(name, data)

    def write_record(self, data: bytes) -> None:
        self.deadline.tick()
        super().write_record(data)

    def publish(self) -> None:
        self.deadline.tick()
        super().publish()

    def settle(self) -> None:
        self.deadline.tick()
        super().settle()

    def tidy(self, superseded: str) -> None:
        self.deadline.tick()
        super().tidy(superseded)


class TickingStore(Store):
    commit_sequence = TickingCommit


def train_until_killed(plan: Order, directory: Path, number: int) -> int:
    """In a process of its own. Returns how many events there were, if it comes to an end."""
    deadline = TickingCommit.deadline = Deadline(number)
    with TickingEngine(DirectEngine(num_threads=2), deadline) as engine:
        go_on(job(plan), directory, engine, store_kind=TickingStore)
    return deadline.count


@pytest.fixture(scope="module")
def courses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Order, Course]]:
    folder = tmp_path_factory.mktemp("courses")
    with torch_threads(1):
        yield {plan: undisturbed(job(plan), folder / plan) for plan in PLANS}


@pytest.fixture(scope="module")
def num_events(courses: dict[Order, Course], tmp_path_factory: pytest.TempPathFactory) -> dict[Order, int]:
    counted: dict[Order, int] = {}
    for plan in PLANS:
        directory = copy_store(courses[plan].store, tmp_path_factory.mktemp("counting") / "store")
        code, answer = run_in_process(train_until_killed, plan, directory, 0)
        assert code == 0
        counted[plan] = answer
    return counted


SEEDS: list[Any] = [pytest.param(seed, marks=[] if seed < 8 else pytest.mark.slow) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_any_event(
    seed: int, courses: dict[Order, Course], num_events: dict[Order, int], tmp_path: Path
) -> None:
    plan = PLANS[seed % 2]
    course = courses[plan]
    # one from each eighth of the run
    eighth = num_events[plan] // 8
    number = max(1, random.Random(seed).randint(eighth * (seed % 8), eighth * (seed % 8 + 1)))
    directory = copy_store(course.store, tmp_path / "store")
    code, _ = run_in_process(train_until_killed, plan, directory, number)
    assert code == -signal.SIGKILL
    kept = snapshot(directory)
    assert kept == course.snapshots[kept.step]
    with DirectEngine(num_threads=2) as engine:
        assert go_on(job(plan), directory, engine) == course.losses[kept.step :]
    assert snapshot(directory) == course.snapshots[NUM_STEPS]
