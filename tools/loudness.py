"""How much commands say: `--quiet` and `--log-level`, which every command has, before its name and after it.

What is said is the business of each command; how progress looks is in `progress.py`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

LOG_LEVELS = ("debug", "info", "warning", "error")
_PANEL = "What is said"

Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", rich_help_panel=_PANEL,
        help="Say nothing but errors, and results that were asked for, as with --json.",
    ),
]  # fmt: skip
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level", metavar="LEVEL", rich_help_panel=_PANEL, show_default=False,
        help="Log to stderr what is of this level and above: debug, info, warning (default) or error (with --quiet).",
    ),
]  # fmt: skip


class _Loudness:
    """What the command line at work has asked for."""

    quiet = False
    level: str | None = None


class _Handler(logging.Handler):
    """Writes to what is stderr at that moment: a progress bar puts itself in its place, to stay the last line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except Exception:  # as all handlers do: logging must not end what it tells of
            self.handleError(record)


_handler = _Handler()
_handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))


def begin(quiet: bool, level: str | None) -> None:
    """What was given before the command's name. Raises RefusalError."""
    _Loudness.quiet, _Loudness.level = False, None
    _add(quiet, level)


def _add(quiet: bool, level: str | None) -> None:
    """What was given after it, too."""
    if level is not None and level not in LOG_LEVELS:
        from hoist.tiers.errors import RefusalError

        raise RefusalError(f"--log-level: {level!r} is not one of {', '.join(LOG_LEVELS)}")
    _Loudness.quiet = _Loudness.quiet or quiet
    _Loudness.level = level or _Loudness.level
    logger = logging.getLogger("hoist")
    logger.setLevel((_Loudness.level or ("error" if _Loudness.quiet else "warning")).upper())
    if _handler not in logger.handlers:
        logger.addHandler(_handler)


def is_quiet() -> bool:
    """Nothing is to be said but errors and what was asked for."""
    return _Loudness.quiet


def say(text: str) -> None:
    """A line on stdout about what was done, unless nothing is to be said."""
    if not _Loudness.quiet:
        typer.echo(text)


class LoudApp(typer.Typer):
    """Typer, whose every command has the two options too."""

    def command(self, *arguments: Any, **named: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # type: ignore[override]  # typer's own is narrower, in a way that changes with its version
        """As typer's."""
        register = super().command(*arguments, **named)
        return lambda command: register(_with_options(command))


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with two more options, which it is not told of."""

    @functools.wraps(command)
    def loud(*arguments: Any, quiet: bool = False, log_level: str | None = None, **named: Any) -> Any:
        _add(quiet, log_level)
        return command(*arguments, **named)

    hints = typing.get_type_hints(command, include_extras=True)
    more = {"quiet": (Quiet, False), "log_level": (LogLevel, None)}
    own = inspect.signature(command)
    parameters = [one.replace(annotation=hints[one.name]) for one in own.parameters.values()]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, (hint, default) in more.items()
    ]
    loud.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect looks for it
    loud.__annotations__ = hints | {name: hint for name, (hint, _) in more.items()}
    return loud
