"""What a store does at a resume whose committed chunks are not what was committed: refuse with the chunk's name.

`hoist train` reads every committed chunk once before it goes on. What is damaged in metadata and records is in
`tests/tiers/test_store_damage.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoist.tiers.errors import CorruptChunkError
from hoist.tiers.format import COMMIT_NAME
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from hoist.tools.options import TrainOptions
from hoist.tools.report import RunEnd
from hoist.tools.train import train
from tests.support.damage import chunk_files, flip_a_bit, shorten
from tests.support.faults import (
    NUM_STEPS,
    VOCAB_SIZE,
    Course,
    copy_store,
    go_on,
    job,
    quick_directory,
    snapshot,
    undisturbed,
)
from tests.support.training import torch_threads

pytestmark = pytest.mark.timeout(240)

PLAN = "vertical"


@pytest.fixture(scope="module")
def course() -> Iterator[Course]:
    with quick_directory() as folder, torch_threads(1):
        yield undisturbed(job(PLAN), folder / PLAN)


@pytest.fixture
def store(course: Course) -> Iterator[Path]:
    """At step 1."""
    with quick_directory() as folder:
        directory = copy_store(course.store, folder / "store")
        with DirectEngine(num_threads=2) as engine:
            go_on(job(PLAN), directory, engine, upto=1)
        yield directory


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip_a_bit, r"checksum: committed [0-9a-f]{8}, the file gives [0-9a-f]{8}"),
    "a short file": (shorten, r"has \d+ bytes, expected \d+"),
    "a missing file": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_chunk_is_named_and_nothing_is_changed(what: str, store: Path) -> None:
    damage, message = DAMAGE[what]
    path = chunk_files(store, committed=True)[5]
    damage(path)
    record = (store / COMMIT_NAME).read_bytes()
    for check in ("sizes", "crc"):
        if what == "a flipped bit" and check == "sizes":
            continue
        with DirectEngine(num_threads=1) as engine, pytest.raises(CorruptChunkError, match=message) as raised:
            Store.open(store, engine=engine, check=check)
        assert str(path) in str(raised.value)
        assert "stage 'embed' array weight_lo chunk 1" in str(raised.value)
    assert (store / COMMIT_NAME).read_bytes() == record


def test_every_committed_file_is_checked_and_no_other(course: Course, store: Path) -> None:
    """A bit in any committed chunk is found; those of the other slots are overwritten and do no harm."""
    for path in chunk_files(store, committed=True):
        content = path.read_bytes()
        flip_a_bit(path)
        with DirectEngine(num_threads=1) as engine, pytest.raises(CorruptChunkError, match=str(path)):
            Store.open(store, engine=engine, check="crc")
        path.write_bytes(content)
    for path in chunk_files(store, committed=False):
        flip_a_bit(path)
    with DirectEngine(num_threads=2) as engine:
        assert go_on(job(PLAN), store, engine) == course.losses[1:]
    assert snapshot(store) == course.snapshots[NUM_STEPS]


# ---------------------------------------------------------------------- hoist train


class Silent:
    """A reporter that notes what is in progress."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def notice(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        self.seen.add(what)

    def plan(self, start: Any) -> None: ...

    def forecast(self, forecast: Any) -> None: ...

    def evaluation(self, found: Any) -> None: ...

    def step(self, metrics: Any, start: Any) -> None: ...


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's config, data, and a store that `hoist train` has taken to step 2."""
    folder = tmp_path_factory.mktemp("trained")
    job(PLAN).config.save_pretrained(folder / "model")
    tokens = np.random.default_rng(5).integers(3, VOCAB_SIZE, 4000, dtype=np.int64)
    np.save(folder / "tokens.npy", tokens)
    with torch_threads(1):
        assert run_train(folder, folder / "store", 2).step == 2
    return folder


def run_train(folder: Path, store: Path, steps: int, report: Silent | None = None) -> RunEnd:
    options: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": (str(folder / "tokens.npy"),),
        "store": str(store),
        "host_memory": "8MiB",
        "seq_len": 8,
        "micro_batch_size": 1,
        "micro_batches": 2,
        "steps": steps,
        "max_chunk_elements": 8192,
        "io": "direct",
    }
    return train(TrainOptions.make(config=None, command_line=options), report or Silent())


@pytest.mark.parametrize("what", DAMAGE)
def test_hoist_train_refuses_to_go_on_from_a_damaged_store(what: str, trained: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[what]
    store = tmp_path / "store"
    shutil.copytree(trained / "store", store)
    path = chunk_files(store, committed=True)[3]
    damage(path)
    record = (store / COMMIT_NAME).read_bytes()
    with pytest.raises(CorruptChunkError, match=message) as raised:
        run_train(trained, store, 3)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 1
    assert (store / COMMIT_NAME).read_bytes() == record


def test_hoist_train_shows_that_it_checks_the_store(trained: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(trained / "store", store)
    report = Silent()
    with torch_threads(1):
        assert run_train(trained, store, 3, report).step == 3
    assert "checking the store" in report.seen
