"""Runs whatever trains through `training.py` on devices whose streams are late and out of order: a suite once more.

A test module that imports the tests of another one and uses :func:`on_late_devices` in a fixture runs them all there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from hoist.scheduler.config import OptimDevice
from tests.support import training
from tests.support.late_device import LateDevice


@contextmanager
def on_late_devices(first_seed: int = 0, *, optim_device: OptimDevice = "cpu") -> Iterator[None]:
    """Every run of :func:`tests.support.training.train` has a late device of its own, each in another order.

    On every third, tensors of both memories may not be mixed. ``optim_device``: what updates run on.
    """
    seeds = itertools.count(first_seed)
    before = training.make_device, training.optim_device

    def make() -> LateDevice:
        seed = next(seeds)
        return LateDevice(seed, checks_placement=seed % 3 == 0)

    training.make_device, training.optim_device = make, optim_device
    try:
        yield
    finally:
        training.make_device, training.optim_device = before
