"""Settings drawn at random, and models of which little is trained, on devices whose streams run late.

What each test is about is said in the module that it is from; parity on such devices is `test_late_parity.py`'s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scheduler.test_any_settings import (
    NUM_STEPS,
    VOCAB_SIZE,
    config,
    drawn,
    reference,
)
from tests.support.late_runs import on_late_devices
from tests.support.training import Recipe, assert_identical, make_steps, torch_threads, train

#: How many are tried in every run, and in all.
FEW, MANY = 3, 100
#: Those that are not refused: what a late device refuses is a matter of its budget, as on the CPU.
NUMBERS = [number for number in range(2 * MANY) if drawn(number)[2].budget_factor >= 1.0][:MANY]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if place < FEW else pytest.mark.slow) for place, number in enumerate(NUMBERS)],
)
def test_any_settings_give_the_plain_loops_bits_on_a_late_device(number: int, tmp_path: Path) -> None:
    """The device has a budget of its own, drawn too."""
    num_micro_batches, clip_norm, engine = drawn(number)
    factor = random.Random(number).choice([1.0, 1.0, 1.2, 2.0, 60.0])
    engine = replace(engine, device_budget_factor=factor)
    steps = make_steps(NUM_STEPS, num_micro_batches, vocab_size=VOCAB_SIZE)
    with on_late_devices(number):
        got = train(tmp_path / "store", config(), steps, Recipe(clip_norm=clip_norm), engine)
    assert_identical(got, reference(num_micro_batches, clip_norm))
    assert got.memory is not None
    assert {done.device_peak_bytes for done in got.metrics} == {got.memory.region_bytes}
