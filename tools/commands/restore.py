"""`hoist restore`: parses and calls `hoist.tools.snapshot`, and prints where the store now is.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hoist.tools.invoked import command_name

EPILOG = "Example:  [bold]hoist restore hoist-store before-the-new-data[/]"


def restore(
    store: Annotated[Path, typer.Argument(help="The store.")],
    name: Annotated[str, typer.Argument(help="Of the snapshot.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> int:
    """Bring a store back to a snapshot: what came after is given up, and training goes on from there, bit for bit."""
    return _restore(store, name, as_json)


def _restore(store: Path, name: str, as_json: bool) -> int:
    from hoist.tools.loudness import say
    from hoist.tools.progress import loading

    with loading():
        from hoist.tiers.io.choose import choose_engine
        from hoist.tools.show import Display
        from hoist.tools.snapshot import restore_store
        from hoist.tools.stop import Stop

    with Stop() as stop, choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress("restoring", done, total)

        before, record = restore_store(store, name, engine=engine, progress=progress)
    if as_json:
        typer.echo(json.dumps({"name": name, "step": record.step, "step_before": before}))
    else:
        say(f"{store} was at step {before} and is now at step {record.step}, as snapshot {name} kept it")
        asked = record.run.get("options", {}).get("steps", 0)
        more = f" --steps {max(before, record.step + 1)}" if asked and asked <= record.step else ""
        say(f"go on: {command_name()} train --store {shlex.quote(str(store))}{more}")
    return 0
