"""What a report says of a whole run: how training goes, and how fast.

Each function makes one section of facts. Bytes over steps are in `bytes.py`, what is within a step in
`step.py`, charts in `charts.py`.
"""

from __future__ import annotations

from hoist.tiers.format import METRICS_NAME
from hoist.tools.durations import show_seconds
from hoist.tools.run_report.charts import Curve, curves
from hoist.tools.run_report.facts import RunFacts
from hoist.tools.run_report.parts import (
    Figure,
    Section,
    Unit,
    against,
    middle,
    show_rate,
    steady,
    times,
)
from hoist.tools.run_report.reduce import TABLE_ROWS
from hoist.tools.run_report.series import Values, points, table, thinned


def training(facts: RunFacts) -> Section:
    """Loss with evaluations, the gradients' norm, the learning rate."""
    if not facts.steps:
        return Section(key="training", title="Training", figures=(), words=(facts.why(METRICS_NAME),))
    figures, words = [], []
    for what, make in (("loss", _loss), ("grad_norm", _norm), ("lr", _rate)):
        if any(getattr(step, what) is not None for step in facts.steps):
            figures.append(make(facts))
        else:
            words.append(f"No step has a finite {what}.")
    return Section(key="training", title="Training", figures=figures, words=words)


def _loss(facts: RunFacts) -> Figure:
    steps, evaluations = facts.steps, facts.evaluations
    losses = [step.loss for step in steps]
    known = [step for step in steps if step.loss is not None]
    notes = thinned(len(steps))
    missing = [step.step for step in steps if step.loss is None]
    if missing:
        which = ", ".join(str(step) for step in missing[:8]) + (", ..." if len(missing) > 8 else "")
        notes.append(f"{times(len(missing), 'step')} without a finite loss, left as gaps: {which}.")
    if len(known) == 1:
        title = f"Loss {known[0].loss:.4f} at step {known[0].step}, the only step so far"
    else:
        first, last = known[0], known[-1]
        assert first.loss is not None and last.loss is not None
        verb = "fell" if last.loss < first.loss else "rose" if last.loss > first.loss else "stayed"
        title = f"Loss {verb} from {first.loss:.4f} at step {first.step} to {last.loss:.4f} at step {last.step}"
    best = min(((one.loss, one.step) for one in evaluations if one.loss is not None), default=None)
    if best is not None:
        title += f"; best validation loss {best[0]:.4f} at step {best[1]}"
    found = [
        Curve(label="training loss", colour="@blue", points=points(steps, losses)),
        Curve(
            label="validation loss",
            colour="@vermilion",
            points=[(one.step, one.loss) for one in evaluations],
            dots=len(evaluations) <= 60,
        ),
    ]
    by_step = {one.step: one.loss for one in evaluations}
    series: list[tuple[str, Unit, Values]] = [("loss", Unit.NUMBER, losses)]
    if evaluations:
        series.append(("validation loss", Unit.NUMBER, [by_step.get(step.step) for step in steps]))
    return Figure(
        key="loss",
        title=title,
        alt="Curve of the training loss over steps" + (", with the loss of each evaluation" if evaluations else ""),
        chart=curves("loss", found, x_title="step", y_title="loss (nats per label)", big=True),
        table=table(steps, series, keep=lambda step: len(by_step) <= TABLE_ROWS and step in by_step),
        notes=notes,
    )


def _norm(facts: RunFacts) -> Figure:
    steps = facts.steps
    norms = [step.grad_norm for step in steps]
    known = [(step.grad_norm, step.step) for step in steps if step.grad_norm is not None]
    clipped = sum(step.clip_scale is not None and 0.0 < step.clip_scale < 1.0 for step in steps)
    skipped = sum(step.clip_scale == 0.0 for step in steps)
    highest = max(known)
    title = f"Gradient norm: median {middle(norms):.4g}, highest {highest[0]:.4g} at step {highest[1]}"
    if clipped or skipped:
        title += f"; {times(clipped, 'step')} clipped, {skipped:,} skipped"
    positive = [value for value, _ in known if value > 0]
    log = len(positive) == len(known) > 1 and max(positive) > 20 * min(positive)
    notes = thinned(len(steps))
    if len(known) < len(steps):
        notes.append(f"{times(len(steps) - len(known), 'step')} without a finite norm, left as gaps.")
    return Figure(
        key="norm",
        title=title,
        alt="Curve of the global gradient norm over steps" + (", on a logarithmic axis" if log else ""),
        chart=curves(
            "norm",
            [Curve(label="gradient norm", colour="@green", points=points(steps, norms))],
            x_title="step", y_title="2-norm of the gradients", log_y=log,
        ),
        table=table(
            steps,
            (
                ("gradient norm", Unit.NUMBER, norms),
                ("multiplied with", Unit.NUMBER, [step.clip_scale for step in steps]),
            ),
        ),
        notes=notes,
    )  # fmt: skip


