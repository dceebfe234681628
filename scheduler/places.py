"""Where each buffer of a run lies: the regions of host and device memory as tensors, by the names that plans use.

Made once when a run is set up; what moves bytes here is called by those who know when (`runtime.py`, `updates.py`).
Sizes come from `memory.py`, the cuts from `tiers/layout.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoist.optim.adamw import UpdateScratch
from hoist.optim.split import merge, merge_block
from hoist.scheduler.frozen import FrozenLayout, computed_tensors, stored_tensors, widen
from hoist.scheduler.memory import (
    GRADIENT_BYTES,
    NUM_BOUNCE_SLOTS,
    NUM_UPDATE_SLOTS,
    PAGE_BYTES,
    STAGING_BYTES,
    STATE_BYTES,
    UPDATE_BYTES,
    MemoryPlan,
    steps_bytes,
)
from hoist.tiers.arena import Arena
from hoist.tiers.device import Device
from hoist.tiers.format import WEIGHT_ARRAYS, StateArray
from hoist.tiers.layout import (
    CHUNK_QUANTUM_ELEMENTS,
    DTYPE_BYTES,
    TENSOR_ALIGN_ELEMENTS,
    Piece,
    PlacedTensor,
    StageLayout,
    round_up,
)

#: Elements of ``weight_hi`` in a page: what is read straight into a weight buffer is made of these.
PAGE_ELEMENTS = PAGE_BYTES // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Borrowed:
    """A tensor that a stage uses and another stage owns (tied weights)."""

    owner: int
    placed: PlacedTensor
    """Its place in the owner's array."""
    offset: int
    """First element in the borrower's weight buffer, counted like the stage's own elements."""

    def pages(self, piece: Piece) -> slice:
        """What of the owner's array has this tensor's part of an overlapping piece, in whole pages of ``weight_hi``.

        Where weights are read straight into the buffer, their room there is of whole pages too.
        """
        end = self.placed.offset + self.placed.spec.num_elements
        first = self.placed.offset // PAGE_ELEMENTS * PAGE_ELEMENTS
        return slice(max(piece.start, first), min(piece.stop, round_up(end, PAGE_ELEMENTS)))

    def position(self, element: int) -> int:
        """Where in the borrower's weight buffer an element of the owner's array lies."""
        return self.offset + element - self.placed.offset


def weight_elements(layout: StageLayout) -> int:
    """Elements that a stage's own trainable tensors take in a weight or gradient buffer: whole pieces."""
    return round_up(layout.num_elements, CHUNK_QUANTUM_ELEMENTS)


def lay_out_borrowed(
    layout: StageLayout, lent: Sequence[tuple[int, PlacedTensor]], *, straight: bool = False
) -> tuple[Borrowed, ...]:
    """Put the tensors that a stage borrows behind its own, on the same 64-element boundaries.

    ``straight``: as far behind the beginning of a page as in the owner's array, each with pages of its own.
    """
    position = weight_elements(layout)
    borrowed: list[Borrowed] = []
    for owner, placed in lent:
        quantum = PAGE_ELEMENTS if straight else TENSOR_ALIGN_ELEMENTS
        offset = position + (placed.offset % quantum)
        borrowed.append(Borrowed(owner=owner, placed=placed, offset=offset))
        position = round_up(offset + placed.spec.num_elements, quantum)
    return tuple(borrowed)


def weight_bytes(
    layout: StageLayout, borrowed: Sequence[Borrowed], frozen: FrozenLayout, dtype: str = "float32"
) -> int:
    """Bytes of a stage's weight buffer: own weights and borrowed ones in ``dtype``, then the frozen part."""
    return _trained_bytes(layout, borrowed, dtype) + frozen.num_bytes


def _trained_bytes(layout: StageLayout, borrowed: Sequence[Borrowed], dtype: str) -> int:
    elements = weight_elements(layout)
    if borrowed:
        elements = borrowed[-1].offset + borrowed[-1].placed.spec.num_elements
    return round_up(elements * DTYPE_BYTES[dtype], PAGE_BYTES)


