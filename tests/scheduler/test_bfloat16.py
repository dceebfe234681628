"""Computing in bfloat16 with float32 masters: the bits of a plain loop that does so, and half the bytes of weights.

The plain loop is `Masters` in `tests/support/training.py`. Tied weights are also in `test_tied.py`, adapters in
`tests/tools/test_lora.py`, blocks of gradients in `test_accumulate.py`, conversion in place in `test_freezing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hoist.optim.adamw import AdamWHyperparameters
from hoist.optim.schedules import Schedule
from hoist.scheduler import memory
from hoist.scheduler.config import Order
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.freezing import choose_trained
from hoist.scheduler.memory import STATE_BYTES
from hoist.scheduler.models import build_model
from hoist.scheduler.module_stages import stage_modules
from hoist.scheduler.op_bytes import OpBytes
from hoist.scheduler.ops import Kind
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import split
from tests.support.branching import even_steps_only, with_branch
from tests.support.models import FAMILIES, reference_model, tiny_config
from tests.support.sampling import thinned
from tests.support.training import (
    PLENTY_BYTES,
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    assert_identical_states,
    elements_of,
    layouts_of,
    make_steps,
    same_bits,
    scale_by_exact_norm,
    staged_model,
    torch_threads,
    train,
    train_reference,
    trained_part,
    trainer_config,
    trainer_on,
)

PLANS: tuple[Order, ...] = ("vertical", "horizontal")
NUM_STEPS = 3
PLAIN = Recipe(dtype="bfloat16")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def recipe_of(family: str) -> Recipe:
    return replace(PLAIN, attention="eager" if family == "gemma2" else "sdpa")


@cache
def reference(family: str, num_micro_batches: int) -> Outcome:
    return train_reference(tiny_config(family), make_steps(NUM_STEPS, num_micro_batches), recipe_of(family))


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("family", "plan", "num_micro_batches"),
    [
        ("llama", "vertical", 3),
        ("gpt2", "horizontal", 1),
        *(
            pytest.param(family, plan, count, marks=pytest.mark.slow)
            for family in FAMILIES
            for plan in PLANS
            for count in (1, 3)
        ),
    ],
)
def test_losses_weights_and_moments_equal_the_plain_loop(
    family: str, plan: Order, num_micro_batches: int, tmp_path: Path
) -> None:
    steps = make_steps(NUM_STEPS, num_micro_batches)
    got = train(tmp_path / "store", tiny_config(family), steps, recipe_of(family), Engine(plan=plan))
    assert_identical(got, reference(family, num_micro_batches))


@pytest.mark.parametrize(
    ("plan", "budget_factor", "delay", "residency", "verify_reads"),
    thinned(4, PLANS, (1.0, 1.5, 50.0), (0.0, 0.6), (0.0, 0.5), (False, True)),
)
def test_any_budget_delay_and_share_in_memory(
    plan: Order, budget_factor: float, delay: float, residency: float, verify_reads: bool, tmp_path: Path
) -> None:
    engine = Engine(plan=plan, budget_factor=budget_factor, delay=delay, residency=residency)
    steps = make_steps(NUM_STEPS, 3)
    got = train(tmp_path / "store", tiny_config("llama"), steps, PLAIN, engine, verify_reads=verify_reads)
    assert_identical(got, reference("llama", 3))
    if residency == 0:
        assert got.ops[Kind.READ_WEIGHTS] > got.ops[Kind.MERGE] == 0, "only what is kept is copied"


@pytest.mark.parametrize(("plan", "delay", "residency"), [("vertical", 0.6, 0.5), ("horizontal", 0.0, 0.2)])
def test_states_in_memory(plan: Order, delay: float, residency: float, tmp_path: Path) -> None:
    """Half of what is kept there goes to the weight buffer for a visit."""
    engine = Engine(plan=plan, budget_factor=3.0, delay=delay, residency=residency, resident_weights=False)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(NUM_STEPS, 3), PLAIN, engine)
    assert_identical(got, reference("llama", 3))
    assert got.ops[Kind.MERGE] > 0
    assert got.ops[Kind.READ_WEIGHTS] > 0
    assert got.ops[Kind.WRITE_KEPT] > 0


@pytest.mark.parametrize("clip_mode", ["exact", pytest.param("speculative", marks=pytest.mark.slow)])
def test_clipping(clip_mode: Any, tmp_path: Path) -> None:
    recipe = replace(PLAIN, clip_norm=1.0, alter=with_branch, before_step=even_steps_only)
    steps = make_steps(4, 2)
    scales: list[float] = []
    hook = partial(scale_by_exact_norm, 1.0, scales)
    expected = train_reference(tiny_config("llama"), steps, recipe, before_update=hook)
    assert min(scales) < 1.0
    engine = Engine(clip_mode=clip_mode, delay=0.5, commit_every=1, max_chunk_elements=4096)
    assert_identical(train(tmp_path / "store", tiny_config("llama"), steps, recipe, engine), expected)


class Adding(nn.Module):
    """Another module, and a parameter that is added to what it gives."""

    def __init__(self, inner: nn.Module, bias: nn.Parameter) -> None:
        super().__init__()
        self.inner = inner
        self.own = bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(hidden)
        return result + self.own


def adding_a_bias(model: PreTrainedModel, *, of_its_own: bool) -> None:
    """The third layer adds a bias of the first one; or a copy."""
    layers = model.get_submodule("transformer.h")
    assert isinstance(layers, nn.ModuleList)
    bias = shared_bias(model)
    if of_its_own:
        bias = nn.Parameter(bias.detach().clone())
    layers[2].mlp = Adding(layers[2].get_submodule("mlp"), bias)


def shared_bias(model: PreTrainedModel) -> nn.Parameter:
    return model.get_parameter("transformer.h.0.mlp.c_proj.bias")


def add_the_copys_gradient(model: PreTrainedModel) -> None:
    copied = model.get_parameter("transformer.h.2.mlp.own")
    first = shared_bias(model)
    assert first.grad is not None
    assert copied.grad is not None
    first.grad.add_(copied.grad)
    copied.grad = None


def renew_the_copy(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_parameter("transformer.h.2.mlp.own").copy_(shared_bias(model))


@pytest.mark.parametrize(("plan", "budget_factor", "residency"), [("vertical", 1.0, 0.0), ("horizontal", 2.0, 0.5)])
def test_a_borrowed_tensor_in_the_middle_of_a_page(
    plan: Order, budget_factor: float, residency: float, tmp_path: Path
) -> None:
    """Whole pages of it are read; a micro-batch's two gradients of it are added in float32, in torch in bfloat16."""
    recipe = replace(PLAIN, alter=partial(adding_a_bias, of_its_own=False))
    engine = Engine(plan=plan, budget_factor=budget_factor, residency=residency, max_chunk_elements=4096)
    got = train(tmp_path / "store", tiny_config("gpt2"), make_steps(3, 2), recipe, engine)
    twin = replace(PLAIN, alter=partial(adding_a_bias, of_its_own=True))
    expected = train_reference(
        tiny_config("gpt2"),
        make_steps(3, 2),
        twin,
        before_update=add_the_copys_gradient,
        after_update=renew_the_copy,
    )
    assert got.losses == expected.losses
    for name, value in got.states.weights.items():
        assert same_bits(value, expected.states.weights[name]), name


