"""Where no store can be made or opened, one line says why and what to do, and nothing has changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hoist.tiers.allocation import DirectoryState, directory_state
from hoist.tiers.errors import StoreLockedError, StoreRefusedError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import TensorSpec, lay_out
from hoist.tiers.lock import StoreLock
from hoist.tiers.store import Store
from tests.support.stores import commit, committed, create, fill

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Every entry with its size and time of change."""
    return {
        str(path.relative_to(directory)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
    }


def refused(directory: Path, engine: IoEngine, pattern: str, *, fresh: bool = False) -> None:
    """Creating is refused with one line that fits, and the parent looks as before."""
    before = listing(directory.parent) if directory.parent.is_dir() else None
    with pytest.raises(StoreRefusedError, match=pattern) as caught:
        create(directory, engine, fresh=fresh)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, OSError)
    assert before == (listing(directory.parent) if directory.parent.is_dir() else None)


def test_a_missing_parent(tmp_path: Path, engine: IoEngine) -> None:
    missing = tmp_path / "no"
    refused(missing / "store", engine, f"{missing} does not exist; create it, or name another place")
    assert not missing.exists()


def test_a_parent_that_is_a_file(tmp_path: Path, engine: IoEngine) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreRefusedError, match="file is not a directory; create it"):
        create(tmp_path / "file" / "store", engine)


def test_a_file(tmp_path: Path, engine: IoEngine) -> None:
    (tmp_path / "store").write_text("mine")
    refused(tmp_path / "store", engine, "store: is not a directory; name an empty or a new directory")
    refused(tmp_path / "store", engine, "store: is not a directory", fresh=True)


def test_a_dangling_link(tmp_path: Path, engine: IoEngine) -> None:
    (tmp_path / "store").symlink_to(tmp_path / "gone")
    refused(tmp_path / "store", engine, "store: is not a directory")


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "COMMIT.json", "zarr.json", "stages"])
def test_somebody_elses_directory(tmp_path: Path, engine: IoEngine, name: str, fresh: bool) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    (directory / name).write_text("mine")
    if name in ("zarr.json", "stages"):
        (directory / "other").write_text("mine")
    refused(directory, engine, "store: is not empty and holds no hoist store; name an empty", fresh=fresh)


