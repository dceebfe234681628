"""The words that plans are written in: ops, the lanes that execute them, the resources that order them.

No torch, no files, no threads. `plan.py` writes steps with them, `link.py` finds dependencies, `executor.py` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


class Lane(Enum):
    """What executes an op."""

    IO = "io"
    """The I/O engine; any number at once, limited by the buffers they need."""
    COPY = "copy"
    """One thread that moves bytes between buffers."""
    COMPUTE = "compute"
    """The caller's thread, strictly in plan order."""
    OPTIM = "optim"
    """One thread; updates strictly in plan order (checksums are extended piece after piece), norms before them."""
    COMMIT = "commit"
    """One thread that makes commits, and writes what is kept in memory between them."""
    NONE = "none"
    """Nothing but bookkeeping: the op joins dependencies."""


class Kind(Enum):
    """What an op does. ``stage``, ``micro_batch``, ``piece`` and ``slot`` of the op say to what."""

    ACQUIRE = auto()
    """The weight buffer of ``stage`` changes hands: whoever used it before has let go."""
    READ_WEIGHTS = auto()
    """NVMe -> staging slot: both halves of the weights of one piece of ``owner``; or without a slot (-1), where weights
    are computed with in bfloat16, NVMe -> weight buffer of ``stage``: the first half, which is all that it takes."""
    MERGE = auto()
    """Staging slot, or where the weights are kept (``slot`` -1) -> weight buffer of ``stage``."""
    READ_FROZEN = auto()
    """NVMe -> weight buffer: the frozen tensors and buffers of ``stage``, own and borrowed, in their own dtypes."""
    WIDEN = auto()
    """Within the weight buffer of ``stage``, or from where they are kept: frozen weights that are stored in another
    dtype than they are computed with become such."""
    READ_KEPT = auto()
    """NVMe -> host memory: the arrays of one piece of ``stage`` that stay there from step to step; once a run."""
    BIND = auto()
    """The weights of ``stage`` are all there: its modules get them."""
    FORWARD = auto()
    """One micro-batch through one stage without autograd; keeps the boundary activation."""
    LOSS = auto()
    """The last stage's forward and backward on one micro-batch."""
    EVALUATE = auto()
    """The last stage's forward on one micro-batch without autograd: its loss alone. Its input is then dropped."""
    BACKWARD = auto()
    """Recompute one stage on one micro-batch and run its backward; gradients accumulate in the stage's buffer."""
    UNBIND = auto()
    """The modules of ``stage`` lose their weights; the buffer may be taken."""
    NORM = auto()
    """The gradients of ``stage`` are complete: add what borrowers of its tensors left, and take the sum of squares."""
    OPEN_CHUNK = auto()
    """Every piece of a chunk (``piece``: its last) has been written: the chunk may be read from its newest slot."""
    READ_STATES = auto()
    """NVMe -> state slot: weights (unless ``loaded``) and moments of one piece, unless they are kept; the stashed
    gradient too."""
    DOWNLOAD = auto()
    """Gradient buffer of ``stage`` -> its gradient buffer in host memory, what borrowers of its tensors left added
    first. Only with a separate device; the gradients are complete."""
    DEVICE_UPDATE = auto()
    """AdamW on one piece on a separate device: it goes up from its state slot, or where it is kept (``slot`` -1 if all
    of it is), with its gradient, and back to the same place. The UPDATE that follows then keeps the books alone."""
    UPDATE = auto()
    """AdamW on one piece in its state slot, or where it is kept (``slot`` -1 if all of it is); the new weights also go
    to the buffers of the stages in ``refresh``. If ``loaded``, the weights before are those in the weight buffer."""
    REFRESH = auto()
    """State slot, or where it is kept (``slot`` -1) -> weight buffer of ``stage``: the new weights of a piece of
    ``owner``, after their update. Only with a separate device; else the update does this itself."""
    WRITE_STATES = auto()
    """State slot -> NVMe (a slot that the last commit does not name): what is not kept."""
    WRITE_KEPT = auto()
    """Host memory -> NVMe: what is kept of a chunk (``piece``: its last), if the step is to be committed and the chunk
    has changed since it was last written."""
    SPILL_ACTIVATION = auto()
    """Activation slot -> NVMe scratch: boundary (``stage``, ``micro_batch``)."""
    FETCH_ACTIVATION = auto()
    """NVMe scratch -> activation slot."""
    LOWER_ACTIVATION = auto()
    """Activation slot -> activation slot in host memory. Only with a separate device."""
    RAISE_ACTIVATION = auto()
    """Activation slot in host memory -> activation slot. Only with a separate device."""
    STASH_GRADIENT = auto()
    """Gradient buffer of ``stage`` -> NVMe scratch: one piece whose update is delayed into the next step."""
    SPILL_GRADIENT = auto()
    """Gradient buffer of ``stage`` -> NVMe scratch."""
    FETCH_GRADIENT = auto()
    """NVMe scratch -> gradient buffer of ``stage``."""
    COMMIT = auto()
    """Every chunk carries the previous step and none of this one: it may be committed."""


