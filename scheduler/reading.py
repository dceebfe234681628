"""Reads tensors back out of a store: a range of elements at a time, through the I/O engine, in a bounded buffer.

For export and inspection. Training reads whole pieces instead (`runtime.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hoist.optim.split import merge
from hoist.scheduler.memory import STAGING_BYTES
from hoist.tiers.arena import Arena
from hoist.tiers.format import StateArray
from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, Piece, PlacedTensor, StageLayout, round_up
from hoist.tiers.store import Store


class TensorReader:
    """Yields the elements of one tensor after another. Holds ``window_elements`` x 8 bytes; close when done."""

    def __init__(self, store: Store, engine: IoEngine, *, window_elements: int = 2**20) -> None:
        """``window_elements`` (a multiple of 4096) are read at a time."""
        self._store = store
        self._engine = engine
        self._window_elements = window_elements
        self._arena = Arena(window_elements * (STAGING_BYTES + 4))
        self._staging = self._arena.lease(window_elements * STAGING_BYTES, "staging").tensor
        self._values = self._arena.lease(window_elements * 4, "values").tensor.view(torch.float32)

    def weights(self, layout: StageLayout, placed: PlacedTensor, start: int) -> Tensor:
        """float32 weights of a trainable tensor from element ``start`` on, at most a window, at least one.

        The view is valid until the next call. Raises TransferError if the drive fails.
        """
        piece, inner = self._window(layout, placed, start)
        num_bytes = 2 * piece.num_elements
        halves = []
        for half, array in enumerate((StateArray.WEIGHT_HI, StateArray.WEIGHT_LO)):
            place = self._store.place(layout.index, array, piece, write=False)
            target = self._staging[half * num_bytes : (half + 1) * num_bytes]
            halves.append((self._engine.read(place.path, place.offset_bytes, target), target))
        for future, _ in halves:
            future.result()
        values = self._values[: piece.num_elements]
        merge(halves[0][1].view(torch.int16), halves[1][1].view(torch.int16), values)
        return values[inner]

    def moments(self, layout: StageLayout, placed: PlacedTensor, array: StateArray, start: int) -> Tensor:
        """float32 elements of one of Adam's moments of a trainable tensor; as :meth:`weights` otherwise."""
        piece, inner = self._window(layout, placed, start)
        place = self._store.place(layout.index, array, piece, write=False)
        target = self._staging[: place.num_bytes]
        self._engine.read(place.path, place.offset_bytes, target).result()
        return target.view(torch.float32)[inner]

    def _window(self, layout: StageLayout, placed: PlacedTensor, start: int) -> tuple[Piece, slice]:
        """What is read for the elements from ``start`` on, and which of it are the tensor's."""
        first = placed.offset + start
        last = placed.offset + placed.spec.num_elements
        chunk = first // layout.chunk_elements
        begin = first // CHUNK_QUANTUM_ELEMENTS * CHUNK_QUANTUM_ELEMENTS
        end = min(
            begin + self._window_elements,
            (chunk + 1) * layout.chunk_elements,
            round_up(last, CHUNK_QUANTUM_ELEMENTS),
        )
        return Piece(index=-1, chunk=chunk, start=begin, stop=end), slice(first - begin, min(last, end) - begin)

    def frozen(self, layout: StageLayout, placed: PlacedTensor, start: int) -> Tensor:
        """Elements of a frozen tensor or buffer from ``start`` on, in its own dtype; as :meth:`weights` otherwise."""
        dtype = getattr(torch, placed.spec.dtype)
        place = self._store.frozen_place(layout.index)
        first = placed.offset + start * dtype.itemsize
        last = placed.offset + placed.spec.num_bytes
        begin = first // IO_ALIGN_BYTES * IO_ALIGN_BYTES
        end = min(begin + self._staging.numel(), round_up(last, IO_ALIGN_BYTES), place.num_bytes)
        target = self._staging[: end - begin]
        self._engine.read(place.path, begin, target).result()
        count = (min(last, end) - first) // dtype.itemsize
        return target[first - begin : first - begin + count * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Free the buffers; idempotent."""
        self._staging = self._values = torch.empty(0)
        self._arena.close()
