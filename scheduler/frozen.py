"""Where a stage's frozen tensors lie in its weight buffer: as they are stored, and as the model computes with them.

A frozen base is kept in the 16 bits of its checkpoint where float32 holds the same numbers. It is read whole, in one
request, into the far end of its place and converted there from the front: no second copy. Cuts are `tiers/layout.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoist.tiers.io.base import IO_ALIGN_BYTES
from hoist.tiers.layout import FROZEN_ALIGN_BYTES, PlacedTensor, StageLayout, round_up

#: Elements that are converted in one go. Where a tensor overlaps itself they are copied first: at most 1 MiB.
_BLOCK_ELEMENTS = 2**18


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenRange:
    """A range of a stage's frozen array on NVMe, and where it is read to."""

    owner: int
    start: int
    """First byte in the owner's array, a multiple of 4096."""
    num_bytes: int
    """Multiple of 4096."""
    position: int
    """First byte in the region of stored tensors, a multiple of 4096."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTensor:
    """One frozen tensor of a stage, its own or a borrowed one."""

    placed: PlacedTensor
    stored: int
    """First byte in the region of stored tensors."""
    computed: int
    """First byte in the buffer's frozen part, where the model finds it; a multiple of 256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenLayout:
    """The frozen part of a stage's weight buffer. Make one with :func:`lay_out_frozen`."""

    ranges: tuple[FrozenRange, ...]
    """What is read: the stage's own array first, if it has one."""
    tensors: tuple[FrozenTensor, ...]
    """In the order of their bytes, in which they are converted too."""
    stored_bytes: int
    """Bytes of the region of stored tensors, a multiple of 4096."""
    stored_from: int
    """Where that region begins in the part, a multiple of 4096: so far behind that no tensor, once converted, reaches
    what is still to be converted."""
    dtype: str = "float32"
    """What the model computes with."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.stored_from + self.stored_bytes

    @property
    def widens(self) -> bool:
        """Some of the tensors are not computed with as they are stored."""
        return any(_is_converted(tensor.placed, self.dtype) for tensor in self.tensors)


def _is_converted(placed: PlacedTensor, dtype: str) -> bool:
    return placed.spec.compute_dtype(dtype) != placed.spec.dtype


def lay_out_frozen(
    layout: StageLayout, lent: Sequence[tuple[int, PlacedTensor]] = (), *, dtype: str = "float32"
) -> FrozenLayout:
    """Place a stage's own frozen tensors, then those that it borrows: (owner, place in the owner's frozen array).

    ``dtype``: what the model computes with.
    """
    ranges: list[FrozenRange] = []
    stored: list[tuple[PlacedTensor, int]] = [(placed, placed.offset) for placed in layout.frozen]
    position = layout.frozen_bytes
    if layout.frozen_bytes:
        ranges.append(FrozenRange(owner=layout.index, start=0, num_bytes=layout.frozen_bytes, position=0))
    for owner, placed in lent:
        start = placed.offset // IO_ALIGN_BYTES * IO_ALIGN_BYTES
        num_bytes = round_up(placed.offset + placed.spec.num_bytes, IO_ALIGN_BYTES) - start
        ranges.append(FrozenRange(owner=owner, start=start, num_bytes=num_bytes, position=position))
        stored.append((placed, position + placed.offset - start))
        position += num_bytes
    converted = any(_is_converted(placed, dtype) for placed, _ in stored)
    tensors: list[FrozenTensor] = []
    computed_end = stored_from = 0
    for placed, offset in stored:
        # What is not converted anywhere stays where it is read to.
        computed = round_up(computed_end, FROZEN_ALIGN_BYTES) if converted else offset
        tensors.append(FrozenTensor(placed=placed, stored=offset, computed=computed))
        computed_end = computed + placed.spec.compute_bytes(dtype)
        # Of a tensor that grows the end must not come too far, of one that shrinks the beginning.
        stored_from = max(stored_from, computed - offset, computed_end - (offset + placed.spec.num_bytes))
    return FrozenLayout(
        ranges=tuple(ranges),
        tensors=tuple(tensors),
        stored_bytes=position,
        stored_from=round_up(stored_from, IO_ALIGN_BYTES),
        dtype=dtype,
    )


def widen(layout: FrozenLayout, stored: Tensor, computed: Tensor, *, through: Tensor | None = None) -> None:
    """Bring every tensor from its stored form to the one that the model computes with.

    Exact in float32. bfloat16 has fewer digits than float32 and float16: what it does not hold goes to the nearest that
    it holds, ties to even, as torch converts.

    ``stored`` (uint8) is the region of stored tensors, ``computed`` (uint8) the frozen part of the buffer, of which
    ``stored`` may be the end: it is lost then. ``through`` (uint8, of the memory of ``computed``) is what passes of
    ``stored`` may be brought to first, where that lies in other memory: copies then take no other.
    """
    for tensor in layout.tensors:
        source = _stored(tensor, stored)
        target = _computed(tensor, computed, layout.dtype)
        length = _BLOCK_ELEMENTS if through is None else min(_BLOCK_ELEMENTS, through.nbytes // source.itemsize)
        for start in range(0, source.numel(), length):
            part, into = source[start : start + length], target[start : start + length]
            if part.data_ptr() == into.data_ptr() and part.dtype == into.dtype:
                continue
            if through is not None:
                into.copy_(through[: part.nbytes].view(part.dtype).copy_(part, non_blocking=True))
            else:
                into.copy_(part.clone() if _overlap(part, into) else part)


def stored_tensors(layout: FrozenLayout, stored: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and view of each tensor in the region of stored tensors (uint8), in the dtype that it is stored in."""
    for tensor in layout.tensors:
        yield tensor.placed.spec.name, _stored(tensor, stored).view(tensor.placed.spec.shape)


def computed_tensors(layout: FrozenLayout, computed: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and view of each tensor in the frozen part of a buffer (uint8), in the dtype that is computed with."""
    for tensor in layout.tensors:
        yield tensor.placed.spec.name, _computed(tensor, computed, layout.dtype).view(tensor.placed.spec.shape)


def _stored(tensor: FrozenTensor, stored: Tensor) -> Tensor:
    spec = tensor.placed.spec
    return stored[tensor.stored : tensor.stored + spec.num_bytes].view(getattr(torch, spec.dtype))


def _computed(tensor: FrozenTensor, computed: Tensor, dtype: str) -> Tensor:
    spec = tensor.placed.spec
    part = computed[tensor.computed : tensor.computed + spec.compute_bytes(dtype)]
    return part.view(getattr(torch, spec.compute_dtype(dtype)))


def _overlap(left: Tensor, right: Tensor) -> bool:
    return (
        left.data_ptr() < right.data_ptr() + right.nbytes and right.data_ptr() < left.data_ptr() + left.nbytes
    )
