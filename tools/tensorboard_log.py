"""`--tensorboard DIR`: what `--metrics` has, number by number under the same names, as event files for TensorBoard.

What the numbers mean is in docs/metrics.md; `metrics_file.py` writes the lines. torch's SummaryWriter does the writing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.metrics import StepMetrics
from hoist.tools.errors import MetricsError
from hoist.tools.evaluation import EvalRecord
from hoist.tools.invoked import install_command

#: A kill loses what came in since the last flush.
FLUSH_SECONDS = 5


def check_tensorboard(directory: Path) -> None:
    """Raise ConfigError if files cannot be made in ``directory``, or TensorBoard is not installed.

    It is tried, and undone. Imports what writing needs, so that it is there before memory is measured.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
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
    """Adds the numbers of steps and evaluations to event files. Close when done; use it as a context manager."""

    def __init__(self, directory: Path, *, next_step: int) -> None:
        """``next_step``: the step that comes next; what earlier calls wrote of it and later ones is not shown any more.

        Raises MetricsError if no file can be made.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        try:
            make: Any = SummaryWriter  # without types
            self._writer = make(log_dir=str(directory), purge_step=next_step, flush_secs=FLUSH_SECONDS)
        except OSError as error:
            raise self._error(error) from error

    def write(self, metrics: StepMetrics | EvalRecord) -> None:
        """Add a step or an evaluation; what is no number is left out. Raises MetricsError, perhaps of one before."""
        try:
            for name, value in scalars(metrics.to_json()):
                self._writer.add_scalar(name, value, metrics.step)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> MetricsError:
        return MetricsError(f"--tensorboard {self._directory}: cannot be written: {error.strerror or error}")

    def close(self) -> None:
        """Write what is left. Idempotent. Raises MetricsError."""
        try:
            self._writer.close()
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
