"""Follows tensors through a model's own code outside its layers, and says what every stage must be given.

While a forward runs with its layers replaced, each torch call that touches a weight or what a layer returned is noted.
Who replaces the layers is `stack.py`; what is noted is kept and replayed by `context.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hoist.scheduler.context import Entry, LayerCall, Value, WeightRef, leaves, rebuild
from hoist.scheduler.errors import ModelError

#: Calls that take a tensor only for its shape and kind.
_SHAPED_ONLY = frozenset(
    (
        "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "empty_like",
        "full_like", "rand_like", "randn_like",
    )
)
#: Calls that make a decision of what a tensor holds.
_DECIDING = frozenset(("__bool__", "item", "tolist", "__int__", "__float__", "__index__", "__contains__"))


class Tape(TorchFunctionMode):
    """Notes the calls of one forward. Segment 0 is the code before the first layer, segment n that before layer n."""

    def __init__(self, owner: str, names: Callable[[], Mapping[int, str]]) -> None:
        """``names``: the name of each parameter and persistent buffer by its id, asked for when one is first needed."""
        super().__init__()
        self._owner = owner
        #: Tells what this tape named from what another one did.
        self._token = object()
        self._names_of = names
        self._weights: Mapping[int, str] | None = None
        self.segment = 0
        self._end_of_segment_0 = 2**62
        self._start_of_segment = 0
        #: Calls noted so far, whose numbers their results carry.
        self.count = 0
        #: Set while a layer runs: nothing is noted.
        self.paused = False
        self.entries: list[Entry] = []
        #: Calls that the model makes with gradients disabled: segment, number within it. Known from the probe.
        self.without_gradients: frozenset[tuple[int, int]] = frozenset()
        self.notes_gradients = False
        #: Results that are replaced by other tensors.
        self.substitutes: Mapping[Value, Tensor] = {}
        #: Changes in place are made; otherwise what tensors hold does not matter.
        self.changes_in_place = False
        #: Calls are kept; otherwise only counted.
        self.records = True
        #: Values of segment 0 that something later uses, and those of `watched`.
        self.used: dict[Value, Tensor] = {}
        self.watched: frozenset[Value] = frozenset()

    def name(self, tensor: Tensor, value: Value) -> None:
        """``tensor`` is ``value`` from now on."""
        # Kept on the tensor itself: a table by id would have to keep every tensor alive.
        marked: Any = tensor
        marked._hoist_value = (self._token, value)
        if value in self.watched:
            self.used[value] = tensor

    def value(self, tensor: Tensor) -> Value | None:
        """What ``tensor`` was named."""
        owner, value = getattr(tensor, "_hoist_value", (None, None))
        return value if owner is self._token else None

    def reference(self, leaf: object) -> object:
        """``leaf`` as it is kept: a value or weight by its name, anything else as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        value = self.value(leaf)
        if value is not None:
            if value.kind == "glue" and value.number < self._end_of_segment_0:
                self.used[value] = leaf
            return value
        if self._weights is None:
            self._weights = self._names_of()
        name = self._weights.get(id(leaf))
        if name is not None:
            return WeightRef(name)
        return leaf

    def begin_segment(self, number: int) -> None:
        """What follows comes after layer ``number - 1``."""
        if self.segment == 0:
            self._end_of_segment_0 = self.count
        self.segment = number
        self._start_of_segment = self.count

    def _grad(self, position: int) -> bool:
        """Whether the model makes the call at ``position`` of the segment with gradients enabled."""
        place = self.segment, position
        if self.notes_gradients and not torch.is_grad_enabled():
            self.without_gradients |= {place}
        return place not in self.without_gradients

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self.paused:
            return func(*args, **named)
        given = [leaf for leaf in leaves((args, named)) if isinstance(leaf, Tensor)]
        followed = any(isinstance(leaf, nn.Parameter) or self.value(leaf) is not None for leaf in given)
        title = getattr(func, "__name__", "")
        if not followed or title in _SHAPED_ONLY:
            return func(*args, **named)
        if title in _DECIDING and self.segment:
            raise ModelError(f"{self._owner}: its forward decides between layers by what they return")
        in_place = title == "__setitem__" or _in_place(title)
        spec: tuple[object, object] = (None, None)
        if self.segment and self.records:
            spec = rebuild(tuple(args), self.reference), rebuild(dict(named), self.reference)
        if in_place and not self.changes_in_place:
            result: object = None if title == "__setitem__" else args[0]
        else:
            result = func(*args, **named)
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if in_place:
            tensors = [args[0]]
        if not tensors or (len(tensors) == 1 and isinstance(tensors[0], nn.Parameter)):
            return result  # a size, or a weight as it is
        number, self.count = self.count, self.count + 1
        values = [Value("glue", number, leaf) for leaf in range(len(tensors))]
        for tensor, value in zip(tensors, values, strict=True):
            self.name(tensor, value)
        if self.segment and self.records:
            self.entries.append(
                Entry(
                    segment=self.segment,
                    number=number,
                    func=func,
                    args=spec[0],
                    kwargs=spec[1],
                    changes_first=in_place,
                    grad=self._grad(number - self._start_of_segment),
                )
            )
        if any(value in self.substitutes for value in values):
            if in_place:
                raise ModelError(f"{self._owner}: its forward changes a tensor in place that later stages use")
            return self._substituted(result, values)
        return result

    def _substituted(self, result: object, values: Sequence[Value]) -> object:
        position = iter(values)

        def substitute(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            value = next(position)
            other = self.substitutes.get(value, leaf)
            self.name(other, value)
            return other

        return rebuild(result, substitute)


def _in_place(title: str) -> bool:
    return (title.endswith("_") and not title.endswith("__")) or (title.startswith("__i") and title.endswith("__"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """What passes between stages."""

    boundaries: tuple[tuple[Value, ...], ...]
    """What each layer's stage is given, in the order of the forward, and last the head."""
    calls: tuple[LayerCall, ...]
    """The layers' calls, each with the code before it that it needs."""


def flow(calls: Sequence[LayerCall], entries: Sequence[Entry], into_head: Iterable[Value]) -> Flow:
    """Find what each stage needs, from the last to the first.

    ``into_head``: values that the code after the last layer uses and doesn't make itself.
    """
    by_segment: dict[int, list[Entry]] = {}
    for entry in entries:
        by_segment.setdefault(entry.segment, []).append(entry)
    wanted = set(into_head)
    boundaries = [_ordered(wanted)]
    complete: list[LayerCall] = []
    for number in reversed(range(len(calls))):
        call = calls[number]
        needed = {value for value in wanted if not (value.kind == "layer" and value.number == number)}
        needed |= set(values_in((call.args, call.kwargs)))
        before: list[Entry] = []
        if number:
            before, needed = prune(by_segment.get(number, []), needed)
        complete.append(replace(call, before=tuple(before)))
        wanted = needed
        boundaries.append(_ordered(wanted))
    return Flow(boundaries=tuple(reversed(boundaries)), calls=tuple(reversed(complete)))


def prune(entries: Sequence[Entry], needed: set[Value]) -> tuple[list[Entry], set[Value]]:
    """The entries that make something that is needed, in order, and what is then needed from outside."""
    kept: list[Entry] = []
    needed = set(needed)
    for entry in reversed(entries):
        made = {value for value in needed if value.kind == "glue" and value.number == entry.number}
        if made:
            needed = (needed - made) | set(values_in((entry.args, entry.kwargs)))
            kept.append(entry)
    return kept[::-1], needed


def values_in(spec: object) -> list[Value]:
    """The values that a kept call names."""
    return [leaf for leaf in leaves(spec) if isinstance(leaf, Value)]


def weights_in(entries: Iterable[Entry]) -> set[str]:
    """Names of the weights that kept calls use."""
    specs = [leaves((entry.args, entry.kwargs)) for entry in entries]
    return {leaf.name for spec in specs for leaf in spec if isinstance(leaf, WeightRef)}


def _ordered(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(sorted(values, key=lambda value: (value.kind, value.number, value.leaf)))


def replay(entries: Iterable[Entry], values: dict[Value, Tensor], resolve: Callable[[object], object]) -> None:
    """Carry out kept calls, adding what they make to ``values``. ``resolve`` gives each leaf its tensor."""
    for entry in entries:
        args = list(rebuild(entry.args, resolve))
        kwargs: dict[str, Any] = rebuild(entry.kwargs, resolve)
        if entry.changes_first:
            # the value before may be a stage's input, which recomputation needs as it was
            args[0] = torch.clone(args[0])
        with torch.set_grad_enabled(entry.grad and torch.is_grad_enabled()):
            result = entry.func(*args, **kwargs)
        made = [args[0]] if entry.changes_first else [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        for leaf, tensor in enumerate(made):
            values[Value("glue", entry.number, leaf)] = tensor
