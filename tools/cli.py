"""The command line: `hoist train`, `export`, `verify`, `snapshot`, `restore`, `drives`, `doctor`. Parses and calls, no
more: what a run shows is `show.py`'s.

Errors and exit codes are in `exits.py`. Heavy imports wait until a command runs, so that `--help` is quick.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hoist._version import __version__
from hoist.tools.invoked import command_name

app = typer.Typer(
    name="hoist",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train language models bigger than memory from NVMe, exactly.",
)

# Panels of `hoist train --help`.
_WHAT, _DATA, _RUN, _OPTIMIZER, _MACHINE = "What to train", "Data", "The run", "Optimizer", "Machine"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"hoist {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train language models bigger than memory from NVMe, exactly."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    epilog="Examples. About two minutes, no files needed:\n\n[bold]hoist train[/]\n\n"
    "A Hugging Face directory, trained on conversations and evaluated:\n\n"
    "[bold]hoist train --model my-model --data chats.jsonl --validation-split 0.05 --order shuffle --store my-store "
    "--host-memory 8GiB --lr 1e-5 --steps 500[/]\n\n"
    "The same with adapters, and going on in a store:\n\n"
    "[bold]hoist train --model my-model --lora r=16,alpha=32 --data chats.jsonl --store my-lora --host-memory 8GiB[/]"
    "\n\n[bold]hoist train --store my-store --steps 1000[/]"
)
def train(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|PRESET", rich_help_panel=_WHAT,
            help="Hugging Face directory, or a preset: gpt2, llama2-7b, gpt-65b, ... "
            "Left out: tiny, with settings for a job of about two minutes instead of the defaults below.",
        ),
    ] = None,
    dropout: Annotated[
        str | None,
        typer.Option(metavar="P", rich_help_panel=_WHAT, help="Instead of every dropout probability of the model."),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=_WHAT, help="sdpa (default) or eager.")
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", rich_help_panel=_WHAT,
            help="Train only the parameters whose names match, like 'lm_head.*' or '*.layers.1[0-9].*'; repeat for "
            "more. The others are frozen: no moments, no gradients, never written.",
        ),
    ] = None,
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", rich_help_panel=_WHAT,
            help="Freeze the parameters whose names match; repeat for more. Wins over --train.",
        ),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", rich_help_panel=_WHAT,
            help="Train LoRA adapters around the frozen model, like r=8,targets=q_proj+v_proj (defaults: "
            "r=16, alpha=32, dropout=0, targets=all-linear). They and their moments stay in memory. Needs peft.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH", rich_help_panel=_DATA,
            help="Text, records (.jsonl, .json, .parquet, .arrow), token ids (.npy, .bin) or a folder of them; repeat "
            "for more. "
            "Left out, with tiny: Python's standard library.",
        ),
    ] = None,
    token_bytes: Annotated[
        str | None, typer.Option(metavar="2|4", rich_help_panel=_DATA, help="Bytes of an id in .bin files. Default 2.")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_DATA, help="Order of the rows: sequential (default) or shuffle."),
    ] = None,
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack/--no-pack", rich_help_panel=_DATA, show_default=False,
            help="Make rows as full as can be (default), or give each document a row of its own and pad it.",
        ),
    ] = None,
    isolate_documents: Annotated[
        bool | None,
        typer.Option(
            "--isolate-documents", rich_help_panel=_DATA,
            help="Have no token of a packed row attend to another document, where the model can; default: it may.",
        ),
    ] = None,
    truncate: Annotated[
        bool | None,
        typer.Option(
            "--truncate", rich_help_panel=_DATA,
            help="Cut examples that are longer than --seq-len; default: they are refused, with file and line.",
        ),
    ] = None,
    validation_data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH", rich_help_panel=_DATA,
            help="Like --data, to evaluate with and not to train on; repeat for more.",
        ),
    ] = None,
    validation_split: Annotated[
        str | None,
        typer.Option(
            metavar="X", rich_help_panel=_DATA,
            help="Hold this share (0 to 0.5) of the rows out of training and evaluate with them. Default 0.",
        ),
    ] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR", rich_help_panel=_RUN,
            help="Directory on the NVMe drive, made if it is not there, resumed if it holds a store: what is not given "
            "is then as it was. Repeat it with a directory on each further drive to spread a new store over them, as "
            "their measured speed allows. Default hoist-store.",
        ),
    ] = None,
    fresh: Annotated[
        bool | None, typer.Option("--fresh", rich_help_panel=_RUN, help="Start over in an existing store.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_RUN,
            help="Steps of the whole run, counted from its first; 0 only makes the store. Default 1000.",
        ),
    ] = None,
    seq_len: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_RUN, help="Tokens of a row. Default 1024.")
    ] = None,
    micro_batch_size: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_RUN, help="Rows of a micro-batch. Default 2.")
    ] = None,
    micro_batches: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_RUN, help="Micro-batches of a step. Default 16.")
    ] = None,
    eval_every: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_RUN,
            help="Evaluate after every N steps and at the end. Default 0: at the end alone, if there is validation "
            "data.",
        ),
    ] = None,
    eval_batches: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_RUN,
            help="Micro-batches of validation data that an evaluation takes, the same ones each time; 0: all. "
            "Default: as many as a step.",
        ),
    ] = None,
    commit_every: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_RUN,
            help="Steps between commits. Default 10, or by time where states are kept in memory: a commit must write "
            "those.",
        ),
    ] = None,
    commit_minutes: Annotated[
        str | None,
        typer.Option(
            metavar="X", rich_help_panel=_RUN,
            help="Minutes after which a commit is due at the latest. Default 10 where states are kept in memory.",
        ),
    ] = None,
    snapshot_every: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_RUN,
            help="Make a snapshot, step-000123, after every N steps (hoist restore goes back to it). Default 0: none.",
        ),
    ] = None,
    keep_snapshots: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_RUN,
            help="Remove the oldest of these beyond N; snapshots that you named stay. Default 0: keep all.",
        ),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(metavar="N", rich_help_panel=_RUN, help="Of initial weights, shuffle and dropout. Default 0."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=_RUN, help="Append one JSON object a step to this file."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=_RUN,
            help="TOML file with these options, like micro-batches = 4; the command line wins.",
        ),
    ] = None,
    lr: Annotated[
        str | None, typer.Option(metavar="X", rich_help_panel=_OPTIMIZER, help="Peak learning rate. Default 1e-4.")
    ] = None,
    lr_schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_OPTIMIZER, help="constant (default), linear or cosine."),
    ] = None,
    warmup_steps: Annotated[
        str | None,
        typer.Option(metavar="N", rich_help_panel=_OPTIMIZER, help="Steps of linear rise before that. Default 0."),
    ] = None,
    betas: Annotated[
        str | None,
        typer.Option(metavar="X,X", rich_help_panel=_OPTIMIZER, help="AdamW's decay rates. Default 0.9,0.95."),
    ] = None,
    eps: Annotated[
        str | None, typer.Option(metavar="X", rich_help_panel=_OPTIMIZER, help="AdamW's epsilon. Default 1e-8.")
    ] = None,
    weight_decay: Annotated[
        str | None,
        typer.Option(metavar="X", rich_help_panel=_OPTIMIZER, help="AdamW's decoupled weight decay. Default 0."),
    ] = None,
    no_decay_norms: Annotated[
        bool | None,
        typer.Option(
            "--no-decay-norms", rich_help_panel=_OPTIMIZER, help="No decay for biases and norms; default: all decay."
        ),
    ] = None,
    clip_norm: Annotated[
        str | None,
        typer.Option(
            metavar="X", rich_help_panel=_OPTIMIZER,
            help="Scale a step's gradients down to this global norm, exactly; a step without a finite norm is skipped. "
            "0 (default): no clipping.",
        ),
    ] = None,
    clip_mode: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=_OPTIMIZER,
            help="exact (default): updates wait for the norm. speculative: they are made at once and made again where "
            "the norm was too large, with the same results; a new store takes 12 more bytes a parameter for it, unless "
            "every step is committed.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_MACHINE,
            help="Budget for host memory, on top of what Python and its libraries take. Default 4GiB.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=_MACHINE,
            help="vertical (default: layer by layer) or horizontal (micro-batch by micro-batch, for comparison).",
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            metavar="X", rich_help_panel=_MACHINE,
            help="Share (0 to 1) of the optimizer's work that is done in the next step's forward instead of this "
            "step's backward: the same results. auto: measured in the first steps. Default 0; with --clip-norm 1.",
        ),
    ] = None,
    residency: Annotated[
        str | None,
        typer.Option(
            metavar="X", rich_help_panel=_MACHINE,
            help="Largest share (0 to 1) of the states that memory left over keeps from step to step. Default 1.",
        ),
    ] = None,
    loss_slice_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_MACHINE,
            help="Most tokens whose logits exist at once. Default: as many as have 32 MiB of them, or a quarter of the "
            "hidden size if more; another number differs in rounding.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_MACHINE, help="Compute type: auto (default) or float32."),
    ] = None,
    io: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_MACHINE, help="I/O engine: auto (default), direct or kvikio."),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=_MACHINE,
            help="Compare checksums: resume (default: all, before the run goes on), always (also those of what is read "
            "for updates) or never (sizes alone).",
        ),
    ] = None,
    max_chunk_elements: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_MACHINE,
            help="Largest chunk of a new store in elements, a multiple of 4096. Default 8388608.",
        ),
    ] = None,
) -> int:
    """Train a model whose states live on NVMe. Without options: a small one, on text that is already here."""
    # Numbers stay text here: `options.py` reads them, whose refusals name the value.
    given = {name: value for name, value in locals().items() if value not in (None, []) and name != "config"}
    return _train(given, config)


def _train(given: Mapping[str, Any], config: Path | None) -> int:
    from hoist.tools.options import TrainOptions
    from hoist.tools.show import Display
    from hoist.tools.train import train as run

    options = TrainOptions.make(config=config, command_line=given)
    with Display(Console()) as display:
        end = run(options, display)
        display.end(end)
    return 128 + end.signal if end.signal else 0


@app.command(epilog="Example:  [bold]hoist export hoist-store hoist-model --dtype bfloat16[/]")
def export(
    store: Annotated[Path, typer.Argument(help="The store.")],
    directory: Annotated[Path, typer.Argument(help="Directory for the model; a new or an empty one.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default=False,
            help="float32, bfloat16 or float16. Default: what the weights came in, or the config says.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", show_default=False, help="Largest safetensors file. Default 5GB.")
    ] = "5GB",
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Of a store with LoRA adapters, write the whole model with them added, not them alone."
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read everything back, and compare it with the store bit for bit, before the directory is there.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Write committed weights as a Hugging Face directory (safetensors, config, tokenizer); adapters as peft does."""
    return _export(store, directory, dtype, max_shard_size, merge, verify, as_json)


