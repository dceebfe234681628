"""How much memory one stage's forward and backward will take beside the arena, found without running it.

Layers and head are run on fake tensors: torch's own shape propagation, kernels chosen as for real ones, no memory.
Every storage is counted from its creation to its end. Kernels' private scratch (small on a CPU) is not seen;
`memory.py` budgets what is found here, and the metrics' measured peak shows what was missed.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hoist.scheduler.accumulate import DirectGradients, Target, block_elements
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.context import Context
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.head_loss import SLICE_BYTES, HeadLoss, Part
from hoist.scheduler.models import private_rng
from hoist.scheduler.module_stages import MiddleModule, ModuleModel
from hoist.scheduler.stages import EmbedStage, HeadStage, LayerStage, Stage, StagedModel
from hoist.tiers.heap import OWN_MAPPING_BYTES

logger = logging.getLogger(__name__)

#: Activations are float32.
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspaces:
    """What a micro-batch of the largest shape needs."""

    stages: tuple[int, ...]
    """Bytes beside the arena, per stage: saved activations, temporaries, one weight's gradient."""
    in_heap: tuple[int, ...]
    """Per stage, the most bytes at once in tensors that are too small for a mapping of their own (`tiers/heap.py`)."""
    hidden_shape: tuple[int, ...]
    """Shape of a boundary activation."""
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


def largest_batch(model: StagedModel, config: TrainerConfig) -> dict[str, Tensor]:
    """A micro-batch of the largest shape with everything that one may have, so that all masks there can be are made.

    Raises ConfigError if the model's forward takes no such input.
    """
    if isinstance(model, ModuleModel):
        return model.largest_batch(config)
    shape = (config.micro_batch_size, config.seq_len)
    batch = {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.zeros(shape, dtype=torch.int64)}
    known = inspect.signature(model.model.forward).parameters
    for name in config.extra_inputs:
        if name not in known or name not in ("attention_mask", "position_ids"):
            raise ConfigError(f"extra_inputs: {type(model.model).__name__} takes no {name}")
        batch[name] = torch.ones(shape, dtype=torch.int64)
        if name == "attention_mask":
            batch[name][:, -1] = 0  # models leave a mask of ones out
        else:
            half = config.seq_len // 2  # two documents, as a single one needs no mask
            positions = torch.cat([torch.arange(half), torch.arange(config.seq_len - half)])
            batch[name] = positions.expand(shape).contiguous()
    return batch


def measure(model: StagedModel, batch: Mapping[str, Tensor], *, loss_slice_tokens: int = 0) -> Workspaces:
    """Find the workspace of every stage for a micro-batch shaped like ``batch`` (its values do not matter).

    ``loss_slice_tokens``: most tokens of a slice of the loss, see `head_loss.py`.

    The embed stage runs for real on absent weights (its activations alone are allocated). Raises what a stage raises on
    such a batch.
    """
    embed = model.embed
    values = {name: _absent_like(model, name) for name in _names(embed)}
    embed.bind(values)
    try:
        tracker = _LiveBytes()
        with private_rng(), torch.no_grad(), tracker:
            hidden, context = embed.forward(batch)
        live = tracker.peak_bytes
    finally:
        embed.unbind(forget=True)
    hidden_bytes = hidden.numel() * _FLOAT_BYTES
    # Backward makes the gradients of the embedding rows that occur (at most one a token) beside a few activations.
    first = model.first_trained
    behind = 4 * hidden_bytes if first == 0 else 0
    found = [_Peaks(live + behind, live + behind)]
    if isinstance(model, ModuleModel):  # the first one may be anything
        found = [_measure_stage(model, embed, hidden, batch, context, 0 if first == 0 else -1)]
    known: dict[object, _Peaks] = {}
    for stage in model.stages[1:]:
        # Below what is trained there is no backward, and the first that is trained hands no gradient down.
        passes = (stage.index > first) - (stage.index < first)
        key = (passes, _signature(stage, context))
        if key not in known:
            known[key] = (
                _measure_head(model, hidden, batch, context, loss_slice_tokens, passes)
                if isinstance(stage, HeadStage)
                else _measure_stage(model, stage, hidden, batch, context, passes)
            )
        found.append(known[key])
    return Workspaces(
        stages=tuple(peaks.all_bytes for peaks in found),
        in_heap=tuple(peaks.heap_bytes for peaks in found),
        hidden_shape=tuple(hidden.shape),
        context_bytes=context.num_bytes,
    )


def _names(stage: Stage) -> list[str]:
    return [*(spec.name for spec in stage.tensors), *stage.borrowed]


def _absent_like(model: StagedModel, name: str) -> Tensor:
    _, spec = model.tensor(name)
    scalar = torch.zeros((), dtype=getattr(torch, spec.compute_dtype))
    return scalar.expand(spec.shape)


