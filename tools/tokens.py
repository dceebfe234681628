"""Token ids on disk: `.npy` and raw `.bin` files, read a row at a time with pread, checked once in one pass.

Text becomes such a file in `text.py`, records in `examples.py`; which rows a step takes is `data.py`'s business. No
file is ever mapped, and pages that were read leave the page cache again, so that data of any size costs no memory.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from hoist.tiers.io.requests import drop_cache
from hoist.tools.errors import DataError, DataReadError

#: Called with (bytes done, bytes in all) while data is prepared.
Progress = Callable[[int, int], None]

#: Bytes that one read of the checking pass takes; a multiple of every item size.
SCAN_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """A run of token ids in one file."""

    path: Path
    """The file, absolute."""
    offset_bytes: int
    """First byte of the first id (past an `.npy` header)."""
    dtype: str
    """numpy's name of the item with its byte order: ``<u2``, ``|u1``, ``>i8`` ..."""
    num_tokens: int
    """Ids in the file; at least 1."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one id."""
        return np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all ids, header apart."""
        return self.num_tokens * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """What one pass over a token file tells."""

    lowest: int
    """Smallest id."""
    highest: int
    """Largest id."""
    crc32c: int
    """CRC32C of the ids' bytes, header apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A run of ids from one origin, with what is known of the documents in it."""

    ids: TokenFile
    facts: TokenFacts
    counted: TokenFile | None = None
    """One byte an id: 1 where it counts in the loss. None: all do."""
    counted_crc32c: int | None = None
    """CRC32C of those bytes."""
    documents: TokenFile | None = None
    """Number of each document's first id, ascending, then one past the last id. None: documents are not known."""
    documents_crc32c: int | None = None
    """CRC32C of those numbers."""
    whole: bool = False
    """Its documents are examples, which rows never cut; else text, which they may."""

    @property
    def num_documents(self) -> int | None:
        """None where they are not known."""
        return None if self.documents is None else self.documents.num_tokens - 1


def open_npy(path: Path) -> TokenFile:
    """Read the header of a `.npy` file. Refuses what is not a whole 1-D array of integers."""
    with refuse_os_errors(path), path.open("rb") as file:
        found_bytes = os.fstat(file.fileno()).st_size
        if found_bytes == 0:
            raise DataError(f"--data {path}: the file is empty; give a 1-D integer array saved with numpy.save")
        try:
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read_header is None:
                raise ValueError(f"format version {version[0]}.{version[1]}")
            shape, _, dtype = read_header(file)
        except (ValueError, EOFError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"--data {path}: not a numpy array file ({reason}); write it with numpy.save") from None
        offset_bytes = file.tell()
    if dtype.kind not in "iu":
        raise DataError(f"--data {path}: holds {dtype}, token ids must be integers; save the ids as uint16 or uint32")
    if len(shape) != 1:
        raise DataError(f"--data {path}: has shape {tuple(shape)}, must have one dimension; save array.reshape(-1)")
    if shape[0] == 0:
        raise DataError(f"--data {path}: the array is empty; it needs at least one step's tokens")
    expected_bytes = offset_bytes + shape[0] * dtype.itemsize
    if found_bytes < expected_bytes:
        raise DataError(
            f"--data {path}: truncated, its header promises {expected_bytes} bytes but the file has {found_bytes}; "
            "copy it again"
        )
    return TokenFile(path=path.absolute(), offset_bytes=offset_bytes, dtype=dtype.str, num_tokens=int(shape[0]))


def open_bin(path: Path, *, token_bytes: int) -> TokenFile:
    """A file of little-endian unsigned ids without a header. ``.u16.bin`` and ``.u32.bin`` outrank ``token_bytes`` (2
    or 4)."""
    if token_bytes not in (2, 4):
        raise DataError(f"token_bytes: {token_bytes} is not allowed; a .bin file holds ids of 2 or 4 bytes")
    with refuse_os_errors(path):
        found_bytes = path.stat().st_size
    item_bytes = {".u16.bin": 2, ".u32.bin": 4}.get("".join(path.suffixes[-2:]), token_bytes)
    if found_bytes == 0:
        raise DataError(f"--data {path}: the file is empty; it needs at least one step's tokens")
    if found_bytes % item_bytes:
        raise DataError(
            f"--data {path}: {found_bytes} bytes are not a whole number of {item_bytes}-byte ids; copy it again, or "
            "name it "
            f"*.u{48 - 8 * item_bytes}.bin if its ids have {6 - item_bytes} bytes"
        )
    return TokenFile(
        path=path.absolute(), offset_bytes=0, dtype=f"<u{item_bytes}", num_tokens=found_bytes // item_bytes
    )


