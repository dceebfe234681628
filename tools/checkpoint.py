"""The contract of weights on files: which tensors there are, and streaming ranges of them, without mapping a file.

What fits a model is found here too. Formats have files of their own: `safetensors_reader.py`, `torch_reader.py`; which
one a directory is in, `checkpoint_files.py` says.
"""

from __future__ import annotations

import math
import re
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine
from hoist.tiers.layout import round_up
from hoist.tools.errors import CheckpointError
from hoist.tools.strided import Box, assign, boxes, span_elements

#: Smallest staging buffer: two halves of two pages, so that each holds an element wherever it begins.
MIN_STAGING_BYTES = 4 * IO_ALIGN_BYTES
#: Bytes that are read at a time while what came before is converted: enough for a drive's full speed.
WINDOW_BYTES = 16 * 2**20
#: Elements that are looked at for NaN in one go, since that takes temporaries.
_LOOKED_AT_ELEMENTS = 2**18
#: Types that are read as float32. The 8-bit floats need scales that lie elsewhere, so they are not weights by
#: themselves.
FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor of a checkpoint lies."""

    file: Path
    """The shard."""
    dtype: torch.dtype
    """Type of the elements in the file."""
    shape: tuple[int, ...]
    """Shape; ``()`` is a 0-d tensor."""
    offset: int
    """Byte of the first element, counted from the start of the file."""
    strides: tuple[int, ...] | None = None
    """Elements from one index of a dimension to the next; None: one row after another, without gaps."""

    @property
    def num_elements(self) -> int:
        """Number of elements; 0 for an empty tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that its elements take by themselves."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A tensor as the model has it: tensors of the checkpoint, flattened and laid end to end. Nearly always one."""

    names: tuple[str, ...]
    """The checkpoint's names, in order."""
    shape: tuple[int, ...]
    """The shape that they make."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """How the tensors of a checkpoint fit those of a model. Make one with :func:`match`."""

    directory: Path
    """The checkpoint's directory."""
    sources: Mapping[str, tuple[str, ...]]
    """For each of the model's tensors that was found, what to give :meth:`CheckpointReader.read_into`."""
    missing: tuple[str, ...]
    """The model's tensors that the checkpoint lacks."""
    unexpected: tuple[str, ...]
    """The checkpoint's tensors that the model lacks."""
    wrong_shape: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Name, the model's shape, the checkpoint's shape."""
    extra_copies: tuple[tuple[str, str], ...]
    """Tied tensors that the checkpoint holds twice: the name that is read, the name that is not."""

    def require(self, *, allow_unexpected: bool = False) -> None:
        """Raise :class:`CheckpointError`, one line that lists what does not fit, unless all does."""
        faults = []
        if self.missing:
            faults.append(f"{len(self.missing)} missing ({some(self.missing)})")
        if self.wrong_shape:
            shapes = [
                f"{name} is {list(found)}, the model has {list(wanted)}" for name, wanted, found in self.wrong_shape
            ]
            faults.append(f"{len(shapes)} of another shape ({some(shapes)})")
        if self.unexpected and not allow_unexpected:
            faults.append(f"{len(self.unexpected)} unknown to the model ({some(self.unexpected)})")
        if faults:
            raise CheckpointError(
                f"checkpoint {self.directory}: tensors do not fit the config: {'; '.join(faults)}; use the "
                "config.json that the "
                "weights were saved with"
            )


class CheckpointReader(ABC):
    """The weights of one directory, whatever the format. Headers are read and checked at once, data when asked for.

    Holds no open file itself. One thread at a time reads, from one shard at a time: when it goes on to another, the
    engine is told to forget the last. A format is a subclass that finds the shards and their tensors.
    """

    #: For people: ``safetensors``.
    format_name: str

    def __init__(self, directory: Path, shards: Sequence[Path], tensors: Mapping[str, TensorEntry]) -> None:
        #: The directory, absolute.
        self.directory = directory
        #: The checkpoint's tensors, by name, in the order of their shards and places.
        self.tensors = dict(tensors)
        #: The shards, sorted by name.
        self.shards = tuple(shards)
        #: The shard that was read last; the engine may have it open.
        self._open: Path | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The floating-point type that most elements have; None if none is floating."""
        elements: dict[torch.dtype, int] = {}
        for entry in self.tensors.values():
            if entry.dtype.is_floating_point:
                elements[entry.dtype] = elements.get(entry.dtype, 0) + entry.num_elements
        return max(elements, key=lambda dtype: elements[dtype]) if elements else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    def read_into(
        self,
        name: str | Sequence[str],
        destination: Tensor,
        *,
        start_element: int = 0,
        engine: IoEngine,
        staging: Tensor,
        refuse_nan: bool = True,
    ) -> None:
        """Fill ``destination`` with the elements of tensor ``name`` from ``start_element`` on, counted flattened.

        Several names are read as one tensor, laid end to end (:attr:`Match.sources`). ``destination`` is 1-D and
        contiguous, and either of the tensor's own dtype or float32, to which the other floating-point types are
        converted. ``staging`` is 1-D uint8, its address and length multiples of 4 KiB, at least 16 KiB; it is free
        again when the call returns. Reads are rounded out to 4 KiB; at the file's end they are exact.

        Raises :class:`CheckpointError` on a NaN (if ``refuse_nan``) with the tensor and the element, TransferError if a
        read fails, KeyError for an unknown name, ValueError for a range or buffer that cannot be. After a failure the
        content of both buffers is undefined.
        """
        check_staging(staging)
        names = (name,) if isinstance(name, str) else tuple(name)
        total = sum(self.tensors[part].num_elements for part in names)
        stop_element = start_element + destination.numel()
        if start_element < 0 or stop_element > total:
            raise ValueError(f"elements {start_element} to {stop_element} of the {total} of {', '.join(names)}")
        position = 0
        for part in names:
            end = position + self.tensors[part].num_elements
            first, last = max(position, start_element), min(end, stop_element)
            if first < last:
                into = destination[first - start_element : last - start_element]
                self._read_part(part, into, first - position, engine, staging)
                if refuse_nan and into.dtype in FLOAT_DTYPES:
                    _refuse_nan(into, self.tensors[part], part, first - position)
            position = end

    def _read_part(self, name: str, destination: Tensor, start_element: int, engine: IoEngine, staging: Tensor) -> None:
        """:meth:`read_into` of one tensor, at least one element. A format may read in another way."""
        entry = self.tensors[name]
        if destination.dtype not in (entry.dtype, torch.float32) or (
            destination.dtype != entry.dtype and entry.dtype not in FLOAT_DTYPES
        ):
            raise CheckpointError(
                f"checkpoint {entry.file}: tensor {name!r} is {entry.dtype}, which cannot be read as "
                f"{destination.dtype}; allowed are {', '.join(sorted(map(str, FLOAT_DTYPES)))}: save the model in one "
                "of these"
            )
        if self._open not in (None, entry.file):
            self.forget(engine)
        self._open = entry.file
        _Transfer(entry, engine, staging).read(destination, start_element)

    def forget(self, engine: IoEngine) -> None:
        """Have the engine close the shard that was read last."""
        if self._open is not None:
            engine.forget(self._open)
            self._open = None


