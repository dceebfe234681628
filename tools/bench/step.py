"""How close a training step comes to its limits: python -m hoist.tools.bench.step --directory /nvme

For each shape: hoist's step beside the same computation in memory (plain PyTorch, activation checkpointing, fused
AdamW) and beside the bytes that the step moves at the bandwidth measured in the same run. The two sides take turns.
The steps' timelines say for how much of a step neither the compute nor the io lane was busy.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store, initialised
from hoist.scheduler.executor import Span
from hoist.scheduler.models import build_model
from hoist.scheduler.ops import Lane
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.io.probe import measure_bandwidth
from hoist.tools.bench.shapes import add_model_options, batches, make_parser, model_config, parse_shape
from hoist.tools.sizes import parse_bytes, show_bytes

#: seq_len, micro_batch_size, num_micro_batches that are measured by default.
SHAPES = ((64, 1, 4), (64, 1, 16), (256, 2, 8))
#: Counted steps of each side before the other's turn.
STEPS_A_ROUND = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One shape's result. Times are medians in seconds."""

    seq_len: int
    micro_batch_size: int
    num_micro_batches: int
    hoist_seconds: float
    memory_seconds: float
    """The same computation in memory, AdamW included."""
    memory_compute_seconds: float
    """Of that, forward and backward alone."""
    io_seconds: float
    """Bytes read and written at the measured bandwidths, one after the other."""
    read_bytes: int
    written_bytes: int
    idle_share: float
    """Share of a step of hoist's in which neither the compute nor the io lane was busy; median over the steps."""
    timeline: tuple[str, ...]
    """The lanes during hoist's last counted step, drawn by :func:`draw_timeline`."""
    ratios: tuple[float, ...]
    """hoist's step over the larger of the same computation in memory and I/O, of each pair."""


def idle_share(spans: Sequence[Span], start: float, stop: float) -> float:
    """Share of ``start`` to ``stop`` in which neither a compute nor an io op was running."""
    parts = sorted((span.start, span.stop) for span in spans if span.op.lane in (Lane.COMPUTE, Lane.IO))
    covered, reached = 0.0, start
    for first, last in parts:
        first, last = max(first, reached), min(last, stop)
        if last > first:
            covered += last - first
            reached = last
    return 1.0 - covered / (stop - start)


def draw_timeline(spans: Sequence[Span], start: float, stop: float, *, columns: int = 72) -> list[str]:
    """One line a lane: a block where it was busy for most of the column's time, a dot for some of it."""
    width = (stop - start) / columns
    lines = []
    for lane in (Lane.COMPUTE, Lane.IO, Lane.OPTIM, Lane.COPY):
        busy = [0.0] * columns
        reached = start
        for first, last in sorted((span.start, span.stop) for span in spans if span.op.lane is lane):
            first, last = max(first, reached), min(last, stop)
            reached = max(reached, last)
            while first < last:
                column = min(columns - 1, int((first - start) / width))
                end = min(last, start + (column + 1) * width)
                if end <= first:  # rounding at a column's edge
                    break
                busy[column] += end - first
                first = end
        marks = "".join("#" if share > 0.5 * width else "." if share > 0.05 * width else " " for share in busy)
        lines.append(f"{lane.value:>8} |{marks}|")
    return lines


