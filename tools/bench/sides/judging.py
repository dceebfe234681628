"""Whether results of several sides may be compared: they did the same work, and none was helped by the page cache.

A comparison that must not be believed is refused here, in one line; nothing is ever shown with a warning instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from hoist.tools.bench.sides.job import SideResult, Work
from hoist.tools.errors import BenchError

#: Largest relative difference of two losses of the same step. In float32 the sides differ in the order of sums alone:
#: 1e-7 was seen over three steps, at several sizes. Another learning rate, weight or token moves a loss by much more.
LOSS_TOLERANCE = 1e-5
#: Training must move the loss by so much of it, at least: a learning rate one percent off is then seen.
LEAST_LEARNT = 100 * LOSS_TOLERANCE
#: Packages that compute: all sides must have the same versions of them.
COMPUTING = ("torch", "transformers")
#: Most of a side's files that may be in the page cache, as a share, and beside it: what describes them is small.
CACHED_SHARE = 0.02
CACHED_BYTES = 2**20
#: Of what a side must have read, what the kernel's counts must show at least.
READ_SHARE = 0.95


def refuse_other_work(asked: Work, result: SideResult) -> None:
    """Raise BenchError, naming what differs, if a side did another work than it was told to do, by its own account."""
    for one in fields(Work):
        wanted, done = getattr(asked, one.name), getattr(result.work, one.name)
        if wanted != done:
            raise BenchError(f"{result.name} did another work: {one.name} is {done}, and it was told {wanted}")
    _refuse_incomplete(result)


def refuse_unless_comparable(results: Sequence[SideResult]) -> None:
    """Raise BenchError, naming what differs, unless all of the results, at least one, may be compared with each other.
    """
    first, *others = results
    for one in results:
        _refuse_incomplete(one)
        _refuse_cached(one)
    for other in others:
        _refuse_other_settings(first, other)
        _refuse_other_losses(first, other)
    _refuse_unlearnt(results)


def _refuse_incomplete(one: SideResult) -> None:
    for name in ("losses", "step_seconds", "read_bytes", "written_bytes"):
        count = len(getattr(one, name))
        if count != one.work.num_steps:
            raise BenchError(f"{one.name}: {name} of {count} steps, {one.work.num_steps} were to be made")
    if one.work.num_steps < 2:
        raise BenchError(f"{one.name}: {one.work.num_steps} step; the first is not counted, so at least 2 are needed")


def _refuse_cached(one: SideResult) -> None:
    allowed = CACHED_SHARE * one.stored_bytes + CACHED_BYTES
    if one.cached_bytes > allowed:
        raise BenchError(
            f"{one.name}: the page cache was warm: it held {one.cached_bytes:,} of the {one.stored_bytes:,} bytes of "
            "its files, so a step's reads were not the drive's"
        )
    read = sum(one.read_bytes)
    if read < READ_SHARE * one.least_read_bytes:
        raise BenchError(
            f"{one.name}: the page cache was warm: the kernel counts {read:,} bytes read from the drive, and "
            f"the side must have read {one.least_read_bytes:,}"
        )


def _refuse_other_settings(first: SideResult, other: SideResult) -> None:
    for one in fields(Work):
        mine, theirs = getattr(first.work, one.name), getattr(other.work, one.name)
        if mine != theirs:
            raise BenchError(
                f"the sides' settings differ: {one.name} is {mine} in {first.name}, {theirs} in {other.name}"
            )
    if first.layer_calls != other.layer_calls:
        raise BenchError(
            f"the sides' layers slept {first.layer_calls} times in {first.name}, {other.layer_calls} times in "
            f"{other.name}: they did not do the same"
        )
    for package in COMPUTING:
        ours, others = first.versions.get(package), other.versions.get(package)
        if ours is None or ours != others:
            raise BenchError(
                f"the sides' versions differ: {package} is {ours} in {first.name}, {others} in {other.name}"
            )


def _refuse_other_losses(first: SideResult, other: SideResult) -> None:
    for number, (mine, theirs) in enumerate(zip(first.losses, other.losses, strict=True), 1):
        _refuse_other_loss(f"at step {number}", first, mine, other, theirs)


def _refuse_other_loss(when: str, first: SideResult, mine: float, other: SideResult, theirs: float) -> None:
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        raise BenchError(f"{when} the loss is {mine} in {first.name}, {theirs} in {other.name}")
    difference = abs(mine - theirs) / max(abs(mine), abs(theirs), 1e-30)
    if difference > LOSS_TOLERANCE:
        raise BenchError(
            f"the sides' losses differ: {mine:.7f} in {first.name}, {theirs:.7f} in {other.name} {when}, "
            f"a relative difference of {difference:.1e}; {LOSS_TOLERANCE:g} is allowed: they did not train the same"
        )


def _refuse_unlearnt(results: Sequence[SideResult]) -> None:
    """Where next to nothing is learnt, any optimizer gives equal losses. The last update is seen here alone."""
    looked = [(one, one.trained_loss) for one in results if one.trained_loss is not None]
    if not looked:
        raise BenchError(f"{results[0].name}: does not say what the loss is after the last step")
    first, expected = looked[0]
    for one, trained in looked:
        _refuse_other_loss("after the last step", first, expected, one, trained)
        moved = abs(one.losses[0] - trained) / max(abs(one.losses[0]), 1e-30)
        if moved < LEAST_LEARNT:
            raise BenchError(
                f"{one.name}: training moved the loss of the first step's ids by {moved:.1e} of it, from "
                f"{one.losses[0]:.7f} to {trained:.7f}; at least {LEAST_LEARNT:g} is needed, or a side that trains "
                "otherwise would not be seen: take more --steps or a larger learning rate"
            )
