"""What a run of `hoist train` tells while it goes on, as data; `show.py` puts it on a terminal or into a log.

`train.py` fills these records in. Metrics of one step are `hoist.scheduler.metrics`'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, Self

from hoist.scheduler.metrics import CommitTotals, StepMetrics
from hoist.scheduler.setup import Setup
from hoist.tiers.io.base import IoStatistics
from hoist.tools.evaluation import EvalRecord
from hoist.tools.forecast import Forecast
from hoist.tools.wear import BudgetEnd


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What a store's run has done in all its calls; every commit keeps it."""

    first_loss: float | None = None
    """Loss of step 1, or of the first that had a finite one; None before it."""
    tokens: int = 0
    """Tokens that went through the model."""
    seconds: float = 0.0
    """Time spent in steps."""
    nvme_read_bytes: int = 0
    """Bytes read from the drive, those of making the store included."""
    nvme_written_bytes: int = 0
    """Bytes written to it."""
    nvme_read_saved_bytes: int = 0
    """Bytes that steps did not have to read, as states stayed in memory."""
    nvme_written_saved_bytes: int = 0
    """Bytes that they did not have to write."""
    since_step: int = 0
    """Step after which they count; not 0 where steps before it were not made by `hoist train`."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """What :meth:`to_json` gave; what is missing is as at the start."""
        return cls(**{spec.name: document[spec.name] for spec in fields(cls) if spec.name in document})

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return asdict(self)

    def with_io(self, moved: IoStatistics) -> Self:
        """These totals, and what an engine has moved since it was made."""
        return replace(
            self,
            nvme_read_bytes=self.nvme_read_bytes + moved.read_bytes,
            nvme_written_bytes=self.nvme_written_bytes + moved.written_bytes,
        )

    def with_step(self, metrics: StepMetrics) -> Self:
        """These totals and a step's, its I/O apart."""
        return replace(
            self,
            first_loss=metrics.loss if self.first_loss is None and math.isfinite(metrics.loss) else self.first_loss,
            tokens=self.tokens + metrics.tokens,
            seconds=self.seconds + metrics.seconds,
            nvme_read_saved_bytes=self.nvme_read_saved_bytes + metrics.nvme_read_saved_bytes,
            nvme_written_saved_bytes=self.nvme_written_saved_bytes + metrics.nvme_written_saved_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """What is known before the first step."""

    model: str
    """What the model was named."""
    store: str
    """The store as the user named it."""
    resumed: bool
    """The store was there; if not, it has just been made."""
    step: int
    """Steps that the store already carries."""
    steps: int
    """Steps of the whole run."""
    setup: Setup
    num_parameters: int
    """Those that are trained."""
    num_frozen: int
    """Those that are not."""
    num_tokens: int
    """Tokens of the data; 0 if none are needed."""
    text_as: str | None
    """How its text became ids, as "as bytes"; None if it is all token ids."""
    num_windows: int
    """Rows of the data that are trained on."""
    windows_per_step: int
    budget_bytes: int
    baseline_bytes: int
    """Memory of the warmed-up process, which the budget comes on top of."""
    engine: str
    """The I/O engine's description of itself."""
    device: str
    """The device's, likewise."""
    device_budget_bytes: int | None = None
    """For its memory; None where that is the host's."""
    layers_compiled: bool = False
    commits: str
    """When commits are due, for people."""
    drives: tuple[tuple[str, float], ...] = ()
    """Directory and share, from 0 to 1, of each drive that the store spans; empty if it is in one directory."""
    num_validation_rows: int = 0
    """Rows that an evaluation takes."""
    num_validation_rows_there: int = 0
    """Rows that it could take."""
    clips: bool = False
    """Gradients are clipped: steps show their scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended."""

    store: str
    """The store as the user named it."""
    created: bool
    """This call made the store."""
    step: int
    """Steps that the store now carries, committed."""
    steps: int
    """Steps of the whole run."""
    signal: int
    """Signal that ended it early; 0 if none did."""
    seconds: float
    """Wall time of this call's steps, the last commit included."""
    num_steps: int
    """Steps that this call did."""
    last: StepMetrics | None
    """The last of them."""
    totals: Totals
    budget_bytes: int
    device_budget_bytes: int | None = None
    """For a device with memory of its own."""
    commits: CommitTotals
    """This call's."""
    wear: str = ""
    """What was written to the drive, and what that means for its life: one line; empty if there is nothing to say."""
    budget_end: BudgetEnd | None = None
    """Why the run stopped early, if --write-budget was the reason."""
    predicted_seconds: float | None = None
    """What was predicted of a step; None if nothing was."""
    measured_seconds: float | None = None
    """Median of this call's steps, of which the first ones are left out; None if there were no others."""


class Reporter(Protocol):
    """What a run tells; `show.py` has the one for people."""

    def notice(self, text: str) -> None:
        """One line that the user should see."""

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        """How far long work is: bytes, or as many ``unit``; without a total (0) that is not known. Something else that
        is told ends it.
        """

    def plan(self, start: RunStart) -> None:
        """What is about to run."""

    def forecast(self, forecast: Forecast) -> None:
        """What the run is expected to take."""

    def step(self, metrics: StepMetrics, start: RunStart) -> None:
        """A step has ended."""

    def evaluation(self, found: EvalRecord) -> None:
        """An evaluation has been made."""
