"""The decoder stack of a model, and what stands in for its layers when the model's own forward runs around them.

How it is found is `probe.py`; the stages themselves are `stages.py`; how tensors are followed outside the layers is
`tape.py`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hoist.scheduler.answers import PROBE_ROWS, PROBE_TOKENS, Answer, Blank, argument
from hoist.scheduler.context import Context, LayerCall, Value, leaves, make_context, rebuild
from hoist.scheduler.errors import ModelError
from hoist.scheduler.models import locations
from hoist.scheduler.tape import Tape, flow

#: Called in a layer's place with the layer and its arguments.
Handler = Callable[..., object]


class Stop(BaseException):
    """Leaves a model's forward once its last layer was recorded; not an Exception, so models don't catch it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """The decoder layers in the order of the forward, and what passes between them."""

    layers: tuple[nn.Module, ...]
    """One per call: a layer that is called twice is here twice."""
    answers: tuple[Answer, ...]
    """One per call."""
    into_head: tuple[Value, ...]
    """What the code after the last layer uses."""
    num_calls: int
    """Torch calls that the tape noted up to the last layer."""
    used_before: frozenset[int]
    """Addresses of the storages that the forward uses before the first layer."""
    used_between: frozenset[int]
    """The same, between the first layer and the last."""
    used_after: frozenset[int]
    """The same, after the last layer."""
    changed_in_head: bool
    """The code after the last layer changes tensors in place, which autograd's leaves do not take."""
    without_gradients: frozenset[tuple[int, int]]
    """Torch calls between layers that the model makes with gradients disabled: segment, number within it."""
    has_own_loss: bool = False
    """The model's forward does not use its ``loss_function``."""
    weights: tuple[frozenset[str], ...]
    """Per call, the weights that the code before it uses, as far as it is replayed with the layer."""
    used_within: tuple[frozenset[int], ...]
    """Per call, addresses of the storages that the layer uses, whichever module they belong to."""

    @property
    def head_width(self) -> int:
        """Width of the hidden state that the head is given, if it is given nothing else; otherwise 0."""
        value = self.into_head[0]
        if len(self.into_head) != 1 or value.kind != "layer":
            return 0
        blank = next(blank for blank in self.answers[value.number].blanks() if blank.leaf == value.leaf)
        *rows_and_tokens, width = blank.tensor(PROBE_ROWS, PROBE_TOKENS, {}).shape
        return int(width) if rows_and_tokens == [PROBE_ROWS, PROBE_TOKENS] else 0

    @property
    def substitutes(self) -> bool:
        """Whether the head needs a tensor that no layer returned."""
        return any(value.kind == "glue" for value in self.into_head)

    def recorder(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Recorder:
        """A handler that records the calls of one forward and leaves it after the last layer."""
        return Recorder(model, self, batch["input_ids"])

    @contextmanager
    def injecting(self, model: PreTrainedModel, values: Mapping[Value, Tensor], ids: Tensor) -> Iterator[None]:
        """Have the layers return ``values`` in the model's forward, with gradients off up to the last of them.

        After that gradients are as they were on entry, and so are torch's random numbers.
        """
        grad = torch.is_grad_enabled()
        random = torch.get_rng_state()
        tape = Tape(type(model).__name__, partial(weight_names, model))
        if self.changed_in_head:
            values = {value: tensor.clone() for value, tensor in values.items()}
        tape.substitutes = {value: tensor for value, tensor in values.items() if value.kind == "glue"}
        tape.records = False
        number = 0
        blanks: dict[object, Tensor] = {}

        def inject(_layer: nn.Module, *args: object, **kwargs: object) -> object:
            nonlocal number
            call = number
            number += 1
            if call + 1 == len(self.layers):
                torch.set_rng_state(random)
                torch.set_grad_enabled(grad)
                tape.changes_in_place = True

            def fill(blank: Blank) -> Tensor:
                value = Value("layer", call, blank.leaf)
                tensor = values.get(value)
                tensor = blank.tensor(ids.shape[0], ids.shape[1], blanks) if tensor is None else tensor
                tape.name(tensor, value)
                return tensor

            tape.begin_segment(call + 1)
            return self.answers[call].give(fill, args, kwargs)

        with torch.no_grad(), intercepted(self.layers, inject), tape:
            yield


class Recorder:
    """Stands in for the layers of one forward; checks that each is called in its turn."""

    def __init__(self, model: PreTrainedModel, stack: Stack, ids: Tensor) -> None:
        self._owner = type(model).__name__
        self._stack = stack
        self._ids = ids
        self._calls: list[LayerCall] = []
        self._blanks: dict[object, Tensor] = {}
        self.tape = Tape(self._owner, partial(weight_names, model))
        self.tape.changes_in_place = True  # until the first layer
        self.tape.without_gradients = stack.without_gradients
        self.tape.watched = frozenset(value for value in stack.into_head if value.kind == "glue")

    def __call__(self, layer: nn.Module, *args: object, **kwargs: object) -> object:
        number = len(self._calls)
        if layer is not self._stack.layers[number]:
            raise ModelError(f"{self._owner}: layer {number} was skipped or called out of turn; it cannot be staged")
        answer = self._stack.answers[number]
        self._calls.append(recorded(self.tape, answer, args, kwargs))
        self.tape.begin_segment(number + 1)
        self.tape.changes_in_place = False
        if len(self._calls) == len(self._stack.layers):
            raise Stop

        def fill(blank: Blank) -> Tensor:
            tensor = blank.tensor(self._ids.shape[0], self._ids.shape[1], self._blanks)
            self.tape.name(tensor, Value("layer", number, blank.leaf))
            return tensor

        return answer.give(fill, args, kwargs)

    def result(self) -> tuple[tuple[Tensor, ...], Context]:
        """What the first layer's stage is given, and the context of all.

        Raises:
            ModelError: not every layer was called, or this forward runs through other code than the probe's.
        """
        if len(self._calls) != len(self._stack.layers):
            raise ModelError(
                f"{self._owner}: this forward called {len(self._calls)} of {len(self._stack.layers)} layers; "
                "such models cannot be staged"
            )
        if self._stack.substitutes and self.tape.count != self._stack.num_calls:
            raise ModelError(
                f"{self._owner}: with these inputs its forward runs through other code than with input_ids alone, and "
                "hands the head more than the last layer's output; give full windows without attention_mask"
            )
        found = flow(self._calls, self.tape.entries, self._stack.into_head)
        context = make_context(self._owner, found.calls, found.boundaries)
        return tuple(self.tape.used[value] for value in found.boundaries[0]), context


def recorded(tape: Tape, answer: Answer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> LayerCall:
    """A layer's call with names for what depends on weights; dicts hold only what the layer reads of it."""
    given = list(args), dict(kwargs)
    for where, keys in answer.reads:
        container = argument(*given, where)
        if isinstance(container, dict | UserDict):
            items = {key: item for key, item in container.items() if key in keys or not _is_followed(tape, item)}
            kept = items if isinstance(container, dict) else type(container)(items)
            if isinstance(where, int):
                given[0][where] = kept
            else:
                given[1][where] = kept
    tape.paused = True
    try:
        return LayerCall(args=rebuild(tuple(given[0]), tape.reference), kwargs=rebuild(given[1], tape.reference))
    finally:
        tape.paused = False


def _is_followed(tape: Tape, item: object) -> bool:
    return any(isinstance(leaf, Tensor) and tape.value(leaf) is not None for leaf in leaves(item))


def weight_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter and persistent buffer, by the id of what is there now."""
    return {id(place.get()): place.name for place in locations(model)}


@contextmanager
def intercepted(layers: Sequence[nn.Module], handler: Handler) -> Iterator[None]:
    """Have ``handler`` called in place of each layer's forward; the modules themselves stay in the model."""
    replaced: list[tuple[nn.Module, object]] = []
    try:
        for layer in {id(layer): layer for layer in layers}.values():
            replaced.append((layer, vars(layer).get("forward")))
            vars(layer)["forward"] = partial(handler, layer)
        yield
    finally:
        for layer, forward in replaced:
            if forward is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = forward


def model_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments for the model's forward: the batch without labels, caches off."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return inputs | {"use_cache": False, "return_dict": True}
