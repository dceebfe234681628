"""Makes what sides work on: a checkpoint of random weights, and ids of text that is on the machine.

Which sides take it is each benchmark's own; how they read it is in `feeding.py` and their own files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hoist.tools.errors import BenchError
from hoist.tools.safetensors_reader import SINGLE_FILE
from hoist.tools.text import ByteTokenizer, TextTokenizer, stdlib_sources


def make_checkpoint(directory: Path, config: PreTrainedConfig, *, seed: int = 0) -> None:
    """Write a model of ``config`` with weights as transformers initialises them, in one float32 file.

    It is made in memory. torch's random state is kept.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    # Parameters that are tied are named once.
    save_file(dict(model.named_parameters()), directory / SINGLE_FILE, metadata={"format": "pt"})


def make_tokens(path: Path, num_tokens: int, *, tokenizer: TextTokenizer | None = None) -> None:
    """Write ``num_tokens`` ids of Python's own sources to ``path``, from the beginning again where they end.

    ``tokenizer``: bytes if None.
    """
    encoder = tokenizer or ByteTokenizer()
    parts: list[npt.NDArray[np.int64]] = []
    found = 0
    for source in stdlib_sources():
        if found >= num_tokens:
            break
        parts.append(encoder.encode(source.read_text(encoding="utf-8", errors="replace")))
        found += len(parts[-1])
    np.save(path, np.resize(np.concatenate(parts), num_tokens).astype(np.int32))


def take_tokens(path: Path, data: Path, num_tokens: int, *, vocab_size: int) -> None:
    """Write the first ``num_tokens`` ids of a file of the user's to ``path``, from the beginning again where they end.

    Raises BenchError if it is no one-dimensional array of ids that the model has.
    """
    try:
        ids = np.load(data, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise BenchError(f"--data {data}: cannot be read as .npy: {error}") from error
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise BenchError(f"--data {data}: shape {ids.shape} of {ids.dtype}; a one-dimensional array of ids is needed")
    taken = np.resize(ids[:num_tokens], num_tokens)
    if taken.min() < 0 or taken.max() >= vocab_size:
        raise BenchError(f"--data {data}: has ids from {taken.min()} to {taken.max()}; the model has {vocab_size}")
    np.save(path, taken.astype(np.int32))