class CacheEntries:
    """What one preparation of data puts into the cache, so that it can be taken back."""

    def __init__(self, directory: Path) -> None:
        """Notes which folders are not there yet; changes nothing."""
        #: Files that were made, to be filled in by whoever makes them.
        self.files: list[Path] = []
        #: Innermost first.
        self._folders = [path for path in (directory, *directory.absolute().parents) if not path.exists()]

    def remove(self) -> None:
        """Remove the files, and the folders that only they needed. Idempotent."""
        for path in self.files:
            path.unlink(missing_ok=True)
        for folder in self._folders:
            with contextlib.suppress(OSError):  # never made, or others keep something there
                folder.rmdir()


class TokenSource:
    """One long sequence of token ids, made of parts laid end to end. Holds no open file; safe to use from threads."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        notices: Sequence[str] = (),
        made: CacheEntries | None = None,
        tokenizer: str | None = None,
    ) -> None:
        #: What its preparation put into the cache; for a caller that gives up before it has used it.
        self.made = made
        #: What text was tokenized with, for people; None if the files were token ids already.
        self.tokenizer = tokenizer
        #: The parts in the order in which their ids are numbered; at least one.
        self.parts = tuple(parts)
        #: What preparation has to tell people, one line each.
        self.notices = tuple(notices)
        #: First token number of each part, ascending; and one past the last.
        self.starts = [0]
        for part in self.parts:
            self.starts.append(self.starts[-1] + part.ids.num_tokens)
        identity: list[list[Any]] = []
        for part in self.parts:
            identity.append([part.ids.num_tokens, part.ids.dtype, part.facts.crc32c])
            if part.counted is not None:
                identity[-1] += [part.counted_crc32c, part.documents_crc32c]
        #: Depends on the ids, how they are stored and which of them count; not on where the files are or how old.
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]

    @property
    def num_tokens(self) -> int:
        """Ids in all parts."""
        return self.starts[-1]

    @property
    def whole(self) -> bool:
        """The documents are examples, which rows never cut."""
        return any(part.whole for part in self.parts)

    def read(self, start: int, destination: npt.NDArray[np.int64]) -> None:
        """Fill a 1-D int64 array with the ids from number ``start`` on.

        Raises IndexError past the end, and :class:`DataReadError` if a file cannot be read any more; ``destination`` is
        then undefined.
        """
        for part, first, count, where in self._cut(start, destination.size):
            destination[where : where + count] = read_ids(part.ids, first, count)

    def read_counted(self, start: int, destination: npt.NDArray[np.bool_]) -> None:
        """Fill a 1-D array with whether each id from number ``start`` on counts in the loss. Raises as :meth:`read`."""
        for part, first, count, where in self._cut(start, destination.size):
            counts = True if part.counted is None else read_ids(part.counted, first, count) != 0
            destination[where : where + count] = counts

    def document_starts(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Offsets from ``start``, ascending, of the ids among the next ``count`` that begin a document.

        The first id of a part begins one. Raises ValueError where a part's documents are not known, else as
        :meth:`read`.
        """
        found = []
        for part, first, length, where in self._cut(start, count):
            if part.documents is None:
                raise ValueError(f"{part.ids.path}: its documents are not known")
            begin, end = (_search(part.documents, number) for number in (first, first + length))
            if begin < end:
                found.append(read_ids(part.documents, begin, end - begin) - first + where)
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def _cut(self, start: int, count: int) -> Iterator[tuple[Part, int, int, int]]:
        """Where the next ``count`` ids are: (part, number in it, how many, offset from ``start``)."""
        stop = start + count
        if start < 0 or stop > self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        index = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            last = min(stop, self.starts[index + 1])
            yield self.parts[index], start - self.starts[index], last - start, count - (stop - start)
            start = last
            index += 1


def _search(file: TokenFile, number: int) -> int:
    """How many of the ascending numbers in a file are below ``number``, by a few small reads."""
    low, high = 0, file.num_tokens
    while low < high:
        middle = (low + high) // 2
        if int(read_ids(file, middle, 1)[0]) < number:
            low = middle + 1
        else:
            high = middle
    return low


