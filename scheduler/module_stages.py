"""Stages from a list of PyTorch modules, run one after another like an `nn.Sequential`, and a loss that its user gives.

transformers' models are cut by `stages.py`, whose base class does what both kinds share: weights that are absent unless
the stage is at work. What a step feeds here are ``inputs`` and ``targets``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hoist.scheduler.batches import Batch, Batches
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.context import Context, leaves
from hoist.scheduler.errors import ConfigError, ModelError
from hoist.scheduler.models import (
    Location,
    absent,
    is_unfilled,
    make_absent,
    private_rng,
    shared_locations,
    stage_seed,
)
from hoist.scheduler.stages import EmbedStage, HeadStage, LayerStage, Stage, StagedModel, make_weight

#: Names of what a micro-batch holds.
INPUTS, TARGETS = "inputs", "targets"
#: A target of this value is not counted, as in torch.nn.CrossEntropyLoss.
IGNORED_TARGET = -100

#: The loss of a micro-batch, *summed* over what counts, 0-d: from the last module's output and the targets.
Loss = Callable[[Tensor, Tensor], Tensor]
#: How much of a micro-batch's targets counts; the step's loss is the sum of all losses over the sum of these.
Count = Callable[[Tensor], int]
#: Fills the own parameters and buffers of one module (not those of modules in it) in place.
Init = Callable[[nn.Module], object]


def count_targets(targets: Tensor) -> int:
    """Whole-number targets that are not -100; of others, all elements."""
    return targets.numel() if targets.is_floating_point() else int((targets != IGNORED_TARGET).sum())


class _Modules(nn.ModuleList):
    """The user's modules, under the names ``0``, ``1`` and so on."""

    #: What a transformers model has here; modules have none.
    config: Any = None


class _Values:
    """Initial values of a module list: those that its weights had, and how to make the others."""

    def __init__(self, init: Init | None) -> None:
        self.init = init
        self.given: dict[str, Tensor] = {}
        #: Names of those that were given and let go of.
        self.dropped: frozenset[str] = frozenset()

    def drop(self) -> None:
        """Let go of what was given."""
        self.dropped |= self.given.keys()
        self.given.clear()

    def fill(self, stage: str, module: nn.Module, values: Mapping[str, Location], *, seed: int) -> None:
        """Give the tensors at ``values``, which are real, their values; deterministic in ``seed`` and ``stage``."""
        missing = {name: place for name, place in values.items() if name not in self.given}
        with torch.no_grad():
            for place in missing.values():
                place.get().copy_(absent(place.get()))
            holders = {id(place.module) for place in missing.values()}
            with private_rng(stage_seed(seed, stage)):
                for inner in module.modules():
                    if id(inner) in holders:
                        self._make(stage, inner)
            for name, place in values.items():
                if name in self.given:
                    place.get().copy_(self.given[name])
        unfilled = [name for name, place in missing.items() if is_unfilled(place.get())]
        if unfilled:
            raise ModelError(f"modules: {unfilled[0]} was left without initial values; fill it in init")

    def _make(self, stage: str, module: nn.Module) -> None:
        if self.init is not None:
            self.init(module)
            return
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ModelError(
                f"modules: a {type(module).__name__} of stage {stage} was built on the meta device and has no "
                "reset_parameters; give init, a function that fills a module in place"
            )
        reset()


