"""What each layer is called with besides its hidden state: masks, positions, rotary tables, flags.

Recorded once per micro-batch by the embed stage and replayed to the layers. The recording is `stages.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from hoist.scheduler.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for ``Context.tensors[index]`` in a recorded call."""

    index: int


class _Hidden:
    """Stands for the hidden state in a recorded call."""

    def __repr__(self) -> str:
        return "HIDDEN"


HIDDEN: Final = _Hidden()

#: Position (int) or name (str) of the argument that carries the hidden state.
Slot = int | str

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCall:
    """The arguments of one layer's call; tensors are :class:`TensorRef`, the hidden state is :data:`HIDDEN`."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the layers of one micro-batch are called with. Immutable; no hidden state, no gradients."""

    tensors: tuple[torch.Tensor, ...]
    """Every tensor of every call, once."""
    calls: tuple[LayerCall, ...]
    """One per layer, in the order of the forward."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages that the tensors use, each counted once."""
        return sum(_storages(self.tensors).values())

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
        return Context(tensors=tuple(tensors), calls=self.calls)

    def arguments(self, layer: int, hidden: torch.Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments for a call of ``layer`` with ``hidden``; in fresh containers, so that filling one shows."""
        call = self.calls[layer]

        def resolve(leaf: object) -> object:
            if leaf is HIDDEN:
                return hidden
            return self.tensors[leaf.index] if isinstance(leaf, TensorRef) else leaf

        args = tuple(_rebuild(value, resolve) for value in call.args)
        return args, {name: _rebuild(value, resolve) for name, value in call.kwargs.items()}


class ContextBuilder:
    """Collects the calls of one forward into a :class:`Context`."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tensors: list[torch.Tensor] = []
        self._refs: dict[int, TensorRef] = {}
        self._calls: list[LayerCall] = []

    def add(self, args: tuple[object, ...], kwargs: Mapping[str, object], slot: Slot) -> None:
        """Record a call whose hidden state is the argument ``slot``.

        Raises:
            ModelError: an argument has a gradient (state carried past the layers) or cannot be replayed.
        """

        def record(where: str, value: object) -> object:
            return _rebuild(value, lambda leaf: self._leaf(where, leaf))

        self._calls.append(
            LayerCall(
                args=tuple(HIDDEN if n == slot else record(f"argument {n}", value) for n, value in enumerate(args)),
                kwargs={name: HIDDEN if name == slot else record(f"{name!r}", value) for name, value in kwargs.items()},
            )
        )

    def build(self) -> Context:
        """The context of the calls recorded so far."""
        return Context(tensors=tuple(self._tensors), calls=tuple(self._calls))

    def _leaf(self, where: str, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                raise ModelError(
                    f"{self._owner}: layer {len(self._calls)} is given a tensor with a gradient besides its hidden "
                    f"state ({where}, shape {tuple(leaf.shape)}); only models whose layers pass on one hidden state "
                    "can be staged"
                )
            if id(leaf) not in self._refs:
                self._refs[id(leaf)] = TensorRef(len(self._tensors))
                self._tensors.append(leaf)
            return self._refs[id(leaf)]
        if isinstance(leaf, _CONSTANTS):
            return leaf
        raise ModelError(
            f"{self._owner}: layer {len(self._calls)} is given {where} of type {type(leaf).__name__}, which may carry "
            "state from layer to layer; such models cannot be staged"
        )


def same_structure(before: object, after: object) -> bool:
    """Whether a layer left the containers that it was given as they were: same keys, same objects."""
    if isinstance(before, dict):
        if not isinstance(after, dict) or before.keys() != after.keys():
            return False
        return all(same_structure(value, after[key]) for key, value in before.items())
    if isinstance(before, list | tuple):
        if not isinstance(after, list | tuple) or len(before) != len(after):
            return False
        return all(same_structure(mine, theirs) for mine, theirs in zip(before, after, strict=True))
    return before is after or (not isinstance(before, torch.Tensor) and before == after)


def _rebuild(value: object, leaf: Callable[[object], object]) -> object:
    """``value`` with ``leaf`` applied to what its tuples, lists and dicts hold."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        items = [_rebuild(item, leaf) for item in value]
        make: Callable[..., object] | None = getattr(type(value), "_make", None)
        # a named tuple must stay one: layers read it by name
        return tuple(items) if make is None else make(items)
    if type(value) is list:
        return [_rebuild(item, leaf) for item in value]
    if type(value) is dict:
        return {key: _rebuild(item, leaf) for key, item in value.items()}
    return leaf(value)


def _storages(tensors: tuple[torch.Tensor, ...]) -> dict[int, int]:
    """Bytes of each storage behind ``tensors``, by address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
