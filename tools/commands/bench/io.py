"""`hoist bench io`: what it takes. What it does is `hoist.tools.bench.io`'s business."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hoist.tools.commands.bench.measuring import Json, Output, Plot, Rounds, check_drive, measured, num_bytes

EPILOG = "Example:  [bold]hoist bench io /mnt/nvme[/]"


def bench_io(
    directory: Annotated[Path, typer.Argument(help="Directory on the drive.")] = Path(),
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of the temporary file.")] = "512MiB",
    block: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Bytes of a request; repeat. Default: 1, 4 and 16 MiB.")
    ] = None,
    depth: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Requests in flight; repeat. Default: 1 and 8.")
    ] = None,
    rounds: Rounds = 3,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """Read and write bandwidth of each I/O engine over block sizes and depths, beside fio where it is installed."""
    from hoist.tools.bench import io
    from hoist.tools.invoked import command_line

    check_drive(directory)
    file_bytes = num_bytes("--size", size)
    blocks = [num_bytes("--block", text) for text in block or []] or list(io.BLOCK_BYTES)
    measured(
        lambda telling: io.run(
            directory, num_bytes=file_bytes, block_bytes=blocks, depths=depth or io.DEPTHS, rounds=rounds,
            command=command_line(), progress=telling.progress("measuring the drive"),
        ),
        unit="runs", output=output, plot=plot, as_json=as_json,
    )  # fmt: skip
    return 0
