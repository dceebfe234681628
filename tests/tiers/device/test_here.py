"""The CPU as a device."""

from __future__ import annotations

from hoist.tiers.device import Device, HereDevice
from tests.tiers.device.conformance import DeviceConformance


class TestHereConforms(DeviceConformance):
    def make(self) -> Device:
        return HereDevice()
