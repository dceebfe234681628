"""How what passes between two stages lies in one activation slot: one tensor after another, as raw bytes.

What it is for a model is found in `probe.py`; who fills and frees slots is `runtime.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoist.tiers.layout import round_up

#: Each tensor starts on a multiple of so many bytes.
ALIGN_BYTES = 64


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether autograd follows tensors of a dtype."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """One tensor's place in a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_gradient(self) -> bool:
        """Its gradient may take its place on the way back; what autograd does not follow stays."""
        return has_gradient(self.dtype)


def pack(values: Sequence[Tensor]) -> tuple[Packed, ...]:
    """Places for tensors like ``values``, in their order."""
    places: list[Packed] = []
    offset = 0
    for value in values:
        places.append(Packed(shape=tuple(value.shape), dtype=value.dtype, offset_bytes=offset))
        offset = round_up(offset + places[-1].num_bytes, ALIGN_BYTES)
    return tuple(places)


def packed_bytes(places: Sequence[Packed]) -> int:
    """Bytes of the slot that ``places`` take."""
    return places[-1].offset_bytes + places[-1].num_bytes if places else 0


def unpack(slot: Tensor, places: Sequence[Packed]) -> list[Tensor]:
    """Views of a slot, uint8 and 64-byte aligned, as the tensors that lie in it.

    Raises ValueError if they do not fit.
    """
    if packed_bytes(places) > slot.numel():
        raise ValueError(f"{packed_bytes(places)} bytes between two stages do not fit a slot of {slot.numel()}")
    return [
        slot[place.offset_bytes : place.offset_bytes + place.num_bytes].view(place.dtype).view(place.shape)
        for place in places
    ]


def as_leaves(slots: Sequence[Tensor], *, wanted: bool = True) -> tuple[Tensor, ...]:
    """The tensors in a slot as autograd starts from them, on the same memory; integers as they are.

    Without ``wanted`` no gradient of them is made.
    """
    # .data: a version counter of its own (see stages.py)
    return tuple(slot.data.requires_grad_(wanted) if has_gradient(slot.dtype) else slot.data for slot in slots)


def keep_gradients(slots: Sequence[Tensor], sources: Sequence[Tensor]) -> frozenset[int]:
    """The gradients of a stage's input take the place of that input, which is not needed any more.

    Returns the positions of the tensors that have none; there the input stays.
    """
    missing = set()
    for position, (slot, source) in enumerate(zip(slots, sources, strict=True)):
        if source.grad is None:
            missing.add(position)
        else:
            slot.copy_(source.grad)
    return frozenset(missing)
