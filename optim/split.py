"""Split weights: a float32 as the nearest bf16 (`hi`) and the 16 bits that bring it back (`lo`), without loss.

This is arithmetic on host tensors in place. Where hi and lo are stored is the store's business; `adamw.py` uses the
block functions around its kernel.

The scheme, with p the 32-bit pattern of w and everything modulo 2^32: ``hi = (p + 0x8000) >> 16``, ``lo = p & 0xFFFF``,
and back ``p = (hi << 16) + int16(lo)``. int16(lo) is p minus hi's pattern, and int16(lo) + 0x8000 always fits 16 bits,
so the two maps are inverse for all 2^32 patterns. hi is the bf16 nearest to w, ties away from zero: a carry into the
exponent is right rounding, and floats past bf16's largest have hi inf while lo keeps their value. Only NaN needs care:
its rounding could reach inf or wrap to zero, so a NaN is stored as the one NaN hi 0x7FC0, lo 0; payloads are lost.
"""

from __future__ import annotations

import math
import sys
import threading

import torch
from torch import Tensor

if sys.byteorder != "little":
    raise ImportError(f"hoist stores little-endian bytes as they lie in memory; this machine is {sys.byteorder}-endian")

#: Elements worked on at a time, so that the passes over a block stay in cache: 2 MiB with scratch.
SPLIT_BLOCK_ELEMENTS = 2**18

#: Half of hi's last place, as a pattern.
_ROUND = 0x8000


class _Scratch(threading.local):
    """One block of int32 per thread, made at its first use and freed with the thread."""

    def __init__(self) -> None:
        self.block = torch.empty(SPLIT_BLOCK_ELEMENTS, dtype=torch.int32)


_scratch = _Scratch()


def merge(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    """Write to ``out`` the float32 weights whose halves are ``hi`` and ``lo``.

    All are flat, contiguous, on the CPU and of one length: hi and lo int16 or uint16, out float32. hi and lo are not
    changed. Memory: one block of 1 MiB per thread. Raises ValueError, with ``out`` unchanged, if that is not so.
    """
    _check(hi, lo, out)
    hi_bits, lo_bits, patterns = hi.view(torch.int16), lo.view(torch.int16), out.view(torch.int32)
    scratch = _scratch.block
    for start in range(0, out.numel(), SPLIT_BLOCK_ELEMENTS):
        stop = min(start + SPLIT_BLOCK_ELEMENTS, out.numel())
        merge_block(hi_bits[start:stop], lo_bits[start:stop], patterns[start:stop], scratch[: stop - start])


def split(values: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write to ``hi`` and ``lo`` the halves of the float32 ``values``; :func:`merge` brings back the same bits.

    All are flat, contiguous, on the CPU and of one length: hi and lo int16 or uint16, values float32, which is not
    changed. A NaN becomes the NaN 0x7FC00000. Memory: one block of 1 MiB per thread. Raises ValueError, with hi and lo
    unchanged, if that is not so.
    """
    _check(hi, lo, values)
    hi_bits, lo_bits, patterns = hi.view(torch.int16), lo.view(torch.int16), values.view(torch.int32)
    for start in range(0, values.numel(), SPLIT_BLOCK_ELEMENTS):
        stop = min(start + SPLIT_BLOCK_ELEMENTS, values.numel())
        block = _scratch.block[: stop - start]
        block.copy_(patterns[start:stop])
        floats = block.view(torch.float32)
        if has_nan(floats):
            make_nans_canonical(floats)
        split_block(block, hi_bits[start:stop], lo_bits[start:stop])


def merge_block(hi: Tensor, lo: Tensor, out: Tensor, scratch: Tensor) -> None:
    """:func:`merge` of one block, unchecked: hi, lo int16; out, scratch int32 (patterns), all of the same length.

    Of a dozen ways tried (strided 16-bit copies, shifts, numpy), three whole passes of torch's vectorised loops were
    the fastest: 2.7 G elements/s on one core. hi is widened with its sign, so the product with 2^16 fits an int32.
    """
    scratch.copy_(hi)
    out.copy_(lo)
    out.add_(scratch, alpha=1 << 16)


def split_block(patterns: Tensor, hi: Tensor, lo: Tensor) -> None:
    """:func:`split` of one block, unchecked and **destroying** ``patterns`` (int32); hi and lo are int16.

    NaNs must have been made canonical, where their rounding matters: see :func:`make_nans_canonical`. For all other
    patterns, and for NaNs too, :func:`merge_block` brings the same bits back.
    """
    split_block_to(patterns, hi, lo, patterns)


def split_block_to(patterns: Tensor, hi: Tensor, lo: Tensor, scratch: Tensor) -> None:
    """:func:`split_block` that keeps ``patterns`` and destroys ``scratch`` (int32, of the same length) instead."""
    lo.copy_(patterns)  # narrowing keeps the low 16 bits
    torch.add(patterns, _ROUND, out=scratch)
    scratch.bitwise_right_shift_(16)
    hi.copy_(scratch)


def has_nan(floats: Tensor) -> bool:
    """True if any element of the float tensor (not empty) is NaN: one vectorised pass, cheap while in cache."""
    return math.isnan(floats.amax().item())


def make_nans_canonical(floats: Tensor) -> None:
    """Replace each NaN of a float32 tensor, in place, by 0x7FC00000, whose halves are a bf16 NaN and 0."""
    floats.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)


def _check(hi: Tensor, lo: Tensor, values: Tensor) -> None:
    """Raise ValueError unless the three are what :func:`merge` and :func:`split` take."""
    for name, tensor, dtypes in (
        ("hi", hi, (torch.int16, torch.uint16)),
        ("lo", lo, (torch.int16, torch.uint16)),
        ("the float32 side", values, (torch.float32,)),
    ):
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} must be flat, contiguous and on the CPU, "
                f"got shape {tuple(tensor.shape)}, strides {tensor.stride()}, device {tensor.device}"
            )
    if not hi.numel() == lo.numel() == values.numel():
        raise ValueError(f"lengths must be equal, got hi {hi.numel()}, lo {lo.numel()}, float32 {values.numel()}")
