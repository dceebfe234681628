"""What the lanes did and what was where during the last step, and its JSON: STORE/timeline.json.

Ops come from `executor.py`'s spans, moves from `tiers/move_log.py`'s; when it is written is `publish.py`'s business.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hoist.scheduler.ops import Kind, Lane
from hoist.scheduler.spans import Span
from hoist.scheduler.status import STATE_KINDS
from hoist.scheduler.whereabouts import Whereabouts
from hoist.tiers.format import TIMELINE_NAME
from hoist.tiers.manager import Item, ItemKind, Manager, Snapshot, State, Tier
from hoist.tiers.move_log import MoveLog
from hoist.tiers.small_files import replace_file

#: Raised by one when a reader of the version before would misread the document.
TIMELINE_VERSION = 1
#: Ops that are told at most. With :data:`hoist.tiers.move_log.MAX_MOVES` this bounds what a timeline takes: two logs of
#: moves of 0.9 MB each (the last step's, and the one that goes on), and, while one is written, 4 MB of spans.
MAX_OPS = 32 * 1024
LANES = (Lane.IO, Lane.COPY, Lane.COMPUTE, Lane.OPTIM, Lane.COMMIT)
#: Rows that are encoded at once.
_ROWS = 1024
_LANE_INDEX = {lane: index for index, lane in enumerate(LANES)}
_KIND_INDEX = {kind: index for index, kind in enumerate(Kind)}
_TIERS = tuple(Tier)
_ITEM_KINDS = tuple(ItemKind)
_STATE_INDEX = {state: index for index, state in enumerate(State)}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """One step. Times are ``time.perf_counter()`` seconds."""

    step: int
    started_at: float
    """When it began, in seconds since 1970."""
    start: float
    stop: float
    spans: Sequence[Span]
    """Ops that ended since the step before returned, by their start."""
    unfinished: Sequence[Span]
    """Ops that were at work when the step returned; their stop is that moment."""
    before: Snapshot
    """What was where when it began."""
    moves: MoveLog


class Recorder:
    """Keeps the last step's timeline. :meth:`begin` and :meth:`end` are the trainer's thread's, :attr:`last` anyone's.

    It holds the spans that the trainer keeps anyway; see :data:`MAX_OPS` for the rest.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        #: What was where when the step at work began.
        self._before: Snapshot | None = None
        #: The last step that ended; replaced as a whole.
        self.last: StepTimeline | None = None

    def begin(self) -> None:
        """A step begins."""
        _, self._before = self._manager.swap_log()

    def end(self, step: int, start: float, stop: float, spans: Sequence[Span], unfinished: Sequence[Span]) -> None:
        """It has ended. Times are ``time.perf_counter()`` seconds."""
        moves, _ = self._manager.swap_log()
        if self._before is None or moves is None:
            raise RuntimeError(f"step {step}: ended without having begun")
        self.last = StepTimeline(
            step=step,
            started_at=time.time() - (time.perf_counter() - start),
            start=start,
            stop=stop,
            spans=spans,
            unfinished=unfinished,
            before=self._before,
            moves=moves,
        )
        self._before = None


def write_timeline(directory: Path, timeline: StepTimeline, whereabouts: Whereabouts) -> None:
    """Replace STORE/timeline.json of a store that is open for writing. Raises OSError; the one before stays then."""
    replace_file(directory, TIMELINE_NAME, encode(timeline, whereabouts))


def encode(timeline: StepTimeline, whereabouts: Whereabouts) -> Iterator[bytes]:
    """The document in parts: as a whole it would take tens of MB while it is made."""
    num_ops = len(timeline.spans) + len(timeline.unfinished)
    head = {
        "format_version": TIMELINE_VERSION,
        "step": timeline.step,
        "start": timeline.started_at,
        "seconds": timeline.stop - timeline.start,
        "lanes": [lane.value for lane in LANES],
        "kinds": [kind.name.lower() for kind in Kind],
        "stage_names": list(whereabouts.stage_names),
        "state_kinds": list(STATE_KINDS),
        "states": [state.value for state in State],
        "tiers": [tier.value for tier in _TIERS],
        "truncated": timeline.moves.truncated or num_ops > MAX_OPS,
    }
    yield json.dumps(head, separators=(",", ":")).encode()[:-1]
    yield b',"ops":['
    yield from _joined(_op_rows(timeline))
    yield b'],"residency":['
    yield from _joined(_residency_rows(timeline, whereabouts))
    yield b"]}\n"


def _op_rows(timeline: StepTimeline) -> Iterator[list[float]]:
    """Lane, kind, stage, micro-batch, piece, start, stop of every op that ran within the step, by their start."""
    within = [span for span in timeline.spans if span.stop > timeline.start]
    for span in sorted([*within, *timeline.unfinished], key=lambda span: span.start)[:MAX_OPS]:
        op = span.op
        yield [
            _LANE_INDEX[op.lane],
            _KIND_INDEX[op.kind],
            op.stage,
            op.micro_batch,
            op.piece,
            round(span.start - timeline.start, 6),
            round(span.stop - timeline.start, 6),
        ]


def _residency_rows(timeline: StepTimeline, whereabouts: Whereabouts) -> Iterator[list[float]]:
    """Time, kind of state, stage, second number, state, tier, bytes: what was where at first, then each move."""
    for item, state, num_bytes, in_buffer in timeline.before.items:
        yield from _rows_of(0.0, item, state, num_bytes, in_buffer, whereabouts)
    gradients = STATE_KINDS.index("gradients")
    nvme = _TIERS.index(Tier.NVME)
    for (stage, piece), num_bytes in timeline.before.stashed.items():
        yield [0.0, gradients, stage, piece, _STATE_INDEX[State.STORED], nvme, num_bytes]
    log, states = timeline.moves, tuple(State)
    for index in range(len(log)):
        kind = _ITEM_KINDS[log.kinds[index]]
        item = Item(kind, log.first[index], log.second[index])
        when = round(log.times[index] - timeline.start, 6)
        state = states[log.states[index]]
        yield from _rows_of(when, item, state, log.num_bytes[index], bool(log.in_buffer[index]), whereabouts)


def _rows_of(
    when: float, item: Item, state: State, num_bytes: int, in_buffer: bool, whereabouts: Whereabouts
) -> Iterator[list[float]]:
    second = whereabouts.second_number(item)
    tier = _TIERS.index(whereabouts.tier(item, in_buffer))
    for kind, part in whereabouts.split(item, num_bytes):
        yield [when, kind, item.first, second, _STATE_INDEX[state], tier, part]


def _joined(rows: Iterable[list[float]]) -> Iterator[bytes]:
    rows = iter(rows)
    comma = b""
    while some := list(islice(rows, _ROWS)):
        yield comma + json.dumps(some, separators=(",", ":")).encode()[1:-1]
        comma = b","
