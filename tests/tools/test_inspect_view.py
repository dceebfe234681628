"""How a store looks: which stages share a row, that every width holds, that letters say what colours say."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hoist.scheduler.status import RunStatus, StateBytes
from hoist.tiers.format import LOCK_NAME
from hoist.tiers.layout import StageLayout
from hoist.tiers.lock import StoreLock
from hoist.tools.durations import show_clock
from hoist.tools.inspection.looking import Inspection, StageStates, inspect_store
from hoist.tools.inspection.rows import MAX_ROWS, rows, total
from hoist.tools.inspection.view import next_step, render, short_bytes
from hoist.tools.inspection.watch import Screen
from tests.support.commands import hoist
from tests.support.inspected import many_layouts, status_of, write_status, write_store

#: Says of what is in a view whatever the width; the rest may be cut or wrapped.
_ALWAYS = ("running", "layer.", "committed", "host", "nvme", "compute", "i/o", "memory", "wear", "expected")


def live(folder: Path, layouts: Sequence[StageLayout], status: RunStatus) -> Inspection:
    """A store in which a run says ``status``."""
    write_store(folder, layouts)
    write_status(folder, status)
    lock = StoreLock(folder / LOCK_NAME)
    try:
        return inspect_store(folder, now=status.written_at + 0.5)
    finally:
        lock.release()


def lines(found: Inspection, width: int | None, **options: bool) -> list[str]:
    return [line.plain for line in render(found, width=width, **options)]


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    layouts = many_layouts(998)
    return live(tmp_path_factory.mktemp("thousand") / "store", layouts, status_of(layouts, stage=500))


# --- rows -----------------------------------------------------------------------------------------------------------


def stage(name: str, **numbers: int) -> StageStates:
    return StageStates(name=name, kinds=(StateBytes(**numbers), StateBytes(), StateBytes(), StateBytes()))


def test_equal_neighbours_are_one_row() -> None:
    stages = [stage("embed", nvme=3), *(stage(f"layer.{n}", nvme=5) for n in range(4)), stage("head", nvme=3)]
    found = rows(stages)
    assert [(row.first, row.last, row.num_stages) for row in found] == [
        ("embed", "embed", 1), ("layer.0", "layer.3", 4), ("head", "head", 1),
    ]  # fmt: skip
    assert found[1].kinds[0] == StateBytes(nvme=20)
    assert [row.first for row in rows(stages, every=True)] == [each.name for each in stages]
    assert len(rows(stages[:3])) == 3  # two alike stay apart


def test_the_stage_at_work_is_alone() -> None:
    stages = [stage(f"layer.{n}", nvme=5) for n in range(9)]
    found = rows(stages, at_work="layer.4")
    assert [(row.first, row.num_stages, row.at_work) for row in found] == [
        ("layer.0", 4, False), ("layer.4", 1, True), ("layer.5", 4, False),
    ]  # fmt: skip


def test_where_bytes_differ_everywhere_tiers_decide_then_the_limit() -> None:
    alike = [stage(f"layer.{n}", nvme=n + 1, host=n // 50 * n) for n in range(100)]
    found = rows(alike)
    assert [(row.num_stages) for row in found] == [50, 50]
    mixed = [stage(f"layer.{n}", nvme=n + 1, host=n % 2) for n in range(1000)]
    found = rows(mixed, at_work="layer.77")
    assert len(found) <= MAX_ROWS + 2
    assert [row.first for row in found if row.at_work] == ["layer.77"]


@given(
    numbers=st.lists(st.tuples(*[st.integers(0, 2)] * 7), min_size=1, max_size=80),
    at=st.none() | st.integers(0, 79),
    limit=st.integers(1, 40),
)
def test_no_stage_and_no_byte_is_lost(
    numbers: list[tuple[int, ...]], at: int | None, limit: int
) -> None:
    names = ("nvme", "host", "device", "dirty", "filling", "writing", "bound")
    stages = [stage(f"s{n}", **dict(zip(names, each, strict=True))) for n, each in enumerate(numbers)]
    found = rows(stages, at_work=None if at is None else f"s{at}", limit=limit)
    assert sum(row.num_stages for row in found) == len(stages)
    assert len(found) <= limit + 2
    position = 0
    for row in found:
        assert row.first == stages[position].name
        position += row.num_stages
        assert row.last == stages[position - 1].name
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    assert [sum(column) for column in zip(*(astuple(row.kinds[0]) for row in found), strict=True)] == sums
    assert list(astuple(total(stages).kinds[0])) == sums


# --- lines ----------------------------------------------------------------------------------------------------------


def test_a_thousand_stages_at_every_width(thousand: Inspection) -> None:
    for width in (72, 79, 80, 81, 100, 133, 200):
        shown = lines(thousand, width)
        assert max(map(len, shown)) <= width, width
        assert len(shown) < 45, width
        text = "\n".join(shown)
        assert all(word in text for word in _ALWAYS), width
        assert any(line.startswith("▶ layer.499") for line in shown), width


def test_a_thousand_stages_are_looked_at_without_torch(thousand: Inspection) -> None:
    """Loading it takes longer than all the rest."""
    code = (
        "import sys\nfrom hoist.tools import cli\n"
        f"code = cli.run(['inspect', {str(thousand.view.directory)!r}])\n"
        "print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))\nsys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    assert lines[-1] == "[]"
    assert len(lines) < 40
    assert any("embed … head (1000)" in line for line in lines)  # nobody holds it: all are alike


def test_a_wide_terminal_shows_full_sizes(thousand: Inspection) -> None:
    shown = lines(thousand, 200)
    (at_work,) = [line for line in shown if line.startswith("▶")]
    assert at_work.split("  ")[0] == "▶ layer.499"
    assert "H 16.0 KiB+ N 16.0 KiB" in at_work
    assert "H 16.0 KiB*> N 16.0 KiB" in at_work
    (ahead,) = [line for line in shown if line.strip().startswith("layer.498 ")]
    assert "H 16.0 KiB< N 16.0 KiB" in ahead
    assert any(line.strip().startswith("layer.500 … head (499)") for line in shown)
    assert any(line.strip().startswith("all together") for line in shown)


def test_a_pipe_gets_everything_uncut(thousand: Inspection) -> None:
    shown = lines(thousand, None)
    assert "chosen because there is no CUDA driver" in "\n".join(shown)
    assert any(line.endswith("backward(layer.499, micro-batch 2)") for line in shown)


def test_all_shows_every_stage(thousand: Inspection) -> None:
    shown = lines(thousand, 80, every=True)
    assert sum("layer." in line and ("N " in line) for line in shown) >= 998


def test_nothing_but_ascii_where_the_terminal_has_no_more(thousand: Inspection) -> None:
    text = "\n".join(lines(thousand, 80, ascii_only=True))
    assert text.isascii()
    assert "> layer.499" in text
    assert "layer.500 .. head (499)" in text


def test_numbers_of_the_run(thousand: Inspection) -> None:
    text = "\n".join(lines(thousand, None))
    for part in (
        "step     42 of 100: backward of layer.499, micro-batch 2; committed is step 7; told 0.5 s ago",
        "41%, 2:28 left",
        "1,234 tokens/s, 2.5 s a step; loss 5.4695, norm 5.41, lr 3.0e-04 at step 41",
        "20.0 MiB of 64.0 MiB, at most 30.0 MiB",
        "reads 1.25 GB/s, writes 85.0 MB/s",
        "40.0 MiB now, at most 47.0 MiB so far, within the promised 67.0 MiB",
        "5.5 TB written so far, 12.9 GB a step; 0.92% of 600 TB (--tbw) are used; 2.2 years are left at this speed",
        "2.4 s a step, bound by computation; measured 2.5 s, error -4%",
        "io         61%      20%",
        "read_states(layer.499) and 2 more",
    ):
        assert part in text


def test_one_stage_and_hard_names(tmp_path: Path) -> None:
    """Names longer than any terminal, in characters that no terminal can show."""
    layouts = many_layouts(0)[:1]
    one = replace(layouts[0], name="embed" * 40)
    status = replace(status_of((one,)), stage_names=("größe\n\x1b[31m" * 30,))
    found = live(tmp_path / "store", (layouts[0],), status)
    for width in (80, 200):
        shown = lines(found, width)
        assert max(map(len, shown)) <= width
        assert all(line.isprintable() for line in shown)
    assert not any(line.strip().startswith("all together") for line in lines(found, 80))


def test_an_accelerator_has_its_letter(tmp_path: Path) -> None:
    layouts = many_layouts(0)
    kinds = (StateBytes(nvme=100, host=200, device=300, dirty=10), StateBytes(), StateBytes(), StateBytes())
    status = replace(status_of(layouts), stages=(kinds, kinds))
    found = live(tmp_path / "store", layouts, status)
    assert any("D 300 B* H 200 B N 100 B" in line for line in lines(found, 200))


def test_no_colour_without_a_terminal_or_where_it_is_not_wanted(
    thousand: Inspection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*, terminal: bool) -> str:
        target = io.StringIO()
        console = Console(file=target, force_terminal=terminal, width=120)
        for line in render(thousand, width=120):
            console.print(line)
        return target.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "\x1b[38;2;" in printed(terminal=True) or "38;2;" in printed(terminal=True)
    assert "\x1b" not in printed(terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "38;2;" not in printed(terminal=True)


def test_a_picture_is_one_file(
    thousand: Inspection, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is drawn with what is in it: nothing is fetched."""
    result = hoist(capfd, "inspect", thousand.view.directory, "--svg", tmp_path / "view.svg")
    assert result.code == 0
    svg = (tmp_path / "view.svg").read_text()
    ElementTree.fromstring(svg)
    assert len(svg) < 100_000
    assert "url(http" not in svg
    assert "died" in svg
    assert "#009e73" in svg
    missing = tmp_path / "missing" / "view.svg"
    assert f"{missing}: No such file" in hoist(capfd, "inspect", thousand.view.directory, "--svg", missing).failure()


