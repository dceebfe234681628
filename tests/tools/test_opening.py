"""`hoist.open_trainer`: makes a store, resumes it, and refuses what cannot be, leaving it as it was."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch import nn

import hoist
from hoist.scheduler.errors import ConfigError
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.format import METRICS_NAME, STATUS_NAME, TIMELINE_NAME, WEAR_NAME
from tests.support.commands import hoist as command
from tests.support.commands import tree
from tests.support.models import reference_model, tiny_config
from tests.support.processes import run_in_process

NUM_STEPS = 3
#: A tensor that is not trained, by what the store was told.
_FROZEN = {
    "lora": "model.layers.0.mlp.up_proj.base_layer.weight",
    "freeze": "model.layers.0.mlp.up_proj.weight",
}


def _config(host_memory_bytes: int = 32 * 2**20) -> hoist.TrainerConfig:
    return hoist.TrainerConfig(
        host_memory_bytes=host_memory_bytes,
        micro_batch_size=2,
        seq_len=16,
        num_micro_batches=2,
        optimizer=hoist.AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        schedule=hoist.Schedule(kind="constant", lr=1e-2, num_steps=NUM_STEPS),
    )


def _batches(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    batches = [torch.randint(0, 100, (2, 16), generator=generator) for _ in range(2)]
    return [{"input_ids": ids, "labels": ids} for ids in batches]


def test_a_store_is_opened_in_bfloat16(tmp_path: Path) -> None:
    """After a step in float32; modules compute in float32 alone."""
    model = tmp_path / "model"
    tiny_config("llama").save_pretrained(model)
    with hoist.open_trainer(tmp_path / "store", config=_config(), model=model, io="direct") as trainer:
        exact = trainer.step(_batches(0))
        held = trainer.memory.demand.stages[1].weights
        trainer.commit()
    config = dataclasses.replace(_config(), dtype="bfloat16")
    with hoist.open_trainer(tmp_path / "store", config=config, io="direct") as trainer:
        assert trainer.memory.demand.stages[1].weights * 2 == held
        assert trainer.step(_batches(0)).loss < exact.loss
    modules = hoist.stage_modules(
        [nn.Linear(8, 8), nn.Linear(8, 8)],
        loss=nn.MSELoss(reduction="sum"),
        example={"inputs": torch.zeros(2, 8), "targets": torch.zeros(2, 8)},
    )
    with (
        pytest.raises(ConfigError, match=r"^dtype: modules compute in float32, not in bfloat16; leave it out$"),
        hoist.open_trainer(tmp_path / "other", config=config, model=modules, io="direct"),
    ):
        pass
    assert not (tmp_path / "other").exists()


def _train(store: Path, stops: list[int], model: Path) -> list[float]:
    """Losses of a run that is left, committed, after each of ``stops`` steps; the model is named the first time."""
    losses: list[float] = []
    for stop in stops:
        with hoist.open_trainer(store, config=_config(), model=None if losses else model, io="direct") as trainer:
            while trainer.step_number < stop:
                losses.append(trainer.step(_batches(trainer.step_number)).loss)
            trainer.commit()
    return losses


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a config and no weights."""
    tiny_config("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_resumed_run_goes_on_as_if_never_left(tmp_path: Path, model: Path) -> None:
    whole = _train(tmp_path / "whole", [NUM_STEPS], model)
    parts = _train(tmp_path / "parts", [1, NUM_STEPS], model)
    assert parts == whole
    assert len(set(whole)) == NUM_STEPS


def test_the_command_line_says_that_it_does_not_know_the_settings(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And counts from where it came in."""
    _train(tmp_path / "store", [2], model)
    numpy.save(tmp_path / "tokens.npy", numpy.arange(2000) % 100)
    told = ("--data", tmp_path / "tokens.npy", "--seq-len", 16, "--micro-batches", 2, "--steps", 4)
    result = command(capfd, "train", "--store", tmp_path / "store", *told)
    assert result.code == 0
    assert "its settings are not recorded, and those that are not given have their defaults" in result.out
    assert " at step 3, " in result.out
    assert "written since step 2" in result.out
    assert "settings are not recorded" not in command(capfd, "train", "--store", tmp_path / "store", "--steps", 5).out


@pytest.mark.parametrize("trained", [{"lora": hoist.LoraOptions(r=2)}, {"freeze": ["*mlp*"]}], ids=["lora", "freeze"])
def test_the_command_line_trains_what_the_store_was_made_to_train(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str], trained: dict[str, Any]
) -> None:
    with hoist.open_trainer(tmp_path / "store", config=_config(), model=model, io="direct", **trained) as trainer:
        trainer.step(_batches(0))
        trainer.commit()
    numpy.save(tmp_path / "tokens.npy", numpy.arange(2000) % 100)
    told = ("--data", tmp_path / "tokens.npy", "--seq-len", 16, "--micro-batches", 2, "--steps", 2)
    frozen = hoist.read_tensor(tmp_path / "store", _FROZEN[next(iter(trained))])
    assert command(capfd, "train", "--store", tmp_path / "store", *told).code == 0
    assert (hoist.read_tensor(tmp_path / "store", _FROZEN[next(iter(trained))]) == frozen).all()
    if "lora" in trained:
        again = command(capfd, "train", "--store", tmp_path / "store", "--lora", "r=4", "--steps", 3)
        assert again.code == 2
        assert "--lora: r=4 is not what the store was made with (r=2,alpha=32,targets=" in again.err


def test_fresh_starts_over(tmp_path: Path, model: Path) -> None:
    _train(tmp_path / "store", [1], model)
    with hoist.open_trainer(tmp_path / "store", config=_config(), model=model, fresh=True, io="direct") as trainer:
        assert trainer.step_number == 0


def test_a_model_is_needed_where_there_is_no_store(tmp_path: Path) -> None:
    with (
        pytest.raises(hoist.HoistError, match=r"model: nothing given, and .*holds no store to resume"),
        hoist.open_trainer(tmp_path / "store", config=_config()),
    ):
        pass
    assert not (tmp_path / "store").exists()


def test_another_model_is_refused_and_the_store_kept(tmp_path: Path, model: Path) -> None:
    _train(tmp_path / "store", [1], model)
    tiny_config("gpt2").save_pretrained(tmp_path / "other")
    with (
        pytest.raises(StoreRefusedError, match="the store holds another model"),
        hoist.open_trainer(tmp_path / "store", config=_config(), model=tmp_path / "other"),
    ):
        pass
    with hoist.open_trainer(tmp_path / "store", config=_config()) as trainer:
        assert trainer.step_number == 1


def test_a_budget_too_small_creates_nothing(tmp_path: Path, model: Path) -> None:
    with (
        pytest.raises(hoist.HoistError, match="is too small; at least"),
        hoist.open_trainer(tmp_path / "store", config=_config(host_memory_bytes=4096), model=model),
    ):
        pass
    assert not (tmp_path / "store").exists()


def test_one_more_trainable_layer_is_another_model(tmp_path: Path, model: Path) -> None:
    """Not a resume in which the new layer starts anew beside others that have learned."""
    _train(tmp_path / "store", [1], model)
    config = tiny_config("llama")
    config.update({"num_hidden_layers": config.num_hidden_layers + 1})
    config.save_pretrained(tmp_path / "deeper")
    before = tree(tmp_path)
    with (
        pytest.raises(StoreRefusedError, match="the store holds another model"),
        hoist.open_trainer(tmp_path / "store", config=_config(), model=tmp_path / "deeper"),
    ):
        pass
    assert tree(tmp_path) == before


def _resume_without_pickle(store: Path) -> list[float]:
    """In a process of its own."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    open_trainer, untyped = hoist.open_trainer, cast(Any, pickle)
    untyped.load = untyped.loads = untyped.Unpickler = refuse
    with open_trainer(store, config=_config(), io="direct") as trainer:
        losses = [trainer.step(_batches(number)).loss for number in range(trainer.step_number, NUM_STEPS)]
        trainer.commit()
    return losses


def test_nothing_in_a_store_is_a_pickle(tmp_path: Path, model: Path) -> None:
    """A store is resumed where nothing can be unpickled, and its files are JSON or plain numbers."""
    whole = _train(tmp_path / "whole", [NUM_STEPS], model)
    _train(tmp_path / "store", [1], model)
    code, losses = run_in_process(_resume_without_pickle, tmp_path / "store")
    assert (code, losses) == (0, whole[1:])
    names = [path.relative_to(tmp_path / "store") for path in (tmp_path / "store").rglob("*") if path.is_file()]
    kinds = (".json", ".jsonl", ".bin")
    plain = [name for name in names if name.suffix in kinds or name.name == "LOCK" or "c" in name.parts]
    assert sorted(plain) == sorted(names)
    for name in names:
        if name.suffix == ".json":
            json.loads((tmp_path / "store" / name).read_text())
        if name.suffix == ".jsonl":
            assert all(map(json.loads, (tmp_path / "store" / name).read_text().splitlines()))


def _end(store: Path, model: Path, how: str) -> None:
    """In a process of its own: train two steps of which one is committed, and end so."""
    config = dataclasses.replace(_config(), residency=0.0, commit_every=1)
    with hoist.open_trainer(store, config=config, model=model, io="direct", fresh=True) as trainer:
        trainer.step(_batches(0))
        trainer.step(_batches(1))
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "error":
            with pytest.raises(ConfigError, match="micro_batches: 0 given"):
                trainer.step([])
            os._exit(3)


def test_a_store_does_not_grow_however_runs_end(tmp_path: Path, model: Path) -> None:
    sizes = []
    for how in ("clean", "error", "killed", "clean"):
        code, _ = run_in_process(_end, tmp_path / "store", model, how)
        assert code == {"clean": 0, "error": 3, "killed": -signal.SIGKILL}[how]
        # What runs tell of themselves grows by a line a step; numbers in it have as many digits as they have.
        told = {STATUS_NAME, METRICS_NAME, TIMELINE_NAME, WEAR_NAME}
        found = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in told]
        sizes.append((len(found), sum(path.stat().st_size for path in found)))
    num_files, num_bytes = sizes[0]
    for number, size in sizes[1:]:  # a killed run leaves its scratch, until the next one
        assert number <= num_files + 2
        assert size <= num_bytes * 1.05
    assert sizes[-1][0] == num_files
    assert abs(sizes[-1][1] - num_bytes) < 64, "a number in COMMIT.json may have more digits"


def test_an_import_writes_every_weight_once(tmp_path: Path) -> None:
    """4 bytes an element, and the few of the last chunks that no tensor has; nothing is written and read again."""
    built = reference_model(tiny_config("llama"))
    built.save_pretrained(tmp_path / "model")
    num_bytes = 4 * sum(parameter.numel() for parameter in built.parameters())
    with hoist.open_trainer(tmp_path / "store", config=_config(), model=tmp_path / "model", io="direct") as trainer:
        moved = trainer.statistics().nvme
    assert num_bytes <= moved.written_bytes <= 1.05 * num_bytes + 5 * 2 * 8192
    assert num_bytes <= moved.read_bytes <= num_bytes + 2 * 4096 * len(list(built.parameters()))


def _modules(device: str) -> Any:
    with torch.device(device):
        made = [nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 2)]
    example = {"inputs": torch.zeros(1, 8), "targets": torch.zeros(1, 2)}
    return hoist.stage_modules(made, loss=nn.MSELoss(reduction="sum"), example=example)


