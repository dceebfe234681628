"""Adds the residency table up: where the bytes of each stage's weights, moments, gradients and activations are.

The table is `tiers/manager.py`'s, the records `status.py`'s. Nothing here looks at a buffer or a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hoist.scheduler.residency import MOMENT_BYTES, WEIGHT_BYTES
from hoist.scheduler.status import STATE_KINDS, StateBytes
from hoist.tiers.layout import Piece, StageLayout
from hoist.tiers.manager import Item, ItemKind, Snapshot, State, Tier

#: Positions in :data:`hoist.scheduler.status.STATE_KINDS`.
WEIGHTS, MOMENTS, GRADIENTS, ACTIVATIONS = range(4)
_NOTHING = StateBytes()
#: Records that are remembered: some 300 bytes each.
_MOST_MADE = 8192
#: What NVMe has in scratch alone, if at all; of all other kinds it has the newest version unless a buffer's is newer.
_PASSING = frozenset({ItemKind.GRADIENT, ItemKind.WAITING_GRADIENT, ItemKind.ACTIVATION, ItemKind.LOWERED_ACTIVATION})
_WHOLE_KINDS = {
    ItemKind.WEIGHTS: WEIGHTS,
    ItemKind.KEPT_WEIGHTS: WEIGHTS,
    ItemKind.KEPT_FROZEN: WEIGHTS,
    ItemKind.KEPT_MOMENTS: MOMENTS,
    ItemKind.GRADIENT: GRADIENTS,
    ItemKind.WAITING_GRADIENT: GRADIENTS,
    ItemKind.ACTIVATION: ACTIVATIONS,
    ItemKind.LOWERED_ACTIVATION: ACTIVATIONS,
}


class Whereabouts:
    """Knows what each stage has in all, and splits what the table knows as one: a piece's weights and moments."""

    def __init__(
        self,
        layouts: Sequence[StageLayout],
        pieces: Sequence[Sequence[Piece]],
        tiers: Mapping[ItemKind, Tier],
    ) -> None:
        """``pieces``: per stage, the cuts that the table's items have. ``tiers``: where the buffers of a kind are."""
        #: Per stage and piece, the bytes of its moments.
        self._moments = [[MOMENT_BYTES * piece.num_elements for piece in stage] for stage in pieces]
        #: Per stage and chunk, the first piece.
        self._first_pieces: list[dict[int, int]] = []
        for stage in pieces:
            first: dict[int, int] = {}
            for piece in stage:
                first.setdefault(piece.chunk, piece.index)
            self._first_pieces.append(first)
        self._tiers = {kind: tiers.get(kind, Tier.HOST) for kind in ItemKind}
        self.stage_names = tuple(layout.name for layout in layouts)
        #: Per stage and kind of state, bytes of one version in the store; weights with the frozen ones.
        self._stored = [
            (
                WEIGHT_BYTES * sum(layout.used_elements()) + layout.frozen_bytes,
                MOMENT_BYTES * sum(layout.used_elements()),
                0,
                0,
            )
            for layout in layouts
        ]
        #: Per stage, what is told of it while nothing is in memory.
        self.at_rest = tuple(
            (StateBytes(nvme=weights), StateBytes(nvme=moments), _NOTHING, _NOTHING)
            for weights, moments, *_ in self._stored
        )
        #: Records made so far: most stages are in one of few states, document after document.
        self._made: dict[tuple[int, ...], StateBytes] = {}

    def split(self, item: Item, num_bytes: int) -> tuple[tuple[int, int], ...]:
        """The kinds of state that an item holds, by position in STATE_KINDS, each with its bytes."""
        if item.kind is not ItemKind.STATES:
            return ((_WHOLE_KINDS[item.kind], num_bytes),)
        # Weights are beside them unless they are kept, or have not come there from the weight buffer yet.
        moments = self._moments[item.first][item.second]
        if num_bytes == moments:
            return ((MOMENTS, num_bytes),)
        return ((WEIGHTS, num_bytes - moments), (MOMENTS, moments))

    def tier(self, item: Item, in_buffer: bool) -> Tier:
        """The highest tier that an item is in."""
        return self._tiers[item.kind] if in_buffer else Tier.NVME

    def second_number(self, item: Item) -> int:
        """What tells items of one kind of state and stage apart: a piece, of a kept chunk the first one; a
        micro-batch, or -1 less it for the copy in host memory of what a device has no room for; -1 for what is of the
        whole stage, -2 for its frozen tensors that are kept.
        """
        match item.kind:
            case ItemKind.KEPT_WEIGHTS | ItemKind.KEPT_MOMENTS:
                return self._first_pieces[item.first][item.second]
            case ItemKind.WEIGHTS:
                return -1
            case ItemKind.GRADIENT | ItemKind.WAITING_GRADIENT:
                return item.second - 1  # as `Manager.stash` numbers those that wait
            case ItemKind.KEPT_FROZEN:
                return -2
            case ItemKind.LOWERED_ACTIVATION:
                return -1 - item.second
            case _:
                return item.second

    def stages(self, table: Snapshot) -> tuple[tuple[StateBytes, ...], ...]:
        """Per stage and kind of state, where its bytes are."""
        # Rows of the numbers of a StateBytes, of what is not at rest, by 4 x stage + kind.
        rows: dict[int, list[int]] = {}
        lowered = {item[1:] for item, *_ in table.items if item.kind is ItemKind.LOWERED_ACTIVATION}
        for item, state, num_bytes, in_buffer in table.items:
            kind, stage, _ = item
            if kind is ItemKind.STATES:
                for part, part_bytes in self.split(item, num_bytes):
                    self._add(self._row(rows, stage, part), kind, state, part_bytes, in_buffer)
            else:
                row = self._row(rows, stage, _WHOLE_KINDS[kind])
                self._add(row, kind, state, num_bytes, in_buffer)
                if kind is ItemKind.ACTIVATION and state is State.CLEAN and item[1:] in lowered:
                    row[0] -= num_bytes  # its copy is not in scratch
        for (stage, _), num_bytes in table.stashed.items():
            self._row(rows, stage, GRADIENTS)[0] += num_bytes
        found: dict[int, list[StateBytes]] = {}
        for place, row in rows.items():
            stage, part = divmod(place, len(STATE_KINDS))
            found.setdefault(stage, list(self.at_rest[stage]))[part] = self._record(tuple(row))
        return tuple([tuple(found[stage]) if stage in found else rest for stage, rest in enumerate(self.at_rest)])

    def _row(self, rows: dict[int, list[int]], stage: int, part: int) -> list[int]:
        place = stage * len(STATE_KINDS) + part
        row = rows.get(place)
        if row is None:
            row = rows[place] = [self._stored[stage][part], 0, 0, 0, 0, 0, 0]
        return row

    def _add(self, row: list[int], kind: ItemKind, state: State, num_bytes: int, in_buffer: bool) -> None:
        dirty = state is State.DIRTY or state is State.WRITING
        if kind in _PASSING:
            if not dirty:
                row[0] += num_bytes  # it is in scratch
        elif dirty:
            row[0] -= num_bytes  # what NVMe has is older
        if not in_buffer:
            return
        row[2 if self._tiers[kind] is Tier.DEVICE else 1] += num_bytes
        if dirty:
            row[3] += num_bytes
            if state is State.WRITING:
                row[5] += num_bytes
        elif state is State.FILLING:
            row[4] += num_bytes
        elif state is State.BOUND:
            row[6] += num_bytes

    def _record(self, numbers: tuple[int, ...]) -> StateBytes:
        made = self._made.get(numbers)
        if made is None:
            if len(self._made) > _MOST_MADE:
                self._made.clear()
            nvme, host, device, dirty, filling, writing, bound = numbers
            made = self._made[numbers] = StateBytes(
                nvme=nvme, host=host, device=device, dirty=dirty, filling=filling, writing=writing, bound=bound
            )
        return made
