"""What a training run is told: one frozen record, checked as a whole, with no dictionary behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from hoist.optim.adamw import AdamWHyperparameters
from hoist.optim.schedules import Schedule
from hoist.scheduler.errors import ConfigError

#: How the micro-batches of a step pass through the stages.
Order = Literal["vertical", "horizontal"]
#: What layers compute with.
Dtype = Literal["float32", "bfloat16"]
#: What AdamW runs on: the CPU, or a device with memory of its own.
OptimDevice = Literal["cpu", "device"]
#: When updates of a clipped step are made.
ClipMode = Literal["exact", "speculative"]
#: Without a word on commits: so many steps between them, or so many minutes where they write what is kept in memory.
DEFAULT_COMMIT_STEPS = 10
DEFAULT_COMMIT_MINUTES = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """Everything that `Trainer` needs besides a model and a store."""

    host_memory_bytes: int
    """The promise: memory beyond the baseline of a warmed-up process, arena and autograd's share together."""
    device_memory_bytes: int | None = None
    """The same promise for a device with memory of its own: the most that torch has allocated there. None: there is no
    such device, and ``host_memory_bytes`` bounds both tiers together."""
    optim_device: OptimDevice = "cpu"
    """What AdamW runs on. ``device``: on the one that computes, which must have memory of its own. States stay in host
    memory and on NVMe; for its update each piece is copied there, 16 bytes a parameter, and back, 12. Results differ
    from the CPU's in rounding."""
    dtype: Dtype = "float32"
    """What layers compute with. Weights, moments and sums of gradients are float32 in any case."""
    compile: bool = False
    """Compile decoder layers with torch.compile: one graph for all equal ones. Results differ from those of layers that
    are not compiled in rounding, and the budget then has room for all gradients of a layer's weights at once."""
    compile_backend: str = "inductor"
    """What compiles them: one of torch's backends. ``aot_eager`` needs no compiler and gives the bits of layers that
    are not compiled."""
    micro_batch_size: int
    """Most rows of a micro-batch."""
    seq_len: int = 1024
    """Most tokens of a row. Modules' micro-batches are sized by their example instead."""
    num_micro_batches: int
    """Most micro-batches of a step."""
    extra_inputs: tuple[str, ...] = ()
    """What micro-batches may have besides ids and labels: ``attention_mask`` or ``position_ids``. The budget then has
    room for the masks that a model makes of them: each micro-batch has its own."""
    optimizer: AdamWHyperparameters = field(default_factory=lambda: AdamWHyperparameters(lr=1e-4))
    """Betas, eps and weight decay. The learning rate is the schedule's."""
    schedule: Schedule
    """Learning rate of every step."""
    no_decay_norms: bool = False
    """True: biases and norms are not decayed. False, as in torch: all parameters are."""
    clip_norm: float = 0.0
    """Largest global norm of a step's gradients; larger ones are scaled down to it. 0: no clipping. Clipping delays
    updates into the next step, as the norm is known only when all gradients are; see ``clip_mode``."""
    clip_mode: ClipMode = "exact"
    """``exact``: every update waits for the norm. ``speculative``: those that ``delay`` leaves to the backward are made
    at once, unscaled, and made again from the version before if the norm turns out too large: the same results. Needs
    a store of three slots, or a commit at every step."""
    max_skipped_steps: int = 5
    """With clipping, a step whose gradients are not finite is skipped; so many in a row end the run."""
    delay: float = 0.0
    """Share of each stage's chunks (0 to 1) that is updated in the next step's forward, just before it is needed."""
    plan: Order = "vertical"
    """``horizontal`` gives the same results with the traffic of a micro-batch-major engine; for comparisons."""
    seed: int = 0
    """Seeds dropout masks, which depend on (seed, step, stage, micro-batch) alone."""
    commit_every: int | None = None
    """Steps between commits; None: see ``commit_minutes``."""
    commit_minutes: float | None = None
    """Minutes after which a commit is due at the latest. If this and ``commit_every`` are None: 10 minutes where states
    are kept in memory, which a commit must write, else 10 steps."""
    loss_slice_tokens: int = 0
    """Most tokens whose logits exist at once, where the model's head allows it. 0: as many as have 32 MiB of float32
    logits, or a quarter of the hidden width if that is more. A micro-batch that fits one slice gives the bits of a loss
    over all its logits; more slices differ from that in rounding, whatever the budget."""
    max_piece_elements: int = 2**20
    """Largest unit of I/O and update (elements, a multiple of 4096); made smaller where the budget is short."""
    weight_buffers: int = 2
    """Weight buffers that stages whose weights do not stay take in turn, each for a whole stage; at least 2. With more,
    so many more stages ahead are read: of use where the time of stages, or the drive's, is uneven."""
    resident_weights: bool = True
    """Use host memory that is left over at last to keep the compute weights of the last stages."""
    residency: float = 1.0
    """Largest share (0 to 1) of the states that host memory that is left over keeps from step to step."""
    pin_trained: bool = False
    """All states of what is trained stay in host memory whatever the budget and ``residency``: for adapters, which are
    small beside a frozen base. A budget that has no room for them is too small."""
    verify_reads: bool = False
    """Check what is read for updates, and frozen tensors, against the stored checksums: damage that comes during a run
    is found before anything made of it is committed. Costs a checksum of what is read, and for each update its weights
    are read once more, 4 bytes a parameter, also where they are in memory for computation."""
    status_seconds: float = 1.0
    """Seconds between two writings of STORE/status.json, what other processes are told of the run; 0: never."""
    validate: bool = False
    """Re-check residency after every op; for tests."""

    @property
    def backend_in_force(self) -> str | None:
        """What compiles layers; None: nothing does."""
        return self.compile_backend if self.compile else None

    @property
    def delay_in_force(self) -> float:
        """The delay that is used: all of it where every update waits for the norm."""
        return 1.0 if self.clip_norm and self.clip_mode == "exact" else self.delay

    @property
    def speculates(self) -> bool:
        """Updates are made before the norm is known."""
        return bool(self.clip_norm) and self.clip_mode == "speculative"

    @property
    def num_slots(self) -> int:
        """Slots that each chunk of a new store gets."""
        return 3 if self.clip_mode == "speculative" and self.commit_every != 1 else 2

    def commit_rule(self, *, keeps_states: bool) -> tuple[int | None, float | None]:
        """Steps and minutes after which a commit is due, whichever is first; None: these do not count.

        ``keeps_states``: states are kept in memory, which a commit must write.
        """
        if self.commit_every is None and self.commit_minutes is None:
            return (None, DEFAULT_COMMIT_MINUTES) if keeps_states else (DEFAULT_COMMIT_STEPS, None)
        return self.commit_every, self.commit_minutes

    def __post_init__(self) -> None:
        whole = ("host_memory_bytes", "micro_batch_size", "num_micro_batches", "commit_every", "seq_len")
        for name in (*whole, "loss_slice_tokens", "weight_buffers"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name == "commit_every" and value is None):
                raise ConfigError(f"{name}: {value!r} is not a whole number")
        for name in ("clip_norm", "delay", "residency", "commit_minutes", "status_seconds"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) and not (name == "commit_minutes" and value is None):
                raise ConfigError(f"{name}: {value!r} is not a number")
        for name in ("host_memory_bytes", "micro_batch_size", "num_micro_batches", "commit_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is not positive")
        if self.commit_minutes is not None and not 0.0 < self.commit_minutes < math.inf:
            raise ConfigError(f"commit_minutes: {self.commit_minutes} is not a positive number")
        if not 0.0 <= self.status_seconds < math.inf:
            raise ConfigError(f"status_seconds: {self.status_seconds} is not a number of at least 0 (0: never)")
        if not 0.0 <= self.residency <= 1.0:
            raise ConfigError(f"residency: {self.residency} is not a share from 0 to 1")
        if self.optim_device not in get_args(OptimDevice):
            raise ConfigError(f"optim_device: {self.optim_device!r} is not one of {', '.join(get_args(OptimDevice))}")
        if self.clip_mode not in get_args(ClipMode):
            raise ConfigError(f"clip_mode: {self.clip_mode!r} is not one of {', '.join(get_args(ClipMode))}")
        if not 0.0 <= self.delay <= 1.0:
            raise ConfigError(f"delay: {self.delay} is not a share from 0 to 1")
        if not isinstance(self.compile, bool):
            raise ConfigError(f"compile: {self.compile!r} is neither true nor false")
        if not self.compile_backend:
            raise ConfigError(f"compile_backend: {self.compile_backend!r} is no backend's name, like 'inductor'")
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0.0):
            raise ConfigError(f"clip_norm: {self.clip_norm} is not a finite number of at least 0 (0: no clipping)")
        if self.weight_buffers < 2:
            raise ConfigError(f"weight_buffers: {self.weight_buffers} is too few; one is computed with, one is read: 2")
        if self.max_skipped_steps < 1:
            raise ConfigError(f"max_skipped_steps: {self.max_skipped_steps} is not positive")
        if self.loss_slice_tokens < 0:
            raise ConfigError(f"loss_slice_tokens: {self.loss_slice_tokens} is negative; 0 lets the model decide")
        if self.seq_len < 2:
            raise ConfigError(f"seq_len: {self.seq_len} is too short; a label needs a token before it, so at least 2")
        if self.plan not in ("vertical", "horizontal"):
            raise ConfigError(f"plan: {self.plan!r} is not one of vertical, horizontal")
        if self.max_piece_elements < 4096 or self.max_piece_elements % 4096:
            raise ConfigError(f"max_piece_elements: {self.max_piece_elements} is not a positive multiple of 4096")
