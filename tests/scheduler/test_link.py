"""Dependencies from what ops read and write: within a plan, and from one step to the next."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.scheduler.link import LinkedPlan, join, link
from hoist.scheduler.ops import Kind, Op, Part, Resource
from hoist.scheduler.plan_records import Plan

A, B, C = (Resource(Part.STAGING, number) for number in range(3))


def op(*, reads: tuple[Resource, ...] = (), writes: tuple[Resource, ...] = ()) -> Op:
    return Op(Kind.MERGE, reads, writes)


def plan_of(*ops: Op) -> Plan:
    return Plan(
        name="toy",
        ops=ops,
        num_micro_batches=1,
        cold=True,
        pending=False,
        scratch_activations=(),
        scratch_gradients=(),
        stashed_gradients=(),
    )


def waits(linked: LinkedPlan) -> list[set[int]]:
    """For each op, the earlier ops that it waits for."""
    found: list[set[int]] = [set() for _ in linked.plan.ops]
    for earlier, dependents in enumerate(linked.dependents):
        for later in dependents:
            found[later].add(earlier)
    assert [len(earlier) for earlier in found] == list(linked.num_dependencies)
    return found


def test_a_reader_waits_for_the_last_writer_only() -> None:
    linked = link(plan_of(op(writes=(A,)), op(writes=(A,)), op(reads=(A,)), op(reads=(A,))))
    assert waits(linked) == [set(), {0}, {1}, {1}]


def test_a_writer_waits_for_the_readers_since_the_last_writer() -> None:
    linked = link(plan_of(op(writes=(A,)), op(reads=(A,)), op(reads=(A,)), op(writes=(A,)), op(writes=(A,))))
    assert waits(linked) == [set(), {0}, {0}, {0, 1, 2}, {3}]


def test_an_op_that_reads_and_writes_is_both() -> None:
    linked = link(plan_of(op(reads=(A,), writes=(A,)), op(reads=(A,)), op(reads=(A,), writes=(A,))))
    assert waits(linked) == [set(), {0}, {0, 1}]


def test_other_resources_do_not_matter() -> None:
    assert waits(link(plan_of(op(writes=(A,)), op(writes=(B,)), op(reads=(C,))))) == [set(), set(), set()]


def test_a_step_waits_for_the_step_before_by_the_same_rule() -> None:
    earlier = link(plan_of(op(writes=(A,)), op(reads=(A,)), op(reads=(B,)), op(writes=(C,))))
    later = link(plan_of(op(reads=(A,)), op(writes=(A,)), op(reads=(B,)), op(writes=(B,)), op(reads=(A, C))))
    assert set(join(earlier, later)) == {(0, 0), (0, 1), (1, 1), (2, 3), (3, 4)}


def test_a_plan_that_only_reads_joins_to_a_writer() -> None:
    assert set(join(link(plan_of(op(reads=(A,)))), link(plan_of(op(reads=(A,)), op(writes=(A,)))))) == {(0, 1)}


_resources = st.lists(st.sampled_from((A, B, C)), max_size=2, unique=True).map(tuple)
_ops = st.lists(
    st.builds(lambda reads, writes: op(reads=reads, writes=writes), _resources, _resources), min_size=1, max_size=8
)


def reachable(pairs: set[tuple[int, int]], count: int) -> set[tuple[int, int]]:
    """The transitive closure of dependencies between ops 0..count-1, which point forwards."""
    closed = set(pairs)
    for middle in range(count):
        into = [first for first, last in closed if last == middle]
        out = [last for first, last in closed if first == middle]
        closed.update((first, last) for first in into for last in out)
    return closed


@settings(deadline=None)
@given(first=_ops, second=_ops)
def test_two_steps_joined_are_ordered_as_one_long_plan(first: list[Op], second: list[Op]) -> None:
    """Two ops are ordered exactly if a chain of conflicts (one writes what the other uses) joins them."""
    count = len(first) + len(second)
    whole = first + second
    conflicts = {
        (earlier, later)
        for later in range(count)
        for earlier in range(later)
        if set(whole[earlier].writes) & {*whole[later].reads, *whole[later].writes}
        or set(whole[earlier].reads) & set(whole[later].writes)
    }
    left, right = link(plan_of(*first)), link(plan_of(*second))
    pairs = {(earlier, later) for later, found in enumerate(waits(left)) for earlier in found}
    pairs |= {
        (earlier + len(first), later + len(first)) for later, found in enumerate(waits(right)) for earlier in found
    }
    pairs |= {(earlier, later + len(first)) for earlier, later in join(left, right)}
    assert pairs <= conflicts
    assert reachable(pairs, count) == reachable(conflicts, count)
