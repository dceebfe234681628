"""Fills a new store with initial weights, one stage at a time, inside the run's own buffers; then commits step 0.

Where the values come from is the caller's: transformers' initialisation (`stages.py`) or a checkpoint (`tools/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoist.optim.split import split
from hoist.scheduler.errors import ModelError
from hoist.scheduler.residency import WEIGHT_BYTES
from hoist.scheduler.setup import Setup
from hoist.scheduler.stages import Stage, StagedModel
from hoist.tiers import checksum, heap
from hoist.tiers.checksum import ChunkChecksum
from hoist.tiers.dealing import MeasuredDirectory
from hoist.tiers.format import MODEL_DIRECTORY, StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.layout import StageLayout
from hoist.tiers.store import Store

#: Fills the owned tensors of a stage in place: name -> float32 (frozen ones: dtype that they are kept in) view with the
#: tensor's shape.
#: The last argument is memory that it may use for staging, uint8, 4 KiB-aligned.
Source = Callable[[Stage, Mapping[str, Tensor], Tensor], None]
Progress = Callable[[str, int, int], None]

#: Room in which a checkpoint's tensors can be staged while the former stage is written.
_STAGING_BYTES = 64 * 1024


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
    and done and total bytes, or zeros where nobody knows. ``extras`` is called with the directory for small files that
    belong beside the weights (configuration, tokenizer). ``drives``: see :meth:`Store.create`. Raises
    StoreRefusedError or BudgetError with nothing changed, ModelError on weights that are not finite, whatever
    ``source`` raises, TransferError; after those the directory holds no store that opens.
    """

    def report(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(what, done, total)

    def reserving(done: int, total: int) -> None:
        assert progress is not None
        progress("reserving space", done, total)
        if done >= total:  # until the drive has the reservations, which nobody knows the length of
            progress("waiting for the drive", 0, 0)

    filling = setup.for_creation()
    store = Store.create(
        directory,
        layouts=setup.layouts,
        attributes=attributes,
        engine=engine,
        num_slots=setup.num_slots,
        scratch_bytes=setup.scratch_bytes,
        drives=drives,
        fresh=fresh,
        progress=None if progress is None else reserving,
    )
    try:
        _fill(store, model, filling, store.counted(engine), source, report("writing weights"))
        if progress is not None:
            progress("committing", 0, 0)
        if extras is not None:
            folder = store.directory / MODEL_DIRECTORY
            extras(folder)
            if store.wear is not None:
                store.wear.add(written_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
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
    # both halves of a trained weight; its moments begin as the zeros of a fresh file
    total = sum(WEIGHT_BYTES * layout.num_elements + layout.frozen_bytes for layout in setup.layouts)
    done = 0
    # Little may be trained: then gradients are too small to stage a checkpoint's tensors in, and the slots that stages
    # are written from must do, in turn.
    # Where stages compute in bfloat16 gradients are where the values are put: neighbours may share that place.
    overlaps = setup.dtype == "float32" and places.gradient_region.nbytes >= min(_STAGING_BYTES, places.ring.nbytes)

    def fill(stage: Stage) -> None:
        stage_places = places.stages[stage.index]
        _zero_gaps(stage_places.initial, setup.layouts[stage.index])
        stage_places.frozen.zero_()
        owned = stage_places.stored()
        source(stage, owned, places.gradient_region if overlaps else places.ring)
        buffers = {placed.spec.name for placed in setup.layouts[stage.index].frozen if not placed.spec.is_weight}
        refuse_non_finite(owned, may_be_infinite=buffers)

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    def write(layout: StageLayout) -> None:
        stage_places = places.stages[layout.index]
        frozen = stage_places.frozen[: layout.frozen_bytes]
        _write_stage(store, layout, stage_places.initial, frozen, places.states, engine, setup, advance)

    try:
        # While a stage is written, the next is filled: neighbours have different weight buffers. Leaving waits for it.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hoist-fill") as filler:
            filled = filler.submit(fill, model.stages[0])
            for stage, following in zip_longest(model.stages, model.stages[1:]):
                filled.result()
                if following is not None and overlaps:
                    filled = filler.submit(fill, following)
                write(setup.layouts[stage.index])
                if following is not None and not overlaps:
                    filled = filler.submit(fill, following)
    finally:
        places.close()


def _zero_gaps(weights: Tensor, layout: StageLayout) -> None:
    """Zero what no tensor covers: it is written and checked with the rest, and must not depend on what was there."""
    end = 0
    for placed in sorted(layout.trainable, key=lambda placed: placed.offset):
        weights[end : placed.offset].zero_()
        end = placed.offset + placed.spec.num_elements
    weights[end:].zero_()


def refuse_non_finite(values: Mapping[str, Tensor], *, may_be_infinite: Collection[str] = ()) -> None:
    """Raise ModelError, naming the tensor, if a floating-point one holds NaN or infinity. Takes no memory.

    Of those that ``may_be_infinite`` (bounds in buffers are) only NaN is refused.
    """
    for name, value in values.items():
        if not value.is_floating_point() or not value.numel():
            continue
        # One pass; NaN counts as the least and the greatest.
        extremes = [extreme.item() for extreme in torch.aminmax(value)]
        if any(math.isnan(extreme) or (math.isinf(extreme) and name not in may_be_infinite) for extreme in extremes):
            raise ModelError(f"weights: {name} holds NaN or infinity; take another checkpoint")


def _write_stage(
    store: Store,
    layout: StageLayout,
    weights: Tensor,
    frozen: Tensor,
    slots: list[Any],
    engine: IoEngine,
    setup: Setup,
    advance: Callable[[int], None],
) -> None:
    """Split the stage's weights piece by piece and write them; moments stay the zeros of fresh files.

    Nothing is in flight when it returns or raises.
    """
    pending: dict[int, list[Future[None]]] = {}
    try:
        _write_trainable(store, layout, weights, slots, engine, setup, pending, advance)
    finally:
        wait([future for futures in pending.values() for future in futures])
    if layout.frozen_bytes:
        place = store.frozen_place(layout.index)
        engine.write(place.path, place.offset_bytes, frozen).result()
        store.note_frozen(layout.index, checksum.extend(0, frozen))
        advance(layout.frozen_bytes)


def _write_trainable(
    store: Store,
    layout: StageLayout,
    weights: Tensor,
    slots: list[Any],
    engine: IoEngine,
    setup: Setup,
    pending: dict[int, list[Future[None]]],
    advance: Callable[[int], None],
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
        advance(WEIGHT_BYTES * (min(piece.stop, layout.num_elements) - min(piece.start, layout.num_elements)))


def _finish(pending: dict[int, list[Future[None]]], slot: int) -> None:
    """Wait for the writes of one slot. Raises the first failure; the others stay in ``pending``."""
    for future in pending.get(slot, ()):
        future.result()
    pending.pop(slot, None)
