"""The residency table: legal moves and their counters, refusals with history, invariants, and that it stays cheap."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hoist.tiers.errors import ResidencyError
from hoist.tiers.manager import HISTORY_MOVES, Item, ItemKind, Manager, State, Tier

WEIGHTS = [Item(ItemKind.WEIGHTS, stage) for stage in range(4)]
STATES = [Item(ItemKind.STATES, 0, piece) for piece in range(4)]
GRADIENT = Item(ItemKind.GRADIENT, 0)
ACTIVATIONS = [Item(ItemKind.ACTIVATION, 0, micro_batch) for micro_batch in range(4)]


@pytest.fixture
def manager() -> Manager:
    return Manager(validate=True, stored_bytes=1000)


def states_of(manager: Manager) -> dict[str, str]:
    return {f"{line.kind}.{line.first}.{line.second}": f"{line.state}@{line.tier}" for line in manager.table()}


# ---------------------------------------------------------------------- the lives of items


def test_weights_are_filled_bound_and_evicted_by_the_next(manager: Manager) -> None:
    first, second = WEIGHTS[:2]
    assert manager.state(first) is State.STORED
    manager.fill(first, 0, 100, parts=2)
    assert manager.state(first) is State.FILLING
    manager.filled(first)
    assert manager.state(first) is State.FILLING
    manager.filled(first)
    assert manager.state(first) is State.CLEAN
    assert manager.bind(first) is False  # it had to be read
    manager.unbind(first)
    assert manager.bind(first) is True
    manager.unbind(first)
    manager.refresh(first)
    manager.fill(second, 0, 70)
    assert manager.state(first) is State.STORED
    assert states_of(manager) == {"weights.1.0": "filling@host"}
    kinds = manager.statistics().kinds["weights"]
    assert (kinds.fills, kinds.filled_bytes, kinds.hits, kinds.misses, kinds.evictions) == (2, 170, 1, 1, 1)
    assert kinds.resident_bytes == 70


def test_a_stage_without_tensors_is_there_at_once(manager: Manager) -> None:
    manager.fill(WEIGHTS[0], 0, 0, parts=0)
    assert manager.bind(WEIGHTS[0]) is False


def test_outdated_weights_are_not_hit(manager: Manager) -> None:
    """After an update that did not reach the buffer, its copy is no weight of this model any more."""
    manager.expire(WEIGHTS[0])  # nothing resident: nothing to do
    manager.fill(WEIGHTS[0], 0, 100)
    manager.expire(WEIGHTS[0])  # on its way: it is the new version that comes
    manager.filled(WEIGHTS[0])
    manager.expire(WEIGHTS[0])
    assert manager.state(WEIGHTS[0]) is State.STORED
    with pytest.raises(ResidencyError, match="is stored: not allowed: bind"):
        manager.bind(WEIGHTS[0])


def test_states_pass_through_a_slot(manager: Manager) -> None:
    for item in STATES[:2]:
        manager.fill(item, 0, 12)
        manager.filled(item)
        manager.modify(item)
        assert manager.state(item) is State.DIRTY
        manager.write(item)
        manager.written(item, 12)
    assert states_of(manager) == {"states.0.1": "clean@host"}
    kinds = manager.statistics().kinds["states"]
    assert (kinds.fills, kinds.writes, kinds.written_bytes, kinds.evictions) == (2, 2, 24, 1)


def test_an_activation_is_made_spilled_fetched_and_dropped(manager: Manager) -> None:
    item, other = ACTIVATIONS[:2]
    assert manager.state(item) is State.ABSENT
    manager.create(item, 0, 64)
    manager.need(item, 0)
    manager.write(item)
    manager.need(item, 0)  # reading beside the write is allowed
    manager.written(item, 64)
    manager.create(other, 0, 64)
    assert states_of(manager) == {"activation.0.0": "stored@nvme", "activation.0.1": "dirty@host"}
    assert manager.statistics().resident_bytes == {"device": 0, "host": 64, "nvme": 1000 + 64}
    manager.fill(item, 1, 64)
    manager.filled(item)
    manager.modify(item)
    manager.discard(other)
    manager.discard(item)
    assert manager.table() == ()
    assert manager.statistics().resident_bytes == {"device": 0, "host": 0, "nvme": 1000}
    assert manager.statistics().peak_bytes == {"device": 0, "host": 128, "nvme": 1064}


@pytest.fixture
def beside() -> Manager:
    """Of a run with a device: activations are in its memory."""
    return Manager(validate=True, tiers={ItemKind.ACTIVATION: Tier.DEVICE})


def test_an_activation_waits_in_host_memory_and_its_copy_stays_until_it_changes(beside: Manager) -> None:
    item, other = ACTIVATIONS[:2]
    beside.create(item, 0, 64)
    beside.lower(item, 3, 64)
    assert states_of(beside) == {"activation.0.0": "clean@device", "lowered activation.0.0": "dirty@host"}
    beside.create(other, 0, 64)
    assert states_of(beside) == {"activation.0.1": "dirty@device", "lowered activation.0.0": "dirty@host"}
    assert beside.state(item) is State.ABSENT
    beside.lift(item, 1, 64)
    assert beside.statistics().resident_bytes == {"device": 128, "host": 64, "nvme": 0}
    beside.lift(item, 2, 64)  # its slot may be given before somebody takes it
    beside.need(item, 2)
    beside.modify(item)
    assert states_of(beside) == {"activation.0.0": "dirty@device", "activation.0.1": "dirty@device"}
    beside.lower(item, 3, 64)
    beside.lower(item, 4, 64)  # to another slot: two ops of one lane may change places
    beside.lower(other, 3, 64)
    beside.discard(item)
    assert states_of(beside) == {"activation.0.1": "clean@device", "lowered activation.0.1": "dirty@host"}
    assert beside.statistics().resident_bytes == {"device": 64, "host": 64, "nvme": 0}


def test_a_copy_in_host_memory_may_go_as_long_as_it_is_one(beside: Manager) -> None:
    item, other, third = ACTIVATIONS[:3]
    for number, each in enumerate((item, other, third)):
        beside.create(each, number, 64)
    beside.lower(item, 0, 64)
    beside.lower(other, 0, 64)
    assert beside.state(item) is State.DIRTY  # the only one again
    beside.write(other)  # to scratch: the one in host memory is of no use any more
    beside.written(other, 64)
    beside.lower(item, 0, 64)
    beside.discard(third)
    beside.create(third, 0, 64)
    with pytest.raises(ResidencyError, match=r"lower of activation \(0, 2\), which takes its buffer 0"):
        beside.lower(third, 0, 64)
    with pytest.raises(ResidencyError, match=r"activation \(0, 0\) is absent: not allowed: create"):
        beside.create(item, 1, 64)
    with pytest.raises(ResidencyError, match=r"activation \(0, 2\) is dirty: not allowed: lift of activation"):
        beside.lift(item, 0, 64)
    with pytest.raises(ResidencyError, match=r"activation \(0, 1\) is clean: not allowed: lift"):
        beside.lift(other, 1, 64)
    assert states_of(beside) == {
        "activation.0.1": "clean@device", "activation.0.2": "dirty@device", "lowered activation.0.0": "dirty@host",
    }  # fmt: skip


def test_a_spilled_gradient_may_be_dropped_in_scratch(manager: Manager) -> None:
    manager.create(GRADIENT, 0, 8)
    manager.write(GRADIENT)
    manager.written(GRADIENT, 8)
    manager.create(Item(ItemKind.GRADIENT, 2), 0, 8)
    manager.discard(GRADIENT)
    assert states_of(manager) == {"gradient.2.0": "dirty@host"}


def test_kinds_can_be_on_another_tier() -> None:
    manager = Manager(tiers={ItemKind.WEIGHTS: Tier.DEVICE}, validate=True)
    manager.fill(WEIGHTS[0], 0, 100)
    manager.create(GRADIENT, 0, 10)
    assert manager.statistics().resident_bytes == {"device": 100, "host": 10, "nvme": 0}
    assert states_of(manager)["weights.0.0"] == "filling@device"


# ---------------------------------------------------------------------- refusals


def test_the_only_copy_is_not_overwritten(manager: Manager) -> None:
    manager.create(ACTIVATIONS[0], 0, 64)
    with pytest.raises(ResidencyError, match=r"\(0, 0\) is dirty: not allowed: create of activation \(0, 1\)"):
        manager.create(ACTIVATIONS[1], 0, 64)
    manager.write(ACTIVATIONS[0])
    with pytest.raises(ResidencyError, match=r"is writing: not allowed: (create|fill) of .*, which takes its buffer 0"):
        manager.create(ACTIVATIONS[1], 0, 64)
    with pytest.raises(ResidencyError, match="is writing: not allowed: modify"):
        manager.modify(ACTIVATIONS[0])
    assert states_of(manager) == {"activation.0.0": "writing@host"}


def test_weights_in_use_are_not_taken_or_changed(manager: Manager) -> None:
    manager.fill(WEIGHTS[0], 0, 10)
    with pytest.raises(ResidencyError, match="is filling: not allowed: bind"):
        manager.bind(WEIGHTS[0])
    with pytest.raises(ResidencyError, match=r"is filling: not allowed: (create|fill) of .*, which takes its buffer 0"):
        manager.fill(WEIGHTS[1], 0, 10)
    manager.filled(WEIGHTS[0])
    manager.bind(WEIGHTS[0])
    for asked in (manager.refresh, manager.expire, manager.bind):
        with pytest.raises(ResidencyError, match="is bound: not allowed"):
            asked(WEIGHTS[0])
    with pytest.raises(ResidencyError, match=r"is bound: not allowed: (create|fill) of .*, which takes its buffer 0"):
        manager.fill(WEIGHTS[1], 0, 10)


def test_reading_from_another_buffer_is_refused(manager: Manager) -> None:
    manager.create(ACTIVATIONS[0], 0, 64)
    with pytest.raises(ResidencyError, match="is dirty: not allowed: read from buffer 1"):
        manager.need(ACTIVATIONS[0], 1)
    with pytest.raises(ResidencyError, match="is absent: not allowed: read from buffer 0"):
        manager.need(ACTIVATIONS[1], 0)


def test_an_item_is_in_one_buffer(manager: Manager) -> None:
    manager.fill(WEIGHTS[0], 0, 10)
    manager.filled(WEIGHTS[0])
    with pytest.raises(ResidencyError, match="is clean: not allowed: fill"):
        manager.fill(WEIGHTS[0], 1, 10)
    manager.fill(WEIGHTS[0], 0, 10)  # again in its own buffer: reread
    with pytest.raises(ResidencyError, match="is filling: not allowed: fill"):
        manager.fill(WEIGHTS[0], 0, 10)


def test_a_refusal_shows_the_items_own_recent_moves(manager: Manager) -> None:
    manager.create(ACTIVATIONS[0], 0, 64)
    manager.create(ACTIVATIONS[1], 1, 64)
    manager.write(ACTIVATIONS[0])
    manager.written(ACTIVATIONS[0], 64)
    with pytest.raises(ResidencyError) as caught:
        manager.written(ACTIVATIONS[0], 64)
    assert str(caught.value) == (
        "activation (0, 0) is clean: not allowed: written. Its last moves: "
        "create: absent -> dirty; write: dirty -> writing; written: writing -> clean"
    )


def test_the_history_is_bounded(manager: Manager) -> None:
    manager.fill(WEIGHTS[0], 0, 10)
    manager.filled(WEIGHTS[0])
    for _ in range(2 * HISTORY_MOVES):
        manager.refresh(WEIGHTS[0])
    with pytest.raises(ResidencyError) as caught:
        manager.unbind(WEIGHTS[0])
    assert str(caught.value).count("refresh: clean -> clean") == 8
    with pytest.raises(ResidencyError, match="Its last moves: none remembered"):
        manager.unbind(WEIGHTS[1])


# ---------------------------------------------------------------------- any sequence


class AnySequence(RuleBasedStateMachine):
    """Random calls, most of them refused: a refusal changes nothing, and bytes always equal those of a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = Manager(validate=True, tiers={ItemKind.ACTIVATION: Tier.DEVICE})

    items = st.sampled_from([*WEIGHTS, *STATES, *ACTIVATIONS, GRADIENT])
    buffers = st.integers(0, 2)

    def attempt(self, name: str, *arguments: object) -> None:
        before = self.manager.table(), self.manager.statistics()
        try:
            getattr(self.manager, name)(*arguments)
        except ResidencyError:
            assert (self.manager.table(), self.manager.statistics()) == before

    @rule(item=items, buffer=buffers, num_bytes=st.integers(0, 9))
    def fill(self, item: Item, buffer: int, num_bytes: int) -> None:
        self.attempt("fill", item, buffer, num_bytes)

    @precondition(lambda self: self.manager.table())
    @rule(
        data=st.data(),
        name=st.sampled_from(["filled", "bind", "unbind", "modify", "refresh", "expire", "write", "discard"]),
    )
    def move(self, data: st.DataObject, name: str) -> None:
        line = data.draw(st.sampled_from(self.manager.table()))
        if line.kind != ItemKind.LOWERED_ACTIVATION.value:  # whose moves are those of what it is a copy of
            self.attempt(name, Item(ItemKind(line.kind), line.first, line.second))

    @rule(item=items, buffer=buffers, num_bytes=st.integers(0, 9), name=st.sampled_from(["lower", "lift"]))
    def to_or_from_host(self, item: Item, buffer: int, num_bytes: int, name: str) -> None:
        self.attempt(name, item, buffer, num_bytes)

    @rule(item=items)
    def written(self, item: Item) -> None:
        self.attempt("written", item, 5)

    @rule(item=items, buffer=buffers, num_bytes=st.integers(0, 9))
    def create(self, item: Item, buffer: int, num_bytes: int) -> None:
        self.attempt("create", item, buffer, num_bytes)

    @invariant()
    def bytes_are_those_of_the_table(self) -> None:
        statistics = self.manager.statistics()
        table = self.manager.table()
        for tier in ("device", "host", "nvme"):
            assert statistics.resident_bytes[tier] == sum(line.num_bytes for line in table if line.tier == tier)
            assert statistics.peak_bytes[tier] >= statistics.resident_bytes[tier]
        held = [(line.kind, line.buffer) for line in table if line.buffer >= 0]
        assert len(held) == len(set(held))
        json.dumps([line.to_json() for line in table])


AnySequence.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_sequence = AnySequence.TestCase


# ---------------------------------------------------------------------- threads, size


def test_threads_do_not_lose_counts() -> None:
    manager = Manager()

    def work(stage: int) -> None:
        for _ in range(300):
            manager.fill(WEIGHTS[stage], stage, 10)
            manager.filled(WEIGHTS[stage])
            manager.bind(WEIGHTS[stage])
            manager.unbind(WEIGHTS[stage])
            manager.expire(WEIGHTS[stage])

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = manager.statistics()
    assert statistics.num_moves == 4 * 300 * 5
    assert statistics.kinds["weights"].fills == statistics.kinds["weights"].evictions == 1200
    assert statistics.resident_bytes["host"] == 0


def test_the_table_does_not_grow_with_the_model() -> None:
    """Only what is in a buffer or in scratch has a record: a thousand pieces through two slots leave two."""
    manager = Manager(validate=True)
    for piece in range(1000):
        item = Item(ItemKind.STATES, 0, piece)
        manager.fill(item, piece % 2, 12)
        manager.filled(item)
        manager.modify(item)
        manager.write(item)
        manager.written(item, 12)
    assert len(manager.table()) == 2
