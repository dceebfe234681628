"""Whole runs on the accelerator's own code, with torch.cpu in place of a GPU's module: what is put is done at once.

The order that a real one may take is `test_late_parity.py`'s part; what torch.cpu lacks is in `test_accelerator.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hoist.scheduler.config import Dtype, Order
from tests.support import training
from tests.support.late_device import LateDevice
from tests.support.models import tiny_config
from tests.support.training import Engine, Recipe, assert_identical, make_steps, torch_threads, train, train_reference
from tests.tiers.device.test_accelerator import OnCpu


class Separate(OnCpu):
    """Its memory counts as its own; what was not written there is not a number."""

    is_separate = True
    counts_allocations = False

    def __init__(self) -> None:
        #: Address and bytes of what was allocated.
        self.allocations: list[tuple[int, int]] = []
        super().__init__()

    def allocate(self, num_bytes: int, label: str) -> torch.Tensor:
        region = super().allocate(num_bytes, label).fill_(0xFF)
        self.allocations.append((region.data_ptr(), num_bytes))
        return region

    def owns(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < start + length for start, length in self.allocations)


class GivingBack(LateDevice):
    """Notes what was still allocated each time that free memory was given back."""

    def __init__(self) -> None:
        self.left_bytes: list[int] = []
        super().__init__(1)

    def give_back_free(self) -> None:
        self.left_bytes.append(self.allocated_bytes)


def test_a_closed_trainer_leaves_no_memory_of_the_device_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch keeps, the next run in the process would not find free, nor any other process."""
    made: list[GivingBack] = []

    def make() -> GivingBack:
        made.append(GivingBack())
        return made[-1]

    monkeypatch.setattr(training, "make_device", make)
    train(tmp_path / "store", tiny_config("llama"), make_steps(1, 1), Recipe(), Engine())
    assert [device.left_bytes for device in made if device.left_bytes] == [[0]]


@pytest.fixture
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with torch_threads(1):
        monkeypatch.setattr(training, "make_device", Separate)
        yield


@pytest.mark.usefixtures("_accelerator")
@pytest.mark.parametrize(
    ("dtype", "plan", "budget_factor", "delay"),
    [("float32", "vertical", 1.0, 0.5), ("bfloat16", "horizontal", 50.0, 0.0)],
)
def test_the_same_bits(dtype: Dtype, plan: Order, budget_factor: float, delay: float, tmp_path: Path) -> None:
    recipe, steps = Recipe(dtype=dtype), make_steps(3, 2)
    engine = Engine(plan=plan, budget_factor=budget_factor, delay=delay)
    got = train(tmp_path / "store", tiny_config("llama"), steps, recipe, engine)
    assert_identical(got, train_reference(tiny_config("llama"), steps, recipe))
    assert all(metrics.nvme_written_bytes > 0 for metrics in got.metrics)
