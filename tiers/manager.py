"""The residency table: on which tier every item is now, in what state, and in whose hands; counters of what moved.

It decides nothing and moves no bytes: plans decide (`scheduler/plan.py`), handlers move (`scheduler/runtime.py`) and
report each move here. A move that would lose or misread data raises instead of being noted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from time import perf_counter
from typing import Any, NamedTuple

from hoist.tiers.errors import ResidencyError
from hoist.tiers.move_log import MoveLog

#: Moves that are remembered for error messages, of all items together.
HISTORY_MOVES = 512
#: Moves of one item that an error message shows.
SHOWN_MOVES = 8


class Tier(Enum):
    """Where bytes can be."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    __hash__ = object.__hash__  # identity: Enum's own hashes the name, in Python


class ItemKind(Enum):
    """Kinds of items. The two numbers of an :class:`Item` say which one."""

    WEIGHTS = "weights"
    """The compute weights of a stage (first: stage)."""
    STATES = "states"
    """Weights and moments of one piece on its way through the optimizer (first: stage, second: piece)."""
    KEPT_WEIGHTS = "kept weights"
    """Both halves of the weights of a chunk that stay from step to step (first: stage, second: chunk)."""
    KEPT_MOMENTS = "kept moments"
    """Its moments (first: stage, second: chunk)."""
    KEPT_FROZEN = "kept frozen"
    """Frozen tensors of a stage that stay from step to step (first: stage)."""
    GRADIENT = "gradient"
    """The gradients of a stage (first: stage)."""
    WAITING_GRADIENT = "waiting gradient"
    """The same in host memory, where a separate device has made them (first: stage)."""
    ACTIVATION = "activation"
    """A boundary activation (first: stage, second: micro-batch); in backward, its gradient."""
    LOWERED_ACTIVATION = "lowered activation"
    """The same in host memory, where a separate device has no room for it (first: stage, second: micro-batch)."""

    __hash__ = object.__hash__


class State(Enum):
    """What of an item is resident in a buffer of an upper tier, and who owns that buffer."""

    STORED = "stored"
    """Nothing is resident; its bytes are on NVMe (weights, states), or in scratch (activations, gradients)."""
    ABSENT = "absent"
    """An activation or gradient that does not exist yet, or any more, or an activation that waits in host memory, where
    it is another item. Nothing is resident."""
    FILLING = "filling"
    """The io and copy lanes own the buffer and bring its content from NVMe. Nobody may read it."""
    CLEAN = "clean"
    """The buffer holds what NVMe holds, or of an activation what its slot in host memory does; anyone may read it, and
    another item may take it."""
    BOUND = "bound"
    """As CLEAN, but modules compute with it: it may not be taken."""
    DIRTY = "dirty"
    """The buffer holds the only, or the newest, copy; the compute or optim lane owns it."""
    WRITING = "writing"
    """As DIRTY; the io lane reads it to write it to NVMe, so nobody may change it."""

    __hash__ = object.__hash__


class Item(NamedTuple):
    """Names one item."""

    kind: ItemKind
    first: int
    second: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.first}, {self.second})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Residency:
    """One line of the table: an item that is not simply where it is stored."""

    kind: str
    first: int
    second: int
    tier: str
    """Highest tier that holds it: the buffer's, or nvme."""
    state: str
    num_bytes: int
    buffer: int
    """Number of the buffer, counted per kind; -1 if it is in none."""

    def to_json(self) -> dict[str, Any]:
        """The line as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindStatistics:
    """Counters of one kind of items since the manager was made."""

    fills: int
    """Times that a buffer was filled from NVMe."""
    filled_bytes: int
    """Bytes of the items that were brought (in the form they have in the buffer)."""
    writes: int
    """Times that a buffer was written to NVMe. For activations and gradients: spills."""
    written_bytes: int
    hits: int
    """Weights: visits of a stage that found its weights resident."""
    misses: int
    """Weights: visits for which they had to be read."""
    evictions: int
    """Times that another item took the buffer, or that it became out of date."""
    saved_read_bytes: int
    """Bytes that need not be read from NVMe, since they were kept from the step before."""
    saved_written_bytes: int
    """Bytes that need not be written to NVMe, since they were kept; what commits wrote of them is taken off."""
    resident_bytes: int
    """Bytes of such items in buffers now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerStatistics:
    """A snapshot of the residency table's counters."""

    resident_bytes: Mapping[str, int]
    """Bytes of items per tier now, by the tier's name; for nvme, those of the items that only NVMe holds."""
    peak_bytes: Mapping[str, int]
    """Most bytes that were there at once."""
    kinds: Mapping[str, KindStatistics]
    """Counters by the kind's name."""
    num_moves: int
    """Moves noted so far."""


