"""What is said of a step's writes is what a step writes; the most that one can write is never exceeded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hoist.scheduler.setup import prepare
from hoist.scheduler.writes import count, creation_bytes, savings
from tests.support.models import tiny_config
from tests.support.training import Engine, Recipe, make_steps, trainer_on

NUM_STEPS = 4
SETTINGS = {
    "spilled": Engine(),
    "roomy": Engine(budget_factor=3.0),
    "kept": Engine(budget_factor=2.0, residency=1.0),
    "all kept": Engine(budget_factor=9.0, residency=1.0),
    "horizontal": Engine(plan="horizontal"),
    "delayed": Engine(delay=0.5),
    "speculative": Engine(delay=0.5, clip_mode="speculative"),
}


#: What each of these adds is in "speculative", "kept" or "horizontal" too.
_SLOW = {"spilled", "roomy", "delayed"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in SETTINGS]
)
def test_a_step_writes_what_was_said(tmp_path: Path, name: str) -> None:
    engine = replace(SETTINGS[name], commit_every=10**6)
    speculates = name == "speculative"
    recipe = Recipe(clip_norm=1e-3 if speculates else 0.0)
    config = tiny_config("llama")
    steps = make_steps(NUM_STEPS, 3)
    with trainer_on(tmp_path / "store", config, steps, engine, recipe) as trainer:
        writes = count(trainer._setup, trainer.config)
        ledger = trainer._store.wear
        assert ledger is not None
        files = ledger.record().directories[0]
        weights = creation_bytes(trainer._setup)
        assert weights <= files.written_bytes <= weights + 64 * 1024
        moved = trainer.statistics().nvme.written_bytes
        assert moved == weights
        for step in steps:
            before = ledger.written_bytes
            trainer.step(step)
            trainer.wait()  # the next one then has no updates to make for this one
            now = trainer.statistics().nvme.written_bytes
            if not speculates:
                assert now - moved == writes.step_bytes
            else:
                assert writes.step_bytes < now - moved
            assert now - moved <= writes.most_step_bytes
            assert ledger.written_bytes - before <= writes.most_step_bytes + 4096
            moved = now
        before = ledger.written_bytes
        trainer.commit()
        assert trainer.statistics().nvme.written_bytes - moved == writes.kept_bytes
        assert ledger.written_bytes - before <= writes.commit_bytes
    assert bool(writes.kept_bytes) == (name in ("kept", "all kept"))
    assert bool(writes.states_bytes) == (name != "all kept")
    assert bool(writes.activation_bytes) == (name in ("spilled", "delayed", "speculative"))


def test_what_would_lower_it_is_what_dividing_and_planning_give(tmp_path: Path) -> None:
    config = tiny_config("llama")
    steps = make_steps(2, 2)
    engine = Engine(budget_factor=1.5, residency=1.0)
    with trainer_on(tmp_path / "store", config, steps, engine) as trainer:
        setup, told = trainer._setup, trainer.config
        now = count(setup, told).step_bytes
        found = {saving.what: saving for saving in savings(setup, told, frozen_possible=True)}
    assert set(found) == {"memory", "micro_batches", "states"}
    assert found["memory"].value == 2 * told.host_memory_bytes
    assert found["states"].saved_bytes == count(setup, told).states_bytes
    # The same, sized from the start, every stage measured again.
    larger = replace(told, host_memory_bytes=2 * told.host_memory_bytes)
    again = prepare(trainer._model, setup.layouts, larger)
    assert found["memory"].saved_bytes == now - count(again, larger).step_bytes
    more = replace(told, num_micro_batches=2 * told.num_micro_batches)
    again = prepare(trainer._model, setup.layouts, replace(more, host_memory_bytes=told.host_memory_bytes))
    assert found["micro_batches"].saved_bytes == pytest.approx(now - count(again, more).step_bytes / 2, rel=0.2)
    assert 0 < found["memory"].saved_bytes <= now
