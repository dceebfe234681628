"""`hoist drives`: which directories a store spans, how much is on each, and taking one into use or out of it.

What is done to the store is `hoist.tiers.redeal`'s; here is what a user asks and is shown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hoist.tiers import allocation, drives, inventory, opening
from hoist.tiers.allocation import DirectoryState, Progress
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.format import LOCK_NAME, CommitRecord
from hoist.tiers.io.base import IoEngine
from hoist.tiers.lock import StoreLock
from hoist.tiers.redeal import change_drives, drive_of
from hoist.tiers.store import Store
from hoist.tools.invoked import shown_path
from hoist.tools.sizes import show_bytes

#: What is said of a drive whose share is 0.
_LEAVING = "           is leaving the store, and was interrupted: remove it again to finish"


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveUse:
    """A directory of a store, and what is on it."""

    directory: str
    main: bool
    """The store's own directory."""
    share: float
    """What it is to have of the store's bytes, from 0 to 1."""
    num_files: int
    """Chunk files that are on it now."""
    num_bytes: int
    """Their bytes."""
    read_bytes_per_second: float | None
    """As measured when it was taken into use; None if it never was."""
    write_bytes_per_second: float | None
    problem: str | None
    """Why the store cannot be opened with it; None if it can."""

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return asdict(self)


def shares(record: CommitRecord, store: Path) -> tuple[tuple[str, float], ...]:
    """Directory and share of each drive of the store at ``store``; empty if it is in one directory."""
    known = drives.registered(record, store)
    total = sum(drive.weight for drive in known)
    if len(known) == 1:
        return ()
    directories = [drive.directory(store) for drive in known]
    shown = [shown_path(place) for place in directories]
    return tuple((name, drive.weight / total) for name, drive in zip(shown, known, strict=True))


def look(store: Path) -> tuple[DriveUse, ...]:
    """What each drive of the store holds. Changes nothing, and works while a drive is missing.

    Raises StoreRefusedError where there is no store, StoreFormatError where its small files are damaged.
    """
    store = store.absolute()
    if allocation.directory_state(store) is not DirectoryState.COMMITTED:
        raise StoreRefusedError(opening.why_no_commit(store))
    found = opening.read(store)
    known = drives.registered(found.record, store)
    held: dict[str, list[int]] = {drive.id: [] for drive in known}
    for chunk in inventory.all_chunks(store, found.layouts, num_slots=found.num_slots):
        drive = drive_of(chunk.path, store, known)
        if drive is not None:
            held[drive.id].append(chunk.num_bytes)
    total = sum(drive.weight for drive in known)
    problems = {drive.id: drives.problem(store, found.record, drive) for drive in known}
    return tuple(
        DriveUse(
            directory=str(drives.place(store, drive)),
            main=drive.is_main,
            share=drive.weight / total,
            num_files=len(held[drive.id]),
            num_bytes=sum(held[drive.id]),
            read_bytes_per_second=drive.read_bytes_per_second,
            write_bytes_per_second=drive.write_bytes_per_second,
            problem=problems[drive.id],
        )
        for drive in known
    )


def change(
    store: Path, engine: IoEngine, *, add: Sequence[Path], remove: Sequence[Path], progress: Progress | None = None
) -> int:
    """Spread an existing store over other drives; returns the bytes that were moved. See `hoist.tiers.redeal`.

    Raises what :meth:`Store.open` and :func:`change_drives` raise.
    """
    with Store.open(store, engine=engine) as opened:
        return change_drives(
            opened,
            engine,
            add=[Path(os.path.abspath(directory)) for directory in add],  # noqa: PTH100 (links keep their names)
            remove=[Path(os.path.abspath(directory)) for directory in remove],  # noqa: PTH100
            progress=progress,
        )


def follow(store: Path, named: Sequence[Path]) -> None:
    """Check the further directories that are named for an existing store, and link those that are elsewhere now.

    Raises StoreRefusedError, with nothing changed, unless ``named`` is all of the store's drives but the main one.
    """
    store = store.absolute()
    lock = StoreLock(store / LOCK_NAME)
    try:
        drives.relocate(store, opening.read(store).record, named)
    finally:
        lock.release()


def render(uses: Sequence[DriveUse], console: Console) -> None:
    """Show the drives: a line for each, and below it what is wrong with it."""
    rows = [("share", "files", "bytes", "read/s", "written/s", "directory")]
    for use in uses:
        read, written = (
            "-" if speed is None else show_bytes(int(speed))
            for speed in (use.read_bytes_per_second, use.write_bytes_per_second)
        )
        rows.append((f"{use.share:.0%}", str(use.num_files), show_bytes(use.num_bytes), read, written, use.directory))
    notes = ["", *(use.problem or ("" if use.share else _LEAVING) for use in uses)]
    for (*numbers, directory), note in zip(rows, notes, strict=True):
        for line in (" ".join(f"{cell:>10}" for cell in numbers) + f"  {directory}", note):
            if line:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
