"""Any order that a plan's dependencies allow gives the same bits, also with buffers poisoned as soon as they are free.

The order is made unlucky by `tests/support/disorder.py`; that it would show a missing dependency is tested here too.
Plans alone, without bytes, are tested in `test_plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hoist.scheduler.config import Order
from hoist.scheduler.ops import Kind, Part
from hoist.scheduler.trainer import Trainer
from hoist.tiers.errors import HoistError
from hoist.tiers.io.direct import DirectEngine
from tests.support.disorder import Mutation, StatePoisoningEngine, disordered, without_reads, without_writes
from tests.support.faults import (
    NUM_STEPS,
    Course,
    Job,
    copy_store,
    delayed_job,
    go_on,
    job,
    quick_directory,
    snapshot,
    undisturbed,
)
from tests.support.training import torch_threads

PLANS: tuple[Order, ...] = ("vertical", "horizontal")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def courses() -> Iterator[dict[Order, Course]]:
    with quick_directory() as folder, torch_threads(1):
        yield {plan: undisturbed(job(plan), folder / plan) for plan in PLANS}


def check_same(what: Job, course: Course, *, kind: type[Trainer], seed: int) -> None:
    """A run in another order gives the same losses and the same bytes in the store.

    State slots are poisoned when they have been written: nothing reads one again before it is refilled.
    """
    with quick_directory() as folder:
        directory = copy_store(course.store, folder / "store")
        with StatePoisoningEngine(DirectEngine(num_threads=2), seed=seed) as engine:
            losses = go_on(what, directory, engine, trainer_kind=kind, validate=True)
        assert losses == course.losses
        assert snapshot(directory) == course.snapshots[NUM_STEPS]


SEEDS = [pytest.param(seed, marks=[] if seed < 3 else pytest.mark.slow) for seed in range(20)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plan", PLANS)
def test_delayed_transfers_and_poisoned_buffers(plan: Order, seed: int, courses: dict[Order, Course]) -> None:
    check_same(job(plan), courses[plan], kind=Trainer, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plan", PLANS)
def test_unlucky_order(plan: Order, seed: int, courses: dict[Order, Course]) -> None:
    check_same(job(plan), courses[plan], kind=disordered(seed), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("delay", [0.5, 1.0])
@pytest.mark.parametrize("plan", PLANS)
def test_unlucky_order_of_delayed_updates(
    plan: Order, delay: float, kept: bool, seed: int, courses: dict[Order, Course]
) -> None:
    """The same as without delay, commits at the turns and the flush of the last one included."""
    check_same(delayed_job(plan, delay, kept=kept), courses[plan], kind=disordered(seed), seed=seed)


#: Each leaves out a dependency that the plan needs.
MUTATIONS: dict[str, tuple[Order, Mutation]] = {
    "a weight buffer is taken while a layer computes with it": (
        "vertical",
        without_writes([Kind.ACQUIRE], lambda resource: resource.part is not Part.WEIGHTS),
    ),
    "staging is merged before it is read": (
        "vertical",
        without_reads([Kind.MERGE], lambda resource: resource.part is not Part.STAGING),
    ),
    "a state slot is filled while it is written": (
        "vertical",
        without_reads([Kind.WRITE_STATES], lambda resource: resource.part is not Part.STATE_SLOT),
    ),
    "states are written before the commit": (
        "vertical",
        without_reads([Kind.WRITE_STATES], lambda resource: resource.part is not Part.COMMIT),
    ),
    "an update does not wait for its gradient": (
        "vertical",
        without_reads([Kind.UPDATE], lambda resource: resource.part is not Part.GRADIENT),
    ),
    "a layer does not wait for its weights": (
        "vertical",
        without_writes([Kind.BIND], lambda resource: resource.part is not Part.WEIGHTS),
    ),
    "an activation is used before it is fetched": (
        "vertical",
        without_writes([Kind.FETCH_ACTIVATION], lambda resource: resource.part is not Part.ACTIVATION),
    ),
    "an activation is overwritten while it is spilled": (
        "vertical",
        without_reads([Kind.SPILL_ACTIVATION], lambda resource: resource.part is not Part.ACTIVATION),
    ),
    "an activation is fetched before it is spilled": (
        "vertical",
        without_writes([Kind.SPILL_ACTIVATION], lambda resource: resource.part is not Part.SCRATCH_ACTIVATION),
    ),
    "a gradient is used before it is fetched": (
        "horizontal",
        without_writes([Kind.FETCH_GRADIENT], lambda resource: resource.part is not Part.GRADIENT),
    ),
    "a gradient is overwritten while it is spilled": (
        "horizontal",
        without_reads([Kind.SPILL_GRADIENT], lambda resource: resource.part is not Part.GRADIENT),
    ),
    "weights expire while a layer computes with them": (
        "vertical",
        without_writes([Kind.UNBIND], lambda resource: resource.part not in (Part.GRADIENT, Part.WEIGHTS)),
    ),
    "a weight buffer is taken while an update takes its weights": (
        "vertical",
        without_reads([Kind.UPDATE], lambda resource: resource.part is not Part.WEIGHTS),
    ),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_missing_dependency_shows(what: str, courses: dict[Order, Course]) -> None:
    """At least one of some orders gives other bits, or a move that the residency table or the store refuses."""
    plan, mutation = MUTATIONS[what]
    for seed in range(16):
        try:
            check_same(job(plan), courses[plan], kind=disordered(seed, mutation), seed=seed)
        except (AssertionError, HoistError, RuntimeError):
            return
    pytest.fail("no order shows it")


# ---------------------------------------------------------------------- bfloat16


@pytest.fixture(scope="module")
def rounded_courses() -> Iterator[dict[Order, Course]]:
    """In bfloat16, where weights are read straight into their buffers."""
    with quick_directory() as folder, torch_threads(1):
        yield {plan: undisturbed(job(plan, dtype="bfloat16"), folder / plan) for plan in PLANS}


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 1 else pytest.mark.slow) for seed in range(10)])
@pytest.mark.parametrize("plan", PLANS)
def test_unlucky_order_in_bfloat16(plan: Order, seed: int, rounded_courses: dict[Order, Course]) -> None:
    what = job(plan, dtype="bfloat16")
    check_same(what, rounded_courses[plan], kind=disordered(seed), seed=seed)


def test_weights_that_are_read_into_a_buffer_in_use_show(rounded_courses: dict[Order, Course]) -> None:
    mutation = without_reads([Kind.READ_WEIGHTS], lambda resource: resource.part is not Part.WEIGHTS)
    what = job("vertical", dtype="bfloat16")
    for seed in range(16):
        try:
            check_same(what, rounded_courses["vertical"], kind=disordered(seed, mutation), seed=seed)
        except (AssertionError, HoistError, RuntimeError):
            return
    pytest.fail("no order shows it")
