"""STORE/status.json says what is so: compared, while nothing moves, with the table, the buffers and the drive.

The document's encoding is `test_status.py`'s, the timeline `test_timeline.py`'s, the metrics `test_metrics_log.py`'s.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hoist.scheduler import publish
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.executor import Mark
from hoist.scheduler.metrics_log import MetricsLog
from hoist.scheduler.ops import Kind, Lane, Op
from hoist.scheduler.publish import Publisher
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.status import STATE_KINDS, RunState, RunStatus, StateBytes
from hoist.scheduler.status_file import read_status
from hoist.scheduler.timeline import Recorder
from hoist.scheduler.trainer import Trainer
from hoist.scheduler.whereabouts import Whereabouts
from hoist.tiers.errors import HoistError
from hoist.tiers.format import MOMENT_ARRAYS, STATUS_NAME, TIMELINE_NAME, WEAR_NAME, WEIGHT_ARRAYS
from hoist.tiers.manager import Manager, Residency
from hoist.tiers.small_files import Unusable, Why
from tests.scheduler.test_freezing import freezing
from tests.support import standstill
from tests.support.models import tiny_config
from tests.support.standstill import World
from tests.support.training import Engine, Recipe, assert_identical, make_steps, torch_threads, train, trainer_on

#: Which looks of a kind are taken: some of the first step, which reads all, and of the next ones.
LOOKS = (1, 7, 40)
#: Only what a test asks for is written.
NEVER = 0.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def read(directory: Path) -> RunStatus:
    found = read_status(directory)
    assert isinstance(found, RunStatus), found
    return found


# ---------------------------------------------------------------------- true at any moment


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A way to run in which items are in other places than in most."""

    engine: Engine
    num_micro_batches: int = 2
    clip_norm: float = 0.0
    tied: bool = False
    recipe: Recipe | None = None
    seen: tuple[tuple[str, str], ...] = ()
    """Kinds of state and what must have been seen of them, by names of StateBytes' fields."""


CASES = {
    "smallest budget": Case(
        engine=Engine(budget_factor=1.0, resident_weights=False), num_micro_batches=4,
        seen=(("activations", "nvme"), ("weights", "filling"), ("moments", "writing"), ("weights", "bound")),
    ),
    "horizontal": Case(
        engine=Engine(plan="horizontal", budget_factor=1.0, resident_weights=False),
        seen=(("gradients", "nvme"), ("gradients", "writing"), ("activations", "dirty")),
    ),
    "all kept": Case(
        engine=Engine(residency=1.0, budget_factor=60.0, commit_every=3),
        seen=(("weights", "dirty"), ("moments", "dirty"), ("weights", "writing"), ("moments", "filling")),
    ),
    "weights kept": Case(
        engine=Engine(residency=0.3, budget_factor=1.6, commit_every=3, resident_weights=False),
        seen=(("weights", "dirty"), ("moments", "filling"), ("moments", "writing")),
    ),
    "delayed": Case(engine=Engine(delay=1.0, budget_factor=1.0), seen=(("gradients", "nvme"),)),
    "speculative": Case(
        engine=Engine(delay=0.5, budget_factor=1.0, clip_mode="speculative", commit_every=3), clip_norm=0.01,
        seen=(("gradients", "nvme"), ("weights", "dirty")),
    ),
    "tied": Case(engine=Engine(budget_factor=1.5), tied=True, seen=(("weights", "bound"),)),
    "frozen": Case(
        engine=Engine(budget_factor=1.0), recipe=freezing("last layer", rounded=torch.bfloat16),
        seen=(("weights", "filling"),),
    ),
    "frozen and kept": Case(
        engine=Engine(budget_factor=60.0, residency=1.0), recipe=freezing("last layer", rounded=torch.bfloat16),
        seen=(("weights", "filling"), ("weights", "dirty")),
    ),
}  # fmt: skip


