"""The command line: puts the commands of `commands/` together, and runs one.

Errors and exit codes are in `exits.py`. Heavy imports wait until a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from hoist._version import __version__
from hoist.tools import invoked
from hoist.tools.commands import bench, doctor, drives, export, inspect, report, restore, snapshot, train, verify
from hoist.tools.loudness import LogLevel, LoudApp, Quiet, begin

app = LoudApp(
    name="hoist",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train language models bigger than memory from NVMe, exactly.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"hoist {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    quiet: Quiet = False,
    log_level: LogLevel = None,
) -> None:
    """Train language models bigger than memory from NVMe, exactly."""
    begin(quiet, log_level)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# In the order of `hoist --help`.
app.command(epilog=train.EPILOG)(train.train)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect_command)
app.command(epilog=export.EPILOG)(export.export)
app.command("verify", epilog=verify.EPILOG)(verify.verify_command)
app.command(epilog=report.EPILOG)(report.report)
app.command(epilog=snapshot.EPILOG)(snapshot.snapshot)
app.command(epilog=restore.EPILOG)(restore.restore)
app.command(epilog=drives.EPILOG)(drives.drives)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(bench.app)


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line; returns the exit code. Errors are told on stderr, one line each."""
    from hoist.tools.exits import guarded

    invoked.begin(arguments)
    return guarded(lambda: int(app(list(arguments), prog_name="hoist", standalone_mode=False) or 0))


def main() -> None:
    """Entry point of the `hoist` command."""
    # No hub is ever asked, and nobody is to wait for one: models and tokenizers are files.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is on code that users have not written
    warnings.simplefilter("ignore", FutureWarning)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
