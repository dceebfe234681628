"""`hoist export`: a directory that stands alone, whole or not there at all, also beside a run that goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hoist.tiers.errors import HoistError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tools.errors import ExportError, StoppedError
from hoist.tools.export import export_store
from hoist.tools.train import train
from tests.support.commands import Job, hoist, make_job, save_model, tree
from tests.support.engines import WrapperEngine
from tests.support.processes import run_in_process
from tests.support.reporters import Recorder
from tests.tools.test_import import load, logits, round_trip, tensors_in

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
        "dtype": "float32",
        "verified": False,
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


def test_types_and_names_are_those_of_the_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Some tensors in float32 among bfloat16, one tensor for each expert: what others wrote is what others get."""
    source = tmp_path / "source"
    model = save_model(source, "mixtral", dtype=torch.bfloat16)
    config = json.loads((source / "config.json").read_text())
    expected = tensors_in(source)
    norms = [name for name in expected if "norm" in name]
    expected |= {name: expected[name].float() + 2.0**-20 for name in norms}
    save_file(expected, source / "model.safetensors", {"format": "pt"})
    assert any(".experts.3." in name for name in expected) and len(norms) > 3
    target = round_trip(source, tmp_path, capfd)
    written = tensors_in(target)
    assert written.keys() == expected.keys()
    differing = [name for name in expected if not same_tensor(written[name], expected[name])]
    assert not differing
    exported = json.loads((target / "config.json").read_text())
    assert exported["architectures"] == config["architectures"] == [type(model).__name__]
    assert exported["dtype"] == "bfloat16"
    load(target)
    capfd.readouterr()
    assert hoist(capfd, "export", tmp_path / "store", tmp_path / "half", "--dtype", "float16").code == 0
    assert {value.dtype for value in tensors_in(tmp_path / "half").values()} == {torch.float16}
    assert hoist(capfd, "export", tmp_path / "store", tmp_path / "x", "--dtype", "int8").refusal() == (
        "--dtype: 'int8' is not one of float32, bfloat16, float16"
    )


def same_tensor(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("chunk", [4096, 12288])
@pytest.mark.parametrize("tied", [False, True])
def test_odd_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str], chunk: int, tied: bool) -> None:
    """Every dimension is prime or odd, so nothing ends where a chunk, a page or a vector does."""
    sizes: dict[str, Any] = {
        "hidden_size": 93, "intermediate_size": 131, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 62
    }  # fmt: skip
    config: Any = LlamaConfig(vocab_size=503, num_hidden_layers=3, tie_word_embeddings=tied, **sizes)
    made: Any = LlamaForCausalLM(config)
    made.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    store = tmp_path / "store"
    arguments = Job.at(tmp_path).arguments(
        model=tmp_path / "source", steps=0, data=None, max_chunk_elements=chunk, micro_batch_size=1
    )
    assert hoist(capfd, *arguments).code == 0
    assert hoist(capfd, "export", store, tmp_path / "out", "--max-shard-size", "70001B", "--verify").code == 0
    written, expected = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "source")
    assert written.keys() == expected.keys()
    assert all(same_tensor(written[name], expected[name]) for name in expected)
    unique = sum(parameter.numel() for parameter in made.parameters())
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"] == {
        "total_size": 2 * unique
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    load(tmp_path / "out")


