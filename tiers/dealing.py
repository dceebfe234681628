"""How a store's chunk files are dealt out over several directories: in proportion to measured bandwidth. Makes none.

What a further directory holds, and whether it is there, is `drives.py`'s business; the measurement itself is
`io/probe.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.format import StateArray
from hoist.tiers.inventory import StoredChunk
from hoist.tiers.layout import StageLayout

if TYPE_CHECKING:  # who only looks at a store does without the second that torch takes
    from hoist.tiers.io.base import IoEngine

#: The most that a measurement writes, and reads back twice, in each directory: part of a second on an NVMe drive.
MEASURED_BYTES = 64 * 2**20
#: Its requests, and how many are in flight: buffers of 8 MiB in all, as it runs beside a memory budget.
_REQUEST_BYTES, _IN_FLIGHT = 2 * 2**20, 3
#: With everything on NVMe, 16 of 28 bytes that a step moves are reads (docs/tuning.md).
_READ_PART = 16 / 28


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDirectory:
    """A directory that is to hold a share of a store, and how fast its drive is."""

    directory: Path
    """Absolute."""
    read_bytes_per_second: float
    write_bytes_per_second: float
    probed_bytes: int = 0
    """What the measurement wrote, and read back twice."""

    @property
    def weight(self) -> float:
        """Bytes of a step's mix of reads and writes that the drive moves in a second: what its share goes by."""
        seconds_per_byte = _READ_PART / self.read_bytes_per_second + (1 - _READ_PART) / self.write_bytes_per_second
        return 1 / seconds_per_byte


def measured_bytes(layouts: Sequence[StageLayout], *, most: int = MEASURED_BYTES) -> int:
    """How much to measure with for a store of such stages: no more than one slot of it holds, nor than ``most``."""
    per_element = sum(array.itemsize for array in StateArray)
    return min(most, sum(per_element * layout.padded_elements + layout.frozen_bytes for layout in layouts))


def measure(
    directories: Sequence[Path], engine: IoEngine, num_bytes: int = MEASURED_BYTES
) -> tuple[MeasuredDirectory, ...]:
    """Measure each directory in turn with a temporary file of ``num_bytes``; one that is missing, in its parent.

    Takes 8 MiB of host memory meanwhile. Raises StoreRefusedError where no such file can be made, or does not keep what
    it is given, TransferError.
    """
    from hoist.tiers.io.probe import measure_bandwidth

    found = []
    for directory in directories:
        place = directory if directory.exists() else directory.parent
        speed = measure_bandwidth(
            place, engine, num_bytes=num_bytes, request_bytes=_REQUEST_BYTES, in_flight=_IN_FLIGHT
        )
        if not speed.verified:
            raise StoreRefusedError(
                f"{directory}: what was read back differs from what was written; name a directory on another drive"
            )
        found.append(
            MeasuredDirectory(
                directory=directory,
                read_bytes_per_second=speed.read_bytes_per_second,
                write_bytes_per_second=speed.write_bytes_per_second,
                probed_bytes=speed.probed_bytes,
            )
        )
    return tuple(found)


def deal(chunks: Sequence[StoredChunk], weights: Sequence[float]) -> list[int]:
    """For each chunk file, the number of the drive that holds it. Pure, and the same for the same arguments.

    In the order given, each file goes to the drive that would be the first to be done with it, counted both in the
    file's own array and in all arrays so far. So every array, and all arrays together, are spread in proportion to
    ``weights`` up to a few chunks, and neighbours lie on different drives. All slots of a chunk of an array go to one
    drive: the spread is then the same whichever slots hold the newest versions. A weight of 0 gets nothing.

    Raises ValueError unless the weights are finite, not negative, and one at least is positive.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(f"weights: got {list(weights)}, must be at least 0, and one of them more")
    takers = [number for number, weight in enumerate(weights) if weight]
    in_all = [0] * len(weights)
    in_array: dict[str, list[int]] = {}
    dealt: dict[tuple[str, str, int], int] = {}
    for chunk in chunks:
        key = (chunk.stage, chunk.array, chunk.chunk)
        if key in dealt:
            continue
        own = in_array.setdefault(chunk.array, [0] * len(weights))
        best = min(
            takers, key=lambda number: (own[number] + in_all[number] + 2 * chunk.num_bytes) / weights[number]
        )
        own[best] += chunk.num_bytes
        in_all[best] += chunk.num_bytes
        dealt[key] = best
    return [dealt[chunk.stage, chunk.array, chunk.chunk] for chunk in chunks]
