"""What computes, and its memory; see `base.py`."""

from hoist.tiers.device.base import Device, Mark, Stream
from hoist.tiers.device.here import HereDevice

__all__ = ["Device", "HereDevice", "Mark", "Stream"]
