"""How much memory one stage's forward and backward will take beside the buffers: on a CPU found without running it.

Layers and head are run on fake tensors there: torch's own shape propagation, kernels chosen as for real ones, no
memory; kernels' private scratch (small on a CPU) is not seen. An accelerator's kernels have more, and other ones, so
there each kind of stage is run once, on zeros. `memory.py` budgets what is found, metrics show what was missed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hoist.scheduler.accumulate import DirectGradients, Target, block_elements
from hoist.scheduler.boundary import Packed, pack, packed_bytes
from hoist.scheduler.context import Context, TensorRef, Value, leaves
from hoist.scheduler.head_loss import SLICE_BYTES, HeadLoss
from hoist.scheduler.models import private_rng
from hoist.scheduler.stages import EmbedStage, HeadStage, LayerStage, Stage, StagedModel, as_carried, as_tuple
from hoist.tiers.device import Device
from hoist.tiers.errors import BudgetError
from hoist.tiers.heap import OWN_MAPPING_BYTES
from hoist.tiers.layout import TensorSpec, round_up

logger = logging.getLogger(__name__)

#: torch's allocator hands out a block that is larger than what was asked for, if what is over is at most this: so much
#: may be lost with each tensor above this size, depending on what happens to be free (kSmallSize in its sources).
BLOCK_WASTE_BYTES = 2**20
#: It rounds everything up to this.
BLOCK_BYTES = 512
#: What libraries keep on a device once they have been used, by the device; measured again, it is there already.
_kept_bytes: weakref.WeakKeyDictionary[Device, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspaces:
    """What a micro-batch of the largest shape needs."""

    stages: tuple[int, ...]
    """Bytes beside the arena, per stage: saved activations, temporaries, one weight's gradient."""
    in_heap: tuple[int, ...]
    """Per stage, the most bytes at once in tensors that are too small for a mapping of their own (`tiers/heap.py`)."""
    boundary_bytes: int
    """Bytes of the largest boundary activation."""
    context_bytes: int
    """Masks, positions and rotary tables of one micro-batch."""
    kept_bytes: int = 0
    """What libraries keep on an accelerator from their first use on (cuBLAS's workspaces); 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class _Peaks:
    """The most bytes at once of one stage: in all tensors, and in those that come from the heap."""

    all_bytes: int
    heap_bytes: int
    num_large: int = 0
    """Tensors that may take a block of more than they need, at most at once."""

    @property
    def with_waste(self) -> _Peaks:
        """With what an accelerator's allocator may lose in the worst order of blocks; one run shows only one order."""
        return replace(self, all_bytes=self.all_bytes + BLOCK_WASTE_BYTES * self.num_large)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that ops create, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types none of it
        self.live_bytes = 0
        self.peak_bytes = 0
        self.heap_bytes = 0
        self.peak_heap_bytes = 0
        self.num_large = 0
        self.most_large = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs))
        known = {leaf.untyped_storage()._cdata for leaf in given if isinstance(leaf, Tensor)}
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, known)
        return result

    def _count(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or key in known:  # a view of an input
            return
        num_bytes = storage.nbytes()
        self._seen[key] = num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if num_bytes < OWN_MAPPING_BYTES:
            self.heap_bytes += num_bytes
            self.peak_heap_bytes = max(self.peak_heap_bytes, self.heap_bytes)
        if num_bytes > BLOCK_WASTE_BYTES:
            self.num_large += 1
            self.most_large = max(self.most_large, self.num_large)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        num_bytes = self._seen.pop(key, 0)
        self.live_bytes -= num_bytes
        if num_bytes < OWN_MAPPING_BYTES:
            self.heap_bytes -= num_bytes
        if num_bytes > BLOCK_WASTE_BYTES:
            self.num_large -= 1


def measure(
    model: StagedModel,
    batch: Mapping[str, Tensor],
    *,
    loss_slice_tokens: int = 0,
    layers_compiled: bool = False,
    device: Device | None = None,
) -> Workspaces:
    """Find the workspace of every stage for a micro-batch shaped like ``batch`` (its values do not matter).

    ``loss_slice_tokens``: most tokens of a slice of the loss, see `head_loss.py`. ``layers_compiled``: a layer's
    backward then has all gradients of its weights at once, as compiled graphs hand them over together; fused kernels
    need less than what is counted here, op by op.

    The embed stage runs for real on absent weights (its activations alone are allocated). Raises what a stage raises on
    such a batch.

    On a ``device`` that counts what its kernels allocate, stages run there, on zeros, with their weights, one by one.
    Their need is then what the device counted beyond what had been allocated before, or what is counted here, if that
    is more. Raises BudgetError where one does not fit the device at all; nothing is left allocated but what libraries
    keep.
    """
    if device is None or not device.counts_allocations:
        return _measure(model, batch, loss_slice_tokens, layers_compiled, None)
    found: list[Workspaces] = []
    compute = device.stream("compute")
    try:
        compute.put(partial(model.move_to, device.torch_device)).wait()
        # In the stream that runs compute in: libraries keep a workspace for each stream.
        compute.put(
            partial(_measure_there, model, batch, loss_slice_tokens, layers_compiled, device, found)
        ).wait()
    finally:
        model.move_back()
        device.give_back_free()
        device.reset_peak()
    return found[0]


def _measure_there(
    model: StagedModel,
    batch: Mapping[str, Tensor],
    loss_slice_tokens: int,
    layers_compiled: bool,
    device: Device,
    found: list[Workspaces],
) -> None:
    result: Workspaces | None = None
    with first_use(device):
        try:
            inputs = {name: tensor.to(device.torch_device) for name, tensor in batch.items()}
            result = _measure(model, inputs, loss_slice_tokens, layers_compiled, device)
            del inputs
        except torch.OutOfMemoryError as error:
            logger.debug("%s: %s", device.torch_device, error)
    if result is None:  # not within the handler: that error's frames would keep what they had allocated
        raise BudgetError(
            f"--device-memory: a stage alone, on one micro-batch, does not fit in what is free on "
            f"{device.torch_device}, whatever the budget; give a smaller --micro-batch-size or --seq-len, or end what "
            "else uses the device"
        )
    found.append(replace(result, kept_bytes=_kept_bytes[device]))


@contextmanager
def first_use(device: Device) -> Iterator[None]:
    """Around what uses a device's libraries, perhaps for the first time, and keeps nothing there itself.

    What they keep allocated from then on is in what :func:`measure` finds. Nothing on a device that does not count.
    """
    if not device.counts_allocations:
        yield
        return
    before = _allocated_bytes(device)
    yield
    _kept_bytes[device] = _kept_bytes.get(device, 0) + max(0, _allocated_bytes(device) - before)


def allocated_bytes(num_bytes: int) -> int:
    """The most that an accelerator's allocator counts for a tensor of so many bytes."""
    return round_up(num_bytes, BLOCK_BYTES) + (BLOCK_WASTE_BYTES if num_bytes > BLOCK_WASTE_BYTES else 0)


def _allocated_bytes(device: Device) -> int:
    """What is allocated there now; the peak is counted from here."""
    device.reset_peak()
    return device.peak_bytes()


def _measure(
    model: StagedModel,
    batch: Mapping[str, Tensor],
    loss_slice_tokens: int,
    layers_compiled: bool,
    device: Device | None,
) -> Workspaces:
    """As :func:`measure`; with ``device`` on it, where the batch and what no stage binds are."""
    embed = model.embed
    values = {
        name: _absent_like(spec, model.dtype, None if device is None else device.torch_device)
        for name, spec in model.used_by(embed)
    }
    embed.bind(values)
    try:
        tracker = _LiveBytes()
        with private_rng(), torch.no_grad(), tracker:
            carried, context = embed.forward(batch)
        live = tracker.peak_bytes
    finally:
        embed.unbind(forget=True)
    entering = pack(as_tuple(carried))
    del carried
    # Backward makes the gradients of the embedding rows that occur (at most one a token) beside a few activations.
    first = model.first_trained
    # Those of bfloat16 are widened besides.
    live += (4 if model.dtype == "float32" else 6) * packed_bytes(entering) if first == 0 else 0
    found = [_Peaks(live, live)]
    if not embed.is_known_by_shape or device is not None:
        found = [_measure_stage(model, embed, (), batch, context, 0 if first == 0 else -1, device)[0]]
    boundary_bytes = packed_bytes(entering)
    known: dict[object, tuple[_Peaks, tuple[Packed, ...]]] = {}
    for stage in model.stages[1:]:
        # Below what is trained there is no backward, and the first that is trained hands no gradient down.
        passes = (stage.index > first) - (stage.index < first)
        given = tuple((place.shape, place.dtype) for place in entering)
        key = (passes, signature(model, stage, context), given)
        if key not in known:
            known[key] = (
                (_measure_head(model, entering, batch, context, loss_slice_tokens, passes, device), ())
                if isinstance(stage, HeadStage)
                else _measure_stage(
                    model, stage, entering, batch, context, passes, device, whole_gradients=layers_compiled
                )
            )
        peaks, entering = known[key]
        boundary_bytes = max(boundary_bytes, packed_bytes(entering))
        found.append(peaks)
    if device is not None:
        found = [peaks.with_waste for peaks in found]
    return Workspaces(
        stages=tuple(peaks.all_bytes for peaks in found),
        in_heap=tuple(peaks.heap_bytes for peaks in found),
        boundary_bytes=boundary_bytes,
        context_bytes=context.num_bytes if device is None else sum(map(allocated_bytes, context.storage_bytes)),
    )


def _absent_like(spec: TensorSpec, dtype: str, device: torch.device | None) -> Tensor:
    scalar = torch.zeros((), dtype=getattr(torch, spec.compute_dtype(dtype)), device=device)
    return scalar.expand(spec.shape)


def signature(model: StagedModel, stage: Stage, context: Context) -> object:
    """Stages that agree in this need the same: kind, tensors, and for a layer what it is called with."""
    if not stage.is_known_by_shape:
        return stage.index
    shapes = tuple((spec.shape, spec.trainable, spec.compute_dtype(model.dtype)) for _, spec in model.used_by(stage))
    if not isinstance(stage, LayerStage):
        return (type(stage), shapes)
    layer = stage.index - 1
    call = context.calls[layer]
    position = {value: number for number, value in enumerate(context.boundaries[layer])}

    def described(leaf: object) -> object:
        if isinstance(leaf, TensorRef):
            tensor = context.tensors[leaf.index]
            return tuple(tensor.shape), tensor.dtype
        return position.get(leaf) if isinstance(leaf, Value) else None

    glue = tuple(getattr(entry.func, "__name__", "") for entry in call.before)
    passed = tuple(position.get(value, -1) for value in context.boundaries[layer + 1])
    return (type(stage), shapes, tuple(described(leaf) for leaf in leaves((call.args, call.kwargs))), glue, passed)


def _measure_head(
    model: StagedModel,
    entering: Sequence[Packed],
    batch: Mapping[str, Tensor],
    context: Context,
    loss_slice_tokens: int,
    passes: int,
    device: Device | None,
) -> _Peaks:
    """Of the head with its loss: the largest slice's, as no two exist at once, and the shifted labels of all."""
    given = [torch.empty(place.shape, dtype=place.dtype, device="meta") for place in entering]
    cut = HeadLoss(model.head, slice_tokens=loss_slice_tokens).parts(given)
    if len(cut) == 1:
        if not model.head.token_wise_width and model.head.is_known_by_shape:
            _tell_of_whole_logits(model, batch["input_ids"].numel())
        return _measure_stage(model, model.head, entering, batch, context, passes, device)[0]
    largest = max(cut, key=lambda part: part.of(batch["labels"]).numel())
    sliced = pack([largest.of(tensor) for tensor in given])
    batch_part = {name: largest.of(batch[name]) for name in ("input_ids", "labels")}
    peaks, _ = _measure_stage(model, model.head, sliced, batch_part, context, passes, device, in_slices=True)
    labels_bytes = 2 * batch["labels"].nbytes
    return replace(
        peaks, all_bytes=peaks.all_bytes + labels_bytes, heap_bytes=peaks.heap_bytes + labels_bytes
    )


def _tell_of_whole_logits(model: StagedModel, num_tokens: int) -> None:
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    num_bytes = model.model.dtype.itemsize * vocab_size * num_tokens
    if num_bytes > SLICE_BYTES:
        logger.warning(
            "%s: its head or its loss is not made token by token, so all logits of a micro-batch exist at once: "
            "%.0f MiB, several times; a smaller --micro-batch-size or --seq-len needs less",
            type(model.model).__name__,
            num_bytes / 2**20,
        )


def _measure_stage(
    model: StagedModel,
    stage: Stage,
    entering: Sequence[Packed],
    batch: Mapping[str, Tensor],
    context: Context,
    passes: int,
    device: Device | None,
    *,
    in_slices: bool = False,
    whole_gradients: bool = False,
) -> tuple[_Peaks, tuple[Packed, ...]]:
    """What a stage needs, and what it hands on.

    ``passes``: 1 if a gradient is handed on to the stage below, 0 if the backward ends here, -1 for no backward.
    ``in_slices``: the head's loss is made in slices, and what is given is one. ``whole_gradients``: its weights'
    gradients are made whole, and kept until the backward's end.
    """
    if device is not None:
        return _run_stage(model, stage, entering, batch, context, passes, None, in_slices, whole_gradients, device)
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_logger.level
    torch_logger.setLevel(logging.CRITICAL)  # it prints a traceback before it raises
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        return _run_stage(model, stage, entering, batch, context, passes, fake, in_slices, whole_gradients)
    except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:
        # Some kernels have no faithful shape function (grouped products of experts in float32, torch 2.13).
        logger.debug("%s cannot be sized on fake tensors (%s); it is run once on zeros", stage.name, error)
        return _run_stage(model, stage, entering, batch, context, passes, None, in_slices, whole_gradients)
    finally:
        torch_logger.setLevel(level)


def _run_stage(
    model: StagedModel,
    stage: Stage,
    entering: Sequence[Packed],
    batch: Mapping[str, Tensor],
    context: Context,
    passes: int,
    mode: FakeTensorMode | None,
    in_slices: bool,
    whole_gradients: bool,
    device: Device | None = None,
) -> tuple[_Peaks, tuple[Packed, ...]]:
    """As :func:`_measure_stage`, on fake tensors; without ``mode`` it is run for real, on zeros, here or on ``device``.
    """
    # Around what is made here alone: a model that makes tensors in the wrong memory shall fail now, as it would later.
    there: AbstractContextManager[Any] = nullcontext() if device is None else torch.device(device.torch_device)

    def given(tensor: Tensor) -> Tensor:
        return tensor if mode is None else mode.from_tensor(tensor)

    leaving: tuple[Packed, ...] = ()
    with mode or nullcontext(), there:
        sources = tuple(
            torch.zeros(place.shape, dtype=place.dtype, requires_grad=place.has_gradient and passes > 0)
            for place in entering
        )
        fake_batch = {name: given(tensor) for name, tensor in batch.items()}
        fake_context = replace(context, tensors=tuple(given(tensor) for tensor in context.tensors))
        values = {
            name: torch.zeros(spec.shape, dtype=getattr(torch, spec.compute_dtype(model.dtype)))
            for name, spec in model.used_by(stage)
        }
    stage.bind(values)
    try:
        targets: dict[Tensor, Target] = {}
        direct: AbstractContextManager[Any] = nullcontext()  # an accelerator makes gradients whole, see `runtime.py`
        with mode or nullcontext():
            for parameter in stage.parameters().values():
                if parameter.requires_grad and not whole_gradients:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
                    if device is None:
                        targets[parameter] = Target(torch.empty(parameter.shape), lambda: True)
            if device is None:
                length = max((block_elements(value.shape) for value in values.values()), default=0)
                direct = DirectGradients(targets, torch.empty(length, dtype=getattr(torch, model.dtype)))
        before = 0 if device is None else _allocated_bytes(device)
        tracker = _LiveBytes()
        with mode or nullcontext(), tracker, private_rng():
            if isinstance(stage, HeadStage):
                with direct:
                    if in_slices:
                        loss = stage.slice_loss(sources[0], fake_batch["input_ids"], fake_batch["labels"], 1)
                    else:
                        loss = stage.forward(as_carried(sources), fake_batch, fake_context, 1)
                if loss.requires_grad:
                    loss.backward()
            else:
                with direct, nullcontext() if passes >= 0 else torch.no_grad():
                    if isinstance(stage, EmbedStage):
                        carried = as_tuple(stage.forward(fake_batch)[0])
                    elif isinstance(stage, LayerStage):
                        carried = as_tuple(stage.forward(as_carried(sources), fake_context))
                    else:
                        raise TypeError(f"{stage.name}: a {type(stage).__name__} cannot be measured alone")
                leaving = pack(carried)
                outputs = [value for value in carried if value.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [torch.zeros_like(value) for value in outputs])
                del carried, outputs
    finally:
        stage.unbind(forget=True)
    counted = 0 if device is None else device.peak_bytes() - before
    return _Peaks(max(counted, tracker.peak_bytes), tracker.peak_heap_bytes, tracker.most_large), leaving


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None

