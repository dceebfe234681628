"""What the host says about locking memory, read from folders like the kernel's, and from the kernel itself."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hoist.tiers.device import pinning
from hoist.tiers.errors import BudgetError
from tests.support.buffers import empty_buffer


def make_sysfs(root: Path, *, address: str = "0000:17:00.0", node: str = "1", cpus: dict[int, str]) -> Path:
    folder = root / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")
    for index, text in cpus.items():
        folder = root / "devices/system/node" / f"node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    return root


def test_the_address_of_what_torch_tells() -> None:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=2)
    assert pinning.pci_address(properties) == "0001:c1:02.0"
    assert pinning.pci_address(SimpleNamespace(name="torch 2.8 tells less")) is None


def test_the_node_of_an_address(tmp_path: Path) -> None:
    sysfs = make_sysfs(tmp_path, cpus={0: "0-3,8", 1: "4-7,9-10", 2: ""})
    assert pinning.numa_node("0000:17:00.0", sysfs) == 1
    assert pinning.numa_node("0000:18:00.0", sysfs) is None
    assert pinning.numa_node(None, sysfs) is None
    assert pinning.cpus_of_node(1, sysfs) == {4, 5, 6, 7, 9, 10}
    assert pinning.cpus_of_node(2, sysfs) == set()
    assert pinning.cpus_of_node(3, sysfs) == set()


@pytest.mark.parametrize("node", ["-1", "7", "what?"])
def test_a_node_that_is_not_known_is_none(tmp_path: Path, node: str) -> None:
    assert pinning.numa_node("0000:17:00.0", make_sysfs(tmp_path, node=node, cpus={0: "0"})) is None


def test_a_thread_is_near_a_node_within_and_where_it_was_afterwards(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    sysfs = make_sysfs(tmp_path, cpus={0: str(max(allowed) + 1), 1: f"{first},{max(allowed) + 1}"})
    with pinning.near_node(1, sysfs):
        assert os.sched_getaffinity(0) == {first}
    assert os.sched_getaffinity(0) == allowed
    for node in (0, 5, None):  # none of its processors is allowed, there is no such, not known
        with pinning.near_node(node, sysfs):
            assert os.sched_getaffinity(0) == allowed
    with pytest.raises(KeyError), pinning.near_node(1, sysfs):
        raise KeyError
    assert os.sched_getaffinity(0) == allowed


def test_free_memory_is_what_machine_and_groups_leave(tmp_path: Path) -> None:
    meminfo, membership, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs"
    root.mkdir()
    meminfo.write_text("MemTotal:  3000 kB\nMemAvailable:  2000 kB\n")
    assert pinning.free_host_bytes(meminfo, membership, root) == 2000 * 1024
    membership.write_text("0::/\n")
    (root / "memory.max").write_text("1000000\n")
    (root / "memory.current").write_text("400000\n")
    assert pinning.free_host_bytes(meminfo, membership, root) == 600_000
    assert pinning.free_host_bytes() > 2**20  # and of this machine


def test_pages_that_were_touched_are_resident() -> None:
    mapping = mmap.mmap(-1, 16 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region = torch.frombuffer(mapping, dtype=torch.uint8)
    assert pinning.resident_bytes(region) == 0
    region[: 3 * 4096 + 1] = 1
    assert pinning.resident_bytes(region) == 4 * 4096


def test_what_does_not_fit_is_not_locked() -> None:
    mapping = mmap.mmap(-1, 16 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region = torch.frombuffer(mapping, dtype=torch.uint8)
    pinning.check_lockable(region, free_bytes=16 * 4096)
    with pytest.raises(BudgetError, match=r"locking 65536 bytes .* takes 65536 bytes more, and 65535 are free; give"):
        pinning.check_lockable(region, free_bytes=16 * 4096 - 1)
    region[:4096] = 1  # costs nothing more
    pinning.check_lockable(region, free_bytes=16 * 4096 - 1)
    pinning.check_lockable(region)


def test_only_whole_pages_in_one_registration_are_locked() -> None:
    with pytest.raises(ValueError, match="only whole pages"):
        pinning.check_lockable(empty_buffer(4096, skew=512))
    with pytest.raises(ValueError, match=r"only whole pages can be locked, not torch.float32"):
        pinning.check_lockable(empty_buffer(4096).view(torch.float32))
    with pytest.raises(BudgetError, match=r"549755813888 bytes cannot be locked .* in one piece"):
        pinning.check_lockable(torch.empty(2**39, dtype=torch.uint8, device="meta"))
