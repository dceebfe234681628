"""Cutting requests and finding what direct I/O can do of them: pure arithmetic, so properties are the specification."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoist.tiers.io.alignment import CUT_BYTES, DirectAlignment, cut_request, direct_range, is_aligned

offsets = st.one_of(st.integers(0, 2**40), st.integers(0, 2**24).map(lambda page: page * 4096))
lengths = st.one_of(st.integers(0, 2**26), st.integers(0, 2**14).map(lambda page: page * 4096))
#: P020: what file systems report, and the 4096 assumed where they report nothing.
alignments = st.sampled_from([512, 4096, 16384, 65536])


@given(offset=offsets, num_bytes=lengths, part_bytes=st.sampled_from([1, 4096, 65536, 2**20, 4 * 2**20]))
def test_parts_cover_the_request_once_and_are_no_bigger_than_told(offset: int, num_bytes: int, part_bytes: int) -> None:
    parts = cut_request(offset, num_bytes, max(part_bytes, num_bytes // 1000))
    end = 0
    for start, length in parts:
        assert start == end
        end += length
        assert length <= max(part_bytes, num_bytes // 1000) + CUT_BYTES
    assert end == num_bytes
    assert len(parts) == 1 or all(length > 0 for _, length in parts)


@given(offset=offsets, num_bytes=lengths)
def test_inner_cuts_fit_every_file_system(offset: int, num_bytes: int) -> None:
    assert all((offset + start) % CUT_BYTES == 0 for start, _ in cut_request(offset, num_bytes, 2**20)[1:])


def test_an_aligned_request_is_cut_evenly() -> None:
    mebi = 2**20
    assert cut_request(0, 12 * mebi, 4 * mebi) == [(0, 4 * mebi), (4 * mebi, 4 * mebi), (8 * mebi, 4 * mebi)]
    assert cut_request(64 * mebi, 4 * mebi, 4 * mebi) == [(0, 4 * mebi)]
    assert [length for _, length in cut_request(4096, 8 * mebi, 4 * mebi)] == [4 * mebi + 61440, 4 * mebi - 61440]
    assert cut_request(5, 0, 4 * mebi) == [(0, 0)]


@given(
    offset=offsets,
    num_bytes=lengths,
    address=st.integers(0, 2**30),
    memory=st.sampled_from([1, 4, 512, 4096]),
    reported=alignments,
)
def test_the_direct_range_is_aligned_and_as_long_as_can_be(
    offset: int, num_bytes: int, address: int, memory: int, reported: int
) -> None:
    alignment = DirectAlignment.from_kernel(memory, reported)
    quantum = max(reported, 4096)
    assert alignment.offset_bytes == quantum
    start, stop = direct_range(offset, num_bytes, address, alignment)
    assert 0 <= start <= stop <= num_bytes
    if stop:
        assert (offset + start) % quantum == 0
        assert (offset + stop) % quantum == 0
        assert (address + start) % memory == 0
        assert start < quantum
        assert num_bytes - stop < quantum
    elif (address + -offset % quantum) % memory == 0:
        assert num_bytes < 2 * quantum


def test_the_hot_path_is_direct_as_a_whole() -> None:
    assert direct_range(8192, 12288, 4096, DirectAlignment()) == (0, 12288)
    assert direct_range(8192, 12288, 4096 + 64, DirectAlignment()) == (0, 0)
    assert direct_range(8192, 12288, 4096 + 64, DirectAlignment(memory_bytes=4)) == (0, 12288)
    assert is_aligned(8192, 12288, 4096)
    assert not any([is_aligned(1, 4096, 4096), is_aligned(0, 1, 4096), is_aligned(0, 4096, 64)])


@pytest.mark.parametrize("field", ["memory_bytes", "offset_bytes"])
@pytest.mark.parametrize("value", [0, 3, -4096])
def test_alignments_are_powers_of_two(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}: got {value}, must be a power of two"):
        DirectAlignment(**{field: value})