def _export(
    store: Path, directory: Path, dtype: str | None, max_shard_size: str, merge: bool, verify: bool, as_json: bool
) -> int:
    from hoist.scheduler.errors import ConfigError
    from hoist.tiers.io.choose import choose_engine
    from hoist.tools.export import export_store
    from hoist.tools.show import Display
    from hoist.tools.sizes import parse_bytes, show_bytes
    from hoist.tools.stop import Stop

    try:
        shard_bytes = parse_bytes(max_shard_size, minimum=1)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}") from error
    with Stop() as stop, choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            checking = verify and 2 * done > total
            display.progress("checking the export" if checking else "exporting", done, total)

        summary = export_store(
            store, directory, engine=engine, dtype=dtype, max_shard_bytes=shard_bytes, merge=merge, verify=verify,
            progress=progress,
        )
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "directory": str(summary.directory),
                    "step": summary.step,
                    "tensors": summary.num_tensors,
                    "bytes": summary.num_bytes,
                    "dtype": summary.dtype,
                    "verified": verify,
                    **({} if summary.base is None else {"base": summary.base}),
                }
            )
        )
    else:
        typer.echo(
            f"exported step {summary.step}: {summary.num_tensors} tensors, {show_bytes(summary.num_bytes)}, "
            f"{summary.dtype}, to {summary.directory}{' (read back: no bit differs)' if verify else ''}"
        )
        if summary.base is None:
            typer.echo(f"load it: AutoModelForCausalLM.from_pretrained({str(summary.directory)!r})")
        else:
            base = f"AutoModelForCausalLM.from_pretrained({summary.base!r})"
            typer.echo(f"load it: PeftModel.from_pretrained({base}, {str(summary.directory)!r})")
    return 0


