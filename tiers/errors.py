"""Every error that the tiers raise: refusals (exit code 2), before anything was changed, and failures (exit code 1).

Each class is also the builtin that it resembles, so callers who don't know hoist can still catch it.
"""


class HoistError(Exception):
    """Base of all errors that hoist raises on purpose. ``str(error)`` is one line that says what to do next."""

    #: Process exit code of the command line: 1 the work failed, 2 it was refused before it began.
    exit_code: int = 1


class RefusalError(HoistError, ValueError):
    """The request cannot be carried out as given; nothing was created or changed."""

    exit_code = 2


class BudgetError(RefusalError, MemoryError):
    """A memory budget is too small for what was asked; the message gives the smallest that works."""


class StoreRefusedError(RefusalError, OSError):
    """A store directory cannot be used: missing, read-only, not a directory, too little space, another model's."""


class StoreLockedError(RefusalError, BlockingIOError):
    """Another process writes to the store."""


class StoreFormatError(HoistError, ValueError):
    """Bytes of a store are not what the format says; the message carries file, offset and what was seen."""


class CorruptChunkError(StoreFormatError):
    """A committed chunk is missing, has the wrong size, or fails its checksum."""


class TransferError(HoistError, OSError):
    """A read or write of the NVMe tier failed; the message carries operation, file, offset, length and cause."""


class DeviceError(HoistError, RuntimeError):
    """The device that computes has failed, was lost, or has run out of memory; the message says what to do next."""


class ResidencyError(HoistError, RuntimeError):
    """A move that the residency table does not allow: a bug in a plan or in what carries it out. Nothing was moved."""
