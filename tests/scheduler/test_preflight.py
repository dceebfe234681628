"""Predictions before the first step: bytes are those that runs move, and measuring leaves no trace."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hoist.scheduler import advice
from hoist.scheduler.creation import create_store
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.ops import Lane
from hoist.scheduler.plan import flush
from hoist.scheduler.preflight import DrivePlace, Prediction, predict
from hoist.scheduler.pricing import Prices
from hoist.scheduler.residency import Candidate, Keep
from hoist.scheduler.setup import Setup
from hoist.scheduler.step_plans import steady_plan, step_plan
from hoist.scheduler.trainer import Trainer
from hoist.tiers.footprint import PeakSampler, anonymous_bytes, warm_up
from hoist.tiers.io.direct import DirectEngine
from tests.support.models import tiny_config
from tests.support.training import (
    Engine,
    Recipe,
    assert_identical_states,
    from_weights,
    initial_weights,
    layouts_of,
    make_steps,
    read_states,
    set_up,
    staged_model,
    train,
    trainer_on,
)

NUM_STEPS = 3


def freeze_first(model: PreTrainedModel) -> None:
    """Train only what is above the first layer."""
    model.get_input_embeddings().requires_grad_(requires_grad=False)
    model.model.layers[0].requires_grad_(requires_grad=False)


FROZEN = Recipe(alter=freeze_first)
#: Never reached: nothing is clipped, and no update made again.
CLIPPED = Recipe(clip_norm=1e9)


def run_bytes(trainer: Trainer, num_steps: int) -> tuple[int, int]:
    """What a trainer's steps and its wait() should move: the cold step, the steady ones, and what these leave."""
    setup: Setup = trainer._setup
    prices = Prices(setup, part_bytes=2**20)
    plans = [step_plan(setup, trainer.config, cold=True, pending=False)]
    plans += [steady_plan(setup, trainer.config)] * (num_steps - 1)
    if setup.leaves_updates:
        plans.append(flush(setup.shapes(), setup.buffers()))
    moved = [prices.bytes_of(plan.ops) for plan in plans]
    return sum(read for read, _ in moved), sum(written for _, written in moved)


@pytest.mark.parametrize(
    ("family", "recipe", "engine"),
    [
        ("llama", Recipe(), Engine()),
        ("llama", Recipe(), Engine(plan="horizontal")),
        pytest.param("gpt2", Recipe(), Engine(delay=0.5), marks=pytest.mark.slow),
        ("llama", Recipe(), Engine(delay=1.0, budget_factor=1.3)),
        pytest.param("llama", Recipe(), Engine(budget_factor=3.0, residency=0.4), marks=pytest.mark.slow),
        ("gpt2", Recipe(), Engine(budget_factor=50.0, residency=1.0)),
        ("llama", Recipe(), Engine(plan="horizontal", delay=0.5, budget_factor=2.0, residency=0.5)),
        pytest.param("llama", FROZEN, Engine(), marks=pytest.mark.slow),
        ("llama", replace(FROZEN, frozen_dtype="bfloat16", clip_norm=1e9), Engine(pin_trained=True)),
        pytest.param("llama", FROZEN, Engine(budget_factor=50.0, residency=1.0), marks=pytest.mark.slow),
        ("gemma2", replace(CLIPPED, attention="eager"), Engine()),
        ("llama", CLIPPED, Engine(clip_mode="speculative", delay=0.5)),
        ("llama", CLIPPED, Engine(clip_mode="speculative", budget_factor=4.0, residency=0.6)),
    ],
    ids=lambda value: "" if isinstance(value, Recipe) else str(value)[:60],
)
def test_bytes_are_those_that_runs_move(family: str, recipe: Recipe, engine: Engine, tmp_path: Path) -> None:
    steps = make_steps(NUM_STEPS, 3)
    if recipe.frozen_dtype is not None:
        recipe = replace(recipe, alter=_to_bfloat16)
    with trainer_on(tmp_path / "store", tiny_config(family), steps, engine, recipe, commit_every=10**6) as trainer:
        before = trainer.statistics().nvme
        for step in steps:
            trainer.step(step)
        trainer.wait()
        after = trainer.statistics().nvme
        moved = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
        assert moved == run_bytes(trainer, NUM_STEPS)
    assert sum(moved) > 0 or engine.residency == 1.0


