"""`hoist snapshot` and `hoist restore`, and the snapshots that a run makes on its own (``--snapshot-every``).

What a snapshot is, and how it is made, is `hoist.tiers.snapshots`; here is when, how many, and beside what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from hoist.scheduler.trainer import Trainer
from hoist.tiers import snapshots
from hoist.tiers.errors import StoreLockedError, StoreRefusedError
from hoist.tiers.format import SCRATCH_DIRECTORY, SNAPSHOTS_DIRECTORY, CommitRecord
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.snapshots import SnapshotInfo, SnapshotMaker
from hoist.tiers.store import Store

Progress = Callable[[int, int], None]

#: What checking a snapshot beside a run may take of memory: the run's promise has room for it.
BACKGROUND_BUFFER_BYTES = 2**20


@contextmanager
def _unlocked() -> Iterator[None]:
    """Say of a store in which a run trains how that run makes snapshots."""
    try:
        yield
    except StoreLockedError as error:
        raise StoreLockedError(f"{error}; a run makes snapshots itself with hoist train --snapshot-every N") from error


def snapshot_store(
    directory: Path, name: str, *, engine: IoEngine, progress: Progress | None = None
) -> SnapshotInfo:
    """Keep the last commit of a store that nobody trains in. Leaves room for as much scratch as its last run had.

    Raises StoreLockedError, StoreRefusedError (name, space), CorruptChunkError, TransferError; then there is none.
    """
    snapshots.check_name(name)
    scratch_bytes = _scratch_bytes(directory)
    with _unlocked(), Store.open(directory, engine=engine) as store:
        return snapshots.take(store, name, engine=engine, leave_bytes=scratch_bytes, progress=progress)


def remove_snapshot(directory: Path, name: str, *, engine: IoEngine) -> None:
    """Remove a snapshot of a store that nobody trains in."""
    snapshots.check_name(name)
    with _unlocked(), Store.open(directory, engine=engine, check="nothing") as store:
        snapshots.remove(store, name, engine=engine)


def restore_store(
    directory: Path, name: str, *, engine: IoEngine, progress: Progress | None = None
) -> tuple[int, CommitRecord]:
    """Bring a store that nobody trains in back to a snapshot. Returns the step that it was at, and the record now."""
    snapshots.find(directory, name)
    with Store.open(directory, engine=engine, check="nothing") as store:
        before = store.record
        return (0 if before is None else before.step), snapshots.restore(store, name, engine=engine, progress=progress)


def _scratch_bytes(directory: Path) -> int:
    """What the scratch files that the last run has left take; the next run will want as much."""
    scratch = directory / SCRATCH_DIRECTORY
    return sum(path.stat().st_blocks * 512 for path in scratch.iterdir() if path.is_file()) if scratch.is_dir() else 0


def automatic_name(step: int) -> str:
    """What a run calls the snapshot of a step."""
    return f"step-{step:06d}"


def check_space_for_run(
    directory: Path, *, every: int, keep: int, step: int, steps: int, bytes_each: int, leave_bytes: int
) -> None:
    """Raise StoreRefusedError if the snapshots of a run from ``step`` to ``steps`` do not fit beside its scratch.

    ``bytes_each``: what one takes at most. With ``keep``, one more than that is there for a moment.
    """
    needed = num_made(every=every, step=step, steps=steps)
    if keep:
        found, _ = snapshots.list_snapshots(directory)
        needed = min(needed, max(1, keep + 1 - sum(info.automatic for info in found)))
    if needed:
        place = directory if directory.exists() else directory.parent
        plural = "s" * (needed != 1)
        what = f"--snapshot-every {every}: {needed} snapshot{plural} of {bytes_each} bytes at a time"
        snapshots.check_free(place, needed * bytes_each, leave_bytes=leave_bytes, what=f"{what}{'' if keep else _KEEP}")


_KEEP = " (fewer with --keep-snapshots)"


def num_made(*, every: int, step: int, steps: int) -> int:
    """How many snapshots a run from ``step`` to ``steps`` makes."""
    return max(0, steps // every - step // every) if every else 0


class AutomaticSnapshots:
    """Makes a run's snapshots. Close it before trainer and store; use it as a context manager.

    A snapshot is begun right after a commit, which takes moments, and checked by a thread while training goes on: its
    files are not written to any more. Only when all is well does it get its name, and are older ones removed.
    """

    def __init__(
        self, store: Store, *, every: int, keep: int, notice: Callable[[str], None]
    ) -> None:
        """``every``: steps, 0 for none. ``keep``: automatic snapshots, 0 for all. ``notice`` gets lines for people."""
        self._store = store
        self._every = every
        self._keep = keep
        self._notice = notice
        self._thread: threading.Thread | None = None
        #: What the thread ended with; read once it has.
        self._failure: BaseException | None = None

    def after_step(self, trainer: Trainer) -> None:
        """A step has ended: make a snapshot if one is due, and raise what went wrong with the one before.

        A full drive is told and does not end the run; a bad chunk (CorruptChunkError) and a failing drive do.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        step = trainer.step_number
        if not self._every or step % self._every:
            return
        self.wait()
        trainer.commit()
        try:
            maker = SnapshotMaker(self._store, self._free_name(step), automatic=True)
            # An engine of its own: what it reads is no traffic of the steps.
            engine = DirectEngine(num_threads=2)
            try:
                maker.begin(engine, buffer_bytes=BACKGROUND_BUFFER_BYTES)
            except BaseException:
                engine.close()
                raise
        except StoreRefusedError as error:
            self._notice(f"no snapshot of step {step} was made: {error}")
            return
        self._thread = threading.Thread(target=self._finish, args=(maker, engine), name="hoist-snapshot", daemon=True)
        self._thread.start()

    def _free_name(self, step: int) -> str:
        """The step's name; after a restore the run may come to a step again, whose earlier snapshot stays."""
        name, number = automatic_name(step), 1
        while (self._store.directory / SNAPSHOTS_DIRECTORY / name).exists():
            number += 1
            name = f"{automatic_name(step)}-{number}"
        return name

    def _finish(self, maker: SnapshotMaker, engine: IoEngine) -> None:
        try:
            with engine:
                maker.finish(engine, buffer_bytes=BACKGROUND_BUFFER_BYTES)
                self._rotate(engine)
        except BaseException as error:
            self._failure = error

    def _rotate(self, engine: IoEngine) -> None:
        """Remove the oldest automatic snapshots beyond those to keep."""
        if not self._keep:
            return
        found, _ = snapshots.list_snapshots(self._store.directory)
        automatic = [info for info in found if info.automatic]
        for info in automatic[: -self._keep]:
            snapshots.remove(self._store, info.name, engine=engine)

    def wait(self) -> None:
        """Wait for the snapshot that is being made. Raises what went wrong with it, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait; raise what went wrong unless another error is on its way."""
        try:
            self.wait()
        except Exception:
            if error is None:  # else its cause may well be the same, and it says more
                raise
