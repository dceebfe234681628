"""Options come from the command line, a TOML file, the store and defaults, in this order; each is checked once."""

from __future__ import annotations

import dataclasses
import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from hoist.scheduler.errors import ConfigError
from hoist.tools import cli
from hoist.tools.commands import train
from hoist.tools.options import DEFAULT_JOB, MINIMA, NOT_REMEMBERED, TrainOptions, flag

FIELDS = [spec for spec in dataclasses.fields(TrainOptions) if spec.name != "given"]


def make(**command_line: Any) -> TrainOptions:
    return TrainOptions.make(config=None, command_line=command_line)


def from_toml(tmp_path: Path, text: str, **command_line: Any) -> TrainOptions:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return TrainOptions.make(config=path, command_line=command_line)


def test_the_command_line_has_every_option_and_no_other() -> None:
    assert set(inspect.signature(train.train).parameters) == {spec.name for spec in FIELDS} | {"config", "as_json"}


def test_text_of_the_command_line_becomes_numbers() -> None:
    options = make(model="m", steps="12", lr="2e-3", betas="0.8, 0.99", dropout="0.1", data=["a", "b"], fresh=True)
    assert (options.steps, options.lr, options.betas, options.dropout) == (12, 2e-3, (0.8, 0.99), 0.1)
    assert options.data == ("a", "b")
    assert options.given == {"model", "steps", "lr", "betas", "dropout", "data", "fresh"}


def test_without_a_model_the_default_job() -> None:
    assert {name: getattr(make(), name) for name in DEFAULT_JOB} == DEFAULT_JOB
    assert make(steps="7").steps == 7
    assert make(steps="7").lr == DEFAULT_JOB["lr"]
    assert make(model="gpt2") == dataclasses.replace(TrainOptions(model="gpt2"), given=frozenset({"model"}))


def test_defaults_are_torch_s_or_documented() -> None:
    """Only the learning rate, beta 2 and the decay differ from torch.optim.AdamW: DESIGN names them."""
    ours = TrainOptions(model="m").trainer_config().optimizer
    theirs = torch.optim.AdamW([torch.zeros(1)]).defaults
    assert (ours.eps, ours.betas[0]) == (theirs["eps"], theirs["betas"][0])
    assert (ours.lr, ours.betas[1], ours.weight_decay) == (1e-4, 0.95, 0.0)


def test_toml(tmp_path: Path) -> None:
    text = 'model = "m"\nmicro-batches = 3\nlr = 1\nbetas = [0.5, 0]\ndata = ["a", "b"]\nno_decay_norms = true\n'
    options = from_toml(tmp_path, text, steps="9", lr="0.5")
    assert (options.model, options.micro_batches, options.betas) == ("m", 3, (0.5, 0.0))
    assert (options.data, options.no_decay_norms) == (("a", "b"), True)
    assert (options.steps, options.lr) == (9, 0.5)  # the command line wins
    assert options.given == {"model", "micro_batches", "lr", "betas", "data", "no_decay_norms", "steps"}
    assert from_toml(tmp_path, 'data = "one"').data == ("one",)
    assert from_toml(tmp_path, 'betas = "0.1,0.2"').betas == (0.1, 0.2)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("steps = 1.5", r"steps is 1.5; it must be a whole number"),
        ("steps = true", r"steps is True; it must be a whole number"),
        ('steps = "3"', r"steps is '3'; it must be a whole number"),
        ("lr = true", r"lr is True; it must be a finite number"),
        ("lr = inf", r"lr is inf; it must be a finite number"),
        ("dropout = [0.1]", r"dropout is \[0.1\]; it must be a finite number"),
        ("betas = [0.9]", r"--betas: betas must be two numbers"),
        ("betas = 0.9", r"betas is 0.9; it must be a list of numbers"),
        ('betas = ["0.9", "0.95"]', r"betas is .*; it must be a list of numbers"),
        ("data = [1]", r"data is \[1\]; it must be a list of strings"),
        ("model = 7", r"model is 7; it must be a string"),
        ('fresh = "yes"', r"fresh is 'yes'; it must be true or false"),
        ('order = "random"', r"--order: 'random' is not one of sequential, shuffle"),
        ("token-bytes = 3", r"--token-bytes: 3 is not one of 2, 4"),
        ("[job]\nsteps = 3", r"unknown key 'job'; known are attention, betas, "),
        ("given = 3", r"unknown key 'given'"),
        ("micro-batch = 3", r"unknown key 'micro-batch' \(did you mean micro_batch"),
        ("seq-len = 8\nseq_len = 9", r"seq_len is there twice"),
        ("steps = 1\nsteps = 2", r"is not TOML"),
    ],
)
def test_toml_that_is_refused(text: str, pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=pattern):
        from_toml(tmp_path, text)


