"""How much memory one stage's forward and backward will take beside the arena, found without running it.

Layers and head are run on fake tensors: torch's own shape propagation, kernels chosen as for real ones, no memory.
Every storage is counted from its creation to its end. Kernels' private scratch (small on a CPU) is not seen;
`memory.py` budgets what is found here, and the metrics' measured peak shows what was missed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from hoist.tiers.heap import OWN_MAPPING_BYTES
from hoist.tiers.layout import TensorSpec

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class _Peaks:
    """The most bytes at once of one stage: in all tensors, and in those that come from the heap."""

    all_bytes: int
    heap_bytes: int


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that ops create, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types none of it
        self.live_bytes = 0
        self.peak_bytes = 0
        self.heap_bytes = 0
        self.peak_heap_bytes = 0
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
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        num_bytes = self._seen.pop(key, 0)
        self.live_bytes -= num_bytes
        if num_bytes < OWN_MAPPING_BYTES:
            self.heap_bytes -= num_bytes


def measure(
    model: StagedModel, batch: Mapping[str, Tensor], *, loss_slice_tokens: int = 0, layers_compiled: bool = False
) -> Workspaces:
    """Find the workspace of every stage for a micro-batch shaped like ``batch`` (its values do not matter).

    ``loss_slice_tokens``: most tokens of a slice of the loss, see `head_loss.py`. ``layers_compiled``: a layer's
    backward then has all gradients of its weights at once, as compiled graphs hand them over together; fused kernels
    need less than what is counted here, op by op.

    The embed stage runs for real on absent weights (its activations alone are allocated). Raises what a stage raises on
    such a batch.
    """
    embed = model.embed
    values = {name: _absent_like(spec, model.dtype) for name, spec in model.used_by(embed)}
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
    if not embed.is_known_by_shape:
        found = [_measure_stage(model, embed, (), batch, context, 0 if first == 0 else -1)[0]]
    boundary_bytes = packed_bytes(entering)
    known: dict[object, tuple[_Peaks, tuple[Packed, ...]]] = {}
    for stage in model.stages[1:]:
        # Below what is trained there is no backward, and the first that is trained hands no gradient down.
        passes = (stage.index > first) - (stage.index < first)
        given = tuple((place.shape, place.dtype) for place in entering)
        key = (passes, signature(model, stage, context), given)
        if key not in known:
            known[key] = (
                (_measure_head(model, entering, batch, context, loss_slice_tokens, passes), ())
                if isinstance(stage, HeadStage)
                else _measure_stage(model, stage, entering, batch, context, passes, whole_gradients=layers_compiled)
            )
        peaks, entering = known[key]
        boundary_bytes = max(boundary_bytes, packed_bytes(entering))
        found.append(peaks)
    return Workspaces(
        stages=tuple(peaks.all_bytes for peaks in found),
        in_heap=tuple(peaks.heap_bytes for peaks in found),
        boundary_bytes=boundary_bytes,
        context_bytes=context.num_bytes,
    )


def _absent_like(spec: TensorSpec, dtype: str) -> Tensor:
    scalar = torch.zeros((), dtype=getattr(torch, spec.compute_dtype(dtype)))
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
) -> _Peaks:
    """Of the head with its loss: the largest slice's, as no two exist at once, and the shifted labels of all."""
    given = [torch.empty(place.shape, dtype=place.dtype, device="meta") for place in entering]
    cut = HeadLoss(model.head, slice_tokens=loss_slice_tokens).parts(given)
    if len(cut) == 1:
        if not model.head.token_wise_width and model.head.is_known_by_shape:
            _tell_of_whole_logits(model, batch["input_ids"].numel())
        return _measure_stage(model, model.head, entering, batch, context, passes)[0]
    largest = max(cut, key=lambda part: part.of(batch["labels"]).numel())
    sliced = pack([largest.of(tensor) for tensor in given])
    batch_part = {name: largest.of(batch[name]) for name in ("input_ids", "labels")}
    peaks, _ = _measure_stage(model, model.head, sliced, batch_part, context, passes, in_slices=True)
    labels_bytes = 2 * batch["labels"].nbytes
    return _Peaks(peaks.all_bytes + labels_bytes, peaks.heap_bytes + labels_bytes)


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
    *,
    in_slices: bool = False,
    whole_gradients: bool = False,
) -> tuple[_Peaks, tuple[Packed, ...]]:
    """What a stage needs, and what it hands on.

    ``passes``: 1 if a gradient is handed on to the stage below, 0 if the backward ends here, -1 for no backward.
    ``in_slices``: the head's loss is made in slices, and what is given is one. ``whole_gradients``: its weights'
    gradients are made whole, and kept until the backward's end.
    """
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
) -> tuple[_Peaks, tuple[Packed, ...]]:
    """As :func:`_measure_stage`, on fake tensors; without ``mode`` it is run for real, on zeros."""

    def given(tensor: Tensor) -> Tensor:
        return tensor if mode is None else mode.from_tensor(tensor)

    leaving: tuple[Packed, ...] = ()
    with mode or nullcontext():
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
        with mode or nullcontext():
            block = torch.empty(
                max((block_elements(value.shape) for value in values.values()), default=0),
                dtype=getattr(torch, model.dtype),
            )
            for parameter in stage.parameters().values():
                if parameter.requires_grad and not whole_gradients:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
                    targets[parameter] = Target(torch.empty(parameter.shape), lambda: True)
        direct = DirectGradients(targets, block)
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
    return _Peaks(tracker.peak_bytes, tracker.peak_heap_bytes), leaving


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None

