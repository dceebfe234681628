"""Which boundary activation is in which slot at each point of a step, and which wait in scratch.

Pure functions of a plan's visits; the ops that move activations are `plan_builder.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from hoist.scheduler.visits import Visit, computations, touched

#: Input and output of the micro-batch that computes, and of one that is fetched or spilled meanwhile.
MIN_ACTIVATION_SLOTS = 4


class ActivationSlots:
    """Decides, knowing every future use, which boundary activation is in which slot and which wait in scratch.

    Belady's rule: when a slot is needed and none is free, the activation whose next use is furthest away is spilled.
    """

    def __init__(self, visits: Sequence[Visit], num_slots: int) -> None:
        self.free = list(range(num_slots))[::-1]
        self.slot_of: dict[tuple[int, int], int] = {}
        self.spilled: set[tuple[int, int]] = set()
        #: Scratch holds what they are now: losing their slot costs no write.
        self.saved: set[tuple[int, int]] = set()
        self.ever_spilled: set[tuple[int, int]] = set()
        self._uses: dict[tuple[int, int], list[int]] = {}
        for position, (visit, micro_batch) in enumerate(computations(visits)):
            for boundary in touched(visit, micro_batch):
                self._uses.setdefault(boundary, []).append(position)

    def next_use(self, boundary: tuple[int, int], position: int) -> int:
        """Position of the first use at or after ``position``; very large if there is none."""
        return next((use for use in self._uses[boundary] if use >= position), 2**62)

    def is_needed(self, boundary: tuple[int, int], position: int) -> bool:
        """Something at or after ``position`` uses ``boundary``."""
        return self._uses[boundary][-1] >= position

    def take(
        self, boundary: tuple[int, int], position: int, pinned: set[tuple[int, int]]
    ) -> tuple[int, tuple[int, int] | None]:
        """A slot for ``boundary``, and the activation that must be spilled from it first, if any."""
        victim: tuple[int, int] | None = None
        if self.free:
            slot = self.free.pop()
        else:
            candidates = [other for other in self.slot_of if other not in pinned]
            if not candidates:
                raise ValueError(
                    f"activation slots: {len(self.slot_of)} are too few; at least {MIN_ACTIVATION_SLOTS} are needed"
                )
            victim = max(candidates, key=lambda other: (self.next_use(other, position), other))
            slot = self.slot_of.pop(victim)
            self.spilled.add(victim)
            self.ever_spilled.add(victim)
        self.slot_of[boundary] = slot
        return slot, victim

    def drop(self, boundary: tuple[int, int]) -> None:
        """``boundary`` is not needed any more."""
        self.free.append(self.slot_of.pop(boundary))
