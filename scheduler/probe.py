"""Finds a model's decoder stack by running its forward once with the layers watched.

What was found stands in for the layers later: `stack.py`. How tensors are followed outside the layers is `tape.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hoist.scheduler.answers import PROBE_ROWS, PROBE_TOKENS, Answer, Blank, Noting
from hoist.scheduler.context import LayerCall, Value, leaves, make_context, rebuild, same_structure
from hoist.scheduler.errors import ModelError
from hoist.scheduler.models import locations, private_rng
from hoist.scheduler.stack import Stack, intercepted, model_inputs, recorded, weight_names
from hoist.scheduler.tape import Tape, flow, prune, weights_in

logger = logging.getLogger(__name__)


def find_stack(model: PreTrainedModel) -> Stack:
    """The decoder stack of ``model``, whose weights are absent: the list of layers that its forward runs through.

    Of several such lists the one with the most parameters is taken, together with those of layers of the same kind.
    Costs no memory for the weights' sake.

    Raises:
        ModelError: there is none, or what passes between its layers cannot be followed.
    """
    name = type(model).__name__
    faults: list[str] = []
    causes: list[Exception] = []
    for path, layers in _candidates(model):
        try:
            stack = _Probe(name, layers).run(model)
        except Exception as error:  # whatever a model raises on numbers that are none: the next list is tried
            fault = str(error).removeprefix(f"{name}: ") if isinstance(error, ModelError) else _described(error)
            faults.append(f"{fault} (layers: {path})")
            causes.append(error)
            logger.debug("%s: %s", name, faults[-1], exc_info=True)
            continue
        _refuse_bidirectional(model, stack)
        return replace(stack, has_own_loss=_has_own_loss(model, stack))
    why = f"; of the lists tried: {faults[0]}" if faults else ""
    cause = causes[0] if causes else None
    fault = f"no list of decoder layers that its forward runs through one after another{why}"
    raise ModelError(f"{name}: {fault}") from cause


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
        if not isinstance(logits, Tensor) or logits.shape[:-1] != (PROBE_ROWS, PROBE_TOKENS):
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
        noted = Noting(args, kwargs)
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
        self._calls.append(recorded(tape, answer, args, kwargs))
        self._called.append(layer)
        self._answers.append(answer)
        self._num_calls = tape.count
        tape.begin_segment(number + 1)

        def fill(blank: Blank) -> Tensor:
            tensor = blank.tensor(PROBE_ROWS, PROBE_TOKENS, self._blanks)
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
    ids = torch.arange(PROBE_ROWS * PROBE_TOKENS).remainder(int(vocab_size))
    return ids.view(PROBE_ROWS, PROBE_TOKENS)


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
