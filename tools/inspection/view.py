"""How a store looks on a terminal, or in a pipe: `hoist inspect`'s lines, made from an `Inspection`. Prints nothing.

Letters carry the meaning, colours repeat it. Which stages share a row is `rows.py`'s business, refreshing
`watch.py`'s.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from hoist.scheduler.status import STATE_KINDS, RunStatus, StateBytes, TierStatus
from hoist.tools.durations import show_clock, show_span
from hoist.tools.inspection.looking import Condition, Inspection, StageStates
from hoist.tools.inspection.rows import MAX_ROWS, Row, rows, total
from hoist.tools.invoked import shown_path
from hoist.tools.sizes import show_bytes, show_days, show_decimal, show_share

#: Letter and colour of each tier; the colours are told apart with any kind of colour blindness (Okabe and Ito 2008).
TIERS = {"device": ("D", "#e69f00"), "host": ("H", "#56b4e9"), "nvme": ("N", "#009e73")}
_MARK_STYLE = "bold #d55e00"
_STALL_STYLE = "#cc79a7"
_LABEL_STYLE = "bold"
_QUIET_STYLE = "dim"
_CONDITION_STYLES = {
    Condition.RUNNING: "bold #009e73",
    Condition.ENDED: "bold",
    Condition.HANGING: "bold #d55e00",
    Condition.FAILED: "bold #d55e00",
    Condition.DIED: "bold #d55e00",
    Condition.UNFINISHED: "bold #d55e00",
}
#: Lanes as people call them.
LANES = {"compute": "computation", "io": "i/o", "optim": "updates", "copy": "merging weights", "commit": "commits"}
_LABEL_WIDTH = 9
_BAR_WIDTH = 20
_GAP = 2
#: Columns that a name of a stage has at least where the terminal is too narrow for all.
_MIN_NAME = 12


@dataclass(kw_only=True, slots=True)
class Canvas:
    """Lines that become a view."""

    width: int | None
    """Columns; None: as many as it takes, for a pipe."""
    ascii_only: bool = False
    """The terminal shows no other characters."""
    lines: list[Text] = field(default_factory=list)
    spare: list[tuple[int, Text]] = field(default_factory=list)
    """Lines that a low terminal can do without, the smallest numbers first."""

    def add(self, line: Text, *, spare: int | None = None) -> None:
        """A line, and how easily it is spared."""
        self.lines.append(line)
        if spare is not None:
            self.spare.append((spare, line))

    def gap(self) -> None:
        """An empty line."""
        self.add(Text(""), spare=0)

    def fit(self, height: int) -> None:
        """Leave out lines, as far as they can be spared, until there are at most ``height``."""
        for _, line in sorted(self.spare, key=lambda each: each[0]):
            if len(self.lines) <= height:
                return
            self.lines = [each for each in self.lines if each is not line]

    def field(self, label: str, text: str, style: str = "", *, spare: int | None = None) -> None:
        """A label and what there is to say, wrapped under itself."""
        parts = [text]
        if self.width is not None:
            room = max(20, self.width - _LABEL_WIDTH)
            parts = textwrap.wrap(text, room, break_long_words=True, break_on_hyphens=False) or [""]
        for number, part in enumerate(parts):
            self.add(
                Text.assemble((f"{'' if number else label:<{_LABEL_WIDTH}}", _LABEL_STYLE), (self.plain(part), style)),
                spare=spare,
            )

    def plain(self, text: str) -> str:
        """The text in characters that can be shown."""
        printable = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
        return printable.replace("…", "..") if self.ascii_only else printable

    def bar(self, share: float | None, width: int = _BAR_WIDTH) -> Text:
        """A bar that is full at 1."""
        full, empty = ("#", ".") if self.ascii_only else ("━", "─")
        filled = 0 if share is None else round(min(1.0, max(0.0, share)) * width)
        if share and not filled:
            filled = 1
        style = _MARK_STYLE if (share or 0.0) > 1.0 else ""
        return Text.assemble((full * filled, style), (empty * (width - filled), "dim"))


def render(
    inspection: Inspection,
    *,
    width: int | None,
    ascii_only: bool = False,
    every: bool = False,
    height: int | None = None,
) -> list[Text]:
    """The view's lines, none longer than ``width``; at most ``height`` of them, as far as joining stages can help."""
    canvas = Canvas(width=width, ascii_only=ascii_only)
    _head(canvas, inspection)
    below = Canvas(width=width, ascii_only=ascii_only)
    _below(below, inspection)
    limit = MAX_ROWS
    if height is not None:
        needed = len(canvas.lines) + len(below.lines) - len(canvas.spare) - len(below.spare)
        limit = max(5, min(MAX_ROWS, height - needed - 3))
    if inspection.stages:
        canvas.gap()
        _table(canvas, inspection, every, limit)
    if below.lines:
        canvas.gap()
        canvas.lines += below.lines
        canvas.spare += below.spare
    if height is not None:
        canvas.fit(height)
    return canvas.lines


