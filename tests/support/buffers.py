"""Buffers and files for I/O tests: aligned or deliberately skewed tensors, patterns, what the page cache holds.

Engines are in `engines.py` and `systemcalls.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import torch

from hoist.tiers.device import Device

PAGE_BYTES = 4096


def empty_buffer(num_bytes: int, *, skew: int = 0) -> torch.Tensor:
    """A uint8 buffer full of 0x55 whose address is ``skew`` bytes past a multiple of 4096."""
    whole = torch.full((num_bytes + 2 * PAGE_BYTES,), 0x55, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE_BYTES + skew
    return whole[start : start + num_bytes]


def random_buffer(num_bytes: int, *, seed: int, skew: int = 0) -> torch.Tensor:
    """The same with random bytes, the same for the same seed."""
    buffer = empty_buffer(num_bytes, skew=skew)
    generator = torch.Generator().manual_seed(seed)
    buffer.copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator))
    return buffer


def buffer_bytes(buffer: torch.Tensor) -> bytes:
    """The buffer's content, wherever it lies."""
    return buffer.cpu().numpy().tobytes()


class Memory:
    """Where a conformance suite makes its buffers: here in host memory."""

    def empty(self, num_bytes: int, *, skew: int = 0) -> torch.Tensor:
        """As :func:`empty_buffer`."""
        return empty_buffer(num_bytes, skew=skew)

    def random(self, num_bytes: int, *, seed: int, skew: int = 0) -> torch.Tensor:
        """As :func:`random_buffer`."""
        buffer = self.empty(num_bytes, skew=skew)
        buffer.copy_(random_buffer(num_bytes, seed=seed))
        return buffer


class DeviceMemory(Memory):
    """In a device's own memory."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def empty(self, num_bytes: int, *, skew: int = 0) -> torch.Tensor:
        whole = self._device.allocate(num_bytes + 2 * PAGE_BYTES, "a test").fill_(0x55)
        start = -whole.data_ptr() % PAGE_BYTES + skew
        return whole[start : start + num_bytes]


def make_file(path: Path, content: bytes | int) -> Path:
    """A durable file with that content, or with that many zero bytes; nothing of it stays in the page cache."""
    path.write_bytes(bytes(content) if isinstance(content, int) else content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return path


def num_cached_pages(path: Path) -> int:
    """How many pages of a file (not an empty one) the page cache holds, by mincore; asking brings none in."""
    num_bytes = path.stat().st_size
    answer = np.zeros(-(-num_bytes // PAGE_BYTES), dtype=np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ) as mapping:
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_void_p(answer.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
    return int((answer & 1).sum())


def open_descriptors(below: Path) -> list[str]:
    """Files under a directory that this process has open."""
    found = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names are enough)
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(f"{below}/"):
            found.append(target)
    return found
