"""`hoist bench step`: what it takes. What it does is `hoist.tools.bench.step`'s business."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoist.tools.commands.bench.measuring import (
    Json,
    Lanes,
    Output,
    Plot,
    Rounds,
    Telling,
    check_drive,
    measured,
    num_bytes,
)

if TYPE_CHECKING:
    from hoist.scheduler.config import Order
    from hoist.tools.bench.outcome import Outcome

EPILOG = "Example:  [bold]hoist bench step --directory . --micro-batches 4 --micro-batches 16[/]"


def bench_step(
    directory: Annotated[
        Path, typer.Option(metavar="DIR", help="On the drive: where stores are made, and removed.")
    ] = Path(),
    model: Annotated[
        str | None, typer.Option(metavar="DIR|PRESET", help="As of hoist train. Default: the Llama shape that follows.")
    ] = None,
    hidden: Annotated[int, typer.Option(metavar="N", min=64, help="Width of the Llama shape.")] = 1024,
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Its layers.")] = 8,
    vocab: Annotated[int, typer.Option(metavar="N", min=2, help="Its vocabulary.")] = 8192,
    plan: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="vertical or horizontal; repeat. Default: both.")
    ] = None,
    micro_batches: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Of a step; repeat. Default: 4 and 16.")
    ] = None,
    seq_len: Annotated[
        list[int] | None, typer.Option(metavar="N", min=2, help="Tokens of a row; repeat. Default: 64.")
    ] = None,
    micro_batch_size: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Rows of a micro-batch; repeat. Default: 1.")
    ] = None,
    delay: Annotated[
        list[float] | None,
        typer.Option(metavar="X", min=0.0, max=1.0, help="Share of updates in the next forward; repeat. Default: 0."),
    ] = None,
    host_memory: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="hoist's budget; repeat. Default: 256MiB.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="What computes, PyTorch too, as of hoist train: auto, cpu, cuda, ...")
    ] = "auto",
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="hoist's budget there, each side's. Default: a part of what is free."),
    ] = None,
    io: Annotated[str, typer.Option(metavar="NAME", help="I/O engine: auto, direct or kvikio.")] = "auto",
    rounds: Rounds = 3,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Counted steps of a side in a round.")] = 2,
    lanes: Lanes = False,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """A step of hoist beside its limits and beside PyTorch in memory, for every combination of the options repeated.

    All sides begin with the same weights and see the same ids; if their losses differ, nothing is reported.
    """
    from hoist.tools.bench import step
    from hoist.tools.bench.shapes import model_config
    from hoist.tools.invoked import command_line
    from hoist.tools.presets import load_model_source

    check_drive(directory)
    cases = step.cases_of(
        plans=[_order(name) for name in plan or ("vertical", "horizontal")],
        num_micro_batches=micro_batches or [4, 16],
        seq_lens=seq_len or [64],
        micro_batch_sizes=micro_batch_size or [1],
        delays=delay or [0.0],
        host_memory_bytes=[num_bytes("--host-memory", text) for text in host_memory or ["256MiB"]],
    )
    source = None if model is None else load_model_source(model)
    config = source.config if source else model_config(hidden=hidden, layers=layers, vocab=vocab)

    told = None if device_memory is None else num_bytes("--device-memory", device_memory)

    def measure(telling: Telling) -> Outcome:
        from hoist.tiers.io.choose import choose_engine
        from hoist.tools import devices

        with devices.opened(device) as computing, choose_engine(io) as engine:
            return step.run(
                directory, config, cases, engine=engine, rounds=rounds, steps=steps, lanes=lanes, device=computing,
                device_memory_bytes=None if told is None else devices.budget_bytes(computing, told),
                weights=source.directory if source and source.checkpoint else None, command=command_line(),
                progress=telling.progress("training"),
            )  # fmt: skip

    measured(measure, unit="steps", output=output, plot=plot, as_json=as_json)
    return 0


def _order(name: str) -> Order:
    from hoist.scheduler.errors import ConfigError

    if name == "vertical":
        return "vertical"
    if name == "horizontal":
        return "horizontal"
    raise ConfigError(f"--plan: {name!r} is not one of vertical, horizontal")
