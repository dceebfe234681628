"""Finds a model's decoder stack by running its forward with the layers replaced, and how layers are called.

The stages themselves are `stages.py`; here is only what stands in for the layers while another stage runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hoist.scheduler.context import Context, ContextBuilder, Slot
from hoist.scheduler.errors import ModelError
from hoist.scheduler.models import private_rng

logger = logging.getLogger(__name__)

#: Called in a layer's place with the layer and its arguments.
Handler = Callable[..., object]

#: Rows and tokens of the probe's batch: different, and neither 1, so that a wrong axis shows.
_PROBE_ROWS, _PROBE_TOKENS = 2, 5


class Stop(BaseException):
    """Leaves a model's forward once its last layer was recorded; not an Exception, so models don't catch it."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the model takes from a layer: a tensor (``length`` 0), or a tuple of which it reads ``length`` items."""

    length: int

    def wrap(self, hidden: torch.Tensor) -> object:
        """``hidden`` as a layer would return it."""
        return hidden if self.length == 0 else (hidden, *[None] * (self.length - 1))

    def unwrap(self, result: object) -> torch.Tensor | None:
        """The hidden state in what a layer returned; None if the model would hand on more than that."""
        if isinstance(result, torch.Tensor):
            return result if self.length == 0 else None
        if not isinstance(result, tuple | list) or not result or not isinstance(result[0], torch.Tensor):
            return None
        # with length 1 the model does not look at what comes after the hidden state
        return result[0] if self.length == 1 or all(item is None for item in result[1:]) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """The decoder layers in the order of the forward, and how the model calls them."""

    layers: tuple[nn.Module, ...]
    """One per call: a layer that is called twice is here twice."""
    form: Form
    """What the model takes from a layer."""
    slot: Slot
    """The argument that carries the hidden state."""
    width: int
    """Elements of the hidden state per token."""
    used_before: frozenset[int]
    """Addresses of the storages that the forward uses outside the layers, up to the last layer."""
    used_after: frozenset[int]
    """The same, after the last layer."""

    def recorder(self, owner: str) -> Recorder:
        """A handler that records the calls of one forward and leaves it after the last layer."""
        return Recorder(owner, self)

    def injector(self, hidden: torch.Tensor) -> Handler:
        """A handler that makes ``hidden`` what the layers return, and sets gradients as they are enabled now."""
        grad = torch.is_grad_enabled()

        def inject(_layer: nn.Module, *_args: object, **_kwargs: object) -> object:
            torch.set_grad_enabled(grad)
            return self.form.wrap(hidden)

        return inject


class Recorder:
    """Stands in for the layers of one forward; checks that each is called in its turn, with what the last returned."""

    def __init__(self, owner: str, stack: Stack) -> None:
        self._owner = owner
        self._stack = stack
        self._calls = 0
        self._builder = ContextBuilder(owner)
        self._first: torch.Tensor | None = None
        self._current: torch.Tensor | None = None

    def __call__(self, layer: nn.Module, *args: object, **kwargs: object) -> object:
        number = self._calls
        if layer is not self._stack.layers[number]:
            raise ModelError(f"{self._owner}: layer {number} was skipped or called out of turn; it cannot be staged")
        hidden = argument(args, kwargs, self._stack.slot)
        if not isinstance(hidden, torch.Tensor) or (self._current is not None and hidden is not self._current):
            raise ModelError(f"{self._owner}: layer {number} is not given what layer {number - 1} returned")
        if self._first is None:
            self._first = hidden
        self._builder.add(args, kwargs, self._stack.slot)
        self._calls += 1
        if self._calls == len(self._stack.layers):
            raise Stop
        # a new object for each layer, so that the next one's input can be told from it
        self._current = self._first.detach()
        return self._stack.form.wrap(self._current)

    def result(self) -> tuple[torch.Tensor, Context]:
        """The hidden state that the first layer was given, and the context of all.

        Raises:
            ModelError: not every layer was called.
        """
        if self._first is None or self._calls != len(self._stack.layers):
            raise ModelError(
                f"{self._owner}: this forward called {self._calls} of {len(self._stack.layers)} layers; "
                "such models cannot be staged"
            )
        return self._first, self._builder.build()


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


