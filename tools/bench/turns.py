"""Turns of hoist's trainer: some steps one after another, timed, with what they moved and what the lanes did.

How a trainer is set up for that is here too. What turns are compared with is each benchmark's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.trainer import Trainer
from hoist.tools.bench.lanes import draw_timeline, idle_share

#: A step: micro-batches of int64 ids [B, S], which are the labels, too.
Step = list[dict[str, Tensor]]
#: What sides update with, unless their benchmark says otherwise.
OPTIMIZER = AdamWHyperparameters(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
#: More steps than any benchmark takes: no commit falls due of itself. What one costs is `commit.py`'s business.
NEVER = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Some steps of one side, one after another."""

    losses: tuple[float, ...]
    """Of every step."""
    seconds: tuple[float, ...]
    """Of every step but the first, which has nothing before it that it could overlap with."""
    metrics: tuple[StepMetrics, ...] = ()
    """hoist only: of the same steps as ``seconds``."""
    idle_shares: tuple[float, ...] = ()
    """hoist only: of each of these steps, the share in which neither the compute nor the io lane was busy."""
    lanes: tuple[str, ...] = ()
    """hoist only: the last step's timeline, drawn."""
    crossed_bytes: tuple[tuple[int, int], ...] = ()
    """hoist only: of each of these steps, what went over the bus to a separate device, and from it."""


def trainer_config(
    *,
    seq_len: int,
    micro_batch_size: int,
    num_micro_batches: int,
    host_memory_bytes: int,
    optimizer: AdamWHyperparameters = OPTIMIZER,
) -> TrainerConfig:
    """What all turns begin from: layer-major, a constant learning rate, no delay, no commits, no status documents."""
    return TrainerConfig(
        host_memory_bytes=host_memory_bytes,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        num_micro_batches=num_micro_batches,
        optimizer=optimizer,
        schedule=Schedule(kind="constant", lr=optimizer.lr, num_steps=NEVER),
        commit_every=NEVER,
        status_seconds=0.0,
    )


def take_turn(
    trainer: Trainer, feed: Iterator[Step], num_steps: int, *, begin: Callable[[], None] = lambda: None
) -> Turn:
    """Train one step that is not counted and ``num_steps`` that are; ``begin`` is called between them.

    The wait for the last step's updates is not timed, as a next step would hide it; nothing runs any more afterwards.
    """
    losses, seconds, shares = [], [], []
    metrics: list[StepMetrics] = []
    lanes: list[str] = []
    crossed: list[tuple[int, int]] = []
    for number in range(num_steps + 1):
        step = next(feed)
        began = time.perf_counter()
        found = trainer.step(step)
        stopped = time.perf_counter()
        losses.append(found.loss)
        if number:
            seconds.append(stopped - began)
            metrics.append(found)
            crossed.append(trainer.bus_bytes())
            shares.append(idle_share(trainer.last_spans, began, stopped))
            lanes = draw_timeline(trainer.last_spans, began, stopped)
        else:
            begin()
    trainer.wait()
    return Turn(
        losses=tuple(losses), seconds=tuple(seconds), metrics=tuple(metrics), idle_shares=tuple(shares),
        lanes=tuple(lanes), crossed_bytes=tuple(crossed),
    )  # fmt: skip


def moved_bytes(metrics: Sequence[StepMetrics]) -> tuple[int, int]:
    """Bytes that a step reads and writes: medians."""
    return (
        int(statistics.median(one.nvme_read_bytes for one in metrics)),
        int(statistics.median(one.nvme_written_bytes for one in metrics)),
    )
