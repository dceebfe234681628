"""`hoist bench sleep`: how well a step hides I/O and updates behind computing, shown by layers that sleep.

An accelerator's time passes and no processor is used; everything else is real. A step is put beside the larger of the
sleep in it and its I/O alone. What the layers are: `sides/sleeping.py`; with real computing: `step.py`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import LlamaForCausalLM

from hoist.optim import AdamWHyperparameters
from hoist.scheduler import memory
from hoist.scheduler.config import ClipMode, TrainerConfig
from hoist.scheduler.creation import create_store
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import Stage, StagedModel, split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.io.mixed import MixedSpeed, measure_mixed
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS, MAX_CHUNK_ELEMENTS, round_up
from hoist.tiers.store import Store
from hoist.tools.bench.lanes import LANES
from hoist.tools.bench.losses import LOSS_BOUND, check_losses
from hoist.tools.bench.machine import load_note, look
from hoist.tools.bench.outcome import Column, Outcome, column_texts
from hoist.tools.bench.places import temporary_folder
from hoist.tools.bench.rounds import Spread, interleaved, ratios
from hoist.tools.bench.shapes import check_sleep
from hoist.tools.bench.sides.in_memory import adamw, one_step
from hoist.tools.bench.sides.job import Sleep
from hoist.tools.bench.sides.sleeping import (
    HIDDEN,
    VOCAB,
    Spent,
    Watch,
    initial_weight,
    let_layers_sleep,
    sleeping_config,
)
from hoist.tools.bench.sleep_presets import Preset, bytes_here, figures, in_words, scaled
from hoist.tools.bench.turns import Step, Turn, moved_bytes, take_turn, trainer_config
from hoist.tools.errors import BenchError

SEQ_LEN = 8
#: Chunks of a layer: a delay is rounded to whole ones.
CHUNKS_PER_LAYER = 8
#: Times the smallest budget that works, where none is given.
BUDGET_FACTOR = 2.0
#: Norms that no step's gradients reach, and that all of them exceed.
NEVER, ALWAYS = 1e9, 1e-9
_OPTIMIZER = AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How hoist trains. The result must be the same for all with one ``clip_norm``."""

    delay: float = 0.0
    clip_norm: float = 0.0
    clip_mode: ClipMode = "exact"

    @property
    def clipping(self) -> str | None:
        """For people; None without."""
        if not self.clip_norm:
            return None
        if self.clip_mode == "exact":
            return "exact"
        return "guess wrong" if self.clip_norm == ALWAYS else "guess right"