def test_every_small_file_goes_along_and_no_code_is_run(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["tokenizer.model", "vocab.bpe", "merges.txt", "chat_template.jinja", "qwen.tiktoken", "LICENSE",
             "special_tokens_map.json", "added_tokens.json", "preprocessor_config.json"]  # fmt: skip
    for name in names:
        (job.model / name).write_bytes(b"{}")
    (job.model / "modeling_own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    (job.model / "additional_chat_templates").mkdir()
    (job.model / "additional_chat_templates" / "tools.jinja").write_text(TEMPLATE)
    (job.model / "optimizer.pt").write_bytes(b"not a small file")
    config = json.loads((job.model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.OwnConfig"}
    (job.model / "config.json").write_text(json.dumps(config))
    assert hoist(capfd, *job.arguments(steps=0, data=None)).code == 0
    assert hoist(capfd, "export", job.store, tmp_path / "out").code == 0
    for name in (*names, "modeling_own.py", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (job.model / name).read_bytes(), name
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    assert not (tmp_path / "ran").exists()


class LyingEngine(WrapperEngine):
    """Flips a bit of the n-th write, as a drive may."""

    name = "lying"

    def __init__(self, inner: IoEngine, lie_at: int) -> None:
        super().__init__(inner)
        self._left = lie_at

    def write(self, path: Path, offset: int, buffer: Tensor) -> Future[None]:
        self._left -= 1
        if self._left == 0:
            buffer = buffer.clone()
            buffer[buffer.numel() // 2] ^= 1
        return super().write(path, offset, buffer)


def test_verify_finds_a_single_bit(job: Job, tmp_path: Path) -> None:
    train(job.options(steps=0), Recorder())
    before = tree(tmp_path)
    with LyingEngine(DirectEngine(num_threads=1), 1) as engine:
        export_store(job.store, tmp_path / "unseen", engine=engine)
    shutil.rmtree(tmp_path / "unseen")
    with (
        LyingEngine(DirectEngine(num_threads=1), 1) as engine,
        pytest.raises(ExportError, match=r"export: tensor '.*' reads back as .* at element \d+, expected "),
    ):
        export_store(job.store, tmp_path / "out", engine=engine, verify=True)
    assert tree(tmp_path) == before


def export_until_killed(store: Path, target: Path) -> None:
    """In a process of its own, which ends in the middle of it."""

    def die(done: int, total: int) -> None:
        if 2 * done > total:
            os.kill(os.getpid(), signal.SIGKILL)

    with DirectEngine(num_threads=1) as engine:
        export_store(store, target, engine=engine, progress=die)


def test_what_a_killed_export_left_goes_with_the_next(job: Job, tmp_path: Path) -> None:
    train(job.options(steps=0), Recorder())
    target = tmp_path / "out"
    code, _ = run_in_process(export_until_killed, job.store, target)
    assert code == -signal.SIGKILL
    left = list(tmp_path.glob(".out.*.tmp"))
    assert len(left) == 1 and not target.exists()
    others = [tmp_path / ".out.notes.tmp", tmp_path / ".out2.01234567.tmp"]
    for other in others:
        other.mkdir()
    beside: list[Path] = []

    def export_beside(done: int, total: int) -> None:
        if not beside:  # a living export to the same target is left alone
            beside.extend(tmp_path.glob(".out.*.tmp"))
            with DirectEngine(num_threads=1) as engine:
                export_store(job.store, target, engine=engine)

    with DirectEngine(num_threads=1) as engine, pytest.raises(ExportError, match="Directory not empty"):
        export_store(job.store, target, engine=engine, progress=export_beside)
    assert not left[0].exists() and beside != left
    assert sorted(tmp_path.glob(".out*")) == sorted(others)
    load(target)


class Watcher(Recorder):
    """Keeps every report of progress."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[tuple[str, int, int]] = []

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        self.reports.append((what, done, total))


def require_rising(reports: list[tuple[int, int]]) -> None:
    """Progress has one total, never goes back, and ends at it."""
    done = [part for part, _ in reports]
    assert done == sorted(done) and len(done) > 3
    assert {total for _, total in reports} == {done[-1]}


@pytest.mark.parametrize("verify", [False, True])
def test_progress_goes_to_the_end(job: Job, tmp_path: Path, verify: bool) -> None:
    watcher = Watcher()
    train(replace(job.options(steps=0), freeze=("*.layers.1.*",) if verify else ()), watcher)
    require_rising([(done, total) for what, done, total in watcher.reports if what == "writing weights"])
    reports: list[tuple[int, int]] = []
    with DirectEngine(num_threads=1) as engine:
        summary = export_store(
            job.store, tmp_path / "out", engine=engine, verify=verify,
            progress=lambda done, total: reports.append((done, total)),
        )  # fmt: skip
    require_rising(reports)
    assert reports[-1][1] == summary.num_bytes * (1 + verify)
