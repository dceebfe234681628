"""What a trainer tells: of a step, of an evaluation, of commits, and what is where. Numbers alone.

`trainer.py` fills them in; `tools/show.py` shows them and `tools/metrics_file.py` writes them down.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hoist.tiers.commit import CommitStatistics
from hoist.tiers.io.base import IoStatistics
from hoist.tiers.manager import ManagerStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What one step did. One JSON object a step in ``--metrics``."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean over the counted labels of the whole step, before the update."""
    grad_norm: float
    """Global 2-norm of the step's gradients."""
    clip_scale: float
    """What the gradients were multiplied with; 1 where nothing was clipped, 0 where the step was skipped."""
    skipped_steps: int
    """Steps of the whole run that were skipped because their gradients were not finite."""
    lr: float
    """Learning rate of the step's updates."""
    tokens: int
    """Tokens that went through the model."""
    seconds: float
    """Wall time from this step's call to its return."""
    predicted_seconds: float | None = None
    """What was predicted of a step before the first one; None if nothing was."""
    prediction_error: float | None = None
    """``predicted_seconds`` over ``seconds``, less 1: above 0 where the step was faster. None likewise."""
    nvme_read_bytes: int
    """Bytes read from the store's drive since the previous step returned."""
    nvme_written_bytes: int
    """Bytes written to it since then."""
    nvme_read_saved_bytes: int
    """Bytes not read from it since then, as what they hold was kept in memory from the step before."""
    nvme_written_saved_bytes: int
    """Bytes not written to it since then for that reason; what a commit then wrote of them is taken off."""
    busy_seconds: dict[str, float]
    """Per lane: time at work."""
    stall_seconds: dict[str, float]
    """Per lane: time idle while it still had work to do in this step."""
    host_peak_bytes: int
    """Most anonymous and shared memory beyond the baseline, so far in the run."""
    device_peak_bytes: int
    """Most memory on an accelerator; 0 on a CPU-only machine."""

    def to_json(self) -> dict[str, Any]:
        """The metrics as a JSON object; what is infinite or no number is null, which JSON has no word for."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics:
    """What one evaluation found, and what it took."""

    loss: float
    """Mean over the counted labels of all its micro-batches."""
    counted: int
    """Labels that counted."""
    tokens: int
    """Tokens that went through the model."""
    seconds: float
    """Wall time, finishing the updates of the step before included."""
    nvme_read_bytes: int
    """Bytes read from the store's drive meanwhile, those of the step's updates apart."""
    nvme_written_bytes: int
    """Bytes written to it: activations that did not fit."""


@dataclass(kw_only=True, slots=True)
class CommitTotals:
    """What commits took, all together. They run beside computation; writes to freed slots wait for them."""

    num_commits: int = 0
    """Commits made."""
    flush_seconds: float = 0.0
    """Until what had been written was on the drive."""
    seconds: float = 0.0
    """From the beginning of each to its end."""

    def add(self, commit: CommitStatistics) -> None:
        """One more commit."""
        self.join(CommitTotals(num_commits=1, flush_seconds=commit.flush_seconds, seconds=commit.seconds))

    def join(self, other: CommitTotals) -> None:
        """Those of another trainer too."""
        self.num_commits += other.num_commits
        self.flush_seconds += other.flush_seconds
        self.seconds += other.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerStatistics:
    """What is where, and what has moved since the trainer was made."""

    step: int
    """Steps done, those of earlier runs included."""
    residency: ManagerStatistics
    """Bytes per tier; per kind of item: fills, writes (spills), hits, misses and evictions."""
    nvme: IoStatistics
    """The I/O engine's counters, since the engine was made."""
    commits: CommitTotals
    """Commits since the trainer was made."""
    host_peak_bytes: int
    """Most anonymous and shared memory beyond the baseline, so far in the run."""
