"""Measures sides in turn, round after round, so that a noisy machine is noisy to all of them alike.

What is measured is the caller's; how results look is `outcome.py`'s business.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Some measurements of one thing, in its unit."""

    median: float
    low: float
    """The smallest."""
    high: float
    """The largest."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value. Raises ValueError of none."""
        if not values:
            raise ValueError("values: none given")
        return cls(median=statistics.median(values), low=min(values), high=max(values), count=len(values))


def interleaved(
    sides: Mapping[Key, Callable[[], Result]],
    rounds: int,
    *,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Key, list[Result]]:
    """Call every side once a round; the order turns round each time, so that none always follows the same one.

    ``told`` gets the calls done and to be done. Raises what a side raises; nothing is left running then.
    """
    found: dict[Key, list[Result]] = {name: [] for name in sides}
    done, total = 0, rounds * len(sides)
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            found[name].append(sides[name]())
            done += 1
            told(done, total)
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, pair by pair of the same round."""
    return Spread.of([mine / other for mine, other in zip(ours, theirs, strict=True)])
