"""README.md and docs/ are true: every command that they show runs here or is what CI runs, links lead somewhere.

A fenced block marked `sh` or `python` is run, those of one page in order, in a copy of the checkout; python blocks that
follow each other in one process, each with names of its own. A comment before
a block can ask for less: `<!-- tests: append --steps 2 -->` shortens its `hoist train` lines, `<!-- tests: append to
bench.commit: --rounds 1 -->` those that run that tool's module, `append to hoist bench sleep: --steps 1` those of that
command, and `<!-- tests: parse: REASON -->` only checks that the commands and their options exist. Other
blocks are output, diagrams and formulas.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer.main

from hoist.tools.cli import app
from tests.check_types import ROOT
from tests.support.warm import warm_python
from tests.test_packaging import copy_checkout

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
#: What README and CI share: lint, types, tests.
TEST_COMMAND = (ROOT / ".ci" / "run").read_text().rstrip().splitlines()[-1]
#: README's environments; here, the one that the tests run in stands for them.
ENVIRONMENT = ".venv/bin/"
#: A fenced block, with the comment before it, if any.
_BLOCK = re.compile(r"(?:^<!-- tests: (?P<note>.*?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"|!\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    note: str
    body: str
    line: int


def _blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=found["language"],
            note=found["note"] or "",
            body=found["body"],
            line=text.count("\n", 0, found.start()) + 1,
        )
        for found in _BLOCK.finditer(text)
    ]


def _together(blocks: list[Block]) -> list[Block]:
    """The blocks, with python blocks that follow each other as one: imports take longer than most examples."""
    joined: list[Block] = []
    for block in blocks:
        body = block.body
        if block.language == "python":
            body = f"exec(compile({body!r}, 'line {block.line}', 'exec'), {{'__name__': '__main__'}})\n"
        if joined and block.language == joined[-1].language == "python":
            joined[-1] = replace(joined[-1], body=joined[-1].body + body)
        else:
            joined.append(replace(block, body=body))
    return joined


def _hoist_commands(script: str) -> list[list[str]]:
    """Arguments of every `hoist ...` in a shell script."""
    joined = script.replace("\\\n", " ")
    commands: list[list[str]] = []
    for line in joined.splitlines():
        for part in re.split(r"&&|\|\||;|\|", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue  # a piece of Python in quotes
            if words and words[0].removeprefix(ENVIRONMENT) == "hoist":
                commands.append(words[1:])
    return commands


def _parse(arguments: list[str]) -> None:
    """Check a hoist command's options against the command line's parser, without running it."""
    group = typer.main.get_command(app)
    name, *rest = arguments
    command = getattr(group, "commands").get(name)  # noqa: B009 (typer's group type is private)
    assert command is not None, f"no such command: hoist {name}"
    command.make_context(name, rest)


class TestTestCommand:
    def test_readme_shows_what_ci_runs(self) -> None:
        assert TEST_COMMAND in [block.body.strip() for block in _blocks(ROOT / "README.md") if block.language == "sh"]

    def test_it_is_lint_types_and_tests(self) -> None:
        steps = [step.strip() for step in TEST_COMMAND.split("&&")]
        assert steps[0].startswith("sh tools/venv.sh ")
        commands = [" ".join(shlex.split(step)[1:3]) for step in steps[1:]]
        assert commands == ["check .", "-m tests.check_types", "-m pytest"]

    def test_ci_can_only_fail_loudly(self) -> None:
        lines = (ROOT / ".ci" / "run").read_text().splitlines()
        assert lines[0] == "#!/bin/bash"
        assert lines[-3] == "set -euo pipefail"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A python for all pages, which starts at once: most of their time would go into imports."""
    with warm_python(tmp_path_factory.mktemp("warm"), _environment(ROOT)) as program:
        yield program


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path, python: Path) -> None:
    blocks = [block for block in _blocks(page) if block.language in ("sh", "python")]
    for block in blocks:
        for arguments in _hoist_commands(block.body):
            _parse(arguments)
    wanted = [block for block in blocks if not block.note.startswith("parse:") and block.body.strip() != TEST_COMMAND]
    if not wanted:
        return
    checkout = copy_checkout(tmp_path / "checkout")
    scripts = checkout / ".venv" / "bin"
    for block in _together(wanted):
        script = block.body
        if "tools/venv.sh" in script:
            continue  # it is run by test_the_main_job
        if not scripts.exists():
            scripts.mkdir(parents=True)
            for name in ("python", "hoist"):
                start = f'exec "{python}"' + (" -m hoist.tools.cli" if name == "hoist" else "")
                (scripts / name).write_text(f'#!/bin/sh\n{start} "$@"\n')
                (scripts / name).chmod(0o755)
        if block.language == "python":
            command = [str(python), "-W", "error", "-c", script]
        else:
            if block.note.startswith("append to "):
                tool, _, options = block.note.removeprefix("append to ").partition(": ")
                script = _append(script, options, tool if tool.startswith("hoist ") else f"hoist.tools.{tool}")
            elif block.note.startswith("append "):
                script = _append(script, block.note.removeprefix("append "))
            command = ["sh", "-euc", script]
        ran = subprocess.run(command, cwd=checkout, env=_environment(ROOT), capture_output=True, text=True)
        assert ran.returncode == 0, f"{page.name}:{block.line}\n{ran.stdout}{ran.stderr}"


