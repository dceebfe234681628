"""What a program can do wrong around ``Trainer.step``: refused in words, and the trainer goes on; or harmless."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.setup import prepare
from hoist.scheduler.trainer import Trainer
from hoist.tiers.errors import HoistError, TransferError
from hoist.tools.opening import open_trainer
from tests.support.models import reference_model, tiny_config
from tests.support.training import Engine as SmallEngine
from tests.support.training import make_steps, trainer_on

Batch = dict[str, torch.Tensor]
NUM_STEPS = 4


def batch(seed: int = 0) -> Batch:
    ids = torch.randint(0, 503, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def make(tmp_path: Path) -> Iterator[Trainer]:
    model = tmp_path / "model"
    if not model.exists():
        reference_model(tiny_config("llama")).save_pretrained(model)
    config = TrainerConfig(
        host_memory_bytes=16 * 2**20,
        micro_batch_size=2,
        seq_len=16,
        num_micro_batches=2,
        optimizer=AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        schedule=Schedule(kind="constant", lr=1e-2, num_steps=NUM_STEPS),
    )
    with open_trainer(tmp_path / "store", config=config, model=model, fresh=True) as trainer:
        yield trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    yield from make(tmp_path)


def test_batches_are_let_go_of_when_their_step_returns(trainer: Trainer) -> None:
    """Its updates go on, but the budget has room for what one step is fed and what its caller makes for the next."""
    for seed in range(2):
        fed = [batch(seed), batch(seed + 10)]
        tensors = [weakref.ref(tensor) for one in fed for tensor in one.values()]
        trainer.step(fed)
        del fed
        gc.collect()
        assert [tensor() for tensor in tensors] == [None] * 4


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What two ordinary steps give."""
    with contextmanager(make)(tmp_path_factory.mktemp("ordinary")) as trainer:
        return [trainer.step([batch(0)]).loss, trainer.step([batch(1)]).loss]


def _no_grad(trainer: Trainer) -> float:
    with torch.no_grad():
        return trainer.step([batch(0)]).loss


def _inference(trainer: Trainer) -> float:
    with torch.inference_mode():
        return trainer.step([batch(0)]).loss


def _autocast(trainer: Trainer) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return trainer.step([batch(0)]).loss


@pytest.mark.parametrize("around", [_no_grad, _inference, _autocast])
def test_modes_of_the_caller_do_not_reach_the_step(
    trainer: Trainer, losses: list[float], around: Callable[[Trainer], float]
) -> None:
    assert around(trainer) == losses[0]
    assert trainer.step([batch(1)]).loss == losses[1]  # so the first step was an update


@pytest.mark.parametrize("modes", [torch.no_grad, torch.inference_mode])
def test_nor_do_those_in_which_it_was_opened(
    modes: Callable[[], AbstractContextManager[None]], losses: list[float], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        with modes():
            opened = stack.enter_context(contextmanager(make)(tmp_path))
        assert [opened.step([batch(seed)]).loss for seed in range(2)] == losses


def _changed(key: str, position: tuple[int, int], value: int) -> Batch:
    made = batch()
    made[key][position] = value
    return made


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (_changed("input_ids", (1, 3), 503), r"micro-batch 0: input_ids go from \d+ to 503; the model has 0 to 502"),
        (_changed("input_ids", (0, 0), -1), r"micro-batch 0: input_ids go from -1"),
        (_changed("labels", (0, 5), 503), r"micro-batch 0: labels go from \d+ to 503"),
        (_changed("labels", (0, 5), -5), r"micro-batch 0: labels go from -5"),
        ({name: ids.to(torch.int32) for name, ids in batch().items()}, r"input_ids are torch.int32; they must be"),
        ({**batch(), "attention_masks": torch.ones(2, 16)}, r"has attention_masks; .* also .*attention_mask"),
        ({"input_ids": batch()["input_ids"]}, r"micro-batch 0: lacks labels"),
        ({**batch(), "position_ids": torch.ones(1, 16)}, r"position_ids \(1, 16\) must be like input_ids \(2, \d+\)"),
    ],
)
def test_a_wrong_batch_is_refused_and_the_next_step_is_as_ever(
    trainer: Trainer, losses: list[float], wrong: Batch, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer.step([wrong])
    assert trainer.step([batch(0)]).loss == losses[0]


def test_past_the_schedule(trainer: Trainer) -> None:
    for _ in range(NUM_STEPS):
        trainer.step([batch()])
    with pytest.raises(ConfigError, match=f"step must be 1 to {NUM_STEPS}, got {NUM_STEPS + 1}"):
        trainer.step([batch()])
    trainer.commit()
    assert trainer.committed_step == NUM_STEPS


def test_one_thread_at_a_time(trainer: Trainer, losses: list[float]) -> None:
    refused: list[BaseException] = []

    def record(_: object) -> dict[str, int]:
        """Runs inside of the first step: another thread tries one meanwhile."""

        def intrude() -> None:
            try:
                trainer.step([batch()])
            except HoistError as error:
                refused.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        return {}

    assert trainer.step([batch(0)], run=record).loss == losses[0]
    assert "another thread" in str(refused[0])
    assert trainer.step([batch(1)]).loss == losses[1]


@pytest.mark.parametrize(
    "wrong",
    [{"residency": "1"}, {"residency": None}, {"commit_minutes": "x"}, {"clip_norm": "1"}, {"delay": "auto"},
     {"commit_every": 1.5}],
)  # fmt: skip
def test_settings_of_another_type_are_refused(wrong: dict[str, Any], trainer: Trainer) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"{name}: .* is not a (whole )?number"):
        replace(trainer.config, **wrong)


def test_a_model_cannot_be_sized_while_its_trainer_is_open(tmp_path: Path) -> None:
    """Sizing lets go of the Parameters, and with them of the trainer's gradient hooks: it would train on unchanged."""
    with trainer_on(tmp_path / "store", tiny_config("llama"), make_steps(2, 2), SmallEngine()) as trainer:
        staged = trainer._runtime._model
        first = trainer.step(make_steps(2, 2)[0])
        with pytest.raises(ConfigError, match="LlamaForCausalLM: an open trainer uses this staged model; close the"):
            prepare(staged, trainer._store.layouts, trainer.config)
        second = trainer.step(make_steps(2, 2)[1])
        assert second.grad_norm > 0
        assert first.grad_norm > 0
        layouts, config = trainer._store.layouts, trainer.config
    assert prepare(staged, layouts, config).memory.need_bytes <= config.host_memory_bytes


def test_a_closed_trainer_says_so(trainer: Trainer) -> None:
    trainer.step([batch()])
    trainer.close()
    with pytest.raises(ConfigError, match="closed"):
        trainer.step([batch()])
    with pytest.raises(ConfigError, match="closed"):
        trainer.commit()


def test_a_store_that_was_deleted_is_noticed_at_the_commit(trainer: Trainer, tmp_path: Path) -> None:
    trainer.step([batch()])
    shutil.rmtree(tmp_path / "store" / "stages")
    with pytest.raises(TransferError, match=r"has been deleted while the store was in use|No such file or directory"):
        trainer.commit()
