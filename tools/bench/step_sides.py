"""The sides of `hoist bench step`: hoist's engine on a store, and plain PyTorch in memory, taking turns of some steps.

Each begins with the same weights and is fed by its own iterator; that all did the same is for `step.py` to check.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import Source, create_store
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.models import build_model, set_dropout
from hoist.scheduler.setup import Setup, lay_out_stages, prepare
from hoist.scheduler.stages import Stage, split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.io.base import IoEngine
from hoist.tools.bench.lanes import draw_timeline, idle_share

#: A step: micro-batches of int64 ids [B, S], which are the labels, too.
Step = list[dict[str, Tensor]]
#: What all sides update with; torch's is made of it.
OPTIMIZER = AdamWHyperparameters(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
#: No commit falls due while steps are timed: what one costs is `bench.commit`'s business.
_NEVER = 2**31


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


class Side(Protocol):
    """What takes turns."""

    def turn(self, num_steps: int) -> Turn:
        """Train one step that is not counted and ``num_steps`` that are; nothing runs any more when it returns."""
        ...


class MemorySide:
    """Plain PyTorch: all states in memory, micro-batch after micro-batch, fused AdamW."""

    def __init__(self, model: PreTrainedModel, feed: Iterator[Step], *, checkpointing: bool) -> None:
        """``checkpointing``: activations of layers are computed again in the backward, as hoist does."""
        self._model = model
        self._feed = feed
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay, fused=True,
        )  # fmt: skip

    def turn(self, num_steps: int) -> Turn:
        """See :class:`Side`."""
        losses, seconds = [], []
        for _ in range(num_steps + 1):
            step = next(self._feed)
            began = time.perf_counter()
            losses.append(self._step(step))
            seconds.append(time.perf_counter() - began)
        return Turn(losses=tuple(losses), seconds=tuple(seconds[1:]))

    def _step(self, step: Step) -> float:
        num_items = sum(batch["labels"][:, 1:].numel() for batch in step)
        losses = []
        for batch in step:
            loss: Tensor = self._model(**batch, num_items_in_batch=num_items, use_cache=False).loss
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())


class HoistSide(AbstractContextManager["HoistSide"]):
    """hoist's engine on a store of its own in ``directory``. A context manager: the store stays, the trainer goes."""

    def __init__(
        self,
        directory: Path,
        model_config: PreTrainedConfig,
        options: TrainerConfig,
        feed: Iterator[Step],
        *,
        source: Source,
        engine: IoEngine,
        setup: Setup | None = None,
    ) -> None:
        """``setup``: what :func:`prepare` made of the same model and ``options``; made here if None.

        Raises BudgetError with nothing made if the budget is too small, StoreRefusedError on a drive too full."""
        self._feed = feed
        staged = split(build_model(model_config, dropout=0.0))
        setup = setup or prepare(staged, lay_out_stages(staged), options)
        self._store = create_store(
            directory, model=staged, setup=setup, engine=engine, source=source, attributes={}
        )
        try:
            self._trainer = Trainer(model=staged, store=self._store, engine=engine, config=options, setup=setup)
        except BaseException:
            self._store.close()
            raise

    def turn(self, num_steps: int) -> Turn:
        """See :class:`Side`. The wait for the last step's updates is not timed: the next step would hide it."""
        seconds, losses, shares = [], [], []
        metrics: list[StepMetrics] = []
        lanes: list[str] = []
        for number in range(num_steps + 1):
            step = next(self._feed)
            began = time.perf_counter()
            found = self._trainer.step(step)
            stopped = time.perf_counter()
            losses.append(found.loss)
            if number:
                seconds.append(stopped - began)
                metrics.append(found)
                shares.append(idle_share(self._trainer.last_spans, began, stopped))
                lanes = draw_timeline(self._trainer.last_spans, began, stopped)
        self._trainer.wait()
        return Turn(
            losses=tuple(losses), seconds=tuple(seconds), metrics=tuple(metrics), idle_shares=tuple(shares),
            lanes=tuple(lanes),
        )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._trainer.close()
        finally:
            self._store.close()


def trainer_config(
    *, seq_len: int, micro_batch_size: int, num_micro_batches: int, host_memory_bytes: int
) -> TrainerConfig:
    """What all of hoist's sides have alike: layer-major, no delay, no commits."""
    return TrainerConfig(
        host_memory_bytes=host_memory_bytes,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        num_micro_batches=num_micro_batches,
        optimizer=OPTIMIZER,
        schedule=Schedule(kind="constant", lr=OPTIMIZER.lr, num_steps=_NEVER),
        commit_every=_NEVER,
        status_seconds=0.0,
    )


def reference_model(config: PreTrainedConfig, directory: Path | None = None) -> PreTrainedModel:
    """The model in memory, float32, in training mode, without dropout: the weights that all sides begin with.

    From a checkpoint in ``directory``, else initialised by transformers, the same each time.
    """
    config = copy.deepcopy(config)
    set_dropout(config, 0.0)
    auto: Any = AutoModelForCausalLM  # its methods have no types
    settings = {"attn_implementation": "sdpa", "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if directory is None:
            model: object = auto.from_config(config, **settings)
        else:
            model = auto.from_pretrained(directory, config=config, local_files_only=True, **settings)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(model).__name__} is not a PreTrainedModel")
    model.train()
    return model


def weights_of(model: PreTrainedModel) -> Source:
    """A source for new stores: what the model has now."""
    weights: Mapping[str, Tensor] = model.state_dict()

    def fill(stage: Stage, values: Mapping[str, Tensor], staging: Tensor) -> None:
        for name, value in values.items():
            value.copy_(weights[name])

    return fill