def _to_bfloat16(model: PreTrainedModel) -> None:
    freeze_first(model)
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_contiguous():  # hoist's own are absent here
            parameter.data.copy_(parameter.data.bfloat16())


def predicted(directory: Path, engine: Engine, recipe: Recipe) -> Prediction:
    steps = make_steps(1, 3)
    staged = staged_model(tiny_config("llama"), recipe)
    config, setup = set_up(staged, layouts_of(staged, engine), recipe, engine, steps)
    with DirectEngine(num_threads=2) as files:
        return predict(staged, setup, config, engine=files, drives=[DrivePlace(directory=directory)])[0]


@pytest.mark.parametrize(
    ("engine", "recipe"),
    [
        (Engine(), Recipe()),
        (Engine(delay=1.0), Recipe()),
        (Engine(budget_factor=50.0, residency=1.0), Recipe()),
        (Engine(delay=0.5), Recipe(dtype="bfloat16")),
    ],
)
def test_a_prediction_adds_up(engine: Engine, recipe: Recipe, tmp_path: Path) -> None:
    found = predicted(tmp_path, engine, recipe)
    assert list(tmp_path.iterdir()) == []
    assert found.seconds >= 0.99 * found.compute_seconds > 0
    assert found.bound_by in found.without_seconds
    assert found.margin_seconds == pytest.approx(found.seconds - found.without_seconds[found.bound_by])
    assert found.limit_seconds == max(found.compute_seconds, found.io_seconds)
    assert found.lanes["compute"] >= 0.99 * found.compute_seconds
    document = json.loads(json.dumps(found.to_json()))
    assert document["tokens_per_second"] == pytest.approx(found.tokens / found.seconds)
    needed = {"seconds", "bound_by", "lanes", "read_bytes", "written_bytes", "read_bytes_per_second"}
    assert document.keys() >= needed | {"write_bytes_per_second", "compute_seconds", "io_seconds", "limit_seconds"}


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_training_after_a_prediction_has_the_same_bits(family: str, tmp_path: Path) -> None:
    """Losses, weights and moments, of a model with dropout too; torch's own generator goes on where it was."""
    steps = make_steps(2, 2)
    recipe, engine = Recipe(alter=_with_dropout), Engine(budget_factor=1.2)
    expected = train(tmp_path / "without", tiny_config(family), steps, recipe, engine)
    staged = staged_model(tiny_config(family), recipe)
    config, setup = set_up(staged, layouts_of(staged, engine), recipe, engine, steps)
    state = torch.get_rng_state()
    with DirectEngine(num_threads=2) as files:
        predict(staged, setup, config, engine=files, drives=[DrivePlace(directory=tmp_path)])
        assert torch.equal(torch.get_rng_state(), state)
        store = create_store(
            tmp_path / "with", model=staged, setup=setup, engine=files, attributes={},
            source=from_weights(initial_weights(tiny_config(family), recipe)),
        )  # fmt: skip
        with store:
            with Trainer(model=staged, store=store, engine=files, config=config, setup=setup) as trainer:
                losses = [trainer.step(step).loss for step in steps]
                trainer.commit()
            assert losses == expected.losses
            assert_identical_states(read_states(store, files), expected.states)


def _with_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1


