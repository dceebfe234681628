"""A trace as Chrome and Perfetto read it: a JSON array of events, written in batches that can be read after each.

What the events say is `trace.py`'s business. The format's reader forgives a missing end: a killed run leaves one.
"""

from __future__ import annotations

import io
import json
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from hoist.scheduler.errors import ConfigError

#: PyTorch's profiler counts its times from the beginning of the current interval of so many seconds since 1970, so that
#: they have microseconds' thousandths in a double. Counted alike, times of both can be compared.
BASE_INTERVAL_SECONDS = 7_889_238
_LEVEL = 5
#: zlib's largest window, in gzip's frame.
_GZIP_WINDOW = 31
#: A microsecond's, as decimals: looked up in a third of the time that it takes to format them.
_THOUSANDTHS = tuple(f".{number:03}" for number in range(1000))
#: Between the array's events.
_BETWEEN = ",\n"


def base_nanoseconds(now_seconds: float) -> int:
    """What times of a trace that begins now are counted from, in nanoseconds since 1970."""
    return int(now_seconds) // BASE_INTERVAL_SECONDS * BASE_INTERVAL_SECONDS * 10**9


def check_trace_path(path: Path, option: str) -> None:
    """Raise ConfigError if a trace cannot be written to ``path``, as far as can be seen. Changes nothing."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a directory; name a file")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: {folder} is not a directory; make it first, or name another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written; name another file")


class TraceFile:
    """Writes events; compressed if the file's name ends in ``.gz``. One thread at a time. Close when done.

    An OSError closes the file and leaves it as it was after an earlier batch, or with a part of one more.
    """

    def __init__(self, path: Path) -> None:
        """What the file held is gone. Raises OSError if it cannot be opened."""
        self.path = path
        #: Events' times are counted from here.
        self.base_nanoseconds = base_nanoseconds(time.time())
        #: Unbuffered: what is written is in the file, whatever becomes of the process.
        self._raw: io.RawIOBase = path.open("wb", buffering=0)
        #: Makes a gzip file of what is written; None: it stays as it is.
        self._packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW) if path.suffix == ".gz" else None
        self._empty = True
        #: Of events so far, before they are compressed.
        self.num_bytes = 0

    def write(self, events: list[str]) -> None:
        """Append events, each a JSON object, or several from one of the forms below. Raises OSError."""
        if events:
            text = ("[\n" if self._empty else _BETWEEN) + _BETWEEN.join(events)
            self._empty = False
            self._put(text.encode())

    def end_batch(self) -> None:
        """What was written can be read from now on, whatever becomes of the process. Raises OSError."""
        if self._packer is not None:
            self._write_all(self._packer.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        """End the array. Idempotent. Raises OSError, closed all the same."""
        if self._raw.closed:
            return
        try:
            self._put(b"[\n]\n" if self._empty else b"\n]\n", last=True)
        finally:
            self._raw.close()

    def abandon(self) -> None:
        """Close without an end, after a failure."""
        self._raw.close()

    def _put(self, data: bytes, *, last: bool = False) -> None:
        self.num_bytes += len(data)
        if self._packer is not None:
            data = self._packer.compress(data) + (self._packer.flush() if last else b"")
        self._write_all(data)

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._raw.write(rest) or 0 :]


def micros(nanoseconds: int) -> str:
    """A time or duration in microseconds, to the nanosecond."""
    return f"{nanoseconds // 1000}{_THOUSANDTHS[nanoseconds % 1000]}"


def complete_event(
    *, name: str, category: str, process: int, track: int, start: int, duration: int, args: str
) -> str:
    """A slice of a track. ``name`` and ``args`` are JSON; ``start`` and ``duration`` are nanoseconds."""
    return (
        f'{{"ph":"X","name":{name},"cat":"{category}","pid":{process},"tid":{track},"ts":{micros(start)},'
        f'"dur":{micros(duration)},"args":{args}}}'
    )


def op_form(*, name: str, category: str, process: int, args: str) -> str:
    """An op's slice, but for its track, start and duration (both as :func:`micros` says) and step, in this order.

    For the ``%`` operator. ``args`` is the inside of a JSON object.
    """
    head = f'{{"ph":"X","name":{json.dumps(name)},"cat":"{category}","pid":{process},"tid":'.replace("%", "%%")
    return head + '%d,"ts":%s,"dur":%s,"args":{' + args.replace("%", "%%") + ',"step":%d}}'


def arrow_form(process: int) -> str:
    """Both events of an arrow from one slice to another, for the ``%`` operator: the arrow's number, track and time
    within the slice there, of its tail and then of its head.
    """
    common = f'"name":"waits for","cat":"dependency","id":%d,"pid":{process},"tid":%d,"ts":%s}}'
    return f'{{"ph":"s",{common}{_BETWEEN}{{"ph":"f","bp":"e",{common}'


def counters_form(process: int, names: Sequence[str]) -> str:
    """Some counters' values from a time on, for the ``%`` operator: of each the time and the value."""
    return _BETWEEN.join(
        f'{{"ph":"C","name":"{name}","pid":{process},"ts":%s,"args":{{"value":%d}}}}' for name in names
    )


def name_events(process: int, track: int, name: str, order: int) -> list[str]:
    """What a track is called, and where it is among the process' others."""
    return [
        f'{{"ph":"M","name":"thread_name","pid":{process},"tid":{track},"args":{{"name":{json.dumps(name)}}}}}',
        f'{{"ph":"M","name":"thread_sort_index","pid":{process},"tid":{track},"args":{{"sort_index":{order}}}}}',
    ]


def process_events(process: int, name: str, label: str) -> list[str]:
    """What the process is called."""
    return [
        f'{{"ph":"M","name":"process_name","pid":{process},"args":{{"name":{json.dumps(name)}}}}}',
        f'{{"ph":"M","name":"process_labels","pid":{process},"args":{{"labels":{json.dumps(label)}}}}}',
    ]