class _ModuleStage(Stage):
    """What the three kinds of module stages share. Their forward is the module's call."""

    is_known_by_shape = False
    _module: nn.Module
    _initial: _Values
    #: Where weights are that neither the stage nor one that lends to it owns.
    _foreign: Sequence[Location] = ()
    #: It ran once and used no weight of another stage.
    _keeps_to_its_own = False

    def initialise(self, values: Mapping[str, Tensor], *, seed: int) -> None:
        """Fill ``values``, the owned tensors by name, in place: with what the module had, else as ``init`` does.

        Raises:
            ValueError: the names are not those of the owned tensors.
            ModelError: a tensor gets no value; the values are then undefined.
        """
        if values.keys() != self._owned.keys():
            difference = sorted(values.keys() ^ self._owned.keys())
            raise ValueError(f"stage {self.name}: names missing or not owned: {', '.join(difference[:4])}")
        self.unbind()
        try:
            for name, weight in self._owned.items():
                weight.put(weight.wrap(values[name], trainable=False))
            places = {name: weight.places[0] for name, weight in self._owned.items()}
            self._initial.fill(self.name, self._module, places, seed=seed)
        finally:
            for weight in self._owned.values():
                weight.put(weight.absent)

    def _refusal(self, fault: str) -> ModelError:
        return ModelError(
            f"modules: module {self.index} {fault}, which the backward needs once more; begin it with an "
            "operation that makes a new tensor (inplace=False)"
        )

    @contextmanager
    def _running(self) -> Iterator[None]:
        """As the base class has it; the first run, on fake tensors as a rule, also refuses weights of other stages."""
        foreign = {} if self._keeps_to_its_own else {id(place.get()): place.name for place in self._foreign}
        with super()._running(), _Foreign(self.index, foreign) if foreign else nullcontext():
            yield
        self._keeps_to_its_own = True

    def _hidden(self, result: object) -> Tensor:
        if not isinstance(result, Tensor) or result.dtype != torch.float32:
            got = str(result.dtype) if isinstance(result, Tensor) else type(result).__name__
            raise ModelError(f"modules: module {self.index} returns {got}; all but the last must return float32")
        return result


class FirstModule(_ModuleStage, EmbedStage):
    """The first module: it is given the micro-batch's inputs."""

    def forward(self, batch: Batch) -> tuple[Tensor, Context]:
        """The first hidden state; the context is empty, as the others take nothing but that."""
        with self._running(), self._kept([batch[INPUTS]]):
            hidden = self._hidden(self._module(batch[INPUTS]))
        return hidden, Context(tensors=(), calls=())


class MiddleModule(_ModuleStage, LayerStage):
    """A module between the first and the last: a hidden state in, one of the same shape out."""

    @property
    def module(self) -> nn.Module:
        return self._module

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """The next hidden state.

        Raises:
            ModelError: it has another shape, or is no float32 tensor, or the module changes its input in place.
        """
        with self._running(), self._kept([hidden]):
            output = self._hidden(self._module(hidden))
        if output.shape != hidden.shape:
            raise ModelError(
                f"modules: module {self.index} turns {tuple(hidden.shape)} into {tuple(output.shape)}; those between "
                "the first and the last must keep the shape: join it with its neighbour in an nn.Sequential"
            )
        return output


class LastModule(_ModuleStage, HeadStage):
    """The last module, and the loss."""

    _loss: Loss

    def forward(self, hidden: Tensor, batch: Batch, context: Context, num_items: float) -> Tensor:
        """What the micro-batch adds to the step's loss, 0-d: the user's loss over ``num_items``.

        Raises:
            ModelError: the loss is no 0-d tensor, or the module changes its input in place.
        """
        with self._running(), self._kept([hidden]):
            output = self._module(hidden)
            with _NoBackward():
                loss: object = self._loss(output, batch[TARGETS])
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(f"loss: returned {got}; it must return one number, summed over the micro-batch")
        return loss / num_items

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The last module's output."""
        with self._running():
            output: Tensor = self._module(hidden)
        return output


class _Foreign(TorchFunctionMode):
    """Refuses torch calls on weights that belong to other stages: they are absent, and the result would be NaN."""

    def __init__(self, index: int, names: Mapping[int, str]) -> None:
        super().__init__()
        self._index = index
        #: By ``id()`` of the tensors, which live as long as this does.
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) in self._names:
                raise ModelError(
                    f"modules: module {self._index} uses {self._names[id(leaf)]}, a weight of another module, which is "
                    "not in memory then; make it an attribute of both modules, and they share it"
                )
        return func(*args, **(kwargs or {}))


