"""Stops the world around a trainer's ops, so that what it tells of itself can be compared with what is really there.

One lock is held by whatever runs an op or moves bytes, transfers included, so nothing changes while a test looks. It
looks before and after each op, and before and after each transfer: items are seen while they are filled and written.
What every piece's newest states are is remembered as the optimizer makes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hoist.optim.split import merge
from hoist.scheduler.executor import Done, Mark
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.trainer import Trainer
from hoist.tiers.format import MOMENT_ARRAYS, WEIGHT_ARRAYS, StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import Piece
from hoist.tiers.manager import Residency
from hoist.tiers.slots import ChunkState
from tests.support.engines import WrapperEngine

Bytes = npt.NDArray[np.uint8]
#: The arrays of each kind of state, by their place in STATE_KINDS.
ARRAYS = (WEIGHT_ARRAYS, MOMENT_ARRAYS)
DIRTY = ("dirty", "writing")


@dataclass(slots=True)
class World:
    """What is stopped, and what is known of it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    look: Callable[[str, Op | None], None] | None = None
    """Called with a word for where it is called, and the op before or after which that is; None in a transfer."""
    newest: dict[tuple[int, int], dict[StateArray, Bytes]] = field(default_factory=dict)
    """By stage and piece, the states that the optimizer has made last."""
    stashed: dict[tuple[int, int], int] = field(default_factory=dict)
    """By stage and piece, bytes of gradients that wait in scratch."""

    def show(self, where: str, op: Op | None) -> None:
        """Let the test look; the lock is held."""
        if self.look is not None:
            self.look(where, op)

    def trainer_kind(self) -> type[Trainer]:
        """A trainer whose world this is."""
        world = self

        class StandstillRuntime(_Runtime):
            pass

        StandstillRuntime.world = world

        class StandstillTrainer(Trainer):
            runtime_kind = StandstillRuntime

        return StandstillTrainer

    def engine(self, inner: IoEngine) -> IoEngine:
        """An engine whose world this is: it is done when it returns."""
        return _Engine(inner, self)


