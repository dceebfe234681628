"""What training asks of the drive: aligned transfers only, and the same bits however the system answers them.

Faults that end a run are in `test_faults.py`; the engines alone are tested in `tests/tiers/io`.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hoist.scheduler.config import Order
from hoist.tiers.io.alignment import is_aligned
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from hoist.tools.export import export_store
from hoist.tools.import_weights import checkpoint_weights
from hoist.tools.safetensors_reader import SafetensorsReader
from tests.support.engines import RecordedRequest, RecordingEngine
from tests.support.faults import NUM_STEPS, Course, copy_store, create, go_on, job, snapshot, undisturbed
from tests.support.models import reference_model
from tests.support.systemcalls import FaultyDirectEngine, SystemCall
from tests.support.training import torch_threads

PLANS: tuple[Order, ...] = ("vertical", "horizontal")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def courses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Order, Course]]:
    folder = tmp_path_factory.mktemp("courses")
    with torch_threads(1):
        yield {plan: undisturbed(job(plan), folder / plan) for plan in PLANS}


# ---------------------------------------------------------------------- alignment


@pytest.mark.parametrize("plan", PLANS)
def test_no_unaligned_transfer_in_a_whole_life(plan: Order, tmp_path: Path) -> None:
    """Create, train with spills, commit, resume, verify, export: only the exported files' own ends are unaligned.

    A tensor of a safetensors file begins and ends at any byte, which is the format's, not ours, to choose.
    """
    what = job(plan)
    store = tmp_path / "store"
    with RecordingEngine(DirectEngine(num_threads=2)) as engine, torch_threads(1):
        create(what, store, engine)
        (store / "model").mkdir(exist_ok=True)
        what.config.save_pretrained(store / "model")
        go_on(what, store, engine, upto=2)
        go_on(what, store, engine)
        with Store.open(store, engine=engine, check="crc"):
            pass
        hot = engine.requests
        engine.forget_requests()
        export_store(store, tmp_path / "exported", engine=engine)
        exporting = engine.requests
        buffered_bytes = engine.statistics().buffered_bytes
    kinds = {request.operation for request in hot}
    assert kinds == {"read", "write", "flush"}
    places = {_place_of(request, store) for request in hot}
    assert places == {"weight_hi", "weight_lo", "exp_avg", "exp_avg_sq", "buffers", "scratch"}
    assert [request for request in hot if not request.aligned] == []
    unaligned = [request for request in exporting if not request.aligned]
    assert {(request.operation, request.path.suffix) for request in unaligned} <= {("write", ".safetensors")}
    # One end of each file, not of each tensor: what lies between goes out in aligned blocks.
    files = {request.path for request in exporting if request.path.suffix == ".safetensors"}
    assert len(unaligned) <= 2 * len(files)
    assert buffered_bytes <= sum(request.num_bytes for request in unaligned)


def _place_of(request: RecordedRequest, store: Path) -> str:
    parts = request.path.relative_to(store).parts
    return parts[2] if parts[0] == "stages" else parts[0]


def test_an_import_reads_the_store_aligned_and_writes_it_aligned(tmp_path: Path) -> None:
    """Reads of the checkpoint's own files may be unaligned at their ends; every write into the store is not."""
    what = job("vertical")
    reference_model(what.config).save_pretrained(tmp_path / "checkpoint")
    with RecordingEngine(DirectEngine(num_threads=2)) as engine:
        reader = SafetensorsReader(tmp_path / "checkpoint")
        source = checkpoint_weights(reader, what.staged, engine)
        create(what, tmp_path / "store", engine, source=source)
    unaligned = {(request.operation, request.path.suffix) for request in engine.unaligned}
    assert unaligned <= {("read", ".safetensors")}


@pytest.mark.parametrize("plan", PLANS)
def test_every_system_call_of_training_is_direct(plan: Order, courses: dict[Order, Course], tmp_path: Path) -> None:
    directory = copy_store(courses[plan].store, tmp_path / "store")
    with FaultyDirectEngine(num_threads=2) as engine:
        go_on(job(plan), directory, engine)
        calls = engine.calls_of("pread", "pwrite")
        assert engine.statistics().buffered_bytes == 0
    assert len(calls) > 300
    assert [call for call in calls if not call.direct] == []
    assert [call for call in calls if not is_aligned(call.offset, call.num_bytes, call.address)] == []


# ---------------------------------------------------------------------- what the system answers


def check_same(what: Order, course: Course, directory: Path, engine: DirectEngine) -> None:
    """A run under this engine gives the same losses and the same bytes in the store."""
    copy_store(course.store, directory)
    with engine:
        assert go_on(job(what), directory, engine) == course.losses
    assert snapshot(directory) == course.snapshots[NUM_STEPS]


def refuse(name: str, *, only_first: bool = False) -> Callable[[SystemCall], None]:
    """EINVAL for O_DIRECT in calls of that name."""
    left = [1] if only_first else None
    lock = threading.Lock()

    def before(call: SystemCall) -> None:
        if call.name != name or not call.direct:
            return
        with lock:
            if left == [0]:
                return
            if left:
                left[0] -= 1
        raise OSError(22, "Invalid argument")

    return before


@pytest.mark.parametrize("only_first", [False, True])
@pytest.mark.parametrize("name", ["open", "pread", "pwrite"])
def test_a_refusal_of_direct_io_is_said_once_and_changes_nothing(
    name: str, only_first: bool, courses: dict[Order, Course], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="hoist")
    engine = FaultyDirectEngine(before=refuse(name, only_first=only_first), num_threads=2)
    check_same("vertical", courses["vertical"], tmp_path / "store", engine)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("hoist")]
    assert len(said) == 1, said
    assert "no direct I/O on device" in said[0]
    assert "using buffered I/O there" in said[0]
    assert engine.statistics().buffered_bytes > 0
    assert "buffered on device" in engine.describe()


@pytest.mark.parametrize("cap_bytes", [512, 4097, 8192])
@pytest.mark.parametrize("plan", PLANS)
def test_short_and_interrupted_transfers(
    plan: Order, cap_bytes: int, courses: dict[Order, Course], tmp_path: Path
) -> None:
    chance = random.Random(cap_bytes)

    def interrupt(call: SystemCall) -> None:
        if chance.random() < 0.2:
            raise InterruptedError(4, "Interrupted system call")

    def before(call: SystemCall) -> None:
        if call.name in ("pread", "pwrite", "fdatasync"):
            interrupt(call)

    engine = FaultyDirectEngine(before=before, cap_bytes=cap_bytes, num_threads=2)
    check_same(plan, courses[plan], tmp_path / "store", engine)
    moved = engine.calls_of("pread", "pwrite")
    assert len(moved) > 500


def test_a_run_without_direct_io_is_the_same(courses: dict[Order, Course], tmp_path: Path) -> None:
    check_same("horizontal", courses["horizontal"], tmp_path / "store", DirectEngine(num_threads=2, direct=False))
