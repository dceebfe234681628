"""`hoist bench sleep`: what it takes. What it does is `hoist.tools.bench.sleep`'s business."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoist.tools.commands.bench.measuring import Json, Lanes, Output, Plot, Rounds, check_drive, measured, num_bytes

if TYPE_CHECKING:
    from hoist.tools.bench.sleep_presets import Preset

EPILOG = "Example:  [bold]hoist bench sleep --micro-batches 8 --preset a100-2drives[/]"


def bench_sleep(
    directory: Annotated[
        Path, typer.Option(metavar="DIR", help="On the drive: where a store is made, and removed.")
    ] = Path(),
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Layers.")] = 12,
    layer_elements: Annotated[
        int, typer.Option(metavar="N", help="Weights of a layer, a multiple of 64. Default: 2^24.", show_default=False)
    ] = 2**24,
    forward_ms: Annotated[
        float | None, typer.Option(metavar="X", min=0.0, help="Of a layer and a micro-batch. Default: 10.")
    ] = None,
    backward_ms: Annotated[
        float | None, typer.Option(metavar="X", min=0.0, help="Beside the forward that it repeats. Default: 20.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Times of a named machine, scaled to this drive, instead.")
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list-presets", help="Print the presets and end.")] = False,
    micro_batches: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Of a step; repeat. Default: 8.")
    ] = None,
    delay: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X", min=0.0, max=1.0,
            help="Share of updates in the next forward; repeat. Default: 0, 0.25, 0.5 and 1; with --clipping 0.25.",
        ),
    ] = None,
    clipping: Annotated[
        bool, typer.Option("--clipping", help="Compare exact clipping and speculative, with guesses right or wrong.")
    ] = False,
    host_memory: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Budget; repeat. Default: twice the smallest that works.")
    ] = None,
    rounds: Rounds = 3,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Counted steps of a row in a round.")] = 3,
    lanes: Lanes = False,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """A step whose layers sleep, as an accelerator would compute, beside the larger of its sleep and its I/O alone.

    I/O, updates and scheduling are real. If a loss is not that of plain PyTorch in memory, nothing is reported.
    """
    from hoist.tools.bench import sleep
    from hoist.tools.bench.sides.job import Sleep
    from hoist.tools.bench.sleep_presets import PRESETS
    from hoist.tools.invoked import command_line

    if list_presets:
        for name, one in PRESETS.items():
            typer.echo(f"{name}: {one.in_words}")
        return 0
    machine = None if preset is None else (preset, _preset(preset, forward_ms, backward_ms))
    check_drive(directory)
    asleep = Sleep(
        num_layers=layers,
        layer_elements=layer_elements,
        forward_seconds=(10.0 if forward_ms is None else forward_ms) / 1e3,
        backward_seconds=(20.0 if backward_ms is None else backward_ms) / 1e3,
    )
    delays = delay or ([0.25] if clipping else [0.0, 0.25, 0.5, 1.0])
    budgets = [num_bytes("--host-memory", text) for text in host_memory or []]
    measured(
        lambda telling: sleep.run(
            directory, asleep, micro_batches=micro_batches or [8],
            runs=sleep.clipping_runs(delays) if clipping else [sleep.Run(delay=one) for one in delays],
            host_memory_bytes=budgets, rounds=rounds, num_steps=steps, lanes=lanes, preset=machine,
            command=command_line(), progress=telling.progress("training"),
        ),
        unit="steps", output=output, plot=plot, as_json=as_json,
    )  # fmt: skip
    return 0


def _preset(name: str, *times: float | None) -> Preset:
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.bench.sleep_presets import PRESETS

    if any(time is not None for time in times):
        raise ConfigError("--preset: gives layers their times; leave --forward-ms and --backward-ms out")
    if name not in PRESETS:
        raise ConfigError(f"--preset: {name!r} is not one of {', '.join(PRESETS)}; --list-presets describes them")
    return PRESETS[name]
