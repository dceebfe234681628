"""Some of many cases for every run, all of them for the slow one. The choice is fixed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def thinned(number: int, *choices: Sequence[Any]) -> list[Any]:
    """The product of ``choices`` as parameters; all but ``number`` of them are slow.

    Every single choice is among those that are not, if ``number`` is at least the longest sequence's length.
    """
    cases = list(product(*choices))
    order = random.Random(0).sample(cases, len(cases))
    kept: list[tuple[Any, ...]] = []
    for case in order:  # first those that bring a choice that has not been seen
        if len(kept) < number and any(case[place] not in {seen[place] for seen in kept} for place in range(len(case))):
            kept.append(case)
    kept += [case for case in order if case not in kept][: max(0, number - len(kept))]
    return [pytest.param(*case, marks=[] if case in kept else pytest.mark.slow) for case in cases]


def in_pairs(*choices: Sequence[Any]) -> list[Any]:
    """The product of ``choices`` as parameters; those are not slow that have any two choices together at least once.

    A fault that takes two settings to show shows in one of them; few take three.
    """
    cases = list(product(*(range(len(choice)) for choice in choices)))
    order = random.Random(0).sample(cases, len(cases))
    kept: set[tuple[int, ...]] = set()
    missing = {pair for case in cases for pair in _pairs(case)}
    while missing:
        case = max(order, key=lambda each: len(missing & _pairs(each)))
        kept.add(case)
        missing -= _pairs(case)
    return [
        pytest.param(
            *(choice[number] for choice, number in zip(choices, case, strict=True)),
            marks=[] if case in kept else pytest.mark.slow,
        )
        for case in cases
    ]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(case), 2))
