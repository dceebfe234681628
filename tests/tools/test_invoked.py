"""Commands that hoist proposes begin as the shell would find it again."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest

from hoist.tools.invoked import begin, command_line, command_name, install_command
from hoist.tools.options import TrainOptions, flag
from hoist.tools.other_names import _HERE, named_here


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


def test_the_command_at_work_is_as_it_was_given() -> None:
    begin(["bench", "io", "my drive", "--rounds", "1"])
    assert command_line() == "hoist bench io 'my drive' --rounds 1"


def test_what_another_trainer_calls_it_leads_to_options_that_are_there() -> None:
    known = {flag(spec.name) for spec in dataclasses.fields(TrainOptions)}
    assert not known & {f"--{name}" for name in _HERE}
    for here in _HERE.values():
        assert set(re.findall(r"--[a-z-]+", here)) <= known
    assert named_here("--per_device_train_batch_size") == named_here("--batch-size")
    assert named_here("--stepz") is None


def test_an_installation_goes_to_the_python_that_runs_this() -> None:
    assert install_command("peft") == f"{shlex.quote(sys.executable)} -m pip install peft"
