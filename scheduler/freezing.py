"""Which parameters are trained: patterns over their names decide, before a model is cut into stages.

A frozen one has no gradient, no moments and one place on NVMe: `tiers/layout.py`, and `frozen.py` for how it is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.models import shared_locations


def choose_trained(model: nn.Module, *, train: Sequence[str] = (), freeze: Sequence[str] = ()) -> None:
    """Leave a gradient to the parameters that ``train`` names, to all if it is empty, and take it from ``freeze``'s.

    Patterns are globs over ``state_dict()`` names (``*`` passes dots too); a shared parameter goes by any of its names.
    What the model itself freezes stays frozen. Each parameter's ``requires_grad`` is all that changes, and only if
    nothing is refused.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    groups = [(places, places[0].get()) for places in shared_locations(model) if places[0].is_parameter]
    names = [place.name for places, _ in groups for place in places]
    for option, patterns in (("--train", train), ("--freeze", freeze)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"{option}: {pattern!r} matches no parameter of the model; {_near(pattern, names)}")
    trained = [
        parameter.requires_grad
        and (not train or _matches(train, [place.name for place in places]))
        and not _matches(freeze, [place.name for place in places])
        for places, parameter in groups
    ]
    if not any(trained):
        told = " ".join([*(f"--train {pattern}" for pattern in train), *(f"--freeze {pattern}" for pattern in freeze)])
        raise ConfigError(f"{told or 'the model'}: leaves nothing to train; freeze less, or name more with --train")
    for (_, parameter), wanted in zip(groups, trained, strict=True):
        parameter.requires_grad_(wanted)


def train_only(model: nn.Module, names: Collection[str]) -> None:
    """Leave a gradient to the parameters of these names alone, as a store that is resumed has them."""
    for places in shared_locations(model):
        if places[0].is_parameter:
            places[0].get().requires_grad_(any(place.name in names for place in places))


def trained_names(model: nn.Module) -> set[str]:
    """Names, shared ones under each of them, of the parameters that have a gradient."""
    return {
        place.name
        for places in shared_locations(model)
        if places[0].is_parameter and places[0].get().requires_grad
        for place in places
    }


def _matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _near(pattern: str, names: Sequence[str]) -> str:
    """Names that the pattern may have meant; else what names there are."""
    near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.5)
    if near:
        return f"near it are {', '.join(near)}"
    return f"names are like {', '.join(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))}"
