"""A device with memory of its own whose streams run late and in an unlucky order; for tests of whatever uses one.

Its memory is poisoned host memory, its streams are run by one thread, in an order drawn from a seed: one stream is
starved until nothing else can run. A missing mark shows as wrong numbers. Ops out of order are `disorder.py`'s part.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hoist.tiers.device import Device, Mark, Stream
from hoist.tiers.device.accelerator import device_error
from hoist.tiers.device.base import StreamWork
from hoist.tiers.errors import BudgetError, DeviceError
from tests.support.buffers import PAGE_BYTES
from tests.support.placement import Placement

#: Memory that nothing was written to; not a number as float32, bfloat16 and float16.
POISON = 0xFF
#: Threads of these names wait for marks without holding up whoever puts work into streams.
WATCHER_PREFIX = "hoist-wait"
#: Six seeds in a row starve these in every order.
_ORDERS = tuple(itertools.permutations(("compute", "up", "down")))
#: Longest that an item waits for others that may overtake it (seconds). It decides only how unlucky the order is.
LATE_SECONDS = 0.002


def lost() -> torch.AcceleratorError:
    """What torch raises when a kernel has failed, and from then on whatever is asked of the device."""
    return torch.AcceleratorError(
        "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported at some other call"
    )


def out_of_memory() -> torch.OutOfMemoryError:
    """What torch raises when a kernel's memory cannot be had; the device goes on."""
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1.2 GiB is "
        "free. Process 7 has 77.9 GiB memory in use."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFault:
    """What befalls a work."""

    error: Callable[[], BaseException] = lost
    """What torch raises; the device translates it as a real one does."""
    when: Literal["put", "wait"] = "wait"
    """Raised to whoever puts the work, or to whoever waits for its mark. Not carried out in either case."""


#: Says what befalls a work that is put into the stream of a name, on the thread that puts it; None leaves it alone.
WorkRule = Callable[[str], DeviceFault | None]


class NthWork:
    """A rule: the ``number``-th work of a stream fails (from 1)."""

    def __init__(self, stream: str, number: int, fault: DeviceFault) -> None:
        self._stream = stream
        self._number = number
        self._fault = fault
        self._lock = threading.Lock()
        self._count = 0

    def __call__(self, stream: str) -> DeviceFault | None:
        if stream != self._stream:
            return None
        with self._lock:
            self._count += 1
            return self._fault if self._count == self._number else None


class LateMark(Mark):
    """A place in a stream of a :class:`LateDevice`."""

    def __init__(self, device: LateDevice, stream: str) -> None:
        self.stream = stream
        self._device = device
        self._reached = threading.Event()
        #: What :meth:`wait` raises; set before the mark is reached.
        self._error: BaseException | None = None

    @property
    def is_reached(self) -> bool:
        """What was put before the mark has ended, well or not."""
        return self._reached.is_set()

    def wait(self) -> None:
        self._device._count_wait()
        self._reached.wait()
        if self._error is not None:
            raise self._error

    def reach(self, error: BaseException | None) -> None:
        """For the device's thread: say that all before the mark has ended."""
        self._error = error
        self._reached.set()


class LateStream(Stream):
    """Keeps what is put until the device's thread comes to it."""

    def __init__(self, device: LateDevice, name: str, rank: float) -> None:
        self.name = name
        #: The higher, the longer it is starved.
        self.rank = rank
        self._device = device
        #: Work that has not begun, its marks to wait for and the mark behind it; changed under the device's lock.
        self.waiting: deque[tuple[StreamWork, tuple[LateMark, ...], LateMark]] = deque()

    def put(self, work: StreamWork, *, after: Sequence[Mark] = ()) -> LateMark:
        marks = []
        for mark in after:
            assert isinstance(mark, LateMark) and mark._device is self._device, f"{mark} is another device's"
            marks.append(mark)
        behind = LateMark(self._device, self.name)
        self._device._put(self, (self._device._spoiled(self.name, work), tuple(marks), behind))
        return behind


