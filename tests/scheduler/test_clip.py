"""Clipping by the global norm: torch's formula with an exact norm; steps without a finite norm change nothing.

hoist's norm is the float64 sum of `optim/norm.py`, torch's a float32 one. Given the scale of the former, a plain loop
has the same bits; with torch's own, results are as close as the two scales. Plans: `test_plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from hoist.optim.norm import clip_scale
from hoist.optim.schedules import Schedule
from hoist.scheduler.config import ClipMode, Order
from hoist.scheduler.creation import create_store
from hoist.scheduler.errors import ConfigError, NonFiniteGradientError
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.trainer import Trainer
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.branching import even_steps_only, spoiling, with_branch
from tests.support.faults import quick_directory
from tests.support.models import tiny_config
from tests.support.sampling import in_pairs, thinned
from tests.support.training import (
    PLENTY_BYTES,
    Engine,
    Outcome,
    Recipe,
    States,
    assert_identical,
    assert_identical_states,
    from_weights,
    initial_weights,
    layouts_of,
    make_steps,
    read_states,
    scale_by_exact_norm,
    set_up,
    staged_model,
    torch_threads,
    train,
    train_reference,
    trainer_config,
)

NUM_STEPS = 4
PLANS: tuple[Order, ...] = ("vertical", "horizontal")
NORMS = (1e9, 1.0, 1e-3)
SCHEDULE = Schedule(kind="cosine", lr=1e-2, warmup_steps=2, num_steps=6)
U = 2.0**-24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def recipe_of(clip_norm: float, *, branch: bool = False, spoilt: dict[int, float] | None = None) -> Recipe:
    recipe = Recipe(clip_norm=clip_norm, schedule=SCHEDULE)
    if spoilt is not None:
        return replace(recipe, alter=with_branch, before_step=spoiling(spoilt))
    return replace(recipe, alter=with_branch, before_step=even_steps_only) if branch else recipe


# ---------------------------------------------------------------------- references


def by_torch(clip_norm: float, norms: list[float], model: PreTrainedModel) -> None:
    norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))


def reference(
    family: str, num_micro_batches: int, recipe: Recipe, hook: Callable[[PreTrainedModel], None], *skip: int
) -> Outcome:
    steps = make_steps(NUM_STEPS, num_micro_batches)
    return train_reference(tiny_config(family), steps, recipe, before_update=hook, skip=skip)


@cache
def unclipped(num_micro_batches: int) -> Outcome:
    with quick_directory() as folder:
        steps = make_steps(NUM_STEPS, num_micro_batches)
        return train(folder / "store", tiny_config("llama"), steps, recipe_of(0.0), Engine(budget_factor=50.0))


# ---------------------------------------------------------------------- clipped steps


@pytest.mark.parametrize(
    ("plan", "num_micro_batches", "clip_norm", "budget_factor"), in_pairs(PLANS, (1, 3), NORMS, (1.0, 50.0))
)
def test_clipping_is_torchs_formula_with_the_exact_norm(
    plan: Order, num_micro_batches: int, clip_norm: float, budget_factor: float, tmp_path: Path
) -> None:
    """Bit for bit, whatever delay was asked for; the metrics have the norm before, and the scale."""
    recipe = recipe_of(clip_norm)
    scales: list[float] = []
    expected = reference("llama", num_micro_batches, recipe, partial(scale_by_exact_norm, clip_norm, scales))
    engine = Engine(plan=plan, delay=0.25, budget_factor=budget_factor)
    steps = make_steps(NUM_STEPS, num_micro_batches)
    got = train(tmp_path / "store", tiny_config("llama"), steps, recipe, engine)
    assert_identical(got, expected)
    assert [done.clip_scale for done in got.metrics] == scales
    check_metrics(got.metrics, clip_norm)
    assert got.metrics[0].grad_norm == unclipped(num_micro_batches).metrics[0].grad_norm
    if clip_norm == 1e9:
        assert_identical(got, unclipped(num_micro_batches))
        assert scales == [1.0] * NUM_STEPS
    else:
        assert min(scales) < 1.0


def check_metrics(metrics: list[StepMetrics], clip_norm: float) -> None:
    for done in metrics:
        assert done.grad_norm * done.clip_scale <= clip_norm * (1 + 1e-6)
        assert done.clip_scale == clip_scale(done.grad_norm, clip_norm)
        assert (done.clip_scale == 1.0) == (done.grad_norm <= clip_norm)
        assert (done.lr, done.skipped_steps) == (SCHEDULE.at(done.step), 0)


@pytest.mark.parametrize("clip_norm", [1.0, 1e-3])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_the_result_is_torchs_own_within_the_rounding_of_the_norm(
    num_micro_batches: int, clip_norm: float, tmp_path: Path
) -> None:
    """One step: the two scales differ by what torch's float32 norm is off, and so do the first moments.

    torch's norm of n elements is at most n u off relatively (u = 2^-24), and how far it is off is measured here. Both
    scales are rounded to float32, gradients once each after scaling, the moments (0.1 times the gradient) once more.
    """
    recipe = recipe_of(clip_norm)
    norms: list[float] = []
    steps = make_steps(1, num_micro_batches)
    expected = train_reference(
        tiny_config("llama"), steps, recipe, before_update=partial(by_torch, clip_norm, norms)
    )
    got = train(tmp_path / "store", tiny_config("llama"), steps, recipe, Engine())
    check_close_to_torch(got, expected, norms[0])


def check_close_to_torch(got: Outcome, expected: Outcome, norm: float) -> None:
    """After one step, with ``norm`` as torch has it."""
    assert got.losses == expected.losses
    assert got.states.adam_steps == expected.states.adam_steps
    rounding = abs(norm / got.metrics[0].grad_norm - 1.0)
    num_elements = sum(value.numel() for value in expected.states.weights.values())
    assert rounding <= num_elements * U
    for name, moment in expected.states.exp_avg.items():
        limit = (rounding + 8 * U) * moment.abs().double() + 2.0**-149
        assert bool(((got.states.exp_avg[name].double() - moment).abs() <= limit).all()), name


@pytest.mark.parametrize(("budget_factor", "plan"), [(1.0, "vertical"), (50.0, "vertical"), (2.0, "horizontal")])
def test_one_norm_over_tied_weights(budget_factor: float, plan: Order, tmp_path: Path) -> None:
    """The embedding's gradient is the sum of both uses, and counts once."""
    recipe, scales = recipe_of(1e-1), list[float]()
    steps = make_steps(NUM_STEPS, 1)
    config = tiny_config("llama", tied=True)
    expected = train_reference(config, steps, recipe, before_update=partial(scale_by_exact_norm, 1e-1, scales))
    engine = Engine(plan=plan, budget_factor=budget_factor)
    got = train(tmp_path / "store", config, steps, recipe, engine)
    assert_identical(got, expected)
    assert [done.clip_scale for done in got.metrics] == scales
    assert max(scales) < 1.0