def expected_stages(trainer: Trainer, world: World, table: tuple[Residency, ...]) -> list[list[StateBytes]]:
    """What the document should say, counted piece by piece from the table alone."""
    pieces = standstill.pieces_of(trainer)
    dirty = standstill.dirty_pieces(trainer, table)
    rows: list[list[Counter[str]]] = [[Counter() for _ in STATE_KINDS] for _ in pieces]
    for stage, layout in enumerate(trainer._store.layouts):
        for kind, arrays in enumerate((WEIGHT_ARRAYS, MOMENT_ARRAYS)):
            size = sum(array.itemsize for array in arrays)
            rows[stage][kind]["nvme"] = sum(
                size * piece.num_elements for piece in pieces[stage] if (stage, piece.index) not in dirty[kind]
            )
        rows[stage][0]["nvme"] += layout.frozen_bytes
    for (stage, _), num_bytes in world.stashed.items():
        rows[stage][2]["nvme"] += num_bytes
    for line in table:
        for kind, num_bytes in parts_of(trainer, line):
            row = rows[line.first][kind]
            if kind >= 2 and line.state in ("stored", "clean", "filling"):
                row["nvme"] += num_bytes
            if line.buffer >= 0:
                row["host"] += num_bytes
                row["dirty"] += num_bytes * (line.state in standstill.DIRTY)
                for state in ("filling", "writing", "bound"):
                    row[state] += num_bytes * (line.state == state)
    return [[StateBytes(**{name: count for name, count in row.items() if count}) for row in stage] for stage in rows]


def parts_of(trainer: Trainer, line: Residency) -> list[tuple[int, int]]:
    """The kinds of state that a line of the table is of, with their bytes."""
    if line.kind != "states":
        kinds = {"kept moments": 1, "gradient": 2, "activation": 3}
        return [(kinds.get(line.kind, 0), line.num_bytes)]
    piece = standstill.pieces_of(trainer)[line.first][line.second]
    kept = trainer._runtime._updates.kept_arrays(line.first, piece.chunk)
    parts = [
        (kind, piece.num_elements * sum(array.itemsize for array in arrays))
        for kind, arrays in enumerate((WEIGHT_ARRAYS, MOMENT_ARRAYS))
        if not kept.issuperset(arrays)
    ]
    if line.num_bytes == parts[-1][1]:  # the weights have not come from their buffer yet
        parts = parts[-1:]
    assert sum(num_bytes for _, num_bytes in parts) == line.num_bytes
    return parts


#: Those that the others have the parts of.
_SLOW = ("horizontal", "all kept", "frozen")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in CASES]
)
def test_what_is_told_is_what_is_there(name: str, tmp_path: Path) -> None:
    """Before and after ops and transfers, a few of each kind: the document, the table, the buffers and the drive."""
    case, world = CASES[name], World()
    steps = make_steps(3, case.num_micro_batches)
    directory = tmp_path / "store"
    recipe = case.recipe or Recipe(clip_norm=case.clip_norm)
    looks: Counter[str] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    num_dirty = num_buffers = 0
    problems: list[BaseException] = []

    def look(where: str, op: Op | None) -> None:
        nonlocal num_dirty, num_buffers
        key = f"{where.split()[0]} {op.kind.name}" if op else where
        if "weight_lo" in key or "exp_avg_sq" in key:
            return  # as the other half
        looks[key] += 1
        if looks[key] not in LOOKS or problems:
            return
        try:
            step = trainer.step_number
            trainer.publish()
            status, table = read(directory), trainer.residency()
            assert step <= status.position.step <= trainer.step_number
            check_document(trainer, world, status, table)
            check_lanes(trainer, status, where, op)
            num_dirty += standstill.check_drive(trainer, world, table)
            num_buffers += standstill.check_buffers(trainer, world, table)
            for stage in status.stages:
                for kind, state in zip(STATE_KINDS, stage, strict=True):
                    seen.update((kind, field) for field in StateBytes.__slots__ if getattr(state, field))
        except BaseException as problem:
            problem.add_note(f"{where}, step {trainer.step_number + 1}")
            problems.append(problem)

    with trainer_on(
        directory, tiny_config("llama", tied=case.tied), steps, case.engine, recipe, kind=world.trainer_kind(),
        wrap=world.engine, status_seconds=NEVER,
    ) as trainer:  # fmt: skip
        standstill.remember_store(trainer, world)
        world.look = look
        for step in steps:
            trainer.step(step)
            if problems:
                raise problems[0]
        trainer.commit()
        with world.lock:
            look("between steps", None)
        world.look = None
        if problems:
            raise problems[0]
    missing = {(kind, field) for kind, field in case.seen if not seen[kind, field]}
    assert not missing, seen
    assert num_buffers
    assert num_dirty
    assert len(looks) > 20


