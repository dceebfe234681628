"""ZeRO-Infinity's side of a comparison: python -m hoist.tools.bench.sides.deepspeed_side JOB RESULT

DeepSpeed's ZeRO-3 with parameters and optimizer on NVMe, on the processor, as a process of its own in an environment
that has torch, transformers, safetensors and deepspeed; of hoist it needs this folder alone. Its options are the
fields of :class:`Knobs`. Which of them are best is found by `sweeping.py`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hoist.tools.bench.sides import counters
from hoist.tools.bench.sides.job import Job, SideResult, Work, read_job, versions, write_result


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """What DeepSpeed can be told besides the work."""

    pipeline_read: bool = True
    """Read a sub-group's optimizer states while the one before is updated."""
    pipeline_write: bool = True
    """Write them while the next is updated."""
    sub_group_elements: int = 20_000_000
    """Parameters that are updated together."""
    prefetch_elements: int = 10_000_000
    """Parameters that are read ahead."""
    max_live_elements: int = 1_000_000_000
    """Parameters in memory at once, at most."""
    max_reuse_elements: int = 0
    """Parameters that are kept if they are used again within so many; more needs more buffers."""
    param_buffers: int = 12
    """Buffers that parameters are read into, each as large as the largest."""
    optimizer_buffers: int = 12
    """Buffers of a sub-group's size; four fail."""
    aio_block_bytes: int = 2**20
    """Of a request to the drive."""
    aio_queue_depth: int = 8
    """Requests in flight."""
    aio_single_submit: bool = False
    """Submit requests one by one."""
    aio_overlap_events: bool = True
    """Submit further requests before earlier ones have ended."""
    aio_threads: int = 1
    """Threads that submit."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> Knobs:
        """From a job. Raises ValueError for a name that is no knob."""
        unknown = options.keys() - {one.name for one in fields(cls)}
        if unknown:
            raise ValueError(f"no knobs of DeepSpeed's side: {', '.join(sorted(unknown))}")
        return cls(**options)

    def config(self, work: Work, directory: Path, largest_elements: int) -> dict[str, Any]:
        """DeepSpeed's configuration. ``largest_elements``: of the largest parameter."""
        return {
            "train_micro_batch_size_per_gpu": work.micro_batch_size,
            "gradient_accumulation_steps": work.num_micro_batches,
            "train_batch_size": work.micro_batch_size * work.num_micro_batches,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": work.lr, "betas": list(work.betas), "eps": work.eps, "weight_decay": work.weight_decay,
                },
            },
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": self.prefetch_elements,
                "stage3_max_live_parameters": self.max_live_elements,
                "stage3_max_reuse_distance": self.max_reuse_elements,
                "stage3_param_persistence_threshold": 0,
                "sub_group_size": self.sub_group_elements,
                "offload_param": {
                    "device": "nvme", "nvme_path": str(directory), "pin_memory": False,
                    "buffer_count": self.param_buffers, "buffer_size": largest_elements, "max_in_cpu": 0,
                },
                "offload_optimizer": {
                    "device": "nvme", "nvme_path": str(directory), "pin_memory": False,
                    "pipeline_read": self.pipeline_read, "pipeline_write": self.pipeline_write,
                    "buffer_count": self.optimizer_buffers,
                },
            },
            "aio": {
                "block_size": self.aio_block_bytes, "queue_depth": self.aio_queue_depth,
                "single_submit": self.aio_single_submit, "overlap_events": self.aio_overlap_events,
                "thread_count": self.aio_threads,
            },
            "bf16": {"enabled": False},
            "gradient_clipping": work.clip_norm,  # left out, it is 1
            "wall_clock_breakdown": False,
            "steps_per_print": 10**9,
        }  # fmt: skip


