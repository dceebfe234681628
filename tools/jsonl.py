"""JSON records out of a file, one after another, in memory that depends on the longest record alone.

JSON lines, or one array of objects; every record comes with the number of its line. What is in a record is
`records.py`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hoist.tiers.io.requests import drop_cache
from hoist.tools.errors import DataError
from hoist.tools.tokens import refuse_os_errors

#: Files of records that are JSON; `.json` may be an array or lines.
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
#: Longest record, in bytes: a file that is no list of records must not fill the memory before that shows.
MAX_RECORD_BYTES = 64 * 2**20
#: Bytes after which what was read is dropped from the page cache.
_DROP_BYTES = 4 * 2**20
_READ_BYTES = 256 * 2**10
_BLANKS = " \t\r\n"
#: Python reads no more than 4300 of them.
_TOO_MANY_DIGITS = "a whole number of too many digits"


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a file."""

    line: int
    """Number of the line that it begins in, from 1; of a table its row."""
    fields: dict[str, Any]
    done_bytes: int
    """Bytes of the file up to its end, or nearly."""


def read_json(path: Path) -> Iterator[Record]:
    """The records of a JSON file, in order.

    Raises :class:`DataError`, with file and line, where it is no UTF-8, no JSON or a record is no object.
    """
    with refuse_os_errors(path), path.open("rb", buffering=0) as file:
        raw: IO[bytes] = file
        start = raw.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        raw.seek(0)
        yield from _read_array(path, file) if start.startswith(b"[") else _read_lines(path, file)


def _read_lines(path: Path, file: IO[bytes]) -> Iterator[Record]:
    number, done = 0, 0
    for line in _lines(path, file):
        number += 1
        done += len(line)
        text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, path, number)
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise _no_json(path, number, error.colno, error.msg) from None
        except RecursionError:
            raise _no_json(path, number, 1, "nested too deeply") from None
        except ValueError:
            raise _no_json(path, number, 1, _TOO_MANY_DIGITS) from None
        yield _record(path, number, value, done)


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file with their ends, whose pages leave the page cache."""
    pending, dropped, number = b"", 0, 0
    while block := file.read(_READ_BYTES):
        *whole, pending = (pending + block).split(b"\n")
        for line in whole:
            number += 1
            yield line + b"\n"
        if len(pending) > MAX_RECORD_BYTES:
            raise _too_long(path, number + 1)
        if file.tell() - dropped >= _DROP_BYTES:
            drop_cache(file.fileno(), dropped, file.tell() - dropped)
            dropped = file.tell()
    if pending:
        yield pending


def _read_array(path: Path, file: IO[bytes]) -> Iterator[Record]:
    """The objects of one JSON array, decoded one at a time from a buffer that grows to the longest of them."""
    text = _Text(path, file)
    decoder = json.JSONDecoder()
    text.skip()
    text.take(1)  # the bracket
    if text.skip() == "]":
        text.take(1)
    else:
        while True:
            line = text.line
            value, length = _decode_value(path, text, decoder)
            text.take(length)
            yield _record(path, line, value, text.done_bytes)
            separator = text.skip()
            if separator not in (",", "]"):
                raise _no_json(path, text.line, text.column, "expecting ',' or ']' after a record")
            text.take(1)
            if separator == "]":
                break
            text.skip()
    if text.skip():
        raise _no_json(path, text.line, text.column, "more after the array's end")


def _decode_value(path: Path, text: _Text, decoder: json.JSONDecoder) -> tuple[Any, int]:
    """The value at the buffer's beginning, and its length; reads on until it is whole."""
    while True:
        try:
            value, end = decoder.raw_decode(text.buffer)
            return value, end
        except json.JSONDecodeError as error:
            # A value that is cut off fails at the end of what is there, or at the quote that begins its last string.
            cut = error.msg.startswith("Unterminated string") or error.pos >= len(text.buffer) - 8
            if cut and text.more():
                continue
            before = text.buffer[: error.pos]
            column = error.pos - before.rfind("\n") if "\n" in before else text.column + error.pos
            raise _no_json(path, text.line + before.count("\n"), column, error.msg) from None
        except RecursionError:
            raise _no_json(path, text.line, text.column, "nested too deeply") from None
        except ValueError:
            raise _no_json(path, text.line, text.column, _TOO_MANY_DIGITS) from None


class _Text:
    """Decoded text of a file, of which the beginning is taken off; knows the line and column that it is at."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.buffer = ""
        self.line = 1
        self.column = 1
        self.done_bytes = 0
        self._path = path
        self._file = file
        #: Bytes read that are not a whole character yet.
        self._rest = b""
        self._lines_read = 0
        self._dropped = 0
        self._began = False

    def more(self) -> bool:
        """Read as much again as there is, at least a block. False at the file's end."""
        if len(self.buffer) > MAX_RECORD_BYTES:
            raise _too_long(self._path, self.line)
        data = self._file.read(max(_READ_BYTES, len(self.buffer)))
        if not self._began:
            data, self._began = data.removeprefix(b"\xef\xbb\xbf"), True
        whole = self._rest + data
        end = len(whole) if not data else _whole_characters(whole)
        text = _decode(whole[:end], self._path, 1 + self._lines_read)
        self._rest = whole[end:]
        self._lines_read += text.count("\n")
        self.buffer += text
        self.done_bytes = self._file.tell()
        if self.done_bytes - self._dropped >= _DROP_BYTES:
            drop_cache(self._file.fileno(), self._dropped, self.done_bytes - self._dropped)
            self._dropped = self.done_bytes
        return bool(data)

    def take(self, count: int) -> None:
        """Drop the first characters of the buffer."""
        taken = self.buffer[:count]
        lines = taken.count("\n")
        self.line += lines
        self.column = count - taken.rfind("\n") if lines else self.column + count
        self.buffer = self.buffer[count:]

    def skip(self) -> str:
        """Drop blanks, and return the character that follows; empty at the end of the file."""
        while True:
            blanks = len(self.buffer) - len(self.buffer.lstrip(_BLANKS))
            self.take(blanks)
            if self.buffer:
                return self.buffer[0]
            if not self.more():
                return ""


def _whole_characters(data: bytes) -> int:
    """How many bytes are whole UTF-8 characters, if the last one may be cut off."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return len(data)
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < needed else len(data)
    return len(data)


def _decode(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise DataError(
            f"--data {path}: line {line}: no UTF-8 at byte {column} ({data[error.start]:#04x}); convert the file"
        ) from None


def _record(path: Path, line: int, value: Any, done_bytes: int) -> Record:
    if not isinstance(value, dict):
        raise DataError(
            f"--data {path}: line {line}: is {_kind(value)}, not a JSON object; write records like "
            '{"text": "..."}'
        )
    return Record(line, value, done_bytes)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _no_json(path: Path, line: int, column: int, reason: str) -> DataError:
    return DataError(f"--data {path}: line {line}: no JSON at column {column} ({reason}); correct the line")


def _too_long(path: Path, line: int) -> DataError:
    return DataError(
        f"--data {path}: line {line}: a record of more than {MAX_RECORD_BYTES // 2**20} MiB; cut it, or give text or "
        "token ids (.npy)"
    )
