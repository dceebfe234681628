"""What a training run is told: one frozen record, checked as a whole, with no dictionary behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hoist.optim.adamw import AdamWHyperparameters
from hoist.optim.schedules import Schedule
from hoist.scheduler.errors import ConfigError

#: How the micro-batches of a step pass through the stages.
Order = Literal["vertical", "horizontal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """Everything that `Trainer` needs besides a model and a store."""

    host_memory_bytes: int
    """The promise: memory beyond the baseline of a warmed-up process, arena and autograd's share together."""
    micro_batch_size: int
    """Most rows of a micro-batch."""
    seq_len: int
    """Most tokens of a row."""
    num_micro_batches: int
    """Most micro-batches of a step."""
    optimizer: AdamWHyperparameters
    """Betas, eps and weight decay. The learning rate is the schedule's."""
    schedule: Schedule
    """Learning rate of every step."""
    no_decay_norms: bool = False
    """True: biases and norms are not decayed. False, as in torch: all parameters are."""
    clip_norm: float = 0.0
    """Largest global norm of a step's gradients; larger ones are scaled down to it. 0: no clipping. Clipping delays
    every update into the next step, as the norm is known only when all gradients are."""
    max_skipped_steps: int = 5
    """With clipping, a step whose gradients are not finite is skipped; so many in a row end the run."""
    delay: float = 0.0
    """Share of each stage's chunks (0 to 1) that is updated in the next step's forward, just before it is needed."""
    plan: Order = "vertical"
    """``horizontal`` gives the same results with the traffic of a micro-batch-major engine; for comparisons."""
    seed: int = 0
    """Seeds dropout masks, which depend on (seed, step, stage, micro-batch) alone."""
    commit_every: int = 10
    """Steps between commits."""
    max_piece_elements: int = 2**20
    """Largest unit of I/O and update (elements, a multiple of 4096); made smaller where the budget is short."""
    resident_weights: bool = True
    """Use host memory that is left over to keep the weights of the last stages from step to step."""
    verify_reads: bool = False
    """Check what is read for updates, and frozen tensors, against the committed checksums: damage that comes during a
    run is found before anything made of it is committed. Costs a checksum of what is read."""
    validate: bool = False
    """Re-check residency after every op; for tests."""

    @property
    def delay_in_force(self) -> float:
        """The delay that is used: all of it where gradients are clipped."""
        return 1.0 if self.clip_norm else self.delay

    def __post_init__(self) -> None:
        for name in ("host_memory_bytes", "micro_batch_size", "num_micro_batches", "commit_every"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: {value} is not positive")
        if not 0.0 <= self.delay <= 1.0:
            raise ConfigError(f"delay: {self.delay} is not a share from 0 to 1")
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0.0):
            raise ConfigError(f"clip_norm: {self.clip_norm} is not a finite number of at least 0 (0: no clipping)")
        if self.max_skipped_steps < 1:
            raise ConfigError(f"max_skipped_steps: {self.max_skipped_steps} is not positive")
        if self.seq_len < 2:
            raise ConfigError(f"seq_len: {self.seq_len} is too short; a label needs a token before it, so at least 2")
        if self.plan not in ("vertical", "horizontal"):
            raise ConfigError(f"plan: {self.plan!r} is not one of vertical, horizontal")
        if self.max_piece_elements < 4096 or self.max_piece_elements % 4096:
            raise ConfigError(f"max_piece_elements: {self.max_piece_elements} is not a positive multiple of 4096")