class Resident(NamedTuple):
    """One item that is in a buffer or in scratch: what :meth:`Manager.snapshot` copies."""

    item: Item
    state: State
    num_bytes: int
    in_buffer: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The whole table at one moment, in no order, for readers that add it up."""

    items: tuple[Resident, ...]
    stashed: Mapping[tuple[int, int], int]
    """Gradients that wait in scratch for a delayed update: bytes by stage and piece."""
    resident_bytes: Mapping[Tier, int]
    """As :attr:`ManagerStatistics.resident_bytes`."""
    peak_bytes: Mapping[Tier, int]


class _Record:
    """What is known of one item that is not just stored or absent."""

    __slots__ = ("buffer", "fresh", "num_bytes", "parts", "state")

    def __init__(self) -> None:
        self.state = State.ABSENT
        self.num_bytes = 0
        #: -1 unless it is in a buffer.
        self.buffer = -1
        #: Parts that a fill still lacks.
        self.parts = 0
        #: It was filled and nobody has used it since: its next use is a miss.
        self.fresh = False


class _Counters:
    """Mutable counters of one kind."""

    __slots__ = (
        "evictions", "filled_bytes", "fills", "hits", "misses", "saved_read_bytes", "saved_written_bytes", "writes",
        "written_bytes",
    )

    def __init__(self) -> None:
        self.fills = self.filled_bytes = self.writes = self.written_bytes = 0
        self.saved_read_bytes = self.saved_written_bytes = 0
        self.hits = self.misses = self.evictions = 0


#: Position of each kind and state among theirs, as a :class:`MoveLog` has them.
_KIND_INDEX = {kind: index for index, kind in enumerate(ItemKind)}
_STATE_INDEX = {state: index for index, state in enumerate(State)}
_RESIDENT = frozenset({State.FILLING, State.CLEAN, State.BOUND, State.DIRTY, State.WRITING})
#: Kinds whose bytes always are on NVMe too: no record is kept while they are only there.
_HOMED = frozenset(
    {ItemKind.WEIGHTS, ItemKind.STATES, ItemKind.KEPT_WEIGHTS, ItemKind.KEPT_MOMENTS, ItemKind.KEPT_FROZEN}
)


def _lowered(item: Item) -> Item:
    """The copy of an activation in host memory."""
    return Item(ItemKind.LOWERED_ACTIVATION, item.first, item.second)


class Manager:
    """Keeps the table. Every method may be called from any thread; each is one move, or refused as a whole.

    Buffers are numbered from 0 per kind of item; a buffer holds one item at a time. Methods raise ResidencyError, with
    the table unchanged and the item's recent moves in the message, on a move that its state does not allow.
    """

    def __init__(
        self, *, tiers: Mapping[ItemKind, Tier] | None = None, stored_bytes: int = 0, validate: bool = False
    ) -> None:
        """``tiers``: where the buffers of a kind are (default: host). ``stored_bytes``: bytes of the store's arrays.

        ``validate`` re-checks the whole table after every move.
        """
        self._tiers = {kind: (tiers or {}).get(kind, Tier.HOST) for kind in ItemKind}
        self._validate = validate
        self._lock = threading.Lock()
        #: Items that are in a buffer or in scratch; those of _HOMED kinds only while they are in a buffer.
        self._records: dict[Item, _Record] = {}
        #: Which item each buffer holds.
        self._holders: dict[ItemKind, dict[int, Item]] = {kind: {} for kind in ItemKind}
        self._counters = {kind: _Counters() for kind in ItemKind}
        #: Bytes in buffers, by kind.
        self._resident = dict.fromkeys(ItemKind, 0)
        #: Bytes in buffers by tier; for NVME, of what only NVMe holds of activations and gradients, and of the store.
        self._held = dict.fromkeys(Tier, 0)
        self._stored_bytes = self._held[Tier.NVME] = stored_bytes
        self._peaks = dict(self._held)
        #: Last moves: item, state before, state after, what was asked for.
        self._history: deque[tuple[Item, State, State, str]] = deque(maxlen=HISTORY_MOVES)
        self._num_moves = 0
        #: Gradients that wait in scratch for a delayed update: bytes by stage and piece.
        self._stashed: dict[tuple[int, int], int] = {}
        #: Moves since the last :meth:`swap_log`; None: nobody wants them.
        self._log: MoveLog | None = None

    # ------------------------------------------------------------------ moves

    def fill(self, item: Item, buffer: int, num_bytes: int, *, parts: int = 1) -> None:
        """STORED (or CLEAN in this very buffer) -> FILLING: it is being brought from NVMe in ``parts`` parts.

        What the buffer held is evicted, so that must be clean. With no part at all the item is CLEAN at once.
        """
        with self._lock:
            record = self._records.get(item)
            state = self._state(item, record)
            again = state is State.CLEAN and record is not None and record.buffer == buffer
            if not (state is State.STORED or again) or self._is_lowered(item):
                raise self._refuse(item, state, "fill")
            record = self._enter(item, record, buffer, num_bytes, "fill")
            record.parts, record.fresh = parts, True
            counters = self._counters[item.kind]
            counters.fills += 1
            counters.filled_bytes += num_bytes
            self._move(item, record, state, State.FILLING if parts else State.CLEAN, "fill")

    def filled(self, item: Item) -> None:
        """One part of a fill has arrived; with the last, FILLING -> CLEAN."""
        with self._lock:
            record = self._require(item, "filled", State.FILLING)
            record.parts -= 1
            if not record.parts:
                self._move(item, record, State.FILLING, State.CLEAN, "filled")

    def create(self, item: Item, buffer: int, num_bytes: int) -> None:
        """ABSENT -> DIRTY: a computation has made it in a buffer. What that held is evicted, so it must be clean."""
        with self._lock:
            record = self._records.get(item)
            state = self._state(item, record)
            if record is not None or state is not State.ABSENT or self._is_lowered(item):
                raise self._refuse(item, state, "create")
            record = self._enter(item, record, buffer, num_bytes, "create")
            self._move(item, record, state, State.DIRTY, "create")

    def bind(self, item: Item) -> bool:
        """CLEAN -> BOUND; True if it was resident already (a hit), False if it was filled for this use (a miss)."""
        with self._lock:
            record = self._require(item, "bind", State.CLEAN)
            hit = not record.fresh
            record.fresh = False
            if hit:
                self._counters[item.kind].hits += 1
            else:
                self._counters[item.kind].misses += 1
            self._move(item, record, State.CLEAN, State.BOUND, "bind")
            return hit

    def unbind(self, item: Item) -> None:
        """BOUND -> CLEAN."""
        with self._lock:
            self._move(item, self._require(item, "unbind", State.BOUND), State.BOUND, State.CLEAN, "unbind")

    def need(self, item: Item, buffer: int) -> None:
        """No move: it must be readable in ``buffer`` now (CLEAN, BOUND, DIRTY or WRITING)."""
        with self._lock:
            record = self._records.get(item)
            if record is None or record.buffer != buffer or record.state is State.FILLING:
                raise self._refuse(item, self._state(item, record), f"read from buffer {buffer}")

    def modify(self, item: Item, *, num_bytes: int | None = None) -> None:
        """CLEAN or DIRTY -> DIRTY: its buffer has got new content, of ``num_bytes`` if these are others than before."""
        with self._lock:
            record = self._require(item, "modify", State.CLEAN, State.DIRTY)
            self._forget_lowered(item)
            if num_bytes is not None:
                self._count(item.kind, record.buffer, num_bytes - record.num_bytes)
                record.num_bytes = num_bytes
            self._move(item, record, record.state, State.DIRTY, "modify")

    def refresh(self, item: Item) -> None:
        """CLEAN stays CLEAN: the optimizer has put new values into the buffer that go to NVMe as states too."""
        with self._lock:
            self._move(item, self._require(item, "refresh", State.CLEAN), State.CLEAN, State.CLEAN, "refresh")

    def expire(self, item: Item) -> None:
        """What NVMe will hold is newer than the buffer: CLEAN -> STORED. Nothing to do if STORED or FILLING."""
        with self._lock:
            record = self._records.get(item)
            if record is None or record.state in (State.FILLING, State.STORED):
                return
            self._require(item, "expire", State.CLEAN)
            self._evict(item, record, "expire")
            if self._validate:
                self._check()

    def write(self, item: Item) -> None:
        """DIRTY -> WRITING: it is being written to NVMe; or CLEAN, for a copy in host memory, which then goes."""
        with self._lock:
            record = self._require(item, "write", State.DIRTY, *((State.CLEAN,) if self._is_lowered(item) else ()))
            self._forget_lowered(item)
            self._move(item, record, record.state, State.WRITING, "write")

    def written(self, item: Item, num_bytes: int) -> None:
        """WRITING -> CLEAN, after ``num_bytes`` have been written."""
        with self._lock:
            record = self._require(item, "written", State.WRITING)
            counters = self._counters[item.kind]
            counters.writes += 1
            counters.written_bytes += num_bytes
            self._move(item, record, State.WRITING, State.CLEAN, "written")

    def discard(self, item: Item) -> None:
        """CLEAN, DIRTY or STORED in scratch -> ABSENT: an activation or gradient that is not needed any more."""
        with self._lock:
            record = self._require(item, "discard", State.CLEAN, State.DIRTY, State.STORED)
            self._forget_lowered(item)
            before = record.state
            self._leave(item, record)
            del self._records[item]
            self._move(item, record, before, State.ABSENT, "discard")

    def lower(self, item: Item, buffer: int, num_bytes: int) -> None:
        """An activation has been copied to a buffer of host memory: it is CLEAN, and a LOWERED_ACTIVATION is DIRTY.

        It must be DIRTY, or CLEAN for another copy there, which goes. What that buffer held must be the copy of an
        activation that is in a buffer itself, and DIRTY from now on.
        """
        with self._lock:
            if item.kind is not ItemKind.ACTIVATION:
                raise self._refuse(item, self._state(item, self._records.get(item)), "lower")
            record = self._require(item, "lower", State.DIRTY, *((State.CLEAN,) if self._is_lowered(item) else ()))
            lowered = _lowered(item)
            holder = self._holders[lowered.kind].get(buffer)
            if holder is not None and holder != lowered:
                above = Item(item.kind, *holder[1:])
                held = self._records.get(above)
                if held is None or held.state is not State.CLEAN:
                    raise self._refuse(holder, State.DIRTY, f"lower of {item}, which takes its buffer {buffer}")
                self._forget_lowered(above)
                self._move(above, held, State.CLEAN, State.DIRTY, "lose its copy")
            self._forget_lowered(item)
            copy = self._enter(lowered, None, buffer, num_bytes, "lower")
            self._move(lowered, copy, State.ABSENT, State.DIRTY, "lower")
            self._move(item, record, record.state, State.CLEAN, "lower")

    def lift(self, item: Item, buffer: int, num_bytes: int) -> None:
        """An activation has been copied from host memory into ``buffer``: ABSENT (or CLEAN in another one) -> CLEAN.

        The copy there stays. What the buffer held is evicted, so it must be clean.
        """
        with self._lock:
            record = self._records.get(item)
            state = self._state(item, record)
            if not self._is_lowered(item) or state not in (State.ABSENT, State.CLEAN):
                raise self._refuse(item, state, "lift")
            self._check_takeable(item, buffer, "lift")
            if record is not None:
                self._evict(item, record, "expire")  # nobody may have taken its former buffer yet
            record = self._enter(item, None, buffer, num_bytes, "lift")
            self._move(item, record, State.ABSENT, State.CLEAN, "lift")

    def save(self, kind: ItemKind, *, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """No move: so many bytes were not transferred, because they were kept (less than 0: a commit wrote them)."""
        with self._lock:
            self._counters[kind].saved_read_bytes += read_bytes
            self._counters[kind].saved_written_bytes += written_bytes

    def stash(self, stage: int, piece: int, num_bytes: int) -> None:
        """The gradient of one piece has come to scratch, where it waits for its delayed update. Not again before
        :meth:`unstash`, else ResidencyError. The log has it as an item of its own, whose second number is 1 + piece
        (the gradient in its buffer has 0).
        """
        with self._lock:
            if (stage, piece) in self._stashed:
                raise ResidencyError(f"gradient of stage {stage}, piece {piece}: stashed while one is waiting")
            self._stashed[stage, piece] = num_bytes
            self._count(ItemKind.GRADIENT, -1, num_bytes)
            if self._log is not None:
                self._note(self._log, ItemKind.GRADIENT, stage, 1 + piece, State.STORED, False, num_bytes)

    def unstash(self, stage: int, piece: int) -> None:
        """That update has been made: the waiting gradient is not needed any more. ResidencyError if there is none."""
        with self._lock:
            if (stage, piece) not in self._stashed:
                raise ResidencyError(f"gradient of stage {stage}, piece {piece}: none is waiting")
            num_bytes = self._stashed.pop((stage, piece))
            self._count(ItemKind.GRADIENT, -1, -num_bytes)
            if self._log is not None:
                self._note(self._log, ItemKind.GRADIENT, stage, 1 + piece, State.ABSENT, False, 0)

    # ------------------------------------------------------------------ questions

    def state(self, item: Item) -> State:
        """The item's state now."""
        with self._lock:
            return self._state(item, self._records.get(item))

    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of items now, in the tiers' order; for every op's end, so without the lock: tiers between which an item
        moves may be seen before and after it, and each has held what is said of it.
        """
        return tuple(self._held.values())

    def table(self) -> tuple[Residency, ...]:
        """Every item that is in a buffer or in scratch; weights and states that are not listed are on NVMe alone."""
        with self._lock:
            return tuple(
                Residency(
                    kind=item.kind.value,
                    first=item.first,
                    second=item.second,
                    tier=(self._tiers[item.kind] if record.buffer >= 0 else Tier.NVME).value,
                    state=record.state.value,
                    num_bytes=record.num_bytes,
                    buffer=record.buffer,
                )
                for item, record in sorted(self._records.items(), key=lambda pair: (pair[0].kind.value, pair[0][1:]))
            )

    def snapshot(self) -> Snapshot:
        """The table in one pass, for whoever adds it up: under a microsecond an item."""
        with self._lock:
            return self._snapshot()

    def swap_log(self) -> tuple[MoveLog | None, Snapshot]:
        """Begin a new log of moves; returns the one before (None the first time), and what was where at the turn."""
        fresh = MoveLog()
        with self._lock:
            log, self._log = self._log, fresh
            return log, self._snapshot()

    def statistics(self) -> ManagerStatistics:
        """A snapshot of the counters."""
        with self._lock:
            return ManagerStatistics(
                resident_bytes={tier.value: num_bytes for tier, num_bytes in self._held.items()},
                peak_bytes={tier.value: num_bytes for tier, num_bytes in self._peaks.items()},
                kinds={
                    kind.value: KindStatistics(
                        fills=counters.fills,
                        filled_bytes=counters.filled_bytes,
                        writes=counters.writes,
                        written_bytes=counters.written_bytes,
                        hits=counters.hits,
                        misses=counters.misses,
                        evictions=counters.evictions,
                        saved_read_bytes=counters.saved_read_bytes,
                        saved_written_bytes=counters.saved_written_bytes,
                        resident_bytes=self._resident[kind],
                    )
                    for kind, counters in self._counters.items()
                },
                num_moves=self._num_moves,
            )

    # ------------------------------------------------------------------ the lock is held below

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            items=tuple(
                [
                    Resident(item, record.state, record.num_bytes, record.buffer >= 0)
                    for item, record in self._records.items()
                ]
            ),
            stashed=dict(self._stashed),
            resident_bytes=dict(self._held),
            peak_bytes=dict(self._peaks),
        )

    def _state(self, item: Item, record: _Record | None) -> State:
        if record is not None:
            return record.state
        return State.STORED if item.kind in _HOMED else State.ABSENT

    def _require(self, item: Item, asked: str, *allowed: State) -> _Record:
        record = self._records.get(item)
        if record is None or record.state not in allowed:
            raise self._refuse(item, self._state(item, record), asked)
        return record

    def _enter(self, item: Item, record: _Record | None, buffer: int, num_bytes: int, asked: str) -> _Record:
        """Give the item the buffer and evict what that held."""
        holder = self._check_takeable(item, buffer, asked)
        if holder is not None:
            self._evict(holder, self._records[holder], "evict")
        if record is None:
            record = self._records[item] = _Record()
        else:
            self._count(item.kind, record.buffer, -record.num_bytes)
        record.buffer, record.num_bytes = buffer, num_bytes
        self._holders[item.kind][buffer] = item
        self._count(item.kind, buffer, num_bytes)
        return record

    def _check_takeable(self, item: Item, buffer: int, asked: str) -> Item | None:
        """The other item that a buffer holds, if any: a clean one."""
        holder = self._holders[item.kind].get(buffer)
        if holder is None or holder == item:
            return None
        held = self._records[holder]
        if held.state is not State.CLEAN:
            raise self._refuse(holder, held.state, f"{asked} of {item}, which takes its buffer {buffer}")
        return holder

    def _count(self, kind: ItemKind, buffer: int, num_bytes: int) -> None:
        """Bytes that come to, or leave, a buffer (-1: scratch)."""
        if buffer < 0:
            tier = Tier.NVME
        else:
            tier = self._tiers[kind]
            self._resident[kind] += num_bytes
        total = self._held[tier] = self._held[tier] + num_bytes
        if total > self._peaks[tier]:
            self._peaks[tier] = total

    def _leave(self, item: Item, record: _Record) -> None:
        """Take the item out of its buffer, or out of scratch."""
        self._count(item.kind, record.buffer, -record.num_bytes)
        if record.buffer >= 0:
            del self._holders[item.kind][record.buffer]
            record.buffer = -1

    def _evict(self, item: Item, record: _Record, asked: str) -> None:
        """A clean item loses its buffer: NVMe has it, or a buffer in host memory."""
        self._leave(item, record)
        self._counters[item.kind].evictions += 1
        after = State.ABSENT if self._is_lowered(item) else State.STORED
        self._history.append((item, record.state, after, asked))
        self._num_moves += 1
        record.state = after
        if after is State.ABSENT or item.kind in _HOMED:
            del self._records[item]
        else:
            self._count(item.kind, -1, record.num_bytes)
        if self._log is not None:
            num_bytes = 0 if after is State.ABSENT else record.num_bytes
            self._note(self._log, item.kind, item.first, item.second, after, False, num_bytes)

    def _is_lowered(self, item: Item) -> bool:
        """An activation of which host memory has a copy below that of a device, or the only one."""
        return item.kind is ItemKind.ACTIVATION and _lowered(item) in self._records

    def _forget_lowered(self, item: Item) -> None:
        """That copy, if there is one, is worth nothing any more; the caller sees to the state of ``item``."""
        if not self._is_lowered(item):
            return
        lowered = _lowered(item)
        record = self._records[lowered]
        self._leave(lowered, record)
        del self._records[lowered]
        self._move(lowered, record, State.DIRTY, State.ABSENT, "forget")

    @staticmethod
    def _note(
        log: MoveLog, kind: ItemKind, first: int, second: int, state: State, in_buffer: bool, num_bytes: int
    ) -> None:
        log.note(perf_counter(), _KIND_INDEX[kind], first, second, _STATE_INDEX[state], in_buffer, num_bytes)

    def _move(self, item: Item, record: _Record, before: State, after: State, asked: str) -> None:
        record.state = after
        self._history.append((item, before, after, asked))
        self._num_moves += 1
        if self._log is not None:
            num_bytes = 0 if after is State.ABSENT else record.num_bytes
            self._note(self._log, item.kind, item.first, item.second, after, record.buffer >= 0, num_bytes)
        if self._validate:
            self._check()

    def _refuse(self, item: Item, state: State, asked: str) -> ResidencyError:
        moves = [
            f"{move}: {before.value} -> {after.value}" for other, before, after, move in self._history if other == item
        ]
        recent = "; ".join(moves[-SHOWN_MOVES:]) or "none remembered"
        return ResidencyError(f"{item} is {state.value}: not allowed: {asked}. Its last moves: {recent}")

    def _check(self) -> None:
        """The table agrees with itself. Raises ResidencyError naming what does not."""
        resident = dict.fromkeys(ItemKind, 0)
        scratch = 0
        for item, record in self._records.items():
            if (record.buffer >= 0) != (record.state in _RESIDENT):
                raise ResidencyError(f"{item}: state {record.state.value} does not go with buffer {record.buffer}")
            if record.buffer >= 0:
                resident[item.kind] += record.num_bytes
                if self._holders[item.kind].get(record.buffer) != item:
                    raise ResidencyError(f"{item}: buffer {record.buffer} has another holder")
            else:
                scratch += record.num_bytes
                if item.kind in _HOMED or record.state is not State.STORED:
                    raise ResidencyError(f"{item}: kept in the table although it is {record.state.value}")
            if (record.state is State.FILLING) != (record.parts > 0):
                raise ResidencyError(f"{item}: {record.parts} parts are missing although it is {record.state.value}")
        for kind, holders in self._holders.items():
            for buffer, item in holders.items():
                if item not in self._records:
                    raise ResidencyError(f"{kind.value} buffer {buffer}: its holder {item} has no record")
        held = dict.fromkeys(Tier, 0)
        held[Tier.NVME] = self._stored_bytes + scratch + sum(self._stashed.values())
        for kind, num_bytes in resident.items():
            held[self._tiers[kind]] += num_bytes
        if resident != self._resident or held != self._held:
            raise ResidencyError(f"bytes: counted {self._resident}, {self._held}; found {resident}, {held}")
