"""Lets the gradients of linear and embedding weights go straight into a stage's buffer, without autograd's temporaries.

Autograd makes each weight's gradient whole before it adds it: for a head as large as all its logits' weights. Here the
same products are taken block by block, with the same arithmetic, so the sums are the same bits (a test compares them).
Every other parameter goes through autograd's own accumulation and the hooks of `runtime.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: A block of a weight's gradient is about this large (bytes) and has at least so many rows.
BLOCK_BYTES = 4 * 2**20
#: Elements of a 16-bit gradient that are added to a float32 sum at once: torch widens them into a temporary on a CPU.
_WIDENED_ELEMENTS = 2**16
MIN_BLOCK_ROWS = 256
#: Blocks are cut on multiples of this many rows, which no kernel's tile exceeds.
ROW_QUANTUM = 64


class Target:
    """Where one weight's gradient goes. ``values``, float32, has the weight's shape; ``touched``: it is a sum already.

    The sum is a float32 whatever is computed with: a bfloat16 gradient of each micro-batch, as autograd rounds it, is
    added to it.
    """

    def __init__(self, values: Tensor, touched: Callable[[], bool]) -> None:
        self.values = values
        #: Called once for each gradient that arrives: False for the step's first, which replaces what was there.
        self.touched = touched


def add_to(values: Tensor, gradient: Tensor) -> None:
    """Add a gradient to float32 sums of its shape, element by element; a 16-bit one with no large temporary."""
    if gradient.dtype == values.dtype or gradient.device.type != "cpu" or gradient.numel() <= _WIDENED_ELEMENTS:
        values.add_(gradient)
        return
    rows = max(1, _WIDENED_ELEMENTS * gradient.shape[0] // gradient.numel())
    for into, part in zip(values.split(rows), gradient.split(rows), strict=True):
        into.add_(part)


def row_cuts(num_rows: int, num_columns: int) -> Sequence[tuple[int, int]]:
    """Cut a weight's rows into blocks. The last block takes the remainder, so no block is a sliver."""
    rows = max(MIN_BLOCK_ROWS, BLOCK_BYTES // (4 * max(1, num_columns)) // ROW_QUANTUM * ROW_QUANTUM)
    starts = list(range(0, max(1, num_rows - rows + 1), rows))
    return [(start, stop) for start, stop in zip(starts, [*starts[1:], num_rows], strict=True)]


def block_elements(shape: Sequence[int]) -> int:
    """Elements of the largest block of a weight of ``shape``; 0 if it is not a matrix."""
    if len(shape) != 2:
        return 0
    return max(stop - start for start, stop in row_cuts(*shape)) * shape[1]


class _Linear(torch.autograd.Function):
    """``F.linear`` whose weight gradient goes to a target. Input and bias gradients are autograd's formulas."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor, bias: Tensor | None, target: Target, block: Tensor) -> Tensor:
        ctx.save_for_backward(source, weight)
        ctx.target, ctx.block = target, block
        output = torch.nn.functional.linear(source, weight, bias)
        # A view made in here must not be changed in place, which some models do; this is the same memory and no view.
        return output if output._base is None else torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        source, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        inputs = source.reshape(-1, weight.shape[1])
        values = ctx.target.values
        is_sum = ctx.target.touched()
        if is_sum or values.dtype != weight.dtype:
            for start, stop in row_cuts(*weight.shape):
                part = ctx.block[: (stop - start) * weight.shape[1]].view(stop - start, weight.shape[1])
                torch.mm(gradient[:, start:stop].t(), inputs, out=part)
                if is_sum:
                    add_to(values[start:stop], part)
                else:
                    values[start:stop].copy_(part)
        else:
            torch.mm(gradient.t(), inputs, out=values)
        source_gradient = gradient.mm(weight).view(source.shape) if ctx.needs_input_grad[0] else None
        bias_gradient = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return source_gradient, None, bias_gradient, None, None


class _Embedding(torch.autograd.Function):
    """``F.embedding`` whose weight gradient goes to a target, by the rows that occur."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int, target: Target) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.target, ctx.padding = target, padding
        return torch.embedding(weight, indices, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None, None]:
        (indices,) = ctx.saved_tensors
        gradient = gradients[0]
        rows, places = torch.unique(indices, return_inverse=True)
        padding = -1
        if ctx.padding >= 0:
            found = (rows == ctx.padding).nonzero()
            padding = int(found[0]) if found.numel() else -1
        # Rows of one token are added up first, in order, as in a dense gradient; then each row is added once.
        sums = torch.ops.aten.embedding_dense_backward(gradient, places, rows.numel(), padding, False)
        values = ctx.target.values
        if not ctx.target.touched():
            values.zero_()
        values.index_add_(0, rows, sums.to(values.dtype))
        return None, None, None, None


class DirectGradients(TorchFunctionMode):
    """While active, linear and embedding calls on known weights hand their gradients to targets.

    Enter it around a stage's forward with gradients; the backward may run after it has been left. A weight that one
    forward uses twice has its two gradients added to the sum one after the other, where autograd adds them together
    first: equal within rounding.
    """

    def __init__(self, targets: Mapping[Tensor, Target], block: Tensor) -> None:
        """``targets`` by Parameter (identity).

        ``block``: scratch of the largest :func:`block_elements` in the weights' dtype.
        """
        super().__init__()
        self._targets = dict(targets)
        self._block = block

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.nn.functional.linear and not named and len(args) in (2, 3):
            target = self._targets.get(args[1])
            if target is not None and args[0].dtype == args[1].dtype:
                bias = args[2] if len(args) == 3 else None
                return _Linear.apply(args[0], args[1], bias, target, self._block)  # type: ignore[no-untyped-call]  # torch
        elif func is torch.nn.functional.embedding:
            call = _plain_embedding(args, named)
            if call is not None:
                target = self._targets.get(call[1])
                if target is not None:
                    return _Embedding.apply(*call, target)  # type: ignore[no-untyped-call]  # torch
        return func(*args, **named)


def _plain_embedding(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, int] | None:
    """(indices, weight, padding index) of an embedding call without renormalisation, frequency scaling or sparsity."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    if call.get("max_norm") is not None or call.get("scale_grad_by_freq") or call.get("sparse"):
        return None
    padding = call.get("padding_idx")
    if padding is None:
        padding = -1
    elif padding < 0:
        padding += call["weight"].shape[0]
    return call["input"], call["weight"], int(padding)
