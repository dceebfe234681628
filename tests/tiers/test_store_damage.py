"""Damage to a store is found when it is opened or verified, and the message names the file and the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

from hoist.tiers.errors import CorruptChunkError, StoreFormatError
from hoist.tiers.format import COMMIT_NAME, StateArray, decode_commit
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store
from tests.support.stores import commit, committed, write_chunk

COMMITTED = "stages/000-embed/exp_avg/c/0/1"
FREE = "stages/000-embed/exp_avg/c/1/1"
FROZEN = "stages/002-head/buffers/c/0"


@pytest.fixture
def directory(tmp_path: Path, engine: IoEngine) -> Path:
    """A committed store, closed."""
    with committed(tmp_path / "store", engine):
        pass
    return tmp_path / "store"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def refuses(
    directory: Path, engine: IoEngine, pattern: str, kind: type[StoreFormatError] = StoreFormatError
) -> None:
    """Both ways of opening fail with this message, and the store can be locked afterwards."""
    for writable in (False, True, True):
        with pytest.raises(kind, match=pattern) as caught:
            Store.open(directory, engine=engine, writable=writable, check="crc")
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 1


def remove(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def dangle(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("gone"))


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (remove, "is missing"),
    (shorten, r"has \d+ bytes, expected \d+"),
    (lengthen, r"has \d+ bytes, expected \d+"),
    (dangle, "is a link to nothing"),
    (make_directory, "is not a regular file"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        (COMMITTED, "stage 'embed' array exp_avg chunk 1 slot 0"),
        (FROZEN, "stage 'head' array buffers chunk 0 slot 0"),
    ],
)
def test_a_chunk_that_is_not_whole(
    directory: Path, engine: IoEngine, damage: Callable[[Path], None], reason: str, name: str, place: str
) -> None:
    damage(directory / name)
    refuses(directory, engine, f"{name}: {place}: {reason}", CorruptChunkError)
    with pytest.raises(CorruptChunkError, match=reason):
        Store.open(directory, engine=engine)  # checking sizes is enough


def test_a_chunk_that_is_not_whole_in_the_free_slot(directory: Path, engine: IoEngine) -> None:
    remove(directory / FREE)
    with pytest.raises(CorruptChunkError, match="stage 'embed' array exp_avg chunk 1 slot 1: is missing"):
        Store.open(directory, engine=engine)
    with Store.open(directory, engine=engine, writable=False, check="crc") as store:  # no matter to a reader
        assert list(store.verify()) == []


@pytest.mark.parametrize("offset", [0, 4095, 4096, 4 * 8192 - 1])
@pytest.mark.parametrize("array", StateArray)
def test_a_flipped_bit_is_found_by_verify(directory: Path, engine: IoEngine, array: StateArray, offset: int) -> None:
    """Anywhere in the file: first byte, around a page's border, and in the padding at the end."""
    path = directory / f"stages/000-embed/{array.value}/c/0/1"
    flip(path, offset * array.itemsize // 4)
    with Store.open(directory, engine=engine) as store:  # sizes are right
        seen: list[tuple[int, int]] = []
        bad = list(store.verify(buffer_bytes=8192, progress=lambda done, total: seen.append((done, total))))
        assert [(entry.chunk.stage, entry.chunk.array, entry.chunk.chunk, entry.chunk.slot) for entry in bad] == [
            ("embed", array.value, 1, 0)
        ]
        assert bad[0].reason.startswith("checksum: committed ")
        assert str(bad[0]).startswith(f"{path}: stage 'embed' array {array.value} chunk 1 slot 0: checksum: committed")
        assert seen[-1] == ((2 * 8192 + 4096) * 12 + 2 * 4096,) * 2
    refuses(directory, engine, f"array {array.value} chunk 1 slot 0: checksum: committed", CorruptChunkError)


def test_a_flipped_bit_in_frozen_tensors_and_the_free_slot(directory: Path, engine: IoEngine) -> None:
    flip(directory / FROZEN, 17)
    flip(directory / FREE, 17)
    with Store.open(directory, engine=engine) as store:
        assert [entry.chunk.array for entry in store.verify()] == ["buffers"]


def test_verify_looks_at_what_the_last_commit_names(directory: Path, engine: IoEngine) -> None:
    with Store.open(directory, engine=engine) as store:
        write_chunk(store, engine, 0, 1, seed=2)
        commit(store, 1)
        flip(directory / COMMITTED, 0)
        assert list(store.verify()) == []
        flip(directory / FREE, 0)
        assert [entry.chunk.slot for entry in store.verify()] == [1]


def test_verify_reports_several_and_goes_on(directory: Path, engine: IoEngine) -> None:
    flip(directory / COMMITTED, 0)
    flip(directory / "stages/001-layer.0/weight_hi/c/0/0", 1)
    with Store.open(directory, engine=engine, writable=False) as store:
        shorten(directory / FROZEN)
        assert [entry.chunk.stage for entry in store.verify()] == ["embed", "layer.0", "head"]
        with pytest.raises(ValueError, match="buffer_bytes: 4096 is less than 8192"):
            list(store.verify(buffer_bytes=4096))


# --- COMMIT.json --------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_commit_json_is_found(directory: Path) -> None:
    path = directory / COMMIT_NAME
    whole = path.read_bytes()
    for offset in range(len(whole)):
        for bit in (0x01, 0x10, 0x80):
            broken = bytearray(whole)
            broken[offset] ^= bit
            with pytest.raises(StoreFormatError, match=r"COMMIT\.json: "):
                decode_commit(bytes(broken), path)


def test_every_truncation_of_commit_json_is_found(directory: Path, engine: IoEngine) -> None:
    path = directory / COMMIT_NAME
    whole = path.read_bytes()
    for length in range(len(whole)):
        with pytest.raises(StoreFormatError, match=r"COMMIT\.json: offset (0|11): "):
            decode_commit(whole[:length], path)
    path.write_bytes(whole[:-10])
    stated = r"COMMIT\.json: offset 11: checksum: the file states '[0-9a-f]{8}', its bytes from offset 21 to \d+ give"
    refuses(directory, engine, stated)


def resealed(directory: Path, field: str, value: object) -> None:
    """Change a field of COMMIT.json and set its checksum right again."""
    path = directory / COMMIT_NAME
    document = json.loads(path.read_bytes())
    del document["crc32c"]
    if value is None:
        del document[field]
    else:
        document[field] = value
    covered = json.dumps(document)[1:].encode()
    path.write_bytes(b'{"crc32c":"%08x",' % google_crc32c.value(covered) + covered)


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("format_version", 2, r"format_version: saw 2, this hoist \(.+\) reads 1; use the hoist that made the store"),
        ("format_version", None, "format_version: saw None"),
        ("step", "7", "step: expected int, saw '7'"),
        ("step", True, "step: expected int, saw True"),
        ("generation", None, "generation: missing"),
        ("slots", ["00", "3", ""], r"slots\[1\]: expected a string of 0 to 2, saw '3'"),
        ("slots", ["00", "2", ""], r"slots: a slot is named beyond the 2 that the store has"),
        ("slots", ["00", "0"], r"slots: expected \[2, 1, 0\] chunks per stage, saw \[2, 1\]"),
        ("slots", ["000", "0", ""], r"slots: expected \[2, 1, 0\] chunks per stage, saw \[3, 1, 0\]"),
        ("checksum_file", "../1.bin", r"checksum_file: expected 'crc/1\.bin', saw '\.\./1\.bin'"),
        ("adam_steps", {"w": -1}, r"adam_steps\['w'\]: expected a count, saw -1"),
        ("run", [], r"run: expected dict, saw \[\]"),
        ("drives", {}, r"drives: expected list, saw \{\}"),
        ("drives", ["x"], "drives: expected an id and a path each, saw TypeError"),
        ("drives", [{"path": "."}], "drives: expected an id and a path each, saw KeyError: 'id'"),
        ("drives", [{"id": "x", "path": "../.."}], r"drives: expected the path \. or drives/N, saw '\.\./\.\.'"),
        ("store_id", "other", "store_id: expected .*, saw 'other'"),
        ("metadata_crc32c", 5, "zarr.json of the root or of a stage was changed: COMMIT.json states crc32c 00000005"),
    ],
)
def test_a_wrong_field_is_named(directory: Path, engine: IoEngine, field: str, value: object, pattern: str) -> None:
    resealed(directory, field, value)
    refuses(directory, engine, pattern)


