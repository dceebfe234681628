"""Trains tiny models twice: with hoist in a store of many small chunks, and with a plain PyTorch loop in memory.

Both start from the same weights and see the same batches. What must be equal is for the tests to say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from hoist.optim.adamw import AdamWHyperparameters, decay_for
from hoist.optim.norm import SquareSum, clip_scale
from hoist.optim.schedules import Schedule
from hoist.optim.split import merge
from hoist.optim.split import split as split_halves
from hoist.scheduler import memory
from hoist.scheduler.config import ClipMode, Dtype, OptimDevice, Order, TrainerConfig
from hoist.scheduler.creation import Source, create_store
from hoist.scheduler.memory import MemoryPlan
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.models import build_model, locations
from hoist.scheduler.ops import Kind
from hoist.scheduler.setup import Setup, divided, prepare
from hoist.scheduler.stages import Stage, StagedModel, split
from hoist.scheduler.trace import Trace
from hoist.scheduler.trainer import Trainer
from hoist.tiers.device import Device, HereDevice
from hoist.tiers.format import StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, StageLayout, lay_out, round_up
from hoist.tiers.store import Store
from tests.support.models import VOCAB_SIZE, num_counted, reference_model
from tests.support.stores import aligned

Batch = dict[str, Tensor]
#: The micro-batches of one step.
Step = Sequence[Batch]
#: Changes a model just built, in the same way on both sides.
Alter = Callable[[PreTrainedModel], None]
#: Called with the model and the step's number before each step, on both sides.
BeforeStep = Callable[[PreTrainedModel, int], None]

PLENTY_BYTES = 2**30
#: Makes what computes, for a run or while it is sized; `late_runs.py` puts another one here.
make_device: Callable[[], Device] = HereDevice
#: What updates run on where that device has memory of its own; likewise.
optim_device: OptimDevice = "cpu"
ROWS, TOKENS = 2, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What decides the result: the same for both sides."""

    hyperparameters: AdamWHyperparameters = field(
        default_factory=lambda: AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    )
    schedule: Schedule = field(default_factory=lambda: Schedule(kind="constant", lr=1e-2, num_steps=1000))
    no_decay_norms: bool = False
    clip_norm: float = 0.0
    """The reference is clipped only by a test's own hook."""
    seed: int = 0
    alter: Alter | None = None
    before_step: BeforeStep | None = None
    attention: Literal["sdpa", "eager"] = "sdpa"
    frozen_dtype: str | None = None
    """What a new store keeps frozen weights in; None: as they are. Their values must be such."""
    dtype: Dtype = "float32"
    """What is computed with. Of the reference, weights too: see :class:`Masters`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """How hoist runs: must not change the result."""

    plan: Order = "vertical"
    delay: float = 0.0
    budget_factor: float = 1.0
    """Times the smallest budget that works: at 1 activations are spilled and one gradient buffer serves all stages."""
    weight_buffers: int = 2
    resident_weights: bool = True
    """Keep compute weights in their buffers from step to step where the budget has room for them."""
    residency: float = 0.0
    """Largest share of the states that stays in memory from step to step; none by default, so that NVMe is used."""
    pin_trained: bool = False
    """States of what is trained stay in memory whatever ``residency`` says."""
    clip_mode: ClipMode = "exact"
    num_micro_batches: int | None = None
    """Most of any step; by default as many as the steps given have."""
    max_chunk_elements: int = 2 * CHUNK_QUANTUM_ELEMENTS
    num_chunks: int | None = None
    """Chunks of every stage (the nearest possible) instead of ``max_chunk_elements``."""
    max_piece_elements: int = CHUNK_QUANTUM_ELEMENTS
    commit_every: int = 2
    loss_slice_tokens: int = 0
    """Other numbers than 0 change the result within rounding."""
    device_budget_factor: float | None = None
    """Times the smallest budget of a separate device's memory that works; None: as ``budget_factor``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Weights and moments by name (shared ones once, by the owner's name), and Adam's step counts."""

    weights: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    adam_steps: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out of some steps."""

    losses: list[float]
    initial: dict[str, Tensor]
    """Weights before the first of them."""
    states: States
    metrics: list[StepMetrics] = field(default_factory=list)
    """hoist only."""
    memory: MemoryPlan | None = None
    """hoist only."""
    ops: Counter[Kind] = field(default_factory=Counter)
    """How often each kind of op ran, as far as it ended before a later step returned. hoist only."""

    def updates(self) -> dict[str, Tensor]:
        """Weights after minus weights before."""
        return {name: value - self.initial[name] for name, value in self.states.weights.items()}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with ``count`` threads within torch's operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_steps(
    num_steps: int, num_micro_batches: int, *, rows: int = ROWS, tokens: int = TOKENS, vocab_size: int = VOCAB_SIZE
) -> list[list[Batch]]:
    """Random batches; micro-batches differ in how many labels count, so that a mean of means would show."""
    generator = torch.Generator().manual_seed(17)
    steps = []
    for _ in range(num_steps):
        step = []
        for micro_batch in range(num_micro_batches):
            input_ids = torch.randint(3, vocab_size, (rows, tokens), generator=generator)
            labels = input_ids.clone()
            labels[0, : 2 + 3 * (micro_batch % 4)] = -100
            step.append({"input_ids": input_ids, "labels": labels})
        steps.append(step)
    return steps


def padded(batch: Batch, *, left: int = 0, right: int = 0) -> Batch:
    """``batch`` with an attention mask that hides the first ``left`` and last ``right`` tokens of its last row."""
    mask = torch.ones_like(batch["input_ids"])
    labels = batch["labels"].clone()
    tokens = mask.shape[1]
    for hidden in (slice(0, left), slice(tokens - right, tokens)):
        mask[-1, hidden] = 0
        labels[-1, hidden] = -100
    return {"input_ids": batch["input_ids"], "labels": labels, "attention_mask": mask}


def packed(batch: Batch, *, starts: Sequence[int]) -> Batch:
    """``batch`` with documents that begin at these tokens of every row, besides 0: positions begin anew there."""
    positions = torch.zeros_like(batch["input_ids"])
    labels = batch["labels"].clone()
    for first, last in pairwise([0, *starts, positions.shape[1]]):
        positions[:, first:last] = torch.arange(last - first)
        labels[:, first] = -100
    return {"input_ids": batch["input_ids"], "labels": labels, "position_ids": positions}


# --- the reference -------------------------------------------------------------------------------------------------


def initial_weights(config: PreTrainedConfig, recipe: Recipe) -> dict[str, Tensor]:
    """The weights and persistent buffers that both sides start from, under all names of ``state_dict()``."""
    model = _reference(config, recipe)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _reference(config: PreTrainedConfig, recipe: Recipe, dtype: Dtype = "float32") -> PreTrainedModel:
    model = reference_model(config, attention=recipe.attention, dtype=getattr(torch, dtype))
    if recipe.alter is not None:
        recipe.alter(model)
    return model


class Masters:
    """A plain model in bfloat16, computed with, beside the float32 one that the optimizer changes.

    Its weights are the masters rounded: trained ones with ties away from zero, as the first halves of `split.py` are,
    frozen ones with ties to even, as torch converts. Each micro-batch's gradient is added to the masters' in float32.
    """

    def __init__(self, masters: PreTrainedModel, model: PreTrainedModel) -> None:
        self.model = model
        self._pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
        for mine, theirs in zip(locations(model), locations(masters), strict=True):
            if not mine.is_parameter:
                mine.set(theirs.get().clone())  # a buffer has the dtype that it has in float32
        self.round()

    def round(self) -> None:
        """Give the model the masters' values."""
        for parameter, master in self._pairs:
            value = master.detach().bfloat16()
            if parameter.requires_grad:
                hi = value.view(torch.int16).view(-1)
                split_halves(master.detach().view(-1), hi, torch.empty_like(hi))
            parameter.data = value

    def take_gradients(self) -> None:
        """Add a micro-batch's gradients to the masters'; the model has none afterwards."""
        for parameter, master in self._pairs:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)


