"""Checks what a step reads from the store against the checksums of what was written there (`--verify always`).

Reads come in pieces, on any thread and in any order; checksums are of whole chunks. What happens at a mismatch is the
executor's business: nothing of the step is committed after an op has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hoist.tiers import checksum
from hoist.tiers.device import Device, copying
from hoist.tiers.errors import CorruptChunkError
from hoist.tiers.format import FROZEN_NAME, StateArray
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, Piece, round_up
from hoist.tiers.store import Store

#: What was read to a device comes back in blocks of so many bytes.
_BLOCK_BYTES = 2**20


class ReadCheck:
    """Checksums of a store's pieces as they are read for updates. Safe to call from several threads.

    The pieces of a chunk are read once for its update (weights too: plans are then made with ``rereads_weights``), all
    of them before the last of them is updated, and a chunk becomes a newer version only when all have been written: so
    at its last piece the checksum to compare with is still that of what was read.
    """

    def __init__(self, store: Store, device: Device) -> None:
        """``device``: where frozen tensors may be read to."""
        self._store = store
        self._device = device
        self._lock = threading.Lock()
        #: Held while a copy is put into the device's stream for this: one thread at a time may.
        self._putting = threading.Lock()
        #: By step, stage, chunk and array: per piece read so far, its first element, its length and its checksum.
        self._seen: dict[tuple[int, int, int, StateArray], list[tuple[int, int, int]]] = {}

    def piece(
        self, step: int, stage: int, piece: Piece, arrays: Mapping[StateArray, Tensor], *, again: bool = False
    ) -> None:
        """A piece was read in ``step``: its bytes (uint8) in some of the chunk's arrays.

        ``again``: of the version before the newest, to make that another time.

        Raises CorruptChunkError, at an array's last piece of the chunk, if what was read is not what was written.
        """
        layout = self._store.layouts[stage]
        first = piece.chunk * layout.chunk_elements
        used = min(layout.chunk_elements, round_up(layout.num_elements, CHUNK_QUANTUM_ELEMENTS) - first)
        for array, data in arrays.items():
            key = step, stage, piece.chunk, array
            part = piece.start, piece.num_elements, checksum.extend(0, data)
            with self._lock:
                seen = self._seen.setdefault(key, [])
                seen.append(part)
                if sum(count for _, count, _ in seen) < used:
                    continue
                del self._seen[key]
            found = 0
            for _, count, crc32c in sorted(seen):
                found = checksum.combine(found, crc32c, count * array.itemsize)
            found = checksum.extend_zeros(found, (layout.chunk_elements - used) * array.itemsize)
            expected = self._store.checksum(stage, array, piece.chunk, again=again)
            if found != expected:
                names = [segment.name for segment in layout.segments(first, first + layout.chunk_elements)]
                path = self._store.place(stage, array, piece, write=False, again=again).path
                place = f"array {array.value}, chunk {piece.chunk}, file {path}"
                raise self._error(step, stage, place, names, expected, found)

    def frozen(self, stage: int, data: Tensor) -> None:
        """The stage's frozen array was read (uint8), to host memory or to the device's.

        Waits for copies of what is on the device; a block of 1 MiB at a time is in host memory. Raises
        CorruptChunkError if it is not what was written, DeviceError if it cannot be copied.
        """
        found, expected = 0, self._store.frozen_checksum(stage)
        for block in self._on_host(data):
            found = checksum.extend(found, block)
        if found != expected:
            names = [placed.spec.name for placed in self._store.layouts[stage].frozen]
            place = f"array {FROZEN_NAME}, file {self._store.frozen_place(stage).path}"
            raise self._error(None, stage, place, names, expected, found)

    def _on_host(self, data: Tensor) -> Iterator[Tensor]:
        """The bytes in host memory, one after another."""
        if not self._device.owns(data):
            yield data
            return
        block = torch.empty(min(_BLOCK_BYTES, data.numel()), dtype=torch.uint8)
        for part in data.split(_BLOCK_BYTES):
            # In a stream of its own: none of those that steps use waits for this.
            with self._putting:
                mark = self._device.stream("check").put(copying(block[: part.numel()], part))
            mark.wait()
            yield block[: part.numel()]

    def end(self, step: int) -> None:
        """Forget what a step, whose ops have all ended, has left: chunks of which it did not read every piece."""
        with self._lock:
            for key in [key for key in self._seen if key[0] == step]:
                del self._seen[key]

    def _error(
        self, step: int | None, stage: int, place: str, names: Sequence[str], expected: int, found: int
    ) -> CorruptChunkError:
        when = "" if step is None else f"step {step}, "
        record = self._store.record
        kept = 0 if record is None else record.step
        return CorruptChunkError(
            f"{when}stage {self._store.layouts[stage].name!r}, {place} (tensors {', '.join(names)}): checksum: written "
            f"{expected:08x}, read {found:08x}; nothing made of it is committed, the store keeps step {kept}: look at "
            "the drive, then run hoist verify, or restore a snapshot"
        )
