"""Reads the headers of `pytorch_model.bin`: where each tensor lies in the zip file, without running what it says.

The pickle inside names functions to be called; here each of the few that weights need is replaced by one that only
notes its arguments, and any other name is refused. Streaming is `checkpoint.py`'s.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hoist.tools.checkpoint import CheckpointReader, TensorEntry, some
from hoist.tools.errors import CheckpointError
from hoist.tools.safetensors_reader import DTYPES
from hoist.tools.shard_index import find_shards, refuse_pointer
from hoist.tools.strided import span_elements

#: Files that Hugging Face models have: one shard, or an index of several.
SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"
#: Longest pickle that is read: names, shapes and places of a million tensors take less.
MAX_PICKLE_BYTES = 200_000_000
#: A record's own header in a zip file: signature, then lengths of name and extra field at bytes 26 and 28.
_LOCAL_HEADER_BYTES = 30
_LOCAL_SIGNATURE = b"PK\x03\x04"

#: Types by the name of the storage that has them.
_STORAGE_DTYPES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}  # fmt: skip

#: Types by their own name.
_DTYPES: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class TorchReader(CheckpointReader):
    """The `pytorch_model.bin` files of one directory, as torch.save has written them since its version 1.6."""

    format_name = "pytorch_model.bin"

    def __init__(self, directory: Path) -> None:
        """Raises :class:`CheckpointError` for anything that is missing, cut short, or more than a table of tensors."""
        directory = directory.absolute()
        super().__init__(directory, *find_shards(directory, SINGLE_FILE, INDEX_FILE, read_archive))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Storage:
    """A run of bytes that tensors lie in."""

    key: str
    """Its record is data/KEY."""
    dtype: torch.dtype
    num_elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A tensor, as the pickle describes it."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    """Of the first element, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """The bytes of one record of the archive."""

    offset: int
    num_bytes: int


class _Refusal(Exception):
    """What is wrong with a pickle; becomes a CheckpointError that names the file."""


def read_archive(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, ordered by place. Raises :class:`CheckpointError` unless it is a whole archive of them.

    Nothing that the file names is imported or called. Reads the archive's directory and its pickle, no tensor's data.
    """
    try:
        with path.open("rb") as file:
            refuse_pointer(path, file.read(20))
            records = _records(path, file)
            pickled = _pickle_of(path, records, file)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {error.strerror or error}; make the file readable") from error
    prefix, text = pickled
    try:
        document = _Unpickler(text).load()
        return _entries(path, document, records, prefix)
    except _Refusal as refusal:
        raise CheckpointError(f"checkpoint {path}: {refusal}") from None
    except Exception as error:  # whatever unpickling raises on bytes that are no pickle
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"checkpoint {path}: its data.pkl cannot be read ({type(error).__name__}: {reason}); copy the file again"
        ) from error


def _records(path: Path, file: Any) -> dict[str, _Record]:
    """The archive's records by name, each within the file. All are stored as they are."""
    file_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    first = file.read(4)
    if file_bytes and first != _LOCAL_SIGNATURE:
        raise CheckpointError(
            f"checkpoint {path}: is no zip file, which torch.save writes since version 1.6, or a damaged one; load it "
            "with torch.load(weights_only=True) and save the model with save_pretrained"
        )
    found: dict[str, _Record] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise CheckpointError(
                        f"checkpoint {path}: record {info.filename} is compressed or encrypted, which torch.save never "
                        "does; save the model anew"
                    )
                if info.filename in found:
                    raise CheckpointError(f"checkpoint {path}: record {info.filename} is there twice; save it anew")
                file.seek(info.header_offset)
                header = file.read(_LOCAL_HEADER_BYTES)
                if len(header) < _LOCAL_HEADER_BYTES or header[:4] != _LOCAL_SIGNATURE:
                    raise zipfile.BadZipFile(f"no record at byte {info.header_offset}")
                lengths = struct.unpack("<HH", header[26:])
                offset = info.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)
                if offset + info.file_size > file_bytes:
                    raise zipfile.BadZipFile(
                        f"record {info.filename} ends at byte {offset + info.file_size}, the file at {file_bytes}"
                    )
                found[info.filename] = _Record(offset=offset, num_bytes=info.file_size)
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, EOFError, struct.error) as error:
        raise CheckpointError(
            f"checkpoint {path}: truncated or damaged, {error} (found {file_bytes} bytes); copy the file again"
        ) from error
    return found


def _pickle_of(path: Path, records: Mapping[str, _Record], file: Any) -> tuple[str, bytes]:
    """The name that all records begin with, and the pickle."""
    names = [name for name in records if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(names) != 1 or any(name.endswith(("constants.pkl", "/code/")) for name in records):
        raise CheckpointError(
            f"checkpoint {path}: is a zip file, but not one of torch.save's weights; save the model with "
            "save_pretrained"
        )
    prefix = names[0].removesuffix("data.pkl")
    order = records.get(f"{prefix}byteorder")
    if order is not None:
        file.seek(order.offset)
        if file.read(min(order.num_bytes, 16)) != b"little":
            raise CheckpointError(
                f"checkpoint {path}: was saved on a big-endian machine; load it there and save it with save_pretrained"
            )
    record = records[names[0]]
    if record.num_bytes > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"checkpoint {path}: its data.pkl has {record.num_bytes} bytes, allowed are {MAX_PICKLE_BYTES}; it holds "
            "more than weights: save the model with save_pretrained"
        )
    file.seek(record.offset)
    return prefix, file.read(record.num_bytes)


