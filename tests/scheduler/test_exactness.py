"""What a result must not depend on: how labels fall into micro-batches, chunks, odd sizes, where a run was interrupted.

And what torch leaves alone, hoist leaves alone: a parameter without a gradient. Families and plans: `test_parity.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from hoist.optim.adamw import AdamWHyperparameters
from hoist.optim.schedules import Schedule
from hoist.scheduler.config import Dtype, Order
from hoist.scheduler.metrics import StepMetrics
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store
from hoist.tools.read_tensor import read_tensor
from tests.scheduler.test_stages import router_config
from tests.support.models import batch_of, reference_model, tiny_config
from tests.support.training import (
    Batch,
    Engine,
    Outcome,
    Recipe,
    accumulate_gradients,
    assert_identical,
    assert_identical_states,
    assert_nvme_was_used,
    make_steps,
    torch_threads,
    train,
    train_reference,
)

#: exp_avg is then the gradient of the last step itself: (1 - 0) * g.
BARE = AdamWHyperparameters(lr=1e-2, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# --- the loss is the mean over all counted labels of the step -------------------------------------------------------


def unequal_rows() -> tuple[Batch, Batch]:
    """Two rows of 31 tokens (30 labels) with 3 and 29 counted ones."""
    first, second = batch_of(1, 31, seed=1), batch_of(1, 31, seed=2)
    for batch, counted in ((first, 3), (second, 29)):
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][0, : 31 - counted] = -100
    return first, second


def both_in_one(first: Batch, second: Batch) -> Batch:
    return {name: torch.cat([first[name], second[name]]) for name in first}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """2-norm of the difference of two gradients, over that of the second."""
    names = sorted(right)
    difference = torch.cat([(left[name].double() - right[name].double()).flatten() for name in names])
    return float(difference.norm() / torch.cat([right[name].double().flatten() for name in names]).norm())


@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
def test_micro_batches_of_3_and_29_labels_equal_one_batch_of_both(plan: Order, tmp_path: Path) -> None:
    """Within rounding, measured: no further apart than float32 gradients of the one batch are from float64 ones.

    Both are float32 evaluations of one sum; each lies about as far from the exact one, so their distance is at most
    twice that and a margin of two. A mean of means would be off by a third.
    """
    first, second = unequal_rows()
    config = tiny_config("llama")
    recipe = Recipe(hyperparameters=BARE)
    apart = train(tmp_path / "apart", config, [[first, second]], recipe, Engine(plan=plan))
    together = train(tmp_path / "together", config, [[both_in_one(first, second)]], recipe, Engine(plan=plan))
    model = reference_model(config).double()
    loss = accumulate_gradients(model, [both_in_one(first, second)])
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    rounding = distance(together.states.exp_avg, exact)
    assert 0 < rounding < 1e-5
    assert distance(apart.states.exp_avg, exact) <= 2 * rounding
    assert distance(apart.states.exp_avg, together.states.exp_avg) <= 4 * rounding
    assert apart.losses[0] == pytest.approx(loss, rel=1e-6)
    assert together.losses[0] == pytest.approx(loss, rel=1e-6)
    assert_identical(apart, train_reference(config, [[first, second]], recipe))


@pytest.mark.parametrize(("family", "position"), [("llama", 0), ("gpt2", 1), ("llama", 2)])
def test_a_micro_batch_without_counted_labels_adds_nothing(family: str, position: int, tmp_path: Path) -> None:
    (step,) = make_steps(1, 2)
    empty = batch_of(seed=5)
    empty["labels"] = torch.full_like(empty["labels"], -100)
    recipe = Recipe(hyperparameters=BARE)
    config = tiny_config(family)
    steps = [[*step[:position], empty, *step[position:]]] * 2
    got = train(tmp_path / "store", config, steps, recipe, Engine())
    assert_identical(got, train_reference(config, steps, recipe))
    assert all(bool(torch.isfinite(value).all()) for value in got.states.weights.values())
    without = train_reference(config, [step] * 2, recipe)
    assert got.losses == without.losses
    for name, value in without.states.weights.items():
        assert torch.equal(got.states.weights[name], value), name


# --- chunks ---------------------------------------------------------------------------------------------------------


def fifty_chunk_config() -> PreTrainedConfig:
    """Every stage has between 49 and 50 times 4096 elements, so that 50 chunks of it are possible."""
    return LlamaConfig(
        vocab_size=1597,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=397,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )


@cache
def fifty_chunk_reference(num_steps: int) -> Outcome:
    steps = make_steps(num_steps, 2, vocab_size=1597)
    return train_reference(fifty_chunk_config(), steps, Recipe())


def check_chunks(directory: Path, plan: Order, num_chunks: int, num_steps: int) -> None:
    found: list[list[int]] = []

    def note(store: Store, files: IoEngine, done: StepMetrics) -> None:
        found.append([layout.num_chunks for layout in store.layouts])

    steps = make_steps(num_steps, 2, vocab_size=1597)
    engine = Engine(plan=plan, num_chunks=num_chunks, max_piece_elements=2**20)
    got = train(directory / "store", fifty_chunk_config(), steps, Recipe(), engine, after_step=note)
    assert found[0] == [num_chunks] * 4
    assert_identical(got, fifty_chunk_reference(num_steps))
    assert_nvme_was_used(got)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 50])
def test_any_number_of_chunks_gives_the_same_bits(num_chunks: int, tmp_path: Path) -> None:
    check_chunks(tmp_path, "vertical", num_chunks, 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [1, 2, 5, 50])
@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
def test_any_number_of_chunks_over_twenty_steps(plan: Order, num_chunks: int, tmp_path: Path) -> None:
    check_chunks(tmp_path, plan, num_chunks, 20)


@pytest.mark.parametrize(("vocab_size", "tied"), [(521, False), (521, True), (4099, True)])
def test_embeddings_many_times_larger_than_a_chunk(vocab_size: int, tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(**{**tiny_config("llama", tied=tied).to_dict(), "vocab_size": vocab_size})
    steps = make_steps(3, 1 if tied else 2, vocab_size=vocab_size)
    engine = Engine(max_chunk_elements=4096)
    assert vocab_size * 64 > 8 * engine.max_chunk_elements
    got = train(tmp_path / "store", config, steps, Recipe(), engine)
    assert_identical(got, train_reference(config, steps, Recipe()))
    assert_nvme_was_used(got)


# --- odd sizes ------------------------------------------------------------------------------------------------------

#: 32771 is a prime above 8 chunks of 4096.
ODD_SIZES = (0, 1, 2, 3, 511, 513, 1000, 1009, 4095, 4097, 32771)


class OddSizes(nn.Module):
    """Adds to what an MLP gives a number that depends on parameters of odd element counts and ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scalar = nn.Parameter(torch.tensor(0.5))
        for size in ODD_SIZES:
            self.register_parameter(f"odd{size}", nn.Parameter(torch.linspace(-1.0, 1.0, size)))
        self.cube = nn.Parameter(torch.linspace(-1.0, 1.0, 30).view(2, 3, 5))

    def forward(self, hidden: Tensor) -> Tensor:
        total: Tensor = self.scalar
        for name, parameter in self.named_parameters(recurse=False):
            if name != "scalar":
                phase = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
                total = total + (parameter + phase).sin().sum() / 100
        result: Tensor = self.inner(hidden) + total * hidden.mean()
        return result


