"""A device that fails under a training run: one line, the store at its last commit, nothing left, and it can go on.

Failing drives are in `test_faults.py`; the device that fails is `tests/support/late_device.py`'s.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from hoist.scheduler import trainer as trainer_module
from hoist.scheduler.executor import Mark
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.trainer import Trainer
from hoist.tiers.errors import BudgetError, DeviceError
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.faults import (
    NUM_STEPS,
    SETTINGS,
    Course,
    Job,
    copy_store,
    go_on,
    late_job,
    nothing_left_behind,
    snapshot,
)
from tests.support.late_device import DeviceFault, LateDevice, NthWork, WorkRule, out_of_memory
from tests.support.training import torch_threads

When = Literal["put", "wait"]

pytestmark = pytest.mark.timeout(240)

#: What the errors of a device say, and what to do about each.
LOST = r"late device, order \d+ failed: CUDA error: unspecified launch failure; the run goes on from its last commit"
NO_ROOM = r"Tried to allocate 2\.00 GiB; give a smaller --micro-batch-size or --device-memory"
BOUNCES = ("bounce-up", "bounce-down")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


class OpRule:
    """The ``number``-th op of a kind fails, from 1. Ops are known where they are put: see :class:`TellingRuntime`."""

    def __init__(self, kind: Kind, number: int, fault: DeviceFault) -> None:
        self._kind = kind
        self._number = number
        self._fault = fault
        self._count = 0

    def __call__(self, stream: str) -> DeviceFault | None:
        op = getattr(TellingRuntime.putting, "op", None)
        if op is None or op.kind is not self._kind:
            return None
        self._count += 1  # ops of one kind are put by one thread
        return self._fault if self._count == self._number else None


class TellingRuntime(Runtime):
    """Says which op the calling thread puts into a stream."""

    putting = threading.local()

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        self.putting.op = op
        try:
            return super().run(op, step, after)
        finally:
            self.putting.op = None


class TellingTrainer(Trainer):
    runtime_kind = TellingRuntime


def failure_of(what: Job, directory: Path, losses: list[float], *, device: LateDevice, **told: Any) -> DeviceError:
    """Train until the device fails. Everything of the run has gone then but the store and the error."""
    with nothing_left_behind(directory), device, DirectEngine(num_threads=2) as engine:
        try:
            go_on(what, directory, engine, losses, device=device, trainer_kind=TellingTrainer, validate=True, **told)
        except DeviceError as error:
            found = error.with_traceback(None)
        else:
            pytest.fail("nothing failed")
        what.staged.check_free()
        assert device.pinned == {}
    return found


def check_fault(what: Job, course: Course, directory: Path, rule: WorkRule, message: str, *, seed: int = 0) -> None:
    """Run the job with the fault, look at how it fails, then go on without: on the CPU and on another device."""
    copy_store(course.store, directory)
    losses: list[float] = []
    device = LateDevice(seed, rule=rule, late_seconds=0.0)
    error = failure_of(what, directory, losses, device=device)
    check_message(error, message)
    del error
    gc.collect()
    assert device.allocated_bytes == 0
    assert losses == course.losses[: len(losses)]
    kept = snapshot(directory)
    assert kept == course.snapshots[kept.step]
    assert kept.step <= len(losses)
    with DirectEngine(num_threads=2) as engine, LateDevice(seed + 1, late_seconds=0.0) as other:
        rest = go_on(what, directory, engine, upto=kept.step + 1, device=other)
        rest += go_on(SETTINGS["vertical"](), directory, engine)
    assert rest == course.losses[kept.step :]
    assert snapshot(directory) == course.snapshots[NUM_STEPS]


def check_message(error: DeviceError, message: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert re.search(message, text), text


# ---------------------------------------------------------------------- ops


#: Number of the op of each kind that fails: in the second step or the third one, or else the first one that there is.
NUMBERS = {
    Kind.MERGE: 30, Kind.BIND: 9, Kind.FORWARD: 14, Kind.LOSS: 5, Kind.BACKWARD: 12, Kind.UNBIND: 11, Kind.DOWNLOAD: 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        pytest.param(kind, when, marks=[] if (number + (when == "put")) % 2 else pytest.mark.slow)
        for number, kind in enumerate(NUMBERS)
        for when in ("put", "wait")
    ],
)
def test_the_device_is_lost_at_an_op(kind: Kind, when: When, course: Course, quick_path: Path) -> None:
    rule = OpRule(kind, NUMBERS[kind], DeviceFault(when=when))
    check_fault(late_job("vertical"), course, quick_path / "store", rule, LOST, seed=kind.value)


@pytest.mark.parametrize("when", ["put", "wait"])
def test_the_device_is_lost_while_new_weights_are_copied_there(when: When, course: Course, quick_path: Path) -> None:
    rule = OpRule(Kind.REFRESH, 8, DeviceFault(when=when))
    check_fault(late_job("delayed"), course, quick_path / "store", rule, LOST)


@pytest.mark.parametrize("when", ["put", "wait"])
@pytest.mark.parametrize("stream", BOUNCES)
def test_the_device_is_lost_between_two_parts_of_a_transfer(
    stream: str, when: When, course: Course, quick_path: Path
) -> None:
    """What is spilled and fetched goes through the ring: the drive did its part, and is not blamed."""
    rule = NthWork(stream, 7, DeviceFault(when=when))
    check_fault(late_job("vertical"), course, quick_path / "store", rule, r"stage '[a-z0-9.]+', .*" + LOST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("when", ["put", "wait"])
@pytest.mark.parametrize("stream", ["compute", "up", "down", *BOUNCES])
@pytest.mark.parametrize("name", ["vertical", "horizontal", "delayed", "resident in part"])
def test_the_device_is_lost_at_every_fifth_work(
    name: str, stream: str, when: When, course: Course, quick_path: Path
) -> None:
    what = late_job(name)
    directory = copy_store(course.store, quick_path / "undisturbed")
    with DirectEngine(num_threads=2) as engine, LateDevice() as device:
        assert go_on(what, directory, engine, device=device) == course.losses
    for number in range(1, device.num_put[stream] + 1, 5):
        rule = NthWork(stream, number, DeviceFault(when=when))
        # Before the first op, the model is moved; then there is no stage to name.
        check_fault(what, course, quick_path / str(number), rule, LOST, seed=number)


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_a_stage_that_finds_no_memory_says_what_to_give(kind: Kind, course: Course, quick_path: Path) -> None:
    rule = OpRule(kind, NUMBERS[kind], DeviceFault(error=out_of_memory, when="put"))
    check_fault(late_job("vertical"), course, quick_path / "store", rule, NO_ROOM)


# ---------------------------------------------------------------------- beside the ops


class Switch:
    """A rule that is told from outside when all that is put into a stream fails."""

    def __init__(self) -> None:
        self.stream = ""
        self.fault = DeviceFault()

    def __call__(self, stream: str) -> DeviceFault | None:
        return self.fault if stream == self.stream else None


@pytest.mark.parametrize("call", ["step", "evaluate", "commit", "wait", "close"])
def test_one_error_for_whatever_is_called_next(call: str, course: Course, quick_path: Path) -> None:
    """Updates of a step's end are left to a later call, which finds a device that was lost meanwhile, or has no room.

    Nothing that is called then does more than say so again, and closing ends it.
    """
    what = late_job("delayed")
    directory = copy_store(course.store, quick_path / "store")
    rule = Switch()
    with nothing_left_behind(directory), LateDevice(rule=rule) as device, DirectEngine(num_threads=2) as engine:
        with (
            Store.open(directory, engine=engine) as store,
            Trainer(
                model=what.staged, store=store, engine=engine, config=what.settings, baseline_bytes=0,
                setup=what.setup, device=device,
            ) as trainer,
        ):  # fmt: skip
            trainer.step(what.steps[0])
            calls: dict[str, Callable[[], object]] = {
                "step": lambda: trainer.step(what.steps[1]),
                "evaluate": lambda: trainer.evaluate(what.steps[1]),
                "commit": trainer.commit,
                "wait": trainer.wait,
            }
            # Of the first two, what comes before all ops fails: the inputs find no room. Then the device goes on.
            at_inputs = call in ("step", "evaluate")
            rule.fault = DeviceFault(error=out_of_memory, when="put") if at_inputs else DeviceFault()
            rule.stream = "compute" if at_inputs else "up"
            if call == "close":
                trainer.close()
            else:
                with pytest.raises(DeviceError) as raised:
                    calls[call]()
                check_message(raised.value, NO_ROOM if at_inputs else LOST)
                rule.stream = ""
                for again in calls.values():
                    with pytest.raises(DeviceError) as repeated:
                        again()
                    assert repeated.value is raised.value
                del raised, repeated
        assert device.pinned == {}
    kept = snapshot(directory)
    assert kept == course.snapshots[kept.step]
    with DirectEngine(num_threads=2) as engine:
        assert go_on(SETTINGS["delayed"](), directory, engine) == course.losses[kept.step :]


# ---------------------------------------------------------------------- making a trainer


def test_a_trainer_that_could_not_be_made_leaves_nothing_and_another_one_can_be(
    course: Course, quick_path: Path
) -> None:
    """The model is given back too, its weights and buffers where they were, and works on the CPU."""
    what = late_job("vertical")
    directory = copy_store(course.store, quick_path / "store")
    before = {name: buffer.data_ptr() for name, buffer in what.staged.model.named_buffers()}
    for when in ("put", "wait"):
        device = LateDevice(rule=NthWork("compute", 1, DeviceFault(when=when)))
        check_message(failure_of(what, directory, [], device=device), LOST)
        gc.collect()
        assert device.allocated_bytes == 0
        assert {name: buffer.data_ptr() for name, buffer in what.staged.model.named_buffers()} == before
    with DirectEngine(num_threads=2) as engine:
        assert go_on(SETTINGS["vertical"](), directory, engine) == course.losses


@pytest.mark.parametrize("part", ["executor", "publisher"])
def test_what_fails_late_in_the_making_takes_back_what_came_before(
    part: str, course: Course, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that the system does not start, for one."""
    what = late_job("vertical")
    directory = copy_store(course.store, quick_path / "store")

    def refused(*args: object, **told: object) -> None:
        raise RuntimeError("can't start new thread")

    with nothing_left_behind(directory), LateDevice() as device, DirectEngine(num_threads=2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(trainer_module, part.capitalize(), refused)
            with pytest.raises(RuntimeError, match="can't start new thread") as raised:
                go_on(what, directory, engine, device=device)
        del raised
        gc.collect()
        what.staged.check_free()
        assert device.pinned == {}
        assert device.allocated_bytes == 0
        assert go_on(what, directory, engine, device=device) == course.losses


def test_a_device_with_too_little_free_refuses_before_anything_is_changed(course: Course, quick_path: Path) -> None:
    what = late_job("vertical")
    directory = copy_store(course.store, quick_path / "store")
    need = what.setup.memory.region_bytes
    with nothing_left_behind(directory), DirectEngine(num_threads=2) as engine:
        with (
            LateDevice(capacity_bytes=need - 1) as small,
            pytest.raises(BudgetError, match=f"device memory: {need} bytes for buffers do not fit"),
        ):
            go_on(what, directory, engine, device=small)
        assert small.pinned == {}
        with LateDevice(capacity_bytes=need) as device:
            assert go_on(what, directory, engine, device=device) == course.losses
        assert device.peak_bytes() == need
