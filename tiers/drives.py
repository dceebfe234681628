"""The further directories of a store that spans several: what marks them, which the store uses, and whether they are
there.

Which file goes where is `dealing.py`'s business, moving files between directories `redeal.py`'s. The main tree's entry
of a chunk file on another drive is a link to `drives/N/...` within the tree, and `drives/N` a link to the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hoist.tiers import allocation
from hoist.tiers import format as store_format
from hoist.tiers.errors import StoreFormatError, StoreLockedError, StoreRefusedError
from hoist.tiers.format import CommitRecord
from hoist.tiers.inventory import StoredChunk

MARKER_VERSION = 1
#: Path of the store's own directory among its drives.
MAIN_PATH = "."
_TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """A directory that holds chunk files, as COMMIT.json's ``drives`` lists it."""

    id: str
    """UUID; a further directory's marker has it too."""
    path: str
    """Within the store: ``.``, or ``drives/N``, a link to the directory."""
    weight: float = 1.0
    """Its share is in proportion to this; 0: it is being taken out of use."""
    read_bytes_per_second: float | None = None
    """As measured when it was taken into use; None if it never was."""
    write_bytes_per_second: float | None = None

    @property
    def is_main(self) -> bool:
        """It is the store's own directory."""
        return self.path == MAIN_PATH

    def to_json(self) -> dict[str, Any]:
        """The entry in COMMIT.json; :meth:`from_json` reads it back."""
        return {
            "id": self.id,
            "path": self.path,
            "weight": self.weight,
            "read_bytes_per_second": self.read_bytes_per_second,
            "write_bytes_per_second": self.write_bytes_per_second,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], path: Path) -> Self:
        """Read an entry of the COMMIT.json at ``path``. Raises StoreFormatError."""
        try:
            found = cls(
                id=str(entry["id"]),
                path=str(entry["path"]),
                weight=float(entry.get("weight", 1.0)),
                read_bytes_per_second=entry.get("read_bytes_per_second"),
                write_bytes_per_second=entry.get("write_bytes_per_second"),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            seen = f"{type(error).__name__}: {error}"
            raise StoreFormatError(f"{path}: drives: expected an id and a path each, saw {seen}") from error
        head, _, number = found.path.partition("/")
        if not found.is_main and not (head == store_format.DRIVES_DIRECTORY and number.isdecimal()):
            raise StoreFormatError(f"{path}: drives: expected the path . or drives/N, saw {found.path!r:.100}")
        return found

    def directory(self, store: Path) -> Path:
        """Where it is now, as far as the store at ``store`` knows. Raises StoreRefusedError if its link is missing."""
        if self.is_main:
            return store
        try:
            return _target(store / self.path)
        except OSError as error:
            raise StoreRefusedError(
                f"{store / self.path}: is not the link to a drive that it should be ({error.strerror}; copying a "
                f"store keeps its links with cp -a); name both directories: --store {store} --store DIR"
            ) from error


def registered(record: CommitRecord, store: Path) -> tuple[Drive, ...]:
    """The drives that a commit names, the store's own first as it was made. Raises StoreFormatError."""
    return tuple(Drive.from_json(entry, store / store_format.COMMIT_NAME) for entry in record.drives)


# --- the marker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """What DRIVE.json in a further directory says: whose it is."""

    store_id: str
    drive_id: str
    store: Path
    """The store's main directory, absolute, where it was when it was last opened for writing."""

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """The marker of a directory; None where there is none. Raises StoreRefusedError if it cannot be understood."""
        path = directory / store_format.DRIVE_MARKER_NAME
        try:
            document = store_format.load_json(path.read_bytes(), path)
            version = document["format_version"]
            found = cls(
                store_id=str(document["store_id"]),
                drive_id=str(document["drive_id"]),
                store=Path(document["store"]),
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreRefusedError(f"{directory}: cannot be read: {error.strerror}") from error
        except (StoreFormatError, KeyError, TypeError) as error:
            raise StoreRefusedError(
                f"{directory}: {path.name} is no drive's: {type(error).__name__}: {error}; name another directory"
            ) from error
        if version != MARKER_VERSION:
            raise StoreRefusedError(f"{path}: format_version: saw {version!r}, this hoist reads {MARKER_VERSION}")
        return found

    def write(self, directory: Path) -> None:
        """Put the marker into the directory, durably, in place of one that is there."""
        path = directory / store_format.DRIVE_MARKER_NAME
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        document = {
            "format_version": MARKER_VERSION,
            "store_id": self.store_id,
            "drive_id": self.drive_id,
            "store": str(self.store),
        }
        allocation.write_durably(temporary, json.dumps(document).encode("ascii") + b"\n")
        temporary.replace(path)
        allocation.sync_directory(directory)


# --- a new store --------------------------------------------------------------------------------------------------


def check_distinct(directories: Sequence[Path]) -> None:
    """Raise StoreRefusedError if two directories of a store are one, or one lies within another."""
    resolved = [Path(os.path.realpath(directory)) for directory in directories]
    for number, inner in enumerate(resolved):
        for other, outer in enumerate(resolved):
            if number != other and inner == outer:
                raise StoreRefusedError(
                    f"{directories[max(number, other)]}: is named twice among the store's directories; "
                    "name each drive's directory once"
                )
            if number != other and inner.is_relative_to(outer):
                raise StoreRefusedError(
                    f"{directories[number]}: lies within {directories[other]}, another of the store's directories; "
                    "name one directory on each drive"
                )


def check_takeable(directory: Path, main: Path, *, fresh: bool) -> bool:
    """Raise StoreRefusedError unless ``directory`` may become a further directory of the store made at ``main``.

    It may if it is missing, empty, or a drive of the store that is replaced. True if something in it has to go.
    """
    names = _names(directory)
    if names is None:
        allocation.check_creatable(directory, fresh=False)
        return False
    if not names - {store_format.DRIVE_MARKER_NAME + _TEMPORARY_SUFFIX}:
        allocation.check_writable(directory)
        return bool(names)
    marker = Marker.read(directory)
    if marker is None:
        raise StoreRefusedError(
            f"{directory}: is not empty and holds no drive of this store; name an empty or a new directory"
        )
    if not _same(marker.store, main):
        raise StoreRefusedError(
            f"{directory}: is a drive of the store at {marker.store}; name an empty or a new directory, or start over "
            "in that store with --fresh"
        )
    if not fresh and store_id_at(main) != marker.store_id:
        raise StoreRefusedError(
            f"{directory}: is a drive of a store at {main}, which is not there now; if it is on a drive, mount that; "
            "to give the store up, start over with --fresh"
        )
    allocation.check_writable(directory)
    return True


def check_places(main: Path, further: Sequence[Path], *, fresh: bool) -> list[Path]:
    """:func:`check_distinct` and :func:`check_takeable` for all of a new store's directories but what is at ``main``.

    Returns those in which something has to go.
    """
    check_distinct([main, *further])
    return [directory for directory in further if check_takeable(directory, main, fresh=fresh)]


def store_id_at(store: Path) -> str | None:
    """The id of the store, committed or not, at a directory; None if there is none."""
    path = store / store_format.METADATA_NAME
    try:
        found = store_format.hoist_attributes(path.read_bytes(), path).get("store_id")
    except (OSError, StoreFormatError):
        return None
    return found if isinstance(found, str) else None


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """While the block runs, no other process takes the directory for a store. Raises StoreLockedError if one does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLockedError(f"{directory}: another process is taking it for its store; name another") from error
        except OSError as error:
            raise StoreRefusedError(f"{directory}: its file system cannot lock it: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


def check_space(
    shares: Sequence[tuple[Path, Sequence[int]]], *, extra_bytes: int = 0, old: Iterable[Path] = ()
) -> None:
    """Raise StoreRefusedError if the files that each directory is to hold don't fit where it is.

    ``shares``: per directory, sizes in bytes, the main one's first; those on one file system are counted together.
    ``extra_bytes`` is for the main directory. What the store there and its drives ``old`` hold now will be free.
    """
    by_device: dict[int, list[tuple[Path, Sequence[int]]]] = {}
    for directory, sizes in shares:
        place = directory if directory.exists() else directory.parent
        by_device.setdefault(place.stat().st_dev, []).append((directory, sizes))
    for device, together in by_device.items():
        directories = [directory for directory, _ in together]
        freed = {os.path.realpath(drive) for drive in old if drive.stat().st_dev == device}
        has_main = shares[0][0] in directories
        allocation.check_space(
            directories[0],
            [size for _, sizes in together for size in sizes],
            extra_bytes=extra_bytes if has_main else 0,
            freed_bytes=sum(allocation.tree_bytes(Path(drive, store_format.STAGES_DIRECTORY)) for drive in freed)
            + (allocation.store_bytes(shares[0][0]) if has_main else 0),
        )


def link_drive(store: Path, path: str, directory: Path) -> None:
    """Make, or replace at once and whole, the link ``path`` (``drives/N``) to a drive's directory, durably."""
    link = store / path
    if not link.parent.is_dir():
        link.parent.mkdir()
        allocation.sync_directory(store)
    temporary = link.with_name(link.name + _TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(directory)
    temporary.replace(link)
    allocation.sync_directory(link.parent)


def entry_target(path: str, relative: Path) -> str:
    """What the main tree's entry ``relative`` links to if its file is on the drive ``path`` (not the main one)."""
    return "../" * (len(relative.parts) - 1) + f"{path}/{relative}"


# --- an existing store --------------------------------------------------------------------------------------------


def check_present(store: Path, record: CommitRecord, *, writable: bool) -> None:
    """Raise StoreRefusedError, naming the directory, unless every drive of the store is where it should be.

    Also if one may not be written that is to be ``writable``, and if the drives belong to a store of which ``store`` is
    a copy: two stores would write to the same files.
    """
    for drive in registered(record, store):
        if not drive.is_main:
            _check_drive(store, record, drive)
            if writable:
                allocation.check_writable(drive.directory(store))


def place(store: Path, drive: Drive) -> Path:
    """The drive's directory, as a path to show; if its link is missing, where that should be."""
    try:
        return drive.directory(store)
    except StoreRefusedError:
        return store / drive.path


def problem(store: Path, record: CommitRecord, drive: Drive) -> str | None:
    """Why :func:`check_present` would refuse the store for this drive; None if it would not."""
    try:
        if not drive.is_main:
            _check_drive(store, record, drive)
    except StoreRefusedError as error:
        return str(error)
    return None


def _check_drive(store: Path, record: CommitRecord, drive: Drive) -> None:
    directory = drive.directory(store)
    what = f"a drive of the store {store}"
    advice = f"mount it, or say where it is now: --store {store} --store DIR"
    marker = Marker.read(directory)
    if marker is None:
        why = "holds none (not mounted?)" if directory.is_dir() else "is not there"
        raise StoreRefusedError(f"{directory}: should be {what} and {why}; {advice}")
    if (marker.store_id, marker.drive_id) != (record.store_id, drive.id):
        whose = "another drive of it" if marker.store_id == record.store_id else f"one of {marker.store}"
        raise StoreRefusedError(f"{directory}: should be {what} and is {whose}; {advice}")
    if not _same(marker.store, store) and store_id_at(marker.store) == record.store_id:
        raise StoreRefusedError(
            f"{directory}: is a drive of the store at {marker.store}, of which {store} is a copy; a store's drives "
            "cannot be shared: open that one, or remove it if this one is to take its place"
        )


def tidy(store: Path, record: CommitRecord, chunks: Sequence[StoredChunk]) -> None:
    """Remove what an interrupted writer left on the drives, and tell each where the store is. Needs the store's lock.

    That is: drives that the commit does not name, unless one of ``chunks``, all of the store's, is on them; and on the
    others files that no entry of the main tree leads to.
    """
    folder = store / store_format.DRIVES_DIRECTORY
    drives = {drive.path: drive for drive in registered(record, store)}
    ids = {drive.id for drive in drives.values()}
    for link in sorted(folder.iterdir()) if folder.is_dir() else ():
        if f"{store_format.DRIVES_DIRECTORY}/{link.name}" in drives or not link.is_symlink():
            continue
        target = _target(link)
        marker = Marker.read(target)
        if marker is not None and marker.store_id == record.store_id and marker.drive_id not in ids:
            if any(_leads_to(chunk.path, link.name) for chunk in chunks):
                continue
            clear(target)
        link.unlink()
    for drive in drives.values():
        if drive.is_main:
            continue
        directory = drive.directory(store)
        marker = Marker(store_id=record.store_id, drive_id=drive.id, store=store)
        if Marker.read(directory) != marker:
            marker.write(directory)
        _sweep(directory, store)


def _leads_to(entry: Path, number: str) -> bool:
    """The main tree's entry is a link to a file on the drive ``drives/number``."""
    return entry.is_symlink() and f"/{store_format.DRIVES_DIRECTORY}/{number}/" in os.readlink(entry)  # noqa: PTH115


def _sweep(directory: Path, store: Path) -> None:
    """Remove the drive's chunk files that are not those that the main tree's entries lead to."""
    for parent, _, names in os.walk(directory / store_format.STAGES_DIRECTORY):
        for name in names:
            file = Path(parent, name)
            try:
                used = file.samefile(store / file.relative_to(directory))
            except FileNotFoundError:
                used = False
            if not used:
                file.unlink()


def relocate(store: Path, record: CommitRecord, named: Sequence[Path]) -> None:
    """Check the further directories that a user names for an existing store; follow drives that are elsewhere now.

    ``named`` must be all of its drives but the main one, in any order. A drive that is mounted in another place than it
    was is linked there, durably. Raises StoreRefusedError with nothing changed. Needs the store's lock.
    """
    check_distinct([store, *named])
    further = {drive.id: drive for drive in registered(record, store) if not drive.is_main}
    found: dict[str, Path] = {}
    for directory in named:
        marker = Marker.read(directory)
        if marker is None or marker.store_id != record.store_id or marker.drive_id not in further:
            what = "is not there" if not directory.exists() else f"is not a drive of the store {store}"
            raise StoreRefusedError(
                f"{directory}: {what}; mount it, or take a directory into use first: "
                f"hoist drives {store} --add {directory}"
            )
        if marker.drive_id in found:
            raise StoreRefusedError(
                f"{directory}: is the same drive of the store as {found[marker.drive_id]} (a copy?); name one of them"
            )
        found[marker.drive_id] = directory
    for drive in further.values():
        if drive.id not in found:
            directory = drive.directory(store)
            raise StoreRefusedError(
                f"{directory}: is a drive of the store {store}, too; name {store} alone or all of its directories, or "
                f"take it out of use first: hoist drives {store} --remove {directory}"
            )
    for drive_id, directory in found.items():
        link = store / further[drive_id].path
        if not _same(link, directory):
            link_drive(store, further[drive_id].path, directory)


def refuse_drive(directory: Path) -> None:
    """Raise StoreRefusedError if ``directory`` is a further directory of a store, and no store itself."""
    if store_id_at(directory) is None and (marker := Marker.read(directory)) is not None:
        raise StoreRefusedError(f"{directory}: is a drive of the store at {marker.store}; name that store first")


def linked(store: Path) -> list[Path]:
    """The further directories that belong to the store, committed or not, at ``store`` and can be reached."""
    store_id = store_id_at(store)
    found = []
    folder = store / store_format.DRIVES_DIRECTORY
    for link in sorted(folder.iterdir()) if store_id is not None and folder.is_dir() else ():
        if link.is_symlink():
            directory = _target(link)
            with contextlib.suppress(StoreRefusedError):
                marker = Marker.read(directory)
                if marker is not None and marker.store_id == store_id and directory not in found:
                    found.append(directory)
    return found


def clear(directory: Path) -> None:
    """Remove what a drive holds, its marker last; other people's files, and the directory, stay."""
    stages = directory / store_format.STAGES_DIRECTORY
    if stages.is_dir():
        shutil.rmtree(stages)
    marker = directory / store_format.DRIVE_MARKER_NAME
    marker.with_name(marker.name + _TEMPORARY_SUFFIX).unlink(missing_ok=True)
    marker.unlink(missing_ok=True)


def _target(link: Path) -> Path:
    """Where a link to a drive leads, whether or not anything is there. Raises OSError if it is no link."""
    return link.parent / link.readlink()  # hoist's are absolute


def _names(directory: Path) -> set[str] | None:
    """Names in a directory, None if there is nothing at its path. Raises StoreRefusedError if it is no directory."""
    if not os.path.lexists(directory):
        return None
    if not directory.is_dir():
        raise StoreRefusedError(f"{directory}: is not a directory; name an empty or a new directory")
    try:
        return {entry.name for entry in directory.iterdir()} - allocation.IGNORED_NAMES
    except OSError as error:
        raise StoreRefusedError(f"{directory}: cannot be read: {error.strerror}") from error


def _same(one: Path, other: Path) -> bool:
    """The two paths lead to the same place; where nothing is there, they are written alike."""
    try:
        return one.samefile(other)
    except OSError:
        return Path(os.path.abspath(one)) == Path(os.path.abspath(other))  # noqa: PTH100 (not to follow links)
