"""The device that a run computes on, as its options say, with its budget; and what of a run's memory lies where.

Which devices there are is `hoist.tiers.device`'s business. Only here do tools and the scheduler meet about a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hoist.scheduler.config import OptimDevice
from hoist.scheduler.errors import ConfigError
from hoist.tiers.device import Device
from hoist.tiers.device.choose import choose_device
from hoist.tools.sizes import show_bytes

#: Without a word on its budget, so much of what is free in a device's memory is used: the rest is for kernels' scratch
#: and what the allocator cannot fill.
SHARE_OF_FREE = 0.9


@contextmanager
def opened(device: str | Device) -> Iterator[Device]:
    """The device of a name, closed afterwards; one that the caller has made is the caller's to close.

    Raises RefusalError if there is none of that name.
    """
    if isinstance(device, Device):
        yield device
        return
    made = choose_device(device)
    try:
        yield made
    finally:
        made.close()


def budget_bytes(device: Device, told: int | None) -> int | None:
    """The budget for the memory of a device; None for the CPU, whose memory is the host's. ``told``: None: a share.

    Raises ConfigError, naming ``--device-memory``, for a budget where there is no such memory, or not so much is free.
    """
    name = str(device.torch_device)
    if not device.is_separate:
        if told is not None:
            raise ConfigError(
                f"--device-memory: {show_bytes(told)} is not allowed where the CPU computes: its memory is the host's, "
                "which --host-memory bounds; leave it out"
            )
        return None
    device.give_back_free()  # what earlier runs of this process have left is free, too
    free = free_bytes(device.torch_device)
    if free is not None:
        return within(free, told, name=name)
    if told is None:
        raise ConfigError(f"--device-memory: torch does not tell what is free on {name}; give a budget, like 20GiB")
    return told


def within(free: int, told: int | None, *, name: str) -> int:
    """The budget for a device of which ``free`` bytes are free: what is told, else a share. Raises ConfigError."""
    if told is None:
        return int(SHARE_OF_FREE * free)
    if told > free:
        raise ConfigError(
            f"--device-memory: {show_bytes(told)} is more than the {show_bytes(free)} that are free on {name}; give "
            "less, or end what else uses the device"
        )
    return told


def free_bytes(device: torch.device) -> int | None:
    """What is free in the device's memory now; None where torch does not tell."""
    tell = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if tell is None else int(tell(device)[0])


def optim_device(told: str, device: Device) -> OptimDevice:
    """What updates run on where ``--optim-device`` says ``told``: cpu, device, or the name or kind of what computes.

    Raises ConfigError if that is not what computes, or has no memory of its own.
    """
    if told == "cpu":
        return "cpu"
    if not device.is_separate:
        raise ConfigError(
            f"--optim-device: {told} is not allowed where the CPU computes: there is no other device; give cpu, or "
            "leave it out"
        )
    name = str(device.torch_device)
    if told not in ("device", name, device.torch_device.type):
        raise ConfigError(f"--optim-device: {told} is not {name}, which computes; give cpu or device")
    return "device"


def moved(before: object, device: Device) -> str | None:
    """What to say to a run that goes on where another device computed: ``before``, as torch names it; None: nothing."""
    now = str(device.torch_device)
    if before in (None, now):
        return None
    return f"computed on {before} up to the last commit, now on {now}: results differ in rounding"
