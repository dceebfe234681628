"""Boundary activations beside a device: what finds no room in its memory waits in host memory, and else on NVMe.

That plans of such steps are right is `test_plan.py`'s part; that the table refuses to lose one `test_manager.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.configuration_utils import PreTrainedConfig

from hoist.scheduler.activation_slots import MIN_ACTIVATION_SLOTS, schedule
from hoist.scheduler.config import Order
from hoist.scheduler.ops import Kind
from hoist.scheduler.visits import Visit, forward_visits, horizontal_visits, vertical_visits
from hoist.scheduler.whereabouts import ACTIVATIONS, Whereabouts
from hoist.tiers.layout import TensorSpec, lay_out
from hoist.tiers.manager import Item, ItemKind, Manager, Tier
from tests.support.late_runs import on_late_devices
from tests.support.models import tiny_config
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    make_steps,
    torch_threads,
    train,
    train_reference,
    trainer_on,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# ---------------------------------------------------------------------- who waits where


def step_visits(order: Order, num_stages: int, num_micro_batches: int, first: int) -> tuple[Visit, ...]:
    make = vertical_visits if order == "vertical" else horizontal_visits
    return make(num_stages, num_micro_batches, first)


def evaluation_visits(order: Order, num_stages: int, num_micro_batches: int) -> tuple[Visit, ...]:
    """As `plan.evaluation` takes them."""
    visits = forward_visits(num_stages, num_micro_batches)
    if order == "vertical":
        return visits
    return tuple(Visit(each.stage, each.phase, (m,)) for m in range(num_micro_batches) for each in visits)


def moved(visits: Sequence[Visit], num_slots: int, num_host_slots: int) -> Counter[str]:
    """Moves of a schedule by what they do."""
    names = {(False, False): "spills", (True, False): "fetches", (False, True): "lowers", (True, True): "raises"}
    turns = schedule(visits, num_slots, num_host_slots)
    return Counter(names[move.comes, move.host_slot >= 0] for turn in turns for move in turn.moves)


ORDERS = st.sampled_from(("vertical", "horizontal"))


@settings(max_examples=60, deadline=None)
@given(
    order=ORDERS, num_stages=st.integers(2, 7), num_micro_batches=st.integers(1, 7), num_slots=st.integers(4, 9),
    data=st.data(),
)  # fmt: skip
def test_each_slot_in_host_memory_saves_traffic_until_nothing_is_spilled(
    order: Order, num_stages: int, num_micro_batches: int, num_slots: int, data: st.DataObject
) -> None:
    """When that is so, it is of shorter steps and of evaluations too, so a run that spills nothing needs no scratch."""
    first = data.draw(st.integers(0, num_stages - 1), label="first trained stage")
    visits = step_visits(order, num_stages, num_micro_batches, first)
    enough = max(0, (num_stages - 1) * num_micro_batches - num_slots + 1)
    spilled = [moved(visits, num_slots, count)["spills"] for count in range(enough + 1)]
    assert spilled == sorted(spilled, reverse=True)
    assert spilled[-1] == 0
    fewest = spilled.index(0)
    for shorter in range(1, num_micro_batches + 1):
        step = moved(step_visits(order, num_stages, shorter, first), num_slots, fewest)
        evaluated = moved(evaluation_visits(order, num_stages, shorter), num_slots, fewest)
        assert not step["spills"] and not evaluated["spills"]


def test_where_an_activation_waits_follows_from_when_it_is_needed() -> None:
    """Of those that wait at once, what comes back last goes to scratch: the first stages', needed at a step's end."""
    visits = vertical_visits(6, 4)
    whole = schedule(visits, MIN_ACTIVATION_SLOTS, 20)
    some = schedule(visits, MIN_ACTIVATION_SLOTS, 8)
    assert [turn.slots for turn in whole] == [turn.slots for turn in some]  # that does not depend on it
    spilled = {move.boundary for turn in some for move in turn.moves if move.host_slot < 0}
    kept = {(stage, micro_batch) for stage in range(5) for micro_batch in range(4)} - spilled
    assert spilled and kept
    assert max(stage for stage, _ in spilled) <= min(stage for stage, _ in kept)


def test_a_copy_that_is_still_good_is_not_made_again() -> None:
    """With room below, at most twice a step: what the forward made, and the gradient that the backward put there."""
    moves = [move for turn in schedule(vertical_visits(6, 8), MIN_ACTIVATION_SLOTS, 40) for move in turn.moves]
    lowered = Counter(move.boundary for move in moves if not move.comes)
    raised = Counter(move.boundary for move in moves if move.comes)
    assert all(move.host_slot >= 0 for move in moves)
    assert max(lowered.values()) <= 2 < max(raised.values())


def test_what_waits_in_host_memory_counts_there_and_once() -> None:
    layout = lay_out(index=0, name="embed", tensors=[TensorSpec(name="w", shape=(8,), trainable=True)])
    tiers = {ItemKind.ACTIVATION: Tier.DEVICE}
    manager, whereabouts = Manager(tiers=tiers, validate=True), Whereabouts([layout], [layout.pieces(4096)], tiers)
    items = [Item(ItemKind.ACTIVATION, 0, micro_batch) for micro_batch in range(3)]

    def found() -> tuple[int, int, int, int]:
        activations = whereabouts.stages(manager.snapshot())[0][ACTIVATIONS]
        return activations.nvme, activations.host, activations.device, activations.dirty

    manager.create(items[0], 0, 64)
    assert found() == (0, 0, 64, 64)
    manager.lower(items[0], 0, 64)
    assert found() == (0, 64, 64, 64)  # the copy on the device may go
    manager.create(items[1], 0, 64)
    assert found() == (0, 64, 64, 128)
    manager.write(items[1])
    manager.written(items[1], 64)
    assert found() == (64, 64, 64, 64)
    manager.lift(items[0], 1, 64)
    manager.modify(items[0])
    assert found() == (64, 0, 128, 64)
    both = {whereabouts.second_number(each) for each in (items[2], Item(ItemKind.LOWERED_ACTIVATION, 0, 2))}
    assert both == {2, -3}


# ---------------------------------------------------------------------- runs

#: Of a model of so many layers; one whose micro-batch alone has more boundaries than the fewest slots.
LAYERS = {"vertical": 3, "horizontal": 6}


def model_of(order: Order) -> PreTrainedConfig:
    config = tiny_config("llama")
    config.num_hidden_layers = LAYERS[order]
    return config


@cache
def expected(order: Order, num_micro_batches: int) -> Outcome:
    return train_reference(model_of(order), make_steps(2, num_micro_batches), Recipe())


def train_late(
    directory: Path, order: Order, num_micro_batches: int, host: float, seed: int, *, device: float = 1.0
) -> Outcome:
    """Two steps on a late device with little memory, and ``host`` times the smallest budget of host memory."""
    engine = Engine(plan=order, budget_factor=host, device_budget_factor=device)
    with on_late_devices(seed):
        got = train(directory / "store", model_of(order), make_steps(2, num_micro_batches), Recipe(), engine)
    assert_identical(got, expected(order, num_micro_batches))
    assert got.memory is not None and got.memory.num_activations < got.memory.demand.num_boundaries
    assert got.ops[Kind.LOWER_ACTIVATION] and got.ops[Kind.RAISE_ACTIVATION]
    return got


PLENTY, LITTLE = 50.0, 1.0


@pytest.mark.parametrize(
    ("order", "num_micro_batches", "seed"),
    [
        ("vertical", 3, 0),
        ("horizontal", 3, 4),
        *(
            pytest.param(order, count, seed, marks=pytest.mark.slow)
            for order in ("vertical", "horizontal")
            for count in (3, 7)
            for seed in range(1, 9)
        ),
    ],
)
def test_with_room_in_host_memory_none_goes_to_nvme(
    order: Order, num_micro_batches: int, seed: int, tmp_path: Path
) -> None:
    got = train_late(tmp_path, order, num_micro_batches, PLENTY, seed)
    assert not got.ops[Kind.SPILL_ACTIVATION] and not got.ops[Kind.FETCH_ACTIVATION]
    assert not (tmp_path / "store" / "scratch" / "activations").exists()


@pytest.mark.parametrize(
    ("num_micro_batches", "seed"),
    [(7, 2), *(pytest.param(count, seed, marks=pytest.mark.slow) for count in (3, 7) for seed in range(3, 12))],
)
def test_what_finds_no_room_there_either_goes_to_nvme(num_micro_batches: int, seed: int, tmp_path: Path) -> None:
    got = train_late(tmp_path, "vertical", num_micro_batches, LITTLE, seed)
    assert got.ops[Kind.SPILL_ACTIVATION] and got.ops[Kind.FETCH_ACTIVATION]


@pytest.mark.slow
@pytest.mark.parametrize("device", [1.02, 1.05, 1.1])
@pytest.mark.parametrize("host", [1.05, 1.2, 1.5])
def test_any_two_budgets(device: float, host: float, tmp_path: Path) -> None:
    train_late(tmp_path, "vertical", 7, host, int(100 * device * host), device=device)


def test_scratch_and_the_table_follow_the_plan(tmp_path: Path) -> None:
    """Steps and evaluations with room in host memory write no activation to the drive, and leave none anywhere."""
    engine = Engine(plan="vertical", budget_factor=PLENTY, device_budget_factor=1.0, resident_weights=False)
    steps = make_steps(2, 5)
    with on_late_devices(5), trainer_on(tmp_path / "store", model_of("vertical"), steps, engine) as trainer:
        assert trainer._setup.scratch_activation_bytes == 0
        for step in steps:
            trainer.step(step)
        trainer.evaluate(steps[0])
        trainer.wait()
        kinds = trainer.statistics().residency.kinds
        assert kinds["activation"].writes == kinds["activation"].fills == 0
        assert kinds["activation"].resident_bytes == kinds["lowered activation"].resident_bytes == 0
        memory = trainer.memory
        assert trainer.statistics().residency.peak_bytes["host"] > memory.host_activation_bytes > 0
        assert sum(size for _, size in memory.parts()) == memory.need_bytes
