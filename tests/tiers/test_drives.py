"""A store over several directories: made, opened, read with zarr, replaced, discarded; and each way in which it isn't
there, refused by name with nothing changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zarr

from hoist.tiers import drives, opening
from hoist.tiers.errors import CorruptChunkError, StoreLockedError, StoreRefusedError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.drives import chunk_files, contents, directories, told
from tests.support.processes import mount_small_drive, run_in_process
from tests.support.stores import commit, create, direct_engine, fill, read_version, write_chunk

#: 3 chunks with 4 arrays in 2 slots, 2 frozen arrays.
NUM_FILES = 26


@contextmanager
def spread(folder: Path, engine: IoEngine, num_drives: int = 2, seed: int = 1) -> Iterator[Store]:
    """A small store over so many directories, with version ``seed`` committed as step 0."""
    with create(folder / "store", engine, drives=told(directories(folder, num_drives))) as store:
        fill(store, engine, seed)
        commit(store, 0)
        yield store


def refusal(engine: IoEngine, directory: Path, *, writable: bool = True) -> str:
    """Why the store cannot be opened: one line, and nothing next to it is changed."""
    before = contents(directory.parent)
    with pytest.raises(StoreRefusedError) as raised:
        Store.open(directory, engine=engine, writable=writable)
    message = str(raised.value)
    after = contents(directory.parent)
    assert {**after, str(directory / "LOCK"): ""} == {**before, str(directory / "LOCK"): ""}
    assert "\n" not in message
    return message


# --- making -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drives", [1, 2, 3])
def test_files_lie_where_they_were_dealt_and_the_tree_is_whole(
    tmp_path: Path, engine: IoEngine, num_drives: int
) -> None:
    places = directories(tmp_path, num_drives)
    with spread(tmp_path, engine, num_drives) as store:
        write_chunk(store, engine, 0, 1, seed=2)
        commit(store, 1)
    counts = [len(chunk_files(place)) for place in places]
    assert sum(counts) == NUM_FILES
    assert min(counts) >= NUM_FILES // num_drives - 2
    for place in places[1:]:
        assert {path.name for path in place.iterdir()} == {"DRIVE.json", "stages"}
        for relative in chunk_files(place):
            assert (places[0] / relative).samefile(place / relative)
    with Store.open(places[0], engine=engine, check="crc") as store:
        assert [read_version(store, engine, *chunk, range(1, 3)) for chunk in ((0, 0), (0, 1), (1, 0))] == [1, 2, 1]
        assert list(store.verify()) == []
        record = store.record
    assert record is not None
    assert [drive.path for drive in drives.registered(record, places[0])] == [".", "drives/1", "drives/2"][:num_drives]


def test_zarr_reads_the_whole_tree(tmp_path: Path, engine: IoEngine) -> None:
    """Every array of a store over three directories is that of the same store in one."""
    read = []
    for num_drives in (1, 3):
        folder = tmp_path / str(num_drives)
        folder.mkdir()
        with spread(folder, engine, num_drives):
            pass
        root = zarr.open_group(folder / "store", mode="r")
        read.append(
            {
                name: np.asarray(member[...])
                for name, member in root.members(max_depth=None)
                if isinstance(member, zarr.Array)
            }
        )
    assert len(read[0]) == 10
    assert read[0].keys() == read[1].keys()
    for name, array in read[0].items():
        assert array.any()
        np.testing.assert_array_equal(array, read[1][name])


def test_shares_follow_the_weights(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 2)
    with create(places[0], engine, drives=told(places, [1.0, 4.0])) as store:
        size = [sum((place / path).stat().st_size for path in chunk_files(place)) for place in places]
        assert 2 < size[1] / size[0] < 8
        store.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_removes_what_was_made_on_every_drive(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 3)
    places[2].mkdir()

    def stop(done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create(places[0], engine, drives=told(places), progress=stop)
    assert list(tmp_path.iterdir()) == [places[2]]  # it was there
    assert list(places[2].iterdir()) == []


def test_the_main_directory_comes_first(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 2)
    with pytest.raises(ValueError, match=r"drives: begin with .*drive1, not with the store's own .*store"):
        create(places[0], engine, drives=told(places[::-1]))


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda folder: [folder / "store", folder / "store"], r"store: is named twice among the store's directories"),
        (lambda folder: [folder / "store", folder / "link"], r"link: is named twice"),
        (lambda folder: [folder / "store", folder / "store" / "in"], r"store/in: lies within .*store, another of"),
        (lambda folder: [folder / "a" / "store", folder / "a"], r"a/store: lies within .*a, another of"),
        (lambda folder: [folder / "store", folder / "full"], r"full: is not empty and holds no drive of this store"),
        (lambda folder: [folder / "store", folder / "file"], r"file: is not a directory; name an empty or a new"),
        (lambda folder: [folder / "store", folder / "no" / "x"], r"no/x: cannot create the store: .*no does not exist"),
        (lambda folder: [folder / "store", folder / "other"], r"other: is not empty and holds no drive of this store"),
        (lambda folder: [folder / "store", folder / "theirs"], r"theirs: is a drive of the store at .*other; name an"),
        (lambda folder: [folder / "store", folder / "odd"], r"odd: DRIVE.json is no drive's: .*; name another"),
    ],
    ids=["twice", "linked", "inside", "outside", "full", "file", "no parent", "a store", "another's", "odd"],
)
def test_directories_that_cannot_be_taken(
    tmp_path: Path, engine: IoEngine, make: Callable[[Path], list[Path]], pattern: str
) -> None:
    for name in ("store", "a", "full", "odd"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "odd" / "DRIVE.json").write_text("{}")
    with create(tmp_path / "other", engine, drives=told([tmp_path / "other", tmp_path / "theirs"])) as other:
        fill(other, engine, 1)
        commit(other, 0)
    before = contents(tmp_path)
    places = make(tmp_path)
    for fresh in (False, True):
        with pytest.raises(StoreRefusedError, match=pattern) as raised:
            create(places[0], engine, drives=told(places), fresh=fresh)
        assert "\n" not in str(raised.value)
        assert contents(tmp_path) == before


def test_a_committed_store_is_not_replaced_by_way_of_its_drive(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 2)
    with spread(tmp_path, engine):
        pass
    before = contents(tmp_path)
    with pytest.raises(StoreRefusedError, match="store: holds a committed store; resume it, or start over in it with"):
        create(places[0], engine, drives=told(places))
    assert contents(tmp_path) == before
    places[0].rename(tmp_path / "unmounted")
    before = contents(tmp_path)
    with pytest.raises(StoreRefusedError, match=r"drive1: is a drive of a store at .*, which is not there now; if"):
        create(places[0], engine, drives=told(places))
    assert contents(tmp_path) == before
    with create(places[0], engine, drives=told(places), fresh=True) as store:
        fill(store, engine, 3)
        commit(store, 0)


@pytest.mark.parametrize("num_drives", [1, 2, 3])
def test_fresh_replaces_a_store_with_one_over_other_directories(
    tmp_path: Path, engine: IoEngine, num_drives: int
) -> None:
    places = directories(tmp_path, 3)
    with spread(tmp_path, engine, 2):
        pass
    (places[1] / "mine").write_text("stays")
    with create(places[0], engine, drives=told(places[:num_drives]), fresh=True) as store:
        fill(store, engine, 2)
        commit(store, 0)
    assert (places[1] / "mine").read_text() == "stays"
    assert [len(chunk_files(place)) > 0 for place in places] == [number < num_drives for number in range(3)]
    assert (places[1] / "DRIVE.json").exists() == (num_drives > 1)
    with Store.open(places[0], engine=engine, check="crc") as store:
        assert read_version(store, engine, 0, 0, range(1, 3)) == 2


def die_while_creating(folder: Path, fraction: float) -> None:
    """In a process of its own: it ends while space is reserved."""
    places = directories(folder, 3)

    def stop(done: int, total: int) -> None:
        if done > total * fraction:
            os._exit(7)

    with direct_engine() as engine:
        create(places[0], engine, drives=told(places), progress=stop)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("num_drives", [1, 3])
def test_what_a_killed_creation_left_is_replaced(
    tmp_path: Path, engine: IoEngine, fraction: float, num_drives: int
) -> None:
    places = directories(tmp_path, 3)
    assert run_in_process(die_while_creating, tmp_path, fraction)[0] == 7
    assert all((place / "DRIVE.json").exists() for place in places[1:])
    with create(places[0], engine, drives=told(places[:num_drives])) as store:
        fill(store, engine, 2)
        commit(store, 0)
    assert sum(len(chunk_files(place)) for place in places) == NUM_FILES
    assert [(place / "DRIVE.json").exists() for place in places[1:]] == [num_drives == 3] * 2
    with Store.open(places[0], engine=engine, check="crc"):
        pass


def test_a_directory_that_another_process_is_taking(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 2)
    places[1].mkdir()
    with (
        drives.claimed(places[1]),
        pytest.raises(StoreLockedError, match="drive1: another process is taking it for its store; name another"),
    ):
        create(places[0], engine, drives=told(places))
    assert list(tmp_path.iterdir()) == [places[1]]


def test_space_is_counted_once_for_directories_on_one_file_system(tmp_path: Path, engine: IoEngine) -> None:
    """Each directory's share would fit, both do not; the main one also has the scratch."""
    places = directories(tmp_path, 2)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StoreRefusedError, match=r"store: too little free space: the store needs \d+ bytes") as raised:
        create(places[0], engine, drives=told(places), scratch_bytes=free)
    need, _ = (int(number) for number in re.findall(r"(\d+) bytes", str(raised.value)))
    files = 2 * 12 * 3 * 8192  # chunks of 8192, 8192 and (rounded up) 4096 elements, both slots
    assert free < need < free + files + 4 * 2**20
    assert list(tmp_path.iterdir()) == []


