"""From a plan's order to dependencies: which earlier ops each op must wait for. Pure, like `plan.py`.

An op waits for the last writer of what it reads, and for the last writer and every later reader of what it writes.
The same rule joins a step to the one before it, so two steps can overlap without any barrier between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hoist.scheduler.ops import Resource
from hoist.scheduler.plan_records import Plan


@dataclass(slots=True)
class _Use:
    """Who used a resource last: its last writer in this plan (-1: none) and the readers since."""

    writer: int = -1
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    """The first uses of a resource in a plan, which depend on the step before."""

    readers: tuple[int, ...]
    """Ops that read it before anything in this plan writes it."""
    writer: int
    """The first op that writes it (-1: none)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkedPlan:
    """A plan with its dependencies."""

    plan: Plan
    dependents: tuple[tuple[int, ...], ...]
    """For each op, the later ops of the plan that wait for it."""
    num_dependencies: tuple[int, ...]
    """For each op, how many ops of the plan it waits for."""
    entries: dict[Resource, Entry]
    """What must be joined to the step before."""
    exits: dict[Resource, tuple[int, ...]]
    """For each resource, the ops whose end leaves it free for any use: last writer and readers since."""
    exit_writers: dict[Resource, int]
    """For each resource that the plan writes, its last writer: readers of the next step wait for this one only."""


def link(plan: Plan) -> LinkedPlan:
    """Find the dependencies of a plan's ops from what they read and write."""
    uses: dict[Resource, _Use] = {}
    first_readers: dict[Resource, list[int]] = {}
    first_writer: dict[Resource, int] = {}
    dependents: list[list[int]] = [[] for _ in plan.ops]
    counts: list[int] = []
    for index, op in enumerate(plan.ops):
        waits: set[int] = set()
        for resource in op.reads:
            use = uses.setdefault(resource, _Use())
            if use.writer >= 0:
                waits.add(use.writer)
            else:
                first_readers.setdefault(resource, []).append(index)
        for resource in op.writes:
            use = uses.setdefault(resource, _Use())
            if use.writer >= 0:
                waits.add(use.writer)
            else:
                first_writer.setdefault(resource, index)
            waits.update(use.readers)
        for resource in op.reads:
            uses[resource].readers.append(index)
        for resource in op.writes:
            uses[resource] = _Use(writer=index)
        waits.discard(index)
        counts.append(len(waits))
        for earlier in waits:
            dependents[earlier].append(index)
    return LinkedPlan(
        plan=plan,
        dependents=tuple(tuple(ops) for ops in dependents),
        num_dependencies=tuple(counts),
        entries={
            resource: Entry(
                readers=tuple(dict.fromkeys(first_readers.get(resource, ()))), writer=first_writer.get(resource, -1)
            )
            for resource in {**first_readers, **first_writer}
        },
        exits={
            resource: tuple(op for op in (use.writer, *use.readers) if op >= 0) for resource, use in uses.items()
        },
        exit_writers={resource: use.writer for resource, use in uses.items() if use.writer >= 0},
    )


def join(earlier: LinkedPlan, later: LinkedPlan) -> Sequence[tuple[int, int]]:
    """The dependencies between two consecutive steps: pairs (op of ``earlier``, op of ``later`` that waits for it)."""
    pairs: set[tuple[int, int]] = set()
    for resource, entry in later.entries.items():
        if resource in earlier.exit_writers:
            pairs.update((earlier.exit_writers[resource], reader) for reader in entry.readers)
        if entry.writer >= 0:
            pairs.update((op, entry.writer) for op in earlier.exits.get(resource, ()))
    return tuple(sorted(pairs))
