"""What the tests of the tools share: a direct engine and a page-aligned buffer."""

import signal
from collections.abc import Iterator

import pytest
import torch

from hoist.tiers.io.direct import DirectEngine

# A shell that starts the tests in the background lets them ignore Ctrl-C, and every process that they start with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def engine() -> Iterator[DirectEngine]:
    with DirectEngine(num_threads=2) as made:
        yield made


@pytest.fixture
def staging() -> torch.Tensor:
    """16 KiB, so that nearly every tensor needs several windows."""
    whole = torch.zeros(5 * 4096, dtype=torch.uint8)
    skip = -whole.data_ptr() % 4096
    return whole[skip : skip + 4 * 4096]