def create_beside_a_small_drive(folder: Path, num_bytes: int, late: bool) -> str | None:
    """In a process of its own, with a tmpfs as second drive: the refusal, None where none can be mounted.

    ``late``: the drive fills up only when the space has been checked.
    """
    small = folder / "small"
    small.mkdir()
    if not mount_small_drive(small, num_bytes):
        return None
    places = [folder / "store", small / "drive"]

    def fill_up(done: int, total: int) -> None:
        if late and not (small / "other").exists():
            free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
            (small / "other").write_bytes(bytes(free - 8192))

    with DirectEngine(num_threads=1) as engine, pytest.raises(StoreRefusedError) as raised:
        create(places[0], engine, drives=told(places), progress=fill_up)
    assert not places[0].exists()
    assert not places[1].exists()
    return str(raised.value)


def test_a_second_drive_that_is_too_small(tmp_path: Path) -> None:
    code, message = run_in_process(create_beside_a_small_drive, tmp_path, 1 << 20, False)
    assert code == 0
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert f"{tmp_path}/small/drive: too little free space: the store needs" in message


def test_a_second_drive_that_fills_up_meanwhile(tmp_path: Path) -> None:
    code, message = run_in_process(create_beside_a_small_drive, tmp_path, 4 << 20, True)
    assert code == 0
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert re.search(r"small/drive/stages/.* cannot reserve \d+ bytes: No space left on device", message)


