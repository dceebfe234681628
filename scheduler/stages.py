"""Cuts a Hugging Face causal LM into stages: embed, one per decoder layer, head. No code for any one architecture.

A stage owns tensors, takes their values from whoever holds them, and runs forward; backward is torch's. What runs when
is `plan.py`, where the values lie is `hoist.tiers`. How the cut is found is `probe.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hoist.scheduler.batches import Batch, Batches, TokenBatches
from hoist.scheduler.context import Context, Value, same_structure
from hoist.scheduler.errors import ConfigError, ModelError
from hoist.scheduler.head_probe import ones_like, width_of_token_wise
from hoist.scheduler.models import (
    Location,
    absent,
    initialize_tensors,
    make_absent,
    other_buffers,
    shared_locations,
    stage_seed,
)
from hoist.scheduler.probe import find_stack
from hoist.scheduler.stack import Stack, Stop, intercepted, model_inputs
from hoist.scheduler.tape import replay
from hoist.tiers.layout import DTYPE_BYTES, NARROW_DTYPES, TensorSpec

logger = logging.getLogger(__name__)

#: What a stage's forward must not do, and torch's words for it where a gradient is wanted of the input.
_CHANGES_INPUT = "changes in place what it is given"
_LEAF_CHANGED = "leaf Variable that requires grad is being used in an in-place operation"

#: What passes from one stage to the next: a hidden state, [B, S, H], or where a model hands on more than that, a tuple
#: with all of it (the Any: most callers know their model).
Carried = torch.Tensor | Any


def as_tuple(carried: Carried) -> tuple[torch.Tensor, ...]:
    """What passes between two stages, as a tuple also if it is one tensor."""
    return carried if isinstance(carried, tuple) else (carried,)


def as_carried(values: Sequence[torch.Tensor]) -> Carried:
    """What passes between two stages, as stages take it: a tensor, or a tuple of several."""
    return values[0] if len(values) == 1 else tuple(values)


class _Weight:
    """A parameter or persistent buffer: every place that holds it, and what is put there while it is away."""

    def __init__(self, name: str, places: Sequence[Location], spec: TensorSpec, dtype: torch.dtype) -> None:
        self.name = name
        self.places = tuple(places)
        self.spec = spec
        #: dtype of the computation, which the absent tensor has.
        self.dtype = dtype
        self.is_parameter = places[0].is_parameter
        self.absent = self.wrap(absent(places[0].get(), dtype), trainable=False)

    def wrap(self, value: torch.Tensor, *, trainable: bool) -> torch.Tensor:
        """``value`` as the places take it: a Parameter over the same memory, or for a buffer a tensor over it."""
        # .data and not .detach(): buffers carved from one mapping share a version counter, and a write to any of them
        # would pass for a change of this tensor.
        return nn.Parameter(value.data, requires_grad=trainable) if self.is_parameter else value.data

    def move_to(self, device: torch.device) -> None:
        """Have the absent tensor on a device, and in the places; it must not be bound."""
        # One element stands for all; copying the whole would give it memory.
        element = absent(torch.empty(()), self.dtype)
        self.absent = self.wrap(element.to(device, copy=True).expand(self.absent.shape), trainable=False)
        self.put(self.absent)

    def put(self, tensor: torch.Tensor) -> None:
        """Have every place hold ``tensor``."""
        for place in self.places:
            place.set(tensor)


class Stage:
    """The smallest part of a model that is scheduled. Its weights are absent except between ``bind`` and ``unbind``.

    Stages of one model share its modules: at most one of them runs at a time, on one thread.
    """

    #: Two stages of one class with equal tensors, given the same, need the same workspace. Modules may do anything.
    is_known_by_shape: ClassVar[bool] = True

    def __init__(self, index: int, name: str, model: PreTrainedModel, stack: Stack) -> None:
        #: Position in the model, from 0.
        self.index = index
        #: ``embed``, ``layer.0`` ... or ``head``.
        self.name = name
        self._model = model
        self._stack = stack
        self._owned: dict[str, _Weight] = {}
        self._borrowed: dict[str, _Weight] = {}
        #: What is bound now, by canonical name; empty when the stage is not bound.
        self._bound: dict[str, torch.Tensor] = {}
        #: Every tensor bound so far; a Parameter here keeps the memory that it was bound to alive.
        self._cache: dict[tuple[object, ...], torch.Tensor] = {}

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Parameters and persistent buffers that the stage owns, by their ``state_dict()`` names, in model order."""
        return tuple(weight.spec for weight in self._owned.values())

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Names of tensors that an earlier stage owns and this one uses too (tied weights)."""
        return tuple(self._borrowed)

    def bind(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let the stage compute with ``values``: exactly its owned and borrowed tensors, by canonical name.

        No copy: the model's Parameters lie on the memory of the values, and the same memory always gets the same
        Parameter object, so hooks and ``.grad`` stay with it. The values' dtype is the dtype of the computation.

        Raises:
            ValueError: a name is missing or unknown, or a shape is wrong; the stage is then as before.
        """
        weights = self._owned | self._borrowed
        if values.keys() != weights.keys():
            difference = sorted(values.keys() ^ weights.keys())
            raise ValueError(f"stage {self.name}: names missing or not of this stage: {', '.join(difference[:4])}")
        for name, weight in weights.items():
            if tuple(values[name].shape) != weight.spec.shape:
                raise ValueError(f"{name} has shape {tuple(values[name].shape)}, expected {weight.spec.shape}")
        self.unbind()
        for name, weight in weights.items():
            value = values[name]
            place = (value.untyped_storage()._cdata, value.storage_offset())  # fake tensors have no data_ptr
            key = (name, place, value.dtype, value.device, value.stride())
            if key not in self._cache:
                self._cache[key] = weight.wrap(value, trainable=weight.spec.trainable)
            self._bound[name] = self._cache[key]
            weight.put(self._bound[name])

    @property
    def is_bound(self) -> bool:
        """The stage can compute now: its weights are there, or it has none."""
        return bool(self._bound) or not (self._owned or self._borrowed)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The Parameters bound now, owned and borrowed, by canonical name; the trainable ones require a gradient."""
        return {name: tensor for name, tensor in self._bound.items() if isinstance(tensor, nn.Parameter)}

    def unbind(self, *, forget: bool = False) -> None:
        """Make the weights absent again: using one gives NaN. Does nothing to a stage that is not bound.

        Args:
            forget: drop the Parameters made so far too, and with them the memory that they lie on.
        """
        weights = self._owned | self._borrowed
        for name, tensor in self._bound.items():
            for place in weights[name].places:
                # another stage may have bound a tied weight meanwhile
                if place.get() is tensor:
                    place.set(weights[name].absent)
        self._bound = {}
        if forget:
            self._cache = {}

    def initialise(self, values: Mapping[str, torch.Tensor], *, seed: int) -> None:
        """Fill ``values``, owned tensors by name, in place with transformers' initial distributions.

        Owned tensors that are left out (adapters) stay absent. Depends on ``seed``, the model and the stage's name
        alone; torch's generators are left as they were.

        Raises:
            ValueError: a name is not that of an owned tensor.
            ModelError: transformers gives a tensor no initial value; the values are then undefined.
        """
        unknown = sorted(values.keys() - self._owned.keys())
        if unknown:
            raise ValueError(f"stage {self.name}: names not owned: {', '.join(unknown[:4])}")
        self.unbind()
        wanted = {name: weight for name, weight in self._owned.items() if name in values}
        try:
            for name, weight in wanted.items():
                weight.put(weight.wrap(values[name], trainable=False))
            targets = {name: weight.places[0] for name, weight in wanted.items()}
            initialize_tensors(self._model, targets, seed=stage_seed(seed, self.name))
            for name, weight in wanted.items():
                if weight.places[0].get().data_ptr() != values[name].data_ptr():
                    raise ModelError(f"{type(self._model).__name__}: _init_weights does not fill {name} in place")
        finally:
            for weight in wanted.values():
                weight.put(weight.absent)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Around the stage's forward: weights are bound, and persistent buffers come out as they went in."""
        if self._bound.keys() != self._owned.keys() | self._borrowed.keys():
            raise RuntimeError(f"stage {self.name} is not bound")
        parameters = self.parameters()
        buffers = {name: tensor._version for name, tensor in self._bound.items() if name not in parameters}
        yield
        weights = self._owned | self._borrowed
        for name, version in buffers.items():
            current = weights[name].places[0].get()
            if current is not self._bound[name] or current._version != version:
                raise ModelError(
                    f"{type(self._model).__name__}: the forward changes the buffer {name}, and recomputation would "
                    "change it again; such models cannot be staged"
                )


    @contextmanager
    def _kept(self, given: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around the stage's forward: what it is given is used again by the recomputation, so it must stay as it is."""
        versions = [tensor._version for tensor in given]
        try:
            yield
        except RuntimeError as error:
            if _LEAF_CHANGED in str(error):
                raise self._refusal(_CHANGES_INPUT) from error
            raise
        if [tensor._version for tensor in given] != versions:
            raise self._refusal(_CHANGES_INPUT)

    def _refusal(self, fault: str) -> ModelError:
        return ModelError(f"{type(self._model).__name__}: {self.name} {fault}; such models cannot be staged")


class EmbedStage(Stage):
    """Everything before the first layer: the model's own forward, with recorders where the layers were."""

    def forward(self, batch: Batch) -> tuple[Carried, Context]:
        """What the first layer's stage is given (a hidden state, [B, S, H]), and what the layers are to be called with.

        With gradients enabled the hidden state has the graph back to the embeddings.

        Raises:
            ModelError: this forward does not run through the layers as the probe's did.
        """
        with self._running():
            recorder = self._stack.recorder(self._model, batch)
            try:
                with intercepted(self._stack.layers, recorder), recorder.tape:
                    self._model(**model_inputs(batch))
            except Stop:
                pass
            values, context = recorder.result()
            return as_carried(values), context


class LayerStage(Stage):
    """One call of a decoder layer, with the model's code between it and the layer before."""

    def __init__(self, index: int, name: str, model: PreTrainedModel, stack: Stack, layer: int) -> None:
        super().__init__(index, name, model, stack)
        self._layer = layer
        #: Where the weights of the code before the layer are, by name.
        self._between: dict[str, Location] = {}

    @property
    def module(self) -> nn.Module:
        """What the stage calls; a layer that the model calls twice is the module of two stages."""
        return self._stack.layers[self._layer]

    def forward(self, carried: Carried, context: Context) -> Carried:
        """What the next stage is given: as a rule the next hidden state, [B, S, H], of the dtype of this one.

        Raises:
            ModelError: the layer gives back other tensors than it did when the model was split, or changes in place
                what it is given. Tensors of ``carried`` must have version counters of their own (``as_leaves``).
        """
        given = context.boundaries[self._layer]
        values: dict[Value, torch.Tensor] = dict(zip(given, as_tuple(carried), strict=True))
        answer = self._stack.answers[self._layer]
        with self._running(), self._kept(as_tuple(carried)):
            replay(context.calls[self._layer].before, values, context.resolver(values, self._weight))
            args, kwargs = context.arguments(self._layer, values)
            args_given, kwargs_given = context.arguments(self._layer, values)
            with torch.set_grad_enabled(answer.grad and torch.is_grad_enabled()):
                result = self._stack.layers[self._layer](*args, **kwargs)
        if not answer.stores and not same_structure((args_given, kwargs_given), (args, kwargs)):
            raise self._refusal("changes the containers that it is called with")
        returned = answer.tensors(result, args, kwargs)
        if returned is None:
            raise self._refusal("returns other tensors than it did when the model was split")
        values |= {Value("layer", self._layer, leaf): tensor for leaf, tensor in returned.items()}
        return as_carried([values[value] for value in context.boundaries[self._layer + 1]])

    def _weight(self, name: str) -> torch.Tensor:
        return self._between[name].get()


class HeadStage(Stage):
    """Everything after the last layer: the rest of the model's own forward, and the loss."""

    #: Logits per token, if any part of the tokens can be run alone and the loss adds up; else 0. Found by split().
    token_wise_width = 0

    def probe(self) -> None:
        """Find ``token_wise_width``. The stage must not be bound."""
        width = self._stack.head_width
        if not width:
            return
        weights = self._owned | self._borrowed
        self.bind({name: ones_like(weight.spec.shape, weight.dtype) for name, weight in weights.items()})
        try:
            self.token_wise_width = width_of_token_wise(self._model, self.logits, width)
        finally:
            self.unbind(forget=True)

    def forward(self, hidden: Carried, batch: Batch, context: Context, num_items: float) -> torch.Tensor:
        """The loss, 0-d float32: cross-entropy summed over the counted labels of ``batch``, over ``num_items``.

        Equal, bit for bit, to the loss of the model itself called with labels and ``num_items_in_batch``. The part
        before the layers runs too, on absent weights and without gradients; what it gives is dropped, so ``context`` is
        not needed.

        Args:
            hidden: the last layer's output, [B, S, H], with what else the model hands on to its head.
            num_items: counted labels (shifted, not -100) of the whole step. A micro-batch may have none: its loss is 0.

        Raises:
            ConfigError: ``num_items`` is not positive, so the step has no loss.
        """
        if num_items <= 0:
            raise ConfigError(f"num_items is {num_items}: the step has no counted label to learn from")
        logits = self.logits(hidden, batch)
        loss: torch.Tensor = self._model.loss_function(
            logits=logits, labels=batch["labels"], vocab_size=logits.shape[-1], num_items_in_batch=num_items
        )
        return loss

    def slice_loss(
        self, hidden: torch.Tensor, input_ids: torch.Tensor, shift_labels: torch.Tensor, num_items: float
    ) -> torch.Tensor:
        """What some tokens of a micro-batch add to the loss, 0-d float32; only where ``token_wise_width`` is not 0.

        Args:
            hidden: the last layer's output at these tokens, [B, S, H].
            input_ids: the tokens, int64 [B, S].
            shift_labels: for each the label of the token after it, int64 [B, S].
            num_items: as for :meth:`forward`.
        """
        if num_items <= 0:
            raise ConfigError(f"num_items is {num_items}: the step has no counted label to learn from")
        logits = self.logits(hidden, {"input_ids": input_ids})
        loss: torch.Tensor = self._model.loss_function(
            logits=logits,
            labels=None,
            vocab_size=logits.shape[-1],
            num_items_in_batch=num_items,
            shift_labels=shift_labels,
        )
        return loss

    def logits(self, hidden: Carried, batch: Batch) -> torch.Tensor:
        """The model's logits, [B, S, V], from the last layer's output, [B, S, H]."""
        values = dict(zip(self._stack.into_head, as_tuple(hidden), strict=True))
        # what runs before the last layer returns is dropped and needs no graph
        with self._running(), self._stack.injecting(self._model, values, batch["input_ids"]):
            output = self._model(**model_inputs(batch))
        logits: torch.Tensor = output.logits
        return logits.contiguous()  # some are a view of more, which no loss takes


class StagedModel:
    """A causal LM cut into stages. Made by :func:`split`; the model's weights are absent."""

    def __init__(
        self,
        model: PreTrainedModel,
        stages: tuple[Stage, ...],
        aliases: dict[str, str],
        *,
        batches: Batches,
        layer_modules: tuple[nn.Module, ...] = (),
        has_own_loss: bool = False,
    ) -> None:
        self.model = model
        #: What a step may be fed.
        self.batches = batches
        #: The module behind each layer stage; one that the model calls twice is here twice.
        self.layer_modules = layer_modules
        #: The model's forward does not use its ``loss_function``: it would give another loss than what is trained.
        self.has_own_loss = has_own_loss
        self.config = model.config
        #: torch's name of the dtype that weights are computed with in, as the model was built (`build_model`).
        self.dtype = compute_dtype(model)
        #: ``embed``, the layers in the order of the forward, ``head``.
        self.stages = stages
        #: Canonical name of each further name that ``state_dict()`` has for a shared tensor.
        self.aliases = aliases
        self._in_use = False
        #: Buffers that a device has copies of: where each belongs.
        self._at_home: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._by_name = {spec.name: (stage, spec) for stage in stages for spec in stage.tensors}

    def take(self) -> None:
        """Note that a trainer has put its gradient hooks on the stages' Parameters. Raises as `check_free`."""
        self.check_free()
        self._in_use = True

    def give_back(self) -> None:
        """The trainer is closed."""
        self._in_use = False

    def move_to(self, device: torch.device) -> None:
        """Have what no stage binds on ``device``, where stages then compute: absent weights, buffers of no store.

        No stage may be bound. Until :meth:`move_back`.
        """
        self._move_absent(device)
        self._at_home = list(other_buffers(self.model))
        for module, name, buffer in self._at_home:
            module._buffers[name] = buffer.to(device, copy=True)

    def move_back(self) -> None:
        """Undo :meth:`move_to`, with nothing asked of that device, which may be lost."""
        self._move_absent(torch.device("cpu"))
        for module, name, buffer in self._at_home:
            module._buffers[name] = buffer
        self._at_home = []

    def _move_absent(self, device: torch.device) -> None:
        for stage in self.stages:
            for weight in stage._owned.values():
                weight.move_to(device)

    def check_free(self) -> None:
        """Raise ConfigError if a trainer that is open uses the stages: sizing them would remove its gradient hooks."""
        if self._in_use:
            raise ConfigError(
                f"{type(self.model).__name__}: an open trainer uses this staged model; close the trainer first, or "
                "split a second model"
            )

    def check_dtype(self, dtype: str) -> None:
        """Raise ConfigError unless the model was built to compute in ``dtype``."""
        if self.dtype != dtype:
            raise ConfigError(
                f"dtype: the model was built to compute in {self.dtype}, not in {dtype}; build it with dtype={dtype}"
            )

    @property
    def embed(self) -> EmbedStage:
        """The first stage."""
        stage = self.stages[0]
        if not isinstance(stage, EmbedStage):
            raise TypeError(f"the first stage is a {type(stage).__name__}")
        return stage

    @property
    def layers(self) -> tuple[LayerStage, ...]:
        """The stages between the first and the last."""
        return tuple(stage for stage in self.stages if isinstance(stage, LayerStage))

    @property
    def head(self) -> HeadStage:
        """The last stage."""
        stage = self.stages[-1]
        if not isinstance(stage, HeadStage):
            raise TypeError(f"the last stage is a {type(stage).__name__}")
        return stage

    def tensor(self, name: str) -> tuple[Stage, TensorSpec]:
        """The owning stage and the description of a tensor, by any of its ``state_dict()`` names.

        Raises:
            KeyError: the model has no tensor of that name.
        """
        return self._by_name[self.aliases.get(name, name)]

    def used_by(self, stage: Stage) -> tuple[tuple[str, TensorSpec], ...]:
        """Name and description of each tensor that a stage computes with: its own, then those that it borrows."""
        names = (*(spec.name for spec in stage.tensors), *stage.borrowed)
        return tuple((name, self._by_name[name][1]) for name in names)

    @property
    def first_trained(self) -> int:
        """Index of the first stage that owns trainable tensors: the backward ends there.

        Raises:
            ModelError: no tensor is trainable.
        """
        for stage in self.stages:
            if any(spec.trainable for spec in stage.tensors):
                return stage.index
        raise ModelError(f"{type(self.model).__name__}: nothing is trainable: every parameter is frozen")

    def keep_frozen_as(self, dtypes: Mapping[str, str]) -> None:
        """Have a store keep frozen weights in the dtypes given by name, bfloat16 or float16; others stay as they are.

        For weights that come from a checkpoint of that dtype: float32 has the same numbers, and is computed with.

        Raises:
            KeyError: the model has no tensor of that name.
            ValueError: it is not a frozen weight, or a dtype is neither of the two.
        """
        for name, dtype in dtypes.items():
            stage, spec = self.tensor(name)
            if not spec.frozen_weight or dtype not in NARROW_DTYPES:
                raise ValueError(f"{name}: cannot be kept as {dtype}; frozen weights can, as bfloat16 or float16")
            kept = replace(spec, dtype=dtype)
            stage._owned[spec.name].spec = kept
            self._by_name[spec.name] = (stage, kept)


def split(model: PreTrainedModel) -> StagedModel:
    """Cut ``model`` (see ``build_model``) into stages; whatever values its weights had are dropped.

    A weight belongs to the first stage that uses it, and is lent to the others. A weight that no part of the forward
    uses belongs to ``head``, where it never gets a gradient. Torch's random generators are left as they were.

    Raises:
        ModelError: the model has no stack of decoder layers, or it hands on more than one hidden state between layers.
    """
    _refuse_by_config(model)
    make_absent(model)
    stack = find_stack(model)
    head_index = len(stack.layers) + 1
    layers = [LayerStage(n + 1, f"layer.{n}", model, stack, n) for n in range(len(stack.layers))]
    stages: list[Stage] = [EmbedStage(0, "embed", model, stack), *layers]
    head = HeadStage(head_index, "head", model, stack)
    stages.append(head)

    layers_of_module: dict[int, set[int]] = {}
    for number, layer in enumerate(stack.layers):
        for module in layer.modules():
            layers_of_module.setdefault(id(module), set()).add(number + 1)
    tied_targets = set(getattr(model, "all_tied_weights_keys", None) or {})
    aliases: dict[str, str] = {}
    for places in shared_locations(model):
        key = places[0].get().untyped_storage().data_ptr()
        users = {stage for place in places for stage in layers_of_module.get(id(place.module), ())}
        users |= ({0} if key in stack.used_before else set()) | ({head_index} if key in stack.used_after else set())
        # a layer may use a weight of another one's modules
        users |= {number for number, used in enumerate(stack.used_within, start=1) if key in used}
        if not places[0].is_parameter and key in stack.used_between:
            users.add(0)  # the embed stage runs through the code between the layers
        names = [place.name for place in places]
        for number, between in enumerate(stack.weights):
            if not between.isdisjoint(names):
                users.add(number + 1)
                layers[number]._between |= {place.name: place for place in places}
        name = next((name for name in names if name not in tied_targets), names[0])
        aliases |= {other: name for other in names if other != name}
        weight = make_weight(model, name, places)
        owner, *others = sorted(users) or [head_index]
        stages[owner]._owned[name] = weight
        for other in others:
            stages[other]._borrowed[name] = weight
        weight.put(weight.absent)
    head.probe()
    logger.debug("%s: %d layers, %d tied names", type(model).__name__, len(stack.layers), len(aliases))
    return StagedModel(
        model,
        tuple(stages),
        aliases,
        batches=TokenBatches(model),
        layer_modules=stack.layers,
        has_own_loss=stack.has_own_loss,
    )


def make_weight(model: PreTrainedModel, name: str, places: Sequence[Location]) -> _Weight:
    """What a stage keeps of the tensor at ``places``. Raises ModelError for a dtype that stores do not hold."""
    tensor = places[0].get()
    trainable = tensor.requires_grad
    frozen_weight = places[0].is_parameter and not trainable and tensor.is_floating_point()
    computed = compute_dtype(model)
    dtype = str(tensor.dtype).removeprefix("torch.")
    # What a store keeps does not depend on what is computed with.
    if trainable or (frozen_weight and dtype == computed and dtype in NARROW_DTYPES):
        dtype = "float32"
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{type(model).__name__}: {name} has dtype {dtype}; known are {', '.join(DTYPE_BYTES)}")
    spec = TensorSpec(
        name=name, shape=tuple(tensor.shape), trainable=trainable, dtype=dtype, frozen_weight=frozen_weight
    )
    return _Weight(name, places, spec, getattr(torch, spec.compute_dtype(computed)))


def compute_dtype(model: nn.Module) -> str:
    """torch's name of the dtype that a model is built to compute in; float32 for modules of the user's own."""
    return str(model.dtype).removeprefix("torch.") if isinstance(model, PreTrainedModel) else "float32"


def _refuse_by_config(model: PreTrainedModel) -> None:
    """Refuse what a probe of one forward cannot see."""
    name = type(model).__name__
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                f"{name}: output_router_logits adds a loss over what every layer returns, which stages do not carry; "
                "set output_router_logits to false in the config"
            )
        for key, value in vars(config).items():
            if ("layerdrop" in key or "layer_drop" in key) and isinstance(value, int | float) and value > 0:
                raise ModelError(f"{name}: {key} {value} skips layers at random; set it to 0 or build with dropout 0")
