"""`hoist bench peers`: what it takes. What it does is `hoist.tools.bench.peers`'s business."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hoist.tools.commands.bench.measuring import Json, Output, Plot, check_drive, measured, num_bytes

EPILOG = "Example:  [bold]hoist bench peers /mnt/nvme --hidden 512 --layers 4 --rounds 1[/]"


def bench_peers(
    directory: Annotated[Path, typer.Argument(help="Directory on the drive.")] = Path(),
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A Hugging Face directory with weights, not a Llama shape.")
    ] = None,
    hidden: Annotated[int, typer.Option(metavar="N", min=64, help="Of the Llama shape; its vocabulary is 8 N.")] = 1024,
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Of the Llama shape.")] = 8,
    seq_len: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of a row.")] = 64,
    micro_batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of a micro-batch.")] = 1,
    micro_batches: Annotated[int, typer.Option(metavar="N", min=1, help="Micro-batches of a step.")] = 4,
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Steps of a run; the first is not counted.")] = 4,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each side, in turn.")] = 3,
    host_memory: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="hoist's budget; repeat. Default: 256MiB.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="torch (always there), torch-keep, fsdp2 or torchao; repeat. Default: all."),
    ] = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """A step of hoist beside PyTorch with all states in RAM, FSDP2 with CPU offload and torchao's, on the same work.

    What does not run on this machine has a row that says why. Losses that differ refuse the comparison.
    """
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.bench import peers
    from hoist.tools.bench.sides.work import WorkRequest
    from hoist.tools.invoked import command_line

    check_drive(directory)
    unknown = [name for name in peer or [] if name not in peers.PEERS]
    if unknown:
        raise ConfigError(f"--peer: {unknown[0]!r} is not one of {', '.join(peers.PEERS)}")
    request = peers.Request(
        directory=directory,
        work=WorkRequest(
            model=model, hidden=hidden, num_layers=layers, seq_len=seq_len, micro_batch_size=micro_batch_size,
            num_micro_batches=micro_batches, num_steps=steps, lr=1e-4,
        ),
        num_rounds=rounds,
        host_memory_bytes=[num_bytes("--host-memory", text) for text in host_memory or ["256MiB"]],
        peers=peer or list(peers.PEERS),
    )  # fmt: skip
    measured(
        lambda telling: peers.run(request, command=command_line(), told=telling.told, check=telling.check),
        unit="runs", output=output, plot=plot, as_json=as_json,
    )  # fmt: skip
    return 0
