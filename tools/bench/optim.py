"""`hoist bench optim`: the optim lane's AdamW in parameters and bytes a second, beside plain fused AdamW and a copy.

In memory alone, no drive; what a lane reaches beside computation is `hoist bench step`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hoist.optim import AdamWHyperparameters, merge, split
from hoist.optim.adamw import SEGMENT_ALIGN_ELEMENTS, PieceUpdater, SegmentUpdate
from hoist.scheduler.errors import ConfigError
from hoist.tools.bench.machine import load_note, look
from hoist.tools.bench.outcome import Column, Outcome
from hoist.tools.bench.places import refuse_memory
from hoist.tools.bench.rounds import Spread, interleaved, ratios
from hoist.tools.errors import BenchError

BLOCK_ELEMENTS = (2**16, 2**18, 2**20)
#: Bytes that an update moves per parameter. Plain: weight, gradient and moments read (16), weight and moments written
#: (12). Split: the same, as the merged weights of a block stay in cache. Loaded: both halves are written besides.
UPDATE_BYTES, LOADED_BYTES = 28, 32
#: A copy reads and writes.
COPY_BYTES = 2

COLUMNS = (
    Column(key="what", title="what"),
    Column(key="threads", title="threads"),
    Column(key="block_elements", title="block"),
    Column(key="parameters_per_second", title="params"),
    Column(key="moved_bytes_per_second", title="moved"),
    Column(key="plain_ratio", title="/plain"),
    Column(key="plain_low_ratio", title="from"),
    Column(key="plain_high_ratio", title="to"),
    Column(key="copy_ratio", title="/copy"),
)
_COPY, _PLAIN, _SPLIT, _LOADED = "copy", "fused AdamW", "hoist, split", "hoist, loaded"
_HYPERPARAMETERS = AdamWHyperparameters(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class _States:
    """The moments of one side, which all begin the same, and the gradient, which all share: no update changes it."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient
        self.exp_avg = torch.zeros_like(gradient)
        self.exp_avg_sq = torch.zeros_like(gradient)

    def has_moments_of(self, other: _States) -> bool:
        """Whether both moments have the bits of another's."""
        return self.exp_avg.equal(other.exp_avg) and self.exp_avg_sq.equal(other.exp_avg_sq)


