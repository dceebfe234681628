"""`hoist verify`: re-reads everything that a store's last commit names and says of each bad chunk what is lost.

Reading and comparing is `hoist.tiers.verify`'s; what `hoist train` checks, and when, is its ``--verify``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hoist.tiers.errors import CorruptChunkError
from hoist.tiers.format import FROZEN_NAME
from hoist.tiers.inventory import BadChunk, StoredChunk
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import StageLayout
from hoist.tiers.store import Store
from hoist.tiers.verify import check_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class BadFile:
    """A chunk that is not as it was committed, for people and machines."""

    stage: str
    array: str
    chunk: int
    slot: int
    file: str
    reason: str
    tensors: tuple[str, ...]
    """Tensors that have elements in it."""

    def __str__(self) -> str:
        tensors = ", ".join(name if name.isprintable() else ascii(name) for name in self.tensors) or "none"
        return (
            f"stage {self.stage}, array {self.array}, chunk {self.chunk}, slot {self.slot}: {self.reason}; "
            f"file {self.file}; tensors: {tensors}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a verification found."""

    store: str
    step: int
    """Of the commit that was read last; a run may have committed meanwhile."""
    generation: int
    num_files: int
    """Chunk files that were looked at."""
    num_bytes: int
    """Their bytes."""
    seconds: float
    bad: tuple[BadFile, ...]

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {"ok": not self.bad, **asdict(self)}


def verify_store(
    directory: Path, *, engine: IoEngine, progress: Callable[[int, int], None] | None = None
) -> Verdict:
    """Check every committed chunk, and before it the metadata, the commit record and the checksum file.

    Changes nothing and takes no lock, so a run may train in the store: where it has committed meanwhile, what does not
    fit the former commit is looked at again as the new one has it. ``progress`` gets done and total bytes; what it
    raises ends the work. Raises StoreRefusedError (no store there) and StoreFormatError (metadata, COMMIT.json, the
    CRC file, one line that names it).
    """
    started = time.perf_counter()
    bad: list[BadFile] = []
    verified: set[tuple[str, str, int]] = set()
    done = total = num_files = 0

    def report(part: int, _: int) -> None:
        if progress is not None:
            progress(min(done + part, total), total)

    while True:
        with Store.open(directory, engine=engine, writable=False, check="nothing") as store:
            record = store.record
            assert record is not None  # a store opens at a commit
            every = store.committed_chunks()
            total, num_files = sum(chunk.num_bytes for chunk in every), len(every)
            rest = [chunk for chunk in every if _key(chunk) not in verified]
            done = total - sum(chunk.num_bytes for chunk in rest)
            if _verify_rest(store, rest, engine, verified, bad, report):
                break
            # What did not fit a commit that is the store's no more may have been written again since.
            verified -= {(each.stage, each.array, each.chunk) for each in bad}
            bad.clear()
    return Verdict(
        store=str(directory),
        step=record.step,
        generation=record.generation,
        num_files=num_files,
        num_bytes=total,
        seconds=time.perf_counter() - started,
        bad=tuple(bad),
    )


def _verify_rest(
    store: Store,
    rest: list[StoredChunk],
    engine: IoEngine,
    verified: set[tuple[str, str, int]],
    bad: list[BadFile],
    progress: Callable[[int, int], None],
) -> bool:
    """Look at ``rest`` until the end (True), or until one does not fit and the commit is the store's no more."""
    layouts = {layout.name: layout for layout in store.layouts}
    for chunk, wrong in check_chunks(rest, engine, progress=progress):
        if wrong is not None:
            if not store.is_current():
                return False
            bad.append(_described(wrong, layouts[chunk.stage]))
        verified.add(_key(chunk))
    return True


def raise_if_bad(verdict: Verdict) -> None:
    """Raise CorruptChunkError, in one line, if a chunk is bad."""
    if verdict.bad:
        raise CorruptChunkError(
            f"{verdict.store}: {len(verdict.bad)} of {verdict.num_files} chunk files are not as they were committed at "
            f"step {verdict.step}; bring the store back to a snapshot with hoist restore, if it has one "
            f"(hoist snapshot {verdict.store} --list)"
        )


def _key(chunk: StoredChunk) -> tuple[str, str, int]:
    return chunk.stage, chunk.array, chunk.chunk


def _described(bad: BadChunk, layout: StageLayout) -> BadFile:
    chunk = bad.chunk
    if chunk.array == FROZEN_NAME:
        tensors = tuple(placed.spec.name for placed in layout.frozen)
    else:
        first = chunk.chunk * layout.chunk_elements
        tensors = tuple(segment.name for segment in layout.segments(first, first + layout.chunk_elements))
    return BadFile(
        stage=chunk.stage,
        array=chunk.array,
        chunk=chunk.chunk,
        slot=chunk.slot,
        file=str(chunk.path),
        reason=bad.reason,
        tensors=tensors,
    )
