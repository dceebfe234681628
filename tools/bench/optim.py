"""`hoist bench optim`: the optim lane's AdamW in parameters and bytes a second, beside plain fused AdamW and a copy.

In memory alone, no drive; what a lane reaches beside computation is `hoist bench step`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hoist.optim import AdamWHyperparameters
from hoist.optim.adamw import PieceUpdater, SegmentUpdate
from hoist.tools.bench.machine import look
from hoist.tools.bench.outcome import Column, Outcome
from hoist.tools.bench.rounds import Spread, interleaved
from hoist.tools.errors import BenchError

BLOCK_ELEMENTS = (2**16, 2**18, 2**20)
#: Bytes that an update moves per parameter. Plain: weight, gradient and moments read (16), weight and moments written
#: (12). Split: the same, as the merged weights of a block stay in cache.
UPDATE_BYTES = 28
#: A copy reads and writes.
COPY_BYTES = 2

COLUMNS = (
    Column(key="what", title="what"),
    Column(key="threads", title="threads"),
    Column(key="block_elements", title="block"),
    Column(key="parameters_per_second", title="parameters"),
    Column(key="moved_bytes_per_second", title="moved"),
    Column(key="plain_ratio", title="/ plain"),
    Column(key="copy_ratio", title="/ copy"),
)
_HYPERPARAMETERS = AdamWHyperparameters(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class _States:
    """The tensors of one side; both sides begin with the same."""

    def __init__(self, num_elements: int) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(num_elements, generator=generator)
        self.gradient = torch.randn(num_elements, generator=generator)
        self.exp_avg = torch.zeros(num_elements)
        self.exp_avg_sq = torch.zeros(num_elements)
        self.weights = weights


def run(
    *,
    num_elements: int,
    threads: Sequence[int],
    block_elements: Sequence[int] = BLOCK_ELEMENTS,
    rounds: int = 5,
    command: str = "hoist bench optim",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Measure updates of ``num_elements`` parameters (28 bytes each in memory, twice) for every number of threads.

    Raises BenchError if hoist's weights differ from plain AdamW's after the same updates.
    """
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(threads):

        def told(done: int, total: int, number: int = number) -> None:
            progress(number * total + done, total * len(threads))

        with _threads(count):
            rows += _measure(num_elements, count, block_elements, rounds, told)
    return Outcome(
        name="optim",
        about=(
            f"AdamW on {num_elements / 2**20:.0f} Mi parameters in memory: hoist's, which merges and splits weights, "
            f"beside torch's fused kernel on float32; medians of {rounds} interleaved rounds"
        ),
        command=command,
        machine=look(Path()),
        settings={"num_elements": num_elements, "rounds": rounds},
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(
            f"an update moves {UPDATE_BYTES} bytes a parameter on both sides (split halves are as large as float32); a "
            f"copy moves {COPY_BYTES} bytes a byte",
        ),
    )


def _measure(
    num_elements: int,
    threads: int,
    block_elements: Sequence[int],
    rounds: int,
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    plain = _States(num_elements)
    count = torch.zeros(())
    split_sides = {block: _Split(num_elements, block) for block in block_elements}
    source, target = torch.empty(num_elements).fill_(1.0), torch.empty(num_elements)

    def update_plain() -> float:
        started = time.perf_counter()
        count.add_(1)
        torch._fused_adamw_(
            [plain.weights], [plain.gradient], [plain.exp_avg], [plain.exp_avg_sq], [], [count],
            lr=_HYPERPARAMETERS.lr, beta1=_HYPERPARAMETERS.betas[0], beta2=_HYPERPARAMETERS.betas[1],
            weight_decay=_HYPERPARAMETERS.weight_decay, eps=_HYPERPARAMETERS.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        return time.perf_counter() - started

    def copy() -> float:
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    sides: dict[str, Callable[[], float]] = {"copy": copy, "plain": update_plain}
    sides |= {f"hoist {block}": partial(side.update) for block, side in split_sides.items()}
    for side in sides.values():
        side()  # pages are touched, the kernel is warm
    seconds = {name: Spread.of(found) for name, found in interleaved(sides, rounds, told=progress).items()}
    for block, updated in split_sides.items():
        if not torch.equal(updated.merged(), plain.weights):
            raise BenchError(f"blocks of {block}: hoist's weights are not plain AdamW's after {rounds + 1} updates")
    copied = COPY_BYTES * 4 * num_elements / seconds["copy"].median
    rows = [_row("copy", threads, None, None, copied, None, None)]
    for name, spread in seconds.items():
        if name == "copy":
            continue
        rate = num_elements / spread.median
        block_size = None if name == "plain" else int(name.split()[1])
        against = None if name == "plain" else seconds["plain"].median / spread.median
        label = "plain fused AdamW" if name == "plain" else "hoist, split weights"
        rows.append(_row(label, threads, block_size, rate, UPDATE_BYTES * rate, against, UPDATE_BYTES * rate / copied))
    return rows


class _Split:
    """hoist's side: the same states, with split weights."""

    def __init__(self, num_elements: int, block_elements: int) -> None:
        from hoist.optim.split import split

        self._states = _States(num_elements)
        self._hi = torch.empty(num_elements, dtype=torch.int16)
        self._lo = torch.empty(num_elements, dtype=torch.int16)
        split(self._states.weights, self._hi, self._lo)
        self._updater = PieceUpdater(_HYPERPARAMETERS, block_elements=block_elements)
        self._step = 0

    def update(self) -> float:
        self._step += 1
        segment = SegmentUpdate(
            start=0, stop=self._hi.numel(), adam_step=self._step, lr=_HYPERPARAMETERS.lr,
            weight_decay=_HYPERPARAMETERS.weight_decay,
        )  # fmt: skip
        started = time.perf_counter()
        self._updater.update(
            weight_hi=self._hi, weight_lo=self._lo, exp_avg=self._states.exp_avg, exp_avg_sq=self._states.exp_avg_sq,
            gradient=self._states.gradient, segments=[segment],
        )  # fmt: skip
        return time.perf_counter() - started

    def merged(self) -> torch.Tensor:
        from hoist.optim.split import merge

        merge(self._hi, self._lo, self._states.weights)
        return self._states.weights


def _row(
    what: str,
    threads: int,
    block_elements: int | None,
    rate: float | None,
    moved: float,
    plain_ratio: float | None,
    copy_ratio: float | None,
) -> dict[str, Any]:
    return {
        "what": what,
        "threads": threads,
        "block_elements": block_elements,
        "parameters_per_second": rate,
        "moved_bytes_per_second": moved,
        "plain_ratio": plain_ratio,
        "copy_ratio": copy_ratio,
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
