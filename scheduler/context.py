"""What each layer is called with: masks, positions, rotary tables, flags; by name, what depends on weights.

Recorded once per micro-batch by the embed stage and replayed to the layers; `stack.py` and `tape.py` do that.
"""

from __future__ import annotations

import copy
import enum
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache

from hoist.scheduler.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for ``Context.tensors[index]`` in a recorded call."""

    index: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that depends on weights, by where it comes from: the same name in every forward of one kind of batch."""

    kind: Literal["layer", "glue"]
    """Returned by a layer, or made by a torch call outside them."""
    number: int
    """Number of the layer's call, or of the torch call."""
    leaf: int
    """Which of the tensors returned."""


@dataclass(frozen=True, slots=True)
class WeightRef:
    """Stands for a parameter or persistent buffer in a recorded call, by a name of ``state_dict()``."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A torch call of the model's code between layers, kept to be made again."""

    segment: int
    """Number of the layer before which it was made."""
    number: int
    func: Callable[..., object]
    args: Any
    """With :class:`Value` and :class:`WeightRef` for tensors that depend on weights."""
    kwargs: Any
    changes_first: bool
    """It changes its first argument in place, and that is its result."""
    grad: bool = True
    """The model makes it with gradients enabled."""


_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, slice, enum.Enum, type(...), torch.dtype, torch.device,
    torch.Size, torch.memory_format, torch.layout,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCall:
    """The arguments of one layer's call, and the torch calls before it that they need.

    Tensors that depend on weights are :class:`Value`, others :class:`TensorRef`.
    """

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    before: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the layers of one micro-batch are called with. Immutable; nothing in it depends on weights."""

    tensors: tuple[torch.Tensor, ...]
    """Every tensor of every call that depends on no weight, once."""
    calls: tuple[LayerCall, ...]
    """One per layer, in the order of the forward."""
    boundaries: tuple[tuple[Value, ...], ...] = ()
    """What passes from each stage to the next: what each layer's stage is given, and last the head."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages that the tensors use, each counted once."""
        return sum(self.storage_bytes)

    @property
    def storage_bytes(self) -> tuple[int, ...]:
        """Bytes of each of these storages."""
        return tuple(_storages(self.tensors).values())

    def num_bytes_beyond(self, *others: Context) -> int:
        """Bytes of the storages that none of ``others`` uses: what this context costs while those are kept."""
        kept: dict[int, int] = {}
        for other in others:
            kept |= _storages(other.tensors)
        return sum(size for pointer, size in _storages(self.tensors).items() if pointer not in kept)

    def share_with(self, other: Context) -> Context:
        """This context with each tensor that equals its counterpart in ``other`` replaced by that counterpart.

        Micro-batches of one shape have equal rotary tables and, without padding, equal masks; M of them then cost one.
        """
        tensors = list(self.tensors)
        for index, (mine, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            same_kind = mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.device == theirs.device
            if mine is not theirs and same_kind and torch.equal(mine, theirs):
                tensors[index] = theirs
        return replace(self, tensors=tuple(tensors))

    def arguments(
        self, layer: int, values: Mapping[Value, torch.Tensor]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments for a call of ``layer``; in fresh containers, so that what it puts there shows."""
        call = self.calls[layer]
        args: tuple[object, ...] = rebuild(call.args, self.resolver(values))
        kwargs: dict[str, object] = rebuild(call.kwargs, self.resolver(values))
        return args, kwargs

    def resolver(
        self, values: Mapping[Value, torch.Tensor], weight: Callable[[str], torch.Tensor] | None = None
    ) -> Callable[[object], object]:
        """What gives each leaf of a recorded call its tensor; ``values`` may grow meanwhile."""

        def resolve(leaf: object) -> object:
            if isinstance(leaf, Value):
                return values[leaf]
            if isinstance(leaf, TensorRef):
                return self.tensors[leaf.index]
            if isinstance(leaf, WeightRef) and weight is not None:
                return weight(leaf.name)
            # a cache is empty, as no layer ran: each call fills a copy of its own, which nobody reads
            return copy.deepcopy(leaf) if isinstance(leaf, Cache) else leaf

        return resolve


def make_context(owner: str, calls: Sequence[LayerCall], boundaries: Sequence[tuple[Value, ...]]) -> Context:
    """A context of recorded calls, whose tensors are taken out of them.

    Raises:
        ModelError: an argument cannot be replayed, or a layer is given a weight from outside.
    """
    tensors: list[torch.Tensor] = []
    references: dict[int, TensorRef] = {}

    def keep(where: str, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in references:
                references[id(leaf)] = TensorRef(len(tensors))
                tensors.append(leaf)
            return references[id(leaf)]
        if isinstance(leaf, Cache):
            return copy.deepcopy(leaf)
        if isinstance(leaf, (Value, WeightRef, *_CONSTANTS)):
            return leaf
        raise ModelError(
            f"{owner}: {where} of type {type(leaf).__name__}, which may carry state from layer to layer; such models "
            "cannot be staged"
        )

    def entry(number: int, kept: Entry) -> Entry:
        def record(value: Any) -> Any:
            return rebuild(value, lambda leaf: keep(f"the code before layer {number} uses an object", leaf))

        return replace(kept, args=record(kept.args), kwargs=record(kept.kwargs))

    kept_calls = []
    for number, call in enumerate(calls):
        given = f"layer {number} is given"
        args = tuple(rebuild(value, partial(keep, f"{given} argument {n}")) for n, value in enumerate(call.args))
        kwargs = {name: rebuild(value, partial(keep, f"{given} {name!r}")) for name, value in call.kwargs.items()}
        kept_calls.append(LayerCall(args=args, kwargs=kwargs, before=tuple(entry(number, one) for one in call.before)))
    return Context(tensors=tuple(tensors), calls=tuple(kept_calls), boundaries=tuple(boundaries))


def same_structure(before: object, after: object) -> bool:
    """Whether a layer left the containers that it was given as they were: same keys, same objects."""
    if isinstance(before, dict | UserDict):
        if not isinstance(after, dict | UserDict) or before.keys() != after.keys():
            return False
        return all(same_structure(value, after[key]) for key, value in before.items())
    if isinstance(before, list | tuple):
        if not isinstance(after, list | tuple) or len(before) != len(after):
            return False
        return all(same_structure(mine, theirs) for mine, theirs in zip(before, after, strict=True))
    if isinstance(before, Cache):
        return True
    return before is after or (not isinstance(before, torch.Tensor) and before == after)


def rebuild(value: Any, leaf: Callable[[object], object]) -> Any:
    """``value`` with ``leaf`` applied to what its tuples, lists and dicts hold; they are made anew."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        items = [rebuild(item, leaf) for item in value]
        make: Callable[..., object] | None = getattr(type(value), "_make", None)
        # a named tuple must stay one: layers read it by name
        if make is not None:
            return make(items)
        return tuple(items) if type(value) is tuple or not hasattr(type(value), "n_fields") else type(value)(items)
    if type(value) is list:
        return [rebuild(item, leaf) for item in value]
    if isinstance(value, dict):
        return {key: rebuild(item, leaf) for key, item in value.items()}
    if isinstance(value, UserDict):
        return type(value)({key: rebuild(item, leaf) for key, item in value.items()})
    return leaf(value)


def leaves(value: object) -> Iterator[object]:
    """What the tuples, lists and dicts of ``value`` hold, in order."""
    if isinstance(value, dict | UserDict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _storages(tensors: tuple[torch.Tensor, ...]) -> dict[int, int]:
    """Bytes of each storage behind ``tensors``, by address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
