"""`hoist bench ...`: parses, runs one benchmark of `hoist.tools.bench`, shows it and writes it down.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hoist.tools.loudness import LoudApp

if TYPE_CHECKING:
    from hoist.tools.bench.outcome import Outcome

app = LoudApp(
    name="bench", no_args_is_help=True, rich_markup_mode="rich",
    help="Measure: drives, the optimizer. Each benchmark checks that its sides do the same.",
)  # fmt: skip

Progress = Callable[[int, int], None]
_Json = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
_Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Also write the outcome as JSON to a file.")
]
_Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also draw the outcome, to a file that ends in .svg, .png or .html."),
]


@app.command("io", epilog="Example:  [bold]hoist bench io /mnt/nvme[/]")
def bench_io(
    directory: Annotated[Path, typer.Argument(help="Directory on the drive.")] = Path(),
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of the temporary file.")] = "512MiB",
    block: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Bytes of a request; repeat. Default: 1, 4 and 16 MiB.")
    ] = None,
    depth: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Requests in flight; repeat. Default: 1, 4 and 8.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds; medians are taken.")] = 3,
    output: _Output = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> int:
    """Read and write bandwidth of each I/O engine over block sizes and depths, beside fio where it is installed."""
    from hoist.tools.bench import io

    blocks = [_bytes("--block", text) for text in block or []] or list(io.BLOCK_BYTES)
    return _run(
        "measuring the drive",
        lambda progress: io.run(
            directory, num_bytes=_bytes("--size", size), block_bytes=blocks, depths=depth or io.DEPTHS, rounds=rounds,
            command=f"hoist bench io {shlex.quote(str(directory))} --size {size} --rounds {rounds}", progress=progress,
        ),
        output, as_json, plot,
    )  # fmt: skip


@app.command("optim", epilog="Example:  [bold]hoist bench optim --threads 1 --threads 2[/]")
def bench_optim(
    elements: Annotated[
        str, typer.Option(metavar="SIZE", help="Parameters that are updated, as 64MiB = 64 Mi.")
    ] = "32MiB",
    threads: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Threads; repeat. Default: one, and all.")
    ] = None,
    block: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Elements worked on at a time; repeat. Default: 2^16, 18, 20.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds; medians are taken.")] = 5,
    output: _Output = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> int:
    """The CPU AdamW of split weights in parameters and bytes a second, beside plain fused AdamW and a copy."""
    import torch

    from hoist.tools.bench import optim

    counts = threads or sorted({1, torch.get_num_threads()})
    return _run(
        "updating",
        lambda progress: optim.run(
            num_elements=_bytes("--elements", elements), threads=counts, block_elements=block or optim.BLOCK_ELEMENTS,
            rounds=rounds, command=f"hoist bench optim --elements {elements} --rounds {rounds}", progress=progress,
        ),
        output, as_json, plot,
    )  # fmt: skip


@app.command("show", epilog="Example:  [bold]hoist bench show io.json --plot io.svg[/]")
def bench_show(
    result: Annotated[Path, typer.Argument(metavar="FILE", help="What --output wrote.")],
    plot: _Plot = None,
    as_json: _Json = False,
) -> int:
    """Show an outcome again that a benchmark wrote with --output, or draw it. Measures nothing."""
    from hoist.tools.bench.reading import read

    draw = _drawing(plot)
    found = read(result)
    return _tell(found, draw, as_json)


def _run(
    what: str,
    measure: Callable[[Progress], Outcome],
    output: Path | None,
    as_json: bool,
    plot: Path | None = None,
) -> int:
    from hoist.tools.bench.outcome import write
    from hoist.tools.show import Display
    from hoist.tools.stop import Stop
    from hoist.tools.targets import check_target

    if output is not None:
        check_target(output, None, option="--output")
    draw = _drawing(plot)
    with Stop() as stop, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress(what, done, total)

        found = measure(progress)
    if output is not None:
        write(found, output)
    return _tell(found, draw, as_json)


def _drawing(path: Path | None) -> Callable[[Outcome], None]:
    """What writes the plot, with all looked at that can be wrong, so that nothing is measured for nothing."""
    if path is None:
        return lambda outcome: None
    from hoist.tools.errors import ReportRefusedError
    from hoist.tools.invoked import install_command
    from hoist.tools.targets import check_target, write_file

    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ModuleNotFoundError as error:
        command = install_command("altair vl-convert-python")
        raise ReportRefusedError(f"--plot needs {error.name}, which is not installed: {command}") from error
    from hoist.tools.bench.plot import FORMATS, drawn

    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise ReportRefusedError(f"--plot {path}: a plot is a file that ends in {', '.join(FORMATS)}; name one")
    target = check_target(path, None, option="--plot")
    return lambda outcome: write_file(target, drawn(outcome, kind))


def _tell(found: Outcome, draw: Callable[[Outcome], None], as_json: bool) -> int:
    from hoist.tools.bench.outcome import show

    draw(found)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        show(found, Console())
    return 0


def _bytes(option: str, text: str) -> int:
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.sizes import parse_bytes

    try:
        return parse_bytes(text, minimum=4096)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
