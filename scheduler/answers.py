"""What a layer gives back, and what it does with the dicts that it is given: noted once, and given in its place later.

Who runs the layers once is `probe.py`; what stands in for them is `stack.py`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hoist.scheduler.context import leaves, rebuild

#: Rows and tokens of the probe's batch: different primes, so that a wrong axis shows and sizes can be told.
PROBE_ROWS, PROBE_TOKENS = 3, 7


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
        sizes = {PROBE_ROWS: rows, PROBE_TOKENS: tokens, PROBE_ROWS * PROBE_TOKENS: rows * tokens}
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
            container = argument(args, kwargs, where)
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
            container = argument(args, kwargs, where)
            if isinstance(container, MutableMapping):
                container[key] = rebuild(item, filled)
        return rebuild(self.result, filled)


def argument(args: Sequence[object], kwargs: Mapping[str, object], where: int | str) -> object:
    """The argument at a position or of a name, or None."""
    if isinstance(where, str):
        return kwargs.get(where)
    return args[where] if where < len(args) else None


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


class Noting:
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
