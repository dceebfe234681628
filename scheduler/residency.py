"""What is worth keeping in host memory from step to step: candidates, each with what it takes and what it saves.

Pure arithmetic on a plan's ops. How many of them fit is `memory.py`'s business; what is kept there, `places.py`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hoist.scheduler.ops import Kind
from hoist.scheduler.plan_records import FROZEN_PIECE, Plan, StageShape

#: Bytes of an element's two weight halves on NVMe.
WEIGHT_BYTES = 4
#: Bytes of an element's two moments.
MOMENT_BYTES = 8


class Keep(Enum):
    """What can be kept."""

    WEIGHTS = "weights"
    """Both halves of a chunk's weights: read for every visit of a stage that uses them, and for updates that come too
    late to find them in its buffer; written by updates."""
    MOMENTS = "moments"
    """A chunk's two moments: read and written once a step. Only where the weights are kept too."""
    FROZEN = "frozen"
    """A stage's frozen tensors: read for every visit, never written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One thing that may be kept."""

    keep: Keep
    stage: int
    chunk: int
    """:data:`FROZEN_PIECE` for frozen tensors."""
    num_bytes: int
    """Host memory that it takes."""
    saved_bytes: int
    """NVMe traffic that it saves in a step between commits, reads and writes together."""

    @property
    def value(self) -> float:
        """Bytes saved a step for each byte kept."""
        return self.saved_bytes / self.num_bytes


def candidates(
    plan: Plan, shapes: Sequence[StageShape], chunk_elements: Sequence[Sequence[int]], frozen_bytes: Sequence[int]
) -> tuple[Candidate, ...]:
    """Everything that a run could keep, the best first; weights before the moments of the same chunk.

    ``plan`` is a steady step in which nothing is kept; ``chunk_elements`` are the elements in use of each stage's
    chunks. Among equals the chunks of all stages take turns, so that what is left to be read and written is spread
    over the step and hides behind all of it; a stage's last chunks come first, those that a delay takes first.
    """
    loads: defaultdict[tuple[int, int], float] = defaultdict(float)
    for op in plan.ops:
        if op.kind is Kind.READ_STATES and not op.loaded and not op.redo:
            loads[op.stage, shapes[op.stage].chunks[op.piece]] += 1
        elif op.kind is Kind.READ_WEIGHTS:
            # Without a slot it is the first half of each weight that is read.
            loads[op.owner, shapes[op.owner].chunks[op.piece]] += 0.5 if op.slot < 0 else 1
        elif op.kind is Kind.READ_FROZEN:
            loads[op.stage, FROZEN_PIECE] += 1
    found: list[Candidate] = []
    for stage, shape in enumerate(shapes):
        for chunk, elements in enumerate(chunk_elements[stage]):
            # All pieces of a chunk are nearly always read equally often; a borrower may need only some.
            reads = loads[stage, chunk] / shape.chunks.count(chunk)
            for keep, num_bytes, moved in (
                (Keep.WEIGHTS, WEIGHT_BYTES * elements, reads + 1),
                (Keep.MOMENTS, MOMENT_BYTES * elements, 2.0),
            ):
                saved_bytes = int(num_bytes * moved)
                found.append(
                    Candidate(keep=keep, stage=stage, chunk=chunk, num_bytes=num_bytes, saved_bytes=saved_bytes)
                )
        if frozen_bytes[stage]:
            num_bytes = frozen_bytes[stage]
            saved_bytes = int(num_bytes * loads[stage, FROZEN_PIECE])
            found.append(
                Candidate(
                    keep=Keep.FROZEN, stage=stage, chunk=FROZEN_PIECE, num_bytes=num_bytes, saved_bytes=saved_bytes
                )
            )
    order = list(Keep)

    def rank(candidate: Candidate) -> tuple[float, int, float, int]:
        num_chunks = len(chunk_elements[candidate.stage])
        share_behind = (num_chunks - candidate.chunk) / max(num_chunks, 1)
        return -candidate.value, order.index(candidate.keep), share_behind, candidate.stage

    return tuple(sorted(found, key=rank))


def pinned_first(found: Sequence[Candidate]) -> tuple[tuple[Candidate, ...], int]:
    """The candidates with all trained states first, each group as it was, and how many those are."""
    trained = [candidate for candidate in found if candidate.keep is not Keep.FROZEN]
    return (*trained, *(candidate for candidate in found if candidate.keep is Keep.FROZEN)), len(trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What a run keeps, as its plans and buffers need it."""

    weights: tuple[frozenset[int], ...]
    """Per stage, the chunks whose weights are kept."""
    moments: tuple[frozenset[int], ...]
    """Per stage, those whose moments are kept too."""
    frozen: frozenset[int]
    """Stages whose frozen tensors are kept."""

    @property
    def is_dirty_between_commits(self) -> bool:
        """Some of it changes in memory alone, until a commit writes it."""
        return any(self.weights)


def kept_of(chosen: Sequence[Candidate], num_stages: int) -> Kept:
    """The chosen candidates, sorted by kind and stage."""

    chunks: dict[tuple[Keep, int], set[int]] = {}
    for each in chosen:
        chunks.setdefault((each.keep, each.stage), set()).add(each.chunk)
    stages = range(num_stages)
    return Kept(
        weights=tuple(frozenset(chunks.get((Keep.WEIGHTS, stage), ())) for stage in stages),
        moments=tuple(frozenset(chunks.get((Keep.MOMENTS, stage), ())) for stage in stages),
        frozen=frozenset(stage for stage in stages if (Keep.FROZEN, stage) in chunks),
    )