class _Unpickler(pickle.Unpickler):
    """Builds the table of tensors out of dictionaries, numbers, strings and :class:`_View`; calls nothing else."""

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name, or a refusal. A pickle may call it with anything that it can make."""
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        stand_in = _STAND_INS.get((module, name))
        if stand_in is None:
            raise _Refusal(
                f"its pickle asks for {module}.{name}, which plain weights never do and which is not run; get the "
                "weights as safetensors, or from someone you trust, and save them with save_pretrained"
            )
        return stand_in

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage, by what torch.save notes of it."""
        match pid:
            case ("storage", torch.dtype() as dtype, str(key), str(_), int(num_elements)) if num_elements >= 0:
                return _Storage(key=key, dtype=dtype, num_elements=num_elements)
        raise _Refusal(f"its pickle refers to {str(pid)[:80]}, expected a storage; save the model anew")


def _view(
    storage: object, offset: object, shape: object, strides: object, _gradient: object, _hooks: object,
    metadata: object = None,
) -> _View:  # fmt: skip
    if not isinstance(storage, _Storage):
        raise _Refusal("a tensor in it has no storage; save the model anew")
    return _typed_view(storage, offset, shape, strides, _gradient, _hooks, storage.dtype, metadata)


def _typed_view(
    storage: object, offset: object, shape: object, strides: object, _gradient: object, _hooks: object, dtype: object,
    metadata: object = None,
) -> _View:  # fmt: skip
    whole = (
        isinstance(storage, _Storage)
        and isinstance(dtype, torch.dtype)
        and isinstance(shape, tuple)
        and isinstance(strides, tuple)
        and len(shape) == len(strides)
        and all(type(number) is int and number >= 0 for number in (offset, *shape, *strides))
    )
    if not whole or metadata:
        raise _Refusal(
            f"a tensor in it has offset {offset!r}, shape {shape!r}, strides {strides!r}, type {dtype!r} and flags "
            f"{metadata!r}; save the model anew"
        )
    assert isinstance(storage, _Storage) and isinstance(dtype, torch.dtype)
    assert isinstance(offset, int) and isinstance(shape, tuple) and isinstance(strides, tuple)
    return _View(storage=storage, dtype=dtype, offset=offset, shape=shape, strides=strides)


def _parameter(data: object, _gradient: object, _hooks: object, _state: object = None) -> object:
    return data


def _size(numbers: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(numbers)


#: What stands in for each name that weights need. OrderedDict is itself: it runs nothing.
_STAND_INS: Mapping[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_view,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch.nn.parameter", "Parameter"): _parameter,
    ("torch", "Size"): _size,
}


def _entries(path: Path, document: object, records: Mapping[str, _Record], prefix: str) -> dict[str, TensorEntry]:
    """The tensors of a table, each within its storage and that within the file."""
    if not isinstance(document, dict) or not document:
        raise _Refusal(f"holds a {type(document).__name__}, expected a table of tensors; save the model anew")
    foreign = [str(name) for name, view in document.items() if not (isinstance(name, str) and isinstance(view, _View))]
    if foreign:
        raise _Refusal(
            f"holds {len(foreign)} things that are no tensors ({some(foreign)}), as training checkpoints do; save the "
            "model alone, with save_pretrained"
        )
    found: list[tuple[int, str, TensorEntry]] = []
    for name, view in document.items():
        storage, item_bytes = view.storage, view.dtype.itemsize
        record = records.get(f"{prefix}data/{storage.key}")
        needed = storage.num_elements * storage.dtype.itemsize
        if record is None:
            raise _Refusal(f"the data of tensor {name!r}, record data/{storage.key}, is missing; copy the file again")
        if record.num_bytes != needed:
            raise _Refusal(
                f"the data of tensor {name!r}, record data/{storage.key}, has {record.num_bytes} bytes, expected "
                f"{needed}; copy the file again"
            )
        span = span_elements(view.shape, view.strides) if math.prod(view.shape) else 0
        if (view.offset + span) * item_bytes > record.num_bytes:
            raise _Refusal(
                f"tensor {name!r} ends at byte {(view.offset + span) * item_bytes} of the {record.num_bytes} of record "
                f"data/{storage.key}; copy the file again"
            )
        offset = record.offset + view.offset * item_bytes
        strides = None if _is_contiguous(view) else view.strides
        entry = TensorEntry(file=path, dtype=view.dtype, shape=view.shape, offset=offset, strides=strides)
        found.append((offset, name, entry))
    return {name: entry for _, name, entry in sorted(found, key=lambda one: one[:2])}


def _is_contiguous(view: _View) -> bool:
    """Elements follow one another; strides of dimensions of one index do not matter."""
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