@pytest.mark.parametrize("residency", [0.0, 1.0])
@pytest.mark.parametrize("entry", ["weights", "config", "modules", "modules on meta"])
def test_every_way_in_trains_with_states_on_nvme_or_in_memory(tmp_path: Path, entry: str, residency: float) -> None:
    """Weights and moments stay in memory together here, or stream together; what is trained is the same."""
    model: Any = tmp_path / "model"
    if entry == "weights":
        reference_model(tiny_config("llama")).save_pretrained(model)
    elif entry == "config":
        tiny_config("llama").save_pretrained(model)
    else:
        model = _modules("meta" if entry == "modules on meta" else "cpu")
    batches = _batches(0)
    if entry.startswith("modules"):
        batches = [{"inputs": torch.ones(2, 8), "targets": torch.ones(2, 2)}] * 2
    config = dataclasses.replace(_config(512 * 2**20), residency=residency, resident_weights=residency > 0.0)
    with hoist.open_trainer(tmp_path / "store", model=model, config=config, io="direct") as trainer:
        assert (trainer.memory.kept_bytes > 0) == (residency > 0.0)
        first, second = trainer.step(batches), trainer.step(batches)
        trainer.commit()
        assert second.loss < first.loss
        assert (second.nvme_read_bytes == 0) == (residency > 0.0)
        assert trainer.committed_step == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (reference_model(tiny_config("llama")), r"^model: a LlamaForCausalLM .*; save it with save_pretrained"),
        (nn.Sequential(nn.Linear(2, 2)), r"^model: a Sequential .*; give hoist\.stage_modules\(its modules in order"),
    ],
)
def test_a_model_that_is_built_already_is_told_the_way_in(tmp_path: Path, model: Any, message: str) -> None:
    store = tmp_path / "store"
    with pytest.raises(ConfigError, match=message), hoist.open_trainer(store, model=model, config=_config()):
        pass
    assert not (tmp_path / "store").exists()
