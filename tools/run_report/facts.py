"""What a store tells of its run, as data: the commit, and the status, metrics, timeline and wear that a run leaves.

Reads small files alone, takes no lock and changes nothing, so a run may go on. What is said of it is in
`run.py` and `step.py`; the fields are those of `hoist.scheduler.status` and `.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hoist.scheduler.metrics_log import Recorded, read_metrics
from hoist.scheduler.status import RunStatus
from hoist.tiers.format import METRICS_NAME, STATUS_NAME, TIMELINE_NAME, WEAR_NAME
from hoist.tiers.small_files import Unusable, read_object
from hoist.tiers.wear import WearRecord, read_wear
from hoist.tools.inspection.looking import Inspection, inspect_store
from hoist.tools.run_report.timeline import Timeline
from hoist.tools.sizes import show_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """One step, as its line in the metrics has it. None: the line has no number there."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    clip_scale: float | None = None
    lr: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    predicted_seconds: float | None = None
    nvme_read_bytes: int | None = None
    nvme_written_bytes: int | None = None
    nvme_read_saved_bytes: int | None = None
    nvme_written_saved_bytes: int | None = None
    host_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    busy_seconds: Mapping[str, float]
    """Per lane; empty if the line has none."""
    stall_seconds: Mapping[str, float]
    """Per lane; empty if the line has none."""

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the step."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalFacts:
    """One evaluation."""

    step: int
    """Steps done when it was made."""
    loss: float | None
    counted: int | None
    """Labels that counted."""
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFacts:
    """What the store itself says: its metadata and its last commit."""

    model: str
    """What the model was named when the store was made, and its type."""
    num_parameters: int
    """Those that are trained."""
    num_frozen: int
    """Those that are not."""
    stage_names: tuple[str, ...]
    store_id: str
    created_by: str
    """Name and version of the hoist that made it."""
    step: int
    """Of the last commit."""
    num_steps: int | None
    """Of the whole run; None if that is not known."""
    options: Mapping[str, Any]
    """Options of `hoist train` that the commit keeps; empty for a run of another program."""
    num_drives: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Everything that a report is made of."""

    directory: str
    """The store as the user named it; bytes that are no UTF-8 are written out."""
    made_at: float
    """When the facts were gathered; seconds since 1970."""
    store: StoreFacts
    state: str
    """What goes on in the store, in a word: see `hoist.tools.inspection.Condition`."""
    message: str
    """The same in a sentence."""
    status: RunStatus | None
    """What the run told last."""
    steps: tuple[StepFacts, ...]
    """By step, each once: the last line that a step has."""
    evaluations: tuple[EvalFacts, ...]
    """By step, each once."""
    timeline: Timeline | None
    wear: WearRecord | None
    """Bytes ever written to the store's drives."""
    problems: Mapping[str, str]
    """By file name: why there is nothing, or less, from it. One sentence each."""

    @property
    def last(self) -> StepFacts | None:
        """The last step."""
        return self.steps[-1] if self.steps else None

    @property
    def prediction(self) -> Mapping[str, float]:
        """The numbers of what was predicted of a step, by name; empty if nothing was."""
        told = self.status.prediction if self.status is not None else None
        return {name: found for name, value in (told or {}).items() if (found := number(value)) is not None}

    def why(self, name: str) -> str:
        """Why a file gave nothing, as a sentence."""
        return self.problems.get(name, f"{name} does not say.")


def gather(directory: Path) -> RunFacts:
    """Read what is there of a store's run.

    Raises StoreRefusedError if there is no store. What the run should have left and did not, what is torn, and what is
    damaged of the store, is a problem and no error.
    """
    found = inspect_store(directory)
    where = found.view.directory
    problems: dict[str, str] = {}
    if found.view.is_snapshot:
        for name in (STATUS_NAME, METRICS_NAME, TIMELINE_NAME, WEAR_NAME):
            problems[name] = f"This is a snapshot: {name} stays in the store that it was made of."
        recorded, timeline, wear = Recorded(steps=(), evaluations=()), None, None
    else:
        if found.status is None:
            told = [note for note in found.notes if STATUS_NAME in note]
            problems[STATUS_NAME] = _sentence(told[0]) if told else _missing(STATUS_NAME, "what the run is doing")
        recorded = _metrics(where / METRICS_NAME, problems)
        timeline = _timeline(where / TIMELINE_NAME, problems)
        wear = _wear(where, problems)
    if found.damage:
        problems["damage"] = _sentence("; ".join(found.damage))
    return RunFacts(
        directory=str(directory).encode("utf-8", "backslashreplace").decode(),
        made_at=found.seen_at,
        store=_store(found),
        state=found.condition.value,
        message=found.message,
        status=found.status,
        steps=tuple(_step(line) for line in recorded.steps),
        evaluations=tuple(
            EvalFacts(
                step=line["step"],
                loss=number(line.get("eval_loss")),
                counted=whole(line.get("eval_counted")),
                seconds=number(line.get("eval_seconds")),
            )
            for line in recorded.evaluations
        ),
        timeline=timeline,
        wear=wear,
        problems=problems,
    )


