"""The store: a run's states on NVMe, as a Zarr v3 hierarchy that opens at its last commit. Moves no chunk bytes itself.

It says where a piece is read and written (callers move it with an engine), keeps checksums, and commits. Bytes on disk:
`format.py`; order of a commit: `commit.py`; which slot: `slots.py`; free space: `allocation.py`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import numpy as np

from hoist.tiers import allocation, checksum, creation, inventory, opening, verify
from hoist.tiers import drives as store_drives
from hoist.tiers import format as store_format
from hoist.tiers.allocation import DirectoryState, Progress
from hoist.tiers.commit import CommitSequence, CommitStatistics
from hoist.tiers.dealing import MeasuredDirectory
from hoist.tiers.errors import CorruptChunkError, StoreRefusedError, TransferError
from hoist.tiers.format import CommitRecord, StageChecksums, StateArray
from hoist.tiers.inventory import BadChunk, StoredChunk
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.counted import CountedEngine
from hoist.tiers.layout import Piece, StageLayout
from hoist.tiers.lock import StoreLock
from hoist.tiers.sharing import SharedFiles
from hoist.tiers.slots import ChunkState, SlotTable
from hoist.tiers.wear import WearLedger

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A range of a file, ready for an engine."""

    path: Path
    offset_bytes: int
    num_bytes: int


