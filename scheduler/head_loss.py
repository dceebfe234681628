"""The loss of a micro-batch, forward and backward, in slices of its tokens, so that its logits never exist whole.

For a vocabulary of 150,000 the logits of 4,096 tokens are 2.3 GiB in float32, and autograd wants them three times.
Which models allow slices is found by `head_probe.py`; the head itself is in `stages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hoist.scheduler.batches import IGNORED_LABEL, Batch
from hoist.scheduler.boundary import as_leaves, keep_gradients
from hoist.scheduler.context import Context
from hoist.scheduler.head_probe import shifted_labels
from hoist.scheduler.stages import HeadStage, as_carried

#: A slice's logits may take this much as float32, if nothing else is asked for,
SLICE_BYTES = 32 * 2**20
#: or this share of the head's weight, if that is more: with fewer tokens a product waits for the weight's bytes, and
#: buffers for that weight and its gradient are needed anyway.
SLICE_SHARE_OF_WEIGHT = 1 / 4
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some tokens of a micro-batch, which lie together in memory: whole rows, or part of one row."""

    rows: slice
    columns: slice

    def of(self, values: Tensor) -> Tensor:
        """The part of [B, S, ...], a contiguous view of a contiguous tensor."""
        return values[self.rows, self.columns]


def slice_tokens(vocab_width: int, hidden_width: int) -> int:
    """Most tokens of a slice: as many as have 32 MiB of float32 logits, or a quarter of the hidden width if more.

    Depends on nothing but the model, above all not on the budget: results are the same bits for any.
    """
    by_bytes = SLICE_BYTES // (_FLOAT_BYTES * vocab_width)
    return max(1, by_bytes, int(SLICE_SHARE_OF_WEIGHT * hidden_width))


def parts(num_rows: int, num_tokens: int, limit: int) -> Sequence[Part]:
    """Cut [B, S] into parts of at most ``limit`` tokens, nearly equal: whole rows if they fit, else parts of rows."""
    if num_tokens <= limit:
        groups = _cuts(num_rows, limit // num_tokens)
        return [Part(rows=rows, columns=slice(0, num_tokens)) for rows in groups]
    pieces = _cuts(num_tokens, limit)
    return [Part(rows=slice(row, row + 1), columns=piece) for row in range(num_rows) for piece in pieces]


def _ignores(part: Part, batch: Batch) -> bool:
    """No label of the part counts. ``batch`` is in host memory."""
    return bool((part.of(shifted_labels(batch["labels"])) == IGNORED_LABEL).all())


def _cuts(length: int, limit: int) -> list[slice]:
    count = -(-length // limit)
    bounds = [length * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


class HeadLoss:
    """The loss of one model's head. Whole where one slice holds all tokens, or where the head allows no slices."""

    def __init__(self, head: HeadStage, *, slice_tokens: int = 0) -> None:
        """``slice_tokens``: most tokens of a slice; 0: see :func:`slice_tokens`."""
        self._head = head
        self._configured = slice_tokens

    def parts(self, carried: Sequence[Tensor]) -> Sequence[Part]:
        """How a micro-batch is cut whose head is given ``carried``: where it is cut, a last hidden state [B, S, H]."""
        vocab_width = self._head.token_wise_width
        if not vocab_width:
            return [Part(rows=slice(None), columns=slice(None))]
        num_rows, num_tokens, hidden_width = carried[0].shape
        return parts(num_rows, num_tokens, self._configured or slice_tokens(vocab_width, hidden_width))

    def train(
        self,
        carried: Sequence[Tensor],
        batch: Batch,
        context: Context,
        num_items: float,
        *,
        on_host: Batch | None = None,
        mode: AbstractContextManager[object],
        backward: Callable[[Tensor], None],
        hands_down: bool = True,
    ) -> tuple[Tensor, frozenset[int]]:
        """The loss, 0-d float32, as :meth:`HeadStage.forward` has it; and its gradients.

        ``on_host`` is ``batch`` in host memory, for what must be decided at once; None: it is there.

        ``carried``, what the head is given, is overwritten by the gradients of the loss, slice by slice; returned are
        also the positions of those tensors that have none. Without ``hands_down`` nobody wants these gradients: none
        are made, and ``carried`` stays as it is. ``mode`` is entered around each forward, ``backward`` is given each
        slice's loss. With one slice everything is bit for bit as without slices; with several the sums over tokens are
        made in parts, and differ in rounding. A slice that has no counted label is passed over: its gradient is zero.

        Raises:
            ConfigError: ``num_items`` is not positive.
        """
        cut = self.parts(carried)
        if len(cut) == 1:
            with mode:
                sources = as_leaves(carried, wanted=hands_down)
                loss = self._head.forward(as_carried(sources), batch, context, num_items)
            backward(loss)
            return loss.detach(), keep_gradients(carried, sources) if hands_down else frozenset()
        (hidden,) = carried
        labels = shifted_labels(batch["labels"])
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for part in cut:
            place = part.of(hidden)
            if _ignores(part, on_host or batch):
                if hands_down:
                    place.zero_()
                continue
            sources = as_leaves([place], wanted=hands_down)
            with mode:
                loss = self._head.slice_loss(sources[0], part.of(batch["input_ids"]), part.of(labels), num_items)
            backward(loss)
            if hands_down and keep_gradients([place], sources):
                place.zero_()
            total += loss.detach()
        return total.float(), frozenset()

    def evaluate(
        self,
        carried: Sequence[Tensor],
        batch: Batch,
        context: Context,
        num_items: float,
        *,
        on_host: Batch | None = None,
    ) -> Tensor:
        """The loss, 0-d float32, as :meth:`train` has it for the same arguments, without gradients.

        ``carried`` stays as it is. The head must be bound.
        """
        cut = self.parts(carried)
        with torch.no_grad():
            if len(cut) == 1:
                sources = as_leaves(carried, wanted=False)
                return self._head.forward(as_carried(sources), batch, context, num_items)
            (hidden,) = carried
            labels = shifted_labels(batch["labels"])
            total = torch.zeros((), dtype=torch.float64, device=hidden.device)
            for part in cut:
                if not _ignores(part, on_host or batch):
                    ids = part.of(batch["input_ids"])
                    total += self._head.slice_loss(part.of(hidden), ids, part.of(labels), num_items)
        return total.float()
