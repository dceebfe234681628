"""Makes what is too much to look at less, by rules that can be said in a sentence: long curves, op bars, residency.

Pure functions on numbers. Each keeps extremes; what was left out is told in the report beside the chart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from hoist.tools.run_report.timeline import Moment, TimedOp, Timeline

#: A curve with more points is thinned to about so many.
CURVE_POINTS = 800
#: A table with more rows is thinned to about so many.
TABLE_ROWS = 1000
#: What lies closer together within a step than this share of it is drawn as one: less than a pixel of a wide screen.
PIXEL_SHARE = 1 / 1200
#: Residency is drawn in so many columns of time.
TIME_BINS = 240
#: A map with more stages shows neighbours together, so that it has at most so many rows.
STAGE_ROWS = 48


def kept_indices(values: Sequence[float | None], *, most: int) -> list[int]:
    """Indices of the points of a curve to draw: all of them, or the first, the last, and of each of ``most``/2 equal
    parts the lowest and the highest. Points without a value are kept only where no part has any other.
    """
    if len(values) <= most:
        return list(range(len(values)))
    parts = max(1, most // 2)
    kept = {0, len(values) - 1}
    for part in range(parts):
        indices = range(part * len(values) // parts, (part + 1) * len(values) // parts)
        known = [(value, index) for index in indices if (value := values[index]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else {indices[0]}
    return sorted(kept)


def kept_rows(columns: Sequence[Sequence[float | None]], *, most: int = TABLE_ROWS) -> list[int]:
    """Indices of the rows of a table to show: all, or every k-th, the last, and those with a column's extremes."""
    count = len(columns[0]) if columns else 0
    if count <= most:
        return list(range(count))
    kept = {*range(0, count, -(-count // most)), count - 1}
    for column in columns:
        known = [(value, index) for index, value in enumerate(column) if value is not None]
        if known:
            kept |= {min(known)[1], max(known)[1]}
    return sorted(kept)


# --- ops --------------------------------------------------------------------------------------------------------------

#: What ops are coloured by: kinds of ops under names for people. Weights and states are moved, activations and
#: gradients spilled and brought back.
OP_GROUPS: dict[str, tuple[str, ...]] = {
    "forward": ("forward", "evaluate"),
    "backward": ("backward", "loss"),
    "weights": ("read_weights", "merge", "read_frozen", "widen", "bind", "unbind", "refresh"),
    "states": ("read_states", "write_states", "read_kept", "write_kept"),
    "spills": (
        "spill_activation", "fetch_activation", "stash_gradient", "spill_gradient", "fetch_gradient",
        "lower_activation", "raise_activation", "download",
    ),
    "updates": ("update", "device_update", "norm"),
    "commit": ("commit",),
}  # fmt: skip
OTHER_GROUP = "other"
_GROUP_OF = {kind: group for group, kinds in OP_GROUPS.items() for kind in kinds}
_OUTWARD = ("write_", "spill_", "stash_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of the timeline: an op, or several that are too close together to be told apart."""

    row: str
    """The lane; of the io lane, the direction too."""
    group: str
    start: float
    stop: float
    num_ops: int
    what: str
    """The op, or the first and the last of them."""


def group_of(kind: str) -> str:
    """What an op is coloured by."""
    return _GROUP_OF.get(kind, OTHER_GROUP)


def row_of(op: TimedOp) -> str:
    """In which row of the timeline an op is drawn: transfers of the io lane run beside each other."""
    if op.lane != "io":
        return op.lane
    return f"io: {group_of(op.kind)} {'out' if op.kind.startswith(_OUTWARD) else 'in'}"


def merged_bars(timeline: Timeline, *, pixel_share: float = PIXEL_SHARE) -> list[Bar]:
    """The bars of a step, cut to it. Ops of one row and group that overlap, or have less than a pixel between them,
    are one bar; a bar is at least a pixel wide.
    """
    pixel = pixel_share * timeline.seconds
    runs: dict[tuple[str, str], list[list[TimedOp]]] = defaultdict(list)
    ends: dict[tuple[str, str], float] = {}
    for op in timeline.ops:  # by start
        if op.stop < 0 or op.start > timeline.seconds:
            continue
        key = row_of(op), group_of(op.kind)
        if key in ends and op.start - ends[key] < pixel:
            runs[key][-1].append(op)
            ends[key] = max(ends[key], op.stop)
        else:
            runs[key].append([op])
            ends[key] = op.stop
    bars = []
    for (row, group), each in runs.items():
        for ops in each:
            start = min(max(0.0, ops[0].start), timeline.seconds - pixel)
            stop = max(min(timeline.seconds, max(op.stop for op in ops)), start + pixel)
            first, last = (op.named(timeline.stage_names) for op in (ops[0], ops[-1]))
            bars.append(
                Bar(
                    row=row,
                    group=group,
                    start=start,
                    stop=stop,
                    num_ops=len(ops),
                    what=first if len(ops) == 1 else f"{first} ... {last}",
                )
            )
    return sorted(bars, key=lambda bar: (bar.row, bar.start))


def union_seconds(spans: Iterable[tuple[float, float]], *, stop: float) -> float:
    """Time from 0 to ``stop`` that at least one of the spans covers."""
    total, end = 0.0, 0.0
    for first, last in sorted(spans):
        first, last = max(first, end), min(last, stop)
        if last > first:
            total += last - first
            end = last
    return total


# --- residency --------------------------------------------------------------------------------------------------------


class Level(IntEnum):
    """Where the most valuable copy is. Of several at once the highest counts."""

    NOWHERE = 0
    """It does not exist: an activation or a gradient that is not there yet, or any more."""
    NVME = 1
    """On NVMe alone: in the store, or spilled to scratch."""
    HOST_FILLING = 2
    HOST = 3
    HOST_DIRTY = 4
    """Newer than what NVMe holds, or the only copy."""
    DEVICE_FILLING = 5
    DEVICE = 6
    DEVICE_DIRTY = 7

    @property
    def label(self) -> str:
        """For people."""
        return _LABELS[self]


_LABELS = {
    Level.NOWHERE: "nowhere",
    Level.NVME: "NVMe only",
    Level.HOST_FILLING: "host, arriving",
    Level.HOST: "host",
    Level.HOST_DIRTY: "host, dirty",
    Level.DEVICE_FILLING: "device, arriving",
    Level.DEVICE: "device",
    Level.DEVICE_DIRTY: "device, dirty",
}
#: Kinds whose bytes are on NVMe whenever they are nowhere else.
_HOMED = ("weights", "moments")


def level_of(moment: Moment) -> Level:
    """What a state in a tier means for its item."""
    if moment.state == "absent":
        return Level.NOWHERE
    if moment.state == "stored" or moment.tier == "nvme":
        return Level.NVME
    above = Level.DEVICE_FILLING - Level.HOST_FILLING if moment.tier == "device" else 0
    match moment.state:
        case "filling":
            return Level(Level.HOST_FILLING + above)
        case "dirty" | "writing":
            return Level(Level.HOST_DIRTY + above)
        case _:
            return Level(Level.HOST + above)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """From a time to another, the highest level of a stage's items of some kinds."""

    start: float
    stop: float
    level: Level


def stretches(
    moments: Sequence[Moment], *, stages: range, kinds: Sequence[str], seconds: float
) -> list[Stretch]:
    """The highest level, over a step, of all items of these stages and kinds; whole, without gaps, in order."""
    base = Level.NVME if set(kinds) & set(_HOMED) else Level.NOWHERE
    now: dict[tuple[str, int, int], Level] = {}
    count: Counter[Level] = Counter()
    found: list[Stretch] = []
    since, level = 0.0, base
    for moment in moments:
        if moment.stage not in stages or moment.kind not in kinds:
            continue
        key = moment.kind, moment.stage, moment.second
        if key in now:
            count[now[key]] -= 1
        now[key] = level_of(moment)
        count[now[key]] += 1
        highest = max((one for one, items in count.items() if items), default=base)
        highest = max(highest, base)
        at = min(max(moment.seconds, 0.0), seconds)
        if highest != level:
            if at > since:
                found.append(Stretch(start=since, stop=at, level=level))
            since, level = at, highest
    if seconds > since:
        found.append(Stretch(start=since, stop=seconds, level=level))
    return _joined(found)


def _joined(found: Sequence[Stretch]) -> list[Stretch]:
    joined: list[Stretch] = []
    for stretch in found:
        if joined and joined[-1].level is stretch.level:
            joined[-1] = Stretch(start=joined[-1].start, stop=stretch.stop, level=stretch.level)
        else:
            joined.append(stretch)
    return joined


def binned(found: Sequence[Stretch], *, seconds: float, num_bins: int = TIME_BINS) -> list[Stretch]:
    """The highest level in each of equal parts of the step, neighbours with the same one joined: what was somewhere
    for a moment is seen.
    """
    highest = [Level.NOWHERE] * num_bins
    for stretch in found:
        first = int(stretch.start / seconds * num_bins)
        last = stretch.stop / seconds * num_bins
        for number in range(first, min(num_bins, max(first + 1, int(last) + (last > int(last))))):
            highest[number] = max(highest[number], stretch.level)
    edges = [seconds * number / num_bins for number in range(num_bins + 1)]
    return _joined(
        [
            Stretch(start=start, stop=stop, level=level)
            for (start, stop), level in zip(pairwise(edges), highest, strict=True)
        ]
    )


def shares(found: Sequence[Stretch], *, seconds: float) -> dict[Level, float]:
    """Share of the step, from 0 to 1, in each level."""
    total: dict[Level, float] = defaultdict(float)
    for stretch in found:
        total[stretch.level] += (stretch.stop - stretch.start) / seconds
    return dict(total)


def stage_groups(stage_names: Sequence[str], *, most: int = STAGE_ROWS) -> list[tuple[str, range]]:
    """Rows of a map: each stage, or as many neighbours together as needed, under the name of the first and the last."""
    together = -(-len(stage_names) // most) if stage_names else 1
    groups = []
    for first in range(0, len(stage_names), together):
        stages = range(first, min(first + together, len(stage_names)))
        name = stage_names[first]
        groups.append((name if len(stages) == 1 else f"{name} to {stage_names[stages[-1]]}", stages))
    return groups


def by_stage(moments: Iterable[Moment]) -> dict[int, list[Moment]]:
    """The moments of each stage, in order of time."""
    found: dict[int, list[Moment]] = defaultdict(list)
    for moment in moments:
        found[moment.stage].append(moment)
    return found


