"""Probing a store's lock: it says who holds it, and keeps no writer out. Refusals are in test_store_refusals."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from hoist.tiers import lock
from hoist.tiers.errors import StoreLockedError
from hoist.tiers.lock import Holder, StoreLock


def test_a_probe_says_who_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    assert lock.probe(path) is None
    assert not path.exists()
    held = StoreLock(path)
    assert lock.probe(path) == Holder(pid=os.getpid(), host=socket.gethostname())
    assert str(lock.probe(path)) == f"process {os.getpid()} on {socket.gethostname()}"
    path.write_bytes(b"{")
    assert lock.probe(path) == Holder(pid=None, host=None)
    assert str(lock.probe(path)) == "another process"
    held.release()
    assert lock.probe(path) is None


def test_probes_keep_no_writer_out(tmp_path: Path) -> None:
    """A reader that looks again and again, and a writer that takes the lock meanwhile and never waits for long."""
    path = tmp_path / "LOCK"
    path.touch()
    enough = threading.Event()
    probes = 0

    def look() -> None:
        nonlocal probes
        while not enough.is_set():
            lock.probe(path)
            probes += 1

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for _ in range(500):
            StoreLock(path).release()
    finally:
        enough.set()
        reader.join()
    assert probes > 0


def test_who_holds_a_shared_lock_for_long_is_no_probe(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(StoreLockedError, match=r"another process is writing to this store; wait for it to end"):
            StoreLock(path, patience_seconds=0.01)
    StoreLock(path).release()
