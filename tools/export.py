"""`hoist export`: a store's committed weights as a Hugging Face directory, streamed tensor by tensor.

The writer of safetensors is `safetensors_writer.py`; reading the store is `hoist.scheduler.reading`; comparing what was
written with the store is `export_check.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hoist.scheduler.errors import ConfigError
from hoist.scheduler.models import build_model
from hoist.scheduler.reading import TensorReader
from hoist.tiers.allocation import DirectoryState, directory_state
from hoist.tiers.arena import Arena
from hoist.tiers.errors import StoreFormatError
from hoist.tiers.format import COMMIT_NAME, MODEL_DIRECTORY
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import PlacedTensor, StageLayout
from hoist.tiers.store import Store
from hoist.tools.adapter_export import WEIGHTS_FILE, Merger, adapter_names, merged_names, write_config
from hoist.tools.checkpoint_names import published
from hoist.tools.errors import ExportError, ExportRefusedError
from hoist.tools.export_check import compare
from hoist.tools.model_files import (
    ADAPTER_KEY,
    WeightTypes,
    copy_model_files,
    load_config,
    refuse_modules,
    stored_weight_types,
)
from hoist.tools.safetensors_reader import SINGLE_FILE
from hoist.tools.safetensors_writer import MAX_SHARD_BYTES, StreamingWriter

#: Elements that are read at a time, and the writer's buffer: 8 + 8 MiB in all.
WINDOW_ELEMENTS = 2**20
STAGING_BYTES = 8 * 2**20

#: What weights can be written as.
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
    dtype: str
    """Type of the weights, but for those that came in another."""
    base: str | None = None
    """The model that adapters, if these were written, belong to; None for a whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """A tensor of the export: a part of a tensor in the store, nearly always all of it."""

    layout: StageLayout
    placed: PlacedTensor
    start: int
    """First element of the part, counted flattened."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Type in the export."""
    merger: Merger | None = None
    """Adds the adapter that is around the tensor, if there is one."""

    def read(self, reader: TensorReader, element: int) -> torch.Tensor:
        """Elements of the part from ``element`` on, at least one, in the store's type, or float32 where an adapter is
        added; valid until the next call."""
        num_elements = torch.Size(self.shape).numel()
        if self.merger is not None:
            merged = self.merger.read(reader, self.layout, self.placed, self.start + element)
            return merged[: num_elements - element]
        read = reader.weights if self.placed.spec.trainable else reader.frozen
        return read(self.layout, self.placed, self.start + element)[: num_elements - element]