def replace_on_a_small_drive(folder: Path, num_bytes: int) -> str | None:
    """In a process of its own: start over in a store with more on its second drive, a tmpfs, than fits there."""
    small = folder / "small"
    small.mkdir()
    if not mount_small_drive(small, num_bytes):
        return None
    places = [folder / "store", small / "drive"]
    with DirectEngine(num_threads=1) as engine:
        with create(places[0], engine, drives=told(places)) as store:
            fill(store, engine, 1)
            commit(store, 0)
        before = contents(folder)
        with pytest.raises(StoreRefusedError) as raised:
            create(places[0], engine, drives=told(places, [1.0, 1000.0]), fresh=True)
        assert contents(folder) == before
    return str(raised.value)


def test_what_fresh_gives_back_is_counted_once(tmp_path: Path) -> None:
    """Half of the store's 0.5 MB fits beside the 1 MiB that is kept free, all of it does not."""
    code, message = run_in_process(replace_on_a_small_drive, tmp_path, 1_450_000)
    assert code == 0
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert f"{tmp_path}/small/drive: too little free space: the store needs" in message


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, engine: IoEngine) -> Path:
    """A closed store over two directories."""
    with spread(tmp_path, engine) as made:
        return made.directory


@pytest.mark.parametrize("writable", [False, True])
def test_a_drive_that_is_not_there(store: Path, engine: IoEngine, writable: bool) -> None:
    drive = store.with_name("drive1")
    drive.rename(store.with_name("elsewhere"))
    advice = f"; mount it, or say where it is now: --store {store} --store DIR"
    line = refusal(engine, store, writable=writable)
    assert line == f"{drive}: should be a drive of the store {store} and is not there{advice}"
    drive.mkdir()
    line = refusal(engine, store, writable=writable)
    assert line == f"{drive}: should be a drive of the store {store} and holds none (not mounted?){advice}"