# ---------------------------------------------------------------------- frozen weights


def frozen_recipe(kept_as: str | None) -> Recipe:
    """Embedding and parts of layers are frozen, and kept in float32 or such 16 bits."""

    def alter(model: PreTrainedModel) -> None:
        choose_trained(model, train=(), freeze=("*embed_tokens*", "*.layers.[01].self_attn.*"))
        for parameter in model.parameters():
            if kept_as is not None and not parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, kept_as)).to(parameter.dtype)

    return replace(PLAIN, alter=alter, frozen_dtype=kept_as)


@pytest.mark.parametrize(
    ("kept_as", "budget_factor", "residency"),
    [(None, 1.0, 0.0), ("bfloat16", 1.0, 0.0), ("float16", 1.5, 1.0), (None, 50.0, 1.0)],
)
def test_frozen_weights(kept_as: str | None, budget_factor: float, residency: float, tmp_path: Path) -> None:
    recipe = frozen_recipe(kept_as)
    model = reference_model(tiny_config("llama"))
    assert recipe.alter is not None
    recipe.alter(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    steps = make_steps(NUM_STEPS, 2)
    engine = Engine(budget_factor=budget_factor, residency=residency)
    got = train(tmp_path / "store", tiny_config("llama"), steps, recipe, engine)
    assert_identical(got, trained_part(train_reference(tiny_config("llama"), steps, recipe), trained))
    assert bool(got.ops[Kind.WIDEN]) == (kept_as != "bfloat16"), "what is kept in bfloat16 is computed with as it is"


# ---------------------------------------------------------------------- evaluations, slices of the loss


def test_evaluations_and_a_loss_in_slices(tmp_path: Path) -> None:
    """An evaluation is the next step's loss; slices add up what each token gives, in float32."""
    steps = make_steps(2, 2)
    engine = Engine(loss_slice_tokens=5)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, engine, PLAIN) as trainer:
        found = [trainer.evaluate(steps[0]).loss, trainer.step(steps[0]).loss]
        found += [trainer.evaluate(steps[1]).loss, trainer.step(steps[1]).loss]
    assert found[::2] == found[1::2]
    whole = reference("llama", 2).losses
    assert found[0] == pytest.approx(whole[0], rel=1e-6)
    assert found[2] == pytest.approx(whole[1], rel=1e-3)


