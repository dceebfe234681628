"""What the commands of `hoist bench` share: options, and how one measures, writes, draws and shows an outcome.

What is measured is each command's; how outcomes look is `hoist.tools.bench.outcome`'s and `plot`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from hoist.tools.bench.outcome import Outcome

Json = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Also write the outcome as JSON to a file.")
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also draw the outcome, to a file that ends in .svg, .png or .html."),
]
Rounds = Annotated[int, typer.Option(metavar="N", min=1, help="Rounds; medians are taken.")]
Lanes = Annotated[bool, typer.Option("--lanes", help="Draw what the lanes did during a step.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Telling:
    """How a measurement says how far it is, and hears that it is to stop: both raise StoppedError after Ctrl-C."""

    told: Callable[[str, int, int], None]
    """Takes what is at work, how much of it is done, and of how much: 0 if that is not known."""
    check: Callable[[], None]

    def progress(self, what: str) -> Callable[[int, int], None]:
        """:attr:`told` for what is one piece of work from beginning to end."""
        return partial(self.told, what)


def measured(
    measure: Callable[[Telling], Outcome], *, unit: str, output: Path | None, plot: Path | None, as_json: bool
) -> Outcome:
    """Measure, then write, print and draw. ``unit``: what a measurement counts when it tells how far it is.

    Raises ReportRefusedError before anything is measured, if the outcome cannot go where it is wanted. One that then
    cannot be written is printed nevertheless.
    """
    from hoist.tools.bench.outcome import write
    from hoist.tools.show import Display
    from hoist.tools.stop import Stop
    from hoist.tools.targets import check_target

    if output is not None:
        check_target(output, None, option="--output")
    draw = drawing(plot)
    with Stop() as stop, Display(Console(stderr=as_json)) as display:

        def told(what: str, done: int, total: int) -> None:
            stop.check()
            display.progress(what, done, total, unit)

        found = measure(Telling(told=told, check=stop.check))
    try:
        if output is not None:
            write(found, output)
    finally:
        tell(found, as_json=as_json)
    draw(found)
    return found


def drawing(path: Path | None) -> Callable[[Outcome], None]:
    """What draws an outcome to ``path``, or does nothing for None.

    Raises ReportRefusedError if it cannot, as far as can be seen: so that nothing is measured for nothing.
    """
    if path is None:
        return lambda outcome: None
    from hoist.tools.errors import ReportRefusedError
    from hoist.tools.targets import check_drawing, check_target, write_file

    check_drawing("--plot")
    from hoist.tools.bench.plot import FORMATS, drawn

    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise ReportRefusedError(f"--plot {path}: a plot is a file that ends in {', '.join(FORMATS)}; name one")
    target = check_target(path, None, option="--plot")
    return lambda outcome: write_file(target, drawn(outcome, kind))


def tell(found: Outcome, *, as_json: bool) -> None:
    """Print an outcome for people, or as JSON."""
    from hoist.tools.bench.showing import show_all

    if as_json:
        typer.echo(found.to_text())
    else:
        show_all(found, Console())


def num_bytes(option: str, text: str) -> int:
    """A size that was given. Raises ConfigError, which names the option."""
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.sizes import parse_bytes

    try:
        return parse_bytes(text, minimum=4096)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def check_drive(directory: Path) -> None:
    """Raise ConfigError unless files can be made in a directory."""
    from hoist.tools.bench.places import refuse_place

    refuse_place(directory)