def open_on_read_only_drive(folder: Path) -> str | None:
    """In a process of its own: the store's second drive is mounted read-only when it is opened."""
    drive = folder / "drive1"
    drive.mkdir()
    if not mount_small_drive(drive, 4 << 20):
        return None
    with direct_engine() as engine, spread(folder, engine):
        pass
    subprocess.run(["mount", "-o", "remount,ro", str(drive)], check=True)
    with direct_engine() as engine:
        with Store.open(folder / "store", engine=engine, writable=False, check="crc"):
            pass
        return refusal(engine, folder / "store")


def test_a_drive_that_cannot_be_written(tmp_path: Path) -> None:
    code, message = run_in_process(open_on_read_only_drive, tmp_path)
    assert code == 0
    if message is None:
        pytest.skip("no small file system can be mounted here")
    assert message.startswith(f"{tmp_path}/drive1: cannot be written: its file system is mounted read-only; name")


def test_a_drive_of_another_store(store: Path, engine: IoEngine, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with spread(tmp_path / "b", engine):
        pass
    drive = tmp_path / "drive1"
    drive.rename(tmp_path / "aside")
    shutil.copytree(tmp_path / "b" / "drive1", drive)
    line = refusal(engine, store)
    assert line.startswith(f"{drive}: should be a drive of the store {store} and is one of {tmp_path}/b/store; mount")


def test_drives_that_changed_places(tmp_path: Path, engine: IoEngine) -> None:
    with spread(tmp_path, engine, 3):
        pass
    (tmp_path / "drive1").rename(tmp_path / "x")
    (tmp_path / "drive2").rename(tmp_path / "drive1")
    (tmp_path / "x").rename(tmp_path / "drive2")
    assert "drive1: should be a drive of the store" in (line := refusal(engine, tmp_path / "store"))
    assert "and is another drive of it" in line


def test_a_marker_of_another_version(store: Path, engine: IoEngine) -> None:
    marker = store.with_name("drive1") / "DRIVE.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format_version": 9}))
    assert refusal(engine, store) == f"{marker}: format_version: saw 9, this hoist reads 1"


def test_a_store_copied_without_its_links(store: Path, engine: IoEngine) -> None:
    (store / "drives" / "1").unlink()
    line = refusal(engine, store)
    assert f"{store}/drives/1: is not the link to a drive that it should be (No such file or directory; " in line
    assert line.endswith(f"name both directories: --store {store} --store DIR")


def test_a_copy_of_a_store_does_not_write_to_its_drives(store: Path, engine: IoEngine) -> None:
    copy = store.with_name("copy")
    shutil.copytree(store, copy, symlinks=True)
    line = refusal(engine, copy)
    assert f"drive1: is a drive of the store at {store}, of which {copy} is a copy; a store's drives cannot be" in line
    shutil.rmtree(store)  # the copy takes its place
    with Store.open(copy, engine=engine, check="crc"):
        pass
    assert json.loads((store.with_name("drive1") / "DRIVE.json").read_text())["store"] == str(copy)


def test_a_drive_named_as_a_store(store: Path, engine: IoEngine) -> None:
    line = refusal(engine, store.with_name("drive1"))
    assert line == f"{store.with_name('drive1')}: is a drive of the store at {store}; name that store first"


def test_one_file_that_is_missing_on_a_drive(store: Path, engine: IoEngine) -> None:
    relative = chunk_files(store.with_name("drive1"))[0]
    (store.with_name("drive1") / relative).unlink()
    with pytest.raises(CorruptChunkError, match=rf"{relative}: .* is a link to nothing"):
        Store.open(store, engine=engine)


def test_holes_on_a_drive_are_filled(store: Path, engine: IoEngine) -> None:
    file = store.with_name("drive1") / chunk_files(store.with_name("drive1"))[0]
    num_bytes = file.stat().st_size
    file.write_bytes(b"")
    os.truncate(file, num_bytes)
    assert file.stat().st_blocks == 0
    with Store.open(store, engine=engine):
        pass
    assert file.stat().st_blocks * 512 >= num_bytes
    assert (store / file.relative_to(store.with_name("drive1"))).is_symlink()