@pytest.mark.parametrize(("budget_factor", "plan"), [(1.0, "vertical"), (50.0, "vertical"), (2.0, "horizontal")])
def test_idle_and_unused_parameters_have_no_part_in_it(budget_factor: float, plan: Order, tmp_path: Path) -> None:
    """What an idle one's place in a gradient buffer still holds from another step is neither measured nor used."""
    recipe, scales = recipe_of(1e-1, branch=True), list[float]()
    expected = reference("llama", 2, recipe, partial(scale_by_exact_norm, 1e-1, scales))
    engine = Engine(plan=plan, budget_factor=budget_factor, max_chunk_elements=4096)
    steps = make_steps(NUM_STEPS, 2)
    got = train(tmp_path / "store", tiny_config("llama"), steps, recipe, engine)
    assert_identical(got, expected)
    assert [done.clip_scale for done in got.metrics] == scales


# ---------------------------------------------------------------------- every norm with every delay

#: How updates and clipping are ordered: no result may depend on it.
MODES: tuple[ClipMode, ...] = ("exact", "speculative")
DELAYS = (0.0, 0.25, 1.0)


def engine_of(mode: ClipMode, delay: float) -> Engine:
    """The one place where a mode becomes settings. Several chunks a stage; waiting gradients go to scratch."""
    return Engine(delay=delay, clip_mode=mode, budget_factor=1.2, max_chunk_elements=4096, commit_every=1)


def tied_and_branching(clip_norm: float) -> tuple[PreTrainedConfig, Recipe]:
    """Tied embeddings, a parameter that is idle in odd steps, one that never gets a gradient."""
    return tiny_config("llama", tied=True), recipe_of(clip_norm, branch=True)


