"""Cuts a range of a strided tensor into boxes, each of which one window of its storage holds. Index arithmetic alone.

Reading the windows is `checkpoint.py`'s. A tensor without gaps is the case of one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

#: A window may hold so many times what is wanted of it: reading a little too much is cheaper than more requests.
_MOST_WASTE = 8
#: Elements of a window that is worth a single request whatever is wanted of it.
_SMALL_SPAN_ELEMENTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A part of a tensor, in the storage and in the destination. All numbers are elements."""

    shape: tuple[int, ...]
    """At least one index in every dimension."""
    source_start: int
    """Of its first element, counted from the tensor's first."""
    source_strides: tuple[int, ...]
    """In the storage."""
    destination_start: int
    """Of its first element, counted from the destination's first."""
    destination_strides: tuple[int, ...]
    """In the destination, where the tensor's elements lie in order."""

    @property
    def num_elements(self) -> int:
        """Elements that are wanted."""
        return math.prod(self.shape)

    def part(self, dimension: int, first: int, count: int) -> Box:
        """``count`` indices of a dimension from ``first`` on."""
        return replace(
            self,
            shape=(*self.shape[:dimension], count, *self.shape[dimension + 1 :]),
            source_start=self.source_start + first * self.source_strides[dimension],
            destination_start=self.destination_start + first * self.destination_strides[dimension],
        )


def span_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of the storage from the first of a box to its last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def boxes(
    shape: Sequence[int], strides: Sequence[int], start: int, stop: int, *, room_elements: int
) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a tensor, counted flattened, as boxes that span ``room_elements`` at most.

    Each element is in one box. Where the tensor is a permutation of its storage, the boxes follow the storage.
    """
    if start == stop:
        return
    logical = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
    whole = Box(
        shape=tuple(shape),
        source_start=0,
        source_strides=tuple(strides),
        destination_start=-start,
        destination_strides=logical,
    )
    for box in _of_range(whole, 0, start, stop):
        yield from _fitting(box, room_elements)


def _of_range(box: Box, dimension: int, start: int, stop: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a box that has one index in each dimension before ``dimension``."""
    if start == 0 and stop == box.num_elements:
        yield box
        return
    inner = box.destination_strides[dimension]
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        row = box.part(dimension, last, 1)
        yield from _of_range(row, dimension + 1, start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        row = box.part(dimension, first - 1, 1)
        yield from _of_range(row, dimension + 1, start - (first - 1) * inner, inner)
    if first < last:
        yield box.part(dimension, first, last - first)
    if last * inner < stop:
        yield from _of_range(box.part(dimension, last, 1), dimension + 1, 0, stop - last * inner)


def _fitting(box: Box, room_elements: int) -> Iterator[Box]:
    """A box in parts that fit a window, and are not much smaller than it."""
    span = span_elements(box.shape, box.source_strides)
    dense = span <= max(_SMALL_SPAN_ELEMENTS, _MOST_WASTE * box.num_elements)
    if span == 1 or (span <= room_elements and dense):
        yield box
        return
    dimension = max(
        (number for number, size in enumerate(box.shape) if size > 1), key=lambda number: box.source_strides[number]
    )
    size, stride = box.shape[dimension], box.source_strides[dimension]
    rest = span - (size - 1) * stride
    count = 1 + (room_elements - rest) // stride if dense and rest <= room_elements else 1
    for first in range(0, size, count):
        yield from _fitting(box.part(dimension, first, min(count, size - first)), room_elements)


def assign(box: Box, window: Tensor, destination: Tensor) -> None:
    """Copy a box's elements from its window, whose first element is the box's first, to the 1-D destination."""
    window = window.as_strided(box.shape, box.source_strides, window.storage_offset())
    start = destination.storage_offset() + box.destination_start
    destination.as_strided(box.shape, box.destination_strides, start).copy_(window)
