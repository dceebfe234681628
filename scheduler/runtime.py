"""What each op of a plan does to real tensors and files: the executor's handler. Order is the plan's, not decided here.

The optimizer's are in `updates.py`. `trainer.py` sets this up and feeds it steps; `places.py` says where buffers are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from hoist.optim.adamw import AdamWHyperparameters
from hoist.scheduler.accumulate import DirectGradients, Target, add_to
from hoist.scheduler.boundary import as_leaves, has_gradient, keep_gradients, pack, unpack
from hoist.scheduler.compiling import CompiledLayers, explained
from hoist.scheduler.completion import Join, then
from hoist.scheduler.context import Context
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.executor import Done, Mark
from hoist.scheduler.head_loss import HeadLoss
from hoist.scheduler.ops import DEVICE_KINDS, Kind, Op
from hoist.scheduler.places import Places
from hoist.scheduler.plan_records import Buffers
from hoist.scheduler.read_check import ReadCheck
from hoist.scheduler.scratch import Scratch, ScratchPlace
from hoist.scheduler.stages import EmbedStage, HeadStage, LayerStage, Stage, StagedModel, as_carried, as_tuple
from hoist.scheduler.step_state import StepState
from hoist.scheduler.updates import Updates
from hoist.tiers import heap
from hoist.tiers.device import Device
from hoist.tiers.device import Mark as DeviceMark
from hoist.tiers.device.base import copying
from hoist.tiers.errors import DeviceError, TransferError
from hoist.tiers.format import WEIGHT_ARRAYS, StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import Piece, PlacedTensor, StageLayout
from hoist.tiers.manager import Item, ItemKind, Manager, State
from hoist.tiers.store import Store


def accumulate_into(target: Target) -> Callable[[Tensor], None]:
    """A hook that hands over the gradient that autograd has accumulated for one micro-batch."""

    def accumulate(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        # The first gradient is put, not added to zeros, as autograd does: 0.0 + -0.0 would lose a sign.
        if target.touched():
            add_to(target.values, gradient)
        else:
            target.values.copy_(gradient)

    return accumulate


def _boundary(op: Op, offset: int) -> Item:
    """The boundary activation behind stage ``op.stage + offset`` for the op's micro-batch."""
    return Item(ItemKind.ACTIVATION, op.stage + offset, op.micro_batch)


def mask_seed(seed: int, step: int, stage: int, micro_batch: int) -> int:
    """What torch is seeded with before a stage sees a micro-batch. Changing this changes every run with dropout."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stage}/{micro_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class Work:
    """What an op does where computation happens: on a separate device, work for one of its streams."""

    compute: Callable[[], None]
    """Touches tensors, and what is known of the step's gradients; nothing else."""
    noted: Callable[[], None] = lambda: None
    """Keeps the residency table: what is so once ``compute`` has been done, or is sure to be done before whatever is
    put into a stream after it."""


#: The stream of a separate device that each kind of op is put into, where that is not the one of computation.
_STREAMS = {
    Kind.MERGE: "up", Kind.WIDEN: "up", Kind.REFRESH: "up", Kind.RAISE_ACTIVATION: "up",
    Kind.DOWNLOAD: "down", Kind.LOWER_ACTIVATION: "down",
}  # fmt: skip


