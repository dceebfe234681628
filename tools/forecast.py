"""What a run of `hoist train` is expected to take, as one record: the scheduler's prediction, tiers and drives.

`forecasting.py` makes it, before anything is created; `preflight_view.py` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.preflight import Measured, Prediction, priced
from hoist.scheduler.setup import Setup

#: Bytes that a step reads and writes for each trained parameter if nothing stays in memory: weights for the forward,
#: for the backward, whose update takes them too, and moments; then all of these are written.
TEXTBOOK = (4 + 4 + 8, 12)
#: Kinds of bytes in a tier, in the order that they are shown in.
KINDS = ("weights", "moments", "gradients", "activations", "scratch")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveNeed:
    """One of the store's drives."""

    directory: str
    need_bytes: int
    """What the run will take of it, beyond what the store has there."""
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a run is expected to take."""

    prediction: Prediction | None
    """None where the machine could not be measured: see ``why_not``."""
    why_not: str | None
    measured: Measured | None
    host: Mapping[str, int]
    """Bytes of host memory by kind, see :data:`KINDS`; the scratch also has what moves through."""
    host_budget_bytes: int
    device: Mapping[str, int]
    """Bytes of an accelerator's memory; none where the CPU computes, out of ``host``."""
    device_name: str = "cpu"
    """As torch names it."""
    device_budget_bytes: int | None = None
    """For its memory; None where that is the host's."""
    step_bytes: tuple[int, int] | None = None
    """What a step reads from the drives and writes to them, where no more than that is predicted."""
    nvme: Mapping[str, int]
    """Bytes of the store by kind, all slots of a chunk counted."""
    drives: tuple[DriveNeed, ...]
    num_parameters: int
    """Those that are trained."""
    steps_left: int
    tokens_of_micro_batch: int
    measuring_read_bytes: int = 0
    """What measuring the drives moved."""
    measuring_written_bytes: int = 0
    wear: tuple[str, ...] = ()
    """What the run will do to the drives, and what would lower it: a line each."""

    @property
    def run_seconds(self) -> float | None:
        """Of all steps that are left; commits, evaluations and making the store come on top."""
        return None if self.prediction is None else self.steps_left * self.prediction.seconds

    def of(self, setup: Setup, config: TrainerConfig) -> Self:
        """The same measurements' prediction for other buffers, as another delay needs them."""
        if self.measured is None:
            return self
        return replace(
            self, prediction=priced(setup, config, self.measured, tokens=self.tokens_of_micro_batch, advise=False)
        )

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON."""
        prediction = None if self.prediction is None else self.prediction.to_json()
        return {
            **{name: getattr(self, name) for name in ("why_not", "host_budget_bytes", "num_parameters", "steps_left")},
            "prediction": prediction,
            "run_seconds": self.run_seconds,
            "device_name": self.device_name,
            "device_budget_bytes": self.device_budget_bytes,
            "step_bytes": None if self.step_bytes is None else list(self.step_bytes),
            "host": dict(self.host),
            "device": dict(self.device),
            "nvme": dict(self.nvme),
            "drives": [asdict(drive) for drive in self.drives],
            "textbook_read_bytes": TEXTBOOK[0] * self.num_parameters,
            "textbook_written_bytes": TEXTBOOK[1] * self.num_parameters,
            "measured": None if self.measured is None else asdict(self.measured),
            "wear": list(self.wear),
        }
