"""What an export of a store with adapters writes: the adapters alone, in peft's format, or merged into the base.

Streamed like any export, by `export.py`, which asks for the elements; how adapters are made is `lora.py`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def adapter_names(stored: Stored) -> dict[str, str]:
    """The adapters' tensors by their names in peft's files."""
    return {adapter_name(name): name for name in stored if is_adapter(name)}


def merged_names(stored: Stored) -> dict[str, str]:
    """The other tensors by their names in the checkpoint."""
    return {base: name for name in stored if (base := checkpoint_name(name)) is not None}


class Merger:
    """Reads weights with the adapters that are around them added: W + (B A) * scaling in float32, as peft merges.

    Keeps the two matrices of one adapter, and one block of the weight: 4 MiB or 256 rows.
    """

    def __init__(self, layouts: Sequence[StageLayout], adapter: Mapping[str, Any]) -> None:
        """``adapter`` is peft's configuration."""
        self._stored: dict[str, tuple[StageLayout, PlacedTensor]] = {
            placed.spec.name: (layout, placed) for layout in layouts for placed in (*layout.trainable, *layout.frozen)
        }
        self._scaling: float = adapter["lora_alpha"] / adapter["r"]
        #: Weights are [inputs, outputs] instead of [outputs, inputs].
        self._fan_in_fan_out = bool(adapter.get("fan_in_fan_out", False))
        #: The weight whose adapter is at hand: A and B.
        self._name = ""
        self._first = self._second = torch.empty(0)
        #: Rows of it that are at hand, merged.
        self._rows = (0, 0)
        self._block = torch.empty(0)

    def has(self, placed: PlacedTensor) -> bool:
        """Whether an adapter is around the tensor."""
        around = adapter_of(placed.spec.name)
        return around is not None and around[0] in self._stored

    def read(self, reader: TensorReader, layout: StageLayout, placed: PlacedTensor, start: int) -> Tensor:
        """Merged elements of a tensor from ``start`` on, counted flattened, at least one; valid until the next call."""
        name, (num_rows, num_columns) = placed.spec.name, placed.spec.shape
        if name != self._name:
            first, second = adapter_of(name) or ("", "")
            self._first, self._second = (_rows_of(reader, *self._stored[part]) for part in (first, second))
            self._name, self._rows = name, (0, 0)
        row = start // num_columns
        if not self._rows[0] <= row < self._rows[1]:
            self._rows = next(cut for cut in row_cuts(num_rows, num_columns) if cut[0] <= row < cut[1])
            self._block = self._merged(reader, layout, placed, *self._rows)
        return self._block.view(-1)[start - self._rows[0] * num_columns :]

    def _merged(
        self, reader: TensorReader, layout: StageLayout, placed: PlacedTensor, start: int, stop: int
    ) -> Tensor:
        block = _rows_of(reader, layout, placed, start, stop)
        if self._fan_in_fan_out:
            product = (self._second @ self._first[:, start:stop]).T
        else:
            product = self._second[start:stop] @ self._first
        return block.add_(product * self._scaling)


def _rows_of(
    reader: TensorReader, layout: StageLayout, placed: PlacedTensor, first_row: int = 0, stop_row: int | None = None
) -> Tensor:
    """Some rows of a matrix, all by default: float32 [rows, columns]."""
    num_rows, num_columns = placed.spec.shape
    values = torch.empty((num_rows if stop_row is None else stop_row) - first_row, num_columns)
    flat, done = values.view(-1), 0
    read = reader.weights if placed.spec.trainable else reader.frozen
    while done < flat.numel():
        part = read(layout, placed, first_row * num_columns + done)[: flat.numel() - done]
        flat[done : done + part.numel()] = part
        done += part.numel()
    return values


def write_config(directory: Path, adapter: Mapping[str, Any]) -> None:
    """Write peft's configuration of an adapter."""
    (directory / CONFIG_FILE).write_text(json.dumps(adapter, indent=2, sort_keys=True) + "\n", encoding="utf-8")
