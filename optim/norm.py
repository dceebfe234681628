"""Sum of squares of a gradient in fp64, with the same bits however the gradient was produced, cut or threaded.

It does not add up tensors or clip: the caller adds the tensors' sums in a fixed order and takes the root.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

#: Elements of a block. Blocks are counted from the tensor's start, so pieces and chunks have no say in the cuts.
NORM_BLOCK_ELEMENTS = 2**16


class SquareSum:
    """Sums squares block by block through one preallocated fp64 buffer (512 KiB). Calls from several threads queue up.

    A block is widened into the buffer, squared there and added up by numpy's pairwise summation. The first two are
    element by element and the third runs on one thread over a buffer that is always the same, so neither the input's
    alignment nor torch's thread count changes a bit (torch's own ``dot`` and ``sum`` differ between 1 and 2 threads).
    """

    def __init__(self) -> None:
        #: Holds the squares of one block; freed with this object.
        self._squares = torch.empty(NORM_BLOCK_ELEMENTS, dtype=torch.float64)
        #: Guards ``_squares``.
        self._lock = threading.Lock()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory this object holds."""
        return self._squares.nbytes

    def square_sum(self, tensor: Tensor) -> float:
        """The sum of squares of all elements of one whole tensor, in fp64.

        ``tensor`` is contiguous, of any shape (0-d and empty included) and any floating dtype, on the CPU, and is not
        changed. Block sums are added in order of position. inf gives inf; NaN gives NaN.

        Raises ValueError for a tensor that isn't contiguous, TypeError for one that isn't floating point.
        """
        if not tensor.is_floating_point():
            raise TypeError(f"square_sum needs a floating dtype, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"square_sum needs a contiguous tensor, got strides {tensor.stride()} for shape {tuple(tensor.shape)}"
            )
        flat = tensor.detach().view(-1)
        total = 0.0
        with self._lock:
            for start in range(0, flat.numel(), NORM_BLOCK_ELEMENTS):
                block = flat[start : start + NORM_BLOCK_ELEMENTS]
                squares = self._squares[: block.numel()]
                squares.copy_(block)
                squares.mul_(squares)
                total += float(np.add.reduce(squares.numpy()))
        return total


def clip_scale(norm: float, max_norm: float) -> float:
    """What gradients of global norm ``norm`` are multiplied with to have at most ``max_norm``; 1.0 if they have.

    ``max_norm / (norm + 1e-6)``, at most 1, rounded to float32: torch.nn.utils.clip_grad_norm_'s formula. Both finite.
    """
    return float(np.float32(min(1.0, max_norm / (norm + 1e-6))))