def with_odd_sizes(model: PreTrainedModel) -> None:
    layer = model.get_decoder().layers[1]
    layer.mlp = OddSizes(layer.mlp)


@pytest.mark.parametrize(
    ("plan", "max_chunk_elements"), [("vertical", 4096), ("vertical", 2**17), ("horizontal", 4096)]
)
def test_tensors_of_odd_sizes(plan: Order, max_chunk_elements: int, tmp_path: Path) -> None:
    """Also the reference's odd tails have these bits: on one thread torch cuts a tensor as hoist does."""
    recipe = Recipe(alter=with_odd_sizes)
    engine = Engine(plan=plan, max_chunk_elements=max_chunk_elements)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(3, 2), recipe, engine)
    expected = train_reference(tiny_config("llama"), make_steps(3, 2), recipe)
    assert expected.states.weights["model.layers.1.mlp.scalar"].shape == ()
    assert_identical(got, expected)


def prime_config() -> PreTrainedConfig:
    """No dimension divisible by a power of two above 2."""
    return LlamaConfig(
        vocab_size=509,
        hidden_size=42,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=14,
        intermediate_size=67,
        max_position_embeddings=61,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize("tokens", [11, 13])
def test_dimensions_that_no_vector_divides(tokens: int, tmp_path: Path) -> None:
    steps = make_steps(3, 3, rows=3, tokens=tokens, vocab_size=509)
    got = train(tmp_path / "store", prime_config(), steps, Recipe(), Engine(max_chunk_elements=4096))
    assert_identical(got, train_reference(prime_config(), steps, Recipe()))


# --- parameters without a gradient ----------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """An MLP with a branch that is used only while ``active``, and one that never is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.branch = nn.Linear(64, 400, bias=False)  # 25600 elements: whole chunks of 4096
        self.never = nn.Parameter(torch.ones(3 * 4096 + 7))
        self.active = True
        with torch.no_grad():
            self.branch.weight.copy_(torch.linspace(-0.1, 0.1, 25600).view(400, 64))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden)
        return result + self.branch(hidden).sin().sum(-1, keepdim=True) if self.active else result


