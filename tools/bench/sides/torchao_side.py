"""PyTorch with torchao's CPUOffloadOptimizer: python -m hoist.tools.bench.sides.torchao_side JOB RESULT

Weights stay where the model is, weights' copies, gradients and moments are in pinned RAM. torchao is no requirement of
hoist, and says itself where it runs. The loop is `in_memory.py`'s.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hoist.tools.bench.sides.in_memory import main
from hoist.tools.bench.sides.job import Work


def prepare(model: PreTrainedModel, work: Work) -> torch.optim.Optimizer:
    """Raises what torchao raises where it is not installed, or does not run."""
    from torchao.optim import CPUOffloadOptimizer

    found: torch.optim.Optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW,
        lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay, fused=True,
    )  # fmt: skip
    return found


if __name__ == "__main__":
    main("torchao", prepare)
