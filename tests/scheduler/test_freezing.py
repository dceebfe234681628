"""Frozen parameters: equal to plain PyTorch with the same ``requires_grad``, and without moments, gradients or writes.

Plans with stages below what is trained are also in `test_plan.py`; the options are in `tests/tools/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hoist.scheduler.config import Order
from hoist.scheduler.errors import ConfigError, ModelError
from hoist.scheduler.freezing import choose_trained, trained_names
from hoist.scheduler.frozen import computed_tensors, lay_out_frozen, stored_tensors, widen
from hoist.scheduler.models import build_model
from hoist.scheduler.ops import Kind
from hoist.scheduler.stages import split
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import TensorSpec, lay_out
from hoist.tiers.store import Store
from tests.support.models import reference_model, tiny_config
from tests.support.sampling import thinned
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    initial_weights,
    make_steps,
    scale_by_exact_norm,
    torch_threads,
    train,
    train_reference,
    trained_part,
    trainer_on,
)

PLANS: tuple[Order, ...] = ("vertical", "horizontal")
#: What is trained, by patterns: (train, freeze).
CHOICES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "head": (("lm_head.*", "model.norm.*"), ()),
    "last layer": (("model.layers.2.*",), ()),
    "all but an end": ((), ("model.embed_tokens.*", "*layers.0.*", "lm_head.*")),
    "norms in the middle": (("*layers.1.input_layernorm.weight",), ()),
    "parts of layers": ((), ("*embed_tokens*", "*.layers.[01].self_attn.*")),
    "embedding": (("*embed_tokens*",), ()),
    "every other layer": (("*layers.0.*", "*layers.2.*"), ("*mlp*",)),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def freezing(choice: str, *, rounded: torch.dtype | None = None) -> Recipe:
    """A recipe that trains what ``choice`` names; the frozen rest is ``rounded``, and kept so."""
    train_patterns, freeze = CHOICES[choice]

    def alter(model: PreTrainedModel) -> None:
        choose_trained(model, train=train_patterns, freeze=freeze)
        for parameter in model.parameters():
            if rounded is not None and not parameter.requires_grad:
                parameter.data = parameter.data.to(rounded).float()

    return Recipe(alter=alter, frozen_dtype=None if rounded is None else str(rounded).removeprefix("torch."))


def names_in(recipe: Recipe, *, tied: bool = False) -> set[str]:
    model = reference_model(tiny_config("llama", tied=tied))
    assert recipe.alter is not None
    recipe.alter(model)
    return trained_names(model)


@cache
def reference(
    choice: str, num_micro_batches: int, *, tied: bool = False, rounded: torch.dtype | None = None
) -> Outcome:
    recipe = freezing(choice, rounded=rounded)
    expected = train_reference(tiny_config("llama", tied=tied), make_steps(3, num_micro_batches), recipe)
    return trained_part(expected, names_in(recipe, tied=tied))


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("choice", "plan", "num_micro_batches", "budget_factor", "delay", "residency"),
    thinned(9, tuple(CHOICES), PLANS, (1, 3), (1.0, 1.5, 50.0), (0.0, 0.6), (0.0, 1.0)),
)
def test_equal_to_plain_pytorch(
    choice: str,
    plan: Order,
    num_micro_batches: int,
    budget_factor: float,
    delay: float,
    residency: float,
    tmp_path: Path,
) -> None:
    steps = make_steps(3, num_micro_batches)
    engine = Engine(plan=plan, budget_factor=budget_factor, delay=delay, residency=residency)
    got = train(tmp_path / "store", tiny_config("llama"), steps, freezing(choice), engine)
    assert_identical(got, reference(choice, num_micro_batches))


def test_stages_that_are_no_neighbours_do_not_share_the_region_of_weights(tmp_path: Path) -> None:
    """The head alone stays in memory; the first stage, which follows the last trained one, does not fit beside it."""
    engine = Engine(budget_factor=1.5)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(3, 1), freezing("last layer"), engine)
    assert got.memory is not None
    assert got.memory.num_resident == 1
    first, last = got.memory.demand.stages[0], got.memory.demand.stages[3]
    assert first.weights + last.weights > got.memory.weight_offset(4), "the case that is meant"
    assert_identical(got, reference("last layer", 1))


@pytest.mark.parametrize(
    ("choice", "rounded", "plan", "budget_factor", "residency"),
    thinned(5, ("head", "parts of layers"), (torch.bfloat16, torch.float16), PLANS, (1.0, 50.0), (0.0, 1.0)),
)
def test_weights_kept_in_16_bits_are_widened_exactly(
    choice: str, rounded: torch.dtype, plan: Order, budget_factor: float, residency: float, tmp_path: Path
) -> None:
    recipe = freezing(choice, rounded=rounded)
    engine = Engine(plan=plan, budget_factor=budget_factor, residency=residency)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(3, 2), recipe, engine)
    assert_identical(got, reference(choice, 2, rounded=rounded))
    assert got.ops[Kind.WIDEN] > 0
    # Where there is room they are kept: as they are stored, or with residency 0 as they are computed with.
    read_once = got.ops[Kind.READ_FROZEN] <= 5
    assert read_once == (budget_factor == 50.0)


@pytest.mark.parametrize("rounded", [None, torch.bfloat16])
@pytest.mark.parametrize("plan", PLANS)
def test_a_tied_embedding_is_frozen_in_both_places(plan: Order, rounded: torch.dtype | None, tmp_path: Path) -> None:
    """Named by either name. The head reads the embedding's part of the other stage's array."""
    config = tiny_config("llama", tied=True)
    recipe = freezing("all but an end", rounded=rounded)
    assert not names_in(recipe, tied=True) & {"lm_head.weight", "model.embed_tokens.weight"}
    got = train(tmp_path / "store", config, make_steps(3, 2), recipe, Engine(plan=plan))
    assert_identical(got, reference("all but an end", 2, tied=True, rounded=rounded))


@pytest.mark.parametrize(("mode", "plan"), [("exact", "vertical"), ("speculative", "horizontal")])
@pytest.mark.parametrize("choice", ["last layer", "every other layer"])
def test_clipping_is_by_the_norm_of_what_is_trained(choice: str, mode: str, plan: Order, tmp_path: Path) -> None:
    recipe = freezing(choice)
    clipped = Recipe(alter=recipe.alter, clip_norm=0.05)
    steps = make_steps(4, 2)
    scales: list[float] = []
    hook = partial(scale_by_exact_norm, 0.05, scales)
    expected = trained_part(
        train_reference(tiny_config("llama"), steps, clipped, before_update=hook), names_in(recipe)
    )
    assert max(scales) < 1.0
    engine = Engine(plan=plan, clip_mode="exact" if mode == "exact" else "speculative")
    assert_identical(train(tmp_path / "store", tiny_config("llama"), steps, clipped, engine), expected)


@pytest.mark.parametrize(
    ("choice", "plan", "budget_factor", "delay"),
    thinned(4, ("head", "last layer", "norms in the middle", "every other layer"), PLANS, (1.0, 50.0), (0.0, 1.0)),
)
def test_evaluations_change_nothing(
    choice: str, plan: Order, budget_factor: float, delay: float, tmp_path: Path
) -> None:
    """Their forward leaves buffers as a step does, whose backward may have ended anywhere."""
    steps = make_steps(3, 2)
    recipe = freezing(choice, rounded=torch.bfloat16)
    engine = Engine(plan=plan, budget_factor=budget_factor, delay=delay)
    losses = []
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, engine, recipe) as trainer:
        for step in steps:
            before = trainer.evaluate(step).loss
            losses.append(trainer.step(step).loss)
            assert trainer.evaluate(step).loss < before == losses[-1]
    assert losses == reference(choice, 2, rounded=torch.bfloat16).losses


# ---------------------------------------------------------------------- and nothing else


def test_backward_ends_where_nothing_below_is_trained(tmp_path: Path) -> None:
    """Stages are embed, three layers, head: with layer 2 trained, the backward has two of them, and one norm."""
    steps = make_steps(4, 2)
    engine = Engine(budget_factor=1.0)
    got = train(tmp_path / "store", tiny_config("llama"), steps, freezing("last layer"), engine)
    assert got.ops[Kind.BACKWARD] <= 4 * 2
    assert got.ops[Kind.LOSS] == 4 * 2
    assert got.ops[Kind.FORWARD] == 4 * 2 * 4
    assert got.ops[Kind.NORM] <= 4
    assert got.memory is not None
    assert [stage.gradients > 0 for stage in got.memory.demand.stages] == [False, False, False, True, False]
    assert got.memory.demand.num_boundaries == 2 * 2, "the inputs of two stages, for two micro-batches"


@pytest.mark.parametrize("rounded", [None, torch.bfloat16])
def test_the_store_has_states_of_the_trained_part_alone(rounded: torch.dtype | None, tmp_path: Path) -> None:
    """12 bytes x 2 slots a trained parameter, padded to chunks, and the frozen weights once; a step writes 12."""
    recipe = freezing("norms in the middle", rounded=rounded)
    seen: list[bytes] = []

    def after_step(store: Store, engine: IoEngine, metrics: object) -> None:
        seen.append(b"".join(path.read_bytes() for path in sorted((tmp_path / "store/stages").glob("*/buffers/c/0"))))

    got = train(
        tmp_path / "store", tiny_config("llama"), make_steps(3, 1), recipe, Engine(), after_step=after_step
    )
    stages = tmp_path / "store" / "stages"
    initial = initial_weights(tiny_config("llama"), recipe)
    assert got.states.weights.keys() == {"model.layers.1.input_layernorm.weight"}
    frozen = [value for name, value in initial.items() if name not in got.states.weights]
    itemsize = 4 if rounded is None else 2
    expected = itemsize * sum(value.numel() for value in frozen)
    assert expected <= sum(len(path.read_bytes()) for path in stages.glob("*/buffers/c/0")) <= expected + 5 * 8192
    states = [path for path in stages.glob("*/*/c/*/*") if path.is_file()]
    assert sum(path.stat().st_size for path in states) == 12 * 2 * 4096, "one tensor of 64, in a chunk of 4096"
    assert {path.parts[-5] for path in states} == {"002-layer.1"}
    assert len(set(seen)) == 1, "frozen weights are never written"
    assert got.ops[Kind.SPILL_ACTIVATION] == 0
    written = [step.nvme_written_bytes for step in got.metrics]
    assert sum(written[:2]) <= 2 * 12 * 4096 <= sum(written) <= 3 * 12 * 4096, "as far as done when they returned"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converting_in_place_loses_nothing(dtype: str) -> None:
    """Stored and converted tensors overlap in the buffer: each is read before another one is put over it."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"a": (700, 900), "b": (3,), "mask": (5,), "c": (700, 500), "d": ()}
    dtypes = {"a": "bfloat16", "b": "float16", "mask": "int64", "c": "float32", "d": "bfloat16"}
    specs = [
        TensorSpec(name=name, shape=shape, trainable=False, dtype=dtypes[name], frozen_weight=name != "mask")
        for name, shape in shapes.items()
    ]
    layout = lay_out(index=1, name="layer.0", tensors=specs)
    frozen = lay_out_frozen(layout, [(0, layout.frozen[0])], dtype=dtype)
    assert frozen.widens
    if dtype == "float32":
        assert frozen.num_bytes <= 4 * 2 * 700 * 900 + 8 * 4096 + 4 * 700 * 500, "float32 alone: no second copy"
    else:
        assert frozen.num_bytes <= 2 * 2 * 700 * 900 + 8 * 4096 + 4 * 700 * 500, "as it is stored: no second copy"
    part = torch.zeros(frozen.num_bytes, dtype=torch.uint8)
    stored = part[frozen.stored_from :]
    expected = []
    for _, view in stored_tensors(frozen, stored):
        view.copy_(torch.randint(-99, 99, view.shape, generator=generator))
        expected.append(view.clone())
    apart = stored.clone()
    widen(frozen, stored, part)
    computed = getattr(torch, dtype)
    for _ in range(2):
        got = list(computed_tensors(frozen, part))
        assert [name for name, _ in got] == [*shapes, "a"]
        assert [view.dtype for _, view in got] == [computed, computed, torch.int64, *[computed] * 3]
        assert all(torch.equal(view.to(each.dtype), each) for (_, view), each in zip(got, expected, strict=True))
        part.zero_()
        widen(frozen, apart, part)  # as from where they are kept


