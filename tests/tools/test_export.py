"""`hoist export`: a directory that stands alone, whole or not there at all, also beside a run that goes on."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from hoist.tiers.errors import HoistError
from hoist.tiers.io.direct import DirectEngine
from hoist.tools.errors import ExportError, StoppedError
from hoist.tools.export import export_store
from hoist.tools.train import train
from tests.support.commands import Job, hoist, make_job, save_model, tree
from tests.support.reporters import Recorder
from tests.tools.test_import import load, logits, tensors_in

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def save_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of words with an added token and a chat template."""
    vocabulary = {"<unk>": 0, "</s>": 2, "one": 3, "two": 4, "three": 5}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = made(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job whose model has weights."""
    made = make_job(tmp_path)
    save_model(made.model, "llama")
    return made


def test_the_directory_stands_alone(job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = save_tokenizer(job.model)
    GenerationConfig(max_new_tokens=7, eos_token_id=2, temperature=0.25, do_sample=True).save_pretrained(job.model)
    text = tmp_path / "text.txt"
    text.write_text("one two three two <extra> one\n" * 100)
    assert hoist(capfd, *job.arguments(data=text, steps=1)).code == 0
    assert hoist(capfd, "export", job.store, tmp_path / "out", "--dtype", "bfloat16").code == 0
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    (tmp_path / "out").rename(moved)
    shutil.rmtree(job.model)
    shutil.rmtree(job.store)
    model = load(moved)
    assert model.dtype == torch.bfloat16
    assert json.loads((moved / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in tensors_in(moved).values()} == {torch.bfloat16}
    generation = model.generation_config
    assert generation is not None
    assert (generation.max_new_tokens, generation.temperature) == (7, 0.25)
    again = AutoTokenizer.from_pretrained(moved, local_files_only=True)
    sample = "three <extra> one nonsense"
    assert again(sample)["input_ids"] == tokenizer(sample)["input_ids"]
    messages = [{"role": "user", "content": "one two"}]
    assert again.apply_chat_template(messages, tokenize=False) == "<user>one two"
    assert not list(moved.glob("*.tmp"))


def test_shards(job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert hoist(capfd, *job.arguments(steps=0, data=None)).code == 0
    limit = 100_000
    summary = hoist(capfd, "export", job.store, tmp_path / "out", "--max-shard-size", f"{limit}B", "--json")
    assert summary.code == 0, summary.err
    said = json.loads(summary.out)
    shards = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    largest = max(value.numel() * 4 for value in tensors_in(tmp_path / "out").values())
    assert all(shard.stat().st_size <= max(limit, largest) + 4096 for shard in shards)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert said == {
        "directory": str(tmp_path / "out"),
        "step": 0,
        "tensors": len(index["weight_map"]),
        "bytes": index["metadata"]["total_size"],
    }
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(job.model)))


def test_initial_weights_depend_on_the_seed_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = {}
    for name, seed, budget in (("a", 0, "16MiB"), ("b", 0, "3MiB"), ("c", 1, "16MiB")):
        job = make_job(tmp_path)
        store = tmp_path / name
        assert hoist(capfd, *job.arguments(store=store, steps=0, seed=seed, host_memory=budget)).code == 0
        assert hoist(capfd, "export", store, tmp_path / f"{name}-model").code == 0
        results[name] = tensors_in(tmp_path / f"{name}-model")
        load(tmp_path / f"{name}-model")
    assert all(torch.equal(value, results["b"][name]) for name, value in results["a"].items())
    assert not all(torch.equal(value, results["c"][name]) for name, value in results["a"].items())


def test_beside_a_run(job: Job, tmp_path: Path) -> None:
    """A store that is being trained is exported as of its last commit."""
    exports: dict[str, Path] = {}

    def export(moment: str) -> None:
        if moment in ("step 6", "step 9"):
            target = tmp_path / moment
            with DirectEngine(num_threads=1) as engine:
                summary = export_store(job.store, target, engine=engine)
            # Step 3's commit is an op of step 4, which has ended when step 6 is computed; step 6's is one of step 7.
            assert summary.step == int(moment[-1]) - 3
            exports[moment] = target

    train(job.options(steps=9, commit_every=3), Recorder(at=export))
    first, second = (tensors_in(target) for target in exports.values())
    assert any(not torch.equal(value, second[name]) for name, value in first.items())


def test_a_commit_meanwhile_is_noticed(job: Job, tmp_path: Path) -> None:
    train(job.options(steps=1), Recorder())
    before = tree(tmp_path)

    def go_on(done: int, total: int) -> None:
        if done == total:
            train(job.options(steps=2), Recorder())

    with DirectEngine(num_threads=1) as engine, pytest.raises(ExportError, match="export again"):
        export_store(job.store, tmp_path / "out", engine=engine, progress=go_on)
    assert not (tmp_path / "out").exists()
    assert {path for path in tree(tmp_path) if "/store" not in path} == {
        path for path in before if "/store" not in path
    }


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), StoppedError(signal.SIGINT), KeyError()])
def test_a_failure_leaves_nothing(job: Job, tmp_path: Path, failure: Exception) -> None:
    train(job.options(steps=0), Recorder())
    before = tree(tmp_path)

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise failure

    with DirectEngine(num_threads=1) as engine, pytest.raises(type(failure)):
        export_store(job.store, tmp_path / "deep" / "out", engine=engine, progress=fail)
    assert tree(tmp_path) == before


def test_a_damaged_store_is_not_exported(job: Job, tmp_path: Path) -> None:
    train(job.options(steps=0), Recorder())
    chunk = next(path for path in sorted(job.store.rglob("weight_hi/c/0/0")))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    before = tree(tmp_path)
    with DirectEngine(num_threads=1) as engine, pytest.raises(HoistError, match="weight_hi"):
        export_store(job.store, tmp_path / "out", engine=engine)
    assert tree(tmp_path) == before
