"""Sees every name that a process makes, renames or removes below a folder, and every fsync there, as it happens.

Python's audit events tell of the former; of fsync there is none, so `os.fsync` is wrapped. Audit hooks cannot be taken
out again: for processes of their own (`processes.py`). What to do with what is seen: `power.py`, `kills.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike


class Act(Enum):
    """What is seen. All but SYNCED are told of just before they happen."""

    CREATE = auto()
    """A file is opened that is made if it is not there."""
    MAKE_DIRECTORY = auto()
    RENAME = auto()
    """``path`` becomes ``target``."""
    REMOVE = auto()
    """A file, or a directory with all that is in it."""
    SYNC = auto()
    """fsync of a file or a directory is about to begin."""
    SYNCED = auto()
    """It has ended."""
    SYNC_ALL = auto()
    """syncfs: all of the file system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One of them."""

    act: Act
    path: Path
    target: Path | None = None
    truncates: bool = False
    """CREATE: what the file held is gone."""


@contextmanager
def watching(root: Path, tell: Callable[[Seen], None]) -> Iterator[None]:
    """Within, ``tell`` gets what happens below ``root``, on the thread that does it. Once a process."""
    active = True
    fsync = os.fsync

    def note(act: Act, path: object, target: object = None, *, truncates: bool = False) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor
        own = Path(os.fsdecode(path))
        if own.is_relative_to(root):
            other = None if target is None else Path(os.fsdecode(str(target)))
            tell(Seen(act=act, path=own, target=other, truncates=truncates))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not active:
            return
        match event:
            case "open" if isinstance(arguments[2], int) and arguments[2] & os.O_CREAT:
                note(Act.CREATE, arguments[0], truncates=bool(arguments[2] & os.O_TRUNC))
            case "os.mkdir":
                note(Act.MAKE_DIRECTORY, arguments[0])
            case "os.rename":
                note(Act.RENAME, arguments[0], arguments[1])
            case "os.remove" | "os.rmdir" | "shutil.rmtree":
                note(Act.REMOVE, arguments[0])
            case "ctypes.dlsym" if arguments[1] == "syncfs":
                note(Act.SYNC_ALL, root)

    def watched_fsync(fd: FileDescriptorLike) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        name = Path(f"/proc/self/fd/{number}").readlink()
        note(Act.SYNC, name)
        fsync(fd)
        note(Act.SYNCED, name)

    sys.addaudithook(hook)
    os.fsync = watched_fsync
    try:
        yield
    finally:
        active = False
        os.fsync = fsync
