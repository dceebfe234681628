"""Snapshots: commits of a store that are kept under a name, in STORE/snapshots/NAME, each readable as a store itself.

Making one links the committed chunk files (`sharing.py` says why nothing writes to them later) and copies only what
lies on another drive; restoring one copies it into free slots (`copying.py`) and commits. When and how many: `tools/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hoist.tiers import allocation, creation, inventory, opening, sharing, verify
from hoist.tiers import format as store_format
from hoist.tiers.allocation import Progress
from hoist.tiers.copying import copy_chunks
from hoist.tiers.errors import CorruptChunkError, StoreFormatError, StoreRefusedError
from hoist.tiers.format import CommitRecord, StageChecksums, StateArray
from hoist.tiers.inventory import BadChunk, StoredChunk
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import Piece
from hoist.tiers.store import Store

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotInfo:
    """A snapshot in a store's directory."""

    name: str
    directory: Path
    """Can be opened to read, exported and verified as a store."""
    step: int
    """Optimizer steps that it carries."""
    generation: int
    """Number of the commit that it keeps: newer ones have larger numbers, also after a restore."""
    automatic: bool
    """Made by a run on its own (``--snapshot-every``); only such ones make room for newer ones."""
    created: str
    """When, ISO 8601 in UTC."""


def check_name(name: str) -> None:
    """Raise StoreRefusedError if a snapshot may not be called so."""
    if not _NAME.fullmatch(name):
        raise StoreRefusedError(
            f"snapshot name {name!r}: give at most 200 letters, digits and . _ - that do not begin with a dot or a dash"
        )


def find(directory: Path, name: str) -> SnapshotInfo:
    """The snapshot of that name. Raises StoreRefusedError if there is none, StoreFormatError if it is damaged."""
    check_name(name)
    path = directory / store_format.SNAPSHOTS_DIRECTORY / name
    if not path.is_dir():
        names = ", ".join(allocation.snapshot_names(directory)) or "none"
        raise StoreRefusedError(f"{directory}: has no snapshot {name!r}; there are: {names}")
    mark, commit = path / store_format.SNAPSHOT_NAME, path / store_format.COMMIT_NAME
    try:
        document = store_format.load_json(mark.read_bytes(), mark)
        record = store_format.decode_commit(commit.read_bytes(), commit)
    except OSError as error:
        why = f"{error.filename}: cannot be read: {error.strerror}"
        raise StoreFormatError(f"{why}; snapshot {name!r} is damaged, remove it") from error
    return SnapshotInfo(
        name=name,
        directory=path,
        step=record.step,
        generation=record.generation,
        automatic=document.get("automatic") is True,
        created=str(document.get("created")),
    )


def list_snapshots(directory: Path) -> tuple[list[SnapshotInfo], list[StoreFormatError]]:
    """The store's snapshots, oldest commit first, and what is wrong with those that are damaged."""
    found: list[SnapshotInfo] = []
    damaged: list[StoreFormatError] = []
    for name in allocation.snapshot_names(directory):
        try:
            found.append(find(directory, name))
        except StoreFormatError as error:
            damaged.append(error)
        except StoreRefusedError:  # somebody else's file, or gone meanwhile
            continue
    return sorted(found, key=lambda info: (info.generation, info.created, info.name)), damaged


