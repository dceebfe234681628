"""What `hoist inspect` knows of a store at one moment: its files, who holds it, and what the run there tells of itself.

Reads, never writes; needs no torch. How it looks is `view.py`'s business; the store's small files are read
by `store_view.py`, the run's document is described in `scheduler/status.py`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hoist.scheduler.endurance import judge
from hoist.scheduler.status import STATE_KINDS, RunState, RunStatus, StateBytes
from hoist.scheduler.status_file import read_status
from hoist.tiers import allocation, lock
from hoist.tiers.format import LOCK_NAME, MOMENT_ARRAYS, STATUS_NAME, WEIGHT_ARRAYS, StateArray
from hoist.tiers.layout import StageLayout
from hoist.tiers.lock import Holder
from hoist.tiers.small_files import Why
from hoist.tiers.wear import read_wear
from hoist.tools.durations import show_span
from hoist.tools.inspection.store_view import StoreView, look

#: Raised by one when a reader of the version before would misread `--json`.
INSPECTION_VERSION = 1
#: A document older than this many of its intervals, and than :data:`PATIENCE_SECONDS`, is not written any more.
PATIENCE_INTERVALS = 10
PATIENCE_SECONDS = 10.0
#: Looks at lock and document until both are of one moment.
_TRIES = 5


class Condition(Enum):
    """What goes on in a store."""

    RUNNING = "running"
    """A run holds the store and tells of itself."""
    HANGING = "hanging"
    """A run holds the store and has told nothing for long: it is stopped, or waits for something that does not come."""
    ENDED = "ended"
    """The last run ended as it should."""
    FAILED = "failed"
    """An error ended the last run."""
    DIED = "died"
    """The last run's process is gone and could not say so: what was in memory is lost, the last commit is not."""
    HELD = "held"
    """A process holds the store that tells nothing: another hoist command, a run that begins, or an older hoist."""
    IDLE = "idle"
    """Nobody holds the store, and no run has left a document."""
    UNTRAINED = "untrained"
    """The same, and the store is at step 0."""
    ELSEWHERE = "elsewhere"
    """A run on another machine told of itself last; whether it lives cannot be seen from here."""
    CREATING = "creating"
    """There is no commit yet, and a process holds the store."""
    UNFINISHED = "unfinished"
    """There is no commit, and nobody holds the store."""
    SNAPSHOT = "snapshot"
    """A snapshot, in which nothing ever goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStates:
    """Where one stage's states are."""

    name: str
    kinds: tuple[StateBytes, ...]
    """In the order of :data:`STATE_KINDS`."""

    def to_json(self) -> dict[str, Any]:
        """The record as JSON: the kinds by their names."""
        return {"name": self.name, **{kind: asdict(each) for kind, each in zip(STATE_KINDS, self.kinds, strict=True)}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """A store at one moment."""

    view: StoreView
    seen_at: float
    """Seconds since 1970."""
    condition: Condition
    message: str
    """The condition in a sentence."""
    notes: tuple[str, ...]
    """Lines on what could not be used and does not harm the store: a document that is cut off, say."""
    holder: Holder | None
    """Who holds the store's lock."""
    status: RunStatus | None
    """What the last run told last; None where there is nothing of this store's."""
    stages: tuple[StageStates, ...]
    """While a run holds the store, as it tells; otherwise as the last commit left them, all on NVMe."""
    wear: Mapping[str, Any] | None
    """What was written so far and what that means for the drives: as the run tells, or as the store counts it."""
    free_bytes: int | None
    """Free on the drive of the store's own directory; None if that cannot be seen."""

    @property
    def file_bytes(self) -> int:
        """What the chunk files take, all slots of a store, those of the commit in a snapshot."""
        slots = 1 if self.view.is_snapshot else self.view.num_slots
        element = sum(array.itemsize for array in StateArray)
        return sum(
            layout.padded_elements * element * slots + layout.frozen_bytes for layout in self.view.layouts
        )

    @property
    def is_live(self) -> bool:
        """The states are those of a run that holds the store."""
        return self.status is not None and self.condition in (Condition.RUNNING, Condition.HANGING)

    @property
    def damage(self) -> tuple[str, ...]:
        """What is wrong with the store."""
        return self.view.damage

    @property
    def age_seconds(self) -> float | None:
        """Since the document was written; None without one."""
        return None if self.status is None else max(0.0, self.seen_at - self.status.written_at)

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run, as it told, or as the last commit has them."""
        if self.status is not None and self.status.position.num_steps is not None:
            return self.status.position.num_steps
        found = self.options.get("steps")
        return found if isinstance(found, int) else None

    @property
    def model(self) -> str:
        """What the store calls its model."""
        told = self.view.attributes.get("model")
        name = told.get("name") if isinstance(told, Mapping) else None
        return name if isinstance(name, str) else "modules" if self.view.layouts else "unknown"

    @property
    def num_parameters(self) -> int:
        """Weights that are trained, in the stages that could be read."""
        return sum(placed.spec.num_elements for layout in self.view.layouts for placed in layout.trainable)

    @property
    def num_frozen(self) -> int:
        """Elements of weights that are not trained, buffers apart."""
        return sum(
            placed.spec.num_elements
            for layout in self.view.layouts
            for placed in layout.frozen
            if placed.spec.frozen_weight
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """What `hoist train` was told, as the last commit has it; empty where another program trained."""
        found = None if self.view.record is None else self.view.record.run.get("options")
        return found if isinstance(found, Mapping) else {}

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it; docs/inspect.md describes every field."""
        record = self.view.record
        return {
            "format_version": INSPECTION_VERSION,
            "store": str(self.view.directory),
            "store_id": self.view.store_id,
            "created_by": self.view.created_by,
            "seen_at": self.seen_at,
            "condition": self.condition.value,
            "message": self.message,
            "notes": list(self.notes),
            "damage": list(self.damage),
            "holder": None if self.holder is None else {"pid": self.holder.pid, "host": self.holder.host},
            "model": {
                "name": self.model,
                "num_parameters": self.num_parameters,
                "num_frozen": self.num_frozen,
                "num_stages": self.view.num_stages,
            },
            "commit": None
            if record is None
            else {
                "generation": record.generation,
                "step": record.step,
                "num_slots": self.view.num_slots,
                "num_drives": len(record.drives),
            },
            "file_bytes": self.file_bytes,
            "free_bytes": self.free_bytes,
            "num_steps": self.num_steps,
            "options": dict(self.options),
            "snapshots": list(self.view.snapshots),
            "live": self.is_live,
            "age_seconds": self.age_seconds,
            "wear": None if self.wear is None else dict(self.wear),
            "stages": [stage.to_json() for stage in self.stages],
            "status": None if self.status is None else _without_stages(self.status),
        }


def inspect_store(directory: str | Path, *, before: Inspection | None = None, now: float | None = None) -> Inspection:
    """Look at a store or a snapshot. ``before``: the last look, so that what no commit has changed is not read again.

    ``now`` is for tests. Raises StoreRefusedError where there is neither.
    """
    view = look(Path(directory), None if before is None else before.view)
    if view.is_snapshot:
        step = "" if view.record is None else f" of step {view.record.step}"
        name = view.directory.name
        message = f"snapshot {name!r}{step}: is kept as it is, until it is removed"
        return _inspection(view, now, Condition.SNAPSHOT, message, [], None, None)
    notes: list[str] = []
    status, holder = _look_at_run(view, notes)
    if view.record is None and view.versions[0] is None:
        return _without_commit(view, now, notes, holder)
    seen_at = time.time() if now is None else now
    condition, message = _judge(view, status, holder, seen_at, notes)
    return _inspection(view, seen_at, condition, message, notes, status, holder)


def _look_at_run(view: StoreView, notes: list[str]) -> tuple[RunStatus | None, Holder | None]:
    """The document and the lock's holder, of one moment: the lock is the same before and after."""
    path = view.directory / LOCK_NAME
    holder = lock.probe(path)
    for _ in range(_TRIES):
        notes.clear()
        status = _read_status(view, notes)
        after = lock.probe(path)
        if (after is None) == (holder is None):
            return status, after
        holder = after
    return status, holder


def _read_status(view: StoreView, notes: list[str]) -> RunStatus | None:
    found = read_status(view.directory, store_id=view.store_id)
    if isinstance(found, RunStatus):
        return found
    if found.why is not Why.MISSING or (view.directory / STATUS_NAME).exists():
        notes.append(f"{found.detail}; what the last run told is not shown")
    return None


def _without_commit(view: StoreView, now: float | None, notes: list[str], holder: Holder | None) -> Inspection:
    if holder is not None:
        message = f"{holder} is creating the store; nothing is committed yet"
        return _inspection(view, now, Condition.CREATING, message, notes, None, holder)
    message = "has no commit: its creation never finished, or COMMIT.json was deleted; create it again"
    return _inspection(view, now, Condition.UNFINISHED, message, notes, None, None)


def _judge(
    view: StoreView, status: RunStatus | None, holder: Holder | None, now: float, notes: list[str]
) -> tuple[Condition, str]:
    """What goes on, and how to say it."""
    step = "its last commit" if view.record is None else f"step {view.record.step}"
    if status is None:
        if holder is not None:
            return Condition.HELD, f"{holder} holds the store and tells nothing of itself; committed is {step}"
        if view.record is not None and view.record.step == 0:
            return Condition.UNTRAINED, "nothing has been trained in this store yet"
        return Condition.IDLE, f"nobody trains in this store; it opens at {step}"
    who = f"process {status.pid} on {status.hostname}" if status.hostname else f"process {status.pid}"
    age = max(0.0, now - status.written_at)
    fresh = age <= max(PATIENCE_SECONDS, PATIENCE_INTERVALS * status.interval_seconds)
    if status.interval_seconds == 0 and holder is not None:
        fresh = True  # it writes when it is asked to, and nobody knows when that is
    when = f"{show_span(age)} ago, at {show_time(status.written_at, now)}"
    own = holder is None or holder.pid is None or (holder.pid, holder.host) == (status.pid, status.hostname)
    if status.state is RunState.RUNNING and own:
        if fresh and (holder is not None or not _is_here(status)):
            return Condition.RUNNING, f"{who} trains"
        if holder is not None:
            return Condition.HANGING, (
                f"{who} holds the store and was last heard of {when}: it is stopped, or waits for something"
            )
        if not _is_here(status):
            return Condition.ELSEWHERE, (
                f"{who} trained and was last heard of {when}; from this machine nobody can tell whether it still runs"
            )
    if holder is not None:
        former = {
            RunState.ENDED: "the last run has ended",
            RunState.FAILED: f"the last run failed: {status.error}",
            RunState.RUNNING: f"the last run ({who}) has died",
        }[status.state]
        return Condition.HELD, f"{holder} holds the store and tells nothing of itself; {former}; committed is {step}"
    if status.state is RunState.ENDED:
        return Condition.ENDED, f"the last run ended {when}; the store opens at {step}"
    if status.state is RunState.FAILED:
        return Condition.FAILED, f"the last run failed {when}: {status.error}; the store opens at {step}"
    if _is_alive(status.pid):
        notes.append(
            f"a process {status.pid} is there all the same: another one, or this is a copy of the store that it trains"
        )
    return Condition.DIED, (
        f"{who} has died; it was last heard of {when}. What was in memory is lost, and the store opens at {step}"
    )


def _is_here(status: RunStatus) -> bool:
    return not status.hostname or status.hostname == socket.gethostname()


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _inspection(
    view: StoreView,
    now: float | None,
    condition: Condition,
    message: str,
    notes: list[str],
    status: RunStatus | None,
    holder: Holder | None,
) -> Inspection:
    live = status is not None and condition in (Condition.RUNNING, Condition.HANGING)
    if live and status is not None and len(status.stages) == len(status.stage_names) != 0:
        stages = tuple(
            StageStates(name=name, kinds=_padded(kinds))
            for name, kinds in zip(status.stage_names, status.stages, strict=True)
        )
    else:
        stages = () if view.record is None else tuple(map(stored_states, view.layouts))
    wear = _wear(view, status, notes)
    return Inspection(
        view=view,
        seen_at=time.time() if now is None else now,
        condition=condition,
        message=message,
        notes=tuple(notes),
        holder=holder,
        status=status,
        stages=stages,
        wear=wear,
        free_bytes=_free_bytes(view.directory),
    )


def _wear(view: StoreView, status: RunStatus | None, notes: list[str]) -> Mapping[str, Any] | None:
    """What the run told of wear, or, of a run that told nothing, what the store's own count says with its speed."""
    if status is not None and status.wear is not None:
        return status.wear
    try:
        record = read_wear(view.directory)
    except (ValueError, OSError) as error:
        notes.append(str(error))
        return None
    if record is None:
        return None
    per_step = None if status is None or status.last_step is None else status.last_step.get("nvme_written_bytes")
    known = isinstance(per_step, (int, float))
    seconds = status.speed.seconds_per_step if status is not None and known else None
    found = judge(record, bytes_per_step=float(per_step or 0) if known else 0.0, seconds_per_step=seconds).to_json()
    return found if known else {**found, "written_bytes_per_step": None, "days_left": None}


def _free_bytes(directory: Path) -> int | None:
    try:
        return allocation.free_bytes(directory)
    except OSError:
        return None


def _padded(kinds: tuple[StateBytes, ...]) -> tuple[StateBytes, ...]:
    return (*kinds, *[StateBytes()] * len(STATE_KINDS))[: len(STATE_KINDS)]


def stored_states(layout: StageLayout) -> StageStates:
    """A stage as a commit leaves it: what pieces cover of weights and moments, and the frozen array, on NVMe."""
    elements = sum(layout.used_elements())
    weights = elements * sum(array.itemsize for array in WEIGHT_ARRAYS) + layout.frozen_bytes
    moments = elements * sum(array.itemsize for array in MOMENT_ARRAYS)
    return StageStates(
        name=layout.name, kinds=(StateBytes(nvme=weights), StateBytes(nvme=moments), StateBytes(), StateBytes())
    )


def _without_stages(status: RunStatus) -> dict[str, Any]:
    document = status.to_json()
    del document["stages"], document["stage_names"]
    return document


def show_time(seconds: float, now: float) -> str:
    """A moment in local time, its date only if that is not today's."""
    then, today = time.localtime(seconds), time.localtime(now)
    same = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M:%S", then)
