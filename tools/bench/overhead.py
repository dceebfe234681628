"""For developers: what telling costs. python -m hoist.tools.bench.overhead --directory /nvme

The same steps with STORE/status.json written every second and the timeline kept, and without: by turns, in one process.
What is done for every document and every line of metrics is measured beside it, also of a model of 1000 tiny stages,
where documents are longest.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from hoist.optim import Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.metrics_log import LineFile
from hoist.scheduler.models import build_model
from hoist.scheduler.module_stages import stage_modules
from hoist.scheduler.setup import Setup
from hoist.scheduler.stages import StagedModel, split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.footprint import warm_up
from hoist.tiers.format import STATUS_NAME
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.store import Store
from hoist.tools.bench.developing import add_model_options, make_parser, new_store, parse_shape
from hoist.tools.bench.shapes import batches, model_config
from hoist.tools.bench.turns import trainer_config
from hoist.tools.sizes import parse_bytes

#: Documents and lines whose cost is measured.
SAMPLES = 30
#: Width of a tiny stage.
TINY = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a document takes. Medians, in seconds of this thread's CPU time and of the clock."""

    num_stages: int
    cpu_seconds: float
    wall_seconds: float
    document_bytes: int
    line_seconds: float
    """Appending a line of metrics, by the clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Both sides. Seconds are means of a turn's steps, the first left out."""

    told_seconds: tuple[float, ...]
    """With documents every second and a timeline; one of each turn."""
    quiet_seconds: tuple[float, ...]
    documents: int
    """Written in the turns of the first side."""

    @property
    def ratio(self) -> float:
        """Median of the ratios of neighbouring turns."""
        pairs = zip(self.told_seconds, self.quiet_seconds, strict=True)
        return statistics.median(told / quiet for told, quiet in pairs)


@contextmanager
def made(
    directory: Path, engine: IoEngine, model: StagedModel, config: TrainerConfig
) -> Iterator[tuple[Store, Setup]]:
    """A new store and its setup; removed at the end."""
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="bench-overhead-") as folder,
        new_store(Path(folder) / "store", model, config, engine) as found,
    ):
        yield found


def cost(trainer: Trainer, store: Store, last: Mapping[str, object]) -> Cost:
    """What a document of a trainer takes now, and a line of metrics."""
    cpu, wall, lines = [], [], []
    for _ in range(SAMPLES):
        started, clock = time.thread_time(), time.perf_counter()
        trainer.publish()
        cpu.append(time.thread_time() - started)
        wall.append(time.perf_counter() - clock)
    with LineFile(store.directory / "scratch" / "lines") as file:
        for _ in range(SAMPLES):
            clock = time.perf_counter()
            file.write(last)
            lines.append(time.perf_counter() - clock)
    return Cost(
        num_stages=len(store.layouts),
        cpu_seconds=statistics.median(cpu),
        wall_seconds=statistics.median(wall),
        document_bytes=(store.directory / STATUS_NAME).stat().st_size,
        line_seconds=statistics.median(lines),
    )


