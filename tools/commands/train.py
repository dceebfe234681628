"""`hoist train`: its options, in panels; `options.py` reads them, `train.py` does the work.

Numbers stay text here, so that refusals name the value as it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from hoist.tools.options import TrainOptions

# Panels of `hoist train --help`.
_WHAT, _DATA, _RUN, _OPTIMIZER, _MACHINE = "What to train", "Data", "The run", "Optimizer", "Machine"

EPILOG = (
    "Examples. About two minutes, no files needed:\n\n[bold]hoist train[/]\n\n"
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
    dry_run: Annotated[
        bool | None,
        typer.Option(
            "--dry-run", rich_help_panel=_RUN,
            help="Print what the run would take (memory, drive, seconds a step, measured in a few seconds) and stop; "
            "nothing is created or changed.",
        ),
    ] = None,
    as_json: Annotated[
        bool | None, typer.Option("--json", rich_help_panel=_RUN, help="With --dry-run: print it as JSON.")
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
    tensorboard: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", rich_help_panel=_RUN,
            help="Also write every number of --metrics, under the same names, as event files for TensorBoard.",
        ),
    ] = None,
    tbw: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_MACHINE,
            help="What the store's drive is rated for in its life, like 600TB (TBW in its data sheet); with several "
            "drives repeat it for each, in their order. The store keeps it. Default: what the drive implies itself, if "
            "nvme-cli may ask it.",
        ),
    ] = None,
    write_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_MACHINE,
            help="Most bytes ever written to the store's drives, over all calls since it was made: the run commits and "
            "stops before a step that could exceed it. 0 (default): no limit.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=_RUN, help="Append one JSON object a step to this file."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", rich_help_panel=_RUN,
            help="Write what every lane did, op by op, to this file, for ui.perfetto.dev or chrome://tracing. What it "
            "held is replaced; .json.gz is compressed.",
        ),
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
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=_MACHINE,
            help="What computes: auto (default: an accelerator, if torch finds one), cpu, or one by torch's name, like "
            "cuda:1.",
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_MACHINE,
            help="Budget for an accelerator's memory. Default auto: 90% of what is free there. Not allowed with cpu, "
            "whose memory is the host's.",
        ),
    ] = None,
    optim_device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=_MACHINE,
            help="What AdamW runs on: cpu (default), or device, an accelerator that computes: states go there piece by "
            "piece and come back.",
        ),
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", rich_help_panel=_MACHINE, show_default=False,
            help="Compile decoder layers with torch.compile, one graph for all equal ones: other rounding, and on a "
            "CPU it needs g++. Default: no.",
        ),
    ] = None,
    compile_backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=_MACHINE, help="With --compile: one of torch's backends. Default inductor."
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
    weight_buffers: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_MACHINE,
            help="Buffers that stages' weights take in turn: with N of them, N - 1 stages are read while one computes, "
            "and N are in memory. The same results. At least 2, the default.",
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
        typer.Option(
            metavar="NAME", rich_help_panel=_MACHINE,
            help="What layers compute with: float32, bfloat16, or auto (default: bfloat16 on an accelerator that has "
            "it, else float32). Weights, moments and sums of gradients are float32 in any case.",
        ),
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
    given = {
        name: value for name, value in locals().items() if value not in (None, []) and name not in ("config", "as_json")
    }
    return _train(given, config, as_json=bool(as_json))


def _forecast(options: TrainOptions, *, as_json: bool) -> int:
    import json

    from hoist.tools.preflight_view import render
    from hoist.tools.show import Display
    from hoist.tools.train import preview

    console = Console()
    with Display(Console(stderr=True) if as_json else console) as display:
        forecast = preview(options, display)
    if as_json:
        print(json.dumps(forecast.to_json(), indent=2))
    else:
        render(forecast, console)
    return 0


def _train(given: Mapping[str, Any], config: Path | None, *, as_json: bool) -> int:
    from hoist.tools.progress import loading

    with loading():
        from hoist.scheduler.errors import ConfigError
        from hoist.tools.options import TrainOptions
        from hoist.tools.show import Display
        from hoist.tools.train import train as run

    options = TrainOptions.make(config=config, command_line=given)
    if options.dry_run:
        return _forecast(options, as_json=as_json)
    if as_json:
        raise ConfigError("--json: goes with --dry-run; a run's numbers are in --metrics FILE, one JSON object a step")
    with Display(Console()) as display:
        end = run(options, display)
        display.end(end)
    return 128 + end.signal if end.signal else 0
