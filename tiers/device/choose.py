"""Which device a run computes on, of what it was told and what there is; and a list of what there is.

Looks at the machine only. What a device can do is in `accelerator.py`, what its memory is divided into is the
schedule's business.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from hoist.tiers.device import pinning
from hoist.tiers.device.accelerator import AcceleratorDevice
from hoist.tiers.device.base import Device
from hoist.tiers.device.here import HereDevice
from hoist.tiers.errors import RefusalError

_log = logging.getLogger(__name__)

#: Kinds whose memory is the host's: nothing would be gained by copying there, and their budget is the host's.
_SHARING_KINDS = frozenset({"mps"})
#: Kinds that torch may be built for, as people call them.
_KIND_NAMES = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "mtia": "MTIA", "hpu": "HPU", "npu": "NPU"}
#: Files that say that a driver is loaded, below the root, and whose.
_DRIVER_FILES = {"proc/driver/nvidia/version": "NVIDIA", "dev/kfd": "AMD", "sys/module/xe": "Intel"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What torch and the system tell about one device."""

    name: str
    """As ``--device`` takes it, such as ``cuda:0``."""
    model: str
    """What its maker calls it."""
    total_memory_bytes: int
    """Its own memory."""
    numa_node: int | None
    """Where its bus hangs; None if it is not known."""
    capability: str
    """What kernels are built for it (``9.0``, ``gfx942``); empty where torch does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What decides which device is chosen."""

    torch_version: str
    """With what it was built for (``2.13.0+cpu``)."""
    built_for: str | None
    """The kind of device that torch was built for (``cuda``), whether there is one or not; None: the CPU alone."""
    models: tuple[str, ...]
    """What the devices of that kind that torch can use are called, by index."""
    drivers: tuple[str, ...] = ()
    """Makers whose driver is loaded."""


def choose_device(name: str = "auto") -> Device:
    """Make the device that ``--device`` names: ``auto``, ``cpu``, or as torch does (``cuda``, ``cuda:1``, ``xpu``).

    The caller closes it. ``auto`` is the accelerator where torch can use one with memory of its own, else the CPU.
    Raises RefusalError, naming the devices there are, if there is none of that name; DeviceError if it cannot be used.
    """
    machine = look_at_machine()
    chosen = resolve(name, machine)
    device = HereDevice() if chosen == "cpu" else AcceleratorDevice(chosen)
    if name == "auto" and chosen == "cpu" and machine.drivers:
        _log.info("device cpu: torch (%s) cannot use the %s device", machine.torch_version, machine.drivers[0])
    else:
        _log.info("device %s", device.describe())
    return device


def resolve(name: str, machine: Machine) -> str:
    """``cpu``, or the accelerator with its index, that ``name`` means on this machine. Raises RefusalError."""
    usable = machine.built_for is not None and machine.built_for not in _SHARING_KINDS and bool(machine.models)
    if name == "auto":
        return f"{machine.built_for}:0" if usable else "cpu"
    if name == "cpu":
        return name
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?", name)
    if match is None or match[1] not in _KIND_NAMES:
        others = "" if usable else "; accelerators have torch's names (cuda, cuda:1, xpu:0), and there is none here"
        raise RefusalError(f"--device: got {name!r}, must be auto or {_listed(machine)}{others}")
    kind, index = match[1], int(match[2] or 0)
    if kind in _SHARING_KINDS:
        raise RefusalError(f"--device {name}: its memory is the host's, which hoist does not compute in; give cpu")
    if kind != machine.built_for:
        drivers = f", though a driver of {' and '.join(machine.drivers)} is loaded" if machine.drivers else ""
        raise RefusalError(
            f"--device {name}: this torch build ({machine.torch_version}) has no {_KIND_NAMES[kind]}{drivers}: install "
            f"one that has (https://pytorch.org/get-started/locally), or give {_listed(machine)}"
        )
    if not machine.models:
        raise RefusalError(
            f"--device {name}: torch ({machine.torch_version}) finds no such device: look whether its driver runs and "
            f"whether it is hidden (CUDA_VISIBLE_DEVICES, the container's options), or give {_listed(machine)}"
        )
    if index >= len(machine.models):
        raise RefusalError(f"--device {name}: there is none of that number; give {_listed(machine)}")
    return f"{kind}:{index}"


def look_at_machine(root: Path = Path("/")) -> Machine:
    """What torch was built for and finds, and which drivers are loaded (files below ``root``)."""
    built_for = torch.accelerator.current_accelerator()
    return Machine(
        torch_version=torch.__version__,
        built_for=None if built_for is None else built_for.type,
        models=tuple(facts.model for facts in list_devices(root)),
        drivers=tuple(maker for file, maker in _DRIVER_FILES.items() if (root / file).exists()),
    )


def list_devices(root: Path = Path("/")) -> tuple[DeviceFacts, ...]:
    """Every accelerator that torch can use, by index; none on a machine without one. Makes no context on any."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return ()
    module = torch.get_device_module(accelerator)
    found = []
    for index in range(torch.accelerator.device_count()):
        name = f"{accelerator.type}:{index}"
        if not hasattr(module, "get_device_properties"):
            found.append(DeviceFacts(name=name, model=name, total_memory_bytes=0, numa_node=None, capability=""))
            continue
        properties = module.get_device_properties(index)
        found.append(
            DeviceFacts(
                name=name,
                model=properties.name,
                total_memory_bytes=properties.total_memory,
                numa_node=pinning.numa_node(pinning.pci_address(properties), root / "sys"),
                capability=_capability(properties),
            )
        )
    return tuple(found)


def _capability(properties: object) -> str:
    """Of what torch tells about a device."""
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    if architecture:
        return str(architecture).split(":", 1)[0]
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    return "" if major is None or minor is None else f"{major}.{minor}"


def _listed(machine: Machine) -> str:
    """What ``--device`` may be."""
    if machine.built_for is None or machine.built_for in _SHARING_KINDS or not machine.models:
        return "cpu"
    devices = [f"{machine.built_for}:{index} ({model})" for index, model in enumerate(machine.models)]
    return f"cpu or {' or '.join(devices)}"