class Store:
    """One run's store. Make with :meth:`create` or :meth:`open`; close when done (the engine stays the caller's).

    Life of a chunk: ``place(..., write=True)`` for each piece and array, the caller's writes, ``note_written`` when all
    are done, ``commit``. Reading goes to what was last noted as written. Calls may come from several threads; a write's
    place and a note wait while a commit runs, reads don't.

    After a failed commit nothing more can be written or committed (RuntimeError): open the store again.
    """

    #: What a commit does, step by step; tests put a sequence here that stops between steps.
    commit_sequence: ClassVar[type[CommitSequence]] = CommitSequence

    def __init__(
        self,
        *,
        directory: Path,
        engine: IoEngine,
        lock: StoreLock | None,
        layouts: tuple[StageLayout, ...],
        num_slots: int,
        attributes: dict[str, Any],
        store_id: str,
        metadata_crc32c: int,
        drives: tuple[Mapping[str, Any], ...],
        record: CommitRecord | None,
        checksums: list[StageChecksums] | None,
        wear: WearLedger | None,
    ) -> None:
        """Not for callers: see :meth:`create` and :meth:`open`."""
        #: Absolute.
        self.directory = directory
        #: In stage order; ``layouts[i].index == i``.
        self.layouts = layouts
        #: What the creator gave: model configuration and the like.
        self.attributes = attributes
        #: Names this store among all.
        self.store_id = store_id
        #: The last commit; None before the first.
        self.record = record
        #: Counts what is moved to and from the store's drives; None if the store is read-only.
        self.wear = wear
        self._engine = self.counted(engine)
        #: Held as long as the store is open for writing; None if it is read-only.
        self._lock = lock
        self._metadata_crc32c = metadata_crc32c
        self._drives = drives
        #: Places that each chunk has; with three, the version before the newest is kept until the next is begun.
        self.num_slots = num_slots
        self._slots = SlotTable(
            [layout.num_chunks for layout in layouts], None if record is None else record.slots, num_slots=num_slots
        )
        #: Arrays of a chunk's newest version that its writer still keeps in memory, by stage and chunk.
        self._kept: dict[tuple[int, int], set[StateArray]] = {}
        #: Of the newest complete version of each chunk; 0 where there is none yet.
        self._newest = checksums or [
            StageChecksums(chunks=np.zeros((layout.num_chunks, len(StateArray)), np.uint32), frozen=0)
            for layout in layouts
        ]
        #: Of the version before it, where that is kept.
        self._before = _copy(self._newest)
        #: As of the last commit.
        self._committed = _copy(self._newest)
        #: Stages whose frozen array was written since the store was created; all of them once there is a commit.
        self._frozen_written = {layout.index for layout in layouts if layout.frozen_bytes and record is not None}
        #: Committed chunk files that snapshots hold too; guarded by the gate.
        self.shared = SharedFiles(directory, self._engine)
        #: Guards slots and checksums; held through a commit. Looking up a slot to read is a single load, without it.
        self._gate = threading.Lock()
        #: Why nothing may be written any more; None as long as all is well.
        self._broken: BaseException | None = None
        self._closed = False
        stages = [directory / store_format.stage_path(layout) for layout in layouts]
        #: Per stage: directory of each array's chunks, by array and slot.
        self._chunk_directories = [
            {
                (array, slot): stage / array.value / "c" / str(slot)
                for array in StateArray
                for slot in range(num_slots)
            }
            for stage in stages
        ]

    # --- making and opening ---------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        directory: Path,
        *,
        layouts: Sequence[StageLayout],
        attributes: Mapping[str, Any],
        engine: IoEngine,
        num_slots: int = store_format.NUM_SLOTS,
        scratch_bytes: int = 0,
        drives: Sequence[MeasuredDirectory] = (),
        fresh: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        """Make a store with every chunk file reserved on the drive, reading as zeros, and nothing committed.

        Every chunk and frozen array must be written and noted before the first commit. ``num_slots`` is 2, or 3 to
        keep the version before the newest (:meth:`place`) at 12 bytes a parameter. ``scratch_bytes`` is counted
        in the free-space check; ``progress`` gets done and total bytes reserved. What an earlier creation that never
        committed left is replaced; so is a committed store with ``fresh``, whose COMMIT.json is removed durably first.
        ``drives``: the directories that the chunk files are dealt out over, ``directory`` itself first (`dealing.py`).

        Raises StoreRefusedError (place missing, read-only, not a directory, occupied, too small) with nothing changed,
        StoreLockedError if another process writes there, ValueError on attributes that are not JSON. After any later
        failure, what was created is removed; a store that was being replaced is gone as soon as its COMMIT.json is.
        """
        directory = directory.absolute()
        store_id = str(uuid.uuid4())
        metadata = store_format.metadata_files(layouts, attributes, store_id=store_id, num_slots=num_slots)
        chunks = inventory.all_chunks(directory, layouts, num_slots=num_slots)
        shares = creation.share_out(directory, chunks, drives)
        further = [share.directory for share in shares[1:]]

        def check() -> DirectoryState:
            return cls.check_creation(
                directory,
                layouts=layouts,
                attributes=attributes,
                num_slots=num_slots,
                scratch_bytes=scratch_bytes,
                drives=drives,
                fresh=fresh,
            )

        made = [directory] if check() is DirectoryState.MISSING and creation.make_directory(directory) else []
        lock: StoreLock | None = None
        wear: WearLedger | None = None
        untouched = True
        with contextlib.ExitStack() as claims:
            try:
                lock = StoreLock(directory / store_format.LOCK_NAME)
                for place in further:
                    if not place.exists() and creation.make_directory(place):
                        made.append(place)
                    claims.enter_context(store_drives.claimed(place))
                check()  # again, now that nobody else can change it
                untouched = False
                creation.remove_store(directory, engine)
                for place in further:
                    store_drives.clear(place)
                wear = WearLedger(
                    directory, store_id=store_id, drives={share.drive.id: share.directory for share in shares}
                )
                creation.build(directory, metadata, shares, store_id, progress)
            except BaseException:
                try:
                    if not untouched:
                        creation.remove_store(directory, engine)
                        if wear is not None:
                            wear.discard()
                finally:
                    if lock is not None:
                        lock.release(remove=lock.created)
                    for place in made:
                        with contextlib.suppress(OSError):  # not empty: another process was quicker to take the lock
                            place.rmdir()
                raise
        wear.add(written_bytes=sum(map(len, metadata.values())))
        for number, one in enumerate(drives):  # each was written once, and read back twice
            wear.add(number, written_bytes=one.probed_bytes, read_bytes=2 * one.probed_bytes)
        name = store_format.METADATA_NAME
        root = store_format.hoist_attributes(metadata[name], directory / name)
        return cls(
            directory=directory,
            engine=engine,
            lock=lock,
            layouts=tuple(layouts),
            num_slots=num_slots,
            attributes=store_format.callers_attributes(root),  # as opening would read them
            store_id=store_id,
            metadata_crc32c=opening.metadata_crc32c(metadata, layouts),
            drives=tuple(share.drive.to_json() for share in shares),
            record=None,
            checksums=None,
            wear=wear,
        )

    @classmethod
    def check_creation(
        cls,
        directory: Path,
        *,
        layouts: Sequence[StageLayout],
        attributes: Mapping[str, Any],
        num_slots: int = store_format.NUM_SLOTS,
        scratch_bytes: int = 0,
        drives: Sequence[MeasuredDirectory] = (),
        fresh: bool = False,
    ) -> DirectoryState:
        """Raise the StoreRefusedError that :meth:`create` would raise, and change nothing. Ignores the lock."""
        directory = directory.absolute()
        further = [one.directory for one in drives[1:]]
        state = allocation.check_creatable(directory, fresh=fresh)
        replaced = store_drives.check_places(directory, further, fresh=fresh)
        metadata = store_format.metadata_files(
            layouts, attributes, store_id=str(uuid.UUID(int=0)), num_slots=num_slots
        )
        chunks = inventory.all_chunks(directory, layouts, num_slots=num_slots)
        shares = creation.share_out(directory, chunks, drives)
        extra_bytes = scratch_bytes + sum(map(len, metadata.values()))
        extra_bytes += 2 * 4 * len(chunks)  # the CRC file: one each commit, two for a moment
        store_drives.check_space(
            [(share.directory, [chunk.num_bytes for chunk in share.files]) for share in shares],
            extra_bytes=extra_bytes + allocation.OVERHEAD_BYTES_PER_FILE * len(metadata),
            old={*store_drives.linked(directory), *replaced},
        )
        return state

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        engine: IoEngine,
        writable: bool = True,
        check: Literal["nothing", "sizes", "crc"] = "sizes",
        progress: Progress | None = None,
    ) -> Self:
        """Open a store at its last commit. ``check="crc"`` also re-reads every committed chunk (``progress`` in bytes).

        ``check="nothing"`` is for a reader that checks the chunk files itself, and for a writer that replaces them all:
        files of free slots that are missing or of the wrong size are made anew.

        For writing: takes the lock, makes the commit that is seen durable, fills holes that copying left in chunk
        files, empties scratch, removes what an interrupted commit left. Read-only: takes no lock, changes nothing; a
        writer may then overwrite what was committed here once it commits again (:meth:`is_current` tells).

        Raises StoreRefusedError (no store here, none ever committed, a drive missing or full), StoreLockedError,
        StoreFormatError
        (metadata, COMMIT.json, CRC file) or CorruptChunkError (a chunk missing, of the wrong size, or, with "crc",
        failing its checksum). The store is unchanged then.
        """
        directory = Path(directory).absolute()
        if not (directory / store_format.COMMIT_NAME).is_file():
            raise StoreRefusedError(opening.why_no_commit(directory))
        if writable:
            allocation.check_no_snapshot(directory)
        lock = StoreLock(directory / store_format.LOCK_NAME) if writable else None
        try:
            if writable:
                opening.settle_commit(directory)
            found = opening.read(directory)
            store_drives.check_present(directory, found.record, writable=writable)
            store = cls(
                directory=directory,
                engine=engine,
                lock=lock,
                layouts=found.layouts,
                num_slots=found.num_slots,
                attributes=found.attributes,
                store_id=found.record.store_id,
                metadata_crc32c=found.record.metadata_crc32c,
                drives=found.record.drives,
                record=found.record,
                checksums=found.checksums,
                wear=None if lock is None else _ledger(directory, found.record),
            )
            every = inventory.all_chunks(directory, found.layouts, num_slots=found.num_slots)
            committed = store.committed_chunks()
            named = {chunk.path for chunk in committed}
            looked_at = every if writable else committed
            if check == "nothing":
                looked_at = []
                if writable:
                    inventory.repair_sizes([chunk for chunk in every if chunk.path not in named], engine)
            bad = next(inventory.check_sizes(looked_at), None)
            if bad is None and check == "crc":
                bad = next(store.verify(progress=progress), None)
            if bad is not None:
                raise CorruptChunkError(str(bad))
            if writable:
                for chunk in every:
                    if inventory.lacks_blocks(chunk):
                        allocation.allocate(chunk.path, chunk.num_bytes)
                opening.tidy(directory, found.record, every, engine)
                store.shared.settle(every, named)
            _log.info(
                "store %s opened at step %d, generation %d, to be %s",
                directory,
                found.record.step,
                found.record.generation,
                "written" if writable else "read",
            )
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return store

    def close(self) -> None:
        """Give the lock back. What was not committed is lost. Idempotent; the engine stays open."""
        if not self._closed and self.wear is not None and self._lock is not None and self._lock.is_held:
            self.wear.save(durable=True)  # a forked child's copy of the store has no lock, and its count is old
        self._closed = True
        if self._lock is not None:
            self._lock.release()

    def discard(self) -> None:
        """Close a store that was never committed and remove it, its directory too if nothing else is in it.

        Raises RuntimeError, with nothing changed, on a store that has a commit.
        """
        if self.record is not None:
            raise RuntimeError(f"{self.directory}: has a commit and is not discarded")
        self._closed = True
        directories = [self.directory, *store_drives.linked(self.directory)]
        creation.remove_store(self.directory, self._engine)
        if self.wear is not None:
            self.wear.discard()
        if self._lock is not None:
            self._lock.release(remove=True)
        for directory in directories:
            with contextlib.suppress(OSError):
                directory.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def counted(self, engine: IoEngine) -> IoEngine:
        """The engine, as whoever moves this store's bytes uses it: what it moves is counted. Need not be closed."""
        if self.wear is None:
            return engine
        return CountedEngine(engine.inner if isinstance(engine, CountedEngine) else engine, self.wear)

    # --- chunks ---------------------------------------------------------------------------------------------------

    def place(self, stage: int, array: StateArray, piece: Piece, *, write: bool, again: bool = False) -> Place:
        """Where ``piece`` of ``array`` is read (its newest complete version) or written (a slot not committed).

        Asking for a write's place begins a write of the whole chunk: all four arrays must be written, and
        :meth:`note_written` called, before the next commit.

        ``again`` is for making the newest version another time: then what is read is the version before it, and what
        is written lies where the newest is, which must not be committed yet. It also completes a version of which
        arrays were kept in memory. A store of two slots has the version before only if that is the committed one.

        Raises RuntimeError on reading what was never written or is overwritten, and on writing to a store that is
        read-only, closed or broken.
        """
        layout = self.layouts[stage]
        first = piece.chunk * layout.chunk_elements
        if not (first <= piece.start < piece.stop <= first + layout.chunk_elements):
            raise ValueError(f"piece: {piece} does not lie in a chunk of stage {layout.name!r}")
        if write:
            with self._gate:
                self._check_writable()
                slot = self._slots.begin_write(stage, piece.chunk, again=again)
        elif again:
            slot = self._slots.previous_slot(stage, piece.chunk)
        else:
            slot = self._slots.read_slot(stage, piece.chunk)
        return Place(
            path=self._chunk_directories[stage][array, slot] / str(piece.chunk),
            offset_bytes=(piece.start - first) * array.itemsize,
            num_bytes=piece.num_elements * array.itemsize,
        )

    def chunk_state(self, stage: int, chunk: int) -> ChunkState:
        """Where the chunk's newest version is."""
        return self._slots.state(stage, chunk)

    def note_written(
        self,
        stage: int,
        chunk: int,
        checksums: Mapping[StateArray, int],
        *,
        kept: frozenset[StateArray] = frozenset(),
        again: bool = False,
    ) -> None:
        """All pieces of the chunk's arrays have been written (futures done): it is now the version to read.

        ``checksums`` are those of the whole chunk files (:class:`hoist.tiers.checksum.ChunkChecksum`), of all four
        arrays. ``kept`` are arrays of this version that the caller keeps in memory instead: it writes them, with
        ``again``, before the next commit, and notes those.

        Raises ValueError if a checksum is missing, RuntimeError if no write had begun.
        """
        with self._gate:
            self._check_writable()
            lacking = kept | (self._kept.get((stage, chunk), frozenset()) if again else frozenset()) - set(checksums)
            if not again and set(checksums) | lacking != set(StateArray):
                expected = ", ".join(array.value for array in StateArray if array not in kept)
                raise ValueError(f"checksums: expected one for each of {expected}")
            self._slots.end_write(stage, chunk)
            if not again:
                self._before[stage].chunks[chunk] = self._newest[stage].chunks[chunk]
            for column, array in enumerate(StateArray):
                if array in checksums:
                    self._newest[stage].chunks[chunk, column] = checksums[array]
            if lacking:
                self._kept[stage, chunk] = set(lacking)
            else:
                self._kept.pop((stage, chunk), None)

    def frozen_place(self, stage: int) -> Place:
        """The stage's whole frozen array. Written once, between creation and the first commit."""
        layout = self.layouts[stage]
        if not layout.frozen_bytes:
            raise ValueError(f"stage {layout.name!r}: has no frozen tensors")
        path = self.directory / store_format.frozen_path(layout)
        return Place(path=path, offset_bytes=0, num_bytes=layout.frozen_bytes)

    def note_frozen(self, stage: int, crc32c: int) -> None:
        """The stage's frozen array has been written whole. Raises RuntimeError after the first commit (one slot)."""
        layout = self.layouts[stage]
        if not layout.frozen_bytes:
            raise ValueError(f"stage {layout.name!r}: has no frozen tensors")
        with self._gate:
            self._check_writable()
            if self.record is not None:
                raise RuntimeError(f"stage {layout.name!r}: frozen tensors are committed and have no second slot")
            self._newest[stage].frozen = crc32c
            self._frozen_written.add(stage)

    # --- commit ---------------------------------------------------------------------------------------------------

    def commit(
        self, *, step: int, adam_steps: Mapping[str, int], run: Mapping[str, Any], back: bool = False
    ) -> CommitStatistics:
        """Make the newest version of every chunk the store's state, durably. Blocks; writes wait meanwhile.

        ``back``: the step may be before the committed one, as when a snapshot is restored.

        Raises ValueError (``run`` is not JSON, ``step`` goes back) or RuntimeError (a chunk never or half written, a
        store that cannot be written) with nothing changed. After a TransferError the drive holds the commit
        before or this one, whole, and this object cannot write any more.
        """
        started = time.perf_counter()
        with self._gate:
            self._check_writable()
            before = self.record
            if before is not None and step < before.step and not back:
                raise ValueError(f"step: {step} is before the committed step {before.step}")
            slots = self._slots.newest_slots()
            if self._kept:
                stage, chunk = next(iter(self._kept))
                raise RuntimeError(f"stage {stage} chunk {chunk}: a part is in memory only, cannot commit")
            for layout in self.layouts:
                if layout.frozen_bytes and layout.index not in self._frozen_written:
                    raise RuntimeError(f"stage {layout.name!r}: frozen tensors were never written, cannot commit")
            generation = 1 if before is None else before.generation + 1
            checksums = store_format.encode_checksums(self.layouts, self._newest)
            record = CommitRecord(
                store_id=self.store_id,
                generation=generation,
                step=step,
                slots=slots,
                checksum_file=store_format.checksum_path(generation),
                checksum_file_crc32c=checksum.of_bytes(checksums),
                metadata_crc32c=self._metadata_crc32c,
                adam_steps=dict(adam_steps),
                run=dict(run),
                drives=self._drives,
            )
            encoded = store_format.encode_commit(record)
            paths = self._unflushed_paths()
            try:
                self._check_present(paths)
                if self.wear is not None:  # the sequence makes the directory's entries durable, this one's too
                    self.wear.add(written_bytes=len(encoded) + len(checksums))
                    self.wear.save(durable=True, synced=True)
                flush_seconds = self.commit_sequence(self.directory, self._engine).run(
                    paths=paths,
                    checksum_file=record.checksum_file,
                    checksums=checksums,
                    record=encoded,
                    superseded=None if before is None else before.checksum_file,
                )
                if self.shared:  # the slots that became free are written to soon, the snapshots' files never
                    self.shared.part({chunk.path for chunk in self._chunks_of(record)})
            except OSError as error:
                failure = TransferError(
                    f"{self.directory}: the commit of step {step} failed: {error}; the drive holds that commit or the "
                    "one before, whole: when the drive works, open the store again"
                )
                failure.errno = error.errno
                self._broken = failure
                raise failure from error
            except BaseException as error:
                self._broken = error
                raise
            self._slots.published()
            self._committed = _copy(self._newest)
            self.record = store_format.decode_commit(encoded, self.directory / store_format.COMMIT_NAME)
        seconds = time.perf_counter() - started
        _log.info(
            "step %d is committed as generation %d: %d files in %.3f s, of it %.3f s until the drive had them",
            step,
            generation,
            len(paths),
            seconds,
            flush_seconds,
        )
        return CommitStatistics(
            generation=generation,
            step=step,
            num_files=len(paths),
            record_bytes=len(encoded) + len(checksums),
            flush_seconds=flush_seconds,
            seconds=seconds,
        )

    def commit_drives(self, drives: Sequence[store_drives.Drive]) -> CommitStatistics:
        """Commit the committed state again, unchanged, with another list of drives. Raises as :meth:`commit` does."""
        if self.record is None:
            raise RuntimeError(f"{self.directory}: nothing is committed yet")
        self._drives = tuple(drive.to_json() for drive in drives)
        if self.wear is not None:
            self.wear.cover({drive.id: drive.directory(self.directory) for drive in drives})
        return self.commit(step=self.record.step, adam_steps=self.record.adam_steps, run=self.record.run)

    @staticmethod
    def _check_present(paths: Sequence[Path]) -> None:
        """A file that was deleted while the engine had it open would be flushed into nothing."""
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(errno.ENOENT, "has been deleted while the store was in use", str(path))

    def _unflushed_paths(self) -> list[Path]:
        """Files written since the last commit, or since creation."""
        paths = [
            self._chunk_directories[stage][array, self._slots.read_slot(stage, chunk)] / str(chunk)
            for stage, chunk in self._slots.chunks_in(ChunkState.WRITTEN)
            for array in StateArray
        ]
        if self.record is None:
            paths += [self.frozen_place(stage).path for stage in sorted(self._frozen_written)]
        return paths

    def _check_writable(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.directory}: the store was opened read-only")
        if self._closed:
            raise RuntimeError(f"{self.directory}: the store is closed")
        if self._broken is not None:
            raise RuntimeError(f"{self.directory}: a commit failed ({self._broken}); open the store again to go on")

    # --- checking and scratch -------------------------------------------------------------------------------------

    def verify(
        self, *, buffer_bytes: int = verify.BUFFER_BYTES, progress: Progress | None = None
    ) -> Iterator[BadChunk]:
        """Re-read every committed chunk and yield those that differ from what was committed; see `verify.py`.

        May run beside training: a commit's chunks are not touched before the next commit.
        """
        chunks = self.committed_chunks()
        return verify.verify_chunks(chunks, self._engine, buffer_bytes=buffer_bytes, progress=progress)

    def is_current(self) -> bool:
        """True if the store on the drive is still at :attr:`record`: no other process has committed or replaced it."""
        path = self.directory / store_format.COMMIT_NAME
        try:
            return self.record is not None and store_format.decode_commit(path.read_bytes(), path) == self.record
        except FileNotFoundError:
            return False

    def committed_chunks(self) -> list[StoredChunk]:
        """Every file that the last commit names, with its checksum, in order; none before the first commit."""
        return [] if self.record is None else self._chunks_of(self.record)

    def _chunks_of(self, record: CommitRecord) -> list[StoredChunk]:
        """The files that a record names; their checksums are those of the last commit."""
        return list(inventory.record_chunks(self.directory, self.layouts, record, self._committed))

    def checksum(self, stage: int, array: StateArray, chunk: int, *, again: bool = False) -> int:
        """CRC32C of the chunk file that is read now: its newest complete version's, or (``again``) the one's before."""
        versions = self._before if again else self._newest
        return int(versions[stage].chunks[chunk, list(StateArray).index(array)])

    def frozen_checksum(self, stage: int) -> int:
        """CRC32C of the stage's frozen array."""
        return self._newest[stage].frozen

    @contextlib.contextmanager
    def between_commits(self) -> Iterator[CommitRecord]:
        """The last commit, and none other as long as the block runs: commits wait, and so does who begins to write.

        Raises RuntimeError on a store that cannot be written or has no commit.
        """
        with self._gate:
            self._check_writable()
            if self.record is None:
                raise RuntimeError(f"{self.directory}: nothing was ever committed")
            yield self.record

    def chunk_files(self) -> list[StoredChunk]:
        """Every chunk file of the store; those that the last commit does not name have no ``crc32c``."""
        committed = {chunk.path: chunk for chunk in self.committed_chunks()}
        every = inventory.all_chunks(self.directory, self.layouts, num_slots=self.num_slots)
        return [committed.get(chunk.path, chunk) for chunk in every]

    def scratch_file(self, name: str, num_bytes: int) -> Path:
        """A file under scratch/ with ``num_bytes`` reserved; its content is undefined and dies with the run.

        Raises StoreRefusedError if the drive cannot hold it, RuntimeError on a store that cannot be written.
        """
        self._check_writable()
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"name: {name!r} is not a file name")
        path = self.directory / store_format.SCRATCH_DIRECTORY / name
        try:
            allocation.allocate(path, num_bytes)
        except StoreRefusedError:
            path.unlink(missing_ok=True)
            raise
        return path


def _ledger(directory: Path, record: CommitRecord) -> WearLedger:
    known = store_drives.registered(record, directory)
    drives = {drive.id: drive.directory(directory) for drive in known}
    return WearLedger(directory, store_id=record.store_id, drives=drives)


def _copy(checksums: Sequence[StageChecksums]) -> list[StageChecksums]:
    return [StageChecksums(chunks=stage.chunks.copy(), frozen=stage.frozen) for stage in checksums]