def train_reference(
    config: PreTrainedConfig,
    steps: Sequence[Step],
    recipe: Recipe,
    *,
    fused: bool = True,
    before_micro_batch: Callable[[PreTrainedModel, int, int], None] | None = None,
    before_update: Callable[[PreTrainedModel], None] | None = None,
    skip: Collection[int] = (),
    in_float32: Collection[int] = (),
    after_update: Callable[[PreTrainedModel], None] | None = None,
) -> Outcome:
    """The plain loop: micro-batches one after another, ``torch.optim.AdamW``. Steps are numbered from 1.

    The hooks get the model; the first also the step's number and the micro-batch's, from 0. The steps in ``skip`` are
    computed, but their updates are left out. In bfloat16 the last two get the float32 model, see :class:`Masters`, and
    the steps ``in_float32`` are computed with that.
    """
    model = _reference(config, recipe)
    masters = None if recipe.dtype == "float32" else Masters(model, _reference(config, recipe, recipe.dtype))
    names = {parameter: name for name, parameter in model.named_parameters()}
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adam = recipe.hyperparameters
    groups = [
        {
            "params": [parameter],
            "weight_decay": decay_for(
                name, tuple(parameter.shape), adam.weight_decay, no_decay_norms=recipe.no_decay_norms
            ),
        }
        for name, parameter in model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps, fused=fused)
    losses = []
    for number, step in enumerate(steps, start=1):
        rounded = masters if number not in in_float32 else None
        computing = model if rounded is None else rounded.model
        if recipe.before_step is not None:
            recipe.before_step(computing, number)
        prepared = partial(before_micro_batch, computing, number) if before_micro_batch is not None else None
        model.zero_grad(set_to_none=True)
        losses.append(accumulate_gradients(computing, step, prepared, rounded))
        if number in skip:
            continue
        if before_update is not None:
            before_update(model)
        for group in optimizer.param_groups:
            group["lr"] = recipe.schedule.at(number)
        optimizer.step()
        if after_update is not None:
            after_update(model)
        if masters is not None:
            masters.round()
    moments: dict[str, Mapping[str, Tensor]] = {name: optimizer.state[parameter] for parameter, name in names.items()}
    states = States(
        weights={name: parameter.detach().clone() for parameter, name in names.items()},
        exp_avg={name: _moment(moments[name], "exp_avg", initial[name]) for name in initial},
        exp_avg_sq={name: _moment(moments[name], "exp_avg_sq", initial[name]) for name in initial},
        adam_steps={name: int(moments[name]["step"]) if moments[name] else 0 for name in initial},
    )
    return Outcome(losses=losses, initial=initial, states=states)


