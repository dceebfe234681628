"""What a store tells of its run, as data: the commit, and the status, metrics, timeline and wear that a run leaves.

Reads small files alone, takes no lock and changes nothing, so a run may go on. What is said of it is in
`run_report_run.py` and `run_report_step.py`; the fields are those of `hoist.scheduler.status` and `.metrics`.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hoist.scheduler.status import RunState, RunStatus
from hoist.tiers import opening
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.format import COMMIT_NAME, METRICS_NAME, SNAPSHOT_NAME, STATUS_NAME, TIMELINE_NAME, WEAR_NAME
from hoist.tools.run_report_timeline import Timeline

#: A status document older than so many of its own intervals is no sign of life any more.
SILENT_INTERVALS = 10.0


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
    frozen_bytes: int
    """Of their arrays, buffers included."""
    stage_names: tuple[str, ...]
    store_id: str
    created_by: str
    """Name and version of the hoist that made it."""
    step: int
    """Of the last commit."""
    options: Mapping[str, Any]
    """Options of `hoist train` that the commit keeps; empty for a run of another program."""
    totals: Mapping[str, Any]
    """What the run has done until the commit; empty likewise."""
    num_drives: int
    is_snapshot: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Everything that a report is made of."""

    directory: str
    """The store as the user named it."""
    made_at: float
    """When the facts were gathered; seconds since 1970."""
    store: StoreFacts
    status: RunStatus | None
    steps: tuple[StepFacts, ...]
    """By step, each once: the last line that a step has."""
    evaluations: tuple[EvalFacts, ...]
    """By step, each once."""
    timeline: Timeline | None
    wear: Mapping[str, Any]
    """wear.json as it is; empty if there is none."""
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

    def state(self) -> str:
        """What the run is doing, for people."""
        status = self.status
        if status is None:
            if self.store.is_snapshot:
                return "a snapshot: it is read, never trained in"
            return "not known: no status has been written"
        match status.state:
            case RunState.ENDED:
                return "ended"
            case RunState.FAILED:
                return f"failed: {status.error}" if status.error else "failed"
        silent = self.made_at - status.written_at
        if status.hostname == socket.gethostname() and status.pid > 0 and not _process_is_there(status.pid):
            return f"gone: process {status.pid} is not there any more, and it has not said how it ended"
        if silent > SILENT_INTERVALS * max(status.interval_seconds, 1.0):
            return f"silent for {silent:.0f} s: its process hangs, is stopped, or is gone"
        return "running"


def gather(directory: Path) -> RunFacts:
    """Read what is there of a store's run.

    Raises StoreRefusedError if there is no store, StoreFormatError if its metadata or commit cannot be read. What the
    run should have left and did not, or what is torn, is a problem and no error.
    """
    shown = str(directory)
    directory = directory.absolute()
    if not (directory / COMMIT_NAME).is_file():
        raise StoreRefusedError(opening.why_no_commit(directory))
    store = _store(directory)
    problems: dict[str, str] = {}
    if store.is_snapshot:
        for name in (STATUS_NAME, METRICS_NAME, TIMELINE_NAME, WEAR_NAME):
            problems[name] = f"This is a snapshot: {name} stays in the store that it was made of."
        steps: tuple[StepFacts, ...] = ()
        evaluations: tuple[EvalFacts, ...] = ()
        status, timeline, wear = None, None, {}
    else:
        status = _status(directory, store, problems)
        steps, evaluations = _metrics(directory, store, problems)
        timeline = _timeline(directory, problems)
        wear = _document(directory / WEAR_NAME, problems, "what the store has written") or {}
    return RunFacts(
        directory=shown,
        made_at=time.time(),
        store=store,
        status=status,
        steps=steps,
        evaluations=evaluations,
        timeline=timeline,
        wear=wear,
        problems=problems,
    )


def _store(directory: Path) -> StoreFacts:
    opened = opening.read(directory)
    model = opened.attributes.get("model")
    model = model if isinstance(model, Mapping) else {}
    kind = model.get("type")
    name = str(model.get("name") or "a model without a name")
    frozen = [placed.spec for layout in opened.layouts for placed in layout.frozen if placed.spec.frozen_weight]
    run = opened.record.run
    return StoreFacts(
        model=f"{name} ({kind})" if kind else name,
        num_parameters=sum(placed.spec.num_elements for layout in opened.layouts for placed in layout.trainable),
        num_frozen=sum(spec.num_elements for spec in frozen),
        frozen_bytes=sum(layout.frozen_bytes for layout in opened.layouts),
        stage_names=tuple(layout.name for layout in opened.layouts),
        store_id=opened.record.store_id,
        created_by=_created_by(directory),
        step=opened.record.step,
        options=_mapping(run.get("options")),
        totals=_mapping(run.get("totals")),
        num_drives=max(1, len(opened.record.drives)),
        is_snapshot=(directory / SNAPSHOT_NAME).exists(),
    )


