"""What every side feeds a step, and how it warms up: the same windows of the same ids, the same first tiny step.

Needs torch and numpy alone. What the numbers are compared for is `judging.py`'s business.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hoist.tools.bench.sides import counters
from hoist.tools.bench.sides.job import Work


class Windows:
    """The micro-batches of a work, step by step."""

    def __init__(self, work: Work) -> None:
        """Raises ValueError if there are too few ids."""
        self._work = work
        self._tokens = np.load(work.tokens, mmap_mode="r")
        needed = work.num_steps * work.num_micro_batches * work.micro_batch_size * work.seq_len
        if self._tokens.ndim != 1 or len(self._tokens) < needed:
            raise ValueError(f"{work.tokens}: shape {self._tokens.shape}, {needed} ids are needed")

    def step(self, number: int) -> list[Tensor]:
        """Ids of step ``number`` from 0, which are the labels, too: int64 [B, S] a micro-batch."""
        work = self._work
        found = []
        for micro_batch in range(work.num_micro_batches):
            first = (number * work.num_micro_batches + micro_batch) * work.micro_batch_size * work.seq_len
            ids = self._tokens[first : first + work.micro_batch_size * work.seq_len].astype(np.int64)
            found.append(torch.from_numpy(ids).view(work.micro_batch_size, work.seq_len))
        return found


def warm_up() -> int:
    """Make what any training makes once (kernels' caches, threads), then return the resident bytes: the baseline.

    torch's random state is kept.
    """
    with torch.random.fork_rng(devices=()):
        layer = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        hidden = layer(torch.zeros(2, 8, 64)).view(2, 8, 4, 16).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        nn.functional.cross_entropy(attended.reshape(-1, 64), torch.zeros(16, dtype=torch.int64)).backward()
        optimizer.step()
    return counters.resident_bytes()


def weights_file(work: Work) -> Path:
    """The checkpoint's one file."""
    return Path(work.model) / "model.safetensors"
