"""How chunk files are dealt out: in proportion, neighbours apart, and by what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoist.tiers.dealing import MeasuredDirectory, deal, measure, measured_bytes
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.inventory import StoredChunk, all_chunks
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.layout import TensorSpec, lay_out
from tests.support.stores import small_layouts

QUANTUM = 4096


def chunks_of(stages: Sequence[tuple[int, int]]) -> list[StoredChunk]:
    """Chunk files of stages with so many chunks of so many quanta."""
    layouts = [
        lay_out(
            index=index,
            name=f"layer.{index}",
            tensors=[TensorSpec(name="w", shape=(num_chunks * quanta * QUANTUM,), trainable=True)],
            max_chunk_elements=quanta * QUANTUM,
        )
        for index, (num_chunks, quanta) in enumerate(stages)
    ]
    return all_chunks(Path("store"), layouts, num_slots=2)


def held(chunks: Sequence[StoredChunk], dealt: Sequence[int], num_drives: int, array: str = "") -> list[int]:
    """Bytes of an array, or of all, on each drive."""
    total = [0] * num_drives
    for chunk, number in zip(chunks, dealt, strict=True):
        if array in ("", chunk.array):
            total[number] += chunk.num_bytes
    return total


@given(
    stages=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 3, 8])), min_size=1, max_size=12),
    weights=st.lists(st.floats(0.5, 8.0), min_size=1, max_size=4),
)
def test_shares_are_in_proportion_array_by_array_and_in_all(
    stages: list[tuple[int, int]], weights: list[float]
) -> None:
    chunks = chunks_of(stages)
    dealt = deal(chunks, weights)
    for array in ("", "weight_hi", "weight_lo", "exp_avg", "exp_avg_sq"):
        largest = max(chunk.num_bytes for chunk in chunks if array in ("", chunk.array))
        shares = held(chunks, dealt, len(weights), array)
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - sum(shares) * weight / sum(weights)) <= 2 * 3 * largest  # two slots, three chunks


@given(st.lists(st.floats(0.0, 8.0), min_size=1, max_size=5).filter(any))
def test_slots_of_a_chunk_go_together_and_a_weight_of_nothing_gets_nothing(weights: list[float]) -> None:
    chunks = chunks_of([(3, 1), (2, 8)])
    dealt = deal(chunks, weights)
    places = {(chunk.stage, chunk.array, chunk.chunk): set[int]() for chunk in chunks}
    for chunk, number in zip(chunks, dealt, strict=True):
        places[chunk.stage, chunk.array, chunk.chunk].add(number)
    assert {len(numbers) for numbers in places.values()} == {1}
    assert all(weights[number] for number in dealt)


def test_neighbours_lie_on_different_drives() -> None:
    """Whatever is read of a stage, the first half, the second, the moments: both drives are at work."""
    chunks = chunks_of([(4, 2), (4, 2)])
    dealt = {
        (chunk.stage, chunk.array, chunk.chunk): number
        for chunk, number in zip(chunks, deal(chunks, [1, 1]), strict=True)
    }
    for stage in ("layer.0", "layer.1"):
        for array in ("weight_hi", "weight_lo", "exp_avg", "exp_avg_sq"):
            assert sorted(dealt[stage, array, chunk] for chunk in range(4)) == [0, 0, 1, 1]
            assert dealt[stage, array, 0] != dealt[stage, array, 1]
        for chunk in range(4):
            assert dealt[stage, "weight_hi", chunk] != dealt[stage, "weight_lo", chunk]
            assert dealt[stage, "exp_avg", chunk] != dealt[stage, "exp_avg_sq", chunk]


def test_stages_of_one_chunk_use_all_drives() -> None:
    chunks = chunks_of([(1, 2)] * 3)
    dealt = deal(chunks, [1, 1, 1])
    for stage in ("layer.0", "layer.1", "layer.2"):
        mine = [number for chunk, number in zip(chunks, dealt, strict=True) if chunk.stage == stage]
        assert len(Counter(mine)) >= 2


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [float("nan"), 1.0], [float("inf")]])
def test_weights_that_mean_nothing(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weights: got \["):
        deal(chunks_of([(1, 1)]), weights)


def test_a_weight_is_the_speed_of_a_steps_mix() -> None:
    even = MeasuredDirectory(directory=Path("a"), read_bytes_per_second=2e9, write_bytes_per_second=2e9)
    assert even.weight == pytest.approx(2e9)
    slow_writes = MeasuredDirectory(directory=Path("a"), read_bytes_per_second=2e9, write_bytes_per_second=5e8)
    assert slow_writes.weight == pytest.approx(28 / (16 / 2e9 + 12 / 5e8))


def test_measuring_leaves_nothing_and_needs_no_directory(tmp_path: Path, engine: IoEngine) -> None:
    (tmp_path / "there").mkdir()
    found = measure([tmp_path / "there", tmp_path / "missing"], engine, num_bytes=2**20)
    assert [one.directory.name for one in found] == ["there", "missing"]
    assert all(one.read_bytes_per_second > 0 and one.write_bytes_per_second > 0 for one in found)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    assert engine.statistics().buffered_bytes == 0


def test_a_drive_that_forgets_is_refused(tmp_path: Path) -> None:
    class Forgetful(DirectEngine):
        def _pread(self, descriptor: int, view: memoryview, offset: int) -> int:
            moved = super()._pread(descriptor, view, offset)
            view[0] ^= 1
            return moved

    with Forgetful(num_threads=1) as engine, pytest.raises(StoreRefusedError, match="read back differs from what was"):
        measure([tmp_path], engine, num_bytes=2**20)
    assert list(tmp_path.iterdir()) == []


def test_a_small_store_is_measured_with_no_more_than_it_holds() -> None:
    layouts = small_layouts()
    assert measured_bytes(layouts) == sum(
        chunk.num_bytes for chunk in all_chunks(Path(), layouts, num_slots=3) if chunk.slot == 0
    )
