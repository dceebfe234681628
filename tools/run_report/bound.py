"""What a report says of what bounds a step: computation or what does not grow with its tokens, and by how much.

Of the prediction, or of how long lanes were busy. What happens within a step is in `step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hoist.tiers.format import METRICS_NAME
from hoist.tools.durations import show_seconds
from hoist.tools.run_report.charts import Bar, Curve, bars, curves
from hoist.tools.run_report.facts import RunFacts
from hoist.tools.run_report.parts import (
    Cell,
    Figure,
    Section,
    Table,
    Unit,
    columns,
    middle,
    show_rate,
    show_share,
    steady,
)

#: Lanes whose work grows with the tokens of a step; that of the others does not in the vertical order.
_COMPUTE = "compute"
#: A prediction that measured steps are further away from is not what a step is made of.
_FAR_OFF = 0.25
#: Fixed and growing times closer than this are called balanced.
_BALANCED = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What a step's time is made of."""

    compute_seconds: float
    """Computation: grows with the tokens."""
    fixed_seconds: float
    """The longest of what does not grow with them."""
    fixed_by: str
    """Which lane that is."""
    io_seconds: float
    measured_seconds: float | None
    tokens: int
    is_predicted: bool
    """From the prediction; else from the time that lanes were busy in the measured steps."""
    predicted_seconds: float | None
    """What was predicted of a step, right or wrong."""

    @property
    def verdict(self) -> str:
        """In words, with by how much."""
        if self.compute_seconds <= 0 or self.fixed_seconds <= 0:
            return "Compute-bound: nothing else takes time" if self.fixed_seconds <= 0 else "I/O-bound"
        ratio = self.fixed_seconds / self.compute_seconds
        who = "the drive" if self.fixed_by == "io" else f"the {self.fixed_by} lane"
        if abs(ratio - 1) < _BALANCED:
            return f"Balanced: {who} needs as long as compute"
        if ratio > 1:
            kind = "I/O-bound" if self.fixed_by == "io" else f"Bound by {self.fixed_by}"
            return f"{kind}: {who} needs {ratio:.2g} times as long as compute"
        return f"Compute-bound: computing takes {1 / ratio:.2g} times as long as {who}"


def bound(facts: RunFacts) -> Bound | None:
    """What bounds a step; None without measured steps or their tokens."""
    recent = steady(facts)
    tokens = middle([step.tokens for step in recent])
    if not tokens:
        return None
    prediction = facts.prediction
    measured = middle([step.seconds for step in recent])
    told = prediction.get("seconds")
    far_off = bool(told and measured and abs(measured / told - 1) > _FAR_OFF)
    if "compute_seconds" in prediction and "io_seconds" in prediction and not far_off:
        names = {"io": "io_seconds", "optim": "optim_seconds", "copy": "copy_seconds"}
        fixed = {lane: prediction[name] for lane, name in names.items() if name in prediction}
        compute = prediction["compute_seconds"]
        is_predicted = True
    else:
        there = {lane for step in recent for lane in step.busy_seconds}
        busy = {lane: middle([step.busy_seconds.get(lane) for step in recent]) or 0.0 for lane in there}
        if _COMPUTE not in busy or "io" not in busy:
            return None
        compute, is_predicted = busy[_COMPUTE], False
        fixed = {lane: busy[lane] for lane in ("io", "optim", "copy") if lane in busy}
    longest = max(fixed, key=lambda lane: fixed[lane])
    return Bound(
        compute_seconds=compute, fixed_seconds=fixed[longest], fixed_by=longest, io_seconds=fixed["io"],
        measured_seconds=measured, tokens=int(tokens), is_predicted=is_predicted, predicted_seconds=told,
    )  # fmt: skip


def roofline(facts: RunFacts) -> Section:
    """Whether a step is bound by computation or by what does not grow with its tokens, and by how much."""
    title = "What bounds a step"
    found = bound(facts)
    if found is None or found.compute_seconds <= 0:
        why = f"No step of {METRICS_NAME} says how long lanes were busy." if facts.steps else facts.why(METRICS_NAME)
        return Section(key="roofline", title=title, figures=(), words=(why,))
    return Section(key="roofline", title=title, figures=(_bound_bars(found), _roof(facts, found)))


