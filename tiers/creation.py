"""Makes the files of a new store and removes those of an old one. Refuses nothing: `allocation.py` has looked before.

What the files say is `format.py`'s business; the lock and what happens after a failure, `store.py`'s.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hoist.tiers import allocation
from hoist.tiers import format as store_format
from hoist.tiers.allocation import Progress
from hoist.tiers.errors import StoreRefusedError
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
    """Remove what is hoist's except LOCK. COMMIT.json goes first, durably; the root's metadata, which marks the
    directory as hoist's, goes last. Other people's files stay.
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
    (directory / store_format.STATUS_NAME).unlink(missing_ok=True)
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


def build(
    directory: Path, metadata: Mapping[str, bytes], files: Mapping[Path, int], progress: Progress | None
) -> None:
    """Write the metadata, reserve the chunk files, make it all durable. The root's metadata is durable before anything
    else is made: it marks the directory as hoist's, also after a power cut.

    Raises StoreRefusedError if the drive fills up meanwhile, OSError if it fails; what was made stays.
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
    done, total = 0, sum(files.values())
    for chunk_file, num_bytes in files.items():
        chunk_file.parent.mkdir(parents=True, exist_ok=True)
        allocation.allocate(chunk_file, num_bytes)
        done += num_bytes
        if progress is not None:
            progress(done, total)
    allocation.sync_file_system(directory)
