"""Reads safetensors checkpoints: finds and validates the shards, then streams ranges of tensors by direct I/O.

The files are parsed here, not mapped (a mapping would fill the page cache), by the format's own rules:
https://github.com/huggingface/safetensors#format. Writing is in `safetensors_writer.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine
from hoist.tiers.layout import round_up
from hoist.tools.errors import CheckpointError

#: Files that Hugging Face models have: one shard, or an index of several.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Longest header that the format allows.
MAX_HEADER_BYTES = 100_000_000
#: Smallest staging buffer: two halves of two pages, so that each holds an element wherever it begins.
MIN_STAGING_BYTES = 4 * IO_ALIGN_BYTES

#: torch's dtype of each of the format's types. Types that torch lacks, or packs several to a byte, are refused.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
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
    """First byte, counted from the start of the file."""
    num_bytes: int
    """Bytes in the file."""

    @property
    def num_elements(self) -> int:
        """Number of elements; 0 for an empty tensor."""
        return math.prod(self.shape)


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
            faults.append(f"{len(self.missing)} missing ({_some(self.missing)})")
        if self.wrong_shape:
            shapes = [
                f"{name} is {list(found)}, the model has {list(wanted)}" for name, wanted, found in self.wrong_shape
            ]
            faults.append(f"{len(shapes)} of another shape ({_some(shapes)})")
        if self.unexpected and not allow_unexpected:
            faults.append(f"{len(self.unexpected)} unknown to the model ({_some(self.unexpected)})")
        if faults:
            raise CheckpointError(
                f"checkpoint {self.directory}: tensors do not fit the config: {'; '.join(faults)}; use the "
                "config.json that the "
                "weights were saved with"
            )


class CheckpointReader:
    """The safetensors files of one directory. Headers are read and checked at once, data when asked for.

    Holds no open file itself. One thread at a time reads, from one shard at a time: when it goes on to another, the
    engine is told to forget the last.
    """

    def __init__(self, directory: Path) -> None:
        """Raises :class:`CheckpointError` for anything that is missing, cut short or not what the format allows."""
        #: The directory, absolute.
        self.directory = directory.absolute()
        index = self.directory / INDEX_FILE
        single = self.directory / SINGLE_FILE
        #: The checkpoint's tensors, by name, in the order of their shards and places.
        self.tensors: dict[str, TensorEntry]
        #: The shards, sorted by name.
        self.shards: tuple[Path, ...]
        if single.is_file():
            self.shards = (single,)
            self.tensors = read_header(single)
        elif index.is_file():
            self.shards, self.tensors = _read_shards(index)
        else:
            raise CheckpointError(
                f"checkpoint {self.directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model with "
                "save_pretrained"
            )
        #: The shard that was read last; the engine may have it open.
        self._open: Path | None = None

    @staticmethod
    def find(directory: Path) -> CheckpointReader | None:
        """The checkpoint in a directory, or None where there is none. Raises as the constructor does."""
        if (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file():
            return CheckpointReader(directory)
        return None

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
        destination: torch.Tensor,
        *,
        start_element: int = 0,
        engine: IoEngine,
        staging: torch.Tensor,
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
                self._read_part(part, into, first - position, engine, staging, refuse_nan)
            position = end

    def _read_part(
        self,
        name: str,
        destination: torch.Tensor,
        start_element: int,
        engine: IoEngine,
        staging: torch.Tensor,
        refuse_nan: bool,
    ) -> None:
        entry = self.tensors[name]
        if destination.dtype not in (entry.dtype, torch.float32) or (
            destination.dtype != entry.dtype and entry.dtype not in FLOAT_DTYPES
        ):
            raise CheckpointError(
                f"checkpoint {entry.file}: tensor {name!r} is {entry.dtype}, which cannot be read as "
                f"{destination.dtype}; allowed "
                f"are {', '.join(sorted(map(str, FLOAT_DTYPES)))}: save the model in one of these"
            )
        if self._open not in (None, entry.file):
            self.forget(engine)
        self._open = entry.file
        item_bytes = entry.dtype.itemsize
        # Elements that do not start on multiples of their size cannot be viewed in place: half of the staging is then
        # kept to copy them to. Our own files and those of newer libraries never need it.
        aligned = entry.offset % item_bytes == 0
        room = staging.numel() if aligned else staging.numel() // 2 // IO_ALIGN_BYTES * IO_ALIGN_BYTES
        file_bytes = entry.file.stat().st_size
        done = 0
        while done < destination.numel():
            first_byte = entry.offset + (start_element + done) * item_bytes
            read_from = first_byte // IO_ALIGN_BYTES * IO_ALIGN_BYTES
            skip = first_byte - read_from
            count = min(destination.numel() - done, (room - skip) // item_bytes)
            read_to = min(round_up(first_byte + count * item_bytes, IO_ALIGN_BYTES), file_bytes)
            engine.read(entry.file, read_from, staging[: read_to - read_from]).result()
            data = staging[skip : skip + count * item_bytes]
            if not aligned:
                data = staging[room : room + data.numel()].copy_(data)
            part = destination[done : done + count]
            part.copy_(data.view(entry.dtype))
            if refuse_nan and part.dtype in FLOAT_DTYPES:
                _refuse_nan(part, entry, name, start_element + done)
            done += count

    def forget(self, engine: IoEngine) -> None:
        """Have the engine close the shard that was read last."""
        if self._open is not None:
            engine.forget(self._open)
            self._open = None


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


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one shard, ordered by place. Raises :class:`CheckpointError` if the file is not a whole
    safetensors file."""
    try:
        with path.open("rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = file.read(8)
            if len(length) < 8:
                raise CheckpointError(
                    f"checkpoint {path}: truncated, expected at least 8 bytes, found {file_bytes}; copy the file again"
                )
            header_bytes = int.from_bytes(length, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"checkpoint {path}: byte 0 promises a header of {header_bytes} bytes, allowed are "
                    f"{MAX_HEADER_BYTES}; this "
                    "is no safetensors file, or a damaged one: copy it again"
                )
            if 8 + header_bytes > file_bytes:
                raise CheckpointError(
                    f"checkpoint {path}: truncated, the header alone ends at byte {8 + header_bytes}, found "
                    f"{file_bytes} bytes; copy "
                    "the file again"
                )
            header = _read_exactly(file.fileno(), header_bytes)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {error.strerror or error}; make the file readable") from error
    entries = _parse_header(path, header)
    end = 8 + header_bytes + sum(entry.num_bytes for entry in entries.values())
    if end != file_bytes:
        kind = "truncated" if file_bytes < end else "longer than its header says"
        raise CheckpointError(
            f"checkpoint {path}: {kind}, expected {end} bytes, found {file_bytes}; copy the file again"
        )
    return entries


def _read_exactly(descriptor: int, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = os.read(descriptor, num_bytes - len(data))
        if not part:
            break
        data += part
    return bytes(data)


def _parse_header(path: Path, header: bytes) -> dict[str, TensorEntry]:
    """Check a header's JSON; the tensors must fill the data without gap or overlap, as the format demands."""

    def bad(reason: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {path}: invalid header, {reason}; copy the file again or save the model anew"
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) != len(pairs):
            names = [name for name, _ in pairs]
            raise bad(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
        return document

    try:
        document = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise bad(f"no UTF-8 at byte {8 + error.start}") from None
    except RecursionError:
        raise bad("no JSON: nested too deep") from None
    except json.JSONDecodeError as error:
        raise bad(f"no JSON at byte {8 + error.pos} ({error.msg})") from None
    if not isinstance(document, dict):
        raise bad("not a JSON object")
    document.pop("__metadata__", None)
    places: list[tuple[int, int, str]] = []
    for name, fields in document.items():
        try:
            dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise bad(f"tensor {name!r} lacks dtype, shape or data_offsets") from None
        if dtype not in DTYPES:
            raise bad(f"tensor {name!r} has dtype {dtype!r}, known are {', '.join(DTYPES)}")
        whole = isinstance(shape, list) and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        if not whole:
            raise bad(f"tensor {name!r} has shape {shape!r} and data_offsets [{begin!r}, {end!r}]")
        if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise bad(
                f"tensor {name!r} of {dtype} {shape} needs {math.prod(shape) * DTYPES[dtype].itemsize} bytes, its "
                "data_offsets "
                f"give {end - begin}"
            )
        places.append((begin, end, name))
    places.sort()
    position = 0
    for begin, end, name in places:
        if begin != position:
            raise bad(f"tensor {name!r} begins at byte {begin} of the data, expected {position}: a gap or an overlap")
        position = end
    base = 8 + len(header)
    return {
        name: TensorEntry(
            file=path,
            dtype=DTYPES[document[name]["dtype"]],
            shape=tuple(document[name]["shape"]),
            offset=base + begin,
            num_bytes=end - begin,
        )
        for begin, end, name in places
    }


def _read_shards(index: Path) -> tuple[tuple[Path, ...], dict[str, TensorEntry]]:
    """The shards that an index names, all present, and their tensors, each in the shard that the index says."""
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
        weight_map = document["weight_map"]
        places = {name: file for name, file in weight_map.items() if isinstance(name, str) and isinstance(file, str)}
        if len(places) != len(weight_map) or not places:
            raise ValueError("weight_map must map tensor names to file names")
    except OSError as error:
        raise CheckpointError(f"checkpoint {index}: {error.strerror or error}; make the file readable") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {index}: not an index of shards ({error}); copy the file again") from error
    names = sorted(set(places.values()))
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise CheckpointError(
            f"checkpoint {index}: names shards outside its directory: {_some(foreign)}; copy the file again"
        )
    shards = tuple(index.parent / name for name in names)
    absent = [path.name for path in shards if not path.is_file()]
    if absent:
        raise CheckpointError(
            f"checkpoint {index.parent}: {len(absent)} of {len(shards)} shards are missing: {', '.join(absent)}; "
            "download them"
        )
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"checkpoint {index.parent}: tensor {name!r} is in two shards, {tensors[name].file.name} and "
                    f"{shard.name}; "
                    "keep the files of one checkpoint only"
                )
            tensors[name] = entry
    lost = [
        f"{name} ({file})" for name, file in places.items() if name not in tensors or tensors[name].file.name != file
    ]
    if lost:
        raise CheckpointError(
            f"checkpoint {index}: {len(lost)} tensors are not in the shard that the index names: {_some(lost)}; copy "
            "the files again"
        )
    return shards, tensors


def check_staging(staging: torch.Tensor) -> None:
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
            f"{MIN_STAGING_BYTES} "
            f"bytes, got {staging.dtype} {tuple(staging.shape)} at {staging.data_ptr():#x}"
        )


def _refuse_nan(part: torch.Tensor, entry: TensorEntry, name: str, start_element: int) -> None:
    # The sum is NaN if any element is, and needs no memory; infinities can make it NaN too, so only then look closely.
    if not torch.isnan(part.sum()):
        return
    wrong = torch.isnan(part)
    if wrong.any():
        element = start_element + int(wrong.to(torch.uint8).argmax())
        raise CheckpointError(
            f"checkpoint {entry.file}: tensor {name!r} is NaN at element {element} (and maybe more); training from it "
            "gives only "
            "NaN: take another checkpoint"
        )


def _some(items: Sequence[str], limit: int = 3) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