def run(
    *,
    num_elements: int,
    threads: Sequence[int],
    block_elements: Sequence[int] = BLOCK_ELEMENTS,
    rounds: int = 5,
    make_updater: Callable[[int], PieceUpdater] = lambda block: PieceUpdater(_HYPERPARAMETERS, block_elements=block),
    command: str = "hoist bench optim",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Measure updates of ``num_elements`` parameters (12 to 16 bytes each for each side) for every number of threads.

    hoist's side is measured both ways in which a step makes updates: from halves alone, and where float32 weights are
    loaded, as after a stage's backward. ``make_updater`` makes it for a block size. Raises ConfigError for settings
    that cannot be, BenchError if hoist's weights or moments differ in a bit from plain AdamW's after the same updates.
    """
    for block in block_elements:
        if block < 1 or block % SEGMENT_ALIGN_ELEMENTS:
            raise ConfigError(f"--block: got {block}, must be a multiple of {SEGMENT_ALIGN_ELEMENTS} elements")
    # Weights and two moments of each side, the gradient and the first weights that all share, and the copy's two.
    num_sides = 1 + 2 * len(block_elements)
    refuse_memory(
        4 * (3 * num_sides + 4) * num_elements, f"--elements: {num_sides} sides of {num_elements:,} parameters",
        "give fewer --elements",
    )  # fmt: skip
    machine = look(Path())
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(threads):

        def told(done: int, total: int, number: int = number) -> None:
            progress(number * total + done, total * len(threads))

        with _threads(count):
            rows += _measure(num_elements, count, block_elements, rounds, make_updater, told)
    return Outcome(
        name="optim",
        about=(
            f"AdamW on {num_elements / 2**20:.0f} Mi parameters in memory: hoist's, which merges and splits weights, "
            f"beside torch's fused kernel on float32; medians of {rounds} interleaved rounds"
        ),
        command=command,
        machine=machine,
        settings={"num_elements": num_elements, "rounds": rounds},
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(
            f"{_SPLIT}: from both halves of the weights; {_LOADED}: float32 weights are in memory, as after a stage's "
            "backward",
            f"an update moves {UPDATE_BYTES} bytes a parameter (split halves are as large as float32), {LOADED_BYTES} "
            f"where weights are loaded; a copy moves {COPY_BYTES} bytes a byte",
            *load_note(machine),
        ),
    )


def _measure(
    num_elements: int,
    threads: int,
    block_elements: Sequence[int],
    rounds: int,
    make_updater: Callable[[int], PieceUpdater],
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    weights, gradient = (torch.randn(num_elements, generator=generator) for _ in range(2))
    plain = _Plain(weights, gradient, num_elements)
    plain_sides = {block: _Plain(weights, gradient, block) for block in block_elements}
    hoist_sides = {
        (what, block): _Split(weights, gradient, make_updater(block), loaded=what == _LOADED)
        for what in (_SPLIT, _LOADED)
        for block in block_elements
    }
    source, target = torch.empty(num_elements).fill_(1.0), torch.empty(num_elements)

    def copy() -> float:
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    sides: dict[tuple[str, int | None], Callable[[], float]] = {(_COPY, None): copy, (_PLAIN, None): plain.update}
    sides |= {(_PLAIN, block): side.update for block, side in plain_sides.items()}
    sides |= {key: side.update for key, side in hoist_sides.items()}
    for side in sides.values():
        side()  # pages are touched, the kernel is warm
    seconds = interleaved(sides, rounds, told=progress)
    for (what, block), updated in hoist_sides.items():
        if not (updated.merged().equal(plain.weights) and updated.states.has_moments_of(plain.states)):
            raise BenchError(f"{what}, blocks of {block}: states are not plain AdamW's after {rounds + 1} updates")
    rows = []
    for (what, block_size), spread in ((name, Spread.of(found)) for name, found in seconds.items()):
        per_element = {_COPY: 4 * COPY_BYTES, _LOADED: LOADED_BYTES}.get(what, UPDATE_BYTES)
        against = None if (what, block_size) in ((_COPY, None), (_PLAIN, None)) else ratios(
            seconds[_PLAIN, None], seconds[what, block_size]
        )
        copied = ratios(seconds[_COPY, None], seconds[what, block_size]).median * per_element / (4 * COPY_BYTES)
        rows.append(
            {
                "what": what,
                "threads": threads,
                "block_elements": block_size,
                "parameters_per_second": None if what == _COPY else num_elements / spread.median,
                "moved_bytes_per_second": per_element * num_elements / spread.median,
                "plain_ratio": against.median if against else None,
                "plain_low_ratio": against.low if against else None,
                "plain_high_ratio": against.high if against else None,
                "copy_ratio": None if what == _COPY else copied,
                "low_update_seconds": spread.low,
                "high_update_seconds": spread.high,
            }
        )
    return rows


class _Plain:
    """torch's fused kernel on float32 weights, called for each block."""

    def __init__(self, weights: torch.Tensor, gradient: torch.Tensor, block_elements: int) -> None:
        self.states = _States(gradient)
        self.weights = weights.clone()
        self._block_elements = block_elements
        self._step = 0

    def update(self) -> float:
        """Seconds of one update."""
        self._step += 1
        states, count = self.states, torch.tensor(float(self._step))
        started = time.perf_counter()
        for start in range(0, self.weights.numel(), self._block_elements):
            cut = slice(start, start + self._block_elements)
            torch._fused_adamw_(
                [self.weights[cut]], [states.gradient[cut]], [states.exp_avg[cut]], [states.exp_avg_sq[cut]], [],
                [count], lr=_HYPERPARAMETERS.lr, beta1=_HYPERPARAMETERS.betas[0], beta2=_HYPERPARAMETERS.betas[1],
                weight_decay=_HYPERPARAMETERS.weight_decay, eps=_HYPERPARAMETERS.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
        return time.perf_counter() - started


class _Split:
    """hoist's side: the same states, with split weights; ``loaded``: and what they are merged to in memory."""

    def __init__(
        self, weights: torch.Tensor, gradient: torch.Tensor, updater: PieceUpdater, *, loaded: bool
    ) -> None:
        self.states = _States(gradient)
        self._hi = torch.empty_like(weights, dtype=torch.int16)
        self._lo = torch.empty_like(weights, dtype=torch.int16)
        split(weights, self._hi, self._lo)
        self._loaded = weights.clone() if loaded else None
        self._updater = updater
        self._step = 0

    def update(self) -> float:
        """Seconds of one update."""
        self._step += 1
        segment = SegmentUpdate(
            start=0, stop=self._hi.numel(), adam_step=self._step, lr=_HYPERPARAMETERS.lr,
            weight_decay=_HYPERPARAMETERS.weight_decay,
        )  # fmt: skip
        started = time.perf_counter()
        self._updater.update(
            weight_hi=self._hi, weight_lo=self._lo, exp_avg=self.states.exp_avg, exp_avg_sq=self.states.exp_avg_sq,
            gradient=self.states.gradient, segments=[segment], weights=self._loaded,
        )  # fmt: skip
        return time.perf_counter() - started

    def merged(self) -> torch.Tensor:
        """The weights as float32."""
        weights = torch.empty(self._hi.numel())
        merge(self._hi, self._lo, weights)
        return weights


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