# ---------------------------------------------------------------------- one store for both


def test_a_store_is_the_same_for_both_and_goes_on_with_either(tmp_path: Path) -> None:
    steps = make_steps(4, 2)
    config, engine = tiny_config("llama"), Engine()
    stores = tmp_path / "float32", tmp_path / "bfloat16"
    for directory, recipe in zip(stores, (Recipe(), PLAIN), strict=True):
        with trainer_on(directory, config, steps, engine, recipe):
            pass  # the store is there
    written = [
        {path.relative_to(store): path.read_bytes() for path in (store / "stages").rglob("*") if path.is_file()}
        for store in stores
    ]
    assert written[0]
    assert written[0] == written[1]
    train(stores[0], config, steps[:2], Recipe(), engine)
    got = train(stores[0], config, steps, PLAIN, engine)
    expected = train_reference(config, steps, PLAIN, in_float32=(1, 2))
    assert got.losses == expected.losses[2:]
    assert_identical_states(got.states, expected.states)
    train(stores[1], config, steps[:2], PLAIN, engine)
    got = train(stores[1], config, steps, Recipe(), engine)
    expected = train_reference(config, steps, PLAIN, in_float32=(3, 4))
    assert got.losses == expected.losses[2:]
    assert_identical_states(got.states, expected.states)


def slow_learning(dtype: Any) -> Recipe:
    """A learning rate below half of bfloat16's last place of most weights."""
    return Recipe(
        hyperparameters=AdamWHyperparameters(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        schedule=Schedule(kind="constant", lr=1e-5, num_steps=1000),
        dtype=dtype,
    )


def test_masters_move_where_bfloat16_would_not(tmp_path: Path) -> None:
    """P055 in short: weights on the drive move, though most would not if they were bfloat16 themselves."""
    steps = [make_steps(1, 1)[0]] * 3
    got = train(tmp_path / "store", tiny_config("llama"), steps, slow_learning("bfloat16"), Engine())
    assert_identical(got, train_reference(tiny_config("llama"), steps, slow_learning("bfloat16")))
    name = "model.layers.1.mlp.up_proj.weight"
    before, after = got.initial[name], got.states.weights[name]
    stuck = before.bfloat16() + 1e-5 == before.bfloat16()
    assert float(stuck.float().mean()) > 0.75
    assert float((before != after)[stuck].float().mean()) > 0.99


@pytest.mark.slow
def test_two_hundred_steps_at_a_small_rate(tmp_path: Path) -> None:
    """P055: masters move, and the loss is that of float32 within a twentieth of what was learned."""
    steps = [make_steps(1, 1)[0]] * 200
    got = train(tmp_path / "store", tiny_config("llama"), steps, slow_learning("bfloat16"), Engine(commit_every=100))
    exact = train_reference(tiny_config("llama"), steps, slow_learning("float32"))
    assert_identical(got, train_reference(tiny_config("llama"), steps, slow_learning("bfloat16")))
    learned = exact.losses[0] - exact.losses[-1]
    assert learned > 0.1
    assert got.losses[-1] == pytest.approx(exact.losses[-1], abs=0.05 * learned)


# ---------------------------------------------------------------------- bytes


def test_what_a_steady_step_moves(tmp_path: Path) -> None:
    """Half of each weight for every visit, all of it and the moments for the update."""
    steps = make_steps(3, 2)
    engine = Engine(budget_factor=1.8, resident_weights=False)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, engine, PLAIN) as trainer:
        for step in steps[:2]:
            trainer.step(step)
        trainer.wait()
        before = trainer.statistics()
        trainer.step(steps[2])
        trainer.wait()
        after = trainer.statistics()
        elements = elements_of(trainer)
    read = sum((2 * count + STATE_BYTES) * size for count, size in zip([1, 1, 2, 1, 1], elements, strict=True))
    assert after.nvme.read_bytes - before.nvme.read_bytes == read
    assert after.nvme.written_bytes - before.nvme.written_bytes == STATE_BYTES * sum(elements)