def _source(found: Bound) -> str:
    if found.is_predicted:
        return "Compute and i/o are predictions, made before the first step; the measured time is a median."
    why = "Nothing was predicted"
    if found.predicted_seconds and found.measured_seconds:
        why = f"The prediction, {show_seconds(found.predicted_seconds)} a step, is far from what is measured"
    return (
        f"{why}: these are the times that lanes were busy in the measured steps (medians). The io lane "
        "also counts as busy while a request waits for the drive, so this is an estimate."
    )


def _bound_bars(found: Bound) -> Figure:
    how = "predicted" if found.is_predicted else "lane busy"
    limit = max(found.compute_seconds, found.fixed_seconds)
    rows: list[tuple[str, str, float]] = [("compute", how, found.compute_seconds), ("io", how, found.io_seconds)]
    if found.fixed_by != "io":
        rows.append((found.fixed_by, how, found.fixed_seconds))
    rows.append(("longest of them", how, limit))
    if found.measured_seconds is not None:
        rows.append(("measured step", "measured", found.measured_seconds))
    title = found.verdict
    if found.measured_seconds and limit:
        title += f"; the measured step takes {found.measured_seconds / limit:.3g} times the longest of them"
    return Figure(
        key="bound",
        title=title,
        alt="Bars of the seconds that a step needs for compute and for i/o, the longest, and the measured step",
        chart=bars(
            "bound",
            [Bar(label=what, value=value, part=part, shown=show_seconds(value)) for what, part, value in rows],
            title="seconds a step", colours={"predicted": "@vermilion", "lane busy": "@grey", "measured": "@blue"},
        ),
        table=Table(
            columns=columns(
                ("what", Unit.TEXT), ("how known", Unit.TEXT), ("time", Unit.SECONDS), ("seconds", Unit.NUMBER),
                ("of the longest", Unit.SHARE),
            ),
            rows=[(what, part, value, value, value / limit if limit else None) for what, part, value in rows],
        ),
        notes=(_source(found),),
    )  # fmt: skip


def _roof(facts: RunFacts, found: Bound) -> Figure:
    """Tokens per second over tokens per step: what compute allows is flat, what the fixed part allows rises."""
    each = found.compute_seconds / found.tokens
    longest = max(found.compute_seconds, found.fixed_seconds)
    ridge = found.fixed_seconds / each
    low, high = min(found.tokens, max(ridge, 1.0)) / 8, max(found.tokens, ridge) * 8
    count = 48
    xs = [low * (high / low) ** (number / count) for number in range(count + 1)]
    xs = sorted({*xs, float(found.tokens), *([ridge] if low < ridge < high else [])})
    roof = [(x, x / max(x * each, found.fixed_seconds)) for x in xs]
    rows: list[tuple[Cell, ...]] = [
        ("tokens a step, now", found.tokens, None),
        ("tokens a step where both are equal", ridge, None),
        ("tokens per second at most, as compute allows", 1 / each, None),
        ("tokens per second at most, in such a step", found.tokens / longest, None),
    ]
    measured = found.tokens / found.measured_seconds if found.measured_seconds else None
    mark = None
    if measured is not None:
        mark = (float(found.tokens), measured, f"measured: {show_rate(measured)}/s")
        rows.append(("tokens per second, measured", measured, measured * each))
    if ridge > 0:
        ratio = found.tokens / ridge
        more = "times" if ratio >= 1 else "of"
        amount = f"{ratio:.2g}" if ratio >= 1 else show_share(ratio)
        title = f"A step has {found.tokens:,} tokens, {amount} {more} the {ridge:,.0f} that balance compute and others"
    else:
        title = f"A step has {found.tokens:,} tokens; nothing but compute takes time"
    notes = [
        _source(found),
        "The slope: a step's i/o and updates do not depend on its tokens. The flat part: computing takes the same "
        "time for each token.",
    ]
    if facts.store.options.get("plan") == "horizontal":
        notes.append("In the horizontal order i/o grows with the micro-batches: the slope is that of this step alone.")
    return Figure(
        key="roof",
        title=title,
        alt="Roofline: tokens per second at most over tokens per step, rising where i/o bounds and flat where compute "
        "does, with the measured step marked",
        chart=curves(
            "roof",
            [Curve(label="at most", colour="@vermilion" if found.is_predicted else "@grey", points=roof, dashed=True)],
            x_title="tokens per step", y_title="tokens per second", log_x=True, log_y=True, whole_x=False, mark=mark,
        ),
        table=Table(
            columns=columns(("what", Unit.TEXT), ("number", Unit.NUMBER), ("of what compute allows", Unit.SHARE)),
            rows=rows,
        ),
        notes=notes,
    )  # fmt: skip
