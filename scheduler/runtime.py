"""What each op of a plan does to real tensors and files: the executor's handler. Order is the plan's, not decided here.

`trainer.py` sets this up and feeds it steps; `places.py` says where buffers are; `tiers/store.py` where chunks are.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hoist.optim.adamw import AdamWHyperparameters, PieceUpdater, SegmentUpdate, decay_for
from hoist.optim.norm import SquareSum, clip_scale
from hoist.optim.split import merge
from hoist.scheduler.accumulate import DirectGradients, Target
from hoist.scheduler.context import Context
from hoist.scheduler.executor import Done
from hoist.scheduler.memory import GRADIENT_BYTES
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.places import Places
from hoist.scheduler.plan import Buffers
from hoist.scheduler.read_check import ReadCheck
from hoist.scheduler.stages import EmbedStage, HeadStage, LayerStage, Stage, StagedModel
from hoist.tiers import heap
from hoist.tiers.checksum import ChunkChecksum
from hoist.tiers.errors import TransferError
from hoist.tiers.format import MOMENT_ARRAYS, WEIGHT_ARRAYS, StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import Piece, PlacedTensor, StageLayout
from hoist.tiers.manager import Item, ItemKind, Manager, State
from hoist.tiers.store import Store

Batch = Mapping[str, Tensor]


@dataclass(kw_only=True, slots=True)
class StepState:
    """What belongs to one step while it is under way; the next step may begin before it is finished."""

    step: int
    """Number of the step, from 1."""
    batches: Sequence[Batch]
    """One per micro-batch."""
    num_items: int
    """Counted tokens of the whole step."""
    lr: float
    """Learning rate of its updates."""
    commit_due: bool = False
    """The step is to be committed: what is kept in memory is written once it is updated."""
    commit: Callable[[], None] | None = None
    """Commits the step; called at the next step's turn, if it is set by then."""
    contexts: list[Context | None] = field(default_factory=list)
    """What layers are called with, per micro-batch; made by the embed stage's forward, dropped after its backward."""
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Shape of the boundary activation of each micro-batch."""
    losses: list[Tensor] = field(default_factory=list)
    """Per micro-batch, 0-d."""
    touched: list[set[str]] = field(default_factory=list)
    """Per stage, the own tensors that have got a gradient."""
    lent: set[str] = field(default_factory=set)
    """Tensors whose loan holds a gradient."""
    square_sums: dict[int, float] = field(default_factory=dict)
    """Per stage, once its gradients are complete."""
    adam_steps: dict[str, int] | None = None
    """All tensors' step counts as of the end of this step, once known."""
    scale: float = 1.0
    """What its gradients are multiplied with, once the norm is known: below 1 when they are clipped."""
    skipped: bool = False
    """Its gradients are not finite: nothing is updated."""
    guessed: set[tuple[int, int]] = field(default_factory=set)
    """Chunks (stage, chunk) that were updated before the norm was known, as if nothing needed scaling."""
    updated: set[tuple[int, int]] = field(default_factory=set)
    """Chunks (stage, chunk) with an update to be written."""
    gradient_uses: list[int] = field(default_factory=list)
    """Per stage, pieces whose gradient is still to be used or stashed; then the gradient buffer is free."""
    chunks_left: dict[tuple[int, int], int] = field(default_factory=dict)
    """Pieces of (stage, chunk) that are still to be written."""
    redo_left: dict[tuple[int, int], int] = field(default_factory=dict)
    """The same for updates that are made again."""

    def grad_norm(self) -> float:
        """Global 2-norm of the gradients, before any scaling; the square sums of all stages must be known."""
        return math.sqrt(math.fsum(self.square_sums.values()))

    @property
    def guessed_wrong(self) -> bool:
        """What was updated before the norm was known must be updated again."""
        return self.skipped or self.scale != 1.0


