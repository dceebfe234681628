"""What a run looks like: no line is cut or wrapped badly at 80 and 120 columns, and nothing in a log is cut at all."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from hoist.scheduler.memory import promised_bytes
from hoist.scheduler.metrics import CommitTotals, StepMetrics
from hoist.tools.report import RunEnd, Totals
from hoist.tools.show import Display, _clipped

MIB = 2**20


def metrics(
    step: int, *, loss: float = 6.3208, peak: int = 50 * MIB, clip_scale: float = 1.0, skipped_steps: int = 0
) -> StepMetrics:
    return StepMetrics(
        step=step, loss=loss, grad_norm=1234.5678, clip_scale=clip_scale, skipped_steps=skipped_steps, lr=9.87654e-05,
        tokens=1024, seconds=2.0, nvme_read_bytes=260 * MIB, nvme_written_bytes=160 * MIB, nvme_read_saved_bytes=MIB,
        nvme_written_saved_bytes=MIB, busy_seconds={}, stall_seconds={}, host_peak_bytes=peak, device_peak_bytes=0,
    )  # fmt: skip


def run_end(**changed: object) -> RunEnd:
    values: dict[str, object] = {
        "store": "a store", "created": True, "step": 100, "steps": 100, "signal": 0, "seconds": 3725.0,
        "num_steps": 100, "last": metrics(100, loss=2.5), "budget_bytes": 32 * MIB,
        "totals": Totals(first_loss=6.3208, nvme_read_bytes=3 * 2**40, nvme_written_bytes=5 * 2**30),
        "commits": CommitTotals(num_commits=3, flush_seconds=0.51, seconds=0.75), **changed,
    }  # fmt: skip
    return RunEnd(**values)  # type: ignore[arg-type]  # checked by the class itself at run time


class Screen:
    """A display on a terminal of some width, or (width None) in a log."""

    def __init__(self, width: int | None) -> None:
        self._file = io.StringIO()
        self.width = width
        terminal = width is not None
        self._console = Console(
            file=self._file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False, _environ={}
        )
        self.display = Display(self._console)

    def lines(self) -> list[str]:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._file.getvalue())
        return text.split("\n")[:-1]


@pytest.mark.parametrize("width", [80, 120, None])
def test_end(width: int | None) -> None:
    screen = Screen(width)
    screen.display.end(run_end())
    lines = screen.lines()
    assert "done     100 steps in 1:02:05; step 100 of 100 is committed" in lines
    assert "loss     6.3208 at step 1, 2.5000 at step 100" in lines
    assert "nvme     3.00 TiB read and 5.0 GiB written since the store was made" in lines
    assert not any("without the states in memory" in line for line in lines)
    assert "3 commits took 0.8 s, mostly beside computation" in " ".join(" ".join(lines).split())
    assert "memory   host peak 50.0 MiB, within the promised 67.2 MiB" in lines
    assert "go on    hoist train --store 'a store' --steps 200" in lines
    assert "export   hoist export 'a store' 'a store-model'" in lines
    assert all(len(line) <= (width or 999) for line in lines)


def test_what_memory_saves_is_told() -> None:
    screen = Screen(None)
    totals = Totals(first_loss=6.3, nvme_read_saved_bytes=2**40, nvme_written_saved_bytes=2**30)
    screen.display.end(run_end(totals=totals))
    saved = "1.00 TiB more would have been read and 1.0 GiB more written without the states in memory"
    assert saved in [line.strip() for line in screen.lines()]


def test_end_is_honest() -> None:
    screen = Screen(80)
    screen.display.end(run_end(last=metrics(100, peak=68 * MIB)))
    assert "memory   host peak 68.0 MiB, MORE THAN the promised 67.2 MiB" in screen.lines()
    assert promised_bytes(32 * MIB) == int(67.2 * MIB)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"signal": 2, "step": 7}, "stopped  on request after step 7 of 100; everything is committed"),
        (
            {"num_steps": 0, "last": None, "step": 0, "steps": 0},
            "done     the store is made and holds the initial weights, step 0",
        ),
        (
            {"num_steps": 0, "last": None, "created": False},
            "done     nothing to do: the store is at step 100, and --steps is 100; nothing was changed",
        ),
        ({"num_steps": 1}, "done     1 step in 1:02:05; step 100 of 100 is committed"),
    ],
)  # fmt: skip
def test_outcomes(changed: dict[str, object], line: str) -> None:
    screen = Screen(None)
    screen.display.end(run_end(**changed))
    assert line in screen.lines()
    assert sum(shown.startswith("go on") for shown in screen.lines()) == 1
    if changed.get("signal"):
        assert "go on    hoist train --store 'a store'" in screen.lines()


def test_what_goes_on_from_a_store_beyond_steps_has_something_to_do() -> None:
    screen = Screen(None)
    screen.display.end(run_end(num_steps=0, last=None, created=False, step=100, steps=30))
    assert "go on    hoist train --store 'a store' --steps 200" in screen.lines()


@pytest.mark.parametrize(
    ("scale", "skipped", "cell"), [(1.0, 0, ""), (0.123456, 0, "x 0.12"), (1e-7, 3, "x 1e-07"), (0.0, 12, "skipped 12")]
)
def test_what_became_of_the_gradients(scale: float, skipped: int, cell: str) -> None:
    assert _clipped(metrics(7, clip_scale=scale, skipped_steps=skipped)) == cell


def test_what_is_no_number_is_null_in_json() -> None:
    done = replace(metrics(7), loss=float("nan"), grad_norm=float("inf")).to_json()
    assert json.loads(json.dumps(done, allow_nan=False)) == metrics(7).to_json() | {"loss": None, "grad_norm": None}
    assert Totals().with_step(replace(metrics(7), loss=float("inf"))).first_loss is None


@pytest.mark.parametrize("width", [80, 120])
def test_notes_are_wrapped_under_themselves(width: int) -> None:
    screen = Screen(width)
    screen.display.notice("word " * 60)
    lines = screen.lines()
    assert len(lines) > 2 and all(len(line) <= width for line in lines)
    assert lines[0].startswith("note     word")
    assert all(line.startswith("         word") for line in lines[1:])


def test_notes_in_a_log_are_one_line() -> None:
    screen = Screen(None)
    screen.display.notice("word " * 60)
    assert len(screen.lines()) == 1
