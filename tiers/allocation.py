"""What a directory holds, whether a store fits in it, and reserving its files so that a full disk shows at once.

Refusals here come before anything is changed. The order of a creation is `store.py`'s business.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from hoist.tiers import format as store_format
from hoist.tiers.errors import StoreFormatError, StoreRefusedError

#: Entries of a store's directory that hoist makes; a creation that replaces a store removes these and no others.
OWN_NAMES = frozenset(
    {
        store_format.METADATA_NAME,
        store_format.COMMIT_NAME,
        store_format.COMMIT_TEMPORARY_NAME,
        store_format.LOCK_NAME,
        store_format.STATUS_NAME,
        store_format.METRICS_NAME,
        store_format.TIMELINE_NAME,
        store_format.WEAR_NAME,
        store_format.WEAR_TEMPORARY_NAME,
        store_format.CRC_DIRECTORY,
        store_format.STAGES_DIRECTORY,
        store_format.SCRATCH_DIRECTORY,
        store_format.MODEL_DIRECTORY,
        store_format.SNAPSHOTS_DIRECTORY,
        store_format.DRIVES_DIRECTORY,
    }
)
#: What the root of an ext4 file system holds when new: a drive may be mounted right at the store's directory.
IGNORED_NAMES = frozenset({"lost+found"})
#: Room for directories, indirect blocks and the commit records, beyond the files' own bytes.
OVERHEAD_BYTES = 1 << 20
#: The same, per file: a directory entry, an inode, extents.
OVERHEAD_BYTES_PER_FILE = 512

#: Done and total bytes.
Progress = Callable[[int, int], None]


class DirectoryState(Enum):
    """What is at a path where a store is wanted."""

    MISSING = "missing"
    """Nothing; :meth:`Store.create` makes the directory."""
    EMPTY = "empty"
    """An empty directory, or one with hoist's LOCK alone, or what it counts of an earlier store's writes."""
    UNCOMMITTED = "uncommitted"
    """A store whose creation never came to a first commit: holds nothing, and is replaced."""
    COMMITTED = "committed"
    """A store that can be opened."""
    FOREIGN = "foreign"
    """A file, or a directory with entries that are not hoist's."""


def directory_state(directory: Path) -> DirectoryState:
    """Look, change nothing. A dangling link counts as foreign. Raises StoreRefusedError if it may not be looked at."""
    try:
        if not os.path.lexists(directory):
            return DirectoryState.MISSING
        if not directory.is_dir():
            return DirectoryState.FOREIGN
        names = {entry.name for entry in directory.iterdir()} - IGNORED_NAMES
    except OSError as error:
        raise StoreRefusedError(f"{directory}: cannot be read: {error.strerror}") from error
    if names <= {store_format.LOCK_NAME, store_format.WEAR_NAME, store_format.WEAR_TEMPORARY_NAME}:
        return DirectoryState.EMPTY
    metadata = directory / store_format.METADATA_NAME
    try:
        store_format.hoist_attributes(metadata.read_bytes(), metadata)
    except OSError:
        return DirectoryState.FOREIGN
    except StoreFormatError:
        # A creation cut short within its first write leaves nothing but hoist's own names.
        only_ours = names <= OWN_NAMES and store_format.COMMIT_NAME not in names
        return DirectoryState.UNCOMMITTED if only_ours else DirectoryState.FOREIGN
    return DirectoryState.COMMITTED if store_format.COMMIT_NAME in names else DirectoryState.UNCOMMITTED


def check_creatable(directory: Path, *, fresh: bool) -> DirectoryState:
    """Raise StoreRefusedError unless a store may be created at ``directory``, as far as its place and content go."""
    check_no_snapshot(directory)
    state = directory_state(directory)
    if state is DirectoryState.MISSING:
        parent = directory.parent
        if not parent.is_dir():
            what = "is not a directory" if parent.exists() else "does not exist"
            raise StoreRefusedError(
                f"{directory}: cannot create the store: {parent} {what}; create it, or name another place"
            )
        check_writable(parent)
    elif state is DirectoryState.FOREIGN:
        what = "is not empty and holds no hoist store" if directory.is_dir() else "is not a directory"
        raise StoreRefusedError(f"{directory}: {what}; name an empty or a new directory")
    else:
        if state is DirectoryState.COMMITTED and not fresh:
            raise StoreRefusedError(
                f"{directory}: holds a committed store; resume it, or start over in it with --fresh"
            )
        names = snapshot_names(directory)
        if names:
            raise StoreRefusedError(
                f"{directory}: holds snapshots ({', '.join(names)}), which a new store would not fit; remove them with "
                "hoist snapshot STORE NAME --remove, or name another place for the new store"
            )
        check_writable(directory)
    return state