def argument(args: tuple[object, ...], kwargs: Mapping[str, object], slot: Slot) -> object:
    """The argument at ``slot``, or None."""
    if isinstance(slot, str):
        return kwargs.get(slot)
    return args[slot] if slot < len(args) else None


def find_stack(model: PreTrainedModel) -> Stack:
    """The decoder stack of ``model``, whose weights are absent: the list of layers that its forward runs through.

    Of several such lists the one with the most parameters is taken. Costs no memory for the weights' sake.

    Raises:
        ModelError: there is none, or its layers hand on more than one hidden state.
    """
    name = type(model).__name__
    faults: list[str] = []
    for path, layers in _candidates(model):
        for length in range(5):
            probe = _Probe(name, layers, Form(length))
            try:
                stack = probe.run(model)
            except ModelError as error:
                faults.append(str(error))
            except Exception as error:  # whatever a model raises on an answer of the wrong form: the next one is tried
                faults.append(f"{name}: {type(error).__name__}: {error}")
            else:
                _refuse_bidirectional(name, stack)
                _check_loss(model, stack)
                return stack
            if probe.refused:
                raise ModelError(f"{faults[-1]} (layers: {path})")
    why = f"; of the lists tried: {faults[0].removeprefix(name + ': ')}" if faults else ""
    raise ModelError(f"{name}: no list of decoder layers that its forward runs through one after another{why}")


def _candidates(model: nn.Module) -> list[tuple[str, tuple[nn.Module, ...]]]:
    """Lists of modules that may be the stack, outermost ones only, those with the most parameters first."""
    found: list[tuple[str, tuple[nn.Module, ...]]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) and not inside:
            found.append((path, tuple(module)))

    def num_parameters(entry: tuple[str, tuple[nn.Module, ...]]) -> int:
        return sum(parameter.numel() for parameter in nn.ModuleList(entry[1]).parameters())

    return sorted(found, key=num_parameters, reverse=True)


class _Probe:
    """One forward of a model on a tiny batch, with the modules of a list answered for in one form."""

    def __init__(self, owner: str, layers: tuple[nn.Module, ...], form: Form) -> None:
        #: Set when the fault would be the same in every form.
        self.refused = False
        self._owner = owner
        self._layers = layers
        self._form = form
        self._calls: list[nn.Module] = []
        self._slot: Slot = 0
        self._shape: torch.Size | None = None
        self._current: torch.Tensor | None = None
        self._version = 0
        self._builder = ContextBuilder(owner)
        self._usage = _Usage()
        self._used_before: set[int] = set()

    def run(self, model: PreTrainedModel) -> Stack:
        """The stack, if the model runs through the list and makes logits of what it returns."""
        with private_rng(), torch.enable_grad(), intercepted(self._layers, self._answer), self._usage:
            output = model(**model_inputs({"input_ids": _probe_ids(model)}))
        if self._current is None:
            raise ModelError(f"{self._owner}: the forward does not call the list")
        uncalled = [n for n, layer in enumerate(self._layers) if not any(layer is called for called in self._calls)]
        if uncalled:
            raise ModelError(f"{self._owner}: the forward does not call layer {uncalled[0]} of {len(self._layers)}")
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != (_PROBE_ROWS, _PROBE_TOKENS):
            raise ModelError(f"{self._owner}: the forward gives no logits for every token")
        if not _depends_on(logits, self._current):
            raise ModelError(f"{self._owner}: the logits do not depend on what the last layer returns")
        return Stack(
            layers=tuple(self._calls),
            form=self._form,
            slot=self._slot,
            width=self._current.shape[-1],
            used_before=frozenset(self._used_before),
            used_after=frozenset(self._usage.storages),
        )

    def _answer(self, layer: nn.Module, *args: object, **kwargs: object) -> object:
        """Take a layer's call: check its input, note the rest, return a new tensor that needs a gradient.

        So whatever the model derives from it besides the next input is known by its gradient.
        """
        number = len(self._calls)
        slot = _find_slot(args, kwargs, self._current)
        if slot is None and number == 0:
            raise ModelError(f"{self._owner}: the first layer is given no hidden state of shape [rows, tokens, width]")
        if slot is None or (number > 0 and slot != self._slot):
            raise ModelError(f"{self._owner}: layer {number} is not given what layer {number - 1} returned")
        hidden = argument(args, kwargs, slot)
        if not isinstance(hidden, torch.Tensor) or hidden._version != (self._version if number else hidden._version):
            raise ModelError(f"{self._owner}: what layer {number - 1} returned is changed before layer {number}")
        if self._shape is not None and hidden.shape != self._shape:
            shapes = f"shape {tuple(hidden.shape)} after {tuple(self._shape)}"
            raise ModelError(f"{self._owner}: layer {number} is given {shapes}")
        if hidden.shape[:-1] != (_PROBE_ROWS, _PROBE_TOKENS):
            raise ModelError(f"{self._owner}: layer {number} is given {tuple(hidden.shape)}, not [rows, tokens, width]")
        self._slot, self._shape = slot, hidden.shape
        try:
            self._builder.add(args, kwargs, slot)
        except ModelError:
            self.refused = True
            raise
        self._calls.append(layer)
        self._used_before |= self._usage.storages
        self._usage.storages.clear()
        self._current = hidden.detach().requires_grad_()
        self._version = self._current._version
        return self._form.wrap(self._current)


