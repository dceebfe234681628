"""Checkpoints in each format, as others write them: files of tensors, and indexes of shards.

What reads them is `hoist.tools.checkpoint`'s; models saved by transformers are in `commands.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hoist.tools.checkpoint import CheckpointReader
from hoist.tools.safetensors_reader import SafetensorsReader
from hoist.tools.torch_reader import TorchReader

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format of checkpoints."""

    name: str
    single: str
    """The file of a checkpoint that has one."""
    index: str
    """The file that names the shards."""
    reader: Callable[[Path], CheckpointReader]
    write: Callable[[Tensors, Path], None]
    """Make one file of tensors."""

    def save(self, tensors: Tensors, directory: Path) -> Path:
        """A checkpoint of one file; returns that."""
        self.write(tensors, directory / self.single)
        return directory / self.single

    def shard(self, number: int, total: int) -> str:
        """The name of a shard, numbered from 1."""
        stem, _, ending = self.single.partition(".")
        return f"{stem}-{number:05d}-of-{total:05d}.{ending}"

    def save_shards(self, directory: Path, *shards: Tensors) -> Path:
        """A new directory with an index; returns it."""
        directory.mkdir()
        places = {}
        for number, tensors in enumerate(shards, start=1):
            name = self.shard(number, len(shards))
            self.write(tensors, directory / name)
            places.update(dict.fromkeys(tensors, name))
        (directory / self.index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return directory

    def two_shards(self, directory: Path) -> Path:
        """Tensors a and b in the first shard, c in the second."""
        return self.save_shards(
            directory, {"a": torch.arange(5000.0), "b": torch.ones(3, 5)}, {"c": torch.arange(7000.0)}
        )

    def edit_index(self, directory: Path, change: Callable[[dict[str, str]], None]) -> None:
        """Change what an index says of its shards."""
        index = directory / self.index
        document = json.loads(index.read_text())
        change(document["weight_map"])
        index.write_text(json.dumps(document))


def _write_safetensors(tensors: Tensors, path: Path) -> None:
    save_file(dict(tensors), path)


def _write_torch(tensors: Tensors, path: Path) -> None:
    save: Any = torch.save
    save(dict(tensors), path)


SAFETENSORS = Format(
    name="safetensors",
    single="model.safetensors",
    index="model.safetensors.index.json",
    reader=SafetensorsReader,
    write=_write_safetensors,
)
TORCH = Format(
    name="torch",
    single="pytorch_model.bin",
    index="pytorch_model.bin.index.json",
    reader=TorchReader,
    write=_write_torch,
)
FORMATS = (SAFETENSORS, TORCH)