@cache
def by_exact_norm(clip_norm: float) -> Outcome:
    """In memory, clipped with the scale of hoist's definition; not at all for 0."""
    config, recipe = tied_and_branching(clip_norm)
    hook = partial(scale_by_exact_norm, clip_norm, list[float]()) if clip_norm else None
    return train_reference(config, make_steps(NUM_STEPS, 1), recipe, before_update=hook)


@pytest.mark.parametrize(("clip_norm", "delay", "mode"), in_pairs((0.0, *NORMS), DELAYS, MODES))
def test_any_delay_and_mode_give_the_same_bits(clip_norm: float, delay: float, mode: ClipMode, tmp_path: Path) -> None:
    """In parts, with a resume at the turn of step 3. Not to clip is to clip at a norm that is never reached; and the
    rate of every update is the schedule's, before and after the resume."""
    config, recipe = tied_and_branching(clip_norm)
    steps, engine = make_steps(NUM_STEPS, 1), engine_of(mode, delay)
    first = train(tmp_path / "store", config, steps[:3], recipe, engine, commit_at_end=False)
    last = train(tmp_path / "store", config, steps, recipe, engine)
    expected = by_exact_norm(clip_norm)
    assert (len(first.losses), len(last.losses)) == (3, 2)  # step 3 was lost, and is made again
    assert first.losses == expected.losses[:3]
    assert last.losses == expected.losses[2:]
    assert_identical_states(last.states, expected.states)
    for done in (*first.metrics, *last.metrics):
        assert done.lr == SCHEDULE.at(done.step)
        assert done.clip_scale == (clip_scale(done.grad_norm, clip_norm) if clip_norm else 1.0)
        assert (done.clip_scale < 1.0) == (clip_norm in (1.0, 1e-3))
    if clip_norm == 1e9:
        assert_identical_states(last.states, by_exact_norm(0.0).states)


@pytest.mark.parametrize(("clip_norm", "delay", "mode"), thinned(9, NORMS, DELAYS, MODES))
def test_any_delay_and_mode_are_torchs_within_the_rounding_of_the_norm(
    clip_norm: float, delay: float, mode: ClipMode, tmp_path: Path
) -> None:
    """One step, and the limits of `test_the_result_is_torchs_own_within_the_rounding_of_the_norm`."""
    config, recipe = tied_and_branching(clip_norm)
    norms: list[float] = []
    steps = make_steps(1, 1)
    expected = train_reference(config, steps, recipe, before_update=partial(by_torch, clip_norm, norms))
    got = train(tmp_path / "store", config, steps, recipe, engine_of(mode, delay))
    check_close_to_torch(got, expected, norms[0])
    if clip_norm == 1e9:  # neither scales: nothing is rounded
        assert_identical_states(got.states, expected.states)


@pytest.mark.parametrize("commit_at_end", [True, False])
def test_a_clipped_run_in_parts_equals_the_uninterrupted_one(commit_at_end: bool, tmp_path: Path) -> None:
    recipe = recipe_of(1e-2)
    expected = reference("llama", 2, recipe, partial(scale_by_exact_norm, 1e-2, []))
    steps = make_steps(NUM_STEPS, 2)
    engines = (Engine(commit_every=1), Engine(commit_every=1, budget_factor=50.0, plan="horizontal"), Engine())
    for stop, engine in zip((2, 3, 4), engines, strict=True):
        last = train(
            tmp_path / "store",
            tiny_config("llama"),
            steps[:stop],
            recipe,
            engine,
            commit_at_end=commit_at_end or stop == 4,
        )
    assert_identical_states(last.states, expected.states)


@pytest.mark.parametrize("clip_norm", [-1.0, math.inf, math.nan])
def test_what_is_no_norm_is_refused(clip_norm: float) -> None:
    with pytest.raises(ConfigError, match=r"clip_norm: \S+ is not a finite number of at least 0"):
        trainer_config(Recipe(clip_norm=clip_norm), Engine(), list(make_steps(1, 1)), PLENTY_BYTES)


# ---------------------------------------------------------------------- steps without a finite norm


