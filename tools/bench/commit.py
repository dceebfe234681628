"""For developers: what commits cost. python -m hoist.tools.bench.commit --directory /nvme

Trains the same steps without commits between them, with one every few steps, and with one every step, by turns in one
store, and compares the run times. A commit's flush is measured apart. Steps against their limits: `step.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import Setup
from hoist.scheduler.stages import StagedModel, split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.commit import CommitStatistics
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.store import Store
from hoist.tools.bench.developing import add_model_options, make_parser, new_store, parse_shape
from hoist.tools.bench.shapes import batches, model_config
from hoist.tools.bench.turns import NEVER, trainer_config
from hoist.tools.sizes import parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One commit interval's result: medians over the rounds."""

    commit_every: int
    """Steps between commits; 0: none."""
    seconds: float
    """All steps of a round, up to the last one's writes."""
    overhead: float
    """Share by which that is more than without commits; may be below 0 by what else the machine does."""
    num_commits: int
    """In a round, the one that ends it left out."""
    flush_seconds: float
    """Of one commit: making what was written durable; nothing but freed slots waits for it. 0 if there was none."""
    commit_seconds: float
    """Of one commit, the flush included."""
    commit_share: float
    """All commits' seconds over the run's: the overhead if nothing of them were hidden. Other load disturbs it less."""


class CountingStore(Store):
    """Keeps what each commit took."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.commits: list[CommitStatistics] = []

    def commit(
        self, *, step: int, adam_steps: Mapping[str, int], run: Mapping[str, Any], back: bool = False
    ) -> CommitStatistics:
        """As the store does, and note it."""
        done = super().commit(step=step, adam_steps=adam_steps, run=run, back=back)
        self.commits.append(done)
        return done


def measure(
    directory: Path,
    config: LlamaConfig,
    shape: tuple[int, int, int],
    intervals: Sequence[int],
    *,
    host_memory_bytes: int,
    num_steps: int,
    num_rounds: int,
    delay: float,
) -> list[Row]:
    """Run ``num_rounds`` rounds of ``num_steps`` steps for each of ``intervals`` (0: no commits), by turns."""
    seq_len, rows, count = shape
    warm_up()
    seconds: dict[int, list[float]] = {interval: [] for interval in intervals}
    commits: dict[int, list[CommitStatistics]] = {interval: [] for interval in intervals}
    counts: dict[int, int] = {}
    with choose_engine() as engine, tempfile.TemporaryDirectory(dir=directory, prefix="bench-commit-") as folder:
        staged = split(build_model(config))
        base = trainer_config(
            seq_len=seq_len, micro_batch_size=rows, num_micro_batches=count, host_memory_bytes=host_memory_bytes
        )
        options = replace(base, delay=delay)
        store = Path(folder) / "store"
        with new_store(store, staged, options, engine) as (_, setup):
            pass  # each run opens it
        _run(store, staged, setup, engine, options, config, shape, 1)  # warms up
        for number in range(num_rounds):
            for interval in intervals[:: -1 if number % 2 else 1]:  # so that none always comes after the same one
                told = replace(options, commit_every=interval or NEVER)
                took, done = _run(store, staged, setup, engine, told, config, shape, num_steps)
                seconds[interval].append(took)
                commits[interval] += done
                counts[interval] = len(done)
    without = statistics.median(seconds[intervals[0]])
    return [
        Row(
            commit_every=interval,
            seconds=statistics.median(seconds[interval]),
            overhead=statistics.median(seconds[interval]) / without - 1.0,
            num_commits=counts[interval],
            flush_seconds=_median([done.flush_seconds for done in commits[interval]]),
            commit_seconds=_median([done.seconds for done in commits[interval]]),
            commit_share=sum(done.seconds for done in commits[interval]) / sum(seconds[interval]),
        )
        for interval in intervals
    ]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _run(
    directory: Path,
    staged: StagedModel,
    setup: Setup,
    engine: IoEngine,
    options: TrainerConfig,
    config: LlamaConfig,
    shape: tuple[int, int, int],
    num_steps: int,
) -> tuple[float, list[CommitStatistics]]:
    """Seconds of the steps, and the commits made in them. One step goes before, one commit after, neither counted."""
    feed = batches(config, shape)
    with (
        CountingStore.open(directory, engine=engine) as store,
        Trainer(model=staged, store=store, engine=engine, config=options, setup=setup) as trainer,
    ):
        trainer.step(next(feed))
        trainer.wait()
        before = len(store.commits)
        began = time.perf_counter()
        for _ in range(num_steps):
            trainer.step(next(feed))
        trainer.wait()
        took = time.perf_counter() - began
        within = store.commits[before:]
        trainer.commit()
    return took, within


def show(rows: Sequence[Row], load: float) -> None:
    """Print the table."""
    table = Table(title=f"what commits cost (medians; load before: {load:.1f})")
    for column in ("steps a commit", "run", "overhead", "commits", "flush", "a commit", "all, if unhidden"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.commit_every) if row.commit_every else "never",
            f"{row.seconds:.2f} s",
            f"{row.overhead:+.1%}",
            str(row.num_commits),
            f"{row.flush_seconds:.3f} s",
            f"{row.commit_seconds:.3f} s",
            f"{row.commit_share:.1%}",
        )
    Console().print(table)


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser("commit", __doc__)
    add_model_options(parser, host_memory="256MiB", hidden=1024, layers=8)
    parser.add_argument("--shape", default="64,1,4", help="seq,B,M; default: 64,1,4")
    parser.add_argument("--every", type=int, action="append", help="commit interval; repeat for more; default: 10 1")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each interval, by turns")
    parser.add_argument("--delay", type=float, default=0.0, help="share of updates that wait for the next forward")
    arguments = parser.parse_args()
    for name in ("steps", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: {getattr(arguments, name)} is not positive")
    every = arguments.every or [10, 1]
    if min(every) < 1:
        parser.error(f"--every: {min(every)} is not positive")
    load = os.getloadavg()[0]
    found = measure(
        arguments.directory.absolute(),
        model_config(hidden=arguments.hidden, layers=arguments.layers, vocab=arguments.vocab),
        parse_shape(arguments.shape),
        [0, *every],
        host_memory_bytes=parse_bytes(arguments.host_memory),
        num_steps=arguments.steps,
        num_rounds=arguments.rounds,
        delay=arguments.delay,
    )
    if arguments.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
    else:
        show(found, load)


if __name__ == "__main__":
    main()
