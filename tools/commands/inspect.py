"""`hoist inspect`: parses and calls `hoist.tools.inspection`, and prints what was found.

Errors become one line in `exits.py`. Torch is imported only for `--tensor` and `--diff`: the rest is to be quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from hoist.tools.inspection.looking import Inspection

EPILOG = (
    "Examples:\n\n[bold]hoist inspect hoist-store[/]\n\n[bold]hoist inspect hoist-store --watch[/]\n\n"
    "[bold]hoist inspect hoist-store --tensor 'model.layers.3.*'[/]\n\n"
    "[bold]hoist inspect hoist-store --diff before-the-new-data[/]"
)


def inspect_command(
    store: Annotated[Path, typer.Argument(help="The store, or a snapshot: STORE/snapshots/NAME.")],
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again; q ends it.")] = False,
    every: Annotated[
        float,
        typer.Option("--every", min=0.1, max=86_400, help="Seconds between two looks of --watch.", metavar="SECONDS"),
    ] = 1.0,
    show_all: Annotated[bool, typer.Option("--all", help="A row for every stage, however many are alike.")] = False,
    tensor: Annotated[
        list[str] | None,
        typer.Option("--tensor", metavar="NAME", help="Show this tensor, or those that a pattern with * means."),
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option("--diff", metavar="OTHER", help="Compare with a snapshot's name, or another store's directory."),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Save the view as a picture.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as JSON; with --watch one object a line.")
    ] = False,
) -> int:
    """See where every piece of the model is and what the run does, from another process; the run is not disturbed."""
    if bool(tensor) + (diff is not None) + watch + (svg is not None) > 1:
        from hoist.scheduler.errors import ConfigError

        raise ConfigError("inspect: give one of --tensor, --diff, --watch and --svg")
    if svg is not None and svg.resolve().is_relative_to(store.resolve()):
        from hoist.scheduler.errors import ConfigError

        raise ConfigError(f"--svg {svg}: lies in the store; name a file outside of it")
    if tensor or diff is not None:
        return _look_inside(store, tensor or [], diff, show_all, as_json)
    return _inspect(store, watch, every, show_all, as_json, svg)


def _look_inside(store: Path, tensors: Sequence[str], diff: str | None, show_all: bool, as_json: bool) -> int:
    """``--tensor`` and ``--diff``, which read values."""
    from hoist.tiers.errors import CorruptChunkError
    from hoist.tiers.io.choose import choose_engine
    from hoist.tools.inspection import diff as differences
    from hoist.tools.inspection import tensors as reading
    from hoist.tools.show import Display
    from hoist.tools.stop import Stop

    console = Console()
    with Stop() as stop, choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress("reading tensors", done, total)

        if diff is not None:
            other = differences.other_side(store, diff)
            found = differences.compare(store, other, engine=engine, progress=progress)
        else:
            reports = reading.inspect_tensors(store, tensors, engine=engine, progress=progress)
    if diff is not None:
        if as_json:
            typer.echo(json.dumps(found.to_json()))
        else:
            differences.print_difference(found, console, every=show_all)
        return 0
    if as_json:
        typer.echo(reading.print_json(store, reports))
    else:
        reading.print_reports(reports, console)
    damaged = next((report for report in reports if report.damage is not None), None)
    if damaged is not None:
        raise CorruptChunkError(f"{damaged.name}: {damaged.damage}")
    return 0


def _inspect(store: Path, watch: bool, every: float, show_all: bool, as_json: bool, svg: Path | None) -> int:
    from hoist.tools.inspection.looking import inspect_store
    from hoist.tools.inspection.watch import Watch

    console = Console()
    in_place = console.is_terminal and not console.is_dumb_terminal and not as_json

    def show(found: Inspection, trouble: str | None = None) -> None:
        if as_json:
            told = found.to_json() if trouble is None else {"store": str(store), "error": trouble}
            typer.echo(json.dumps(told))
            sys.stdout.flush()
            return
        if trouble is not None:
            console.print(trouble, markup=False, highlight=False, soft_wrap=True)
            return
        _print(found, console, show_all)

    if watch:
        watching = Watch(store, every)
        if in_place:
            return watching.in_place(console, sys.stdin, every=show_all)
        return watching.in_turn(show)
    found = inspect_store(store)
    show(found)
    if svg is not None:
        from hoist.tools.inspection.picture import write_picture

        write_picture(found, svg, every=show_all)
    _raise_if_damaged(found)
    return 0


def _print(found: Inspection, console: Console, show_all: bool) -> None:
    from hoist.tools.inspection.view import next_step, render
    from hoist.tools.invoked import command_name

    width = console.width if console.is_terminal else None
    for line in render(found, width=width, ascii_only=console.options.ascii_only, every=show_all):
        console.print(line, soft_wrap=True)
    command = next_step(found, command_name())
    if command is not None:
        console.print(f"\nnext     {command}", markup=False, highlight=False, soft_wrap=True)


def _raise_if_damaged(found: Inspection) -> None:
    """Raise StoreFormatError, in one line, if something of the store is not as it should be."""
    from hoist.tiers.errors import StoreFormatError
    from hoist.tools.inspection.looking import Condition

    if found.damage:
        first, *rest = found.damage
        more = f", and {len(rest)} more" if rest else ""
        raise StoreFormatError(f"{found.view.directory}: is damaged: {first}{more}")
    if found.condition is Condition.UNFINISHED:
        raise StoreFormatError(f"{found.view.directory}: {found.message}")
