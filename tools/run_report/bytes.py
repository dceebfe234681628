"""What a report says of bytes over a run: what steps move, the memory they take, what the drive has suffered.

Each function makes one section of facts. What is within a step is in `step.py`, charts in
`charts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hoist.scheduler.endurance import Wear, judge
from hoist.tiers.format import METRICS_NAME, STATUS_NAME, WEAR_NAME
from hoist.tools.run_report.charts import Bar, Curve, bars, curves
from hoist.tools.run_report.facts import RunFacts, number
from hoist.tools.run_report.parts import (
    Cell,
    Figure,
    Section,
    Table,
    Unit,
    against,
    byte_scale,
    columns,
    decimal_scale,
    middle,
    show_share,
    steady,
    times,
)
from hoist.tools.run_report.series import Values, over, points, table, thinned
from hoist.tools.sizes import show_bytes, show_days, show_decimal
from hoist.tools.sizes import show_share as show_wear

#: Bytes read and written per trained parameter and step with nothing kept in memory, in vertical order: the same in
#: float32 and bfloat16 (docs/tuning.md).
FORMULA_READ_BYTES, FORMULA_WRITTEN_BYTES = 16, 12


def traffic(facts: RunFacts) -> Section:
    """What a step moves to and from NVMe, beside the prediction and the formula; what residency saves."""
    steps = facts.steps
    title = "Traffic"
    if not any(step.nvme_read_bytes is not None for step in steps):
        return Section(key="traffic", title=title, figures=(), words=(facts.why(METRICS_NAME),))
    return Section(key="traffic", title=title, figures=(_moved(facts), _moved_by_step(facts)))


def _moved(facts: RunFacts) -> Figure:
    recent, prediction, store = steady(facts), facts.prediction, facts.store
    read, written, read_saved, written_saved = (
        middle([getattr(step, f"nvme_{what}_bytes") for step in recent])
        for what in ("read", "written", "read_saved", "written_saved")
    )
    rows: list[tuple[str, str, float | None]] = [
        ("read", "measured", read),
        ("read", "predicted", prediction.get("read_bytes")),
        ("written", "measured", written),
        ("written", "predicted", prediction.get("written_bytes")),
    ]
    notes = [f"Measured: medians of the last {times(len(recent), 'step')}, what commits wrote included."]
    vertical = facts.store.options.get("plan", "vertical") == "vertical"
    if vertical and not store.num_frozen and store.num_parameters:
        rows.insert(2, ("read", "formula, nothing kept", float(FORMULA_READ_BYTES * store.num_parameters)))
        rows.append(("written", "formula, nothing kept", float(FORMULA_WRITTEN_BYTES * store.num_parameters)))
        notes.append(
            f"The formula: {FORMULA_READ_BYTES} bytes read and {FORMULA_WRITTEN_BYTES} written per trained parameter, "
            "if nothing stayed in memory from step to step; spilled activations and gradients come on top of it."
        )
    if prediction.get("read_bytes") is None:
        notes.append("Nothing was predicted of this run's traffic.")
    rows += [("saved reads", "saved by residency", read_saved), ("saved writes", "saved by residency", written_saved)]
    known = [(what, part, value) for what, part, value in rows if value is not None]
    scale, unit = byte_scale(max((value for _, _, value in known), default=1.0))
    found = [
        Bar(label=_row_label(what, part), value=value / scale, part=part, shown=show_bytes(value))
        for what, part, value in known
    ]
    per = max(1, store.num_parameters)
    headline = f"A step reads {show_bytes(read or 0)} and writes {show_bytes(written or 0)}"
    if store.num_parameters:
        headline += f": {(read or 0) / per:.3g} + {(written or 0) / per:.3g} bytes a parameter"
    if read is not None and prediction.get("read_bytes"):
        total = prediction["read_bytes"] + (prediction.get("written_bytes") or 0.0)
        headline += f", {against(read + (written or 0.0), total, ('more', 'less'))} the prediction"
    return Figure(
        key="traffic",
        title=headline,
        alt="Bars of the bytes that a step reads from NVMe and writes to it: measured, predicted, by formula, saved",
        chart=bars(
            "traffic", found, title=f"{unit} a step, on NVMe",
            colours={
                "measured": "@blue", "predicted": "@vermilion", "formula, nothing kept": "@grey",
                "saved by residency": "@green",
            },
        ),
        table=Table(
            columns=columns(
                ("what", Unit.TEXT), ("how known", Unit.TEXT), ("amount", Unit.BYTES), ("bytes", Unit.COUNT),
                ("bytes a parameter", Unit.NUMBER),
            ),
            rows=[
                (what, part, value, value, value / per if store.num_parameters else None)
                for what, part, value in known
            ],
        ),
        notes=notes,
    )  # fmt: skip


def _row_label(what: str, part: str) -> str:
    return what if part == "saved by residency" else f"{what}, {part.split(',')[0]}"


def _moved_by_step(facts: RunFacts) -> Figure:
    steps = facts.steps
    names = ("read", "written", "read_saved", "written_saved")
    values = {name: [getattr(step, f"nvme_{name}_bytes") for step in steps] for name in names}
    largest = max((value for each in ("read", "written") for value in values[each] if value is not None), default=0)
    scale, unit = byte_scale(largest)
    found = [
        Curve(label=label, colour=colour, points=points(steps, over(values[name], scale)))
        for label, colour, name in (("read", "@blue", "read"), ("written", "@vermilion", "written"))
    ]
    total = sum(value or 0 for name in ("read", "written") for value in values[name])
    saved = sum(value or 0 for name in ("read_saved", "written_saved") for value in values[name])
    title = f"{show_bytes(total)} moved in {times(len(steps), 'step')}"
    if saved > 0:
        title += f"; states in memory saved {show_bytes(saved)}, {show_share(saved / (saved + total))} of it all"
    return Figure(
        key="trafficbystep",
        title=title,
        alt="Curves of the bytes that each step read from NVMe and wrote to it",
        chart=curves("trafficbystep", found, x_title="step", y_title=f"{unit} a step", from_zero=True),
        table=table(
            steps,
            tuple(
                (f"{name.replace('_', ', ')} bytes", Unit.COUNT, values[name]) for name in names
            ),
        ),
        notes=thinned(len(steps)),
        in_picture=False,
    )  # fmt: skip


def memory(facts: RunFacts) -> Section:
    """The budget's parts, the process's peak against the promise, tiers against what they may hold."""
    status = facts.status
    figures: list[Figure] = []
    words: list[str] = []
    if status is None:
        words.append(facts.why(STATUS_NAME) + " It says how the budget is divided.")
    elif status.memory_parts:
        figures.append(_parts(status.memory_parts, _budget(facts)))
    peaks = [step.host_peak_bytes for step in facts.steps]
    if any(peak is not None for peak in peaks):
        figures.append(_peak(facts, peaks))
    else:
        words.append(facts.why(METRICS_NAME))
    if status is not None and status.tiers:
        figures.append(_tiers(facts))
    return Section(key="memory", title="Memory", figures=figures, words=tuple(dict.fromkeys(words)))


def _budget(facts: RunFacts) -> int | None:
    """What host memory may hold."""
    host = facts.status.tiers.get("host") if facts.status is not None else None
    return None if host is None else host.budget_bytes


def _parts(parts: Mapping[str, int], budget: int | None) -> Figure:
    known = {name: size for name, size in parts.items() if size > 0}
    largest = max(known, key=lambda name: known[name], default="nothing")
    planned = sum(known.values())
    scale, unit = byte_scale(max(known.values(), default=1))
    of = "" if budget is None else f" of a budget of {show_bytes(budget)}"
    return Figure(
        key="budget",
        title=f"{show_bytes(planned)}{of} are planned; most go to {largest}",
        alt="Bars of the parts of the host-memory budget",
        chart=bars(
            "budget",
            [
                Bar(label=name, value=size / scale, part="planned", shown=show_bytes(size))
                for name, size in known.items()
            ],
            title=f"{unit}", colours={"planned": "@blue"},
        ),
        table=Table(
            columns=columns(
                ("part", Unit.TEXT), ("amount", Unit.BYTES), ("bytes", Unit.COUNT), ("of the budget", Unit.SHARE)
            ),
            rows=[(name, size, size, size / budget if budget else None) for name, size in parts.items()],
        ),
    )  # fmt: skip


def _peak(facts: RunFacts, peaks: Values) -> Figure:
    status, steps = facts.status, facts.steps
    promise = status.promised_bytes if status is not None and status.promised_bytes else None
    budget = _budget(facts)
    highest = max(peak for peak in peaks if peak is not None)
    title = f"Host peak {show_bytes(highest)}"
    if promise:
        within = "within" if highest <= promise else "MORE THAN"
        title += f", {within} the promised {show_bytes(promise)} ({show_share(highest / promise)} of it)"
    scale, unit = byte_scale(max(highest, promise or 0))
    limits = [("promise", "@vermilion", promise), ("budget", "@grey", budget)]
    ends = sorted({steps[0].step, steps[-1].step})
    found = [Curve(label="host peak", colour="@blue", points=points(steps, over(peaks, scale)))]
    found += [
        Curve(label=label, colour=colour, points=[(step, limit / scale) for step in ends], dashed=True)
        for label, colour, limit in limits
        if limit
    ]
    device = [step.device_peak_bytes for step in steps]
    series: list[tuple[str, Unit, Values]] = [("host peak bytes", Unit.COUNT, peaks)]
    if promise:
        series.append(("of the promise", Unit.SHARE, over(peaks, promise)))
    if any(device):
        series.append(("device peak bytes", Unit.COUNT, device))
    return Figure(
        key="peak",
        title=title,
        alt="Curve of the most host memory that the run has taken by each step, with budget and promise dashed",
        chart=curves("peak", found, x_title="step", y_title=f"{unit} beyond Python and its libraries", from_zero=True),
        table=table(
            steps,
            series,
        ),
        notes=(
            "The peak is the most so far; the promise is 1.1 x budget + 32 MiB, since heaps and stacks take memory "
            "that no plan can place.",
            *thinned(len(steps)),
        ),
    )


def _tiers(facts: RunFacts) -> Figure:
    assert facts.status is not None
    found: list[Bar] = []
    rows: list[tuple[Cell, ...]] = []
    fullest = ("", 0.0)
    for name, tier in facts.status.tiers.items():
        rows.append(
            (name, tier.resident_bytes, tier.resident_bytes, tier.peak_bytes, tier.peak_bytes, tier.budget_bytes,
             tier.peak_bytes / tier.budget_bytes if tier.budget_bytes else None)
        )  # fmt: skip
        if not tier.budget_bytes:
            continue
        fullest = max(fullest, (name, tier.peak_bytes / tier.budget_bytes), key=lambda one: one[1])
        for part, amount in (("now", tier.resident_bytes), ("at most", tier.peak_bytes)):
            found.append(
                Bar(
                    label=f"{name}, {part}", value=100 * amount / tier.budget_bytes, part=part,
                    shown=f"{show_bytes(amount)} of {show_bytes(tier.budget_bytes)}",
                )
            )  # fmt: skip
    title = "What the tiers hold" if not fullest[0] else f"The {fullest[0]} tier was filled to {show_share(fullest[1])}"
    return Figure(
        key="tiers",
        title=title,
        alt="Bars of the bytes of states that each tier holds now and held at most, as shares of what it may hold",
        chart=bars(
            "tiers", found, title="% of what the tier may hold", colours={"now": "@sky", "at most": "@blue"},
            top=max(180.0, *(1.7 * bar.value for bar in found)) if found else 100.0,
        ),
        table=Table(
            columns=columns(
                ("tier", Unit.TEXT), ("now", Unit.BYTES), ("now, bytes", Unit.COUNT), ("at most", Unit.BYTES),
                ("at most, bytes", Unit.COUNT), ("may hold", Unit.BYTES), ("filled", Unit.SHARE),
            ),
            rows=rows,
        ),
        notes=("As of the last status. A tier without a known limit is in the table alone.",),
    )  # fmt: skip


def wear(facts: RunFacts) -> Section:
    """What the drives have taken so far, per step, and what the run will add."""
    title, record, steps = "Drive wear", facts.wear, facts.steps
    if record is None:
        return Section(key="wear", title=title, figures=(), words=(facts.why(WEAR_NAME),))
    told = facts.status.wear or {} if facts.status is not None else {}
    recent = steady(facts)
    per_step = number(told.get("written_bytes_per_step")) or middle([step.nvme_written_bytes for step in recent]) or 0.0
    done = steps[-1].step if steps else facts.store.step
    left = max(0, facts.store.num_steps - done) if facts.store.num_steps is not None else None
    found = judge(
        record,
        bytes_per_step=per_step,
        seconds_per_step=middle([step.seconds for step in recent]),
        steps_left=left,
    )
    return Section(key="wear", title=title, figures=(_wear(facts, found, done, done + (left or 0)),))


def _wear(facts: RunFacts, found: Wear, done: int, last_step: int) -> Figure:
    steps, worst = facts.steps, found.worst
    end = found.written_bytes + (found.run_bytes or 0.0)
    headline = f"{show_decimal(found.written_bytes)} written so far"
    notes = ["All that hoist has ever written to the store's drives counts, making the store and snapshots included."]
    if found.run_bytes:
        headline += f", {show_decimal(end)} by step {last_step:,} (estimated)"
        notes.append("The estimate: each step that is left writes as much as a step does now.")
    if worst is not None and worst.used_share is not None:
        headline += f"; {show_wear(worst.used_share + (worst.run_share or 0.0))} of what the drive is rated for"
    else:
        notes.append("What the drive is rated for is not known; hoist train --tbw 600TB, say, names it.")
    # What was written before and beside the steps lies below the curve.
    total = max(0.0, float(found.written_bytes - sum(step.nvme_written_bytes or 0 for step in steps)))
    sums: list[float | None] = []
    for step in steps:
        total += step.nvme_written_bytes or 0
        sums.append(total)
    scale, unit = decimal_scale(end)
    drawn = [Curve(label="written", colour="@vermilion", points=points(steps, over(sums, scale)))]
    if found.run_bytes and steps:
        ends = [(done, found.written_bytes / scale), (last_step, end / scale)]
        drawn.append(Curve(label="estimated", colour="@grey", points=ends, dashed=True))
    if steps:
        chart = curves("wear", drawn, x_title="step", y_title=f"{unit} written in all", from_zero=True)
    else:
        bar = Bar(
            label="written so far", value=end / scale, part="written", shown=show_decimal(found.written_bytes)
        )
        chart = bars("wear", [bar], title=unit, colours={"written": "@vermilion"})
    return Figure(
        key="wear",
        title=headline,
        alt="Curve of the bytes written to the drive in all, with an estimate until the end of the run dashed",
        chart=chart,
        table=_wear_table(found),
        notes=(*notes, *thinned(len(steps))),
    )


def _wear_table(found: Wear) -> Table:
    rows: list[tuple[Cell, ...]] = [
        ("written so far", show_decimal(found.written_bytes), found.written_bytes),
        ("read so far", show_decimal(found.read_bytes), found.read_bytes),
        ("written a step", show_decimal(found.written_bytes_per_step), found.written_bytes_per_step),
    ]
    if found.run_bytes is not None:
        rows.append(("still to be written, estimated", show_decimal(found.run_bytes), found.run_bytes))
    for drive in found.drives:
        rows.append((f"{drive.directory}: written", show_decimal(drive.written_bytes), drive.written_bytes))
        if drive.tbw_bytes is None:
            continue
        rows.append((f"{drive.directory}: rated for ({drive.source})", show_decimal(drive.tbw_bytes), drive.tbw_bytes))
        if drive.used_share is not None:
            rows.append((f"{drive.directory}: used of it", show_wear(drive.used_share), drive.used_share))
        if drive.days_left is not None:
            rows.append((f"{drive.directory}: left at this speed", show_days(drive.days_left), drive.days_left))
    return Table(
        columns=columns(("what", Unit.TEXT), ("amount", Unit.SHOWN), ("bytes, share or days", Unit.NUMBER)), rows=rows
    )
