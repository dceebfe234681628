"""STORE/timeline.json: every op of the last step and every move, as they were, within bounds.

When it is written is also `test_publish.py`'s part.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hoist.scheduler import timeline as timelines
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.spans import Span
from hoist.scheduler.status import STATE_KINDS
from hoist.scheduler.timeline import Recorder, StepTimeline, encode
from hoist.scheduler.whereabouts import Whereabouts
from hoist.tiers.format import TIMELINE_NAME
from hoist.tiers.layout import TensorSpec, lay_out
from hoist.tiers.manager import Item, ItemKind, Manager, Snapshot, State, Tier
from hoist.tiers.move_log import MOVE_BYTES, MoveLog
from tests.support.models import tiny_config
from tests.support.training import Engine, make_steps, torch_threads, trainer_on


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


ENGINES = {
    "smallest budget": Engine(budget_factor=1.0, resident_weights=False),
    "kept": Engine(residency=0.3, budget_factor=1.6),
    "delayed": Engine(delay=1.0, budget_factor=1.0),
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_last_step_is_told_op_by_op_and_move_by_move(name: str, tmp_path: Path) -> None:
    directory, steps = tmp_path / "store", make_steps(3, 3)
    before = time.time()
    with trainer_on(directory, tiny_config("llama"), steps, ENGINES[name]) as trainer:
        for step in steps:
            metrics = trainer.step(step)
        spans = trainer.last_spans
        after, table = trainer._manager.swap_log()  # updates go on after the step
        whereabouts = trainer._publisher._whereabouts
        last = trainer._recorder.last if trainer._recorder is not None else None
        assert last is not None
        assert after is not None
        trainer.wait()
    document = json.loads((directory / TIMELINE_NAME).read_bytes())
    assert document["format_version"] == 1
    assert document["step"] == 3
    assert before < document["start"] < time.time() - document["seconds"]
    assert document["seconds"] == pytest.approx(metrics.seconds)
    assert document["truncated"] is False
    check_ops(document, spans, last)
    later = replace(last, spans=[], unfinished=[], before=replace(last.before, items=(), stashed={}), moves=after)
    rows = document["residency"] + json.loads(b"".join(encode(later, whereabouts)))["residency"]
    assert where_at_the_end(document, rows) == where_now(whereabouts, table)


def check_ops(document: dict[str, Any], spans: list[Span], last: StepTimeline) -> None:
    """Each span is there, in the words of ops; others are those that were at work when the step returned."""
    told = Counter(
        (document["lanes"][lane], document["kinds"][kind], stage, micro_batch, piece, start, stop)
        for lane, kind, stage, micro_batch, piece, start, stop in document["ops"]
    )
    expected = Counter(
        (
            span.op.lane.value, span.op.kind.name.lower(), span.op.stage, span.op.micro_batch, span.op.piece,
            round(span.start - last.start, 6), round(span.stop - last.start, 6),
        )
        for span in [*spans, *last.unfinished]
        if span.stop > last.start
    )  # fmt: skip
    assert told == expected
    assert {"forward", "loss", "backward"} <= {kind for _, kind, *_ in told}
    assert all(first[5] <= second[5] for first, second in pairwise(document["ops"]))
    assert all(start < stop <= document["seconds"] + 1.0 for *_, start, stop in document["ops"])


def where_at_the_end(document: dict[str, Any], rows: list[Any]) -> dict[tuple[str, int, int], tuple[str, str, int]]:
    """What the rows say in the end, by kind of state, stage and second number; what is at rest is left out."""
    found: dict[tuple[str, int, int], tuple[str, str, int]] = {}
    assert all(0.0 <= first[0] <= second[0] for first, second in pairwise(rows))
    for _, kind, stage, second, state, tier, num_bytes in rows:
        found[STATE_KINDS[kind], stage, second] = (document["states"][state], document["tiers"][tier], num_bytes)
    at_rest = {("weights", "stored"), ("moments", "stored"), ("gradients", "absent"), ("activations", "absent")}
    return {key: value for key, value in found.items() if (key[0], value[0]) not in at_rest}


def where_now(whereabouts: Whereabouts, table: Snapshot) -> dict[tuple[str, int, int], tuple[str, str, int]]:
    """The same of the table."""
    found = {
        (STATE_KINDS[kind], item.first, whereabouts.second_number(item)): (
            state.value, "host" if in_buffer else "nvme", part,
        )
        for item, state, num_bytes, in_buffer in table.items
        for kind, part in whereabouts.split(item, num_bytes)
    }  # fmt: skip
    for (stage, piece), num_bytes in table.stashed.items():
        found["gradients", stage, piece] = ("stored", "nvme", num_bytes)
    return found


# ---------------------------------------------------------------------- bounds


def whereabouts_of(num_stages: int) -> Whereabouts:
    layouts = [
        lay_out(index=index, name=f"s{index}", tensors=[TensorSpec(name=f"w{index}", shape=(8,), trainable=True)])
        for index in range(num_stages)
    ]
    return Whereabouts(
        layouts,
        [layout.pieces(4096) for layout in layouts],
        dict.fromkeys(ItemKind, Tier.HOST),
    )


def recorded(manager: Manager, spans: list[Span]) -> StepTimeline:
    recorder = Recorder(manager)
    recorder.begin()
    for _ in range(3):
        manager.fill(Item(ItemKind.WEIGHTS, 0), 0, 64)
        manager.filled(Item(ItemKind.WEIGHTS, 0))
    recorder.end(1, 0.0, 100.0, spans, [])
    assert recorder.last is not None
    return recorder.last


def test_beyond_its_bounds_a_timeline_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [Span(Op(Kind.FORWARD, (), ()), float(at), at + 1.0) for at in range(5)]
    last = recorded(Manager(), spans)
    whole = json.loads(b"".join(encode(last, whereabouts_of(1))))
    assert (len(whole["ops"]), whole["truncated"]) == (5, False)
    monkeypatch.setattr(timelines, "MAX_OPS", 3)
    cut = json.loads(b"".join(encode(last, whereabouts_of(1))))
    assert cut["ops"] == whole["ops"][:3]
    assert cut["truncated"] is True


def test_a_full_log_of_moves_takes_no_more_and_says_so() -> None:
    log = MoveLog(max_moves=4)
    for at in range(4):
        log.note(float(at), 1, 2, 3, 4, True, 5)
    assert not log.truncated
    log.note(4.0, 1, 2, 3, 4, True, 5)
    assert (len(log), log.truncated) == (4, True)
    columns = (log.times, log.num_bytes, log.first, log.second, log.kinds, log.states, log.in_buffer)
    assert sum(column.itemsize for column in columns) == MOVE_BYTES
    assert {len(column) for column in columns} == {4}


def test_a_document_of_many_rows_is_made_in_parts() -> None:
    spans = [Span(Op(Kind.FORWARD, (), (), stage=0), at / 100, at / 100 + 1.0) for at in range(5000)]
    parts = list(encode(recorded(Manager(), spans), whereabouts_of(1)))
    assert max(map(len, parts)) < 100_000
    assert len(json.loads(b"".join(parts))["ops"]) == 5000


def test_ops_of_the_step_before_are_told_as_far_as_they_ran_in_this_one() -> None:
    spans = [Span(Op(Kind.UPDATE, (), ()), -2.0, -1.0), Span(Op(Kind.UPDATE, (), ()), -1.0, 1.0)]
    document = json.loads(b"".join(encode(recorded(Manager(), spans), whereabouts_of(1))))
    assert [row[5:] for row in document["ops"]] == [[-1.0, 1.0]]


def test_a_manager_logs_moves_only_once_it_is_asked() -> None:
    manager = Manager(validate=True)
    item = Item(ItemKind.ACTIVATION, 1, 2)
    manager.create(item, 0, 10)
    log, _ = manager.swap_log()
    assert log is None
    manager.write(item)
    manager.written(item, 10)
    manager.stash(0, 3, 16)
    log, table = manager.swap_log()
    assert log is not None
    states = list(State)
    assert [states[index] for index in log.states] == [State.WRITING, State.CLEAN, State.STORED]
    assert list(zip(log.first, log.second, log.num_bytes, log.in_buffer, strict=True)) == [
        (1, 2, 10, 1), (1, 2, 10, 1), (0, 1 + 3, 16, 0),
    ]  # fmt: skip
    assert table.stashed == {(0, 3): 16}
    assert table.items == ((item, State.CLEAN, 10, True),)
    assert table.resident_bytes[Tier.NVME] == 16
    manager.unstash(0, 3)
    assert manager.snapshot().resident_bytes[Tier.NVME] == 0
