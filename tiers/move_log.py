"""Remembers the moves of the residency table for a while: compact, bounded, and for `scheduler/timeline.py` to tell.

`manager.py` notes them under its lock. Nothing here knows what a move means.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

#: Moves that are kept at most; later ones are left out, and that is said.
MAX_MOVES = 32 * 1024
#: What one takes.
MOVE_BYTES = 8 + 8 + 4 + 4 + 1 + 1 + 1


@dataclass(slots=True)
class MoveLog:
    """Columns of equal length, one entry a move, in the order of time: :data:`MOVE_BYTES` each."""

    max_moves: int = MAX_MOVES
    times: array[float] = field(default_factory=lambda: array("d"))
    """``time.perf_counter()`` seconds."""
    num_bytes: array[int] = field(default_factory=lambda: array("q"))
    """Bytes of the item."""
    first: array[int] = field(default_factory=lambda: array("i"))
    second: array[int] = field(default_factory=lambda: array("i"))
    """The item's two numbers."""
    kinds: array[int] = field(default_factory=lambda: array("B"))
    """Position of its kind among the kinds."""
    states: array[int] = field(default_factory=lambda: array("B"))
    """Position of its new state among the states."""
    in_buffer: array[int] = field(default_factory=lambda: array("B"))
    """1 if it now is in a buffer."""
    truncated: bool = False
    """There were more than :attr:`max_moves`."""

    def __len__(self) -> int:
        return len(self.times)

    def note(
        self, time: float, kind: int, first: int, second: int, state: int, in_buffer: bool, num_bytes: int
    ) -> None:
        """Add a move, unless the log is full."""
        if len(self.times) >= self.max_moves:
            self.truncated = True
            return
        self.times.append(time)
        self.kinds.append(kind)
        self.first.append(first)
        self.second.append(second)
        self.states.append(state)
        self.in_buffer.append(in_buffer)
        self.num_bytes.append(num_bytes)
