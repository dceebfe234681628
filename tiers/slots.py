"""Which of its two slots each chunk is read from and written to. Pure state: no files, no threads.

`store.py` turns slots into paths and guards the table; `commit.py` makes a commit durable before the table hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

_NONE = 0xFF


class ChunkState(Enum):
    """Where the newest version of a chunk is."""

    ABSENT = "absent"
    """Nowhere: the store is new and the chunk was not yet written."""
    COMMITTED = "committed"
    """In the slot that the last commit names; the other slot holds nothing of value."""
    WRITING = "writing"
    """A write into the other slot has begun and is not finished; reads still go to the version before."""
    WRITTEN = "written"
    """In the other slot, complete; the next commit publishes it. Until then the committed version stays too."""


class SlotTable:
    """The slot rule: read where last written, write where the last commit does not point, publish the last written.

    A chunk written twice between two commits overwrites its own uncommitted version, in place, piece by piece.
    """

    def __init__(self, num_chunks: Sequence[int], committed: Sequence[str] | None = None) -> None:
        if committed is not None and [len(digits) for digits in committed] != list(num_chunks):
            got = [len(digits) for digits in committed]
            raise ValueError(f"slots: expected {list(num_chunks)} chunks per stage, got {got}")
        #: Per stage and chunk, the slot that the last commit names; 1 before the first: slot 0 is written first.
        self._committed = [bytearray([1]) * count for count in num_chunks]
        #: Slot of the newest complete version; _NONE if there is none.
        self._newest = [bytearray([_NONE]) * count for count in num_chunks]
        #: 1 while a write into the uncommitted slot is unfinished.
        self._writing = [bytearray(count) for count in num_chunks]
        if committed is not None:
            self._committed = [bytearray(int(digit) for digit in digits) for digits in committed]
            self._newest = [bytearray(slots) for slots in self._committed]

    def state(self, stage: int, chunk: int) -> ChunkState:
        """The chunk's state. Raises IndexError if there is no such chunk, as all methods do."""
        self._check(stage, chunk)
        newest = self._newest[stage][chunk]
        if self._writing[stage][chunk]:
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

    def begin_write(self, stage: int, chunk: int) -> int:
        """Slot to write to; the same until the write ends, however often it is asked for."""
        self._check(stage, chunk)
        self._writing[stage][chunk] = 1
        return 1 - self._committed[stage][chunk]

    def end_write(self, stage: int, chunk: int) -> None:
        """The chunk has been written whole. Raises RuntimeError if no write had begun."""
        self._check(stage, chunk)
        if not self._writing[stage][chunk]:
            raise RuntimeError(f"stage {stage} chunk {chunk}: noted as written, but no write had begun")
        self._writing[stage][chunk] = 0
        self._newest[stage][chunk] = 1 - self._committed[stage][chunk]

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

    def committed_slot(self, stage: int, chunk: int) -> int:
        """Slot that the last commit names; meaningless before the first."""
        self._check(stage, chunk)
        return self._committed[stage][chunk]

    def _check(self, stage: int, chunk: int) -> None:
        if not (0 <= stage < len(self._committed) and 0 <= chunk < len(self._committed[stage])):
            raise IndexError(f"stage {stage} chunk {chunk}: the store has no such chunk")
