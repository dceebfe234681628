"""`hoist export`: a store's committed weights as a Hugging Face directory, streamed tensor by tensor.

The writer of safetensors is `safetensors_writer.py`; reading the store is `hoist.scheduler.reading`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.reading import TensorReader
from hoist.tiers.arena import Arena
from hoist.tiers.errors import StoreFormatError
from hoist.tiers.format import MODEL_DIRECTORY
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import PlacedTensor, StageLayout
from hoist.tiers.store import Store
from hoist.tools.adapter_export import (
    WEIGHTS_FILE,
    Merge,
    adapter_names,
    elements,
    merged_elements,
    merged_names,
    write_config,
)
from hoist.tools.errors import ExportError
from hoist.tools.lora import ADAPTER_KEY
from hoist.tools.model_files import copy_model_files
from hoist.tools.safetensors_reader import SINGLE_FILE
from hoist.tools.safetensors_writer import MAX_SHARD_BYTES, StreamingWriter

#: Elements that are read at a time, and the writer's buffer: 8 + 8 MiB in all.
WINDOW_ELEMENTS = 2**20
STAGING_BYTES = 8 * 2**20

#: What trainable weights can be written as.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSummary:
    """What an export wrote."""

    directory: Path
    step: int
    """Optimizer steps that the weights carry."""
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors."""
    base: str | None = None
    """The model that adapters, if these were written, belong to; None for a whole model."""


def export_store(
    store_directory: Path,
    target: Path,
    *,
    engine: IoEngine,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ExportSummary:
    """Write the last commit's weights and the model's small files to the new directory ``target``.

    Of a store with adapters these alone are written, as peft does, or with ``merge`` the model with them added.
    Tied tensors are written once. Weights, frozen ones too, are written as ``dtype``, buffers as they are kept.
    Needs about 24 MiB, whatever the model's size. The store may be trained meanwhile, but not for longer than to its
    next commit: then ExportError. On any failure nothing is left at ``target``. Raises ConfigError for a ``dtype`` that
    is not one of :data:`DTYPES`, StoreRefusedError and StoreFormatError where there is no whole store,
    ExportRefusedError for a target that cannot be used, TransferError when a drive fails.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    with Store.open(store_directory, engine=engine, writable=False) as store:
        if store.record is None:
            raise StoreFormatError(f"{store.directory}: nothing is committed")
        stored: dict[str, tuple[StageLayout, PlacedTensor]] = {
            placed.spec.name: (layout, placed)
            for layout in store.layouts
            for placed in (*layout.trainable, *layout.frozen)
        }
        adapter = store.attributes.get(ADAPTER_KEY)
        if merge and adapter is None:
            raise ConfigError(f"--merge: {store.directory} has no adapters to merge; leave it out")
        names = {name: name for name in stored}
        if adapter is not None:
            names = merged_names(stored) if merge else adapter_names(stored)
        alone = adapter is not None and not merge
        tensors = {given: stored[name] for given, name in names.items()}
        exported = {
            name: DTYPES[dtype]
            if placed.spec.trainable or placed.spec.frozen_weight
            else getattr(torch, placed.spec.dtype)
            for name, (_, placed) in tensors.items()
        }
        total = sum(exported[name].itemsize * placed.spec.num_elements for name, (_, placed) in tensors.items())
        arena = Arena(STAGING_BYTES)
        reader = TensorReader(store, engine, window_elements=WINDOW_ELEMENTS)
        try:
            with StreamingWriter(
                target,
                [(name, exported[name], placed.spec.shape) for name, (_, placed) in tensors.items()],
                2**63 if alone else max_shard_bytes,
                engine=engine,
                staging=arena.lease(STAGING_BYTES, "staging").tensor,
                single_file=WEIGHTS_FILE if alone else SINGLE_FILE,
            ) as writer:
                done = 0
                for planned in writer.plan:
                    if adapter is not None and merge:
                        parts = merged_elements(reader, stored, names[planned.name], Merge.of(adapter))
                    else:
                        parts = elements(reader, *tensors[planned.name])
                    for part in parts:
                        writer.write(planned.name, part)
                        done += part.numel() * planned.dtype.itemsize
                        if progress is not None:
                            progress(done, total)
                if adapter is not None and alone:
                    write_config(writer.temporary_directory, adapter)
                else:
                    copy_model_files(store.directory / MODEL_DIRECTORY, writer.temporary_directory, dtype=dtype)
                if not store.is_current():
                    raise ExportError(
                        f"{store.directory}: a run committed while it was exported; stop the run or export again"
                    )
        finally:
            reader.close()
            arena.close()
        return ExportSummary(
            directory=target,
            step=store.record.step,
            num_tensors=len(tensors),
            num_bytes=total,
            base=str(adapter.get("base_model_name_or_path")) if adapter is not None and alone else None,
        )
