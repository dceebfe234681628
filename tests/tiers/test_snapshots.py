"""A snapshot keeps a commit while the store goes on, opens like a store, and brings the store back: the same bytes.

That a killed process leaves nothing half made is in `test_snapshots_crash.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from hoist.tiers import snapshots
from hoist.tiers.errors import CorruptChunkError, StoreFormatError, StoreRefusedError
from hoist.tiers.format import COMMIT_NAME, StateArray, chunk_path
from hoist.tiers.io.base import IoEngine
from hoist.tiers.snapshots import SnapshotInfo, SnapshotMaker
from hoist.tiers.store import Store
from tests.support.commands import tree
from tests.support.faults import quick_directory
from tests.support.stores import commit, committed, content, create, fill, read_version, small_layouts, write_chunk

CHUNKS = [(layout.index, chunk) for layout in small_layouts() for chunk in range(layout.num_chunks)]
SEEDS = range(1, 9)
#: Bytes of one version of every chunk.
VERSION_BYTES = (2 * 8192 + 4096) * 12


@pytest.fixture
def store(tmp_path: Path, engine: IoEngine) -> Iterator[Store]:
    """Version 1, committed as step 0."""
    with committed(tmp_path / "store", engine) as made:
        yield made


def take(store: Store, engine: IoEngine, name: str = "kept") -> SnapshotInfo:
    return snapshots.take(store, name, engine=engine)


def versions(store: Store, engine: IoEngine) -> list[int]:
    return [read_version(store, engine, *chunk, SEEDS) for chunk in CHUNKS]


def versions_in(directory: Path, engine: IoEngine) -> list[int]:
    """Versions of all chunks of a store or snapshot, every checksum compared."""
    with Store.open(directory, engine=engine, writable=False, check="crc") as opened:
        return versions(opened, engine)


def go_on(store: Store, engine: IoEngine, seed: int) -> None:
    """Write a version of everything and commit it as a step of that number."""
    fill(store, engine, seed)
    commit(store, seed)


def inodes(directory: Path, pattern: str) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_ino for path in directory.glob(pattern) if path.is_file()}


def reserved(store: Store) -> list[Path]:
    return sorted((store.directory / "snapshots" / ".replacements").iterdir())


def test_a_snapshot_links_and_writes_no_chunk(store: Store, engine: IoEngine) -> None:
    (store.directory / "model").mkdir()
    (store.directory / "model" / "config.json").write_text("{}")
    before = engine.statistics().written_bytes
    seen: list[tuple[int, int]] = []
    info = snapshots.take(store, "kept", engine=engine, progress=lambda *now: seen.append(now))
    assert engine.statistics().written_bytes == before
    assert seen[-1] == (VERSION_BYTES + 2 * 4096,) * 2
    assert info == snapshots.find(store.directory, "kept")
    assert (info.step, info.automatic, info.directory) == (0, False, store.directory / "snapshots" / "kept")
    for pattern in ("stages/*/*/c/0/*", "stages/*/buffers/c/0", "**/zarr.json", "model/*"):
        mine, theirs = inodes(store.directory, pattern), inodes(info.directory, pattern)
        theirs = {name: number for name, number in theirs.items() if not name.startswith("snapshots")}
        assert theirs
        assert all(mine[name] == number for name, number in theirs.items())
    assert (info.directory / COMMIT_NAME).read_bytes() == (store.directory / COMMIT_NAME).read_bytes()
    assert not list(info.directory.glob("stages/*/*/c/1/*"))
    assert sum(path.stat().st_blocks * 512 for path in reserved(store)) == VERSION_BYTES
    assert versions_in(info.directory, engine) == [1] * len(CHUNKS)


def test_the_store_goes_on_and_the_snapshot_stays(store: Store, engine: IoEngine) -> None:
    info = take(store, engine)
    numbers = inodes(info.directory, "stages/*/*/c/*/*")
    for seed in (2, 3, 4):
        go_on(store, engine, seed)
        assert versions_in(info.directory, engine) == [1] * len(CHUNKS)
        assert versions(store, engine) == [seed] * len(CHUNKS)
    assert inodes(info.directory, "stages/*/*/c/*/*") == numbers
    assert not set(numbers.values()) & set(inodes(store.directory, "stages/*/*/c/*/*").values())
    assert reserved(store) == []
    assert list(store.verify()) == []


def test_chunks_that_are_not_written_stay_shared(store: Store, engine: IoEngine) -> None:
    info = take(store, engine)
    write_chunk(store, engine, 0, 1, seed=2)
    commit(store, 2)
    assert len(reserved(store)) == 4 * (len(CHUNKS) - 1)
    for chunk in CHUNKS:
        name = chunk_path(store.layouts[chunk[0]], StateArray.EXP_AVG, 0, chunk[1])
        same = (store.directory / name).samefile(info.directory / name)
        assert same == (chunk != (0, 1))
    write_chunk(store, engine, 0, 1, seed=3)  # into the file that has taken the place of the snapshot's
    write_chunk(store, engine, 0, 0, seed=3)
    commit(store, 3)
    assert versions(store, engine) == [3, 3, 1]
    assert versions_in(info.directory, engine) == [1] * len(CHUNKS)


def test_snapshots_of_the_same_commit_need_room_once(store: Store, engine: IoEngine) -> None:
    take(store, engine, "a")
    take(store, engine, "b")
    assert len(reserved(store)) == 4 * len(CHUNKS)
    snapshots.remove(store, "a", engine=engine)
    assert len(reserved(store)) == 4 * len(CHUNKS)
    go_on(store, engine, 2)
    assert versions_in(store.directory / "snapshots" / "b", engine) == [1] * len(CHUNKS)
    snapshots.remove(store, "b", engine=engine)
    assert snapshots.list_snapshots(store.directory) == ([], [])
    assert reserved(store) == []
    go_on(store, engine, 3)


def test_removal_gives_the_space_back(store: Store, engine: IoEngine) -> None:
    take(store, engine)
    snapshots.remove(store, "kept", engine=engine)
    assert reserved(store) == []
    assert not (store.directory / "snapshots" / "kept").exists()
    assert all(number.stat().st_nlink == 1 for number in store.directory.glob("stages/*/*/c/*/*"))
    with pytest.raises(StoreRefusedError, match="has no snapshot 'kept'; there are: none"):
        snapshots.remove(store, "kept", engine=engine)


def test_another_process_goes_on(tmp_path: Path, engine: IoEngine) -> None:
    """What is shared is found again when the store is opened."""
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        info = take(store, engine)
    for seed in (2, 3):
        with Store.open(directory, engine=engine) as store:
            go_on(store, engine, seed)
    assert versions_in(info.directory, engine) == [1] * len(CHUNKS)
    assert versions_in(directory, engine) == [3] * len(CHUNKS)


def test_a_snapshot_removed_by_hand(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        take(store, engine)
    shutil.rmtree(directory / "snapshots" / "kept")
    with Store.open(directory, engine=engine) as store:
        assert reserved(store) == []
        go_on(store, engine, 2)


def test_a_snapshot_removed_by_hand_while_the_store_is_open(store: Store, engine: IoEngine) -> None:
    info = take(store, engine)
    numbers = inodes(store.directory, "stages/*/*/c/*/*")
    shutil.rmtree(info.directory)
    go_on(store, engine, 2)
    assert reserved(store) == []
    assert inodes(store.directory, "stages/*/*/c/*/*") == numbers
    go_on(store, engine, 3)


def test_links_that_others_made_are_respected(tmp_path: Path, engine: IoEngine) -> None:
    """A copy of the store by hard links (cp -al) is not written to either, committed slot or free."""
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        go_on(store, engine, 2)
    subprocess.run(["cp", "-al", directory, tmp_path / "copy"], check=True)
    before = tree(*(tmp_path / "copy").glob("stages/*/*/c"))
    with Store.open(directory, engine=engine) as store:
        go_on(store, engine, 3)
        go_on(store, engine, 4)
    assert tree(*(tmp_path / "copy").glob("stages/*/*/c")) == before


def test_zarr_reads_a_snapshot(store: Store, engine: IoEngine) -> None:
    info = take(store, engine)
    go_on(store, engine, 2)
    root = zarr.open_group(info.directory, mode="r")
    stored = root["stages/000-embed/exp_avg"]
    assert isinstance(stored, zarr.Array)
    expected = content(1, 0, StateArray.EXP_AVG, 0, 4096 * 4).numpy()
    assert np.asarray(stored[0, :4096]).tobytes() == expected.tobytes()


def test_chunks_on_another_drive_are_copied(tmp_path: Path, engine: IoEngine) -> None:
    """Where a chunk file is a link to another place, the snapshot has its bytes; training writes there as before."""
    directory = tmp_path / "store"
    with committed(directory, engine):
        pass
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as other:
        for path in [*directory.glob("stages/000-embed/*/c/*/1"), directory / "stages/002-head/buffers/c/0"]:
            moved = Path(other) / "-".join(path.relative_to(directory).parts)
            shutil.copyfile(path, moved)
            path.unlink()
            path.symlink_to(moved)
        with Store.open(directory, engine=engine) as store:
            before = engine.statistics().written_bytes
            info = take(store, engine)
            assert engine.statistics().written_bytes - before == 8192 * 12 + 4096
            assert not [path for path in info.directory.rglob("*") if path.is_symlink()]
            go_on(store, engine, 2)
            go_on(store, engine, 3)
            assert versions_in(info.directory, engine) == [1] * len(CHUNKS)
            snapshots.restore(store, "kept", engine=engine)
            assert versions(store, engine) == [1] * len(CHUNKS)
            assert (directory / "stages/000-embed/exp_avg/c/0/1").is_symlink()
        assert versions_in(directory, engine) == [1] * len(CHUNKS)


def test_snapshots_on_another_drive_are_copies(store: Store, engine: IoEngine) -> None:
    """The snapshots' folder may be a link to one; then nothing is shared, and nothing reserved."""
    with quick_directory() as other:
        (store.directory / "snapshots").symlink_to(other)
        if other.stat().st_dev == store.directory.stat().st_dev:
            pytest.skip("there is no second file system")
        info = take(store, engine)
        assert not store.shared
        go_on(store, engine, 2)
        go_on(store, engine, 3)
        assert versions_in(info.directory, engine) == [1] * len(CHUNKS)
        snapshots.restore(store, "kept", engine=engine)
        assert versions(store, engine) == [1] * len(CHUNKS)
        snapshots.remove(store, "kept", engine=engine)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "ä", "x" * 201, "a\n"])