def with_branch(model: PreTrainedModel) -> None:
    layer = model.get_decoder().layers[1]
    layer.mlp = Sometimes(layer.mlp)


def even_steps_only(model: PreTrainedModel, step: int) -> None:
    model.get_decoder().layers[1].mlp.active = step % 2 == 0


BRANCH, NEVER = "model.layers.1.mlp.branch.weight", "model.layers.1.mlp.never"


def slots_of(store: Store, name: str) -> list[str]:
    """Slots that the last commit names for the chunks that hold nothing but (a part of) the tensor."""
    assert store.record is not None
    slots = []
    for layout in store.layouts:
        for chunk in range(layout.num_chunks):
            first = chunk * layout.chunk_elements
            if {segment.name for segment in layout.segments(first, first + layout.chunk_elements)} == {name}:
                slots.append(store.record.slots[layout.index][chunk])
    return slots


@pytest.mark.parametrize(("plan", "budget_factor"), [("vertical", 1.0), ("vertical", 50.0), ("horizontal", 2.0)])
def test_a_parameter_without_a_gradient_is_left_alone(plan: Order, budget_factor: float, tmp_path: Path) -> None:
    recipe = Recipe(alter=with_branch, before_step=even_steps_only)
    steps = make_steps(5, 2)
    branch: list[list[str]] = []
    never: list[list[str]] = []

    def note(store: Store, files: IoEngine, done: StepMetrics) -> None:
        branch.append(slots_of(store, BRANCH))
        never.append(slots_of(store, NEVER))

    engine = Engine(plan=plan, budget_factor=budget_factor, max_chunk_elements=4096)
    got = train(tmp_path / "store", tiny_config("llama"), steps, recipe, engine, after_step=note)
    assert_identical(got, train_reference(tiny_config("llama"), steps, recipe))
    assert got.states.adam_steps[BRANCH] == 2
    assert got.states.adam_steps[NEVER] == 0
    assert not got.states.exp_avg[NEVER].any()
    # each commit that follows a write of a chunk names its other slot
    assert len(branch[0]) >= 4
    assert branch[0] != branch[1] == branch[2] != branch[3] == branch[4]
    assert len(never[0]) >= 2
    assert all(slots == never[0] for slots in never)
    assert set(never[0]) == {"0"}


def test_an_untouched_chunk_costs_no_write(tmp_path: Path) -> None:
    """Bytes written to the drive in a step are 12 for each element of a chunk that has a gradient, and no more."""
    written: list[int] = []
    expected: list[int] = []

    def note(store: Store, files: IoEngine, done: StepMetrics) -> None:
        idle = {NEVER} if done.step % 2 == 0 else {NEVER, BRANCH}
        written.append(files.statistics().written_bytes)
        total = 0
        for layout in store.layouts:
            for piece in layout.pieces(layout.chunk_elements):
                first = piece.chunk * layout.chunk_elements
                names = {segment.name for segment in layout.segments(first, first + layout.chunk_elements)}
                total += 12 * piece.num_elements if names - idle else 0
        expected.append(total)

    recipe = Recipe(alter=with_branch, before_step=even_steps_only)
    engine = Engine(budget_factor=50.0, max_chunk_elements=4096)
    train(tmp_path / "store", tiny_config("llama"), make_steps(4, 2), recipe, engine, after_step=note)
    assert [later - earlier for earlier, later in pairwise(written)] == expected[1:]
    assert expected[0] < expected[1]