class _Transfer:
    """Moves elements of one tensor from its file: windows of the file into halves of the staging, one read ahead."""

    def __init__(self, entry: TensorEntry, engine: IoEngine, staging: Tensor) -> None:
        self._entry = entry
        self._engine = engine
        self._file_bytes = entry.file.stat().st_size
        #: Elements that do not start on multiples of their size cannot be viewed in place: half of the staging is then
        #: kept to copy them to. Our own files and those of newer libraries never need it.
        self._aligned = entry.offset % entry.dtype.itemsize == 0
        half = staging.numel() // 2 // IO_ALIGN_BYTES * IO_ALIGN_BYTES
        room = min(half, WINDOW_BYTES)
        #: Where windows are read to in turn, and where unaligned ones are copied to.
        self._buffers = (staging[:room], staging[half : half + room]) if self._aligned else (staging[:room],)
        self._copy = staging[half : half + room]
        #: Elements that a window holds wherever it begins.
        self._room_elements = (room - IO_ALIGN_BYTES) // entry.dtype.itemsize + 1
        if not self._aligned:
            self._room_elements -= 1

    def read(self, destination: Tensor, start: int) -> None:
        """Fill the 1-D ``destination`` from element ``start`` on, counted flattened."""
        # Windows in flight: what was asked for, its elements, and what to do with them.
        waiting: list[tuple[Future[None], Tensor, Box]] = []
        entry = self._entry
        shape: Sequence[int] = entry.shape
        strides = entry.strides
        if strides is None:
            shape, strides = (entry.num_elements,), (1,)
        turn = 0
        try:
            for box in boxes(shape, strides, start, start + destination.numel(), room_elements=self._room_elements):
                if len(waiting) == len(self._buffers):
                    self._take(waiting.pop(0), destination)
                waiting.append(self._ask(box, self._buffers[turn % len(self._buffers)]))
                turn += 1
            while waiting:
                self._take(waiting.pop(0), destination)
        finally:
            for future, _, _ in waiting:  # a failure: nothing may still be written to the staging
                future.exception()

    def _ask(self, box: Box, buffer: Tensor) -> tuple[Future[None], Tensor, Box]:
        item_bytes = self._entry.dtype.itemsize
        first_byte = self._entry.offset + box.source_start * item_bytes
        num_bytes = span_elements(box.shape, box.source_strides) * item_bytes
        read_from = first_byte // IO_ALIGN_BYTES * IO_ALIGN_BYTES
        read_to = min(round_up(first_byte + num_bytes, IO_ALIGN_BYTES), self._file_bytes)
        future = self._engine.read(self._entry.file, read_from, buffer[: read_to - read_from])
        return future, buffer[first_byte - read_from : first_byte - read_from + num_bytes], box

    def _take(self, window: tuple[Future[None], Tensor, Box], destination: Tensor) -> None:
        future, data, box = window
        future.result()
        if not self._aligned:
            data = self._copy[: data.numel()].copy_(data)
        assign(box, data.view(self._entry.dtype), destination)


