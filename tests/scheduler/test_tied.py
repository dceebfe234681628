"""Tied weights, which one stage owns and another uses: the bits of a stated order of sums; torch's own for M = 1.

With M micro-batches torch adds each micro-batch's two gradients of a tied weight, then the sums:
(h0 + e0) + (h1 + e1) + ... . hoist sees all of the head's before any of the embedding's, so it keeps the sums apart:
(e0 + e1 + ...) + (h0 + h1 + ...), in both plans. For M = 1 these are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from hoist.optim.adamw import AdamWHyperparameters
from hoist.scheduler.config import Order
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS
from tests.support.models import FAMILIES, num_counted, reference_model, tiny_config
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    assert_identical_states,
    assert_nvme_was_used,
    make_steps,
    torch_threads,
    train,
    train_reference,
)

U = 2.0**-24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def recipe_for(family: str) -> Recipe:
    return Recipe(attention="eager" if family == "gemma2" else "sdpa")


def embeddings(model: PreTrainedModel) -> tuple[nn.Parameter, nn.Parameter]:
    """The weights of the input and output embeddings."""
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert isinstance(first, nn.Parameter)
    assert isinstance(last, nn.Parameter)
    return first, last


def train_with_sums_apart(config: PreTrainedConfig, num_steps: int, micro_batches: int, recipe: Recipe) -> Outcome:
    """The plain loop with the head's copy of the weights a Parameter of its own, whose gradient is added at the end."""

    def part(model: PreTrainedModel) -> None:
        if recipe.alter is not None:
            recipe.alter(model)
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())

    def add(model: PreTrainedModel) -> None:
        first, last = embeddings(model)
        assert first.grad is not None
        assert last.grad is not None
        first.grad.add_(last.grad)
        last.grad = None  # AdamW passes it over

    def copy_back(model: PreTrainedModel) -> None:
        first, last = embeddings(model)
        with torch.no_grad():
            last.copy_(first)

    twin = replace(recipe, alter=part)
    outcome = train_reference(
        config, make_steps(num_steps, micro_batches), twin, before_update=add, after_update=copy_back
    )
    names = dict(reference_model(config, attention=recipe.attention).named_parameters()).keys()
    (extra,) = outcome.initial.keys() - names
    for values in (outcome.initial, outcome.states.weights, outcome.states.exp_avg, outcome.states.exp_avg_sq):
        del values[extra]
    del outcome.states.adam_steps[extra]
    return outcome


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_one_micro_batch_equals_torch(family: str, tmp_path: Path) -> None:
    check_one_micro_batch(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_one_micro_batch_equals_torch_in_every_family(family: str, tmp_path: Path) -> None:
    check_one_micro_batch(family, tmp_path)


def check_one_micro_batch(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, tied=True)
    got = train(tmp_path / "store", config, make_steps(3, 1), recipe_for(family), Engine())
    assert_identical(got, train_reference(config, make_steps(3, 1), recipe_for(family)))
    assert_nvme_was_used(got)


@pytest.mark.parametrize(
    ("family", "plan", "budget_factor"),
    [
        ("llama", "vertical", 1.0),
        ("opt", "vertical", 1.5),
        ("opt", "vertical", 50.0),
        ("llama", "horizontal", 50.0),
        ("opt", "horizontal", 1.0),
    ],
)
def test_many_micro_batches_equal_sums_made_apart(
    family: str, plan: Order, budget_factor: float, tmp_path: Path
) -> None:
    config = tiny_config(family, tied=True)
    engine = Engine(plan=plan, budget_factor=budget_factor)
    got = train(tmp_path / "store", config, make_steps(3, 3), recipe_for(family), engine)
    assert_identical(got, train_with_sums_apart(config, 3, 3, recipe_for(family)))


def one_layer_for_all(model: PreTrainedModel) -> None:
    """As in ALBERT: every entry of the list is the first layer."""
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    for number in range(1, len(layers)):
        layers[number] = layers[0]


@pytest.mark.parametrize(("plan", "budget_factor"), [("vertical", 1.0), ("vertical", 50.0), ("horizontal", 1.0)])
def test_a_layer_used_three_times_sums_its_gradients_and_is_updated_once(
    plan: Order, budget_factor: float, tmp_path: Path
) -> None:
    config = tiny_config("llama")
    recipe = Recipe(alter=one_layer_for_all)
    got = train(
        tmp_path / "store", config, make_steps(3, 1), recipe, Engine(plan=plan, budget_factor=budget_factor)
    )
    expected = train_reference(config, make_steps(3, 1), recipe)
    assert got.losses == expected.losses
    assert got.states.adam_steps == expected.states.adam_steps
    assert_identical_states(got.states, expected.states)


def test_a_layer_used_three_times_with_many_micro_batches(tmp_path: Path) -> None:
    """Sums in another order than torch's: gradients are within the bound of two orders, seen in one step's exp_avg."""
    adam = AdamWHyperparameters(lr=1e-2, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)
    recipe = Recipe(alter=one_layer_for_all, hyperparameters=adam)
    config = tiny_config("llama")
    got = train(tmp_path / "store", config, make_steps(1, 3), recipe, Engine())
    expected = train_reference(config, make_steps(1, 3), recipe)
    assert got.losses == expected.losses
    for name, gradient in expected.states.exp_avg.items():
        torch.testing.assert_close(got.states.exp_avg[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def with_bias(model: PreTrainedModel) -> None:
    """Give the head, whose weight is the embedding's, a bias of its own."""
    head = model.get_output_embeddings()
    head.bias = nn.Parameter(torch.linspace(-1, 1, head.weight.shape[0]))


def test_a_tied_head_with_a_bias_and_an_embedding_of_many_chunks(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=True)
    recipe = Recipe(alter=with_bias)
    engine = Engine(max_chunk_elements=CHUNK_QUANTUM_ELEMENTS)  # 4096 elements; the embedding has 32,192
    got = train(tmp_path / "store", config, make_steps(3, 1), recipe, engine)
    assert_identical(got, train_reference(config, make_steps(3, 1), recipe))
    assert got.states.weights["model.embed_tokens.weight"].numel() > 7 * CHUNK_QUANTUM_ELEMENTS
    assert got.updates()["lm_head.bias"].abs().max() > 0


@pytest.mark.parametrize(
    ("family", "plan", "micro_batches", "budget_factor", "residency"),
    [
        ("llama", "vertical", 1, 1.0, 0.0),
        ("opt", "horizontal", 3, 3.0, 0.3),
        pytest.param("opt", "vertical", 3, 1.0, 0.0, marks=pytest.mark.slow),
        pytest.param("gpt2", "vertical", 3, 50.0, 0.0, marks=pytest.mark.slow),
        pytest.param("gemma2", "horizontal", 2, 1.5, 0.5, marks=pytest.mark.slow),
    ],
)
def test_in_bfloat16_both_sums_are_float32(
    family: str, plan: Order, micro_batches: int, budget_factor: float, residency: float, tmp_path: Path
) -> None:
    """Torch adds a micro-batch's two gradients in bfloat16, so even for one these are other bits than its own."""
    recipe = replace(recipe_for(family), dtype="bfloat16")
    config = tiny_config(family, tied=True)
    engine = Engine(plan=plan, budget_factor=budget_factor, residency=residency)
    got = train(tmp_path / "store", config, make_steps(3, micro_batches), recipe, engine)
    assert_identical(got, train_with_sums_apart(config, 3, micro_batches, recipe))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 3, 7])
@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_sums_made_apart(family: str, plan: Order, micro_batches: int, tmp_path: Path) -> None:
    config = tiny_config(family, tied=True)
    got = train(tmp_path / "store", config, make_steps(3, micro_batches), recipe_for(family), Engine(plan=plan))
    assert_identical(got, train_with_sums_apart(config, 3, micro_batches, recipe_for(family)))


def test_distance_to_torch_is_that_of_reordered_sums(tmp_path: Path) -> None:
    """One step at M = 3: gradients within the bound of two orders of one sum, updates within what that implies.

    Two orders of a float32 sum of n terms differ by at most 2 (n - 1) u sum|terms|; n = 2M here. AdamW's first update,
    -lr g / (|g| + eps) beside the decay, grows with g, so it must lie between the updates of the two ends. betas are 0
    and 0: exp_avg then is the gradient itself.
    """
    adam = AdamWHyperparameters(lr=1e-2, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)
    recipe = Recipe(hyperparameters=adam)
    config = tiny_config("llama", tied=True)
    steps = make_steps(1, 3)
    got = train(tmp_path / "store", config, steps, recipe, Engine())
    expected = train_reference(config, steps, recipe)
    assert got.losses == expected.losses
    shared = "model.embed_tokens.weight"
    for name in got.states.weights.keys() - {shared}:
        assert torch.equal(got.states.weights[name], expected.states.weights[name]), name
    size = _sum_of_term_sizes(config)
    bound = 2 * 5 * U * size
    gradient = expected.states.exp_avg[shared].double()
    assert bool(((got.states.exp_avg[shared] - gradient).abs() <= bound).all())

    def update(value: Tensor) -> Tensor:
        return -adam.lr * value / (value.abs() + adam.eps)

    moved = got.updates()[shared].double()
    slack = 8 * U * (got.initial[shared].abs().double() + adam.lr)
    assert bool((moved <= update(gradient - bound) + slack).all())
    assert bool((moved >= update(gradient + bound) - slack).all())


def _sum_of_term_sizes(config: PreTrainedConfig) -> Tensor:
    """float64: per element of the tied weight, the sum of the sizes of all micro-batches' gradients of both uses."""
    (step,) = make_steps(1, 3)
    num_items = sum(num_counted(batch) for batch in step)
    total = torch.zeros((), dtype=torch.float64)
    for batch in step:
        model = reference_model(config)
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        torch.autograd.backward(model(**batch, num_items_in_batch=num_items, use_cache=False).loss)
        for part in embeddings(model):
            assert part.grad is not None
            total = total + part.grad.double().abs()
    return total
