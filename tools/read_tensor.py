"""One tensor out of a store, as a numpy array: `hoist.read_tensor`. The store may be in use; nothing is locked.

A whole model leaves a store through `export.py`. Where the bytes lie is described in docs/store-format.md.
"""

from __future__ import annotations

import difflib
import errno
import os
from pathlib import Path
from typing import Any, Literal

import numpy
import numpy.typing

from hoist.scheduler.errors import ConfigError
from hoist.tiers.errors import StoreFormatError, TransferError
from hoist.tiers.format import StateArray
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.layout import PlacedTensor, StageLayout
from hoist.tiers.store import Store

#: What can be read of a trainable tensor.
What = Literal["weight", "exp_avg", "exp_avg_sq"]
_ARRAYS: dict[str, tuple[StateArray, ...]] = {
    "weight": (StateArray.WEIGHT_HI, StateArray.WEIGHT_LO),
    "exp_avg": (StateArray.EXP_AVG,),
    "exp_avg_sq": (StateArray.EXP_AVG_SQ,),
}


def read_tensor(store: str | Path, name: str, *, what: What = "weight") -> numpy.typing.NDArray[Any]:
    """A tensor as of the last commit, with its shape: float32; if it is not trained, as it is kept (bfloat16: uint16).

    ``name`` is the tensor's in the model's ``state_dict()``; of tied ones the first. ``what``: the weight, or one of
    Adam's moments. Takes memory for the tensor alone, and reads through the page cache.

    Raises:
        ConfigError: the store has no such tensor, or the tensor no such moment.
        StoreRefusedError, StoreFormatError: there is no whole store; a run committed meanwhile (read again).
        TransferError: a file cannot be read.
    """
    if what not in _ARRAYS:
        raise ConfigError(f"what: {what!r} is not one of {', '.join(_ARRAYS)}")
    with DirectEngine(num_threads=1) as engine, Store.open(Path(store), engine=engine, writable=False) as opened:
        if opened.record is None:
            raise StoreFormatError(f"{opened.directory}: nothing is committed")
        layout, placed = _find(opened, name)
        if placed.spec.trainable:
            values = _trained(opened, layout, placed, what)
        elif what != "weight":
            raise ConfigError(f"what: {name} is not trained, so it has no {what}")
        else:
            place = opened.frozen_place(layout.index)
            kind = "uint16" if placed.spec.dtype == "bfloat16" else placed.spec.dtype
            values = _read(
                place.path, place.offset_bytes + placed.offset, numpy.dtype(kind), placed.spec.num_elements
            )
        if not opened.is_current():
            raise StoreFormatError(f"{opened.directory}: a run committed while {name} was read; read it again")
    return values.reshape(placed.spec.shape)


def _find(store: Store, name: str) -> tuple[StageLayout, PlacedTensor]:
    known = {
        placed.spec.name: (layout, placed)
        for layout in store.layouts
        for placed in (*layout.trainable, *layout.frozen)
    }
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
        raise ConfigError(f"name: {store.directory} has no tensor {name!r}; it has, for example, {', '.join(near)}")
    return known[name]


def _trained(store: Store, layout: StageLayout, placed: PlacedTensor, what: What) -> numpy.typing.NDArray[Any]:
    """float32 [elements]: the parts that chunks hold of the tensor, one after another."""
    start, stop = placed.offset, placed.offset + placed.spec.num_elements
    parts = []
    for piece in layout.pieces(layout.chunk_elements):
        if not piece.overlaps(placed):
            continue
        first, last = max(start, piece.start), min(stop, piece.stop)
        arrays = []
        for array in _ARRAYS[what]:
            place = store.place(layout.index, array, piece, write=False)
            offset = place.offset_bytes + (first - piece.start) * array.itemsize
            arrays.append(_read(place.path, offset, numpy.dtype(array.dtype), last - first))
        parts.append(arrays[0] if len(arrays) == 1 else _merged(*arrays))
    return numpy.concatenate(parts) if parts else numpy.empty(0, dtype=numpy.float32)


def _merged(
    hi: numpy.typing.NDArray[numpy.uint16], lo: numpy.typing.NDArray[numpy.uint16]
) -> numpy.typing.NDArray[numpy.float32]:
    """float32 weights from their halves: the sum of the first's bits and the second as a signed difference."""
    bits = (hi.astype(numpy.uint32) << 16) + lo.view(numpy.int16).astype(numpy.int32).view(numpy.uint32)
    return bits.view(numpy.float32)


def _read(path: Path, offset: int, dtype: numpy.dtype[Any], count: int) -> numpy.typing.NDArray[Any]:
    try:
        values = numpy.fromfile(path, dtype=dtype, count=count, offset=offset)
    except OSError as error:
        failure = TransferError(f"read {path}, offset {offset}: {os.strerror(error.errno or errno.EIO)}")
        failure.errno = error.errno
        raise failure from error
    if len(values) != count:
        raise StoreFormatError(f"{path}: offset {offset}: {len(values)} of {count} elements; hoist verify the store")
    return values