def match(
    reader: CheckpointReader,
    names_and_shapes: Mapping[str, tuple[int, ...]],
    aliases: Iterable[Sequence[str]] = (),
    *,
    parts: Mapping[str, Parts] | None = None,
    ignore_unexpected: Sequence[str] = (),
) -> Match:
    """Find each of the model's tensors in the checkpoint.

    ``aliases`` are groups of tied names: any of a group will do for all. ``parts`` says what the checkpoint's tensors
    are in the model where names differ (`checkpoint_names.py`); by default each is the one of its own name.
    ``ignore_unexpected`` are regular expressions of names that are no news (transformers'
    ``_keys_to_ignore_on_load_unexpected``).
    """
    if parts is None:
        parts = {name: Parts(names=(name,), shape=entry.shape) for name, entry in reader.tensors.items()}
    groups: dict[str, tuple[str, ...]] = {}
    for group in aliases:
        groups.update(dict.fromkeys(group, tuple(group)))
    sources: dict[str, str] = {}
    missing: list[str] = []
    wrong_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    copies: dict[str, str] = {}
    for name, shape in names_and_shapes.items():
        candidates = [name, *(other for other in groups.get(name, ()) if other != name)]
        found = [candidate for candidate in candidates if candidate in parts]
        if not found:
            missing.append(name)
            continue
        sources[name] = found[0]
        copies.update(dict.fromkeys(found[1:], found[0]))
        if parts[found[0]].shape != tuple(shape):
            wrong_shape.append((name, tuple(shape), parts[found[0]].shape))
    used = set(sources.values())
    patterns = [re.compile(pattern) for pattern in ignore_unexpected]
    return Match(
        directory=reader.directory,
        sources={name: parts[source].names for name, source in sources.items()},
        missing=tuple(missing),
        unexpected=tuple(
            name
            for name in parts
            if name not in used and name not in copies and not any(pattern.search(name) for pattern in patterns)
        ),
        wrong_shape=tuple(wrong_shape),
        extra_copies=tuple((read, other) for other, read in copies.items() if other not in used),
    )


def check_staging(staging: Tensor) -> None:
    """Raise ValueError unless direct I/O and the streaming loops can work with this buffer."""
    if (
        staging.dtype != torch.uint8
        or staging.dim() != 1
        or not staging.is_contiguous()
        or staging.numel() < MIN_STAGING_BYTES
        or staging.numel() % IO_ALIGN_BYTES
        or staging.data_ptr() % IO_ALIGN_BYTES
    ):
        raise ValueError(
            f"staging: must be 1-D uint8 with address and length multiples of {IO_ALIGN_BYTES} and at least "
            f"{MIN_STAGING_BYTES} bytes, got {staging.dtype} {tuple(staging.shape)} at {staging.data_ptr():#x}"
        )


def _refuse_nan(part: Tensor, entry: TensorEntry, name: str, start_element: int) -> None:
    # The sum is NaN if any element is, and needs no memory; infinities can make it NaN too, so only then look closely.
    if not torch.isnan(part.sum()):
        return
    for start in range(0, part.numel(), _LOOKED_AT_ELEMENTS):
        wrong = torch.isnan(part[start : start + _LOOKED_AT_ELEMENTS])
        if wrong.any():
            element = start_element + start + int(wrong.to(torch.uint8).argmax())
            raise CheckpointError(
                f"checkpoint {entry.file}: tensor {name!r} is NaN at element {element} (and maybe more); training from "
                "it gives only NaN: take another checkpoint"
            )


def some(items: Sequence[str], limit: int = 3) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
