"""`hoist bench step`: a training step in hoist's engine, beside what limits it and beside plain PyTorch in memory.

How the sides take their steps is in `step_sides.py`; the drive's own speed is `hoist bench io`'s business. This module
says what is compared, what is refused, and what a row holds.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from hoist.scheduler.config import Order, TrainerConfig
from hoist.scheduler.head_loss import slice_tokens
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import Setup, lay_out_stages, prepare
from hoist.scheduler.stages import StagedModel, split
from hoist.tiers.device import Device, HereDevice
from hoist.tiers.footprint import warm_up
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.mixed import MixedSpeed, measure_mixed
from hoist.tools import devices
from hoist.tools.bench.lanes import LANES
from hoist.tools.bench.losses import LOSS_BOUND, check_losses
from hoist.tools.bench.machine import load_note, look
from hoist.tools.bench.outcome import Column, Outcome
from hoist.tools.bench.places import refuse_memory, temporary_folder
from hoist.tools.bench.rounds import Spread, interleaved, ratios
from hoist.tools.bench.shapes import batches, check_length
from hoist.tools.bench.step_sides import HoistSide, MemorySide, Side, reference_model, weights_of
from hoist.tools.bench.turns import Step, Turn, moved_bytes, trainer_config
from hoist.tools.errors import BenchError
from hoist.tools.sizes import show_bytes
from hoist.tools.transfers import measure_transfers

#: Bytes a parameter takes at most while the sides of a shape run: two models with gradients and moments (16 each), and
#: hoist's resident side with states, gradients and float32 weights (20); their buffers are small beside it.
MEMORY_BYTES_PER_PARAMETER = 52

#: Bytes of a copy over the bus that is timed.
COPIED_BYTES = 64 * 2**20
#: As `LOSS_BOUND`, where an accelerator computes: PyTorch's optimizer runs there and hoist's on the CPU, which round
#: differently, and so do the kernels of slices. A thousand times the last bit of float32; not yet tried on one.
ACCELERATOR_LOSS_BOUND = 1e-4

COLUMNS = (
    Column(key="how", title="plan"),
    Column(key="work", title="MxSxB"),
    Column(key="budget", title="budget"),
    Column(key="step_seconds", title="step"),
    Column(key="resident_seconds", title="resid."),
    Column(key="io_seconds", title="I/O"),
    Column(key="roofline_ratio", title="ratio"),
    Column(key="plain_ratio", title="plain"),
    Column(key="checkpointing_ratio", title="ckpt."),
)
_RESIDENT, _PLAIN, _CHECKPOINTING = "resident", "plain PyTorch", "PyTorch with checkpointing"
DIRECT, CACHED = "direct", "page cache: not compared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row: how hoist runs, and on what."""

    plan: Order
    num_micro_batches: int
    seq_len: int
    micro_batch_size: int
    delay: float
    host_memory_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """seq_len, micro_batch_size, num_micro_batches: cases of one shape share what they are compared with."""
        return self.seq_len, self.micro_batch_size, self.num_micro_batches

    @property
    def how(self) -> str:
        """Plan and delay, in few letters: the table has a terminal's 80 columns."""
        plan = "horiz." if self.plan == "horizontal" else self.plan
        return f"{plan} {self.delay:g}" if self.delay else plan

    @property
    def budget(self) -> str:
        """In few letters."""
        return show_bytes(self.host_memory_bytes).replace(".0 ", "").replace(" ", "")

    @property
    def name(self) -> str:
        """Among the cases of its shape."""
        return f"{self.plan}, delay {self.delay}, {self.host_memory_bytes} bytes"

    def options(self, base: TrainerConfig) -> TrainerConfig:
        """``base``, run as this case says."""
        return replace(base, plan=self.plan, delay=self.delay, host_memory_bytes=self.host_memory_bytes)


