"""How much memory the process really holds: anonymous and shared pages, as the promise of a budget counts them.

Page cache is not in it (direct I/O leaves none). Reads /proc of this process; Linux only, like the rest of the tiers.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from hoist.tiers import heap

#: Seconds between two samples of :class:`PeakSampler`.
SAMPLE_SECONDS = 0.02
_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Anonymous plus shared memory of this process now, in bytes (RssAnon + RssShmem of /proc/self/status)."""
    total = 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total


def warm_up() -> int:
    """Make what any run makes once (kernels' caches, thread pools), then return :func:`anonymous_bytes`: the baseline.

    A first matrix product, attention and AdamW on tiny tensors, forward and backward. torch's random state is kept.
    Also makes the heap's settings (`heap.py`), which the promise counts on.
    """
    heap.settle()
    with torch.random.fork_rng(devices=()):
        layer = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        hidden = layer(torch.zeros(2, 8, 64)).view(2, 8, 4, 16).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        nn.functional.cross_entropy(attended.reshape(-1, 64), torch.zeros(16, dtype=torch.int64)).backward()
        optimizer.step()
    return anonymous_bytes()


class PeakSampler:
    """Samples the process's memory from a thread and keeps the largest excess over a baseline. Close when done."""

    def __init__(self, baseline_bytes: int) -> None:
        #: What does not count.
        self.baseline_bytes = baseline_bytes
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="hoist-memory", daemon=True)
        self._thread.start()

    @property
    def peak_bytes(self) -> int:
        """Most bytes beyond the baseline that were seen, now included."""
        self._look()
        return self._peak_bytes

    def _look(self) -> None:
        self._peak_bytes = max(self._peak_bytes, anonymous_bytes() - self.baseline_bytes)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._look()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._stop.set()
        self._thread.join()