def _find_slot(args: tuple[object, ...], kwargs: Mapping[str, object], previous: torch.Tensor | None) -> Slot | None:
    """The argument that is ``previous``; for the first layer the one that looks like a hidden state."""
    named: list[tuple[Slot, object]] = [*enumerate(args), *kwargs.items()]
    if previous is not None:
        return next((slot for slot, value in named if value is previous), None)
    preferred = [entry for entry in named if entry[0] in (0, "hidden_states")]
    for slot, value in preferred + named:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3:
            return slot
    return None


def _depends_on(output: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether autograd knows of a way from ``output`` back to the leaf ``source``; nothing is computed."""
    pending = [output.grad_fn]
    seen: set[object] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is source:
            return True
        seen.add(node)
        pending += [edge for edge, _ in node.next_functions]
    return False


class _Usage(TorchDispatchMode):
    """Notes the storages that torch reads; does not multiply by absent matrices, which torch would first write out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types none of it
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat = [item for value in args for item in (value if isinstance(value, list | tuple) else (value,))]
        tensors = [item for item in flat if isinstance(item, torch.Tensor)]
        self.storages |= {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_meta}
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = tensors[-2:]
            if any(matrix.untyped_storage().nbytes() < matrix.numel() * matrix.itemsize for matrix in (left, right)):
                return left.new_full((left.shape[0], right.shape[1]), float("nan"))
        return func(*args, **(kwargs or {}))


def _probe_ids(model: PreTrainedModel) -> torch.Tensor:
    """Tokens of the probe's batch, int64."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(_PROBE_ROWS * _PROBE_TOKENS).remainder(int(vocab_size))
    return ids.view(_PROBE_ROWS, _PROBE_TOKENS)


def _check_loss(model: PreTrainedModel, stack: Stack) -> None:
    """Say so if the model's forward does not use its ``loss_function``, as then the loss here is not that of the model.

    Some such models do not shift the labels, and none can average over a whole step.
    """
    calls: list[torch.Tensor] = []

    def spy(logits: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
        calls.append(logits)
        return logits.new_zeros(())

    ids = _probe_ids(model)
    hidden = torch.full((*ids.shape, stack.width), float("nan"), dtype=model.dtype)
    had = vars(model).get("_loss_function")
    vars(model)["_loss_function"] = spy
    try:
        with private_rng(), torch.no_grad(), intercepted(stack.layers, stack.injector(hidden)), _Usage():
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


def _refuse_bidirectional(owner: str, stack: Stack) -> None:
    """Refuse an encoder: its attention says that it is not causal, and a token would see its own label."""
    flags = [getattr(module, "is_causal", None) for layer in stack.layers for module in layer.modules()]
    causal = [flag for flag in flags if isinstance(flag, bool)]
    if causal and not any(causal):
        raise ModelError(f"{owner}: its attention is not causal (an encoder); only causal LMs can be staged")
