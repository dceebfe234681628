"""Every error that the tools raise. Refusals (exit code 2) leave nothing behind; failures (exit code 1) say what is
left.

The bases, and the errors of the tiers, are in `hoist.tiers.errors`.
"""

from __future__ import annotations

import signal

from hoist.tiers.errors import HoistError, RefusalError


class DataError(RefusalError):
    """``--data`` cannot be used as given: missing, empty, of the wrong kind, too short, or with ids that the model has
    not."""


class DataReadError(HoistError, OSError):
    """A token file that was fine at the start could not be read during the run; the store is at its last commit."""


class ModelSourceError(RefusalError):
    """``--model`` names nothing that can be trained: no such preset or directory, an unknown type, an unreadable
    config."""


class CheckpointError(RefusalError):
    """A safetensors checkpoint is not whole, not valid, or not this model's; the message carries file and numbers."""


class ExportRefusedError(RefusalError, OSError):
    """The target of an export cannot be used: it exists, its parent cannot be written, or its disk is too full."""


class ExportError(HoistError, OSError):
    """An export failed while it was written; nothing of it is left."""


class StoppedError(HoistError):
    """SIGINT or SIGTERM came before there was anything to keep; what was begun is removed again."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; what was unfinished is removed")
        self.exit_code = 128 + number


class MetricsError(HoistError, OSError):
    """``--metrics`` cannot be written any more; the run has ended after a whole step, which is committed."""


class RunFailedError(HoistError, RuntimeError):
    """A drive or device failed, or the loss is no number any more; the store is at its last commit, see the message."""


class ReportRefusedError(RefusalError, OSError):
    """A report cannot be made as asked: nowhere to go, or what draws it is not installed; nothing was written."""


class ReportError(HoistError, OSError):
    """A report could not be written; what was there before is still there."""


class BenchError(HoistError, RuntimeError):
    """A measurement failed, or its sides did not do the same: nothing is reported of it."""


class OutcomeError(RefusalError, ValueError):
    """A file is no outcome of a benchmark that can be read; the message carries its name."""
