"""The `--metrics` file: one JSON object a step, and one an evaluation, a line each, appended whole or not at all.

What is in a line is `hoist.scheduler.metrics.StepMetrics` or `evaluation.EvalRecord`. The store's own metrics, which
are always written, are `hoist.scheduler.metrics_log`'s; how a line is appended, too.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.metrics_log import LineFile
from hoist.tiers.format import METRICS_NAME
from hoist.tools.errors import MetricsError
from hoist.tools.evaluation import EvalRecord


def check_metrics_path(path: Path, *, store: Path) -> None:
    """Raise ConfigError if lines cannot be appended to ``path``, as far as can be seen, or if it is the store's own.

    Creates and changes nothing.
    """
    try:
        if path.name == METRICS_NAME and path.resolve().parent == store.resolve():
            raise ConfigError(f"--metrics {path}: is the store's own, written in any case; leave the option out")
        if path.is_dir():
            raise ConfigError(f"--metrics {path}: is a directory; name a file")
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK))
            return
        folder = path.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"--metrics {path}: {folder} is not a directory; make it first, or name another file")
        if path.is_symlink() or not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--metrics {path}: {folder} cannot be written; name a file in another place")
    except OSError as error:
        raise ConfigError(f"--metrics {path}: cannot be written: {error.strerror}; name another file") from error


class MetricsFile:
    """Appends a line a step. Close when done; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises MetricsError if the file cannot be opened."""
        self._path = path
        try:
            self._file = LineFile(path)
        except OSError as error:
            raise self._error(error) from error

    def write(self, metrics: StepMetrics | EvalRecord) -> None:
        """Append a step or an evaluation. Raises MetricsError; of its line nothing is in the file then."""
        try:
            self._file.write(metrics.to_json())
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> MetricsError:
        return MetricsError(f"--metrics {self._path}: cannot be written: {error.strerror}")

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
