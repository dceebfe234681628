"""Files of metrics: a JSON object a line, appended whole; and reading them back, also after crashes and restores.

What is in a line is `metrics.py`'s (steps) and `tools/evaluation.py`'s (evaluations). Which files there are:
STORE/metrics.jsonl, which the trainer writes, and `tools/metrics_file.py`'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_log = logging.getLogger(__name__)
#: Bytes that are looked at for the end of the last line at once.
_BLOCK_BYTES = 65536


class LineFile:
    """Appends lines of JSON, each whole or not at all. Close when done; use it as a context manager.

    What was written survives the process, however it ends; a power cut, only after :meth:`sync`.
    """

    def __init__(self, path: Path, *, cut_torn: bool = False) -> None:
        """A last line without its end, which a power cut can leave, is ended; or with ``cut_torn`` removed, unless it
        is JSON, so that every line of the file is. Raises OSError.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        try:
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
            start, tail = length, b""
            while start and b"\n" not in tail:
                count = min(start, _BLOCK_BYTES)
                start -= count
                tail = os.pread(reader, count, start) + tail
        finally:
            os.close(reader)
        last = tail.rpartition(b"\n")[2]
        if not last:
            return
        if cut_torn and not _is_object(last):
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


def read_metrics(path: str | Path) -> Recorded:
    """Read a file of metrics; a file that is not there has none. Lines that are no record are passed over.

    A run that crashed, or was brought back to an earlier commit, does steps again: a line for a step replaces what was
    there for it and for later ones. Raises OSError if the file is there and cannot be read.
    """
    steps: dict[int, Mapping[str, Any]] = {}
    evaluations: dict[int, Mapping[str, Any]] = {}
    newest = -1
    path = Path(path)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Recorded(steps=(), evaluations=())
    with file:
        for line in file:
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
    )


def _record(line: bytes) -> dict[str, Any] | None:
    """The line's object, if it is one of a step or an evaluation."""
    try:
        record = json.loads(line)
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
