"""The choice of a delay: lanes are balanced between forward and backward, and nothing is delayed for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hoist.scheduler.delay import SHARES, StepTimes, choose, measure
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.spans import Span, busy_seconds
from tests.support.models import tiny_config
from tests.support.training import Engine, make_steps, torch_threads, trainer_on

FREE = dict.fromkeys(SHARES, 0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def times(**seconds: float) -> StepTimes:
    zero = dict.fromkeys(
        ("forward_seconds", "backward_seconds", "forward_io_seconds", "backward_io_seconds", "states_io_seconds",
         "updates_seconds"),
        0.0,
    )  # fmt: skip
    return StepTimes(**{**zero, "bytes_per_second": 1e9, **seconds})


def test_hidden_updates_are_not_delayed() -> None:
    hidden = times(forward_seconds=1.0, backward_seconds=2.0, states_io_seconds=1.5, updates_seconds=0.5)
    assert choose(hidden, FREE) == 0.0


def test_what_does_not_fit_the_backward_goes_into_the_forward() -> None:
    """3 s of I/O beside 2 s: a third more fits the forward's idle second."""
    crowded = times(forward_seconds=1.0, backward_seconds=2.0, states_io_seconds=2.6)
    assert choose(crowded, FREE) == 0.25
    assert crowded.estimate(0.0, 0) == pytest.approx(3.6)
    assert crowded.estimate(0.25, 0) == pytest.approx(3.0)


def test_a_drive_that_is_always_busy_gains_nothing() -> None:
    """All of its work has to be done, whenever: delaying only takes memory."""
    busy = times(forward_seconds=0.1, backward_seconds=0.2, forward_io_seconds=1.0, states_io_seconds=3.0)
    assert choose(busy, FREE) == 0.0


def test_the_optim_lane_counts_like_the_drive() -> None:
    slow = times(forward_seconds=1.0, backward_seconds=1.0, updates_seconds=2.0)
    assert choose(slow, FREE) == 0.5


def test_gradients_that_must_go_to_scratch_count_against_it() -> None:
    crowded = times(forward_seconds=1.0, backward_seconds=2.0, states_io_seconds=2.6)
    assert choose(crowded, {share: 4 * 10**9 if share else 0 for share in SHARES}) == 0.0


def test_only_what_the_budget_allows_is_chosen() -> None:
    crowded = times(forward_seconds=1.0, backward_seconds=2.0, states_io_seconds=2.6)
    assert choose(crowded, {0.0: 0}) == 0.0
    with pytest.raises(ValueError, match="no share is allowed"):
        choose(crowded, {})


def op(kind: Kind) -> Op:
    return Op(kind, (), ())


def test_times_come_from_spans() -> None:
    """I/O that overlaps counts once, shared out by bytes; spans of other plans do not count."""
    ops = [op(kind) for kind in (Kind.READ_WEIGHTS, Kind.FORWARD, Kind.LOSS, Kind.BACKWARD, Kind.READ_STATES,
                                 Kind.UPDATE, Kind.WRITE_STATES)]  # fmt: skip
    starts = ((0.0, 2.0), (0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (1.0, 3.0), (3.0, 3.5), (4.0, 5.0))
    spans = [Span(each, *when) for each, when in zip(ops, starts, strict=True)]
    spans.append(Span(op(Kind.UPDATE), 0.0, 100.0))
    sizes = {Kind.READ_WEIGHTS: 100, Kind.READ_STATES: 200, Kind.WRITE_STATES: 100}
    measured = measure(ops, spans, lambda each: sizes[each.kind])
    assert measured == times(
        forward_seconds=1.0, backward_seconds=3.0, forward_io_seconds=1.0, states_io_seconds=3.0, updates_seconds=0.5,
        bytes_per_second=100.0,
    )
    assert busy_seconds([]) == 0.0


def test_a_trainer_measures_its_steps(tmp_path: Path) -> None:
    """All I/O of a steady step is accounted for; before one there is nothing to measure, nor with a delay."""
    steps = make_steps(3, 2)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, Engine(budget_factor=1.0)) as trainer:
        trainer.step(steps[0])
        with pytest.raises(ConfigError, match="after the first"):
            trainer.step_times()
        trainer.step(steps[1])
        trainer.wait()
        before = trainer.statistics().nvme
        trainer.step(steps[2])
        trainer.wait()
        after = trainer.statistics().nvme
        found = trainer.step_times()
        ops = trainer._plan(2).plan.ops
        moved = after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes
        io_kinds = [each for each in ops if each.lane.value == "io"]
        assert sum(trainer._op_bytes.num_bytes(each) for each in io_kinds) == moved
    assert min(found.forward_seconds, found.backward_seconds) > 0
    assert min(found.states_io_seconds, found.forward_io_seconds, found.updates_seconds) > 0