def test_a_screen_is_never_higher_than_the_terminal(thousand: Inspection) -> None:
    for height in (10, 24, 40, 60):
        target = io.StringIO()
        console = Console(file=target, force_terminal=True, width=80, height=height, color_system=None)
        screen = Screen(thousand, every=False)
        screen.trouble = "the store went away"
        console.print(screen)
        shown = target.getvalue().splitlines()
        assert len(shown) <= height
        assert shown[0].startswith("the store went away")
        assert shown[-1].startswith("q ends")


def test_what_to_do_next(tmp_path: Path) -> None:
    write_store(tmp_path / "my store", many_layouts(1))
    assert next_step(inspect_store(tmp_path / "my store"), "hoist") is None
    write_status(tmp_path / "my store", status_of(many_layouts(1)))
    found = inspect_store(tmp_path / "my store")
    assert next_step(found, "hoist") == f"hoist train --store '{tmp_path / 'my store'}'"
    next((tmp_path / "my store").glob("stages/*/*/c/1/0")).unlink()
    assert next_step(inspect_store(tmp_path / "my store"), "hoist") == f"hoist verify '{tmp_path / 'my store'}'"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0"), (1023, "1023"), (1024, "1.0K"), (10189, "10K"), (10 << 20, "10M"), (1 << 40, "1.0T"), (99 << 40, "99T")],
)
def test_short_sizes(num_bytes: int, text: str) -> None:
    assert short_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.6, "1:00"), (3725, "1:02:05"), (90061, "1 day 1:01:01"), (190061, "2 days 4:47:41")]
)
def test_clock(seconds: float, text: str) -> None:
    assert show_clock(seconds) == text


def test_clock_of_hours_alone() -> None:
    assert show_clock(190061, days=False) == "52:47:41"
