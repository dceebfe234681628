"""`hoist inspect --diff`: compares what a store has committed with a snapshot or another store, tensor by tensor.

Values are read by `values.py`, a window of each side at a time. Nothing is locked or changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hoist.scheduler.reading import TensorReader
from hoist.tiers import allocation
from hoist.tiers import format as store_format
from hoist.tiers.errors import StoreFormatError, StoreRefusedError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store
from hoist.tools.inspection.values import STATES, WINDOW_ELEMENTS, Placed, finite, states_of, tensors_of, window

#: Both sides are compared again where one commits meanwhile, so often.
_TRIES = 5
#: Tensors that are shown without ``--all``: those that changed the most.
SHOWN = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDifference:
    """How one state of a tensor differs. The first side is the store, the second what it is compared with."""

    num_differing: int
    """Elements whose bits differ; with different dtypes, those that are different numbers."""
    max_abs: float | None
    """Largest absolute difference of elements that are finite on both sides, in float64; None if there are none."""
    relative_l2: float | None
    """L2 norm of the differences over that of the second side, over the same elements; None if the latter is 0 and the
    former is not."""

    @property
    def is_same(self) -> bool:
        """No element differs."""
        return self.num_differing == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """How a tensor that both sides have, in one shape, differs."""

    name: str
    num_elements: int
    states: Mapping[str, StateDifference]
    """Of the weight and, where both sides train it, of both moments."""

    @property
    def is_same(self) -> bool:
        """Nothing of it differs."""
        return all(state.is_same for state in self.states.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side of a comparison."""

    directory: str
    step: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreDifference:
    """How two commits differ."""

    store: Side
    other: Side
    options: Mapping[str, tuple[Any, Any]]
    """Options of `hoist train` that the two have differently, or only one of them has."""
    tensors: tuple[TensorDifference, ...]
    """Those that both have, in the store's order."""
    only_store: tuple[str, ...]
    only_other: tuple[str, ...]
    other_shape: tuple[str, ...]
    """Those that both have, in different shapes: not compared."""
    relative_l2: float | None
    """Of the weights of all tensors that were compared, together."""

    @property
    def num_same(self) -> int:
        """Tensors of which nothing differs."""
        return sum(tensor.is_same for tensor in self.tensors)

    @property
    def is_same(self) -> bool:
        """Both sides have the same tensors, bit for bit."""
        return self.num_same == len(self.tensors) and not (self.only_store or self.only_other or self.other_shape)

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        document = asdict(self)
        document["options"] = {name: list(values) for name, values in self.options.items()}
        return {"same": self.is_same, "num_same": self.num_same, **document}


@dataclass(kw_only=True, slots=True)
class _Sums:
    """What is added up over windows."""

    num_differing: int = 0
    max_abs: float | None = None
    differences: float = 0.0
    seconds: float = 0.0
    """Squares of the second side."""

    def add(self, one: Tensor, other: Tensor) -> None:
        if one.dtype == other.dtype:
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
            unequal = one.view(bits) != other.view(bits)
        else:
            unequal = one.to(torch.float64) != other.to(torch.float64)
        self.num_differing += int(unequal.sum())
        first, second = one.to(torch.float64), other.to(torch.float64)
        both = first.isfinite() & second.isfinite()
        if not bool(both.all()):
            first, second = first[both], second[both]
        if not first.numel():
            return
        self.seconds += float(torch.dot(second, second))
        first -= second
        self.differences += float(torch.dot(first, first))
        self.max_abs = max(self.max_abs or 0.0, float(first.abs_().max()))

    @property
    def relative(self) -> float | None:
        if self.differences == 0.0:
            return 0.0
        return finite(math.sqrt(self.differences / self.seconds)) if self.seconds else None

    def finish(self) -> StateDifference:
        return StateDifference(
            num_differing=self.num_differing,
            max_abs=None if self.max_abs is None else finite(self.max_abs),
            relative_l2=self.relative,
        )


def other_side(store: Path, other: str) -> Path:
    """The directory that ``--diff`` means: the store's snapshot of that name, or the path of a store or a snapshot.

    Raises StoreRefusedError if it is neither.
    """
    if other in allocation.snapshot_names(store):
        return store / store_format.SNAPSHOTS_DIRECTORY / other
    path = Path(other)
    if (path / store_format.METADATA_NAME).is_file():
        return path
    names = ", ".join(allocation.snapshot_names(store)) or "none"
    raise StoreRefusedError(
        f"--diff: {other!r} is no snapshot of {store} (there are: {names}), and no directory of a store; name one"
    )


def compare(
    store: Path, other: Path, *, engine: IoEngine, progress: Callable[[int, int], None] | None = None
) -> StoreDifference:
    """Compare two commits. Takes about 48 MiB, however large they are. ``progress`` gets done and total elements.

    Raises what opening a store raises, TransferError (a file cannot be read), and StoreFormatError if a side commits
    again and again meanwhile.
    """
    for _ in range(_TRIES):
        with ExitStack() as opened:
            sides = [Store.open(directory, engine=engine, writable=False) for directory in (store, other)]
            for side in sides:
                opened.enter_context(side)
            found = _compare(sides[0], sides[1], engine, progress)
            if found is not None:
                return found
    raise StoreFormatError(
        f"{store}: a run commits faster than the tensors are read; keep a commit with hoist snapshot, and compare that"
    )