def check_document(trainer: Trainer, world: World, status: RunStatus, table: tuple[Residency, ...]) -> None:
    """Its byte counts, against the table's lines."""
    assert [list(stage) for stage in status.stages] == expected_stages(trainer, world, table)
    host = sum(line.num_bytes for line in table if line.buffer >= 0)
    assert sum(kind.host for stage in status.stages for kind in stage) == host
    assert status.tiers["host"].resident_bytes == host <= status.tiers["host"].peak_bytes
    assert host <= trainer.memory.arena_bytes == sum(dict(trainer.memory.parts()[:7]).values())
    assert status.memory_parts == dict(trainer.memory.parts())
    scratch = sum(line.num_bytes for line in table if line.buffer < 0) + sum(world.stashed.values())
    stored = sum(12 * layout.padded_elements + layout.frozen_bytes for layout in trainer._store.layouts)
    assert status.tiers["nvme"].resident_bytes == stored + scratch
    assert status.state is RunState.RUNNING
    assert status.position.committed_step == trainer.committed_step


def check_lanes(trainer: Trainer, status: RunStatus, where: str, op: Op | None) -> None:
    """What its lanes are said to do, where this look is from within one."""
    if op is None:
        if " of " in where and status.lanes["commit"].current is None:  # what is kept is written by the commit lane
            assert status.lanes["io"].in_flight >= 1
            assert status.lanes["io"].current is not None
        return
    lane = status.lanes[op.lane.value] if op.lane is not Lane.NONE else None
    if lane is None or op.lane is Lane.IO:
        return
    assert lane.in_flight == 1
    assert lane.current is not None
    assert lane.current.startswith(f"{op.kind.name.lower()}({status.stage_names[op.stage]}" if op.stage >= 0 else "")
    phases = {Kind.FORWARD: "forward", Kind.LOSS: "loss", Kind.BACKWARD: "backward"}
    if op.kind in phases:
        position = status.position
        assert position.phase == phases[op.kind]
        assert position.stage == status.stage_names[op.stage]
        assert position.micro_batch == op.micro_batch
        assert position.current_step is not None
        assert position.current_step >= trainer.step_number


# ---------------------------------------------------------------------- beside a run


def test_readers_find_a_whole_document_at_any_moment(tmp_path: Path) -> None:
    """Published as fast as can be, also from a second thread, while two others read."""
    directory, steps = tmp_path / "store", make_steps(3, 2)
    stop = threading.Event()
    seen: list[list[RunStatus]] = [[], []]

    def keep_reading(found: list[RunStatus]) -> None:
        while not stop.is_set():
            status = read_status(directory)
            assert isinstance(status, RunStatus), status
            found.append(status)

    def keep_publishing(trainer: Trainer) -> None:
        while not stop.is_set():
            trainer.publish()

    with trainer_on(directory, tiny_config("llama"), steps, Engine(), status_seconds=1e-3) as trainer:
        trainer.publish()
        threads = [threading.Thread(target=keep_reading, args=(found,)) for found in seen]
        threads.append(threading.Thread(target=keep_publishing, args=(trainer,)))
        for thread in threads:
            thread.start()
        try:
            for step in steps:
                trainer.step(step)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    for found in seen:
        assert [status.sequence for status in found] == sorted(status.sequence for status in found)
        assert found[-1].sequence > found[0].sequence


def test_results_have_the_same_bits_while_published_every_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "MOST_SHARE", 100.0)  # as often as asked for, whatever it takes
    steps = make_steps(3, 2)
    engine = Engine(delay=0.5, budget_factor=1.2)
    quiet = train(tmp_path / "quiet", tiny_config("llama"), steps, Recipe(), engine, status_seconds=NEVER)
    told = train(tmp_path / "told", tiny_config("llama"), steps, Recipe(), engine, status_seconds=1e-3)
    assert_identical(told, quiet)
    assert not (tmp_path / "quiet" / STATUS_NAME).exists()
    assert read(tmp_path / "told").sequence > 10


