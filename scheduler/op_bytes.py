"""What each I/O op of a run moves, in bytes and requests, as its setup says: the one place where that is written down;
and what ops bring over the bus to and from a separate device.

Pure arithmetic, and exact: tests compare it with what runs move. Seconds are `pricing.py`'s business, what a run writes
in all `writes.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from hoist.scheduler.memory import GRADIENT_BYTES
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.setup import Setup
from hoist.tiers.format import WEIGHT_ARRAYS, StateArray
from hoist.tiers.layout import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What an op moves between host memory and NVMe. An op only reads, or only writes."""

    read_bytes: int = 0
    written_bytes: int = 0
    request_bytes: tuple[int, ...] = ()
    """Bytes of each request, before the engine cuts long ones into parts."""

    @property
    def num_bytes(self) -> int:
        """Either way."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """What ops bring over the bus, in bytes."""

    up: int = 0
    """To the device."""
    down: int = 0
    """From it."""

    def __add__(self, other: Crossing) -> Crossing:
        return Crossing(up=self.up + other.up, down=self.down + other.down)


class OpBytes:
    """Knows what the ops of one run's plans move."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        #: Per stage, the cuts that loads and updates share.
        self.pieces: list[tuple[Piece, ...]] = [
            layout.pieces(setup.memory.piece_elements) for layout in setup.layouts
        ]
        kept = setup.memory.kept
        self._kept_weights, self._kept_moments = kept.weights, kept.moments

    def of(self, op: Op) -> Moved:
        """What an I/O op moves, if it does what it is for. Raises ValueError on another lane's op.

        An update that is there to be made again (``op.redo``) moves this if it is, and nothing if it need not be.
        """
        demand = self._setup.memory.demand
        match op.kind:
            case Kind.SPILL_ACTIVATION:
                return _written(demand.activation_bytes)
            case Kind.FETCH_ACTIVATION:
                return _read(demand.activation_bytes)
            case Kind.SPILL_GRADIENT:
                return _written(demand.stages[op.stage].gradients)
            case Kind.FETCH_GRADIENT:
                return _read(demand.stages[op.stage].gradients)
            case Kind.READ_FROZEN:
                return _read(*(part.num_bytes for part in self._setup.frozen[op.stage].ranges))
        piece = self.piece(op)
        match op.kind:
            case Kind.READ_WEIGHTS:
                return _read(*(self._straight_bytes(op) if op.slot < 0 else _array_bytes(WEIGHT_ARRAYS, piece)))
            case Kind.READ_KEPT:
                return _read(*_array_bytes(self.kept_arrays(op.stage, piece.chunk), piece))
            case Kind.STASH_GRADIENT:
                return _written(GRADIENT_BYTES * piece.num_elements)
            case Kind.READ_STATES:
                stash = (GRADIENT_BYTES * piece.num_elements,) if op.stashed else ()
                return _read(*_array_bytes(self.read_arrays(op, piece.chunk), piece), *stash)
            case Kind.WRITE_STATES:
                return _written(*_array_bytes(self.stored_arrays(op.stage, piece.chunk), piece))
        raise ValueError(f"{op}: is no I/O")

    def num_bytes(self, op: Op) -> int:
        """Bytes that an I/O op moves, as :meth:`of`."""
        return self.of(op).num_bytes

    def crossing(self, op: Op) -> Crossing:
        """What an op brings over the bus to and from a separate device, if it does what it is for; nothing without one.

        Whether the host's memory is passed by on the way between drive and device makes no difference here.
        """
        demand = self._setup.memory.demand
        if not demand.separate:
            return Crossing()
        match op.kind:
            case Kind.READ_WEIGHTS | Kind.FETCH_ACTIVATION | Kind.FETCH_GRADIENT:
                return Crossing(up=self.of(op).read_bytes)
            case Kind.READ_FROZEN | Kind.WIDEN:
                is_kept = op.stage in self._setup.memory.kept.frozen
                # What is kept in host memory goes up each time that it is used, and is read once.
                goes_up = is_kept == (op.kind is Kind.WIDEN)
                return Crossing(up=self._setup.frozen[op.stage].stored_bytes if goes_up else 0)
            case Kind.SPILL_ACTIVATION | Kind.SPILL_GRADIENT:
                return Crossing(down=self.of(op).written_bytes)
            case Kind.DOWNLOAD:
                return Crossing(down=demand.stages[op.stage].gradients)
            case Kind.REFRESH:
                return Crossing(up=self._uploaded_bytes(op))
            case Kind.MERGE if op.slot < 0:
                return Crossing(up=self._uploaded_bytes(op))
        return Crossing()

    def _uploaded_bytes(self, op: Op) -> int:
        """Of a piece's weights that are in host memory, what the stage has in its weight buffer."""
        piece = self.piece(op)
        arrays = WEIGHT_ARRAYS[:1] if self._setup.memory.demand.straight else WEIGHT_ARRAYS
        elements = piece.num_elements
        if op.owner not in (-1, op.stage):
            elements = 0
            for lent in self._setup.borrowed[op.stage]:
                if lent.owner == op.owner and piece.overlaps(lent.placed):
                    end = lent.placed.offset + lent.placed.spec.num_elements
                    elements += min(piece.stop, end) - max(piece.start, lent.placed.offset)
        return elements * sum(array.itemsize for array in arrays)

    def piece(self, op: Op) -> Piece:
        """The piece that an op is about: its owner's, where a stage uses a tensor of another one."""
        return self.pieces[op.stage if op.owner < 0 else op.owner][op.piece]

    def _straight_bytes(self, op: Op) -> list[int]:
        """Of the first half of a piece's weights: all of it, or the pages that a borrower needs."""
        itemsize = StateArray.WEIGHT_HI.itemsize
        piece = self.piece(op)
        if op.stage == op.owner:
            return [itemsize * piece.num_elements]
        lent = [each for each in self._setup.borrowed[op.stage] if each.owner == op.owner]
        pages = [each.pages(piece) for each in lent if piece.overlaps(each.placed)]
        return [itemsize * (each.stop - each.start) for each in pages]

    def kept_arrays(self, stage: int, chunk: int) -> tuple[StateArray, ...]:
        """What of a chunk stays in memory between commits."""
        if chunk in self._kept_moments[stage]:
            return tuple(StateArray)
        return tuple(WEIGHT_ARRAYS) if chunk in self._kept_weights[stage] else ()

    def stored_arrays(self, stage: int, chunk: int) -> tuple[StateArray, ...]:
        """What of a chunk each update writes: all that is not kept."""
        kept = self.kept_arrays(stage, chunk)
        return tuple(array for array in StateArray if array not in kept)

    def read_arrays(self, op: Op, chunk: int) -> tuple[StateArray, ...]:
        """What of a chunk a READ_STATES reads: the same, but for weights that are loaded."""
        stored = self.stored_arrays(op.stage, chunk)
        return tuple(array for array in stored if not (op.loaded and array in WEIGHT_ARRAYS))


def _array_bytes(arrays: tuple[StateArray, ...], piece: Piece) -> list[int]:
    return [array.itemsize * piece.num_elements for array in arrays]


def _read(*request_bytes: int) -> Moved:
    return Moved(read_bytes=sum(request_bytes), request_bytes=request_bytes)


def _written(*request_bytes: int) -> Moved:
    return Moved(written_bytes=sum(request_bytes), request_bytes=request_bytes)