class _NoBackward(TorchFunctionMode):
    """Refuses a loss that runs the backward itself: its gradients would go nowhere."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward:
            raise ConfigError("loss: it calls backward; return the sum alone, a step runs the backward itself")
        return func(*args, **(kwargs or {}))


class ModuleBatches(Batches):
    """What a list of modules is fed: inputs and targets like an example's."""

    def __init__(self, example: Mapping[str, Tensor], count: Count) -> None:
        self._example = {name: torch.empty_like(tensor, device="meta") for name, tensor in example.items()}
        self._count = count

    def largest(self, config: TrainerConfig) -> dict[str, Tensor]:
        """Zeros of the largest shape that a micro-batch may have: the example's, with ``micro_batch_size`` rows."""
        rows = config.micro_batch_size
        return {
            name: torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype) for name, tensor in self._example.items()
        }

    def num_tokens(self, batch: Batch) -> int:
        """Whole-number inputs each, else rows."""
        inputs = batch[INPUTS]
        return len(inputs) if inputs.is_floating_point() else inputs.numel()

    def check(self, micro_batches: Sequence[Batch], config: TrainerConfig) -> int:
        """What the user's count makes of a step's targets. Raises ConfigError as the contract says."""
        num_items = 0
        for index, batch in enumerate(micro_batches):
            if batch.keys() != self._example.keys():
                raise ConfigError(
                    f"micro-batch {index}: has {', '.join(sorted(batch)) or 'nothing'}; for modules it must have "
                    f"{INPUTS} and {TARGETS}"
                )
            for name, like in self._example.items():
                _check_tensor(f"micro-batch {index}: {name}", batch[name], like, config.micro_batch_size)
            if len(batch[INPUTS]) != len(batch[TARGETS]):
                rows = f"{len(batch[INPUTS])} rows of {INPUTS} and {len(batch[TARGETS])} of {TARGETS}"
                raise ConfigError(f"micro-batch {index}: {rows}; there must be as many")
            num_items += self._count(batch[TARGETS])
        if num_items <= 0:
            raise ConfigError(f"{TARGETS}: nothing in this step counts; there is nothing to learn from")
        return num_items


class ModuleModel(StagedModel):
    """A list of modules cut into stages, one a module. Made by :func:`stage_modules`; the weights are absent."""

    def __init__(
        self,
        modules: _Modules,
        stages: tuple[Stage, ...],
        aliases: dict[str, str],
        *,
        batches: ModuleBatches,
        initial: _Values,
    ) -> None:
        untyped: Any = modules  # what reads a StagedModel's model knows of these modules only that they are some
        super().__init__(untyped, stages, aliases, batches=batches)
        self._initial = initial

    def check_dtype(self, dtype: str) -> None:
        """Raise ConfigError unless ``dtype`` is float32: what modules do in another one is not known."""
        if dtype != self.dtype:
            raise ConfigError(f"dtype: modules compute in {self.dtype}, not in {dtype}; leave it out")

    def drop_initial_values(self) -> None:
        """Let go of the values that the modules had: the store has them, or others that are newer."""
        self._initial.drop()

    def require_initial_values(self) -> None:
        """Raise ConfigError if values that the modules had are gone, so that no second store can begin with them."""
        if self._initial.dropped:
            raise ConfigError(
                f"model: the value that {min(self._initial.dropped)} had was let go of when a trainer was opened; for "
                "another new store make the modules again and stage those"
            )


def _check_tensor(what: str, got: Tensor, like: Tensor, rows: int) -> None:
    largest = (rows, *like.shape[1:])
    if got.dtype != like.dtype:
        raise ConfigError(f"{what} are {got.dtype}; the example has {like.dtype}")
    fits = got.dim() == like.dim() and all(0 < side <= most for side, most in zip(got.shape, largest, strict=True))
    if not fits:
        raise ConfigError(
            f"{what} have shape {tuple(got.shape)}; at most {largest} fit (micro_batch_size, and as the example)"
        )