class StateSlot:
    """One optimizer state slot: the four arrays of a piece, one after another."""

    def __init__(self, raw: Tensor, piece_elements: int) -> None:
        self._raw = raw
        self._piece_elements = piece_elements

    def bytes_of(self, position: int, num_elements: int) -> Tensor:
        """uint8 view of array ``position`` (0 weight_hi, 1 weight_lo, 2 exp_avg, 3 exp_avg_sq) for a piece."""
        itemsize = (2, 2, 4, 4)[position]
        start = (0, 2, 4, 8)[position] * self._piece_elements
        return self._raw[start : start + itemsize * num_elements]

    def gradient_bytes(self, num_elements: int) -> Tensor:
        """uint8 view of a gradient that has come back from scratch; only where slots were made with room for it."""
        start = STATE_BYTES * self._piece_elements
        return self._raw[start : start + GRADIENT_BYTES * num_elements]

    def gradient(self, num_elements: int) -> Tensor:
        """The same, float32 [num_elements]."""
        return self.gradient_bytes(num_elements).view(torch.float32)

    def arrays(self, num_elements: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """weight_hi, weight_lo (int16), exp_avg, exp_avg_sq (float32), each [num_elements]."""
        return (
            self.bytes_of(0, num_elements).view(torch.int16),
            self.bytes_of(1, num_elements).view(torch.int16),
            self.bytes_of(2, num_elements).view(torch.float32),
            self.bytes_of(3, num_elements).view(torch.float32),
        )


class KeptChunk:
    """What stays in host memory of one chunk from step to step: its arrays, as they are on NVMe."""

    def __init__(self, start: int, arrays: Mapping[StateArray, Tensor]) -> None:
        #: First element of the chunk, counted in the stage.
        self._start = start
        #: uint8, as far as pieces cover the chunk.
        self.arrays = dict(arrays)

    def bytes_of(self, array: StateArray, piece: Piece) -> Tensor:
        """uint8 view of a piece of a kept array."""
        itemsize = array.itemsize
        return self.arrays[array][itemsize * (piece.start - self._start) : itemsize * (piece.stop - self._start)]


class StagePlaces:
    """One stage's views of the weight and gradient regions."""

    def __init__(
        self,
        layout: StageLayout,
        borrowed: Sequence[Borrowed],
        frozen: FrozenLayout,
        weights: Tensor,
        gradients: Tensor,
        kept_frozen: Tensor | None,
        host_gradients: Tensor | None,
        dtype: str,
    ) -> None:
        """``host_gradients``: where gradients wait for updates, if a separate device has ``weights`` and ``gradients``.

        ``kept_frozen`` is in host memory in any case.
        """
        self.layout = layout
        self.borrowed = tuple(borrowed)
        self.frozen_layout = frozen
        trained = _trained_bytes(layout, borrowed, dtype)
        #: In the dtype of the computation: own tensors at their layout offsets, then borrowed ones.
        self.weights = weights[:trained].view(getattr(torch, dtype))
        part = weights[trained : trained + frozen.num_bytes]
        #: uint8: frozen tensors as they are stored; behind the weights, or where they are kept from step to step.
        self.frozen = part[frozen.stored_from :] if kept_frozen is None else kept_frozen
        #: uint8: frozen tensors as they are computed with.
        self._computed = part if frozen.widens or host_gradients is not None else self.frozen
        #: float32: gradients of own trainable tensors at their layout offsets, as backward passes make them.
        self.gradients = gradients.view(torch.float32)
        #: The same where norms and updates take them.
        self.waiting_gradients = self.gradients if host_gradients is None else host_gradients.view(torch.float32)
        #: float32: where a new store's values of own tensors are put, at their layout offsets.
        self.initial = self.weights if self.weights.dtype is torch.float32 else self.gradients

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the stage by name, own and borrowed, as views with the tensor's shape."""
        views: dict[str, Tensor] = {}
        for placed in self.layout.trainable:
            views[placed.spec.name] = _shaped(self.weights, placed.offset, placed)
        for borrowed in self.borrowed:
            views[borrowed.placed.spec.name] = _shaped(self.weights, borrowed.offset, borrowed.placed)
        views.update(computed_tensors(self.frozen_layout, self._computed))
        return views

    def stored(self) -> dict[str, Tensor]:
        """The stage's own tensors by name, as a new store is given them: frozen ones in the dtype they are kept in."""
        views = {placed.spec.name: _shaped(self.initial, placed.offset, placed) for placed in self.layout.trainable}
        own = {placed.spec.name for placed in self.layout.frozen}
        views.update((name, view) for name, view in stored_tensors(self.frozen_layout, self.frozen) if name in own)
        return views

    def widen(self, through: Tensor | None) -> None:
        """Bring the frozen tensors, which have been read, to the form that is computed with. ``through``: see there."""
        widen(self.frozen_layout, self.frozen, self._computed, through=through)

    def gradient(self, placed: PlacedTensor) -> Tensor:
        """The gradient of one own trainable tensor as backward passes make it, with its shape."""
        return _shaped(self.gradients, placed.offset, placed)

    def waiting_gradient(self, placed: PlacedTensor) -> Tensor:
        """The same where norms and updates take it."""
        return _shaped(self.waiting_gradients, placed.offset, placed)

    def piece_weights(self, piece: Piece) -> Tensor:
        """View of one own piece in the weight buffer, padding included."""
        return self.weights[piece.start : piece.stop]


def put_weights(hi: Tensor, lo: Tensor, target: Tensor) -> None:
    """Put weights, given as int16 halves, where they are computed with: in float32 merged, in bfloat16 hi alone."""
    if target.dtype is torch.bfloat16:
        target.view(torch.int16).copy_(hi)
    else:
        merge(hi, lo, target)


def _shaped(flat: Tensor, offset: int, placed: PlacedTensor) -> Tensor:
    return flat[offset : offset + placed.spec.num_elements].view(placed.spec.shape)


class _Regions:
    """Takes one region after another out of a tensor of bytes."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._taken = 0

    def take(self, num_bytes: int) -> Tensor:
        """The next ``num_bytes``, uint8; each region begins on a multiple of 4096 bytes."""
        start, self._taken = self._taken, self._taken + round_up(num_bytes, PAGE_BYTES)
        return self._memory[start : start + num_bytes]


class Places:
    """All regions of a run: in one arena, and of a separate device in one region of its memory."""

    def __init__(
        self,
        *,
        memory: MemoryPlan,
        layouts: Sequence[StageLayout],
        borrowed: Sequence[Sequence[Borrowed]],
        frozen: Sequence[FrozenLayout],
        loans: Mapping[str, PlacedTensor],
        device: Device,
        dtype: str = "float32",
    ) -> None:
        """``loans`` are the trainable tensors that some stage borrows, by name; ``dtype`` is the computation's.

        With a separate ``device`` the arena is pinned for it. Raises BudgetError, with nothing left allocated, if the
        system or the device refuses the memory.
        """
        self._device = device
        #: A separate device has what is computed with; it must be closed after this.
        self._separate = memory.demand.separate
        #: Freed by :meth:`close`.
        self.arena = Arena(memory.arena_bytes)
        try:
            host = _Regions(self.arena.lease(memory.arena_bytes, "buffers").tensor)
            computing = host
            if self._separate:
                device.pin(self.arena.bytes_at(0, round_up(memory.arena_bytes, PAGE_BYTES)))
                computing = _Regions(device.allocate(memory.region_bytes, "buffers"))
            self._carve(memory, layouts, borrowed, frozen, loans, host, computing, dtype)
        except BaseException:
            self._free_arena()
            raise

    def _carve(
        self,
        memory: MemoryPlan,
        layouts: Sequence[StageLayout],
        borrowed: Sequence[Sequence[Borrowed]],
        frozen: Sequence[FrozenLayout],
        loans: Mapping[str, PlacedTensor],
        host: _Regions,
        computing: _Regions,
        dtype: str,
    ) -> None:
        weights = computing.take(memory.weight_bytes)
        gradients = computing.take(memory.gradients.num_bytes)
        loan_region = computing.take(memory.demand.loan_bytes).view(torch.float32)
        #: Scratch for one block of a weight's gradient, in the dtype of the computation.
        self.block = computing.take(memory.demand.block_bytes).view(getattr(torch, dtype))
        activations = computing.take(memory.activation_bytes)
        kept_region = host.take(memory.kept_bytes)
        host_gradients = host.take(memory.host_gradients.num_bytes) if self._separate else None
        lowered = host.take(memory.host_activation_bytes)
        #: uint8: all gradient buffers in host memory together, which creation uses for staging.
        self.gradient_region = gradients if host_gradients is None else host_gradients
        if self._separate:
            staging, states = computing.take(memory.staging_bytes), host.take(memory.states_bytes)
            ring = states
        else:
            ring = host.take(memory.ring_bytes)
            staging, states = ring[: memory.staging_bytes], ring[memory.staging_bytes :]
        #: uint8: staging and state slots in host memory together, which creation uses too.
        self.ring = ring
        #: uint8: the ring between files and a separate device; empty without one.
        self.bounce = host.take(NUM_BOUNCE_SLOTS * memory.bounce_slot_bytes)
        #: uint8, on a separate device: a piece's halves and merging them, for what comes from host memory. Used in the
        #: order of one stream. Empty without such a device.
        self._upload = computing.take(memory.upload_bytes)
        #: On a separate device: pieces that AdamW works on, with room for their gradients; none where the CPU does.
        self.update_slots: list[StateSlot] = []
        #: What AdamW needs there besides.
        self.update_scratch: UpdateScratch | None = None
        if memory.updates_bytes:
            elements = memory.piece_elements
            for _ in range(NUM_UPDATE_SLOTS):
                self.update_slots.append(StateSlot(computing.take(UPDATE_BYTES * elements), elements))
            self.update_scratch = UpdateScratch(
                weights=computing.take(4 * elements).view(torch.float32),
                patterns=computing.take(4 * elements).view(torch.int32),
                steps=computing.take(steps_bytes(elements)).view(torch.float32),
            )
        #: What is kept of chunks, by stage and chunk.
        self.kept: dict[tuple[int, int], KeptChunk] = {}
        kept_frozen: dict[int, Tensor] = {}
        taken = 0
        kept = memory.kept
        for stage, chunks in enumerate(kept.weights):
            layout = layouts[stage]
            for chunk in sorted(chunks):
                arrays = {}
                for array in StateArray if chunk in kept.moments[stage] else WEIGHT_ARRAYS:
                    length = array.itemsize * layout.used_elements()[chunk]
                    arrays[array] = kept_region[taken : taken + length]
                    taken += length
                self.kept[stage, chunk] = KeptChunk(chunk * layout.chunk_elements, arrays)
        for stage in sorted(kept.frozen):
            kept_frozen[stage] = kept_region[taken : taken + frozen[stage].stored_bytes]
            taken += frozen[stage].stored_bytes
        self.stages: list[StagePlaces] = []
        for index, (layout, lent) in enumerate(zip(layouts, borrowed, strict=True)):
            start, size = memory.weight_offset(index), memory.demand.stages[index].weights
            length = memory.demand.stages[index].gradients
            first, waiting = memory.gradients.offset(index), memory.host_gradients.offset(index)
            self.stages.append(
                StagePlaces(
                    layout,
                    lent,
                    frozen[index],
                    weights[start : start + size],
                    gradients[first : first + length],
                    kept_frozen.get(index),
                    None if host_gradients is None else host_gradients[waiting : waiting + length],
                    dtype,
                )
            )
        #: Gradients that borrowers leave for the owner, by tensor name, with the tensor's shape.
        self.loans: dict[str, Tensor] = {}
        position = 0
        for name, placed in loans.items():
            self.loans[name] = _shaped(loan_region, position, placed)
            position = round_up(position + placed.spec.num_elements, TENSOR_ALIGN_ELEMENTS)
        staging_bytes = memory.piece_elements * STAGING_BYTES
        state_bytes = memory.piece_elements * memory.state_bytes
        #: Staging slots: weight_hi in the first half, weight_lo in the second.
        self.staging = [
            staging[slot * staging_bytes : (slot + 1) * staging_bytes] for slot in range(memory.num_staging)
        ]
        self.states = [
            StateSlot(states[slot * state_bytes : (slot + 1) * state_bytes], memory.piece_elements)
            for slot in range(memory.num_states)
        ]
        size = memory.demand.activation_bytes
        self.activations = [activations[slot * size : (slot + 1) * size] for slot in range(memory.num_activations)]
        #: Slots in host memory beside those of a separate device; none without one.
        self.host_activations = [
            lowered[slot * size : (slot + 1) * size] for slot in range(memory.num_host_activations)
        ]

    def put_weights(
        self, stage: int, owner: int, piece: Piece, hi: Tensor, lo: Tensor, *, from_host: bool = True
    ) -> None:
        """Put a piece of ``owner`` into the weight buffer of ``stage``: its own, or what it borrows of the piece.

        From both halves, int16, if weights are computed with in float32; in bfloat16 ``hi`` is all of it.
        ``from_host``: the halves are in host memory. If the buffer is a separate device's, this is work for its stream
        of uploads.
        """
        places = self.stages[stage]
        if owner == stage:
            self._merge(hi, lo, places.piece_weights(piece), from_host=from_host)
            return
        for borrowed in places.borrowed:
            if borrowed.owner != owner or not piece.overlaps(borrowed.placed):
                continue
            first = max(piece.start, borrowed.placed.offset)
            last = min(piece.stop, borrowed.placed.offset + borrowed.placed.spec.num_elements)
            target = borrowed.position(first)
            source = slice(first - piece.start, last - piece.start)
            self._merge(hi[source], lo[source], places.weights[target : target + last - first], from_host=from_host)

    def _merge(self, hi: Tensor, lo: Tensor, out: Tensor, *, from_host: bool) -> None:
        if not self._separate:
            put_weights(hi, lo, out)
            return
        if out.dtype is not torch.float32:
            out.view(torch.int16).copy_(hi, non_blocking=True)
            return
        length = out.numel()
        scratch = self._upload[: 4 * length].view(torch.int32)
        if from_host:
            halves = self._upload[4 * length : 8 * length].view(torch.int16)
            halves[:length].copy_(hi, non_blocking=True)
            halves[length:].copy_(lo, non_blocking=True)
            hi, lo = halves[:length], halves[length:]
        merge_block(hi, lo, out.view(torch.int32), scratch)

    def weight_targets(self, stage: int, owner: int, piece: Piece) -> list[tuple[slice, Tensor]]:
        """Where ``weight_hi`` of a piece of ``owner`` is read straight to, in whole pages: elements of the owner's
        array, and uint8 views of the weight buffer of ``stage``, which computes in bfloat16.
        """
        places = self.stages[stage]
        if owner == stage:
            return [(slice(piece.start, piece.stop), places.piece_weights(piece).view(torch.uint8))]
        found = []
        for lent in places.borrowed:
            if lent.owner == owner and piece.overlaps(lent.placed):
                pages = lent.pages(piece)
                target = slice(lent.position(pages.start), lent.position(pages.stop))
                found.append((pages, places.weights[target].view(torch.uint8)))
        return found

    def widen(self, stage: int) -> None:
        """Bring the frozen tensors of a stage, which have been read, to the form that is computed with.

        If the buffer is a separate device's, this is work for its stream of uploads.
        """
        self.stages[stage].widen(self._upload if self._separate else None)

    def _free_arena(self) -> None:
        if self._separate:
            self._device.unpin(self.arena.bytes_at(0, self.arena.statistics().capacity_bytes))
        self.arena.close()

    def close(self) -> None:
        """Free the memory; the views must not be used any more, and nothing may be left in a separate device's streams.
        """
        self.stages.clear()
        self.kept.clear()
        self.loans.clear()
        self.block = self.gradient_region = self.ring = self.bounce = self._upload = torch.empty(0)
        self.update_scratch = None
        self.update_slots.clear()
        self.staging.clear()
        self.states.clear()
        self.activations.clear()
        self.host_activations.clear()
        self._free_arena()
        self._device.give_back_free()  # what was nearly all of its memory: torch would keep it, for this process alone


def loan_bytes(loans: Mapping[str, PlacedTensor]) -> int:
    """Bytes of the region that :class:`Places` makes for ``loans``."""
    elements = 0
    for placed in loans.values():
        elements = round_up(elements + placed.spec.num_elements, TENSOR_ALIGN_ELEMENTS)
    return round_up(elements * GRADIENT_BYTES, PAGE_BYTES)
