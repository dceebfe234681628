"""Runs hoist's command line, in this process or in one of its own, on a tiny model and data made on the spot.

Also snapshots of directory trees, to show that a refusal has changed nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hoist.tools import cli
from hoist.tools.options import TrainOptions
from tests.support.models import VOCAB_SIZE, reference_model, tiny_config

SEQ_LEN, ROWS, MICRO_BATCHES = 16, 2, 2
TOKENS_PER_STEP = SEQ_LEN * ROWS * MICRO_BATCHES


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line of a refusal, without the program's name. Fails if it is none."""
        assert self.code == 2, (self.code, self.out, self.err)
        return self.line()

    def failure(self) -> str:
        """The one line of a failure."""
        assert self.code == 1, (self.code, self.out, self.err)
        return self.line()

    def line(self) -> str:
        """The only line on stderr, without the program's name."""
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("hoist: "), self.err
        assert "Traceback" not in self.err
        return self.err.removeprefix("hoist: ").rstrip("\n")


def hoist(capfd: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Run a command in this process."""
    capfd.readouterr()
    code = cli.run([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return Result(code=code, out=out, err=err)


def process_arguments(arguments: Sequence[object]) -> list[str]:
    """The argument vector of hoist in a process of its own."""
    return [sys.executable, "-m", "hoist.tools.cli", *map(str, arguments)]


def run_process(
    *arguments: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Result:
    """Run a command in a process of its own, to its end."""
    ended = subprocess.run(
        process_arguments(arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
    )
    return Result(code=ended.returncode, out=ended.stdout, err=ended.stderr)


def tree(*roots: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, size and content of everything below ``roots``, by path."""
    found: dict[str, tuple[int, int, str]] = {}
    for root in roots:
        for path in sorted([root, *root.rglob("*")]):
            status = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = (status.st_mode, 0 if path.is_dir() else status.st_size, content)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model directory without weights and token data, and how `hoist train` is told of them."""

    folder: Path
    model: Path
    data: Path
    store: Path

    @classmethod
    def at(cls, folder: Path) -> Self:
        """The job whose files are, or will be, in a folder."""
        return cls(folder=folder, model=folder / "model", data=folder / "tokens.npy", store=folder / "store")

    def options(self, **changed: object) -> TrainOptions:
        """The options of :meth:`arguments`, as `hoist.tools.train.train` takes them."""
        told = {name: str(value) for name, value in self._told(changed).items()}
        return TrainOptions.make(config=None, command_line={**told, "data": (told["data"],)})

    def arguments(self, *more: object, **changed: object) -> list[object]:
        """Arguments of `hoist train`; a keyword replaces an option (None leaves it out), ``more`` is appended."""
        words: list[object] = ["train"]
        for name, value in self._told(changed).items():
            words += ["--" + name.replace("_", "-"), value]
        return [*words, *more]

    def _told(self, changed: Mapping[str, object]) -> dict[str, object]:
        options: dict[str, object] = {
            "model": self.model,
            "data": self.data,
            "store": self.store,
            "host_memory": "16MiB",
            "seq_len": SEQ_LEN,
            "micro_batch_size": ROWS,
            "micro_batches": MICRO_BATCHES,
            "steps": 3,
            "lr": 0.01,
            "max_chunk_elements": 8192,
            **changed,
        }
        return {name: value for name, value in options.items() if value is not None}


def make_job(folder: Path, *, family: str = "llama", num_steps: int = 12, **config: Any) -> Job:
    """A job whose data lasts for ``num_steps`` steps of the usual size."""
    job = Job.at(folder)
    made = tiny_config(family)
    made.update(config)
    made.save_pretrained(job.model)
    np.save(job.data, np.random.default_rng(5).integers(3, VOCAB_SIZE, num_steps * TOKENS_PER_STEP).astype(np.uint16))
    return job


def save_model(
    directory: Path, family: str, *, dtype: torch.dtype = torch.float32, tied: bool = False, **saving: Any
) -> PreTrainedModel:
    """A model with weights of that type, written by transformers to ``directory``."""
    attention = "eager" if family == "gemma2" else "sdpa"  # Gemma-2 has no other
    model = reference_model(tiny_config(family, tied=tied), seed=3, attention=attention)
    convert: Any = model.to  # wrapped by transformers, without types
    convert(dtype)
    model.eval()
    model.save_pretrained(directory, **saving)
    return model


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `--metrics` file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(path: Path) -> list[tuple[int, float, float, float]]:
    """Step, loss, gradient norm and learning rate of each line of a `--metrics` file."""
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in read_metrics(path)]
