"""Reads a store's small files and checks them against each other; settles and tidies after an interrupted writer.

What the bytes mean is `format.py`'s business; the chunk files are looked at by `inventory.py` and `verify.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoist.tiers import allocation, checksum, creation, drives
from hoist.tiers import format as store_format
from hoist.tiers.allocation import DirectoryState
from hoist.tiers.errors import StoreFormatError
from hoist.tiers.format import CommitRecord, StageChecksums
from hoist.tiers.inventory import StoredChunk
from hoist.tiers.layout import StageLayout

if TYPE_CHECKING:  # who only looks at a store does without the second that torch takes
    from hoist.tiers.io.base import IoEngine


@dataclass(kw_only=True, slots=True)
class Opened:
    """What reading a store's small files gave."""

    layouts: tuple[StageLayout, ...]
    num_slots: int
    attributes: dict[str, Any]
    record: CommitRecord
    checksums: list[StageChecksums]


def _metadata_paths(layouts: Sequence[StageLayout]) -> list[str]:
    """The zarr.json files that a commit's ``metadata_crc32c`` covers, in order."""
    name = store_format.METADATA_NAME
    return [name, *(f"{store_format.stage_path(layout)}/{name}" for layout in layouts)]


def metadata_crc32c(metadata: Mapping[str, bytes], layouts: Sequence[StageLayout]) -> int:
    """CRC32C of the zarr.json files that :func:`_metadata_paths` names, as a commit keeps it."""
    return checksum.of_bytes(b"".join(metadata[path] for path in _metadata_paths(layouts)))


def why_no_commit(directory: Path) -> str:
    """One line for people on why a directory without COMMIT.json cannot be opened."""
    drives.refuse_drive(directory)
    match allocation.directory_state(directory):
        case DirectoryState.MISSING:
            return f"{directory}: does not exist; create the store first, or look at its name"
        case DirectoryState.UNCOMMITTED:
            return f"{directory}: the store's creation never finished; create it again"
        case _:
            return f"{directory}: holds no hoist store; name the directory of one"


def settle_commit(directory: Path) -> None:
    """Make the COMMIT.json that we are about to trust durable, else a crash soon after its rename could undo it."""
    descriptor = os.open(directory / store_format.COMMIT_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    allocation.sync_directory(directory)


def read(directory: Path) -> Opened:
    """Read and check the small files, again if a writer commits meanwhile (its old CRC file is gone then).

    Raises StoreFormatError with file, offset or field, and what was seen.
    """
    commit_path = directory / store_format.COMMIT_NAME
    while True:
        commit_bytes = _read_file(commit_path)
        try:
            return _read_commit(directory, commit_bytes)
        except StoreFormatError:
            if _read_file(commit_path) == commit_bytes:
                raise


def _read_commit(directory: Path, commit_bytes: bytes) -> Opened:
    root_path = directory / store_format.METADATA_NAME
    root = _read_file(root_path)
    attributes = store_format.hoist_attributes(root, root_path)
    store_format.check_version(attributes.get("format_version"), root_path)
    commit_path = directory / store_format.COMMIT_NAME
    try:
        record = store_format.decode_commit(commit_bytes, commit_path)
    except StoreFormatError as error:
        raise StoreFormatError(
            f"{error}; without it nobody knows which slot of a chunk is the committed one: put back a copy of it, or "
            "start over with --fresh"
        ) from error
    if record.store_id != attributes.get("store_id"):
        expected = attributes.get("store_id")
        comparison = f"expected {root_path}'s {expected!r}, saw {record.store_id!r}"
        raise StoreFormatError(f"{commit_path}: store_id: {comparison}")
    stages = attributes.get("stages")
    if not isinstance(stages, list) or not all(isinstance(name, str) and "/" not in name for name in stages):
        raise StoreFormatError(f"{root_path}: attributes.hoist.stages: expected a list of names, saw {stages!r:.100}")
    metadata = {store_format.METADATA_NAME: root}
    layouts = []
    for index, name in enumerate(stages):
        relative = f"{store_format.STAGES_DIRECTORY}/{name}/{store_format.METADATA_NAME}"
        data = _read_file(directory / relative)
        metadata[relative] = data
        layouts.append(store_format.decode_layout(data, directory / relative, directory=name, index=index))
    actual = metadata_crc32c(metadata, layouts)
    if actual != record.metadata_crc32c:
        raise StoreFormatError(
            f"{directory}: {store_format.METADATA_NAME} of the root or of a stage was changed: "
            f"{store_format.COMMIT_NAME} states crc32c {record.metadata_crc32c:08x}, they give {actual:08x}"
        )
    num_slots = attributes.get("num_slots")
    if num_slots not in (store_format.NUM_SLOTS, store_format.NUM_SLOTS_WITH_PREVIOUS):
        raise StoreFormatError(f"{root_path}: attributes.hoist.num_slots: expected 2 or 3, saw {num_slots!r:.100}")
    counts = [layout.num_chunks for layout in layouts]
    if [len(digits) for digits in record.slots] != counts:
        seen = [len(digits) for digits in record.slots]
        raise StoreFormatError(f"{commit_path}: slots: expected {counts} chunks per stage, saw {seen}")
    if any(int(digit) >= num_slots for digits in record.slots for digit in digits):
        raise StoreFormatError(f"{commit_path}: slots: a slot is named beyond the {num_slots} that the store has")
    checksum_path = directory / record.checksum_file
    checksums = store_format.decode_checksums(
        _read_file(checksum_path), checksum_path, layouts=layouts, expected_crc32c=record.checksum_file_crc32c
    )
    own = store_format.callers_attributes(attributes)
    return Opened(
        layouts=tuple(layouts), num_slots=num_slots, attributes=own, record=record, checksums=checksums
    )


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreFormatError(f"{path}: cannot be read: {error.strerror}") from error


def tidy(directory: Path, record: CommitRecord, chunks: Sequence[StoredChunk], engine: IoEngine) -> None:
    """Remove what a killed writer left: a half-made commit, snapshots half made or half removed, scratch, and what
    `drives.tidy` says of all ``chunks``.
    """
    (directory / store_format.COMMIT_TEMPORARY_NAME).unlink(missing_ok=True)
    for path in (directory / store_format.CRC_DIRECTORY).iterdir():
        if path != directory / record.checksum_file:
            path.unlink()
    snapshots = directory / store_format.SNAPSHOTS_DIRECTORY
    if snapshots.is_dir():
        for path in snapshots.iterdir():
            if path.name.startswith((store_format.MAKING_PREFIX, store_format.REMOVING_PREFIX)):
                creation.remove_tree(path, engine)
    scratch = directory / store_format.SCRATCH_DIRECTORY
    creation.remove_tree(scratch, engine)
    scratch.mkdir()
    if (directory / store_format.DRIVES_DIRECTORY).is_dir():
        drives.tidy(directory, record, chunks)
