"""How well a step hides I/O and updates behind computing: python -m hoist.tools.bench.overlap --directory /nvme

The model's layers sleep instead of computing, as an accelerator would: time passes, and no processor is used. A step
is compared with the larger of the sleep in it and of its I/O at the bandwidth measured in the same run, for several
delays, in one store that each run resumes. With real computation beside it: `step.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler import memory
from hoist.scheduler.config import ClipMode, TrainerConfig
from hoist.scheduler.creation import create_store
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import Stage, StagedModel, split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.io.probe import Bandwidth, measure_bandwidth
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, MAX_CHUNK_ELEMENTS, round_up
from hoist.tiers.store import Store
from hoist.tools.bench.lanes import draw_timeline
from hoist.tools.bench.shapes import make_parser
from hoist.tools.bench.sides.job import Sleep
from hoist.tools.bench.sides.sleeping import HIDDEN, VOCAB, initial_weight, let_layers_sleep, sleeping_config
from hoist.tools.sizes import parse_bytes, show_bytes

SEQ_LEN = 8
#: Chunks of a layer: a delay is rounded to whole ones.
CHUNKS_PER_LAYER = 8
#: Times the smallest budget that works, where none is given.
BUDGET_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured: sizes and the time that a layer takes for one micro-batch."""

    num_layers: int
    layer_elements: int
    """Weights of a layer, a multiple of 64."""
    num_micro_batches: int
    forward_seconds: float
    backward_seconds: float
    num_steps: int
    """Counted steps of each run; one more goes before them."""

    @property
    def sleep(self) -> Sleep:
        """Its layers."""
        return Sleep(
            num_layers=self.num_layers,
            layer_elements=self.layer_elements,
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
        )

    @property
    def sleep_seconds(self) -> float:
        """Sleep in one step: every layer's forward twice, as the backward recomputes it, and its backward once."""
        return self.num_layers * self.num_micro_batches * (2 * self.forward_seconds + self.backward_seconds)


#: Norms that no step's gradients reach, and that all of them exceed.
NEVER, ALWAYS = 1e9, 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is tried."""

    delay: float
    clip_norm: float = 0.0
    clip_mode: ClipMode = "exact"

    @property
    def name(self) -> str:
        """For people."""
        if not self.clip_norm:
            return f"delay {self.delay:g}"
        if self.clip_mode == "exact":
            return "clip exactly"
        return f"guess, delay {self.delay:g}, {'all' if self.clip_norm == ALWAYS else 'none'} wrong"

    def configured(self, config: TrainerConfig) -> TrainerConfig:
        """``config`` with this run's delay and clipping."""
        return replace(config, delay=self.delay, clip_norm=self.clip_norm, clip_mode=self.clip_mode)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run's result. Times are medians over the steps, in seconds."""

    name: str
    """Delay and clipping."""
    step_seconds: float
    sleep_seconds: float
    io_seconds: float
    """Bytes read and written at the measured bandwidths, one after the other; no more than the io lane was busy."""
    ratio: float
    """The step over the larger of the two."""
    read_bytes: int
    written_bytes: int
    busy_seconds: dict[str, float]
    """Per lane: at work."""
    stall_seconds: dict[str, float]
    """Per lane: idle while it still had work in the step."""
    timeline: tuple[str, ...]
    """The lanes during the last step."""


def sleeping_model(job: Job) -> StagedModel:
    """A small Llama whose layers are replaced."""
    model = build_model(sleeping_config(job.sleep))
    let_layers_sleep(model, job.sleep)
    return split(model)


def fill(stage: Stage, values: Mapping[str, Tensor], _staging: Tensor) -> None:
    """The weights that every side begins with."""
    for name, value in values.items():
        value.copy_(initial_weight(name, value.shape, seed=0))