def _compare(
    store: Store, other: Store, engine: IoEngine, progress: Callable[[int, int], None] | None
) -> StoreDifference | None:
    """The difference; None if a side committed meanwhile."""
    mine, theirs = tensors_of(store), tensors_of(other)
    shared = [name for name in mine if name in theirs]
    compared = [name for name in shared if mine[name][1].spec.shape == theirs[name][1].spec.shape]
    total = sum(mine[name][1].spec.num_elements for name in compared)
    weights = _Sums()
    found: list[TensorDifference] = []
    done = 0
    with ExitStack() as cleanup:
        readers = []
        for side in (store, other):
            reader = TensorReader(side, engine, window_elements=WINDOW_ELEMENTS)
            cleanup.callback(reader.close)
            readers.append(reader)
        for name in compared:
            states: dict[str, StateDifference] = {}
            trained = [state for state in states_of(mine[name][1]) if state in states_of(theirs[name][1])]
            for state in trained:
                sums = _Sums()
                _add_state(readers, (mine[name], theirs[name]), state, sums)
                states[state] = sums.finish()
                if state == STATES[0]:
                    weights.differences += sums.differences
                    weights.seconds += sums.seconds
            done += mine[name][1].spec.num_elements
            if progress is not None:
                progress(done, total)
            if not (store.is_current() and other.is_current()):
                return None
            found.append(
                TensorDifference(name=name, num_elements=mine[name][1].spec.num_elements, states=states)
            )
    return StoreDifference(
        store=_side(store),
        other=_side(other),
        options=_options(store, other),
        tensors=tuple(found),
        only_store=tuple(name for name in mine if name not in theirs),
        only_other=tuple(name for name in theirs if name not in mine),
        other_shape=tuple(name for name in shared if name not in compared),
        relative_l2=weights.relative,
    )


def _add_state(readers: Sequence[TensorReader], tensors: tuple[Placed, Placed], state: str, sums: _Sums) -> None:
    start, stop = 0, tensors[0][1].spec.num_elements
    while start < stop:
        one, other = (window(reader, tensor, state, start) for reader, tensor in zip(readers, tensors, strict=True))
        count = min(one.numel(), other.numel())
        sums.add(one[:count], other[:count])
        start += count


def _side(store: Store) -> Side:
    assert store.record is not None  # a store opens at a commit
    return Side(directory=str(store.directory), step=store.record.step, generation=store.record.generation)


def _options(store: Store, other: Store) -> dict[str, tuple[Any, Any]]:
    mine, theirs = (
        dict(found) if side.record is not None and isinstance(found := side.record.run.get("options"), Mapping) else {}
        for side in (store, other)
    )
    names = [*mine, *(name for name in theirs if name not in mine)]
    return {name: (mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)}


# --- showing --------------------------------------------------------------------------------------------------------


def print_difference(found: StoreDifference, console: Console, *, every: bool) -> None:
    """Both sides, the tensors that changed the most (or ``every`` one), and a line that sums it up."""

    def line(text: str) -> None:
        console.print("".join(each if each.isprintable() else ascii(each)[1:-1] for each in text), soft_wrap=True,
                      markup=False, highlight=False)  # fmt: skip

    for label, side in (("store", found.store), ("other", found.other)):
        line(f"{label:<9}{side.directory}, step {side.step:,} (generation {side.generation:,})")
    for number, (name, (mine, theirs)) in enumerate(found.options.items()):
        line(f"{'' if number else 'options':<9}{name}: {_shown(mine)}, the other has {_shown(theirs)}")
    for what, names in (
        ("in the store only", found.only_store),
        ("in the other only", found.only_other),
        ("of another shape there", found.other_shape),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            line(f"{'tensors':<9}{what}: {', '.join(names[:5])}{more}")
    shown = [tensor for tensor in found.tensors if every or not tensor.is_same]
    if not every and len(shown) > SHOWN:
        largest = sorted(shown, key=_change, reverse=True)[:SHOWN]
        shown = [tensor for tensor in shown if tensor in largest]
    if shown:
        line("")
        line(f"{'differing':>10} {'of':>13} {'max |a-b|':>10} {'rel. L2':>8}  {'moments':<8} tensor")
        for tensor in shown:
            weight = tensor.states[STATES[0]]
            line(
                f"{weight.num_differing:>10,} {tensor.num_elements:>13,} {_number(weight.max_abs):>10} "
                f"{_number(weight.relative_l2):>8}  {_moments(tensor):<8} {tensor.name}"
            )
        rest = len(found.tensors) - found.num_same - len(shown)
        if rest > 0:
            line(f"{rest:,} more that changed less (--all: every tensor)")
        line("")
    line(_summary(found))


def _summary(found: StoreDifference) -> str:
    if found.is_same:
        return f"the same: all {len(found.tensors):,} tensors have the same bits, their moments too"
    differ = len(found.tensors) - found.num_same
    return (
        f"{found.num_same:,} of {len(found.tensors):,} tensors have the same bits; {differ:,} differ; all weights "
        f"together: relative L2 {_number(found.relative_l2)}"
    )


def _change(tensor: TensorDifference) -> float:
    relative = tensor.states[STATES[0]].relative_l2
    return math.inf if relative is None else relative


def _moments(tensor: TensorDifference) -> str:
    moments = [state for name, state in tensor.states.items() if name != STATES[0]]
    return "-" if not moments else "same" if all(state.is_same for state in moments) else "differ"


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"


def _shown(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)