@pytest.mark.parametrize(("plan", "budget_factor", "factor"), in_pairs(PLANS, (1.0, 50.0), (math.inf, math.nan)))
def test_a_step_with_gradients_that_are_not_finite_is_skipped(
    plan: Order, budget_factor: float, factor: float, tmp_path: Path
) -> None:
    """Weights, moments and step counts are as if it had not been; the schedule and the step numbers go on."""
    recipe, scales = recipe_of(1e-2, spoilt={2: factor}), list[float]()
    expected = reference("llama", 2, recipe, partial(scale_by_exact_norm, 1e-2, scales), 2)
    states: list[States] = []

    def note(store: Store, files: IoEngine, done: StepMetrics) -> None:
        states.append(read_states(store, files))

    engine = Engine(plan=plan, budget_factor=budget_factor, max_chunk_elements=4096)
    steps = make_steps(NUM_STEPS, 2)
    got = train(tmp_path / "apart", tiny_config("llama"), steps, recipe, engine, after_step=note)
    assert_identical_states(states[1], states[0])
    for outcome in (got, train(tmp_path / "through", tiny_config("llama"), steps, recipe, engine)):
        assert_identical(outcome, expected)
        assert [done.skipped_steps for done in outcome.metrics] == [0, 1, 1, 1]
        assert [done.clip_scale for done in outcome.metrics] == [scales[0], 0.0, *scales[1:]]
        assert [math.isfinite(done.grad_norm) for done in outcome.metrics] == [True, False, True, True]
        assert [done.lr for done in outcome.metrics] == [SCHEDULE.at(number) for number in range(1, NUM_STEPS + 1)]


def test_skipped_steps_are_counted_across_resumes(tmp_path: Path) -> None:
    recipe = recipe_of(1.0, spoilt={2: math.inf, 4: math.inf})
    expected = reference("llama", 1, recipe, partial(scale_by_exact_norm, 1.0, []), 2, 4)
    steps = make_steps(NUM_STEPS, 1)
    counts: list[int] = []
    for stop in (2, 3, 4):
        last = train(tmp_path / "store", tiny_config("llama"), steps[:stop], recipe, Engine())
        counts += [done.skipped_steps for done in last.metrics]
    assert counts == [0, 1, 1, 2]
    assert_identical_states(last.states, expected.states)


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    """With advice; the store keeps its last commit, from which a run with better gradients goes on."""
    config, steps = tiny_config("llama"), make_steps(6, 1)
    spoilt = dict.fromkeys((3, 4, 5), math.nan)
    recipe = recipe_of(1.0, spoilt=spoilt)
    staged = staged_model(config, recipe)
    engine = Engine(commit_every=1)
    settings, setup = set_up(staged, layouts_of(staged, engine), recipe, engine, list(steps))
    settings = replace(settings, max_skipped_steps=3)
    source = from_weights(initial_weights(config, recipe))
    directory = tmp_path / "store"
    with (
        DirectEngine(num_threads=2) as files,
        create_store(directory, model=staged, setup=setup, engine=files, source=source, attributes={}) as store,
        Trainer(model=staged, store=store, engine=files, config=settings, setup=setup, baseline_bytes=0) as trainer,
    ):
        for number, step in enumerate(steps[:4], start=1):
            spoiling(spoilt)(staged.model, number)
            trainer.step(step)
        trainer.commit()
        spoiling(spoilt)(staged.model, 5)
        with pytest.raises(NonFiniteGradientError) as caught:
            trainer.step(steps[4])
        assert trainer.committed_step == 4
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("step 5: the gradients were not finite in 3 steps in a row; each was skipped")
    assert "lower --lr" in message
    # It opens at step 4, of which two were skipped; the next finite step starts the row anew.
    sound = replace(recipe, before_step=spoiling({5: math.nan}))
    got = train(directory, config, steps, sound, engine)
    assert [done.skipped_steps for done in got.metrics] == [3, 3]
    hook = partial(scale_by_exact_norm, 1.0, list[float]())
    expected = train_reference(config, steps, recipe, before_update=hook, skip=(3, 4, 5))
    assert_identical_states(got.states, expected.states)


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_without_clipping_nothing_is_skipped(delay: float, tmp_path: Path) -> None:
    """As torch does: what is not finite spreads, and the metrics show it."""
    recipe = recipe_of(0.0, spoilt={1: math.inf})
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(1, 1), recipe, Engine(delay=delay))
    assert not math.isfinite(got.metrics[0].grad_norm)
    assert (got.metrics[0].clip_scale, got.metrics[0].skipped_steps) == (1.0, 0)
    assert not all(bool(torch.isfinite(value).all()) for value in got.states.weights.values())
