"""`hoist report`: parses and calls `hoist.tools.run_report`, and says what was written.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = "Example:  [bold]hoist report hoist-store --html report.html --png report.png[/]"


def report(
    store: Annotated[Path, typer.Argument(help="The store; a run may go on in it.")],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", show_default=False,
            help="One page with every chart and its numbers. It needs no network and no server; just open it.",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", show_default=False, help="The main charts in one picture."),
    ] = None,
) -> int:
    """Make a report of a run: curves, where states are, what each lane does, what bounds a step, memory, wear."""
    return _report(store, html, png)


def _report(store: Path, html: Path | None, png: Path | None) -> int:
    from hoist.tools.errors import ReportRefusedError
    from hoist.tools.loudness import say
    from hoist.tools.run_report.facts import gather
    from hoist.tools.targets import check_drawing, check_target, write_file

    if html is None and png is None:
        raise ReportRefusedError("nothing to write: give --html FILE, --png FILE or both")
    check_drawing("a report")
    from hoist.tools.run_report.making import report_of

    targets = [
        (option, check_target(path, store, option=option), path)
        for option, path in (("--html", html), ("--png", png))
        if path is not None
    ]
    if len({target for _, target, _ in targets}) < len(targets):
        raise ReportRefusedError(f"--html and --png both name {targets[0][2]}; give each a file of its own")
    made = report_of(gather(store))
    for option, target, path in targets:
        if option == "--html":
            from hoist.tools.run_report.page import page

            data = page(made).encode("utf-8", "backslashreplace")  # names of files can be any bytes
        else:
            from hoist.tools.run_report.picture import picture

            data = picture(made)
        write_file(target, data)
        from hoist.tools.sizes import show_bytes

        say(f"wrote {path} ({show_bytes(len(data))})")
    return 0
