"""Settings drawn at random, all at once: the plain loop's bits, or a refusal before anything is made.

What each setting does by itself, and why, is tested where it belongs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest
from transformers import LlamaConfig
from transformers.configuration_utils import PreTrainedConfig

from hoist.tiers.errors import BudgetError
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    make_steps,
    scale_by_exact_norm,
    torch_threads,
    train,
    train_reference,
)

NUM_STEPS, VOCAB_SIZE = 3, 211
#: How many are tried in every run, and in all.
FEW, MANY = 10, 200


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def config() -> PreTrainedConfig:
    """31,264 parameters; the embeddings are more than a chunk of the smallest size."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=61,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )


@cache
def reference(num_micro_batches: int, clip_norm: float) -> Outcome:
    steps = make_steps(NUM_STEPS, num_micro_batches, vocab_size=VOCAB_SIZE)
    hook = partial(scale_by_exact_norm, clip_norm, []) if clip_norm else None
    return train_reference(config(), steps, Recipe(clip_norm=clip_norm), before_update=hook)


def drawn(number: int) -> tuple[int, float, Engine]:
    """Micro-batches, clipping norm, and how hoist runs; the same for a number at any time."""
    pick = random.Random(number).choice
    clip_norm = pick([0.0, 0.0, 1e9, 0.5, 1e-3])
    return (
        pick([1, 2, 3, 5]),
        clip_norm,
        Engine(
            plan=pick(["vertical", "vertical", "horizontal"]),
            delay=pick([0.0, 0.0, 0.3, 0.5, 1.0]),
            budget_factor=pick([0.7, 0.99, 1.0, 1.0, 1.1, 1.7, 4.0, 60.0]),
            resident_weights=pick([True, False]),
            residency=pick([0.0, 0.0, 0.4, 1.0]),
            clip_mode=pick(["exact", "speculative"]) if clip_norm else "exact",
            max_chunk_elements=pick([4096, 8192, 20480, 2**17]),
            max_piece_elements=pick([4096, 12288, 2**20]),
            commit_every=pick([1, 2, 7]),
        ),
    )


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[] if number < FEW else pytest.mark.slow) for number in range(MANY)]
)
def test_any_settings_give_the_plain_loops_bits_or_are_refused(number: int, tmp_path: Path) -> None:
    num_micro_batches, clip_norm, engine = drawn(number)
    steps = make_steps(NUM_STEPS, num_micro_batches, vocab_size=VOCAB_SIZE)
    if engine.budget_factor < 1.0:
        with pytest.raises(BudgetError, match="is too small; at least"):
            train(tmp_path / "store", config(), steps, Recipe(clip_norm=clip_norm), engine)
        assert not list(tmp_path.iterdir())
        return
    got = train(tmp_path / "store", config(), steps, Recipe(clip_norm=clip_norm), engine)
    assert_identical(got, reference(num_micro_batches, clip_norm))
    if not engine.residency:  # a delayed update of the last step comes after its metrics
        num_bytes = 12 * sum(value.numel() for value in got.states.weights.values()) * (NUM_STEPS - 1)
        assert sum(done.nvme_written_bytes for done in got.metrics) >= num_bytes
        assert sum(done.nvme_read_bytes for done in got.metrics) >= num_bytes


def test_the_few_try_every_kind() -> None:
    """Those of every run are some that are refused, delayed, clipped, and kept."""
    found = [drawn(number) for number in range(FEW)]
    assert 0 < sum(engine.budget_factor < 1.0 for *_, engine in found) < FEW // 2
    assert {engine.plan for *_, engine in found} == {"vertical", "horizontal"}
    assert {engine.clip_mode for *_, engine in found} == {"exact", "speculative"}
    assert any(engine.delay for *_, engine in found) and any(engine.residency for *_, engine in found)
