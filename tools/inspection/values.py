"""The elements of a store's tensors, and of their moments, a window at a time; and numbers that describe them.

Nothing is locked: who needs one commit's values asks afterwards whether it is still the store's (`Store.is_current`).
Where the bytes lie, and how they look, is the business of `tensors.py`.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.reading import TensorReader
from hoist.tiers.format import StateArray
from hoist.tiers.layout import PlacedTensor, StageLayout
from hoist.tiers.store import Store

#: What is kept of a trained tensor, in the order in which it is shown; of others, the first.
STATES = ("weight", "exp_avg", "exp_avg_sq")
#: Elements that are read and worked on at a time: with numbers in float64, about 24 MiB.
WINDOW_ELEMENTS = 2**20

#: A tensor and its stage.
Placed = tuple[StageLayout, PlacedTensor]


def tensors_of(store: Store) -> dict[str, Placed]:
    """Every tensor of a store by name, in its order."""
    return {
        placed.spec.name: (layout, placed)
        for layout in store.layouts
        for placed in (*layout.trainable, *layout.frozen)
    }


def chosen(names: Sequence[str], known: Mapping[str, Placed], *, directory: Path) -> list[str]:
    """The tensors that names and patterns (``*``, ``?``, ``[...]``) mean, in the store's order.

    Raises ConfigError, with names that are near, where one means none.
    """
    found: set[str] = set()
    for name in names:
        matching = {name} if name in known else set(fnmatch.filter(known, name))
        if not matching:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
            raise ConfigError(
                f"--tensor: {directory} has no tensor {name!r}; it has, for example, {', '.join(near)}"
            )
        found |= matching
    return [name for name in known if name in found]


def states_of(placed: PlacedTensor) -> tuple[str, ...]:
    """Which of :data:`STATES` the tensor has."""
    return STATES if placed.spec.trainable else STATES[:1]


def window(reader: TensorReader, tensor: Placed, state: str, start: int) -> Tensor:
    """Elements of a state from ``start`` on, at least one; a view that the next call overwrites."""
    layout, placed = tensor
    if not placed.spec.trainable:
        return reader.frozen(layout, placed, start)
    if state == STATES[0]:
        return reader.weights(layout, placed, start)
    return reader.moments(layout, placed, StateArray(state), start)


def windows(reader: TensorReader, tensor: Placed, state: str) -> Iterator[Tensor]:
    """All of a state, window after window."""
    start = 0
    while start < tensor[1].spec.num_elements:
        values = window(reader, tensor, state, start)
        start += values.numel()
        yield values


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Numbers over a tensor's elements, computed in float64; those that are not finite count, and nothing else."""

    num_nan: int
    num_inf: int
    min: float | None
    """None, like all below, where no element is finite, or float64 cannot hold the number."""
    max: float | None
    mean: float | None
    """Sum over number."""
    std: float | None
    """Root of the summed squared distances to the mean over number - 1, as torch has it; None for one element."""
    norm: float | None
    """L2: root of the sum of squares."""


class Gatherer:
    """Statistics of values that come in windows. Chan, Golub and LeVeque 1979 for joining means and distances."""

    def __init__(self) -> None:
        self._count = self._num_nan = self._num_inf = 0
        self._min, self._max = math.inf, -math.inf
        self._mean = self._distances = self._squares = 0.0

    def add(self, values: Tensor) -> None:
        """More elements, 1-D, of any dtype."""
        if values.is_floating_point():
            nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
            self._num_nan += nan
            self._num_inf += inf
            numbers = (values[values.isfinite()] if nan or inf else values).to(torch.float64)
        else:
            numbers = values.to(torch.float64)
        count = numbers.numel()
        if not count:
            return
        low, high = torch.aminmax(numbers)
        self._min, self._max = min(self._min, low.item()), max(self._max, high.item())
        self._squares += float(torch.dot(numbers, numbers))
        mean = float(numbers.mean())
        numbers = numbers - mean
        away = mean - self._mean
        total = self._count + count
        self._distances += float(torch.dot(numbers, numbers)) + away * away * self._count * count / total
        self._mean += away * count / total
        self._count = total

    def finish(self) -> Statistics:
        """Of all that was added."""
        some = self._count > 0
        return Statistics(
            num_nan=self._num_nan,
            num_inf=self._num_inf,
            min=self._min if some else None,
            max=self._max if some else None,
            mean=finite(self._mean) if some else None,
            std=finite(math.sqrt(self._distances / (self._count - 1))) if self._count > 1 else None,
            norm=finite(math.sqrt(self._squares)) if some else None,
        )


def finite(number: float) -> float | None:
    """The number, or None where float64 could not hold it: JSON has no word for that."""
    return number if math.isfinite(number) else None
