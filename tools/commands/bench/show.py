"""`hoist bench show`: an outcome that was written, shown or drawn again. Nothing is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hoist.tools.commands.bench.measuring import Json, Plot, drawing, tell

EPILOG = "Example:  [bold]hoist bench show io.json --plot io.svg[/]"


def bench_show(
    result: Annotated[Path, typer.Argument(metavar="FILE", help="What --output wrote.")],
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """Show an outcome again that a benchmark wrote with --output, or draw it. Measures nothing."""
    from hoist.tools.bench.reading import read

    draw = drawing(plot)
    found = read(result)
    tell(found, as_json=as_json)
    draw(found)
    return 0
