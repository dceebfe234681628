"""FSDP2 with CPUOffloadPolicy, as one rank on the CPU: python -m hoist.tools.bench.sides.fsdp_side JOB RESULT

`fully_shard` per decoder layer, then the whole, over a mesh of one CPU with gloo: states in RAM, a layer's weights
gathered while it computes. The loop is `in_memory.py`'s.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import PreTrainedModel

from hoist.tools.bench.sides.in_memory import adamw, layers, main
from hoist.tools.bench.sides.job import Work


def prepare(model: PreTrainedModel, work: Work) -> torch.optim.Optimizer:
    """Shard over one rank. Gradients are reduced after every micro-batch: FSDP2 keeps no unsharded ones."""
    mesh = init_device_mesh("cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=False)  # nothing is copied to an accelerator
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return adamw(model, work)


@contextmanager
def one_rank() -> Iterator[None]:
    """A group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    with one_rank():
        main("fsdp2", prepare)
