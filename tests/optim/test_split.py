"""Split weights lose nothing: every hi with chosen lo, every kind of float, any length; NaN stays NaN.

The optimizer on split weights is tested in `test_adamw.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hoist.optim import SPLIT_BLOCK_ELEMENTS, merge, split
from hoist.optim.split import merge_block, split_block

#: Low halves around every border of the scheme.
LOW_HALVES = (0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)


def floats(patterns: Tensor) -> Tensor:
    """float32 with the given bit patterns (int64, 0 ... 2^32 - 1)."""
    return patterns.to(torch.int32).view(torch.float32)


def patterns(values: Tensor) -> Tensor:
    """Bit patterns of float32 values, as int64 0 ... 2^32 - 1."""
    return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def every_high_half(low: int) -> Tensor:
    """All 2^16 patterns with one low half."""
    return (torch.arange(2**16) << 16) | low


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    hi, lo = torch.empty(values.numel(), dtype=torch.uint16), torch.empty(values.numel(), dtype=torch.int16)
    split(values, hi, lo)
    return hi, lo


def round_trip(values: Tensor) -> Tensor:
    out = torch.full_like(values, 123.0)
    merge(*halves(values), out)
    return out


@pytest.mark.parametrize("low", LOW_HALVES)
def test_every_high_half_survives_and_nan_stays_nan(low: int) -> None:
    values = floats(every_high_half(low))
    before = patterns(values)
    hi, lo = halves(values)
    out = torch.empty_like(values)
    merge(hi, lo, out)

    assert torch.equal(patterns(values), before), "split changed its input"
    is_nan = values.isnan()
    assert torch.equal(patterns(out)[~is_nan], before[~is_nan])
    assert out[is_nan].isnan().all()
    assert hi.view(torch.bfloat16)[is_nan].isnan().all()
    assert not hi.view(torch.bfloat16)[~is_nan].isnan().any()


@pytest.mark.parametrize("low", LOW_HALVES)
def test_halves_of_every_pattern_are_inverse_maps(low: int) -> None:
    """The block functions, which fix no NaN, are a bijection: rubbish between tensors keeps its bits."""
    before = every_high_half(low).to(torch.int32)
    hi, lo, back = (torch.empty(2**16, dtype=dtype) for dtype in (torch.int16, torch.int16, torch.int32))
    split_block(before.clone(), hi, lo)
    merge_block(hi, lo, back, torch.empty_like(back))
    assert torch.equal(back, before)


@pytest.mark.parametrize("length", range(1, 40))
def test_vector_tails(length: int) -> None:
    """Every length around the vector width, so that the scalar tails of the loops are right too."""
    generator = torch.Generator().manual_seed(length)
    drawn = torch.randint(0, 2**32, (length,), generator=generator)
    for values in (floats(drawn), floats(drawn | 0x8000), floats((drawn & 0x7FFFFFFF) | 0x7FFF8000)):
        back = round_trip(values)
        assert torch.equal(back.isnan(), values.isnan())
        assert torch.equal(patterns(back)[~values.isnan()], patterns(values)[~values.isnan()])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70))
@example([0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000])
@example([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0xFFFF8000, 0x7F807FFF])
@settings(deadline=None)
def test_any_floats(bits: list[int]) -> None:
    values = floats(torch.tensor(bits, dtype=torch.int64))
    back = round_trip(values)
    assert torch.equal(back.isnan(), values.isnan())
    assert torch.equal(patterns(back)[~values.isnan()], patterns(values)[~values.isnan()])


def test_hi_is_the_nearest_bf16() -> None:
    """As torch's cast, but for ties, which torch sends to even and hi away from zero."""
    for low in LOW_HALVES:
        values = floats(every_high_half(low))
        values = values[~values.isnan()]
        hi = halves(values)[0].view(torch.int16)
        cast = values.to(torch.bfloat16).view(torch.int16)
        if low == 0x8000:
            truncated = (values.view(torch.int32) >> 16).to(torch.int16)
            assert torch.equal(hi, truncated + 1)
        else:
            assert torch.equal(hi, cast)


@pytest.mark.parametrize(
    ("value", "hi_bits"),
    [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0, 0x3F80),
        (math.inf, 0x7F80),
        (-math.inf, 0xFF80),
        (math.nan, 0x7FC0),
        (float(np.finfo(np.float32).max), 0x7F80),  # past bf16's largest: nearest is inf, and lo brings it back
        (float(np.finfo(np.float32).smallest_subnormal), 0x0000),
        (1.0 + 2.0**-8, 0x3F81),  # tie, away from zero
        (-1.0 - 2.0**-8, 0xBF81),
        (2.0 - 2.0**-23, 0x4000),  # carry into the exponent
    ],
)
def test_known_halves(value: float, hi_bits: int) -> None:
    assert halves(torch.tensor([value]))[0].tolist() == [hi_bits]


@pytest.mark.parametrize("length", [0, 1, SPLIT_BLOCK_ELEMENTS - 1, SPLIT_BLOCK_ELEMENTS, 2 * SPLIT_BLOCK_ELEMENTS + 7])
def test_lengths_around_a_block(length: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(1))
    if length:
        values[-1] = math.nan
    back = round_trip(values)
    assert torch.equal(back[:-1], values[:-1])
    assert torch.equal(back.isnan(), values.isnan())


def test_signed_and_unsigned_halves_are_the_same_bits() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    signed = torch.empty(1000, dtype=torch.int16), torch.empty(1000, dtype=torch.int16)
    unsigned = torch.empty(1000, dtype=torch.uint16), torch.empty(1000, dtype=torch.uint16)
    for hi, lo in (signed, unsigned):
        split(values, hi, lo)
        out = torch.empty(1000)
        merge(hi, lo, out)
        assert torch.equal(out, values)
    assert torch.equal(signed[0], unsigned[0].view(torch.int16))
    assert torch.equal(signed[1], unsigned[1].view(torch.int16))


def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    hi, lo, out = torch.ones(8, dtype=torch.int16), torch.ones(8, dtype=torch.int16), torch.ones(8)
    for arguments, message in (
        ((hi.to(torch.int32), lo, out), "hi must be torch.int16 or torch.uint16, got torch.int32"),
        ((hi, lo.view(torch.bfloat16), out), "lo must be torch.int16 or torch.uint16, got torch.bfloat16"),
        ((hi, lo, out.double()), "the float32 side must be torch.float32, got torch.float64"),
        ((hi, lo, out.view(2, 4)), "must be flat, contiguous and on the CPU, got shape"),
        ((hi, lo, torch.ones(16)[::2]), "strides"),
        ((hi, lo[:7], out), "lengths must be equal, got hi 8, lo 7, float32 8"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(*arguments)
        with pytest.raises(ValueError, match=message):
            split(arguments[2], arguments[0], arguments[1])
    assert hi.eq(1).all() and lo.eq(1).all() and out.eq(1).all()