def cases_of(
    *,
    plans: Sequence[Order],
    num_micro_batches: Sequence[int],
    seq_lens: Sequence[int],
    micro_batch_sizes: Sequence[int],
    delays: Sequence[float],
    host_memory_bytes: Sequence[int],
) -> list[Case]:
    """Every combination once; those of one shape follow each other."""
    found = [
        Case(plan=plan, num_micro_batches=count, seq_len=seq_len, micro_batch_size=rows, delay=delay,
             host_memory_bytes=budget)
        for seq_len, rows, count, budget, delay, plan in product(
            seq_lens, micro_batch_sizes, num_micro_batches, host_memory_bytes, delays, plans
        )
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def run(
    directory: Path,
    config: PreTrainedConfig,
    cases: Sequence[Case],
    *,
    engine: IoEngine,
    weights: Path | None = None,
    rounds: int = 3,
    steps: int = 2,
    lanes: bool = False,
    device: Device | None = None,
    device_memory_bytes: int | None = None,
    command: str = "hoist bench step",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Measure every case in ``rounds`` interleaved rounds, in turns of one uncounted and ``steps`` counted steps.

    The sides of a shape, which all begin with the same weights (a checkpoint's in ``weights``, else initialised ones)
    and see the same ids: every case of it; hoist with all states resident; PyTorch with and without activation
    checkpointing. ``lanes`` adds the lanes of each case's last step, drawn, to its row.

    **The limit** of a case is the largest of these times, each measured in the same run:

    - ``resident_seconds``, computation on resident weights: the layer-major step with a budget in which nothing moves
      from or to the drive (a single byte is refused). The updates are in it, since on a CPU they take the cores that
      compute; the compute lane's own work, without them, is ``resident_compute_seconds``. It is hoist's own code, so
      what that wastes beside PyTorch shows in ``plain_ratio`` and ``checkpointing_ratio``, not here.
    - ``bus_seconds``, with a separate ``device``: the bytes that the case brings over the bus to it and from it, both
      ways at once, each at the speed of copies of locked memory alone.
    - ``io_seconds``: the bytes that the case reads and writes in a step, read and written at once by the same engine
      and nothing beside it (:func:`hoist.tiers.io.mixed.measure_mixed`).

    ``device`` is what computes, PyTorch too, whose optimizer is there as well; None: the CPU. It stays open. Every side
    of hoist's gets ``device_memory_bytes``; None: an equal part of what is free there.

    Ratios are those of the medians of turns of the same round; the median over the rounds is given. What went through
    the page cache is labelled, and has no ratios.

    Raises ConfigError or BudgetError before anything is made, if the memory or a budget is too small; BenchError if a
    loss differs (:func:`check_losses`) or something moves in the resident side. Everything made is removed.
    """
    shapes: dict[tuple[int, int, int], list[Case]] = {}
    for case in cases:
        shapes.setdefault(case.shape, []).append(case)
    machine = look(directory)
    device = HereDevice() if device is None else device
    if device.is_separate and device_memory_bytes is None:
        # As many sides of hoist's at once as a shape has cases, and the resident one; and PyTorch's two.
        most = max(len(mine) for mine in shapes.values())
        device_memory_bytes = (devices.budget_bytes(device, None) or 0) // (most + 3)
    setups = _prepare(config, cases, device, device_memory_bytes)
    bus = _bus_speed(directory, engine, device)
    warm_up()
    steps_of_shape = [(len(mine) + 3) * rounds * (steps + 1) for mine in shapes.values()]
    done, total = 0, sum(steps_of_shape)

    def tick() -> None:
        nonlocal done
        progress(done, total)
        done += 1

    rows: list[dict[str, Any]] = []
    exact, differs, allowed = True, 0.0, _bound(device)
    for shape, mine in shapes.items():
        with temporary_folder(directory) as folder, ExitStack() as stack:
            found, is_exact, difference = _measure(
                folder, config, mine, stack, engine=engine, weights=weights, rounds=rounds, steps=steps,
                lanes=lanes, setups=setups, device=device, device_memory_bytes=device_memory_bytes, bus=bus,
                feed=partial(_ticking, config, shape, tick),
            )  # fmt: skip
        rows += found
        exact, differs = exact and is_exact, max(differs, difference)
    progress(total, total)
    return Outcome(
        name="step",
        about=(
            f"a training step of hoist (median of {rounds} interleaved rounds of {steps} steps), beside the larger of "
            f"the step with all states resident and its I/O{' or bus' if bus else ''} alone (ratio), and "
            "beside PyTorch in memory without (plain) and with activation checkpointing (ckpt.)"
        ),
        command=command,
        machine=machine,
        settings={
            "model": config.model_type,
            "num_parameters": _num_parameters(split(build_model(config, dropout=0.0))),
            "rounds": rounds,
            "steps": steps,
            "device": device.describe(),
            "device_memory_bytes": device_memory_bytes,
            "loss_bound_ratio": 0.0 if exact else allowed,
            "loss_difference_ratio": differs,
        },
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(
            "the losses of all hoist's sides are equal bit for bit, and PyTorch's differ from them "
            + (f"by {differs:.1g} of the loss at most (allowed: {allowed:g})" if differs else "in no bit, either"),
            "plan: with the delay, if any; MxSxB: micro-batches x seq_len x rows; no commit in a step; dropout is off",
            *load_note(machine),
        ),
    )


def take_turns(
    hoist: Mapping[str, Side],
    reference: Mapping[str, Side],
    *,
    rounds: int,
    steps: int,
    bound: float,
    probe: Callable[[str, Turn], MixedSpeed],
) -> tuple[dict[str, list[Turn]], dict[str, list[MixedSpeed]], float]:
    """Let all sides take turns, and measure the I/O of each of hoist's after its turn.

    Returns turns and I/O by side's name, and the largest difference of a loss, a share of it. Raises BenchError if
    their losses differ (:func:`check_losses`).
    """
    moved: dict[str, list[MixedSpeed]] = {name: [] for name in hoist}

    def turn(name: str, side: Side) -> Turn:
        taken = side.turn(steps)
        if name in hoist:
            moved[name].append(probe(name, taken))
        return taken

    sides = {name: partial(turn, name, side) for name, side in {**hoist, **reference}.items()}
    turns = interleaved(sides, rounds)
    losses = {name: [loss for taken in mine for loss in taken.losses] for name, mine in turns.items()}
    difference = check_losses(
        {name: losses[name] for name in hoist}, {name: losses[name] for name in reference}, bound=bound
    )
    return turns, moved, difference


def _measure(
    folder: Path,
    config: PreTrainedConfig,
    cases: Sequence[Case],
    stack: ExitStack,
    *,
    engine: IoEngine,
    weights: Path | None,
    rounds: int,
    steps: int,
    lanes: bool,
    setups: Mapping[TrainerConfig, Setup],
    device: Device,
    device_memory_bytes: int | None,
    bus: tuple[float, float] | None,
    feed: Callable[[], Iterator[Step]],
) -> tuple[list[dict[str, Any]], bool, float]:
    """The rows of the cases of one shape, whether losses had to be the same bits, and by how much they differ."""
    base = _base(cases[0], device_memory_bytes)
    buffered_before = engine.statistics().buffered_bytes
    model = reference_model(config, weights)
    source = weights_of(model)
    options = {_RESIDENT: base} | {case.name: case.options(base) for case in cases}
    hoist = {
        name: stack.enter_context(
            HoistSide(
                folder / f"{number}", config, mine, feed(), source=source, engine=engine, setup=setups[mine],
                device=device,
            )
        )
        for number, (name, mine) in enumerate(options.items())
    }
    there = device.torch_device
    reference = {
        _PLAIN: MemorySide(copy.deepcopy(model), feed(), checkpointing=False, device=there),
        _CHECKPOINTING: MemorySide(model, feed(), checkpointing=True, device=there),
    }

    def probe(name: str, turn: Turn) -> MixedSpeed:
        read, written = moved_bytes(turn.metrics)
        if name == _RESIDENT and read + written:
            raise BenchError(
                f"with all states resident a step moved {show_bytes(read + written)}; this machine's memory is too "
                "small for this model: give fewer --layers or a smaller --hidden"
            )
        return measure_mixed(folder, engine, read_bytes=read, written_bytes=written)

    exact = _is_exact(config, cases[0]) and there.type == "cpu"
    turns, moved, difference = take_turns(
        hoist, reference, rounds=rounds, steps=steps, bound=0.0 if exact else _bound(device), probe=probe
    )
    # What the engine takes for direct is not, where files are in memory: the kernel counts what drives moved.
    direct = engine.statistics().buffered_bytes == buffered_before and all(
        one.direct for speeds in moved.values() for one in speeds
    )
    rows = [_row(case, turns, moved[case.name], bus, direct=direct, lanes=lanes) for case in cases]
    return rows, exact, difference


def _row(
    case: Case,
    turns: Mapping[str, Sequence[Turn]],
    moved: Sequence[MixedSpeed],
    bus: tuple[float, float] | None,
    *,
    direct: bool,
    lanes: bool,
) -> dict[str, Any]:
    mine, resident = turns[case.name], turns[_RESIDENT]
    seconds = Spread.of([one for turn in mine for one in turn.seconds])
    crossing: dict[str, Any] = {}
    if bus is not None:
        crossed = [each for turn in mine for each in turn.crossed_bytes]
        up, down = (int(statistics.median(way)) for way in zip(*crossed, strict=True))
        crossing = {"bus_seconds": max(up / bus[0], down / bus[1]), "up_bytes": up, "down_bytes": down}
    bus_seconds = crossing.get("bus_seconds", 0.0)
    limits = [
        max(theirs, speed.seconds, bus_seconds) for theirs, speed in zip(_medians(resident), moved, strict=True)
    ]
    ratio = ratios(_medians(mine), limits)
    metrics = [one for turn in mine for one in turn.metrics]
    read, written = moved_bytes(metrics)
    per_lane: dict[str, float] = {}
    for lane in LANES:
        name = lane.value
        per_lane[f"{name}_busy_seconds"] = statistics.median(one.busy_seconds[name] for one in metrics)
        per_lane[f"{name}_stall_seconds"] = statistics.median(one.stall_seconds[name] for one in metrics)
    return {
        **asdict(case),
        "how": case.how,
        "budget": case.budget,
        "work": f"{case.num_micro_batches}x{case.seq_len}x{case.micro_batch_size}",
        "step_seconds": seconds.median,
        "step_low_seconds": seconds.low,
        "step_high_seconds": seconds.high,
        "counted_steps": seconds.count,
        "resident_seconds": statistics.median(_all(resident)),
        "resident_compute_seconds": statistics.median(
            one.busy_seconds["compute"] for turn in resident for one in turn.metrics
        ),
        "io_seconds": statistics.median(speed.seconds for speed in moved),
        **crossing,
        "io_measured_bytes": int(statistics.median(speed.measured_bytes for speed in moved)),
        "roofline_ratio": ratio.median if direct else None,
        "roofline_low_ratio": ratio.low if direct else None,
        "roofline_high_ratio": ratio.high if direct else None,
        **_beside(mine, turns[_PLAIN], "plain", compared=direct),
        **_beside(mine, turns[_CHECKPOINTING], "checkpointing", compared=direct),
        "read_bytes": read,
        "written_bytes": written,
        "idle_share": statistics.median(share for turn in mine for share in turn.idle_shares),
        **per_lane,
        "mode": DIRECT if direct else CACHED,
        **({"lanes": list(mine[-1].lanes)} if lanes else {}),
    }


def _beside(mine: Sequence[Turn], theirs: Sequence[Turn], name: str, *, compared: bool) -> dict[str, float | None]:
    return {
        f"{name}_seconds": statistics.median(_all(theirs)),
        f"{name}_ratio": ratios(_medians(mine), _medians(theirs)).median if compared else None,
    }


def _all(turns: Sequence[Turn]) -> list[float]:
    return [seconds for turn in turns for seconds in turn.seconds]


def _medians(turns: Sequence[Turn]) -> list[float]:
    return [statistics.median(turn.seconds) for turn in turns]


def _bus_speed(directory: Path, engine: IoEngine, device: Device) -> tuple[float, float] | None:
    """Bytes a second to a separate device and from it; None without one. Raises BenchError if they cannot be had."""
    if not device.is_separate:
        return None
    ways = {
        one.name: one for one in measure_transfers(directory, engine, device, num_bytes=COPIED_BYTES).transfers
    }
    rates = []
    for name in ("host to device", "device to host"):
        rate = ways[name].bytes_per_second
        if rate is None:
            raise BenchError(f"{name}: {ways[name].error}")
        rates.append(rate)
    return rates[0], rates[1]


def _bound(device: Device) -> float:
    """How much losses may differ from PyTorch's, a share of them."""
    return LOSS_BOUND if device.torch_device.type == "cpu" else ACCELERATOR_LOSS_BOUND


def _base(case: Case, device_memory_bytes: int | None) -> TrainerConfig:
    """The resident side's: the machine's memory as its budget, of which it takes what all states need."""
    made = trainer_config(
        seq_len=case.seq_len, micro_batch_size=case.micro_batch_size, num_micro_batches=case.num_micro_batches,
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )  # fmt: skip
    return replace(made, device_memory_bytes=device_memory_bytes)


def _is_exact(config: PreTrainedConfig, case: Case) -> bool:
    """hoist and PyTorch add up the same numbers in the same order."""
    text = config.get_text_config(decoder=True)
    in_one_slice = case.seq_len * case.micro_batch_size <= slice_tokens(text.vocab_size, text.hidden_size)
    return torch.get_num_threads() == 1 and in_one_slice


def _prepare(
    config: PreTrainedConfig, cases: Sequence[Case], device: Device, device_memory_bytes: int | None
) -> dict[TrainerConfig, Setup]:
    """Size all of hoist's sides. Raises ConfigError or BudgetError before minutes are spent on what works."""
    for case in cases:
        check_length(config, case.seq_len)
    staged = split(build_model(config, dropout=0.0))
    refuse_memory(
        MEMORY_BYTES_PER_PARAMETER * _num_parameters(staged), "bench step holds the model in memory three times",
        "give fewer --layers, a smaller --hidden or a smaller --model",
    )  # fmt: skip
    layouts = lay_out_stages(staged)
    bases = [_base(case, device_memory_bytes) for case in cases]
    wanted = [options for case, base in zip(cases, bases, strict=True) for options in (base, case.options(base))]
    return {options: prepare(staged, layouts, options, device=device) for options in dict.fromkeys(wanted)}


def _num_parameters(model: StagedModel) -> int:
    return sum(tensor.num_elements for stage in model.stages for tensor in stage.tensors)


def _ticking(config: PreTrainedConfig, shape: tuple[int, int, int], tick: Callable[[], None]) -> Iterator[Step]:
    """The same steps each time; ``tick`` is called before each, and may raise to stop."""
    for step in batches(config, shape):
        tick()
        yield step
