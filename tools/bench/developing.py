"""What the benchmarks for hoist's own developers share: `python -m hoist.tools.bench.NAME`, none of them a command.

They are `checkpoint_import`, `commit`, `overhead`, `prediction` and `trace`, each of which looks at one cost inside
hoist. Comparisons with others are `hoist bench`; what must hold on a GPU is tried by `gpu`, with options of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store, initialised
from hoist.scheduler.setup import Setup, lay_out_stages, prepare
from hoist.scheduler.stages import StagedModel
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store


def parse_shape(text: str) -> tuple[int, int, int]:
    """``64,2,4`` as seq_len, micro_batch_size, num_micro_batches. Raises ValueError on what is none."""
    seq_len, rows, count = (int(part) for part in text.split(","))
    return seq_len, rows, count


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A benchmark's parser, with ``--directory`` and ``--json``. ``name``: its module in this folder."""
    command = f"python -m hoist.tools.bench.{name}"
    parser = argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=f"Example: {command} --directory .",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--directory", type=Path, default=Path(), help="where stores are made (and removed)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    return parser


def add_model_options(parser: argparse.ArgumentParser, *, host_memory: str, hidden: int, layers: int) -> None:
    """Options for the budget and :func:`model_config`, with these defaults; the vocabulary is eight times as wide."""
    parser.add_argument("--host-memory", default=host_memory, help=f"budget of a trainer; default: {host_memory}")
    parser.add_argument("--hidden", type=int, default=hidden, help=f"default: {hidden}")
    parser.add_argument("--layers", type=int, default=layers, help=f"default: {layers}")
    parser.add_argument("--vocab", type=int, default=8 * hidden, help=f"default: {8 * hidden}")


@contextmanager
def new_store(
    directory: Path, model: StagedModel, options: TrainerConfig, engine: IoEngine
) -> Iterator[tuple[Store, Setup]]:
    """A new store in ``directory``, which must not be there yet, with initialised weights; and its setup. It stays."""
    setup = prepare(model, lay_out_stages(model), options)
    with create_store(
        directory, model=model, setup=setup, engine=engine, source=initialised(0), attributes={}
    ) as store:
        yield store, setup
