"""`hoist bench ...`: parses, runs one benchmark of `hoist.tools.bench`, shows it and writes it down.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hoist.tools.loudness import LoudApp

if TYPE_CHECKING:
    from hoist.scheduler.config import Order
    from hoist.tools.bench.outcome import Outcome
    from hoist.tools.bench.sleep_presets import Preset

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
        list[int] | None, typer.Option(metavar="N", help="Requests in flight; repeat. Default: 1 and 8.")
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
            command=_command("io", directory, size=size, block=block, depth=depth, rounds=rounds), progress=progress,
        ),
        output, as_json,
    )  # fmt: skip


@app.command("step", epilog="Example:  [bold]hoist bench step --directory . --micro-batches 4 --micro-batches 16[/]")
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
    io: Annotated[str, typer.Option(metavar="NAME", help="I/O engine: auto, direct or kvikio.")] = "auto",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds; medians are taken.")] = 3,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Counted steps of a side in a round.")] = 2,
    lanes: Annotated[bool, typer.Option("--lanes", help="Draw what the lanes did during a step.")] = False,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """A step of hoist beside its limits and beside PyTorch in memory, for every combination of the options repeated.

    All sides begin with the same weights and see the same ids; if their losses differ, nothing is reported.
    """
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.bench import step
    from hoist.tools.bench.lanes import show_lanes
    from hoist.tools.bench.shapes import model_config
    from hoist.tools.presets import load_model_source

    plan, micro_batches, seq_len = plan or ["vertical", "horizontal"], micro_batches or [4, 16], seq_len or [64]
    micro_batch_size, delay, host_memory = micro_batch_size or [1], delay or [0.0], host_memory or ["256MiB"]
    repeated: dict[str, list[Any]] = {
        "--directory": [directory],
        **({"--model": [model]} if model else {"--hidden": [hidden], "--layers": [layers], "--vocab": [vocab]}),
        "--plan": plan, "--micro-batches": micro_batches, "--seq-len": seq_len, "--micro-batch-size": micro_batch_size,
        "--delay": delay, "--host-memory": host_memory, "--io": [io], "--rounds": [rounds], "--steps": [steps],
    }  # fmt: skip
    words = [str(word) for option, values in repeated.items() for value in values for word in (option, value)]
    if hidden % 64:
        raise ConfigError(f"--hidden: {hidden} is not a multiple of 64, the width of a head")
    source = None if model is None else load_model_source(model)
    config = source.config if source else model_config(hidden=hidden, layers=layers, vocab=vocab)
    cases = step.cases_of(
        plans=[_order(name) for name in plan],
        num_micro_batches=micro_batches,
        seq_lens=seq_len,
        micro_batch_sizes=micro_batch_size,
        delays=delay,
        host_memory_bytes=[_bytes("--host-memory", text) for text in host_memory],
    )

    rows: list[Any] = []

    def measure(progress: Progress) -> Outcome:
        from hoist.tiers.io.choose import choose_engine

        with choose_engine(io) as engine:
            found = step.run(
                directory, config, cases, engine=engine, rounds=rounds, steps=steps, lanes=lanes, progress=progress,
                weights=source.directory if source and source.checkpoint else None,
                command=shlex.join(["hoist", "bench", "step", *words]),
            )  # fmt: skip
        rows.extend(found.rows)
        return found

    code = _run("training", measure, output, as_json)
    if not as_json:
        show_lanes(rows, Console())
    return code


@app.command("sleep", epilog="Example:  [bold]hoist bench sleep --micro-batches 8 --preset a100-2drives[/]")
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
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds; medians are taken.")] = 3,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Counted steps of a row in a round.")] = 3,
    lanes: Annotated[bool, typer.Option("--lanes", help="Draw what the lanes did during a step.")] = False,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """A step whose layers sleep, as an accelerator would compute, beside the larger of its sleep and its I/O alone.

    I/O, updates and scheduling are real. If a loss is not that of plain PyTorch in memory, nothing is reported.
    """
    from hoist.tools.bench import sleep
    from hoist.tools.bench.sides.job import Sleep
    from hoist.tools.bench.sleep_presets import PRESETS

    if list_presets:
        for name, one in PRESETS.items():
            typer.echo(f"{name}: {one.in_words}")
        return 0
    machine = None if preset is None else (preset, _preset(preset, forward_ms, backward_ms))
    forward_ms, backward_ms = 10.0 if forward_ms is None else forward_ms, 20.0 if backward_ms is None else backward_ms
    micro_batches, delay = micro_batches or [8], delay or ([0.25] if clipping else [0.0, 0.25, 0.5, 1.0])
    times = {"--preset": [preset]} if preset else {"--forward-ms": [forward_ms], "--backward-ms": [backward_ms]}
    words = _words(
        "sleep",
        {
            "--directory": [directory], "--layers": [layers], "--layer-elements": [layer_elements], **times,
            "--micro-batches": micro_batches, "--delay": delay, "--host-memory": host_memory or [],
            "--rounds": [rounds], "--steps": [steps],
        },
        *(["--clipping"] if clipping else []),
    )  # fmt: skip
    asleep = Sleep(
        num_layers=layers, layer_elements=layer_elements, forward_seconds=forward_ms / 1e3,
        backward_seconds=backward_ms / 1e3,
    )  # fmt: skip
    rows: list[Mapping[str, Any]] = []

    def measure(progress: Progress) -> Outcome:
        found = sleep.run(
            directory, asleep, micro_batches=micro_batches,
            runs=sleep.clipping_runs(delay) if clipping else [sleep.Run(delay=one) for one in delay],
            host_memory_bytes=[_bytes("--host-memory", text) for text in host_memory or []],
            rounds=rounds, num_steps=steps, preset=machine, command=words, progress=progress,
        )  # fmt: skip
        rows.extend(found.rows)
        return found

    code = _run("training", measure, output, as_json)
    if not as_json:
        sleep.show_more(rows, Console(), lanes=lanes)
    return code


def _preset(name: str, *times: float | None) -> Preset:
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.bench.sleep_presets import PRESETS

    if any(time is not None for time in times):
        raise ConfigError("--preset: gives layers their times; leave --forward-ms and --backward-ms out")
    if name not in PRESETS:
        raise ConfigError(f"--preset: {name!r} is not one of {', '.join(PRESETS)}; --list-presets describes them")
    return PRESETS[name]


def _words(name: str, options: Mapping[str, Sequence[object]], *flags: str) -> str:
    """A command line that makes an outcome again; an option is repeated for each of its values."""
    given = [str(word) for option, values in options.items() for value in values for word in (option, value)]
    return shlex.join(["hoist", "bench", name, *given, *flags])


def _order(name: str) -> Order:
    from hoist.scheduler.errors import ConfigError

    if name == "vertical":
        return "vertical"
    if name == "horizontal":
        return "horizontal"
    raise ConfigError(f"--plan: {name!r} is not one of vertical, horizontal")


@app.command("optim", epilog="Example:  [bold]hoist bench optim --threads 1 --threads 2[/]")
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
            rounds=rounds, progress=progress,
            command=_command("optim", elements=elements, threads=counts, block=block, rounds=rounds),
        ),
        output, as_json,
    )  # fmt: skip


def _run(what: str, measure: Callable[[Progress], Outcome], output: Path | None, as_json: bool) -> int:
    from hoist.tools.bench.outcome import show, write
    from hoist.tools.show import Display
    from hoist.tools.stop import Stop

    _check_output(output)
    with Stop() as stop, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress(what, done, total)

        found = measure(progress)
    if output is not None:
        write(found, output)
    if as_json:
        typer.echo(found.to_text())
    else:
        show(found, Console())
    return 0


def _check_output(output: Path | None) -> None:
    """Raise ConfigError for a file that could not be written after minutes of measuring."""
    from hoist.scheduler.errors import ConfigError

    if output is not None and (output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK)):
        raise ConfigError(f"--output: got {output}, which cannot be written; name a file in a directory that can")


def _command(name: str, *arguments: object, **options: object) -> str:
    """The command line that measures the same again; options that were not given are left out."""
    words = ["hoist", "bench", name, *(str(argument) for argument in arguments)]
    for option, value in options.items():
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            words += [f"--{option}", str(each)]
    return shlex.join(words)


def _bytes(option: str, text: str) -> int:
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.sizes import parse_bytes

    try:
        return parse_bytes(text, minimum=4096)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
