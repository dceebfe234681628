"""Fills a new store from a checkpoint: files to a stage's buffers, read directly, one tensor at a time.

The files are read by `checkpoint.py`; initialisation without a checkpoint is `hoist.scheduler.creation`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hoist.scheduler.creation import Source, refuse_non_finite
from hoist.scheduler.stages import Stage, StagedModel
from hoist.tiers.arena import Arena
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import NARROW_DTYPES, StageLayout, TensorSpec
from hoist.tools.checkpoint import CheckpointReader, Match
from hoist.tools.checkpoint_names import match_model
from hoist.tools.lora import checkpoint_name, is_adapter

#: Elements that :func:`check_weights` looks at in one go, and bytes that it reads at a time: 8 + 4 MiB in all.
_WINDOW_ELEMENTS = 2 * 2**20
_STAGING_BYTES = 4 * 2**20


def checkpoint_weights(reader: CheckpointReader, model: StagedModel, engine: IoEngine) -> Source:
    """A source of weights for `create_store`. Raises CheckpointError, at once, if names or shapes do not fit."""
    found = _match(reader, model, [spec for stage in model.stages for spec in stage.tensors])
    found.require()
    places = {name: number for number, name in enumerate(reader.tensors)}

    def fill(stage: Stage, values: Mapping[str, Tensor], staging: Tensor) -> None:
        try:  # as they lie in the files, so that a shard is opened once for a stage
            sources = {name: found.sources[_in_checkpoint(name)] for name in values}
            for name in sorted(values, key=lambda name: places[sources[name][0]]):
                reader.read_into(sources[name], values[name].view(-1), engine=engine, staging=staging)
        finally:
            reader.forget(engine)

    return fill


def checkpoint_dtypes(reader: CheckpointReader, model: StagedModel) -> dict[str, str]:
    """Frozen weights that the checkpoint has in 16 bits, with their dtype: they need not be kept as float32."""
    frozen = [spec for stage in model.stages for spec in stage.tensors if spec.frozen_weight]
    if not frozen:
        return {}
    found = _match(reader, model, frozen)
    dtypes: dict[str, str] = {}
    for spec in frozen:
        sources = found.sources.get(_in_checkpoint(spec.name), ())
        parts = {str(reader.tensors[part].dtype).removeprefix("torch.") for part in sources}
        if len(parts) == 1 and parts <= NARROW_DTYPES:
            dtypes[spec.name] = parts.pop()
    return dtypes


def _match(reader: CheckpointReader, model: StagedModel, specs: Sequence[TensorSpec]) -> Match:
    """Find tensors of the model, adapters apart, in its checkpoint, which knows of no adapters."""
    shapes = {_in_checkpoint(spec.name): spec.shape for spec in specs if not is_adapter(spec.name)}
    aliases = tuple((_in_checkpoint(other), _in_checkpoint(name)) for other, name in model.aliases.items())
    return match_model(reader, model.model, shapes, aliases)


def _in_checkpoint(name: str) -> str:
    return checkpoint_name(name) or name


def stored_dtypes(layouts: Sequence[StageLayout]) -> dict[str, str]:
    """Frozen weights that a store keeps in 16 bits, with their dtype."""
    specs = [placed.spec for layout in layouts for placed in layout.frozen]
    return {spec.name: spec.dtype for spec in specs if spec.frozen_weight and spec.dtype in NARROW_DTYPES}


def check_weights(
    reader: CheckpointReader,
    model: StagedModel,
    engine: IoEngine,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read every floating-point weight once and refuse NaN and infinity, before a store that is replaced is removed.

    Making a store checks its weights too, as it writes them: with a store to lose that is too late. Takes 12 MiB.
    ``progress`` gets done and total bytes. Raises CheckpointError or ModelError, TransferError if a read fails.
    """
    specs = [
        spec
        for stage in model.stages
        for spec in stage.tensors
        if getattr(torch, spec.dtype).is_floating_point and not is_adapter(spec.name)
    ]
    found = _match(reader, model, specs)
    found.require(allow_unexpected=True)
    arena = Arena(4 * _WINDOW_ELEMENTS + _STAGING_BYTES)
    values = arena.lease(4 * _WINDOW_ELEMENTS, "values").tensor.view(torch.float32)
    staging = arena.lease(_STAGING_BYTES, "staging").tensor
    done, total = 0, sum(spec.num_elements * getattr(torch, spec.dtype).itemsize for spec in specs)
    try:
        for spec in specs:
            for start in range(0, spec.num_elements, _WINDOW_ELEMENTS):
                part = values[: min(_WINDOW_ELEMENTS, spec.num_elements - start)]
                source = found.sources[_in_checkpoint(spec.name)]
                reader.read_into(source, part, start_element=start, engine=engine, staging=staging)
                refuse_non_finite({spec.name: part})
                done += part.numel() * getattr(torch, spec.dtype).itemsize
                if progress is not None:
                    progress(done, total)
    finally:
        reader.forget(engine)
        arena.close()
