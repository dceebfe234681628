"""`hoist export`: parses and calls `hoist.tools.export`, and prints its summary.

Errors become one line in `exits.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EPILOG = "Example:  [bold]hoist export hoist-store hoist-model --dtype bfloat16[/]"


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
    from hoist.tools.loudness import say
    from hoist.tools.progress import loading

    with loading():
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
        say(
            f"exported step {summary.step}: {summary.num_tensors} tensors, {show_bytes(summary.num_bytes)}, "
            f"{summary.dtype}, to {summary.directory}{' (read back: no bit differs)' if verify else ''}"
        )
        if summary.base is None:
            say(f"load it: AutoModelForCausalLM.from_pretrained({str(summary.directory)!r})")
        else:
            base = f"AutoModelForCausalLM.from_pretrained({summary.base!r})"
            say(f"load it: PeftModel.from_pretrained({base}, {str(summary.directory)!r})")
    return 0
