"""What the process holds: the measurement sees anonymous and shared memory but no page cache; the peak survives."""

from __future__ import annotations

import gc
import mmap
import threading
from pathlib import Path

import pytest
import torch

from hoist.tiers import heap
from hoist.tiers.footprint import PeakSampler, anonymous_bytes, warm_up

MIB = 2**20
SIZE = 48 * MIB
SLACK = 6 * MIB


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS])
def test_anonymous_and_shared_memory_count(flags: int) -> None:
    before = anonymous_bytes()
    with mmap.mmap(-1, SIZE, flags=flags) as mapping:
        assert abs(anonymous_bytes() - before) < SLACK  # not touched yet
        mapping.write(b"x" * SIZE)
        held = anonymous_bytes() - before
    assert SIZE - SLACK < held < 2 * SIZE + SLACK  # the bytes object may still be counted
    assert anonymous_bytes() - before < SIZE + SLACK


def test_a_mapped_file_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    before = anonymous_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapping:
        assert sum(mapping[offset] for offset in range(0, SIZE, 4096)) == 0
        assert anonymous_bytes() - before < SLACK


def test_the_sampler_keeps_a_peak_that_has_passed() -> None:
    gc.collect()
    heap.trim()  # else what earlier tests left may go meanwhile, and hide the block
    sampler = PeakSampler(anonymous_bytes())
    try:
        block = torch.ones(SIZE, dtype=torch.uint8)
        assert sampler.peak_bytes > SIZE - SLACK  # asking looks, too
        del block
        assert sampler.peak_bytes > SIZE - SLACK
    finally:
        sampler.close()
        sampler.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hoist-memory"]


def test_the_baseline_is_taken_off() -> None:
    sampler = PeakSampler(2**50)
    try:
        assert sampler.peak_bytes == 0
    finally:
        sampler.close()


def test_warming_up_keeps_the_random_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    baseline = warm_up()
    assert torch.equal(torch.rand(4), expected)
    assert abs(anonymous_bytes() - baseline) < SLACK


def test_the_second_warm_up_costs_nothing() -> None:
    """What any run makes once is made: the baseline is one."""
    first = warm_up()
    assert abs(warm_up() - first) < SLACK
