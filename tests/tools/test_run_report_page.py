"""The page of `hoist report` in a real browser without network: charts are drawn, numbers are the run's, nothing breaks
out, nothing is too wide; light and dark differ. What needs a browser is skipped where there is none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair
import pytest

from hoist.tools.run_report.facts import gather
from hoist.tools.run_report.making import report_of
from hoist.tools.run_report.page import page
from tests.support.browser import Shown, browser, shown
from tests.support.commands import Job, make_job
from tests.support.run_files import write_long_run, written_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NASTY = """</script><script>document.title = "broken out"</script><img src=x onerror="document.title='out'">"'&é漢"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    """One browser for all tests here."""
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return written_run(make_job(tmp_path_factory.mktemp("run"), num_steps=30))


@pytest.fixture(scope="module")
def file(job: Job) -> Path:
    """The page of a real run."""
    path = job.folder / "report é 漢.html"
    path.write_text(page(report_of(gather(job.store))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def drawn(opened: Browser, file: Path) -> Iterator[Shown]:
    """That page in a wide window."""
    with shown(opened, file) as found:
        yield found


def test_every_chart_is_drawn_and_nothing_goes_wrong(drawn: Shown) -> None:
    charts = drawn.charts()
    assert len(charts) == 20
    assert min(charts.values()) > 8, charts  # an empty one has but a frame and an axis
    labels = drawn.page.eval_on_selector_all("[role=img]", "all => all.map(one => one.getAttribute('aria-label'))")
    assert len(labels) == 20 and all(len(label) > 40 for label in labels)
    assert drawn.wrong == []


def test_numbers_are_the_runs(drawn: Shown, job: Job) -> None:
    """What a reader sees in the tables, against the files that the run wrote."""
    lines = [json.loads(line) for line in (job.store / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 4
    keys = ("loss", "norm", "rate", "seconds", "throughput", "trafficbystep", "peak")
    tables = {key: drawn.table(key) for key in keys}
    for key, column, name in (
        ("loss", "loss", "loss"),
        ("norm", "gradient norm", "grad_norm"),
        ("norm", "multiplied with", "clip_scale"),
        ("rate", "learning rate", "lr"),
        ("seconds", "seconds", "seconds"),
        ("throughput", "tokens", "tokens"),
        ("trafficbystep", "read bytes", "nvme_read_bytes"),
        ("trafficbystep", "written bytes", "nvme_written_bytes"),
        ("trafficbystep", "read, saved bytes", "nvme_read_saved_bytes"),
        ("peak", "host peak bytes", "host_peak_bytes"),
    ):
        assert [row[column] for row in tables[key]] == [line[name] for line in steps], (key, column)
        assert [row["step"] for row in tables[key]] == [1, 2, 3, 4]
    assert [row["tokens per second"] for row in tables["throughput"]] == [
        line["tokens"] / line["seconds"] for line in steps
    ]
    assert {row["step"]: row["validation loss"] for row in tables["loss"] if row["validation loss"] is not None} == {
        line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line
    }
    lanes = {row["lane"]: row for row in drawn.table("lanes")}
    for lane, busy in steps[-1]["busy_seconds"].items():
        assert (lanes[lane]["busy seconds"], lanes[lane]["waiting seconds"]) == (
            busy, steps[-1]["stall_seconds"][lane],
        )  # fmt: skip


def test_numbers_are_the_status(drawn: Shown, job: Job) -> None:
    status = json.loads((job.store / "status.json").read_text())
    assert {row["part"]: row["bytes"] for row in drawn.table("budget")} == status["memory_parts"]
    for row in drawn.table("tiers"):
        tier = status["tiers"][row["tier"]]
        assert (row["now, bytes"], row["at most, bytes"]) == (tier["resident_bytes"], tier["peak_bytes"])
    cards = drawn.page.eval_on_selector_all(
        ".cards div", "all => Object.fromEntries(all.map(one => [...one.children].map(part => part.textContent)))"
    )
    assert cards["step"] == "4 of 4"
    assert drawn.page.title() == f"{job.model} (llama): {job.store}"


def test_numbers_are_the_timelines(drawn: Shown, job: Job) -> None:
    """Ops are counted and added up once more, in another way; residency at a thousand instants of the step."""
    timeline = json.loads((job.store / "timeline.json").read_text())
    seconds = timeline["seconds"]
    for row in drawn.table("ops"):
        ops = [
            (max(0.0, start), min(seconds, stop))
            for lane, kind, _, _, _, start, stop in timeline["ops"]
            if (timeline["lanes"][lane], timeline["kinds"][kind]) == (row["lane"], row["op"])
            and stop >= 0
            and start <= seconds
        ]
        assert row["ops"] == len(ops)
        edges = sorted({edge for op in ops for edge in op})
        busy = sum(
            after - before
            for before, after in zip(edges, edges[1:], strict=False)  # noqa: RUF007 (as plain as can be)
            if any(start <= before and after <= stop for start, stop in ops)
        )
        assert row["busy"] == pytest.approx(busy, abs=1e-9)
    assert sum(row["ops"] for row in drawn.table("ops")) == len(
        [op for op in timeline["ops"] if op[6] >= 0 and op[5] <= seconds]
    )
    above = {"filling", "clean", "bound", "dirty", "writing"}
    for row, name in zip(drawn.table("residencygradients"), timeline["stage_names"], strict=True):
        assert row["stage"] == name
        items: dict[tuple[int, int], bool] = {}
        edges_above = []
        for at, kind, stage, second, state, _, _ in timeline["residency"]:
            if timeline["state_kinds"][kind] == "gradients" and timeline["stage_names"][stage] == name:
                edges_above.append((min(max(at, 0.0), seconds), (kind, second), timeline["states"][state] in above))
        since, total = 0.0, 0.0
        for at, item, there in sorted(edges_above, key=lambda edge: edge[0]):
            total += (at - since) * any(items.values())
            since, items[item] = at, there
        total += (seconds - since) * any(items.values())
        shares = [value for key, value in row.items() if key.startswith("host")]
        assert sum(shares) == pytest.approx(total / seconds, abs=1e-6)


def test_light_and_dark_differ_and_the_button_switches(opened: Browser, file: Path) -> None:
    with shown(opened, file) as light, shown(opened, file, scheme="dark") as dark:
        bright, dim = light.page.screenshot(), dark.page.screenshot()
        assert bright != dim
        background = "getComputedStyle(document.body).backgroundColor"
        assert light.page.evaluate(background) == "rgb(255, 255, 255)"
        assert dark.page.evaluate(background) != "rgb(255, 255, 255)"
        curve = "getComputedStyle(document.querySelector('#chart-loss .mark-line path')).stroke"
        strokes = light.page.evaluate(curve), dark.page.evaluate(curve)
        assert len({"none", *strokes}) == 3
        dark.page.click("#theme")
        assert dark.page.evaluate(background) == "rgb(255, 255, 255)"
        assert dark.page.evaluate(curve) == strokes[0]
        dark.page.click("#theme")
        assert dark.page.evaluate(curve) == strokes[1]
        assert light.wrong == dark.wrong == []


def test_a_phone_scrolls_down_alone(opened: Browser, file: Path) -> None:
    with shown(opened, file, width=360) as found:
        for summary in found.page.query_selector_all("summary"):
            summary.click()
        assert found.page.evaluate("document.documentElement.scrollWidth") == 360
        edges = "all => all.map(one => one.getBoundingClientRect().right)"
        narrow = found.page.eval_on_selector_all(".chart svg", edges)
        assert len(narrow) == 20 and max(narrow) <= 360
        found.page.set_viewport_size({"width": 1000, "height": 800})
        found.page.wait_for_function("document.documentElement.dataset.drawn === '2'")
        assert min(found.page.eval_on_selector_all(".chart svg", edges)) > 380
        assert found.page.evaluate("document.documentElement.scrollWidth") == 1000
        assert found.wrong == []


def test_nothing_breaks_out_of_its_place(opened: Browser, job: Job, tmp_path: Path) -> None:
    """Names and messages with markup are text, in the page, in its title, in tables and in what is pointed at."""
    copy = tmp_path / "store"
    shutil.copytree(job.store, copy, symlinks=True)
    names = json.loads((copy / "timeline.json").read_text())["stage_names"]
    for name, changed in (
        ("status.json", {"state": "failed", "error": NASTY, "memory_parts": {NASTY: 10, "other": 5}}),
        ("timeline.json", {"stage_names": [NASTY, *names[1:]]}),
    ):
        document: dict[str, Any] = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**document, **changed}))
    strange = tmp_path / "<img src=x onerror=alert(1)> 漢.html"
    strange.write_text(page(report_of(gather(copy))), encoding="utf-8")
    with shown(opened, strange) as found:
        assert found.page.title().endswith(str(copy))
        assert found.page.query_selector("img") is None
        assert found.page.evaluate("document.scripts.length") == 3
        assert [row["part"] for row in found.table("budget")] == [NASTY, "other"]
        assert found.table("residency")[0]["stage"] == NASTY
        found.page.hover("#chart-residency .mark-rect path", force=True)
        found.page.wait_for_selector("#vg-tooltip-element.visible")
        assert found.page.query_selector("#vg-tooltip-element img") is None
        assert found.wrong == []


def test_a_store_that_never_trained_has_a_page_without_charts(opened: Browser, job: Job) -> None:
    path = job.folder / "snapshot.html"
    path.write_text(page(report_of(gather(job.store / "snapshots" / "kept"))), encoding="utf-8")
    with shown(opened, path) as found:
        assert found.charts() == {}
        assert found.page.inner_text("main").count("This is a snapshot") >= 8
        assert found.wrong == []


@pytest.mark.parametrize(
    ("num_steps", "num_stages"), [(2_000, 240), pytest.param(10_000, 1_000, marks=pytest.mark.slow)]
)
def test_long_runs_of_many_stages_stay_small_and_keep_extremes(
    num_steps: int, num_stages: int, opened: Browser, job: Job, tmp_path: Path
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(job.store, copy, symlinks=True)
    write_long_run(copy, num_steps=num_steps, num_stages=num_stages)
    path = tmp_path / "long.html"
    path.write_text(page(report_of(gather(copy))), encoding="utf-8")
    assert path.stat().st_size < 4 * 2**20
    with shown(opened, path) as found:
        assert found.wrong == []
        losses = {row["step"]: row["loss"] for row in found.table("loss")}
        assert losses[num_steps // 3 + 1] == 77.0
        assert len(losses) < 1100 and {1, num_steps} <= set(losses)
        assert 333.0 in [row["seconds"] for row in found.table("seconds")]
        assert len(found.table("residency")) == num_stages
        assert found.page.eval_on_selector_all("#chart-residency .role-axis-label text", "all => all.length") <= 60
        text = found.page.inner_text("#figure-residency .notes")
        assert f"{num_stages:,} stages are shown {-(-num_stages // 48)} to a row" in text
        text = found.page.inner_text("#figure-loss .notes")
        assert f"Of {num_steps:,} steps the curve shows the first, the last, and the lowest and highest of" in text


def test_every_chart_is_valid(job: Job) -> None:
    """By Vega-Lite's schema; reports themselves do not check, which would take half their time."""
    for section in report_of(gather(job.store)).sections:
        for figure in section.figures:
            altair.Chart.from_dict({**figure.chart.spec, "datasets": dict(figure.chart.datasets)}, validate=True)