def test_a_closed_trainer_has_ended_with_nothing_in_memory(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(2, 2)
    with trainer_on(directory, tiny_config("llama"), steps, Engine(residency=1.0, budget_factor=60.0)) as trainer:
        for step in steps:
            last = trainer.step(step)
        trainer.publish()
        at_work = read(directory)
        trainer.commit()
    assert at_work.state is RunState.RUNNING
    assert at_work.host_bytes > 0
    assert at_work.io.read_bytes_per_second > 0.0
    assert at_work.lanes["compute"].busy_share is not None
    assert 0.0 < at_work.lanes["compute"].busy_share <= 1.0
    assert at_work.speed.seconds_per_step is not None  # of the second step
    assert at_work.speed.eta_seconds == pytest.approx(at_work.speed.seconds_per_step * 998)
    ended = read(directory)
    assert ended.state is RunState.ENDED
    assert ended.error is None
    assert ended.position.step == ended.position.committed_step == 2
    assert (ended.position.phase, ended.position.current_step) == (None, None)
    assert ended.tiers["host"].resident_bytes == ended.host_bytes == 0
    assert ended.tiers["host"].peak_bytes == at_work.tiers["host"].peak_bytes > 0
    assert all(kind == StateBytes(nvme=kind.nvme) for stage in ended.stages for kind in stage)
    assert all(lane.current is None and lane.in_flight == 0 for lane in ended.lanes.values())
    assert ended.last_step == json.loads(json.dumps(last.to_json()))
    assert ended.sequence > at_work.sequence
    assert (ended.pid, ended.interval_seconds) == (os.getpid(), 1.0)


def test_a_run_that_tells_only_when_asked_says_at_the_end_that_it_has_ended(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(1, 1)
    for is_asked in (True, False):  # the second time, what the first one told must go
        with trainer_on(directory, tiny_config("llama"), steps, Engine(), status_seconds=NEVER) as trainer:
            if is_asked:
                trainer.publish()
                assert read(directory).state is RunState.RUNNING
        assert (directory / STATUS_NAME).exists() == is_asked
        assert not is_asked or read(directory).state is RunState.ENDED


def test_a_forked_child_that_ends_does_not_speak_for_the_run(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(1, 1)
    with trainer_on(directory, tiny_config("llama"), steps, Engine()) as trainer:
        trainer.publish()
        wear = (directory / WEAR_NAME).read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, as there are threads
            child = os.fork()
        if not child:
            code = 1
            try:
                trainer.publish()
                trainer.close()
                trainer._store.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0) == (child, 0)
        told = read(directory)
        assert (told.state, told.pid) == (RunState.RUNNING, os.getpid())
        assert (directory / WEAR_NAME).read_bytes() == wear
        trainer.step(steps[0])
    assert read(directory).position.step == 1


def test_a_delayed_update_at_the_end_of_a_step_is_told_of(tmp_path: Path) -> None:
    """Between two calls: nothing computes, and the gradients that wait are on NVMe."""
    directory, steps = tmp_path / "store", make_steps(1, 2)
    engine = Engine(delay=1.0, budget_factor=1.0)
    with trainer_on(directory, tiny_config("llama"), steps, engine, status_seconds=NEVER) as trainer:
        trainer.step(steps[0])
        trainer._executor.drain()
        trainer.publish()
        status = read(directory)
        assert (status.position.phase, status.position.current_step) == (None, None)
        gradients = [stage[STATE_KINDS.index("gradients")] for stage in status.stages]
        assert all(gradient.nvme > 0 for gradient in gradients)
        trainer.wait()
        trainer.publish()
        assert all(stage[STATE_KINDS.index("gradients")].nvme == 0 for stage in read(directory).stages)


def test_updates_that_are_finished_on_their_own_are_told_with_their_step(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(1, 2)
    seen: set[tuple[str | None, int | None, int]] = set()

    class Watching(Runtime):
        def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
            if op.kind is Kind.UPDATE:
                trainer.publish()
                position = read(directory).position
                seen.add((position.phase, position.current_step, position.step))
            return super().run(op, step, after)

    class WatchingTrainer(Trainer):
        runtime_kind = Watching

    with trainer_on(
        directory, tiny_config("llama"), steps, Engine(delay=1.0), kind=WatchingTrainer, status_seconds=NEVER
    ) as trainer:
        trainer.step(steps[0])
        assert not seen  # all of them are delayed
        trainer.wait()
    assert seen == {("updates", 1, 1)}


def test_the_thread_publishes_draws_and_makes_metrics_durable_by_itself(tmp_path: Path) -> None:
    """Without a trainer: three documents, one of them asked for, then the metrics are made durable."""
    (tmp_path / "scratch").mkdir()
    asked = threading.Semaphore(0)
    synced = threading.Event()
    whereabouts = Whereabouts([], [], {})
    recorder = Recorder(Manager())

    def status() -> RunStatus:
        asked.release()
        return RunStatus(store_id="id")

    class Noting(MetricsLog):
        def sync(self) -> None:
            super().sync()
            synced.set()

    def publisher(interval_seconds: float) -> Publisher:
        return Publisher(
            tmp_path,
            interval_seconds=interval_seconds,
            status=status,
            timeline=lambda: recorder.last,
            whereabouts=whereabouts,
            metrics=Noting(tmp_path / "m"),
        )

    rare = publisher(3600.0)
    rare.publish_soon()
    assert asked.acquire(timeout=60)
    rare.close()
    rare.close()
    assert asked.acquire(timeout=60)  # the last one
    assert not (tmp_path / TIMELINE_NAME).exists()  # there was no step
    synced.clear()
    recorder.begin()
    recorder.end(7, 0.0, 1.0, [], [])
    often = publisher(1e-3)
    assert synced.wait(timeout=60)
    assert all(asked.acquire(timeout=60) for _ in range(3))
    assert json.loads((tmp_path / TIMELINE_NAME).read_bytes())["step"] == 7  # drawn before the first sync
    often.close()
    silent = publisher(NEVER)
    assert not (tmp_path / STATUS_NAME).exists()  # else it would be taken for this run's
    silent.publish_soon()
    silent.close()
    assert not (tmp_path / STATUS_NAME).exists()


def test_an_evaluation_is_told_as_one(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(1, 2)
    phases: set[tuple[str | None, int | None]] = set()

    class Watching(Runtime):
        def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
            if op.kind in (Kind.FORWARD, Kind.EVALUATE):
                trainer.publish()
                position = read(directory).position
                phases.add((position.phase, position.current_step))
            return super().run(op, step, after)

    class WatchingTrainer(Trainer):
        runtime_kind = Watching

    with trainer_on(
        directory, tiny_config("llama"), steps, Engine(), kind=WatchingTrainer, status_seconds=NEVER
    ) as trainer:
        trainer.evaluate(steps[0])
        assert phases == {("evaluate", None)}
        phases.clear()
        trainer.step(steps[0])
        assert phases == {("forward", 1)}


class FailingRuntime(Runtime):
    """One op fails; an op of the compute lane by default."""

    kind = Kind.BACKWARD
    error: Exception = RuntimeError("no such\nluck")

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        if op.kind is self.kind and op.stage == 2:
            raise self.error
        return super().run(op, step, after)


class FailingTrainer(Trainer):
    runtime_kind = FailingRuntime


class UpdateFails(FailingRuntime):
    kind = Kind.UPDATE
    error = HoistError("the drive is gone: put it back")


class UpdateFailsTrainer(Trainer):
    runtime_kind = UpdateFails


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (FailingTrainer, "RuntimeError: no such luck (while executing backward(layer.1, micro-batch"),
        (UpdateFailsTrainer, "the drive is gone: put it back (while executing update(layer.1, piece"),
    ],
)
def test_a_failing_op_fails_the_run_and_names_the_error(kind: type[Trainer], told: str, tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(1, 2)
    with trainer_on(directory, tiny_config("llama"), steps, Engine(), kind=kind) as trainer:
        with pytest.raises((RuntimeError, HoistError)):  # an update may fail after its step
            trainer.step(steps[0])
            trainer.wait()
        trainer.publish()
        failed = read(directory)
        assert failed.position.phase is None
    for status in (failed, read(directory)):
        assert status.state is RunState.FAILED
        assert status.error is not None
        assert status.error.startswith(told)
    assert read(directory).tiers["host"].resident_bytes == 0


def test_an_error_of_the_caller_between_two_steps_fails_the_run_too(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(1, 2)
    with (
        pytest.raises(ZeroDivisionError),
        trainer_on(directory, tiny_config("llama"), steps, Engine()) as trainer,
    ):
        trainer.step(steps[0])
        raise ZeroDivisionError
    assert (read(directory).state, read(directory).error) == (RunState.FAILED, "ZeroDivisionError")


def test_a_refused_step_fails_nothing(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(1, 2)
    with trainer_on(directory, tiny_config("llama"), steps, Engine()) as trainer:
        with pytest.raises(ConfigError):
            trainer.step([])
        trainer.step(steps[0])
        trainer.publish()
        assert read(directory).state is RunState.RUNNING
    assert read(directory).state is RunState.ENDED


def test_what_others_add_is_told_as_it_is(tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(1, 1)
    counts = iter(range(100))

    class Told(Trainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments, prediction={"seconds": 2.5}, wear=lambda: {"written_bytes": next(counts)})

    with trainer_on(directory, tiny_config("llama"), steps, Engine(), kind=Told, status_seconds=NEVER) as trainer:
        for count in range(2):
            trainer.publish()
            status = read(directory)
            assert status.prediction == {"seconds": 2.5}
            assert status.wear == {"written_bytes": count}


# ---------------------------------------------------------------------- files that cannot be used


def test_a_document_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory is in its place: not even root may rename a file over it."""
    directory, steps = tmp_path / "store", make_steps(2, 2)
    with trainer_on(directory, tiny_config("llama"), steps, Engine(), status_seconds=NEVER) as trainer:
        (directory / STATUS_NAME).mkdir()
        (directory / STATUS_NAME / "full").touch()
        with caplog.at_level(logging.WARNING):
            for step in steps:
                trainer.step(step)
                trainer.publish()
        assert [record.name for record in caplog.records] == [Publisher.__module__]
        assert "status.json: cannot be written: " in caplog.text
        assert "the run goes on" in caplog.text
        shutil.rmtree(directory / STATUS_NAME)
        trainer.publish()
        assert read(directory).position.step == 2
        assert [path.name for path in (directory / "scratch").iterdir() if path.suffix == ".json"] == []


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A store with a document of its own."""
    directory, steps = tmp_path / "store", make_steps(1, 1)
    with trainer_on(directory, tiny_config("llama"), steps, Engine()):
        pass
    return directory


@pytest.mark.parametrize(
    ("data", "why", "detail"),
    [
        (None, Why.MISSING, "No such file"),
        (b"", Why.TORN, "not JSON"),
        (b'{"format_version":1,"store_id":"', Why.TORN, "not JSON"),
        (b"\xff\xfe{}", Why.TORN, "not JSON"),
        (b"[" * 100_000, Why.TORN, "not JSON"),
        (b"[1]", Why.TORN, "expected a JSON object, saw list"),
        (b"{}", Why.VERSION, "saw None, this hoist reads 1"),
        (b'{"format_version":2}', Why.VERSION, "saw 2, this hoist reads 1"),
        (b'{"format_version":1,"pid":"x"}', Why.TORN, "pid: expected int"),
        (b'{"format_version":1,"stages":7}', Why.TORN, "stages: "),
        (b'{"format_version":1,"stages":[[[1e999,0,0,0,0,0,0]]]}', Why.TORN, "stages: |infinity"),
        (b'{"format_version":1,"store_id":"another"}', Why.OTHER_STORE, "is of the store 'another', this one is"),
    ],
)
def test_a_reader_is_told_why_there_is_no_document(
    data: bytes | None, why: Why, detail: str, told: Path
) -> None:
    path = told / STATUS_NAME
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    found = read_status(told)
    assert isinstance(found, Unusable)
    assert found.why is why
    assert any(part in found.detail for part in detail.split("|"))
    assert str(path) in found.detail


def test_a_reader_that_knows_the_store_need_not_look_it_up(told: Path) -> None:
    status = read(told)
    (told / "COMMIT.json").unlink()
    assert read_status(told) == status  # whoever opens the store says what is wrong with it
    assert read_status(told, store_id=status.store_id) == status
    assert isinstance(read_status(told, store_id="x"), Unusable)
