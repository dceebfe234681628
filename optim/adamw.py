"""AdamW on one piece of a stage: merge the split weights, update, split again, block by block and in place.

It does not read or write storage, choose steps or learning rates, or clip. `split.py` has the weights' format,
`schedules.py` the learning rates; the scheduler says which tensors were touched and counts their steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoist.optim.errors import HyperparameterError
from hoist.optim.split import (
    SPLIT_BLOCK_ELEMENTS,
    has_nan,
    make_nans_canonical,
    merge_block,
    split_block,
    split_block_to,
)

#: Segments start on multiples of this. torch's fused kernel gives whole tensors' bits in pieces that are cut on
#: multiples of 16 elements, and a tensor starts on a multiple of 64 of its stage (256 bytes).
SEGMENT_ALIGN_ELEMENTS = 64
#: The fused kernel takes the step count as a float32, which holds every whole number up to this one.
MAX_ADAM_STEP = 2**24
#: A gap between two segments that is wider than this is not merged and split along with them.
_MAX_GAP_ELEMENTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWHyperparameters:
    """What AdamW runs with. Raises :class:`HyperparameterError` on what torch.optim.AdamW refuses, NaN and inf."""

    lr: float
    """Peak learning rate; a schedule may scale it. Finite, not negative."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of ``exp_avg`` and ``exp_avg_sq``, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment. Finite, not negative; 0 gives NaN where every gradient so far was 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay, multiplied by the step's learning rate. Finite, not negative."""

    def __post_init__(self) -> None:
        for field, value in (("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)):
            if not (math.isfinite(value) and value >= 0.0):
                raise HyperparameterError(f"{field} must be a finite number of at least 0, got {value!r}")
        if len(self.betas) != 2:
            raise HyperparameterError(f"betas must be two numbers, got {self.betas!r}")
        for index, beta in enumerate(self.betas):
            if not 0.0 <= beta < 1.0:
                raise HyperparameterError(f"betas[{index}] must be at least 0 and below 1, got {beta!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentUpdate:
    """What happens to the part of one tensor that lies in a piece. Raises ValueError on an illegal cut or step."""

    start: int
    """First element, counted in the piece; a multiple of 64, so that the bits are those of the whole tensor."""
    stop: int
    """One past the last element; more than ``start``. Where the tensor goes on in the next piece: a multiple of 64."""
    adam_step: int
    """The tensor's count of updates, this one included: 1 at its first."""
    lr: float
    """Learning rate of this update."""
    weight_decay: float
    """Weight decay of this tensor; see :func:`decay_for`."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.start % SEGMENT_ALIGN_ELEMENTS:
            raise ValueError(f"segment start must be a multiple of {SEGMENT_ALIGN_ELEMENTS} elements, got {self.start}")
        if self.stop <= self.start:
            raise ValueError(f"segment stop must be more than its start {self.start}, got {self.stop}")
        if not 1 <= self.adam_step <= MAX_ADAM_STEP:
            raise ValueError(f"adam_step must be 1 to {MAX_ADAM_STEP}, this update included, got {self.adam_step}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceReport:
    """What :meth:`PieceUpdater.update` did to one piece."""

    num_elements: int
    """Elements updated."""
    learning_rates: tuple[float, ...]
    """The distinct rates that were handed to the kernel, ascending."""


def decay_for(name: str, shape: Sequence[int], weight_decay: float, *, no_decay_norms: bool) -> float:
    """The weight decay of one tensor: ``weight_decay``, or 0 for biases and norms if ``no_decay_norms``.

    A bias or norm is what has at most one dimension, or a name whose last part is ``bias``: the usual rule, which needs
    no knowledge of the model. Without ``no_decay_norms`` everything decays, as in torch.
    """
    if no_decay_norms and (len(shape) <= 1 or name.rpartition(".")[2] == "bias"):
        return 0.0
    return weight_decay


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateScratch:
    """Memory of a device for :class:`PieceUpdater`: the tensors that it updates are there too."""

    weights: Tensor
    """float32 [block]: the merged weights of one block."""
    patterns: Tensor
    """int32 [block]: second operand of the merge."""
    steps: Tensor
    """float32 [block / 64, rounded up]: step counts of the tensors of a block."""


class PieceUpdater:
    """Runs AdamW on pieces. Holds two blocks of scratch (2 MiB); calls from several threads take turns.

    With scratch on a device its calls are work for one of that's streams: nothing is allocated, and nothing read that
    the host would have to wait for.

    Same bits as ``torch.optim.AdamW(fused=True)`` on whole tensors, for any cut into pieces and blocks and any number
    of torch threads, on the device that the tensors are on. The caller sets torch's threads. amsgrad and maximize are
    not supported.
    """

    def __init__(
        self,
        hyperparameters: AdamWHyperparameters,
        *,
        block_elements: int = SPLIT_BLOCK_ELEMENTS,
        scratch: UpdateScratch | None = None,
    ) -> None:
        """``block_elements`` (a multiple of 64) bounds the scratch; it doesn't change results.

        ``scratch``: a device's, as long as its blocks; None: memory of the host.
        """
        if scratch is not None:
            block_elements = scratch.weights.numel()
        if block_elements <= 0 or block_elements % SEGMENT_ALIGN_ELEMENTS:
            raise ValueError(f"block_elements must be a multiple of {SEGMENT_ALIGN_ELEMENTS}, got {block_elements}")
        self._betas = hyperparameters.betas
        self._eps = hyperparameters.eps
        self._block_elements = block_elements
        #: The merged weights of one block; valid only while ``_lock`` is held. Freed with this object.
        self._weights = torch.empty(block_elements, dtype=torch.float32) if scratch is None else scratch.weights
        #: Second operand of the merge; same life.
        self._scratch = torch.empty(block_elements, dtype=torch.int32) if scratch is None else scratch.patterns
        #: Step counts of one call of the kernel on a device; None on the CPU, where making them costs nothing.
        self._steps = None if scratch is None else scratch.steps
        #: Guards the two blocks.
        self._lock = threading.Lock()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory this object holds."""
        return self._weights.nbytes + self._scratch.nbytes

    def update(
        self,
        *,
        weight_hi: Tensor,
        weight_lo: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        segments: Sequence[SegmentUpdate],
        weights: Tensor | None = None,
    ) -> PieceReport:
        """Update the segments of one piece in place; every other element keeps its bits.

        All tensors are flat, contiguous views of the same piece of n elements where the scratch is: ``weight_hi`` and
        ``weight_lo`` int16 or uint16 (see `split.py`), the moments, ``gradient`` and ``weights`` float32. ``gradient``
        may be shorter than n, as long as it covers every segment, and is only read. ``segments`` ascend and don't
        overlap; a tensor whose gradient is None is simply not among them, one whose gradient is zero is, and decays.

        ``weights``: the piece's weights before the update, as :func:`~hoist.optim.split.merge` has given them, where
        they are in memory. They are then updated in place, and the halves are only written: all n, with or without a
        segment, whatever they held. The results are the same bits as without.

        A NaN that arises in a weight stays NaN. Raises ValueError before anything is changed if an argument is not as
        said. Should the kernel itself raise, weights (halves and float32) and moments of the piece may be partly
        updated: its chunk must be read again from its committed slot.
        """
        _check_piece(weight_hi, weight_lo, exp_avg, exp_avg_sq, gradient, weights, device=self._weights.device)
        _check_segments(segments, min(weight_hi.numel(), gradient.numel()))
        hi_bits, lo_bits = weight_hi.view(torch.int16), weight_lo.view(torch.int16)
        runs = _runs(segments, self._block_elements)
        with self._lock, torch.no_grad():
            if weights is None:
                self._update_halves(hi_bits, lo_bits, exp_avg, exp_avg_sq, gradient, runs)
            else:
                self._update_whole(weights, hi_bits, lo_bits, exp_avg, exp_avg_sq, gradient, runs)
        return PieceReport(
            num_elements=sum(segment.stop - segment.start for segment in segments),
            learning_rates=tuple(sorted({segment.lr for segment in segments})),
        )

    def _update_halves(
        self, hi: Tensor, lo: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, runs: Iterable[_Run]
    ) -> None:
        """Merge each run's weights in scratch, update them there, and split them again."""
        for run in runs:
            start, stop = run[0][0], run[-1][1]
            weights = self._weights[: stop - start]
            patterns = weights.view(torch.int32)
            merge_block(hi[start:stop], lo[start:stop], patterns, self._scratch[: stop - start])
            self._step(weights, start, run, exp_avg, exp_avg_sq, gradient)
            split_block(patterns, hi[start:stop], lo[start:stop])

    def _update_whole(
        self,
        weights: Tensor,
        hi: Tensor,
        lo: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        runs: Iterable[_Run],
    ) -> None:
        """Update the runs of each block where they are, and split the whole block while it is in cache."""
        by_block: dict[int, list[_Run]] = {}
        for run in runs:
            by_block.setdefault(run[0][0] // self._block_elements, []).append(run)
        patterns = weights.view(torch.int32)
        for block, start in enumerate(range(0, weights.numel(), self._block_elements)):
            stop = min(start + self._block_elements, weights.numel())
            for run in by_block.get(block, ()):
                first, last = run[0][0], run[-1][1]
                self._step(weights[first:last], first, run, exp_avg, exp_avg_sq, gradient)
            split_block_to(patterns[start:stop], hi[start:stop], lo[start:stop], self._scratch[: stop - start])

    def _step(
        self, weights: Tensor, offset: int, run: _Run, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor
    ) -> None:
        """One kernel call for each distinct (lr, weight_decay) in the run; ``weights`` begins at element ``offset``.

        A NaN among the run's weights is then the one that :func:`split_block` can take.
        """
        groups: dict[tuple[float, float], _Run] = {}
        for part in run:
            groups.setdefault((part[2].lr, part[2].weight_decay), []).append(part)
        for (lr, weight_decay), parts in groups.items():
            torch._fused_adamw_(
                [weights[begin - offset : end - offset] for begin, end, _ in parts],
                [gradient[begin:end] for begin, end, _ in parts],
                [exp_avg[begin:end] for begin, end, _ in parts],
                [exp_avg_sq[begin:end] for begin, end, _ in parts],
                [],  # amsgrad's
                self._step_counts([segment.adam_step for _, _, segment in parts]),
                lr=lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=weight_decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )
        # Looking would block on a device; there all are replaced, which leaves other numbers as they are.
        if self._steps is not None or has_nan(weights):
            for begin, end, _ in run:
                make_nans_canonical(weights[begin - offset : end - offset])

    def _step_counts(self, adam_steps: Sequence[int]) -> list[Tensor]:
        """The kernel's step counts (float32, no dimension); on a device valid until the next call in its stream."""
        if self._steps is None:
            return [torch.full((), adam_step, dtype=torch.float32) for adam_step in adam_steps]
        counts = {adam_step: self._steps[place] for place, adam_step in enumerate(dict.fromkeys(adam_steps))}
        for adam_step, count in counts.items():
            count.fill_(adam_step)
        return [counts[adam_step] for adam_step in adam_steps]


#: Parts of segments that are worked on together: (first element, one past the last, segment), ascending.
_Run = list[tuple[int, int, SegmentUpdate]]


def _runs(segments: Sequence[SegmentUpdate], block_elements: int) -> Iterator[_Run]:
    """Cut segments at multiples of ``block_elements`` of the piece and gather neighbours that share a block.

    Gaps of alignment padding are merged and split along with a run, which gives their bits back; over a wider gap (an
    untouched tensor) that would be wasted work, so a new run begins. A run lies in one block.
    """
    run: _Run = []
    for segment in segments:
        begin = segment.start
        while begin < segment.stop:
            block = begin // block_elements
            end = min(segment.stop, (block + 1) * block_elements)
            if run and (block != run[0][0] // block_elements or begin - run[-1][1] > _MAX_GAP_ELEMENTS):
                yield run
                run = []
            run.append((begin, end, segment))
            begin = end
    if run:
        yield run


def _check_piece(
    weight_hi: Tensor,
    weight_lo: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    weights: Tensor | None,
    *,
    device: torch.device,
) -> None:
    """Raise ValueError unless the tensors are what :meth:`PieceUpdater.update` takes, with scratch on ``device``."""
    halves, floats = (torch.int16, torch.uint16), (torch.float32,)
    for name, tensor, dtypes in (
        ("weight_hi", weight_hi, halves),
        ("weight_lo", weight_lo, halves),
        ("exp_avg", exp_avg, floats),
        ("exp_avg_sq", exp_avg_sq, floats),
        ("gradient", gradient, floats),
        *(() if weights is None else (("weights", weights, floats),)),
    ):
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"{name} must be flat, contiguous and on {'the CPU' if device.type == 'cpu' else device}, "
                f"got shape {tuple(tensor.shape)}, strides {tensor.stride()}, device {tensor.device}"
            )
        if name != "gradient" and tensor.numel() != weight_hi.numel():
            raise ValueError(f"{name} must have weight_hi's {weight_hi.numel()} elements, got {tensor.numel()}")


def _check_segments(segments: Sequence[SegmentUpdate], num_elements: int) -> None:
    """Raise ValueError unless segments ascend, don't overlap and end within ``num_elements``."""
    last_stop = 0
    for segment in segments:
        if segment.start < last_stop:
            raise ValueError(f"segments must ascend without overlap: one starts at {segment.start}, before {last_stop}")
        if segment.stop > num_elements:
            raise ValueError(f"segment ends at {segment.stop}, past the {num_elements} elements of piece and gradient")
        last_stop = segment.stop
