"""`hoist inspect --tensor`: where tensors of a store's last commit lie, down to files and drives, and their statistics.

Values are read by `values.py`. The store may be in use: where a run commits meanwhile, a tensor is read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hoist.scheduler.reading import TensorReader
from hoist.scheduler.status import STATE_KINDS
from hoist.tiers import drives, inventory
from hoist.tiers import format as store_format
from hoist.tiers.errors import StoreFormatError, TransferError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.redeal import drive_of
from hoist.tiers.store import Store
from hoist.tools.inspection.looking import StageStates, inspect_store
from hoist.tools.inspection.values import (
    WINDOW_ELEMENTS,
    Gatherer,
    Placed,
    Statistics,
    chosen,
    states_of,
    tensors_of,
    windows,
)
from hoist.tools.inspection.view import states_line

#: Reads of one tensor, until no commit comes between.
_TRIES = 20
#: Of a tensor's chunks, so many are shown with their files; JSON has them all.
_SHOWN_CHUNKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkFile:
    """A file that holds elements of a tensor."""

    array: str
    chunk: int
    slot: int
    """The committed one; 0 for the frozen array, which has one place."""
    start: int
    """First element of the tensor in it, in the flattened tensor."""
    stop: int
    """One past the last."""
    file: str
    """Within the store."""
    drive: str
    """The directory that the file is in: the store's own or a further one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorReport:
    """One tensor of a commit."""

    name: str
    tied_names: tuple[str, ...]
    """Other names of the same tensor in the model."""
    stage: str
    kind: str
    """``trained``, ``frozen`` or ``buffer``."""
    dtype: str
    shape: tuple[int, ...]
    num_elements: int
    start: int
    """Trained: first element in the stage's arrays; others: first byte in its frozen array."""
    stop: int
    """One past the last element, or byte."""
    adam_steps: int | None
    """Updates that Adam has made of it; None if it is not trained."""
    step: int
    """Of the commit that it was read from."""
    generation: int
    files: tuple[ChunkFile, ...]
    statistics: Mapping[str, Statistics]
    """Of the weight and, where it is trained, of both moments."""
    damage: str | None
    """Why statistics are missing."""
    now: StageStates | None = None
    """Where its stage's states were right after it was read; None unless a run holds the store. Numbers and files are
    the commit's all the same."""

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it; numbers beyond JSON's are null."""
        states = None if self.now is None else self.now.to_json()
        return {**asdict(self), "now": states and {kind: states[kind] for kind in STATE_KINDS}}


def inspect_tensors(
    directory: Path,
    names: Sequence[str],
    *,
    engine: IoEngine,
    progress: Callable[[int, int], None] | None = None,
) -> list[TensorReport]:
    """Look at the tensors that names and patterns mean. Takes about 24 MiB, however large they are.

    ``progress`` gets done and total elements. Raises ConfigError (no such tensor), StoreRefusedError, StoreFormatError
    (small files of the store are damaged, or a run commits faster than a tensor is read).
    """
    reports: list[TensorReport] = []
    wanted: list[str] | None = None
    tries = 0
    tied: Mapping[str, str] | None = None
    while True:
        with Store.open(directory, engine=engine, writable=False, check="nothing") as store:
            known = tensors_of(store)
            if wanted is None:
                if any(name not in known for name in names):
                    tied = _tied_names(store.directory)
                wanted = chosen([(tied or {}).get(name, name) for name in names], known, directory=directory)
                if tied is None and any(_may_be_tied(store, known[name]) for name in wanted):
                    tied = _tied_names(store.directory)
            if any(name not in known for name in wanted):
                raise StoreFormatError(f"{directory}: was replaced by another model's store meanwhile; look again")
            total = sum(known[name][1].spec.num_elements for name in wanted)
            reader = TensorReader(store, engine, window_elements=WINDOW_ELEMENTS)
            try:
                while len(reports) < len(wanted):
                    name = wanted[len(reports)]
                    done = sum(report.num_elements for report in reports)
                    report = _report(store, reader, known[name], tied or {}, progress, (done, total))
                    if not store.is_current():
                        break
                    reports.append(report)
                    tries = 0
                else:
                    return _with_whereabouts(directory, reports)
            finally:
                reader.close()
        tries += 1
        if tries == _TRIES:
            raise StoreFormatError(
                f"{directory}: a run commits faster than {name} can be read; keep a commit with hoist snapshot "
                f"{directory} NAME, and inspect that"
            )


