"""How this process's command was called, so that commands, paths and installations it shows can be pasted where it ran.

What is proposed is the business of `show.py` and `train.py`.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "hoist"


class _Invoked:
    """The command line at work."""

    arguments: tuple[str, ...] = ()


def begin(arguments: Sequence[str]) -> None:
    """A command line is about to be carried out."""
    _Invoked.arguments = tuple(arguments)


def command_line() -> str:
    """The command at work, as it was given, for a shell. Results are kept, so it has no path to the program."""
    return shlex.join([NAME, *_Invoked.arguments])


def command_name() -> str:
    """``hoist`` where the shell finds that very program; else the path by which it was called, quoted for a shell."""
    called = Path(sys.argv[0]) if sys.argv else Path()
    if called.name != NAME:  # a module or another program that imports this one
        return NAME
    found = shutil.which(NAME)
    try:
        same = found is not None and called.samefile(found)
    except OSError:
        return NAME
    return NAME if same else shlex.quote(sys.argv[0])


def shown_path(path: Path) -> str:
    """From the current directory, where it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def install_command(package: str) -> str:
    """The command that installs a package for the Python that runs this, also where its environment is not active."""
    return f"{shlex.quote(sys.executable)} -m pip install {package}"
