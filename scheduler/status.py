"""What a run tells other processes of itself: the records in ``STORE/status.json``, and their JSON. Numbers alone.

`publish.py` fills them in and writes them about once a second; `hoist inspect` and `hoist report` read them. The same
in prose, field by field, is docs/status.md.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Self, TypeVar, get_args, get_origin

#: Raised by one when a reader of the version before would misread the document.
STATUS_VERSION = 1
#: Kinds of state that a stage has, in the order of :attr:`Residency.stages`' inner lists.
STATE_KINDS = ("weights", "moments", "gradients", "activations")


class RunState(Enum):
    """What the process that writes the document is doing."""

    RUNNING = "running"
    """Steps, or waiting for the caller's next one."""
    ENDED = "ended"
    """The trainer was closed: nothing is in memory any more."""
    FAILED = "failed"
    """An error ended it: see :attr:`RunStatus.error`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Where one kind of state of one stage is; bytes may be in several tiers at once. All 0: it has none of it."""

    nvme: int = 0
    """Bytes that NVMe holds: the newest version in the store's slots, or what is in scratch. An older version that a
    dirty copy in memory has replaced does not count."""
    host: int = 0
    """Bytes in buffers of host memory, in the form they have there (compute weights: float32 or bfloat16)."""
    device: int = 0
    """The same in an accelerator's memory."""
    dirty: int = 0
    """Of host and device: the only, or the newest, copy."""
    filling: int = 0
    """Of host and device: on the way from NVMe; nobody may read them yet."""
    writing: int = 0
    """Of the dirty ones: on the way to NVMe."""
    bound: int = 0
    """Of host and device: modules compute with them now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierStatus:
    """One tier."""

    budget_bytes: int | None = None
    """What the user allows; for nvme, what the store takes and its drive still has free. None: no limit known."""
    resident_bytes: int = 0
    """Bytes of items in buffers now; for nvme, one version of all stored states, and what is in scratch alone."""
    peak_bytes: int = 0
    """The most of that at once in this run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStatus:
    """One lane: what it does now, and how it spent the last step."""

    current: str | None = None
    """The op at work, as ``backward(layer.3, micro-batch 2)``; None if it waits. For io, the oldest in flight."""
    in_flight: int = 0
    """Ops at work: more than 1 for io alone."""
    busy_share: float | None = None
    """Share of the last step (0 to 1) in which it was at work. None before the first step."""
    stall_share: float | None = None
    """Share of the last step in which it had ops left but waited for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IoStatus:
    """What the io engine moves."""

    engine: str = ""
    """The engine's description of itself: direct or buffered, and why."""
    read_bytes_per_second: float = 0.0
    """Since the document before, or one a little older where two come right after each other; in the first one, since
    the trainer was made."""
    write_bytes_per_second: float = 0.0
    read_bytes: int = 0
    """Since the engine was made."""
    written_bytes: int = 0
    buffered_bytes: int = 0
    """Of both, what went through the page cache, as the file system refused direct I/O."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where the run stands."""

    step: int = 0
    """Steps done."""
    num_steps: int | None = None
    """Steps of the whole run; None where the schedule has none: the caller decides."""
    committed_step: int = 0
    """What a crash now would leave."""
    current_step: int | None = None
    """The step at work; None between steps and in an evaluation."""
    phase: str | None = None
    """``forward``, ``loss``, ``backward``, ``evaluate``, or ``updates`` while only updates are left; None if nothing
    runs."""
    stage: str | None = None
    """Name of the stage that computes."""
    micro_batch: int | None = None
    """Which micro-batch of it, from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast it goes: means over the last steps of this run (at most 20, not the first)."""

    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    """Until :attr:`Position.num_steps`; None if that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The document. Byte counts are of this moment; shares and speeds are of the steps that they name."""

    format_version: int = STATUS_VERSION
    store_id: str = ""
    """The store's: a copied document of another one is noticed."""
    pid: int = 0
    hostname: str = ""
    started_at: float = 0.0
    """When the trainer was made; seconds since 1970, like all times here."""
    written_at: float = 0.0
    """When this document was written."""
    sequence: int = 0
    """Documents that this trainer has written, this one included."""
    interval_seconds: float = 1.0
    """How often it is written: much older than that, its process hangs or is gone. 0: only when asked."""
    state: RunState = RunState.RUNNING
    error: str | None = None
    """One line on what ended it."""
    position: Position = field(default_factory=Position)
    speed: Speed = field(default_factory=Speed)
    tiers: Mapping[str, TierStatus] = field(default_factory=dict)
    """By name: device, host, nvme."""
    lanes: Mapping[str, LaneStatus] = field(default_factory=dict)
    """By name: io, copy, compute, optim, commit."""
    io: IoStatus = field(default_factory=IoStatus)
    host_bytes: int = 0
    """Anonymous and shared memory beyond the baseline now: what the promise is about."""
    host_peak_bytes: int = 0
    """The most of it so far."""
    promised_bytes: int = 0
    """What the budget promises it stays below."""
    memory_parts: Mapping[str, int] = field(default_factory=dict)
    """How the budget is divided: bytes by what for."""
    stage_names: tuple[str, ...] = ()
    stages: tuple[tuple[StateBytes, ...], ...] = ()
    """Per stage, per kind of :data:`STATE_KINDS`. In JSON: lists of the numbers of :class:`StateBytes`, in order."""
    last_step: Mapping[str, Any] | None = None
    """The metrics of the last step, as `metrics.py` has them; None before it."""
    prediction: Mapping[str, Any] | None = None
    """What was predicted of a step before the first one, and from what; None if nothing was."""
    wear: Mapping[str, Any] | None = None
    """Bytes written so far, per step and in all, and what they mean for the drive."""

    def to_json(self) -> dict[str, Any]:
        """The document as JSON."""
        document = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "stages"}
        document = {name: _encoded(value) for name, value in document.items()}
        document["stages"] = [
            [
                [kind.nvme, kind.host, kind.device, kind.dirty, kind.filling, kind.writing, kind.bound]
                for kind in stage
            ]
            for stage in self.stages
        ]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` gave. What is missing has its default, what is unknown is passed over.

        Raises ValueError, naming the field, on another version, and on what is not of its field's type.
        """
        version = document.get("format_version")
        if version != STATUS_VERSION:
            raise ValueError(f"format_version: expected {STATUS_VERSION}, saw {version!r:.100}")
        stages = document.get("stages", [])
        try:
            kinds = tuple(
                tuple(
                    StateBytes(**dict(zip(_STATE_FIELDS, map(int, numbers), strict=True))) for numbers in stage
                )
                for stage in stages
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"stages: not lists of {len(_STATE_FIELDS)} numbers: {error}") from error
        rest = {name: value for name, value in document.items() if name != "stages"}
        return _decoded_record(cls, rest, "", {"stages": kinds})


_STATE_FIELDS = tuple(spec.name for spec in fields(StateBytes))
_Record = TypeVar("_Record")


def _encoded(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _encoded(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_encoded(each) for each in value]
    return value


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decoded_record(
    kind: type[_Record], document: Any, where: str, given: Mapping[str, Any] | None = None
) -> _Record:
    if not isinstance(document, Mapping):
        raise ValueError(f"{where or 'document'}: expected an object, saw {document!r:.100}")
    hints = _hints(typing.cast(Hashable, kind))
    values = {
        name: _decoded(hints[name], value, f"{where}.{name}" if where else name)
        for name, value in document.items()
        if name in hints
    }
    return kind(**values, **(given or {}))


def _decoded(hint: Any, value: Any, where: str) -> Any:
    """A JSON value as its field's type."""
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in get_args(hint):
            return None
        hint = next(option for option in get_args(hint) if option is not types.NoneType)
    origin = get_origin(hint) or hint
    if origin is Any:
        return value
    if isinstance(origin, type) and issubclass(origin, Enum):
        if value not in [member.value for member in origin]:
            raise ValueError(f"{where}: {value!r:.100} is none of {', '.join(str(member.value) for member in origin)}")
        return origin(value)
    if is_dataclass(origin) and isinstance(origin, type):
        return _decoded_record(origin, value, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: expected an object, saw {value!r:.100}")
        inner = get_args(hint)[1]
        return {str(key): _decoded(inner, each, f"{where}.{key}") for key, each in value.items()}
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, saw {value!r:.100}")
        return tuple(_decoded(get_args(hint)[0], each, where) for each in value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, origin) or (origin is int and isinstance(value, bool)):
        raise ValueError(f"{where}: expected {origin.__name__}, saw {value!r:.100}")
    return value
