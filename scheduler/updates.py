"""The optimizer's side of a run: norms, updates, and the way of states between NVMe and memory. Order is the plan's.

Computation, weights and activations are `runtime.py`'s; AdamW itself is `hoist.optim`'s, slots are the store's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial

import torch
from torch import Tensor

from hoist.optim.adamw import AdamWHyperparameters, PieceUpdater, SegmentUpdate, decay_for
from hoist.optim.norm import SquareSum, clip_scale
from hoist.scheduler.completion import Join, then
from hoist.scheduler.device_updates import DeviceUpdates
from hoist.scheduler.executor import Done
from hoist.scheduler.memory import GRADIENT_BYTES
from hoist.scheduler.ops import Op
from hoist.scheduler.places import Places
from hoist.scheduler.plan_records import Buffers
from hoist.scheduler.read_check import ReadCheck
from hoist.scheduler.scratch import ScratchPlace
from hoist.scheduler.step_state import StepState
from hoist.tiers.checksum import ChunkChecksum
from hoist.tiers.device import Device, Mark
from hoist.tiers.format import MOMENT_ARRAYS, WEIGHT_ARRAYS, StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import Piece, PlacedTensor, StageLayout
from hoist.tiers.manager import Item, ItemKind, Manager, State
from hoist.tiers.store import Store


class Updates:
    """Carries out the ops that bring gradients into weights and moments, for one store and one set of buffers."""

    def __init__(
        self,
        *,
        store: Store,
        engine: IoEngine,
        places: Places,
        manager: Manager,
        buffers: Buffers,
        device: Device,
        pieces: list[tuple[Piece, ...]],
        optimizer: AdamWHyperparameters,
        no_decay_norms: bool,
        clip_norm: float,
        adam_steps: Mapping[str, int],
        stashed_gradients: Mapping[int, ScratchPlace],
        read_check: ReadCheck | None,
    ) -> None:
        """``pieces``: per stage, the cuts that loads and updates share. ``read_check`` checks what is read."""
        self._store = store
        self._engine = engine
        self._places = places
        self._manager = manager
        self._buffers = buffers
        self.pieces = pieces
        self._optimizer = optimizer
        self._no_decay_norms = no_decay_norms
        #: Largest global gradient norm; 0: gradients are not clipped.
        self._clip_norm = clip_norm
        self._read_check = read_check
        self._layouts: tuple[StageLayout, ...] = store.layouts
        #: What updates on the CPU, unless the device does.
        self._updater: PieceUpdater | None = None
        self._device_updates: DeviceUpdates | None = None
        if places.update_scratch is None:
            self._updater = PieceUpdater(optimizer)
        else:
            self._device_updates = DeviceUpdates(
                device, places.update_slots, PieceUpdater(optimizer, scratch=places.update_scratch)
            )
        self._square_sum = SquareSum()
        #: Adam's step count of every trainable tensor; changed by the optim lane alone.
        self.adam_steps: dict[str, int] = dict(adam_steps)
        #: Checksums of the chunk that the optim lane writes now.
        self._checksum: ChunkChecksum | None = None
        #: Finished checksums of chunks whose writes are under way.
        self._checksums: dict[tuple[int, int], dict[StateArray, int]] = {}
        #: Guards what I/O threads change too: counts of a step's pieces, _checksums, the filling of kept chunks.
        self._lock = threading.Lock()
        #: Per stage, its own trainable tensors by name.
        self._own: list[dict[str, PlacedTensor]] = [
            {placed.spec.name: placed for placed in layout.trainable} for layout in self._layouts
        ]
        #: Per stage and piece, whose weight buffers hold a part of it: the stage's own and its borrowers'.
        self._users = [
            [
                [
                    user
                    for user, own in enumerate(places.stages)
                    if user == stage
                    or any(lent.owner == stage and piece.overlaps(lent.placed) for lent in own.borrowed)
                ]
                for piece in stage_pieces
            ]
            for stage, stage_pieces in enumerate(pieces)
        ]
        #: Stages with trainable tensors: each has a norm.
        self._num_trained = sum(bool(stage_pieces) for stage_pieces in pieces)
        #: Number of each kept chunk in the residency table.
        self._kept_buffers = {key: number for number, key in enumerate(places.kept)}
        #: Where the gradients of delayed pieces wait: path and byte offset of the stage's first element.
        self._stashed_gradients = stashed_gradients

    def release(self) -> None:
        """Let go of the buffers: no op may follow."""
        self._device_updates = None

    def begin(self, state: StepState) -> None:
        """Count what is to be done with the step's gradients and chunks, before the executor runs its plan."""
        state.touched = [set() for _ in self.pieces]
        state.gradient_uses = [len(pieces) for pieces in self.pieces]
        if self._buffers.speculative:  # pieces that are updated at once, and stashed or perhaps updated again
            for stage, at_once in enumerate(self._buffers.delayed_from):
                state.gradient_uses[stage] += at_once
        for stage, pieces in enumerate(self.pieces):
            for piece in pieces:
                key = (stage, piece.chunk)
                state.chunks_left[key] = state.chunks_left.get(key, 0) + 1
        state.redo_left = dict(state.chunks_left)

    # ------------------------------------------------------------------ what stays in memory

    def kept_arrays(self, stage: int, chunk: int) -> frozenset[StateArray]:
        kept = self._places.kept.get((stage, chunk))
        return frozenset() if kept is None else frozenset(kept.arrays)

    def _kept_items(self, stage: int, chunk: int) -> dict[Item, int]:
        """What is kept of a chunk, as the residency table has it, each with the bytes that an element of it takes."""
        kept = self.kept_arrays(stage, chunk)
        return {
            Item(kind, stage, chunk): sum(array.itemsize for array in arrays)
            for kind, arrays in ((ItemKind.KEPT_WEIGHTS, WEIGHT_ARRAYS), (ItemKind.KEPT_MOMENTS, MOMENT_ARRAYS))
            if kept.issuperset(arrays)
        }

    def _arrays(self, op: Op, piece: Piece) -> dict[StateArray, Tensor]:
        """uint8 views of the four arrays of a piece: in the op's state slot, or where they are kept."""
        kept = self._places.kept.get((op.stage, piece.chunk))
        return {
            array: kept.bytes_of(array, piece)
            if kept is not None and array in kept.arrays
            else self._places.states[op.slot].bytes_of(position, piece.num_elements)
            for position, array in enumerate(StateArray)
        }

    def read_kept(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.stage][op.piece]
        kept = self._places.kept[op.stage, piece.chunk]
        items = self._kept_items(op.stage, piece.chunk)
        with self._lock:
            if all(self._manager.state(item) is State.STORED for item in items):  # the first piece of the chunk
                elements = self._layouts[op.stage].used_elements()[piece.chunk]
                parts = sum(other.chunk == piece.chunk for other in self.pieces[op.stage])
                for item, itemsize in items.items():
                    buffer = self._kept_buffers[op.stage, piece.chunk]
                    self._manager.fill(item, buffer, itemsize * elements, parts=parts)

        def filled() -> None:
            if self._read_check is not None:
                arrays = {array: kept.bytes_of(array, piece) for array in kept.arrays}
                self._read_check.piece(state.step, op.stage, piece, arrays)
            for item in items:
                self._manager.filled(item)

        join = Join(len(kept.arrays), then(done, filled))
        for array in kept.arrays:
            place = self._store.place(op.stage, array, piece, write=False)
            join.start(partial(self._engine.read, place.path, place.offset_bytes, kept.bytes_of(array, piece)))

    def write_kept(self, op: Op, state: StepState) -> None:
        """Bring a kept chunk to NVMe; nothing of it is in flight any more when this returns or raises."""
        chunk = self.pieces[op.stage][op.piece].chunk
        items = self._kept_items(op.stage, chunk)
        if not state.commit_due or any(self._manager.state(item) is not State.DIRTY for item in items):
            return
        for item in items:
            self._manager.write(item)
        layout = self._layouts[op.stage]
        kept = self._places.kept[op.stage, chunk]
        start = chunk * layout.chunk_elements
        whole = Piece(index=0, chunk=chunk, start=start, stop=start + layout.used_elements()[chunk])
        # Moments that are not kept were written just now: the weights join them.
        again = len(kept.arrays) < len(StateArray)
        futures: list[Future[None]] = []
        checksums = ChunkChecksum(layout, chunk)
        try:
            for array, data in kept.arrays.items():
                place = self._store.place(op.stage, array, whole, write=True, again=again)
                futures.append(self._engine.write(place.path, place.offset_bytes, data))
            for array, data in kept.arrays.items():
                checksums.extend(array, data)
        finally:
            wait(futures)
        for future in futures:
            future.result()
        self._store.note_written(op.stage, chunk, checksums.finish(kept.arrays), again=again)
        for item, itemsize in items.items():
            num_bytes = itemsize * whole.num_elements
            self._manager.written(item, num_bytes)
            self._manager.save(item.kind, written_bytes=-num_bytes)

    # ------------------------------------------------------------------ gradients and their norm

    def norm(self, op: Op, state: StepState) -> None:
        if not self._buffers.separate:  # else they were added on the device
            self.take_loans(op.stage, state)
        places = self._places.stages[op.stage]
        total = 0.0
        for name, placed in self._own[op.stage].items():
            if name in state.touched[op.stage]:
                total += self._square_sum.square_sum(places.waiting_gradient(placed))
                self.adam_steps[name] += 1
                state.counted[name] = self.adam_steps[name]
        state.square_sums[op.stage] = total
        if len(state.square_sums) == self._num_trained:
            self._conclude(state)

    def take_loans(self, stage: int, state: StepState) -> None:
        """Add what borrowers have left to the owner's own gradient, once both are complete, where both are.

        Own and lent sums are kept apart until then, so that the result does not depend on the plan's order.
        """
        touched = state.touched[stage]
        for name in sorted(state.lent & self._own[stage].keys()):
            gradient = self._places.stages[stage].gradient(self._own[stage][name])
            if name in touched:
                gradient.add_(self._places.loans[name])
            else:
                gradient.copy_(self._places.loans[name])
                touched.add(name)
            state.lent.remove(name)

    def _conclude(self, state: StepState) -> None:
        """All gradients of a step are measured: settle what its delayed updates do."""
        state.adam_steps = dict(self.adam_steps)
        if not self._clip_norm:
            return
        norm = state.grad_norm()
        if math.isfinite(norm):
            state.scale = clip_scale(norm, self._clip_norm)
            return
        state.skipped = True  # updates wait for this, or are guesses that are taken back
        for touched in state.touched:
            for name in touched:
                self.adam_steps[name] -= 1
        state.adam_steps = dict(self.adam_steps)

    def _used_gradient(self, stage: int, state: StepState) -> None:
        """The gradient of one more piece is not needed in its buffer any more."""
        with self._lock:
            state.gradient_uses[stage] -= 1
            left = state.gradient_uses[stage]
        if not left:
            kind = ItemKind.WAITING_GRADIENT if self._buffers.separate else ItemKind.GRADIENT
            self._manager.discard(Item(kind, stage))

    def stash_gradient(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.stage][op.piece]
        path, offset = self._stashed_gradients[op.stage]
        source = self._places.stages[op.stage].waiting_gradients[piece.start : piece.stop].view(torch.uint8)

        def stashed() -> None:
            self._manager.stash(op.stage, op.piece, source.nbytes)
            self._used_gradient(op.stage, state)

        noted = then(done, stashed)
        future = self._engine.write(path, offset + GRADIENT_BYTES * piece.start, source)
        future.add_done_callback(Join(1, noted).part)

    # ------------------------------------------------------------------ updates

    def read_states(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.stage][op.piece]
        if self._is_idle(op, piece, state):
            done(None)
            return
        slot = self._places.states[op.slot]
        item = Item(ItemKind.STATES, op.stage, op.piece)
        kept = self.kept_arrays(op.stage, piece.chunk)
        left = kept | frozenset(WEIGHT_ARRAYS) if op.loaded else kept
        moved = [(position, array) for position, array in enumerate(StateArray) if array not in left]
        num_bytes = sum(array.itemsize for _, array in moved) * piece.num_elements
        self._manager.expire(item)  # its last slot may be another one, which nobody has taken since
        self._manager.fill(item, op.slot, num_bytes)

        def read() -> None:
            if self._read_check is not None:
                arrays = {array: slot.bytes_of(position, piece.num_elements) for position, array in moved}
                self._read_check.piece(state.step, op.stage, piece, arrays, again=op.redo)
            self._manager.filled(item)

        join = Join(len(moved) + op.stashed, then(done, read))
        for position, array in moved:
            place = self._store.place(op.stage, array, piece, write=False, again=op.redo)
            target = slot.bytes_of(position, piece.num_elements)
            join.start(partial(self._engine.read, place.path, place.offset_bytes, target))
        if op.stashed:
            path, offset = self._stashed_gradients[op.stage]
            target = slot.gradient_bytes(piece.num_elements)
            join.start(partial(self._engine.read, path, offset + GRADIENT_BYTES * piece.start, target))

    def _is_made(self, op: Op, piece: Piece, state: StepState) -> bool:
        """The update is made: some of the chunk changes, or what was guessed wrong is written once more."""
        if op.redo:
            return not self._is_idle(op, piece, state)
        return (self._is_guess(op) or not state.skipped) and self._chunk_is_touched(op.stage, piece.chunk, state)

    def _gradient(self, op: Op, piece: Piece) -> Tensor:
        """Where the gradient of a piece waits for its update, float32."""
        if op.stashed:
            return self._places.states[op.slot].gradient(piece.num_elements)
        return self._places.stages[op.stage].waiting_gradients[piece.start : piece.stop]

    def _scale(self, op: Op, state: StepState) -> float:
        """What the gradients of an update are multiplied by."""
        return 1.0 if self._is_guess(op) else state.scale

    def update_on_device(self, op: Op, state: StepState, after: Sequence[Mark]) -> Mark | None:
        """Have AdamW done there, behind ``after``; None if the piece's states stay as they are. :meth:`update` does the
        rest."""
        piece = self.pieces[op.stage][op.piece]
        segments = self._segments(op, piece, state) if self._is_made(op, piece, state) else []
        if not segments:
            return None
        if self._device_updates is None:
            raise RuntimeError(f"{op}: updates run on the CPU")
        return self._device_updates.put(
            self._arrays(op, piece), self._gradient(op, piece), self._scale(op, state), segments, after
        )

    def update(self, op: Op, state: StepState) -> None:
        piece = self.pieces[op.stage][op.piece]
        if self._is_made(op, piece, state):
            if not op.redo:
                state.updated.add((op.stage, piece.chunk))
            self._update_piece(op, piece, state)
        if op.fill:
            arrays = self._arrays(op, piece)
            hi, lo = (arrays[array].view(torch.int16) for array in WEIGHT_ARRAYS)
            self._places.put_weights(op.stage, op.stage, piece, hi, lo)
            self._manager.filled(Item(ItemKind.WEIGHTS, op.stage))
        if op.stashed:
            self._manager.unstash(op.stage, op.piece)
        if not op.stashed or (self._buffers.speculative and not op.delayed):
            self._used_gradient(op.stage, state)

    def _update_piece(self, op: Op, piece: Piece, state: StepState) -> None:
        kept = self.kept_arrays(op.stage, piece.chunk)
        for item, itemsize in self._kept_items(op.stage, piece.chunk).items():
            self._manager.modify(item)
            num_bytes = itemsize * piece.num_elements
            read_bytes = 0 if op.loaded and item.kind is ItemKind.KEPT_WEIGHTS else num_bytes
            self._manager.save(item.kind, read_bytes=read_bytes, written_bytes=num_bytes)
        if len(kept) < len(StateArray):
            # Loaded weights join the moments in the slot.
            num_bytes = sum(array.itemsize for array in StateArray if array not in kept) * piece.num_elements
            self._manager.modify(Item(ItemKind.STATES, op.stage, op.piece), num_bytes=num_bytes)
        places = self._places.stages[op.stage]
        for user in self._users[op.stage][op.piece]:
            if user not in op.refresh and not (op.fill and user == op.stage):
                self._manager.expire(Item(ItemKind.WEIGHTS, user))
        found = self._arrays(op, piece)
        weight_hi, weight_lo = (found[array].view(torch.int16) for array in WEIGHT_ARRAYS)
        segments = self._segments(op, piece, state)
        # Without segments a guess is taken back, whose version before is written once more, or only other pieces of the
        # chunk have changed; what is loaded must come to the slot all the same.
        if self._updater is not None and (segments or op.loaded):
            gradient = self._gradient(op, piece)
            if (scale := self._scale(op, state)) != 1.0:
                gradient.mul_(scale)
            exp_avg, exp_avg_sq = (found[array].view(torch.float32) for array in MOMENT_ARRAYS)
            self._updater.update(
                weight_hi=weight_hi,
                weight_lo=weight_lo,
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                gradient=gradient,
                segments=segments,
                weights=places.piece_weights(piece) if op.loaded else None,
            )
        for keeper in () if self._buffers.separate else op.refresh:
            if not (op.loaded and keeper == op.stage):  # else the update has been made there
                self._places.put_weights(keeper, op.stage, piece, weight_hi, weight_lo)
            self._manager.refresh(Item(ItemKind.WEIGHTS, keeper))
        if len(kept) < len(StateArray):
            self._extend_checksum(op, piece, {array: data for array, data in found.items() if array not in kept})

    def refreshed(self, op: Op, state: StepState) -> tuple[Tensor, Tensor] | None:
        """Both halves of the new weights of a piece (int16) that a REFRESH brings on; None if they are the old ones."""
        piece = self.pieces[op.owner][op.piece]
        changed = (op.owner, piece.chunk) in state.updated and (not op.redo or state.guessed_wrong)
        if not (op.fill or changed):
            return None
        kept = self._places.kept.get((op.owner, piece.chunk))
        found = [
            kept.bytes_of(array, piece)
            if kept is not None and array in kept.arrays
            else self._places.states[op.slot].bytes_of(position, piece.num_elements)
            for position, array in enumerate(WEIGHT_ARRAYS)
        ]
        hi, lo = (half.view(torch.int16) for half in found)
        return hi, lo

    def _segments(self, op: Op, piece: Piece, state: StepState) -> list[SegmentUpdate]:
        """What of a piece an update changes: the tensors that have a gradient; nothing if the step is skipped."""
        touched = state.touched[op.stage]
        return [
            SegmentUpdate(
                start=segment.start - piece.start,
                stop=segment.start - piece.start + segment.num_elements,
                adam_step=state.counted[segment.name],
                lr=state.lr,
                weight_decay=self._decay(op.stage, segment.name),
            )
            for segment in self._layouts[op.stage].segments(piece.start, piece.stop)
            if segment.name in touched and (self._is_guess(op) or not state.skipped)
        ]

    def _extend_checksum(self, op: Op, piece: Piece, written: Mapping[StateArray, Tensor]) -> None:
        """Of the chunk that is being written, by one more piece of the arrays that go to NVMe."""
        layout = self._layouts[op.stage]
        first_of_chunk = piece.start == piece.chunk * layout.chunk_elements
        if first_of_chunk:
            self._checksum = ChunkChecksum(layout, piece.chunk)
        if self._checksum is None:
            raise RuntimeError(f"{op}: pieces of a chunk must come in order")
        for array, data in written.items():
            self._checksum.extend(array, data)
        is_last = op.piece + 1 == len(self.pieces[op.stage]) or self.pieces[op.stage][op.piece + 1].chunk != piece.chunk
        if is_last:
            with self._lock:
                self._checksums[op.stage, piece.chunk] = self._checksum.finish(written)
            self._checksum = None

    def write_states(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.stage][op.piece]
        idle = self._is_idle(op, piece, state) if op.redo else (op.stage, piece.chunk) not in state.updated
        if idle:
            done(None)  # no tensor of the chunk has a gradient: its stored version stays the newest
            return
        item = Item(ItemKind.STATES, op.stage, op.piece)
        self._manager.write(item)
        kept = self.kept_arrays(op.stage, piece.chunk)
        moved = {array: data for array, data in self._arrays(op, piece).items() if array not in kept}

        def written() -> None:
            self._manager.written(item, sum(data.nbytes for data in moved.values()))
            self._note_piece(op, piece, state, kept)

        join = Join(len(moved), then(done, written))
        for array, source in moved.items():
            place = self._store.place(op.stage, array, piece, write=True, again=op.redo)
            join.start(partial(self._engine.write, place.path, place.offset_bytes, source))

    def _note_piece(self, op: Op, piece: Piece, state: StepState, kept: frozenset[StateArray]) -> None:
        """A piece has been written; with the last of its chunk, that is the version to read."""
        key = (op.stage, piece.chunk)
        with self._lock:
            left = state.redo_left if op.redo else state.chunks_left
            left[key] -= 1
            if left[key]:
                return
            checksums = self._checksums.pop(key)
        self._store.note_written(*key, checksums, kept=kept, again=op.redo)

    def _chunk_is_touched(self, stage: int, chunk: int, state: StepState) -> bool:
        layout = self._layouts[stage]
        first = chunk * layout.chunk_elements
        touched = state.touched[stage]
        return any(segment.name in touched for segment in layout.segments(first, first + layout.chunk_elements))

    def _is_idle(self, op: Op, piece: Piece, state: StepState) -> bool:
        """The op is there to make an update again, and that is not needed."""
        return op.redo and not (state.guessed_wrong and (op.stage, piece.chunk) in state.updated)

    def _is_guess(self, op: Op) -> bool:
        """The update is made as if nothing needed scaling, even if that should be known by now: so all pieces of a
        chunk are treated alike, and so is every run.
        """
        return self._buffers.speculative and not op.delayed

    def _decay(self, stage: int, name: str) -> float:
        shape = self._own[stage][name].spec.shape
        return decay_for(name, shape, self._optimizer.weight_decay, no_decay_norms=self._no_decay_norms)
