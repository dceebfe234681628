"""How the named tensors of a stage are packed into chunks, pieces and segments. Pure arithmetic: no files, no torch.

A stage's trainable tensors are packed one after another into a *stage array* (the same cuts for weight_hi, weight_lo,
exp_avg and exp_avg_sq), frozen tensors and persistent buffers into a byte array of their own. Where the bytes of a
chunk lie is `store.py`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Tensors start on multiples of this many elements, so that torch's vectorised AdamW sees the same cuts in a piece as
#: in a whole tensor and gives the same bits (it needs multiples of 16; 64 elements are 256 bytes).
TENSOR_ALIGN_ELEMENTS = 64
#: Chunks and pieces are multiples of this, so that every array's bytes are multiples of 4 KiB (2 bytes an element).
CHUNK_QUANTUM_ELEMENTS = 4096
#: Largest chunk that is chosen by default (elements).
MAX_CHUNK_ELEMENTS = 8 * 2**20
#: Frozen tensors start on multiples of this many bytes within the frozen array.
FROZEN_ALIGN_BYTES = 256
#: The frozen array's chunk is a multiple of this many bytes (direct I/O).
FROZEN_QUANTUM_BYTES = 4096

#: Element sizes of the dtypes that a frozen tensor or a buffer may have, by torch's name.
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip
#: What a frozen weight may be kept in besides float32, which holds each of their numbers.
NARROW_DTYPES = frozenset({"bfloat16", "float16"})


def round_up(value: int, quantum: int) -> int:
    """The smallest multiple of ``quantum`` that is at least ``value``."""
    return -(-value // quantum) * quantum


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor of a stage, as the model names it."""

    name: str
    """Name in the model's ``state_dict()``; any text."""
    shape: tuple[int, ...]
    """Shape; ``()`` is a 0-d tensor."""
    trainable: bool
    """Has a gradient, moments and more than one slot. False for frozen parameters and persistent buffers."""
    dtype: str = "float32"
    """torch's name of the dtype. Trainable tensors are float32 in the store, whatever the checkpoint held."""
    frozen_weight: bool = False
    """A weight that is not trained: computed with in the model's dtype, whatever it is kept in. False for buffers,
    which are computed with as they are kept."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.trainable and self.dtype != "float32":
            raise ValueError(f"tensor {self.name!r}: trainable tensors are kept as float32, got {self.dtype!r}")
        if self.trainable and self.frozen_weight:
            raise ValueError(f"tensor {self.name!r}: a weight is either trained or frozen")

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a 0-d tensor, 0 for an empty one."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in its own dtype."""
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def is_weight(self) -> bool:
        """A parameter, trained or not, and no buffer."""
        return self.trainable or self.frozen_weight

    def compute_dtype(self, dtype: str = "float32") -> str:
        """torch's name of the dtype that a model which computes in ``dtype`` has it in: buffers keep their own."""
        converted = self.trainable or (self.frozen_weight and self.dtype in {"float32", *NARROW_DTYPES})
        return dtype if converted else self.dtype

    def compute_bytes(self, dtype: str = "float32") -> int:
        """Bytes in that dtype."""
        return self.num_elements * DTYPE_BYTES[self.compute_dtype(dtype)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTensor:
    """A tensor with its place in its stage's array."""

    spec: TensorSpec
    offset: int
    """Trainable: first element in the stage array (multiple of 64). Frozen: first byte in the frozen array (of 256)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of elements of one chunk: the unit of I/O and of the optimizer's work. Never crosses a chunk's end."""

    index: int
    """Number of the piece within its stage."""
    chunk: int
    """Chunk that holds it."""
    start: int
    """First element, counted in the stage array; a multiple of 4096."""
    stop: int
    """One past the last element, padding included; a multiple of 4096."""

    @property
    def num_elements(self) -> int:
        """Elements of the piece, padding included."""
        return self.stop - self.start

    def overlaps(self, placed: PlacedTensor) -> bool:
        """Part of the tensor lies in the piece, which is one of the same stage."""
        return self.start < placed.offset + placed.spec.num_elements and placed.offset < self.stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The part of one trainable tensor that lies in some range of the stage array."""

    name: str
    tensor_start: int
    """First element, counted in the flattened tensor."""
    start: int
    """First element, counted in the stage array."""
    num_elements: int
    """At least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLayout:
    """Where each tensor of one stage lies, and how its array is cut. Make one with :func:`lay_out`."""

    index: int
    """Position of the stage in the model, from 0."""
    name: str
    """``embed``, ``layer.0`` ... or ``head``."""
    trainable: tuple[PlacedTensor, ...]
    """In packing order, offsets ascending."""
    frozen: tuple[PlacedTensor, ...]
    """In packing order, offsets ascending."""
    chunk_elements: int
    """Elements of a chunk (the same for all chunks of the stage); 0 if nothing is trainable."""
    num_chunks: int
    """Chunks of the stage array; 0 if nothing is trainable."""
    frozen_bytes: int
    """Bytes of the frozen array, padded to 4 KiB; 0 if there is none."""

    @property
    def directory(self) -> str:
        """Name of the stage's directory in a store: index and name, so that a listing is in stage order."""
        return f"{self.index:03d}-{self.name}"

    @property
    def num_elements(self) -> int:
        """Elements of the stage array that tensors use (gaps between tensors included, chunk padding not)."""
        if not self.trainable:
            return 0
        last = self.trainable[-1]
        return last.offset + last.spec.num_elements

    @property
    def padded_elements(self) -> int:
        """Elements of the stage array as stored: whole chunks."""
        return self.chunk_elements * self.num_chunks

    def pieces(self, max_elements: int) -> tuple[Piece, ...]:
        """Cut every chunk into pieces of at most ``max_elements`` (a multiple of 4096); unused parts are left out.

        The last piece of the stage ends at the first multiple of 4096 past the last used element.
        """
        if max_elements < CHUNK_QUANTUM_ELEMENTS or max_elements % CHUNK_QUANTUM_ELEMENTS:
            raise ValueError(f"max_elements: {max_elements} is not a positive multiple of {CHUNK_QUANTUM_ELEMENTS}")
        used = round_up(self.num_elements, CHUNK_QUANTUM_ELEMENTS)
        pieces: list[Piece] = []
        for chunk in range(self.num_chunks):
            end = min((chunk + 1) * self.chunk_elements, used)
            for start in range(chunk * self.chunk_elements, end, max_elements):
                stop = min(start + max_elements, end)
                pieces.append(Piece(index=len(pieces), chunk=chunk, start=start, stop=stop))
        return tuple(pieces)

    def segments(self, start: int, stop: int) -> tuple[Segment, ...]:
        """The parts of trainable tensors within ``[start, stop)`` of the stage array, in order."""
        found: list[Segment] = []
        for placed in self.trainable:
            first = max(start, placed.offset)
            last = min(stop, placed.offset + placed.spec.num_elements)
            if first < last:
                found.append(
                    Segment(
                        name=placed.spec.name,
                        tensor_start=first - placed.offset,
                        start=first,
                        num_elements=last - first,
                    )
                )
        return tuple(found)

    def used_elements(self) -> tuple[int, ...]:
        """Elements of each chunk that pieces cover: all but the end of the last."""
        covered = round_up(self.num_elements, CHUNK_QUANTUM_ELEMENTS)
        return tuple(
            min(self.chunk_elements, covered - chunk * self.chunk_elements) for chunk in range(self.num_chunks)
        )

    def to_json(self) -> dict[str, Any]:
        """The stage's ``attributes.hoist`` in its ``zarr.json``; :meth:`from_json` reads it back."""

        def entry(placed: PlacedTensor) -> dict[str, Any]:
            spec = placed.spec
            described: dict[str, Any] = {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "trainable": spec.trainable,
                "offset": placed.offset,
            }
            return {**described, "frozen_weight": True} if spec.frozen_weight else described

        return {
            "index": self.index,
            "name": self.name,
            "chunk_elements": self.chunk_elements,
            "num_chunks": self.num_chunks,
            "frozen_bytes": self.frozen_bytes,
            "tensors": [entry(placed) for placed in (*self.trainable, *self.frozen)],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StageLayout:
        """Read what :meth:`to_json` wrote. Raises KeyError, TypeError or ValueError on anything else."""
        placed = [
            PlacedTensor(
                spec=TensorSpec(
                    name=str(entry["name"]),
                    shape=tuple(int(side) for side in entry["shape"]),
                    trainable=bool(entry["trainable"]),
                    dtype=str(entry["dtype"]),
                    frozen_weight=bool(entry.get("frozen_weight", False)),
                ),
                offset=int(entry["offset"]),
            )
            for entry in document["tensors"]
        ]
        return cls(
            index=int(document["index"]),
            name=str(document["name"]),
            trainable=tuple(tensor for tensor in placed if tensor.spec.trainable),
            frozen=tuple(tensor for tensor in placed if not tensor.spec.trainable),
            chunk_elements=int(document["chunk_elements"]),
            num_chunks=int(document["num_chunks"]),
            frozen_bytes=int(document["frozen_bytes"]),
        )


def lay_out(
    *, index: int, name: str, tensors: Sequence[TensorSpec], max_chunk_elements: int = MAX_CHUNK_ELEMENTS
) -> StageLayout:
    """Pack a stage's tensors, in the order given, and choose its chunk.

    The chunk is the smallest multiple of 4096 elements that covers the stage in ``ceil(elements / max_chunk_elements)``
    chunks, so padding stays below 4096 elements a chunk. Tensors may cross chunk ends. Empty tensors take no room.

    Raises ValueError on duplicate names or a ``max_chunk_elements`` that is not a positive multiple of 4096.
    """
    if max_chunk_elements < CHUNK_QUANTUM_ELEMENTS or max_chunk_elements % CHUNK_QUANTUM_ELEMENTS:
        raise ValueError(
            f"max_chunk_elements: {max_chunk_elements} is not a positive multiple of {CHUNK_QUANTUM_ELEMENTS}"
        )
    names = [spec.name for spec in tensors]
    if len(set(names)) != len(names):
        repeated = sorted({spec_name for spec_name in names if names.count(spec_name) > 1})
        raise ValueError(f"stage {name!r}: tensor names must differ, repeated: {', '.join(repeated)}")
    trainable: list[PlacedTensor] = []
    frozen: list[PlacedTensor] = []
    elements = 0
    frozen_bytes = 0
    for spec in tensors:
        if spec.trainable:
            offset = round_up(elements, TENSOR_ALIGN_ELEMENTS)
            trainable.append(PlacedTensor(spec=spec, offset=offset))
            elements = offset + spec.num_elements
        else:
            offset = round_up(frozen_bytes, FROZEN_ALIGN_BYTES)
            frozen.append(PlacedTensor(spec=spec, offset=offset))
            frozen_bytes = offset + spec.num_bytes
    num_chunks = -(-elements // max_chunk_elements)
    chunk_elements = round_up(-(-elements // num_chunks), CHUNK_QUANTUM_ELEMENTS) if num_chunks else 0
    if num_chunks:
        num_chunks = -(-elements // chunk_elements)  # rounding the chunk up can make the last one superfluous
    return StageLayout(
        index=index,
        name=name,
        trainable=tuple(trainable),
        frozen=tuple(frozen),
        chunk_elements=chunk_elements,
        num_chunks=num_chunks,
        frozen_bytes=round_up(frozen_bytes, FROZEN_QUANTUM_BYTES),
    )