def _store(found: Inspection) -> StoreFacts:
    view = found.view
    kind = _mapping(view.attributes.get("model")).get("type")
    run = view.record.run if view.record is not None else {}
    return StoreFacts(
        model=f"{found.model} ({kind})" if kind else found.model,
        num_parameters=found.num_parameters,
        num_frozen=found.num_frozen,
        stage_names=tuple(layout.name for layout in view.layouts),
        store_id=view.store_id or "without an id",
        created_by=view.created_by or "an unknown program",
        step=view.record.step if view.record is not None else 0,
        num_steps=found.num_steps,
        options=_mapping(run.get("options")),
        num_drives=max(1, len(view.record.drives)) if view.record is not None else 1,
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# --- what the run leaves --------------------------------------------------------------------------------------------


def _sentence(text: str) -> str:
    return f"{text.rstrip('.')}."


def _missing(name: str, what: str) -> str:
    return f"There is no {name}, which says {what}: a run writes it."


def _document(path: Path, problems: dict[str, str], what: str) -> dict[str, Any] | None:
    """A JSON object, or None and a problem."""
    if not path.exists():
        problems[path.name] = _missing(path.name, what)
        return None
    found = read_object(path)
    if isinstance(found, Unusable):
        problems[path.name] = _sentence(f"{found.detail[:300]}; it is passed over")
        return None
    return found


def _wear(store: Path, problems: dict[str, str]) -> WearRecord | None:
    try:
        found = read_wear(store)
    except (OSError, ValueError) as error:
        problems[WEAR_NAME] = _sentence(f"{str(error)[:300]}; it is passed over")
        return None
    if found is None:
        problems[WEAR_NAME] = _missing(WEAR_NAME, "what the store has ever written")
    return found


def _metrics(path: Path, problems: dict[str, str]) -> Recorded:
    try:
        recorded = read_metrics(path)
    except OSError as error:
        problems[path.name] = f"{path.name} cannot be read: {error.strerror}."
        return Recorded(steps=(), evaluations=())
    if not recorded.steps:
        there = f"{path.name} has no step yet." if path.exists() else _missing(path.name, "what each step did")
        problems[path.name] = there
    elif recorded.unread_bytes:
        problems[path.name] = (
            f"{path.name} is so long that the steps of its first {show_bytes(recorded.unread_bytes)} are left out."
        )
    return recorded


_WHOLE = frozenset(spec.name for spec in fields(StepFacts) if "int" in str(spec.type))
_LANES = ("busy_seconds", "stall_seconds")


def _step(found: Mapping[str, Any]) -> StepFacts:
    numbers = {
        spec.name: (whole if spec.name in _WHOLE else number)(found.get(spec.name))
        for spec in fields(StepFacts)
        if spec.name not in _LANES and spec.name != "step"
    }
    lanes = {
        name: {
            str(lane): float(value) for lane, value in _mapping(found.get(name)).items() if number(value) is not None
        }
        for name in _LANES
    }
    return StepFacts(step=found["step"], **numbers, **lanes)  # type: ignore[arg-type]  # names and types go together above


def number(value: Any) -> float | None:
    """A finite number of a document; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: Any) -> int | None:
    """A whole number of a document; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _timeline(path: Path, problems: dict[str, str]) -> Timeline | None:
    document = _document(path, problems, "what ran when within a step")
    if document is None:
        return None
    try:
        return Timeline.from_json(document)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        seen = f"{type(error).__name__}: {error}"[:200]
        problems[path.name] = f"{path.name} is not a timeline that this hoist reads ({seen})."
        return None
