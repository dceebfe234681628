"""The arena: leases are aligned and apart, exact fits fit, a refusal takes nothing, memory is private and freed."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.tiers.arena import LEASE_ALIGN_BYTES, Arena, Lease
from hoist.tiers.errors import BudgetError
from hoist.tiers.footprint import anonymous_bytes

PAGE = LEASE_ALIGN_BYTES
MIB = 2**20


def test_an_exact_fit_fits_and_one_byte_more_does_not() -> None:
    arena = Arena(3 * PAGE)
    first = arena.lease(PAGE, "first")
    rest = arena.lease(2 * PAGE, "rest")
    assert (first.offset, rest.offset) == (0, PAGE)
    assert arena.statistics().leased_bytes == arena.statistics().capacity_bytes == 3 * PAGE
    with pytest.raises(BudgetError, match="host memory: 1 bytes for more do not fit: 12288 of 12288 bytes are in use"):
        arena.lease(1, "more")
    rest.close()
    with pytest.raises(BudgetError, match=f"{2 * PAGE + 1} bytes for more"):
        arena.lease(2 * PAGE + 1, "more")
    assert arena.statistics().num_leases == 1
    assert arena.lease(2 * PAGE, "rest again").offset == PAGE


def test_the_capacity_is_rounded_up_to_a_page() -> None:
    assert Arena(PAGE + 1).statistics().capacity_bytes == 2 * PAGE


@pytest.mark.parametrize("capacity_bytes", [0, -1])
def test_no_capacity_is_refused(capacity_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_bytes: {capacity_bytes} is not positive"):
        Arena(capacity_bytes)


def test_a_mapping_that_the_system_refuses_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match=r"the system refused a mapping of .* give a smaller --host-memory"):
        Arena(2**60)


def test_a_negative_lease_is_refused_and_an_empty_one_is_not() -> None:
    arena = Arena(PAGE)
    with pytest.raises(ValueError, match="lease 'odd': num_bytes -1 is negative"):
        arena.lease(-1, "odd")
    assert arena.lease(0, "nothing").tensor.numel() == 0
    assert arena.lease(PAGE, "all").num_bytes == PAGE


def test_a_gap_is_used_again() -> None:
    arena = Arena(4 * PAGE)
    leases = [arena.lease(PAGE, str(number)) for number in range(4)]
    leases[1].close()
    leases[2].close()
    assert arena.lease(2 * PAGE, "both").offset == PAGE


def test_a_lease_ends_once_and_then_has_no_bytes() -> None:
    arena = Arena(2 * PAGE)
    with arena.lease(100, "mine") as lease:
        lease.tensor.fill_(7)
        assert lease.tensor.tolist() == [7] * 100
        assert arena.statistics().leased_bytes == PAGE
    lease.close()
    assert arena.statistics().leased_bytes == 0
    assert arena.statistics().peak_bytes == PAGE
    with pytest.raises(ValueError, match="lease 'mine' is closed"):
        _ = lease.tensor


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5 * PAGE), st.integers(0, 30)), max_size=40))
def test_open_leases_are_aligned_and_never_overlap(wanted: list[tuple[int, int]]) -> None:
    """Each step takes a lease, then closes one of the open ones; a refusal leaves everything as it was."""
    arena = Arena(24 * PAGE)
    held: list[Lease] = []
    for number, (num_bytes, close) in enumerate(wanted):
        before = arena.statistics()
        try:
            held.append(arena.lease(num_bytes, str(number)))
        except BudgetError:
            assert arena.statistics() == before
        held.sort(key=lambda lease: (lease.offset, lease.num_bytes))
        end = 0
        for lease in held:
            assert lease.offset % PAGE == 0
            assert lease.tensor.data_ptr() % PAGE == 0
            assert lease.offset >= end
            end = lease.offset + lease.num_bytes
        assert end <= 24 * PAGE
        if close < len(held):
            held.pop(close).close()
        pages = sum(-(-lease.num_bytes // PAGE) for lease in held)
        assert arena.statistics().leased_bytes == pages * PAGE
        assert arena.statistics().num_leases == len(held)


def test_views_see_the_same_bytes() -> None:
    arena = Arena(2 * PAGE)
    lease = arena.lease(PAGE, "floats")
    lease.tensor.view(torch.float32).fill_(1.5)
    assert torch.equal(arena.bytes_at(0, PAGE), lease.tensor)
    assert torch.equal(lease.tensor.view(torch.float32), torch.full((PAGE // 4,), 1.5))


def test_memory_is_anonymous_taken_when_touched_and_freed_by_close() -> None:
    """Also while views are left: they may be in a cycle of references, which is collected much later."""
    size = 64 * MIB
    gc.collect()
    before = anonymous_bytes()
    arena = Arena(size)
    lease = arena.lease(size, "all")
    assert anonymous_bytes() - before < size // 2
    lease.tensor.fill_(1)
    assert anonymous_bytes() - before > size - 4 * MIB
    arena.close()
    arena.close()
    assert anonymous_bytes() - before < size // 2
    assert not lease.tensor.any()


def test_the_mapping_is_private_not_shared() -> None:
    """Shared memory is counted and swapped in another way, and would be inherited by a forked data loader."""
    arena = Arena(8 * MIB)
    arena.lease(8 * MIB, "all").tensor.fill_(1)
    with open("/proc/self/smaps_rollup") as file:  # noqa: PTH123
        rollup = {line.split(":")[0]: int(line.split()[1]) for line in file.readlines()[1:]}
    assert rollup["Anonymous"] >= 8 * 1024
    with open("/proc/self/status") as file:  # noqa: PTH123
        shared = [line for line in file if line.startswith("RssShmem")]
    assert int(shared[0].split()[1]) < 8 * 1024