class LateDevice(Device):
    """Separate memory, late streams. Work runs with gradients on and the creator's number of torch threads.

    When a work has raised, its mark raises the same, or what an accelerator makes of it, and no later work is carried
    out: its marks raise DeviceError, as when a CUDA context is lost. What kernels allocate by themselves is ordinary
    memory, neither owned nor counted.
    """

    torch_device = torch.device("cpu")
    is_separate = True

    def __init__(
        self,
        seed: int = 0,
        capacity_bytes: int | None = None,
        *,
        late_seconds: float = LATE_SECONDS,
        checks_placement: bool = False,
        rule: WorkRule | None = None,
    ) -> None:
        """``rule`` says which works fail.

        ``late_seconds`` bounds how long an item waits to be overtaken; 0 runs what is there, still out of order.

        ``checks_placement``: work fails where it mixes memories in a way that a real device refuses; slower.
        """
        self.seed_of_order = seed
        self.capacity_bytes = capacity_bytes
        self._rule = rule
        #: Works that were put, by stream.
        self.num_put: Counter[str] = Counter()
        #: Regions that were pinned so far, those that are no more among them.
        self.num_pinned = 0
        #: Work that was carried out.
        self.num_works = 0
        #: Waits for marks by threads other than watchers: each holds up whoever puts work into streams.
        self.num_waits = 0
        #: Regions that are pinned now: address -> bytes.
        self.pinned: dict[int, int] = {}
        #: What lies in device memory; ``device.placement.on_host()`` watches the calling thread, too.
        self.placement = Placement(self.owns)
        self._within_work = self.placement.within_work if checks_placement else contextlib.nullcontext
        self._random = random.Random(seed)
        self._late_seconds = late_seconds
        self._num_threads = torch.get_num_threads()
        self._changed = threading.Condition()
        self._streams: dict[str, LateStream] = {}
        #: What ended the device.
        self._failure: BaseException | None = None
        self._closed = False
        #: A work is being carried out.
        self._is_working = False
        #: Reentrant: memory may be given back by a collection of garbage within a call.
        self._memory_lock = threading.RLock()
        #: Living allocations: first address -> bytes.
        self._allocations: dict[int, int] = {}
        self._allocated_bytes = 0
        self._peak_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"late-device-{seed}", daemon=True)
        self._thread.start()

    def stream(self, name: str) -> LateStream:
        with self._changed:
            if name not in self._streams:
                order = _ORDERS[self.seed_of_order % len(_ORDERS)]
                drawn = random.Random(f"{self.seed_of_order} {name}").uniform(0, len(order) - 1)
                self._streams[name] = LateStream(self, name, order.index(name) if name in order else drawn)
            return self._streams[name]

    def allocate(self, num_bytes: int, label: str) -> torch.Tensor:
        with self._memory_lock:
            if self.capacity_bytes is not None and self._allocated_bytes + num_bytes > self.capacity_bytes:
                raise BudgetError(
                    f"device memory: {num_bytes} bytes for {label} do not fit: {self._allocated_bytes} of "
                    f"{self.capacity_bytes} bytes are in use"
                )
            # An owner that torch's storage keeps alive, and that tells when the last view is gone.
            owner = np.full(num_bytes + PAGE_BYTES, POISON, dtype=np.uint8)
            start = -owner.ctypes.data % PAGE_BYTES
            address = owner.ctypes.data + start
            self._allocations[address] = num_bytes
            self._allocated_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
            weakref.finalize(owner, self._free, address).atexit = False
            return torch.from_numpy(owner[start : start + num_bytes])

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        with self._memory_lock:
            return any(first <= address < first + max(1, size) for first, size in self._allocations.items())

    def pin(self, region: torch.Tensor) -> None:
        assert region.dtype is torch.uint8 and not region.data_ptr() % PAGE_BYTES, "not page-aligned bytes"
        assert not self.owns(region), "device memory needs no pinning"
        self.pinned[region.data_ptr()] = region.numel()
        self.num_pinned += 1

    def unpin(self, region: torch.Tensor) -> None:
        self.pinned.pop(region.data_ptr(), None)

    def seed(self, seed: int) -> None:
        assert threading.current_thread() is self._thread, "seed() is to be called within work"
        torch.default_generator.manual_seed(seed)

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reset_peak(self) -> None:
        with self._memory_lock:
            self._peak_bytes = self._allocated_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now."""
        return self._allocated_bytes

    def give_back_free(self) -> None:
        """Nothing: none is kept."""

    def describe(self) -> str:
        return f"late device, order {self.seed_of_order}"

    def finish(self) -> None:
        with self._changed:
            self._changed.wait_for(self._is_idle)

    def _is_idle(self) -> bool:
        return not self._is_working and not any(stream.waiting for stream in self._streams.values())

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._failure = None  # its traceback has frames with tensors
        self.pinned.clear()

    def _free(self, address: int) -> None:
        with self._memory_lock:
            self._allocated_bytes -= self._allocations.pop(address)

    def _count_wait(self) -> None:
        thread = threading.current_thread()
        assert thread is not self._thread, "work must not wait for a mark"
        if not thread.name.startswith(WATCHER_PREFIX):
            with self._changed:
                self.num_waits += 1

    def _put(self, stream: LateStream, item: tuple[StreamWork, tuple[LateMark, ...], LateMark]) -> None:
        with self._changed:
            if self._closed:
                raise ValueError(f"{self.describe()} is closed")
            stream.waiting.append(item)
            self._changed.notify_all()

    def _spoiled(self, stream: str, work: StreamWork) -> StreamWork:
        """The work, or what fails in its place. Raises what befalls a work when it is put."""
        with self._changed:
            self.num_put[stream] += 1
            if self._failure is not None and isinstance(self._failure.__cause__, torch.AcceleratorError):
                raise DeviceError(str(self._failure))  # as whatever is asked of a device that was lost
        fault = None if self._rule is None else self._rule(stream)
        if fault is None:
            return work
        error = self._translated(fault.error())
        if fault.when == "put":
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                with self._changed:
                    self._failure = self._failure or error
            raise error

        def fail() -> None:
            raise error

        return fail

    def _translated(self, error: BaseException) -> BaseException:
        """What an accelerator raises in the place of an error of torch."""
        translated = device_error(self.describe(), error)
        if translated is None:
            return error
        translated.__cause__ = error
        return translated

    def _ready(self) -> list[LateStream]:
        """Streams whose next work may begin."""
        return [
            stream
            for stream in self._streams.values()
            if stream.waiting and all(mark.is_reached for mark in stream.waiting[0][1])
        ]

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while True:
            with self._changed:
                # Work's marks to wait for are older than itself, so that something is ready whenever any is waiting.
                self._changed.wait_for(lambda: self._closed or self._ready())
                if not self._ready():
                    return
                self._be_late()
                stream = self._choose(self._ready())
                work, _, mark = stream.waiting.popleft()
                self._is_working = True
            error: BaseException | None = None
            if self._failure is not None:
                error = DeviceError(f"{self.describe()} failed earlier: {self._failure!r}")
            else:
                try:
                    with self._within_work():
                        work()
                except BaseException as raised:
                    error = self._failure = self._translated(raised)
                else:
                    self.num_works += 1
            del work  # what it holds is freed now, not when the next comes
            mark.reach(error)
            with self._changed:
                self._is_working = False
                self._changed.notify_all()

    def _be_late(self) -> None:
        """Give others the chance to overtake what could begin now: their work, and what the host does meanwhile."""
        rank = min(stream.rank for stream in self._ready())
        is_starved = rank >= len(_ORDERS[0]) - 1
        seconds = self._late_seconds * self._random.choice((0.0, 0.25, 1.0) if is_starved else (0.0, 0.0, 0.0, 0.25))
        if seconds and not self._closed:
            # Not a sleep that a result depends on.
            self._changed.wait_for(
                lambda: self._closed or min(stream.rank for stream in self._ready()) < rank, timeout=seconds
            )

    def _choose(self, ready: list[LateStream]) -> LateStream:
        if self._random.random() < 0.1:
            return self._random.choice(ready)
        return min(ready, key=lambda stream: stream.rank)
