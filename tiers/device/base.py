"""The contract between the schedule and what computes: a device's memory, its streams, and marks as the only order.

Work that is put into a stream begins later, perhaps much later, and after what was put there before. Two streams have
no order but what marks give them. `here.py` is the machine's own CPU, `accelerator.py` what torch calls an accelerator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

#: What is put into a stream: it starts kernels and copies, and neither waits for them nor reads their results.
StreamWork = Callable[[], None]


class Mark(ABC):
    """A place in a stream: what was put there before it. Any thread may ask, any number of times."""

    #: Name of the stream that it lies in. Marks of one stream are reached in the order in which they were made.
    stream: str

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until everything before the mark has ended, its results visible to the host.

        Raises DeviceError (or whatever the work raised) if any of it failed; what it was to write is undefined then.
        """


class Stream(ABC):
    """An order of work on a device. Any thread may put work there, one at a time."""

    name: str

    @abstractmethod
    def put(self, work: StreamWork, *, after: Sequence[Mark] = ()) -> Mark:
        """Have ``work`` done after all that was put here before, and after ``after``; a mark behind it.

        ``work`` may be called at once, by the caller, or later, by another thread: it must only touch tensors that no
        other work touches at the same time, and its own. May raise what ``work`` raises; nothing was put there then
        that a later one relies on.
        """


class Device(ABC):
    """One device that computes. Close it after everything that uses its memory."""

    #: What tensors are made on.
    torch_device: torch.device
    #: Its memory is not the host's: what it computes with must be copied there, and has a budget of its own.
    is_separate: bool

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """The stream of that name, made when it is first asked for; ``compute`` is the one that kernels run in."""

    @abstractmethod
    def allocate(self, num_bytes: int, label: str) -> torch.Tensor:
        """Device memory, uint8 [num_bytes], aligned to at least 256 bytes, content undefined; freed with its last view.

        Raises BudgetError, naming ``label``, if there is not so much.
        """

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """The tensor lies in memory that the host cannot address (never, where the memory is the host's)."""

    @abstractmethod
    def pin(self, region: torch.Tensor) -> None:
        """Have the pages of a host region (uint8, page-aligned) locked, so that copies run beside computation.

        Until :meth:`unpin` or :meth:`close`. Nothing to do where the memory is the host's. Raises BudgetError if the
        system does not let so much be locked, with what to do.
        """

    @abstractmethod
    def unpin(self, region: torch.Tensor) -> None:
        """Undo :meth:`pin`; nothing may be in flight from or to the region. Idempotent."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the generator that kernels in ``compute`` draw from; to be called within work that is put there."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes that torch has had allocated there at once since :meth:`reset_peak`; 0 where it is the host's."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Count from now on."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until nothing is left in any stream, well or not. Raises nothing: who needs the work has its mark."""

    @abstractmethod
    def close(self) -> None:
        """Unpin everything, end threads. Work that is still in a stream is done first. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
