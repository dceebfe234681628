"""Checkpoints in each format, as others write them: files of tensors, and indexes of shards.

What reads them is `hoist.tools.checkpoint`'s; models saved by transformers are in `commands.py`.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hoist.tiers.arena import Arena
from hoist.tiers.io.direct import DirectEngine
from hoist.tools.checkpoint import CheckpointReader
from hoist.tools.safetensors_reader import SafetensorsReader
from hoist.tools.safetensors_writer import StreamingWriter, plan_shards
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The size of a Llama whose weights are numbers that follow from their names."""

    hidden: int
    layers: int
    vocab: int

    def config(self) -> LlamaConfig:
        """As transformers takes it."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            tie_word_embeddings=False,
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config())
        return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def large_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 values that no other tensor has."""
    first = zlib.crc32(name.encode()) % 2**20
    return torch.arange(first, first + math.prod(shape), dtype=torch.float32).mul_(2.0**-31).view(shape)


def write_large(directory: Path, shape: Shape, *, form: str, num_shards: int, shuffled: bool) -> int:
    """A new directory with config and weights, one tensor in memory at a time (torch: one shard). Returns the bytes."""
    shapes = shape.tensors()
    names = list(shapes)
    if shuffled:
        random.Random(1).shuffle(names)
    num_bytes = sum(4 * math.prod(each) for each in shapes.values())
    if form == "torch":
        directory.mkdir()
        cuts = [names[number::num_shards] for number in range(num_shards)]
        places = {}
        for number, cut in enumerate(cuts, start=1):
            file = TORCH.single if num_shards == 1 else TORCH.shard(number, num_shards)
            TORCH.write({name: large_tensor(name, shapes[name]) for name in cut}, directory / file)
            places.update(dict.fromkeys(cut, file))
        if num_shards > 1:
            (directory / TORCH.index).write_text(json.dumps({"weight_map": places}))
        shape.config().save_pretrained(directory)
        return num_bytes
    arena = Arena(2**24)
    planned = [(name, torch.float32, shapes[name]) for name in names]
    most = -(-num_bytes // num_shards)
    while plan_shards(planned, most)[-1].shard >= num_shards:
        most += most // 100
    with (
        DirectEngine() as engine,
        StreamingWriter(
            directory,
            planned,
            most,
            engine=engine,
            staging=arena.lease(2**24, "staging").tensor,
        ) as writer,
    ):
        for tensor in writer.plan:
            writer.write(tensor.name, large_tensor(tensor.name, tensor.shape).view(-1))
        shape.config().save_pretrained(writer.temporary_directory)
    arena.close()
    return num_bytes


def differing_tensors(directory: Path, shape: Shape) -> list[str]:
    """Names of the tensors in a directory that are not those of :func:`write_large`, missing ones and others too."""
    found: dict[str, bool] = dict.fromkeys(shape.tensors(), False)
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for name in set(opened.keys()):
                value = opened.get_tensor(name)
                found[name] = torch.equal(value, large_tensor(name, tuple(value.shape)))
    return [name for name, same in found.items() if not same]