def export_store(
    store_directory: Path,
    target: Path,
    *,
    engine: IoEngine,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge: bool = False,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ExportSummary:
    """Write the last commit's weights and the model's small files to the new directory ``target``.

    Names are those that save_pretrained writes; tied tensors are written once. Weights, frozen ones too, are written as
    ``dtype``, by default in the types that they were imported in (float32 if they were initialised and the config says
    nothing), buffers as they are kept. Of a store with adapters these alone are written, as peft does, in float32 by
    default; with ``merge`` the whole model with them added. ``verify`` reads everything back before the directory gets
    its name, compares it with the store bit for bit, and checks that the model of the exported config takes every
    tensor.
    ``progress`` gets done and total bytes, twice as many with ``verify``.

    Needs about 24 MiB beside the modules of the model, whatever its size. The store may be trained meanwhile, but not
    for longer than to its next commit: then ExportError. On any failure nothing is left at ``target``. Raises
    ConfigError for a ``dtype`` that is not one of :data:`DTYPES`, StoreRefusedError and StoreFormatError where there is
    no whole store, ExportRefusedError for a target that cannot be used, ExportError for what differs, TransferError
    when a drive fails.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    _refuse_inside_store(target)
    with Store.open(store_directory, engine=engine, writable=False) as store:
        if store.record is None:
            raise StoreFormatError(f"{store.directory}: nothing is committed")
        refuse_modules(store.directory / MODEL_DIRECTORY)
        adapter = store.attributes.get(ADAPTER_KEY)
        if merge and adapter is None:
            raise ConfigError(f"--merge: {store.directory} has no adapters to merge; leave it out")
        alone = adapter is not None and not merge
        architecture = ""
        if alone:
            types = WeightTypes(main=dtype or "float32")
            parts = _adapter_parts(store, types)
        else:
            types = WeightTypes(main=dtype) if dtype is not None else stored_weight_types(store)
            model = build_model(load_config(store.directory / MODEL_DIRECTORY))  # without weights, for its names alone
            architecture = type(model).__name__
            parts = _parts(store, model, types, None if adapter is None else Merger(store.layouts, adapter))
            del model
        total = sum(part.dtype.itemsize * torch.Size(part.shape).numel() for part in parts.values())
        arena = Arena(STAGING_BYTES)
        reader = TensorReader(store, engine, window_elements=WINDOW_ELEMENTS)
        staging = arena.lease(STAGING_BYTES, "staging").tensor
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done, total * (1 + verify))

        try:
            with StreamingWriter(
                target,
                [(name, part.dtype, part.shape) for name, part in parts.items()],
                2**63 if alone else max_shard_bytes,
                engine=engine,
                staging=staging,
                single_file=WEIGHTS_FILE if alone else SINGLE_FILE,
            ) as writer:
                for planned in writer.plan:
                    element = 0
                    while element < planned.num_elements:
                        values = parts[planned.name].read(reader, element)
                        writer.write(planned.name, values)
                        element += values.numel()
                        advance(values.numel() * planned.dtype.itemsize)
                folder = writer.temporary_directory
                if adapter is not None and alone:
                    write_config(folder, adapter)
                else:
                    copy_model_files(
                        store.directory / MODEL_DIRECTORY, folder, dtype=types.main, architecture=architecture
                    )
                if verify:
                    writer.complete()
                    compare(
                        folder,
                        {name: (part.dtype, part.shape) for name, part in parts.items()},
                        lambda name, element: parts[name].read(reader, element),
                        engine=engine,
                        staging=staging,
                        advance=advance,
                        adapter_file=WEIGHTS_FILE if alone else None,
                    )
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
            num_tensors=len(parts),
            num_bytes=total,
            dtype=types.main,
            base=str(adapter.get("base_model_name_or_path")) if adapter is not None and alone else None,
        )


def _refuse_inside_store(target: Path) -> None:
    """Raise ExportRefusedError for a target in a store, which keeps nothing of others': ``--fresh`` removes it."""
    for folder in target.resolve().parents:
        if os.access(folder / COMMIT_NAME, os.F_OK) and directory_state(folder) is DirectoryState.COMMITTED:
            raise ExportRefusedError(f"export to {target}: lies inside the store {folder}; name a directory outside it")


def _stored(store: Store) -> dict[str, tuple[StageLayout, PlacedTensor]]:
    """The store's tensors by name."""
    return {
        placed.spec.name: (layout, placed)
        for layout in store.layouts
        for placed in (*layout.trainable, *layout.frozen)
    }


def _adapter_parts(store: Store, types: WeightTypes) -> dict[str, StoredPart]:
    """The adapters' tensors by peft's names."""
    stored = _stored(store)
    return {
        written: StoredPart(
            layout=stored[name][0],
            placed=stored[name][1],
            start=0,
            shape=stored[name][1].spec.shape,
            dtype=DTYPES[types.main],
        )
        for written, name in adapter_names(stored).items()
    }


def _parts(
    store: Store, model: PreTrainedModel, types: WeightTypes, merger: Merger | None
) -> dict[str, StoredPart]:
    """The tensors of the export by name, in the store's order; without adapters, which ``merger`` adds."""
    stored = _stored(store)
    tensors = {name: stored[inner] for name, inner in merged_names(stored).items()} if merger is not None else stored
    shapes = {name: placed.spec.shape for name, (_, placed) in tensors.items()}
    names = published(model, shapes)
    parts: dict[str, StoredPart] = {}
    for name, (layout, placed) in tensors.items():
        start = 0
        for written, shape in names[name]:
            kept = getattr(torch, placed.spec.dtype)
            parts[written] = StoredPart(
                layout=layout,
                placed=placed,
                start=start,
                shape=shape,
                dtype=DTYPES[types.of(written)] if placed.spec.is_weight else kept,
                merger=merger if merger is not None and merger.has(placed) else None,
            )
            start += torch.Size(shape).numel()
    return parts