# --- above the table ------------------------------------------------------------------------------------------------


def _head(canvas: Canvas, inspection: Inspection) -> None:
    view, status = inspection.view, inspection.status
    condition = inspection.condition
    canvas.lines.append(
        Text.assemble(
            (f"{'store':<{_LABEL_WIDTH}}", _LABEL_STYLE),
            (condition.value, _CONDITION_STYLES.get(condition, "bold")),
            "  ",
            canvas.plain(shown_path(view.directory)),
        )
    )
    if canvas.width is not None and canvas.lines[-1].cell_len > canvas.width:
        canvas.lines[-1] = Text.assemble(
            (f"{'store':<{_LABEL_WIDTH}}", _LABEL_STYLE), (condition.value, _CONDITION_STYLES.get(condition, "bold"))
        )
        canvas.field("", shown_path(view.directory))
    canvas.field("", inspection.message)
    frozen = f" and {inspection.num_frozen:,} frozen ones" if inspection.num_frozen else ""
    if view.num_stages:
        canvas.field(
            "model", f"{inspection.model}: {inspection.num_parameters:,} trained parameters{frozen} in "
            f"{view.num_stages:,} {'stage' if view.num_stages == 1 else 'stages'}",
            spare=3,
        )  # fmt: skip
    for line in inspection.damage:
        canvas.field("DAMAGED", line, _MARK_STYLE)
    for line in inspection.notes:
        canvas.field("note", line)
    if view.record is not None:
        _position(canvas, inspection, status)
    if "lr" in inspection.options:
        canvas.field("trained", _trained_with(inspection.options), spare=2)
    if view.record is not None and not inspection.is_live and inspection.free_bytes is not None:
        slots = "" if view.is_snapshot else f", {view.num_slots} slots a chunk"
        canvas.field(
            "drive",
            f"{show_bytes(inspection.file_bytes)} in chunk files{slots}; {show_bytes(inspection.free_bytes)} are free",
        )
    if view.snapshots:
        names = view.snapshots if len(view.snapshots) <= 6 else (*view.snapshots[:5], f"{len(view.snapshots) - 5} more")
        canvas.field("kept", f"snapshots: {', '.join(names)}")


def _trained_with(options: Mapping[str, Any]) -> str:
    """What `hoist train` was told of optimizer and batch, as far as it is known, in its own options."""
    names = ("lr", "lr_schedule", "betas", "eps", "weight_decay", "clip_norm", "seq_len", "micro_batch_size",
             "micro_batches")  # fmt: skip
    found = ["AdamW"]
    for name in names:
        value = options.get(name)
        if value is not None:
            several = value if isinstance(value, list) else [value]
            shown = (f"{each:g}" if isinstance(each, float) else str(each) for each in several)
            found.append(f"--{name.replace('_', '-')} {','.join(shown)}")
    return " ".join(found)


