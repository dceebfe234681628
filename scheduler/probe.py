"""Finds a model's decoder stack by running its forward with the layers watched, and stands in for the layers later.

The stages themselves are `stages.py`; how tensors are followed outside the layers is `tape.py`.
"""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hoist.scheduler.context import Context, LayerCall, Value, leaves, make_context, rebuild, same_structure
from hoist.scheduler.errors import ModelError
from hoist.scheduler.models import locations, private_rng
from hoist.scheduler.tape import Tape, flow, prune, weights_in

logger = logging.getLogger(__name__)

#: Called in a layer's place with the layer and its arguments.
Handler = Callable[..., object]

#: Rows and tokens of the probe's batch: different primes, so that a wrong axis shows and sizes can be told.
_PROBE_ROWS, _PROBE_TOKENS = 3, 7


class Stop(BaseException):
    """Leaves a model's forward once its last layer was recorded; not an Exception, so models don't catch it."""


@dataclass(frozen=True, slots=True)
class Blank:
    """Stands for a tensor in what a layer gives back."""

    leaf: int
    shape: tuple[int, ...]
    """As of the probe."""
    dtype: torch.dtype

    def tensor(self, rows: int, tokens: int, made: dict[object, Tensor]) -> Tensor:
        """A tensor of this shape for a batch of ``rows`` x ``tokens``; what it holds is no use.

        Those of one shape lie on one memory, which ``made`` keeps.
        """
        sizes = {_PROBE_ROWS: rows, _PROBE_TOKENS: tokens, _PROBE_ROWS * _PROBE_TOKENS: rows * tokens}
        shape = tuple(sizes.get(side, side) for side in self.shape)
        if (shape, self.dtype) not in made:
            nothing = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
            made[shape, self.dtype] = torch.full(shape, nothing, dtype=self.dtype)
        return made[shape, self.dtype].view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a layer gives back: its result, and what it puts into dicts that it is given."""

    result: Any
    """With :class:`Blank` for tensors."""
    stores: tuple[tuple[int | str, object, Any], ...] = ()
    """Argument, key, and what is stored there, with :class:`Blank` for tensors."""
    grad: bool = True
    """The model calls the layer with gradients enabled."""
    reads: tuple[tuple[int | str, frozenset[object]], ...] = ()
    """Arguments that are dicts, and the keys of each that the layer reads; it is given only those."""

    def blanks(self) -> list[Blank]:
        """In the order of their leaves."""
        return [leaf for leaf in leaves((self.result, [item for *_, item in self.stores])) if isinstance(leaf, Blank)]

    def tensors(self, result: object, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[int, Tensor] | None:
        """The tensors that a layer gave back, by leaf; None if there are others than the probe saw."""
        stored: list[object] = []
        for where, key, _ in self.stores:
            container = _argument(args, kwargs, where)
            if not isinstance(container, MutableMapping) or key not in container:
                return None
            stored.append(container[key])
        found = [leaf for leaf in leaves((result, stored)) if isinstance(leaf, Tensor)]
        blanks = self.blanks()
        if len(found) != len(blanks):
            return None
        return {blank.leaf: tensor for blank, tensor in zip(blanks, found, strict=True)}

    def give(self, fill: Callable[[Blank], Tensor], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """What stands in for the layer's result; what it stores is put where it would be."""

        def filled(leaf: object) -> object:
            return fill(leaf) if isinstance(leaf, Blank) else leaf

        for where, key, item in self.stores:
            container = _argument(args, kwargs, where)
            if isinstance(container, MutableMapping):
                container[key] = rebuild(item, filled)
        return rebuild(self.result, filled)


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
        *rows_and_tokens, width = blank.tensor(_PROBE_ROWS, _PROBE_TOKENS, {}).shape
        return int(width) if rows_and_tokens == [_PROBE_ROWS, _PROBE_TOKENS] else 0

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
        self._calls.append(_recorded(self.tape, answer, args, kwargs))
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