def with_spare_layer(model: PreTrainedModel) -> None:
    """A whole module that no forward calls: it belongs to the last stage."""
    spare = nn.Linear(64, 64)
    with torch.no_grad():
        spare.weight.fill_(0.25)
        spare.bias.fill_(-1.0)
    model.spare = spare


def test_a_module_that_is_never_called_is_left_alone(tmp_path: Path) -> None:
    recipe = Recipe(alter=with_spare_layer)
    got = train(tmp_path / "store", tiny_config("gpt2"), make_steps(3, 2), recipe, Engine())
    assert_identical(got, train_reference(tiny_config("gpt2"), make_steps(3, 2), recipe))
    assert got.states.adam_steps["spare.weight"] == 0
    assert bool((got.states.weights["spare.weight"] == 0.25).all())


@pytest.mark.parametrize("tokens", [2, 4])
def test_idle_experts_are_treated_as_torch_does(tokens: int, tmp_path: Path) -> None:
    """Packed experts are one tensor: the idle ones get a gradient of zeros, and decay, in torch too."""
    config = tiny_config("mixtral")
    steps = make_steps(5, 1, rows=1, tokens=tokens)
    for step in steps:
        step[0]["labels"] = step[0]["input_ids"].clone()
    got = train(tmp_path / "store", config, steps, Recipe(), Engine(max_chunk_elements=4096))
    assert_identical(got, train_reference(config, steps, Recipe()))


def with_shared_layers(model: PreTrainedModel) -> None:
    """One layer's module stands for the first two."""
    layers = model.get_decoder().layers
    layers[1] = layers[0]


@pytest.mark.parametrize(("plan", "budget_factor"), [("vertical", 1.0), ("vertical", 50.0), ("horizontal", 2.0)])
def test_a_layer_that_runs_twice(plan: Order, budget_factor: float, tmp_path: Path) -> None:
    recipe = Recipe(alter=with_shared_layers)
    steps = make_steps(3, 1)
    engine = Engine(plan=plan, budget_factor=budget_factor)
    got = train(tmp_path / "store", tiny_config("llama"), steps, recipe, engine)
    assert_identical(got, train_reference(tiny_config("llama"), steps, recipe))


# --- interruptions --------------------------------------------------------------------------------------------------


def resumable_recipe() -> Recipe:
    return Recipe(schedule=Schedule(kind="cosine", lr=1e-2, warmup_steps=2, num_steps=6))


@cache
def uninterrupted() -> Outcome:
    return train_reference(tiny_config("gpt2"), make_steps(6, 2), resumable_recipe())


@pytest.mark.parametrize("commit_at_end", [True, False])
def test_a_run_in_three_parts_equals_the_uninterrupted_one(commit_at_end: bool, tmp_path: Path) -> None:
    """Each part has another budget, other pieces and another plan. Without a last commit, steps are done again."""
    steps = make_steps(6, 2)
    parts = [
        (2, Engine(commit_every=1)),
        (4, Engine(plan="horizontal", budget_factor=3.0, max_piece_elements=2**20, commit_every=1)),
        (6, Engine(budget_factor=50.0, max_piece_elements=8192, num_micro_batches=5)),
    ]
    losses: dict[int, float] = {}
    for stop, engine in parts:
        last = train(
            tmp_path / "store",
            tiny_config("gpt2"),
            steps[:stop],
            resumable_recipe(),
            engine,
            commit_at_end=commit_at_end or stop == 6,
        )
        for done in last.metrics:
            assert losses.setdefault(done.step, done.loss) == done.loss
    assert [losses[number] for number in range(1, 7)] == uninterrupted().losses
    assert_identical_states(last.states, uninterrupted().states)
    assert [done.step for done in last.metrics] == ([5, 6] if commit_at_end else [4, 5, 6])


