"""What a power cut may leave of a store: any state that the drive was allowed to be in at that instant.

A run is recorded: every write with its bytes, every flush with the writes that it covers, every name made, renamed or
removed, every fsync. At any place of the recording, a drive may hold any subset of what was not yet made durable, torn
and in any order. Runs and what must hold are the tests' business; how names are seen, `watch.py`'s.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

import torch

from hoist.tiers.format import COMMIT_NAME, SCRATCH_DIRECTORY, STATUS_NAME
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.requests import started_future
from tests.support.engines import WrapperEngine
from tests.support.watch import Act, Seen, watching

#: A path relative to the recording's folder -> the file's bytes; None for a directory.
Tree = dict[str, bytes | None]
#: What a drive writes as a whole: its sectors, or the file system's blocks.
BLOCK_BYTES = (512, 4096)


class Kind(Enum):
    """What was recorded."""

    WRITE = auto()
    """A write has begun: its bytes may reach the drive from here on."""
    WRITTEN = auto()
    """It has completed: a flush that is asked for from here on covers it."""
    FLUSHED = auto()
    """The writes in ``covered`` are durable."""
    CREATED = auto()
    """A name leads to a new file, or to the old one emptied; ``data`` is what will be in it when it is next synced."""
    DIRECTORY = auto()
    SYNCED = auto()
    """A file's bytes (``data``) are durable, or a directory's names."""
    RENAMED = auto()
    REMOVED = auto()
    ALL_SYNCED = auto()
    """Everything is durable as it is in ``tree``."""
    PROMISED = auto()
    """Whoever commits has been told that step ``number`` is committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One of them."""

    kind: Kind
    path: str = ""
    target: str = ""
    number: int = -1
    """Of a write; or a step."""
    offset: int = 0
    data: bytes = b""
    covered: tuple[int, ...] = ()
    tree: Tree = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A run, as a drive sees it."""

    base: Tree
    """What was durable at the beginning."""
    events: Sequence[Event]

    def without(self, forgotten: Callable[[int, Event], bool]) -> Recording:
        """The same run on a drive, or of a program, that leaves some events out, told by place and event."""
        events = [event for place, event in enumerate(self.events) if not forgotten(place, event)]
        assert len(events) < len(self.events), "nothing is left out, the test proves nothing"
        return Recording(base=self.base, events=events)