def _with_whereabouts(directory: Path, reports: Sequence[TensorReport]) -> list[TensorReport]:
    """The reports, with where their stages' states are now if a run tells."""
    found = inspect_store(directory)
    now = {stage.name: stage for stage in found.stages} if found.is_live else {}
    return [replace(report, now=now.get(report.stage)) for report in reports]


def _report(
    store: Store,
    reader: TensorReader,
    tensor: Placed,
    tied: Mapping[str, str],
    progress: Callable[[int, int], None] | None,
    done: tuple[int, int],
) -> TensorReport:
    layout, placed = tensor
    spec, record = placed.spec, store.record
    assert record is not None  # a store opens at a commit
    statistics: dict[str, Statistics] = {}
    damage: str | None = None
    states = states_of(placed)
    try:
        for number, state in enumerate(states):
            gatherer = Gatherer()
            read = 0
            for values in windows(reader, tensor, state):
                gatherer.add(values)
                read += values.numel()
                if progress is not None:
                    progress(done[0] + (number * spec.num_elements + read) // len(states), done[1])
            statistics[state] = gatherer.finish()
    except TransferError as error:
        damage = str(error)
    return TensorReport(
        name=spec.name,
        tied_names=tuple(other for other, name in tied.items() if name == spec.name),
        stage=layout.name,
        kind="trained" if spec.trainable else "frozen" if spec.frozen_weight else "buffer",
        dtype=spec.dtype,
        shape=spec.shape,
        num_elements=spec.num_elements,
        start=placed.offset,
        stop=placed.offset + (spec.num_elements if spec.trainable else spec.num_bytes),
        adam_steps=record.adam_steps.get(spec.name, 0) if spec.trainable else None,
        step=record.step,
        generation=record.generation,
        files=_files(store, tensor),
        statistics=statistics,
        damage=damage,
    )


def _files(store: Store, tensor: Placed) -> tuple[ChunkFile, ...]:
    """The committed files that hold the tensor, in order."""
    layout, placed = tensor
    spec, record = placed.spec, store.record
    assert record is not None
    if not spec.num_elements:
        return ()
    known = drives.registered(record, store.directory)
    found: list[ChunkFile] = []
    slots = [[int(digit)] for digit in record.slots[layout.index]]
    for chunk in inventory.stage_chunks(store.directory, layout, slots=slots, checksums=None):
        frozen = chunk.array == store_format.FROZEN_NAME
        if frozen == spec.trainable:
            continue
        first = 0 if frozen else max(placed.offset, chunk.chunk * layout.chunk_elements) - placed.offset
        last = spec.num_elements
        if not frozen:
            last = min(last, (chunk.chunk + 1) * layout.chunk_elements - placed.offset)
        if first < last:
            drive = drive_of(chunk.path, store.directory, known)
            place = chunk.path.parent if drive is None else drives.place(store.directory, drive)
            found.append(
                ChunkFile(
                    array=chunk.array,
                    chunk=chunk.chunk,
                    slot=chunk.slot,
                    start=first,
                    stop=last,
                    file=str(chunk.path.relative_to(store.directory)),
                    drive=str(place),
                )
            )
    return tuple(found)


def _may_be_tied(store: Store, tensor: Placed) -> bool:
    """Ties are between what the model begins and ends with; asking the model itself takes seconds."""
    return tensor[0].index in (0, len(store.layouts) - 1) and tensor[1].spec.is_weight


def _tied_names(directory: Path) -> Mapping[str, str]:
    """The name in the store of every other name that the model has for a tensor; none where no config is there."""
    config = directory / store_format.MODEL_DIRECTORY / "config.json"
    if not config.is_file():
        return {}
    from hoist.scheduler.models import build_model
    from hoist.scheduler.stages import split
    from hoist.tools.model_files import load_config

    return split(build_model(load_config(config.parent))).aliases


# --- showing --------------------------------------------------------------------------------------------------------


def print_json(directory: Path, reports: Sequence[TensorReport]) -> str:
    """The reports as one JSON object."""
    return json.dumps({"store": str(directory.absolute()), "tensors": [report.to_json() for report in reports]})


def print_reports(reports: Sequence[TensorReport], console: Console) -> None:
    """A block of lines for each tensor."""
    for number, report in enumerate(reports):
        if number:
            console.print()
        for line in _lines(report):
            console.print(line, soft_wrap=True)


def _lines(report: TensorReport) -> list[Text]:
    shape = "scalar" if not report.shape else " x ".join(map(str, report.shape))
    lines = [Text(_plain(report.name), style="bold")]

    def field(label: str, text: str) -> None:
        lines.append(Text.assemble((f"  {label:<11}", "bold"), _plain(text)))

    field("is", f"{report.kind}, {report.dtype}, {shape}: {report.num_elements:,} elements")
    if report.tied_names:
        field("also", ", ".join(report.tied_names))
    unit = "elements" if report.kind == "trained" else "frozen bytes"
    field("lies in", f"stage {report.stage}, {unit} {report.start:,} to {report.stop:,}")
    if report.now is not None:
        lines.append(Text.assemble((f"  {'now':<11}", "bold"), "the stage has ", states_line(report.now)))
    updates = "" if report.adam_steps is None else f"; Adam has updated it {report.adam_steps:,} times"
    field("committed", f"step {report.step:,}, generation {report.generation:,}{updates}")
    chunks = list(dict.fromkeys(file.chunk for file in report.files))
    label = "files"
    for chunk in chunks[:_SHOWN_CHUNKS]:
        for line in _chunk_lines([file for file in report.files if file.chunk == chunk]):
            field(label, line)
            label = ""
    if len(chunks) > _SHOWN_CHUNKS:
        field("", f"and those of {len(chunks) - _SHOWN_CHUNKS} more chunks (--json has all)")
    if report.statistics:
        names = ("min", "max", "mean", "std", "L2 norm")
        heading = f"  {'':<11}" + "".join(f"{name:>11}" for name in names) + f"{'NaN':>5} {'Inf':>5}"
        lines.append(Text(heading, style="bold"))
        for state, numbers in report.statistics.items():
            shown = (numbers.min, numbers.max, numbers.mean, numbers.std, numbers.norm)
            row = "".join(f"{'-' if number is None else f'{number:.4g}':>11}" for number in shown)
            bad = bool(numbers.num_nan or numbers.num_inf)
            lines.append(
                Text.assemble(
                    (f"  {state:<11}", "bold"), row, (f"{numbers.num_nan:>5,} {numbers.num_inf:>5,}", "bold red" * bad)
                )
            )
    if report.damage is not None:
        field("DAMAGED", report.damage)
    return lines


def _chunk_lines(files: Sequence[ChunkFile]) -> Iterator[str]:
    """The files of a chunk, those of each drive in one line that a shell takes."""
    for drive in dict.fromkeys(file.drive for file in files):
        here = [file for file in files if file.drive == drive]
        arrays = ",".join(file.array for file in here)
        first = here[0]
        name = first.file.replace(f"/{first.array}/", f"/{{{arrays}}}/" if len(here) > 1 else f"/{first.array}/")
        yield f"{name}: elements {first.start:,} to {first.stop:,}, slot {first.slot}, in {drive}"


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
