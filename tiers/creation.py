"""Makes the files of a new store and removes those of an old one. Refuses nothing: `allocation.py` has looked before.

What the files say is `format.py`'s business; the lock and what happens after a failure, `store.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hoist.tiers import allocation, drives
from hoist.tiers import format as store_format
from hoist.tiers.allocation import Progress
from hoist.tiers.dealing import MeasuredDirectory, deal
from hoist.tiers.drives import Drive, Marker
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.inventory import StoredChunk

if TYPE_CHECKING:  # who only looks at a store does without the second that torch takes
    from hoist.tiers.io.base import IoEngine


def make_directory(directory: Path) -> bool:
    """Make the store's directory durably. False if another process was quicker: then the lock decides.

    Raises StoreRefusedError if it cannot be made.
    """
    try:
        directory.mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        raise StoreRefusedError(f"{directory}: cannot create the store: {error.strerror}") from error
    allocation.sync_directory(directory.parent)
    return True


def remove_store(directory: Path, engine: IoEngine) -> None:
    """Remove what is hoist's, here and on the store's further drives that can be reached. LOCK stays, and so does the
    count of bytes ever written.

    COMMIT.json goes first, durably; the root's metadata, which marks the directory as hoist's, goes last. Other
    people's files stay, and so do the drives' directories.
    """
    commit = directory / store_format.COMMIT_NAME
    if commit.exists():
        commit.unlink()
        allocation.sync_directory(directory)
    (directory / store_format.COMMIT_TEMPORARY_NAME).unlink(missing_ok=True)
    for name in (
        store_format.STAGES_DIRECTORY,
        store_format.SCRATCH_DIRECTORY,
        store_format.CRC_DIRECTORY,
        store_format.MODEL_DIRECTORY,
    ):
        remove_tree(directory / name, engine)
    if not allocation.snapshot_names(directory):  # whoever wants them gone removes them by name
        folder = directory / store_format.SNAPSHOTS_DIRECTORY
        remove_tree(folder.resolve() if folder.is_symlink() else folder, engine)
    for drive in drives.linked(directory):
        drives.clear(drive)
    remove_tree(directory / store_format.DRIVES_DIRECTORY, engine)
    for name in (
        store_format.STATUS_NAME,
        store_format.METRICS_NAME,
        store_format.TIMELINE_NAME,
        store_format.WEAR_TEMPORARY_NAME,
    ):
        with contextlib.suppress(IsADirectoryError):  # not ours
            (directory / name).unlink(missing_ok=True)
    if (directory / store_format.METADATA_NAME).exists():
        allocation.sync_directory(directory)  # else a power cut could bring the rest back without its mark
        (directory / store_format.METADATA_NAME).unlink()


def remove_tree(directory: Path, engine: IoEngine) -> None:
    """Remove a directory, if it is there, and have the engine close the files in it that it keeps open."""
    if not directory.exists():
        return
    for parent, _, names in os.walk(directory):
        for name in names:
            engine.forget(Path(parent, name))
    shutil.rmtree(directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one directory of a new store is to hold."""

    directory: Path
    """Absolute."""
    drive: Drive
    files: Sequence[StoredChunk]
    """By their paths in the main tree."""


def share_out(
    directory: Path, chunks: Sequence[StoredChunk], measured: Sequence[MeasuredDirectory]
) -> tuple[Share, ...]:
    """What each directory of a new store at ``directory`` is to hold; without ``measured``, all in the one.

    Raises ValueError unless ``measured`` begins with ``directory`` itself.
    """
    if not measured:
        return (Share(directory=directory, drive=Drive(id=str(uuid.uuid4()), path=drives.MAIN_PATH), files=chunks),)
    if measured[0].directory != directory:
        raise ValueError(f"drives: begin with {measured[0].directory}, not with the store's own {directory}")
    dealt = deal(chunks, [one.weight for one in measured])
    return tuple(
        Share(
            directory=one.directory,
            drive=Drive(
                id=str(uuid.uuid4()),
                path=f"{store_format.DRIVES_DIRECTORY}/{number}" if number else drives.MAIN_PATH,
                weight=one.weight,
                read_bytes_per_second=one.read_bytes_per_second,
                write_bytes_per_second=one.write_bytes_per_second,
            ),
            files=[chunk for chunk, taker in zip(chunks, dealt, strict=True) if taker == number],
        )
        for number, one in enumerate(measured)
    )


def build(
    directory: Path, metadata: Mapping[str, bytes], shares: Sequence[Share], store_id: str, progress: Progress | None
) -> None:
    """Write the metadata, reserve the chunk files, make it all durable. The root's metadata is durable before anything
    else is made: it marks the directory as hoist's, also after a power cut.

    ``shares`` begins with the main directory's. What leads to the other directories is durable before anything is put
    there, so that a removal of the store finds them. Raises StoreRefusedError if a drive fills up meanwhile, OSError if
    it fails; what was made stays.
    """
    allocation.write_durably(directory / store_format.METADATA_NAME, metadata[store_format.METADATA_NAME])
    allocation.sync_directory(directory)
    for path, data in metadata.items():
        if path == store_format.METADATA_NAME:
            continue
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    for name in (store_format.CRC_DIRECTORY, store_format.SCRATCH_DIRECTORY):
        (directory / name).mkdir(exist_ok=True)
    further = [share for share in shares if not share.drive.is_main]
    if further:
        for share in further:
            drives.link_drive(directory, share.drive.path, share.directory)
        allocation.sync_file_system(directory)
        for share in further:
            Marker(store_id=store_id, drive_id=share.drive.id, store=directory).write(share.directory)
    done, total = 0, sum(chunk.num_bytes for share in shares for chunk in share.files)
    for share in shares:
        for chunk in share.files:
            _reserve(chunk, directory, share)
            done += chunk.num_bytes
            if progress is not None:
                progress(done, total)
    for share in reversed(shares):
        allocation.sync_file_system(share.directory)


def _reserve(chunk: StoredChunk, directory: Path, share: Share) -> None:
    """Reserve a chunk file on its drive, and link it into the main tree if that is another."""
    chunk.path.parent.mkdir(parents=True, exist_ok=True)
    if share.drive.is_main:
        allocation.allocate(chunk.path, chunk.num_bytes)
        return
    relative = chunk.path.relative_to(directory)
    file = share.directory / relative
    file.parent.mkdir(parents=True, exist_ok=True)
    allocation.allocate(file, chunk.num_bytes)
    chunk.path.symlink_to(drives.entry_target(share.drive.path, relative))