class Recorder:
    """Records what happens below ``root`` and through the engine. For a process of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._base = read_tree(root)
        #: Per file, completed writes that no flush has covered yet.
        self._completed: dict[Path, set[int]] = {}
        self._num_writes = 0

    def finish(self) -> Recording:
        """What was recorded so far, with the bytes of small files known."""
        with self._lock:
            events, final = [], {path: data for path, data in read_tree(self._root).items() if data is not None}
            for event in reversed(self._events):
                if event.kind is Kind.CREATED:
                    event = Event(kind=Kind.CREATED, path=event.path, data=final.get(event.path, b""))
                elif event.kind in (Kind.SYNCED, Kind.RENAMED):
                    final[event.path] = event.data
                elif event.kind is Kind.ALL_SYNCED:
                    final |= {path: data for path, data in event.tree.items() if data is not None}
                events.append(event)
            return Recording(base=self._base, events=events[::-1])

    def promise(self, step: int) -> None:
        """The caller of a commit has been told that it is done."""
        self._note(Event(kind=Kind.PROMISED, number=step))

    def seen(self, seen: Seen) -> None:
        """For :func:`tests.support.watch.watching`."""
        if SCRATCH_DIRECTORY in seen.path.parent.parts or seen.path.name == STATUS_NAME:
            return  # dies with the run
        path = self._relative(seen.path)
        match seen.act:
            case Act.CREATE if seen.truncates or not seen.path.exists():
                self._note(Event(kind=Kind.CREATED, path=path))
            case Act.MAKE_DIRECTORY if not seen.path.exists():
                self._note(Event(kind=Kind.DIRECTORY, path=path))
            case Act.RENAME:
                assert seen.target is not None
                target = self._relative(seen.target)
                self._note(Event(kind=Kind.RENAMED, path=path, target=target, data=seen.path.read_bytes()))
            case Act.REMOVE:
                self._note(Event(kind=Kind.REMOVED, path=path))
            case Act.SYNCED:
                data = seen.path.read_bytes() if seen.path.is_file() else b""
                self._note(Event(kind=Kind.SYNCED, path=path, data=data))
            case Act.SYNC_ALL:
                self._note(Event(kind=Kind.ALL_SYNCED, tree=read_tree(self._root)))

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> int:
        """A write begins. Returns its number."""
        data = buffer.numpy().tobytes()
        with self._lock:
            number = self._num_writes
            self._num_writes += 1
            place = self._relative(path)
            self._events.append(Event(kind=Kind.WRITE, path=place, number=number, offset=offset, data=data))
        return number

    def written(self, path: Path, number: int) -> None:
        """A write has completed."""
        with self._lock:
            self._completed.setdefault(path, set()).add(number)
            self._events.append(Event(kind=Kind.WRITTEN, path=self._relative(path), number=number))

    def covered(self, path: Path) -> tuple[int, ...]:
        """The writes that a flush that is asked for now covers."""
        with self._lock:
            return tuple(sorted(self._completed.get(path, ())))

    def flushed(self, path: Path, covered: tuple[int, ...]) -> None:
        """A flush has completed."""
        with self._lock:
            self._completed.get(path, set()).difference_update(covered)
            self._events.append(Event(kind=Kind.FLUSHED, path=self._relative(path), covered=covered))

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    def _note(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


@contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """A recorder of what is done below ``root`` from here on, which is all durable now."""
    recorder = Recorder(root)
    with watching(root, recorder.seen):
        yield recorder


class RecordedEngine(WrapperEngine):
    """Passes everything on and tells the recorder of it; scratch, which dies with the run, is left out."""

    name = "recorded"

    def __init__(self, inner: IoEngine, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        if path.parent.name == SCRATCH_DIRECTORY:
            return super().write(path, offset, buffer)
        number = self._recorder.write(path, offset, buffer)
        return _after(super().write(path, offset, buffer), lambda: self._recorder.written(path, number))

    def flush(self, path: Path) -> Future[None]:
        covered = self._recorder.covered(path)
        return _after(super().flush(path), lambda: self._recorder.flushed(path, covered))


def _after(inner: Future[None], note: Callable[[], None]) -> Future[None]:
    """A future that is done when ``inner`` is, after ``note`` if it succeeded."""
    outer = started_future()

    def finish(done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            note()
            outer.set_result(None)
        else:
            outer.set_exception(error)

    inner.add_done_callback(finish)
    return outer


def read_tree(root: Path) -> Tree:
    """Everything below ``root``, but for what is in scratch."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if SCRATCH_DIRECTORY not in path.parent.parts
    }