def test_leftovers_on_drives_are_removed_and_nothing_else(store: Path, engine: IoEngine, tmp_path: Path) -> None:
    drive = tmp_path / "drive1"
    stray = drive / "stages" / "000-embed" / "exp_avg" / "c" / "0" / "77"
    stray.write_bytes(b"half a copy")
    in_main = next(path for path in chunk_files(store) if not (drive / path).exists())
    (drive / in_main).parent.mkdir(parents=True, exist_ok=True)
    (drive / in_main).write_bytes(b"half a copy")
    (tmp_path / "joining").mkdir()
    (store / "drives" / "2").symlink_to(tmp_path / "joining")  # a drive that was being taken into use
    found = opening.read(store).record
    drives.Marker(store_id=found.store_id, drive_id="new", store=store).write(tmp_path / "joining")
    (store / "drives" / "3").symlink_to(tmp_path / "missing")
    before = contents(store / "stages")
    with Store.open(store, engine=engine, check="crc"):
        pass
    assert not stray.exists()
    assert not (drive / in_main).exists()
    assert [link.name for link in (store / "drives").iterdir()] == ["1"]
    assert list((tmp_path / "joining").iterdir()) == []
    assert contents(store / "stages") == before


def test_a_drive_that_no_commit_names_but_files_lie_on_is_left_alone(store: Path, engine: IoEngine) -> None:
    """Whatever has happened to the list of drives: what an entry leads to is never removed."""
    with Store.open(store, engine=engine) as opened:
        assert opened.record is not None
        listed = drives.registered(opened.record, store)
        opened.commit_drives(listed[:1])
    with Store.open(store, engine=engine, check="crc"):
        pass
    with Store.open(store, engine=engine, check="crc"):
        pass


# --- drives that are elsewhere now ------------------------------------------------------------------------------------


def test_a_drive_that_is_mounted_elsewhere_is_followed(tmp_path: Path, engine: IoEngine) -> None:
    with spread(tmp_path, engine, 3) as made:
        store = made.directory
    (tmp_path / "drive2").rename(tmp_path / "moved")
    record = opening.read(store).record
    drives.relocate(store, record, [tmp_path / "moved", tmp_path / "drive1"])
    assert (store / "drives" / "2").readlink() == tmp_path / "moved"
    with Store.open(store, engine=engine, check="crc") as opened:
        assert read_version(opened, engine, 0, 0, range(1, 3)) == 1
    assert opening.read(store).record == record  # no commit is needed


def test_links_are_replaced_whole(store: Path, engine: IoEngine, tmp_path: Path) -> None:
    """A kill while a link is replaced leaves the old one and a temporary, which the next opening removes."""
    (store / "drives" / "1.tmp").symlink_to(tmp_path / "drive1")
    with Store.open(store, engine=engine, check="crc"):
        pass
    assert [link.name for link in (store / "drives").iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("named", "pattern"),
    [
        (["drive1"], r"drive2: is a drive of the store .*store, too; name .*store alone or all of its directories, or"),
        (["drive1", "drive2", "new"], r"new: is not there; mount it, or take a directory into use first: hoist drives"),
        (["drive1", "other"], r"other: is not a drive of the store .*store; mount it, or take .* --add .*other$"),
        (["drive1", "copy"], r"copy: is the same drive of the store as .*drive1 \(a copy\?\); name one of them"),
        (["drive1", "drive1"], r"drive1: is named twice"),
    ],
)
def test_directories_that_are_not_the_stores(
    tmp_path: Path, engine: IoEngine, named: list[str], pattern: str
) -> None:
    with spread(tmp_path, engine, 3) as made:
        store = made.directory
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "drive1", tmp_path / "copy")
    before = contents(tmp_path)
    with pytest.raises(StoreRefusedError, match=pattern):
        drives.relocate(store, opening.read(store).record, [tmp_path / name for name in named])
    assert contents(tmp_path) == before


def test_three_slots_are_dealt_like_two(tmp_path: Path, engine: IoEngine) -> None:
    places = directories(tmp_path, 2)
    with create(places[0], engine, drives=told(places), num_slots=3) as store:
        fill(store, engine, 1)
        commit(store, 0)
    dealt = {path: place for place in places for path in chunk_files(place)}
    assert len(dealt) == NUM_FILES + 12
    for path in dealt:
        if path.parent.name in ("1", "2"):
            assert dealt[path] == dealt[path.parent.with_name("0") / path.name]
    with Store.open(places[0], engine=engine, check="crc"):
        pass
