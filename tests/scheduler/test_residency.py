"""A real trainer's residency table and counters: what moves per step follows DESIGN.md's formula, whatever M is."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from hoist.scheduler.memory import STATE_BYTES
from hoist.scheduler.ops import Kind
from hoist.tiers.manager import KindStatistics
from tests.support.models import NUM_LAYERS, tiny_config
from tests.support.training import Engine, elements_of, make_steps, trainer_on

NUM_STAGES = NUM_LAYERS + 2
#: Bytes of weight_hi and weight_lo, which fp32 computation reads, and of the moments, which updates do.
WEIGHT_BYTES, MOMENT_BYTES = 4, 8


def difference(later: KindStatistics, earlier: KindStatistics, name: str) -> int:
    found: int = getattr(later, name) - getattr(earlier, name)
    return found


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_steady_vertical_step_moves_what_the_formula_says(tmp_path: Path, num_micro_batches: int) -> None:
    """Weights twice but once at the turns, moments once, and states once up; nothing else: independent of M."""
    steps = make_steps(3, num_micro_batches)
    engine = Engine(budget_factor=1.8, resident_weights=False)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, engine) as trainer:
        for step in steps[:2]:
            trainer.step(step)
        trainer.wait()
        before = trainer.statistics()
        trainer.step(steps[2])
        trainer.wait()
        after = trainer.statistics()
        elements = elements_of(trainer)
    assert NUM_STAGES == 5
    loads = [1, 1, 2, 1, 1]
    read = sum((WEIGHT_BYTES * count + MOMENT_BYTES) * size for count, size in zip(loads, elements, strict=True))
    assert after.nvme.read_bytes - before.nvme.read_bytes == read
    assert after.nvme.written_bytes - before.nvme.written_bytes == STATE_BYTES * sum(elements)
    weights = after.residency.kinds["weights"], before.residency.kinds["weights"]
    assert difference(*weights, "fills") == difference(*weights, "misses") == sum(loads)
    assert difference(*weights, "hits") == 2 * NUM_STAGES - 1 - sum(loads)
    states = after.residency.kinds["states"], before.residency.kinds["states"]
    assert difference(*states, "written_bytes") == STATE_BYTES * sum(elements)
    assert difference(*states, "filled_bytes") == MOMENT_BYTES * sum(elements)
    for kind in ("activation", "gradient"):
        assert after.residency.kinds[kind].writes == 0


def test_with_room_for_all_weights_every_visit_is_a_hit(tmp_path: Path) -> None:
    """Tied weights too: the head's copy of the embedding is refreshed by the embedding's update."""
    steps = make_steps(3, 2)
    with trainer_on(tmp_path / "store", tiny_config("llama", tied=True), steps, Engine(budget_factor=20)) as trainer:
        for step in steps:
            trainer.step(step)
        weights = trainer.statistics().residency.kinds["weights"]
        assert (weights.fills, weights.misses) == (NUM_STAGES, NUM_STAGES)
        assert weights.hits == 3 * (2 * NUM_STAGES - 1) - NUM_STAGES
        assert weights.evictions == 0


def test_in_the_smallest_budget_activations_are_spilled_and_the_table_shows_them(tmp_path: Path) -> None:
    steps = make_steps(2, 4)
    engine = Engine(budget_factor=1.0, resident_weights=False)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, engine) as trainer:
        spills = 0
        for step in steps:
            trainer.step(step)
            spills += sum(span.op.kind is Kind.SPILL_ACTIVATION for span in trainer.last_spans)
        trainer.wait()
        statistics = trainer.statistics()
        activations = statistics.residency.kinds["activation"]
        assert activations.writes == spills > 0
        assert activations.fills > activations.writes  # one spill serves several fetches
        assert activations.resident_bytes == 0  # between steps there is none
        stored = statistics.residency.resident_bytes
        assert stored["device"] == 0
        assert stored["host"] <= trainer.memory.arena_bytes
        assert stored["nvme"] == sum(
            STATE_BYTES * layout.padded_elements + layout.frozen_bytes for layout in trainer._store.layouts
        )
        assert statistics.step == 2
        table = [line.to_json() for line in trainer.residency()]
    assert json.loads(json.dumps(table)) == table
    assert {line["kind"] for line in table} == {"weights", "states"}
    assert {line["state"] for line in table} == {"clean"}


def test_statistics_may_be_asked_for_while_a_step_runs(tmp_path: Path) -> None:
    steps = make_steps(3, 2)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, Engine()) as trainer:
        stop = threading.Event()
        moves: list[int] = []

        def ask() -> None:
            while not stop.is_set():
                moves.append(trainer.statistics().residency.num_moves)
                trainer.residency()

        asker = threading.Thread(target=ask)
        asker.start()
        try:
            for step in steps:
                trainer.step(step)
        finally:
            stop.set()
            asker.join()
        assert moves == sorted(moves)
        assert trainer.statistics().residency.num_moves >= moves[-1]
