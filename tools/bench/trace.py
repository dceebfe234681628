"""For developers: what a trace costs. python -m hoist.tools.bench.trace --directory /nvme

Two trainers of the same model, one with a trace and one without, take turns, a step each, and then in the other order.
Wall time varies with the machine; the processor time of noting an op, measured alone, and of making and writing its
events, measured in these steps, hardly does.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from transformers import LlamaConfig

from hoist.scheduler.annotate import OpNames
from hoist.scheduler.batches import Batch
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.executor import Done, Handler, Mark
from hoist.scheduler.link import LinkedPlan, link
from hoist.scheduler.models import build_model
from hoist.scheduler.ops import Lane, Op
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import split
from hoist.scheduler.step_plans import steady_plan
from hoist.scheduler.trace import Trace
from hoist.scheduler.traced import Traced
from hoist.scheduler.trainer import Trainer
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.manager import Tier
from hoist.tools.bench.developing import add_model_options, make_parser, new_store, parse_shape
from hoist.tools.bench.shapes import batches, model_config
from hoist.tools.bench.turns import trainer_config
from hoist.tools.sizes import parse_bytes, show_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    """Of one step."""

    seconds: float
    processor_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was measured. A step ends when its updates have."""

    num_pairs: int
    plain_seconds: float
    """A step without a trace; median."""
    traced_seconds: float
    """A step with one; median."""
    ratio: float
    """Wall time of a traced step over that of the plain one beside it; median over the pairs."""
    ratio_quartiles: tuple[float, float]
    processor_ratio: float
    """Processor time of all threads, the same way."""
    processor_quartiles: tuple[float, float]
    trace_bytes_per_step: int
    ops_per_step: int
    events_per_step: int
    """Slices, ends of arrows, values of counters."""
    noting_op_seconds: float
    """Processor time that noting adds to an op on its lane, alone on the machine."""
    writing_op_seconds: float
    """Processor time, in the thread that writes, of an op's events."""


class _Nothing:
    """Ops that do nothing."""

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> None:
        return

    def start(self, op: Op, step: int, done: Done) -> None:
        done(None)


def noting_seconds(linked: LinkedPlan, names: OpNames, path: Path, *, num_steps: int = 20) -> float:
    """Processor time that noting adds to an op of a plan whose ops do nothing: median over some steps."""
    held = dict.fromkeys(Tier, 0)

    def taken(handler: Handler, step: int) -> float:
        began = time.thread_time()
        for op in linked.plan.ops:
            if op.lane is Lane.IO:
                handler.start(op, step, lambda error: None)
            else:
                handler.run(op, step)
        return time.thread_time() - began

    found = []
    with Trace(path) as trace:
        plain = _Nothing()
        traced = Traced(trace, plain, names=names, io_bytes=lambda op: 1, held=lambda: tuple(held.values()))
        for step in range(num_steps):
            traced.begin(linked, step)
            found.append(taken(traced, step) - taken(plain, step))
            trace.flush()
    return statistics.median(found) / len(linked.plan.ops)


