"""The error that optim raises for settings no optimizer can run with. Misuse by our own code is a plain ValueError.

The tiers' errors are in `hoist.tiers.errors`; optim doesn't import tiers, so this class stands alone.
"""


class HyperparameterError(ValueError):
    """A setting is outside what is allowed; the message names field, value and what is allowed. Nothing was changed."""

    #: Process exit code of the command line: refused before anything began.
    exit_code: int = 2