def test_names(store: Store, engine: IoEngine, name: str) -> None:
    for attempt in (take, lambda *both: snapshots.remove(store, name, engine=engine)):
        with pytest.raises(StoreRefusedError, match=r"give at most 200 letters, digits and \. _ -"):
            attempt(store, engine, name)
    assert not (store.directory / "snapshots").exists()


def test_a_name_is_used_once(store: Store, engine: IoEngine) -> None:
    take(store, engine, "a-1._B")
    before = tree(store.directory / "snapshots")
    with pytest.raises(StoreRefusedError, match=r"there is a snapshot 'a-1\._B'; give another name, or remove it"):
        take(store, engine, "a-1._B")
    assert tree(store.directory / "snapshots") == before


def test_a_snapshot_is_not_trained_in(store: Store, engine: IoEngine) -> None:
    info = take(store, engine)
    before = tree(store.directory / "snapshots")
    message = "is a snapshot, which can be exported and verified but not trained in; hoist restore STORE kept"
    with pytest.raises(StoreRefusedError, match=message):
        Store.open(info.directory, engine=engine)
    with pytest.raises(StoreRefusedError, match=message):
        create(info.directory, engine, fresh=True)
    assert tree(store.directory / "snapshots") == before


def test_a_store_with_snapshots_is_not_replaced(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        take(store, engine, "b")
        take(store, engine, "a")
    before = tree(directory)
    for _ in range(2):
        with pytest.raises(StoreRefusedError, match=r"holds snapshots \(a, b\).*hoist snapshot STORE NAME --remove"):
            create(directory, engine, fresh=True)
        assert tree(directory) == before
    with Store.open(directory, engine=engine) as store:
        for name in ("a", "b"):
            snapshots.remove(store, name, engine=engine)
    with create(directory, engine, fresh=True):
        assert not (directory / "snapshots").exists()


def test_a_snapshot_of_another_store(tmp_path: Path, engine: IoEngine) -> None:
    with committed(tmp_path / "one", engine) as one:
        info = take(one, engine)
    with committed(tmp_path / "two", engine) as two:
        shutil.copytree(info.directory, two.directory / "snapshots" / "kept")
        with pytest.raises(StoreRefusedError, match="is a snapshot of another store"):
            snapshots.restore(two, "kept", engine=engine)
        with pytest.raises(StoreRefusedError, match="has no snapshot 'none'; there are: kept"):
            snapshots.restore(two, "none", engine=engine)


# --- restoring --------------------------------------------------------------------------------------------------------


def test_restore(store: Store, engine: IoEngine) -> None:
    go_on(store, engine, 2)
    kept = store.record
    assert kept is not None
    take(store, engine)
    write_chunk(store, engine, 0, 1, seed=3)
    commit(store, 3)
    go_on(store, engine, 4)
    before = store.record
    assert before is not None
    used = sum(path.stat().st_blocks for path in store.directory.rglob("*") if path.is_file())
    record = snapshots.restore(store, "kept", engine=engine)
    assert sum(path.stat().st_blocks for path in store.directory.rglob("*") if path.is_file()) == used
    now = store.record
    assert now is not None
    assert (record.step, now.step, now.generation) == (2, 2, before.generation + 1)
    assert (now.run, now.adam_steps) == (kept.run, kept.adam_steps)
    assert versions(store, engine) == [2] * len(CHUNKS)
    assert versions_in(store.directory, engine) == [2] * len(CHUNKS)
    for seed in (5, 6):
        go_on(store, engine, seed)
    assert versions_in(store.directory / "snapshots" / "kept", engine) == [2] * len(CHUNKS)
    snapshots.restore(store, "kept", engine=engine)
    assert versions_in(store.directory, engine) == [2] * len(CHUNKS)


def test_restore_while_everything_is_shared(store: Store, engine: IoEngine) -> None:
    take(store, engine)
    snapshots.restore(store, "kept", engine=engine)
    assert versions(store, engine) == [1] * len(CHUNKS)
    go_on(store, engine, 2)
    assert versions_in(store.directory / "snapshots" / "kept", engine) == [1] * len(CHUNKS)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "checksum: committed [0-9a-f]{8}, the file gives"),
    (shorten, r"has \d+ bytes, expected \d+"),
    (Path.unlink, "is missing"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
@pytest.mark.parametrize("name", ["stages/000-embed/exp_avg/c/0/1", "stages/002-head/buffers/c/0"])
def test_a_bad_chunk_is_never_snapshotted(
    store: Store, engine: IoEngine, damage: Callable[[Path], None], reason: str, name: str
) -> None:
    damage(store.directory / name)
    with pytest.raises(CorruptChunkError, match=f"no snapshot 'kept' was made: stage .* is not as .*{reason}"):
        take(store, engine)
    assert snapshots.list_snapshots(store.directory) == ([], [])
    folder = store.directory / "snapshots"
    assert [path for path in folder.rglob("*") if path.name != ".replacements"] == []


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_snapshot_is_not_restored(
    tmp_path: Path, engine: IoEngine, damage: Callable[[Path], None], reason: str
) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        info = take(store, engine)
        go_on(store, engine, 2)
        record = store.record
        damage(info.directory / "stages/001-layer.0/weight_lo/c/0/0")
        with pytest.raises(CorruptChunkError, match=f"{reason}.*snapshot 'kept' cannot be restored, and the store is"):
            snapshots.restore(store, "kept", engine=engine)
    with Store.open(directory, engine=engine, check="crc") as store:
        assert store.record == record
        assert versions(store, engine) == [2] * len(CHUNKS)
        go_on(store, engine, 3)


@pytest.mark.parametrize("name", ["SNAPSHOT.json", "COMMIT.json", "crc/1.bin", "zarr.json"])
def test_a_snapshot_without_its_small_files(store: Store, engine: IoEngine, name: str) -> None:
    info = take(store, engine)
    (info.directory / name).unlink()
    with pytest.raises(StoreFormatError, match=f"{name}: cannot be read: No such file"):
        snapshots.restore(store, "kept", engine=engine)
    assert store.is_current()
    snapshots.remove(store, "kept", engine=engine)
    go_on(store, engine, 2)


@pytest.mark.parametrize(("damage", "_"), DAMAGES)
@pytest.mark.parametrize("slot", [0, 1])
def test_a_damaged_store_is_restored(
    tmp_path: Path, engine: IoEngine, damage: Callable[[Path], None], _: str, slot: int
) -> None:
    """A chunk of the last commit, or of a free slot, is lost: the snapshot brings the store back, whole."""
    directory = tmp_path / "store"
    with committed(directory, engine) as store:
        take(store, engine)
        go_on(store, engine, 2)
    damage(directory / f"stages/000-embed/exp_avg_sq/c/{slot}/0")
    with Store.open(directory, engine=engine, check="nothing") as store:
        snapshots.restore(store, "kept", engine=engine)
    with Store.open(directory, engine=engine, check="crc") as store:
        assert versions(store, engine) == [1] * len(CHUNKS)
        go_on(store, engine, 3)
        go_on(store, engine, 4)
        assert versions(store, engine) == [4] * len(CHUNKS)


def test_a_lost_frozen_array_is_not_papered_over(store: Store, engine: IoEngine) -> None:
    take(store, engine)
    flip(store.directory / "stages/002-head/buffers/c/0")
    with pytest.raises(CorruptChunkError, match="array buffers chunk 0 slot 0: checksum"):
        snapshots.restore(store, "kept", engine=engine)


# --- beside training ------------------------------------------------------------------------------------------------


def test_a_snapshot_is_checked_while_commits_go_on(store: Store, engine: IoEngine) -> None:
    maker = SnapshotMaker(store, "kept", automatic=True)
    maker.begin(engine)
    assert snapshots.list_snapshots(store.directory) == ([], [])
    for seed in (2, 3):
        go_on(store, engine, seed)
    info = maker.finish(engine, buffer_bytes=8192)
    assert (info.automatic, info.step) == (True, 0)
    assert versions_in(info.directory, engine) == [1] * len(CHUNKS)
    assert versions(store, engine) == [3] * len(CHUNKS)


def test_newer_commits_come_later_in_the_list(store: Store, engine: IoEngine) -> None:
    take(store, engine, "z")
    go_on(store, engine, 2)
    take(store, engine, "b")
    snapshots.restore(store, "z", engine=engine)
    take(store, engine, "a")
    found, damaged = snapshots.list_snapshots(store.directory)
    assert [(info.name, info.step) for info in found] == [("z", 0), ("b", 2), ("a", 0)]
    (store.directory / "snapshots" / "b" / COMMIT_NAME).unlink()
    found, damaged = snapshots.list_snapshots(store.directory)
    assert [info.name for info in found] == ["z", "a"]
    assert [str(error).endswith("snapshot 'b' is damaged, remove it") for error in damaged] == [True]


def test_space(store: Store, engine: IoEngine) -> None:
    """The numbers of a refusal; a drive that is really full is in test_snapshots_crash.py."""
    with pytest.raises(StoreRefusedError, match=r"too little free space: a snapshot needs \d+ bytes .*are left to the"):
        snapshots.take(store, "kept", engine=engine, leave_bytes=2**60)
    assert not (store.directory / "snapshots").exists()
