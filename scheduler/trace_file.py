"""A trace as Chrome and Perfetto read it: a JSON array of events, written in batches, whole after each.

What the events say is `trace.py`'s business. The format's reader forgives a missing end: a killed run leaves one.
"""

from __future__ import annotations

import io
import json
import os
import time
import zlib
from pathlib import Path

from hoist.scheduler.errors import ConfigError

#: PyTorch's profiler counts its times from the beginning of the current interval of so many seconds since 1970, so that
#: they have microseconds' thousandths in a double. Counted alike, times of both can be compared.
BASE_INTERVAL_SECONDS = 7_889_238
_LEVEL = 5
#: zlib's largest window, in gzip's frame.
_GZIP_WINDOW = 31


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
        #: Unbuffered, so that what a batch holds is in the file once it is written, whatever becomes of the process.
        self._raw: io.RawIOBase = path.open("wb", buffering=0)
        #: Makes a gzip file of what is written; None: it stays as it is.
        self._packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW) if path.suffix == ".gz" else None
        self._empty = True

    def write(self, events: list[str]) -> None:
        """Append events, each a JSON object. Raises OSError."""
        if events:
            text = ("[\n" if self._empty else ",\n") + ",\n".join(events)
            self._empty = False
            self._put(text.encode())

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
        if self._packer is not None:
            # To a boundary up to which everything can be unpacked.
            data = self._packer.compress(data) + self._packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
        rest = memoryview(data)
        while rest:
            rest = rest[self._raw.write(rest) or 0 :]


def micros(nanoseconds: int) -> str:
    """A time or duration in microseconds, to the nanosecond."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"


def complete_event(
    *, name: str, category: str, process: int, track: int, start: int, duration: int, args: str
) -> str:
    """A slice of a track. ``name`` and ``args`` are JSON; ``start`` and ``duration`` are nanoseconds."""
    return (
        f'{{"ph":"X","name":{name},"cat":"{category}","pid":{process},"tid":{track},"ts":{micros(start)},'
        f'"dur":{micros(duration)},"args":{args}}}'
    )


def flow_events(*, number: int, process: int, tail: tuple[int, int], head: tuple[int, int]) -> tuple[str, str]:
    """An arrow from one slice to another; ``tail`` and ``head`` are a track and a time within the slice there."""
    common = f'"name":"waits for","cat":"dependency","id":{number},"pid":{process}'
    return (
        f'{{"ph":"s",{common},"tid":{tail[0]},"ts":{micros(tail[1])}}}',
        f'{{"ph":"f","bp":"e",{common},"tid":{head[0]},"ts":{micros(head[1])}}}',
    )


def counter_event(*, name: str, process: int, at: int, value: int) -> str:
    """A counter's value from a time on."""
    return f'{{"ph":"C","name":"{name}","pid":{process},"ts":{micros(at)},"args":{{"value":{value}}}}}'


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
