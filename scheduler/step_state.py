"""What belongs to one step while it is under way: its inputs, what is known of its gradients, what is still to be done.

Lanes change it as `runtime.py` and `updates.py` say; the next step may begin before this one is finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hoist.scheduler.batches import Batch
from hoist.scheduler.boundary import Packed
from hoist.scheduler.context import Context


@dataclass(kw_only=True, slots=True)
class StepState:
    """What belongs to one step while it is under way; the next step may begin before it is finished."""

    step: int
    """Number of the step, from 1."""
    batches: Sequence[Batch]
    """One per micro-batch; empty once all have passed back, though the step's updates may still be under way."""
    inputs: Sequence[Batch] = ()
    """The batches where computation happens."""
    num_items: int
    """Counted tokens of the whole step."""
    lr: float
    """Learning rate of its updates."""
    commit_due: bool = False
    """The step is to be committed: what is kept in memory is written once it is updated."""
    commit: Callable[[], None] | None = None
    """Commits the step; called at the next step's turn, if it is set by then."""
    contexts: list[Context | None] = field(default_factory=list)
    """What layers are called with, per micro-batch; made by the embed stage's forward, dropped after its backward."""
    boundaries: dict[tuple[int, int], tuple[Packed, ...]] = field(default_factory=dict)
    """How the boundary activation behind (stage, micro-batch) lies in its slot."""
    without_gradient: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    """Which of a boundary's tensors got no gradient from the stages above, not even zeros."""
    losses: list[Tensor] = field(default_factory=list)
    """Per micro-batch, 0-d."""
    touched: list[set[str]] = field(default_factory=list)
    """Per stage, the own tensors that have got a gradient."""
    lent: set[str] = field(default_factory=set)
    """Tensors whose loan holds a gradient."""
    square_sums: dict[int, float] = field(default_factory=dict)
    """Per stage, once its gradients are complete."""
    adam_steps: dict[str, int] | None = None
    """All tensors' step counts as of the end of this step, once known."""
    scale: float = 1.0
    """What its gradients are multiplied with, once the norm is known: below 1 when they are clipped."""
    skipped: bool = False
    """Its gradients are not finite: nothing is updated."""
    counted: dict[str, int] = field(default_factory=dict)
    """Adam's step count of the tensors that have a gradient in this step, this step included."""
    updated: set[tuple[int, int]] = field(default_factory=set)
    """Chunks (stage, chunk) with an update to be written."""
    gradient_uses: list[int] = field(default_factory=list)
    """Per stage, pieces whose gradient is still to be used or stashed; then the gradient buffer is free."""
    chunks_left: dict[tuple[int, int], int] = field(default_factory=dict)
    """Pieces of (stage, chunk) that are still to be written."""
    redo_left: dict[tuple[int, int], int] = field(default_factory=dict)
    """The same for updates that are made again."""

    def grad_norm(self) -> float:
        """Global 2-norm of the gradients, before any scaling; the square sums of all stages must be known."""
        return math.sqrt(math.fsum(self.square_sums.values()))

    @property
    def guessed_wrong(self) -> bool:
        """What was updated before the norm was known must be updated again."""
        return self.skipped or self.scale != 1.0
