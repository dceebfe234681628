"""Fills a new store from a checkpoint: safetensors to a stage's buffers, read directly, one tensor at a time.

The files are read by `safetensors_reader.py`; initialisation without a checkpoint is `hoist.scheduler.creation`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hoist.scheduler.creation import Source
from hoist.scheduler.stages import Stage, StagedModel
from hoist.tiers.io.base import IoEngine
from hoist.tools.checkpoint_names import match_model
from hoist.tools.safetensors_reader import CheckpointReader


def checkpoint_weights(reader: CheckpointReader, model: StagedModel, engine: IoEngine) -> Source:
    """A source of weights for `create_store`. Raises CheckpointError, at once, if names or shapes do not fit."""
    names = {spec.name: spec.shape for stage in model.stages for spec in stage.tensors}
    found = match_model(reader, model.model, names, tuple(model.aliases.items()))
    found.require()

    def fill(stage: Stage, values: Mapping[str, Tensor], staging: Tensor) -> None:
        for name, value in values.items():
            reader.read_into(found.sources[name], value.view(-1), engine=engine, staging=staging)
        reader.forget(engine)

    return fill
