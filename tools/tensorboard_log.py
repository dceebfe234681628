"""`--tensorboard DIR`: what `--metrics` has, number by number under the same names, as event files for TensorBoard.

What the numbers mean is in docs/metrics.md; `metrics_file.py` writes the lines. Records are TensorBoard's own,
written by who asks for it: a thread, as torch's SummaryWriter has one, tells of a full drive by itself, and too late.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.metrics import StepMetrics
from hoist.tools.errors import MetricsError
from hoist.tools.evaluation import EvalRecord
from hoist.tools.invoked import install_command


def check_tensorboard(directory: Path) -> None:
    """Raise ConfigError if files cannot be made in ``directory``, or TensorBoard is not installed.

    It is tried, and undone. Imports what writing needs, so that it is there before memory is measured.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard: needs tensorboard ({error}); install it: {install_command('tensorboard')}, or "
            "hoist-engine[tensorboard] with hoist"
        ) from None
    place = directory.absolute()
    made: list[Path] = []
    try:
        for folder in (*reversed(place.parents), place):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            f"--tensorboard {directory}: nothing can be written there: {error.strerror}; name another directory"
        ) from error
    finally:
        for folder in reversed(made):
            folder.rmdir()


def scalars(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON object by name, those of inner objects as ``busy_seconds/io``. ``step`` is no value."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and (prefix or name != "step"):
            yield f"{prefix}{name}", float(value)


class TensorboardLog:
    """Adds the numbers of steps and evaluations to an event file. Close when done; use it as a context manager."""

    def __init__(self, directory: Path, *, next_step: int) -> None:
        """``next_step``: the step that comes next; what earlier calls wrote of it and later ones is not shown any more.

        Raises MetricsError if no file can be made.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory = directory
        now = time.time()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads a directory's files in the order of their names.
            seconds, nanoseconds = divmod(time.time_ns(), 10**9)
            name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
            self._file = (directory / name).open("xb")
        except OSError as error:
            raise self._error(error) from error
        make: Any = RecordWriter  # without types
        self._records = make(self._file)
        self._event: Any = Event
        self._add(wall_time=now, file_version="brain.Event:2")
        self._add(wall_time=now, step=next_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, metrics: StepMetrics | EvalRecord) -> None:
        """Add a step or an evaluation, for readers to see; what is no number is left out. Raises MetricsError."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(metrics.to_json())]
        self._add(wall_time=time.time(), step=metrics.step, summary=Summary(value=values))

    def _add(self, **content: Any) -> None:
        try:
            self._records.write(self._event(**content).SerializeToString())
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> MetricsError:
        return MetricsError(f"--tensorboard {self._directory}: cannot be written: {error.strerror or error}")

    def close(self) -> None:
        """Idempotent. What could not be written was told when it came."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
