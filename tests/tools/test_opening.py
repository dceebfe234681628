"""`hoist.open_trainer`: makes a store, resumes it, and refuses what cannot be, leaving it as it was."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

import hoist
from hoist.tiers.errors import StoreRefusedError
from tests.support.commands import hoist as command
from tests.support.models import tiny_config

NUM_STEPS = 3


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
