"""Every error that the tools raise. Refusals (exit code 2) leave nothing behind; failures (exit code 1) say what is
left.

The bases, and the errors of the tiers, are in `hoist.tiers.errors`.
"""

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