def accumulate_gradients(
    model: PreTrainedModel,
    step: Step,
    before_micro_batch: Callable[[int], None] | None = None,
    masters: Masters | None = None,
) -> float:
    """Leave a step's gradients in ``.grad`` and return its loss: the mean over all counted labels of the step.

    With ``masters`` the sums are theirs.
    """
    model.zero_grad(set_to_none=True)
    num_items = sum(num_counted(batch) for batch in step)
    parts = []
    for micro_batch, batch in enumerate(step):
        if before_micro_batch is not None:
            before_micro_batch(micro_batch)
        loss: Tensor = model(**batch, num_items_in_batch=num_items, use_cache=False).loss
        torch.autograd.backward(loss)
        if masters is not None:
            masters.take_gradients()
        parts.append(loss.detach())
    return float(torch.stack(parts).sum())


def scale_by_exact_norm(clip_norm: float, scales: list[float], model: PreTrainedModel) -> None:
    """torch's clip_grad_norm_ with the norm that hoist's definition gives, in place."""
    square_sum = SquareSum()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    scale = clip_scale(math.sqrt(math.fsum(square_sum.square_sum(each) for each in gradients)), clip_norm)
    scales.append(scale)
    for gradient in gradients:
        gradient.mul_(scale)


def _moment(state: Mapping[str, Tensor], key: str, like: Tensor) -> Tensor:
    return state[key].clone() if state else torch.zeros_like(like)  # no gradient so far: torch has no state yet


# --- hoist ---------------------------------------------------------------------------------------------------------


def from_weights(weights: Mapping[str, Tensor]) -> Source:
    """A source for a new store: given values, by name."""

    def fill(stage: Stage, values: Mapping[str, Tensor], staging: Tensor) -> None:
        for name, value in values.items():
            value.copy_(weights[name])

    return fill


