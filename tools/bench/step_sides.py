"""The sides of `hoist bench step`: hoist's engine on a store, and plain PyTorch in memory, taking turns of some steps.

Each begins with the same weights and is fed by its own iterator; that all did the same is for `step.py` to check. How
turns are taken is in `turns.py`, PyTorch's loop in `sides/in_memory.py`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import Source, create_store
from hoist.scheduler.models import build_model, set_dropout
from hoist.scheduler.setup import Setup, lay_out_stages, prepare
from hoist.scheduler.stages import Stage, split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.device import Device
from hoist.tiers.io.base import IoEngine
from hoist.tools.bench.sides.in_memory import adamw, checkpoint_activations, one_step
from hoist.tools.bench.turns import OPTIMIZER, Step, Turn, take_turn


class Side(Protocol):
    """What takes turns."""

    def turn(self, num_steps: int) -> Turn:
        """Train one step that is not counted and ``num_steps`` that are; nothing runs any more when it returns."""
        ...


class MemorySide:
    """Plain PyTorch: all states in memory, micro-batch after micro-batch, fused AdamW."""

    def __init__(
        self, model: PreTrainedModel, feed: Iterator[Step], *, checkpointing: bool, device: torch.device | None = None
    ) -> None:
        """``checkpointing``: activations of layers are computed again in the backward, as hoist does.

        The model, its gradients and its optimizer are brought to ``device``, and stay there.
        """
        torch.nn.Module.to(model, device)
        self._model = model
        self._feed = feed
        self._device = device
        if checkpointing:
            checkpoint_activations(model)
        self._optimizer = adamw(model, OPTIMIZER)

    def turn(self, num_steps: int) -> Turn:
        """See :class:`Side`."""
        losses, seconds = [], []
        for _ in range(num_steps + 1):
            step = [batch["input_ids"] for batch in next(self._feed)]
            began = time.perf_counter()
            # The loss that is returned is read after all that was begun on a device.
            losses.append(one_step(self._model, self._optimizer, [ids.to(self._device) for ids in step]))
            seconds.append(time.perf_counter() - began)
        return Turn(losses=tuple(losses), seconds=tuple(seconds[1:]))


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
        device: Device | None = None,
    ) -> None:
        """``setup``: what :func:`prepare` made of the same model, ``options`` and device; made here if None.

        ``device``: what computes; None: the CPU. It stays open.

        Raises BudgetError with nothing made if the budget is too small, StoreRefusedError on a drive too full.
        """
        self._feed = feed
        staged = split(build_model(model_config, dropout=0.0))
        setup = setup or prepare(staged, lay_out_stages(staged), options, device=device)
        self._store = create_store(
            directory, model=staged, setup=setup, engine=engine, source=source, attributes={}
        )
        try:
            self._trainer = Trainer(
                model=staged, store=self._store, engine=engine, config=options, setup=setup, device=device
            )
        except BaseException:
            self._store.close()
            raise

    def turn(self, num_steps: int) -> Turn:
        """See :class:`Side`."""
        return take_turn(self._trainer, self._feed, num_steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._trainer.close()
        finally:
            self._store.close()


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
