"""Locking host memory for a device that copies from it: how much can be, on which NUMA node, and in what pieces.

What the driver is asked is in `accelerator.py`; this is what the host says, read from /proc and /sys. Drivers lock
pages by themselves, not through mlock: RLIMIT_MEMLOCK does not bind them (NVIDIA's os-mlock.c takes references to pages
and asks no limit), but what is locked must fit into memory and into the control group, where the kernel else kills.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hoist.tiers import cgroups
from hoist.tiers.errors import BudgetError
from hoist.tiers.layout import round_up

PAGE_BYTES = 4096
#: One registration must stay below this: NVIDIA's driver keeps 16 bytes a page in one table, which must be under 2 GiB.
#: A copy may not cross from one registration into the next, so a bigger region is not cut here.
MAX_REGION_BYTES = 2**39
_SYSFS = Path("/sys")
_MEMINFO = Path("/proc/meminfo")
#: Bytes that mincore is asked about at once; its answer takes a byte a page.
_WINDOW_BYTES = 2**30


def check_lockable(region: torch.Tensor, *, free_bytes: int | None = None) -> None:
    """Raise BudgetError if locking the region's pages (uint8, page-aligned) takes more memory than is free now.

    ``free_bytes`` is :func:`free_host_bytes` if it isn't given. Pages that are in memory already cost nothing more.
    """
    if region.data_ptr() % PAGE_BYTES or region.dtype is not torch.uint8 or not region.is_contiguous():
        raise ValueError(f"only whole pages can be locked, not {region.dtype} at {region.data_ptr():#x}")
    num_bytes = region.numel()
    if num_bytes >= MAX_REGION_BYTES:
        raise BudgetError(
            f"host memory: {num_bytes} bytes cannot be locked for the device in one piece, drivers take fewer than "
            f"{MAX_REGION_BYTES}; give a smaller --host-memory"
        )
    free_bytes = free_host_bytes() if free_bytes is None else free_bytes
    if num_bytes <= free_bytes:
        return
    missing_bytes = round_up(num_bytes, PAGE_BYTES) - resident_bytes(region)
    if missing_bytes > free_bytes:
        raise BudgetError(
            f"host memory: locking {num_bytes} bytes for the device takes {missing_bytes} bytes more, and {free_bytes} "
            "are free; give a smaller --host-memory, or raise the memory limit of the container"
        )


def free_host_bytes(
    meminfo: Path = _MEMINFO, membership: Path = cgroups.MEMBERSHIP, cgroup_root: Path = cgroups.ROOT
) -> int:
    """Memory that this process could use now: what the machine has available, within its control groups."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    within_groups = cgroups.cgroup_free_bytes(membership, cgroup_root)
    return available if within_groups is None else min(available, within_groups)


def resident_bytes(region: torch.Tensor) -> int:
    """Bytes of the region's pages (page-aligned) that are in memory now, by mincore; raises its OSError."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    num_pages = 0
    for start in range(0, region.numel(), _WINDOW_BYTES):
        length = min(_WINDOW_BYTES, region.numel() - start)
        answer = torch.zeros(-(-length // PAGE_BYTES), dtype=torch.uint8)
        window = ctypes.c_void_p(region.data_ptr() + start)
        if mincore(window, ctypes.c_size_t(length), ctypes.c_void_p(answer.data_ptr())):
            code = ctypes.get_errno()
            raise OSError(code, f"mincore: {os.strerror(code)}")
        num_pages += int((answer & 1).sum())
    return num_pages * PAGE_BYTES


def pci_address(properties: Any) -> str | None:
    """The address that sysfs knows a device by, of what torch tells about it; None where torch does not tell."""
    try:
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:  # torch before 2.9, and devices other than CUDA's
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def numa_node(address: str | None, sysfs: Path = _SYSFS) -> int | None:
    """The NUMA node that a PCI device hangs on; None if it is not known, or there is only one."""
    if address is None:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # The kernel says -1 where the firmware does not tell.
    return node if node >= 0 and cpus_of_node(node, sysfs) else None


def cpus_of_node(node: int, sysfs: Path = _SYSFS) -> frozenset[int]:
    """The processors of a NUMA node; none if there is no such node, or it is memory alone."""
    try:
        text = (sysfs / "devices/system/node" / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return frozenset()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


@contextlib.contextmanager
def near_node(node: int | None, sysfs: Path = _SYSFS) -> Iterator[None]:
    """Have the calling thread run on the node's processors within: pages that it is the first to touch lie there.

    Nothing changes where the node is not known or none of its processors is allowed.
    """
    allowed = os.sched_getaffinity(0)
    wanted = allowed & cpus_of_node(node, sysfs) if node is not None else set()
    if not wanted or wanted == allowed:
        yield
        return
    # 0 is the calling thread here, not the process.
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
