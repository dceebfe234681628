"""A process that makes a store, trains, resumes and exports under a host-memory budget, and says what it used.

Run as `python -m tests.support.memory_run JSON`; prints one JSON object. With a control group in the JSON it joins it
before anything is imported, and limits it, once it is warm, to the promise. tests/test_memory_promise.py has the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the process does."""

    directory: str = ""
    """Where model, store and export go; made by the caller, who removes it."""
    hidden: int = 512
    layers: int = 6
    vocab: int = 2048
    budget_mib: int | None = None
    """The budget; None: the smallest that works."""
    rows: int = 1
    tokens: int = 64
    micro_batches: int = 4
    steps: int = 3
    resumed_steps: int = 0
    """Steps after the store has been closed and opened again."""
    export: bool = False
    delay: float = 0.0
    clip_norm: float = 0.0
    """Clipping is speculative, so that gradients wait beside updates that are made at once."""
    residency: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed with."""
    lora_rank: int = 0
    """Not 0: a model is made and exported in bfloat16, then adapters around that are trained."""
    group: str | None = None
    """Directory of a memory control group of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """What it used, in bytes."""

    budget: int
    states: int
    """Weights and moments of the model; with adapters, the base in bfloat16."""
    baseline: int
    """Anonymous and shared memory of the warm process: all imports, tiny products, nothing of the model."""
    allowed: int
    """1.1 times the budget and 32 MiB, the most beyond the baseline."""
    need: int
    """What the plan says that its buffers and workspace take."""
    kept: int
    """What of it stays in memory from step to step."""
    reported_peak: int
    """The largest ``host_peak_bytes`` of the metrics. A resumed trainer's baseline holds what kernels kept before."""
    losses: list[float]
    group_limit: int = 0
    group_peak: int = 0
    group_at_limit: int = 0
    """How often the group was at its limit, so that page cache had to go."""


