"""Packing, pieces and segments as properties: nothing overlaps or is lost, all is aligned, JSON keeps it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoist.tiers.layout import (
    CHUNK_QUANTUM_ELEMENTS,
    DTYPE_BYTES,
    FROZEN_ALIGN_BYTES,
    FROZEN_QUANTUM_BYTES,
    TENSOR_ALIGN_ELEMENTS,
    StageLayout,
    TensorSpec,
    lay_out,
    round_up,
)

SIDES = st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 65, 511, 513, 4095, 4097]))
SHAPES = st.lists(SIDES, max_size=3).map(tuple).filter(lambda shape: math.prod(shape) < 200_000)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(st.lists(st.text(max_size=400), unique=True, max_size=8))
    found = []
    for name in names:
        trainable = draw(st.booleans())
        dtype = "float32" if trainable else draw(st.sampled_from(sorted(DTYPE_BYTES)))
        found.append(TensorSpec(name=name, shape=draw(SHAPES), trainable=trainable, dtype=dtype))
    return found


QUANTA = st.integers(1, 8).map(lambda count: count * CHUNK_QUANTUM_ELEMENTS)
LAYOUTS = st.builds(
    lambda tensors, chunk: lay_out(index=3, name="layer.2", tensors=tensors, max_chunk_elements=chunk), specs(), QUANTA
)


@given(LAYOUTS)
def test_trainable_tensors_are_aligned_apart_and_within(layout: StageLayout) -> None:
    end = 0
    for placed in layout.trainable:
        assert placed.offset % TENSOR_ALIGN_ELEMENTS == 0
        assert end <= placed.offset < end + TENSOR_ALIGN_ELEMENTS
        end = placed.offset + placed.spec.num_elements
    assert end == layout.num_elements <= layout.padded_elements


@given(LAYOUTS)
def test_frozen_tensors_are_aligned_apart_and_within(layout: StageLayout) -> None:
    end = 0
    for placed in layout.frozen:
        assert placed.offset % FROZEN_ALIGN_BYTES == 0
        assert end <= placed.offset < end + FROZEN_ALIGN_BYTES
        end = placed.offset + placed.spec.num_bytes
    assert layout.frozen_bytes == round_up(end, FROZEN_QUANTUM_BYTES)


@given(specs(), QUANTA)
def test_nothing_is_lost_and_order_is_kept(tensors: list[TensorSpec], max_chunk_elements: int) -> None:
    layout = lay_out(index=0, name="embed", tensors=tensors, max_chunk_elements=max_chunk_elements)
    assert [placed.spec for placed in layout.trainable] == [spec for spec in tensors if spec.trainable]
    assert [placed.spec for placed in layout.frozen] == [spec for spec in tensors if not spec.trainable]


@given(specs(), QUANTA)
def test_chunks_are_small_enough_and_waste_little(tensors: list[TensorSpec], max_chunk_elements: int) -> None:
    layout = lay_out(index=0, name="embed", tensors=tensors, max_chunk_elements=max_chunk_elements)
    if not layout.num_elements:
        assert layout.num_chunks == layout.chunk_elements == 0
        return
    assert layout.chunk_elements % CHUNK_QUANTUM_ELEMENTS == 0
    assert 0 < layout.chunk_elements <= max_chunk_elements
    assert layout.num_chunks <= -(-layout.num_elements // max_chunk_elements)
    assert (layout.num_chunks - 1) * layout.chunk_elements < layout.num_elements  # no chunk is all padding
    assert layout.padded_elements - layout.num_elements < CHUNK_QUANTUM_ELEMENTS * layout.num_chunks


@given(LAYOUTS, QUANTA)
def test_pieces_cover_what_is_used_once_in_order(layout: StageLayout, max_elements: int) -> None:
    pieces = layout.pieces(max_elements)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    end = 0
    for piece in pieces:
        assert piece.start == end
        assert piece.start % CHUNK_QUANTUM_ELEMENTS == piece.stop % CHUNK_QUANTUM_ELEMENTS == 0
        assert 0 < piece.num_elements <= max_elements
        assert piece.start // layout.chunk_elements == (piece.stop - 1) // layout.chunk_elements == piece.chunk
        end = piece.stop
    assert end == round_up(layout.num_elements, CHUNK_QUANTUM_ELEMENTS)
    assert {piece.chunk for piece in pieces} == set(range(layout.num_chunks))


@given(LAYOUTS, QUANTA)
def test_segments_of_all_pieces_are_all_elements_of_all_tensors(layout: StageLayout, max_elements: int) -> None:
    reached = {placed.spec.name: 0 for placed in layout.trainable}
    offsets = {placed.spec.name: placed.offset for placed in layout.trainable}
    for piece in layout.pieces(max_elements):
        for segment in layout.segments(piece.start, piece.stop):
            assert segment.num_elements >= 1
            assert piece.start <= segment.start
            assert segment.start + segment.num_elements <= piece.stop
            assert segment.start == offsets[segment.name] + segment.tensor_start
            assert segment.tensor_start == reached[segment.name]
            reached[segment.name] += segment.num_elements
    assert reached == {placed.spec.name: placed.spec.num_elements for placed in layout.trainable}


@given(LAYOUTS, st.integers(0, 50_000), st.integers(0, 50_000))
def test_segments_of_any_range_lie_in_it(layout: StageLayout, start: int, length: int) -> None:
    segments = layout.segments(start, start + length)
    end = start
    for segment in segments:
        assert end <= segment.start
        end = segment.start + segment.num_elements
    assert end <= start + length


@given(LAYOUTS)
def test_json_round_trip(layout: StageLayout) -> None:
    assert StageLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize("broken", ["index", "name", "chunk_elements", "num_chunks", "frozen_bytes", "tensors"])
def test_json_without_a_field_is_refused(broken: str) -> None:
    document = lay_out(index=0, name="embed", tensors=[]).to_json()
    del document[broken]
    with pytest.raises(KeyError, match=broken):
        StageLayout.from_json(document)


def test_a_small_stage_gets_a_small_chunk() -> None:
    layout = lay_out(index=11, name="head", tensors=[TensorSpec(name="w", shape=(503, 64), trainable=True)])
    assert (layout.num_chunks, layout.chunk_elements) == (1, 32768)
    assert layout.directory == "011-head"


def test_what_cannot_be_laid_out_is_refused() -> None:
    with pytest.raises(ValueError, match="max_chunk_elements: 4095 is not a positive multiple of 4096"):
        lay_out(index=0, name="embed", tensors=[], max_chunk_elements=4095)
    twice = [TensorSpec(name="w", shape=(1,), trainable=True)] * 2
    with pytest.raises(ValueError, match="stage 'embed': tensor names must differ, repeated: w"):
        lay_out(index=0, name="embed", tensors=twice)
    with pytest.raises(ValueError, match="tensor 'w': dtype 'float8' is not one of float64"):
        TensorSpec(name="w", shape=(), trainable=False, dtype="float8")
    with pytest.raises(ValueError, match="tensor 'w': trainable tensors are kept as float32, got 'bfloat16'"):
        TensorSpec(name="w", shape=(), trainable=True, dtype="bfloat16")
    with pytest.raises(ValueError, match="max_elements: 100 is not a positive multiple of 4096"):
        lay_out(index=0, name="embed", tensors=[]).pieces(100)