def _surroundings(work: Work) -> None:
    """What DeepSpeed reads when it is imported: the processor as accelerator, and a group of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0",
        WORLD_SIZE="1", OMP_NUM_THREADS=str(work.num_threads),
    )  # fmt: skip


def run(job: Job) -> SideResult:
    """Do the work. Raises what DeepSpeed raises."""
    work, folder = job.work, Path(job.directory)
    if work.dtype != "float32":
        raise ValueError("DeepSpeed's side computes in float32")
    _surroundings(work)
    import deepspeed
    import torch
    import torch._dynamo  # left to be imported inside zero.Init, it fails there
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    from hoist.tools.bench.sides.feeding import Windows, warm_up, weights_file
    from hoist.tools.bench.sides.sleeping import let_layers_sleep

    torch.set_num_threads(work.num_threads)
    windows = Windows(work)
    knobs = Knobs.of(job.options)
    deepspeed.init_distributed("gloo")
    baseline_bytes = warm_up()
    steps, losses = counters.Steps(), list[float]()
    with counters.PeakMemory() as memory, safe_open(str(weights_file(work)), framework="pt") as weights:
        names = set(weights.keys())
        shapes = {name: weights.get_slice(name).get_shape() for name in names}
        sizes = {name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}
        swap = folder / "swap"
        swap.mkdir()
        config = knobs.config(work, swap, -(-max(sizes.values()) // 512) * 512)
        # Its argument dtype=torch.float32 would make bfloat16 of a processor's parameters; the configuration does not.
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(work.model, local_files_only=True), attn_implementation="sdpa",
                dtype=torch.float32,
            )  # fmt: skip
            watch = None if work.sleep is None else let_layers_sleep(model, work.sleep, device=None)
        parameters = dict(model.named_parameters())
        if parameters.keys() - names:
            raise ValueError(f"{weights_file(work)}: lacks {', '.join(sorted(parameters.keys() - names)[:3])}")
        for name, parameter in parameters.items():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(weights.get_tensor(name))
        model.train()
        if work.activation_checkpointing:  # DeepSpeed's parameter swapper does not go with the other kind
            model.gradient_checkpointing_enable({"use_reentrant": True})
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        startup_seconds = counters.process_seconds()
        counters.drop_cache(counters.files_below(folder))
        for number in range(work.num_steps):
            batches = windows.step(number)
            with steps.measured():
                total = 0.0
                for ids in batches:
                    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
                    total += loss.item()
                    engine.backward(loss)
                    engine.step()
            losses.append(total / work.num_micro_batches)
        peak_bytes = memory.peak_bytes
        files = counters.files_below(folder)
        stored_bytes, cached_bytes = counters.stored_bytes(files), counters.cached_bytes(files)
        save_seconds, refused = _save(engine, folder / "checkpoint")
    num_elements = sum(sizes[name] for name in parameters)
    return SideResult(
        name="ZeRO-Infinity",
        work=_applied(work, engine, model, num_steps=engine.global_steps),
        options=job.options,
        versions=versions("deepspeed", "torch", "transformers", "numpy", "safetensors"),
        losses=losses,
        step_seconds=steps.seconds,
        read_bytes=steps.read_bytes,
        written_bytes=steps.written_bytes,
        # A master weight and two moments of each parameter, of four bytes, a step; of parameters themselves, those
        # of a small tensor stay in memory. Moments are made by the first step.
        least_read_bytes=12 * num_elements * (work.num_steps - 1),
        cached_bytes=cached_bytes,
        stored_bytes=stored_bytes,
        startup_seconds=startup_seconds,
        save_seconds=save_seconds,
        save_refused=refused,
        baseline_bytes=baseline_bytes,
        peak_bytes=peak_bytes,
        layer_calls=None if watch is None else watch.take().num_calls,
    )


def _save(engine: Any, directory: Path) -> tuple[float | None, str | None]:
    """Seconds until a checkpoint is durable; or None, and why there is none."""
    began = time.perf_counter()
    try:
        engine.save_checkpoint(str(directory))
        counters.make_durable(counters.files_below(directory))
    except Exception as error:  # what it raises depends on its version
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return time.perf_counter() - began, None


def _applied(work: Work, engine: Any, model: Any, *, num_steps: int) -> Work:
    """The work as DeepSpeed's own objects have it."""
    import torch

    groups = engine.optimizer.param_groups
    (group,) = groups
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    return replace(
        work,
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        num_micro_batches=engine.gradient_accumulation_steps(),
        num_steps=num_steps,
        lr=group["lr"],
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        clip_norm=engine.gradient_clipping(),
        dtype=" and ".join(sorted(dtypes)),
        activation_checkpointing=bool(model.is_gradient_checkpointing),
        num_threads=torch.get_num_threads(),
        attention=str(model.config._attn_implementation),
    )


if __name__ == "__main__":
    write_result(run(read_job(Path(sys.argv[1]))), Path(sys.argv[2]))
