"""One writer per store: flock on its LOCK file. Says who holds it; never waits.

What a writer may do is `store.py`'s business. Readers take no lock; a probe holds a shared one for an instant, for
which a writer waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from hoist.tiers.errors import StoreLockedError, StoreRefusedError

#: How long a writer waits for probes, which hold their lock for microseconds: who holds one longer is no probe.
PROBE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds a store's lock, as far as LOCK tells: a holder may be about to write it."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return "another process" if self.pid is None else f"process {self.pid} on {self.host}"


class StoreLock:
    """Holds ``path`` exclusively from construction to :meth:`release`, or to the end of the process, however it ends.

    The file stays when the lock goes: only flock counts, so what a dead process left behind is no obstacle. Programs
    that the process starts do not inherit the lock (O_CLOEXEC), nor do forked children, which close it as they start.

    Raises StoreLockedError if another process, or another lock in this one, holds it; StoreRefusedError if the file
    cannot be made or locked. Nothing is changed then.
    """

    def __init__(self, path: Path, *, patience_seconds: float = PROBE_SECONDS) -> None:
        """``patience_seconds``: how long to wait where only shared locks are in the way."""
        self._path = path
        #: Open file that carries the flock; -1 once released.
        self._descriptor = -1
        #: True if LOCK was not there before.
        self.created = not path.exists()
        patience = time.monotonic() + patience_seconds
        while self._descriptor < 0:
            self._descriptor = self._try_lock(patience)
        _held.add(self)
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n"
        with contextlib.suppress(OSError):  # a full drive: the lock is held all the same, only who holds it is not told
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder, 0)

    def _try_lock(self, patience: float) -> int:
        """A locked descriptor of the file that is at the path now, or -1: try again.

        That is if the file was replaced meanwhile, or only probes hold it, until ``patience`` on the monotonic clock.
        """
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
            if _is_probed(descriptor) and time.monotonic() < patience:
                return -1
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

    @property
    def is_held(self) -> bool:
        """False once released, and in forked children."""
        return self._descriptor >= 0

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
    holder = probe(path)
    if holder is not None:
        raise StoreLockedError(_is_writing(path, holder))


def probe(path: Path) -> Holder | None:
    """Who holds the lock on ``path`` now; None if nobody does, as far as this machine can see. Changes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # no such file, or one that only taking the lock can judge
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _is_probed(descriptor: int) -> bool:
    """True if what keeps a writer out is no writer: a writer's lock would refuse a shared one too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _locked(path: Path, descriptor: int) -> StoreLockedError:
    return StoreLockedError(_is_writing(path, _holder(descriptor)))


def _is_writing(path: Path, holder: Holder) -> str:
    return f"{path.parent}: {holder} is writing to this store; wait for it to end, or stop it"


def _holder(descriptor: int) -> Holder:
    """Who wrote LOCK; the holder may be about to write it, then nobody is named."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(pid=int(holder["pid"]), host=str(holder["host"]))
    except (ValueError, KeyError, TypeError):
        return Holder(pid=None, host=None)


_held: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_close_all_in_child)