# --- the drive --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, eq=False)
class _File:
    """What a name leads to: a file, or a directory."""

    is_directory: bool = False
    durable: bytes = b""
    """What is certainly on the drive, but for what ``pending`` changes."""
    pending: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Writes that have begun and are not flushed: offset and bytes, by number."""
    unsynced: bytes | None = None
    """All that was put into a small file since its last fsync; None if it was synced."""


class Drive:
    """The state of a drive at a place of a recording, and what a power cut there may leave of it."""

    def __init__(self, recorded: Recording, place: int) -> None:
        #: Per name, what it has led to since its directory was last synced: the first certainly reached the drive.
        self._names: dict[str, list[_File | None]] = {}
        #: The last step whose commit was promised; -1 before the first.
        self.promised = -1
        #: The last step whose COMMIT.json got its name.
        self.published = -1
        for path, data in recorded.base.items():
            self._names[path] = [_File(is_directory=data is None, durable=data or b"")]
            if Path(path).name == COMMIT_NAME and data is not None:
                self.promised = self.published = _step_of(data)
        for event in recorded.events[:place]:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        match event.kind:
            case Kind.WRITE:
                self._file(event.path).pending[event.number] = (event.offset, event.data)
            case Kind.FLUSHED:
                file = self._file(event.path)
                for number in event.covered:
                    offset, data = file.pending.pop(number)
                    file.durable = _put(file.durable, offset, data)
            case Kind.CREATED:
                if self._now(event.path) is None:
                    self._lead(event.path, _File())
                self._file(event.path).unsynced = event.data
                if Path(event.path).name == COMMIT_NAME:  # overwritten in place, as no commit should
                    self.published = _step_of(event.data)
            case Kind.DIRECTORY:
                self._lead(event.path, _File(is_directory=True))
            case Kind.SYNCED:
                self._sync(event)
            case Kind.RENAMED:
                moved = self._file(event.path)
                self._lead(event.path, None)
                self._lead(event.target, moved)
                if Path(event.target).name == COMMIT_NAME:
                    self.published = _step_of(event.data)
            case Kind.REMOVED:
                for path in [path for path in self._names if _is_below(path, event.path)]:
                    self._lead(path, None)
            case Kind.ALL_SYNCED:
                for path, versions in self._names.items():
                    del versions[:-1]
                    now = versions[0]
                    if now is not None and not now.is_directory:
                        now.durable, now.unsynced = event.tree[path] or b"", None
            case Kind.PROMISED:
                self.promised = event.number

    def _sync(self, event: Event) -> None:
        file = self._now(event.path)
        if file is not None and not file.is_directory:
            file.durable, file.unsynced = event.data, None
            return
        for path, versions in self._names.items():
            if str(Path(path).parent) == event.path:
                del versions[:-1]

    def _now(self, path: str) -> _File | None:
        versions = self._names.get(path)
        return versions[-1] if versions else None

    def _file(self, path: str) -> _File:
        file = self._now(path)
        assert file is not None, f"{path} is not there"
        return file

    def _lead(self, path: str, file: _File | None) -> None:
        self._names.setdefault(path, [None]).append(file)

    def cut(self, seed: int) -> Tree:
        """One of the states that the drive may be in when the power goes now."""
        chance = random.Random(seed)
        #: What of the names, and of the bytes, that are not durable has reached the drive.
        names, some_bytes = (chance.choice(("none", "some", "some", "all")) for _ in range(2))
        files: dict[str, _File] = {}
        for path, versions in sorted(self._names.items()):
            number = {"none": 0, "some": chance.randrange(len(versions)), "all": len(versions) - 1}[names]
            chosen = versions[number]
            if chosen is not None:
                files[path] = chosen
        tree: Tree = {}
        for path, file in files.items():
            above = [str(parent) for parent in Path(path).parents if str(parent) != "."]
            if all(parent in files for parent in above):
                tree[path] = None if file.is_directory else _content(file, some_bytes, chance)
        return tree


def _content(file: _File, what: str, chance: random.Random) -> bytes:
    share = {"none": 0.0, "some": 0.5, "all": 1.0}[what]
    data = file.durable
    if file.unsynced is not None and what != "none":
        whole = file.unsynced
        end = len(whole) if what == "all" else chance.randrange(len(whole) + 1)
        block = chance.choice((1, *BLOCK_BYTES))
        data = whole if end == len(whole) else whole[: end // block * block]
        if chance.random() < 0.25:  # the length has reached the drive, not all of the bytes
            data = data.ljust(len(whole), b"\0")
    pending = list(file.pending.values())
    chance.shuffle(pending)
    for offset, written in pending:
        if chance.random() >= share:
            continue
        block = chance.choice(BLOCK_BYTES)
        starts = range(0, len(written), block)
        torn = what == "some" and chance.random() < 0.5
        for start in chance.sample(starts, chance.randint(0, len(starts))) if torn else starts:
            data = _put(data, offset + start, written[start : start + block])
    return data


def _step_of(record: bytes) -> int:
    return int(json.loads(record)["step"])


def _put(data: bytes, offset: int, written: bytes) -> bytes:
    return data[:offset].ljust(offset, b"\0") + written + data[offset + len(written) :]


def _is_below(path: str, parent: str) -> bool:
    return path == parent or Path(parent) in Path(path).parents


def write_tree(tree: Tree, root: Path) -> None:
    """Make the files and directories of ``tree`` below ``root``."""
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)


def places_to_cut(recorded: Recording, seeds: Sequence[int]) -> list[tuple[int, int]]:
    """(seed, place) to try: every second one beside an event that is no write, as those are few and matter most."""
    rare = [
        place
        for place, event in enumerate(recorded.events)
        if event.kind not in (Kind.WRITE, Kind.WRITTEN)
    ]
    places = []
    for seed in seeds:
        chance = random.Random(seed)
        anywhere = chance.randrange(len(recorded.events) + 1)
        beside = chance.choice(rare) + chance.randrange(2)
        places.append((seed, beside if seed % 2 else anywhere))
    return places
