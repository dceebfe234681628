"""An engine around an engine that tells a store's ledger what passes to and from the store's drives. Moves no bytes.

What is counted where is `tiers/wear.py`'s business; the contract is in `base.py`.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import torch

from hoist.tiers.io.base import IoEngine, IoStatistics


class Ledger(Protocol):
    """What is told of each transfer."""

    def note(self, path: str, *, written_bytes: int = 0, read_bytes: int = 0) -> None:
        """Bytes are moved to or from a file."""


class CountedEngine(IoEngine):
    """Passes everything on. A transfer counts when it is asked for: one that fails may have been made in part.

    :meth:`close` leaves the engine inside open: it is its owner's.
    """

    def __init__(self, inner: IoEngine, ledger: Ledger) -> None:
        self.inner = inner
        self._ledger = ledger
        self.name = inner.name
        self.part_bytes = inner.part_bytes
        self.parts_at_once = inner.parts_at_once
        self.takes_device_memory = inner.takes_device_memory

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        # Before it is asked for: whoever waits for it finds it counted.
        self._ledger.note(str(path), read_bytes=buffer.nbytes)
        return self.inner.read(path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        self._ledger.note(str(path), written_bytes=buffer.nbytes)
        return self.inner.write(path, offset, buffer)

    def flush(self, path: Path) -> Future[None]:
        return self.inner.flush(path)

    def forget(self, path: Path) -> None:
        self.inner.forget(path)

    def describe(self) -> str:
        return self.inner.describe()

    def describe_device_path(self) -> str:
        return self.inner.describe_device_path()

    def statistics(self) -> IoStatistics:
        return self.inner.statistics()

    def close(self) -> None:
        """Nothing: see the class."""
