"""For developers: how well steps are predicted. python -m hoist.tools.bench.prediction --directory /nvme

For each case: the prediction that `hoist train` makes before the first step, beside the steps, and the bytes of both.
Nothing is fitted to the steps. The two take turns, as other work on the machine disturbs both; medians are compared.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.models import build_model
from hoist.scheduler.preflight import DrivePlace, Prediction, predict
from hoist.scheduler.stages import split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.choose import choose_engine
from hoist.tools.bench.developing import make_parser, new_store
from hoist.tools.bench.shapes import batches, model_config
from hoist.tools.bench.turns import trainer_config
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
    Case(name="compute", hidden=384, layers=4, vocab=2048, seq_len=256, micro_batch_size=2, num_micro_batches=4,
         host_memory="96MiB"),
    Case(name="compute, half delayed", hidden=384, layers=4, vocab=2048, seq_len=256, micro_batch_size=2,
         num_micro_batches=4, host_memory="96MiB", delay=0.5),
    Case(name="balanced", hidden=512, layers=4, vocab=2048, seq_len=64, micro_batch_size=1, num_micro_batches=2,
         host_memory="96MiB", residency=0.0),
    Case(name="i/o", hidden=768, layers=4, vocab=2048, seq_len=32, micro_batch_size=1, num_micro_batches=1,
         host_memory="128MiB", residency=0.0),
    Case(name="i/o, all delayed", hidden=768, layers=4, vocab=2048, seq_len=32, micro_batch_size=1,
         num_micro_batches=1, host_memory="128MiB", residency=0.0, delay=1.0),
    Case(name="i/o, some states kept", hidden=768, layers=4, vocab=2048, seq_len=32, micro_batch_size=1,
         num_micro_batches=1, host_memory="320MiB"),
    Case(name="all states kept", hidden=512, layers=4, vocab=2048, seq_len=64, micro_batch_size=1,
         num_micro_batches=2, host_memory="1GiB"),
)  # fmt: skip


#: Steps of a round that do not count, since the one before them was not like theirs; and those that do.
UNSTEADY_STEPS, STEPS_A_ROUND = 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case's result."""

    case: Case
    predicted_seconds: float
    """Median of the predictions."""
    predictions: tuple[float, ...]
    """Each of them."""
    measured_seconds: float
    """Median of the steps."""
    step_seconds: tuple[float, ...]
    """Each of them."""
    busy_seconds: dict[str, float]
    """Per lane, median of the steps."""
    predicted_bytes: tuple[int, int]
    """Read and written, a step."""
    measured_bytes: tuple[int, int]
    """Means over the steps."""
    bound_by: str
    preflight_seconds: float
    """What measuring and predicting took."""
    prediction: Prediction
    """The one of the median."""

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_seconds / self.measured_seconds - 1.0


def measure(directory: Path, case: Case, *, rounds: int) -> Row:
    """Predict and run a few steps, in turn. The predictions have a model of their own, of which no trainer is made."""
    warm_up()
    config = model_config(hidden=case.hidden, layers=case.layers, vocab=case.vocab)
    with choose_engine() as engine, tempfile.TemporaryDirectory(dir=directory, prefix="bench-prediction-") as folder:
        staged, other = split(build_model(config)), split(build_model(config))
        base = trainer_config(
            seq_len=case.seq_len, micro_batch_size=case.micro_batch_size, num_micro_batches=case.num_micro_batches,
            host_memory_bytes=parse_bytes(case.host_memory),
        )  # fmt: skip
        options = replace(
            base, delay=case.delay, residency=case.residency, resident_weights=case.residency > 0.0, status_seconds=1.0
        )
        feed = batches(config, (case.seq_len, case.micro_batch_size, case.num_micro_batches))
        found: list[StepMetrics] = []
        predictions: list[Prediction] = []
        preflight_seconds: list[float] = []
        with (
            new_store(Path(folder) / "store", staged, options, engine) as (store, setup),
            Trainer(model=staged, store=store, engine=engine, config=options, setup=setup) as trainer,
        ):
            for _ in range(rounds):
                began = time.perf_counter()
                made, _ = predict(other, setup, options, engine=engine, drives=[DrivePlace(directory=Path(folder))])
                preflight_seconds.append(time.perf_counter() - began)
                predictions.append(made)
                for number in range(UNSTEADY_STEPS + STEPS_A_ROUND):
                    step = trainer.step(next(feed))
                    if number >= UNSTEADY_STEPS:
                        found.append(step)
                trainer.wait()
    prediction = sorted(predictions, key=lambda each: each.seconds)[len(predictions) // 2]
    return Row(
        case=case,
        predicted_seconds=prediction.seconds,
        predictions=tuple(each.seconds for each in predictions),
        measured_seconds=statistics.median(step.seconds for step in found),
        step_seconds=tuple(step.seconds for step in found),
        busy_seconds={
            lane: statistics.median(step.busy_seconds[lane] for step in found) for lane in found[0].busy_seconds
        },
        predicted_bytes=(prediction.read_bytes, prediction.written_bytes),
        measured_bytes=(
            int(statistics.mean(step.nvme_read_bytes for step in found)),
            int(statistics.mean(step.nvme_written_bytes for step in found)),
        ),
        bound_by=prediction.bound_by,
        preflight_seconds=statistics.median(preflight_seconds),
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
    parser = make_parser("prediction", __doc__)
    parser.add_argument("--case", action="append", help="names of cases; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="a prediction and a few steps, so often")
    arguments = parser.parse_args()
    known = {case.name: case for case in CASES}
    unknown = set(arguments.case or ()) - known.keys()
    if unknown:
        parser.error(f"--case: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    rows = [
        measure(arguments.directory.absolute(), case, rounds=arguments.rounds)
        for case in CASES
        if not arguments.case or case.name in arguments.case
    ]
    if arguments.json:
        print(json.dumps([{**asdict(row), "error": row.error} for row in rows], indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
