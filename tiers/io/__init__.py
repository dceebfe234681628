"""The NVMe tier's I/O: one contract, two engines, and what chooses between them."""

from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine, IoStatistics
from hoist.tiers.io.bounce import BounceEngine, for_device, needs_ring
from hoist.tiers.io.choose import ENGINE_KINDS, choose_engine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.io.kvikio import KvikioEngine
from hoist.tiers.io.probe import Bandwidth, measure_bandwidth

__all__ = [
    "ENGINE_KINDS",
    "IO_ALIGN_BYTES",
    "Bandwidth",
    "BounceEngine",
    "DirectEngine",
    "IoEngine",
    "IoStatistics",
    "KvikioEngine",
    "choose_engine",
    "for_device",
    "measure_bandwidth",
    "needs_ring",
]
