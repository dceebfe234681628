"""Takes what lanes note for `--trace`, and has a thread that makes events of it and writes them.

Lanes note through `traced.py`; `trace_events.py` makes the events, in `trace_file.py`'s format. Without a trace none of
this exists.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Self

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.trace_events import Events, Note
from hoist.scheduler.trace_file import TraceFile, check_trace_path, process_events

_log = logging.getLogger(__name__)

#: Notes after which the file is written within a step, and after which lanes wait until it is.
BATCH_NOTES, MOST_NOTES = 2048, 16384
#: Notes between two writes to the file. Python runs one thread at a time: a lane that wants its turn gets it when the
#: writing thread writes, so it waits for the events of so many notes at most.
_WRITE_NOTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceStatistics:
    """What writing has taken so far."""

    num_bytes: int
    """Of events, before they are compressed."""
    processor_seconds: float
    """Processor time of the thread that writes, up to its last batch."""


class Trace:
    """Writes what trainers do to a file, from its creation until :meth:`close`. One trainer at a time.

    Lanes note; a thread of its own writes, at the end of each step, and within it whenever much has been noted. If the
    file cannot be written, the trace ends there with a notice and the run goes on.
    """

    def __init__(
        self, path: str | Path, *, notice: Callable[[str], None] | None = None, option: str = "trace:"
    ) -> None:
        """``notice`` is told, on the training thread, why a trace ends early; default: the log. ``option`` is what the
        user calls the path.

        Replaces a file that is there. Raises ConfigError if it cannot be made.
        """
        check_trace_path(Path(path), option)
        try:
            self._file = TraceFile(Path(path))
        except OSError as error:
            raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}; name another file") from error
        self._notice = notice or (lambda text: _log.warning("%s", text))
        base = self._file.base_nanoseconds
        self._events = Events(os.getpid(), time.time_ns() - perf_counter_ns() - base)
        #: What is not written yet. Anyone appends; the writing thread takes away from the front. Both are one operation
        #: of the interpreter.
        self.notes: list[Note] = []
        #: Guards everything below it, and what it says.
        self._changed = threading.Condition()
        self._asked = self._writing = self._closing = False
        #: Why nothing is written any more; what is noted from then on is dropped.
        self._failure: BaseException | None = None
        self._told = False
        self._processor_seconds = 0.0
        self._thread = threading.Thread(target=self._serve, name="hoist-trace", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Return when everything noted so far is in the file, or the trace has ended."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()
            while (self._asked or self._writing) and not self._closing:
                self._changed.wait()

    def close(self) -> None:
        """Write what is left and end the file. Idempotent. Raises only what would be a fault of hoist itself."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._failure is None:
            try:
                self._file.close()
            except OSError as error:
                self._failure = error
        self.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def tell(self) -> None:
        """Say once if the trace has ended early."""
        failure = self._failure
        if failure is None or self._told:
            return
        self._told = True
        if not isinstance(failure, OSError):
            raise failure
        self._notice(f"the trace {self._file.path} ends here, it cannot be written: {failure.strerror or failure}")

    def statistics(self) -> TraceStatistics:
        """What writing has taken; exact after :meth:`flush`."""
        with self._changed:
            return TraceStatistics(num_bytes=self._file.num_bytes, processor_seconds=self._processor_seconds)

    def ask(self) -> None:
        """Have everything written that is noted."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Have it written, and let the writing thread catch up if it is far behind."""
        with self._changed:
            if not self._writing:
                self._asked = True
                self._changed.notify_all()
            while len(self.notes) >= MOST_NOTES and not self._closing:
                self._changed.wait()

    # ------------------------------------------------------------------ the writing thread

    def _serve(self) -> None:
        self._attempt(self._write_process)
        closing = False
        while not closing:
            with self._changed:
                while not (self._closing or self._asked):
                    self._changed.wait()
                self._asked, self._writing, closing = False, True, self._closing
            self._attempt(self._write_notes)
            with self._changed:
                if self._failure is not None:
                    self.notes.clear()
                self._writing = False
                self._processor_seconds = time.thread_time()
                self._changed.notify_all()

    def _attempt(self, write: Callable[[], None]) -> None:
        """Unless the trace has ended. An error ends it, and is told by the next step, or when the trace is closed."""
        if self._failure is None:
            try:
                write()
            except BaseException as error:
                self._file.abandon()
                self._failure = error

    def _write_process(self) -> None:
        base = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self._file.base_nanoseconds // 10**9))
        self._file.write(process_events(os.getpid(), "hoist", f"times are since {base} UTC"))

    def _write_notes(self) -> None:
        """All that there are now, and a part of what comes meanwhile."""
        left = len(self.notes)
        while left > 0:
            notes = self.notes[:_WRITE_NOTES]
            del self.notes[: len(notes)]
            self._file.write(self._events.of(notes))
            left -= len(notes)
        self._file.end_batch()