def _shown_path(path: Path) -> str:
    """From the current directory, where it is below it."""
    try:
        here = Path.cwd()
    except OSError:  # it was removed, which is no matter for a store elsewhere
        return str(path)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _position(canvas: Canvas, inspection: Inspection, status: RunStatus | None) -> None:
    record = inspection.view.record
    committed = "" if record is None else f"committed is step {record.step}"
    of = "" if inspection.num_steps is None else f" of {inspection.num_steps:,}"
    if status is None or not inspection.is_live:
        canvas.field("step", f"{0 if record is None else record.step:,}{of} committed")
        ended_badly = inspection.condition in (Condition.DIED, Condition.FAILED)
        # What it told before its last commit says nothing of what was lost.
        if status is not None and ended_badly and (record is None or status.position.step >= record.step):
            position = status.position
            at = "" if position.current_step is None else f" and was at step {position.current_step:,}"
            canvas.field("", f"the run itself had done {position.step:,} steps{at}")
    else:
        position = status.position
        doing = "between steps" if position.phase is None else position.phase
        if position.stage is not None:
            doing += f" of {position.stage}"
        if position.micro_batch is not None:
            doing += f", micro-batch {position.micro_batch}"
        number = position.step if position.current_step is None else position.current_step
        share = position.step / inspection.num_steps if inspection.num_steps else None
        told = "" if inspection.age_seconds is None else f"; told {show_span(inspection.age_seconds)} ago"
        canvas.field("step", f"{number:,}{of}: {doing}; {committed}{told}")
        if share is not None:
            left = "" if status.speed.eta_seconds is None else f", {show_clock(status.speed.eta_seconds)} left"
            canvas.add(Text.assemble(" " * _LABEL_WIDTH, canvas.bar(share), f" {share:.0%}{left}"), spare=2)
    if status is not None:
        _last_step(canvas, status)


def _last_step(canvas: Canvas, status: RunStatus) -> None:
    parts = []
    if status.speed.tokens_per_second is not None:
        parts.append(f"{status.speed.tokens_per_second:,.0f} tokens/s")
    if status.speed.seconds_per_step is not None:
        parts.append(f"{show_span(status.speed.seconds_per_step)} a step")
    if status.last_step is not None:
        of = [
            f"{word} {number:.{digits}}"
            for word, name, digits in (("loss", "loss", "4f"), ("norm", "grad_norm", "3g"), ("lr", "lr", "1e"))
            if isinstance(number := status.last_step.get(name), (int, float))
        ]
        if of:
            parts.append(f"{', '.join(of)} at step {status.last_step.get('step')}")
    if parts:
        canvas.field("speed" if len(parts) > 1 else "last", "; ".join([", ".join(parts[:2]), *parts[2:]]))


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Token:
    """What a cell says of one tier."""

    tier: str
    size: str
    marks: str

    @property
    def width(self) -> int:
        return 2 + len(self.size) + len(self.marks)

    def text(self) -> Text:
        letter, style = TIERS[self.tier]
        return Text.assemble((letter, f"bold {style}"), " ", (self.size, style), (self.marks, _MARK_STYLE))


def _table(canvas: Canvas, inspection: Inspection, every: bool, limit: int) -> None:
    status = inspection.status
    at_work = status.position.stage if status is not None and inspection.is_live else None
    shown = rows(inspection.stages, at_work=at_work, every=every, limit=limit)
    arrow, dots = (">", "..") if canvas.ascii_only else ("▶", "…")
    names = [_name(canvas, row, dots) for row in shown]
    if len(inspection.stages) > 1:
        shown = (*shown, total(inspection.stages))
        names.append("all together")
    for sizes in (show_bytes, short_bytes):
        cells = [[_tokens(kind, sizes) for kind in row.kinds] for row in shown]
        name_width = max(len("stage"), *map(cell_len, names)) + 2
        widths, stacked = _fit(canvas.width, name_width, cells)
        if sizes is short_bytes or not any(stacked):
            break
    if canvas.width is not None:
        name_width = min(name_width, max(_MIN_NAME, canvas.width - sum(widths) - _GAP * len(widths)))
    line = Text(f"{'  stage':<{name_width}}", style=_LABEL_STYLE)
    for kind, width in zip(STATE_KINDS, widths, strict=True):
        line.append(" " * _GAP + f"{kind[:width] if canvas.width is not None else kind:<{width}}")
    canvas.lines.append(_trimmed(line))
    for name, row, tokens in zip(names, shown, cells, strict=True):
        _add_row(canvas, (arrow if row.at_work else " ", name, name_width, dots), tokens, widths, stacked)
    canvas.lines.append(Text(""))
    _legend(canvas, inspection, shown, short=sizes is short_bytes)


def _name(canvas: Canvas, row: Row, dots: str) -> str:
    if row.num_stages == 1:
        return canvas.plain(row.first)
    return canvas.plain(f"{row.first} {dots} {row.last} ({row.num_stages})")


