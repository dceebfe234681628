"""`hoist doctor`: parses and calls `hoist.tools.doctor`, and prints what the machine offers.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
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
    device: Annotated[
        str,
        typer.Option(metavar="NAME", show_default=False, help="Device to measure: auto (default), cpu, or as cuda:1."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Say what this machine offers: I/O engine, memory, limits, GPU; and how bytes move between them, with the speed of
    each way."""
    return _doctor(directory, io, device, as_json)


def _doctor(directory: Path, io: str, device_name: str, as_json: bool) -> int:
    from hoist.tools.loudness import is_quiet
    from hoist.tools.progress import LongWork, loading

    with loading():
        from hoist.tiers.device.choose import choose_device
        from hoist.tiers.errors import DeviceError
        from hoist.tiers.io.choose import choose_engine
        from hoist.tools.doctor import diagnose, render

    work = LongWork(Console(stderr=True), quiet=is_quiet())
    with ExitStack() as stack:
        engine = stack.enter_context(choose_engine(io))
        try:
            device = choose_device(device_name)
            stack.callback(device.close)
        except DeviceError as error:
            device, why_no_device = None, str(error)
        else:
            why_no_device = ""
        stack.enter_context(work.during("measuring the drive"))
        diagnosis = diagnose(directory, engine, device, why_no_device=why_no_device)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json(), indent=2))
    else:
        render(diagnosis, Console())
    return 0 if diagnosis.healthy else 1