LANES: dict[Kind, Lane] = {
    Kind.ACQUIRE: Lane.NONE,
    Kind.READ_WEIGHTS: Lane.IO,
    Kind.MERGE: Lane.COPY,
    Kind.READ_FROZEN: Lane.IO,
    Kind.WIDEN: Lane.COPY,
    Kind.READ_KEPT: Lane.IO,
    Kind.BIND: Lane.COMPUTE,
    Kind.FORWARD: Lane.COMPUTE,
    Kind.LOSS: Lane.COMPUTE,
    Kind.EVALUATE: Lane.COMPUTE,
    Kind.BACKWARD: Lane.COMPUTE,
    Kind.UNBIND: Lane.COMPUTE,
    Kind.NORM: Lane.OPTIM,
    Kind.OPEN_CHUNK: Lane.NONE,
    Kind.READ_STATES: Lane.IO,
    Kind.DOWNLOAD: Lane.COPY,
    Kind.DEVICE_UPDATE: Lane.COPY,
    Kind.UPDATE: Lane.OPTIM,
    Kind.REFRESH: Lane.COPY,
    Kind.WRITE_STATES: Lane.IO,
    # Not the io lane: one chunk after another, so that the drive is left to what computation waits for.
    Kind.WRITE_KEPT: Lane.COMMIT,
    Kind.SPILL_ACTIVATION: Lane.IO,
    Kind.FETCH_ACTIVATION: Lane.IO,
    Kind.LOWER_ACTIVATION: Lane.COPY,
    Kind.RAISE_ACTIVATION: Lane.COPY,
    Kind.STASH_GRADIENT: Lane.IO,
    Kind.SPILL_GRADIENT: Lane.IO,
    Kind.FETCH_GRADIENT: Lane.IO,
    Kind.COMMIT: Lane.COMMIT,
}


#: What a separate device does: these ops are put into its streams, and end when it has done them.
DEVICE_KINDS = frozenset(
    {
        Kind.MERGE, Kind.WIDEN, Kind.BIND, Kind.FORWARD, Kind.LOSS, Kind.EVALUATE, Kind.BACKWARD, Kind.UNBIND,
        Kind.DOWNLOAD, Kind.DEVICE_UPDATE, Kind.REFRESH, Kind.LOWER_ACTIVATION, Kind.RAISE_ACTIVATION,
    }
)  # fmt: skip


