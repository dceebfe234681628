"""`--store` given several times, and `hoist drives`: what a user sees, in order and when something is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zarr
from safetensors.torch import load_file

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.errors import ConfigError
from hoist.tiers.errors import StoreRefusedError
from hoist.tools.opening import open_trainer
from hoist.tools.options import TrainOptions
from tests.support.commands import ROWS, SEQ_LEN, Job, Result, curve, hoist, make_job, tree
from tests.support.drives import chunk_files

Hoist = Callable[..., Result]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Hoist:
    return lambda *arguments: hoist(capfd, *arguments)


def arguments(job: Job, *stores: str, metrics: str = "", **changed: object) -> list[object]:
    """`hoist train` on stores of these names in the job's folder."""
    words = [word for name in stores for word in ("--store", job.folder / name)]
    more = ["--metrics", job.folder / metrics] if metrics else []
    return job.arguments(*words, *more, store=None, **changed)


def test_a_run_over_three_directories_equals_one_in_one(job: Job, run: Hoist) -> None:
    assert run(*arguments(job, "one", metrics="one.jsonl")).code == 0
    assert run(*arguments(job, "a", "b", "c", metrics="abc.jsonl", steps=2)).code == 0
    # Resuming needs the first directory only, or all of them.
    resumed = run(*arguments(job, "a", "c", "b", metrics="abc.jsonl"))
    assert resumed.code == 0, resumed.err
    assert re.search(r"^drives +chunks are spread over 3: \S*a \d+%, \S*b \d+%, \S*c \d+%$", resumed.out, re.M)
    assert f"train --store {job.folder / 'a'} --steps 6" in resumed.out
    assert "changed since the last commit: --steps 3 (was 2)\n" in resumed.out
    assert curve(job.folder / "abc.jsonl") == curve(job.folder / "one.jsonl")
    for name in ("one", "a"):
        assert run("export", job.folder / name, job.folder / f"{name}-model").code == 0
    one, three = (load_file(job.folder / f"{name}-model" / "model.safetensors") for name in ("one", "a"))
    assert one.keys() == three.keys()
    assert all(torch.equal(one[name], three[name]) for name in one)
    assert len(dict(zarr.open_group(job.folder / "a", mode="r").members(max_depth=None))) > 10
    inside = run("export", job.folder / "a", job.folder / "b" / "model").refusal()
    assert f"lies inside {job.folder / 'b'}, a drive of the store {job.folder / 'a'}; name a directory" in inside
    assert run("train", "--store", job.folder / "a", "--steps", 4).code == 0


def test_the_config_file_takes_one_directory_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for text, expected in (('"a"', ("a",)), ('["a", "b"]', ("a", "b"))):
        path.write_text(f"store = {text}\n")
        assert TrainOptions.make(config=path, command_line={}).store == expected
    path.write_text("store = 3\n")
    with pytest.raises(ConfigError, match="store is 3; it must be a list of strings"):
        TrainOptions.make(config=path, command_line={})
    path.write_text("store = []\n")
    with pytest.raises(ConfigError, match="--store: nothing given; name a directory, or leave the option out"):
        TrainOptions.make(config=path, command_line={})
    with pytest.raises(ConfigError, match="--store: '' is not allowed; give a path"):
        TrainOptions.make(config=None, command_line={"store": ["a", ""]})
    assert "store" not in TrainOptions.make(config=None, command_line={"store": ["a", "b"]}).remembered()


