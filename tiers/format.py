"""The store's bytes: names, Zarr metadata, COMMIT.json and the CRC file, encoded and decoded. Opens no files.

The same format in prose is docs/store-format.md. The order in which files are written is `commit.py`'s business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt

from hoist._version import __version__
from hoist.tiers.errors import StoreFormatError
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, StageLayout

#: Raised by one when a reader of the version before would misread the store.
FORMAT_VERSION = 1
#: Places that each trainable chunk has: the committed version and the next.
NUM_SLOTS = 2
#: Places where the version before the newest is kept too, committed or not.
NUM_SLOTS_WITH_PREVIOUS = 3

METADATA_NAME = "zarr.json"
COMMIT_NAME = "COMMIT.json"
COMMIT_TEMPORARY_NAME = "COMMIT.json.tmp"
LOCK_NAME = "LOCK"
#: What a run tells other processes of itself (`scheduler/status.py`), and leaves for reports. No commit names them.
STATUS_NAME = "status.json"
METRICS_NAME = "metrics.jsonl"
TIMELINE_NAME = "timeline.json"
#: Bytes that were ever written to the store: what a drive has suffered is not undone by a restore or a fresh start.
WEAR_NAME = "wear.json"
WEAR_TEMPORARY_NAME = "wear.json.tmp"
CRC_DIRECTORY = "crc"
STAGES_DIRECTORY = "stages"
SCRATCH_DIRECTORY = "scratch"
MODEL_DIRECTORY = "model"
SNAPSHOTS_DIRECTORY = "snapshots"
#: Marks a directory as a snapshot, which is read and never trained in.
SNAPSHOT_NAME = "SNAPSHOT.json"
#: Names in the snapshots' directory that are no snapshots: one being made, one being removed, reserved files.
MAKING_PREFIX = ".making-"
REMOVING_PREFIX = ".removing-"
REPLACEMENTS_NAME = ".replacements"
#: Links to the further directories of a store that spans several, and what marks those as its.
DRIVES_DIRECTORY = "drives"
DRIVE_MARKER_NAME = "DRIVE.json"
FROZEN_NAME = "buffers"

#: COMMIT.json begins with this and 8 hexadecimal digits; they cover every byte from :data:`_COVERED_FROM` on.
_CHECKSUM_PREFIX = b'{"crc32c":"'
_COVERED_FROM = len(_CHECKSUM_PREFIX) + 8 + len(b'",')

#: What a stage's directory may be called: any file system and any Zarr library takes it.
_DIRECTORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")

#: Keys of the root's ``attributes.hoist`` that the store writes itself.
RESERVED_ATTRIBUTES = frozenset({"format_version", "created_by", "store_id", "num_slots", "chunk_elements", "stages"})


class StateArray(Enum):
    """The arrays of a stage's trainable tensors, in the order that checksums are kept."""

    WEIGHT_HI = "weight_hi"
    """uint16: the bfloat16 nearest to the weight, as bits."""
    WEIGHT_LO = "weight_lo"
    """uint16: what the weight's float32 bits have beyond it."""
    EXP_AVG = "exp_avg"
    """float32: Adam's first moment."""
    EXP_AVG_SQ = "exp_avg_sq"
    """float32: Adam's second moment."""

    @property
    def dtype(self) -> str:
        """Zarr's name of the element type; little-endian on disk."""
        return "uint16" if self in (StateArray.WEIGHT_HI, StateArray.WEIGHT_LO) else "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self in (StateArray.WEIGHT_HI, StateArray.WEIGHT_LO) else 4


#: The two halves of the weights.
WEIGHT_ARRAYS = (StateArray.WEIGHT_HI, StateArray.WEIGHT_LO)
#: Adam's two moments.
MOMENT_ARRAYS = (StateArray.EXP_AVG, StateArray.EXP_AVG_SQ)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """What COMMIT.json says: the state to which the store opens."""

    store_id: str
    """Same as the root metadata's: a COMMIT.json of another store is noticed."""
    generation: int
    """Number of the commit, from 1."""
    step: int
    """Optimizer steps that every chunk carries."""
    slots: tuple[str, ...]
    """Per stage, one character a chunk: the slot (``0``, ``1``, in some stores ``2``) of its committed version."""
    checksum_file: str
    """The CRC file, relative to the store."""
    checksum_file_crc32c: int
    """CRC32C of the CRC file's bytes."""
    metadata_crc32c: int
    """CRC32C of the root's zarr.json followed by each stage's, in stage order."""
    adam_steps: Mapping[str, int]
    """Adam's step count by tensor name."""
    run: Mapping[str, Any]
    """The caller's, JSON; `hoist train` keeps the data's position, its options and totals."""
    drives: tuple[Mapping[str, Any], ...]
    """The directories that hold the store's chunks; `drives.py` reads the entries."""


