"""Which of its slots each chunk is read from and written to. Pure state: no files, no threads.

`store.py` turns slots into paths and guards the table; `commit.py` makes a commit durable before the table hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

#: Two versions must find room at once: the committed one and the next.
MIN_SLOTS = 2
_NONE = 0xFF


class ChunkState(Enum):
    """Where the newest version of a chunk is."""

    ABSENT = "absent"
    """Nowhere: the store is new and the chunk was not yet written."""
    COMMITTED = "committed"
    """In the slot that the last commit names."""
    WRITING = "writing"
    """A write into another slot has begun and is not finished; reads still go to the version before."""
    WRITTEN = "written"
    """In another slot, complete; the next commit publishes it. Until then the committed version stays too."""


class SlotTable:
    """The slot rule: read where last written, write where the last commit does not point, publish the last written.

    With a slot to spare the version before the newest stays too, until the chunk is written again. With two slots, a
    chunk written twice between two commits overwrites its own uncommitted version, in place, piece by piece.
    """

    def __init__(
        self, num_chunks: Sequence[int], committed: Sequence[str] | None = None, *, num_slots: int = MIN_SLOTS
    ) -> None:
        """``committed``: per stage a digit a chunk, from the last commit; None for a new store.

        Raises ValueError if they are of another number of chunks or name a slot that is not there.
        """
        if num_slots < MIN_SLOTS:
            raise ValueError(f"num_slots: {num_slots} are too few; at least {MIN_SLOTS} are needed")
        if committed is not None and [len(digits) for digits in committed] != list(num_chunks):
            got = [len(digits) for digits in committed]
            raise ValueError(f"slots: expected {list(num_chunks)} chunks per stage, got {got}")
        self.num_slots = num_slots
        #: Per stage and chunk, the slot that the last commit names; the last one before the first commit.
        self._committed = [bytearray([num_slots - 1]) * count for count in num_chunks]
        #: Slot of the newest complete version; _NONE if there is none.
        self._newest = [bytearray([_NONE]) * count for count in num_chunks]
        #: Slot of the version before the newest, if it is still whole; else, and during a write, _NONE.
        self._previous = [bytearray([_NONE]) * count for count in num_chunks]
        #: Slot of an unfinished write; else _NONE.
        self._writing = [bytearray([_NONE]) * count for count in num_chunks]
        if committed is not None:
            if any(int(digit) >= num_slots for digits in committed for digit in digits):
                raise ValueError(f"slots: a digit is not below {num_slots}, the slots that the store has")
            self._committed = [bytearray(int(digit) for digit in digits) for digits in committed]
            self._newest = [bytearray(slots) for slots in self._committed]

    def state(self, stage: int, chunk: int) -> ChunkState:
        """The chunk's state. Raises IndexError if there is no such chunk, as all methods do."""
        self._check(stage, chunk)
        newest = self._newest[stage][chunk]
        if self._writing[stage][chunk] != _NONE:
            return ChunkState.WRITING
        if newest == _NONE:
            return ChunkState.ABSENT
        return ChunkState.COMMITTED if newest == self._committed[stage][chunk] else ChunkState.WRITTEN

    def read_slot(self, stage: int, chunk: int) -> int:
        """Slot of the newest complete version. Raises RuntimeError if the chunk was never written."""
        self._check(stage, chunk)
        newest = self._newest[stage][chunk]
        if newest == _NONE:
            raise RuntimeError(f"stage {stage} chunk {chunk}: read before it was ever written")
        return newest

    def previous_slot(self, stage: int, chunk: int) -> int:
        """Slot of the version before the newest. Raises RuntimeError if that has been overwritten."""
        self._check(stage, chunk)
        previous = self._previous[stage][chunk]
        if previous == _NONE:
            raise RuntimeError(f"stage {stage} chunk {chunk}: the version before the newest is not kept")
        return previous

    def begin_write(self, stage: int, chunk: int, *, again: bool = False) -> int:
        """Slot to write the next version to; the same until the write ends, however often it is asked for.

        ``again``: write the newest version once more, in its place; only an uncommitted one, else RuntimeError.
        """
        self._check(stage, chunk)
        if self._writing[stage][chunk] != _NONE:
            return self._writing[stage][chunk]
        newest, committed = self._newest[stage][chunk], self._committed[stage][chunk]
        if again:
            if newest in (_NONE, committed):
                raise RuntimeError(f"stage {stage} chunk {chunk}: its newest version is committed and must not change")
            slot = newest
        else:
            free = [slot for slot in range(self.num_slots) if slot != committed]
            slot = next((slot for slot in free if slot != newest), free[0])
            self._previous[stage][chunk] = _NONE
        self._writing[stage][chunk] = slot
        return slot

    def end_write(self, stage: int, chunk: int) -> None:
        """The chunk has been written whole. Raises RuntimeError if no write had begun."""
        self._check(stage, chunk)
        slot = self._writing[stage][chunk]
        if slot == _NONE:
            raise RuntimeError(f"stage {stage} chunk {chunk}: noted as written, but no write had begun")
        self._writing[stage][chunk] = _NONE
        if slot != self._newest[stage][chunk]:
            self._previous[stage][chunk] = self._newest[stage][chunk]
            self._newest[stage][chunk] = slot

    def chunks_in(self, *states: ChunkState) -> list[tuple[int, int]]:
        """Stage and number of every chunk in one of ``states``, in order."""
        return [
            (stage, chunk)
            for stage, slots in enumerate(self._committed)
            for chunk in range(len(slots))
            if self.state(stage, chunk) in states
        ]

    def newest_slots(self) -> tuple[str, ...]:
        """What a commit would publish: per stage a digit a chunk.

        Raises RuntimeError if a chunk is absent or half-written.
        """
        unready = self.chunks_in(ChunkState.ABSENT, ChunkState.WRITING)
        if unready:
            stage, chunk = unready[0]
            raise RuntimeError(
                f"stage {stage} chunk {chunk}: is {self.state(stage, chunk).value}, cannot commit "
                f"({len(unready)} such chunks)"
            )
        return tuple("".join(map(str, slots)) for slots in self._newest)

    def published(self) -> None:
        """A commit of :meth:`newest_slots` is durable: the slots that it does not name are free."""
        self._committed = [bytearray(slots) for slots in self._newest]

    def _check(self, stage: int, chunk: int) -> None:
        if not (0 <= stage < len(self._committed) and 0 <= chunk < len(self._committed[stage])):
            raise IndexError(f"stage {stage} chunk {chunk}: the store has no such chunk")
