"""Plain PyTorch with all states in RAM, and fused AdamW: python -m hoist.tools.bench.sides.torch_side JOB RESULT

The limit that a user would love, with activation checkpointing or without, as the work says. The loop is
`in_memory.py`'s.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hoist.tools.bench.sides.in_memory import adamw, main
from hoist.tools.bench.sides.job import Work


def prepare(model: PreTrainedModel, work: Work) -> torch.optim.Optimizer:
    """Nothing is wrapped."""
    return adamw(model, work)


if __name__ == "__main__":
    main("torch", prepare)
