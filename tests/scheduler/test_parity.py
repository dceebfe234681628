"""hoist against a plain in-memory PyTorch loop: nine families, both plans, M micro-batches, any budget: the same bits.

Tied weights are the one exception from M = 2 on; what they equal, and how far from torch's own sum they may lie, is
`test_tied.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from hoist.optim.adamw import AdamWHyperparameters
from hoist.optim.schedules import Schedule, ScheduleKind
from hoist.scheduler.config import Order
from hoist.scheduler.ops import Kind
from tests.support.models import FAMILIES, batch_of, reference_model, tiny_config
from tests.support.training import (
    Batch,
    Engine,
    Outcome,
    Recipe,
    States,
    accumulate_gradients,
    assert_identical,
    assert_nvme_was_used,
    make_steps,
    packed,
    padded,
    read_states,
    torch_threads,
    train,
    train_reference,
)

#: Unit roundoff of float32.
U = 2.0**-24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def recipe_for(family: str) -> Recipe:
    """Gemma-2 has eager attention only."""
    return Recipe(attention="eager" if family == "gemma2" else "sdpa")


@cache
def reference(family: str, num_micro_batches: int, num_steps: int = 3) -> Outcome:
    return train_reference(tiny_config(family), make_steps(num_steps, num_micro_batches), recipe_for(family))


def check(directory: Path, family: str, plan: Order, num_micro_batches: int, num_steps: int = 3) -> None:
    steps = make_steps(num_steps, num_micro_batches)
    got = train(directory / "store", tiny_config(family), steps, recipe_for(family), Engine(plan=plan))
    assert_identical(got, reference(family, num_micro_batches, num_steps))
    assert_nvme_was_used(got)


@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_weights_and_moments_equal_the_plain_loop(family: str, plan: Order, tmp_path: Path) -> None:
    check(tmp_path, family, plan, 3)


@pytest.mark.parametrize(
    ("family", "plan", "num_micro_batches"),
    [
        ("gpt2", "vertical", 1),
        ("gemma2", "vertical", 2),
        ("llama", "vertical", 7),
        ("gemma2", "horizontal", 1),
        ("llama", "horizontal", 2),
        ("gpt2", "horizontal", 7),
    ],
)
def test_any_number_of_micro_batches(family: str, plan: Order, num_micro_batches: int, tmp_path: Path) -> None:
    check(tmp_path, family, plan, num_micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 7])
@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_plan_and_number(family: str, plan: Order, num_micro_batches: int, tmp_path: Path) -> None:
    check(tmp_path, family, plan, num_micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
def test_fifty_steps(plan: Order, tmp_path: Path) -> None:
    check(tmp_path, "llama", plan, 3, num_steps=50)


def test_two_threads(tmp_path: Path) -> None:
    with torch_threads(2):
        expected = train_reference(tiny_config("llama"), make_steps(3, 2), Recipe())
        got = train(tmp_path / "store", tiny_config("llama"), make_steps(3, 2), Recipe(), Engine())
    assert_identical(got, expected)


@pytest.mark.parametrize(
    ("plan", "budget_factor"),
    [*(("vertical", factor) for factor in (1.0, 1.2, 1.6, 3.0, 50.0)), ("horizontal", 1.0), ("horizontal", 50.0)],
)
def test_any_budget_and_piece(plan: Order, budget_factor: float, tmp_path: Path) -> None:
    engine = Engine(plan=plan, budget_factor=budget_factor, max_piece_elements=4096 if budget_factor < 2 else 2**20)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(3, 3), Recipe(), engine)
    assert_identical(got, reference("llama", 3))
    assert_nvme_was_used(got)
    assert got.memory is not None
    spills = got.ops[Kind.SPILL_ACTIVATION] + got.ops[Kind.SPILL_GRADIENT]
    if budget_factor == 1.0:
        assert got.memory.num_gradient_buffers == 1
        assert got.ops[Kind.SPILL_ACTIVATION if plan == "vertical" else Kind.SPILL_GRADIENT] > 0
    if budget_factor == 50.0:
        assert spills == 0
        assert got.memory.num_resident == len(got.memory.demand.stages)


@pytest.mark.parametrize(
    ("plan", "weight_buffers", "delay"), [("vertical", 3, 0.0), ("vertical", 4, 0.5), ("horizontal", 3, 0.5)]
)
def test_any_number_of_weight_buffers(plan: Order, weight_buffers: int, delay: float, tmp_path: Path) -> None:
    engine = Engine(plan=plan, weight_buffers=weight_buffers, delay=delay, resident_weights=False)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(3, 3), Recipe(), engine)
    assert_identical(got, reference("llama", 3))


@pytest.mark.parametrize(
    ("family", "plan", "budget_factor"),
    [
        ("llama", "vertical", 1.0),
        ("gpt2", "vertical", 50.0),
        ("gemma2", "horizontal", 1.0),
        ("llama", "horizontal", 50.0),
    ],
)
def test_micro_batches_of_different_shapes(family: str, plan: Order, budget_factor: float, tmp_path: Path) -> None:
    shapes = [[(2, 12), (1, 7), (2, 9)], [(1, 2)], [(2, 12), (2, 12)], [(1, 5), (2, 12), (1, 12)]]
    steps = [
        [batch_of(rows, tokens, seed=10 * number + index) for index, (rows, tokens) in enumerate(step)]
        for number, step in enumerate(shapes)
    ]
    for step in steps:
        for batch in step:  # batch_of leaves the first labels out: none would count in two tokens
            batch["labels"] = batch["input_ids"].clone()
    expected = train_reference(tiny_config(family), steps, recipe_for(family))
    engine = Engine(plan=plan, budget_factor=budget_factor)
    assert_identical(train(tmp_path / "store", tiny_config(family), steps, recipe_for(family), engine), expected)


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_padding_masks(family: str, tmp_path: Path) -> None:
    check_padding(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_masks_in_every_family(family: str, tmp_path: Path) -> None:
    check_padding(family, tmp_path)


def check_padding(family: str, tmp_path: Path) -> None:
    plain = make_steps(2, 3)
    steps: list[list[Batch]] = [[padded(step[0], right=4), step[1], padded(step[2], left=3)] for step in plain]
    expected = train_reference(tiny_config(family), steps, recipe_for(family))
    assert_identical(train(tmp_path / "store", tiny_config(family), steps, recipe_for(family), Engine()), expected)
    assert expected.losses != reference(family, 3, 2).losses  # the masks matter


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_packed_documents(family: str, tmp_path: Path) -> None:
    check_packed(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_packed_documents_in_every_family(family: str, tmp_path: Path) -> None:
    check_packed(family, tmp_path)


def check_packed(family: str, tmp_path: Path) -> None:
    plain = make_steps(2, 3)
    steps: list[list[Batch]] = [
        [packed(step[0], starts=[5]), packed(step[1], starts=[]), packed(step[2], starts=[1, 4, 11])] for step in plain
    ]
    expected = train_reference(tiny_config(family), steps, recipe_for(family))
    assert_identical(train(tmp_path / "store", tiny_config(family), steps, recipe_for(family), Engine()), expected)
    crossing = [[{**batch, "position_ids": positions_of(batch)} for batch in step] for step in steps]
    assert expected.losses != train_reference(tiny_config(family), crossing, recipe_for(family)).losses


def positions_of(batch: Batch) -> torch.Tensor:
    """Positions of rows that are one document."""
    rows, tokens = batch["input_ids"].shape
    return torch.arange(tokens).expand(rows, tokens).contiguous()


@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
def test_micro_batches_without_a_counted_label(plan: Order, tmp_path: Path) -> None:
    """As in a plain loop they count nothing, and the others are as ever; clipped or not."""
    steps = make_steps(2, 3)
    for step in steps:
        step[1]["labels"] = torch.full_like(step[1]["labels"], -100)
    expected = train_reference(tiny_config("llama"), steps, Recipe())
    assert_identical(train(tmp_path / "store", tiny_config("llama"), steps, Recipe(), Engine(plan=plan)), expected)


def test_label_counts_of_micro_batches_do_not_matter(tmp_path: Path) -> None:
    """3 and 29 labels: two micro-batches are what one of both rows is, but for the order of the sums."""
    row = make_steps(1, 1, rows=2, tokens=30)[0][0]
    row["labels"] = row["input_ids"].clone()
    row["labels"][0, :-3] = -100
    apart = [[{name: value[index : index + 1] for name, value in row.items()} for index in range(2)]]
    recipe = Recipe(hyperparameters=AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0))
    one = train(tmp_path / "one", tiny_config("llama"), [[row]], recipe, Engine())
    two = train(tmp_path / "two", tiny_config("llama"), apart, recipe, Engine())
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    for name, moments in one.states.exp_avg.items():
        assert torch.allclose(two.states.exp_avg[name], moments, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(("kind", "no_decay_norms"), [("linear", False), ("cosine", True)])
def test_schedules_and_weight_decay(kind: ScheduleKind, no_decay_norms: bool, tmp_path: Path) -> None:
    recipe = Recipe(
        hyperparameters=AdamWHyperparameters(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5),
        schedule=Schedule(kind=kind, lr=0.1, warmup_steps=2, num_steps=6),
        no_decay_norms=no_decay_norms,
    )
    steps = make_steps(6, 2)
    got = train(tmp_path / "store", tiny_config("gpt2"), steps, recipe, Engine())
    assert_identical(got, train_reference(tiny_config("gpt2"), steps, recipe))
    assert [step.lr for step in got.metrics] == [recipe.schedule.at(number) for number in range(1, 7)]


def test_a_step_of_torchs_default_adamw_is_equal_within_its_rounding(tmp_path: Path) -> None:
    """The default (not fused) AdamW rounds in other places: each step is compared from hoist's own state before it.

    Moments: a product and a sum each, at most 3 roundings apart on either side. Weights: the decay rounds a number of
    the size of the weight, the step one of the size of lr (|exp_avg_hat| <= sqrt(exp_avg_sq_hat) up to a factor that
    beta1 < sqrt(beta2) bounds by 8 here); 8 roundings on either side cover all of the formula's operations.
    """
    recipe = Recipe()
    adam = recipe.hyperparameters
    steps = make_steps(4, 2)
    history: list[States] = []
    got = train(
        tmp_path / "store",
        tiny_config("llama"),
        steps,
        recipe,
        Engine(),
        after_step=lambda store, files, done: history.append(read_states(store, files)),
    )
    model = reference_model(tiny_config("llama"))
    parameters = dict(model.named_parameters())
    before = States(
        weights=got.initial,
        exp_avg={name: torch.zeros_like(value) for name, value in got.initial.items()},
        exp_avg_sq={name: torch.zeros_like(value) for name, value in got.initial.items()},
        adam_steps={},
    )
    for number, (step, after) in enumerate(zip(steps, history, strict=True), start=1):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before.weights[name])
        accumulate_gradients(model, step)
        optimizer = torch.optim.AdamW(
            parameters.values(), lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay
        )
        for name, parameter in parameters.items():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(number - 1)),
                "exp_avg": before.exp_avg[name].clone(),
                "exp_avg_sq": before.exp_avg_sq[name].clone(),
            }
        optimizer.step()
        for name, parameter in parameters.items():
            state = optimizer.state[parameter]
            assert parameter.grad is not None
            size = adam.betas[0] * before.exp_avg[name].abs() + (1 - adam.betas[0]) * parameter.grad.abs()
            assert bool(((after.exp_avg[name] - state["exp_avg"]).abs() <= 6 * U * size).all()), name
            gap = (after.exp_avg_sq[name] - state["exp_avg_sq"]).abs()
            assert bool((gap <= 6 * U * state["exp_avg_sq"] + 2.0**-149).all()), name
            gap = (after.weights[name] - parameter.detach()).abs()
            assert bool((gap <= 16 * U * (before.weights[name].abs() + 8 * adam.lr)).all()), name
        before = after
