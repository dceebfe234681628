"""How much memory one stage's forward and backward will take beside the arena, found without running it.

Layers and head are run on fake tensors: torch's own shape propagation, kernels chosen as for real ones, no memory.
Every storage is counted from its creation to its end. Kernels' private scratch (small on a CPU) is not seen;
`memory.py` budgets what is found here, and the metrics' measured peak shows what was missed.
"""

from __future__ import annotations

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
from hoist.scheduler.context import Context
from hoist.scheduler.models import private_rng
from hoist.scheduler.stages import HeadStage, LayerStage, Stage, StagedModel
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


def measure(model: StagedModel, batch: Mapping[str, Tensor]) -> Workspaces:
    """Find the workspace of every stage for a micro-batch shaped like ``batch`` (its values do not matter).

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
    known: dict[object, _Peaks] = {}
    for stage in model.stages[1:]:
        # Below what is trained there is no backward, and the first that is trained hands no gradient down.
        passes = (stage.index > first) - (stage.index < first)
        key = (passes, _signature(stage, context))
        if key not in known:
            known[key] = _measure_stage(model, stage, hidden, batch, context, passes)
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


def _measure_stage(
    model: StagedModel, stage: Stage, hidden: Tensor, batch: Mapping[str, Tensor], context: Context, passes: int
) -> _Peaks:
    """``passes``: 1 if a gradient is handed on to the stage below, 0 if the backward ends here, -1 for no backward."""
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_logger.level
    torch_logger.setLevel(logging.CRITICAL)  # it prints a traceback before it raises
    try:
        return _run_stage(model, stage, hidden, batch, context, passes, FakeTensorMode(allow_non_fake_inputs=True))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        # Some kernels have no faithful shape function (grouped products of experts in float32, torch 2.13).
        logger.debug("%s cannot be sized on fake tensors (%s); it is run once on zeros", stage.name, error)
        return _run_stage(model, stage, hidden, batch, context, passes, None)
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
) -> _Peaks:
    """Peak bytes of one forward and backward, if it has one; without ``mode`` it is run for real, on zeros."""

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
            block = torch.empty(max(block_elements(value.shape) for value in values.values()))
            for parameter in stage.parameters().values():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
                    targets[parameter] = Target(torch.empty(parameter.shape), lambda: True)
        direct = DirectGradients(targets, block)
        tracker = _LiveBytes()
        with mode or nullcontext(), tracker, private_rng():
            if isinstance(stage, HeadStage):
                with direct:
                    loss = stage.forward(source, fake_batch, fake_context, 1)
                if loss.requires_grad:
                    loss.backward()
            elif isinstance(stage, LayerStage):
                with direct, nullcontext() if passes >= 0 else torch.no_grad():
                    output = stage.forward(source, fake_context)
                if output.requires_grad:
                    torch.autograd.backward(output, output_gradient)
            else:
                raise TypeError(f"{stage.name}: a {type(stage).__name__} cannot be measured alone")
    finally:
        stage.unbind(forget=True)
    return _Peaks(tracker.peak_bytes, tracker.peak_heap_bytes)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None

