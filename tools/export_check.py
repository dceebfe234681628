"""Compares a written checkpoint with what it was made of, bit for bit, and with the model that its config describes.

Writing is `export.py`'s; the reader of files is `safetensors_reader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hoist.scheduler.models import build_model
from hoist.tiers.io.base import IoEngine
from hoist.tools.checkpoint_names import match_model
from hoist.tools.errors import CheckpointError, ExportError
from hoist.tools.model_files import load_config
from hoist.tools.safetensors_reader import SINGLE_FILE, SafetensorsReader


def compare(
    directory: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Callable[[str, int], Tensor],
    *,
    engine: IoEngine,
    staging: Tensor,
    advance: Callable[[int], None],
    adapter_file: str | None = None,
) -> None:
    """Read every tensor of a directory back from the drive and compare it.

    ``tensors``: type and shape of each that must be there, and no other. ``values(name, element)`` are its elements
    from ``element`` on, at least one, before conversion to the type. ``staging``: see `CheckpointReader.read_into`.
    ``advance`` gets bytes compared. Raises ExportError, naming tensor and element, for the first that differs, and
    where the model of the directory's config does not take exactly these tensors. ``adapter_file`` names the one file
    of an export of adapters, which has no such config.
    """
    try:
        reader = SafetensorsReader(directory, single_file=adapter_file or SINGLE_FILE)
    except CheckpointError as error:
        raise ExportError(f"export: what was written cannot be read back: {error}") from error
    found = {name: (entry.dtype, entry.shape) for name, entry in reader.tensors.items()}
    if found != dict(tensors):
        names = sorted(name for name in found.keys() | tensors.keys() if found.get(name) != tensors.get(name))
        raise ExportError(f"export to {directory}: {len(names)} tensors are not as planned: {', '.join(names[:3])}")
    try:
        for name, (dtype, shape) in tensors.items():
            element, num_elements = 0, torch.Size(shape).numel()
            while element < num_elements:
                expected = values(name, element).to(dtype)
                written = torch.empty_like(expected)
                reader.read_into(
                    name, written, start_element=element, engine=engine, staging=staging, refuse_nan=False
                )
                _require_same_bits(name, element, written, expected)
                element += expected.numel()
                advance(expected.numel() * dtype.itemsize)
    finally:
        reader.forget(engine)
    if adapter_file is None:
        _require_fit(reader, directory)


def _require_same_bits(name: str, element: int, written: Tensor, expected: Tensor) -> None:
    mine, theirs = written.view(torch.uint8), expected.view(torch.uint8)
    if torch.equal(mine, theirs):
        return
    differs = int((mine != theirs).to(torch.uint8).argmax()) // expected.dtype.itemsize
    raise ExportError(
        f"export: tensor {name!r} reads back as {written[differs].item()} at element {element + differs}, expected "
        f"{expected[differs].item()}; check the drive, nothing is left of the export"
    )


def _require_fit(reader: SafetensorsReader, directory: Path) -> None:
    """Every tensor has a place in the model of the exported config, and every place that is saved a tensor."""
    model = build_model(load_config(directory))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = [(name, source) for name, source in model.all_tied_weights_keys.items()]
    try:
        match_model(reader, model, shapes, tied).require()
    except CheckpointError as error:
        raise ExportError(f"export: the exported model does not take the exported tensors: {error}") from error