def _rate(facts: RunFacts) -> Figure:
    rates = [step.lr for step in facts.steps]
    known = [rate for rate in rates if rate is not None]
    title = f"Learning rate {known[-1]:.3g}" + (f", highest {max(known):.3g}" if max(known) > known[-1] else "")
    return Figure(
        key="rate",
        title=title,
        alt="Curve of the learning rate over steps",
        chart=curves(
            "rate",
            [Curve(label="learning rate", colour="@pink", points=points(facts.steps, rates))],
            x_title="step", y_title="learning rate", from_zero=True,
        ),
        table=table(facts.steps, (("learning rate", Unit.NUMBER, rates),)),
        notes=thinned(len(rates)),
        in_picture=False,
    )  # fmt: skip


def speed(facts: RunFacts) -> Section:
    """Tokens a second, and seconds per step beside what was predicted."""
    steps = facts.steps
    if not any(step.seconds for step in steps):
        return Section(key="speed", title="Speed", figures=(), words=(facts.why(METRICS_NAME),))
    prediction = facts.prediction
    seconds = [step.seconds for step in steps]
    rates = [step.tokens_per_second for step in steps]
    median_seconds, median_rate = (
        middle([step.seconds for step in steady(facts)]), middle([step.tokens_per_second for step in steady(facts)])
    )  # fmt: skip
    told = [
        step.predicted_seconds if step.predicted_seconds is not None else prediction.get("seconds") for step in steps
    ]
    expected = told[-1]
    off = [(one - other) / other if one and other else None for one, other in zip(seconds, told, strict=True)]
    title = "A step takes an unknown time" if median_seconds is None else f"A step takes {show_seconds(median_seconds)}"
    if median_seconds and expected:
        title += f", {against(median_seconds, expected, ('longer', 'shorter'))} the predicted {show_seconds(expected)}"
    notes = thinned(len(steps))
    notes.append(f"The title's times are medians of the last {times(len(steady(facts)), 'step')}.")
    if not any(told):
        notes.append("Nothing was predicted of this run.")
    found = [
        Curve(label="measured", colour="@blue", points=points(steps, seconds)),
        Curve(label="predicted", colour="@vermilion", points=points(steps, told) if any(told) else (), dashed=True),
    ]
    step_figure = Figure(
        key="seconds",
        title=title,
        alt="Curve of the seconds that each step took" + (", with the prediction dashed" if any(told) else ""),
        chart=curves("seconds", found, x_title="step", y_title="seconds per step", from_zero=True),
        table=table(
            steps,
            (
                ("seconds", Unit.NUMBER, seconds),
                *((("predicted seconds", Unit.NUMBER, told), ("off by", Unit.SHARE, off)) if any(told) else ()),
            ),
        ),
        notes=notes,
    )
    rate_title = "Throughput is not known"
    if median_rate is not None:
        rate_title = f"{show_rate(median_rate)} tokens a second"
    rate_figure = Figure(
        key="throughput",
        title=rate_title,
        alt="Curve of the tokens per second of each step",
        chart=curves(
            "throughput",
            [Curve(label="throughput", colour="@blue", points=points(steps, rates))],
            x_title="step", y_title="tokens per second", from_zero=True,
        ),
        table=table(
            steps,
            (("tokens", Unit.COUNT, [step.tokens for step in steps]), ("tokens per second", Unit.NUMBER, rates)),
        ),
        notes=thinned(len(steps)),
    )  # fmt: skip
    return Section(key="speed", title="Speed", figures=(step_figure, rate_figure))
