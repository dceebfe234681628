"""Takes drives into a store, or out of it, and moves chunk files to where they then belong; a kill loses nothing.

The state is not changed: every chunk stays the committed bytes. A move, for the files of one stage at a time:

1. copy     the committed chunks to their new drive, their checksums compared; of others only the space is reserved;
2. secure   flush the copies and sync their file systems: bytes and names are on the drive;
3. switch   put the new entry over the old one in the main tree, each by a rename;
4. settle   sync the main tree's file system: the entries outlive a power cut;
5. remove   the old files.

COMMIT.json names a new drive before the first move to it, and one that leaves until nothing is left on it, each by a
commit of the same step. Whoever opens the store after a kill finds every entry leading to a whole file and removes the
files that none leads to (`drives.tidy`); the change can then be asked for again, and goes on where it was.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from hoist.tiers import allocation, creation, dealing, drives
from hoist.tiers import format as store_format
from hoist.tiers.allocation import Progress
from hoist.tiers.copying import copy_chunks
from hoist.tiers.dealing import MeasuredDirectory
from hoist.tiers.drives import Drive, Marker
from hoist.tiers.errors import CorruptChunkError, StoreRefusedError
from hoist.tiers.inventory import StoredChunk
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A chunk file that belongs on another drive."""

    chunk: StoredChunk
    source: Drive | None
    """None: somewhere outside of the store's drives; that file stays."""
    target: Drive


def drive_of(entry: Path, main: Path, known: Sequence[Drive]) -> Drive | None:
    """The drive that an entry of the tree at ``main`` leads to; None for a link that hoist did not make."""
    if not entry.is_symlink():
        return next(drive for drive in known if drive.is_main)
    relative, target = entry.relative_to(main), os.readlink(entry)  # noqa: PTH115
    further = (drive for drive in known if not drive.is_main)
    return next((drive for drive in further if target == drives.entry_target(drive.path, relative)), None)


def moves(chunks: Sequence[StoredChunk], main: Path, known: Sequence[Drive]) -> list[Move]:
    """What is not where the weights of the drives want it, in the store at ``main``."""
    dealt = dealing.deal(chunks, [drive.weight for drive in known])
    found = []
    for chunk, number in zip(chunks, dealt, strict=True):
        source = drive_of(chunk.path, main, known)
        if source != known[number]:
            found.append(Move(chunk=chunk, source=source, target=known[number]))
    return found


def change_drives(
    store: Store,
    engine: IoEngine,
    *,
    add: Sequence[Path] = (),
    remove: Sequence[Path] = (),
    progress: Progress | None = None,
    redeal: type[Redeal] | None = None,
    measure: Callable[[Sequence[Path], IoEngine, int], Sequence[MeasuredDirectory]] = dealing.measure,
) -> int:
    """Take directories into use and others out of it, and move chunk files so that each drive has its share.

    The store is open for writing, and trained on by nobody. Returns the bytes of the files that were moved;
    ``progress`` gets these and their total. An interrupted call is finished by the same call again. ``redeal`` carries
    the moves out, :class:`Redeal` unless a test wants another; ``measure`` is asked, with how many bytes to do it, for
    the speed of all directories that stay or join when one joins, so that they were measured at the same time.

    Raises StoreRefusedError with nothing changed: a directory that is not new or empty, not one of the store's, too
    small, or the store's own. After CorruptChunkError, TransferError and other failures the store is as committed, with
    some files moved and the others not.
    """
    assert store.record is not None, "a store without a commit has nothing to move"
    main = store.directory
    old = drives.registered(store.record, main)
    places = {drive.id: drive.directory(main) for drive in old}
    leaving = {_find(directory, places, old, main).id for directory in remove}
    new = [directory for directory in add if not any(_is(directory, place) for place in places.values())]
    drives.check_distinct([*places.values(), *new])
    for directory in new:
        drives.check_takeable(directory, main, fresh=False)
    # Who takes a drive back into use that was about to leave has it measured like a new one.
    leaves = [drive for drive in old if not drive.weight]
    back = {drive.id for drive in leaves if any(_is(directory, places[drive.id]) for directory in add)}
    wanted = _wanted(old, new, leaving)
    probed_bytes: dict[str, int] = {}
    if new or back:
        places |= {drive.id: directory for drive, directory in zip(wanted[len(old) :], new, strict=True)}
        staying = [drive for drive in wanted if drive.weight or drive.id in back]
        speeds = measure([places[drive.id] for drive in staying], engine, dealing.measured_bytes(store.layouts))
        wanted = _measured(wanted, {drive.id: speed for drive, speed in zip(staying, speeds, strict=True)})
        probed_bytes = {drive.id: speed.probed_bytes for drive, speed in zip(staying, speeds, strict=True)}
    chunks = store.chunk_files()
    _check_space(moves(chunks, main, wanted), places)
    for drive in wanted[len(old) :]:
        creation.make_directory(places[drive.id])
        with drives.claimed(places[drive.id]):
            drives.check_takeable(places[drive.id], main, fresh=False)
            drives.link_drive(main, drive.path, places[drive.id])
            drives.clear(places[drive.id])
            Marker(store_id=store.store_id, drive_id=drive.id, store=main).write(places[drive.id])
    if wanted != old:
        store.commit_drives(wanted)
    if store.wear is not None:
        for number, drive in enumerate(wanted):
            probed = probed_bytes.get(drive.id, 0)
            store.wear.add(number, written_bytes=probed, read_bytes=2 * probed)
    moved_bytes = (redeal or Redeal)(main, store.counted(engine), places).run(moves(chunks, main, wanted), progress)
    gone = [drive for drive in wanted if not drive.weight]
    if gone:
        store.commit_drives([drive for drive in wanted if drive.weight])
        for drive in gone:
            drives.clear(places[drive.id])
            (main / drive.path).unlink()
    return moved_bytes