def _fit(
    width: int | None, name_width: int, cells: Sequence[Sequence[Sequence[_Token]]]
) -> tuple[list[int], list[bool]]:
    """Each column's width, and whether its tiers stand below each other, so that all fit if they can."""
    columns = list(zip(*cells, strict=True))
    beside = [max((_width(cell) for cell in column), default=0) for column in columns]
    below = [max((token.width for cell in column for token in cell), default=1) for column in columns]
    titles = list(map(len, STATE_KINDS))
    stacked = [False] * len(columns)

    def widths() -> list[int]:
        return [
            max(title, low if low_one else wide)
            for title, wide, low, low_one in zip(titles, beside, below, stacked, strict=True)
        ]

    while width is not None and name_width + sum(widths()) + _GAP * len(columns) > width:
        gains = [0 if done else wide - low for done, wide, low in zip(stacked, beside, below, strict=True)]
        if max(gains) <= 0:
            break
        stacked[gains.index(max(gains))] = True
    return widths(), stacked


def _width(cell: Sequence[_Token]) -> int:
    return sum(token.width for token in cell) + max(0, len(cell) - 1)


def _add_row(
    canvas: Canvas,
    named: tuple[str, str, int, str],
    tokens: Sequence[Sequence[_Token]],
    widths: Sequence[int],
    stacked: Sequence[bool],
) -> None:
    arrow, name, name_width, dots = named
    height = max([1, *(len(cell) for cell, low in zip(tokens, stacked, strict=True) if low)])
    for number in range(height):
        line = Text()
        if number == 0:
            line.append(f"{arrow} ", style=_MARK_STYLE)
            line.append(_pad(_shortened(name, name_width - 2, dots), name_width - 2), style="bold" * (arrow != " "))
        else:
            line.append(" " * name_width)
        for cell, width, low in zip(tokens, widths, stacked, strict=True):
            part = Text()
            here = cell[number : number + 1] if low else cell if number == 0 else ()
            for position, token in enumerate(here):
                part.append_text(Text(" " * bool(position)) + token.text())
            if not cell and number == 0:
                part = Text("-", style=_QUIET_STYLE)
            line.append(" " * _GAP)
            line.append_text(part)
            line.append(" " * (width - part.cell_len))
        canvas.lines.append(_trimmed(line))


def states_line(stage: StageStates) -> Text:
    """Where each kind of state of one stage is: ``weights H 3.1 MiB+ N 3.1 MiB, moments N 6.2 MiB, ...``."""
    parts = []
    for name, kind in zip(STATE_KINDS, stage.kinds, strict=True):
        tiers = [token.text() for token in _tokens(kind, show_bytes)]
        parts.append(Text(" ").join([Text(name), *tiers] if tiers else [Text(f"{name} -")]))
    return Text(", ").join(parts)


def _tokens(kind: StateBytes, sizes: Any) -> list[_Token]:
    marks = "".join(
        mark
        for mark, there in (("*", kind.dirty), ("<", kind.filling), (">", kind.writing), ("+", kind.bound))
        if there
    )
    found = []
    for tier, num_bytes in (("device", kind.device), ("host", kind.host), ("nvme", kind.nvme)):
        if num_bytes:
            found.append(_Token(tier=tier, size=sizes(num_bytes), marks="" if tier == "nvme" else marks))
            marks = ""  # they are of both memories together, and stand with the first
    return found


def _legend(canvas: Canvas, inspection: Inspection, shown: Sequence[Row], *, short: bool) -> None:
    signs = [(letter, f"bold {style}", tier) for tier, (letter, style) in TIERS.items()]
    if inspection.is_live:
        meanings = (("*", "newest copy"), ("<", "being read"), (">", "being written"), ("+", "in use"))
        signs += [(mark, _MARK_STYLE, meaning) for mark, meaning in meanings]
    line = Text(" ")
    for sign, style, meaning in signs:
        part = Text.assemble(" ", (sign, style), f" {meaning}")
        if canvas.width is not None and line.cell_len + part.cell_len > canvas.width:
            canvas.add(line)
            line = Text(" ")
        line.append_text(part)
    canvas.add(line)
    also = []
    if short:
        also.append("K M G T: KiB to TiB")
    if any(row.num_stages > 1 for row in shown[:-1]):
        also.append("stages that are alike stand together, with their number and sum (--all: each alone)")
    if also:
        parts = [f"  {'; '.join(also)}"]
        if canvas.width is not None:
            parts = textwrap.wrap("; ".join(also), canvas.width, initial_indent="  ", subsequent_indent="  ")
        for each in parts:
            canvas.add(Text(each, style=_QUIET_STYLE), spare=1)


