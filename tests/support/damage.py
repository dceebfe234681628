"""Files of a store, and what can befall them on a drive. What must be noticed then is for the tests to say."""

from __future__ import annotations

from pathlib import Path

from hoist.tiers import format as store_format
from hoist.tiers.format import StateArray
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store


def chunk_files(directory: Path, *, committed: bool) -> list[Path]:
    """Files of the committed, or of the other, slot of every chunk."""
    with DirectEngine(num_threads=1) as engine, Store.open(directory, engine=engine, writable=False) as store:
        assert store.record is not None
        return [
            directory / store_format.chunk_path(layout, array, slot if committed else 1 - slot, chunk)
            for layout, digits in zip(store.layouts, store.record.slots, strict=True)
            for chunk, slot in enumerate(map(int, digits))
            for array in StateArray
        ]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)


def shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
