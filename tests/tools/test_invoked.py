"""Commands that hoist proposes begin as the shell would find it again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hoist.tools.invoked import command_name


def test_a_proposed_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / "my venv"
    scripts.mkdir()
    program = scripts / "hoist"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["my venv/hoist", "train"])
    assert command_name() == "'my venv/hoist'"
    monkeypatch.setenv("PATH", str(scripts))
    assert command_name() == "hoist"
    monkeypatch.setattr(sys, "argv", ["/somewhere/cli.py", "train"])
    assert command_name() == "hoist"