def trainer_config(recipe: Recipe, engine: Engine, steps: Sequence[Step], host_memory_bytes: int) -> TrainerConfig:
    """The configuration in which ``steps`` fit exactly."""
    shapes = [batch["input_ids"].shape for step in steps for batch in step]
    keys = {name for step in steps for batch in step for name in batch}
    return TrainerConfig(
        host_memory_bytes=host_memory_bytes,
        dtype=recipe.dtype,
        micro_batch_size=max(rows for rows, _ in shapes),
        seq_len=max(tokens for _, tokens in shapes),
        num_micro_batches=engine.num_micro_batches or max(len(step) for step in steps),
        extra_inputs=tuple(sorted(keys - {"input_ids", "labels"})),
        optimizer=recipe.hyperparameters,
        schedule=recipe.schedule,
        no_decay_norms=recipe.no_decay_norms,
        clip_norm=recipe.clip_norm,
        delay=engine.delay,
        plan=engine.plan,
        seed=recipe.seed,
        commit_every=engine.commit_every,
        max_piece_elements=engine.max_piece_elements,
        resident_weights=engine.resident_weights,
        weight_buffers=engine.weight_buffers,
        residency=engine.residency,
        pin_trained=engine.pin_trained,
        clip_mode=engine.clip_mode,
        loss_slice_tokens=engine.loss_slice_tokens,
        validate=True,
    )


def staged_model(config: PreTrainedConfig, recipe: Recipe) -> StagedModel:
    """The model cut into stages, altered as the recipe says."""
    model = build_model(config, attention=recipe.attention, dtype=getattr(torch, recipe.dtype))
    if recipe.alter is not None:
        recipe.alter(model)
    staged = split(model)
    if recipe.frozen_dtype is not None:
        specs = [spec for stage in staged.stages for spec in stage.tensors]
        staged.keep_frozen_as({spec.name: recipe.frozen_dtype for spec in specs if spec.frozen_weight})
    return staged


