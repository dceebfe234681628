"""On a separate device any order that dependencies and marks allow gives the same bits; one that is left out shows.

The device's streams run late (`tests/support/late_device.py`), ops in an unlucky order (`tests/support/disorder.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hoist.scheduler.executor import Mark
from hoist.scheduler.ops import Kind, Op, Part, Resource
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.trainer import Trainer
from hoist.tiers.errors import HoistError
from hoist.tiers.io.direct import DirectEngine
from tests.support.disorder import Mutation, disordered, without_reads, without_writes
from tests.support.engines import PoisoningEngine
from tests.support.faults import (
    NUM_STEPS,
    Course,
    copy_store,
    go_on,
    late_job,
    quick_directory,
    snapshot,
)
from tests.support.late_device import LateDevice
from tests.support.training import torch_threads

pytestmark = pytest.mark.timeout(240)


def check_same(name: str, course: Course, *, kind: type[Trainer], seed: int) -> None:
    """A run on a late device, in another order, gives the same losses and the same bytes in the store.

    What has been written is not poisoned here: a REFRESH may still read it.
    """
    with quick_directory() as folder, torch_threads(1):
        directory = copy_store(course.store, folder / "store")
        with (
            PoisoningEngine(DirectEngine(num_threads=2), seed=seed) as engine,
            LateDevice(seed) as device,
        ):
            losses = go_on(late_job(name), directory, engine, trainer_kind=kind, validate=True, device=device)
        assert losses == course.losses
        assert snapshot(directory) == course.snapshots[NUM_STEPS]


#: Ten seeds of each setting in a long run, one in every run.
SEEDS = [pytest.param(seed, marks=[] if seed == 0 else pytest.mark.slow) for seed in range(10)]
NAMES = ("vertical", "horizontal", "delayed", "delayed, kept", "delayed, horizontal", "resident in part")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name == "delayed, horizontal" else [])
                                  for name in NAMES])  # fmt: skip
def test_unlucky_order_on_a_late_device(name: str, seed: int, course: Course) -> None:
    seed += len(name)
    check_same(name, course, kind=disordered(seed), seed=seed)


def all_but(*parts: Part) -> Callable[[Resource], bool]:
    return lambda resource: resource.part not in parts


#: Each leaves out a dependency that a plan for a separate device needs, in the setting named.
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "staging is merged before it is read": ("vertical", without_reads([Kind.MERGE], all_but(Part.STAGING))),
    "staging is read into while it is merged": (
        "vertical", without_writes([Kind.READ_WEIGHTS], all_but(Part.STAGING)),
    ),
    "a layer computes before its weights are merged": ("vertical", without_writes([Kind.BIND], all_but(Part.WEIGHTS))),
    "weights are let go of while a layer computes": ("vertical", without_writes([Kind.UNBIND], all_but(Part.WEIGHTS))),
    "a buffer is taken while its modules have it": ("vertical", without_writes([Kind.ACQUIRE], all_but(Part.WEIGHTS))),
    "a gradient is copied before it is complete": ("vertical", without_writes([Kind.DOWNLOAD], all_but(Part.GRADIENT))),
    "a gradient is measured before it is copied": (
        "vertical", without_writes([Kind.NORM], all_but(Part.HOST_GRADIENT)),
    ),
    "an update does not wait for its gradient": (
        "vertical", without_reads([Kind.UPDATE], all_but(Part.HOST_GRADIENT)),
    ),
    "a gradient is copied over one that updates need": (
        "vertical", without_writes([Kind.DOWNLOAD], all_but(Part.HOST_GRADIENT)),
    ),
    "the next stage's backward begins while a gradient is copied": (
        "vertical", without_writes([Kind.LOSS, Kind.BACKWARD], all_but(Part.GRADIENT)),
    ),
    "new weights are copied before they are made": (
        "vertical", without_reads([Kind.REFRESH], all_but(Part.STATE_SLOT)),
    ),
    "kept weights are copied before they are made": (
        "delayed, kept", without_reads([Kind.REFRESH], all_but(Part.KEPT)),
    ),
    "a layer computes before its new weights have come": (
        "resident in part", without_writes([Kind.REFRESH], all_but(Part.WEIGHTS)),
    ),
    "states are read over new weights that are being copied": (
        "vertical", without_writes([Kind.READ_STATES], all_but(Part.STATE_SLOT)),
    ),
    "an activation is spilled before it is made": (
        "vertical", without_reads([Kind.SPILL_ACTIVATION], all_but(Part.ACTIVATION)),
    ),
    "an activation is used before it is fetched": (
        "vertical", without_writes([Kind.FETCH_ACTIVATION], all_but(Part.ACTIVATION)),
    ),
    "a gradient is used before it is fetched": (
        "horizontal", without_writes([Kind.FETCH_GRADIENT], all_but(Part.GRADIENT)),
    ),
    "a gradient is spilled before it is complete": (
        "horizontal", without_reads([Kind.SPILL_GRADIENT], all_but(Part.GRADIENT)),
    ),
}  # fmt: skip


def shows(name: str, course: Course, kinds: Callable[[int], type[Trainer]], num_seeds: int) -> int | None:
    """The first seed with which it gives other bits, or a move that the residency table or the store refuses."""
    for seed in range(num_seeds):
        try:
            check_same(name, course, kind=kinds(seed), seed=seed)
        except (AssertionError, HoistError, LookupError, RuntimeError):
            return seed
    return None


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_missing_dependency_shows(what: str, course: Course) -> None:
    name, mutation = MUTATIONS[what]
    assert shows(name, course, lambda seed: disordered(seed, mutation), 16) is not None, "no order shows it"


class Unmarked(Runtime):
    """Ops of one kind are put into their stream without what they must come after."""

    kind = Kind.FORWARD

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        return super().run(op, step, () if op.kind is self.kind else after)


def unmarked(kind: Kind) -> type[Trainer]:
    found = type("UnmarkedRuntime", (Unmarked,), {"kind": kind})
    return type("UnmarkedTrainer", (Trainer,), {"runtime_kind": found})


#: All that come after what may still be in another stream: what computes after what was brought, a copy of a gradient
#: after what computes, what computes after that copy. A MERGE or REFRESH comes after what has ended: I/O, updates, and
#: ACQUIRE, which waits for the ends of those who had the buffer.
MARKED = (Kind.BIND, Kind.DOWNLOAD, Kind.BACKWARD)


@pytest.mark.parametrize("kind", MARKED)
def test_a_mark_that_is_ignored_shows(kind: Kind, course: Course) -> None:
    assert shows("vertical", course, lambda seed: unmarked(kind), 12) is not None, "no order shows it"


@pytest.mark.parametrize("name", ["vertical", pytest.param("delayed", marks=pytest.mark.slow)])
def test_these_are_all_kinds_that_wait_for_another_stream(name: str, course: Course) -> None:
    seen: set[Kind] = set()

    class Noting(Runtime):
        def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
            mark = super().run(op, step, after)
            if mark is not None and any(before.stream != mark.stream for before in after):
                seen.add(op.kind)
            return mark

    check_same(name, course, kind=type("NotingTrainer", (Trainer,), {"runtime_kind": Noting}), seed=1)
    assert seen <= set(MARKED)