def _is(one: Path, other: Path) -> bool:
    return one.exists() and one.samefile(other)


def _find(directory: Path, places: dict[str, Path], known: Sequence[Drive], main: Path) -> Drive:
    """The drive at a directory that is to leave. Raises StoreRefusedError if there is none, or it cannot."""
    for drive in known:
        if _is(directory, places[drive.id]):
            if drive.is_main:
                raise StoreRefusedError(f"{directory}: is the store's own directory, which cannot leave it")
            return drive
    others = ", ".join(str(places[drive.id]) for drive in known if not drive.is_main) or "none"
    raise StoreRefusedError(f"{directory}: is not a drive of the store {main}; its further drives: {others}")


def _wanted(old: Sequence[Drive], new: Sequence[Path], leaving: set[str]) -> tuple[Drive, ...]:
    """The drives as they are to be: those that leave with a weight of 0, the new ones, not measured yet, last."""
    staying = [replace(drive, weight=0.0) if drive.id in leaving else drive for drive in old]
    first = 1 + max(int("0" if drive.is_main else drive.path.rpartition("/")[2]) for drive in old)
    joining = (
        Drive(id=str(uuid.uuid4()), path=f"{store_format.DRIVES_DIRECTORY}/{number}")
        for number in range(first, first + len(new))
    )
    return (*staying, *joining)


def _measured(known: Sequence[Drive], speeds: Mapping[str, MeasuredDirectory]) -> tuple[Drive, ...]:
    """The drives with the speeds that were measured, and weights that follow from them."""
    return tuple(
        replace(
            drive,
            weight=speeds[drive.id].weight,
            read_bytes_per_second=speeds[drive.id].read_bytes_per_second,
            write_bytes_per_second=speeds[drive.id].write_bytes_per_second,
        )
        if drive.id in speeds
        else drive
        for drive in known
    )


def _check_space(planned: Sequence[Move], places: dict[str, Path]) -> None:
    """Raise StoreRefusedError if what is to come to a drive does not fit beside what is on it now."""
    coming: dict[int, list[Move]] = {}
    for move in planned:
        place = places[move.target.id]
        coming.setdefault((place if place.exists() else place.parent).stat().st_dev, []).append(move)
    for together in coming.values():
        place = places[together[0].target.id]
        allocation.check_space(place, [move.chunk.num_bytes for move in together])


class Redeal:
    """Carries out moves in the main tree at ``main``; ``places`` has each drive's directory by its id.

    Each step of the order above is a method of its own, so that a test can stop there.
    """

    def __init__(self, main: Path, engine: IoEngine, places: dict[str, Path]) -> None:
        self._main = main
        self._engine = engine
        self._places = places
        self._scratch = main / store_format.SCRATCH_DIRECTORY

    def run(self, planned: Sequence[Move], progress: Progress | None = None) -> int:
        """Move everything. Returns the bytes of the files."""
        done, total = 0, sum(move.chunk.num_bytes for move in planned)
        for _, group in groupby(planned, key=lambda move: move.chunk.stage):
            batch = list(group)
            for number, move in enumerate(batch):
                self.copy(move, number)
                done += move.chunk.num_bytes
                if progress is not None:
                    progress(done, total)
            self.secure(batch)
            for number, move in enumerate(batch):
                self.switch(move, number)
            self.settle()
            for move in batch:
                self.remove(move)
        return total

    def _relative(self, move: Move) -> Path:
        return move.chunk.path.relative_to(self._main)

    def _copied(self, move: Move, number: int) -> Path:
        """Where the file is made: on a further drive at its place, in the main tree aside, as its place is taken."""
        if move.target.is_main:
            return self._scratch / f"move-{number}"
        return self._places[move.target.id] / self._relative(move)

    def copy(self, move: Move, number: int) -> None:
        """Step 1, one file."""
        chunk, target = move.chunk, self._copied(move, number)
        target.parent.mkdir(parents=True, exist_ok=True)
        allocation.allocate(target, chunk.num_bytes)
        if chunk.crc32c is None:
            return
        [(_, found)] = copy_chunks([(chunk, target)], self._engine)
        if found != chunk.crc32c:
            raise CorruptChunkError(
                f"{chunk.path}: {chunk}: checksum: committed {chunk.crc32c:08x}, the file gives {found:08x}"
            )
        self._engine.flush(target).result()
        self._engine.forget(target)

    def secure(self, batch: Sequence[Move]) -> None:
        """Step 2; each copy's bytes were flushed as it was made."""
        for drive_id in {move.target.id for move in batch}:
            allocation.sync_file_system(self._places[drive_id])

    def switch(self, move: Move, number: int) -> None:
        """Step 3, one file."""
        entry = move.chunk.path
        if move.target.is_main:
            made = self._copied(move, number)
        else:
            made = self._scratch / f"link-{number}"
            made.symlink_to(drives.entry_target(move.target.path, self._relative(move)))
        made.replace(entry)
        self._engine.forget(entry)

    def settle(self) -> None:
        """Step 4."""
        allocation.sync_file_system(self._main)

    def remove(self, move: Move) -> None:
        """Step 5, one file; in the main tree, the new entry has already taken its place."""
        if move.source is not None and not move.source.is_main:
            (self._places[move.source.id] / self._relative(move)).unlink()