class Runtime:
    """Carries out ops for one model, one store, one device and one set of buffers."""

    def __init__(
        self,
        *,
        model: StagedModel,
        store: Store,
        engine: IoEngine,
        places: Places,
        device: Device,
        scratch: Scratch,
        manager: Manager,
        buffers: Buffers,
        piece_elements: int,
        optimizer: AdamWHyperparameters,
        no_decay_norms: bool,
        clip_norm: float,
        seed: int,
        adam_steps: Mapping[str, int],
        verify_reads: bool = False,
        loss_slice_tokens: int = 0,
        compile_backend: str | None = None,
    ) -> None:
        """``compile_backend``: what compiles the layers; None: they are not compiled."""
        #: Checks what is read for updates; None: nothing is checked.
        self._read_check = ReadCheck(store, device) if verify_reads else None
        self._model = model
        self._stages = model.stages
        self._store = store
        self._engine = engine
        self._places = places
        self._device = device
        self._manager = manager
        self._buffers = buffers
        self._seed = seed
        #: Most tokens of a slice of the loss; 0: see `head_loss.py`.
        self._loss_slice_tokens = loss_slice_tokens
        self._layouts: tuple[StageLayout, ...] = store.layouts
        #: Per stage, the cuts that loads and updates share.
        self.pieces: list[tuple[Piece, ...]] = [layout.pieces(piece_elements) for layout in self._layouts]
        self._updates = Updates(
            store=store,
            engine=engine,
            places=places,
            manager=manager,
            buffers=buffers,
            device=device,
            pieces=self.pieces,
            optimizer=optimizer,
            no_decay_norms=no_decay_norms,
            clip_norm=clip_norm,
            adam_steps=adam_steps,
            stashed_gradients=scratch.stashed_gradients,
            read_check=self._read_check,
        )
        self._steps: dict[int, StepState] = {}
        #: Kind of the stage that was bound last; changed by the compute lane alone.
        self._bound_kind: type[Stage] | None = None
        #: Step and stage whose backward runs, for the gradient hooks; set by the compute lane alone.
        self._backward: tuple[StepState, int] | None = None
        #: Per stage, its own trainable tensors by name.
        self._own: list[dict[str, PlacedTensor]] = [
            {placed.spec.name: placed for placed in layout.trainable} for layout in self._layouts
        ]
        self._bound = [places.tensors() for places in places.stages]
        #: Where spilled activations and gradients go.
        self._scratch = scratch
        #: What each kind of op does where computation happens.
        self._works: dict[Kind, Callable[[Op, StepState], Work]] = {
            Kind.MERGE: self._merge,
            Kind.WIDEN: self._widen,
            Kind.BIND: self._bind,
            Kind.UNBIND: self._unbind,
            Kind.FORWARD: self._forward,
            Kind.LOSS: self._loss,
            Kind.EVALUATE: self._evaluate,
            Kind.BACKWARD: self._backward_op,
            Kind.DOWNLOAD: self._download,
            Kind.REFRESH: self._refresh,
            Kind.LOWER_ACTIVATION: self._lower_activation,
            Kind.RAISE_ACTIVATION: self._raise_activation,
        }
        self._run: dict[Kind, Callable[[Op, StepState], None]] = {
            Kind.ACQUIRE: self._acquire,
            Kind.OPEN_CHUNK: lambda op, state: None,
            Kind.NORM: self._updates.norm,
            Kind.UPDATE: self._updates.update,
            Kind.WRITE_KEPT: self._updates.write_kept,
            Kind.COMMIT: self._commit,
        }
        self._start: dict[Kind, Callable[[Op, StepState, Done], None]] = {
            Kind.READ_WEIGHTS: self._read_weights,
            Kind.READ_FROZEN: self._read_frozen,
            Kind.READ_KEPT: self._updates.read_kept,
            Kind.READ_STATES: self._updates.read_states,
            Kind.WRITE_STATES: self._updates.write_states,
            Kind.STASH_GRADIENT: self._updates.stash_gradient,
            Kind.SPILL_ACTIVATION: self._spill_activation,
            Kind.FETCH_ACTIVATION: self._fetch_activation,
            Kind.SPILL_GRADIENT: self._spill_gradient,
            Kind.FETCH_GRADIENT: self._fetch_gradient,
        }
        model.take()
        self._compile_backend = compile_backend
        self._compiled = None if compile_backend is None else CompiledLayers(model, compile_backend)
        #: Per stage, what its forwards run in, so that gradients go where they belong.
        self._direct: list[AbstractContextManager[object]] = []
        try:
            # In the stream of computation: autograd adds gradients up in the stream in which it first met a weight.
            device.stream("compute").put(self._meet_weights).wait()
        except BaseException:
            device.finish()
            self.release()
            raise

    # ------------------------------------------------------------------ the executor's side

    def begin(self, state: StepState) -> None:
        """Take a step's inputs in, before the executor runs its plan."""
        self._updates.begin(state)
        self.begin_evaluation(state)

    def begin_evaluation(self, state: StepState) -> None:
        """Take the inputs of a forward alone in; :meth:`end` forgets them. No step may be under way."""
        state.contexts = [None] * len(state.batches)
        state.losses = [torch.zeros(())] * len(state.batches)
        state.inputs = state.batches
        if self._device.is_separate:
            # Nothing of a step before computes any more: its loss has been read. So this waits for nothing else.
            self._device.stream("compute").put(partial(self._bring_inputs, state))
        self._steps[state.step] = state

    def _bring_inputs(self, state: StepState) -> None:
        where = self._device.torch_device
        state.inputs = [
            {name: tensor.to(where, non_blocking=True, copy=True) for name, tensor in batch.items()}
            for batch in state.batches
        ]

    def end(self, step: int) -> None:
        """Forget a step whose ops have all ended."""
        self._steps.pop(step, None)
        if self._read_check is not None:
            self._read_check.end(step)

    def read_loss(self, state: StepState) -> float:
        """The loss of a step whose ops with losses have ended: the one thing that the caller waits for the device for.

        Raises DeviceError if the device has failed since.
        """
        found = torch.empty(())

        def read() -> None:
            found.copy_(torch.stack(state.losses).sum(), non_blocking=True)

        self._device.stream("compute").put(read).wait()
        return float(found)

    def release(self) -> None:
        """Let go of the buffers and of the model: no op may follow."""
        if self._compiled is not None:
            self._compiled.release()
        for stage in self._stages:
            stage.unbind(forget=True)
        self._updates.release()
        self._bound.clear()
        self._direct.clear()
        self._steps.clear()
        if self._device.is_separate:
            self._model.move_back()
        self._model.give_back()

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        """Carry out a copy, compute, optim or commit op, or put it into a separate device's stream behind ``after``."""
        state = self._steps[step - op.delayed]
        if op.kind is Kind.DEVICE_UPDATE:
            return self._updates.update_on_device(op, state, cast("Sequence[DeviceMark]", after))
        if op.kind in DEVICE_KINDS:
            work = self._works[op.kind](op, state)
            mark: Mark | None = None
            compute = partial(self._compute, work)
            if self._device.is_separate:
                stream = self._device.stream(_STREAMS.get(op.kind, "compute"))
                mark = stream.put(compute, after=cast("Sequence[DeviceMark]", after))  # all are this device's
            else:
                compute()
            work.noted()
            return mark
        try:
            self._run[op.kind](op, state)
        except TransferError as error:
            if op.kind is Kind.WRITE_KEPT:
                raise self._failure(op, step, error) from error
            raise
        return None

    def _compute(self, work: Work) -> None:
        with explained(self._compile_backend):
            work.compute()

    def start(self, op: Op, step: int, done: Done) -> None:
        """Begin an I/O op. A failed transfer's error says whose bytes they were, and where the store stands.

        Where the device failed on the way, and not the drive, that is a DeviceError.
        """

        def named(error: BaseException | None) -> None:
            done(self._failure(op, step, error) if isinstance(error, TransferError) else error)

        self._start[op.kind](op, self._steps[step - op.delayed], named)

    def _failure(self, op: Op, step: int, error: TransferError) -> TransferError | DeviceError:
        stage = self._layouts[op.stage if op.owner < 0 else op.owner]
        if op.micro_batch >= 0:
            what = f"activation of micro-batch {op.micro_batch}"
        elif op.piece >= 0:
            what = f"chunk {self.pieces[stage.index][op.piece].chunk}"
        else:
            what = "frozen tensors" if op.kind is Kind.READ_FROZEN else "gradient"
        if isinstance(error.__cause__, DeviceError):  # the drive did its part; the device says what to do
            lost = DeviceError(f"step {step - op.delayed}, stage {stage.name!r}, {what}: {error.__cause__}")
            lost.__cause__ = error
            return lost
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
            if piece.overlaps(tensor.placed)
        }
        frozen = places.frozen_layout
        streamed_bytes = frozen.num_bytes
        if op.stage in self._buffers.kept_frozen:
            # What is computed with is in the buffer all the same, if it is widened or on a separate device.
            streamed_bytes = frozen.num_bytes if frozen.widens or self._device.is_separate else 0
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
        if op.slot < 0:
            self._read_straight(op, piece, done)
            return
        staging = self._places.staging[op.slot]
        num_bytes = 2 * piece.num_elements
        places = [self._store.place(op.owner, array, piece, write=False) for array in WEIGHT_ARRAYS]
        join = Join(len(places), done)
        for half, place in enumerate(places):
            target = staging[half * num_bytes : (half + 1) * num_bytes]
            join.start(partial(self._engine.read, place.path, place.offset_bytes, target))

    def _read_straight(self, op: Op, piece: Piece, done: Done) -> None:
        targets = self._places.weight_targets(op.stage, op.owner, piece)
        join = Join(len(targets), then(done, lambda: self._manager.filled(Item(ItemKind.WEIGHTS, op.stage))))
        for part, target in targets:
            wanted = replace(piece, start=part.start, stop=part.stop)
            place = self._store.place(op.owner, StateArray.WEIGHT_HI, wanted, write=False)
            join.start(partial(self._engine.read, place.path, place.offset_bytes, target))

    def _merge(self, op: Op, state: StepState) -> Work:
        piece = self.pieces[op.owner][op.piece]
        if op.slot < 0:
            kept = self._places.kept[op.owner, piece.chunk]
            hi, lo = (kept.bytes_of(array, piece).view(torch.int16) for array in WEIGHT_ARRAYS)
            read_bytes = hi.nbytes if self._buffers.straight_weights else hi.nbytes + lo.nbytes
            self._manager.save(ItemKind.KEPT_WEIGHTS, read_bytes=read_bytes)
        else:
            staging = self._places.staging[op.slot].view(torch.int16)
            hi = staging[: piece.num_elements]
            lo = staging[piece.num_elements : 2 * piece.num_elements]
        return Work(
            partial(self._places.put_weights, op.stage, op.owner, piece, hi, lo, from_host=op.slot < 0),
            partial(self._manager.filled, Item(ItemKind.WEIGHTS, op.stage)),
        )

    def _refresh(self, op: Op, state: StepState) -> Work:
        halves = self._updates.refreshed(op, state)
        item = Item(ItemKind.WEIGHTS, op.stage)
        if halves is None:
            return Work(lambda: None)  # nothing of the chunk has changed
        piece = self.pieces[op.owner][op.piece]
        return Work(
            partial(self._places.put_weights, op.stage, op.owner, piece, *halves),
            partial(self._manager.filled if op.fill else self._manager.refresh, item),
        )

    def _read_frozen(self, op: Op, state: StepState, done: Done) -> None:
        places = self._places.stages[op.stage]
        frozen = places.frozen_layout
        item = Item(ItemKind.WEIGHTS, op.stage)
        is_kept = op.stage in self._buffers.kept_frozen
        if is_kept:
            item = Item(ItemKind.KEPT_FROZEN, op.stage)
            self._manager.fill(item, op.stage, places.frozen.nbytes)

        def read() -> None:
            own_bytes = places.layout.frozen_bytes
            if self._read_check is not None and own_bytes:
                self._read_check.frozen(op.stage, places.frozen[:own_bytes])
            if is_kept or not frozen.widens:
                self._manager.filled(item)

        join = Join(len(frozen.ranges), then(done, read))
        for part in frozen.ranges:
            place = self._store.frozen_place(part.owner)
            target = places.frozen[part.position : part.position + part.num_bytes]
            join.start(partial(self._engine.read, place.path, place.offset_bytes + part.start, target))

    def _widen(self, op: Op, state: StepState) -> Work:
        item = Item(ItemKind.WEIGHTS, op.stage)
        return Work(partial(self._places.widen, op.stage), partial(self._manager.filled, item))

    def _bind(self, op: Op, state: StepState) -> Work:
        self._manager.bind(Item(ItemKind.WEIGHTS, op.stage))
        kind = type(self._stages[op.stage])
        if kind is not self._bound_kind and not self._device.is_separate:
            # What layers leave free in the heap does not fit the head's tensors, nor the other way round: without this
            # both would stay. Between two layers it would only cost time, since the next one fits where this one was.
            self._bound_kind = kind
            heap.trim()
        return Work(partial(self._stages[op.stage].bind, self._bound[op.stage]))

    def _unbind(self, op: Op, state: StepState) -> Work:
        return Work(self._stages[op.stage].unbind, partial(self._manager.unbind, Item(ItemKind.WEIGHTS, op.stage)))

    # ------------------------------------------------------------------ computation

    def _seed_for(self, op: Op, state: StepState) -> None:
        """Dropout masks depend on (seed, step, stage, micro-batch) alone: the same in recomputation, in any order."""
        self._device.seed(mask_seed(self._seed, state.step, op.stage, op.micro_batch))

    def _boundary_tensors(self, op: Op, offset: int, state: StepState) -> list[Tensor]:
        """What lies in the op's slot between its stage and the next (0), or the one before (-1)."""
        slot = op.slot if offset else op.output_slot
        return unpack(self._places.activations[slot], state.boundaries[op.stage + offset, op.micro_batch])

    def _context(self, op: Op, state: StepState) -> Context:
        context = state.contexts[op.micro_batch]
        if context is None:
            raise RuntimeError(f"{op}: no context; the first stage has not run")
        return context

    def _forward(self, op: Op, state: StepState) -> Work:
        stage = self._stages[op.stage]
        if isinstance(stage, LayerStage):
            self._manager.need(_boundary(op, -1), op.slot)

        def compute() -> None:
            self._seed_for(op, state)
            with torch.no_grad():
                if isinstance(stage, EmbedStage):
                    carried, context = stage.forward(state.inputs[op.micro_batch])
                    if not self._device.is_separate:  # comparing there would wait for what is computed
                        for other in state.contexts:
                            if other is not None:
                                context = context.share_with(other)
                    state.contexts[op.micro_batch] = context
                elif isinstance(stage, LayerStage):
                    sources = as_leaves(self._boundary_tensors(op, -1, state), wanted=False)
                    carried = stage.forward(as_carried(sources), self._context(op, state))
                else:
                    raise RuntimeError(f"{op}: a {type(stage).__name__} has no forward of its own")
                values = as_tuple(carried)
                state.boundaries[op.stage, op.micro_batch] = pack(values)
                for target, value in zip(self._boundary_tensors(op, 0, state), values, strict=True):
                    target.copy_(value)

        def noted() -> None:
            self._manager.create(_boundary(op, 0), op.output_slot, self._places.activations[op.output_slot].nbytes)
            if op.ends_input:
                self._manager.discard(_boundary(op, -1))

        return Work(compute, noted)

    def _head(self, op: Op) -> HeadLoss:
        stage = self._stages[op.stage]
        if not isinstance(stage, HeadStage):
            raise RuntimeError(f"{op}: the last stage must be a head, not a {type(stage).__name__}")
        return HeadLoss(stage, slice_tokens=self._loss_slice_tokens)

    def _evaluate(self, op: Op, state: StepState) -> Work:
        head = self._head(op)
        self._manager.need(_boundary(op, -1), op.slot)

        def compute() -> None:
            self._seed_for(op, state)
            state.losses[op.micro_batch] = head.evaluate(
                self._boundary_tensors(op, -1, state),
                state.inputs[op.micro_batch],
                self._context(op, state),
                state.num_items,
                on_host=state.batches[op.micro_batch],
            )
            state.contexts[op.micro_batch] = None

        return Work(compute, partial(self._manager.discard, _boundary(op, -1)))

    def _loss(self, op: Op, state: StepState) -> Work:
        head = self._head(op)
        self._manager.need(_boundary(op, -1), op.slot)
        self._own_gradient(op)

        def compute() -> None:
            self._seed_for(op, state)
            state.losses[op.micro_batch], missing = head.train(
                self._boundary_tensors(op, -1, state),
                state.inputs[op.micro_batch],
                self._context(op, state),
                state.num_items,
                on_host=state.batches[op.micro_batch],
                mode=self._direct[op.stage],
                backward=lambda loss: self._run_backward(op, state, [loss], None),
                hands_down=not op.ends_input,
            )
            self._hand_down(op, state, missing)

        return Work(compute, partial(self._note_input, op))

    def _backward_op(self, op: Op, state: StepState) -> Work:
        stage = self._stages[op.stage]
        self._manager.need(_boundary(op, 0), op.output_slot)
        if isinstance(stage, LayerStage):
            self._manager.need(_boundary(op, -1), op.slot)
        self._own_gradient(op)

        def compute() -> None:
            missing = state.without_gradient.pop((op.stage, op.micro_batch), frozenset())
            gradients = [
                None if position in missing or not has_gradient(tensor.dtype) else tensor
                for position, tensor in enumerate(self._boundary_tensors(op, 0, state))
            ]
            self._seed_for(op, state)
            if isinstance(stage, EmbedStage):
                with self._direct[op.stage]:
                    carried, _ = stage.forward(state.inputs[op.micro_batch])
                self._run_backward(op, state, as_tuple(carried), gradients)
                state.contexts[op.micro_batch] = None
            elif isinstance(stage, LayerStage):
                slots = self._boundary_tensors(op, -1, state)
                sources = as_leaves(slots, wanted=not op.ends_input)
                with self._direct[op.stage]:
                    carried = stage.forward(as_carried(sources), self._context(op, state))
                self._run_backward(op, state, as_tuple(carried), gradients)
                self._hand_down(op, state, frozenset() if op.ends_input else keep_gradients(slots, sources))
            else:
                raise RuntimeError(f"{op}: a {type(stage).__name__} has no backward of its own")

        def noted() -> None:
            if isinstance(stage, LayerStage):
                self._note_input(op)
            self._manager.discard(_boundary(op, 0))

        return Work(compute, noted)

    def _hand_down(self, op: Op, state: StepState, missing: frozenset[int]) -> None:
        """What was a stage's input is its gradient now, but for the tensors ``missing``; or nothing anybody needs."""
        if op.ends_input:
            state.contexts[op.micro_batch] = None
        else:
            state.without_gradient[op.stage - 1, op.micro_batch] = missing

    def _note_input(self, op: Op) -> None:
        """The same for the residency table."""
        if op.ends_input:
            self._manager.discard(_boundary(op, -1))
        else:
            self._manager.modify(_boundary(op, -1))

    def _download(self, op: Op, state: StepState) -> Work:
        places = self._places.stages[op.stage]

        def compute() -> None:
            self._updates.take_loans(op.stage, state)
            places.waiting_gradients.copy_(places.gradients, non_blocking=True)

        def noted() -> None:
            self._manager.discard(Item(ItemKind.GRADIENT, op.stage))
            item = Item(ItemKind.WAITING_GRADIENT, op.stage)
            self._manager.create(item, self._buffers.host_gradients[op.stage], places.waiting_gradients.nbytes)

        return Work(compute, noted)

    def _own_gradient(self, op: Op) -> None:
        """The stage's gradient buffer must hold its own sums, or nothing that is still needed."""
        if not self.pieces[op.stage]:
            return
        item = Item(ItemKind.GRADIENT, op.stage)
        if self._manager.state(item) is State.ABSENT:
            num_bytes = self._places.stages[op.stage].gradients.nbytes
            self._manager.create(item, self._buffers.gradients[op.stage], num_bytes)
        else:
            self._manager.modify(item)

    def _run_backward(
        self, op: Op, state: StepState, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None] | None
    ) -> None:
        if gradients is not None:
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            outputs, gradients = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        outputs = [output for output in outputs if output.requires_grad]
        if not outputs:
            return  # nothing trainable on the way
        self._backward = (state, op.stage)
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self._backward = None

    # ------------------------------------------------------------------ gradients

    def _meet_weights(self) -> None:
        """Have the model where it computes, and find out where each weight's gradient goes.

        Those of linear and embedding weights go there directly. Not those of compiled layers: their graphs make all
        gradients themselves, and autograd hands them to the hooks. Nor those made by other kernels than the CPU's,
        which do not give the same bits block by block.
        """
        if self._device.is_separate:
            self._model.move_to(self._device.torch_device)
        in_blocks = self._device.torch_device.type == "cpu"
        for index, stage in enumerate(self._stages):
            targets: dict[Tensor, Target] = {}
            stage.bind(self._bound[index])
            for name, parameter in stage.parameters().items():
                if parameter.requires_grad:
                    targets[parameter] = self._target(index, name)
                    parameter.register_post_accumulate_grad_hook(accumulate_into(targets[parameter]))
            stage.unbind()
            is_compiled = self._compiled is not None and isinstance(stage, LayerStage)
            self._direct.append(
                DirectGradients(targets, self._places.block) if in_blocks and not is_compiled else nullcontext()
            )

    def _target(self, stage: int, name: str) -> Target:
        placed = self._own[stage].get(name)
        values = self._places.stages[stage].gradient(placed) if placed is not None else self._places.loans[name]

        def touched() -> bool:
            current = self._backward
            if current is None or current[1] != stage:
                raise ConfigError(
                    f"{name}: backward was called on something that the stage computed; a step runs every backward "
                    "itself, so a loss or module must not"
                )
            seen = current[0].touched[stage] if placed is not None else current[0].lent
            if name in seen:
                return True
            seen.add(name)
            return False

        return Target(values, touched)

    # ------------------------------------------------------------------ commits and scratch

    def _commit(self, op: Op, state: StepState) -> None:
        before = self._steps.get(state.step - 1)
        if before is not None and before.commit is not None:
            before.commit()

    def _spill(self, item: Item, place: ScratchPlace, source: Tensor, done: Done) -> None:
        self._manager.write(item)
        noted = then(done, lambda: self._manager.written(item, source.nbytes))
        self._engine.write(*place, source).add_done_callback(Join(1, noted).part)

    def _fetch(self, item: Item, buffer: int, place: ScratchPlace, target: Tensor, done: Done) -> None:
        self._manager.expire(item)  # nobody may have taken its former slot yet
        self._manager.fill(item, buffer, target.nbytes)
        noted = then(done, lambda: self._manager.filled(item))
        self._engine.read(*place, target).add_done_callback(Join(1, noted).part)

    def _spill_activation(self, op: Op, state: StepState, done: Done) -> None:
        place = self._scratch.activations[op.stage, op.micro_batch]
        self._spill(_boundary(op, 0), place, self._places.activations[op.slot], done)

    def _fetch_activation(self, op: Op, state: StepState, done: Done) -> None:
        place = self._scratch.activations[op.stage, op.micro_batch]
        self._fetch(_boundary(op, 0), op.slot, place, self._places.activations[op.slot], done)

    def _lower_activation(self, op: Op, state: StepState) -> Work:
        source, target = self._places.activations[op.slot], self._places.host_activations[op.host_slot]
        return Work(
            copying(target, source),
            partial(self._manager.lower, _boundary(op, 0), op.host_slot, target.nbytes),
        )

    def _raise_activation(self, op: Op, state: StepState) -> Work:
        source, target = self._places.host_activations[op.host_slot], self._places.activations[op.slot]
        return Work(
            copying(target, source),
            partial(self._manager.lift, _boundary(op, 0), op.slot, target.nbytes),
        )

    def _gradient_bytes(self, stage: int) -> Tensor:
        return self._places.stages[stage].gradients.view(torch.uint8)

    def _spill_gradient(self, op: Op, state: StepState, done: Done) -> None:
        item = Item(ItemKind.GRADIENT, op.stage)
        self._spill(item, self._scratch.gradients[op.stage], self._gradient_bytes(op.stage), done)

    def _fetch_gradient(self, op: Op, state: StepState, done: Done) -> None:
        item = Item(ItemKind.GRADIENT, op.stage)
        buffer = self._buffers.gradients[op.stage]
        self._fetch(item, buffer, self._scratch.gradients[op.stage], self._gradient_bytes(op.stage), done)