# --- the CRC file and the metadata ----------------------------------------------------------------------------------


def test_the_crc_file(directory: Path, engine: IoEngine) -> None:
    path = directory / "crc" / "1.bin"
    whole = path.read_bytes()
    assert len(whole) == 4 * (3 * 4 + 2)
    flip(path, 7)
    refuses(directory, engine, r"crc/1\.bin: checksum: COMMIT\.json states [0-9a-f]{8}, its 56 bytes give")
    path.write_bytes(whole[:-4])
    refuses(directory, engine, r"crc/1\.bin: expected 56 bytes, saw 52")
    path.unlink()
    refuses(directory, engine, r"crc/1\.bin: cannot be read: No such file or directory")


@pytest.mark.parametrize("name", ["zarr.json", "stages/001-layer.0/zarr.json"])
def test_metadata_that_is_cut_or_changed(directory: Path, engine: IoEngine, name: str) -> None:
    path = directory / name
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    refuses(directory, engine, rf"{name}: not JSON at offset \d+ \(.+\): saw ")
    path.write_bytes(b"[]")
    refuses(directory, engine, f"{name}: expected a JSON object, saw list")
    path.write_bytes(whole.replace(b'"hoist":', b'"other":'))
    refuses(directory, engine, rf"{name}: attributes\.hoist: expected an object, saw None; not a hoist store")
    before, after = (b'"hidden":64', b'"hidden":65') if name == "zarr.json" else (b"[64,3]", b"[3,64]")
    path.write_bytes(whole.replace(before, after))
    refuses(directory, engine, "was changed: COMMIT.json states crc32c")
    path.write_bytes(b"\xff" + whole)
    refuses(directory, engine, rf"{name}: not UTF-8 at offset 0")
    path.unlink()
    refuses(directory, engine, f"{name}: cannot be read: No such file or directory")


def test_a_store_of_another_version(directory: Path, engine: IoEngine) -> None:
    path = directory / "zarr.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version":1', b'"format_version":7'))
    refuses(directory, engine, r"zarr\.json: format_version: saw 7, this hoist \(.+\) reads 1")


def test_stage_metadata_in_the_wrong_place(directory: Path, engine: IoEngine) -> None:
    stages = directory / "stages"
    (stages / "000-embed" / "zarr.json").write_bytes((stages / "001-layer.0" / "zarr.json").read_bytes())
    refuses(directory, engine, "attributes.hoist: expected stage '000-embed', saw '001-layer.0'")
    document = json.loads((stages / "000-embed" / "zarr.json").read_bytes())
    del document["attributes"]["hoist"]["num_chunks"]
    (stages / "000-embed" / "zarr.json").write_text(json.dumps(document))
    refuses(directory, engine, "expected a stage's layout, saw KeyError: 'num_chunks'")