def check_no_snapshot(directory: Path) -> None:
    """Raise StoreRefusedError if ``directory`` is a snapshot, which nobody writes to."""
    if (directory / store_format.SNAPSHOT_NAME).exists():
        raise StoreRefusedError(
            f"{directory}: is a snapshot, which can be exported and verified but not trained in; hoist restore STORE "
            f"{directory.name} brings its store back to it"
        )


def snapshot_names(directory: Path) -> list[str]:
    """Names of the snapshots in a store, sorted; those being made or removed are none."""
    try:
        entries = list((directory / store_format.SNAPSHOTS_DIRECTORY).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(entry.name for entry in entries if not entry.name.startswith("."))


def check_writable(directory: Path) -> None:
    """Raise StoreRefusedError if nothing may be created in an existing directory."""
    if not os.access(directory, os.W_OK | os.X_OK):
        read_only = bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
        why = "its file system is mounted read-only" if read_only else "permission denied"
        raise StoreRefusedError(f"{directory}: cannot be written: {why}; name another place for the store")


def check_space(directory: Path, sizes: Sequence[int], *, extra_bytes: int = 0, freed_bytes: int = 0) -> None:
    """Raise StoreRefusedError if files of ``sizes`` bytes, and ``extra_bytes``, don't fit beside what others hold.

    Counts what an unprivileged user may take (reserved blocks excluded), and ``freed_bytes``, which will be given back
    before.
    """
    place = directory if directory.exists() else directory.parent
    status = os.statvfs(place)
    block = status.f_frsize
    need = sum(-(-size // block) * block for size in sizes) + extra_bytes
    need += OVERHEAD_BYTES + OVERHEAD_BYTES_PER_FILE * len(sizes)
    free = free_bytes(place) + freed_bytes
    if need > free:
        raise StoreRefusedError(
            f"{directory}: too little free space: the store needs {need} bytes ({need / 2**30:.2f} GiB), "
            f"{free} bytes ({free / 2**30:.2f} GiB) are free; free some, or name a place on a larger drive"
        )


def store_bytes(directory: Path) -> int:
    """What removing the store at ``directory``, if there is one, would give back on its own drive."""
    return sum(
        tree_bytes(directory / name) for name in OWN_NAMES - {store_format.LOCK_NAME, store_format.WEAR_NAME}
    )


def tree_bytes(directory: Path) -> int:
    """What the files below a directory take on its drive; links are not followed. 0 if it is not there."""
    return sum(
        os.lstat(f"{parent}/{entry}").st_blocks * 512
        for parent, _, names in os.walk(directory)
        for entry in names
    )


def free_bytes(directory: Path) -> int:
    """What an unprivileged user may still take on the file system of an existing directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def allocate(path: Path, num_bytes: int) -> None:
    """Create ``path`` if need be and reserve its first ``num_bytes`` bytes, which read as zeros where new. Not durable.

    A file that has all its blocks is left as it is. Raises StoreRefusedError if the drive is full, over quota, or
    forbids files so large; the file may then exist with fewer blocks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        status = os.fstat(descriptor)
        if num_bytes and (status.st_size < num_bytes or status.st_blocks * 512 < num_bytes):
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = os.fstatvfs(descriptor)
        raise StoreRefusedError(
            f"{path}: cannot reserve {num_bytes} bytes: {error.strerror}; "
            f"{free.f_bavail * free.f_frsize} bytes are free"
        ) from error
    finally:
        os.close(descriptor)


def sync_file_system(directory: Path) -> None:
    """Make everything on ``directory``'s file system durable: one call for the thousands of entries of a new store."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make a directory's entries durable: creations, renames and removals in it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file whole and fsync it. The directory entry is the caller's to sync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())

