"""Kills this process at a named instant of a training run or of a store's creation, as nothing in it can prevent.

For processes of their own (`processes.py`). What must hold afterwards is for the tests to say.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from hoist.scheduler.executor import Mark
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.trainer import Trainer
from hoist.tiers.format import COMMIT_NAME, COMMIT_TEMPORARY_NAME, CRC_DIRECTORY, METADATA_NAME, SCRATCH_DIRECTORY
from hoist.tiers.io.base import IoEngine
from tests.support.engines import WrapperEngine
from tests.support.watch import Act, Seen

#: Instants of a commit, in their order.
COMMIT_MOMENTS = (
    "before a flush",
    "after a flush",
    "CRC file: between its bytes and its fsync",
    "CRC file: between its fsync and its directory's",
    "COMMIT.json.tmp: between its bytes and its fsync",
    "COMMIT.json: between fsync and rename",
    "COMMIT.json: between rename and the directory's fsync",
    "before the old CRC file goes",
)
#: Instants of a step.
STEP_MOMENTS = (
    "inside a chunk's write",
    "between a chunk's bytes and its fsync",
    "before a read",
    "forward",
    "loss",
    "backward",
    "update in the backward",
    "delayed update",
    "inside a write to scratch",
)
#: Instants of a creation, besides those of its commit.
CREATION_MOMENTS = (
    "before anything is made",
    "zarr.json: between its bytes and its fsync",
    "a stage's directory",
    "reserving a chunk file",
    "before all is synced",
    "inside a chunk's write",
    "between a chunk's bytes and its fsync",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The ``occurrence``-th time that a moment comes, from 1; 0: never."""

    moment: str
    occurrence: int


class Deadline:
    """Counts moments, and ends the process at one of them."""

    def __init__(self, death: Death) -> None:
        self._death = death
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def tick(self, moment: str) -> None:
        """A moment has come."""
        if self.count(moment):
            self.die()

    def count(self, moment: str) -> bool:
        """The same, but the caller calls :meth:`die` if it is True."""
        with self._lock:
            self.counts[moment] += 1
            return moment == self._death.moment and self.counts[moment] == self._death.occurrence

    @staticmethod
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class TickingEngine(WrapperEngine):
    """Requests are moments; a write in whose middle the process dies has written half of its bytes."""

    name = "ticking"

    def __init__(self, inner: IoEngine, deadline: Deadline) -> None:
        super().__init__(inner)
        self._deadline = deadline

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        self._deadline.tick("before a read")
        return super().read(path, offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        scratch = path.parent.name == SCRATCH_DIRECTORY
        if self._deadline.count("inside a write to scratch" if scratch else "inside a chunk's write"):
            half = buffer.numel() // 2 // 4096 * 4096
            if half:
                self.inner.write(path, offset, buffer[:half]).result()
            self._deadline.die()
        future = super().write(path, offset, buffer)
        if not scratch:
            future.add_done_callback(lambda _: self._deadline.tick("between a chunk's bytes and its fsync"))
        return future

    def flush(self, path: Path) -> Future[None]:
        self._deadline.tick("before a flush")
        future = super().flush(path)
        future.add_done_callback(lambda _: self._deadline.tick("after a flush"))
        return future


class TickingRuntime(Runtime):
    """Ops are moments."""

    deadline: ClassVar[Deadline]

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        match op.kind:
            case Kind.FORWARD | Kind.LOSS | Kind.BACKWARD:
                self.deadline.tick(op.kind.name.lower())
            case Kind.DOWNLOAD | Kind.REFRESH:  # of a separate device
                self.deadline.tick(op.kind.name.lower())
            case Kind.UPDATE:
                self.deadline.tick("delayed update" if op.delayed else "update in the backward")
        return super().run(op, step, after)


class TickingTrainer(Trainer):
    runtime_kind = TickingRuntime


class Watcher:
    """What happens to names and small files below the store's directory are moments."""

    def __init__(self, directory: Path, deadline: Deadline) -> None:
        self._directory = directory
        self._deadline = deadline

    def seen(self, seen: Seen) -> None:
        """For :func:`tests.support.watch.watching`."""
        moment = self._moment(seen)
        if moment is not None:
            self._deadline.tick(moment)

    def _is_renamed(self) -> bool:
        """A commit's fsync of the directory comes next; that of wear.json at the end is another."""
        counts = self._deadline.counts
        renamed = counts["COMMIT.json: between fsync and rename"]
        return renamed > counts["COMMIT.json: between rename and the directory's fsync"]

    def _moment(self, seen: Seen) -> str | None:
        own, name = self._directory, seen.path.name
        crc = own / CRC_DIRECTORY
        match seen.act:
            case Act.SYNC if seen.path.parent == crc:
                return "CRC file: between its bytes and its fsync"
            case Act.SYNC if seen.path == crc:
                return "CRC file: between its fsync and its directory's"
            case Act.SYNC if name == COMMIT_TEMPORARY_NAME:
                return "COMMIT.json.tmp: between its bytes and its fsync"
            case Act.RENAME if seen.target == own / COMMIT_NAME:
                return "COMMIT.json: between fsync and rename"
            case Act.SYNC if seen.path == own and self._is_renamed():
                return "COMMIT.json: between rename and the directory's fsync"
            case Act.REMOVE if seen.path.parent == crc:
                return "before the old CRC file goes"
            case Act.MAKE_DIRECTORY if seen.path == own:
                return "before anything is made"
            case Act.SYNC if seen.path == own / METADATA_NAME:
                return "zarr.json: between its bytes and its fsync"
            case Act.MAKE_DIRECTORY if name.startswith("001-"):
                return "a stage's directory"
            case Act.CREATE if seen.path.parent.parent.name == "c" and not seen.path.exists():
                return "reserving a chunk file"
            case Act.SYNC_ALL:
                return "before all is synced"
        return None


def ticking(root: Path, death: Death) -> tuple[Deadline, Watcher]:
    """A deadline, and what watches the store that is or will be at ``root``; the ops of trainers tick it too."""
    deadline = TickingRuntime.deadline = Deadline(death)
    return deadline, Watcher(root, deadline)
