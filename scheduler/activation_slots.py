"""Which boundary activation is in which slot at each point of a step, and which wait in host memory or in scratch.

Pure functions of a plan's visits; the ops that move activations are `plan_builder.py`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hoist.scheduler.visits import Phase, Visit, computations, touched

#: Input and output of the micro-batch that computes, and of one that is fetched or spilled meanwhile.
MIN_ACTIVATION_SLOTS = 4
#: The stage below it, and the micro-batch.
Boundary = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One boundary activation is copied from its slot to where it will wait, or comes from there into a slot."""

    boundary: Boundary
    slot: int
    comes: bool
    host_slot: int
    """Slot in host memory at the other end; -1: scratch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a schedule says of one computation."""

    moves: tuple[Move, ...]
    """What is moved before it, in this order; the last of them are for the computation after it."""
    slots: tuple[int, ...]
    """Slots of what it touches, in the order of :func:`touched`."""
    ends_input: bool
    """Nothing needs its input after it."""


def schedule(visits: Sequence[Visit], num_slots: int, num_host_slots: int = 0) -> tuple[Turn, ...]:
    """A turn for each of the visits' computations. Raises ValueError if the slots are too few.

    Every future use is known. When a slot is needed and none is free, the activation whose next use is furthest away
    gives its own (Belady's rule). It then waits in one of ``num_host_slots`` in host memory; where more wait at once
    than these hold, those that come back last wait in scratch instead, so that the fewest do. A copy that is still good
    is not made again.
    """
    walk = _Walk(visits, num_slots)
    walked = list(walk.turns())
    _choose(walk.stays, num_host_slots)
    copies = _Copies(walk, num_host_slots)
    turns = []
    for position, step in enumerate(walked):
        moves = [move for event in step.events if (move := copies.move(event, position)) is not None]
        for boundary in step.stale:
            copies.forget(boundary)
        turns.append(Turn(moves=tuple(moves), slots=step.slots, ends_input=step.ends_input))
    return tuple(turns)


