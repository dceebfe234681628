"""Fills a new store with initial weights, one stage at a time, inside the run's own buffers; then commits step 0.

Where the values come from is the caller's: transformers' initialisation (`stages.py`) or a checkpoint (`tools/`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoist.optim.split import split
from hoist.scheduler.errors import ModelError
from hoist.scheduler.setup import Setup
from hoist.scheduler.stages import Stage, StagedModel
from hoist.tiers import checksum, heap
from hoist.tiers.checksum import ChunkChecksum
from hoist.tiers.dealing import MeasuredDirectory
from hoist.tiers.format import MODEL_DIRECTORY, StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import StageLayout
from hoist.tiers.store import Store

#: Fills the owned tensors of a stage in place: name -> float32 (frozen ones: own dtype) view with the tensor's shape.
#: The last argument is memory that it may use for staging, uint8, 4 KiB-aligned.
Source = Callable[[Stage, Mapping[str, Tensor], Tensor], None]
Progress = Callable[[str, int, int], None]

#: Weights are looked at for NaN and infinity in parts of so many elements, 1 MiB, since that takes temporaries.
_CHECKED_ELEMENTS = 2**18


def initialised(seed: int) -> Source:
    """Weights as transformers would initialise them, deterministic in ``seed``."""

    def fill(stage: Stage, values: Mapping[str, Tensor], staging: Tensor) -> None:
        stage.initialise(values, seed=seed)

    return fill


def create_store(
    directory: Path,
    *,
    model: StagedModel,
    setup: Setup,
    engine: IoEngine,
    source: Source,
    attributes: Mapping[str, Any],
    run: Mapping[str, Any] | None = None,
    extras: Callable[[Path], None] | None = None,
    drives: Sequence[MeasuredDirectory] = (),
    fresh: bool = False,
    progress: Progress | None = None,
) -> Store:
    """Create a store, fill it stage by stage from ``source`` and commit it as step 0.

    Never holds more than one stage's weights, in the buffers that training uses. ``progress`` gets what is being done
    and done and total bytes. ``extras`` is called with the directory for small files that belong beside the weights
    (configuration, tokenizer). ``drives``: see :meth:`Store.create`. Raises StoreRefusedError with nothing changed,
    ModelError on weights that are not finite, whatever ``source`` raises, TransferError; after those the directory
    holds no store that opens.
    """

    def report(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(what, done, total)

    store = Store.create(
        directory,
        layouts=setup.layouts,
        attributes=attributes,
        engine=engine,
        num_slots=setup.num_slots,
        scratch_bytes=setup.scratch_bytes,
        drives=drives,
        fresh=fresh,
        progress=report("reserving space"),
    )
    try:
        _fill(store, model, setup, engine, source, report("writing weights"))
        if extras is not None:
            extras(store.directory / MODEL_DIRECTORY)
        names = [placed.spec.name for layout in setup.layouts for placed in layout.trainable]
        store.commit(step=0, adam_steps=dict.fromkeys(names, 0), run=dict(run or {}))
    except BaseException:
        store.discard()
        raise
    heap.trim()
    return store


def _fill(
    store: Store,
    model: StagedModel,
    setup: Setup,
    engine: IoEngine,
    source: Source,
    progress: Callable[[int, int], None] | None,
) -> None:
    places = setup.places()
    total = sum(layout.num_elements for layout in setup.layouts)
    done = 0
    try:
        for stage, layout in zip(model.stages, setup.layouts, strict=True):
            stage_places = places.stages[layout.index]
            stage_places.weights.zero_()
            stage_places.frozen.zero_()
            owned = {name: tensor for name, tensor in stage_places.tensors().items() if name not in stage.borrowed}
            source(stage, owned, places.gradient_region)
            refuse_non_finite(owned, may_be_infinite={placed.spec.name for placed in layout.frozen})
            _write_stage(store, layout, stage_places.weights, stage_places.frozen, places.states, engine, setup)
            done += layout.num_elements
            if progress is not None:
                progress(done, total)
    finally:
        places.close()


def refuse_non_finite(values: Mapping[str, Tensor], *, may_be_infinite: Collection[str] = ()) -> None:
    """Raise ModelError, naming the tensor, if a floating-point one holds NaN or infinity. Takes about 1 MiB.

    Of those that ``may_be_infinite`` (bounds in buffers are) only NaN is refused.
    """
    for name, value in values.items():
        if not value.is_floating_point():
            continue
        flat = value.reshape(-1)
        for start in range(0, flat.numel(), _CHECKED_ELEMENTS):
            part = flat[start : start + _CHECKED_ELEMENTS]
            if bool(torch.isnan(part).any() if name in may_be_infinite else not torch.isfinite(part).all()):
                raise ModelError(f"weights: {name} holds NaN or infinity; repair the checkpoint and import it again")


def _write_stage(
    store: Store,
    layout: StageLayout,
    weights: Tensor,
    frozen: Tensor,
    slots: list[Any],
    engine: IoEngine,
    setup: Setup,
) -> None:
    """Split the stage's weights piece by piece and write them; moments stay the zeros of fresh files.

    Nothing is in flight when it returns or raises.
    """
    pending: dict[int, list[Future[None]]] = {}
    try:
        _write_trainable(store, layout, weights, slots, engine, setup, pending)
    finally:
        wait([future for futures in pending.values() for future in futures])
    if layout.frozen_bytes:
        place = store.frozen_place(layout.index)
        engine.write(place.path, place.offset_bytes, frozen).result()
        store.note_frozen(layout.index, checksum.extend(0, frozen))


def _write_trainable(
    store: Store,
    layout: StageLayout,
    weights: Tensor,
    slots: list[Any],
    engine: IoEngine,
    setup: Setup,
    pending: dict[int, list[Future[None]]],
) -> None:
    """``pending`` holds, by slot, the writes that may still be in flight."""
    crc: ChunkChecksum | None = None
    pieces = layout.pieces(setup.memory.piece_elements)
    for piece in pieces:
        number = piece.index % len(slots)
        _finish(pending, number)
        slot = slots[number]
        weight_hi, weight_lo, _, _ = slot.arrays(piece.num_elements)
        split(weights[piece.start : piece.stop], weight_hi, weight_lo)
        if crc is None:
            crc = ChunkChecksum(layout, piece.chunk)
        futures = pending.setdefault(number, [])
        for position, array in enumerate((StateArray.WEIGHT_HI, StateArray.WEIGHT_LO)):
            data = slot.bytes_of(position, piece.num_elements)
            crc.extend(array, data)
            place = store.place(layout.index, array, piece, write=True)
            futures.append(engine.write(place.path, place.offset_bytes, data))
        if piece.index + 1 == len(pieces) or pieces[piece.index + 1].chunk != piece.chunk:
            for other in list(pending):
                _finish(pending, other)
            crc.extend_zeros(StateArray.EXP_AVG)
            crc.extend_zeros(StateArray.EXP_AVG_SQ)
            store.note_written(layout.index, piece.chunk, crc.finish())
            crc = None


def _finish(pending: dict[int, list[Future[None]]], slot: int) -> None:
    """Wait for the writes of one slot. Raises the first failure; the others stay in ``pending``."""
    for future in pending.get(slot, ()):
        future.result()
    pending.pop(slot, None)
