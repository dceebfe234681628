"""For developers: how fast weights come in and go out. python -m hoist.tools.bench.checkpoint_import --directory /nvme

Makes a checkpoint of a Llama shape, imports it into a store and exports it again, in turn with plain writes of as many
bytes to the same drive, and compares. What a store of moments costs beside the weights is no part of it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hoist.scheduler.creation import create_store
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import split
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.io.probe import measure_bandwidth
from hoist.tools.bench.developing import make_parser
from hoist.tools.bench.shapes import model_config
from hoist.tools.bench.sides.work import make_checkpoint
from hoist.tools.bench.turns import trainer_config
from hoist.tools.export import export_store
from hoist.tools.import_weights import checkpoint_weights
from hoist.tools.model_files import save_model_files
from hoist.tools.presets import load_model_source
from hoist.tools.sizes import parse_bytes

#: Of the model that is made.
VOCAB = 32_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Medians over the rounds. Bytes are those of the weights in float32, which all three write."""

    num_bytes: int
    import_seconds: float
    """A checkpoint becomes a committed store, its files' reservation and their flush included."""
    export_seconds: float
    """A store becomes a directory for transformers, flushed and renamed."""
    write_seconds: float
    """As many bytes written to the drive as fast as it takes them, flushed."""

    @property
    def import_ratio(self) -> float:
        """Import over plain writes."""
        return self.import_seconds / self.write_seconds

    @property
    def export_ratio(self) -> float:
        """Export over plain writes."""
        return self.export_seconds / self.write_seconds


def bench(directory: Path, *, num_layers: int, hidden: int, dtype: torch.dtype, rounds: int, budget: int) -> Result:
    """Measure in a new folder under ``directory``, which is removed."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="hoist-bench-") as name:
        folder = Path(name)
        make_checkpoint(
            folder / "model", model_config(hidden=hidden, layers=num_layers, vocab=VOCAB), dtype=dtype
        )
        source = load_model_source(str(folder / "model"))
        checkpoint = source.checkpoint
        if checkpoint is None:
            raise AssertionError(f"{folder / 'model'} was saved without weights")
        model = split(build_model(source.config))
        options = trainer_config(seq_len=64, micro_batch_size=1, num_micro_batches=1, host_memory_bytes=budget)
        setup = prepare(model, lay_out_stages(model), replace(options, residency=0.0, resident_weights=False))
        num_bytes = 4 * sum(layout.num_elements for layout in setup.layouts)
        store, exported = folder / "store", folder / "exported"
        with choose_engine("auto") as engine:

            def bring_in() -> None:
                create_store(
                    store,
                    model=model,
                    setup=setup,
                    engine=engine,
                    source=checkpoint_weights(checkpoint, model, engine),
                    attributes={},
                    extras=lambda folder: save_model_files(source, folder),
                ).close()

            def bring_out() -> None:
                export_store(store, exported, engine=engine, dtype="float32")

            seconds: dict[str, list[float]] = {"import": [], "export": [], "write": []}
            warm_up()
            for _ in range(rounds):
                seconds["import"].append(_timed(bring_in))
                seconds["export"].append(_timed(bring_out))
                shutil.rmtree(store)
                shutil.rmtree(exported)
                # Less than a whole file of this size: the drive's speed, and time for more rounds.
                speed = measure_bandwidth(folder, engine, num_bytes=min(num_bytes, 2**30)).write_bytes_per_second
                seconds["write"].append(num_bytes / speed)
        found = {name: statistics.median(values) for name, values in seconds.items()}
    return Result(
        num_bytes=num_bytes,
        import_seconds=found["import"],
        export_seconds=found["export"],
        write_seconds=found["write"],
    )


def _timed(call: Callable[[], None]) -> float:
    os.sync()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or JSON."""
    parser = make_parser("checkpoint_import", __doc__)
    parser.add_argument("--layers", type=int, default=16, help="decoder layers (default 16)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden width, a multiple of 64 (default 1024)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is done (default 3)")
    parser.add_argument("--host-memory", default="512MiB", help="budget (default 512MiB)")
    told = parser.parse_args(arguments)
    result = bench(
        told.directory.absolute(), num_layers=told.layers, hidden=told.hidden, dtype=getattr(torch, told.dtype),
        rounds=told.rounds, budget=parse_bytes(told.host_memory, minimum=1),
    )  # fmt: skip
    ratios = {"import_ratio": result.import_ratio, "export_ratio": result.export_ratio}
    if told.json:
        print(json.dumps({**asdict(result), **ratios}))
        return 0
    Console().print(_table(result))
    return 0


def _table(result: Result) -> Table:
    table = Table(title=f"{result.num_bytes / 1e9:.2f} GB of weights in float32")
    for heading in ("", "seconds", "GB/s", "to plain writes"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows: Mapping[str, Any] = {
        "import": (result.import_seconds, result.import_ratio),
        "export": (result.export_seconds, result.export_ratio),
        "plain writes": (result.write_seconds, 1.0),
    }
    for name, (seconds, ratio) in rows.items():
        table.add_row(name, f"{seconds:.2f}", f"{result.num_bytes / 1e9 / seconds:.2f}", f"{ratio:.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
