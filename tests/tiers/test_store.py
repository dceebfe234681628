"""A store is created, filled, committed, opened again, and read by zarr alone: the same bytes every time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from hoist.tiers import checksum
from hoist.tiers import format as store_format
from hoist.tiers.format import StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import Piece
from hoist.tiers.slots import ChunkState
from hoist.tiers.store import Store
from tests.support.stores import (
    HARD_NAME,
    PIECE_ELEMENTS,
    aligned,
    commit,
    committed,
    content,
    create,
    fill,
    read_version,
    small_layouts,
    write_chunk,
    write_frozen,
    write_pieces,
)

CHUNKS = [(layout.index, chunk) for layout in small_layouts() for chunk in range(layout.num_chunks)]


def files_below(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def test_round_trip(tmp_path: Path, engine: IoEngine) -> None:
    run = {"rng": [1, 2, 3], "data": {"epoch": 1, "window": 7}, "loss": 0.1 + 0.2, "name": HARD_NAME}
    attributes = {"model_config": {"hidden": 64, "name": HARD_NAME}, "pair": (1, 2)}
    with create(tmp_path / "store", engine, attributes=attributes) as store:
        before = store.record
        assert before is None
        fill(store, engine, 1)
        statistics = store.commit(step=0, adam_steps={HARD_NAME: 0}, run=run)
        created_attributes, created_record = store.attributes, store.record
        assert statistics.num_files == 4 * len(CHUNKS) + 2
        assert (statistics.generation, statistics.step) == (1, 0)
    with Store.open(tmp_path / "store", engine=engine, check="crc") as store:
        assert store.layouts == small_layouts()
        assert store.attributes == created_attributes == {**attributes, "pair": [1, 2]}
        assert store.record == created_record
        assert store.record is not None
        assert store.record.run == run
        assert store.record.adam_steps == {HARD_NAME: 0}
        assert [read_version(store, engine, *chunk, range(2)) for chunk in CHUNKS] == [1] * len(CHUNKS)
        assert list(store.verify()) == []


def test_zarr_reads_the_same_numbers(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine, seed=1) as store:
        write_chunk(store, engine, 0, 1, seed=2)
        commit(store, 1)
        record = store.record
    assert record is not None
    root = zarr.open_group(directory, mode="r")
    hoist = dict(root.attrs)["hoist"]
    assert isinstance(hoist, dict)
    assert hoist["format_version"] == store_format.FORMAT_VERSION
    assert hoist["model_config"] == {"hidden": 64}
    walked = {name for name, _ in root.members(max_depth=None)}  # a warning would be an error here
    assert {"stages/000-embed/weight_hi", "stages/001-layer.0/exp_avg_sq", "stages/002-head/buffers"} <= walked
    assert "stages/002-head/weight_hi" not in walked
    for layout in small_layouts():
        for piece in layout.pieces(PIECE_ELEMENTS):
            slot = int(record.slots[layout.index][piece.chunk])
            seed = 2 if (layout.index, piece.chunk) == (0, 1) else 1
            for array in StateArray:
                stored = root[f"stages/{layout.directory}/{array.value}"]
                assert isinstance(stored, zarr.Array)
                numbers = np.asarray(stored[slot, piece.start : piece.stop])
                num_bytes = piece.num_elements * array.itemsize
                expected = content(seed, layout.index, array, piece.start * array.itemsize, num_bytes).numpy()
                assert numbers.dtype == np.dtype(array.dtype)
                assert numbers.tobytes() == expected.tobytes()
    buffers = root["stages/000-embed/buffers"]
    assert isinstance(buffers, zarr.Array)
    assert np.array_equal(np.asarray(buffers[:]), np.arange(4096) % 251)


def test_without_consolidated_metadata_zarr_finds_the_same_arrays(tmp_path: Path, engine: IoEngine) -> None:
    with committed(tmp_path / "store", engine):
        pass
    stages = zarr.open_group(tmp_path / "store" / "stages", mode="r")
    assert len(list(stages.members(max_depth=None))) == 3 + 2 * 4 + 2
    attributes = dict(stages["001-layer.0"].attrs)["hoist"]
    assert attributes == small_layouts()[1].to_json()


def test_every_file_is_reserved_before_anything_is_written(tmp_path: Path, engine: IoEngine) -> None:
    seen: list[tuple[int, int]] = []
    with create(tmp_path / "store", engine, progress=lambda done, total: seen.append((done, total))):
        chunks = [path for path in (tmp_path / "store" / "stages").rglob("c/*/*") if path.is_file()]
        assert len(chunks) == 2 * 4 * len(CHUNKS)
        for path in chunks:
            assert path.stat().st_blocks * 512 >= path.stat().st_size > 0
        assert seen[-1][0] == seen[-1][1] == 2 * (2 * 8192 + 4096) * 12 + 2 * 4096
        assert seen == sorted(seen)


def test_moments_of_a_new_store_read_as_zeros_without_being_written(tmp_path: Path, engine: IoEngine) -> None:
    """As the importer does it: weights are written, zero moments only counted."""
    with create(tmp_path / "store", engine) as store:
        for layout in store.layouts:
            for chunk in range(layout.num_chunks):
                sums = checksum.ChunkChecksum(layout, chunk)
                for piece in layout.pieces(PIECE_ELEMENTS):
                    for array in (StateArray.WEIGHT_HI, StateArray.WEIGHT_LO):
                        if piece.chunk == chunk:
                            place = store.place(layout.index, array, piece, write=True)
                            data = content(5, layout.index, array, piece.start * array.itemsize, place.num_bytes)
                            engine.write(place.path, place.offset_bytes, data).result()
                            sums.extend(array, data)
                sums.extend_zeros(StateArray.EXP_AVG)
                sums.extend_zeros(StateArray.EXP_AVG_SQ)
                store.note_written(layout.index, chunk, sums.finish())
            if layout.frozen_bytes:
                write_frozen(store, engine, layout.index)
        commit(store, 0)
    with Store.open(tmp_path / "store", engine=engine, check="crc") as store:
        piece = store.layouts[0].pieces(PIECE_ELEMENTS)[0]
        place = store.place(0, StateArray.EXP_AVG, piece, write=False)
        data = aligned(place.num_bytes).fill_(7)
        engine.read(place.path, place.offset_bytes, data).result()
        assert not data.any()


def test_generations_replace_each_other(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        before = files_below(directory)
        for step in (1, 2, 3):
            write_chunk(store, engine, 1, 0, seed=step + 1)
            commit(store, step)
            assert [path.name for path in (directory / "crc").iterdir()] == [f"{step + 1}.bin"]
        after = files_below(directory)
    assert after.keys() - {"crc/4.bin"} == before.keys() - {"crc/1.bin"}
    with Store.open(directory, engine=engine, writable=False) as store:
        assert store.record is not None
        assert (store.record.step, store.record.generation) == (3, 4)
        assert read_version(store, engine, 1, 0, range(1, 5)) == 4
        assert read_version(store, engine, 0, 0, range(1, 5)) == 1


def test_a_commit_flushes_only_what_was_written(tmp_path: Path, engine: IoEngine) -> None:
    with committed(tmp_path / "store", engine) as store:
        write_chunk(store, engine, 1, 0, seed=2)
        assert store.commit(step=1, adam_steps={}, run={}).num_files == 4
        assert store.commit(step=1, adam_steps={}, run={}).num_files == 0


def test_reads_go_to_the_old_version_until_a_chunk_is_noted(tmp_path: Path, engine: IoEngine) -> None:
    with committed(tmp_path / "store", engine, seed=1) as store:
        sums = write_pieces(store, engine, 0, 0, seed=2)
        assert store.chunk_state(0, 0) is ChunkState.WRITING
        assert read_version(store, engine, 0, 0, range(1, 3)) == 1
        store.note_written(0, 0, sums)
        assert store.chunk_state(0, 0) is ChunkState.WRITTEN
        assert read_version(store, engine, 0, 0, range(1, 3)) == 2
        assert list(store.verify(buffer_bytes=8192)) == []  # the committed version is still there, whole


def test_illegal_moves_change_nothing(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with create(directory, engine) as store:
        piece = store.layouts[0].pieces(PIECE_ELEMENTS)[0]
        with pytest.raises(RuntimeError, match="read before it was ever written"):
            store.place(0, StateArray.WEIGHT_HI, piece, write=False)
        with pytest.raises(RuntimeError, match="no write had begun"):
            store.note_written(0, 0, dict.fromkeys(StateArray, 0))
        with pytest.raises(RuntimeError, match="stage 0 chunk 0: is absent, cannot commit"):
            commit(store, 0)
        write_chunk(store, engine, 0, 0, seed=1)
        write_chunk(store, engine, 0, 1, seed=1)
        write_chunk(store, engine, 1, 0, seed=1)
        with pytest.raises(RuntimeError, match="'embed': frozen tensors were never written"):
            commit(store, 0)
        with pytest.raises(ValueError, match=r"'layer\.0': has no frozen tensors"):
            store.note_frozen(1, 0)
        fill(store, engine, 1)
        with pytest.raises(ValueError, match="commit record: cannot be written as JSON"):
            commit(store, 0, run={"loss": float("nan")})
        assert not (directory / "COMMIT.json").exists()
        commit(store, 5)
        with pytest.raises(RuntimeError, match="have no second slot"):
            write_frozen(store, engine, 0)
        with pytest.raises(ValueError, match="step: 4 is before the committed step 5"):
            commit(store, 4)
        write_pieces(store, engine, 0, 1, seed=2)
        with pytest.raises(RuntimeError, match="stage 0 chunk 1: is writing, cannot commit"):
            commit(store, 6)
        with pytest.raises(ValueError, match="checksums: expected one for each of weight_hi"):
            store.note_written(0, 1, {StateArray.EXP_AVG: 0})
        with pytest.raises(ValueError, match="does not lie in a chunk"):
            store.place(0, StateArray.WEIGHT_HI, replace(piece, chunk=1), write=True)
        with pytest.raises(IndexError, match="no such chunk"):
            store.place(0, StateArray.WEIGHT_HI, Piece(index=9, chunk=2, start=16384, stop=20480), write=True)
        write_chunk(store, engine, 0, 1, seed=2)
        commit(store, 6)
    with pytest.raises(RuntimeError, match="the store is closed"):
        commit(store, 7)


def test_read_only_changes_nothing_and_needs_no_lock(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine) as writer:
        (directory / "crc" / "99.bin").write_bytes(b"left over")
        before = files_below(directory)
        with Store.open(directory, engine=engine, writable=False, check="crc") as reader:
            assert files_below(directory) == before
            assert reader.is_current()
            piece = reader.layouts[0].pieces(PIECE_ELEMENTS)[0]
            with pytest.raises(RuntimeError, match="opened read-only"):
                reader.place(0, StateArray.WEIGHT_HI, piece, write=True)
            with pytest.raises(RuntimeError, match="opened read-only"):
                commit(reader, 1)
            commit(writer, 1)
            assert not reader.is_current()
            assert writer.is_current()


def test_scratch_is_reserved_and_emptied_at_the_next_start(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        path = store.scratch_file("activations", 1 << 20)
        assert path.stat().st_blocks * 512 >= 1 << 20
        assert store.scratch_file("activations", 1 << 20) == path
        engine.write(path, 0, aligned(4096)).result()
        for bad in ("", "..", "a/b"):
            with pytest.raises(ValueError, match="is not a file name"):
                store.scratch_file(bad, 1)
    with Store.open(directory, engine=engine):
        assert list((directory / "scratch").iterdir()) == []


def test_holes_that_copying_left_are_filled_at_opening(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine):
        pass
    holed = directory / "stages/001-layer.0/exp_avg/c/1/0"
    holed.unlink()
    with holed.open("wb") as file:
        file.truncate(4 * 4096)
    with Store.open(directory, engine=engine, writable=False):
        assert holed.stat().st_blocks == 0
    with Store.open(directory, engine=engine):
        assert holed.stat().st_blocks * 512 == 4 * 4096


def test_fresh_starts_over_and_leaves_other_files(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        old = store.store_id
    (directory / "notes.jsonl").write_text("mine")
    left_by_runs = ("metrics.jsonl", "status.json", "timeline.json")
    for name in left_by_runs:
        (directory / name).write_text("of the store before")
    with create(directory, engine, fresh=True) as store:
        before = store.record
        assert before is None
        assert store.store_id != old
        assert not (directory / "COMMIT.json").exists()
        fill(store, engine, 2)
        commit(store, 0)
        assert store.record is not None
        assert store.record.generation == 1
    assert (directory / "notes.jsonl").read_text() == "mine"
    assert not any((directory / name).exists() for name in left_by_runs)
    with Store.open(directory, engine=engine, check="crc") as store:
        assert read_version(store, engine, 0, 0, range(1, 3)) == 2
    (directory / "timeline.json").mkdir()  # no run's: it stays, and is no obstacle
    with create(directory, engine, fresh=True):
        assert (directory / "timeline.json").is_dir()


def test_a_creation_that_never_committed_is_replaced(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with create(directory, engine) as store:
        write_chunk(store, engine, 0, 0, seed=3)
        before = files_below(directory)
    with create(directory, engine) as store:
        assert files_below(directory).keys() - {"wear.json"} == before.keys()
        assert store.chunk_state(0, 0) is ChunkState.ABSENT
        path = store.place(0, StateArray.EXP_AVG, store.layouts[0].pieces(PIECE_ELEMENTS)[0], write=True).path
        assert not any(path.read_bytes())
    (directory / "zarr.json").write_text('{"zarr_fo')  # cut short within the very first write
    with create(directory, engine):
        pass


def test_a_failed_creation_leaves_nothing(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        create(directory, engine, progress=stop)
    assert not directory.exists()
    directory.mkdir()
    with pytest.raises(InterruptedError):
        create(directory, engine, progress=stop)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("attributes", [{"store_id": 1}, {"x": float("inf")}, {"x": object()}])
def test_attributes_must_be_json_and_not_the_stores_own(
    tmp_path: Path, engine: IoEngine, attributes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="attributes: "):
        create(tmp_path / "store", engine, attributes=attributes)
    assert not (tmp_path / "store").exists()


def test_metadata_is_plain_json(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine):
        pass
    for path in [*directory.rglob("zarr.json"), directory / "COMMIT.json"]:
        text = path.read_text(encoding="ascii")
        assert isinstance(json.loads(text, parse_constant=pytest.fail), dict)


@pytest.mark.parametrize("sizes", [(0,), (1,), (4095, 1, 4097), (2**20, 2**20 + 1, 3)])
def test_checksums_in_parts_and_over_zeros(sizes: tuple[int, ...]) -> None:
    data = np.frombuffer(np.random.default_rng(0).bytes(sum(sizes)), dtype=np.uint8)
    whole = checksum.of_bytes(data.tobytes())
    parts, start = 0, 0
    for size in sizes:
        parts = checksum.extend(parts, torch.from_numpy(data[start : start + size].copy()))
        start += size
        assert checksum.extend_zeros(parts, size) == checksum.extend(parts, np.zeros(size, np.uint8))
        first, second = (checksum.extend(0, part) for part in (data[:start], data[start:]))
        assert checksum.combine(first, second, data.size - start) == whole
    assert parts == whole
    assert checksum.extend(0, np.frombuffer(b"123456789", np.uint8)) == 0xE3069283  # the check value of CRC-32C


def test_a_chunks_checksum_wants_every_piece_once() -> None:
    layout = small_layouts()[0]
    sums = checksum.ChunkChecksum(layout, 1)
    used = 4096 * 2
    sums.extend(StateArray.WEIGHT_HI, np.ones(used, np.uint8))
    too_many = f"weight_hi of chunk 1 of stage 'embed': {used + 1} bytes, its pieces hold {used}"
    with pytest.raises(ValueError, match=too_many):
        sums.extend(StateArray.WEIGHT_HI, np.ones(1, np.uint8))
    with pytest.raises(ValueError, match=f"weight_lo of chunk 1 of stage 'embed': {used} bytes of its pieces were not"):
        sums.finish()
    for array in StateArray:
        sums.extend_zeros(array)
    whole = np.concatenate([np.ones(used, np.uint8), np.zeros(used, np.uint8)])
    assert sums.finish()[StateArray.WEIGHT_HI] == checksum.extend(0, whole)
    with pytest.raises(ValueError, match=r"chunk: 2 is not in 0\.\.1"):
        checksum.ChunkChecksum(layout, 2)
    with pytest.raises(ValueError, match="expected 1-D uint8"):
        checksum.extend(0, torch.zeros(2, dtype=torch.int16))


def test_descriptors_do_not_leak(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine):
        pass
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with Store.open(directory, engine=engine, writable=False) as reader:
            assert reader.record is not None
        with Store.open(directory, engine=engine) as store:
            assert reader.record == store.record
    assert len(list(Path("/proc/self/fd").iterdir())) == before