def _append(script: str, options: str, command: str = "hoist train") -> str:
    """The script with more options at the end of its lines with that command; the last one given counts."""
    joined = script.replace("\\\n", " ")
    appended, count = re.subn(rf"({re.escape(command)}\b[^\n&|;]*)", rf"\1 {options}", joined)
    assert count, f"no {command} in {script}"
    return appended


def _environment(packages: Path) -> dict[str, str]:
    """This process's environment, with ``packages`` first on the path and no colours."""
    return {**os.environ, "PYTHONPATH": str(packages), "NO_COLOR": "1", "COLUMNS": "120", "CI": ""}


@pytest.mark.timeout(900)
def test_the_main_job(tmp_path: Path) -> None:
    """README's first command, installation and all, in a fresh checkout; two steps instead of seventy.

    What hoist needs is taken from the environment that the tests run in, instead of being installed a second time.
    """
    shown = [block.body.strip() for block in _blocks(ROOT / "README.md") if "tools/venv.sh .venv " in block.body]
    assert shown == ["sh tools/venv.sh .venv . && .venv/bin/hoist train"]
    checkout = copy_checkout(tmp_path / "checkout")
    (installed,) = {str(Path(path)) for path in sys.path if path.endswith("site-packages")}
    install, train = shown[0].split(" && ")
    for script, more in ((install, {"PIP_NO_DEPS": "1"}), (train + " --steps 2", {"PYTHONPATH": installed})):
        environment = {**_environment(Path()), "PYTHONPATH": "", **more}
        ran = subprocess.run(["sh", "-euc", script], cwd=checkout, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads((checkout / "hoist-store" / "COMMIT.json").read_text())["step"] == 2


class TestHelp:
    @pytest.mark.parametrize(
        "name",
        ["train", "inspect", "report", "export", "verify", "snapshot", "restore", "drives", "doctor"],
    )
    def test_examples_in_help_texts_parse(self, name: str) -> None:
        group = typer.main.get_command(app)
        epilog = getattr(group, "commands")[name].epilog  # noqa: B009 (typer's group type is private)
        examples = re.findall(r"\[bold\](.*?)\[/\]", epilog)
        assert examples
        for example in examples:
            (arguments,) = _hoist_commands(example)
            assert arguments[0] == name
            _parse(arguments)


class TestPages:
    @pytest.mark.parametrize("page", (*PAGES, ROOT / "CHANGELOG.md"), ids=lambda page: page.name)
    def test_links_lead_somewhere(self, page: Path) -> None:
        for groups in _LINK.findall(page.read_text(encoding="utf-8")):
            target = next(filter(None, groups))
            if re.match(r"https?://", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in _anchors(file), f"{page.name} links to {target}"

    @pytest.mark.parametrize("page", (*PAGES, ROOT / "CHANGELOG.md"), ids=lambda page: page.name)
    def test_no_path_of_one_machine(self, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        found = re.findall(r"(?<![\w.~/-])/(?:home|root|work|tmp|opt|Users|usr/local)\b\S*", text)
        assert not found

    def test_readme_links_every_page(self) -> None:
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        for page in PAGES[1:]:
            assert f"(docs/{page.name})" in text, page.name

    def test_lines_fit(self) -> None:
        for page in PAGES:
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
                if line.startswith(("|", "sh tools")) or "](" in line:
                    continue
                assert len(line) <= 170, f"{page.name}:{number}"


def _anchors(page: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