def measure(
    directory: Path,
    *,
    host_memory_bytes: int,
    hidden: int,
    layers: int,
    vocab: int,
    shape: tuple[int, int, int],
    pairs: int,
) -> Result:
    """Run ``pairs`` steps of each side, in turns."""
    config = model_config(hidden=hidden, layers=layers, vocab=vocab)
    seq_len, rows, count = shape
    warm_up()
    feed = batches(config, shape)
    with ExitStack() as cleanup:
        engine = cleanup.enter_context(choose_engine())
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix="bench-trace-")))
        base = trainer_config(
            seq_len=seq_len, micro_batch_size=rows, num_micro_batches=count, host_memory_bytes=host_memory_bytes
        )
        options = replace(base, status_seconds=1.0)
        path = folder / "trace.json"
        trace = cleanup.enter_context(Trace(path))
        plain, traced = (
            cleanup.enter_context(_trainer(folder / name, config, options, engine, each))
            for name, each in (("plain", None), ("traced", trace))
        )
        _step(plain, next(feed), None)
        _step(traced, next(feed), trace)
        before, before_events = trace.statistics(), _num_events(path)
        without: list[_Times] = []
        with_it: list[_Times] = []
        for pair in range(pairs):
            batch = next(feed)
            if pair % 2:
                without.append(_step(plain, batch, None))
            with_it.append(_step(traced, batch, trace))
            if not pair % 2:
                without.append(_step(plain, batch, None))
        after, num_events = trace.statistics(), _num_events(path) - before_events
        staged = split(build_model(config))
        setup = prepare(staged, lay_out_stages(staged), options)
        linked = link(steady_plan(setup, options))
        pieces = [layout.pieces(setup.memory.piece_elements) for layout in setup.layouts]
        noting = noting_seconds(linked, OpNames([each.name for each in setup.layouts], pieces), folder / "alone.json")
    wall = [theirs.seconds / own.seconds for theirs, own in zip(with_it, without, strict=True)]
    processor = [theirs.processor_seconds / own.processor_seconds for theirs, own in zip(with_it, without, strict=True)]
    return Result(
        num_pairs=pairs,
        plain_seconds=statistics.median(own.seconds for own in without),
        traced_seconds=statistics.median(theirs.seconds for theirs in with_it),
        ratio=statistics.median(wall),
        ratio_quartiles=_quartiles(wall),
        processor_ratio=statistics.median(processor),
        processor_quartiles=_quartiles(processor),
        trace_bytes_per_step=(after.num_bytes - before.num_bytes) // pairs,
        ops_per_step=len(linked.plan.ops),
        events_per_step=num_events // pairs,
        noting_op_seconds=noting,
        writing_op_seconds=(after.processor_seconds - before.processor_seconds) / pairs / len(linked.plan.ops),
    )


def _num_events(path: Path) -> int:
    """Of a file that has no end yet: one a line, after the first."""
    return path.read_bytes().count(b"\n")


@contextmanager
def _trainer(
    directory: Path, config: LlamaConfig, options: TrainerConfig, engine: IoEngine, trace: Trace | None
) -> Iterator[Trainer]:
    """A trainer on a new store."""
    staged = split(build_model(config))
    with (
        new_store(directory, staged, options, engine) as (store, setup),
        Trainer(model=staged, store=store, engine=engine, config=options, setup=setup, trace=trace) as trainer,
    ):
        yield trainer


def _step(trainer: Trainer, batch: Sequence[Batch], trace: Trace | None) -> _Times:
    """A step with its updates and, if there is a trace, until all of it is written."""
    began, processor_began = time.perf_counter(), time.process_time()
    trainer.step(batch)
    trainer.wait()
    if trace is not None:
        trace.flush()
    return _Times(
        seconds=time.perf_counter() - began, processor_seconds=time.process_time() - processor_began
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def show(result: Result) -> None:
    """Print what was found."""
    console = Console()
    console.print(
        f"a step: {result.plain_seconds:.3f} s without a trace, {result.traced_seconds:.3f} s with one "
        f"(medians of {result.num_pairs}); the trace has {show_bytes(result.trace_bytes_per_step)} a step, "
        f"{result.events_per_step} events of {result.ops_per_step} ops",
        highlight=False, soft_wrap=True,
    )
    own, theirs = 1e6 * result.noting_op_seconds, 1e6 * result.writing_op_seconds
    share = result.events_per_step / result.ops_per_step
    console.print(
        f"processor time: noting {own:.1f} us an op ({own / share:.2f} an event), alone; "
        f"writing {theirs:.1f} us an op ({theirs / share:.2f} an event)",
        highlight=False, soft_wrap=True,
    )
    for what, ratio, (low, high) in (
        ("wall time", result.ratio, result.ratio_quartiles),
        ("processor time", result.processor_ratio, result.processor_quartiles),
    ):
        console.print(
            f"{what}: {ratio - 1:+.1%} with a trace (median of pairs; half of them {low - 1:+.1%} to {high - 1:+.1%})",
            highlight=False, soft_wrap=True,
        )


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser("trace", __doc__)
    add_model_options(parser, host_memory="96MiB", hidden=512, layers=6)
    parser.add_argument("--shape", default="64,2,4", help="seq,B,M")
    parser.add_argument("--pairs", type=int, default=20, help="steps of each side")
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error(f"--pairs: {arguments.pairs} is too few; quartiles need 2")
    result = measure(
        arguments.directory.absolute(),
        host_memory_bytes=parse_bytes(arguments.host_memory),
        hidden=arguments.hidden,
        layers=arguments.layers,
        vocab=arguments.vocab,
        shape=parse_shape(arguments.shape),
        pairs=arguments.pairs,
    )
    if arguments.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
