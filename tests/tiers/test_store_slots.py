"""The slot rule against a simple model: every sequence of events up to length 8 on the table, some on real files."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.tiers.io.base import IoEngine
from hoist.tiers.slots import ChunkState, SlotTable
from hoist.tiers.store import Store
from tests.support.stores import commit, committed, direct_engine, read_version, write_chunk, write_pieces

#: Write chunk 0, write chunk 1, write chunk 0's newest version again (if it is not committed), commit, crash and open,
#: crash in the middle of writing chunk 0 and open.
EVENTS = "01ACXT"
NUM_SLOTS = (2, 3)


class Simulated:
    """A slot table over slots that are plain variables, beside the model: what is committed and what is newest."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.table = SlotTable([2], ["00"], num_slots=num_slots)
        #: Version in each chunk's slots; chunk 0 and 1 start at version 0 in slot 0, the others hold rubbish.
        self.slots = [[0] + [-1] * (num_slots - 1) for _ in range(2)]
        self.committed_slots: tuple[str, ...] = ("00",)
        self.model_committed = [0, 0]
        self.model_newest = [0, 0]
        #: The version before the newest, where it must still be there.
        self.model_previous: list[int | None] = [None, None]
        self.version = 0

    def step(self, event: str) -> None:
        self.version += 1
        match event:
            case "0" | "1":
                chunk = int(event)
                self.slots[chunk][self.table.begin_write(0, chunk)] = self.version
                self.table.end_write(0, chunk)
                was_committed = self.model_newest[chunk] == self.model_committed[chunk]
                kept = self.num_slots > 2 or was_committed
                self.model_previous[chunk] = self.model_newest[chunk] if kept else None
                self.model_newest[chunk] = self.version
            case "A" if self.model_newest[0] == self.model_committed[0]:
                with pytest.raises(RuntimeError, match="its newest version is committed"):
                    self.table.begin_write(0, 0, again=True)
            case "A":
                self.slots[0][self.table.begin_write(0, 0, again=True)] = self.version
                self.table.end_write(0, 0)
                self.model_newest[0] = self.version
            case "C":
                self.committed_slots = self.table.newest_slots()
                self.table.published()
                self.model_committed = list(self.model_newest)
            case "X" | "T":
                if event == "T":
                    self.slots[0][self.table.begin_write(0, 0)] = -1
                self.table = SlotTable([2], self.committed_slots, num_slots=self.num_slots)
                self.model_newest = list(self.model_committed)
                self.model_previous = [None, None]

    def check(self) -> None:
        for chunk in range(2):
            assert self.slots[chunk][self.table.read_slot(0, chunk)] == self.model_newest[chunk]
            assert self.slots[chunk][int(self.committed_slots[0][chunk])] == self.model_committed[chunk]
            if self.model_previous[chunk] is not None:
                assert self.slots[chunk][self.table.previous_slot(0, chunk)] == self.model_previous[chunk]
            else:
                with pytest.raises(RuntimeError, match="the version before the newest is not kept"):
                    self.table.previous_slot(0, chunk)
            clean = self.model_newest[chunk] == self.model_committed[chunk]
            assert self.table.state(0, chunk) is (ChunkState.COMMITTED if clean else ChunkState.WRITTEN)


@pytest.mark.parametrize("num_slots", NUM_SLOTS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_every_sequence_of_events(length: int, num_slots: int) -> None:
    """A shorter sequence is the start of a longer one and is checked on the way: lengths left out are covered."""
    for events in product(EVENTS, repeat=length):
        simulated = Simulated(num_slots)
        for event in events:
            simulated.step(event)
            simulated.check()


@pytest.mark.parametrize("num_slots", NUM_SLOTS)
def test_every_state_that_events_can_reach(num_slots: int) -> None:
    """All sequences of any length, folded: sequences that lead to the same state have the same future."""

    def fold(simulated: Simulated) -> tuple[object, ...]:
        """The state up to a renaming of versions: each slot is rubbish, committed, newest, or stale."""
        chunks = []
        for chunk in range(2):
            committed, newest = simulated.model_committed[chunk], simulated.model_newest[chunk]
            previous = simulated.model_previous[chunk]
            roles = tuple((value == committed, value == newest, value == previous) for value in simulated.slots[chunk])
            table = simulated.table
            chunks.append((roles, previous is None, table.read_slot(0, chunk), table.state(0, chunk)))
        return (*chunks, simulated.committed_slots)

    frontier = {fold(Simulated(num_slots)): ""}
    seen = dict(frontier)
    while frontier:  # ends when nothing new appears any more
        found: dict[tuple[object, ...], str] = {}
        for path in frontier.values():
            for event in EVENTS:
                simulated = Simulated(num_slots)
                for past in path + event:
                    simulated.step(past)
                    simulated.check()
                found.setdefault(fold(simulated), path + event)
        frontier = {state: path for state, path in found.items() if state not in seen}
        seen.update(frontier)
    assert len(seen) > 8


def test_a_new_table_has_nothing_to_read() -> None:
    table = SlotTable([1, 0])
    assert table.state(0, 0) is ChunkState.ABSENT
    assert table.begin_write(0, 0) == table.begin_write(0, 0) == 0
    assert table.state(0, 0) is ChunkState.WRITING
    with pytest.raises(RuntimeError, match="read before it was ever written"):
        table.read_slot(0, 0)
    with pytest.raises(RuntimeError, match=r"is writing, cannot commit \(1 such chunks\)"):
        table.newest_slots()
    table.end_write(0, 0)
    assert table.newest_slots() == ("0", "")
    assert table.chunks_in(ChunkState.WRITTEN) == [(0, 0)]
    table.published()
    assert table.begin_write(0, 0) == 1
    with pytest.raises(IndexError, match="stage 1 chunk 0: the store has no such chunk"):
        table.begin_write(1, 0)
    with pytest.raises(ValueError, match=r"expected \[1, 0\] chunks per stage, got \[2\]"):
        SlotTable([1, 0], ["01"])


@settings(max_examples=12, deadline=None)
@given(events=st.text(alphabet=EVENTS, min_size=3, max_size=8))
def test_sequences_on_real_files(tmp_path_factory: pytest.TempPathFactory, events: str) -> None:
    directory: Path = tmp_path_factory.mktemp("events") / "store"
    with direct_engine() as engine:
        with committed(directory, engine, seed=1):
            pass
        run_events(directory, engine, events)


@pytest.mark.parametrize("events", ["0C1CX", "0X0CX", "00CX", "01C0CTX", "0CTC0CX", "TCX"])
def test_sequences_that_broke_other_rules(tmp_path: Path, engine: IoEngine, events: str) -> None:
    with committed(tmp_path / "store", engine, seed=1):
        pass
    run_events(tmp_path / "store", engine, events)


def run_events(directory: Path, engine: IoEngine, events: str) -> None:
    """Play ``events`` on stage 0's two chunks; version 1 is committed. After each, read what the model says."""
    newest, durable = [1, 1], [1, 1]
    seeds = range(1, len(events) + 3)
    store = Store.open(directory, engine=engine)
    try:
        for number, event in enumerate(events, start=2):
            match event:
                case "0" | "1":
                    write_chunk(store, engine, 0, int(event), seed=number)
                    newest[int(event)] = number
                case "C":
                    commit(store, number)
                    durable = list(newest)
                case _:
                    if event == "T":
                        write_pieces(store, engine, 0, 0, seed=number)
                    store.close()
                    store = Store.open(directory, engine=engine, check="crc")
                    newest = list(durable)
            assert [read_version(store, engine, 0, chunk, seeds) for chunk in range(2)] == newest
    finally:
        store.close()
