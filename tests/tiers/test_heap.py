"""The heap's settings, in processes of their own: they hold from the first call on and cannot be undone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hoist.tiers import heap

ROOT = Path(__file__).resolve().parent.parent.parent
#: Frees ten blocks that lie between smaller ones that stay, and prints what the process has then and after a trim. The
#: smaller ones are too large for holes that imports have left: those would not keep the blocks apart.
SCRIPT = """
import torch
from hoist.tiers import heap
from hoist.tiers.footprint import anonymous_bytes
if SETTLE:
    assert heap.settle() and heap.settle()
large = torch.ones(2**22)  # 16 MiB; glibc alone would raise its threshold when this is freed
del large
before = anonymous_bytes()
blocks, pins = [], []
for _ in range(10):
    blocks.append(torch.ones(SIZE // 4))
    pins.append(torch.ones(SIZE // 16))
before += sum(pin.nbytes for pin in pins)
blocks.clear()
print((anonymous_bytes() - before) // SIZE)
heap.trim()
print((anonymous_bytes() - before) // SIZE)
"""


def kept_blocks(num_bytes: int, *, settle: bool) -> list[int]:
    """Of ten freed blocks, about how many the process still has, before and after a trim (older ones may go too)."""
    script = SCRIPT.replace("SIZE", str(num_bytes)).replace("SETTLE", str(settle))
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return [int(line) for line in ended.stdout.split()]


@pytest.fixture(autouse=True)
def glibc() -> None:
    if not heap.settle():
        pytest.skip("the C library is not glibc")


def test_large_blocks_go_back_when_they_are_freed() -> None:
    assert kept_blocks(heap.OWN_MAPPING_BYTES, settle=True)[0] <= 1


def test_small_blocks_go_back_when_the_heap_is_trimmed() -> None:
    before, after = kept_blocks(heap.OWN_MAPPING_BYTES // 4, settle=True)
    assert before >= 8
    assert after <= 1


def test_without_the_settings_the_heap_keeps_both() -> None:
    """What the settings are for: else the tests above would show nothing."""
    assert kept_blocks(heap.OWN_MAPPING_BYTES, settle=False)[0] >= 8
