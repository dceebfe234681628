"""The learning rate of each step: constant, linear or cosine after a linear warm-up. A pure function of the step.

It keeps no state, so a resumed run continues exactly. Who applies the rate is `adamw.py`'s business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hoist.optim.errors import HyperparameterError

ScheduleKind = Literal["constant", "linear", "cosine"]

#: Every kind, in the order that help texts show.
SCHEDULE_KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning rates of a run of ``num_steps`` steps. Raises :class:`HyperparameterError` on senseless values."""

    kind: ScheduleKind
    """Shape of the curve after the warm-up."""
    lr: float
    """Peak learning rate: reached at the last warm-up step. Finite, not negative."""
    warmup_steps: int = 0
    """Steps of linear rise, W. May exceed ``num_steps``: then the peak is not reached."""
    num_steps: int
    """Steps of the whole run, N, counted from the very first one. 0 is a run that only creates its store."""

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULE_KINDS:
            raise HyperparameterError(f"lr schedule {self.kind!r} is not one of {', '.join(SCHEDULE_KINDS)}")
        if not (math.isfinite(self.lr) and self.lr >= 0.0):
            raise HyperparameterError(f"lr must be a finite number of at least 0, got {self.lr!r}")
        for field, value in (("warmup_steps", self.warmup_steps), ("num_steps", self.num_steps)):
            if value < 0:
                raise HyperparameterError(f"{field} must be at least 0, got {value!r}")

    def at(self, step: int) -> float:
        """The learning rate of ``step``, counted from 1.

        With warm-up W and N steps: ``lr*s/W`` for s <= W; after that, with p = (s-W)/(N-W+1), ``lr`` (constant),
        ``lr*(1-p)`` (linear) or ``lr*(1+cos(pi*p))/2`` (cosine). p stays below 1: the last step still learns.

        Raises ValueError for a step outside 1 ... ``num_steps``.
        """
        if not 1 <= step <= self.num_steps:
            raise ValueError(
                f"step must be 1 to {self.num_steps}, got {step}; a longer run needs a schedule with more num_steps"
            )
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.num_steps - self.warmup_steps + 1)
        if self.kind == "linear":
            return self.lr * (1.0 - progress)
        if self.kind == "cosine":
            return self.lr * (1.0 + math.cos(math.pi * progress)) / 2.0
        return self.lr