def test_somebody_elses_zarr_hierarchy(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    (directory / "stages").mkdir(parents=True)
    (directory / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    (directory / "data").write_text("mine")
    refused(directory, engine, "holds no hoist store", fresh=True)


def test_a_committed_store(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine):
        pass
    refused(directory, engine, "store: holds a committed store; resume it, or start over in it with --fresh")
    with Store.open(directory, engine=engine, check="crc"):
        pass


def test_a_new_drives_root_is_fine(tmp_path: Path, engine: IoEngine) -> None:
    (tmp_path / "lost+found").mkdir()
    with create(tmp_path, engine):
        pass
    assert (tmp_path / "lost+found").is_dir()


def test_too_little_space_gives_need_and_free(tmp_path: Path, engine: IoEngine) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    for directory in (tmp_path / "new", tmp_path / "made"):
        if directory.name == "made":
            directory.mkdir()
        with pytest.raises(StoreRefusedError, match=r"too little free space: the store needs (\d+) bytes") as caught:
            create(directory, engine, scratch_bytes=2 * free)
        need = re.search(r"needs (\d+) bytes .*, (\d+) bytes .*are free; free some", str(caught.value))
        assert need is not None
        assert int(need[1]) > 2 * free
        assert int(need[2]) == pytest.approx(free, rel=0.2)
        assert directory.exists() == (directory.name == "made")
        assert not directory.exists() or list(directory.iterdir()) == []


def test_stage_names_must_be_plain(tmp_path: Path, engine: IoEngine) -> None:
    layout = lay_out(index=0, name="../../etc", tensors=[TensorSpec(name="w", shape=(1,), trainable=True)])
    with pytest.raises(ValueError, match=r"stage name '../../etc' is not made of letters"):
        Store.create(tmp_path / "store", layouts=[layout], attributes={}, engine=engine)
    layout = lay_out(index=1, name="embed", tensors=[])
    with pytest.raises(ValueError, match="stage 'embed' has index 1 at position 0"):
        Store.create(tmp_path / "store", layouts=[layout], attributes={}, engine=engine)
    assert not (tmp_path / "store").exists()


def test_opening_what_is_no_store(tmp_path: Path, engine: IoEngine) -> None:
    with pytest.raises(StoreRefusedError, match="store: does not exist; create the store first"):
        Store.open(tmp_path / "store", engine=engine)
    with pytest.raises(StoreRefusedError, match="holds no hoist store"):
        Store.open(tmp_path, engine=engine)
    with create(tmp_path / "store", engine):
        pass
    for writable in (False, True):
        with pytest.raises(StoreRefusedError, match="creation never finished; create it again"):
            Store.open(tmp_path / "store", engine=engine, writable=writable)


def test_directory_states(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    assert directory_state(directory) is DirectoryState.MISSING
    directory.mkdir()
    assert directory_state(directory) is DirectoryState.EMPTY
    with create(directory, engine) as store:
        assert directory_state(directory) is DirectoryState.UNCOMMITTED
        fill(store, engine, 1)
        commit(store, 0)
        assert directory_state(directory) is DirectoryState.COMMITTED
    assert directory_state(directory / "zarr.json") is DirectoryState.FOREIGN


# --- the lock ---------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from hoist.tiers.lock import StoreLock
lock = StoreLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_writer_is_named(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine):
        pass
    with holder(directory / "LOCK") as process:
        before = listing(directory)
        named = rf"store: process {process.pid} on \S+ is writing to this store; wait for it to end, or stop it"
        with pytest.raises(StoreLockedError, match=named) as caught:
            Store.open(directory, engine=engine)
        assert caught.value.exit_code == 2
        with pytest.raises(StoreLockedError, match=named):
            create(directory, engine, fresh=True)
        with Store.open(directory, engine=engine, writable=False, check="crc"):
            pass
        assert listing(directory) == before
    with Store.open(directory, engine=engine):  # the holder is dead, its LOCK still there
        assert json.loads((directory / "LOCK").read_text())["pid"] == os.getpid()


def test_two_creations_at_once(tmp_path: Path, engine: IoEngine) -> None:
    with create(tmp_path / "store", engine) as first:
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()} on"):
            create(tmp_path / "store", engine)
        fill(first, engine, 1)
        commit(first, 0)


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "LOCK")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        lock.release()
        StoreLock(tmp_path / "LOCK").release()


FORKED = """
import os, sys
from pathlib import Path
from hoist.tiers.errors import StoreLockedError
from hoist.tiers.lock import StoreLock
path = Path(sys.argv[1])
lock = StoreLock(path)
to_child, from_parent = os.pipe()
to_parent, from_child = os.pipe()
child = os.fork()
if child == 0:
    try:
        StoreLock(path)
        os.write(from_child, b"taken")
    except StoreLockedError:  # closing the child's copy must not unlock the parent's
        os.write(from_child, b"refused")
    os.read(to_child, 1)
    os._exit(0)
print(os.read(to_parent, 16).decode())
lock._close()  # as if the parent had died: the child must not hold on to the lock
StoreLock(path).release()
os.write(from_parent, b"x")
os.waitpid(child, 0)
print("free")
"""


def test_forked_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "LOCK")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["refused", "free"], done.stderr


def test_a_lock_on_a_replaced_file_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    first = StoreLock(path)
    assert first.created
    first.release(remove=True)
    first.release()
    assert not path.exists()
    second = StoreLock(path)
    with pytest.raises(StoreLockedError):
        StoreLock(path)
    second.release()
    assert not StoreLock(path).created


# --- real file systems -------------------------------------------------------------------------------------------


def in_namespace(mount: str, source: str, *arguments: Path) -> str:
    """Run Python after shell line ``mount`` in a mount namespace of its own; skip where that is not allowed."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not available here")
    script = f'{mount} || exit 77; shift 0; exec "$PYTHON" -c "$SOURCE" "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, arguments)],
        env={**ENVIRONMENT, "PYTHON": sys.executable, "SOURCE": source},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"cannot mount here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout


CREATE = """
import sys
from pathlib import Path
from hoist.tiers.errors import HoistError
from hoist.tiers.store import Store
from tests.support.stores import committed, create, direct_engine
directory = Path(sys.argv[1])
with direct_engine() as engine:
    for attempt in (lambda: create(directory, engine), lambda: Store.open(directory, engine=engine)):
        try:
            attempt().close()
            print("done")
        except HoistError as error:
            print(f"{type(error).__name__}: {error}")
