"""The device of a machine without another one: the CPU, whose memory is the host's. Work is done when it is put."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hoist.tiers.device.base import Device, Mark, Stream, StreamWork


class _Reached(Mark):
    """A mark behind which nothing is left to do."""

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def wait(self) -> None:
        """Return at once."""


class _HereStream(Stream):
    """Does all work in the caller's thread."""

    def __init__(self, name: str) -> None:
        self.name = name

    def put(self, work: StreamWork, *, after: Sequence[Mark] = ()) -> Mark:
        for mark in after:
            mark.wait()
        work()
        return _Reached(self.name)


class HereDevice(Device):
    """The CPU. Its memory is the host tier's: budgets, pinning and peaks are not its business."""

    torch_device = torch.device("cpu")
    is_separate = False

    def stream(self, name: str) -> Stream:
        return _HereStream(name)

    def allocate(self, num_bytes: int, label: str) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def owns(self, tensor: torch.Tensor) -> bool:
        return False

    def pin(self, region: torch.Tensor) -> None:
        """Nothing: no copy goes anywhere else."""

    def unpin(self, region: torch.Tensor) -> None:
        """Nothing."""

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        """Nothing: the host tier's sampler measures."""

    def give_back_free(self) -> None:
        """Nothing: none is kept."""

    def describe(self) -> str:
        return "cpu"

    def finish(self) -> None:
        """Nothing is ever left."""

    def close(self) -> None:
        """Nothing to end."""
