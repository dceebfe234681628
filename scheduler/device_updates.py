"""AdamW on a device with memory of its own: a piece's states go up, are updated there, and come back to their places.

What is updated, and on which terms, is decided in `updates.py`; the kernels are `hoist.optim`'s. Files, checksums and
the residency table do not know of it: states have no place on the device that outlives their update.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hoist.optim.adamw import PieceUpdater, SegmentUpdate
from hoist.scheduler.places import StateSlot
from hoist.tiers.device import Device, Mark
from hoist.tiers.format import StateArray


class DeviceUpdates:
    """Puts updates into three streams of a device, so that copies both ways and kernels of different pieces overlap.

    Every piece passes through one of a few slots of device memory, in turn.
    """

    def __init__(self, device: Device, slots: Sequence[StateSlot], updater: PieceUpdater) -> None:
        """``slots`` and the scratch of ``updater`` are the device's; the slots have room for gradients."""
        self._up, self._kernels, self._down = (device.stream(name) for name in ("optim-up", "optim", "optim-down"))
        self._slots = slots
        self._updater = updater
        #: Guards what follows.
        self._lock = threading.Lock()
        self._turn = 0
        #: Per slot, the mark behind which its last piece has gone down; None: nobody has had it.
        self._left: list[Mark | None] = [None] * len(slots)

    def put(
        self,
        arrays: Mapping[StateArray, Tensor],
        gradient: Tensor,
        scale: float,
        segments: Sequence[SegmentUpdate],
        after: Sequence[Mark],
    ) -> Mark:
        """Update one piece behind ``after``: ``arrays`` (uint8) by ``gradient`` (float32), times ``scale``.

        These are in host memory; nobody may touch them until the mark returned is reached. ``gradient`` is only read.
        """
        num_elements = gradient.numel()
        with self._lock:  # no two pieces may be put into the streams in different orders
            turn = self._turn
            slot, left = self._slots[turn], self._left[turn]
            there = {array: slot.bytes_of(place, num_elements) for place, array in enumerate(StateArray)}
            given = slot.gradient(num_elements)
            moved = [(arrays[array], data) for array, data in there.items()]
            up = self._up.put(
                partial(_copy, [*moved, (gradient, given)]), after=after if left is None else (*after, left)
            )
            done = self._kernels.put(partial(self._update, there, given, scale, segments), after=(up,))
            down = self._down.put(partial(_copy, [(data, host) for host, data in moved]), after=(done,))
            self._left[turn] = down
            self._turn = (turn + 1) % len(self._slots)
        return down

    def _update(
        self, arrays: Mapping[StateArray, Tensor], gradient: Tensor, scale: float, segments: Sequence[SegmentUpdate]
    ) -> None:
        if scale != 1.0:
            gradient.mul_(scale)
        self._updater.update(
            weight_hi=arrays[StateArray.WEIGHT_HI].view(torch.int16),
            weight_lo=arrays[StateArray.WEIGHT_LO].view(torch.int16),
            exp_avg=arrays[StateArray.EXP_AVG].view(torch.float32),
            exp_avg_sq=arrays[StateArray.EXP_AVG_SQ].view(torch.float32),
            gradient=gradient,
            segments=segments,
        )


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Each first to its second."""
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