def stage_path(layout: StageLayout) -> str:
    """The stage's directory, relative to the store."""
    return f"{STAGES_DIRECTORY}/{layout.directory}"


def chunk_path(layout: StageLayout, array: StateArray, slot: int, chunk: int) -> str:
    """A chunk file, relative to the store."""
    return f"{stage_path(layout)}/{array.value}/c/{slot}/{chunk}"


def frozen_path(layout: StageLayout) -> str:
    """The file of the stage's frozen array, relative to the store."""
    return f"{stage_path(layout)}/{FROZEN_NAME}/c/0"


def checksum_path(generation: int) -> str:
    """The CRC file of a commit, relative to the store."""
    return f"{CRC_DIRECTORY}/{generation}.bin"


def dump_json(document: Mapping[str, Any], *, what: str) -> bytes:
    """Compact strict JSON. Raises ValueError, naming ``what``, on values that JSON has no form for (NaN included)."""
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: cannot be written as JSON: {error}") from error


def load_json(data: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises StoreFormatError with file, offset and what was seen."""
    try:
        document = json.loads(data)
    except json.JSONDecodeError as error:
        seen = error.doc[error.pos : error.pos + 20]
        raise StoreFormatError(f"{path}: not JSON at offset {error.pos} ({error.msg}): saw {seen!r}") from error
    except UnicodeDecodeError as error:
        bad = data[error.start : error.start + 8]
        raise StoreFormatError(f"{path}: not UTF-8 at offset {error.start}: saw {bad!r}") from error
    if not isinstance(document, dict):
        raise StoreFormatError(f"{path}: expected a JSON object, saw {type(document).__name__}")
    return document


# --- Zarr metadata ----------------------------------------------------------------------------------------------


def _group(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def _array(
    *, shape: Sequence[int], chunk_shape: Sequence[int], dtype: str, dimension_names: Sequence[str], itemsize: int
) -> dict[str, Any]:
    codec: dict[str, Any] = {"name": "bytes"}
    if itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [codec],
        "dimension_names": list(dimension_names),
        "attributes": {},
        "storage_transformers": [],
    }


def metadata_files(
    layouts: Sequence[StageLayout], attributes: Mapping[str, Any], *, store_id: str, num_slots: int = NUM_SLOTS
) -> dict[str, bytes]:
    """Every zarr.json of a new store, by path relative to it, the root's first.

    The root carries the others a second time as consolidated metadata: zarr then walks the hierarchy without stumbling
    over the files that are hoist's own (COMMIT.json, LOCK, crc/, scratch/).

    Raises ValueError if ``attributes`` has a reserved key or a value that is not JSON, or if stages are out of
    order or have names that no directory should have.
    """
    reserved = RESERVED_ATTRIBUTES & attributes.keys()
    if reserved:
        raise ValueError(f"attributes: {', '.join(sorted(reserved))} are the store's own keys")
    for position, layout in enumerate(layouts):
        if layout.index != position:
            raise ValueError(f"layouts: stage {layout.name!r} has index {layout.index} at position {position}")
        if not _DIRECTORY_NAME.fullmatch(layout.directory):
            raise ValueError(f"layouts: stage name {layout.name!r} is not made of letters, digits and . _ -")
    nodes: dict[str, dict[str, Any]] = {STAGES_DIRECTORY: _group({})}
    for layout in layouts:
        directory = stage_path(layout)
        nodes[directory] = _group({"hoist": layout.to_json()})
        if layout.num_chunks:
            for array in StateArray:
                nodes[f"{directory}/{array.value}"] = _array(
                    shape=(num_slots, layout.padded_elements),
                    chunk_shape=(1, layout.chunk_elements),
                    dtype=array.dtype,
                    dimension_names=("slot", "element"),
                    itemsize=array.itemsize,
                )
        if layout.frozen_bytes:
            nodes[f"{directory}/{FROZEN_NAME}"] = _array(
                shape=(layout.frozen_bytes,),
                chunk_shape=(layout.frozen_bytes,),
                dtype="uint8",
                dimension_names=("byte",),
                itemsize=1,
            )
    root = _group(
        {
            "hoist": {
                "format_version": FORMAT_VERSION,
                "created_by": f"hoist {__version__}",
                "store_id": store_id,
                "num_slots": num_slots,
                "chunk_elements": {
                    "quantum": CHUNK_QUANTUM_ELEMENTS,
                    "largest": max((layout.chunk_elements for layout in layouts), default=0),
                },
                "stages": [layout.directory for layout in layouts],
                **attributes,
            }
        }
    )
    root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": nodes}
    files = {METADATA_NAME: dump_json(root, what="attributes")}
    for node, document in nodes.items():
        files[f"{node}/{METADATA_NAME}"] = dump_json(document, what=node)
    return files


def hoist_attributes(data: bytes, path: Path) -> dict[str, Any]:
    """``attributes.hoist`` of a zarr.json. Raises StoreFormatError if there is none."""
    document = load_json(data, path)
    attributes = document.get("attributes")
    found = attributes.get("hoist") if isinstance(attributes, dict) else None
    if not isinstance(found, dict):
        raise StoreFormatError(f"{path}: attributes.hoist: expected an object, saw {found!r:.100}; not a hoist store")
    return found


def callers_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The root's ``attributes.hoist`` without what the store itself put there."""
    return {key: value for key, value in attributes.items() if key not in RESERVED_ATTRIBUTES}


def check_version(version: object, path: Path) -> None:
    """Raise StoreFormatError unless ``version`` is the one that this hoist reads."""
    if version != FORMAT_VERSION:
        raise StoreFormatError(
            f"{path}: format_version: saw {version!r}, this hoist ({__version__}) reads {FORMAT_VERSION}; "
            "use the hoist that made the store"
        )


def decode_layout(data: bytes, path: Path, *, directory: str, index: int) -> StageLayout:
    """The layout in a stage's zarr.json. Raises StoreFormatError, also if it is another stage's."""
    found = hoist_attributes(data, path)
    try:
        layout = StageLayout.from_json(found)
    except (KeyError, TypeError, ValueError) as error:
        seen = f"{type(error).__name__}: {error}"
        raise StoreFormatError(f"{path}: attributes.hoist: expected a stage's layout, saw {seen}") from error
    if (layout.index, layout.directory) != (index, directory):
        raise StoreFormatError(f"{path}: attributes.hoist: expected stage {directory!r}, saw {layout.directory!r}")
    return layout


# --- COMMIT.json ------------------------------------------------------------------------------------------------


def encode_commit(record: CommitRecord) -> bytes:
    """COMMIT.json's bytes. Raises ValueError if ``adam_steps`` or ``run`` is not JSON."""
    body = dump_json(
        {
            "format_version": FORMAT_VERSION,
            "store_id": record.store_id,
            "generation": record.generation,
            "step": record.step,
            "slots": list(record.slots),
            "checksum_file": record.checksum_file,
            "checksum_file_crc32c": record.checksum_file_crc32c,
            "metadata_crc32c": record.metadata_crc32c,
            "drives": [dict(drive) for drive in record.drives],
            "adam_steps": dict(record.adam_steps),
            "run": dict(record.run),
        },
        what="commit record",
    )
    covered = body[1:] + b"\n"
    return _CHECKSUM_PREFIX + b"%08x" % google_crc32c.value(covered) + b'",' + covered


_T = TypeVar("_T")


def _field(document: Mapping[str, Any], name: str, kind: type[_T], path: Path) -> _T:
    if name not in document:
        raise StoreFormatError(f"{path}: {name}: missing")
    value = document[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise StoreFormatError(f"{path}: {name}: expected {kind.__name__}, saw {value!r:.100}")
    return value


def decode_commit(data: bytes, path: Path) -> CommitRecord:
    """Read what :func:`encode_commit` wrote. Raises StoreFormatError with file, offset or field, and what was seen."""
    if not data.startswith(_CHECKSUM_PREFIX):
        seen = data[: len(_CHECKSUM_PREFIX)]
        raise StoreFormatError(f"{path}: offset 0: expected {_CHECKSUM_PREFIX!r}, saw {seen!r}")
    stated = data[len(_CHECKSUM_PREFIX) : len(_CHECKSUM_PREFIX) + 8].decode("ascii", "backslashreplace")
    actual = f"{google_crc32c.value(data[_COVERED_FROM:]):08x}"
    if stated != actual:
        raise StoreFormatError(
            f"{path}: offset {len(_CHECKSUM_PREFIX)}: checksum: the file states {stated!r}, its bytes from offset "
            f"{_COVERED_FROM} to {len(data)} give {actual!r}"
        )
    document = load_json(data, path)
    check_version(document.get("format_version"), path)
    adam_steps = _field(document, "adam_steps", dict, path)
    for name, count in adam_steps.items():
        if type(count) is not int or count < 0:
            raise StoreFormatError(f"{path}: adam_steps[{name!r}]: expected a count, saw {count!r:.100}")
    slots = _field(document, "slots", list, path)
    for stage, digits in enumerate(slots):
        if not isinstance(digits, str) or not set(digits) <= {"0", "1", "2"}:
            raise StoreFormatError(f"{path}: slots[{stage}]: expected a string of 0 to 2, saw {digits!r:.100}")
    generation = _field(document, "generation", int, path)
    checksum_file = _field(document, "checksum_file", str, path)
    if checksum_file != checksum_path(generation):
        expected = checksum_path(generation)
        raise StoreFormatError(f"{path}: checksum_file: expected {expected!r}, saw {checksum_file!r:.100}")
    return CommitRecord(
        store_id=_field(document, "store_id", str, path),
        generation=generation,
        step=_field(document, "step", int, path),
        slots=tuple(slots),
        checksum_file=checksum_file,
        checksum_file_crc32c=_field(document, "checksum_file_crc32c", int, path),
        metadata_crc32c=_field(document, "metadata_crc32c", int, path),
        drives=tuple(_field(document, "drives", list, path)),
        adam_steps=adam_steps,
        run=_field(document, "run", dict, path),
    )


# --- the CRC file -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class StageChecksums:
    """CRC32C of one stage's files as last written."""

    chunks: npt.NDArray[np.uint32]
    """[num_chunks, 4], columns in the order of :class:`StateArray`."""
    frozen: int
    """Of the frozen array; 0 if there is none."""


def encode_checksums(layouts: Sequence[StageLayout], checksums: Sequence[StageChecksums]) -> bytes:
    """The CRC file: little-endian uint32; per stage, per chunk, per array; then the stage's frozen array if it has one.

    Raises ValueError if the two sequences differ in length.
    """
    parts: list[bytes] = []
    for layout, stage in zip(layouts, checksums, strict=True):
        parts.append(stage.chunks.astype("<u4").tobytes())
        if layout.frozen_bytes:
            parts.append(int(stage.frozen).to_bytes(4, "little"))
    return b"".join(parts)


def decode_checksums(
    data: bytes, path: Path, *, layouts: Sequence[StageLayout], expected_crc32c: int
) -> list[StageChecksums]:
    """Read what :func:`encode_checksums` wrote. Raises StoreFormatError on a wrong length or checksum."""
    per_stage = [len(StateArray) * layout.num_chunks + bool(layout.frozen_bytes) for layout in layouts]
    if len(data) != 4 * sum(per_stage):
        raise StoreFormatError(f"{path}: expected {4 * sum(per_stage)} bytes, saw {len(data)}")
    actual = google_crc32c.value(data)
    if actual != expected_crc32c:
        raise StoreFormatError(
            f"{path}: checksum: {COMMIT_NAME} states {expected_crc32c:08x}, its {len(data)} bytes give {actual:08x}"
        )
    numbers = np.frombuffer(data, dtype="<u4").astype(np.uint32)
    found: list[StageChecksums] = []
    start = 0
    for layout, count in zip(layouts, per_stage, strict=True):
        stage = numbers[start : start + count]
        start += count
        chunks = stage[: len(StateArray) * layout.num_chunks].reshape(layout.num_chunks, len(StateArray)).copy()
        found.append(StageChecksums(chunks=chunks, frozen=int(stage[-1]) if layout.frozen_bytes else 0))
    return found