def layouts_of(staged: StagedModel, engine: Engine) -> tuple[StageLayout, ...]:
    """Layouts of a new store, with the chunks that ``engine`` asks for."""
    layouts = []
    for stage in staged.stages:
        limit = engine.max_chunk_elements
        if engine.num_chunks is not None:
            whole = lay_out(index=stage.index, name=stage.name, tensors=stage.tensors)
            limit = max(
                CHUNK_QUANTUM_ELEMENTS, round_up(-(-whole.num_elements // engine.num_chunks), CHUNK_QUANTUM_ELEMENTS)
            )
        layouts.append(
            lay_out(index=stage.index, name=stage.name, tensors=stage.tensors, max_chunk_elements=limit)
        )
    return tuple(layouts)


#: What was sized so far, in budgets that have room for everything: sizing takes longer than a step of these models.
_sized: dict[tuple[object, ...], Setup] = {}


def set_up(
    staged: StagedModel, layouts: Sequence[StageLayout], recipe: Recipe, engine: Engine, steps: Sequence[Step]
) -> tuple[TrainerConfig, Setup]:
    """Configuration and buffers for the budget that ``engine`` asks for."""
    config = trainer_config(recipe, engine, steps, PLENTY_BYTES)
    sizes = (config.micro_batch_size, config.seq_len, config.num_micro_batches, config.max_piece_elements, config.plan)
    slices = config.loss_slice_tokens
    waits = config.delay_in_force > 0 or config.speculates
    key: tuple[object, ...] = (
        staged.config.to_json_string(), recipe.attention, recipe.alter, tuple(layouts), waits, slices, *sizes,
        config.extra_inputs, config.pin_trained, recipe.dtype, config.delay_in_force, torch.get_num_threads(),
        config.weight_buffers,
    )  # fmt: skip
    with make_device() as device:
        key = (*key, device.is_separate)
        if device.is_separate:
            config = replace(config, device_memory_bytes=PLENTY_BYTES, optim_device=optim_device)
            key = (*key, optim_device)
        if key not in _sized:
            _sized[key] = prepare(staged, layouts, config, device=device)
    least = memory.smallest(_sized[key].memory.demand)
    config = replace(config, host_memory_bytes=int(engine.budget_factor * least.need_bytes))
    if config.device_memory_bytes is not None:
        factor = engine.budget_factor if engine.device_budget_factor is None else engine.device_budget_factor
        config = replace(config, device_memory_bytes=int(factor * least.device_need_bytes))
    return config, divided(_sized[key], config)


def train(
    directory: Path,
    config: PreTrainedConfig,
    steps: Sequence[Step],
    recipe: Recipe,
    engine: Engine,
    *,
    after_step: Callable[[Store, IoEngine, StepMetrics], None] | None = None,
    commit_at_end: bool = True,
    **settings: Any,
) -> Outcome:
    """Train on ``steps`` with hoist, then commit. Makes the store if there is none, otherwise goes on where it stands.

    ``steps`` are the run's steps from the first one: those that the store has behind it are passed over.
    ``after_step`` is called when everything of a step has been committed. Without ``commit_at_end`` the store stays at
    the last commit that a step made, and the states returned are those of that commit or later. ``settings`` replace
    those of the trainer's configuration.
    """
    staged = staged_model(config, recipe)
    with DirectEngine(num_threads=2) as files:
        if not (directory / "COMMIT.json").exists():
            layouts = layouts_of(staged, engine)
            trainer_settings, setup = set_up(staged, layouts, recipe, engine, steps)
            source = from_weights(initial_weights(config, recipe))
            store = create_store(
                directory, model=staged, setup=setup, engine=files, source=source, attributes={"test": True}
            )
        else:
            store = Store.open(directory, engine=files, check="crc")
            trainer_settings, setup = set_up(staged, store.layouts, recipe, engine, steps)
        trainer_settings = replace(trainer_settings, **settings)
        with store:
            initial = read_states(store, files).weights
            losses, metrics = [], []
            ops: Counter[Kind] = Counter()
            with (
                make_device() as device,
                Trainer(
                    model=staged, store=store, engine=files, config=trainer_settings, baseline_bytes=0, setup=setup,
                    device=device,
                ) as trainer,
            ):
                for number, step in enumerate(steps[trainer.step_number :], start=trainer.step_number + 1):
                    if recipe.before_step is not None:
                        recipe.before_step(staged.model, number)
                    done = trainer.step(step)
                    assert done.step == number
                    losses.append(done.loss)
                    metrics.append(done)
                    ops.update(span.op.kind for span in trainer.last_spans)
                    if after_step is not None:
                        trainer.commit()
                        after_step(store, files, done)
                if commit_at_end:
                    trainer.commit()
                else:
                    trainer.wait()  # a step's own commit goes on beside it: closing now could be before its end
            assert list(store.verify()) == []
            states = read_states(store, files)
    return Outcome(
        losses=losses,
        initial=initial,
        states=states,
        metrics=metrics,
        memory=setup.memory,
        ops=ops,
    )


@contextmanager
def trainer_on(
    directory: Path,
    config: PreTrainedConfig,
    steps: Sequence[Step],
    engine: Engine,
    recipe: Recipe | None = None,
    *,
    kind: type[Trainer] = Trainer,
    trace: Trace | None = None,
    wrap: Callable[[IoEngine], IoEngine] = lambda files: files,
    **settings: Any,
) -> Iterator[Trainer]:
    """A trainer on a store, which is made if it is not there. ``settings`` replace those that ``engine`` gives.

    ``kind`` of trainer; its I/O engine is ``wrap`` of a direct one.
    """
    recipe = recipe or Recipe()
    staged = staged_model(config, recipe)
    with wrap(DirectEngine(num_threads=2)) as files:
        if (directory / "COMMIT.json").exists():
            store = Store.open(directory, engine=files, check="crc")
            told, setup = set_up(staged, store.layouts, recipe, engine, steps)
        else:
            told, setup = set_up(staged, layouts_of(staged, engine), recipe, engine, steps)
            source = from_weights(initial_weights(config, recipe))
            store = create_store(directory, model=staged, setup=setup, engine=files, source=source, attributes={})
        told = replace(told, **settings)
        with (
            store,
            kind(
                model=staged, store=store, engine=files, config=told, setup=setup, baseline_bytes=0, trace=trace
            ) as trainer,
        ):
            yield trainer


def elements_of(trainer: Trainer) -> list[int]:
    """Elements per stage that pieces cover: what is read and written."""
    return [sum(piece.num_elements for piece in pieces) for pieces in trainer._runtime.pieces]


def read_states(store: Store, engine: IoEngine) -> States:
    """Everything trainable, from each chunk's newest complete version."""
    record = store.record
    assert record is not None
    states = States(weights={}, exp_avg={}, exp_avg_sq={}, adam_steps=dict(record.adam_steps))
    for layout in store.layouts:
        if not layout.num_chunks:
            continue
        arrays = {array: _stage_array(store, engine, layout, array) for array in StateArray}
        weights = torch.empty(layout.padded_elements)
        merge(
            arrays[StateArray.WEIGHT_HI].view(torch.int16), arrays[StateArray.WEIGHT_LO].view(torch.int16), weights
        )
        for placed in layout.trainable:
            where = slice(placed.offset, placed.offset + placed.spec.num_elements)
            for target, flat in (
                (states.weights, weights),
                (states.exp_avg, arrays[StateArray.EXP_AVG].view(torch.float32)),
                (states.exp_avg_sq, arrays[StateArray.EXP_AVG_SQ].view(torch.float32)),
            ):
                target[placed.spec.name] = flat[where].view(placed.spec.shape).clone()
    return states


def _stage_array(store: Store, engine: IoEngine, layout: StageLayout, array: StateArray) -> Tensor:
    """uint8: one array of a stage, as long as its chunks; what no tensor uses stays zero."""
    data = aligned(layout.padded_elements * array.itemsize)
    for piece in layout.pieces(layout.chunk_elements):
        place = store.place(layout.index, array, piece, write=False)
        start = piece.start * array.itemsize
        engine.read(place.path, place.offset_bytes, data[start : start + place.num_bytes]).result()
    return data


def trained_part(outcome: Outcome, trained: Collection[str]) -> Outcome:
    """A plain loop's outcome without its frozen parameters, which a store has no states of; they must be unchanged."""
    states = outcome.states
    for name, value in outcome.initial.items():
        assert name in trained or same_bits(states.weights[name], value), f"{name} has changed"

    def only(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in trained}

    return replace(
        outcome,
        initial=only(outcome.initial),
        states=States(
            weights=only(states.weights),
            exp_avg=only(states.exp_avg),
            exp_avg_sq=only(states.exp_avg_sq),
            adam_steps=only(states.adam_steps),
        ),
    )


# --- comparing -----------------------------------------------------------------------------------------------------


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two float32 tensors have the same bit patterns (so -0.0 is not 0.0)."""
    patterns = [value.contiguous().view(torch.int32) for value in (left, right)]
    return torch.equal(*patterns)


def assert_identical(got: Outcome, expected: Outcome) -> None:
    """Losses, every weight and moment, and the step counts have the same bits; and something was learned."""
    assert got.losses == expected.losses
    assert_identical_states(got.states, expected.states)
    for name, update in got.updates().items():
        if expected.states.adam_steps[name] and update.numel():
            assert bool((update != 0).any()), f"{name}: nothing was learned, the test proves nothing"


def assert_identical_states(got: States, expected: States) -> None:
    """Weights, moments and step counts have the same bits, and moments are such as can be."""
    assert got.adam_steps == expected.adam_steps
    for name, square in got.exp_avg_sq.items():
        assert bool(got.exp_avg[name].isfinite().all()) and bool(square.isfinite().all()), name
        assert bool((square >= 0).all()), name
    for what in ("weights", "exp_avg", "exp_avg_sq"):
        mine: dict[str, Tensor] = getattr(got, what)
        theirs: dict[str, Tensor] = getattr(expected, what)
        assert mine.keys() == theirs.keys()
        differing = [name for name in theirs if not same_bits(mine[name], theirs[name])]
        assert not differing, f"{what}: {describe_difference(mine, theirs, differing)}"


def describe_difference(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Where and by how much the named tensors differ, for a failure's message."""
    lines = []
    for name in names:
        gap = (mine[name] - theirs[name]).abs()
        lines.append(f"{name} at {int((gap != 0).sum())} of {gap.numel()} elements, by at most {float(gap.max()):.3g}")
    return "; ".join(lines)


def assert_nvme_was_used(outcome: Outcome) -> None:
    """Every step read every state from the drive and wrote it back, and read weights for its forward besides.

    An update reads and writes 12 bytes an element; the forward of what is not resident reads 4. A step's metrics count
    what ended before it returned, so the sums are over the run, and each step must have moved something.
    """
    elements = sum(value.numel() for value in outcome.states.weights.values())
    assert outcome.memory is not None
    stages = outcome.memory.demand.stages
    streamed_bytes = sum(stage.weights for stage in stages[: len(stages) - outcome.memory.num_resident])
    whole_steps = len(outcome.metrics) - 1
    assert sum(step.nvme_written_bytes for step in outcome.metrics) >= 12 * elements * whole_steps
    assert sum(step.nvme_read_bytes for step in outcome.metrics) >= (12 * elements + streamed_bytes) * whole_steps
    for step in outcome.metrics:
        assert step.nvme_read_bytes > 0
        assert step.nvme_written_bytes > 0