class SnapshotMaker:
    """Makes one snapshot in two parts: :meth:`begin` holds commits up for a moment, :meth:`finish` need not.

    Each risky step is a method of its own, so that a test can stop there. Until :meth:`publish` the snapshot has a
    name that is none, and the next opening for writing removes it; the store is never changed but for reserved files.
    """

    def __init__(self, store: Store, name: str, *, automatic: bool = False) -> None:
        """Raises StoreRefusedError if there can be no snapshot of that name."""
        check_name(name)
        self._store = store
        self._name = name
        self._automatic = automatic
        self._snapshots = store.directory / store_format.SNAPSHOTS_DIRECTORY
        self._making = self._snapshots / f"{store_format.MAKING_PREFIX}{name}"
        self._target = self._snapshots / name
        if os.path.lexists(self._target):
            raise StoreRefusedError(f"{self._target}: there is a snapshot {name!r}; give another name, or remove it")
        #: Files of the snapshot, to be checked; their paths are those under its name while it is made.
        self._files: list[StoredChunk] = []

    def begin(
        self,
        engine: IoEngine,
        *,
        leave_bytes: int = 0,
        buffer_bytes: int = verify.BUFFER_BYTES,
        progress: Progress | None = None,
    ) -> None:
        """Hold the last commit fast: link its files, reserve what takes their place, copy what cannot be linked.

        ``leave_bytes`` of the drive stay free besides, for the run's scratch. Raises StoreRefusedError, with numbers,
        if there is too little space, TransferError; nothing is left then.
        """
        engine = self._store.counted(engine)
        with self._store.between_commits() as record:
            chunks = self._store.committed_chunks()
            bad = next(inventory.check_sizes(chunks), None)
            if bad is not None:
                raise self._corrupt(bad)
            place = self._snapshots if self._snapshots.exists() else self._store.directory
            linked = [chunk for chunk in chunks if sharing.can_be_linked(chunk.path, place)]
            copied = [chunk for chunk in chunks if not sharing.can_be_linked(chunk.path, place)]
            trainable = [chunk for chunk in linked if chunk.array != store_format.FROZEN_NAME]
            new = [chunk for chunk in trainable if chunk.path not in self._store.shared]
            self._check_space([*new, *copied], leave_bytes)
            creation.remove_tree(self._making, engine)
            try:
                self.reserve(trainable)
                self.write_small_files(record)
                unlinked = self.link(linked)
                self._store.shared.release()  # what was reserved for those
                self.copy([*unlinked, *copied], engine, buffer_bytes, progress)
                self.sync()
            except BaseException:
                creation.remove_tree(self._making, engine)
                self._store.shared.release()
                raise
            self._files = [replace(chunk, path=self._inside(chunk.path)) for chunk in chunks]

    def finish(
        self, engine: IoEngine, *, buffer_bytes: int = verify.BUFFER_BYTES, progress: Progress | None = None
    ) -> SnapshotInfo:
        """Check every file's checksum, then give the snapshot its name, durably. Training may go on meanwhile.

        Raises CorruptChunkError, naming the chunk, if one is not as it was committed: then there is no snapshot.
        """
        engine = self._store.counted(engine)
        try:
            self.check(engine, buffer_bytes, progress)
            self.publish()
        except BaseException:
            self.abandon(engine)
            raise
        return find(self._store.directory, self._name)

    def abandon(self, engine: IoEngine) -> None:
        """Remove what :meth:`begin` made."""
        creation.remove_tree(self._making, engine)
        with suppress(RuntimeError), self._store.between_commits():  # a store that failed is opened again, and settled
            self._store.shared.release()

    # --- the steps, in their order --------------------------------------------------------------------------------

    def reserve(self, chunks: Sequence[StoredChunk]) -> None:
        """Reserve the files that will take the linked ones' place."""
        self._store.shared.reserve(chunks)

    def write_small_files(self, record: CommitRecord) -> None:
        """Metadata, the model's small files, the commit and its checksums, and the mark that says what this is."""
        source = self._store.directory
        self._making.mkdir(parents=True)
        for name in (store_format.METADATA_NAME, f"{store_format.STAGES_DIRECTORY}/{store_format.METADATA_NAME}"):
            self._link_or_copy(source / name)
        for path in sorted((source / store_format.STAGES_DIRECTORY).glob(f"*/{store_format.METADATA_NAME}")):
            self._link_or_copy(path)
        for path in sorted((source / store_format.STAGES_DIRECTORY).glob(f"*/*/{store_format.METADATA_NAME}")):
            self._link_or_copy(path)
        for path in sorted((source / store_format.MODEL_DIRECTORY).rglob("*")):
            if path.is_file():
                self._link_or_copy(path)
        (self._making / store_format.CRC_DIRECTORY).mkdir()
        checksums = (source / record.checksum_file).read_bytes()
        self._write(self._making / record.checksum_file, checksums)
        alone = replace(record, drives=tuple(drive for drive in record.drives if drive.get("path") == "."))
        self._write(self._making / store_format.COMMIT_NAME, store_format.encode_commit(alone))
        mark = {
            "automatic": self._automatic,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": record.step,
        }
        self._write(self._making / store_format.SNAPSHOT_NAME, store_format.dump_json(mark, what="snapshot") + b"\n")

    def link(self, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        """Give the files a second name. Returns those that the file system would not link."""
        refused: list[StoredChunk] = []
        for chunk in chunks:
            target = self._inside(chunk.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(chunk.path, target)
            except OSError:  # no hard links here, or too many of this file
                refused.append(chunk)
        return refused

    def copy(
        self, chunks: Sequence[StoredChunk], engine: IoEngine, buffer_bytes: int, progress: Progress | None
    ) -> None:
        """Copy files that are on another drive, durably."""
        jobs = [(chunk, self._inside(chunk.path)) for chunk in chunks]
        for chunk, target in jobs:
            target.parent.mkdir(parents=True, exist_ok=True)
            allocation.allocate(target, chunk.num_bytes)
        for number, _ in copy_chunks(jobs, engine, buffer_bytes=buffer_bytes, progress=progress):
            engine.flush(jobs[number][1]).result()

    def sync(self) -> None:
        """Make every name in the snapshot durable."""
        for parent, _, _ in os.walk(self._making, topdown=False):
            allocation.sync_directory(Path(parent))
        allocation.sync_directory(self._snapshots)

    def check(self, engine: IoEngine, buffer_bytes: int, progress: Progress | None) -> None:
        """Re-read every file of the snapshot."""
        bad = next(verify.verify_chunks(self._files, engine, buffer_bytes=buffer_bytes, progress=progress), None)
        for chunk in self._files:
            engine.forget(chunk.path)  # it gets another name
        if bad is not None:
            raise self._corrupt(bad)

    def publish(self) -> None:
        """Give it its name: from here on it is a snapshot."""
        self._making.replace(self._target)
        allocation.sync_directory(self._snapshots)

    # ----------------------------------------------------------------------------------------------------------------

    def _corrupt(self, bad: BadChunk) -> CorruptChunkError:
        return CorruptChunkError(
            f"{self._store.directory}: no snapshot {self._name!r} was made: {bad.chunk} is not as it was committed: "
            f"{bad.reason}; see hoist verify"
        )

    def _inside(self, path: Path) -> Path:
        return self._making / path.relative_to(self._store.directory)

    def _link_or_copy(self, path: Path) -> None:
        target = self._inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target, follow_symlinks=False)
        except OSError:
            self._write(target, path.read_bytes())

    def _write(self, path: Path, data: bytes) -> None:
        allocation.write_durably(path, data)
        if self._store.wear is not None:
            self._store.wear.add(written_bytes=len(data))

    def _check_space(self, chunks: Sequence[StoredChunk], leave_bytes: int) -> None:
        small = 2 * 4 * len(chunks)
        need = sum(chunk.num_bytes for chunk in chunks) + small
        need += allocation.OVERHEAD_BYTES + 2 * allocation.OVERHEAD_BYTES_PER_FILE * len(chunks)
        check_free(self._store.directory, need, leave_bytes=leave_bytes)


def check_free(directory: Path, need_bytes: int, *, leave_bytes: int = 0, what: str = "a snapshot") -> None:
    """Raise StoreRefusedError, with numbers, if ``need_bytes`` are not free besides ``leave_bytes`` for the run."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if need_bytes > free - leave_bytes:
        kept = f", of which {leave_bytes} bytes ({leave_bytes / 2**30:.2f} GiB) are left to the run" * bool(leave_bytes)
        raise StoreRefusedError(
            f"{directory}: too little free space: {what} needs {need_bytes} bytes ({need_bytes / 2**30:.2f} GiB), "
            f"{free} bytes ({free / 2**30:.2f} GiB) are free{kept}; free some, or remove a snapshot "
            "(hoist snapshot STORE NAME --remove)"
        )


def take(
    store: Store, name: str, *, engine: IoEngine, leave_bytes: int = 0, progress: Progress | None = None
) -> SnapshotInfo:
    """Keep the store's last commit under a name. See :class:`SnapshotMaker`."""
    maker = SnapshotMaker(store, name)
    maker.begin(engine, leave_bytes=leave_bytes, progress=progress)
    return maker.finish(engine, progress=progress)


def remove(store: Store, name: str, *, engine: IoEngine) -> None:
    """Remove a snapshot, damaged or not; it is gone for good at once, its space soon after.

    Raises StoreRefusedError if there is none of that name.
    """
    check_name(name)
    snapshots = store.directory / store_format.SNAPSHOTS_DIRECTORY
    if not (snapshots / name).is_dir():
        find(store.directory, name)
    removing = snapshots / f"{store_format.REMOVING_PREFIX}{name}"
    creation.remove_tree(removing, engine)
    (snapshots / name).replace(removing)
    allocation.sync_directory(snapshots)
    creation.remove_tree(removing, engine)
    with store.between_commits():
        store.shared.release()


def restore(store: Store, name: str, *, engine: IoEngine, progress: Progress | None = None) -> CommitRecord:
    """Make a snapshot the store's state again: copy its chunks into slots that the last commit does not name, commit.

    Takes no space. Until the commit the store is as it was; training then goes on as it went on from the snapshot.
    Raises StoreRefusedError if the snapshot is another store's, StoreFormatError or CorruptChunkError, naming the
    chunk, if it is damaged, TransferError. The store is as it was then, and this object must not be used any more.
    """
    info = find(store.directory, name)
    engine = store.counted(engine)
    kept = opening.read(info.directory)
    before = store.record
    if before is None or kept.record.store_id != store.store_id:
        raise StoreRefusedError(f"{info.directory}: is a snapshot of another store ({kept.record.store_id})")
    if kept.record.metadata_crc32c != before.metadata_crc32c:
        raise StoreRefusedError(f"{info.directory}: its tensors are laid out in another way than the store's")
    chunks = list(inventory.record_chunks(info.directory, kept.layouts, kept.record, kept.checksums))
    trainable = [chunk for chunk in chunks if chunk.array != store_format.FROZEN_NAME]
    _require_good(next(inventory.check_sizes(chunks), None), info)
    frozen = [chunk for chunk in store.committed_chunks() if chunk.array == store_format.FROZEN_NAME]
    _require_good(next(verify.verify_chunks(frozen, engine), None), info)
    jobs = [(chunk, _free_place(store, chunk)) for chunk in trainable]
    for number, found in copy_chunks(jobs, engine, progress=progress):
        chunk = trainable[number]
        if found != chunk.crc32c:
            reason = f"checksum: committed {chunk.crc32c:08x}, the file gives {found:08x}"
            _require_good(BadChunk(chunk=chunk, reason=reason), info)
    for chunk in trainable:
        engine.forget(chunk.path)
    _note(store, kept.checksums)
    store.commit(step=kept.record.step, adam_steps=kept.record.adam_steps, run=kept.record.run, back=True)
    every = inventory.all_chunks(store.directory, store.layouts, num_slots=store.num_slots)
    inventory.repair_sizes(every, engine)  # files of the former commit, which may be why it is restored
    return kept.record


def _require_good(bad: BadChunk | None, info: SnapshotInfo) -> None:
    if bad is not None:
        raise CorruptChunkError(f"{bad}; snapshot {info.name!r} cannot be restored, and the store is as it was")


def _free_place(store: Store, chunk: StoredChunk) -> Path:
    layout = next(layout for layout in store.layouts if layout.name == chunk.stage)
    first = chunk.chunk * layout.chunk_elements
    whole = Piece(index=0, chunk=chunk.chunk, start=first, stop=first + layout.chunk_elements)
    return store.place(layout.index, StateArray(chunk.array), whole, write=True).path


def _note(store: Store, checksums: Sequence[StageChecksums]) -> None:
    for layout, stage in zip(store.layouts, checksums, strict=True):
        for chunk in range(layout.num_chunks):
            sums = {array: int(stage.chunks[chunk, column]) for column, array in enumerate(StateArray)}
            store.note_written(layout.index, chunk, sums)
