"""What passes between stages when it is more than a hidden state: packing, and training with it spilled and carried.

That every family's forward is cut rightly is `tests/tools/test_sweep_models.py`; here the budget is the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hoist.scheduler.boundary import ALIGN_BYTES, as_leaves, keep_gradients, pack, packed_bytes, unpack
from hoist.scheduler.config import Order
from hoist.scheduler.ops import Kind
from hoist.tools.tiny_models import tiny_config
from tests.support.training import Engine, Recipe, make_steps, torch_threads, train, train_reference

VALUES = (
    torch.arange(6.0).view(2, 3),
    torch.tensor(3),
    torch.zeros(2, 0, 3),
    torch.tensor([[True, False]]),
    torch.arange(5, dtype=torch.int64),
    torch.tensor([1 + 2j, -3j]),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        yield


def test_tensors_of_any_kind_come_out_of_a_slot_as_they_went_in() -> None:
    places = pack(VALUES)
    slot = torch.zeros(packed_bytes(places), dtype=torch.uint8)
    for target, value in zip(unpack(slot, places), VALUES, strict=True):
        target.copy_(value)
    for got, value in zip(unpack(slot, places), VALUES, strict=True):
        assert got.dtype == value.dtype
        assert torch.equal(got, value)
    assert all(place.offset_bytes % ALIGN_BYTES == 0 for place in places)
    assert [place.has_gradient for place in places] == [True, False, True, False, False, True]


def test_gradients_take_the_place_of_what_has_one() -> None:
    """Of complex numbers too; of what autograd does not follow, or nothing uses, the input stays."""
    places = pack(VALUES)
    slots = unpack(torch.zeros(packed_bytes(places), dtype=torch.uint8), places)
    for target, value in zip(slots, VALUES, strict=True):
        target.copy_(value)
    real, _, unused, _, whole, complex_numbers = sources = as_leaves(slots)
    (real.sum() * 2 + complex_numbers.abs().pow(2).sum() / 2).backward()
    assert keep_gradients(slots, sources) == {1, 2, 3, 4}
    assert torch.equal(slots[0], torch.full((2, 3), 2.0))
    assert torch.equal(slots[4], VALUES[4])
    torch.testing.assert_close(slots[5], VALUES[5])
    assert unused.grad is None and whole.grad is None


def test_a_slot_that_is_too_small_is_an_error() -> None:
    places = pack(VALUES)
    with pytest.raises(ValueError, match=f"{packed_bytes(places)} bytes between two stages do not fit a slot of 64"):
        unpack(torch.zeros(64, dtype=torch.uint8), places)


@pytest.mark.parametrize(
    ("family", "plan", "budget_factor"),
    [
        ("inkling2_text", "vertical", 1.0),  # a second tensor that grows from layer to layer
        ("inkling2_text", "horizontal", 1.0),
        ("hy_v4", "vertical", 1.0),  # indices of the tokens that count, which have no gradient
        pytest.param("deepseek_v4", "vertical", 1.0, marks=pytest.mark.slow),
        pytest.param("inkling2_text", "vertical", 50.0, marks=pytest.mark.slow),
    ],
)
def test_trains_with_what_it_carries_spilled(family: str, plan: Order, budget_factor: float, tmp_path: Path) -> None:
    config = tiny_config(family)
    steps, recipe = make_steps(2, 3, vocab_size=90), Recipe(attention="eager")
    got = train(tmp_path / "store", config, steps, recipe, Engine(plan=plan, budget_factor=budget_factor))
    expected = train_reference(config, steps, recipe)
    assert got.losses == expected.losses
    for name, weight in expected.states.weights.items():
        assert torch.equal(got.states.weights[name], weight), name
    if budget_factor == 1.0 and plan == "vertical":
        assert got.ops[Kind.SPILL_ACTIVATION] > 0