def _created_by(directory: Path) -> str:
    document = json.loads((directory / "zarr.json").read_bytes())
    return str(document["attributes"]["hoist"].get("created_by", "an unknown version"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _process_is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True


# --- what the run leaves --------------------------------------------------------------------------------------------


def _read(path: Path, problems: dict[str, str], what: str) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        problems[path.name] = f"There is no {path.name}, which says {what}: a run writes it."
    except OSError as error:
        problems[path.name] = f"{path.name} cannot be read: {error.strerror}."
    return None


def _document(path: Path, problems: dict[str, str], what: str) -> dict[str, Any] | None:
    """A JSON object, or None and a problem."""
    data = _read(path, problems, what)
    if data is None:
        return None
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        problems[path.name] = f"{path.name} is not whole, and is passed over ({str(error)[:200]})."
        return None
    return document


def _status(directory: Path, store: StoreFacts, problems: dict[str, str]) -> RunStatus | None:
    document = _document(directory / STATUS_NAME, problems, "what the run is doing")
    if document is None:
        return None
    try:
        status = RunStatus.from_json(document)
    except ValueError as error:
        problems[STATUS_NAME] = f"{STATUS_NAME} is not a status that this hoist reads ({str(error)[:200]})."
        return None
    if status.store_id and status.store_id != store.store_id:
        problems[STATUS_NAME] = f"{STATUS_NAME} is another store's, and is passed over."
        return None
    return status


def _metrics(
    directory: Path, store: StoreFacts, problems: dict[str, str]
) -> tuple[tuple[StepFacts, ...], tuple[EvalFacts, ...]]:
    """Steps and evaluations; of several lines for a step the last one counts, and a torn last line does not."""
    data = _read(directory / METRICS_NAME, problems, "what each step did")
    steps: dict[int, StepFacts] = {}
    evaluations: dict[int, EvalFacts] = {}
    newest = 0
    lines = (data or b"").splitlines()
    num_bad = 0
    for place, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            step = found["step"]
            if type(step) is not int:
                raise ValueError("step")
            if "eval_loss" in found:
                evaluations[step] = EvalFacts(
                    step=step,
                    loss=number(found.get("eval_loss")),
                    counted=whole(found.get("eval_counted")),
                    seconds=number(found.get("eval_seconds")),
                )
            else:
                # After a crash or a restore steps come again: what was written of them and of later ones is undone.
                for undone in range(step, newest + 1):
                    steps.pop(undone, None)
                    evaluations.pop(undone, None)
                steps[step], newest = _step(step, found), step
        except (ValueError, TypeError, KeyError, RecursionError):
            num_bad += place < len(lines)
    if num_bad:
        lines_are = "1 line is" if num_bad == 1 else f"{num_bad} lines are"
        problems[METRICS_NAME] = f"{METRICS_NAME}: {lines_are} not whole and left out."
    elif data is not None and not steps:
        problems[METRICS_NAME] = f"{METRICS_NAME} has no step yet."
    return (
        tuple(steps[step] for step in sorted(steps)),
        tuple(evaluations[step] for step in sorted(evaluations)),
    )


_WHOLE = frozenset(spec.name for spec in fields(StepFacts) if "int" in str(spec.type))
_LANES = ("busy_seconds", "stall_seconds")


def _step(step: int, found: Mapping[str, Any]) -> StepFacts:
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
    return StepFacts(step=step, **numbers, **lanes)  # type: ignore[arg-type]  # names and types go together above


def number(value: Any) -> float | None:
    """A finite number of a document; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: Any) -> int | None:
    """A whole number of a document; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _timeline(directory: Path, problems: dict[str, str]) -> Timeline | None:
    document = _document(directory / TIMELINE_NAME, problems, "what ran when within a step")
    if document is None:
        return None
    try:
        return Timeline.from_json(document)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        seen = f"{type(error).__name__}: {error}"[:200]
        problems[TIMELINE_NAME] = f"{TIMELINE_NAME} is not a timeline that this hoist reads ({seen})."
        return None