def step_of(job: Job, number: int) -> list[dict[str, Tensor]]:
    """The micro-batches of a step."""
    generator = torch.Generator().manual_seed(number)
    batches = []
    for _ in range(job.num_micro_batches):
        ids = torch.randint(0, VOCAB, (1, SEQ_LEN), generator=generator)
        batches.append({"input_ids": ids, "labels": ids})
    return batches


@contextmanager
def prepared(
    directory: Path, job: Job, runs: Sequence[Run], *, host_memory_bytes: int | None
) -> Iterator[tuple[StagedModel, IoEngine, Bandwidth, TrainerConfig, Path]]:
    """A store at step 0, what trains in it, and the drive's bandwidth. All of it is removed afterwards."""
    warm_up()
    with choose_engine() as engine, tempfile.TemporaryDirectory(dir=directory, prefix="bench-overlap-") as folder:
        bandwidth = measure_bandwidth(Path(folder), engine)
        staged = sleeping_model(job)
        chunk_elements = round_up(-(-job.layer_elements // CHUNKS_PER_LAYER), CHUNK_QUANTUM_ELEMENTS)
        layouts = lay_out_stages(staged, max_chunk_elements=min(chunk_elements, MAX_CHUNK_ELEMENTS))
        config = TrainerConfig(
            host_memory_bytes=host_memory_bytes or 2**50,
            micro_batch_size=1,
            seq_len=SEQ_LEN,
            num_micro_batches=job.num_micro_batches,
            optimizer=AdamWHyperparameters(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
            schedule=Schedule(kind="constant", lr=1e-4, num_steps=len(runs) * (job.num_steps + 1)),
            commit_every=10**6,
        )
        if host_memory_bytes is None:
            demand = prepare(staged, layouts, replace(config, delay=1.0)).memory.demand
            config = replace(config, host_memory_bytes=int(BUDGET_FACTOR * memory.smallest(demand).need_bytes))
        store = Path(folder) / "store"
        # The largest scratch, and a third slot if a run needs it.
        guessing = next((run for run in runs if run.clip_mode == "speculative"), Run(delay=1.0))
        setup = prepare(staged, layouts, guessing.configured(replace(config, delay=1.0)))
        create_store(store, model=staged, setup=setup, engine=engine, source=fill, attributes={}).close()
        yield staged, engine, bandwidth, config, store


def measure(directory: Path, job: Job, runs: Sequence[Run], *, host_memory_bytes: int | None) -> list[Row]:
    """A few steps of each run."""
    with prepared(directory, job, runs, host_memory_bytes=host_memory_bytes) as made:
        staged, engine, bandwidth, config, store = made
        rows = [_measure_run(store, staged, engine, run.configured(config), job, run.name) for run in runs]
        # The drive may have been busy with something else: the quicker of two measurements is nearer to what it can do.
        after = measure_bandwidth(store.parent, engine)
        read = max(bandwidth.read_bytes_per_second, after.read_bytes_per_second)
        write = max(bandwidth.write_bytes_per_second, after.write_bytes_per_second)
        return [_compared(row, read, write) for row in rows]


def _measure_run(
    directory: Path, staged: StagedModel, engine: IoEngine, config: TrainerConfig, job: Job, name: str
) -> Row:
    times: list[float] = []
    metrics: list[StepMetrics] = []
    timeline: list[str] = []
    with (
        Store.open(directory, engine=engine) as store,
        Trainer(model=staged, store=store, engine=engine, config=config) as trainer,
    ):
        for number in range(job.num_steps + 1):
            began = time.perf_counter()
            done = trainer.step(step_of(job, trainer.step_number))
            stopped = time.perf_counter()
            if number:  # the first has no step before it to overlap with
                times.append(stopped - began)
                metrics.append(done)
                timeline = draw_timeline(trainer.last_spans, began, stopped)
        trainer.commit()
    read_bytes = int(statistics.median(step.nvme_read_bytes for step in metrics))
    written_bytes = int(statistics.median(step.nvme_written_bytes for step in metrics))
    lanes = metrics[0].busy_seconds
    return Row(
        name=name,
        step_seconds=statistics.median(times),
        sleep_seconds=job.sleep_seconds,
        io_seconds=0.0,
        ratio=0.0,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        busy_seconds={lane: statistics.median(step.busy_seconds[lane] for step in metrics) for lane in lanes},
        stall_seconds={lane: statistics.median(step.stall_seconds[lane] for step in metrics) for lane in lanes},
        timeline=tuple(timeline),
    )


def _compared(row: Row, read_bytes_per_second: float, write_bytes_per_second: float) -> Row:
    """The row with what the drive's bandwidth makes of it. The io lane shows where the drive did better than that."""
    io_seconds = row.read_bytes / read_bytes_per_second + row.written_bytes / write_bytes_per_second
    io_seconds = min(io_seconds, row.busy_seconds["io"])
    return replace(row, io_seconds=io_seconds, ratio=row.step_seconds / max(row.sleep_seconds, io_seconds))


def show(rows: Sequence[Row], load: float) -> None:
    """Print the table, and the lanes of a step of each run."""
    table = Table(title=f"a step whose layers sleep, against its limits (medians; load before: {load:.1f})")
    columns = ("", "step", "sleep", "I/O alone", "ratio", "compute busy", "waits", "io busy", "optim")
    for column in (*columns, "read", "written"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.step_seconds:.2f} s",
            f"{row.sleep_seconds:.2f} s",
            f"{row.io_seconds:.2f} s",
            f"{row.ratio:.3f}",
            f"{row.busy_seconds['compute']:.2f} s",
            f"{row.stall_seconds['compute']:.2f} s",
            f"{row.busy_seconds['io']:.2f} s",
            f"{row.busy_seconds['optim']:.2f} s",
            show_bytes(row.read_bytes),
            show_bytes(row.written_bytes),
        )
    console = Console()
    console.print(table)
    for row in rows:
        console.print(f"\nlanes of one step, {row.name}:")
        for line in row.timeline:
            console.print(line, markup=False, highlight=False)


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser("overlap", __doc__)
    parser.add_argument("--host-memory", help=f"budget; default: {BUDGET_FACTOR} times the smallest that works")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--layer-elements", type=int, default=2**24, help="weights of a layer, a multiple of 64")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=10.0, help="of a layer and a micro-batch")
    parser.add_argument("--backward-ms", type=float, default=20.0, help="beside the forward that it repeats")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each run")
    parser.add_argument("--delay", type=float, action="append", help="repeat for more; default: 0 0.25 0.5 1")
    parser.add_argument(
        "--clipping", action="store_true", help="compare exact and speculative clipping; default delay: 0.25"
    )
    arguments = parser.parse_args()
    if arguments.layer_elements < HIDDEN or arguments.layer_elements % HIDDEN:
        parser.error(f"--layer-elements: {arguments.layer_elements} is not a positive multiple of {HIDDEN}")
    job = Job(
        num_layers=arguments.layers,
        layer_elements=arguments.layer_elements,
        num_micro_batches=arguments.micro_batches,
        forward_seconds=arguments.forward_ms / 1e3,
        backward_seconds=arguments.backward_ms / 1e3,
        num_steps=arguments.steps,
    )
    load = os.getloadavg()[0]
    budget = None if arguments.host_memory is None else parse_bytes(arguments.host_memory)
    delays = arguments.delay or ([0.25] if arguments.clipping else [0.0, 0.25, 0.5, 1.0])
    runs = [Run(delay=delay) for delay in delays]
    if arguments.clipping:
        guessing = [
            Run(delay=delay, clip_norm=norm, clip_mode="speculative") for delay in delays for norm in (NEVER, ALWAYS)
        ]
        runs = [Run(delay=1.0, clip_norm=NEVER), *guessing]
    rows = measure(arguments.directory.absolute(), job, runs, host_memory_bytes=budget)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        show(rows, load)


if __name__ == "__main__":
    main()