def short_bytes(num_bytes: int) -> str:
    """At most four characters and a letter: ``512``, ``1.2M``, ``340K``."""
    amount = float(num_bytes)
    for unit in ("", "K", "M", "G"):
        if amount < 9.95 and unit:
            return f"{amount:.1f}{unit}"
        if amount < 1023.5:
            return f"{amount:.0f}{unit}"
        amount /= 1024
    return f"{amount:.1f}T" if amount < 9.95 else f"{amount:.0f}T"


def _pad(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _shortened(text: str, width: int, dots: str) -> str:
    """The text with its middle left out, where it is too long."""
    if cell_len(text) <= width:
        return text
    keep = max(2, width - len(dots))
    end = keep // 2
    return text[: keep - end] + dots + text[-end:]


def _trimmed(line: Text) -> Text:
    line.rstrip()
    return line


# --- below the table ------------------------------------------------------------------------------------------------


def _below(canvas: Canvas, inspection: Inspection) -> None:
    status = inspection.status
    if status is None:
        _worn(canvas, inspection.wear or {})
        return
    if inspection.is_live:
        _tiers(canvas, status)
        canvas.gap()
    if status.lanes:
        _lanes(canvas, status, live=inspection.is_live)
        canvas.gap()
    if inspection.is_live and status.io.engine:
        canvas.field(
            "i/o",
            f"reads {_speed(status.io.read_bytes_per_second)}, writes {_speed(status.io.write_bytes_per_second)}",
        )
        canvas.field("", status.io.engine, spare=2)
    if status.io.buffered_bytes:
        canvas.field("", f"{show_bytes(status.io.buffered_bytes)} went through the page cache, not directly")
    if status.promised_bytes:
        over = status.host_peak_bytes > status.promised_bytes
        now = f"{show_bytes(status.host_bytes)} now, " if inspection.is_live else ""
        canvas.field(
            "memory",
            f"{now}at most {show_bytes(status.host_peak_bytes)} so far, "
            f"{'MORE THAN' if over else 'within'} the promised {show_bytes(status.promised_bytes)}",
        )
    peak = 0.0 if status.last_step is None else _number(status.last_step, "device_peak_bytes")
    if peak:
        device = status.tiers.get("device")
        budget = None if device is None else device.budget_bytes
        of = "" if not budget else f", {'MORE THAN' if peak > budget else 'within'} the budget of {show_bytes(budget)}"
        canvas.field("", f"on the device at most {show_bytes(int(peak))} so far{of}")
    _worn(canvas, inspection.wear or {})
    _expected(canvas, status)
    while canvas.lines and not canvas.lines[-1].plain:
        canvas.lines.pop()


def _tiers(canvas: Canvas, status: RunStatus) -> None:
    for name, (letter, style) in TIERS.items():
        tier = status.tiers.get(name)
        if tier is None or not (tier.budget_bytes or tier.peak_bytes or tier.resident_bytes):
            continue
        share = tier.resident_bytes / tier.budget_bytes if tier.budget_bytes else None
        bar = canvas.bar(share)
        bar.stylize(style)
        canvas.lines.append(
            Text.assemble((f"{name:<7}", _LABEL_STYLE), (letter, f"bold {style}"), " ", bar, f" {_amount(tier)}")
        )


def _amount(tier: TierStatus) -> str:
    of = "" if tier.budget_bytes is None else f" of {show_bytes(tier.budget_bytes)}"
    return f"{show_bytes(tier.resident_bytes)}{of}, at most {show_bytes(tier.peak_bytes)}"


def _lanes(canvas: Canvas, status: RunStatus, *, live: bool) -> None:
    step = None if status.last_step is None else _number(status.last_step, "step")
    of = "of the last step" if step is None else f"of step {step:.0f}"
    title = f"{'lane':<{_LABEL_WIDTH}}{'busy':>5} {'stalled':>8}  {of:<{_BAR_WIDTH}}  {'now' if live else ''}"
    canvas.lines.append(Text(title.rstrip(), style=_LABEL_STYLE))
    full, half, empty = ("#", "-", ".") if canvas.ascii_only else ("━", "╍", "─")
    for name, lane in status.lanes.items():
        busy, stalled = (min(1.0, max(0.0, share or 0.0)) for share in (lane.busy_share, lane.stall_share))
        at_work = min(_BAR_WIDTH, round(busy * _BAR_WIDTH))
        waiting = min(_BAR_WIDTH - at_work, round(stalled * _BAR_WIDTH))
        line = Text.assemble(
            (f"{name:<{_LABEL_WIDTH}}", _LABEL_STYLE),
            f"{_percent(lane.busy_share):>5} {_percent(lane.stall_share):>8}  ",
            full * at_work, (half * waiting, _STALL_STYLE), (empty * (_BAR_WIDTH - at_work - waiting), "dim"),
        )  # fmt: skip
        if live:
            doing = canvas.plain(lane.current or "waits")
            more = f" and {lane.in_flight - 1} more" if lane.in_flight > 1 else ""
            room = None if canvas.width is None else canvas.width - line.cell_len - 2 - len(more)
            if room is not None:
                doing = _shortened(doing, max(8, room), ".." if canvas.ascii_only else "…")
            line.append("  ").append(doing + more, style="" if lane.current else _QUIET_STYLE)
        canvas.lines.append(line)
    legend = f"  {full} at work  {half} stalled: waited with work left  {empty} nothing to do"
    canvas.add(Text(legend, style=_QUIET_STYLE), spare=1)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _speed(bytes_per_second: float) -> str:
    """As drives are sold: in decimal units."""
    unit, amount = ("GB/s", bytes_per_second / 1e9) if bytes_per_second >= 1e8 else ("MB/s", bytes_per_second / 1e6)
    return f"{amount:.2f} {unit}" if amount < 10 else f"{amount:.1f} {unit}"


def _worn(canvas: Canvas, wear: Mapping[str, Any]) -> None:
    """What was written, and what it means for the drive."""
    written = _number(wear, "written_bytes")
    if written is not None:
        parts = [f"{show_decimal(written)} written so far"]
        per_step, tbw = _number(wear, "written_bytes_per_step"), _number(wear, "tbw_bytes")
        share, days = _number(wear, "used_share"), _number(wear, "days_left")
        budget = _number(wear, "write_budget_bytes")
        if per_step is not None:
            parts[0] += f", {show_decimal(per_step)} a step"
        if budget:
            parts[0] += f"; --write-budget {show_decimal(budget)}"
        if tbw is not None and share is not None:
            who = "as the drive itself implies" if wear.get("source") == "smart" else wear.get("source")
            parts.append(f"{show_share(share)} of {show_decimal(tbw)} ({who}) are used")
        if days is not None:
            parts.append(f"{show_days(days)} are left at this speed")
        canvas.field("wear", "; ".join(parts))


def _expected(canvas: Canvas, status: RunStatus) -> None:
    """What was predicted of a step, and what it took."""
    predicted = status.prediction or {}
    seconds = _number(predicted, "seconds")
    if seconds is not None:
        lane = predicted.get("bound_by")
        bound = f", bound by {LANES.get(lane, lane)}" if isinstance(lane, str) else ""
        measured = status.speed.seconds_per_step
        against = ""
        if measured and seconds > 0:
            against = f"; measured {show_span(measured)}, error {seconds / measured - 1:+.0%}"
        canvas.field("expected", f"{show_span(seconds)} a step{bound}{against}")


def _number(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def next_step(inspection: Inspection, hoist: str) -> str | None:
    """A command that helps now, or None."""
    store = shlex.quote(shown_path(inspection.view.directory))
    if inspection.damage and inspection.view.record is not None:
        return f"{hoist} verify {store}"
    if inspection.condition in (Condition.DIED, Condition.FAILED):
        return f"{hoist} train --store {store}"
    return None
