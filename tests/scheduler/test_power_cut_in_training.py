"""Power cuts at any instant of a training run: it goes on from a commit, bit for bit as if nothing had been.

What a power cut may leave is `tests/support/power.py`'s business; the store alone: `tests/tiers/test_power_cut.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hoist.tiers.commit import CommitSequence, CommitStatistics
from hoist.tiers.errors import HoistError
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.faults import (
    NUM_STEPS,
    RARE,
    SETTINGS,
    Course,
    copy_store,
    go_on,
    quick_directory,
    snapshot,
)
from tests.support.power import Drive, RecordedEngine, Recorder, Recording, places_to_cut, recording, write_tree
from tests.support.processes import run_in_process
from tests.support.training import torch_threads
from tests.support.wrong_commits import FlushAfterwards, LateSettling, NoFlush

pytestmark = pytest.mark.timeout(600)

NAMES = [pytest.param(name, marks=pytest.mark.slow if name in RARE else []) for name in SETTINGS]


class PromisingStore(Store):
    """Tells the recorder of a commit when its caller may rely on it."""

    recorder: ClassVar[Recorder]

    def commit(
        self, *, step: int, adam_steps: Mapping[str, int], run: Mapping[str, Any], back: bool = False
    ) -> CommitStatistics:
        done = super().commit(step=step, adam_steps=adam_steps, run=run, back=back)
        self.recorder.promise(step)
        return done


def record_training(origin: Path, folder: Path, name: str, sequence: type[CommitSequence]) -> Recording:
    """In a process of its own: the whole run, in a copy of a store at step 0."""
    what = SETTINGS[name]()

    class WatchedStore(PromisingStore):
        commit_sequence = sequence

    directory = copy_store(origin, folder / "store")
    with recording(folder) as recorder, RecordedEngine(DirectEngine(num_threads=2), recorder) as engine:
        PromisingStore.recorder = recorder
        go_on(what, directory, engine, store_kind=WatchedStore)
        return recorder.finish()


def record(course: Course, name: str, sequence: type[CommitSequence] = CommitSequence) -> Recording:
    with quick_directory() as folder:
        code, recorded = run_in_process(record_training, course.store, folder, name, sequence)
    assert code == 0
    assert isinstance(recorded, Recording)
    return recorded


@pytest.fixture(scope="module")
def recordings(courses: dict[str, Course]) -> Callable[[str], Recording]:
    """Of a setting's whole run; each is made once."""
    return cache(lambda name: record(courses[name], name))


def check_cut(name: str, course: Course, recorded: Recording, place: int, seed: int) -> int:
    """After a power cut the store holds a commit, whole, and training goes on from it. Returns its step."""
    drive = Drive(recorded, place)
    with quick_directory() as folder, DirectEngine(num_threads=2) as engine:
        write_tree(drive.cut(seed), folder)
        directory = folder / "store"
        kept = snapshot(directory)
        assert drive.promised <= kept.step <= drive.published
        assert kept == course.snapshots[kept.step]
        assert go_on(SETTINGS[name](), directory, engine) == course.losses[kept.step :]
        assert snapshot(directory) == course.snapshots[NUM_STEPS]
    return kept.step


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[] if not part else pytest.mark.slow) for part in range(13)]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_power_cut_changes_no_bit_of_a_run(
    name: str, part: int, courses: dict[str, Course], recordings: Callable[[str], Recording]
) -> None:
    seeds = range(part * 8, part * 8 + 8)
    with torch_threads(1):
        steps = {
            check_cut(name, courses[name], recordings(name), place, seed)
            for seed, place in places_to_cut(recordings(name), seeds)
        }
    assert len(steps) > 1


@pytest.mark.parametrize(
    ("name", "sequence"),
    [("vertical", NoFlush), ("delayed", LateSettling), ("delayed, horizontal", FlushAfterwards), ("clipped", NoFlush)],
)
def test_a_wrong_commit_is_found(name: str, sequence: type[CommitSequence], courses: dict[str, Course]) -> None:
    recorded = record(courses[name], name, sequence)

    def is_wrong(seed: int, place: int) -> bool:
        try:
            check_cut(name, courses[name], recorded, place, seed)
        except (AssertionError, HoistError):
            return True
        return False

    with torch_threads(1):
        assert any(is_wrong(seed, place) for seed, place in places_to_cut(recorded, range(100)))
