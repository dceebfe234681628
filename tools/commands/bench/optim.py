"""`hoist bench optim`: what it takes. What it does is `hoist.tools.bench.optim`'s business."""

from __future__ import annotations

from typing import Annotated

import typer

from hoist.tools.commands.bench.measuring import Json, Output, Plot, Rounds, measured, num_bytes

EPILOG = "Example:  [bold]hoist bench optim --threads 1 --threads 2[/]"


def bench_optim(
    elements: Annotated[
        str, typer.Option(metavar="SIZE", help="Parameters that are updated, as 64MiB = 64 Mi.")
    ] = "16MiB",
    threads: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Threads; repeat. Default: one, and all.")
    ] = None,
    block: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Elements worked on at a time; repeat. Default: 2^16, 18, 20.")
    ] = None,
    rounds: Rounds = 5,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """The CPU AdamW of split weights in parameters and bytes a second, beside plain fused AdamW and a copy."""
    import torch

    from hoist.tools.bench import optim
    from hoist.tools.invoked import command_line

    num_elements = num_bytes("--elements", elements)
    measured(
        lambda telling: optim.run(
            num_elements=num_elements, threads=threads or sorted({1, torch.get_num_threads()}),
            block_elements=block or optim.BLOCK_ELEMENTS, rounds=rounds, command=command_line(),
            progress=telling.progress("updating"),
        ),
        unit="runs", output=output, plot=plot, as_json=as_json,
    )  # fmt: skip
    return 0
