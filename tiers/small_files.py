"""Small files that a run leaves in its store for others to read: replaced whole, and read without trusting them.

Not for what the store itself rests on (`commit.py`): nothing here is made durable. What is in the files is others'
business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hoist.tiers import format as store_format


class Why(Enum):
    """Why a small file cannot be used."""

    MISSING = "missing"
    """It is not there, or may not be read."""
    TORN = "torn"
    """Its bytes are no JSON object, or not one of its kind: a power cut, or not hoist's file."""
    VERSION = "version"
    """Another hoist has written it."""
    OTHER_STORE = "other store"
    """It speaks of another store: somebody has copied it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusable:
    """What is told instead of a file's content."""

    why: Why
    detail: str
    """One line for people: the file, and what was seen."""


def replace_file(directory: Path, name: str, parts: Iterable[bytes]) -> None:
    """Write ``directory/name`` of a store anew: readers see the file before or this one, whole. Not durable.

    It is made in ``scratch/``, which dies with the run, and renamed. Raises OSError, with the file before still there;
    not for two threads at once with the same name.
    """
    temporary = directory / store_format.SCRATCH_DIRECTORY / name
    try:
        with temporary.open("wb", buffering=0) as file:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
        temporary.rename(directory / name)
    except BaseException:
        _forget(temporary)
        raise


def _forget(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # what is left in scratch goes when the store is next opened


def read_object(path: Path) -> dict[str, Any] | Unusable:
    """The JSON object in a file, or why there is none. Raises nothing about the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return Unusable(why=Why.MISSING, detail=f"{path}: {error.strerror or error}")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8, or no document of ours
        return Unusable(why=Why.TORN, detail=f"{path}: not JSON: {error}")
    if not isinstance(document, dict):
        return Unusable(why=Why.TORN, detail=f"{path}: expected a JSON object, saw {type(document).__name__}")
    return document


def store_id_of(directory: Path) -> str | None:
    """The id that the store's last commit names; None if that cannot be read: whoever opens the store says why."""
    commit = directory / store_format.COMMIT_NAME
    try:
        return store_format.decode_commit(commit.read_bytes(), commit).store_id
    except (OSError, ValueError):  # StoreFormatError is one
        return None