print(sorted(path.name for path in directory.parent.iterdir()))
"""


@pytest.mark.parametrize("what", ["store", "parent"])
def test_a_read_only_place(tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    directory = place if what == "store" else place / "store"
    mount = f"mount --bind {place} {place} && mount -o remount,ro,bind {place}"
    lines = in_namespace(mount, CREATE, directory).splitlines()
    assert lines[0] == (
        f"StoreRefusedError: {place}: cannot be written: its file system is mounted read-only; "
        "name another place for the store"
    )
    assert list(place.iterdir()) == []


def test_a_read_only_store_can_be_read(tmp_path: Path, engine: IoEngine) -> None:
    directory = tmp_path / "store"
    with committed(directory, engine):
        pass
    source = """
import sys
from pathlib import Path
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.store import Store
from tests.support.stores import direct_engine
with direct_engine() as engine:
    try:
        Store.open(Path(sys.argv[1]), engine=engine)
    except StoreRefusedError as error:
        print(error)
    with Store.open(Path(sys.argv[1]), engine=engine, writable=False, check="crc") as store:
        print(store.record.step)
"""
    mount = f"mount --bind {directory} {directory} && mount -o remount,ro,bind {directory}"
    lines = in_namespace(mount, source, directory).splitlines()
    assert lines == [f"{directory}/LOCK: cannot be opened for locking: Read-only file system", "0"]


def test_a_drive_that_is_too_small(tmp_path: Path) -> None:
    lines = in_namespace(f"mount -t tmpfs -o size=1m tmpfs {tmp_path}", CREATE, tmp_path / "store").splitlines()
    assert re.match(
        r"StoreRefusedError: \S+store: too little free space: the store needs \d+ bytes \(0.00 GiB\), "
        r"1048576 bytes \(0.00 GiB\) are free; free some, or name a place on a larger drive",
        lines[0],
    )
    assert lines[-1] == "[]"


FILLS_UP = """
import errno, os, sys
from pathlib import Path
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.store import Store
from tests.support.stores import aligned, commit, committed, create, direct_engine, read_version, write_chunk
directory = Path(sys.argv[1])
hog = directory.parent / "hog"

def fill_drive(done=0, total=0):
    "Somebody else takes all space, after the check."
    with hog.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

with direct_engine() as engine:
    try:
        create(directory, engine, progress=fill_drive)
    except StoreRefusedError as error:
        print(error)
    print(sorted(path.name for path in directory.parent.iterdir()))
    hog.unlink()
    with committed(directory, engine, seed=1) as store:
        fill_drive()
        write_chunk(store, engine, 0, 0, seed=2)  # chunks are reserved: training goes on
        try:
            store.scratch_file("gradients", 1 << 20)
        except StoreRefusedError as error:
            print(error)
        print(list((directory / "scratch").iterdir()))
        try:
            commit(store, 1)
        except OSError as error:
            print(errno.errorcode[error.errno])
    with Store.open(directory, engine=engine, check="crc") as store:
        print(store.record.step, read_version(store, engine, 0, 0, range(3)))
    hog.unlink()
    with Store.open(directory, engine=engine) as store:
        write_chunk(store, engine, 0, 0, seed=2)
        commit(store, 1)
        print(store.record.step, read_version(store, engine, 0, 0, range(3)))
"""


def test_a_drive_that_fills_up_meanwhile(tmp_path: Path) -> None:
    output = in_namespace(f"mount -t tmpfs -o size=4m tmpfs {tmp_path}", FILLS_UP, tmp_path / "store")
    lines = output.splitlines()
    assert re.search(r"cannot reserve \d+ bytes: No space left on device; 0 bytes are free", lines[0])
    assert lines[1] == "['hog']"
    assert re.search(r"scratch/gradients: cannot reserve 1048576 bytes: No space left", lines[2])
    assert lines[3] == "[]"
    assert lines[4:] == ["ENOSPC", "0 1", "1 2"]
