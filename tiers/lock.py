"""One writer per store: flock on its LOCK file. Says who holds it; never waits.

What a writer may do is `store.py`'s business. Readers take no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from hoist.tiers.errors import StoreLockedError, StoreRefusedError


class StoreLock:
    """Holds ``path`` exclusively from construction to :meth:`release`, or to the end of the process, however it ends.

    The file stays when the lock goes: only flock counts, so what a dead process left behind is no obstacle. Programs
    that the process starts do not inherit the lock (O_CLOEXEC), nor do forked children, which close it as they start.

    Raises StoreLockedError if another process, or another lock in this one, holds it; StoreRefusedError if the file
    cannot be made or locked. Nothing is changed then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Open file that carries the flock; -1 once released.
        self._descriptor = -1
        #: True if LOCK was not there before.
        self.created = not path.exists()
        while self._descriptor < 0:
            self._descriptor = self._try_lock()
        _held.add(self)
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n"
        with contextlib.suppress(OSError):  # a full drive: the lock is held all the same, only who holds it is not told
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder, 0)

    def _try_lock(self) -> int:
        """A locked descriptor of the file that is at the path now, or -1 if it was replaced meanwhile: try again."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreRefusedError(f"{self._path}: cannot be opened for locking: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_at_path(descriptor):
                kept, descriptor = descriptor, -1
                return kept
            return -1
        except BlockingIOError as error:
            raise _locked(self._path, descriptor) from error
        except OSError as error:
            raise StoreRefusedError(f"{self._path}: the file system cannot lock files: {error.strerror}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self, *, remove: bool = False) -> None:
        """Let go; with ``remove``, delete the file first (undoing a creation). Idempotent."""
        if self._descriptor < 0:
            return
        if remove:
            self._path.unlink(missing_ok=True)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        """Close the file without unlocking: what a forked child does, as unlocking would take the parent's lock."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def check_unlocked(path: Path) -> None:
    """Raise StoreLockedError if some lock on ``path`` is held now. Changes nothing; another may take it right after."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # no such file, or one that only taking the lock can judge
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _locked(path, descriptor) from error
    except OSError:
        return
    finally:
        os.close(descriptor)


def _locked(path: Path, descriptor: int) -> StoreLockedError:
    return StoreLockedError(
        f"{path.parent}: {_describe_holder(descriptor)} is writing to this store; wait for it to end, or stop it"
    )


def _describe_holder(descriptor: int) -> str:
    """Who wrote LOCK; the holder may be about to write it, then nobody is named."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(holder['pid'])} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


_held: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_close_all_in_child)
