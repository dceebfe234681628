"""Thinning keeps extremes, bars cover what ran, and residency is what the moves say: compared with plain counting."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.scheduler.ops import Kind
from hoist.tools.run_report.reduce import (
    OP_GROUPS,
    OTHER_GROUP,
    Level,
    binned,
    group_of,
    kept_indices,
    kept_rows,
    level_of,
    merged_bars,
    shares,
    stage_groups,
    stretches,
    union_seconds,
)
from hoist.tools.run_report.timeline import Moment, TimedOp, Timeline

VALUES = st.lists(st.none() | st.integers(-100, 100), max_size=300)


@given(VALUES, st.integers(2, 60))
def test_thinning_keeps_ends_and_extremes(values: list[int | None], most: int) -> None:
    kept = kept_indices(values, most=most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most + 3, len(values) if len(values) <= most else 0)
    if not values:
        return
    assert {0, len(values) - 1} <= set(kept)
    known = [value for value in values if value is not None]
    if known:
        shown = [value for index in kept if (value := values[index]) is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))


@given(st.lists(VALUES, min_size=1, max_size=3), st.integers(1, 50))
def test_tables_keep_extremes_of_every_column(columns: list[list[int | None]], most: int) -> None:
    count = min(map(len, columns))
    columns = [column[:count] for column in columns]
    kept = kept_rows(columns, most=most)
    assert len(kept) <= most + 1 + 2 * len(columns) or len(kept) == count
    for column in columns:
        known = [value for value in column if value is not None]
        if known:
            shown = [column[index] for index in kept if column[index] is not None]
            assert {min(known), max(known)} <= set(shown)


def test_every_kind_of_op_has_a_colour() -> None:
    """Those that do something; the others join dependencies and take no time."""
    idle = {Kind.ACQUIRE, Kind.OPEN_CHUNK}
    assert {kind.name.lower() for kind in Kind if kind not in idle} == {
        kind for kinds in OP_GROUPS.values() for kind in kinds
    }
    assert group_of("a kind of another version") == OTHER_GROUP


OPS = st.lists(
    st.builds(
        lambda lane, kind, start, seconds: TimedOp(lane, kind, 0, -1, -1, start / 100, (start + seconds) / 100),
        st.sampled_from(["io", "compute"]), st.sampled_from(["read_states", "write_states", "forward", "loss"]),
        st.integers(-40, 140), st.integers(0, 30),
    ),
    max_size=40,
)  # fmt: skip


def timeline(ops: list[TimedOp]) -> Timeline:
    return Timeline(
        step=1, start=0.0, seconds=1.0, lanes=("io", "compute"), stage_names=("embed",),
        ops=tuple(sorted(ops, key=lambda op: op.start)), moments=(), truncated=False,
    )  # fmt: skip


@settings(max_examples=50)
@given(OPS)
def test_bars_cover_what_ran_within_the_step_and_little_more(ops: list[TimedOp]) -> None:
    pixel = 0.05
    bars = merged_bars(timeline(ops), pixel_share=pixel)
    within = [op for op in ops if op.stop >= 0 and op.start <= 1]
    assert sum(bar.num_ops for bar in bars) == len(within)
    for bar in bars:
        assert -1e-12 <= bar.start < bar.stop <= 1 + 1e-12
        assert bar.stop - bar.start >= pixel - 1e-12
    for op in within:
        start, stop = max(0.0, op.start), min(1.0, op.stop)
        assert any(
            bar.group == group_of(op.kind) and bar.start - 1e-12 <= start and stop <= bar.stop + 1e-12 for bar in bars
        )
    drawn = union_seconds(((bar.start, bar.stop) for bar in bars), stop=1.0)
    ran = union_seconds(((op.start, op.stop) for op in within), stop=1.0)
    assert ran - 1e-9 <= drawn <= ran + 2 * pixel * len(bars) + pixel * len(within)


@given(st.lists(st.tuples(st.integers(-20, 120), st.integers(0, 40)), max_size=20))
def test_union_counts_each_hundredth_once(spans: list[tuple[int, int]]) -> None:
    covered = {at for start, length in spans for at in range(max(0, start), min(100, start + length))}
    found = union_seconds(((start / 100, (start + length) / 100) for start, length in spans), stop=1.0)
    assert found == pytest.approx(len(covered) / 100, abs=1e-9)


STATES = ("stored", "absent", "filling", "clean", "bound", "dirty", "writing")
MOMENTS = st.lists(
    st.builds(
        lambda at, kind, stage, second, state, tier: Moment(
            at / 50, kind, stage, second, state, "nvme" if state in ("stored", "absent") else tier, 64
        ),
        st.integers(0, 50), st.sampled_from(["weights", "gradients"]), st.integers(0, 2), st.integers(0, 1),
        st.sampled_from(STATES), st.sampled_from(["host", "device"]),
    ),
    max_size=40,
).map(lambda moments: sorted(moments, key=lambda moment: moment.seconds))  # fmt: skip


@settings(max_examples=40)
@given(MOMENTS, st.sampled_from([("weights",), ("gradients",), ("weights", "gradients")]), st.integers(1, 3))
def test_residency_is_what_the_moves_say(moments: list[Moment], kinds: tuple[str, ...], num_stages: int) -> None:
    """At the middle of every fiftieth of the step, by going through all moves so far."""
    stages = range(num_stages)
    found = stretches(moments, stages=stages, kinds=kinds, seconds=1.0)
    assert found[0].start == 0.0 and found[-1].stop == 1.0
    assert all(
        before.stop == after.start and before.level is not after.level for before, after in pairwise(found)
    )
    for number in range(50):
        at = (number + 0.5) / 50
        items: dict[tuple[str, int, int], Level] = {}
        for moment in moments:
            if moment.seconds <= at and moment.stage in stages and moment.kind in kinds:
                items[moment.kind, moment.stage, moment.second] = level_of(moment)
        base = Level.NVME if "weights" in kinds else Level.NOWHERE
        expected = max([base, *items.values()])
        (seen,) = [stretch.level for stretch in found if stretch.start <= at < stretch.stop]
        assert seen is expected
    assert sum(shares(found, seconds=1.0).values()) == pytest.approx(1.0)
    drawn = binned(found, seconds=1.0, num_bins=10)
    for stretch in found:
        for bin_number in range(10):
            start, stop = bin_number / 10, (bin_number + 1) / 10
            if stretch.start < stop - 1e-9 and stretch.stop > start + 1e-9:
                middle = (start + stop) / 2
                (level,) = [one.level for one in drawn if one.start <= middle < one.stop]
                assert level >= stretch.level


def test_levels_are_by_tier_then_by_what_only_that_tier_has() -> None:
    def level(state: str, tier: str) -> Level:
        return level_of(Moment(0.0, "weights", 0, 0, state, tier, 1))

    assert level("absent", "nvme") is Level.NOWHERE
    assert level("stored", "nvme") is Level.NVME
    assert level("filling", "host") is Level.HOST_FILLING
    assert level("bound", "host") is level("clean", "host") is Level.HOST
    assert level("writing", "host") is level("dirty", "host") is Level.HOST_DIRTY
    assert level("dirty", "device") is Level.DEVICE_DIRTY > Level.HOST_DIRTY


@pytest.mark.parametrize("count", [0, 1, 18, 48, 49, 1000])
def test_rows_of_a_map_are_few_and_hold_every_stage_once(count: int) -> None:
    names = [f"layer.{number}" for number in range(count)]
    groups = stage_groups(names)
    assert [stage for _, stages in groups for stage in stages] == list(range(count))
    assert len(groups) <= 48
    assert len({name for name, _ in groups}) == len(groups)
    if count == 1000:
        assert groups[0] == ("layer.0 to layer.20", range(21))
        assert math.ceil(1000 / 21) == len(groups)