def _recorded(tape: Tape, answer: Answer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> LayerCall:
    """A layer's call with names for what depends on weights; dicts hold only what the layer reads of it."""
    given = list(args), dict(kwargs)
    for where, keys in answer.reads:
        container = _argument(*given, where)
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


def _argument(args: Sequence[object], kwargs: Mapping[str, object], where: int | str) -> object:
    """The argument at a position or of a name, or None."""
    if isinstance(where, str):
        return kwargs.get(where)
    return args[where] if where < len(args) else None


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


def find_stack(model: PreTrainedModel) -> Stack:
    """The decoder stack of ``model``, whose weights are absent: the list of layers that its forward runs through.

    Of several such lists the one with the most parameters is taken, together with those of layers of the same kind.
    Costs no memory for the weights' sake.

    Raises:
        ModelError: there is none, or what passes between its layers cannot be followed.
    """
    name = type(model).__name__
    faults: list[str] = []
    for path, layers in _candidates(model):
        try:
            stack = _Probe(name, layers).run(model)
        except Exception as error:  # whatever a model raises on numbers that are none: the next list is tried
            fault = str(error).removeprefix(f"{name}: ") if isinstance(error, ModelError) else _described(error)
            faults.append(f"{fault} (layers: {path})")
            logger.debug("%s: %s", name, faults[-1], exc_info=True)
            continue
        _refuse_bidirectional(model, stack)
        return replace(stack, has_own_loss=_has_own_loss(model, stack))
    why = f"; of the lists tried: {faults[0]}" if faults else ""
    raise ModelError(f"{name}: no list of decoder layers that its forward runs through one after another{why}")


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _candidates(model: nn.Module) -> list[tuple[str, tuple[nn.Module, ...]]]:
    """Lists of modules that may be the stack, outermost ones only, those with the most parameters first.

    Before each comes its union with the other lists that hold modules of one of its classes.
    """
    found: list[tuple[str, tuple[nn.Module, ...]]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) and not inside:
            found.append((path, tuple(module)))

    def num_parameters(entry: tuple[str, tuple[nn.Module, ...]]) -> int:
        return sum(parameter.numel() for parameter in nn.ModuleList(entry[1]).parameters())

    found.sort(key=num_parameters, reverse=True)
    candidates: list[tuple[str, tuple[nn.Module, ...]]] = []
    for path, layers in found:
        kinds = {type(layer) for layer in layers}
        alike = [other for other in found if kinds & {type(layer) for layer in other[1]}]
        if len(alike) > 1:
            candidates.append((", ".join(other for other, _ in alike), tuple(one for _, more in alike for one in more)))
        candidates.append((path, layers))
    return candidates


class _Probe:
    """One forward of a model on a tiny batch, with the modules of some lists watched; weights are absent."""

    def __init__(self, owner: str, layers: tuple[nn.Module, ...]) -> None:
        self._owner = owner
        self._layers = layers
        self._forwards = {id(layer): layer.forward for layer in layers}
        self._called: list[nn.Module] = []
        self._calls: list[LayerCall] = []
        self._answers: list[Answer] = []
        self._blanks: dict[object, Tensor] = {}
        self._usage = _Usage()
        self._used: list[set[int]] = []
        self._used_within: list[frozenset[int]] = []
        self._num_calls = 0
        self._tape = Tape(owner, dict)

    def run(self, model: PreTrainedModel) -> Stack:
        """Run the model, layers and all, on numbers that are none; see what depends on what."""
        self._tape = tape = Tape(self._owner, partial(weight_names, model))
        tape.notes_gradients = True
        watched = intercepted(self._layers, self._answer)
        with private_rng(), torch.enable_grad(), _integers_filled(model), watched, self._usage, tape:
            output = model(**model_inputs({"input_ids": _probe_ids(model)}))
        self._used.append(self._usage.taken())
        if not self._calls:
            raise ModelError(f"{self._owner}: the forward does not call the list")
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != (_PROBE_ROWS, _PROBE_TOKENS):
            raise ModelError(f"{self._owner}: the forward gives no logits for every token")
        last = len(self._calls)
        made = tape.value(logits)
        after = [entry for entry in tape.entries if entry.segment == last]
        into_head = prune(after, set() if made is None else {made})[1]
        if not any(value.kind == "layer" and value.number == last - 1 for value in into_head):
            raise ModelError(f"{self._owner}: the logits do not depend on what the last layer returns")
        if not self._answers[-1].grad:
            raise ModelError(f"{self._owner}: it runs its layers without autograd, in a function of its own")
        found = flow(self._calls, tape.entries, into_head)
        if not all(found.boundaries):
            raise ModelError(f"{self._owner}: layer {found.boundaries.index(())} is given no hidden state")
        make_context(self._owner, found.calls, found.boundaries)  # whatever is refused
        return Stack(
            layers=tuple(self._called),
            answers=tuple(self._answers),
            into_head=found.boundaries[-1],
            num_calls=self._num_calls,
            used_before=frozenset(self._used[0]),
            used_between=frozenset().union(*self._used[1:-1]),
            used_after=frozenset(self._used[-1]),
            changed_in_head=any(entry.changes_first for entry in after),
            without_gradients=tape.without_gradients,
            weights=tuple(frozenset(weights_in(call.before)) for call in found.calls),
            used_within=tuple(self._used_within),
        )

    def _answer(self, layer: nn.Module, *args: object, **kwargs: object) -> object:
        """Run a layer, and return new tensors in place of what it returns."""
        number = len(self._calls)
        tape = self._tape
        self._used.append(self._usage.taken())
        noted = _Noting(args, kwargs)
        before = [rebuild(noted.rest(one), lambda leaf: leaf) for one in (noted.args, noted.kwargs)]
        tape.paused = True
        try:
            with torch.no_grad():
                result = self._forwards[id(layer)](*noted.args, **noted.kwargs)
        finally:
            tape.paused = False
        self._used_within.append(frozenset(self._usage.taken()))
        if not same_structure(before, [noted.rest(one) for one in (noted.args, noted.kwargs)]):
            raise ModelError(f"{self._owner}: layer {number} changes a container that it is called with")
        answer = noted.answer(result)
        self._calls.append(_recorded(tape, answer, args, kwargs))
        self._called.append(layer)
        self._answers.append(answer)
        self._num_calls = tape.count
        tape.begin_segment(number + 1)

        def fill(blank: Blank) -> Tensor:
            tensor = blank.tensor(_PROBE_ROWS, _PROBE_TOKENS, self._blanks)
            tape.name(tensor, Value("layer", number, blank.leaf))
            return tensor

        return answer.give(fill, args, kwargs)


@contextmanager
def _integers_filled(model: nn.Module) -> Iterator[None]:
    """With zeros in integer tensors that are absent, which are used as indices and must be in range then."""
    replaced = [(place, place.get()) for place in locations(model) if not place.is_parameter]
    replaced = [(place, tensor) for place, tensor in replaced if not tensor.is_floating_point()]
    for place, tensor in replaced:
        place.set(torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
    try:
        yield
    finally:
        for place, tensor in replaced:
            place.set(tensor)


def _is_dict(value: object) -> bool:
    return type(value) is dict or isinstance(value, UserDict)


class _Noted(dict[object, object]):
    """A dict that notes which of its keys are read."""

    def __init__(self, source: Mapping[object, object]) -> None:
        super().__init__(source)
        self.before = dict(source)
        self.read: set[object] = set()

    def __getitem__(self, key: object) -> object:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: object, default: object = None) -> object:
        """As a dict's."""
        self.read.add(key)
        return super().get(key, default)

    def values(self) -> Any:
        """As a dict's; everything is read."""
        self.read |= self.keys()
        return super().values()

    def items(self) -> Any:
        """As a dict's; everything is read."""
        self.read |= self.keys()
        return super().items()


def _noted(value: object) -> object:
    return _Noted(value) if isinstance(value, dict | UserDict) and _is_dict(value) else value


class _Noting:
    """A layer's arguments with each dict among them replaced by one that notes what is done with it."""

    def __init__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.args = tuple(map(_noted, args))
        self.kwargs = {name: _noted(value) for name, value in kwargs.items()}

    @property
    def _dicts(self) -> list[tuple[int | str, _Noted]]:
        named: list[tuple[int | str, object]] = [*enumerate(self.args), *self.kwargs.items()]
        return [(where, value) for where, value in named if isinstance(value, _Noted)]

    def rest(self, values: Any) -> Any:
        """The arguments that are not noted, by position or name."""
        items = values.items() if isinstance(values, dict) else enumerate(values)
        return {where: value for where, value in items if not isinstance(value, _Noted)}

    def answer(self, result: object) -> Answer:
        """What the layer gave back, with numbered blanks for tensors."""
        count = 0

        def blank(leaf: object) -> object:
            nonlocal count
            if not isinstance(leaf, Tensor):
                return leaf
            count += 1
            return Blank(count - 1, tuple(leaf.shape), leaf.dtype)

        blanked = rebuild(result, blank)
        stores: list[tuple[int | str, object, Any]] = []
        for where, noted in self._dicts:
            for key in noted:
                item = dict.__getitem__(noted, key)
                if key not in noted.before or noted.before[key] is not item:
                    stores.append((where, key, rebuild(item, blank)))
        reads = tuple((where, frozenset(noted.read)) for where, noted in self._dicts)
        grad = torch.is_grad_enabled()
        return Answer(result=blanked, stores=tuple(stores), grad=grad, reads=reads)


class _Usage(TorchDispatchMode):
    """Notes the storages that torch reads; does not multiply by absent matrices, which torch would first write out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types none of it
        self.storages: set[int] = set()

    def taken(self) -> set[int]:
        """The storages noted since the last call."""
        storages, self.storages = self.storages, set()
        return storages

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [item for item in leaves((args, kwargs or {})) if isinstance(item, Tensor)]
        self.storages |= {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_meta}
        if func in _PRODUCTS and any(map(_is_absent, tensors)):
            return torch.full(_product_shape(func, tensors), float("nan"), dtype=tensors[0].dtype)
        return func(*args, **(kwargs or {}))


#: What torch would write an absent matrix out for.
_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._grouped_mm.default,
)


def _is_absent(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize


def _product_shape(func: Any, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    if func is torch.ops.aten._grouped_mm.default:  # rows in groups, or one matrix of a group each
        left, right = tensors[:2]
        return (*left.shape[:-1], right.shape[-1])
    left, right = tensors[-2:]
    return (*left.shape[:-1], right.shape[-1])


def _probe_ids(model: PreTrainedModel) -> torch.Tensor:
    """Tokens of the probe's batch, int64."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(_PROBE_ROWS * _PROBE_TOKENS).remainder(int(vocab_size))
    return ids.view(_PROBE_ROWS, _PROBE_TOKENS)


def _has_own_loss(model: PreTrainedModel, stack: Stack) -> bool:
    """Whether the model's forward does not use its ``loss_function``, as then the loss here is not that of the model.

    It is said. Some such models do not shift the labels, and none can average over a whole step.
    """
    calls: list[torch.Tensor] = []

    def spy(logits: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
        calls.append(logits)
        return logits.new_zeros(())

    ids = _probe_ids(model)
    had = vars(model).get("_loss_function")
    vars(model)["_loss_function"] = spy
    try:
        with private_rng(), torch.no_grad(), stack.injecting(model, {}, ids), _Usage():
            model(**model_inputs({"input_ids": ids}), labels=ids)
    except Exception as error:  # a loss of the model's own, on logits that are not numbers
        logger.debug("%s: its loss on the probe: %s", type(model).__name__, error)
    finally:
        if had is None:
            del vars(model)["_loss_function"]
        else:
            vars(model)["_loss_function"] = had
    if not calls:
        logger.warning(
            "%s has a loss of its own, not by its loss_function; trained is the cross-entropy of the shifted labels",
            type(model).__name__,
        )
    return not calls


#: Families that are not causal though nothing in their attention says so: model type, config field that must be true.
_CAUSAL_IF: Mapping[str, str | None] = {"xlm": "causal", "xlnet": None}


def _refuse_bidirectional(model: PreTrainedModel, stack: Stack) -> None:
    """Refuse an encoder: its attention says that it is not causal, and a token would see its own label."""
    owner = type(model).__name__
    flags = [getattr(module, "is_causal", None) for layer in stack.layers for module in layer.modules()]
    causal = [flag for flag in flags if isinstance(flag, bool)]
    if causal and not any(causal) and not getattr(model.config, "is_decoder", False):
        raise ModelError(
            f"{owner}: its attention is not causal (an encoder); only causal LMs can be staged, so set is_decoder to "
            "true in the config if it has that"
        )
    kind = model.config.model_type
    if kind in _CAUSAL_IF:
        field = _CAUSAL_IF[kind]
        if field is None or not getattr(model.config, field, False):
            hint = f"; set {field} to true in the config" if field else ""
            raise ModelError(f"{owner}: its attention is not causal, and a token would see its own label{hint}")
