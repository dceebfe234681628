"""A small store for tests: two stages, several chunks, padding, frozen tensors, and ways to fill and read it.

Every value of a chunk follows from a seed, so that a reader can tell which version it got. Not a test itself.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hoist.tiers import checksum
from hoist.tiers.checksum import ChunkChecksum
from hoist.tiers.format import StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.layout import StageLayout, TensorSpec, lay_out
from hoist.tiers.store import Store

#: Smaller than a chunk: pieces matter.
PIECE_ELEMENTS = 4096
#: Longer than a file name may be, not ASCII, with slashes and quotes, and a character that UTF-8 cannot hold.
HARD_NAME = "größe/" * 60 + '"\\層\n\ud800'


def aligned(num_bytes: int) -> torch.Tensor:
    """A page-aligned uint8 tensor of zeros, as direct I/O wants it."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def small_layouts() -> tuple[StageLayout, ...]:
    """Stage 0: two chunks of 8192 elements, the second short, and a frozen tensor; 1: one chunk; 2: frozen only."""
    embed = [
        TensorSpec(name=HARD_NAME, shape=(100, 101), trainable=True),
        TensorSpec(name="scalar", shape=(), trainable=True),
        TensorSpec(name="empty", shape=(0, 5), trainable=True),
        TensorSpec(name="router.bias", shape=(7,), trainable=False, dtype="int64"),
    ]
    return (
        lay_out(index=0, name="embed", tensors=embed, max_chunk_elements=8192),
        lay_out(index=1, name="layer.0", tensors=[TensorSpec(name="w", shape=(64, 3), trainable=True)]),
        lay_out(index=2, name="head", tensors=[TensorSpec(name="f", shape=(9,), trainable=False, dtype="bfloat16")]),
    )


def content(seed: int, stage: int, array: StateArray, start_byte: int, num_bytes: int) -> torch.Tensor:
    """The bytes that version ``seed`` of an array has at a place of the stage array; seed 0 is all zeros."""
    if seed == 0:
        return aligned(num_bytes)
    key = hashlib.sha256(f"{seed}/{stage}/{array.value}/{start_byte}".encode()).digest()
    data = aligned(num_bytes)
    data.numpy()[:] = np.resize(np.frombuffer(key, dtype=np.uint8), num_bytes)
    return data


def write_pieces(store: Store, engine: IoEngine, stage: int, chunk: int, seed: int) -> dict[StateArray, int]:
    """Write every piece of the chunk, without noting it. Returns the checksums of the chunk."""
    layout = store.layouts[stage]
    sums = ChunkChecksum(layout, chunk)
    for piece in layout.pieces(PIECE_ELEMENTS):
        if piece.chunk == chunk:
            for array in StateArray:
                place = store.place(stage, array, piece, write=True)
                data = content(seed, stage, array, piece.start * array.itemsize, place.num_bytes)
                engine.write(place.path, place.offset_bytes, data).result()
                sums.extend(array, data)
    return sums.finish()


def write_chunk(store: Store, engine: IoEngine, stage: int, chunk: int, seed: int) -> None:
    """Write version ``seed`` of a chunk and note it."""
    store.note_written(stage, chunk, write_pieces(store, engine, stage, chunk, seed))


def write_frozen(store: Store, engine: IoEngine, stage: int) -> None:
    """Fill the stage's frozen array with a pattern and note it."""
    place = store.frozen_place(stage)
    data = aligned(place.num_bytes)
    data.numpy()[:] = np.arange(place.num_bytes, dtype=np.int64) % 251
    engine.write(place.path, place.offset_bytes, data).result()
    store.note_frozen(stage, checksum.extend(0, data))


def fill(store: Store, engine: IoEngine, seed: int) -> None:
    """Write every chunk (version ``seed``) and, before the first commit, every frozen array."""
    for layout in store.layouts:
        for chunk in range(layout.num_chunks):
            write_chunk(store, engine, layout.index, chunk, seed)
        if layout.frozen_bytes and store.record is None:
            write_frozen(store, engine, layout.index)


def read_version(store: Store, engine: IoEngine, stage: int, chunk: int, seeds: range) -> int:
    """Which of ``seeds`` the whole chunk holds, as the store tells a reader to read it. AssertionError if none does."""
    layout = store.layouts[stage]
    matching = set(seeds)
    for piece in layout.pieces(PIECE_ELEMENTS):
        if piece.chunk == chunk:
            for array in StateArray:
                place = store.place(stage, array, piece, write=False)
                data = aligned(place.num_bytes)
                engine.read(place.path, place.offset_bytes, data).result()
                start = piece.start * array.itemsize
                matching = {
                    seed for seed in matching if torch.equal(data, content(seed, stage, array, start, place.num_bytes))
                }
    assert len(matching) == 1, f"stage {stage} chunk {chunk}: torn, or none of {seeds}"
    return matching.pop()


def create(directory: Path, engine: IoEngine, *, kind: type[Store] = Store, **options: Any) -> Store:
    """A new small store; nothing committed."""
    options.setdefault("attributes", {"model_config": {"hidden": 64}})
    return kind.create(directory, layouts=small_layouts(), engine=engine, **options)


def commit(store: Store, step: int, run: Mapping[str, Any] | None = None) -> None:
    """A commit with an Adam count for the tensor that has the hard name."""
    store.commit(step=step, adam_steps={HARD_NAME: step, "w": step}, run=run or {"lr": 1e-4})


@contextmanager
def committed(directory: Path, engine: IoEngine, seed: int = 1, kind: type[Store] = Store) -> Iterator[Store]:
    """A small store with version ``seed`` committed as step 0."""
    with create(directory, engine, kind=kind) as store:
        fill(store, engine, seed)
        commit(store, 0)
        yield store


def direct_engine() -> DirectEngine:
    """An engine small enough for a test."""
    return DirectEngine(num_threads=2)
