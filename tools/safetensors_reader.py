"""Reads safetensors headers: finds and validates the shards of a checkpoint, by the format's own rules.

The files are parsed here, not mapped (a mapping would fill the page cache):
https://github.com/huggingface/safetensors#format. Streaming is `checkpoint.py`'s, writing `safetensors_writer.py`'s.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hoist.tools.checkpoint import CheckpointReader, TensorEntry
from hoist.tools.errors import CheckpointError
from hoist.tools.shard_index import find_shards, refuse_pointer

#: Files that Hugging Face models have: one shard, or an index of several.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Longest header that the format allows.
MAX_HEADER_BYTES = 100_000_000

#: torch's dtype of each of the format's types. Types that torch lacks, or packs several to a byte, are refused.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class SafetensorsReader(CheckpointReader):
    """The safetensors files of one directory."""

    format_name = "safetensors"

    def __init__(self, directory: Path, *, single_file: str = SINGLE_FILE) -> None:
        """Raises :class:`CheckpointError` for anything that is missing, cut short or not what the format allows."""
        directory = directory.absolute()
        super().__init__(directory, *find_shards(directory, single_file, INDEX_FILE, read_header))


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one shard, ordered by place. Raises :class:`CheckpointError` if the file is not a whole
    safetensors file."""
    try:
        with path.open("rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = file.read(8)
            refuse_pointer(path, length)
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
        )
        for begin, end, name in places
    }
