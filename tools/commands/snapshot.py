"""`hoist snapshot`: parses and calls `hoist.tools.snapshot`, and prints what was done.

Errors become one line in `exits.py`; going back is `commands/restore.py`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hoist.tools.invoked import command_name

EPILOG = (
    "Examples:\n\n[bold]hoist snapshot hoist-store before-the-new-data[/]\n\n"
    "[bold]hoist snapshot hoist-store --list[/]\n\n[bold]hoist snapshot hoist-store before-the-new-data --remove[/]"
)


def snapshot(
    store: Annotated[Path, typer.Argument(help="The store.")],
    name: Annotated[str | None, typer.Argument(help="Of the snapshot: letters, digits and . _ -")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the store's snapshots.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the snapshot NAME.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done, or the list, as JSON.")] = False,
) -> int:
    """Keep the last commit under a name, in STORE/snapshots/NAME, where export and verify read it like a store."""
    return _snapshot(store, name, show, remove, as_json)


def _snapshot(store: Path, name: str | None, show: bool, remove: bool, as_json: bool) -> int:
    from hoist.tools.loudness import say
    from hoist.tools.progress import loading

    with loading():
        from hoist.scheduler.errors import ConfigError
        from hoist.tiers.io.choose import choose_engine
        from hoist.tools.show import Display
        from hoist.tools.snapshot import remove_snapshot, snapshot_store
        from hoist.tools.stop import Stop

    if (name is None) != show or (show and remove):
        raise ConfigError("snapshot: give either the NAME of a snapshot or --list")
    if show or name is None:
        return _list_snapshots(store, as_json)
    with Stop() as stop, choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress("checking the snapshot", done, total)

        if remove:
            remove_snapshot(store, name, engine=engine)
            if as_json:
                typer.echo(json.dumps({"removed": name}))
            else:
                say(f"snapshot {name} is removed")
            return 0
        info = snapshot_store(store, name, engine=engine, progress=progress)
    if as_json:
        typer.echo(json.dumps({"name": info.name, "step": info.step, "directory": str(info.directory)}))
    else:
        say(f"snapshot {info.name} of step {info.step} is in {info.directory}")
        say(f"go back to it: {command_name()} restore {shlex.quote(str(store))} {info.name}")
    return 0


def _list_snapshots(store: Path, as_json: bool) -> int:
    from hoist.tiers import allocation
    from hoist.tiers.allocation import DirectoryState
    from hoist.tiers.errors import StoreRefusedError
    from hoist.tiers.opening import why_no_commit
    from hoist.tiers.snapshots import list_snapshots

    if allocation.directory_state(store) is not DirectoryState.COMMITTED:
        raise StoreRefusedError(why_no_commit(store))
    found, damaged = list_snapshots(store)
    if as_json:
        listed = [
            {"name": info.name, "step": info.step, "automatic": info.automatic, "created": info.created}
            for info in found
        ]
        typer.echo(json.dumps({"snapshots": listed, "damaged": [str(error) for error in damaged]}))
        return 1 if damaged else 0
    for info in found:
        typer.echo(f"{info.name}  step {info.step}  {info.created}{'  automatic' if info.automatic else ''}")
    if damaged:
        raise damaged[0]
    if not found:
        typer.echo("no snapshots")
    return 0
