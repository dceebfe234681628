"""`hoist bench zero-infinity`: what it takes. What it does is `hoist.tools.bench.zero_infinity`'s business."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hoist.tools.commands.bench.measuring import Json, Output, Plot, check_drive, measured, num_bytes

EPILOG = "Example:  [bold]hoist bench zero-infinity /mnt/nvme --hidden 1024 --layers 8[/]"


def bench_zero_infinity(
    directory: Annotated[Path, typer.Argument(help="Directory on the drive.")] = Path(),
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A Hugging Face directory with weights, not a Llama shape.")
    ] = None,
    hidden: Annotated[int, typer.Option(metavar="N", min=64, help="Of the Llama shape; its vocabulary is 8 N.")] = 1024,
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of the shape (8), or those that sleep (12).")
    ] = None,
    sleep: Annotated[bool, typer.Option("--sleep", help="Layers that sleep stand in for an accelerator.")] = False,
    layer_elements: Annotated[int, typer.Option(metavar="N", help="Weights of a layer that sleeps.")] = 2**24,
    forward_ms: Annotated[float, typer.Option(metavar="MS", min=0.0, help="It sleeps so long in the forward.")] = 10.0,
    backward_ms: Annotated[float, typer.Option(metavar="MS", min=0.0, help="And in the backward, besides.")] = 20.0,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ids (.npy). Default: Python's own sources.")
    ] = None,
    seq_len: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of a row.")] = 64,
    micro_batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of a micro-batch.")] = 1,
    micro_batches: Annotated[int, typer.Option(metavar="N", min=1, help="Micro-batches of a step.")] = 4,
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Steps of a run; the first is not counted.")] = 4,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: 1e-4; layers that sleep: 1e-2.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each side, in turn.")] = 3,
    host_memory: Annotated[str, typer.Option(metavar="SIZE", help="hoist's budget.")] = "256MiB",
    delay: Annotated[
        float, typer.Option(metavar="X", min=0.0, max=1.0, help="hoist's share of updates in the next forward.")
    ] = 0.0,
    residency: Annotated[
        float, typer.Option(metavar="X", min=0.0, max=1.0, help="hoist's largest share of states kept in memory.")
    ] = 1.0,
    knobs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="DeepSpeed's knobs as JSON, or an earlier --output: not swept then."),
    ] = None,
    sweep: Annotated[bool, typer.Option(help="Look for DeepSpeed's fastest knobs first.")] = True,
    environment: Annotated[
        Path | None, typer.Option(metavar="DIR", help="DeepSpeed's, made if missing. Default: below ~/.cache/hoist.")
    ] = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """A step of hoist beside one of DeepSpeed's ZeRO-3 with parameters and optimizer on NVMe, on the same work.

    Same weights, tokens, optimizer, type and drive; losses that differ, or a warm page cache, refuse the comparison.
    DeepSpeed gets an environment of its own, which needs libaio-dev and g++.
    """
    from hoist.tools.bench import zero_infinity
    from hoist.tools.bench.sides.environment import default_directory
    from hoist.tools.bench.sides.job import Sleep
    from hoist.tools.bench.sides.work import WorkRequest
    from hoist.tools.invoked import command_line

    check_drive(directory)
    asleep = None
    if sleep:
        asleep = Sleep(
            num_layers=layers or 12, layer_elements=layer_elements, forward_seconds=forward_ms / 1e3,
            backward_seconds=backward_ms / 1e3,
        )  # fmt: skip
    if lr is None:
        lr = 1e-2 if sleep else 1e-4
    request = zero_infinity.Request(
        directory=directory,
        environment=environment or default_directory(),
        work=WorkRequest(
            model=model, hidden=hidden, num_layers=layers or 8, sleep=asleep, data=data, seq_len=seq_len,
            micro_batch_size=micro_batch_size, num_micro_batches=micro_batches, num_steps=steps, lr=lr,
        ),
        num_rounds=rounds,
        host_memory_bytes=num_bytes("--host-memory", host_memory),
        hoist_options={"delay": delay, "residency": residency},
        knobs=None if knobs is None else zero_infinity.read_knobs(knobs),
        sweeps=sweep and knobs is None,
    )  # fmt: skip
    measured(
        lambda telling: zero_infinity.run(
            request, command=command_line(), told=telling.told, check=telling.check
        ),
        unit="runs", output=output, plot=plot, as_json=as_json,
    )  # fmt: skip
    return 0