def _signature(stage: Stage, context: Context) -> object:
    """Stages that agree in this need the same: kind, tensors, and for a layer what it is called with."""
    if isinstance(stage, MiddleModule):
        return stage.index  # modules with the same weights may still do other things with them
    shapes = tuple((spec.shape, spec.trainable, spec.dtype) for spec in stage.tensors)
    if not isinstance(stage, LayerStage):
        return (type(stage), shapes)
    hidden = torch.empty(0)
    args, kwargs = context.arguments(stage.index - 1, hidden)
    described = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) and leaf is not hidden else None
        for leaf in pytree.tree_leaves((args, kwargs))
    )
    return (type(stage), shapes, described)


def _measure_head(
    model: StagedModel,
    hidden: Tensor,
    batch: Mapping[str, Tensor],
    context: Context,
    loss_slice_tokens: int,
    passes: int,
) -> _Peaks:
    """Of the head with its loss: the largest slice's, as no two exist at once, and the shifted labels of all."""
    cut = HeadLoss(model.head, slice_tokens=loss_slice_tokens).parts(hidden)
    if len(cut) == 1:
        if not model.head.token_wise_width and not isinstance(model, ModuleModel):
            _tell_of_whole_logits(model, hidden)
        return _measure_stage(model, model.head, hidden, batch, context, passes)
    largest = max(cut, key=lambda part: part.of(batch["labels"]).numel())
    peaks = _measure_stage(model, model.head, hidden, batch, context, passes, largest)
    labels_bytes = 2 * batch["labels"].nbytes
    return _Peaks(peaks.all_bytes + labels_bytes, peaks.heap_bytes + labels_bytes)


def _tell_of_whole_logits(model: StagedModel, hidden: Tensor) -> None:
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    num_bytes = _FLOAT_BYTES * vocab_size * hidden[..., 0].numel()
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
    hidden: Tensor,
    batch: Mapping[str, Tensor],
    context: Context,
    passes: int,
    part: Part | None = None,
) -> _Peaks:
    """``passes``: 1 if a gradient is handed on to the stage below, 0 if the backward ends here, -1 for no backward."""
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_logger.level
    torch_logger.setLevel(logging.CRITICAL)  # it prints a traceback before it raises
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        return _run_stage(model, stage, hidden, batch, context, passes, fake, part)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        # Some kernels have no faithful shape function (grouped products of experts in float32, torch 2.13).
        logger.debug("%s cannot be sized on fake tensors (%s); it is run once on zeros", stage.name, error)
        return _run_stage(model, stage, hidden, batch, context, passes, None, part)
    finally:
        torch_logger.setLevel(level)


def _run_stage(
    model: StagedModel,
    stage: Stage,
    hidden: Tensor,
    batch: Mapping[str, Tensor],
    context: Context,
    passes: int,
    mode: FakeTensorMode | None,
    part: Part | None,
) -> _Peaks:
    """Peak bytes of one forward and backward, if it has one; without ``mode`` it is run for real, on zeros.

    ``part``: only of that part of the micro-batch.
    """
    if part is not None:
        hidden, batch = part.of(hidden), {name: part.of(batch[name]) for name in ("input_ids", "labels")}

    def given(tensor: Tensor) -> Tensor:
        return tensor if mode is None else mode.from_tensor(tensor)

    with mode or nullcontext():
        source = torch.zeros(hidden.shape, dtype=hidden.dtype, requires_grad=passes > 0)
        output_gradient = torch.zeros(hidden.shape, dtype=hidden.dtype)
        fake_batch = {name: given(tensor) for name, tensor in batch.items()}
        fake_context = Context(tensors=tuple(given(tensor) for tensor in context.tensors), calls=context.calls)
        values = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.compute_dtype))
            for spec in (model.tensor(name)[1] for name in _names(stage))
        }
    stage.bind(values)
    try:
        targets: dict[Tensor, Target] = {}
        with mode or nullcontext():
            block = torch.empty(max((block_elements(value.shape) for value in values.values()), default=0))
            for parameter in stage.parameters().values():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
                    targets[parameter] = Target(torch.empty(parameter.shape), lambda: True)
        direct = DirectGradients(targets, block)
        tracker = _LiveBytes()
        with mode or nullcontext(), tracker, private_rng():
            if isinstance(stage, HeadStage):
                with direct:
                    if part is None:
                        loss = stage.forward(source, fake_batch, fake_context, 1)
                    else:
                        loss = stage.slice_loss(source, fake_batch["input_ids"], fake_batch["labels"], 1)
                if loss.requires_grad:
                    loss.backward()
            elif isinstance(stage, LayerStage):
                with direct, nullcontext() if passes >= 0 else torch.no_grad():
                    output = stage.forward(source, fake_context)
                if output.requires_grad:
                    torch.autograd.backward(output, output_gradient)
            elif isinstance(stage, EmbedStage):
                with direct, nullcontext() if passes >= 0 else torch.no_grad():
                    output, _ = stage.forward(fake_batch)
                if output.requires_grad:
                    torch.autograd.backward(output, output_gradient)
            else:
                raise TypeError(f"{stage.name}: a {type(stage).__name__} cannot be measured alone")
    finally:
        stage.unbind(forget=True)
    return _Peaks(tracker.peak_bytes, tracker.peak_heap_bytes)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None

