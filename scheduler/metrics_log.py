"""Files of metrics: a JSON object a line, appended whole; and reading them back, also after crashes and restores.

What is in a line is `metrics.py`'s (steps) and `tools/evaluation.py`'s (evaluations). Which files there are:
STORE/metrics.jsonl, which the trainer writes, and `tools/metrics_file.py`'s.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hoist.tiers.small_files import decode_json

_log = logging.getLogger(__name__)
#: What is longer than this is no line of metrics.
_LINE_BYTES = 1 << 20
#: Of a longer file, its end is read: some 150,000 steps, which take about 300 MB in memory.
MAX_READ_BYTES = 128 << 20


class LineFile:
    """Appends lines of JSON, each whole or not at all. Close when done; use it as a context manager.

    What was written survives the process, however it ends; a power cut, only after :meth:`sync`.
    """

    def __init__(self, path: Path, *, cut_torn: bool = False) -> None:
        """A last line without its end, which a power cut can leave, is ended; or with ``cut_torn`` removed, unless it
        is JSON, so that every line of the file is. ``cut_torn`` is for hoist's own files: what is no regular file, as
        a pipe that nobody reads, is refused then. Raises OSError.
        """
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_NONBLOCK if cut_torn else 0)
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ENXIO:  # what opening a pipe says that nobody reads
                raise
            raise OSError(errno.EINVAL, "is no regular file", str(path)) from error
        self._is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        try:
            if cut_torn and not self._is_file:
                raise OSError(errno.EINVAL, "is no regular file", str(path))
            if self._is_file:
                self._mend(cut_torn)
        except BaseException:
            self.close()
            raise

    def _mend(self, cut_torn: bool) -> None:
        length = os.fstat(self._descriptor).st_size
        if not length:
            return
        try:
            reader = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            return  # appending is allowed, reading is not
        try:
            start = max(0, length - _LINE_BYTES)
            tail = os.pread(reader, length - start, start)
        finally:
            os.close(reader)
        last = tail.rpartition(b"\n")[2]
        if not last:
            return
        if cut_torn and (start == 0 or len(last) < len(tail)) and not _is_object(last):
            os.ftruncate(self._descriptor, length - len(last))
        else:
            self._append(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line. Raises OSError, and ValueError on what is not JSON; nothing of it is in the file then."""
        self._append(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _append(self, data: bytes) -> None:
        start = os.lseek(self._descriptor, 0, os.SEEK_END) if self._is_file else 0
        rest = memoryview(data)
        try:
            while rest:  # one write(2), but where a pipe or a full drive takes only a part
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if self._is_file:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, start)
            raise

    def sync(self) -> None:
        """Make what was written durable. Raises OSError."""
        if self._is_file:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class MetricsLog:
    """The store's own metrics: STORE/metrics.jsonl. A run is never lost to it.

    A line that cannot be written (the drive is full, the file may not be written) is left out, said once through
    `logging`, and the next one tried all the same; so steps can be missing. Unlike ``--metrics FILE``, which was asked
    for and whose failure ends the run.
    """

    def __init__(self, path: Path) -> None:
        """Raises nothing about the file."""
        self._path = path
        #: None until it can be opened, and once closed.
        self._file: LineFile | None = None
        self._failed = False
        self._closed = False
        #: Lines were written since the last :meth:`sync`.
        self._is_new = False
        self._open()

    def _open(self) -> LineFile | None:
        if self._file is None and not self._closed:
            try:
                self._file = LineFile(self._path, cut_torn=True)
            except OSError as error:
                self._tell(error)
        return self._file

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line, if that can be. Raises ValueError on what is not JSON."""
        file = self._open()
        if file is None:
            return
        try:
            file.write(record)
            self._is_new = True
        except OSError as error:
            self._tell(error)

    def sync(self) -> None:
        """Make the lines so far durable, if there are new ones. From any thread."""
        file = self._file
        if file is None or not self._is_new:
            return
        self._is_new = False
        try:
            file.sync()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _log.warning(
                "%s: cannot be written: %s; the run goes on, steps will be missing there", self._path, error.strerror
            )

    def close(self) -> None:
        """Idempotent. No :meth:`sync` may be under way."""
        self.sync()
        self._closed = True
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What a file of metrics says of a run, as far as it holds."""

    steps: tuple[Mapping[str, Any], ...]
    """One a step, in order: :class:`hoist.scheduler.metrics.StepMetrics` as JSON, of whichever hoist wrote it."""
    evaluations: tuple[Mapping[str, Any], ...]
    """One an evaluation, in order; each has ``step`` and ``eval_loss``."""
    unread_bytes: int = 0
    """What was passed over at the beginning of a file that is longer than :data:`MAX_READ_BYTES`."""


def read_metrics(path: str | Path) -> Recorded:
    """Read a file of metrics; a file that is not there has none. Lines that are no record are passed over.

    A run that crashed, or was brought back to an earlier commit, does steps again: a line for a step replaces what was
    there for it and for later ones. Of a longer file, the last :data:`MAX_READ_BYTES` are read. Numbers that are
    infinite, or none, are None. Raises OSError if the file is there and cannot be read.
    """
    steps: dict[int, Mapping[str, Any]] = {}
    evaluations: dict[int, Mapping[str, Any]] = {}
    newest = -1
    path = Path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return Recorded(steps=(), evaluations=())
    with os.fdopen(descriptor, "rb") as file:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        unread = max(0, seen.st_size - MAX_READ_BYTES)
        if unread:
            file.seek(unread)
        # A line that is cut, at the start here or by its length, is no JSON, like all of its parts but, perhaps, one
        # that is a number or a string; and none of those is a record.
        for line in iter(lambda: file.readline(_LINE_BYTES), b""):
            record = _record(line)
            if record is None:
                continue
            step = record["step"]
            if "eval_loss" in record:
                evaluations[step] = record
                continue
            if step <= newest:
                for known in (steps, evaluations):
                    for other in [number for number in known if number >= step]:
                        del known[other]
            steps[step] = record
            newest = step
    return Recorded(
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        unread_bytes=unread,
    )


def _record(line: bytes) -> dict[str, Any] | None:
    """The line's object, if it is one of a step or an evaluation."""
    try:
        record = decode_json(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record if "eval_loss" in record or "loss" in record else None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
