"""`hoist drives`: parses and calls `hoist.tools.drives`, and prints where chunks are.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EPILOG = "Examples:\n\n[bold]hoist drives hoist-store[/]\n\n[bold]hoist drives hoist-store --add /mnt/second/hoist[/]"


def drives(
    store: Annotated[Path, typer.Argument(help="The store: its main directory.")],
    add: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Take a directory on another drive into use; repeat for more."),
    ] = None,
    remove: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Move everything off a drive and take it out of use; repeat for more."),
    ] = None,
    io: Annotated[
        str, typer.Option(metavar="NAME", show_default=False, help="I/O engine: auto (default), direct or kvikio.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the drives as JSON.")] = False,
) -> int:
    """Say which drives a store spans, or spread it over others; run it again to finish an interrupted change."""
    return _drives(store, add or [], remove or [], io, as_json)


def _drives(store: Path, add: list[Path], remove: list[Path], io: str, as_json: bool) -> int:
    from hoist.tools.loudness import is_quiet
    from hoist.tools.progress import loading

    with loading():
        from hoist.tiers.io.choose import choose_engine
        from hoist.tools.drives import change, look, render
        from hoist.tools.show import Display
        from hoist.tools.sizes import show_bytes
        from hoist.tools.stop import Stop

    if add or remove:
        with Stop() as stop, choose_engine(io) as engine, Display(Console(stderr=as_json)) as display:

            def progress(done: int, total: int) -> None:
                stop.check()
                display.progress("moving chunks", done, total)

            if add:
                display.progress("measuring the drives", 0, 0)
            moved_bytes = change(store, engine, add=add, remove=remove, progress=progress)
            display.notice(f"{show_bytes(moved_bytes)} moved")
    uses = look(store)
    if as_json:
        typer.echo(json.dumps([use.to_json() for use in uses], indent=2))
    elif not ((add or remove) and is_quiet()):
        render(uses, Console())
    return 0 if all(use.problem is None for use in uses) else 1
