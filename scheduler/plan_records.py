"""What plans are made from and made of: what they need to know of stages, the buffers they may use, a step's ops.

Data alone. `plan.py` makes plans, `memory.py` chooses the buffers from a budget, `ops.py` has the words of ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hoist.scheduler.ops import Op


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """What a plan needs to know of a stage."""

    chunks: tuple[int, ...]
    """Chunk of each of its pieces."""
    has_frozen: bool = False
    """There are frozen tensors or buffers to read, own or borrowed."""
    widens: bool = False
    """Some of these are not computed with as they are stored."""
    borrowed: tuple[tuple[int, int], ...] = ()
    """(owner stage, owner's piece) of every piece that holds a part of a borrowed tensor."""

    @property
    def num_pieces(self) -> int:
        """Pieces of the stage's trainable tensors."""
        return len(self.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """How many buffers of each kind a plan may use, and which stage uses which."""

    weights: tuple[int, ...]
    """Weight buffer of each stage. Neighbours must differ. Buffers 0 and 1 begin at the two ends of one region, which
    has room for any two neighbours, but not for any two stages; others lie apart."""
    gradients: tuple[int, ...]
    """Gradient buffer of each stage; what it says of one without trainable tensors does not matter."""
    stages_ahead: int = 1
    """Stages whose weights are loaded while one computes, as far as they have buffers of their own until then."""
    delayed_from: tuple[int, ...] = ()
    """Per stage, the first piece whose update is delayed into the next step's forward; the first of a chunk, or the
    number of pieces for none. Empty: nothing is delayed."""
    speculative: bool = False
    """The other updates are made before it is known whether the gradients must be scaled, and made again if so."""
    rereads_weights: bool = False
    """Every update reads its weights from NVMe, also where a weight buffer still holds them: for `read_check.py`, which
    checks what is read for updates, and where the buffer has half of each weight alone."""
    straight_weights: bool = False
    """What is computed with is ``weight_hi`` as it is stored: it is read from NVMe straight into the weight buffer.
    Then ``rereads_weights`` must be set."""
    separate: bool = False
    """Weights, gradients and activations lie in a device's own memory: gradients are brought to host memory before they
    are used, and new weights of updates brought to the device after."""
    updates_on_device: bool = False
    """If ``separate``: AdamW runs on the device. States, and gradients for them, are in host memory all the same."""
    host_gradients: tuple[int, ...] = ()
    """If ``separate``: the gradient buffer in host memory of each stage; ``gradients`` then are the device's."""
    kept_weights: tuple[frozenset[int], ...] = ()
    """Per stage, the chunks whose weights (both halves) stay in host memory from step to step. Empty: none."""
    kept_moments: tuple[frozenset[int], ...] = ()
    """Per stage, those of them whose moments stay there too."""
    kept_frozen: frozenset[int] = frozenset()
    """Stages whose frozen tensors stay in host memory."""
    num_staging: int
    """Staging slots; at least 1, unless weights are read straight."""
    num_states: int
    """Optimizer state slots; at least 1."""
    num_activations: int
    """Activation slots; at least ``MIN_ACTIVATION_SLOTS``, or as many as there are boundary activations."""
    num_host_activations: int = 0
    """If ``separate``: slots in host memory for activations that find no room among those, which the device has. What
    finds none there either goes to scratch."""

    @property
    def waiting_gradients(self) -> tuple[int, ...]:
        """Per stage, the buffer in host memory where its gradients wait for updates."""
        return self.host_gradients if self.separate else self.gradients

    @property
    def updates_in_buffers(self) -> bool:
        """A weight buffer has all that an update needs of the weights before: float32, in host memory."""
        return not (self.rereads_weights or self.straight_weights or self.separate)

    def __post_init__(self) -> None:
        if any(left == right for left, right in zip(self.weights, self.weights[1:], strict=False)):
            raise ValueError("neighbouring stages must have different weight buffers")
        if (self.num_staging < 1 and not self.straight_weights) or self.num_states < 1:
            raise ValueError("at least one staging and one state slot are needed")
        if self.num_host_activations and not self.separate:
            raise ValueError("without a separate device all activation slots are in host memory")
        if self.straight_weights and not self.rereads_weights:
            raise ValueError("weights that are read straight into their buffers must be read again for updates")
        if self.updates_on_device and not self.separate:
            raise ValueError("updates on the device need one with memory of its own")
        for stage, chunks in enumerate(self.kept_moments):
            if not chunks <= self.kept_weights[stage]:
                raise ValueError(f"stage {stage}: moments are kept only of chunks whose weights are kept")


#: Stands for a stage's frozen tensors among its pieces.
FROZEN_PIECE = -1


def first_trained(stages: Sequence[StageShape]) -> int:
    """The first stage with trainable tensors: the backward ends there. Raises ValueError if nothing is trained."""
    for index, stage in enumerate(stages):
        if stage.num_pieces:
            return index
    raise ValueError("stages: none has anything to train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A step's ops in order. Any topological order of their dependencies gives the same bits."""

    name: str
    ops: tuple[Op, ...]
    num_micro_batches: int
    """Micro-batches that pass through the stages; 0 for a flush."""
    cold: bool
    """True: weight buffers hold nothing at the start. False: they hold what the same plan leaves there at its end."""
    pending: bool
    """True: the delayed updates of the step before are still to be done."""
    scratch_activations: tuple[tuple[int, int], ...]
    """Boundary activations (stage, micro-batch) that are spilled at some time."""
    scratch_gradients: tuple[int, ...]
    """Stages whose gradients are spilled at some time."""
    stashed_gradients: tuple[tuple[int, int], ...]
    """Pieces (stage, piece) whose gradients wait in scratch for their delayed updates."""
