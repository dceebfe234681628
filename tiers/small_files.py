"""Small files that a run leaves in its store for others to read: replaced whole, and read without trusting them.

Not for what the store itself rests on (`commit.py`): nothing here is made durable. What is in the files is others'
business.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hoist.tiers import format as store_format

#: What is larger than this was not left by a run; the largest of theirs, a timeline, takes some 5 MB.
MAX_BYTES = 64 << 20
#: Whole numbers beyond this no run writes, and other programs cannot hold.
_MAX_INTEGER = 2**63 - 1


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


def read_small(path: Path) -> bytes:
    """The bytes of a file. Raises OSError, also on what is no file or too large: a pipe must not hold a reader up."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {MAX_BYTES >> 20} MiB, which no run writes", str(path))
    return data


def decode_json(data: bytes) -> Any:
    """JSON of others; a number that is infinite, none, or beyond 64 bits reads as null, as hoist itself writes such.

    Raises ValueError and RecursionError.
    """
    return json.loads(
        data, parse_constant=_nothing, parse_float=_float, parse_int=_integer, object_pairs_hook=_object
    )


def _nothing(text: str) -> None:
    """NaN, Infinity and -Infinity."""


def _float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _integer(text: str) -> int | None:
    value = int(text) if len(text) <= 20 else None
    return value if value is not None and -_MAX_INTEGER <= value <= _MAX_INTEGER else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Many lines have the same names: each is kept in memory once."""
    return {sys.intern(name): value for name, value in pairs}


def read_object(path: Path) -> dict[str, Any] | Unusable:
    """The JSON object in a file, or why there is none. Raises nothing about the file."""
    try:
        data = read_small(path)
    except OSError as error:
        return Unusable(why=Why.MISSING, detail=f"{path}: {error.strerror or error}")
    try:
        document = decode_json(data)
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
