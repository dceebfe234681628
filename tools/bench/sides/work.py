"""Makes what sides work on: a checkpoint of random weights or of the user's, and ids of text or of the user's.

Which sides take it is each benchmark's own; how they read it is in `feeding.py` and their own files.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.models import build_model, set_dropout
from hoist.tools.bench.shapes import check_length, check_sleep, model_config
from hoist.tools.bench.sides.job import SideResult, Sleep, Work
from hoist.tools.bench.sides.sleeping import sleeping_config, weight_shapes, write_checkpoint
from hoist.tools.errors import DataError, ModelSourceError
from hoist.tools.presets import CONFIG_FILE, load_model_source
from hoist.tools.safetensors_reader import SINGLE_FILE
from hoist.tools.text import ByteTokenizer, TextTokenizer, stdlib_sources

#: How dropout is named in a config that a causal LM has no use for.
_NOT_TRAINED = ("summary_", "classifier_")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkRequest:
    """A work as it is asked for: which model is trained, on what, and how long."""

    model: Path | None = None
    """A Hugging Face directory with config.json and model.safetensors; None: ``sleep``, or the Llama shape."""
    hidden: int
    """Of the Llama shape, a multiple of 64; its vocabulary is eight times as wide."""
    num_layers: int
    """Of the Llama shape."""
    sleep: Sleep | None = None
    """Layers that sleep, instead of the Llama shape."""
    data: Path | None = None
    """A .npy of ids; None: Python's own sources, as bytes or as the model's tokenizer has them."""
    seq_len: int
    micro_batch_size: int
    num_micro_batches: int
    num_steps: int
    """Of a run; the first is not counted."""
    lr: float

    def check(self) -> None:
        """Raise ModelSourceError, CheckpointError or ConfigError for what cannot be trained by every side."""
        if not self.lr > 0.0:
            raise ConfigError(f"--lr: got {self.lr}, must be above 0: what learns nothing compares nothing")
        if self.model is not None and self.sleep is not None:
            raise ConfigError("--sleep: layers that sleep are a model of their own; leave --model out")
        if self.model is not None and not (self.model / SINGLE_FILE).is_file():
            raise ModelSourceError(
                f"--model {self.model}: has no {SINGLE_FILE}; name a directory with its weights in that one file"
            )
        config = self._config()
        check_length(config, self.seq_len)
        if self.model is not None:
            _refuse_dropout(config, self.model)

    def num_parameters(self) -> int:
        """Of the model, shared ones once. Raises as :meth:`check`, and ModelError for one that hoist cannot build."""
        if self.sleep is not None:
            return sum(math.prod(shape) for shape in weight_shapes(self.sleep).values())
        return sum(parameter.numel() for parameter in build_model(self._config()).parameters())

    def described(self, work: Work) -> Work:
        """The work as it is told in an outcome, which outlives the files that were made for it."""
        shape = "layers that sleep" if self.sleep else f"Llama of {self.num_layers} layers, hidden {self.hidden}"
        return replace(
            work,
            model=str(self.model or f"{shape}, random weights"),
            tokens=str(self.data or "Python's own sources"),
        )

    def kept(self, results: Sequence[SideResult]) -> list[dict[str, Any]]:
        """Results as an outcome has them: of :meth:`described` works."""
        return [asdict(replace(one, work=self.described(one.work))) for one in results]

    def _config(self) -> PreTrainedConfig:
        if self.model is not None:
            return load_model_source(str(self.model.absolute())).config
        if self.sleep is not None:
            check_sleep(self.sleep)
            return sleeping_config(self.sleep)
        return model_config(hidden=self.hidden, layers=self.num_layers, vocab=8 * self.hidden)

    def make(self, folder: Path) -> Work:
        """Make the checkpoint, unless it is the user's, and the ids, in ``folder``. Raises as :meth:`check`; DataError
        for ids that the model has not.
        """
        self.check()
        config, model, tokenizer = self._config(), folder / "model", None
        if self.model is not None:
            model = self.model.absolute()
            tokenizer = load_model_source(str(model)).tokenizer
        elif self.sleep is not None:
            model.mkdir()
            write_checkpoint(model, self.sleep)
        else:
            make_checkpoint(model, config)
        tokens = folder / "tokens.npy"
        num_tokens = self.num_steps * self.num_micro_batches * self.micro_batch_size * self.seq_len
        vocab_size = int(config.get_text_config(decoder=True).vocab_size)
        if self.data is not None:
            take_tokens(tokens, self.data, num_tokens, vocab_size=vocab_size)
        else:
            make_tokens(tokens, num_tokens, vocab_size=vocab_size, tokenizer=tokenizer)
        return self.work(model=str(model), tokens=str(tokens))

    def work(self, *, model: str, tokens: str) -> Work:
        """The work on files that are there."""
        return Work(
            model=model,
            tokens=tokens,
            seq_len=self.seq_len,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
            num_steps=self.num_steps,
            sleep=self.sleep,
            lr=self.lr,
            num_threads=torch.get_num_threads(),
        )


def _refuse_dropout(config: PreTrainedConfig, model: Path) -> None:
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


def make_checkpoint(
    directory: Path, config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> None:
    """Write a model of ``config`` with weights as transformers initialises them, in one file.

    It is made in memory. torch's random state is kept.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    # Parameters that are tied are named once.
    save_file(dict(model.named_parameters()), directory / SINGLE_FILE, metadata={"format": "pt"})


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
        raise DataError(f"--data {data}: holds several arrays; name a .npy of ids")
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(
            f"--data {data}: shape {ids.shape} of {ids.dtype}; name a one-dimensional array of integers, not empty"
        )
    taken = np.resize(ids[:num_tokens], num_tokens)
    if taken.min() < 0 or taken.max() >= vocab_size:
        raise DataError(
            f"--data {data}: has ids from {taken.min()} to {taken.max()}; the model has {vocab_size}, from 0"
        )
    np.save(path, taken.astype(np.int32))