def test_what_bfloat16_does_not_hold_goes_to_the_nearest_and_ties_to_even() -> None:
    values = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-16])
    spec = TensorSpec(name="a", shape=(3,), trainable=False, frozen_weight=True)
    frozen = lay_out_frozen(lay_out(index=0, name="embed", tensors=[spec]), dtype="bfloat16")
    part = torch.zeros(frozen.num_bytes, dtype=torch.uint8)
    next(stored_tensors(frozen, part[frozen.stored_from :]))[1].copy_(values)
    widen(frozen, part[frozen.stored_from :], part)
    assert next(computed_tensors(frozen, part))[1].tolist() == [1.0, 1.0 + 2**-6, 1.0 + 2**-7]


# ---------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("train_patterns", "freeze", "message"),
    [
        (["lm_haed.weight"], [], r"--train: 'lm_haed.weight' matches no parameter.*near it are lm_head.weight"),
        ([], ["*.zzz"], r"--freeze: '\*.zzz' matches no parameter.*names are like model.embed_tokens.weight"),
        ([], ["*"], r"^--freeze \*: leaves nothing to train"),
        (["lm_head.*"], ["lm_head.*"], r"^--train lm_head.\* --freeze lm_head.\*: leaves nothing to train"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(train_patterns: list[str], freeze: list[str], message: str) -> None:
    model = build_model(tiny_config("llama"))
    with pytest.raises(ConfigError, match=message):
        choose_trained(model, train=train_patterns, freeze=freeze)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_the_model_freezes_stays_so() -> None:
    model = build_model(tiny_config("llama"))
    model.get_input_embeddings().weight.requires_grad_(False)
    choose_trained(model, train=["*embed_tokens*", "*norm*"])
    assert trained_names(model) == {name for name, _ in model.named_parameters() if "norm" in name}


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = build_model(tiny_config("llama"))
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="nothing is trainable"):
        assert split(model).first_trained
