"""What several benchmarks share: the Llama shape that they train, random steps of it, and the options that say which.

What is measured, and how, is each benchmark's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.configuration_utils import PreTrainedConfig

from hoist.scheduler.errors import ConfigError

#: Width of a head of the shape.
HEAD_WIDTH = 64


def model_config(*, hidden: int, layers: int, vocab: int) -> LlamaConfig:
    """The Llama shape that is measured: intermediate is 8/3 of hidden, cut to a multiple of 64; untied.

    Raises ConfigError if ``hidden`` is no multiple of :data:`HEAD_WIDTH`.
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


def refuse_longer(config: PreTrainedConfig, seq_len: int) -> None:
    """Raise ConfigError if the model has no positions for so many tokens."""
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ConfigError(f"--seq-len: {seq_len} is longer than the {longest} positions that the model has")


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


def parse_shape(text: str) -> tuple[int, int, int]:
    """``64,2,4`` as seq_len, micro_batch_size, num_micro_batches. Raises ValueError on what is none."""
    seq_len, rows, count = (int(part) for part in text.split(","))
    return seq_len, rows, count


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A benchmark's parser, with ``--directory`` and ``--json``. ``name``: its module in this folder."""
    command = f"python -m hoist.tools.bench.{name}"
    parser = argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=f"Example: {command} --directory .",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--directory", type=Path, default=Path(), help="where stores are made (and removed)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    return parser


def add_model_options(parser: argparse.ArgumentParser, *, host_memory: str, hidden: int, layers: int) -> None:
    """Options for the budget and :func:`model_config`, with these defaults; the vocabulary is eight times as wide."""
    parser.add_argument("--host-memory", default=host_memory, help=f"budget of a trainer; default: {host_memory}")
    parser.add_argument("--hidden", type=int, default=hidden, help=f"default: {hidden}")
    parser.add_argument("--layers", type=int, default=layers, help=f"default: {layers}")
    parser.add_argument("--vocab", type=int, default=8 * hidden, help=f"default: {8 * hidden}")
