"""Evaluations of a run: which rows they take, when they are due, and what is told of them.

How a forward alone is run is `hoist.scheduler.trainer`'s business; which rows are held out is `split.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.metrics import EvalMetrics
from hoist.scheduler.trainer import Trainer
from hoist.tools.rows import IGNORED_LABEL, Rows
from hoist.tools.split import HeldOut


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """What one evaluation found. One JSON object in ``--metrics``."""

    step: int
    """Steps done when it was made."""
    eval_loss: float
    """Mean over the counted labels of all its rows."""
    eval_counted: int
    """Labels that counted."""
    eval_tokens: int
    """Tokens that went through the model."""
    eval_seconds: float
    """Wall time."""
    eval_nvme_read_bytes: int
    """Bytes read from the store's drive for it."""
    eval_nvme_written_bytes: int
    """Bytes written to it: activations that did not fit."""

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object; a loss that is no number is null."""
        document = asdict(self)
        if not math.isfinite(self.eval_loss):
            document["eval_loss"] = None
        return document


class Evaluation:
    """The validation rows of a run, the same ones in every evaluation."""

    def __init__(
        self,
        rows: Rows,
        numbers: Sequence[int],
        *,
        every: int,
        last_step: int,
        num_rows_there: int,
        micro_batch_size: int,
        num_micro_batches: int,
    ) -> None:
        """``numbers``: the rows to take, of ``num_rows_there``. ``every``: steps between evaluations, 0 for one after
        ``last_step`` alone. ``num_micro_batches`` pass through the model at a time, as in a step.
        """
        self._rows = rows
        self._numbers = numbers
        #: Rows that it could take.
        self.num_rows_there = num_rows_there
        self._every = every
        self._last_step = last_step
        self._micro_batch_size = micro_batch_size
        self._num_micro_batches = num_micro_batches

    @property
    def num_rows(self) -> int:
        """Rows that an evaluation takes."""
        return len(self._numbers)

    def is_due(self, step: int) -> bool:
        """Whether one belongs after a step."""
        return step == self._last_step or (self._every > 0 and step % self._every == 0)

    def run(
        self, trainer: Trainer, stopped: Callable[[], bool], progress: Callable[[int, int], None] | None = None
    ) -> EvalRecord | None:
        """Evaluate; None if ``stopped`` says so before it is complete. ``progress`` gets done and total rows.

        Raises ConfigError if no label of the rows counts; else whatever the trainer raises.
        """
        found: list[EvalMetrics] = []
        done = 0
        for group in self._groups():
            if stopped():
                return None
            if progress is not None:
                progress(done, self.num_rows)
            found.append(trainer.evaluate(group))
            done += sum(len(batch["labels"]) for batch in group)
        counted = sum(part.counted for part in found)
        if not counted:
            raise ConfigError(
                "validation rows: none of their labels counts; give other --validation-data or another split"
            )
        return EvalRecord(
            step=trainer.step_number,
            eval_loss=sum(part.loss * part.counted for part in found) / counted,
            eval_counted=counted,
            eval_tokens=sum(part.tokens for part in found),
            eval_seconds=sum(part.seconds for part in found),
            eval_nvme_read_bytes=sum(part.nvme_read_bytes for part in found),
            eval_nvme_written_bytes=sum(part.nvme_written_bytes for part in found),
        )

    def _groups(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        """What passes through the model at a time; groups without a counted label have nothing to tell."""
        rows = self._micro_batch_size * self._num_micro_batches
        for first in range(0, len(self._numbers), rows):
            numbers = self._numbers[first : first + rows]
            size = self._micro_batch_size
            group = [self._rows.batch(numbers[start : start + size]) for start in range(0, len(numbers), size)]
            if any(bool((batch["labels"][:, 1:] != IGNORED_LABEL).any()) for batch in group):
                yield group


def validation_numbers(held_out: HeldOut | None, rows: Rows, most: int) -> Sequence[int]:
    """The first rows for validation, at most ``most`` (0: all): those held out, or of data that has no other use."""
    if held_out is None:
        return range(min(rows.num_rows, most or rows.num_rows))
    return _HeldOutRows(held_out, min(held_out.num_validation, most or held_out.num_validation))


class _HeldOutRows(Sequence[int]):
    """Numbers of held-out rows, which are computed and not kept."""

    def __init__(self, held_out: HeldOut, count: int) -> None:
        self._held_out = held_out
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._held_out.validation(number) for number in range(*index.indices(self._count))]
        return self._held_out.validation(index)
