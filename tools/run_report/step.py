"""What a report says of one step: what was where, and what each lane did.

Each function makes one section of facts. What bounds it is in `bound.py`; how much is made less is in
`reduce.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hoist.scheduler.status import STATE_KINDS
from hoist.tiers.format import METRICS_NAME, TIMELINE_NAME
from hoist.tools.durations import show_seconds
from hoist.tools.run_report.charts import Bar, Span, bars, spans
from hoist.tools.run_report.facts import RunFacts, StepFacts
from hoist.tools.run_report.parts import (
    Cell,
    Figure,
    Section,
    Table,
    Unit,
    columns,
    show_share,
    times,
)
from hoist.tools.run_report.reduce import (
    OP_GROUPS,
    OTHER_GROUP,
    PIXEL_SHARE,
    TIME_BINS,
    Level,
    binned,
    by_stage,
    merged_bars,
    shares,
    stage_groups,
    stretches,
    union_seconds,
)
from hoist.tools.run_report.timeline import Moment, TimedOp, Timeline

_LEVEL_COLOURS = {
    Level.NVME.label: "@pale",
    Level.HOST_FILLING.label: "@mist",
    Level.HOST.label: "@sky",
    Level.HOST_DIRTY.label: "@blue",
    Level.DEVICE_FILLING.label: "@cream",
    Level.DEVICE.label: "@amber",
    Level.DEVICE_DIRTY.label: "@vermilion",
}
_GROUP_COLOURS = {
    "forward": "@green",
    "backward": "@blue",
    "weights": "@sky",
    "states": "@amber",
    "spills": "@pink",
    "updates": "@vermilion",
    "commit": "@ink",
    OTHER_GROUP: "@grey",
}
assert set(_GROUP_COLOURS) == {*OP_GROUPS, OTHER_GROUP}
#: What each kind of state is, for people.
_KIND_TITLES = {
    "weights": "Weights to compute with",
    "moments": "States in the optimizer",
    "gradients": "Gradients",
    "activations": "Activations between stages",
}
_COMPUTE = "compute"


# --- residency --------------------------------------------------------------------------------------------------------


def residency(facts: RunFacts) -> Section:
    """Where each stage's states were during the last recorded step: over all kinds, and for each kind."""
    timeline = facts.timeline
    title = "Where states are"
    if timeline is None:
        return Section(key="residency", title=title, figures=(), words=(facts.why(TIMELINE_NAME),))
    if not timeline.stage_names:
        return Section(key="residency", title=title, figures=(), words=(f"{TIMELINE_NAME} names no stage.",))
    moments = by_stage(timeline.moments)
    whole = _map_figure(timeline, moments, STATE_KINDS, key="residency", title=_residency_title(timeline, moments))
    seen = {moment.kind for moment in timeline.moments}
    parts = [
        _map_figure(
            timeline, moments, (kind,), key=f"residency{kind}", title=_kind_title(timeline, moments, kind)
        )
        for kind in STATE_KINDS
        if kind in seen
    ]
    words = [f"Step {timeline.step}, which took {show_seconds(timeline.seconds)}."]
    if missing := [kind for kind in STATE_KINDS if kind not in seen]:
        words.append(f"It has no moves of {' and '.join(missing)}.")
    if timeline.truncated:
        words.append("It had more moves than its file holds: the rest is missing here.")
    return Section(key="residency", title=title, figures=(whole, *parts), words=words)


def _residency_title(timeline: Timeline, moments: Mapping[int, Sequence[Moment]]) -> str:
    """How much of the time a stage is above NVMe, and how many are at once."""
    above = _mean_above(timeline, moments, STATE_KINDS)
    count = len(timeline.stage_names)
    return (
        f"On average {above * count:.1f} of {times(count, 'stage')} have something above NVMe; "
        f"a stage has for {show_share(above)} of the step"
    )


def _kind_title(timeline: Timeline, moments: Mapping[int, Sequence[Moment]], kind: str) -> str:
    above = _mean_above(timeline, moments, (kind,))
    return f"{_KIND_TITLES[kind]}: above NVMe for {show_share(above)} of the step (mean of stages)"


def _mean_above(timeline: Timeline, moments: Mapping[int, Sequence[Moment]], kinds: Sequence[str]) -> float:
    """Share of the step in which a stage has some of these kinds above NVMe, as a mean of all stages."""
    total = 0.0
    for stage in range(len(timeline.stage_names)):
        here = moments.get(stage, ())
        whole = stretches(here, stages=range(stage, stage + 1), kinds=kinds, seconds=timeline.seconds)
        found = shares(whole, seconds=timeline.seconds)
        total += sum(share for level, share in found.items() if level > Level.NVME)
    return total / len(timeline.stage_names)


