"""`hoist verify`: parses and calls `hoist.tools.verify`, and prints its verdict.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EPILOG = "Example:  [bold]hoist verify hoist-store[/]"


def verify_command(
    store: Annotated[Path, typer.Argument(help="The store, or a snapshot: STORE/snapshots/NAME.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> int:
    """Re-read everything that the last commit names and compare it with its checksums; also while a run goes on."""
    return _verify(store, as_json)


def _verify(store: Path, as_json: bool) -> int:
    from hoist.tools.loudness import say
    from hoist.tools.progress import loading

    with loading():
        from hoist.tiers.errors import StoreFormatError
        from hoist.tiers.io.choose import choose_engine
        from hoist.tools.show import Display
        from hoist.tools.sizes import show_bytes
        from hoist.tools.stop import Stop
        from hoist.tools.verify import raise_if_bad, verify_store

    with Stop() as stop, choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress("verifying", done, total)

        try:
            verdict = verify_store(store, engine=engine, progress=progress)
        except StoreFormatError as error:
            if as_json:
                typer.echo(json.dumps({"ok": False, "store": str(store), "error": str(error)}))
            raise
    if as_json:
        typer.echo(json.dumps(verdict.to_json()))
    else:
        for bad in verdict.bad:
            typer.echo(f"bad: {bad}")
    raise_if_bad(verdict)
    if not as_json:
        say(
            f"step {verdict.step}: all {verdict.num_files} chunk files are as they were committed "
            f"({show_bytes(verdict.num_bytes)} in {verdict.seconds:.1f} s, "
            f"{show_bytes(int(verdict.num_bytes / max(verdict.seconds, 1e-9)))}/s)"
        )
    return 0
