"""`hoist bench ...`: parses, runs one benchmark of `hoist.tools.bench`, shows it and writes it down.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import shlex
import sys
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
    help="Measure: drives, the optimizer, steps of others. Each benchmark checks that its sides do the same.",
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
        list[int] | None, typer.Option(metavar="N", help="Requests in flight; repeat. Default: 1 and 8.")
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
            command=_command("io", directory, size=size, block=block, depth=depth, rounds=rounds), progress=progress,
        ),
        output, as_json, plot,
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
    plot: _Plot = None,
    as_json: _Json = False,
) -> int:
    """A step of hoist beside its limits and beside PyTorch in memory, for every combination of the options repeated.

    All sides begin with the same weights and see the same ids; if their losses differ, nothing is reported.
    """
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.bench import step
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

    def measure(progress: Progress) -> Outcome:
        from hoist.tiers.io.choose import choose_engine

        with choose_engine(io) as engine:
            return step.run(
                directory, config, cases, engine=engine, rounds=rounds, steps=steps, lanes=lanes, progress=progress,
                weights=source.directory if source and source.checkpoint else None,
                command=shlex.join(["hoist", "bench", "step", *words, *(["--lanes"] if lanes else [])]),
            )  # fmt: skip

    return _run("training", measure, output, as_json, plot)


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
    plot: _Plot = None,
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
        *(["--clipping"] if clipping else []), *(["--lanes"] if lanes else []),
    )  # fmt: skip
    asleep = Sleep(
        num_layers=layers, layer_elements=layer_elements, forward_seconds=forward_ms / 1e3,
        backward_seconds=backward_ms / 1e3,
    )  # fmt: skip

    def measure(progress: Progress) -> Outcome:
        return sleep.run(
            directory, asleep, micro_batches=micro_batches,
            runs=sleep.clipping_runs(delay) if clipping else [sleep.Run(delay=one) for one in delay],
            host_memory_bytes=[_bytes("--host-memory", text) for text in host_memory or []],
            rounds=rounds, num_steps=steps, lanes=lanes, preset=machine, command=words, progress=progress,
        )  # fmt: skip

    return _run("training", measure, output, as_json, plot)


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
            rounds=rounds, progress=progress,
            command=_command("optim", elements=elements, threads=counts, block=block, rounds=rounds),
        ),
        output, as_json, plot,
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
    plot: _Plot = None,
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
    from hoist.tools.bench.sides.sleeping import HIDDEN

    asleep = None
    if sleep:
        if layer_elements < HIDDEN or layer_elements % HIDDEN:
            raise ConfigError(f"--layer-elements: {layer_elements} is not a positive multiple of {HIDDEN}")
        asleep = Sleep(
            num_layers=layers or 12, layer_elements=layer_elements, forward_seconds=forward_ms / 1e3,
            backward_seconds=backward_ms / 1e3,
        )  # fmt: skip
    request = zero_infinity.Request(
        directory=directory, environment=environment or default_directory(), model=model, hidden=hidden,
        num_layers=layers or 8, sleep=asleep, data=data, seq_len=seq_len, micro_batch_size=micro_batch_size,
        num_micro_batches=micro_batches, num_steps=steps,
        lr=lr if lr is not None else 1e-2 if sleep else 1e-4, num_rounds=rounds,
        host_memory_bytes=_bytes("--host-memory", host_memory),
        hoist_options={"delay": delay, "residency": residency},
        knobs=None if knobs is None else zero_infinity.read_knobs(knobs), sweeps=sweep and knobs is None,
    )  # fmt: skip
    return _told(
        lambda told, check: zero_infinity.run(request, command=command_line(), told=told, check=check),
        output, as_json, plot,
    )  # fmt: skip


@app.command("peers", epilog="Example:  [bold]hoist bench peers /mnt/nvme --hidden 512 --layers 4 --rounds 1[/]")
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
    output: _Output = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> int:
    """A step of hoist beside PyTorch with all states in RAM, FSDP2 with CPU offload and torchao's, on the same work.

    What does not run on this machine has a row that says why. Losses that differ refuse the comparison.
    """
    from hoist.scheduler.errors import ConfigError
    from hoist.tools.bench import peers

    unknown = [name for name in peer or [] if name not in peers.PEERS]
    if unknown:
        raise ConfigError(f"--peer {unknown[0]}: is none; give {', '.join(peers.PEERS)}")
    request = peers.Request(
        directory=directory, model=model, hidden=hidden, num_layers=layers, seq_len=seq_len,
        micro_batch_size=micro_batch_size, num_micro_batches=micro_batches, num_steps=steps, num_rounds=rounds,
        host_memory_bytes=[_bytes("--host-memory", text) for text in host_memory or ["256MiB"]],
        peers=peer or list(peers.PEERS),
    )  # fmt: skip
    return _told(
        lambda told, check: peers.run(request, command=command_line(), told=told, check=check), output, as_json, plot
    )


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


def command_line() -> str:
    """The command that is running, as it can be given again."""
    return shlex.join(["hoist", *sys.argv[1:]])


def _told(
    measure: Callable[[Callable[[str, int, int], None], Callable[[], None]], Outcome],
    output: Path | None,
    as_json: bool,
    plot: Path | None = None,
) -> int:
    """As :func:`_run`, for a measurement that says itself what it is at."""
    from hoist.tools.show import Display
    from hoist.tools.stop import Stop
    from hoist.tools.targets import check_target

    if output is not None:
        check_target(output, None, option="--output")
    draw = _drawing(plot)
    with Stop() as stop, Display(Console(stderr=as_json)) as display:

        def told(what: str, done: int, total: int) -> None:
            stop.check()
            display.progress(what, done, total, "runs")

        found = measure(told, stop.check)
    return _tell(found, draw, as_json, output)


def _run(
    what: str,
    measure: Callable[[Progress], Outcome],
    output: Path | None,
    as_json: bool,
    plot: Path | None = None,
) -> int:
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
    return _tell(found, draw, as_json, output)


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


def _tell(found: Outcome, draw: Callable[[Outcome], None], as_json: bool, output: Path | None = None) -> int:
    """Write, show and draw, in this order; what fails takes nothing from what is shown."""
    from hoist.tools.bench.outcome import write
    from hoist.tools.bench.showing import show_all

    try:
        if output is not None:
            write(found, output)
    finally:
        if as_json:
            typer.echo(found.to_text())
        else:
            show_all(found, Console())
    draw(found)
    return 0


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
