"""What a store says of itself, as far as it can be read: for `hoist inspect`. Needs no torch, takes no lock, changes
nothing.

A whole store is read by `tiers/opening.py`; of a damaged one, this keeps what is readable and names what is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hoist.tiers import allocation, drives, inventory, opening
from hoist.tiers import format as store_format
from hoist.tiers.allocation import DirectoryState
from hoist.tiers.errors import StoreFormatError, StoreRefusedError
from hoist.tiers.format import CommitRecord, StageChecksums
from hoist.tiers.layout import StageLayout

#: Of more damage than this, only the number is told.
MAX_DAMAGE = 20
#: What tells one version of a small file from another.
_Version = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreView:
    """A store's small files, and what is wrong with them and with the sizes of its chunk files."""

    directory: Path
    """Absolute."""
    is_snapshot: bool
    store_id: str | None = None
    created_by: str | None = None
    """Name and version of the program that made it."""
    attributes: Mapping[str, Any]
    """What its creator gave: the model's name and type, and the like."""
    layouts: tuple[StageLayout, ...]
    """Of the stages that could be read, in order."""
    num_stages: int
    """Those included that could not."""
    num_slots: int
    record: CommitRecord | None = None
    """The last commit; None where there is none that can be read."""
    checksums: tuple[StageChecksums, ...] | None = None
    """Of the commit's chunks; None unless everything could be read."""
    snapshots: tuple[str, ...] = ()
    """Names of the snapshots in it, damaged ones included."""
    damage: tuple[str, ...] = ()
    """A line for each thing that is not as it should be, with its file."""
    versions: tuple[_Version | None, ...] = ()
    """Of COMMIT.json and the root's zarr.json, when they were read."""


def look(directory: Path, before: StoreView | None = None) -> StoreView:
    """Read what there is; ``before``, if nothing was committed since then.

    Raises StoreRefusedError where there is no store, whole or damaged.
    """
    directory = directory.absolute()
    versions = _versions(directory)
    if before is not None and before.versions == versions and versions[0] is not None and not before.damage:
        return before
    if versions[0] is None:
        state = allocation.directory_state(directory)
        if state is not DirectoryState.UNCOMMITTED:
            raise StoreRefusedError(opening.why_no_commit(directory))
        return _pieces(directory, versions, [])
    try:
        opened = opening.read(directory)
        layouts, record = opened.layouts, opened.record
        problems = _problems(directory, layouts, record, opened.checksums)
    except StoreFormatError as error:
        return _pieces(directory, versions, [str(error)])
    if problems and _versions(directory) != versions:  # a commit meanwhile has given its slots other work
        return look(directory)
    root = store_format.hoist_attributes(
        (directory / store_format.METADATA_NAME).read_bytes(), directory / store_format.METADATA_NAME
    )
    return StoreView(
        directory=directory,
        is_snapshot=(directory / store_format.SNAPSHOT_NAME).exists(),
        store_id=record.store_id,
        created_by=_text(root.get("created_by")),
        attributes=opened.attributes,
        layouts=layouts,
        num_stages=len(layouts),
        num_slots=opened.num_slots,
        record=record,
        checksums=tuple(opened.checksums),
        snapshots=tuple(allocation.snapshot_names(directory)),
        damage=tuple(problems),
        versions=versions,
    )


def _problems(
    directory: Path, layouts: tuple[StageLayout, ...], record: CommitRecord, checksums: list[StageChecksums]
) -> list[str]:
    """Drives that are missing, and chunk files that are missing or of the wrong size."""
    found = [
        problem
        for drive in drives.registered(record, directory)
        if (problem := drives.problem(directory, record, drive)) is not None
    ]
    chunks = list(inventory.record_chunks(directory, layouts, record, checksums))
    bad = map(str, inventory.check_sizes(chunks))
    return found + _cut(bad)


def _cut(lines: Iterator[str]) -> list[str]:
    found = list(islice(lines, MAX_DAMAGE))
    rest = sum(1 for _ in lines)
    return [*found, f"{rest} more; hoist verify names them all"] if rest else found


def _pieces(directory: Path, versions: tuple[_Version | None, ...], damage: list[str]) -> StoreView:
    """What can be read one by one, where reading everything failed or there is no commit."""
    attributes: dict[str, Any] = {}
    record: CommitRecord | None = None

    def note(error: StoreFormatError | OSError) -> None:
        line = str(error) if isinstance(error, StoreFormatError) else f"{error.filename}: {error.strerror}"
        if not any(known.startswith(line) or line in known for known in damage):
            damage.append(line)

    root = directory / store_format.METADATA_NAME
    try:
        attributes = store_format.hoist_attributes(root.read_bytes(), root)
        store_format.check_version(attributes.get("format_version"), root)
    except (StoreFormatError, OSError) as error:
        note(error)
    commit = directory / store_format.COMMIT_NAME
    if versions[0] is not None:
        try:
            record = store_format.decode_commit(commit.read_bytes(), commit)
        except (StoreFormatError, OSError) as error:
            note(error)
    names = _stage_directories(directory, attributes)
    layouts: list[StageLayout] = []
    for index, name in enumerate(names):
        path = directory / store_format.STAGES_DIRECTORY / name / store_format.METADATA_NAME
        try:
            layouts.append(store_format.decode_layout(path.read_bytes(), path, directory=name, index=index))
        except (StoreFormatError, OSError) as error:
            note(error)
    slots = attributes.get("num_slots")
    return StoreView(
        directory=directory,
        is_snapshot=(directory / store_format.SNAPSHOT_NAME).exists(),
        store_id=_text(attributes.get("store_id")) or (None if record is None else record.store_id),
        created_by=_text(attributes.get("created_by")),
        attributes=store_format.callers_attributes(attributes),
        layouts=tuple(layouts),
        num_stages=len(names),
        num_slots=slots if isinstance(slots, int) else store_format.NUM_SLOTS,
        record=record,
        snapshots=tuple(allocation.snapshot_names(directory)),
        damage=tuple(_cut(iter(damage))),
        versions=versions,
    )


def _stage_directories(directory: Path, attributes: Mapping[str, Any]) -> list[str]:
    """Names of the stages' directories, as the root lists them, or as they are there."""
    listed = attributes.get("stages")
    if isinstance(listed, list) and all(isinstance(name, str) and "/" not in name for name in listed):
        return listed
    try:
        entries = list((directory / store_format.STAGES_DIRECTORY).iterdir())
    except OSError:
        return []
    return sorted((entry.name for entry in entries if entry.is_dir()), key=lambda name: (len(name.split("-")[0]), name))


def _versions(directory: Path) -> tuple[_Version | None, ...]:
    return tuple(_version(directory / name) for name in (store_format.COMMIT_NAME, store_format.METADATA_NAME))


def _version(path: Path) -> _Version | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