def stage_modules(
    modules: Iterable[nn.Module],
    *,
    loss: Loss,
    example: Mapping[str, Tensor],
    count: Count = count_targets,
    init: Init | None = None,
) -> ModuleModel:
    """Make a list of modules a model that hoist trains.

    The first takes a micro-batch's inputs, the last one's output goes to the loss, and those between hand on a float32
    tensor of one shape. From here on their weights are absent (NaN), and calling one raises; hoist puts them there
    while it runs them. Weights that are real now become the initial values of a new store; those built on the meta
    device, which costs no memory whatever their size, are filled by ``init``, or by their module's
    ``reset_parameters``. A weight that several modules share stays shared. Parameters that need no gradient stay as
    they are (bfloat16 and float16 ones are computed with in float32); all others must be float32. A forward must not
    change buffers (batch norm does, in training mode), nor what it is given in place: it is run twice.

    Args:
        modules: two or more, in the order in which they run. Each is one stage: what is resident at once.
        loss: of the last module's output and the targets, summed over what counts: for the mean of a step in any number
            of micro-batches the sums are added up, and divided by what counts in all of them.
        example: a micro-batch, ``inputs`` and ``targets``; shapes without the first dimension are the largest that may
            come, dtypes are fixed, values do not matter.
        count: how much of a micro-batch's targets counts. By default whole-number targets other than -100, or else all
            elements: as ``reduction="mean"`` has it in torch.
        init: called with each module that has weights on the meta device, to fill its own ones in place.

    Raises:
        ConfigError: fewer than two modules, something that is none, an example that is none, or a loss that is a mean.
        ModelError: a weight or buffer that cannot be trained so.
    """
    modules = list(modules)
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"modules: number {number} is a {type(module).__name__}; each must be an nn.Module")
    container = _Modules(modules)
    if len(container) < 2:
        raise ConfigError(f"modules: {len(container)} given; give two or more, the first and the last")
    if example.keys() != {INPUTS, TARGETS} or not all(tensor.dim() for tensor in example.values()):
        raise ConfigError(f"example: must be a micro-batch with {INPUTS} and {TARGETS}, tensors of one row or more")
    for name, buffer in container.named_buffers():
        if buffer.is_meta and name not in container.state_dict():
            raise ModelError(f"modules: buffer {name} is on meta and no part of the state_dict; make it a real tensor")
    _check_loss(loss)
    initial = _Values(init)
    groups = shared_locations(container)
    for places in groups:
        tensor = places[0].get()
        if tensor.requires_grad and tensor.dtype != torch.float32:
            raise ModelError(f"modules: {places[0].name} is {tensor.dtype}; what is trained must be float32")
        if not tensor.is_meta:
            initial.given[places[0].name] = tensor.detach()
    untyped: Any = container
    make_absent(untyped)
    stages = _stages(container, loss, initial)
    aliases: dict[str, str] = {}
    for places in groups:
        owner, *others = sorted({int(place.name.partition(".")[0]) for place in places})
        name = places[0].name
        weight = make_weight(untyped, name, places)
        stages[owner]._owned[name] = weight
        for other in others:
            stages[other]._borrowed[name] = weight
        aliases |= {place.name: name for place in places[1:]}
        weight.put(weight.absent)
    owned = [(name, weight.places[0]) for stage in stages for name, weight in stage._owned.items()]
    for stage in stages:
        mine_too = stage._owned.keys() | stage._borrowed.keys()
        stage._foreign = [place for name, place in owned if name not in mine_too]
    for module in {id(module): module for module in container}.values():
        mine = [stage for stage, other in zip(stages, container, strict=True) if other is module]
        module.register_forward_pre_hook(_Guard(mine))
        module.register_state_dict_pre_hook(_refuse_to_save)
    return ModuleModel(
        container, tuple(stages), aliases, batches=ModuleBatches(example, count), initial=initial
    )


def _check_loss(loss: Loss) -> None:
    reduction = getattr(loss, "reduction", "sum")
    if reduction != "sum":
        raise ConfigError(
            f"loss: its reduction is {reduction!r}; it must be 'sum', since the mean is taken over the whole step"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ModelError(f"loss: {type(loss).__name__} has parameters, which nobody would train; put them in a module")


class _Guard:
    """Refuses a call of a module whose weights are absent, which would give NaN."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def __call__(self, module: nn.Module, args: object) -> None:
        if not any(stage.is_bound for stage in self._stages):
            raise ConfigError(
                f"this {type(module).__name__} was called outside of a trainer; its weights are in a store: train with "
                "Trainer.step, read weights with hoist.read_tensor"
            )


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Instead of a state_dict of absent weights: a file of NaN in the right shapes."""
    raise ConfigError(
        f"state_dict: the weights of this {type(module).__name__} are in a store; Trainer.commit puts the last step "
        "there, hoist.read_tensor reads them"
    )


def _stages(container: _Modules, loss: Loss, initial: _Values) -> list[_ModuleStage]:
    untyped: Any = container
    no_stack: Any = None  # where a transformers model's layers are found; these are a list already
    last = len(container) - 1
    stages: list[_ModuleStage] = [FirstModule(0, "embed", untyped, no_stack)]
    stages += [MiddleModule(n, f"layer.{n - 1}", untyped, no_stack, n - 1) for n in range(1, last)]
    head = LastModule(last, "head", untyped, no_stack)
    head._loss = loss
    stages.append(head)
    for stage, module in zip(stages, container, strict=True):
        stage._module, stage._initial = module, initial
    return stages
