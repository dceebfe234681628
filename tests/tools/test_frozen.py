"""`hoist train --train` and `--freeze`: what a store then holds, what a resume may not change, what comes out.

That the results are those of plain PyTorch is `tests/scheduler/test_freezing.py`'s business.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.errors import ConfigError
from hoist.tools.opening import open_trainer
from hoist.tools.options import TrainOptions
from tests.support.commands import Job, curve, hoist, make_job, save_model
from tests.support.models import batch_of
from tests.tools.test_import import load, tensors_in

#: What these tests train: the last layer's attention and the final norm.
TRAINED = ("--train", "*.layers.2.self_attn.*", "--train", "model.norm.weight")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job on a checkpoint in bfloat16, with tied weights."""
    made = make_job(tmp_path, tie_word_embeddings=True)
    save_model(made.model, "llama", dtype=torch.bfloat16, tied=True)
    return made


def is_trained(name: str) -> bool:
    return ".layers.2.self_attn." in name or name == "model.norm.weight"


def test_freeze_resume_export_and_train_all(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """Half frozen for two steps, resumed for two, all of it trained in a new store: what was frozen is bit-unchanged
    up to there. The counts are shown, and the export has every tensor in full.
    """
    whole, parts = job.folder / "whole.jsonl", job.folder / "parts.jsonl"
    exact = ("--clip-norm", 0.5, "--delay", 0.5, "--verify", "always")
    made = hoist(capfd, *job.arguments(*TRAINED, *exact, "--metrics", whole, store=job.folder / "whole", steps=4))
    assert made.code == 0, made.err
    began = hoist(capfd, *job.arguments(*TRAINED, *exact, "--metrics", parts, steps=2))
    assert began.code == 0, began.err
    counts = {True: 0, False: 0}
    for name, value in tensors_in(job.model).items():
        counts[is_trained(name)] += value.numel()
    shown = " ".join(began.out.split())
    assert f": {counts[True]:,} parameters in 5 stages" in shown
    assert f"; {counts[False]:,} more are frozen, " in shown
    resumed = hoist(capfd, "train", "--store", job.store, "--steps", 4, "--metrics", parts)
    assert resumed.code == 0, resumed.err
    assert curve(parts) == curve(whole)

    verified = hoist(capfd, "verify", job.store)
    assert verified.code == 0, verified.err
    exported = job.folder / "exported"
    assert hoist(capfd, "export", job.store, exported, "--dtype", "bfloat16").code == 0
    before, after = tensors_in(job.model), tensors_in(exported)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.shape == after[name].shape
        assert torch.equal(value, after[name]) == (not is_trained(name)), name
    load(exported)

    unfrozen = hoist(capfd, *job.arguments(model=exported, store=job.folder / "all", steps=2))
    assert unfrozen.code == 0, unfrozen.err
    assert "frozen" not in unfrozen.out
    final = job.folder / "final"
    assert hoist(capfd, "export", job.folder / "all", final).code == 0
    for name, value in tensors_in(final).items():
        assert not torch.equal(value, after[name].float()), name


def test_frozen_weights_take_two_bytes_and_one_slot(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert hoist(capfd, *job.arguments(*TRAINED)).code == 0
    before = tensors_in(job.model)
    frozen = sum(value.numel() for name, value in before.items() if not is_trained(name))
    stages = job.store / "stages"
    on_drive = sum(path.stat().st_size for path in stages.glob("*/buffers/c/0"))
    assert 2 * frozen <= on_drive <= 2 * frozen + 4 * 8192
    trained = sum(value.numel() for name, value in before.items() if is_trained(name))
    states = sum(path.stat().st_size for path in stages.glob("*/*/c/*/*"))
    assert 24 * trained <= states <= 24 * (trained + 2 * 4096)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (("--freeze", "*mlp*"), r"^--freeze: \*mlp\* is not what the store was made with \(without it\)"),
        (("--train", "model.norm.weight"), r"^--train: model.norm.weight is not .* \(\*.layers.2.self_attn"),
    ],
)
def test_what_is_frozen_cannot_be_changed_on_resume(
    told: tuple[str, ...], message: str, job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    assert hoist(capfd, *job.arguments(*TRAINED, steps=1)).code == 0
    refused = hoist(capfd, "train", "--store", job.store, "--steps", 2, *told).refusal()
    assert re.search(message, refused)
    assert "export the store" in refused
    assert hoist(capfd, "train", "--store", job.store, "--steps", 2, *TRAINED).code == 0, "the same may be said again"


def test_a_pattern_that_matches_nothing_is_refused_before_anything_is_made(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = hoist(capfd, *job.arguments("--freeze", "*.layer.*")).refusal()
    assert refused.startswith("--freeze: '*.layer.*' matches no parameter of the model; ")
    assert not job.store.exists()


def test_patterns_come_from_a_file_too(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('model = "gpt2"\ntrain = ["*.h.1.*", "*ln_f*"]\nfreeze = "*.mlp.*"\n')
    options = TrainOptions.make(config=config, command_line={})
    assert (options.train, options.freeze) == (("*.h.1.*", "*ln_f*"), ("*.mlp.*",))


def test_from_python(job: Job) -> None:
    config = TrainerConfig(
        host_memory_bytes=2**24, micro_batch_size=2, seq_len=12, num_micro_batches=1,
        optimizer=AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        schedule=Schedule(kind="constant", lr=1e-2, num_steps=4),
    )  # fmt: skip
    with open_trainer(job.store, model=job.model, config=config, train=["*.layers.2.*"]) as trainer:
        first = trainer.step([batch_of()])
        trainer.commit()
    with open_trainer(job.store, config=config) as trainer:
        second = trainer.step([batch_of()])
    with open_trainer(job.store, config=config, train=["*.layers.2.*"]) as trainer:
        assert trainer.step([batch_of()]).loss == second.loss < first.loss
    with (
        pytest.raises(ConfigError, match="was made to train other parameters"),
        open_trainer(job.store, config=config, freeze=["*mlp*"]),
    ):
        pass