class Group:
    """A memory control group of version 1 or 2, as files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._version_1 = (directory / "memory.limit_in_bytes").exists()

    def join(self) -> None:
        """Put this process in."""
        self._write("cgroup.procs", os.getpid())

    def working_set_bytes(self) -> int:
        """What is charged now, page cache that is not in use apart: it would only make the limit wider."""
        used = int(self._read("memory.usage_in_bytes" if self._version_1 else "memory.current"))
        numbers = dict(line.split() for line in self._read("memory.stat").splitlines())
        return used - int(numbers["inactive_file"])

    def limit(self, num_bytes: int) -> None:
        """Allow that much, without swap."""
        self._write("memory.limit_in_bytes" if self._version_1 else "memory.max", num_bytes)
        swap, value = ("memory.memsw.limit_in_bytes", num_bytes) if self._version_1 else ("memory.swap.max", 0)
        if (self._directory / swap).exists():
            self._write(swap, value)

    def peak_bytes(self) -> int:
        """Most that was charged."""
        return int(self._read("memory.max_usage_in_bytes" if self._version_1 else "memory.peak"))

    def times_at_limit(self) -> int:
        """How often the limit was met."""
        if self._version_1:
            return int(self._read("memory.failcnt"))
        return int(dict(line.split() for line in self._read("memory.events").splitlines())["max"])

    def _read(self, name: str) -> str:
        return (self._directory / name).read_text()

    def _write(self, name: str, value: int) -> None:
        (self._directory / name).write_text(f"{value}\n")


def main(task: Task) -> Used:
    """Carry out a task."""
    group = None if task.group is None else Group(Path(task.group))
    if group is not None:
        group.join()
    # Only now: what imports take belongs to the group too.
    import torch
    import torch._subclasses.fake_tensor
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hoist.optim.adamw import AdamWHyperparameters
    from hoist.optim.schedules import Schedule
    from hoist.scheduler.config import TrainerConfig
    from hoist.scheduler.memory import smallest
    from hoist.scheduler.models import build_model
    from hoist.scheduler.setup import lay_out_stages, prepare
    from hoist.scheduler.stages import split
    from hoist.tiers.footprint import warm_up
    from hoist.tiers.io.direct import DirectEngine
    from hoist.tools.export import export_store
    from hoist.tools.lora import add_adapters
    from hoist.tools.lora_options import LoraOptions
    from hoist.tools.opening import open_trainer

    model: Any = LlamaConfig(
        vocab_size=task.vocab,
        hidden_size=task.hidden,
        intermediate_size=task.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=task.layers,
        num_attention_heads=task.hidden // 64,
        tie_word_embeddings=False,
    )
    mapping: Any = AutoModelForCausalLM._model_mapping  # its module is imported on demand
    assert mapping[type(model)]
    lora = LoraOptions(r=task.lora_rank) if task.lora_rank else None
    if lora is not None:
        importlib.import_module("peft")
    baseline = warm_up()

    def config(budget: int) -> TrainerConfig:
        return TrainerConfig(
            host_memory_bytes=budget,
            dtype=task.dtype,
            micro_batch_size=task.rows,
            seq_len=task.tokens,
            num_micro_batches=task.micro_batches,
            optimizer=AdamWHyperparameters(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
            schedule=Schedule(kind="constant", lr=1e-4, num_steps=100),
            commit_every=2,
            delay=task.delay,
            clip_norm=task.clip_norm,
            clip_mode="speculative" if task.clip_norm else "exact",
            residency=task.residency,
            pin_trained=lora is not None,
        )

    directory = Path(task.directory)
    budget = (task.budget_mib or 0) * MIB
    if task.budget_mib is None:
        built = build_model(model, dtype=getattr(torch, task.dtype))
        if lora is not None:
            add_adapters(built, lora, base="")
        staged = split(built)
        budget = smallest(prepare(staged, lay_out_stages(staged), config(2**40)).memory.demand).need_bytes
        budget += lora is not None and MIB  # bfloat16 is laid out on pages of its own
        del built, staged
    allowed = budget * 11 // 10 + 32 * MIB
    limit = 0
    if group is not None:
        limit = group.working_set_bytes() + allowed
        group.limit(limit)
    model.save_pretrained(directory / "model")
    of_layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    parameters = task.layers * of_layer + 2 * task.vocab * model.hidden_size + model.hidden_size
    losses: list[float] = []
    reported = 0
    store, source = directory / "store", directory / "model"
    if lora is not None:
        with open_trainer(directory / "first", config=config(budget), model=source, io="direct", lora=lora):
            pass
        source = directory / "base"
        with DirectEngine() as engine:
            export_store(directory / "first", source, engine=engine, merge=True, dtype="bfloat16")
    for steps in (task.steps, task.resumed_steps):
        if not steps:
            continue
        with open_trainer(store, config=config(budget), model=source, io="direct", lora=lora) as trainer:
            for _ in range(steps):
                generator = torch.Generator().manual_seed(trainer.step_number)
                batches = []
                for _ in range(task.micro_batches):
                    ids = torch.randint(0, task.vocab, (task.rows, task.tokens), generator=generator)
                    batches.append({"input_ids": ids, "labels": ids})
                metrics = trainer.step(batches)
                losses.append(metrics.loss)
                reported = max(reported, metrics.host_peak_bytes)
            trainer.commit()
            need, kept = trainer.memory.need_bytes, trainer.memory.kept_bytes
    if task.export:
        with DirectEngine() as engine:
            export_store(store, directory / "export", engine=engine, merge=lora is not None)
    return Used(
        budget=budget,
        states=(12 if lora is None else 2) * parameters,
        baseline=baseline,
        allowed=allowed,
        need=need,
        kept=kept,
        reported_peak=reported,
        losses=losses,
        group_limit=limit,
        group_peak=0 if group is None else group.peak_bytes(),
        group_at_limit=0 if group is None else group.times_at_limit(),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(main(Task(**json.loads(sys.argv[1]))))))
