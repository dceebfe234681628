"""One stage on a run's own buffers, with random numbers in them: the passes that `timing.py` times.

The passes are those of `runtime.py`'s compute ops, with the same gradient hooks; there is no store, no plan, no lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hoist.scheduler.accumulate import DirectGradients, Target
from hoist.scheduler.batches import Batch
from hoist.scheduler.boundary import Packed, as_leaves, has_gradient, keep_gradients, pack, packed_bytes, unpack
from hoist.scheduler.context import Context
from hoist.scheduler.head_loss import HeadLoss
from hoist.scheduler.places import Places
from hoist.scheduler.runtime import accumulate_into
from hoist.scheduler.stages import EmbedStage, HeadStage, LayerStage, Stage, as_carried, as_tuple

#: So much is gone through to take other things out of the processor's caches.
CHILL_BYTES = 64 * 2**20
#: Random numbers are made for so many elements, and repeated.
PATTERN_ELEMENTS = 2**20
#: Their standard deviation: that of many models' initial weights.
DEVIATION = 0.02


def fill(target: Tensor, pattern: Tensor) -> None:
    """Repeat ``pattern`` (1-D float32) over a contiguous tensor; one of whole numbers becomes zeros."""
    flat = target.view(-1)
    if not target.is_floating_point():
        flat.zero_()
        return
    for start in range(0, flat.numel(), pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])


def chill(places: Places) -> None:
    """Take what the caches hold of a stage out of them, as the stages between two visits do in a run."""
    left = CHILL_BYTES
    for region in (places.gradient_region, places.ring):
        part = region[: min(left, region.numel())].view(torch.int64)
        left -= part.nbytes
        part.add_(0)


class StageBench:
    """A stage that is bound to random weights. Use as a context manager: it lets go of them, and of its hooks."""

    def __init__(
        self,
        stage: Stage,
        places: Places,
        pattern: Tensor,
        *,
        passes: int,
        loss_slice_tokens: int = 0,
        layers_compiled: bool = False,
    ) -> None:
        """``passes``: 1 if a gradient is handed on to the stage below, 0 if the backward ends here, -1 for no backward.

        ``pattern``: random float32 numbers. ``layers_compiled``: see `compiling.py`; then gradients of a layer's
        weights come from autograd.
        """
        self._stage = stage
        self._places = places
        self._pattern = pattern
        self._passes = passes
        self._loss_slice_tokens = loss_slice_tokens
        self._tensors = places.stages[stage.index].tensors()
        for tensor in self._tensors.values():
            fill(tensor, pattern)
        #: Names whose gradient has come in this step.
        self._touched: set[str] = set()
        self._handles: list[RemovableHandle] = []
        stage.bind(self._tensors)
        targets: dict[Tensor, Target] = {}
        own = {placed.spec.name: placed for placed in places.stages[stage.index].layout.trainable}
        for name, parameter in stage.parameters().items():
            if not parameter.requires_grad or passes < 0:
                continue
            values = places.stages[stage.index].gradient(own[name]) if name in own else places.loans[name]
            targets[parameter] = Target(values, partial(self._is_touched, name))
            self._handles.append(parameter.register_post_accumulate_grad_hook(accumulate_into(targets[parameter])))
        self._direct: AbstractContextManager[object] = DirectGradients(targets, places.block)
        if layers_compiled and isinstance(stage, LayerStage):
            self._direct = nullcontext()

    def _is_touched(self, name: str) -> bool:
        if name in self._touched:
            return True
        self._touched.add(name)
        return False

    def begin_step(self) -> None:
        """The next backward is a step's first: its gradients replace what is in the buffer."""
        self._touched.clear()

    def rebind(self) -> None:
        """What a visit does before and after its micro-batches."""
        self._stage.unbind()
        self._stage.bind(self._tensors)

    def load(self, entering: Sequence[Packed]) -> None:
        """Put random activations where the stage finds its input, and random gradients where those of its output are.

        Call it before each pass: a backward leaves gradients in the place of the input.
        """
        for slot in self._slots(packed_bytes(entering)):
            fill(slot.view(self._places.stages[self._stage.index].weights.dtype), self._pattern)

    def _slots(self, num_bytes: int) -> list[Tensor]:
        """Input's and output's activation slots; the run has two unless its model is tiny."""
        found = self._places.activations[:2]
        return [*found, *(torch.empty(max(64, num_bytes), dtype=torch.uint8) for _ in range(2 - len(found)))]

    def forward(self, entering: Sequence[Packed], batch: Batch, context: Context | None) -> tuple[Packed, ...]:
        """A forward without autograd, kept like a boundary activation; what is handed on. A head has none."""
        source, target = self._slots(packed_bytes(entering))
        with torch.no_grad():
            if isinstance(self._stage, EmbedStage):
                values = as_tuple(self._stage.forward(batch)[0])
            elif isinstance(self._stage, LayerStage):
                assert context is not None
                sources = as_leaves(unpack(source, entering), wanted=False)
                values = as_tuple(self._stage.forward(as_carried(sources), context))
            else:
                return ()
            leaving = pack(values)
            for place, value in zip(unpack(target, leaving), values, strict=True):
                place.copy_(value)
        return leaving

    def backward(self, entering: Sequence[Packed], leaving: Sequence[Packed], batch: Batch, context: Context) -> None:
        """Recomputation and backward; of a head its forward, loss and backward. Nothing where there is no backward."""
        if self._passes < 0:
            return
        source, target = self._slots(packed_bytes(entering))
        slots = unpack(source, entering)
        if isinstance(self._stage, HeadStage):
            HeadLoss(self._stage, slice_tokens=self._loss_slice_tokens).train(
                slots,
                batch,
                context,
                1.0,
                mode=self._direct,
                backward=lambda loss: self._run([loss], [None]),
                hands_down=self._passes > 0,
            )
            return
        gradients = [
            tensor if has_gradient(tensor.dtype) else None for tensor in unpack(target, leaving)
        ]
        if isinstance(self._stage, EmbedStage):
            with self._direct:
                values = as_tuple(self._stage.forward(batch)[0])
            self._run(values, gradients)
            return
        assert isinstance(self._stage, LayerStage)
        sources = as_leaves(slots, wanted=self._passes > 0)
        with self._direct:
            values = as_tuple(self._stage.forward(as_carried(sources), context))
        self._run(values, gradients)
        if self._passes > 0:
            keep_gradients(slots, sources)

    def _run(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stage.unbind(forget=True)