@app.command("verify", epilog="Example:  [bold]hoist verify hoist-store[/]")
def verify_command(
    store: Annotated[Path, typer.Argument(help="The store, or a snapshot: STORE/snapshots/NAME.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> int:
    """Re-read everything that the last commit names and compare it with its checksums; also while a run goes on."""
    return _verify(store, as_json)


def _verify(store: Path, as_json: bool) -> int:
    from hoist.tiers.errors import StoreFormatError
    from hoist.tiers.io.choose import choose_engine
    from hoist.tools.show import Display
    from hoist.tools.sizes import show_bytes
    from hoist.tools.stop import Stop
    from hoist.tools.verify import raise_if_bad, verify_store

    with Stop() as stop, choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress("verifying", done, total)

        try:
            verdict = verify_store(store, engine=engine, progress=progress)
        except StoreFormatError as error:
            if as_json:
                typer.echo(json.dumps({"ok": False, "store": str(store), "error": str(error)}))
            raise
    if as_json:
        typer.echo(json.dumps(verdict.to_json()))
    else:
        for bad in verdict.bad:
            typer.echo(f"bad: {bad}")
    raise_if_bad(verdict)
    if not as_json:
        typer.echo(
            f"step {verdict.step}: all {verdict.num_files} chunk files are as they were committed "
            f"({show_bytes(verdict.num_bytes)} in {verdict.seconds:.1f} s, "
            f"{show_bytes(int(verdict.num_bytes / max(verdict.seconds, 1e-9)))}/s)"
        )
    return 0


@app.command(
    epilog="Examples:\n\n[bold]hoist snapshot hoist-store before-the-new-data[/]\n\n"
    "[bold]hoist snapshot hoist-store --list[/]\n\n[bold]hoist snapshot hoist-store before-the-new-data --remove[/]"
)
def snapshot(
    store: Annotated[Path, typer.Argument(help="The store.")],
    name: Annotated[str | None, typer.Argument(help="Of the snapshot: letters, digits and . _ -")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the store's snapshots.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the snapshot NAME.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done, or the list, as JSON.")] = False,
) -> int:
    """Keep the last commit under a name, in STORE/snapshots/NAME, where export and verify read it like a store."""
    return _snapshot(store, name, show, remove, as_json)


def _snapshot(store: Path, name: str | None, show: bool, remove: bool, as_json: bool) -> int:
    from hoist.scheduler.errors import ConfigError
    from hoist.tiers.io.choose import choose_engine
    from hoist.tools.show import Display
    from hoist.tools.snapshot import remove_snapshot, snapshot_store
    from hoist.tools.stop import Stop

    if (name is None) != show or (show and remove):
        raise ConfigError("snapshot: give either the NAME of a snapshot or --list")
    if show or name is None:
        return _list_snapshots(store, as_json)
    with Stop() as stop, choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress("checking the snapshot", done, total)

        if remove:
            remove_snapshot(store, name, engine=engine)
            typer.echo(json.dumps({"removed": name}) if as_json else f"snapshot {name} is removed")
            return 0
        info = snapshot_store(store, name, engine=engine, progress=progress)
    if as_json:
        typer.echo(json.dumps({"name": info.name, "step": info.step, "directory": str(info.directory)}))
    else:
        typer.echo(f"snapshot {info.name} of step {info.step} is in {info.directory}")
        typer.echo(f"go back to it: {command_name()} restore {shlex.quote(str(store))} {info.name}")
    return 0


def _list_snapshots(store: Path, as_json: bool) -> int:
    from hoist.tiers import allocation
    from hoist.tiers.allocation import DirectoryState
    from hoist.tiers.errors import StoreRefusedError
    from hoist.tiers.opening import why_no_commit
    from hoist.tiers.snapshots import list_snapshots

    if allocation.directory_state(store) is not DirectoryState.COMMITTED:
        raise StoreRefusedError(why_no_commit(store))
    found, damaged = list_snapshots(store)
    if as_json:
        listed = [
            {"name": info.name, "step": info.step, "automatic": info.automatic, "created": info.created}
            for info in found
        ]
        typer.echo(json.dumps({"snapshots": listed, "damaged": [str(error) for error in damaged]}))
        return 1 if damaged else 0
    for info in found:
        typer.echo(f"{info.name}  step {info.step}  {info.created}{'  automatic' if info.automatic else ''}")
    if damaged:
        raise damaged[0]
    if not found:
        typer.echo("no snapshots")
    return 0


@app.command(epilog="Example:  [bold]hoist restore hoist-store before-the-new-data[/]")
def restore(
    store: Annotated[Path, typer.Argument(help="The store.")],
    name: Annotated[str, typer.Argument(help="Of the snapshot.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> int:
    """Bring a store back to a snapshot: what came after is given up, and training goes on from there, bit for bit."""
    return _restore(store, name, as_json)


def _restore(store: Path, name: str, as_json: bool) -> int:
    from hoist.tiers.io.choose import choose_engine
    from hoist.tools.show import Display
    from hoist.tools.snapshot import restore_store
    from hoist.tools.stop import Stop

    with Stop() as stop, choose_engine("direct") as engine, Display(Console(stderr=as_json)) as display:

        def progress(done: int, total: int) -> None:
            stop.check()
            display.progress("restoring", done, total)

        before, record = restore_store(store, name, engine=engine, progress=progress)
    if as_json:
        typer.echo(json.dumps({"name": name, "step": record.step, "step_before": before}))
    else:
        typer.echo(f"{store} was at step {before} and is now at step {record.step}, as snapshot {name} kept it")
        asked = record.run.get("options", {}).get("steps", 0)
        more = f" --steps {max(before, record.step + 1)}" if asked and asked <= record.step else ""
        typer.echo(f"go on: {command_name()} train --store {shlex.quote(str(store))}{more}")
    return 0
@app.command(
    epilog="Examples:\n\n[bold]hoist drives hoist-store[/]\n\n[bold]hoist drives hoist-store --add /mnt/second/hoist[/]"
)
def drives(
    store: Annotated[Path, typer.Argument(help="The store: its main directory.")],
    add: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Take a directory on another drive into use; repeat for more."),
    ] = None,
    remove: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Move everything off a drive and take it out of use; repeat for more."),
    ] = None,
    io: Annotated[
        str, typer.Option(metavar="NAME", show_default=False, help="I/O engine: auto (default), direct or kvikio.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the drives as JSON.")] = False,
) -> int:
    """Say which drives a store spans, or spread it over others; run it again to finish an interrupted change."""
    return _drives(store, add or [], remove or [], io, as_json)


def _drives(store: Path, add: list[Path], remove: list[Path], io: str, as_json: bool) -> int:
    from hoist.tiers.io.choose import choose_engine
    from hoist.tools.drives import change, look, render
    from hoist.tools.show import Display
    from hoist.tools.sizes import show_bytes
    from hoist.tools.stop import Stop

    if add or remove:
        with Stop() as stop, choose_engine(io) as engine, Display(Console(stderr=as_json)) as display:

            def progress(done: int, total: int) -> None:
                stop.check()
                display.progress("moving chunks", done, total)

            moved_bytes = change(store, engine, add=add, remove=remove, progress=progress)
            display.notice(f"{show_bytes(moved_bytes)} moved")
    uses = look(store)
    if as_json:
        typer.echo(json.dumps([use.to_json() for use in uses], indent=2))
    else:
        render(uses, Console())
    return 0 if all(use.problem is None for use in uses) else 1


@app.command(epilog="Example:  [bold]hoist doctor .[/]")
def doctor(
    directory: Annotated[Path, typer.Argument(help="Directory on the drive that a store would be on.")] = Path(),
    io: Annotated[
        str, typer.Option(metavar="NAME", show_default=False, help="I/O engine: auto (default), direct or kvikio.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Say what this machine offers: I/O engine, measured bandwidth of the drive, memory, limits, GPU."""
    return _doctor(directory, io, as_json)


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


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line; returns the exit code. Errors are told on stderr, one line each."""
    from hoist.tools.exits import guarded

    return guarded(lambda: int(app(list(arguments), prog_name="hoist", standalone_mode=False) or 0))


def main() -> None:
    """Entry point of the `hoist` command."""
    # No hub is ever asked, and nobody is to wait for one: models and tokenizers are files.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is on code that users have not written
    warnings.simplefilter("ignore", FutureWarning)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
