"""What benchmarks train: a Llama shape with random steps, or layers that sleep; and what cannot be asked of them.

What is measured, and how, is each benchmark's own; the sleeping layers are in `sides/sleeping.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import LlamaConfig
from transformers.configuration_utils import PreTrainedConfig

from hoist.scheduler.errors import ConfigError
from hoist.tools.bench.sides.job import Sleep
from hoist.tools.bench.sides.sleeping import HIDDEN

#: Width of an attention head of the Llama shape.
HEAD_WIDTH = 64


def model_config(*, hidden: int, layers: int, vocab: int) -> LlamaConfig:
    """The Llama shape that is measured: intermediate is 8/3 of hidden, cut to a multiple of 64; untied.

    Raises ConfigError if ``hidden`` is not made of whole heads.
    """
    if hidden < HEAD_WIDTH or hidden % HEAD_WIDTH:
        raise ConfigError(f"--hidden: {hidden} is not a multiple of {HEAD_WIDTH}, the width of a head")
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_WIDTH,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def check_length(config: PreTrainedConfig, seq_len: int) -> None:
    """Raise ConfigError if the model has no positions for so many tokens."""
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ConfigError(f"--seq-len: {seq_len} is longer than the {longest} positions that the model has")


def check_sleep(sleep: Sleep) -> None:
    """Raise ConfigError unless a layer's weights are whole rows."""
    if sleep.layer_elements < HIDDEN or sleep.layer_elements % HIDDEN:
        raise ConfigError(f"--layer-elements: {sleep.layer_elements} is not a positive multiple of {HIDDEN}")


def batches(config: PreTrainedConfig, shape: tuple[int, int, int]) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Random steps without end, the same each time: micro-batches of int64 ids [B, S], which are the labels, too."""
    seq_len, rows, count = shape
    vocab_size = int(config.get_text_config(decoder=True).vocab_size)
    generator = torch.Generator().manual_seed(0)
    while True:
        step = []
        for _ in range(count):
            ids = torch.randint(0, vocab_size, (rows, seq_len), generator=generator)
            step.append({"input_ids": ids, "labels": ids})
        yield step
