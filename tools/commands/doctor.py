"""`hoist doctor`: parses and calls `hoist.tools.doctor`, and prints what the machine offers.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EPILOG = "Example:  [bold]hoist doctor .[/]"


def doctor(
    directory: Annotated[Path, typer.Argument(help="Directory on the drive that a store would be on.")] = Path(),
    io: Annotated[
        str, typer.Option(metavar="NAME", show_default=False, help="I/O engine: auto (default), direct or kvikio.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Say what this machine offers: I/O engine, measured bandwidth of the drive, memory, limits, GPU."""
    return _doctor(directory, io, as_json)


def _doctor(directory: Path, io: str, as_json: bool) -> int:
    from hoist.tools.loudness import is_quiet
    from hoist.tools.progress import LongWork, loading

    with loading():
        from hoist.tiers.io.choose import choose_engine
        from hoist.tools.doctor import diagnose, render

    work = LongWork(Console(stderr=True), quiet=is_quiet())
    with choose_engine(io) as engine, work.during("measuring the drive"):
        diagnosis = diagnose(directory, engine)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json(), indent=2))
    else:
        render(diagnosis, Console())
    return 0 if diagnosis.healthy else 1