def _map_figure(
    timeline: Timeline, moments: Mapping[int, Sequence[Moment]], kinds: Sequence[str], *, key: str, title: str
) -> Figure:
    whole = len(kinds) > 1
    groups = stage_groups(timeline.stage_names)
    seconds = timeline.seconds
    found: list[Span] = []
    for name, stages in groups:
        here = sorted((moment for stage in stages for moment in moments.get(stage, ())), key=lambda one: one.seconds)
        drawn = binned(stretches(here, stages=stages, kinds=kinds, seconds=seconds), seconds=seconds)
        found += [
            Span(row=name, start=stretch.start, stop=stretch.stop, what=stretch.level.label)
            for stretch in drawn
            if stretch.level is not Level.NOWHERE
        ]
    notes = [
        f"Colour: the highest level reached in each of {TIME_BINS} equal parts of the step"
        + (", by any kind of state." if whole else ".")
        + " Dirty: newer than what NVMe holds, or the only copy."
    ]
    together = len(groups[0][1])
    if together > 1:
        notes.append(
            f"{len(timeline.stage_names):,} stages are shown {together} to a row, by the highest level of any of them; "
            "the table has each."
        )
    return Figure(
        key=key,
        title=title,
        alt=f"Map with a row for each stage over the time of step {timeline.step}, coloured by the highest tier "
        + ("that holds any of its states" if whole else f"that holds its {kinds[0]}")
        + "; what is dirty is darker",
        chart=spans(
            key, found, rows=[name for name, _ in groups], colours=_LEVEL_COLOURS, stop=seconds,
            x_title="seconds since the step began", big=whole, narrow=not whole,
            row_height=min(16, max(8 if whole else 6, 380 // len(groups))),
        ),
        table=_share_table(timeline, moments, kinds),
        notes=notes,
        in_picture=whole,
    )  # fmt: skip


def _share_table(timeline: Timeline, moments: Mapping[int, Sequence[Moment]], kinds: Sequence[str]) -> Table:
    """Per stage, the exact share of the step in each level that occurs, and the most bytes above NVMe."""
    rows = []
    for stage, name in enumerate(timeline.stage_names):
        here = moments.get(stage, ())
        found = stretches(here, stages=range(stage, stage + 1), kinds=kinds, seconds=timeline.seconds)
        rows.append((name, shares(found, seconds=timeline.seconds), _peak_bytes(here, kinds)))
    levels = sorted({level for _, found, _ in rows for level in found})
    return Table(
        columns=columns(
            ("stage", Unit.TEXT),
            *((level.label, Unit.SHARE) for level in levels),
            ("most bytes above NVMe", Unit.COUNT),
        ),
        rows=[(name, *(found.get(level, 0.0) for level in levels), peak) for name, found, peak in rows],
        note="Shares of the step's time, not binned; of several states of a stage the highest level counts.",
    )


def _peak_bytes(moments: Sequence[Moment], kinds: Sequence[str]) -> int:
    now: dict[tuple[str, int], int] = {}
    total = most = 0
    for moment in moments:
        if moment.kind not in kinds:
            continue
        key = moment.kind, moment.second
        above = moment.num_bytes if moment.tier != "nvme" and moment.state not in ("stored", "absent") else 0
        total += above - now.get(key, 0)
        now[key] = above
        most = max(most, total)
    return most


# --- lanes ------------------------------------------------------------------------------------------------------------


def lanes(facts: RunFacts) -> Section:
    """The ops of the last recorded step, lane by lane, and how long each was busy, stalled, or had nothing to do."""
    timeline = facts.timeline
    figures: list[Figure] = []
    words: list[str] = []
    if timeline is None:
        words.append(facts.why(TIMELINE_NAME))
    elif timeline.ops:
        figures.append(_ops(timeline))
    else:
        words.append(f"{TIMELINE_NAME} has no ops.")
    step = _lane_step(facts)
    if step is not None:
        figures.append(_lane_shares(step))
    else:
        words.append(f"No line of {METRICS_NAME} says how long lanes were busy.")
    return Section(key="lanes", title="What each lane does", figures=figures, words=words)


def _lane_step(facts: RunFacts) -> StepFacts | None:
    """The timeline's step, or the last one, if it says what lanes did."""
    wanted = facts.timeline.step if facts.timeline is not None else None
    known = [step for step in facts.steps if step.busy_seconds and step.seconds]
    return next((step for step in known if step.step == wanted), known[-1] if known else None)


def _ops(timeline: Timeline) -> Figure:
    found = merged_bars(timeline)
    within = [op for op in timeline.ops if op.stop >= 0 and op.start <= timeline.seconds]
    order = ["io: weights in", "io: states in", "io: states out", "io: spills out", "io: spills in"]
    rows = [row for row in (*order, *timeline.lanes[1:], *timeline.lanes[:1]) if any(bar.row == row for bar in found)]
    rows += sorted({bar.row for bar in found} - set(rows))
    compute = union_seconds(
        ((op.start, op.stop) for op in timeline.ops if op.lane == _COMPUTE), stop=timeline.seconds
    )
    notes = [
        f"{times(len(within), 'op')} in {times(len(found), 'bar')}: what overlaps, or is closer than "
        f"1/{1 / PIXEL_SHARE:.0f} of the step, within a row and a colour, is one bar; shorter ones are that long. "
        f"{TIMELINE_NAME} has each op. Spills: activations and gradients that do not fit."
    ]
    if timeline.truncated:
        notes.append("The step had more ops than the file holds: the rest is missing.")
    return Figure(
        key="ops",
        title=f"Step {timeline.step}: compute is at work for {show_share(compute / timeline.seconds)} of it",
        alt="Timeline of a step: a row for each lane, those of i/o by what is moved, with a bar where it worked",
        chart=spans(
            "ops",
            [
                Span(
                    row=bar.row, start=bar.start, stop=bar.stop, what=bar.group,
                    told=bar.what if bar.num_ops == 1 else f"{bar.num_ops} ops: {bar.what}",
                )
                for bar in found
            ],
            rows=rows, colours=_GROUP_COLOURS, x_title="seconds since the step began", stop=timeline.seconds,
            row_height=24,
        ),
        table=_op_table(timeline, within),
        notes=notes,
    )  # fmt: skip


def _op_table(timeline: Timeline, within: Sequence[TimedOp]) -> Table:
    kinds: dict[tuple[str, str], list[TimedOp]] = defaultdict(list)
    for op in within:
        kinds[op.lane, op.kind].append(op)
    rows: list[tuple[Cell, ...]] = []
    for (lane, kind), ops in kinds.items():
        busy = union_seconds(((op.start, op.stop) for op in ops), stop=timeline.seconds)
        longest = max(ops, key=lambda op: op.stop - op.start)
        rows.append(
            (
                lane, kind, len(ops), busy, busy / timeline.seconds,
                sum(op.stop - op.start for op in ops) / len(ops), longest.stop - longest.start,
                longest.named(timeline.stage_names),
            )
        )  # fmt: skip
    order = {lane: number for number, lane in enumerate(timeline.lanes)}
    rows.sort(key=lambda row: (order.get(str(row[0]), len(order)), -float(row[3] or 0)))
    return Table(
        columns=columns(
            ("lane", Unit.TEXT), ("op", Unit.TEXT), ("ops", Unit.COUNT), ("busy", Unit.SECONDS),
            ("of the step", Unit.SHARE), ("mean", Unit.SECONDS), ("longest", Unit.SECONDS), ("which", Unit.TEXT),
        ),
        rows=rows,
        note="Busy: time within the step in which at least one of these ops ran.",
    )  # fmt: skip


def _lane_shares(step: StepFacts) -> Figure:
    assert step.seconds is not None
    parts = {"busy": "@blue", "waits for others": "@amber", "has nothing left to do": "@pale"}
    found: list[Bar] = []
    rows: list[tuple[Cell, ...]] = []
    for lane, busy in step.busy_seconds.items():
        stall = step.stall_seconds.get(lane)
        rest = max(0.0, step.seconds - busy - (stall or 0.0))
        for (part, _), seconds in zip(parts.items(), (busy, stall or 0.0, rest), strict=True):
            share = seconds / step.seconds
            found.append(
                Bar(label=lane, value=100 * share, part=part, shown=f"{show_seconds(seconds)}, {show_share(share)}")
            )
        rows.append(
            (lane, busy, busy / step.seconds, stall, None if stall is None else stall / step.seconds, rest)
        )
    busiest = max(step.busy_seconds, key=lambda lane: step.busy_seconds[lane])
    return Figure(
        key="lanes",
        title=f"The {busiest} lane is the busiest: {show_share(step.busy_seconds[busiest] / step.seconds)} of step "
        f"{step.step}",
        alt="Bars of the shares of a step in which each lane was busy, waited for others, or had nothing left to do",
        chart=bars("lanes", found, title=f"% of step {step.step}", colours=parts, top=100.0, labelled=False),
        table=Table(
            columns=columns(
                ("lane", Unit.TEXT), ("busy seconds", Unit.NUMBER), ("busy", Unit.SHARE),
                ("waiting seconds", Unit.NUMBER), ("waiting", Unit.SHARE), ("rest", Unit.SECONDS),
            ),
            rows=rows,
        ),
        notes=("As the step's metrics have it. Lanes work beside each other, so shares do not add up to 100%.",),
    )  # fmt: skip
