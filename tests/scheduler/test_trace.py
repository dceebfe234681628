"""The trace of real training: every op once, tracks that nest, arrows along dependencies, true counters; no effect."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hoist.scheduler.annotate import OpNames
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.executor import Executor
from hoist.scheduler.link import LinkedPlan, join
from hoist.scheduler.ops import Kind, Lane
from hoist.scheduler.spans import Span
from hoist.scheduler.trace import Trace
from hoist.scheduler.trace_file import base_nanoseconds
from hoist.scheduler.traced import Traced
from hoist.scheduler.trainer import Trainer
from hoist.tiers.layout import Piece
from tests.scheduler.test_executor import plan_of
from tests.scheduler.test_executor_device import DEVICE, Device
from tests.support.models import tiny_config
from tests.support.processes import run_in_process
from tests.support.traces import ReadTrace, Slice, read_trace
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical_states,
    make_steps,
    read_states,
    torch_threads,
    trainer_on,
)

#: An op's name and step.
Key = tuple[str, int]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


class Noting(Trainer):
    """Remembers what was executed."""

    def __init__(self, **arguments: Any) -> None:
        self.executed: list[tuple[LinkedPlan, int]] = []
        super().__init__(**arguments)

    def _execute(self, linked: LinkedPlan, step: int) -> list[Span]:
        self.executed.append((linked, step))
        return super()._execute(linked, step)

    def keys(self) -> list[list[Key]]:
        """Per execution, name and step of each op."""
        names = OpNames([layout.name for layout in self._store.layouts], self._runtime.pieces)
        return [[(names(op), step - op.delayed) for op in linked.plan.ops] for linked, step in self.executed]


def run(directory: Path, engine: Engine, recipe: Recipe, trace: Path | None) -> tuple[Noting, Outcome]:
    """Three steps, an evaluation and a commit."""
    *steps, held_out = make_steps(4, 2)
    opened = None if trace is None else Trace(trace)
    with trainer_on(
        directory, tiny_config("llama", tied=True), steps, engine, recipe, kind=Noting, trace=opened
    ) as trainer:
        assert isinstance(trainer, Noting)
        losses = [trainer.step(step).loss for step in steps]
        losses.append(trainer.evaluate(held_out).loss)
        trainer.commit()
        states = read_states(trainer._store, trainer._engine)
        if opened is not None:
            opened.close()
            last = {name.removesuffix(" bytes"): values[-1][1] for name, values in read_trace(trace).counters.items()}  # type: ignore[arg-type]  # not None here
            for tier, num_bytes in trainer._manager.statistics().resident_bytes.items():
                assert last[tier] == num_bytes
            peaks = trainer._manager.statistics().peak_bytes
    if trace is not None:
        for tier, values in read_trace(trace).counters.items():
            if tier.removesuffix(" bytes") in peaks:
                assert max(value for _, value in values) <= peaks[tier.removesuffix(" bytes")]
    return trainer, Outcome(losses=losses, initial={}, states=states)


@pytest.mark.parametrize(
    ("engine", "clip_norm"),
    [
        pytest.param(Engine(), 0.0, marks=pytest.mark.slow),
        (Engine(plan="horizontal", delay=0.5), 0.0),
        (Engine(clip_mode="speculative", budget_factor=2.0, residency=0.5, commit_every=1), 0.05),
    ],
)
def test_a_trace_is_whole_and_changes_nothing(engine: Engine, clip_norm: float, tmp_path: Path) -> None:
    recipe = Recipe(clip_norm=clip_norm)
    trainer, traced = run(tmp_path / "a", engine, recipe, tmp_path / "trace.json")
    _, plain = run(tmp_path / "b", engine, recipe, None)
    assert traced.losses == plain.losses
    assert_identical_states(traced.states, plain.states)
    found = read_trace(tmp_path / "trace.json")
    assert found.is_whole
    keys = trainer.keys()
    assert Counter(each.key for each in found.ops) == Counter(key for of_plan in keys for key in of_plan)
    check_tracks(found)
    check_arrows(found, trainer, keys)
    check_io_counters(found)
    expected = [f"step {step}" for step in (1, 2, 3)]
    names = [each.name for each in found.other()]
    assert [name for name in names if name.startswith("step ")] == expected
    assert "evaluation after step 3" in names and "finish updates and commit step 3" in names
    commits = [name for name in names if name.startswith("commit of step ")]
    assert commits == [f"commit of step {step}" for step in ((1, 2, 3) if engine.commit_every == 1 else (2, 3))]


def check_tracks(found: ReadTrace) -> None:
    """A thread's track has one lane's ops; those of lanes without a thread are on numbered ones."""
    for lane in Lane:
        names = {found.tracks[each.track] for each in found.ops if each.category == lane.value}
        if lane is Lane.IO:
            assert names == {f"i/o {number}" for number in range(1, len(names) + 1)} and len(names) > 1
        elif lane is Lane.NONE:
            assert names and all(name.startswith("bookkeeping ") for name in names)
        else:
            assert names == {lane.value}
    moved = [each for each in found.ops if each.category == "io" and not each.name.endswith(" again")]
    assert moved and all(each.args["bytes"] > 0 for each in moved)


def check_arrows(found: ReadTrace, trainer: Noting, keys: Sequence[Sequence[Key]]) -> None:
    """Every op that waits for others has an arrow from the last of them to end."""
    waits: dict[Key, set[Key]] = {}
    num_waiting = 0
    for number, (linked, _) in enumerate(trainer.executed):
        own = keys[number]
        waiting: set[int] = set()
        for earlier, dependents in enumerate(linked.dependents):
            for later in dependents:
                waits.setdefault(own[later], set()).add(own[earlier])
                waiting.add(later)
        if number:
            for earlier, later in join(trainer.executed[number - 1][0], linked):
                waits.setdefault(own[later], set()).add(keys[number - 1][earlier])
                waiting.add(later)
        num_waiting += len(waiting)
    assert len(found.flows) == num_waiting > 100
    count = Counter(each.key for each in found.ops)
    unique = {each.key: each for each in found.ops if count[each.key] == 1}
    by_track: dict[int, list[Slice]] = {}
    for each in found.ops:
        by_track.setdefault(each.track, []).append(each)
    num_checked = 0
    for (tail_track, tail_time), (head_track, head_time) in found.flows:
        assert tail_time < head_time
        [tail] = [each for each in by_track[tail_track] if each.start <= tail_time < each.stop]
        [head] = [each for each in by_track[head_track] if each.start == head_time]
        assert tail.stop <= head.start
        assert tail.key in waits[head.key]
        if head.key in unique and all(key in unique for key in waits[head.key]):
            assert tail.stop == max(unique[key].stop for key in waits[head.key])
            num_checked += 1
    assert num_checked > 50


def check_io_counters(found: ReadTrace) -> None:
    """The counters of I/O in flight say how many i/o slices there are at each time."""
    changes = [(each.start, 1) for each in found.ops if each.category == "io"]
    changes += [(each.stop, -1) for each in found.ops if each.category == "io"]
    in_flight, expected = 0, []
    for at, change in sorted(changes):
        in_flight += change
        expected.append((at, in_flight))
    assert sorted(found.counters["i/o ops in flight"]) == expected
    assert found.counters["i/o bytes in flight"][-1][1] == 0


# --- files ------------------------------------------------------------------------------------------------------------


def _be_killed(directory: Path, path: Path) -> None:
    steps = make_steps(3, 2)
    trace = Trace(path)
    with trainer_on(directory, tiny_config("llama"), steps, Engine(), trace=trace) as trainer:
        trainer.step(steps[0])
        trainer.step(steps[1])
        trainer.wait()
        trace.flush()
        trainer.step(steps[2])
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("name", [pytest.param("trace.json", marks=pytest.mark.slow), "trace.json.gz"])
def test_a_killed_run_leaves_a_trace(name: str, tmp_path: Path) -> None:
    code, _ = run_in_process(_be_killed, tmp_path / "store", tmp_path / name)
    assert code == -signal.SIGKILL
    found = read_trace(tmp_path / name)
    assert not found.is_whole
    assert {each.name for each in found.other()} >= {"step 1", "step 2", "finish updates"}
    assert ("backward layer.0 mb 1", 2) in {each.key for each in found.ops}


def test_a_full_drive_ends_the_trace_and_not_the_run(tmp_path: Path) -> None:
    steps = make_steps(2, 1)
    told: list[str] = []
    with (
        Trace("/dev/full", notice=told.append) as trace,
        trainer_on(tmp_path / "store", tiny_config("llama"), steps, Engine(), trace=trace) as trainer,
    ):
        for step in steps:
            trainer.step(step)
        trainer.commit()
        assert trainer.committed_step == 2
    assert told == ["the trace /dev/full ends here, it cannot be written: No space left on device"]


def test_an_op_that_fails_is_in_the_trace(tmp_path: Path) -> None:
    steps = make_steps(1, 1)
    path = tmp_path / "trace.json"
    with Trace(path) as trace, trainer_on(
        tmp_path / "store", tiny_config("llama"), steps, Engine(), trace=trace
    ) as trainer:
        trainer._runtime._model.model.get_submodule("lm_head").register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            trainer.step(steps[0])
    assert [each.name for each in read_trace(path).ops if each.args.get("error") == "ZeroDivisionError"] == [
        "loss head mb 0"
    ]


def test_ops_in_streams_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    """They last until their marks are reached, also where those are seen late; what ends at once is on its lane's."""
    linked = plan_of(
        (Kind.MERGE, "", "w"),
        (Kind.FORWARD, "w", "a"),
        (Kind.UNBIND, "a", "u"),
        (Kind.BACKWARD, "u", "g"),
        (Kind.UPDATE, "g", "s"),
        (Kind.BACKWARD, "", "x"),
    )
    names = OpNames(["a"], [[Piece(index=number, chunk=0, start=0, stop=4096) for number in range(6)]])
    device, path = Device(), tmp_path / "trace.json"
    with Trace(path) as trace:
        traced = Traced(trace, device, names=names, io_bytes=lambda op: 0, held=lambda: (0, 0, 0))
        executor = Executor(traced, device_kinds=DEVICE, ended=traced.ended)
        traced.begin(linked, 1)
        executor.run(linked, 1)
        issued = [mark for _, mark in sorted(device.marks.items())]
        for mark in reversed(issued[:-1]):
            mark.reach()
        device.wait_begun(1, 4)
        issued[-1].reach(MemoryError("no room"))
        with pytest.raises(MemoryError):
            executor.drain()
        executor.close()
    found = read_trace(path)
    names_of = {each.name: found.tracks[each.track] for each in found.ops}
    assert names_of == {
        "merge a chunk 0 piece 0": "up stream",
        "forward a chunk 0 piece 1": "compute stream",
        "unbind a chunk 0 piece 2": "compute",
        "backward a chunk 0 piece 3": "compute stream",
        "update a chunk 0 piece 4": "optim",
        "backward a chunk 0 piece 5": "compute stream",
    }
    assert [each.name for each in found.ops if "error" in each.args] == ["backward a chunk 0 piece 5"]
    assert [(found.tracks[tail], found.tracks[head]) for (tail, _), (head, _) in found.flows] == [
        ("up stream", "compute stream"),  # to the forward; the unbinding has not waited for it
        ("compute", "compute stream"),
        ("compute stream", "optim"),
    ]


