"""Makes what sides work on: a checkpoint of random weights, and ids of text that is on the machine.

Which sides take it is each benchmark's own; how they read it is in `feeding.py` and their own files.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hoist.scheduler.models import build_model, set_dropout
from hoist.tools.bench.sides.job import SideResult, Work
from hoist.tools.errors import DataError, ModelSourceError
from hoist.tools.presets import CONFIG_FILE, load_model_source
from hoist.tools.safetensors_reader import SINGLE_FILE
from hoist.tools.text import ByteTokenizer, TextTokenizer, stdlib_sources

#: How dropout is named in a config that a causal LM has no use for.
_NOT_TRAINED = ("summary_", "classifier_")


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


def model_of(model: Path) -> PreTrainedConfig:
    """The config of a directory from which every side can train the same.

    Raises ModelSourceError or CheckpointError if the directory has no config, not all its weights in one file, or asks
    for dropout, which each side would draw for itself.
    """
    config = load_model_source(str(model)).config
    if not (model / SINGLE_FILE).is_file():
        raise ModelSourceError(
            f"--model {model}: has no {SINGLE_FILE}; the sides read all weights from one file, so save the model with "
            'max_shard_size="1TB"'
        )
    told, without = config.to_dict(), copy.deepcopy(config)
    set_dropout(without, 0.0)
    asked = [
        f"{name} {told[name]}" for name, value in without.to_dict().items()
        if told[name] != value and not name.startswith(_NOT_TRAINED)
    ]  # fmt: skip
    if asked:
        raise ModelSourceError(
            f"--model {model}: its {CONFIG_FILE} asks for dropout ({', '.join(asked)}), which each side would draw for "
            "itself, so losses could not agree; set it to 0.0 there"
        )
    return config


def num_parameters(config: PreTrainedConfig) -> int:
    """Of the model, shared ones once. Raises ModelError for one that hoist cannot build."""
    return sum(parameter.numel() for parameter in build_model(config).parameters())


def keep(results: Sequence[SideResult], work: Work) -> list[dict[str, Any]]:
    """Results for an outcome, which outlives the files that they name: those of ``work`` stand for them."""
    return [asdict(replace(one, work=replace(one.work, model=work.model, tokens=work.tokens))) for one in results]


def make_tokens(path: Path, num_tokens: int, *, vocab_size: int, tokenizer: TextTokenizer | None = None) -> None:
    """Write ``num_tokens`` ids of Python's own sources to ``path``, from the beginning again where they end.

    ``tokenizer``: bytes if None. Raises ModelSourceError if the model has not all of the ids.
    """
    encoder = tokenizer or ByteTokenizer()
    parts: list[npt.NDArray[np.int64]] = []
    found = 0
    for source in stdlib_sources():
        if found >= num_tokens:
            break
        parts.append(encoder.encode(source.read_text(encoding="utf-8", errors="replace")))
        found += len(parts[-1])
    taken = np.resize(np.concatenate(parts), num_tokens)
    if taken.max() >= vocab_size:
        raise ModelSourceError(
            f"--model: has {vocab_size} ids, and {encoder.description} go up to {taken.max()}; name a larger vocabulary"
        )
    np.save(path, taken.astype(np.int32))


def take_tokens(path: Path, data: Path, num_tokens: int, *, vocab_size: int) -> None:
    """Write the first ``num_tokens`` ids of a file of the user's to ``path``, from the beginning again where they end.

    Raises DataError if it is no one-dimensional array of ids that the model has.
    """
    try:
        ids = np.load(data, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"--data {data}: cannot be read as .npy: {error}") from error
    if not isinstance(ids, np.ndarray):
        raise DataError(f"--data {data}: holds several arrays; a .npy of ids is needed")
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"--data {data}: shape {ids.shape} of {ids.dtype}; a one-dimensional array of ids is needed")
    taken = np.resize(ids[:num_tokens], num_tokens)
    if taken.min() < 0 or taken.max() >= vocab_size:
        raise DataError(f"--data {data}: has ids from {taken.min()} to {taken.max()}; the model has {vocab_size}")
    np.save(path, taken.astype(np.int32))