class Part(Enum):
    """A kind of thing that ops read and write; with two numbers it names one :class:`Resource`."""

    WEIGHTS = auto()
    """A weight buffer (number)."""
    ROOM = auto()
    """Where a weight buffer (number) lies in the region that two share. What uses the weights has no part in it, so
    that who takes one buffer neither waits for the other's users nor makes them wait."""
    FROZEN = auto()
    """The frozen tensors of a stage as they are stored, where they are not computed with so (stage)."""
    STAGING = auto()
    """A staging slot (number)."""
    GRADIENT = auto()
    """A gradient buffer (number)."""
    HOST_GRADIENT = auto()
    """A gradient buffer in host memory, beside a device's (number)."""
    LOAN = auto()
    """The gradients that borrowers of a stage's tensors (owner stage) have left for it."""
    STATE_SLOT = auto()
    """An optimizer state slot (number)."""
    STATE = auto()
    """The stored states of one piece (stage, piece)."""
    KEPT = auto()
    """What is kept of one piece in host memory from step to step (stage, piece)."""
    CHUNK = auto()
    """The place that a chunk (stage, chunk) is read from: it turns as a whole, when its last piece has been written."""
    KEPT_COPY = auto()
    """The copy on NVMe of what is kept of one chunk (stage, chunk)."""
    ACTIVATION = auto()
    """An activation slot (number)."""
    HOST_ACTIVATION = auto()
    """An activation slot in host memory, beside a device's (number)."""
    SCRATCH_ACTIVATION = auto()
    """A spilled boundary activation (stage, micro-batch)."""
    SCRATCH_GRADIENT = auto()
    """A spilled gradient (stage)."""
    STASHED_GRADIENT = auto()
    """The gradient of one piece that waits in scratch for its delayed update (stage, piece)."""
    NORM = auto()
    """The global gradient norm, which delayed updates may need."""
    COMMIT = auto()
    """The commit record: writers of states must not overtake it."""


class Resource(NamedTuple):
    """One thing that ops can conflict over."""

    part: Part
    first: int
    second: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One small piece of work. ``reads`` and ``writes`` are all that orders it against other ops."""

    kind: Kind
    reads: tuple[Resource, ...]
    writes: tuple[Resource, ...]
    stage: int = -1
    micro_batch: int = -1
    piece: int = -1
    slot: int = -1
    """Staging, state or activation slot (-1: none); for ops that compute the slot of the stage's input (-1: none)."""
    output_slot: int = -1
    """FORWARD and BACKWARD: activation slot of the stage's output."""
    host_slot: int = -1
    """LOWER_ACTIVATION, RAISE_ACTIVATION: activation slot in host memory."""
    owner: int = -1
    """READ_WEIGHTS, MERGE, REFRESH: stage whose tensors these are; differs from ``stage`` for borrowed ones."""
    refresh: tuple[int, ...] = ()
    """UPDATE: stages whose weight buffers still hold (part of) these weights and must get the new ones, here or by the
    REFRESH that follows."""

    ends_input: bool = False
    """FORWARD, LOSS, BACKWARD: nobody needs the stage's input after this, nor a gradient of it: nothing below is
    trained."""
    delayed: bool = False
    """They belong to the step before, and run just before the stage is needed (states, updates, what is kept)."""
    fill: bool = False
    """UPDATE, REFRESH: the weights of ``stage`` are being loaded; this piece of them comes from here, not from NVMe."""
    loaded: bool = False
    """READ_STATES, UPDATE: the weights before are still in the stage's weight buffer; they are not read, but updated
    there and split into the state slot, or to where they are kept."""
    stashed: bool = False
    """READ_STATES, DEVICE_UPDATE, UPDATE: the gradient waits in scratch, not in its buffer."""
    redo: bool = False
    """READ_STATES, DEVICE_UPDATE, UPDATE, REFRESH, WRITE_STATES: the update of the step before once more, from the
    version before it, if the gradients turned out to need scaling."""

    @property
    def lane(self) -> Lane:
        """The lane that executes this kind of op."""
        return LANES[self.kind]

    def __str__(self) -> str:
        where = [f"stage {self.stage}"] if self.stage >= 0 else []
        where += [f"micro-batch {self.micro_batch}"] if self.micro_batch >= 0 else []
        where += [f"piece {self.piece}"] if self.piece >= 0 else []
        return f"{self.kind.name.lower()}({', '.join(where)})"
