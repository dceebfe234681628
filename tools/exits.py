"""How a command ends: its errors become one line on stderr and an exit code. No traceback, unless asked for.

0 done, 1 failed, 2 refused or bad usage with nothing changed, 128 + N ended by signal N. Set HOIST_TRACEBACK=1 to see
where an error comes from. What each error says is the business of whoever raises it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

import typer

from hoist.tiers.errors import HoistError
from hoist.tools.other_names import named_here

TRACEBACK_VARIABLE = "HOIST_TRACEBACK"
FAILED = 1
REFUSED = 2
#: click's UsageError, which typer keeps under names that change with its version.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def guarded(work: Callable[[], int]) -> int:
    """Run ``work`` and return its exit code, or that of the error it raised, which is told in one line on stderr."""
    try:
        return work()
    except BaseException as error:
        told = describe(error)
        if told is None:
            raise
        if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exception(error, file=sys.stderr)
        line, code = told
        print(f"hoist: {' '.join(line.split())}", file=sys.stderr)
        return code


def describe(error: BaseException) -> tuple[str, int] | None:
    """The line and the exit code of an error; None for what is no error of a command (SystemExit and the like)."""
    if isinstance(error, HoistError):
        return str(error), error.exit_code
    if isinstance(error, USAGE_ERROR):
        return _usage(error), REFUSED
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT", 128 + signal.SIGINT
    if isinstance(error, MemoryError):
        reason = str(error) or "the system gave no more"
        return f"out of memory: {reason}; free some, or give a smaller --host-memory", FAILED
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}; {_hint()}", FAILED
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's word for it
        return describe(MemoryError(str(error)))
    if isinstance(error, Exception):
        return f"internal error: {type(error).__name__}: {error}; {_hint()}", FAILED
    return None


def _usage(error: Exception) -> str:
    """click's message, which names option, value and what is allowed, and where the help is."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "hoist"
    option = str(getattr(error, "option_name", ""))
    if command == "hoist train" and (here := named_here(option)) is not None:
        message = f"No such option: {option}; here it is {here}"
    elif command == "hoist train" and "unexpected extra argument" in message:
        message = f"{message}; every option has its name before it, like --model DIR --data FILE"
    return f"{str(message).rstrip('.?')}; see {command} --help"


def _hint() -> str:
    return f"run with {TRACEBACK_VARIABLE}=1 for the traceback"
