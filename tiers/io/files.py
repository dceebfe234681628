"""A bounded cache of open files, shared by the engines. What an open file is (descriptors, a CuFile) is theirs to say.

Nothing here reads or writes. One handle serves a path; the least recently used idle one is closed when there are too
many, so a store of 100,000 chunk files needs no more descriptors than one of 500.
"""

from __future__ import annotations

import errno
import logging
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)

#: Descriptors left to the rest of the process.
_SPARE_DESCRIPTORS = 128


class Handle(Protocol):
    """An open file of an engine."""

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing too."""

    def close(self) -> None:
        """Close it; called once, by the cache, when no lease is left."""


H = TypeVar("H", bound=Handle)


@dataclass(kw_only=True, slots=True)
class _Entry(Generic[H]):
    handle: H
    #: Leases that are open. Guarded by the cache's lock.
    users: int = 0
    #: No longer in the table; the last lease closes the handle.
    retired: bool = False


def descriptor_capacity(wanted: int, *, descriptors_each: int) -> int:
    """How many handles of ``descriptors_each`` descriptors may stay open, at most ``wanted`` and at least 1.

    Raises the process's soft limit towards the hard one where that is needed, never further than needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted * descriptors_each + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < need:
        raised = need if hard == resource.RLIM_INFINITY else min(need, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        spare = min(_SPARE_DESCRIPTORS, soft // 2)
        wanted = min(wanted, (soft - spare) // descriptors_each)
    return max(1, wanted)


class HandleCache(Generic[H]):
    """Open handles by path. Safe to call from several threads.

    ``open_handle(path, writable)`` opens one; it runs under the cache's lock, so a path is never opened twice at once.
    More than ``capacity`` handles are open only while more than that are leased.
    """

    def __init__(self, *, open_handle: Callable[[str, bool], H], capacity: int) -> None:
        self._open_handle = open_handle
        self._capacity = capacity
        self._lock = threading.Lock()
        #: Least recently used first.
        self._entries: OrderedDict[str, _Entry[H]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def lease(self, path: str, *, writable: bool) -> Iterator[H]:
        """The handle of ``path``, open while the block runs. A read-only handle is replaced when a write wants it.

        Raises what opening raises; the cache is then as before.
        """
        with self._lock:
            entry, doomed = self._enter(path, writable)
        _close_all(doomed)
        try:
            yield entry.handle
        finally:
            with self._lock:
                entry.users -= 1
                # Asked first: shrinking may retire, and so close, this very entry.
                doomed = [entry.handle] if entry.retired and not entry.users else []
                doomed += self._shrink()
            _close_all(doomed)

    def forget(self, path: str) -> None:
        """Close the handle of ``path``, at once or when its last lease ends."""
        with self._lock:
            doomed = self._retire(path)
        _close_all(doomed)

    def close(self) -> None:
        """Close everything; leased handles when their lease ends."""
        with self._lock:
            doomed = [handle for path in list(self._entries) for handle in self._retire(path)]
        _close_all(doomed)

    def _enter(self, path: str, writable: bool) -> tuple[_Entry[H], list[H]]:
        doomed: list[H] = []
        entry = self._entries.get(path)
        if entry is None or (writable and not entry.handle.writable):
            fresh = _Entry(handle=self._open(path, writable))
            doomed += self._retire(path)
            self._entries[path] = entry = fresh
        else:
            self._entries.move_to_end(path)
        entry.users += 1
        return entry, doomed + self._shrink()

    def _open(self, path: str, writable: bool) -> H:
        try:
            return self._open_handle(path, writable)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        # The rest of the process uses more descriptors than we left it: give back what is idle, then try once more.
        _close_all(self._shrink(capacity=0))
        return self._open_handle(path, writable)

    def _retire(self, path: str) -> list[H]:
        entry = self._entries.pop(path, None)
        if entry is None:
            return []
        entry.retired = True
        return [] if entry.users else [entry.handle]

    def _shrink(self, capacity: int | None = None) -> list[H]:
        surplus = len(self._entries) - (self._capacity if capacity is None else capacity)
        if surplus <= 0:
            return []
        idle = [path for path, entry in self._entries.items() if not entry.users]
        return [handle for path in idle[:surplus] for handle in self._retire(path)]


def _close_all(handles: Iterable[Handle]) -> None:
    for handle in handles:
        try:
            handle.close()
        except OSError as error:
            # Durability is flush's promise, and it has reported what it saw; whoever evicts is not to blame for this.
            _log.warning("closing a cached file failed: %s", error)
