"""How well steps are predicted: python -m hoist.tools.bench_prediction --directory /nvme

For each case: the prediction made before the first step, as `hoist train` makes it, beside the median of the steps that
follow, and the bytes of both. Nothing is fitted to the steps. Other work on the machine disturbs both, at other times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store, initialised
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.models import build_model
from hoist.scheduler.preflight import DrivePlace, Prediction, predict
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.choose import choose_engine
from hoist.tools.bench_step import batches, model_config
from hoist.tools.sizes import parse_bytes, show_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run to predict: a Llama shape, a micro-batch and how it is trained."""

    name: str
    hidden: int
    layers: int
    vocab: int
    seq_len: int
    micro_batch_size: int
    num_micro_batches: int
    host_memory: str
    delay: float = 0.0
    residency: float = 1.0


#: What is measured by default: bound by computation, by I/O and in between; with delays, and with states in memory.
CASES = (
    Case(name="compute", hidden=512, layers=6, vocab=4096, seq_len=256, micro_batch_size=2, num_micro_batches=4,
         host_memory="160MiB"),
    Case(name="compute, half delayed", hidden=512, layers=6, vocab=4096, seq_len=256, micro_batch_size=2,
         num_micro_batches=4, host_memory="160MiB", delay=0.5),
    Case(name="balanced", hidden=768, layers=6, vocab=4096, seq_len=64, micro_batch_size=1, num_micro_batches=4,
         host_memory="160MiB", residency=0.0),
    Case(name="i/o", hidden=1024, layers=6, vocab=4096, seq_len=32, micro_batch_size=1, num_micro_batches=1,
         host_memory="256MiB", residency=0.0),
    Case(name="i/o, all delayed", hidden=1024, layers=6, vocab=4096, seq_len=32, micro_batch_size=1,
         num_micro_batches=1, host_memory="256MiB", residency=0.0, delay=1.0),
    Case(name="i/o, some states kept", hidden=1024, layers=6, vocab=4096, seq_len=32, micro_batch_size=1,
         num_micro_batches=1, host_memory="640MiB"),
    Case(name="all states kept", hidden=768, layers=6, vocab=4096, seq_len=64, micro_batch_size=1,
         num_micro_batches=2, host_memory="2GiB"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case's result."""

    case: Case
    predicted_seconds: float
    measured_seconds: float
    """Median of the steps."""
    step_seconds: tuple[float, ...]
    """Each of them."""
    predicted_bytes: tuple[int, int]
    """Read and written, a step."""
    measured_bytes: tuple[int, int]
    """Means over the steps."""
    bound_by: str
    preflight_seconds: float
    """What measuring and predicting took."""
    prediction: Prediction

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_seconds / self.measured_seconds - 1.0


def measure(directory: Path, case: Case, *, seconds: float) -> Row:
    """Predict, then run steps for so long (5 at least, after two that warm up)."""
    warm_up()
    config = model_config(hidden=case.hidden, layers=case.layers, vocab=case.vocab)
    with choose_engine() as engine, tempfile.TemporaryDirectory(dir=directory, prefix="bench-prediction-") as folder:
        staged = split(build_model(config))
        options = TrainerConfig(
            host_memory_bytes=parse_bytes(case.host_memory),
            micro_batch_size=case.micro_batch_size,
            seq_len=case.seq_len,
            num_micro_batches=case.num_micro_batches,
            optimizer=AdamWHyperparameters(lr=1e-4),
            schedule=Schedule(kind="constant", lr=1e-4, num_steps=10**6),
            delay=case.delay,
            residency=case.residency,
            resident_weights=case.residency > 0.0,
            commit_every=10**6,
        )
        setup = prepare(staged, lay_out_stages(staged), options)
        began = time.perf_counter()
        prediction, _ = predict(staged, setup, options, engine=engine, drives=[DrivePlace(directory=Path(folder))])
        preflight_seconds = time.perf_counter() - began
        store = create_store(
            Path(folder) / "store", model=staged, setup=setup, engine=engine, source=initialised(0), attributes={}
        )
        feed = batches(config, (case.seq_len, case.micro_batch_size, case.num_micro_batches))
        found: list[StepMetrics] = []
        with store, Trainer(model=staged, store=store, engine=engine, config=options, setup=setup) as trainer:
            for _ in range(2):
                trainer.step(next(feed))
            began = time.perf_counter()
            while len(found) < 5 or time.perf_counter() - began < seconds:
                found.append(trainer.step(next(feed)))
    return Row(
        case=case,
        predicted_seconds=prediction.seconds,
        measured_seconds=statistics.median(step.seconds for step in found),
        step_seconds=tuple(step.seconds for step in found),
        predicted_bytes=(prediction.read_bytes, prediction.written_bytes),
        measured_bytes=(
            int(statistics.mean(step.nvme_read_bytes for step in found)),
            int(statistics.mean(step.nvme_written_bytes for step in found)),
        ),
        bound_by=prediction.bound_by,
        preflight_seconds=preflight_seconds,
        prediction=prediction,
    )


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title="a step, predicted and measured (medians)")
    columns = ("case", "seq x B x M", "predicted", "measured", "error", "bound by", "i/o alone", "computing", "read",
               "written", "preflight")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        case = row.case
        table.add_row(
            case.name,
            f"{case.seq_len} x {case.micro_batch_size} x {case.num_micro_batches}",
            f"{row.predicted_seconds:.3f} s",
            f"{row.measured_seconds:.3f} s",
            f"{row.error:+.0%}",
            row.bound_by,
            f"{row.prediction.io_seconds:.3f} s",
            f"{row.prediction.compute_seconds:.3f} s",
            show_bytes(row.predicted_bytes[0]),
            show_bytes(row.predicted_bytes[1]),
            f"{row.preflight_seconds:.1f} s",
        )
    console = Console(width=140)
    console.print(table)
    errors = [abs(row.error) for row in rows]
    console.print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="where stores are made (and removed)")
    parser.add_argument("--case", action="append", help="names of cases; default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="time of each case's steps")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    known = {case.name: case for case in CASES}
    unknown = set(arguments.case or ()) - known.keys()
    if unknown:
        parser.error(f"--case: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    rows = [
        measure(arguments.directory.absolute(), case, seconds=arguments.seconds)
        for case in CASES
        if not arguments.case or case.name in arguments.case
    ]
    if arguments.json:
        print(json.dumps([{**asdict(row), "error": row.error} for row in rows], indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