def measure(
    directory: Path,
    config: LlamaConfig,
    shape: tuple[int, int, int],
    *,
    host_memory_bytes: int,
    rounds: int,
    residency: float,
    delay: float = 0.0,
) -> Row:
    """Run ``rounds`` rounds: a few steps of hoist's, as many in memory."""
    seq_len, rows, count = shape
    warm_up()
    with choose_engine() as engine, tempfile.TemporaryDirectory(dir=directory, prefix="bench-step-") as folder:
        bandwidth = measure_bandwidth(Path(folder), engine)
        staged = split(build_model(config))
        options = TrainerConfig(
            host_memory_bytes=host_memory_bytes,
            micro_batch_size=rows,
            seq_len=seq_len,
            num_micro_batches=count,
            optimizer=AdamWHyperparameters(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
            schedule=Schedule(kind="constant", lr=1e-4, num_steps=rounds * (STEPS_A_ROUND + 1)),
            residency=residency,
            resident_weights=residency > 0.0,
            delay=delay,
        )
        setup = prepare(staged, lay_out_stages(staged), options)
        store = create_store(
            Path(folder) / "store", model=staged, setup=setup, engine=engine, source=initialised(0), attributes={}
        )
        hoist_times: list[float] = []
        memory_times: list[tuple[float, float]] = []
        timelines: list[float] = []
        metrics = []
        drawn: list[str] = []
        reference = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        reference.activation_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        feed = batches(config, shape)
        in_memory(reference, optimizer, next(feed))
        with (
            store,
            Trainer(model=staged, store=store, engine=engine, config=options, setup=setup) as trainer,
        ):
            for _ in range(rounds):
                for number in range(STEPS_A_ROUND + 1):
                    began = time.perf_counter()
                    step = trainer.step(next(feed))
                    stopped = time.perf_counter()
                    if number:  # the first has no step before it to overlap with
                        hoist_times.append(stopped - began)
                        metrics.append(step)
                        timelines.append(idle_share(trainer.last_spans, began, stopped))
                        drawn = draw_timeline(trainer.last_spans, began, stopped)
                trainer.wait()
                memory_times += [in_memory(reference, optimizer, next(feed)) for _ in range(STEPS_A_ROUND)]
    read_bytes = int(statistics.median(step.nvme_read_bytes for step in metrics))
    written_bytes = int(statistics.median(step.nvme_written_bytes for step in metrics))
    io_seconds = read_bytes / bandwidth.read_bytes_per_second + written_bytes / bandwidth.write_bytes_per_second
    return Row(
        seq_len=seq_len,
        micro_batch_size=rows,
        num_micro_batches=count,
        hoist_seconds=statistics.median(hoist_times),
        memory_seconds=statistics.median(whole for whole, _ in memory_times),
        memory_compute_seconds=statistics.median(compute for _, compute in memory_times),
        io_seconds=io_seconds,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        idle_share=statistics.median(timelines),
        timeline=tuple(drawn),
        ratios=tuple(
            ours / max(theirs, io_seconds) for ours, (theirs, _) in zip(hoist_times, memory_times, strict=True)
        ),
    )


def in_memory(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: Sequence[dict[str, torch.Tensor]]
) -> tuple[float, float]:
    """One step in memory: (seconds in all, seconds of forward and backward)."""
    began = time.perf_counter()
    num_items = sum(batch["labels"][:, 1:].numel() for batch in step)
    for batch in step:
        model(**batch, num_items_in_batch=num_items, use_cache=False).loss.backward()
    computed = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - began, computed - began


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(title="a training step against its limits (medians)")
    columns = ("seq x B x M", "hoist", "in memory", "of it compute", "I/O alone", "ratio", "idle", "read", "written")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.seq_len} x {row.micro_batch_size} x {row.num_micro_batches}",
            f"{row.hoist_seconds:.2f} s",
            f"{row.memory_seconds:.2f} s",
            f"{row.memory_compute_seconds:.2f} s",
            f"{row.io_seconds:.2f} s",
            f"{statistics.median(row.ratios):.3f}",
            f"{row.idle_share:.1%}",
            show_bytes(row.read_bytes),
            show_bytes(row.written_bytes),
        )
    console = Console()
    console.print(table)
    for row in rows:
        console.print(f"\nlanes of one step, seq {row.seq_len} x {row.micro_batch_size} x {row.num_micro_batches}:")
        for line in row.timeline:
            console.print(line, markup=False, highlight=False)


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser("step", __doc__)
    add_model_options(parser, host_memory="256MiB", hidden=1024, layers=8)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of three steps of each side")
    parser.add_argument("--shape", action="append", help="seq,B,M; repeat for more; default: 64,1,4 64,1,16 256,2,8")
    parser.add_argument("--residency", type=float, default=1.0, help="largest share of the states kept in memory")
    parser.add_argument("--delay", type=float, default=0.0, help="share of updates that wait for the next forward")
    arguments = parser.parse_args()
    config = model_config(hidden=arguments.hidden, layers=arguments.layers, vocab=arguments.vocab)
    shapes = [parse_shape(text) for text in arguments.shape] if arguments.shape else list(SHAPES)
    rows = [
        measure(
            arguments.directory.absolute(),
            config,
            shape,
            host_memory_bytes=parse_bytes(arguments.host_memory),
            rounds=arguments.rounds,
            residency=arguments.residency,
            delay=arguments.delay,
        )
        for shape in shapes
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
