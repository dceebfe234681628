"""The command line: `hoist train`, `hoist export`, `hoist doctor`. Parses, calls, and turns errors into one line.

Exit codes: 0 done, 1 failed, 2 refused or bad usage, 128 + N stopped by signal N with the store complete.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hoist._version import __version__

app = typer.Typer(
    name="hoist",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train language models bigger than memory from NVMe, exactly.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"hoist {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Set up what all commands share."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


@app.command(
    epilog="Example:  hoist train --model ./my-llama --data corpus.txt --store /nvme/run --host-memory 4GiB --steps 1000"
)
def train(
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face directory, or a preset: tiny, llama2-7b, gpt-65b, ... Default: tiny, as a two-minute job."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Token file (.npy, .bin), text file or folder; repeat for more. Default with tiny: the standard library."),
    ] = None,
    store: Annotated[str | None, typer.Option(help="Directory on the NVMe drive; resumed if it holds a store. [hoist-store]")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Budget for host memory. [4GiB]")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row. [1024]")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows of a micro-batch. [2]")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches of a step. [16]")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the whole run, from its first; 0 only makes the store. [1000]")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. [1e-4]")] = None,
    lr_schedule: Annotated[str | None, typer.Option(help="constant, linear or cosine. [constant]")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear rise of the learning rate. [0]")] = None,
    betas: Annotated[str | None, typer.Option(help="AdamW's decay rates, a comma between them. [0.9,0.95]")] = None,
    eps: Annotated[float | None, typer.Option(help="AdamW's epsilon. [1e-8]")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's decoupled weight decay. [0]")] = None,
    no_decay_norms: Annotated[bool | None, typer.Option("--no-decay-norms", help="No decay for biases and norms.")] = None,
    commit_every: Annotated[int | None, typer.Option(help="Steps between commits. [10]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seeds initial weights, shuffle and dropout. [0]")] = None,
    order: Annotated[str | None, typer.Option(help="Order of the data: sequential or shuffle. [sequential]")] = None,
    plan: Annotated[str | None, typer.Option(help="vertical (layer-major) or horizontal (micro-batch-major). [vertical]")] = None,
    dtype: Annotated[str | None, typer.Option(help="Compute dtype: auto or float32. [auto]")] = None,
    dropout: Annotated[float | None, typer.Option(help="Override every dropout probability of the model.")] = None,
    attention: Annotated[str | None, typer.Option(help="sdpa or eager. [sdpa]")] = None,
    io: Annotated[str | None, typer.Option(help="I/O engine: auto, direct or kvikio. [auto]")] = None,
    max_chunk_elements: Annotated[
        int | None, typer.Option(help="Largest chunk of a new store, in elements, a multiple of 4096. [8388608]")
    ] = None,
    token_bytes: Annotated[int | None, typer.Option(help="Width of the ids in .bin files: 2 or 4. [2]")] = None,
    metrics: Annotated[str | None, typer.Option(help="Append one JSON object a step to this file.")] = None,
    fresh: Annotated[bool | None, typer.Option("--fresh", help="Start over in an existing store.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these options; the command line wins.")] = None,
) -> None:
    """Train a model whose states live on NVMe. Without arguments: a small one, on text that is already here."""
    given = {name: value for name, value in locals().items() if value not in (None, []) and name != "config"}
    _guarded(lambda: _train(given, config))


def _train(given: dict[str, Any], config: Path | None) -> int:
    from hoist.tools.options import TrainOptions
    from hoist.tools.show import Display
    from hoist.tools.train import train as run

    if "betas" in given:
        given["betas"] = _betas(given["betas"])
    if "data" in given:
        given["data"] = tuple(given["data"])
    options = TrainOptions.make(config=config, command_line=given)
    with Display(Console()) as display:
        end = run(options, display)
        display.end(end)
    return 128 + end.signal if end.signal else 0


def _betas(text: str) -> tuple[float, float]:
    from hoist.scheduler.errors import ConfigError

    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--betas: {text!r} is not two numbers with a comma between them, like 0.9,0.95") from error
    return first, second


@app.command(epilog="Example:  hoist export /nvme/run ./my-model --dtype bfloat16")
def export(
    store: Annotated[Path, typer.Argument(help="The store.")],
    directory: Annotated[Path, typer.Argument(help="New directory for the model.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write the committed weights as a Hugging Face directory (safetensors, config, tokenizer)."""
    _guarded(lambda: _export(store, directory, dtype, max_shard_size, as_json))


def _export(store: Path, directory: Path, dtype: str, max_shard_size: str, as_json: bool) -> int:
    from hoist.scheduler.errors import ConfigError
    from hoist.tiers.io.choose import choose_engine
    from hoist.tools.export import DTYPES, export_store
    from hoist.tools.show import Display
    from hoist.tools.sizes import parse_bytes, show_bytes

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    try:
        shard_bytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}") from error
    if shard_bytes < 1:
        raise ConfigError(f"--max-shard-size: {max_shard_size} is too small")
    with choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:
        summary = export_store(
            store,
            directory,
            engine=engine,
            dtype=dtype,
            max_shard_bytes=shard_bytes,
            progress=lambda done, total: display.progress("exporting", done, total),
        )
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "directory": str(summary.directory),
                    "step": summary.step,
                    "tensors": summary.num_tensors,
                    "bytes": summary.num_bytes,
                }
            )
        )
    else:
        typer.echo(
            f"exported step {summary.step}: {summary.num_tensors} tensors, {show_bytes(summary.num_bytes)}, "
            f"to {summary.directory}"
        )
    return 0


@app.command(epilog="Example:  hoist doctor /nvme")
def doctor(
    directory: Annotated[Path, typer.Argument(help="Directory on the drive that a store would be on.")] = Path(),
    io: Annotated[str, typer.Option(help="I/O engine: auto, direct or kvikio.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what this machine offers: I/O engine, measured bandwidth of the drive, memory, limits, GPU."""
    _guarded(lambda: _doctor(directory, io, as_json))


def _doctor(directory: Path, io: str, as_json: bool) -> int:
    from hoist.tiers.io.choose import choose_engine
    from hoist.tools.doctor import diagnose, render

    with choose_engine(io) as engine:
        diagnosis = diagnose(directory, engine)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json(), indent=2))
    else:
        render(diagnosis, Console())
    return 0 if diagnosis.healthy else 1


def _guarded(work: Any) -> None:
    """Run a command; an error that hoist raised on purpose becomes one line on stderr and its exit code."""
    from hoist.optim import HyperparameterError
    from hoist.tiers.errors import HoistError

    try:
        code = work()
    except (HoistError, HyperparameterError) as error:
        print(f"hoist: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    if code:
        raise typer.Exit(code)


def main() -> None:
    """Entry point of the `hoist` command."""
    # No hub is ever asked, and nobody is to wait for one: models and tokenizers are files.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore", FutureWarning)
    app()


if __name__ == "__main__":
    main()
