"""A page in a real browser that reaches nothing but that page's file; what went wrong meanwhile is collected.

Debian's chromium, headless, driven by playwright. Tests skip where one of the two is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Names that chromium has.
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser; skips the test if there is none."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip("no chromium is installed")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=list(_OPTIONS))
        try:
            yield opened
        finally:
            opened.close()


@dataclass(kw_only=True, slots=True)
class Shown:
    """A page that has been drawn."""

    page: Page
    wrong: list[str] = field(default_factory=list)
    """Messages on the console, errors in scripts, and requests for anything but the file."""

    def table(self, key: str) -> list[dict[str, Any]]:
        """The numbers of a figure's table, by column, as a reader of the page gets them: exact where it has them.

        None: a dash.
        """
        rows: list[list[Any]] = self.page.evaluate(
            """key => [...document.querySelectorAll(`#table-${key} tr`)].map(row => [...row.cells].map(cell =>
                [cell.textContent, cell.dataset.value ?? null, cell.classList.contains("t")]))""",
            key,
        )
        heads = [text for text, _, _ in rows[0]]
        assert len(set(heads)) == len(heads), heads
        return [
            {head: _value(text, exact, left) for head, (text, exact, left) in zip(heads, row, strict=True)}
            for row in rows[1:]
        ]

    def charts(self) -> dict[str, int]:
        """By figure: how many shapes its drawing has."""
        found: dict[str, int] = self.page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll(".chart")].map(chart => [
                chart.id.replace("chart-", ""), chart.querySelectorAll("svg path, svg text, svg rect").length]))"""
        )
        return found


def _value(text: str, exact: str | None, left: bool) -> float | str | None:
    if exact is not None:
        return float(exact)
    if text == "-":
        return None
    try:
        return text if left else float(text.replace(",", ""))
    except ValueError:
        return text


@contextmanager
def shown(
    opened: Browser, file: Path, *, width: int = 1200, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Shown]:
    """A page, drawn, in a window of that width. Without network; requests are refused besides."""
    context = opened.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    try:
        found = Shown(page=context.new_page())
        page = found.page
        address = file.absolute().as_uri()
        page.on("console", lambda message: found.wrong.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: found.wrong.append(f"error: {error}"))
        page.on(
            "request", lambda request: None if request.url == address else found.wrong.append(f"request: {request.url}")
        )
        page.goto(address)
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        yield found
    finally:
        context.close()
