"""Committed chunk files that snapshots hold too, by hard link, and the reserved files that take their place.

A snapshot costs no copy: it links the file of a committed slot. That file must then never be written again, so a file
of the same size is reserved beside it, and put into the slot as soon as a commit frees it, before anybody writes there.
What a snapshot is, `snapshots.py` says; this knows of slots and links alone.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hoist.tiers import allocation
from hoist.tiers import format as store_format
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.inventory import StoredChunk

if TYPE_CHECKING:  # who only looks at a store does without the second that torch takes
    from hoist.tiers.io.base import IoEngine


class SharedFiles:
    """The shared files of one store that is open for writing. Not thread-safe: the store's gate guards it.

    What the drive says counts, not what a process remembers: a chunk file with more than one name is shared, whoever
    made the other name. So a killed process, or a snapshot removed by hand, leaves nothing to repair but what
    :meth:`settle` does.
    """

    def __init__(self, directory: Path, engine: IoEngine) -> None:
        self._stages = directory / store_format.STAGES_DIRECTORY
        self._reserved = directory / store_format.SNAPSHOTS_DIRECTORY / store_format.REPLACEMENTS_NAME
        self._engine = engine
        #: Shared files in a committed slot; each has a whole file at :meth:`_replacement`.
        self._paths: set[Path] = set()

    def __bool__(self) -> bool:
        return bool(self._paths)

    def __contains__(self, path: Path) -> bool:
        return path in self._paths

    def settle(self, every: Sequence[StoredChunk], committed: Collection[Path]) -> None:
        """Look at every chunk file when a store is opened: replace shared ones in free slots, reserve for the others.

        Raises StoreRefusedError if the drive is too full for that; what was replaced stays replaced.
        """
        shared = [chunk for chunk in every if chunk.array != store_format.FROZEN_NAME and is_shared(chunk.path)]
        wanted = {self._replacement(chunk.path) for chunk in shared}
        if self._reserved.is_dir():
            for path in self._reserved.iterdir():
                if path not in wanted:
                    path.unlink()
        if shared:
            self.reserve(shared)
            self.part(committed)

    def reserve(self, chunks: Sequence[StoredChunk]) -> None:
        """Reserve a file for each of ``chunks``, which are about to be linked, durably.

        Raises StoreRefusedError if the drive is too full; what was reserved for nothing is removed by :meth:`release`.
        """
        self._reserved.mkdir(parents=True, exist_ok=True)
        allocation.sync_directory(self._reserved.parent.parent)
        allocation.sync_directory(self._reserved.parent)
        for chunk in chunks:
            self._paths.add(chunk.path)
            try:
                allocation.allocate(self._replacement(chunk.path), chunk.num_bytes)
            except StoreRefusedError as error:
                raise StoreRefusedError(
                    f"{error}; a snapshot shares {chunk.path}, so room for its next version is needed: free some, or "
                    "remove a snapshot (hoist snapshot STORE NAME --remove)"
                ) from error
        allocation.sync_directory(self._reserved)

    def part(self, committed: Collection[Path]) -> None:
        """Put the reserved file where a shared one is not ``committed`` any more. Durable when it returns.

        Nobody may be writing there. The snapshots keep the file that was there; what is in the new one is undefined.
        """
        folders: set[Path] = set()
        for path in sorted(path for path in self._paths if path not in committed):
            if is_shared(path):
                self._engine.forget(path)
                self._replacement(path).replace(path)
                folders.add(path.parent)
            else:  # its snapshot was removed by hand, or the file went to another drive
                self._replacement(path).unlink(missing_ok=True)
            self._paths.discard(path)
        for folder in sorted(folders):
            allocation.sync_directory(folder)

    def release(self) -> None:
        """Give up the reserved files of what no snapshot shares any more."""
        for path in [path for path in self._paths if not is_shared(path)]:
            self._replacement(path).unlink(missing_ok=True)
            self._paths.discard(path)

    def _replacement(self, path: Path) -> Path:
        stage, array, _, slot, chunk = path.relative_to(self._stages).parts
        return self._reserved / f"{stage.partition('-')[0]}-{array}-{slot}-{chunk}"


def is_shared(path: Path) -> bool:
    """The file at ``path`` has another name too. Links to another drive are not: their files are copied."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink > 1


def can_be_linked(path: Path, folder: Path) -> bool:
    """A hard link in ``folder`` to the very file at ``path``, no symbolic link, is possible as far as drives go."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_dev == folder.stat().st_dev