def test_toml_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; give a TOML file"):
        TrainOptions.make(config=tmp_path / "absent.toml", command_line={})
    with pytest.raises(ConfigError, match="Is a directory"):
        TrainOptions.make(config=tmp_path, command_line={})
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe9"')
    with pytest.raises(ConfigError, match="is not TOML"):
        TrainOptions.make(config=tmp_path / "latin.toml", command_line={})


@pytest.mark.parametrize(("name", "least"), MINIMA.items())
def test_least_whole_numbers(name: str, least: int) -> None:
    assert getattr(make(**{name: str(least)}), name) == least
    with pytest.raises(ConfigError, match=rf"{flag(name)}: {least - 1} is not allowed; give at least {least}"):
        make(**{name: str(least - 1)})
    with pytest.raises(ConfigError, match=rf"{flag(name)}: '1.5' is not a whole number"):
        make(**{name: "1.5"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": "-1"}, {"lr": "nan"}, {"eps": "inf"}, {"weight_decay": "-0.1"}, {"betas": "1,0"}, {"betas": "a,b"},
        {"betas": "0.9"}, {"dropout": "-0.1"}, {"dropout": "nan"}, {"seed": str(2**63)}, {"host_memory": "much"},
        {"lr_schedule": "step"}, {"io": "aio"}, {"plan": "diagonal"}, {"attention": "flash"}, {"metrics": ""},
        {"delay": "1.1"}, {"delay": "nan"}, {"delay": "-1"},
        {"clip_norm": "-1"}, {"clip_norm": "inf"}, {"clip_norm": "nan"},
        {"max_chunk_elements": "4095"}, {"max_chunk_elements": "-4096"}, {"lr": "fast"},
    ],
)  # fmt: skip
def test_every_refusal_names_the_option(wrong: dict[str, str]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"^{flag(name)}: [^\n]+$"):
        make(**wrong)


# --- what a store remembers -------------------------------------------------------------------------------------------


def test_remembered_options_are_json_and_complete(tmp_path: Path) -> None:
    options = make(model="m", data=["a"], betas="0.5,0.6")
    kept = json.loads(json.dumps(options.remembered()))
    assert kept.keys() == {spec.name for spec in FIELDS} - NOT_REMEMBERED
    assert kept["data"] == [str(Path("a").absolute())]


def test_a_resume_is_as_it_was(tmp_path: Path) -> None:
    before = make(model="m", data=["/a"], lr="0.25", steps="10", betas="0.5,0.6", attention="eager", dropout="0.5")
    kept = json.loads(json.dumps(before.remembered()))
    now, changed = make(store="s", metrics="f").resuming(kept)
    assert changed == ()
    assert now == dataclasses.replace(before, store=("s",), metrics="f", given=frozenset({"store", "metrics"}))


def test_a_resume_takes_what_is_given_and_says_so() -> None:
    kept = make(model="m", data=["/a"], lr="0.25", steps="10").remembered()
    now, changed = make(
        lr="0.5", steps="20", betas="0.5,0.6", host_memory="1GiB", plan="horizontal", commit_every="3", seq_len="8",
        delay="0.5", clip_norm="2",
    ).resuming(kept)  # fmt: skip
    assert changed == (
        "--seq-len 8 (was 1024)", "--steps 20 (was 10)", "--lr 0.5 (was 0.25)", "--betas 0.5,0.6 (was 0.9,0.95)",
        "--clip-norm 2.0 (was 0.0)",
    )  # fmt: skip
    assert (now.trainer_config().delay, now.trainer_config().clip_norm) == (0.5, 2.0)
    assert (now.lr, now.steps, now.host_memory, now.plan, now.seq_len) == (0.5, 20, "1GiB", "horizontal", 8)
    assert now.model == "m"


def test_a_resume_from_another_version() -> None:
    """Unknown options are passed over, missing ones are at their defaults."""
    now, changed = make(store="s").resuming({"lr": 0.5, "of_the_future": 1, "fresh": True})
    assert (now.lr, now.fresh, now.steps) == (0.5, False, TrainOptions().steps)
    assert changed == ()


def test_help_tells_the_defaults(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["train", "--help"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    defaults = TrainOptions()
    names = ("steps", "seq_len", "micro_batches", "micro_batch_size", "seed", "host_memory", "store")
    for name in names:
        value = getattr(defaults, name)
        assert f"Default {value[0] if isinstance(value, tuple) else value}." in text, name
    for shown in ("Default 1e-4.", "Default 0.9,0.95.", "Default 1e-8.", "sequential (default)", "constant (default)"):
        assert shown in text
    assert tomllib.loads("micro-batches = 4")  # what --config's help shows


@pytest.mark.parametrize("arguments", [["--help"], [], ["train", "--help"], ["export", "--help"], ["doctor", "--help"]])
def test_help(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 0
    out, err = capfd.readouterr()
    assert "Usage: hoist" in out
    assert err == ""
    assert ("Example" in out) == (len(arguments) == 2)


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capfd.readouterr().out.startswith("hoist ")
