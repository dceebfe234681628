"""`hoist.read_tensor`: tensors and moments of a store as numpy arrays, equal to what the engine reads; refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hoist
from hoist.scheduler.errors import ConfigError
from hoist.tiers.errors import StoreFormatError, StoreRefusedError
from hoist.tools.read_tensor import read_tensor
from tests.support.models import tiny_config
from tests.support.training import Engine, Outcome, Recipe, make_steps, same_bits, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A store of small chunks, three commits old, so that slots differ."""
    store = tmp_path_factory.mktemp("read") / "store"
    steps = make_steps(3, 1)
    outcome = train(store, tiny_config("llama"), steps, Recipe(), Engine(max_chunk_elements=4096, commit_every=1))
    return store, outcome


@pytest.mark.parametrize("what", ["weight", "exp_avg", "exp_avg_sq"])
def test_every_tensor_is_as_the_engine_reads_it(trained: tuple[Path, Outcome], what: Any) -> None:
    store, outcome = trained
    kept = outcome.states.weights if what == "weight" else getattr(outcome.states, what)
    assert any(value.numel() > 4 * 4096 for value in kept.values())
    for name, expected in kept.items():
        got = torch.from_numpy(read_tensor(str(store), name, what=what))
        assert got.shape == expected.shape
        assert same_bits(got, expected), name


def test_a_name_that_is_not_there_brings_those_that_are_near(trained: tuple[Path, Outcome]) -> None:
    with pytest.raises(ConfigError, match=r"has no tensor 'model\.norm'; it has, for example, model\.norm\.weight"):
        read_tensor(trained[0], "model.norm")
    wrong: Any = "grad"
    with pytest.raises(ConfigError, match=r"^what: 'grad' is not one of weight, exp_avg, exp_avg_sq$"):
        read_tensor(trained[0], "model.norm.weight", what=wrong)


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreRefusedError):
        read_tensor(tmp_path / "nothing", "weight")


def test_a_file_that_is_short(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained[0], copy)
    for path in (copy / "stages" / "000-embed" / "weight_lo").rglob("c/*/0"):
        path.write_bytes(b"")
    with pytest.raises(StoreFormatError):
        read_tensor(copy, "model.embed_tokens.weight")


def test_frozen_tensors_and_buffers_are_as_they_are_kept(tmp_path: Path) -> None:
    frozen = torch.nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = frozen

        def forward(self, source: torch.Tensor) -> torch.Tensor:
            change: torch.Tensor = self.frozen(source)  # computed in float32
            return source + change

    expected = frozen.weight.detach().clone()
    model = hoist.stage_modules(
        [torch.nn.Linear(4, 4), Mixed(), torch.nn.Linear(4, 1)],
        loss=torch.nn.MSELoss(reduction="sum"),
        example={"inputs": torch.zeros(1, 4), "targets": torch.zeros(1, 1)},
    )
    config = hoist.TrainerConfig(
        host_memory_bytes=2**23,
        micro_batch_size=2,
        num_micro_batches=1,
        schedule=hoist.Schedule(kind="constant", lr=1e-3, num_steps=1),
    )
    with hoist.open_trainer(tmp_path / "store", model=model, config=config) as trainer:
        trainer.step([{"inputs": torch.ones(2, 4), "targets": torch.ones(2, 1)}])
        trainer.commit()
    got = read_tensor(tmp_path / "store", "1.frozen.weight")
    assert (got == expected.view(torch.uint16).numpy()).all()
    with pytest.raises(ConfigError, match=r"1\.frozen\.weight is not trained, so it has no exp_avg"):
        read_tensor(tmp_path / "store", "1.frozen.weight", what="exp_avg")