def test_measuring_stays_within_the_budget(tmp_path: Path) -> None:
    """Weights of 32 MiB and a budget that is hardly more than what the run needs at least.

    Afterwards its buffers are gone, though nothing that refers to itself has been collected yet: the run's come next.
    """
    config = tiny_config("llama")
    config.update({"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048})
    steps = make_steps(1, 2, rows=2, tokens=64)
    staged = staged_model(config, Recipe())
    engine = Engine(budget_factor=1.05, max_chunk_elements=2**20, max_piece_elements=2**18)
    options, setup = set_up(staged, layouts_of(staged, engine), Recipe(), engine, steps)
    baseline = warm_up()
    with DirectEngine() as files:
        sampler = PeakSampler(baseline)
        gc.disable()
        try:
            predict(staged, setup, options, engine=files, drives=[DrivePlace(directory=tmp_path)])
            left_bytes = anonymous_bytes() - baseline
        finally:
            gc.enable()
            sampler.close()
    assert sampler.peak_bytes <= 1.1 * options.host_memory_bytes + 32 * 2**20
    assert left_bytes < setup.memory.arena_bytes // 2


def test_an_open_trainer_keeps_its_model(tmp_path: Path) -> None:
    steps = make_steps(1, 2)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, Engine()) as trainer:
        with pytest.raises(ConfigError, match="an open trainer uses this staged model"):
            predict(
                trainer._model, trainer._setup, trainer.config, engine=trainer._engine,
                drives=[DrivePlace(directory=tmp_path)],
            )  # fmt: skip
        trainer.step(steps[0])


def test_a_prediction_is_told_with_every_step(tmp_path: Path) -> None:
    steps = make_steps(1, 2)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, Engine()) as trainer:
        assert trainer.step(steps[0]).predicted_seconds is None
        store, engine, config, setup = trainer._store, trainer._engine, trainer.config, trainer._setup
        model = trainer._model
        trainer.close()
        with Trainer(
            model=model, store=store, engine=engine, config=config, setup=setup, prediction={"seconds": 1.5}
        ) as again:
            line = again.step(steps[0]).to_json()
            assert line["predicted_seconds"] == 1.5
            assert line["prediction_error"] == 1.5 / line["seconds"] - 1.0


# --- advice --------------------------------------------------------------------------------------------------------


def test_micro_batches_until_computation_takes_as_long() -> None:
    found = advice.micro_batches_until_compute_bound
    assert found(compute_seconds=1.0, io_seconds=4.0, num_micro_batches=2) == 8
    assert found(compute_seconds=3.0, io_seconds=4.0, num_micro_batches=2) == 3
    assert found(compute_seconds=5.0, io_seconds=4.0, num_micro_batches=2) == 2


def test_memory_until_computation_takes_as_long(tmp_path: Path) -> None:
    staged = staged_model(tiny_config("llama"), Recipe())
    engine = Engine(residency=1.0)
    _, setup = set_up(staged, layouts_of(staged, engine), Recipe(), engine, make_steps(1, 2))
    memory = setup.memory
    kept: list[Candidate] = list(memory.demand.keepable[memory.num_kept :])
    assert kept, "the budget is too large for the test"
    saved = kept[0].saved_bytes
    written = 0 if kept[0].keep is Keep.FROZEN else kept[0].num_bytes
    seconds = (saved - written) / 2.0 + written / 1.0
    more = advice.memory_until_compute_bound(memory, excess_seconds=seconds, bytes_per_second=(2.0, 1.0))
    assert more == kept[0].num_bytes
    most = sum(candidate.saved_bytes for candidate in kept)
    assert advice.memory_until_compute_bound(memory, excess_seconds=most, bytes_per_second=(1.0, 0.5)) is not None
    assert advice.memory_until_compute_bound(memory, excess_seconds=9.0 * most, bytes_per_second=(1.0, 1.0)) is None


def test_advice_is_given_where_it_helps() -> None:
    staged = staged_model(tiny_config("llama"), Recipe())
    engine = Engine(residency=1.0, budget_factor=1.2)
    config, setup = set_up(staged, layouts_of(staged, engine), Recipe(), engine, make_steps(1, 2))

    def told(bound_by: Lane, compute_seconds: float, io_seconds: float, **changed: str) -> str | None:
        return advice.line(
            bound_by.value,
            compute_seconds=compute_seconds,
            io_seconds=io_seconds,
            config=replace(config, **changed),  # type: ignore[arg-type]
            memory=setup.memory,
            bytes_per_second=(1e9, 1e9),
            spills=False,
        )

    assert told(Lane.COMPUTE, 4.0, 1.0) is None
    assert told(Lane.IO, 1.0, 1.01) is None
    assert told(Lane.IO, 1.0, 4.0) == "--micro-batches 8 (now 2) would compute as long as it moves bytes"
    horizontal = told(Lane.IO, 1.0, 4.0, plan="horizontal")
    assert horizontal is not None
    assert "--plan vertical" in horizontal