@pytest.mark.parametrize("residency", [0.0, 0.5])
def test_ops_move_what_is_told_of_them(residency: float, tmp_path: Path) -> None:
    """With a tied weight, whose borrower reads pages of a piece; and what is saved is what is not moved."""
    steps = make_steps(3, 2)
    engine = Engine(budget_factor=2.0, resident_weights=False, residency=residency)
    config = tiny_config("opt", tied=True)
    with trainer_on(tmp_path / "store", config, steps, engine, PLAIN, commit_every=1000) as trainer:
        trainer.step(steps[0])
        trainer.wait()
        before, saved = trainer.statistics().nvme, trainer._saved()
        trainer.step(steps[1])
        trainer.wait()
        after, saved_after = trainer.statistics().nvme, trainer._saved()
        assert trainer._last_plan is not None
        told = OpBytes(trainer._setup)
        ops = [op for op in trainer._last_plan.plan.ops if op.lane.value == "io"]
        moved = [told.of(op) for op in ops]
    read = after.read_bytes - before.read_bytes
    assert read == sum(each.read_bytes for each in moved)
    assert after.written_bytes - before.written_bytes == sum(each.written_bytes for each in moved)
    assert any(op.kind is Kind.READ_WEIGHTS and op.stage != op.owner for op in ops) or residency
    assert (saved_after[0] > saved[0]) == bool(residency)


def test_weight_buffers_are_half_as_large() -> None:
    """And nothing is staged."""
    found = []
    for recipe in (Recipe(), PLAIN):
        staged = staged_model(tiny_config("llama"), recipe)
        layouts = layouts_of(staged, Engine())
        config = trainer_config(recipe, Engine(), make_steps(1, 2), PLENTY_BYTES)
        found.append(memory.smallest(prepare(staged, layouts, config).memory.demand))
    exact, rounded = found
    assert rounded.weight_bytes * 2 == exact.weight_bytes
    assert rounded.gradients.num_bytes == exact.gradients.num_bytes
    assert rounded.ring_bytes == exact.ring_bytes * STATE_BYTES // (STATE_BYTES + 4)
    assert rounded.demand.block_bytes * 2 == exact.demand.block_bytes
    assert rounded.need_bytes < exact.need_bytes


# ---------------------------------------------------------------------- refusals


def test_model_and_configuration_must_agree() -> None:
    staged = split(build_model(tiny_config("llama"), dtype=torch.bfloat16))
    config = trainer_config(Recipe(), Engine(), make_steps(1, 1), PLENTY_BYTES)
    with pytest.raises(ConfigError, match=r"^dtype: the model was built to compute in bfloat16, not in float32"):
        prepare(staged, lay_out_stages(staged), config)


def test_modules_compute_in_float32() -> None:
    modules = [nn.Linear(8, 8), nn.Linear(8, 8)]
    example = {"inputs": torch.zeros(2, 8), "targets": torch.zeros(2, 8)}
    staged = stage_modules(modules, loss=nn.MSELoss(reduction="sum"), example=example)
    config = trainer_config(PLAIN, Engine(), make_steps(1, 1), PLENTY_BYTES)
    with pytest.raises(ConfigError, match=r"^dtype: modules compute in float32, not in bfloat16"):
        prepare(staged, lay_out_stages(staged), config)
