"""The training loop of every side that is plain PyTorch with all states in RAM: load, step, note, save.

What such a side adds (how layers are wrapped, which optimizer) is in `torch_side.py`, `fsdp_side.py` and
`torchao_side.py`; what it is fed, in `feeding.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hoist.tools.bench.sides import counters
from hoist.tools.bench.sides.feeding import Windows, warm_up, weights_file
from hoist.tools.bench.sides.job import Job, SideResult, Work, read_job, versions, write_result
from hoist.tools.bench.sides.sleeping import Watch, let_layers_sleep

#: Makes a loaded model what the side trains, and its optimizer.
Prepare = Callable[[PreTrainedModel, Work], torch.optim.Optimizer]


def main(name: str, prepare: Prepare) -> None:
    """A side's program: ``JOB RESULT`` does a job; ``--probe`` trains a tiny model, and fails where the side would."""
    if sys.argv[1:] == ["--probe"]:
        probe(prepare)
    else:
        job, result = map(Path, sys.argv[1:])
        write_result(train(name, read_job(job), prepare), result)


def probe(prepare: Prepare) -> None:
    """Two steps of a tiny model. Raises what the side's library raises where it does not run."""
    work = Work(model="", tokens="", seq_len=4, micro_batch_size=1, num_micro_batches=2, num_steps=2)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64
    )
    model = LlamaForCausalLM(config)
    optimizer = prepare(model, work)
    ids = torch.zeros(work.micro_batch_size, work.seq_len, dtype=torch.int64)
    for _ in range(work.num_steps):
        one_step(model, optimizer, [ids] * work.num_micro_batches)


def train(name: str, job: Job, prepare: Prepare) -> SideResult:
    """Do the job's work in this process, which does nothing else. Raises what torch and the side's library raise."""
    work = job.work
    torch.set_num_threads(work.num_threads)
    windows = Windows(work)
    baseline_bytes = warm_up()
    steps, losses = counters.Steps(), list[float]()
    with counters.PeakMemory() as memory:
        model, watch = load(work)
        optimizer = prepare(model, work)
        startup_seconds = counters.process_seconds()
        for number in range(work.num_steps):
            batches = windows.step(number)
            with steps.measured():
                losses.append(one_step(model, optimizer, batches, clip_norm=work.clip_norm))
        peak_bytes = memory.peak_bytes
    layer_calls = None if watch is None else watch.take().num_calls
    return SideResult(
        name=name,
        work=_applied(work, model, optimizer),
        options=job.options,
        versions=versions("torch", "transformers", "numpy", "safetensors"),
        losses=losses,
        step_seconds=steps.seconds,
        read_bytes=steps.read_bytes,
        written_bytes=steps.written_bytes,
        cached_bytes=0,
        stored_bytes=0,
        startup_seconds=startup_seconds,
        save_seconds=save(model, optimizer, Path(job.directory)),
        baseline_bytes=baseline_bytes,
        peak_bytes=peak_bytes,
        trained_loss=loss_of(model, windows.step(0)),
        layer_calls=layer_calls,
    )


def load(work: Work) -> tuple[PreTrainedModel, Watch | None]:
    """The work's model with its first weights, in memory, in training mode; with checkpointing if the work wants it.

    Also what keeps its layers' time, where they sleep.
    """
    dtype = getattr(torch, work.dtype)
    config = AutoConfig.from_pretrained(work.model, local_files_only=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    watch = None if work.sleep is None else let_layers_sleep(model, work.sleep, device="cpu")
    missing, unknown = model.load_state_dict(load_file(weights_file(work)), strict=False)  # tied ones are in it once
    wrong = [*unknown, *(name for name, _ in model.named_parameters() if name in missing)]
    if wrong:
        raise ValueError(f"{weights_file(work)}: not this model's: {', '.join(wrong[:3])}")
    model.train()
    if work.activation_checkpointing:
        checkpoint_activations(model)
    return model, watch


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Have layers computed again in the backward."""
    # older transformers have it under a name that newer ones warn of
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers."""
    found = model.get_submodule("model.layers")
    if not isinstance(found, nn.ModuleList):
        raise TypeError(f"model.layers is a {type(found).__name__}")
    return list(found)


class Hyperparameters(Protocol):
    """AdamW's, as a work and hoist's own record have them."""

    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def adamw(model: PreTrainedModel, told: Hyperparameters) -> torch.optim.Optimizer:
    """torch's fused one over all parameters."""
    return torch.optim.AdamW(
        model.parameters(), lr=told.lr, betas=told.betas, eps=told.eps, weight_decay=told.weight_decay, fused=True
    )


def one_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: Sequence[Tensor], *, clip_norm: float = 0.0
) -> float:
    """Forward and backward of every micro-batch (int64 ids [B, S]), and the update.

    Returns the mean loss over the step's labels, added up in float32 in the order of the micro-batches, as hoist does.
    """
    num_items = sum(ids[:, 1:].numel() for ids in step)
    losses: list[Tensor] = []
    for ids in step:
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=num_items, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    if clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(torch.stack(losses).sum())


def loss_of(model: PreTrainedModel, step: Sequence[Tensor]) -> float:
    """The mean loss over a step's labels, without an update. The model is in evaluation mode afterwards."""
    num_items = sum(ids[:, 1:].numel() for ids in step)
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids, num_items_in_batch=num_items, use_cache=False).loss for ids in step]
    return float(torch.stack(losses).sum())


def save(model: PreTrainedModel, optimizer: torch.optim.Optimizer, directory: Path) -> float:
    """Write weights and moments below ``directory`` until they are durable. Returns the seconds that took."""
    began = time.perf_counter()
    whole: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        whole[name] = _own(parameter)
        whole |= {f"{name}.{key}": _own(value) for key, value in optimizer.state[parameter].items()}
    path = directory / "states.safetensors"
    save_file(whole, path)
    counters.make_durable([path, directory])
    return time.perf_counter() - began


def _own(value: Tensor) -> Tensor:
    """A tensor's own memory: that of the only rank, where it is distributed."""
    found: Tensor = (value.to_local() if hasattr(value, "to_local") else value).detach()
    return found


def _applied(work: Work, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Work:
    """The work as torch's own objects have it."""
    group = optimizer.param_groups[0]
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    return replace(
        work,
        lr=group["lr"],
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        dtype=" and ".join(sorted(dtypes)),
        activation_checkpointing=any(getattr(each, "gradient_checkpointing", False) for each in layers(model)),
        num_threads=torch.get_num_threads(),
        attention=str(model.config._attn_implementation),
    )
