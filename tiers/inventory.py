"""Which files hold a store's chunks, and how long they must be. Looks at names and sizes only.

Reading them is `verify.py`'s business, reserving them `creation.py`'s, which snapshots hold too `sharing.py`'s.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hoist.tiers import allocation
from hoist.tiers import format as store_format
from hoist.tiers.format import CommitRecord, StageChecksums, StateArray
from hoist.tiers.layout import StageLayout

if TYPE_CHECKING:  # who only looks at a store does without the second that torch takes
    from hoist.tiers.io.base import IoEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """A chunk file with what it should be."""

    stage: str
    array: str
    chunk: int
    slot: int
    """Always 0 for the frozen array, which has one place."""
    path: Path
    num_bytes: int
    crc32c: int | None
    """None where nothing is committed: then only the size counts."""

    def __str__(self) -> str:
        return f"stage {self.stage!r} array {self.array} chunk {self.chunk} slot {self.slot}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadChunk:
    """A chunk that is not as it was committed."""

    chunk: StoredChunk
    reason: str

    def __str__(self) -> str:
        return f"{self.chunk.path}: {self.chunk}: {self.reason}"


def check_size(chunk: StoredChunk) -> BadChunk | None:
    """Look whether the file is there, regular, and of the right length. zarr reads a missing one silently as zeros."""
    try:
        status = chunk.path.stat()
    except FileNotFoundError:
        dangling = chunk.path.is_symlink()
        return BadChunk(chunk=chunk, reason="is a link to nothing" if dangling else "is missing")
    except OSError as error:
        return BadChunk(chunk=chunk, reason=f"cannot be looked at: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):
        return BadChunk(chunk=chunk, reason="is not a regular file")
    if status.st_size != chunk.num_bytes:
        return BadChunk(chunk=chunk, reason=f"has {status.st_size} bytes, expected {chunk.num_bytes}")
    return None


def check_sizes(chunks: Sequence[StoredChunk]) -> Iterator[BadChunk]:
    """Yield the chunks that are missing or of the wrong size."""
    for chunk in chunks:
        bad = check_size(chunk)
        if bad is not None:
            yield bad


def repair_sizes(chunks: Sequence[StoredChunk], engine: IoEngine) -> None:
    """Put a new file, reserved and reading as zeros, where one is missing or of the wrong size: its content is lost."""
    for chunk in chunks:
        if check_size(chunk) is not None and not chunk.path.is_dir():
            engine.forget(chunk.path)
            chunk.path.unlink(missing_ok=True)
            chunk.path.parent.mkdir(parents=True, exist_ok=True)
            allocation.allocate(chunk.path, chunk.num_bytes)
            allocation.sync_directory(chunk.path.parent)


def lacks_blocks(chunk: StoredChunk) -> bool:
    """True if the file has holes, as copying a store may leave: writing there could find the drive full."""
    try:
        return chunk.path.stat().st_blocks * 512 < chunk.num_bytes
    except FileNotFoundError:
        return False


def stage_chunks(
    directory: Path, layout: StageLayout, *, slots: Sequence[Sequence[int]], checksums: StageChecksums | None
) -> Iterator[StoredChunk]:
    """The stage's chunk files: of each chunk, those of its ``slots``; then the frozen array."""
    for chunk in range(layout.num_chunks):
        for column, array in enumerate(StateArray):
            for slot in slots[chunk]:
                yield StoredChunk(
                    stage=layout.name,
                    array=array.value,
                    chunk=chunk,
                    slot=slot,
                    path=directory / store_format.chunk_path(layout, array, slot, chunk),
                    num_bytes=layout.chunk_elements * array.itemsize,
                    crc32c=None if checksums is None else int(checksums.chunks[chunk, column]),
                )
    if layout.frozen_bytes:
        yield StoredChunk(
            stage=layout.name,
            array=store_format.FROZEN_NAME,
            chunk=0,
            slot=0,
            path=directory / store_format.frozen_path(layout),
            num_bytes=layout.frozen_bytes,
            crc32c=None if checksums is None else checksums.frozen,
        )


def record_chunks(
    directory: Path, layouts: Sequence[StageLayout], record: CommitRecord, checksums: Sequence[StageChecksums]
) -> Iterator[StoredChunk]:
    """The files that a commit names, in order."""
    for layout, digits, stage in zip(layouts, record.slots, checksums, strict=True):
        yield from stage_chunks(directory, layout, slots=[[int(slot)] for slot in digits], checksums=stage)


def all_chunks(directory: Path, layouts: Sequence[StageLayout], *, num_slots: int) -> list[StoredChunk]:
    """Every chunk file of a store, all slots, and the frozen arrays; without checksums."""
    every_slot = range(num_slots)
    return [
        chunk
        for layout in layouts
        for chunk in stage_chunks(directory, layout, slots=[every_slot] * layout.num_chunks, checksums=None)
    ]