class _Engine(WrapperEngine):
    name = "standstill"

    def __init__(self, inner: IoEngine, world: World) -> None:
        super().__init__(inner)
        self._world = world

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._transfer("read", super().read, path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._transfer("write", super().write, path, offset, buffer)

    def _transfer(
        self,
        what: str,
        start: Callable[[Path, int, torch.Tensor], Future[None]],
        path: Path,
        offset: int,
        buffer: torch.Tensor,
    ) -> Future[None]:
        file = path.name if path.parent.name == "scratch" else path.parent.parent.parent.name
        with self._world.lock:
            self._world.show(f"before a {what} of {file}", None)
            future = start(path, offset, buffer)
            with suppress(OSError):  # the future says it
                future.result()
            self._world.show(f"after a {what} of {file}", None)
            return future


class _Runtime(Runtime):
    world: World

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        with self.world.lock:
            self.world.show(f"before {op}", op)
            mark = super().run(op, step, after)
            if op.kind is Kind.UPDATE:
                self._remember(op, step)
            self.world.show(f"after {op}", op)
        return mark

    def _remember(self, op: Op, step: int) -> None:
        if op.stashed:
            del self.world.stashed[op.stage, op.piece]
        piece = self.pieces[op.stage][op.piece]
        if not self._updates._is_idle(op, piece, self._steps[step - op.delayed]):
            arrays = self._updates._arrays(op, piece)
            self.world.newest[op.stage, op.piece] = {array: data.numpy().copy() for array, data in arrays.items()}

    def start(self, op: Op, step: int, done: Done) -> None:
        def ended(error: BaseException | None) -> None:
            if op.kind is Kind.STASH_GRADIENT:
                self.world.stashed[op.stage, op.piece] = 4 * self.pieces[op.stage][op.piece].num_elements
            done(error)

        with self.world.lock:
            super().start(op, step, ended)
            self.world.show(f"after {op}", op)


# --- what is really there ------------------------------------------------------------------------------------------


def pieces_of(trainer: Trainer) -> list[tuple[Piece, ...]]:
    """Per stage, the cuts of loads and updates."""
    return trainer._runtime.pieces


def remember_store(trainer: Trainer, world: World) -> None:
    """Before the first step: the newest states are what the store holds."""
    for stage, pieces in enumerate(pieces_of(trainer)):
        for piece in pieces:
            world.newest[stage, piece.index] = {
                array: on_drive(trainer, stage, piece, array)[0] for array in StateArray
            }


def on_drive(trainer: Trainer, stage: int, piece: Piece, array: StateArray) -> list[Bytes]:
    """A piece of an array as the drive has it: in the slot that is read, and in the one that is being written."""
    store = trainer._store
    slots = [store._slots.read_slot(stage, piece.chunk)]
    if store.chunk_state(stage, piece.chunk) is ChunkState.WRITING:
        slots.append(store._slots._writing[stage][piece.chunk])
    start = piece.start - piece.chunk * store.layouts[stage].chunk_elements
    return [
        np.fromfile(
            store._chunk_directories[stage][array, slot] / str(piece.chunk),
            dtype=np.uint8,
            count=array.itemsize * piece.num_elements,
            offset=array.itemsize * start,
        )
        for slot in slots
    ]


def dirty_pieces(trainer: Trainer, table: tuple[Residency, ...]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Stage and piece of those whose weights, and whose moments, are newer in a buffer than on the drive."""
    weights: set[tuple[int, int]] = set()
    moments: set[tuple[int, int]] = set()
    pieces = pieces_of(trainer)
    for line in table:
        if line.state not in DIRTY:
            continue
        if line.kind == "states":
            kept = trainer._runtime._updates.kept_arrays(line.first, pieces[line.first][line.second].chunk)
            moments.add((line.first, line.second))
            if not kept.issuperset(WEIGHT_ARRAYS):
                weights.add((line.first, line.second))
        elif line.kind in ("kept weights", "kept moments"):
            found = weights if line.kind == "kept weights" else moments
            found |= {
                (line.first, piece.index) for piece in pieces[line.first] if piece.chunk == line.second
            }
    return weights, moments


def check_drive(trainer: Trainer, world: World, table: tuple[Residency, ...]) -> int:
    """What the table says is on the drive is there, in its newest version, and what it says is not is not.

    Returns the pieces that were newer in memory. A slot is the drive's word for it: of a chunk that is being written,
    pieces lie in either.
    """
    num_dirty = 0
    writing = {(line.kind, line.first, line.second) for line in table if line.state == "writing"}
    kept_kinds = ("kept weights", "kept moments")
    for dirty, arrays, kept_kind in zip(dirty_pieces(trainer, table), ARRAYS, kept_kinds, strict=True):
        #: Of dirty chunks that are kept, and of dirty pieces: whether the drive differs somewhere.
        differs: dict[tuple[int, int, int], bool] = {}
        for stage, pieces in enumerate(pieces_of(trainer)):
            for piece in pieces:
                newest = world.newest[stage, piece.index]
                is_there = all(
                    any(np.array_equal(newest[array], found) for found in on_drive(trainer, stage, piece, array))
                    for array in arrays
                )
                if (stage, piece.index) not in dirty:
                    assert is_there, f"stage {stage}, {piece}: {arrays} are said to be on NVMe"
                    continue
                num_dirty += 1
                kept = trainer._runtime._updates.kept_arrays(stage, piece.chunk).issuperset(arrays)
                if (kept_kind, stage, piece.chunk) in writing or ("states", stage, piece.index) in writing:
                    continue  # any part of it may be there already
                # What is kept of a chunk becomes newer as a whole with the update of its first piece.
                key = (stage, piece.chunk, -1 if kept else piece.index)
                differs[key] = differs.get(key, False) or not is_there
        assert all(differs.values()), f"{arrays}: {differs} are said to be dirty"
    return num_dirty


def check_buffers(trainer: Trainer, world: World, table: tuple[Residency, ...]) -> int:
    """What the table says is in a buffer is there: kept states and compute weights. Returns the buffers looked at."""
    pieces = pieces_of(trainer)
    num_checked = 0
    for line in table:
        if line.kind in ("kept weights", "kept moments") and line.state != "filling":
            kept = trainer._places.kept[line.first, line.second]
            for piece in pieces[line.first]:
                if piece.chunk == line.second:
                    for array in ARRAYS[line.kind == "kept moments"]:
                        newest = world.newest[line.first, piece.index][array]
                        assert np.array_equal(kept.bytes_of(array, piece).numpy(), newest), line
            num_checked += 1
        elif line.kind == "weights" and line.state in ("clean", "bound"):
            places = trainer._places.stages[line.first]
            for piece in pieces[line.first]:
                assert np.array_equal(places.piece_weights(piece).numpy(), merged(world, line.first, piece)), line
            for borrowed in places.borrowed:
                first, count = borrowed.placed.offset, borrowed.placed.spec.num_elements
                whole = np.concatenate([merged(world, borrowed.owner, piece) for piece in pieces[borrowed.owner]])
                found = places.weights[borrowed.offset : borrowed.offset + count].numpy()
                assert np.array_equal(found, whole[first : first + count]), line
            num_checked += 1
    return num_checked


def merged(world: World, stage: int, piece: Piece) -> npt.NDArray[np.float32]:
    """A piece's newest weights, float32: both halves as `optim/split.py` puts them together."""
    newest = world.newest[stage, piece.index]
    target = torch.empty(piece.num_elements)
    hi, lo = (torch.from_numpy(newest[array].copy()).view(torch.int16) for array in WEIGHT_ARRAYS)
    merge(hi, lo, target)
    values: npt.NDArray[np.float32] = target.numpy()
    return values