def _fail(module: torch.nn.Module, args: object) -> None:
    raise ZeroDivisionError


def test_places_where_no_trace_can_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory; name a file"):
        Trace(tmp_path)
    with pytest.raises(ConfigError, match=r"none is not a directory; make it first"):
        Trace(tmp_path / "none" / "trace.json")


# --- PyTorch's profiler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_threads", [False, True])
def test_torch_profiler_shows_ops_at_the_same_times(all_threads: bool, tmp_path: Path) -> None:
    from torch._C._profiler import _ExperimentalConfig

    steps = make_steps(2, 1)
    path, exported = tmp_path / "trace.json", tmp_path / "torch.json"
    with Trace(path) as trace, trainer_on(
        tmp_path / "store", tiny_config("llama"), steps, Engine(), trace=trace
    ) as trainer:
        trainer.step(steps[0])
        trainer.wait()
        with profile(
            activities=[ProfilerActivity.CPU],
            experimental_config=_ExperimentalConfig(profile_all_threads=True) if all_threads else None,
        ) as profiler:
            trainer.step(steps[1])
            trainer.wait()
    profiler.export_chrome_trace(str(exported))
    document = json.loads(exported.read_text())
    assert document["baseTimeNanoseconds"] == base_nanoseconds(document["baseTimeNanoseconds"] / 1e9 + 1)
    ranges = [event for event in document["traceEvents"] if event.get("cat") == "user_annotation"]
    named = {event["name"]: event for event in ranges}
    own = [each for each in read_trace(path).ops if each.args["step"] == 2]
    lanes = {each.category for each in own if each.name in named}
    assert lanes >= ({"compute", "copy", "optim", "io"} if all_threads else {"compute"})
    if not all_threads:
        assert not lanes & {"copy", "optim"}
    [loss] = [each for each in own if each.name == "loss head mb 0"]
    theirs = named[loss.name]
    # The same clock: a hundredth of a second is far more than it takes to begin a range, and less than any mistake.
    assert abs(theirs["ts"] - loss.start / 1000) < 10_000
    assert theirs["tid"] == loss.track
