"""One line on what would make steps shorter, from a prediction's numbers. Pure arithmetic; nothing is tried.

The numbers are `preflight.py`'s. Where nothing simple helps, it says nothing.
"""

from __future__ import annotations

import math

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.memory import MemoryPlan
from hoist.scheduler.residency import Keep

#: Less than so much of a step is not worth a change.
WORTHWHILE = 0.05


def micro_batches_until_compute_bound(*, compute_seconds: float, io_seconds: float, num_micro_batches: int) -> int:
    """The fewest micro-batches whose computation takes as long as a step's I/O, which does not depend on them."""
    return max(num_micro_batches, math.ceil(io_seconds * num_micro_batches / compute_seconds - 1e-9))


def memory_until_compute_bound(
    memory: MemoryPlan, *, excess_seconds: float, bytes_per_second: tuple[float, float]
) -> int | None:
    """Bytes of host memory that would keep enough states from step to step; None if all states would not be enough.

    ``excess_seconds``: how much longer I/O takes than computation. ``bytes_per_second``: read, written.
    """
    read, write = bytes_per_second
    taken = 0
    for candidate in memory.demand.keepable[memory.num_kept :]:
        if excess_seconds <= 0.0:
            break
        taken += candidate.num_bytes
        written = 0 if candidate.keep is Keep.FROZEN else candidate.num_bytes
        excess_seconds -= (candidate.saved_bytes - written) / read + written / write
    return taken if excess_seconds <= 0.0 else None


def line(
    bound_by: str,
    *,
    compute_seconds: float,
    io_seconds: float,
    config: TrainerConfig,
    memory: MemoryPlan,
    bytes_per_second: tuple[float, float],
    spills: bool,
) -> str | None:
    """What to change, with how much; None if there is nothing to say.

    ``spills``: boundary activations go through NVMe, so that I/O grows with the number of micro-batches.
    """
    excess = io_seconds - compute_seconds
    if bound_by != "io" or excess < WORTHWHILE * io_seconds:
        return None
    ways = []
    if config.residency == 1.0:
        more = memory_until_compute_bound(memory, excess_seconds=excess, bytes_per_second=bytes_per_second)
        if more:
            ways.append(
                f"--host-memory {_mebibytes(config.host_memory_bytes + more)} would keep enough states in memory"
            )
    elif memory.demand.keepable[memory.num_kept :]:
        ways.append(f"--residency {config.residency:g} keeps memory from holding more states")
    if config.plan == "horizontal":
        ways.append("--plan vertical reads each stage once a step, not once a micro-batch")
    elif not spills and compute_seconds > 0.0:
        count = micro_batches_until_compute_bound(
            compute_seconds=compute_seconds, io_seconds=io_seconds, num_micro_batches=config.num_micro_batches
        )
        if count > config.num_micro_batches:
            now = config.num_micro_batches
            ways.append(f"--micro-batches {count} (now {now}) would compute as long as it moves bytes")
    return "; or ".join(ways) or None


def _mebibytes(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)}MiB"