def test_drives_join_move_and_leave(job: Job, run: Hoist) -> None:
    folder = job.folder
    assert run(*arguments(job, "whole", metrics="whole.jsonl", steps=4)).code == 0
    assert run(*arguments(job, "a", metrics="a.jsonl", steps=1)).code == 0
    done = run("drives", folder / "a", "--add", folder / "b")
    assert done.code == 0, done.err
    assert re.search(r"^note +\d\S* \w+ moved$", done.out, re.M)
    assert re.search(rf"^ +\d+% +\d+ .*  {folder}/b$", done.out, re.M)
    assert chunk_files(folder / "b")
    # One line says what to do where --store names others than the store has.
    before = tree(folder)
    line = run("train", "--store", folder / "a", "--store", folder / "c").refusal()
    where = folder / "c"
    assert line == (
        f"--store {where}: is not there; mount it, or take a directory into use first: "
        f"hoist drives {folder / 'a'} --add {where}"
    )
    assert {**tree(folder), str(folder / "a" / "LOCK"): ()} == {**before, str(folder / "a" / "LOCK"): ()}
    assert run(*arguments(job, "a", metrics="a.jsonl", steps=2)).code == 0
    # The drive is mounted elsewhere.
    (folder / "b").rename(folder / "moved")
    line = run("train", "--store", folder / "a").refusal()
    assert line == (
        f"--store {folder / 'a'}: {folder / 'b'}: should be a drive of the store {folder / 'a'} and is not there; "
        f"mount it, or say where it is now: --store {folder / 'a'} --store DIR"
    )
    shown = run("drives", folder / "a", "--json")
    assert shown.code == 1
    main, missing = json.loads(shown.out)
    assert (main["directory"], main["main"], main["problem"]) == (str(folder / "a"), True, None)
    assert (missing["directory"], missing["main"]) == (str(folder / "b"), False)
    assert "is not there" in missing["problem"]
    assert run(*arguments(job, "a", "moved", metrics="a.jsonl", steps=3)).code == 0
    shown = run("drives", folder / "a", "--json")
    assert shown.code == 0
    main, moved = json.loads(shown.out)
    assert moved["directory"] == str(folder / "moved")
    assert moved["num_files"] == len(chunk_files(folder / "moved"))
    assert moved["num_bytes"] > 0
    assert moved["read_bytes_per_second"] > 0
    assert main["share"] + moved["share"] == pytest.approx(1)
    assert run("drives", folder / "a", "--remove", folder / "moved", "--json").code == 0
    assert list((folder / "moved").iterdir()) == []
    ended = run(*arguments(job, "a", metrics="a.jsonl", steps=4))
    assert ended.code == 0, ended.err
    assert re.search(r"^drives ", ended.out, re.M) is None
    assert curve(folder / "a.jsonl") == curve(folder / "whole.jsonl")


def test_refusals_change_nothing(job: Job, run: Hoist) -> None:
    folder = job.folder
    (folder / "full").mkdir()
    (folder / "full" / "mine").write_text("mine")
    for stores, line in (
        (("new", "full"), f"--store {folder}/full: is not empty and holds no drive of this store; name an empty"),
        (("new", "new"), f"--store {folder}/new: is named twice among the store's directories; name each drive's"),
        (("new", "new/in"), f"--store {folder}/new/in: lies within {folder}/new, another of the store's directories"),
        (("new", "no/x"), f"--store {folder}/no/x: cannot create the store: {folder}/no does not exist"),
    ):
        before = tree(folder)
        assert run(*arguments(job, *stores)).refusal().startswith(line)
        assert tree(folder) == before
    missing = run("drives", folder / "new").refusal()
    assert missing == f"{folder}/new: does not exist; create the store first, or look at its name"
    assert run("drives", folder / "full").refusal() == f"{folder}/full: holds no hoist store; name the directory of one"


def test_a_drive_is_no_store(job: Job, run: Hoist) -> None:
    folder = job.folder
    assert run(*arguments(job, "a", "b", steps=0)).code == 0
    before = tree(folder)
    line = f"{folder}/b: is a drive of the store at {folder}/a; name that store first"
    assert run(*arguments(job, "b")).refusal() == f"--store {line}"
    assert run(*arguments(job, "b", "a")).refusal() == f"--store {line}"
    assert run("export", folder / "b", folder / "model").refusal() == line
    assert run("drives", folder / "b").refusal() == line
    assert tree(folder) == before


def test_fresh_over_other_directories(job: Job, run: Hoist) -> None:
    folder = job.folder
    assert run(*arguments(job, "a", "b", steps=1)).code == 0
    assert f"{folder}/c: is not there; mount it, or take" in run(*arguments(job, "a", "c", steps=1)).refusal()
    fresh = run(*arguments(job, "a", "c", steps=1), "--fresh")
    assert fresh.code == 0, fresh.err
    assert list((folder / "b").iterdir()) == []
    assert chunk_files(folder / "c")


def test_from_python(job: Job) -> None:
    config = TrainerConfig(
        host_memory_bytes=16 * 2**20,
        micro_batch_size=ROWS,
        seq_len=SEQ_LEN,
        num_micro_batches=1,
        optimizer=AdamWHyperparameters(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        schedule=Schedule(kind="constant", lr=1e-3, num_steps=3),
    )
    batch = {"input_ids": torch.ones(ROWS, SEQ_LEN, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"]
    places = [job.folder / "a", job.folder / "b"]
    with open_trainer(places, model=job.model, config=config) as trainer:
        trainer.step([batch])
        trainer.commit()
    assert chunk_files(places[1])
    shutil.move(places[1], job.folder / "moved")
    with pytest.raises(StoreRefusedError, match="b: should be a drive of the store"), open_trainer(
        places[0], config=config
    ):
        pass
    with open_trainer([places[0], job.folder / "moved"], config=config) as trainer:
        assert trainer.step_number == 1
    with open_trainer(places[0], config=config) as trainer:
        assert trainer.step_number == 1