def test_a_second_run_repeats_the_first(tmp_path: Path) -> None:
    config, steps = tiny_config("mixtral"), make_steps(3, 2)
    runs = [train(tmp_path / str(number), config, steps, Recipe(), Engine()) for number in range(2)]
    assert_identical(runs[0], runs[1])
    assert [step.grad_norm for step in runs[0].metrics] == [step.grad_norm for step in runs[1].metrics]


@pytest.mark.parametrize("plan", ["vertical", "horizontal"])
def test_the_gradient_norm_is_torchs_within_float32(plan: Order, tmp_path: Path) -> None:
    """hoist sums in float64; torch's float32 norm of n elements is off by at most n u, here far less."""
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(1, 3), Recipe(), Engine(plan=plan))
    model = reference_model(tiny_config("llama"))
    accumulate_gradients(model, make_steps(1, 3)[0])
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert got.metrics[0].grad_norm == pytest.approx(norm, rel=1e-5)


# --- whose weight it is ---------------------------------------------------------------------------------------------


class Adding(nn.Module):
    """Adds the bias of a module that belongs to another layer."""

    def __init__(self, inner: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.others = [other]  # no submodule of this one

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden)
        return result + self.others[0].get_parameter("bias")


def with_a_bias_of_another_layer(model: PreTrainedModel) -> None:
    layers = model.get_submodule("transformer.h")
    assert isinstance(layers, nn.ModuleList)
    layers[2].mlp = Adding(layers[2].get_submodule("mlp"), layers[0].get_submodule("mlp.c_proj"))


@pytest.mark.parametrize(("plan", "budget_factor"), [("vertical", 1.0), ("horizontal", 2.0)])
def test_a_layer_that_uses_a_weight_of_another_layer(plan: Order, budget_factor: float, tmp_path: Path) -> None:
    """In an addition, where no module is called that could be noticed: it is lent, and both gradients count."""
    recipe = Recipe(alter=with_a_bias_of_another_layer)
    engine = Engine(plan=plan, budget_factor=budget_factor, max_chunk_elements=4096)
    got = train(tmp_path / "store", tiny_config("gpt2"), make_steps(3, 1), recipe, engine)
    assert_identical(got, train_reference(tiny_config("gpt2"), make_steps(3, 1), recipe))
    assert_nvme_was_used(got)


def with_equal_embeddings(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.get_parameter("model.embed_tokens.weight").detach().clone())


def test_equal_values_do_not_make_one_tensor_of_two(tmp_path: Path) -> None:
    """Embedding and head begin equal, and are not tied."""
    recipe = Recipe(alter=with_equal_embeddings)
    engine = Engine(max_chunk_elements=4096)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(3, 2), recipe, engine)
    assert_identical(got, train_reference(tiny_config("llama"), make_steps(3, 2), recipe))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    first, second = (got.initial[name] for name in names)
    assert torch.equal(first, second)
    assert not torch.equal(*(got.states.weights[name] for name in names))


def with_router_bias(model: PreTrainedModel) -> None:
    """A persistent buffer that decides which experts a token goes to."""
    model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias = torch.tensor([0.5, -0.5, 0.25, 0.0])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_packed_experts_larger_than_a_chunk_and_a_routers_buffer(dtype: Dtype, tmp_path: Path) -> None:
    recipe = Recipe(alter=with_router_bias, dtype=dtype)
    config = router_config()
    kept: list[Tensor] = []

    def note(store: Store, files: IoEngine, done: StepMetrics) -> None:
        kept.append(torch.from_numpy(read_tensor(store.directory, "model.layers.1.mlp.gate.e_score_correction_bias")))

    engine = Engine(max_chunk_elements=4096)
    got = train(tmp_path / "store", config, make_steps(3, 2), recipe, engine, after_step=note)
    assert_identical(got, train_reference(config, make_steps(3, 2), recipe))
    assert_nvme_was_used(got)
    packed = [value for name, value in got.states.weights.items() if ".experts." in name]
    assert {value.dim() for value in packed} == {3}
    assert max(value.numel() for value in packed) > 3 * 4096
    assert [value.tolist() for value in kept] == [[0.5, -0.5, 0.25, 0.0]] * 3
