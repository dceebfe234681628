"""What an export of a store with adapters writes: the adapters alone, in peft's format, or merged into the base.

Streamed like any export (`export.py`, which calls this); how adapters are made is `lora.py`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoist.scheduler.accumulate import row_cuts
from hoist.scheduler.reading import TensorReader
from hoist.tiers.layout import PlacedTensor, StageLayout
from hoist.tools.lora import adapter_name, adapter_of, checkpoint_name, is_adapter

#: peft's names of the two files of an adapter.
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

#: A store's tensors by name, each with the stage that it lies in.
Stored = Mapping[str, tuple[StageLayout, PlacedTensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """How adapters go into the weights that they are around."""

    scaling: float
    """What the product of an adapter's two matrices is multiplied with."""
    fan_in_fan_out: bool
    """Weights are [inputs, outputs] instead of [outputs, inputs]."""

    @classmethod
    def of(cls, adapter: Mapping[str, Any]) -> Merge:
        """From peft's configuration."""
        return cls(
            scaling=adapter["lora_alpha"] / adapter["r"], fan_in_fan_out=bool(adapter.get("fan_in_fan_out", False))
        )


def adapter_names(stored: Stored) -> dict[str, str]:
    """The adapters' tensors by their names in peft's files."""
    return {adapter_name(name): name for name in stored if is_adapter(name)}


def merged_names(stored: Stored) -> dict[str, str]:
    """The other tensors by their names in the checkpoint."""
    return {base: name for name in stored if (base := checkpoint_name(name)) is not None}


def elements(reader: TensorReader, layout: StageLayout, placed: PlacedTensor) -> Iterator[Tensor]:
    """A tensor's elements in order, 1-D parts of at most a window. A part is valid until the next is asked for."""
    read = reader.weights if placed.spec.trainable else reader.frozen
    start = 0
    while start < placed.spec.num_elements:
        part = read(layout, placed, start)
        yield part
        start += part.numel()


def merged_elements(reader: TensorReader, stored: Stored, name: str, merge: Merge) -> Iterator[Tensor]:
    """The same with the tensor's adapter added, if it has one: float32, W + (B A) * scaling, as peft merges.

    Needs the adapter's two matrices and twice a block of 4 MiB or 256 rows.
    """
    layout, placed = stored[name]
    around = adapter_of(name)
    if around is None or around[0] not in stored:
        yield from elements(reader, layout, placed)
        return
    first, second = (_whole(reader, *stored[part]) for part in around)
    num_rows, num_columns = placed.spec.shape
    parts = elements(reader, layout, placed)
    left = torch.empty(0)
    for start, stop in row_cuts(num_rows, num_columns):
        block = torch.empty((stop - start) * num_columns)
        filled = 0
        while filled < block.numel():
            if not left.numel():
                left = next(parts)
            count = min(left.numel(), block.numel() - filled)
            block[filled : filled + count] = left[:count]
            filled, left = filled + count, left[count:]
        product = (second @ first[:, start:stop]).T if merge.fan_in_fan_out else second[start:stop] @ first
        yield block.view(-1, num_columns).add_(product * merge.scaling).view(-1)


def _whole(reader: TensorReader, layout: StageLayout, placed: PlacedTensor) -> Tensor:
    return torch.cat([part.clone() for part in elements(reader, layout, placed)]).view(placed.spec.shape)


def write_config(directory: Path, adapter: Mapping[str, Any]) -> None:
    """Write peft's configuration of an adapter."""
    (directory / CONFIG_FILE).write_text(json.dumps(adapter, indent=2, sort_keys=True) + "\n", encoding="utf-8")