def _accumulate_into(target: Target) -> Callable[[Tensor], None]:
    """A hook that hands over the gradient that autograd has accumulated for one micro-batch."""

    def accumulate(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        # The first gradient is put, not added to zeros, as autograd does: 0.0 + -0.0 would lose a sign.
        if target.touched():
            target.values.add_(gradient)
        else:
            target.values.copy_(gradient)

    return accumulate


def _boundary(op: Op, offset: int) -> Item:
    """The boundary activation behind stage ``op.stage + offset`` for the op's micro-batch."""
    return Item(ItemKind.ACTIVATION, op.stage + offset, op.micro_batch)


def _overlap(piece: Piece, placed: PlacedTensor) -> bool:
    """Part of the tensor lies in the piece."""
    return piece.start < placed.offset + placed.spec.num_elements and placed.offset < piece.stop


def _then(done: Done, note: Callable[[], None]) -> Done:
    """A ``done`` that first notes the success; an error of the noting is the op's error."""

    def finish(error: BaseException | None) -> None:
        if error is None:
            try:
                note()
            except BaseException as raised:
                error = raised
        done(error)

    return finish


def mask_seed(seed: int, step: int, stage: int, micro_batch: int) -> int:
    """What torch is seeded with before a stage sees a micro-batch. Changing this changes every run with dropout."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stage}/{micro_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Join:
    """Calls ``done`` once when ``count`` futures have ended, with the first error."""

    def __init__(self, count: int, done: Done) -> None:
        self._left = count
        self._error: BaseException | None = None
        self._done = done
        self._lock = threading.Lock()

    def start(self, request: Callable[[], Future[None]]) -> None:
        """Make one of the requests. Raises nothing: what making it raises ends its part, and the others still count."""
        try:
            future = request()
        except BaseException as error:
            self._end(error)
        else:
            future.add_done_callback(self.part)

    def part(self, future: Future[None]) -> None:
        self._end(future.exception())

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
            self._left -= 1
            if self._left:
                return
        self._done(self._error)


class Runtime:
    """Carries out ops for one model, one store and one set of buffers."""

    def __init__(
        self,
        *,
        model: StagedModel,
        store: Store,
        engine: IoEngine,
        places: Places,
        manager: Manager,
        buffers: Buffers,
        piece_elements: int,
        optimizer: AdamWHyperparameters,
        no_decay_norms: bool,
        clip_norm: float,
        seed: int,
        adam_steps: Mapping[str, int],
        verify_reads: bool = False,
    ) -> None:
        #: Checks what is read for updates; None: nothing is checked.
        self._read_check = ReadCheck(store) if verify_reads else None
        self._model = model
        self._stages = model.stages
        self._store = store
        self._engine = engine
        self._places = places
        self._manager = manager
        self._buffers = buffers
        self._seed = seed
        self._optimizer = optimizer
        self._no_decay_norms = no_decay_norms
        #: Largest global gradient norm; 0: gradients are not clipped.
        self._clip_norm = clip_norm
        self._layouts: tuple[StageLayout, ...] = store.layouts
        #: Per stage, the cuts that loads and updates share.
        self.pieces: list[tuple[Piece, ...]] = [layout.pieces(piece_elements) for layout in self._layouts]
        self._updater = PieceUpdater(optimizer)
        self._square_sum = SquareSum()
        #: Adam's step count of every trainable tensor; changed by the optim lane alone.
        self.adam_steps: dict[str, int] = dict(adam_steps)
        self._steps: dict[int, StepState] = {}
        #: Kind of the stage that was bound last; changed by the compute lane alone.
        self._bound_kind: type[Stage] | None = None
        #: Step and stage whose backward runs, for the gradient hooks; set by the compute lane alone.
        self._backward: tuple[StepState, int] | None = None
        #: Checksums of the chunk that the optim lane writes now.
        self._checksum: ChunkChecksum | None = None
        #: Finished checksums of chunks whose writes are under way.
        self._checksums: dict[tuple[int, int], dict[StateArray, int]] = {}
        #: Guards chunks_left and _checksums, which I/O threads change too.
        self._lock = threading.Lock()
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
                    or any(lent.owner == stage and _overlap(piece, lent.placed) for lent in own.borrowed)
                ]
                for piece in pieces
            ]
            for stage, pieces in enumerate(self.pieces)
        ]
        self._bound = [places.tensors() for places in places.stages]
        #: Number of each kept chunk in the residency table.
        self._kept_buffers = {key: number for number, key in enumerate(places.kept)}
        #: Where spilled activations and gradients go: path and byte offset, by key.
        self.scratch_activations: dict[tuple[int, int], tuple[Path, int]] = {}
        self.scratch_gradients: dict[int, tuple[Path, int]] = {}
        #: Where the gradients of delayed pieces wait: path and byte offset of the stage's first element.
        self.stashed_gradients: dict[int, tuple[Path, int]] = {}
        self._run: dict[Kind, Callable[[Op, StepState], None]] = {
            Kind.ACQUIRE: self._acquire,
            Kind.OPEN_CHUNK: lambda op, state: None,
            Kind.MERGE: self._merge,
            Kind.BIND: self._bind,
            Kind.UNBIND: self._unbind,
            Kind.FORWARD: self._forward,
            Kind.LOSS: self._loss,
            Kind.BACKWARD: self._backward_op,
            Kind.NORM: self._norm,
            Kind.UPDATE: self._update,
            Kind.WRITE_KEPT: self._write_kept,
            Kind.COMMIT: self._commit,
        }
        self._start: dict[Kind, Callable[[Op, StepState, Done], None]] = {
            Kind.READ_WEIGHTS: self._read_weights,
            Kind.READ_FROZEN: self._read_frozen,
            Kind.READ_KEPT: self._read_kept,
            Kind.READ_STATES: self._read_states,
            Kind.WRITE_STATES: self._write_states,
            Kind.STASH_GRADIENT: self._stash_gradient,
            Kind.SPILL_ACTIVATION: self._spill_activation,
            Kind.FETCH_ACTIVATION: self._fetch_activation,
            Kind.SPILL_GRADIENT: self._spill_gradient,
            Kind.FETCH_GRADIENT: self._fetch_gradient,
        }
        self._direct = self._direct_gradients()

    # ------------------------------------------------------------------ the executor's side

    def begin(self, state: StepState) -> None:
        """Take a step's inputs in, before the executor runs its plan."""
        count = len(state.batches)
        state.contexts = [None] * count
        state.losses = [torch.zeros(())] * count
        state.touched = [set() for _ in self._stages]
        state.gradient_uses = [len(pieces) for pieces in self.pieces]
        if self._buffers.speculative:  # pieces that are updated at once, and stashed or perhaps updated again
            for stage, at_once in enumerate(self._buffers.delayed_from):
                state.gradient_uses[stage] += at_once
        for stage, pieces in enumerate(self.pieces):
            for piece in pieces:
                key = (stage, piece.chunk)
                state.chunks_left[key] = state.chunks_left.get(key, 0) + 1
        state.redo_left = dict(state.chunks_left)
        self._steps[state.step] = state

    def end(self, step: int) -> None:
        """Forget a step whose ops have all ended."""
        self._steps.pop(step, None)
        if self._read_check is not None:
            self._read_check.end(step)

    def release(self) -> None:
        """Let go of the buffers: no op may follow."""
        for stage in self._stages:
            stage.unbind(forget=True)
        self._bound.clear()
        self._direct.clear()
        self._steps.clear()

    def run(self, op: Op, step: int) -> None:
        """Carry out a copy, compute, optim or commit op."""
        try:
            self._run[op.kind](op, self._steps[step - op.delayed])
        except TransferError as error:
            if op.kind is Kind.WRITE_KEPT:
                raise self._failure(op, step, error) from error
            raise

    def start(self, op: Op, step: int, done: Done) -> None:
        """Begin an I/O op. A failed transfer's error says whose bytes they were, and where the store stands."""

        def named(error: BaseException | None) -> None:
            done(self._failure(op, step, error) if isinstance(error, TransferError) else error)

        self._start[op.kind](op, self._steps[step - op.delayed], named)

    def io_bytes(self, op: Op) -> int:
        """Bytes that an I/O op moves."""
        if op.kind in (Kind.SPILL_ACTIVATION, Kind.FETCH_ACTIVATION):
            return self._places.activations[op.slot].nbytes
        if op.kind in (Kind.SPILL_GRADIENT, Kind.FETCH_GRADIENT):
            return self._places.stages[op.stage].gradients.nbytes
        if op.kind is Kind.READ_FROZEN:
            return self._places.stages[op.stage].frozen.nbytes
        stage = op.stage if op.owner < 0 else op.owner
        piece = self.pieces[stage][op.piece]
        if op.kind is Kind.STASH_GRADIENT:
            return GRADIENT_BYTES * piece.num_elements
        kept = self._kept_arrays(stage, piece.chunk)
        arrays = kept if op.kind is Kind.READ_KEPT else set(StateArray) - kept
        if op.kind is Kind.READ_WEIGHTS:
            arrays = set(WEIGHT_ARRAYS)
        stashed = GRADIENT_BYTES if op.stashed and op.kind is Kind.READ_STATES else 0
        return (sum(array.itemsize for array in arrays) + stashed) * piece.num_elements

    def _failure(self, op: Op, step: int, error: TransferError) -> TransferError:
        stage = self._layouts[op.stage if op.owner < 0 else op.owner]
        if op.micro_batch >= 0:
            what = f"activation of micro-batch {op.micro_batch}"
        elif op.piece >= 0:
            what = f"chunk {self.pieces[stage.index][op.piece].chunk}"
        else:
            what = "frozen tensors" if op.kind is Kind.READ_FROZEN else "gradient"
        record = self._store.record
        kept = 0 if record is None else record.step
        failure = TransferError(
            f"step {step - op.delayed}, stage {stage.name!r}, {what}: {error}; the store keeps step {kept}: "
            "when the drive works, run again to go on from there"
        )
        failure.errno = error.errno
        failure.__cause__ = error
        return failure

    # ------------------------------------------------------------------ weights

    def _acquire(self, op: Op, state: StepState) -> None:
        places = self._places.stages[op.stage]
        borrowed = {
            (tensor.owner, piece.index)
            for tensor in places.borrowed
            for piece in self.pieces[tensor.owner]
            if _overlap(piece, tensor.placed)
        }
        streamed_bytes = places.frozen.nbytes
        if op.stage in self._buffers.kept_frozen:
            streamed_bytes = 0
            if self._manager.state(Item(ItemKind.KEPT_FROZEN, op.stage)) is State.CLEAN:
                self._manager.save(ItemKind.KEPT_FROZEN, read_bytes=places.frozen.nbytes)
        self._manager.fill(
            Item(ItemKind.WEIGHTS, op.stage),
            self._buffers.weights[op.stage],
            places.weights.nbytes + streamed_bytes,
            parts=len(self.pieces[op.stage]) + len(borrowed) + bool(streamed_bytes),
        )

    def _read_weights(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.owner][op.piece]
        staging = self._places.staging[op.slot]
        num_bytes = 2 * piece.num_elements
        places = [self._store.place(op.owner, array, piece, write=False) for array in WEIGHT_ARRAYS]
        join = _Join(len(places), done)
        for half, place in enumerate(places):
            target = staging[half * num_bytes : (half + 1) * num_bytes]
            join.start(partial(self._engine.read, place.path, place.offset_bytes, target))

    def _merge(self, op: Op, state: StepState) -> None:
        piece = self.pieces[op.owner][op.piece]
        if op.slot < 0:
            kept = self._places.kept[op.owner, piece.chunk]
            hi, lo = (kept.bytes_of(array, piece).view(torch.int16) for array in WEIGHT_ARRAYS)
            self._manager.save(ItemKind.KEPT_WEIGHTS, read_bytes=hi.nbytes + lo.nbytes)
        else:
            staging = self._places.staging[op.slot].view(torch.int16)
            hi = staging[: piece.num_elements]
            lo = staging[piece.num_elements : 2 * piece.num_elements]
        self._put_weights(op.stage, op.owner, piece, hi, lo)
        self._manager.filled(Item(ItemKind.WEIGHTS, op.stage))

    def _put_weights(self, stage: int, owner: int, piece: Piece, hi: Tensor, lo: Tensor) -> None:
        """Merge a piece of ``owner`` into the weight buffer of ``stage``: its own, or what it borrows of the piece."""
        places = self._places.stages[stage]
        if owner == stage:
            merge(hi, lo, places.piece_weights(piece))
            return
        for borrowed in places.borrowed:
            if borrowed.owner != owner or not _overlap(piece, borrowed.placed):
                continue
            first = max(piece.start, borrowed.placed.offset)
            last = min(piece.stop, borrowed.placed.offset + borrowed.placed.spec.num_elements)
            target = borrowed.offset + first - borrowed.placed.offset
            source = slice(first - piece.start, last - piece.start)
            merge(hi[source], lo[source], places.weights[target : target + last - first])

    def _read_frozen(self, op: Op, state: StepState, done: Done) -> None:
        place = self._store.frozen_place(op.stage)
        target = self._places.stages[op.stage].frozen
        item = Item(ItemKind.WEIGHTS, op.stage)
        if op.stage in self._buffers.kept_frozen:
            item = Item(ItemKind.KEPT_FROZEN, op.stage)
            self._manager.fill(item, op.stage, target.nbytes)

        def read() -> None:
            if self._read_check is not None:
                self._read_check.frozen(op.stage, target)
            self._manager.filled(item)

        future = self._engine.read(place.path, place.offset_bytes, target)
        future.add_done_callback(_Join(1, _then(done, read)).part)

    def _read_kept(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.stage][op.piece]
        kept = self._places.kept[op.stage, piece.chunk]
        items = self._kept_items(op.stage, piece.chunk)
        with self._lock:
            if self._manager.state(items[0]) is State.STORED:
                parts = sum(other.chunk == piece.chunk for other in self.pieces[op.stage])
                for item in items:
                    arrays = WEIGHT_ARRAYS if item.kind is ItemKind.KEPT_WEIGHTS else MOMENT_ARRAYS
                    num_bytes = sum(kept.arrays[array].nbytes for array in arrays)
                    self._manager.fill(item, self._kept_buffers[op.stage, piece.chunk], num_bytes, parts=parts)

        def filled() -> None:
            if self._read_check is not None:
                arrays = {array: kept.bytes_of(array, piece) for array in kept.arrays}
                self._read_check.piece(state.step, op.stage, piece, arrays)
            for item in items:
                self._manager.filled(item)

        join = _Join(len(kept.arrays), _then(done, filled))
        for array in kept.arrays:
            place = self._store.place(op.stage, array, piece, write=False)
            join.start(partial(self._engine.read, place.path, place.offset_bytes, kept.bytes_of(array, piece)))

    def _kept_items(self, stage: int, chunk: int) -> list[Item]:
        """What is kept of a chunk, as the residency table has it."""
        arrays = self._kept_arrays(stage, chunk)
        kinds = [ItemKind.KEPT_WEIGHTS] if arrays else []
        kinds += [ItemKind.KEPT_MOMENTS] if StateArray.EXP_AVG in arrays else []
        return [Item(kind, stage, chunk) for kind in kinds]

    def _kept_arrays(self, stage: int, chunk: int) -> frozenset[StateArray]:
        kept = self._places.kept.get((stage, chunk))
        return frozenset() if kept is None else frozenset(kept.arrays)

    def _arrays(self, op: Op, piece: Piece) -> dict[StateArray, Tensor]:
        """uint8 views of the four arrays of a piece: in the op's state slot, or where they are kept."""
        kept = self._places.kept.get((op.stage, piece.chunk))
        return {
            array: kept.bytes_of(array, piece)
            if kept is not None and array in kept.arrays
            else self._places.states[op.slot].bytes_of(position, piece.num_elements)
            for position, array in enumerate(StateArray)
        }

    def _bind(self, op: Op, state: StepState) -> None:
        self._manager.bind(Item(ItemKind.WEIGHTS, op.stage))
        kind = type(self._stages[op.stage])
        if kind is not self._bound_kind:
            # What layers leave free in the heap does not fit the head's tensors, nor the other way round: without this
            # both would stay. Between two layers it would only cost time, since the next one fits where this one was.
            self._bound_kind = kind
            heap.trim()
        self._stages[op.stage].bind(self._bound[op.stage])

    def _unbind(self, op: Op, state: StepState) -> None:
        self._stages[op.stage].unbind()
        self._manager.unbind(Item(ItemKind.WEIGHTS, op.stage))

    # ------------------------------------------------------------------ computation

    def _seed_for(self, op: Op, state: StepState) -> None:
        """Dropout masks depend on (seed, step, stage, micro-batch) alone: the same in recomputation, in any order."""
        torch.default_generator.manual_seed(mask_seed(self._seed, state.step, op.stage, op.micro_batch))

    def _activation(self, slot: int, shape: Sequence[int]) -> Tensor:
        count = 1
        for side in shape:
            count *= side
        return self._places.activations[slot].view(torch.float32)[:count].view(tuple(shape))

    def _context(self, op: Op, state: StepState) -> Context:
        context = state.contexts[op.micro_batch]
        if context is None:
            raise RuntimeError(f"{op}: no context; the first stage has not run")
        return context

    def _forward(self, op: Op, state: StepState) -> None:
        stage = self._stages[op.stage]
        self._seed_for(op, state)
        with torch.no_grad():
            if isinstance(stage, EmbedStage):
                hidden, context = stage.forward(state.batches[op.micro_batch])
                for other in state.contexts:
                    if other is not None:
                        context = context.share_with(other)
                state.contexts[op.micro_batch] = context
                state.shapes[op.micro_batch] = tuple(hidden.shape)
            elif isinstance(stage, LayerStage):
                self._manager.need(_boundary(op, -1), op.slot)
                source = self._activation(op.slot, state.shapes[op.micro_batch])
                hidden = stage.forward(source, self._context(op, state))
            else:
                raise RuntimeError(f"{op}: a {type(stage).__name__} has no forward of its own")
            self._manager.create(_boundary(op, 0), op.output_slot, self._places.activations[op.output_slot].nbytes)
            self._activation(op.output_slot, state.shapes[op.micro_batch]).copy_(hidden)

    def _loss(self, op: Op, state: StepState) -> None:
        stage = self._stages[op.stage]
        if not isinstance(stage, HeadStage):
            raise RuntimeError(f"{op}: the last stage must be a head, not a {type(stage).__name__}")
        self._manager.need(_boundary(op, -1), op.slot)
        self._own_gradient(op)
        slot = self._activation(op.slot, state.shapes[op.micro_batch])
        hidden = slot.data.requires_grad_()  # .data: a version counter of its own (see stages.py)
        self._seed_for(op, state)
        with self._direct[op.stage]:
            loss = stage.forward(hidden, state.batches[op.micro_batch], self._context(op, state), state.num_items)
        self._run_backward(op, state, loss, None)
        state.losses[op.micro_batch] = loss.detach()
        self._keep_input_gradient(slot, hidden)
        self._manager.modify(_boundary(op, -1))

    def _backward_op(self, op: Op, state: StepState) -> None:
        stage = self._stages[op.stage]
        shape = state.shapes[op.micro_batch]
        self._manager.need(_boundary(op, 0), op.output_slot)
        self._own_gradient(op)
        gradient = self._activation(op.output_slot, shape)
        self._seed_for(op, state)
        if isinstance(stage, EmbedStage):
            with self._direct[op.stage]:
                hidden, _ = stage.forward(state.batches[op.micro_batch])
            self._run_backward(op, state, hidden, gradient)
            state.contexts[op.micro_batch] = None
        elif isinstance(stage, LayerStage):
            self._manager.need(_boundary(op, -1), op.slot)
            slot = self._activation(op.slot, shape)
            source = slot.data.requires_grad_()
            with self._direct[op.stage]:
                output = stage.forward(source, self._context(op, state))
            self._run_backward(op, state, output, gradient)
            self._keep_input_gradient(slot, source)
            self._manager.modify(_boundary(op, -1))
        else:
            raise RuntimeError(f"{op}: a {type(stage).__name__} has no backward of its own")
        self._manager.discard(_boundary(op, 0))

    def _own_gradient(self, op: Op) -> None:
        """The stage's gradient buffer must hold its own sums, or nothing that is still needed."""
        item = Item(ItemKind.GRADIENT, op.stage)
        if self._manager.state(item) is State.ABSENT:
            num_bytes = self._places.stages[op.stage].gradients.nbytes
            self._manager.create(item, self._buffers.gradients[op.stage], num_bytes)
        else:
            self._manager.modify(item)

    def _run_backward(self, op: Op, state: StepState, output: Tensor, gradient: Tensor | None) -> None:
        if not output.requires_grad:
            return  # nothing trainable on the way
        self._backward = (state, op.stage)
        try:
            torch.autograd.backward(output, gradient)
        finally:
            self._backward = None

    @staticmethod
    def _keep_input_gradient(slot: Tensor, source: Tensor) -> None:
        """The gradient of a stage's input takes the place of that input, which is not needed any more."""
        if source.grad is None:
            slot.zero_()
        else:
            slot.copy_(source.grad)

    # ------------------------------------------------------------------ gradients

    def _direct_gradients(self) -> list[DirectGradients]:
        """Per stage: where each weight's gradient goes. Those of linear and embedding weights go there directly."""
        modes: list[DirectGradients] = []
        for index, stage in enumerate(self._stages):
            targets: dict[Tensor, Target] = {}
            stage.bind(self._bound[index])
            for name, parameter in stage.parameters().items():
                if parameter.requires_grad:
                    targets[parameter] = self._target(index, name)
                    parameter.register_post_accumulate_grad_hook(_accumulate_into(targets[parameter]))
            stage.unbind()
            modes.append(DirectGradients(targets, self._places.block))
        return modes

    def _target(self, stage: int, name: str) -> Target:
        placed = self._own[stage].get(name)
        values = self._places.stages[stage].gradient(placed) if placed is not None else self._places.loans[name]

        def touched() -> bool:
            current = self._backward
            if current is None or current[1] != stage:
                raise RuntimeError(f"{name}: a gradient arrived outside of the backward of its stage {stage}")
            seen = current[0].touched[stage] if placed is not None else current[0].lent
            if name in seen:
                return True
            seen.add(name)
            return False

        return Target(values, touched)

    def _take_loans(self, stage: int, state: StepState) -> None:
        """Add what borrowers have left to the owner's own gradient, once both are complete.

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

    # ------------------------------------------------------------------ optimizer

    def _norm(self, op: Op, state: StepState) -> None:
        self._take_loans(op.stage, state)
        places = self._places.stages[op.stage]
        total = 0.0
        for name, placed in self._own[op.stage].items():
            if name in state.touched[op.stage]:
                total += self._square_sum.square_sum(places.gradient(placed))
                self.adam_steps[name] += 1
        state.square_sums[op.stage] = total
        if not self.pieces[op.stage]:
            self._manager.discard(Item(ItemKind.GRADIENT, op.stage))
        if len(state.square_sums) == len(self._stages):
            self._conclude(state)

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

    def _chunk_is_touched(self, stage: int, chunk: int, state: StepState) -> bool:
        layout = self._layouts[stage]
        first = chunk * layout.chunk_elements
        touched = state.touched[stage]
        return any(segment.name in touched for segment in layout.segments(first, first + layout.chunk_elements))

    def _is_idle(self, op: Op, piece: Piece, state: StepState) -> bool:
        """The op is there to make an update again, and that is not needed."""
        return op.redo and not (state.guessed_wrong and (op.stage, piece.chunk) in state.guessed)

    def _read_states(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.stage][op.piece]
        if self._is_idle(op, piece, state):
            done(None)
            return
        slot = self._places.states[op.slot]
        item = Item(ItemKind.STATES, op.stage, op.piece)
        kept = self._kept_arrays(op.stage, piece.chunk)
        moved = [(position, array) for position, array in enumerate(StateArray) if array not in kept]
        num_bytes = sum(array.itemsize for _, array in moved) * piece.num_elements
        self._manager.expire(item)  # its last slot may be another one, which nobody has taken since
        self._manager.fill(item, op.slot, num_bytes)

        def read() -> None:
            if self._read_check is not None and not op.redo:  # again: the version that was checked the first time
                arrays = {array: slot.bytes_of(position, piece.num_elements) for position, array in moved}
                self._read_check.piece(state.step, op.stage, piece, arrays)
            self._manager.filled(item)

        join = _Join(len(moved) + op.stashed, _then(done, read))
        for position, array in moved:
            place = self._store.place(op.stage, array, piece, write=False, again=op.redo)
            target = slot.bytes_of(position, piece.num_elements)
            join.start(partial(self._engine.read, place.path, place.offset_bytes, target))
        if op.stashed:
            path, offset = self.stashed_gradients[op.stage]
            target = slot.gradient_bytes(piece.num_elements)
            join.start(partial(self._engine.read, path, offset + GRADIENT_BYTES * piece.start, target))

    def _update(self, op: Op, state: StepState) -> None:
        piece = self.pieces[op.stage][op.piece]
        key = op.stage, piece.chunk
        if op.redo:
            if not self._is_idle(op, piece, state):
                self._update_piece(op, piece, state)
        elif not state.skipped and self._chunk_is_touched(*key, state):
            state.updated.add(key)
            if len(state.square_sums) < len(self._stages) and self._buffers.speculative:
                state.guessed.add(key)
            self._update_piece(op, piece, state)
        if op.fill:
            arrays = self._arrays(op, piece)
            hi, lo = (arrays[array].view(torch.int16) for array in WEIGHT_ARRAYS)
            self._put_weights(op.stage, op.stage, piece, hi, lo)
            self._manager.filled(Item(ItemKind.WEIGHTS, op.stage))
        if not op.stashed or (self._buffers.speculative and not op.delayed):
            self._used_gradient(op.stage, state)

    def _used_gradient(self, stage: int, state: StepState) -> None:
        """The gradient of one more piece is not needed in its buffer any more."""
        with self._lock:
            state.gradient_uses[stage] -= 1
            left = state.gradient_uses[stage]
        if not left:
            self._manager.discard(Item(ItemKind.GRADIENT, stage))

    def _update_piece(self, op: Op, piece: Piece, state: StepState) -> None:
        layout = self._layouts[op.stage]
        kept = self._kept_arrays(op.stage, piece.chunk)
        for item in self._kept_items(op.stage, piece.chunk):
            self._manager.modify(item)
            arrays = WEIGHT_ARRAYS if item.kind is ItemKind.KEPT_WEIGHTS else MOMENT_ARRAYS
            num_bytes = sum(array.itemsize for array in arrays) * piece.num_elements
            self._manager.save(item.kind, read_bytes=num_bytes, written_bytes=num_bytes)
        if len(kept) < len(StateArray):
            self._manager.modify(Item(ItemKind.STATES, op.stage, op.piece))
        for user in self._users[op.stage][op.piece]:
            if user not in op.refresh and not (op.fill and user == op.stage):
                self._manager.expire(Item(ItemKind.WEIGHTS, user))
        places = self._places.stages[op.stage]
        found = self._arrays(op, piece)
        weight_hi, weight_lo = (found[array].view(torch.int16) for array in WEIGHT_ARRAYS)
        exp_avg, exp_avg_sq = (found[array].view(torch.float32) for array in MOMENT_ARRAYS)
        touched = state.touched[op.stage]
        # By the time of a delayed update, the optim lane may have counted the next step already.
        adam_steps = (state.adam_steps or {}) if op.delayed else self.adam_steps
        gradient = places.gradients[piece.start : piece.stop]
        if op.stashed:
            gradient = self._places.states[op.slot].gradient(piece.num_elements)
        if state.scale != 1.0:
            gradient.mul_(state.scale)
        segments = [
            SegmentUpdate(
                start=segment.start - piece.start,
                stop=segment.start - piece.start + segment.num_elements,
                adam_step=adam_steps[segment.name],
                lr=state.lr,
                weight_decay=self._decay(op.stage, segment.name),
            )
            for segment in layout.segments(piece.start, piece.stop)
            if segment.name in touched and not state.skipped
        ]
        if segments:  # else a guess is taken back: the version before it is written once more
            self._updater.update(
                weight_hi=weight_hi,
                weight_lo=weight_lo,
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                gradient=gradient,
                segments=segments,
            )
        for keeper in op.refresh:
            self._put_weights(keeper, op.stage, piece, weight_hi, weight_lo)
            self._manager.refresh(Item(ItemKind.WEIGHTS, keeper))
        written = [array for array in StateArray if array not in kept]
        if not written:
            return
        first_of_chunk = piece.start == piece.chunk * layout.chunk_elements
        if first_of_chunk:
            self._checksum = ChunkChecksum(layout, piece.chunk)
        if self._checksum is None:
            raise RuntimeError(f"{op}: pieces of a chunk must come in order")
        for array in written:
            self._checksum.extend(array, found[array])
        is_last = op.piece + 1 == len(self.pieces[op.stage]) or self.pieces[op.stage][op.piece + 1].chunk != piece.chunk
        if is_last:
            with self._lock:
                self._checksums[op.stage, piece.chunk] = self._checksum.finish(written)
            self._checksum = None

    def _decay(self, stage: int, name: str) -> float:
        shape = self._own[stage][name].spec.shape
        return decay_for(name, shape, self._optimizer.weight_decay, no_decay_norms=self._no_decay_norms)

    def _write_states(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.stage][op.piece]
        idle = self._is_idle(op, piece, state) if op.redo else (op.stage, piece.chunk) not in state.updated
        if idle:
            done(None)  # no tensor of the chunk has a gradient: its stored version stays the newest
            return
        item = Item(ItemKind.STATES, op.stage, op.piece)
        self._manager.write(item)
        kept = self._kept_arrays(op.stage, piece.chunk)
        moved = {array: data for array, data in self._arrays(op, piece).items() if array not in kept}

        def written() -> None:
            self._manager.written(item, sum(data.nbytes for data in moved.values()))
            self._note_piece(op, piece, state, kept)

        join = _Join(len(moved), _then(done, written))
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

    def _write_kept(self, op: Op, state: StepState) -> None:
        """Bring a kept chunk to NVMe; nothing of it is in flight any more when this returns or raises."""
        chunk = self.pieces[op.stage][op.piece].chunk
        items = self._kept_items(op.stage, chunk)
        if not state.commit_due or self._manager.state(items[0]) is not State.DIRTY:
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
        for item in items:
            arrays = WEIGHT_ARRAYS if item.kind is ItemKind.KEPT_WEIGHTS else MOMENT_ARRAYS
            num_bytes = sum(kept.arrays[array].nbytes for array in arrays)
            self._manager.written(item, num_bytes)
            self._manager.save(item.kind, written_bytes=-num_bytes)

    def _commit(self, op: Op, state: StepState) -> None:
        before = self._steps.get(state.step - 1)
        if before is not None and before.commit is not None:
            before.commit()

    # ------------------------------------------------------------------ scratch

    def _spill(self, item: Item, place: tuple[Path, int], source: Tensor, done: Done) -> None:
        self._manager.write(item)
        noted = _then(done, lambda: self._manager.written(item, source.nbytes))
        self._engine.write(*place, source).add_done_callback(_Join(1, noted).part)

    def _fetch(self, item: Item, buffer: int, place: tuple[Path, int], target: Tensor, done: Done) -> None:
        self._manager.expire(item)  # nobody may have taken its former slot yet
        self._manager.fill(item, buffer, target.nbytes)
        noted = _then(done, lambda: self._manager.filled(item))
        self._engine.read(*place, target).add_done_callback(_Join(1, noted).part)

    def _spill_activation(self, op: Op, state: StepState, done: Done) -> None:
        place = self.scratch_activations[op.stage, op.micro_batch]
        self._spill(_boundary(op, 0), place, self._places.activations[op.slot], done)

    def _fetch_activation(self, op: Op, state: StepState, done: Done) -> None:
        place = self.scratch_activations[op.stage, op.micro_batch]
        self._fetch(_boundary(op, 0), op.slot, place, self._places.activations[op.slot], done)

    def _gradient_bytes(self, stage: int) -> Tensor:
        return self._places.stages[stage].gradients.view(torch.uint8)

    def _stash_gradient(self, op: Op, state: StepState, done: Done) -> None:
        piece = self.pieces[op.stage][op.piece]
        path, offset = self.stashed_gradients[op.stage]
        source = self._places.stages[op.stage].gradients[piece.start : piece.stop].view(torch.uint8)
        noted = _then(done, lambda: self._used_gradient(op.stage, state))
        future = self._engine.write(path, offset + GRADIENT_BYTES * piece.start, source)
        future.add_done_callback(_Join(1, noted).part)

    def _spill_gradient(self, op: Op, state: StepState, done: Done) -> None:
        item = Item(ItemKind.GRADIENT, op.stage)
        self._spill(item, self.scratch_gradients[op.stage], self._gradient_bytes(op.stage), done)

    def _fetch_gradient(self, op: Op, state: StepState, done: Done) -> None:
        item = Item(ItemKind.GRADIENT, op.stage)
        buffer = self._buffers.gradients[op.stage]
        self._fetch(item, buffer, self.scratch_gradients[op.stage], self._gradient_bytes(op.stage), done)
