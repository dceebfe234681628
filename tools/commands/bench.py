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
        output, as_json,
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
        output, as_json,
    )  # fmt: skip


def _run(what: str, measure: Callable[[Progress], Outcome], output: Path | None, as_json: bool) -> int:
    from hoist.tools.bench.outcome import show, write
    from hoist.tools.show import Display
    from hoist.tools.stop import Stop

    with Stop() as stop, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress(what, done, total)

        found = measure(progress)
    if output is not None:
        write(found, output)
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
