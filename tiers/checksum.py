"""CRC32C of chunks, extended piece by piece, with a fast way over runs of zeros. Touches no files.

Which chunk has which checksum, and when it counts as committed, is `store.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import numpy.typing as npt

from hoist.tiers.format import StateArray
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, StageLayout, round_up

if TYPE_CHECKING:  # who only looks at a store does without the second that torch takes
    import torch

    Bytes = torch.Tensor | npt.NDArray[np.uint8]

#: Most bytes per call into google_crc32c, which holds the GIL (1 MiB is about 0.1 ms).
CALL_BYTES = 1 << 20

#: The Castagnoli polynomial, bit-reversed (the lowest bit is the coefficient of x^31).
_POLYNOMIAL = 0x82F63B78
_ONE = 0x80000000  # x^0 in the reversed notation
_X_TO_8 = 0x00800000


def extend(checksum: int, data: Bytes) -> int:
    """The CRC32C of what ``checksum`` covers followed by ``data`` (1-D contiguous uint8). Start with 0."""
    array = data if isinstance(data, np.ndarray) else data.numpy()
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"data: expected 1-D uint8, got {array.ndim}-D {array.dtype}")
    for start in range(0, array.size, CALL_BYTES):
        checksum = google_crc32c.extend(checksum, array[start : start + CALL_BYTES])
    return checksum


def of_bytes(data: bytes) -> int:
    """The CRC32C of ``data``."""
    return int(google_crc32c.value(data))


def extend_zeros(checksum: int, num_bytes: int) -> int:
    """The CRC32C of what ``checksum`` covers followed by ``num_bytes`` zeros, in time independent of their number.

    A CRC is the remainder of a polynomial division: appending n zero bytes multiplies the remainder by x^(8n).
    The inversions before and after are CRC32C's own.
    """
    return _multiply(checksum ^ 0xFFFFFFFF, _power_of_x_to_8(num_bytes)) ^ 0xFFFFFFFF


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of what ``first`` covers followed by what ``second`` covers, ``second_bytes`` long."""
    return _multiply(first, _power_of_x_to_8(second_bytes)) ^ second


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo the CRC's, both bit-reversed."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=256)
def _power_of_x_to_8(exponent: int) -> int:
    """x^(8 * exponent) modulo the CRC's polynomial, by repeated squaring."""
    if exponent < 0:
        raise ValueError(f"num_bytes: {exponent} is negative")
    result, square = _ONE, _X_TO_8
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result


class ChunkChecksum:
    """Checksums of the four arrays of one chunk while its pieces are written, in order, array by array or interleaved.

    A chunk's checksum covers the whole chunk file. The part that no tensor uses is never written and stays zero
    (:meth:`StageLayout.pieces` leaves it out); :meth:`finish` adds it.
    """

    def __init__(self, layout: StageLayout, chunk: int) -> None:
        if not 0 <= chunk < layout.num_chunks:
            raise ValueError(f"chunk: {chunk} is not in 0..{layout.num_chunks - 1} of stage {layout.name!r}")
        self._where = f"chunk {chunk} of stage {layout.name!r}"
        self._chunk_elements = layout.chunk_elements
        used = round_up(layout.num_elements, CHUNK_QUANTUM_ELEMENTS) - chunk * layout.chunk_elements
        #: Elements of the chunk that pieces cover.
        self._used_elements = min(layout.chunk_elements, used)
        self._checksums = dict.fromkeys(StateArray, 0)
        #: Bytes seen so far of each array; never more than the pieces cover.
        self._num_bytes = dict.fromkeys(StateArray, 0)

    def _advance(self, array: StateArray, num_bytes: int) -> None:
        seen = self._num_bytes[array] + num_bytes
        expected = self._used_elements * array.itemsize
        if seen > expected:
            raise ValueError(f"{array.value} of {self._where}: {seen} bytes, its pieces hold {expected}")
        self._num_bytes[array] = seen

    def extend(self, array: StateArray, data: Bytes) -> None:
        """Add the next bytes of ``array`` (1-D contiguous uint8). Raises ValueError past the chunk's last piece."""
        self._advance(array, data.size if isinstance(data, np.ndarray) else data.numel())
        self._checksums[array] = extend(self._checksums[array], data)

    def extend_zeros(self, array: StateArray, num_bytes: int | None = None) -> None:
        """Add ``num_bytes`` zeros to ``array``; by default all that its pieces still lack (moments at creation)."""
        if num_bytes is None:
            num_bytes = self._used_elements * array.itemsize - self._num_bytes[array]
        self._advance(array, num_bytes)
        self._checksums[array] = extend_zeros(self._checksums[array], num_bytes)

    def finish(self, arrays: Iterable[StateArray] = StateArray) -> dict[StateArray, int]:
        """The checksums of the chunk files of ``arrays``. Raises ValueError if a piece of one has not been added."""
        finished = {}
        for array in arrays:
            missing = self._used_elements * array.itemsize - self._num_bytes[array]
            if missing:
                raise ValueError(f"{array.value} of {self._where}: {missing} bytes of its pieces were not added")
            rest = (self._chunk_elements - self._used_elements) * array.itemsize
            finished[array] = extend_zeros(self._checksums[array], rest)
        return finished
