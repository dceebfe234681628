"""What a step may be fed: the largest micro-batch that buffers are sized for, and what is refused before anything runs.

Here is the contract, and the batches of token ids that transformers' causal LMs take; those of plain modules are in
`module_stages.py`. Where they come from is the caller's business.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.errors import ConfigError

#: What a step feeds: input_ids and labels, int64 [B, S]; attention_mask [B, S] and other model inputs as needed.
Batch = Mapping[str, Tensor]
#: Labels that do not count.
IGNORED_LABEL = -100


class Batches(ABC):
    """The micro-batches of one model."""

    @abstractmethod
    def largest(self, config: TrainerConfig) -> dict[str, Tensor]:
        """A micro-batch of the largest shape with everything that one may have. Raises ConfigError if none can be."""

    @abstractmethod
    def check(self, micro_batches: Sequence[Batch], config: TrainerConfig) -> int:
        """What counts in a step. Raises ConfigError on micro-batches that the buffers were not made for."""

    @abstractmethod
    def num_tokens(self, batch: Batch) -> int:
        """What a micro-batch counts as in metrics."""


class TokenBatches(Batches):
    """Token ids and labels, int64 [B, S]; the model shifts the labels."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._owner = type(model).__name__
        #: What a micro-batch may hold besides ids and labels: what the model's forward takes by name.
        self._inputs = frozenset(inspect.signature(model.forward).parameters) - {"input_ids", "labels"}
        #: Token ids that the model has an embedding for.
        self._vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)

    def largest(self, config: TrainerConfig) -> dict[str, Tensor]:
        """A micro-batch of the largest shape with all ``extra_inputs``, so that all masks there can be are made.

        Raises ConfigError if the model's forward takes no such input.
        """
        shape = (config.micro_batch_size, config.seq_len)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}
        for name in config.extra_inputs:
            if name not in self._inputs or name not in ("attention_mask", "position_ids"):
                raise ConfigError(f"extra_inputs: {self._owner} takes no {name}")
            batch[name] = torch.ones(shape, dtype=torch.int64)
            if name == "attention_mask":
                batch[name][:, -1] = 0  # models leave a mask of ones out
            else:
                half = config.seq_len // 2  # two documents, as a single one needs no mask
                positions = torch.cat([torch.arange(half), torch.arange(config.seq_len - half)])
                batch[name] = positions.expand(shape).contiguous()
        return batch

    def check(self, micro_batches: Sequence[Batch], config: TrainerConfig) -> int:
        """Counted labels (shifted, not -100) of a step. Raises as the contract says, also if there are none."""
        num_items = 0
        for index, batch in enumerate(micro_batches):
            missing = {"input_ids", "labels"} - batch.keys()
            unknown = batch.keys() - {"input_ids", "labels"} - self._inputs
            if missing or unknown:
                fault = f"lacks {', '.join(sorted(missing))}" if missing else f"has {', '.join(sorted(unknown))}"
                raise ConfigError(
                    f"micro-batch {index}: {fault}; input_ids and labels are needed, allowed are also "
                    f"{', '.join(sorted(self._inputs))}"
                )
            ids, labels = batch["input_ids"], batch["labels"]
            if ids.dim() != 2 or ids.shape != labels.shape:
                raise ConfigError(
                    f"micro-batch {index}: input_ids {tuple(ids.shape)} and labels {tuple(labels.shape)} "
                    "must be [B, S] alike"
                )
            for name in batch.keys() & {"attention_mask", "position_ids"}:
                if batch[name].shape != ids.shape:
                    raise ConfigError(
                        f"micro-batch {index}: {name} {tuple(batch[name].shape)} must be like input_ids "
                        f"{tuple(ids.shape)}"
                    )
            if ids.shape[0] > config.micro_batch_size or ids.shape[1] > config.seq_len or 0 in ids.shape:
                raise ConfigError(
                    f"micro-batch {index}: shape {tuple(ids.shape)} does not fit {config.micro_batch_size} rows of "
                    f"{config.seq_len} tokens (micro_batch_size, seq_len)"
                )
            self._check_ids(f"micro-batch {index}: input_ids", ids)
            counted = labels[labels != IGNORED_LABEL]
            self._check_ids(f"micro-batch {index}: labels", counted)
            num_items += int((labels[:, 1:] != IGNORED_LABEL).sum())
        if not num_items:
            raise ConfigError("labels: the step has no counted label to learn from; all are -100")
        return num_items

    def num_tokens(self, batch: Batch) -> int:
        """Its token ids, padding included."""
        return batch["input_ids"].numel()

    def _check_ids(self, what: str, ids: Tensor) -> None:
        if ids.dtype != torch.int64:
            raise ConfigError(f"{what} are {ids.dtype}; they must be torch.int64")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size):
            raise ConfigError(
                f"{what} go from {int(ids.min())} to {int(ids.max())}; the model has 0 to {self._vocab_size - 1}"
            )