def check_tokens(
    file: TokenFile, *, vocab_size: int, cache_directory: Path | None, progress: Progress | None = None
) -> tuple[TokenFacts, tuple[Path, ...]]:
    """Make sure that every id is in the model's vocabulary, in one pass that is remembered in ``cache_directory``.

    Returns what was found, and the cache files that this call made. Raises :class:`DataError` with file, position, id
    and vocabulary size. What is remembered is keyed by path, size and time of change; nothing is remembered about a
    file that is refused.
    """
    stat = file.path.stat()
    key = {**asdict(file), "path": str(file.path), "file_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    note: Path | None = None
    if cache_directory is not None:
        note = cache_directory / f"scan-{short_hash(key)}.json"
        known = read_note(note, key)
        if known is not None and known["lowest"] >= 0 and known["highest"] < vocab_size:
            return TokenFacts(**known), ()
    crc, lowest, highest, position = 0, 2**64, -(2**64), 0
    for ids in scan(file):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            wrong = (ids < 0) | (ids >= vocab_size)
            first = int(np.argmax(wrong))
            raise DataError(
                f"--data {file.path}: token {position + first} is {int(ids[first])}, allowed are 0 to {vocab_size - 1} "
                f"(the model's vocab_size is {vocab_size}); tokenize with this model's tokenizer"
            )
        crc = google_crc32c.extend(crc, ids.tobytes())
        lowest, highest, position = min(lowest, low), max(highest, high), position + ids.size
        if progress is not None:
            progress(position * file.item_bytes, file.num_bytes)
    facts = TokenFacts(lowest=lowest, highest=highest, crc32c=crc)
    if note is None:
        return facts, ()
    write_note(note, key, asdict(facts))
    return facts, (note,)


def scan(file: TokenFile) -> Iterator[npt.NDArray[Any]]:
    """All ids of a file, a few MiB at a time, in the file's own dtype."""
    step = SCAN_BYTES // file.item_bytes
    for first in range(0, file.num_tokens, step):
        yield read_ids(file, first, min(step, file.num_tokens - first))


def read_ids(file: TokenFile, first: int, count: int) -> npt.NDArray[Any]:
    """``count`` ids from number ``first`` of one file, in the file's dtype; their pages leave the page cache."""
    ids = np.empty(count, dtype=file.dtype)
    buffer = memoryview(ids.view(np.uint8).data)
    offset = file.offset_bytes + first * file.item_bytes
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Random: the kernel would else read ahead what the next window, elsewhere in the file, doesn't need.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            done = 0
            while done < len(buffer):
                moved = os.preadv(descriptor, [buffer[done:]], offset + done)
                if moved == 0:
                    raise DataReadError(
                        f"read of {file.path}: it ended at byte {offset + done}, {len(buffer) - done} bytes before "
                        "the window "
                        "does; it was cut while in use, restore it and resume"
                    )
                done += moved
            drop_cache(descriptor, offset, len(buffer))
        finally:
            os.close(descriptor)
    except DataReadError:
        raise
    except OSError as error:
        raise DataReadError(
            f"read of {file.path}: {error.strerror or error} at byte {offset}, {len(buffer)} bytes; make the file "
            "readable "
            "again and resume"
        ) from error
    return ids


@contextmanager
def refuse_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError on opening or looking at a data file into a refusal that names it."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise DataError(f"--data {path}: there is no such file or folder; look at its name") from error
        raise DataError(f"--data {path}: {error.strerror or error}; give files that you may read") from error


def short_hash(document: Any) -> str:
    """Twenty hexadecimal digits that identify a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:20]


def read_note(path: Path, key: Any) -> dict[str, Any] | None:
    """What :func:`write_note` kept under the same key, or None if there is nothing or it is not as written."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # a cache: whatever is wrong with it, the work is done again
    if not isinstance(document, dict) or document.get("key") != key or not isinstance(document.get("value"), dict):
        return None
    value: dict[str, Any] = document["value"]
    return value if document.get("crc32c") == _note_checksum(value) else None


def _note_checksum(value: dict[str, Any]) -> int:
    """Of what is kept: damage must not pass for facts about the data."""
    return int(google_crc32c.value(json.dumps(value, sort_keys=True).encode()))


def write_note(path: Path, key: Any, value: dict[str, Any]) -> None:
    """Keep a small JSON document in the cache, under a temporary name first. Raises DataError if it can't be
    written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"key": key, "value": value, "crc32c": _note_checksum(value)}
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"token cache {path.parent}: {error.strerror or error}; make room in it or choose another directory"
        ) from error
