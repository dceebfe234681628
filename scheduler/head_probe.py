"""Finds out whether a model's head may be run on a part of a micro-batch's tokens: each logit from its own token alone.

Tried on a tiny batch when the model is split, without memory for weights. The loss in slices is `head_loss.py`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hoist.scheduler.models import private_rng

logger = logging.getLogger(__name__)

#: The head's forward: logits [B, S, V] from the last layer's output [B, S, H] and a batch.
Logits = Callable[[Tensor, Mapping[str, Tensor]], Tensor]

_ROWS, _TOKENS = 2, 5
#: The token that is made NaN: it has neighbours on both sides, and another row above.
_TAINTED = (1, 2)
_TOLERANCE = 1e-4
#: About so many logits of a token are looked at.
_COLUMNS = 256


def ones_like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A weight for the probe: one real 1, expanded, so that it takes no memory."""
    return torch.ones((), dtype=dtype).expand(tuple(shape))


def width_of_token_wise(model: PreTrainedModel, logits: Logits, width: int) -> int:
    """Logits per token if the head can be run on any part of the tokens and its loss adds up, else 0.

    The head must give, for each token, the same logits whatever the other tokens' hidden states, ids, masks and
    positions are, and wherever a slice begins. ``logits`` runs with weights of :func:`ones_like`; ``width`` is that of
    the hidden state. A head with dropout of its own counts as not token-wise.
    """
    try:
        with torch.no_grad(), _Products():
            found = _try_slices(model, logits, width)
        return found if found and _loss_adds_up(model) else 0
    except Exception as error:  # whatever a model raises on parts of a batch: it is then given whole ones
        logger.debug("%s: its head on the probe's parts: %s", type(model).__name__, error)
        return 0


def _try_slices(model: PreTrainedModel, logits: Logits, width: int) -> int:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn((_ROWS, _TOKENS, width), generator=generator).to(model.dtype)
    ids = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS).remainder(2)

    def run(source: Tensor, **batch: Tensor) -> Tensor:
        """Some of the logits: what holds for them holds for their neighbours."""
        with private_rng(0):
            found = logits(source, batch)
        widths.add(found.shape[-1])
        return found[..., :: max(1, found.shape[-1] // _COLUMNS)].clone()

    widths: set[int] = set()
    whole = run(hidden, input_ids=ids)
    if whole.shape[:-1] != ids.shape or not bool(whole.isfinite().all()):
        return 0
    known = inspect.signature(model.forward).parameters
    given = {"attention_mask": torch.ones_like(ids), "position_ids": ids + 1}
    given["attention_mask"][0, -1] = given["attention_mask"][1, 0] = 0
    others = {name: value for name, value in given.items() if name in known}
    tainted = hidden.clone()
    tainted[_TAINTED] = torch.nan
    seen = run(tainted, input_ids=ids)
    if not bool(seen[_TAINTED].isnan().all()):
        return 0
    seen[_TAINTED] = whole[_TAINTED]
    row, column = _TAINTED
    pairs = [
        (seen, whole),
        (run(hidden, input_ids=1 - ids, **others), whole),
        (run(hidden[:row], input_ids=ids[:row]), whole[:row]),
        (run(hidden[row:, column:], input_ids=ids[row:, column:]), whole[row:, column:]),
        (run(hidden[row:, :column], input_ids=ids[row:, :column]), whole[row:, :column]),
    ]
    same = all(torch.allclose(mine, theirs, rtol=_TOLERANCE, atol=_TOLERANCE) for mine, theirs in pairs)
    return widths.pop() if same and len(widths) == 1 else 0


def _loss_adds_up(model: PreTrainedModel) -> bool:
    """Whether the model's loss takes labels that are shifted already, and is a sum over tokens."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn((_ROWS, _TOKENS, 7), generator=generator)
    labels = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS).remainder(7)
    labels[0, 2] = -100
    shifted = shifted_labels(labels)
    whole = model.loss_function(logits=logits, labels=labels, vocab_size=7, num_items_in_batch=3)
    parts = [
        model.loss_function(
            logits=logits[rows, columns],
            labels=None,
            vocab_size=7,
            num_items_in_batch=3,
            shift_labels=shifted[rows, columns],
        )
        for rows, columns in ((slice(0, 1), slice(0, 5)), (slice(1, 2), slice(0, 2)), (slice(1, 2), slice(2, 5)))
    ]
    return torch.allclose(torch.stack(parts).sum(), whole, rtol=_TOLERANCE)


def shifted_labels(labels: Tensor) -> Tensor:
    """int64 [B, S]: for each token the label of the next one in its row; -100, not counted, for the last."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


class _Products(TorchDispatchMode):
    """Multiplies by expanded matrices, which torch would write out first, as if all their columns were one vector.

    The vector's elements differ, so that what sums up to zero over a token, as after a norm, does not vanish.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types none of it

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            if _is_expanded(right):
                terms = torch.arange(left.shape[1], dtype=torch.float32).cos().to(left.dtype)
                sums = (left * terms).sum(1, keepdim=True) * right.as_strided((1, 1), (0, 0))
                product = sums.expand(left.shape[0], right.shape[1])
                return product + args[0] if len(args) == 3 else product.contiguous()
        return func(*args, **(kwargs or {}))


def _is_expanded(matrix: Tensor) -> bool:
    return matrix.untyped_storage().nbytes() < matrix.numel() * matrix.itemsize
