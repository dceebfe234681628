"""`hoist bench ...`: parses, runs one benchmark of `hoist.tools.bench`, shows it and writes it down.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import json
import shlex
import sys
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
    help="Measure: drives, the optimizer, ZeRO-Infinity. Each benchmark checks that its sides do the same.",
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


@app.command(
    "zero-infinity", epilog="Example:  [bold]hoist bench zero-infinity /mnt/nvme --hidden 1024 --layers 8[/]"
)
def bench_zero_infinity(
    directory: Annotated[
        Path, typer.Argument(help="Directory on the drive.", exists=True, file_okay=False, writable=True)
    ] = Path(),
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
    delay: Annotated[float, typer.Option(help="hoist's share of updates in the next forward.")] = 0.0,
    residency: Annotated[float, typer.Option(help="hoist's largest share of states kept in memory.")] = 1.0,
    knobs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="DeepSpeed's knobs as JSON, or an earlier --output: not swept then."),
    ] = None,
    sweep: Annotated[bool, typer.Option(help="Look for DeepSpeed's fastest knobs first.")] = True,
    environment: Annotated[
        Path | None, typer.Option(metavar="DIR", help="DeepSpeed's, made if missing. Default: below ~/.cache/hoist.")
    ] = None,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """A step of hoist beside one of DeepSpeed's ZeRO-3 with parameters and optimizer on NVMe, on the same work.

    Same weights, tokens, optimizer, type and drive; losses that differ, or a warm page cache, refuse the comparison.
    DeepSpeed gets an environment of its own, which needs libaio-dev and g++.
    """
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.bench import zero_infinity
    from hoist.tools.bench.sides.environment import default_directory
    from hoist.tools.bench.sides.job import Sleep

    asleep = None
    if sleep:
        if layer_elements < zero_infinity.SLEEPING_HIDDEN or layer_elements % zero_infinity.SLEEPING_HIDDEN:
            raise ConfigError(
                f"--layer-elements: {layer_elements} is not a positive multiple of {zero_infinity.SLEEPING_HIDDEN}"
            )
        asleep = Sleep(
            num_layers=layers or 12, layer_elements=layer_elements, forward_seconds=forward_ms / 1e3,
            backward_seconds=backward_ms / 1e3,
        )  # fmt: skip
    request = zero_infinity.Request(
        directory=directory, environment=environment or default_directory(), model=model, hidden=hidden,
        num_layers=layers or 8, sleep=asleep, data=data, seq_len=seq_len, micro_batch_size=micro_batch_size,
        num_micro_batches=micro_batches, num_steps=steps, lr=lr or (1e-2 if sleep else 1e-4), num_rounds=rounds,
        host_memory_bytes=_bytes("--host-memory", host_memory),
        hoist_options={"delay": delay, "residency": residency},
        knobs=None if knobs is None else zero_infinity.read_knobs(knobs), sweeps=sweep and knobs is None,
    )  # fmt: skip
    return _told(
        lambda told, check: zero_infinity.run(request, command=command_line(), told=told, check=check),
        output, as_json,
    )  # fmt: skip


def command_line() -> str:
    """The command that is running, as it can be given again."""
    return shlex.join(["hoist", *sys.argv[1:]])


def _told(
    measure: Callable[[Callable[[str, int, int], None], Callable[[], None]], Outcome],
    output: Path | None,
    as_json: bool,
) -> int:
    """As :func:`_run`, for a measurement that says itself what it is at."""
    from hoist.tools.bench.outcome import show, write
    from hoist.tools.show import Display
    from hoist.tools.stop import Stop

    with Stop() as stop, Display(Console(stderr=as_json)) as display:

        def told(what: str, done: int, total: int) -> None:
            stop.check()
            display.progress(what, done, total, "runs")

        found = measure(told, stop.check)
    if output is not None:
        write(found, output)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        show(found, Console())
    return 0


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
