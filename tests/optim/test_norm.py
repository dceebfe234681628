"""The sum of squares has the same bits for any alignment and number of threads, and is right to fp64 rounding.

"Any chunking" needs no test here: the function sees whole tensors, whose blocks are counted from their own start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from hoist.optim import NORM_BLOCK_ELEMENTS, SquareSum


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (3, 5), (2, 3, 5), (NORM_BLOCK_ELEMENTS,), (3, 50021)])
def test_against_exact_summation(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = math.fsum(value * value for value in tensor.reshape(-1).tolist())
    assert SquareSum().square_sum(tensor) == pytest.approx(exact, rel=1e-13, abs=0.0)


@pytest.mark.usefixtures("restored_threads")
def test_same_bits_for_any_alignment_and_thread_count() -> None:
    memory = torch.empty(NORM_BLOCK_ELEMENTS + 1001 + 64)
    for seed, length in enumerate((NORM_BLOCK_ELEMENTS,) * 4 + (NORM_BLOCK_ELEMENTS + 1001, 999)):
        values = torch.randn(length, generator=torch.Generator().manual_seed(seed))
        seen = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for shift in (0, 1, 3, 8, 17):
                place = memory[shift : shift + length]
                place.copy_(values)
                seen.add(SquareSum().square_sum(place).hex())
        assert len(seen) == 1


def test_same_bits_again_from_a_used_buffer_and_for_any_shape() -> None:
    square_sum = SquareSum()
    values = torch.randn(600, 500, generator=torch.Generator().manual_seed(0))
    first = square_sum.square_sum(values)
    square_sum.square_sum(torch.full((NORM_BLOCK_ELEMENTS,), math.nan))
    assert square_sum.square_sum(values) == first
    assert square_sum.square_sum(values.view(-1)) == first


def test_the_input_is_not_changed() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = values.clone()
    SquareSum().square_sum(values)
    assert torch.equal(values, before)


def test_more_range_than_float32() -> None:
    assert SquareSum().square_sum(torch.full((4,), 1e30)) == pytest.approx(4e60, rel=1e-6)
    assert SquareSum().square_sum(torch.full((4,), 1e-40)) == pytest.approx(4e-80, rel=1e-4)


@pytest.mark.parametrize("position", [0, NORM_BLOCK_ELEMENTS, NORM_BLOCK_ELEMENTS + 16])
def test_inf_and_nan_are_seen(position: int) -> None:
    values = torch.zeros(NORM_BLOCK_ELEMENTS + 17)
    values[position] = -math.inf
    assert SquareSum().square_sum(values) == math.inf
    values[position] = math.nan
    assert math.isnan(SquareSum().square_sum(values))
    values.view(torch.int32)[position] = 0x7F800001  # signalling NaN: no warning either
    assert math.isnan(SquareSum().square_sum(values))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"contiguous tensor, got strides \(1, 4\) for shape \(4, 3\)"):
        SquareSum().square_sum(torch.zeros(3, 4).t())
    with pytest.raises(TypeError, match=r"floating dtype, got torch\.int32"):
        SquareSum().square_sum(torch.zeros(3, dtype=torch.int32))


def test_scratch_is_one_block() -> None:
    assert SquareSum().scratch_bytes == NORM_BLOCK_ELEMENTS * 8