def measure_steps(
    directory: Path,
    *,
    hidden: int,
    layers: int,
    vocab: int,
    shape: tuple[int, int, int],
    host_memory_bytes: int,
    rounds: int,
    steps: int,
) -> tuple[Overhead, Cost]:
    """Turns of ``steps`` steps of each side, ``rounds`` (at least 1) pairs; and what a document took after the last."""
    seq_len, rows, count = shape
    config = model_config(hidden=hidden, layers=layers, vocab=vocab)
    quiet = trainer_config(
        seq_len=seq_len, micro_batch_size=rows, num_micro_batches=count, host_memory_bytes=host_memory_bytes
    )
    model, feed = split(build_model(config)), batches(config, shape)
    taken: dict[bool, list[float]] = {True: [], False: []}
    documents, costs = 0, list[Cost]()
    with choose_engine() as engine, made(directory, engine, model, quiet) as (store, setup):
        for turn in range(2 * rounds):
            told = turn % 4 in (0, 3)  # neither side is always the first of a pair
            options = replace(quiet, status_seconds=1.0) if told else quiet
            with Trainer(model=model, store=store, engine=engine, config=options, setup=setup) as trainer:
                last = trainer.step(next(feed))
                trainer.wait()
                began = time.perf_counter()
                for _ in range(steps):
                    last = trainer.step(next(feed))
                trainer.wait()
                taken[told].append((time.perf_counter() - began) / steps)
                if told:
                    documents += json.loads((store.directory / STATUS_NAME).read_bytes())["sequence"]
                costs.append(cost(trainer, store, last.to_json()))
                trainer.commit()
    overhead = Overhead(told_seconds=tuple(taken[True]), quiet_seconds=tuple(taken[False]), documents=documents)
    return overhead, costs[-1]


def measure_tiny(directory: Path, num_stages: int) -> Cost:
    """A document of so many stages, between two steps, all of whose states are in memory."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum()

    inputs = torch.zeros(2, TINY)
    example = {"inputs": inputs, "targets": inputs}
    model = stage_modules([nn.Linear(TINY, TINY) for _ in range(num_stages)], loss=loss, example=example)
    options = TrainerConfig(
        host_memory_bytes=2**30,
        micro_batch_size=2,
        num_micro_batches=1,
        schedule=Schedule(kind="constant", lr=1e-4, num_steps=1),
        status_seconds=0.0,
    )
    with (
        choose_engine() as engine,
        made(directory, engine, model, options) as (store, setup),
        Trainer(model=model, store=store, engine=engine, config=options, setup=setup) as trainer,
    ):
        last = trainer.step([example])
        trainer.wait()
        return cost(trainer, store, last.to_json())


def show(overhead: Overhead, costs: Sequence[Cost]) -> None:
    """Print what was found."""
    console = Console(highlight=False)
    console.print(
        f"a step: {statistics.median(overhead.told_seconds):.3f} s with {overhead.documents} documents written "
        f"meanwhile, {statistics.median(overhead.quiet_seconds):.3f} s without; ratio {overhead.ratio:.4f} (median of "
        f"{len(overhead.told_seconds)} pairs: "
        + ", ".join(
            f"{told / quiet:.3f}"
            for told, quiet in zip(overhead.told_seconds, overhead.quiet_seconds, strict=True)
        )
        + ")"
    )
    for each in costs:
        console.print(
            f"{each.num_stages} stages: a document takes {1e3 * each.cpu_seconds:.1f} ms of CPU time "
            f"({1e3 * each.wall_seconds:.1f} ms by the clock) and {each.document_bytes} bytes; a line of metrics "
            f"{1e3 * each.line_seconds:.2f} ms"
        )


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser("overhead", __doc__)
    add_model_options(parser, host_memory="128MiB", hidden=512, layers=6)
    parser.add_argument("--shape", default="64,1,4", help="seq,B,M")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of turns, one of each side")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--stages", type=int, default=1000, help="tiny stages of the longest document; 0: none")
    arguments = parser.parse_args()
    for name in ("rounds", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: {getattr(arguments, name)} is not positive")
    warm_up()
    directory = arguments.directory.absolute()
    overhead, own = measure_steps(
        directory,
        hidden=arguments.hidden,
        layers=arguments.layers,
        vocab=arguments.vocab,
        shape=parse_shape(arguments.shape),
        host_memory_bytes=parse_bytes(arguments.host_memory),
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    costs = [own, *([measure_tiny(directory, arguments.stages)] if arguments.stages else [])]
    if arguments.json:
        found = {"steps": asdict(overhead), "ratio": overhead.ratio, "costs": [asdict(each) for each in costs]}
        print(json.dumps(found, indent=2))
    else:
        show(overhead, costs)


if __name__ == "__main__":
    main()
