"""Files that a command is asked to write: looked at before the work, written whole or not at all after it.

What is written is the command's business.
"""

from __future__ import annotations

import os
from pathlib import Path

from hoist.tools.errors import ReportError, ReportRefusedError
from hoist.tools.invoked import install_command


def check_drawing(what: str) -> None:
    """Raise ReportRefusedError, which says that ``what`` needs them, unless the extra `report`'s packages are there."""
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ModuleNotFoundError as error:
        command = install_command("altair vl-convert-python")
        raise ReportRefusedError(f"{what} needs {error.name}, which is not installed: {command}") from error


def check_target(path: Path, store: Path | None, *, option: str) -> Path:
    """Where a file is to go, links followed. Raises ReportRefusedError if it cannot, as far as can be seen.

    ``store``: a directory that it must not lie in.
    """
    try:
        target = path.resolve()
        if target.is_dir():
            raise ReportRefusedError(f"{option} {path}: is a directory; name a file in it")
        if path.exists() and not target.is_file():
            raise ReportRefusedError(f"{option} {path}: is no file; name one")
        if store is not None and target.is_relative_to(store.resolve()):
            raise ReportRefusedError(f"{option} {path}: lies in the store; name a file outside of it")
        if not target.parent.is_dir():
            raise ReportRefusedError(f"{option} {path}: {target.parent} is not a directory; make it first")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise ReportRefusedError(f"{option} {path}: {target.parent} cannot be written; name another place")
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        if isinstance(error, ReportRefusedError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ReportRefusedError(f"{option} {path}: cannot be written: {reason}; name another file") from error
    return target


def write_file(target: Path, data: bytes) -> None:
    """Put a file in its place whole, or leave what was there. Raises ReportError."""
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_bytes(data)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ReportError(f"{target}: cannot be written: {error.strerror}; make room or name another file") from error
