"""Which way bytes take between drive, host memory and a device's memory, and how fast each is: measured, then judged.

For `hoist doctor`, which shows it with everything else (`doctor.py`). Moving the bytes is the business of `tiers/io/`
and `tiers/device/`; nothing here chooses a path for a run.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from hoist.tiers.device.base import Device, Stream, copying
from hoist.tiers.errors import BudgetError, HoistError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.bounce import for_device, needs_ring
from hoist.tiers.io.probe import aligned_buffer, measure_bandwidth

#: Slots of the ring for an engine that takes host memory only; each holds a part of a request.
_RING_SLOTS = 8
#: Bytes of one copy that is timed, and how many are in a row: large enough that starting them does not count.
_COPY_BYTES = 64 * 2**20
_COPIES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One way between two memories."""

    name: str
    """From where to where."""
    path: str
    """How the bytes go, and why so."""
    bytes_per_second: float | None
    """None if it could not be measured."""
    verified: bool = True
    """What came back was what was sent."""
    error: str = ""
    """Why it could not be measured; else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTransfers:
    """What moves to and from a device with memory of its own."""

    device: str
    """The device's own description."""
    why_not_pinned: str
    """Why host memory could not be locked for it; empty where it was."""
    transfers: tuple[Transfer, ...]


def measure_transfers(directory: Path, engine: IoEngine, device: Device, *, num_bytes: int) -> DeviceTransfers:
    """Move a temporary file of about ``num_bytes`` in ``directory`` from and to the device, and copies of host memory.

    The device has memory of its own. Uses 64 MiB of host memory and of the device's (less where ``num_bytes`` is), and
    before that 32 MiB for a ring, where the engine needs one. Raises nothing for what it finds: a way that fails says
    why.
    """
    with ExitStack() as stack:
        if needs_ring(engine, device):
            ring = aligned_buffer(_RING_SLOTS * engine.part_bytes)
            _pin(device, ring)  # why it could not be, what is pinned below says
            stack.callback(device.unpin, ring)
            engine = stack.enter_context(for_device(engine, device, ring=ring, part_bytes=engine.part_bytes))
        files = _measure_files(directory, engine, device, num_bytes)
    host = aligned_buffer(min(_COPY_BYTES, num_bytes))
    why_not_pinned = _pin(device, host)
    try:
        copies = _measure_copies(device, host, f"copies of {'unpinned' if why_not_pinned else 'pinned'} host memory")
    finally:
        device.unpin(host)
    return DeviceTransfers(device=device.describe(), why_not_pinned=why_not_pinned, transfers=(*files, *copies))


def _measure_files(directory: Path, engine: IoEngine, device: Device, num_bytes: int) -> tuple[Transfer, ...]:
    names, path = ("drive to device", "device to drive"), engine.describe_device_path()
    try:
        seen = measure_bandwidth(
            directory, engine, num_bytes=num_bytes, request_bytes=4 * 2**20, in_flight=4, device=device
        )
    except (HoistError, OSError) as error:
        return tuple(Transfer(name=name, path=path, bytes_per_second=None, error=str(error)) for name in names)
    speeds = (seen.read_bytes_per_second, seen.write_bytes_per_second)
    return tuple(
        Transfer(name=name, path=path, bytes_per_second=speed, verified=seen.verified)
        for name, speed in zip(names, speeds, strict=True)
    )


def _measure_copies(device: Device, host: torch.Tensor, path: str) -> tuple[Transfer, ...]:
    names = ("host to device", "device to host")
    try:
        theirs = device.allocate(host.numel(), "measuring")
        host.fill_(1)
        up = _time_copies(device.stream("up"), theirs, host)
        host.fill_(0)
        down = _time_copies(device.stream("down"), host, theirs)
    except HoistError as error:
        return tuple(Transfer(name=name, path=path, bytes_per_second=None, error=str(error)) for name in names)
    verified = bool((host == 1).all())
    return tuple(
        Transfer(name=name, path=path, bytes_per_second=speed, verified=verified)
        for name, speed in zip(names, (up, down), strict=True)
    )


def _time_copies(stream: Stream, to: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes a second, after a copy that is not timed."""
    copy = copying(to, source)
    stream.put(copy).wait()
    started = time.perf_counter()
    for _ in range(_COPIES):
        mark = stream.put(copy)
    mark.wait()
    return _COPIES * source.numel() / (time.perf_counter() - started)


def _pin(device: Device, region: torch.Tensor) -> str:
    """Lock a region for the device; why it could not be, or nothing."""
    try:
        device.pin(region)
    except BudgetError as error:
        return str(error)
    return ""
