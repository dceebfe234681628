"""The ledger of what a store's drives have suffered: bytes ever written to them and read from them, in STORE/wear.json.

It counts and remembers. What passes an engine is counted in `io/counted.py`; what a drive says of itself is read in
`drive_health.py`; what the numbers mean for a drive's life is `scheduler/endurance.py`'s business.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from hoist.tiers import allocation
from hoist.tiers import format as store_format

_log = logging.getLogger(__name__)

#: Raised by one when a reader of the version before would misread the file.
WEAR_VERSION = 1
#: More bytes than all drives will ever see: a count beyond is none.
LARGEST_BYTES = 2**100
#: The file is not read further than this.
_LONGEST_BYTES = 2**24
#: As counts come in, the file is written again when the last time is so long ago.
SAVE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryWear:
    """One of a store's directories, and what has passed to and from its drive for this store."""

    directory: str = ""
    """Where it is, or was when it last belonged to the store; absolute."""
    drive_id: str = ""
    """Its id in COMMIT.json; another one after a fresh start."""
    written_bytes: int = 0
    read_bytes: int = 0
    tbw_bytes: int | None = None
    """Bytes that the drive is rated for in its whole life; None: not known."""
    tbw_source: str | None = None
    """Who says so: ``--tbw``, or ``smart``: what the drive says of itself."""
    drive_written_bytes: int | None = None
    """What the drive said was written to it in its whole life, by everybody, when it was last asked; None: it was not,
    or would not say."""
    in_use: bool = True
    """It belongs to the store now; False: it did once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WearRecord:
    """What wear.json says. Counts what those have moved who held the store's lock; readers are not in it."""

    store_id: str = ""
    since: float = 0.0
    """When counting began; seconds since 1970, as all times here."""
    updated: float = 0.0
    directories: tuple[DirectoryWear, ...] = field(default_factory=tuple)
    """The store's own first; those that it has left last."""

    @property
    def written_bytes(self) -> int:
        """Written to all of the store's drives, those that it has left included."""
        return sum(each.written_bytes for each in self.directories)

    @property
    def read_bytes(self) -> int:
        """Read from them."""
        return sum(each.read_bytes for each in self.directories)

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return {
            "format_version": WEAR_VERSION,
            "store_id": self.store_id,
            "written_bytes": self.written_bytes,
            "read_bytes": self.read_bytes,
            "since": self.since,
            "updated": self.updated,
            "directories": [asdict(each) for each in self.directories],
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Read what :meth:`to_json` gave; what is unknown is passed over. Raises ValueError on what it cannot be."""
        if not isinstance(document, Mapping) or document.get("format_version") != WEAR_VERSION:
            raise ValueError(f"format_version: expected {WEAR_VERSION}")
        try:
            return cls(
                store_id=str(document["store_id"]),
                since=float(document["since"]),
                updated=float(document["updated"]),
                directories=tuple(_directory(each) for each in document["directories"]),
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _directory(document: Mapping[str, Any]) -> DirectoryWear:
    known = {spec.name: document[spec.name] for spec in fields(DirectoryWear) if spec.name in document}
    for name, value in known.items():
        optional = name in ("tbw_bytes", "tbw_source", "drive_written_bytes") and value is None
        if name.endswith("_bytes"):
            # No drive is rated for nothing, and shares of it are taken.
            right = type(value) is int and (name == "tbw_bytes") <= value <= LARGEST_BYTES
        else:
            right = isinstance(value, bool if name == "in_use" else str)
        if not (right or optional):
            raise ValueError(f"directories: {name}: saw {value!r:.100}")
    return DirectoryWear(**known)


def read_wear(store: Path) -> WearRecord | None:
    """What the store at ``store`` counts; None if it counts nothing yet. Takes no lock and changes nothing.

    Raises ValueError, with the file, on one that is torn or that another program wrote, OSError on one that cannot be
    read.
    """
    path = store / store_format.WEAR_NAME
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return WearRecord.from_json(json.loads(data))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are some
        raise ValueError(f"{path}: is torn or no count of hoist's: {error}") from error


class WearLedger:
    """Counts for one store that is open for writing, and keeps wear.json. Safe to call from several threads.

    Only who holds the store's lock has one, so no two processes write the file. It is replaced whole: a kill loses what
    came in since the last time, about :data:`SAVE_SECONDS`; a power cut, what came in since the last durable one.
    Nothing here ever refuses a run: a file that cannot be read or written is told in the log, once, and that the drive
    is full as information alone.
    """

    def __init__(
        self, store: Path, *, store_id: str, drives: Mapping[str, Path], save_seconds: float = SAVE_SECONDS
    ) -> None:
        """``drives``: directory by drive id, the store's own first. Reads what is there, and writes nothing yet."""
        self._save_seconds = save_seconds
        self._store = store
        self._main = f"{store}/"
        #: Guards the counts.
        self._lock = threading.Lock()
        #: Held while the file is written; never with :attr:`_lock` held.
        self._saving = threading.Lock()
        self._saved_at = time.monotonic()
        #: Something changed since then.
        self._dirty = False
        self._told = False
        #: True if there was nothing that could be read: what was moved before is not known.
        self.began_anew = False
        #: True if no file was there.
        self.is_new = False
        found = None
        try:
            found = read_wear(store)
            self.is_new = found is None
        except (OSError, ValueError) as error:
            _log.warning("%s; counting what is written begins again from 0", error)
        self.began_anew = found is None
        self._record = replace(found or WearRecord(since=time.time()), store_id=store_id)
        #: Per directory of the record: bytes [written, read] beyond it.
        self._moved = [[0, 0] for _ in self._record.directories]
        #: What paths of the further directories begin with, and their number in the record.
        self._further: list[tuple[str, int]] = []
        self.cover(drives)

    def cover(self, drives: Mapping[str, Path]) -> None:
        """The directories that the store has now, by drive id, its own first; what others counted is kept."""
        with self._lock:
            left = list(self._merged().directories)
            covered = []
            for drive_id, directory in drives.items():
                same = next((each for each in left if each.drive_id == drive_id), None)
                same = same or next((each for each in left if each.directory == str(directory)), None)
                if same is not None:
                    left.remove(same)
                covered.append(
                    replace(same or DirectoryWear(), directory=str(directory), drive_id=drive_id, in_use=True)
                )
            self._record = replace(
                self._record, directories=(*covered, *(replace(each, in_use=False) for each in left))
            )
            self._moved = [[0, 0] for _ in self._record.directories]
            self._further = [
                (f"{each.directory}/", number) for number, each in enumerate(covered) if number
            ]

    def note(self, path: str, *, written_bytes: int = 0, read_bytes: int = 0) -> None:
        """Bytes are moved to or from a file, absolute. One that is in none of the store's directories is no matter.

        A chunk's entry in the main tree that links to another drive counts there.
        """
        number = self._number(path)
        if number is not None:
            self.add(number, written_bytes=written_bytes, read_bytes=read_bytes)

    def add(self, number: int = 0, *, written_bytes: int = 0, read_bytes: int = 0) -> None:
        """Bytes are moved to or from directory ``number``, in the order of :meth:`cover`; 0 is the store's own."""
        with self._lock:
            moved = self._moved[number]
            moved[0] += written_bytes
            moved[1] += read_bytes
            self._dirty = self._dirty or bool(written_bytes or read_bytes)
        if time.monotonic() - self._saved_at >= self._save_seconds and self._saving.acquire(blocking=False):
            try:
                self._save(durable=False, synced=False)
            finally:
                self._saving.release()

    def _number(self, path: str) -> int | None:
        if path.startswith(self._main):
            if self._further:
                try:
                    target = os.readlink(path)  # noqa: PTH115
                except OSError:
                    return 0
                # "../../../drives/N/stages/...", as drives.entry_target() writes it
                drive = target.lstrip("./").partition(f"/{store_format.STAGES_DIRECTORY}/")[0]
                try:
                    place = f"{os.readlink(self._main + drive)}/"  # noqa: PTH115
                except OSError:
                    return 0
                return next((number for prefix, number in self._further if prefix == place), 0)
            return 0
        return next((number for prefix, number in self._further if path.startswith(prefix)), None)

    def rate(self, number: int, *, tbw_bytes: int | None, source: str | None) -> None:
        """What directory ``number``'s drive is rated for; None: not known."""
        self._change(number, tbw_bytes=tbw_bytes, tbw_source=source if tbw_bytes is not None else None)

    def note_drive(self, number: int, *, written_bytes: int | None) -> None:
        """What the drive of directory ``number`` says was ever written to it, by everybody."""
        self._change(number, drive_written_bytes=written_bytes)

    def _change(self, number: int, **values: Any) -> None:
        with self._lock:
            directories = list(self._record.directories)
            directories[number] = replace(directories[number], **values)
            self._dirty = self._dirty or directories[number] != self._record.directories[number]
            self._record = replace(self._record, directories=tuple(directories))

    def record(self) -> WearRecord:
        """All that was counted up to now."""
        with self._lock:
            return self._merged()

    @property
    def written_bytes(self) -> int:
        """Ever written to the store's drives, up to now."""
        with self._lock:
            return self._record.written_bytes + sum(written for written, _ in self._moved)

    def _merged(self) -> WearRecord:
        return replace(
            self._record,
            directories=tuple(
                replace(each, written_bytes=each.written_bytes + written, read_bytes=each.read_bytes + read)
                for each, (written, read) in zip(self._record.directories, self._moved, strict=True)
            ),
        )

    # --- the file -------------------------------------------------------------------------------------------------

    def save(self, *, durable: bool = False, synced: bool = False) -> None:
        """Replace the file whole; ``durable``: so that it outlives a power cut. ``synced``: the caller makes the names
        in the store's directory durable soon, anyway. Does nothing if nothing came in since the last time.

        The file's own bytes count, too.
        """
        with self._saving:
            if self._dirty:
                self._save(durable=durable, synced=synced)

    def _save(self, *, durable: bool, synced: bool) -> None:
        with self._lock:
            self._dirty = False
            own_bytes = len(_encoded(self._merged()))  # up to a digit or two
            self._moved[0][0] += own_bytes
            record = replace(self._merged(), updated=time.time())
        path = self._store / store_format.WEAR_NAME
        temporary = self._store / store_format.WEAR_TEMPORARY_NAME
        self._saved_at = time.monotonic()
        try:
            if durable:
                allocation.write_durably(temporary, _encoded(record))
            else:
                temporary.write_bytes(_encoded(record))
            temporary.replace(path)
            if durable and not synced:
                allocation.sync_directory(self._store)
        except OSError as error:
            with contextlib.suppress(OSError):  # a full drive leaves a part of it
                temporary.unlink(missing_ok=True)
            with self._lock:
                self._moved[0][0] -= own_bytes
                self._dirty = True  # the next time may find room
            if not self._told:
                self._told = True
                # Of a full drive the run itself tells, at its next commit if not before: one line is enough.
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                level = logging.INFO if full else logging.WARNING
                _log.log(level, "%s: what is written to the drive cannot be kept: %s", path, error.strerror)

    def discard(self) -> None:
        """The store is removed that was being made: forget the file if that was made for it, else bring it up to date.

        What a drive has suffered from such a store is lost with its directory.
        """
        with self._saving:
            if not self.is_new:
                self._save(durable=False, synced=False)
                return
            for name in (store_format.WEAR_TEMPORARY_NAME, store_format.WEAR_NAME):
                (self._store / name).unlink(missing_ok=True)


def _encoded(record: WearRecord) -> bytes:
    return json.dumps(record.to_json()).encode() + b"\n"

