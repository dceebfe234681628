"""What computes, and its memory; see `base.py`."""

from hoist.tiers.device.accelerator import AcceleratorDevice
from hoist.tiers.device.base import Device, Mark, Stream, copying
from hoist.tiers.device.choose import DeviceFacts, choose_device, list_devices
from hoist.tiers.device.here import HereDevice

__all__ = [
    "AcceleratorDevice",
    "Device",
    "DeviceFacts",
    "HereDevice",
    "Mark",
    "Stream",
    "choose_device",
    "copying",
    "list_devices",
]