@dataclass(eq=False, kw_only=True, slots=True)
class _Stay:
    """A time that an activation is in no slot, in numbers of events."""

    boundary: Boundary
    version: int
    """How often its content had changed before."""
    slot: int
    """The one that it gave."""
    start: int
    end: int = 2**62
    in_host: bool = False
    """It waits in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    """A stay begins, or ends in ``slot``."""

    stay: _Stay
    slot: int
    ends: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walked:
    """As a :class:`Turn`, before it is known where activations wait."""

    events: tuple[_Event, ...]
    slots: tuple[int, ...]
    ends_input: bool
    stale: tuple[Boundary, ...]
    """Copies of these are worth nothing afterwards: they have got new content, or are not needed any more."""


class _Walk:
    """Gives slots to activations, computation by computation."""

    def __init__(self, visits: Sequence[Visit], num_slots: int) -> None:
        self.stays: list[_Stay] = []
        self._computations = list(computations(visits))
        self._free = list(range(num_slots))[::-1]
        self._slot_of: dict[Boundary, int] = {}
        #: Those that are in no slot.
        self._away: dict[Boundary, _Stay] = {}
        self._versions: dict[Boundary, int] = {}
        self._num_events = 0
        self._uses: dict[Boundary, list[int]] = {}
        for position, (visit, micro_batch) in enumerate(self._computations):
            for boundary in touched(visit, micro_batch):
                self._uses.setdefault(boundary, []).append(position)

    def next_use(self, boundary: Boundary, position: int) -> int:
        """Position of the first use at or after ``position``; very large if there is none."""
        return next((use for use in self._uses[boundary] if use >= position), 2**62)

    def turns(self) -> Iterator[_Walked]:
        for position, (visit, micro_batch) in enumerate(self._computations):
            boundaries = touched(visit, micro_batch)
            events = [event for boundary in boundaries for event in self._bring(boundary, position, boundaries)]
            slots = tuple(self._slot_of[boundary] for boundary in boundaries)
            events += self._bring_ahead(position, boundaries)
            # No backward comes back to it, and what a first trained stage would give it nobody wants.
            ends_input = visit.stage > 0 and self._uses[boundaries[0]][-1] <= position
            stale = []
            if visit.stage > 0 and visit.phase in (Phase.LOSS, Phase.BACKWARD):
                # The gradient of a stage's input takes the place of that input.
                self._versions[boundaries[0]] = self._versions.get(boundaries[0], 0) + 1
                stale.append(boundaries[0])
            if visit.phase is Phase.BACKWARD:
                self._drop(boundaries[-1])
                stale.append(boundaries[-1])
            if ends_input:
                self._drop(boundaries[0])
                stale.append(boundaries[0])
            yield _Walked(events=tuple(events), slots=slots, ends_input=ends_input, stale=tuple(stale))

    def _bring_ahead(self, position: int, current: Collection[Boundary]) -> Iterator[_Event]:
        """What the next computation needs comes while this one runs, where it need not displace what either needs."""
        if position + 1 < len(self._computations):
            upcoming = touched(*self._computations[position + 1])
            for boundary in upcoming:
                if boundary in self._away:
                    yield from self._bring(boundary, position, (*current, *upcoming))

    def _bring(self, boundary: Boundary, position: int, pinned: Collection[Boundary]) -> Iterator[_Event]:
        """Give an activation a slot, if it has none, and its content, if it has any."""
        if boundary in self._slot_of:
            return
        if self._free:
            slot = self._free.pop()
        else:
            candidates = [other for other in self._slot_of if other not in pinned]
            if not candidates:
                raise ValueError(
                    f"activation slots: {len(self._slot_of)} are too few; at least {MIN_ACTIVATION_SLOTS} are needed"
                )
            victim = max(candidates, key=lambda other: (self.next_use(other, position), other))
            slot = self._slot_of.pop(victim)
            self._num_events += 1
            stay = _Stay(
                boundary=victim, version=self._versions.get(victim, 0), slot=slot, start=self._num_events
            )
            self._away[victim] = stay
            self.stays.append(stay)
            yield _Event(stay=stay, slot=slot, ends=False)
        self._slot_of[boundary] = slot
        if boundary in self._away:
            stay = self._away.pop(boundary)
            self._num_events += 1
            stay.end = self._num_events
            yield _Event(stay=stay, slot=slot, ends=True)

    def _drop(self, boundary: Boundary) -> None:
        self._free.append(self._slot_of.pop(boundary))


def _choose(stays: Sequence[_Stay], num_host_slots: int) -> None:
    """Decide which of the stays, given by their start, are in host memory: as many as its slots can hold.

    What has waited in scratch does so again until it changes: there it costs a read alone.
    """
    in_scratch: set[tuple[Boundary, int]] = set()
    num_there = 0
    #: Those in host memory by their end: the first to leave, and the last, some of which have left.
    first: list[tuple[int, int, _Stay]] = []
    last: list[tuple[int, int, _Stay]] = []
    for stay in stays if num_host_slots else ():
        while first and first[0][0] < stay.start:
            num_there -= heappop(first)[-1].in_host
        if (stay.boundary, stay.version) in in_scratch:
            continue
        stay.in_host = True
        num_there += 1
        heappush(first, (stay.end, stay.start, stay))
        heappush(last, (-stay.end, stay.start, stay))
        if num_there > num_host_slots:
            left_out = heappop(last)[-1]
            left_out.in_host = False
            num_there -= 1
            in_scratch.add((left_out.boundary, left_out.version))


class _Copies:
    """Knows where there is a copy of an activation's newest content, and gives out slots in host memory."""

    def __init__(self, walk: _Walk, num_host_slots: int) -> None:
        self._walk = walk
        #: The one that was freed first is taken first: it has been left for longest.
        self._free = deque(range(num_host_slots))
        #: Copies in host memory of what waits there alone, and of what is in a slot too.
        self._waiting: dict[Boundary, int] = {}
        self._spare: dict[Boundary, int] = {}
        self._in_scratch: set[Boundary] = set()

    def move(self, event: _Event, position: int) -> Move | None:
        """What must be moved at this event, if anything."""
        stay = event.stay
        boundary = stay.boundary
        host_slot = -1
        if event.ends:
            if stay.in_host:
                host_slot = self._spare[boundary] = self._waiting.pop(boundary)
        elif stay.in_host:
            if boundary in self._spare:
                self._waiting[boundary] = self._spare.pop(boundary)
                return None
            host_slot = self._waiting[boundary] = self._take(position)
        else:
            if boundary in self._in_scratch:
                return None
            self._free_spare(boundary)
            self._in_scratch.add(boundary)
        return Move(boundary=boundary, slot=event.slot, comes=event.ends, host_slot=host_slot)

    def forget(self, boundary: Boundary) -> None:
        """Copies of it, which is in a slot, are not good any more."""
        self._in_scratch.discard(boundary)
        self._free_spare(boundary)

    def _free_spare(self, boundary: Boundary) -> None:
        if boundary in self._spare:
            self._free.append(self._spare.pop(boundary))

    def _take(self, position: int) -> int:
        """A slot in host memory: a free one, or that of a copy which is likely to change before it is of use."""
        if self._free:
            return self._free.popleft()
        return self._spare.pop(min(self._spare, key=lambda other: (self._walk.next_use(other, position), other)))