def clipping_runs(delays: Sequence[float]) -> list[Run]:
    """Exact clipping, which delays everything, and speculative clipping with guesses all right, then all wrong."""
    guesses = [
        Run(delay=delay, clip_norm=norm, clip_mode="speculative") for delay in delays for norm in (NEVER, ALWAYS)
    ]
    return [Run(delay=1.0, clip_norm=NEVER), *guesses]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row: how much is done, and how."""

    num_micro_batches: int
    run: Run
    host_memory_bytes: int

    @property
    def name(self) -> str:
        """For messages."""
        clipping = f", clipping: {self.run.clipping}" if self.run.clipping else ""
        return f"{self.num_micro_batches} micro-batches, delay {self.run.delay:g}{clipping}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepTurn:
    """Some steps of one case."""

    turn: Turn
    spent: Spent
    """In layers, in the counted steps."""
    io: MixedSpeed
    """As many bytes as a step moves, alone, right after the turn."""

    @property
    def io_seconds(self) -> float:
        """I/O alone; no more than the io lane was busy, where the drive did better in a step than in the probe."""
        return min(self.io.seconds, statistics.median(one.busy_seconds["io"] for one in self.turn.metrics))


def run(
    directory: Path,
    sleep: Sleep,
    *,
    micro_batches: Sequence[int],
    runs: Sequence[Run],
    host_memory_bytes: Sequence[int] = (),
    rounds: int = 3,
    num_steps: int = 3,
    lanes: bool = False,
    preset: tuple[str, Preset] | None = None,
    command: str = "hoist bench sleep",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Train every case ``num_steps`` counted steps a round, from the same weights each time, in a temporary store.

    The cases are all of ``micro_batches`` x ``host_memory_bytes`` (none: ``BUDGET_FACTOR`` times the smallest that
    works) x ``runs``. ``preset`` (its name, and what it is) replaces the times in ``sleep`` by those of its machine,
    scaled to this drive. ``lanes`` adds those of each case's last step, drawn, to its row. ``progress`` may raise to
    stop; nothing is left behind then. Raises ConfigError for a layer that cannot be, BudgetError for a budget too
    small, BenchError where losses are not those of plain PyTorch, or a preset's drive is none.
    """
    check_sleep(sleep)
    machine = look(directory)
    notes = load_note(machine)
    settings: dict[str, Any] = {"rounds": rounds, "steps": num_steps, "seq_len": SEQ_LEN, "preset": None}
    warm_up()
    with choose_engine() as engine, temporary_folder(directory) as folder:
        if preset is not None:
            name, named = preset
            io = _layer_io(folder, engine, sleep)
            found = scaled(named, layer_elements=sleep.layer_elements, io_seconds=io)
            sleep = replace(sleep, forward_seconds=found.forward_seconds, backward_seconds=found.backward_seconds)
            settings["preset"] = {"name": name, **figures(named, found)}
            notes.append(in_words(name, named, found))
        with _prepared(folder, engine, sleep, micro_batches, runs, host_memory_bytes) as (make_turn, cases):
            done, total = 0, rounds * len(cases) * (num_steps + 1)

            def tick() -> None:
                nonlocal done
                progress(done, total)
                done += 1

            turns = interleaved({case: partial(make_turn, case, num_steps, tick) for case in cases}, rounds)
        progress(total, total)
    for case in cases:
        expected = losses_in_memory(sleep, case.num_micro_batches, num_steps + 1, clip_norm=case.run.clip_norm)
        for one in turns[case]:
            check_losses({case.name: one.turn.losses}, {"plain PyTorch": expected}, bound=LOSS_BOUND)
    rows = [_row(case, turns[case], sleep, lanes=lanes) for case in cases]
    late, calls = (sum(row[key] for row in rows) for key in ("late_calls", "calls"))
    if late:
        most_ms = 1e3 * max(row["most_late_seconds"] for row in rows)
        notes.append(
            f"{late} of {calls} forwards and backwards of layers took longer than they should have, {most_ms:.1f} ms "
            "at most: the processor had too much to do"
        )
    if not all(row["direct"] for row in rows):
        notes.append("I/O went through the page cache here: its seconds are not the drive's, so there is no ratio")
    return Outcome(
        name="sleep",
        about=(
            f"a step of {sleep.num_layers} layers of {sleep.layer_elements / 1e6:.3g} M parameters in float32 that "
            f"sleep {sleep.forward_seconds * 1e3:.4g} ms forward and {sleep.backward_seconds * 1e3:.4g} ms backward, "
            f"recomputed, against the larger of its sleep and its I/O alone; {rounds} interleaved rounds of "
            f"{num_steps} steps; all losses are those of plain PyTorch in memory"
        ),
        command=command,
        machine=machine,
        settings={
            **settings,
            "num_layers": sleep.num_layers,
            "layer_elements": sleep.layer_elements,
            "forward_seconds": sleep.forward_seconds,
            "backward_seconds": sleep.backward_seconds,
            "loss_bound_ratio": LOSS_BOUND,
        },
        columns=_columns(clipping=any(run.clip_norm for run in runs)),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def sleep_seconds(sleep: Sleep, num_micro_batches: int) -> float:
    """Sleep in one step: every layer's forward twice, as the backward repeats it, and its backward once."""
    return sleep.num_layers * num_micro_batches * (2 * sleep.forward_seconds + sleep.backward_seconds)


def step_of(number: int, num_micro_batches: int) -> Step:
    """The micro-batches of a step: int64 ids [1, SEQ_LEN], which are the labels, too."""
    generator = torch.Generator().manual_seed(number)
    batches = []
    for _ in range(num_micro_batches):
        ids = torch.randint(0, VOCAB, (1, SEQ_LEN), generator=generator)
        batches.append({"input_ids": ids, "labels": ids})
    return batches


def losses_in_memory(
    sleep: Sleep, num_micro_batches: int, num_steps: int, *, clip_norm: float = 0.0, lr: float = _OPTIMIZER.lr
) -> list[float]:
    """Every step's loss in plain PyTorch, in memory, without sleep.

    Rows of a layer's weight that no token uses are left out: they have no gradient and no decay, so they never change.
    """
    used = replace(
        sleep,
        layer_elements=min(sleep.layer_elements, SEQ_LEN * HIDDEN), forward_seconds=0.0, backward_seconds=0.0,
    )  # fmt: skip
    model = LlamaForCausalLM(sleeping_config(used)).train()
    let_layers_sleep(model, used, device="cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            shape = tuple(weight.shape)
            if name.startswith("model.layers."):
                shape = (sleep.layer_elements // HIDDEN, HIDDEN)
            weight.copy_(initial_weight(name, shape, seed=0)[: weight.shape[0]])
    optimizer = adamw(model, replace(_OPTIMIZER, lr=lr))
    steps = ([batch["input_ids"] for batch in step_of(number, num_micro_batches)] for number in range(num_steps))
    return [one_step(model, optimizer, step, clip_norm=clip_norm) for step in steps]


def _layer_io(folder: Path, engine: IoEngine, sleep: Sleep) -> float:
    """Seconds of I/O of one layer in a step with nothing kept: the median of three measurements of the whole model."""
    read, written = (sleep.num_layers * num_bytes for num_bytes in bytes_here(sleep.layer_elements))
    measured = [measure_mixed(folder, engine, read_bytes=read, written_bytes=written) for _ in range(3)]
    if not all(one.direct for one in measured):
        raise BenchError("--preset: I/O goes through the page cache here, so no drive is measured; name one on a drive")
    return statistics.median(one.seconds for one in measured) / sleep.num_layers


def _sleeping_model(sleep: Sleep) -> tuple[StagedModel, Watch]:
    model = build_model(sleeping_config(sleep))
    watch = let_layers_sleep(model, sleep)
    return split(model), watch


def _fill(stage: Stage, values: Mapping[str, Tensor], _staging: Tensor) -> None:
    for name, value in values.items():
        value.copy_(initial_weight(name, value.shape, seed=0))


def _feed(num_micro_batches: int, tick: Callable[[], None]) -> Iterator[Step]:
    """The same steps each time; ``tick`` is called before each, and may raise to stop."""
    for number in itertools.count():
        tick()
        yield step_of(number, num_micro_batches)


#: Takes a case, its number of counted steps, and what is called before each step.
MakeTurn = Callable[[Case, int, Callable[[], None]], SleepTurn]


@contextmanager
def _prepared(
    folder: Path,
    engine: IoEngine,
    sleep: Sleep,
    micro_batches: Sequence[int],
    runs: Sequence[Run],
    budgets: Sequence[int],
) -> Iterator[tuple[MakeTurn, list[Case]]]:
    """A store at step 0 with room for every case, what makes a turn in it, and the cases."""
    staged, watch = _sleeping_model(sleep)
    chunk_elements = round_up(-(-sleep.layer_elements // CHUNKS_PER_LAYER), CHUNK_QUANTUM_ELEMENTS)
    layouts = lay_out_stages(staged, max_chunk_elements=min(chunk_elements, MAX_CHUNK_ELEMENTS))
    cases: list[Case] = []
    for count in micro_batches:
        given = budgets
        if not given:
            roomy = _config(Case(num_micro_batches=count, run=Run(delay=1.0), host_memory_bytes=2**50))
            demand = prepare(staged, layouts, roomy).memory.demand
            given = [int(BUDGET_FACTOR * memory.smallest(demand).need_bytes)]
        cases += [
            Case(num_micro_batches=count, run=one, host_memory_bytes=budget) for budget in given for one in runs
        ]
    setups = {case: prepare(staged, layouts, _config(case)) for case in cases}
    largest = max(setups.values(), key=lambda setup: (setup.num_slots, setup.scratch_bytes))
    store = folder / "store"
    create_store(store, model=staged, setup=largest, engine=engine, source=_fill, attributes={}).close()

    def make_turn(case: Case, num_steps: int, tick: Callable[[], None]) -> SleepTurn:
        with (
            Store.open(store, engine=engine) as opened,
            Trainer(
                model=staged, store=opened, engine=engine, config=_config(case), setup=setups[case]
            ) as trainer,
        ):  # fmt: skip
            turn = take_turn(trainer, _feed(case.num_micro_batches, tick), num_steps, begin=watch.forget)
            spent = watch.take()
            read, written = moved_bytes(turn.metrics)
            io = measure_mixed(folder, engine, read_bytes=read, written_bytes=written)
            return SleepTurn(turn=turn, spent=spent, io=io)

    yield make_turn, cases


def _config(case: Case) -> TrainerConfig:
    """No commit falls due: every turn begins at the one that made the store."""
    base = trainer_config(
        seq_len=SEQ_LEN, micro_batch_size=1, num_micro_batches=case.num_micro_batches,
        host_memory_bytes=case.host_memory_bytes, optimizer=_OPTIMIZER,
    )  # fmt: skip
    return replace(base, delay=case.run.delay, clip_norm=case.run.clip_norm, clip_mode=case.run.clip_mode)


def _row(case: Case, turns: Sequence[SleepTurn], sleep: Sleep, *, lanes: bool) -> dict[str, Any]:
    count = case.num_micro_batches
    asleep = sleep_seconds(sleep, count)
    step = Spread.of([seconds for one in turns for seconds in one.turn.seconds])
    metrics = [each for one in turns for each in one.turn.metrics]
    read, written = moved_bytes(metrics)
    limits = [max(asleep, one.io_seconds) for one in turns]
    direct = all(one.io.direct for one in turns)
    # Layers that take no time, and states that never move, have no limit.
    compared = direct and all(limit > 0.0 for limit in limits)
    ratio = ratios([statistics.median(one.turn.seconds) for one in turns], limits) if compared else None
    calls = sum(one.spent.num_calls for one in turns)
    return {
        "micro_batches": count,
        "delay": case.run.delay,
        "clipping": case.run.clipping,
        "host_memory_bytes": case.host_memory_bytes,
        "step_seconds": step.median,
        "step_low_seconds": step.low,
        "step_high_seconds": step.high,
        "sleep_seconds": asleep,
        "io_seconds": statistics.median(one.io_seconds for one in turns),
        "step_ratio": ratio.median if ratio else None,
        "step_low_ratio": ratio.low if ratio else None,
        "step_high_ratio": ratio.high if ratio else None,
        "tokens_per_second": count * SEQ_LEN / step.median,
        "read_bytes": read,
        "written_bytes": written,
        **{
            f"{lane}_{what}_seconds": statistics.median(getattr(one, f"{what}_seconds")[lane] for one in metrics)
            for lane in metrics[0].busy_seconds
            for what in ("busy", "stall")
        },
        "in_layers_seconds": sum(one.spent.seconds for one in turns) / len(metrics),
        "calls": calls,
        "late_calls": sum(one.spent.num_late for one in turns),
        "most_late_seconds": max(one.spent.most_late_seconds for one in turns),
        "direct": direct,
        "losses": list(turns[0].turn.losses),
        **({"lanes": list(turns[-1].turn.lanes)} if lanes else {}),
    }


def _columns(*, clipping: bool) -> tuple[Column, ...]:
    return (
        Column(key="micro_batches", title="M"),
        Column(key="delay", title="delay"),
        *([Column(key="clipping", title="clipping")] if clipping else []),
        Column(key="host_memory_bytes", title="budget"),
        Column(key="step_seconds", title="step"),
        Column(key="step_low_seconds", title="low"),
        Column(key="step_high_seconds", title="high"),
        Column(key="sleep_seconds", title="sleep"),
        Column(key="io_seconds", title="I/O"),
        Column(key="step_ratio", title="ratio"),
    )


def show_more(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """What an outcome's table has no room for: what moved, which lanes waited, and drawings where they are."""
    table = Table(title="a step's traffic, and seconds in which a lane waited", title_justify="left", box=None,
                  pad_edge=False)  # fmt: skip
    columns = {"micro_batches": "M", "delay": "delay", "tokens_per_second": "tokens", "read_bytes": "read",
               "written_bytes": "written"} | {f"{lane.value}_stall_seconds": lane.value for lane in LANES}  # fmt: skip
    texts = []
    for key, title in columns.items():
        unit, column = column_texts(key, [row[key] for row in rows])
        table.add_column(f"{title}\n{unit}", justify="right", no_wrap=True)
        texts.append(column)
    for values in zip(*texts, strict=True):
        table.add_row(*values)
    console.print(table)
    for row in rows:
        if "lanes" not in row:
            continue
        clipping = f", clipping: {row['clipping']}" if row["clipping"] else ""
        console.print(Text(f"\nlanes of a step, M {row['micro_batches']}, delay {row['delay']:g}{clipping}"))
        for line in row["lanes"]:
            console.print(Text(line), soft_wrap=True)
