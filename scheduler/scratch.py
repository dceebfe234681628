"""Where a run's scratch lies: files for what steps may spill, reserved before the first of them.

What is spilled, and when, is in the plans; transfers are `runtime.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hoist.scheduler.setup import Setup
from hoist.tiers.store import Store

#: A file, and the offset in it, in bytes.
ScratchPlace = tuple[Path, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """Places in a store's scratch/; what is never spilled has none."""

    activations: dict[tuple[int, int], ScratchPlace] = field(default_factory=dict)
    """By stage below the boundary and micro-batch."""
    gradients: dict[int, ScratchPlace] = field(default_factory=dict)
    """Per stage, its gradients between two micro-batches."""
    stashed_gradients: dict[int, ScratchPlace] = field(default_factory=dict)
    """Per stage, those that wait for delayed updates."""


def reserve(store: Store, setup: Setup, *, num_micro_batches: int) -> Scratch:
    """Make the files, so that a full drive is an error now and not during a step.

    Raises StoreRefusedError if the drive cannot hold them; files that were made stay until the store is next opened.
    """
    scratch = Scratch()
    if setup.scratch_activation_bytes:
        path = store.scratch_file("activations", setup.scratch_activation_bytes)
        for boundary in range((len(setup.layouts) - 1) * num_micro_batches):
            place = path, boundary * setup.memory.demand.activation_bytes
            scratch.activations[divmod(boundary, num_micro_batches)] = place
    for name, num_bytes, places in (
        ("gradients", setup.scratch_gradient_bytes, scratch.gradients),
        ("waiting-gradients", setup.stash_bytes, scratch.stashed_gradients),
    ):
        if not num_bytes:
            continue
        path = store.scratch_file(name, num_bytes)
        offset = 0
        for stage, needed in enumerate(setup.memory.demand.stages):
            places[stage] = path, offset
            offset += needed.gradients
    return scratch
