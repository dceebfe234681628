"""A device that torch calls an accelerator (CUDA, ROCm, XPU): its streams are torch's, its marks are torch's events.

Written against the device's own torch module: the generic torch.Event ignores `blocking`, so that waiting for it takes
a whole processor. `choose.py` decides whether one is used; `pinning.py` knows the host's side of locked memory.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from hoist.tiers.device import pinning
from hoist.tiers.device.base import Device, Mark, Stream, StreamWork
from hoist.tiers.errors import BudgetError, DeviceError, HoistError

_log = logging.getLogger(__name__)

#: Kinds of devices whose driver can lock memory that it has not allocated: torch's name for CUDA and for ROCm.
_PINNING_KINDS = frozenset({"cuda"})
#: How errors of a driver begin that torch raises as plain RuntimeError.
_DRIVER_ERROR = re.compile(r"(CUDA|HIP|CUBLAS|CUDNN|ROCBLAS|HIPBLAS|MIOPEN|XPU|SYCL|Native API)\b.*(error|fail)", re.I)
#: What such an error says where there was no memory.
_NO_MEMORY = re.compile(r"out of memory|ALLOC_FAILED", re.I)


def device_error(name: str, error: BaseException) -> DeviceError | None:
    """What a user is told of an error that torch raised; None if it is none of the device's. One line."""
    if isinstance(error, HoistError):  # of a mark that was waited for, and some of them are RuntimeErrors, too
        return None
    first_line = _first_line(error)
    # Libraries and drivers allocate beside torch, and say so in errors of their own.
    is_driver_error = isinstance(error, torch.AcceleratorError) or _DRIVER_ERROR.match(first_line) is not None
    if isinstance(error, torch.OutOfMemoryError) or (is_driver_error and _NO_MEMORY.search(first_line)):
        # "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...": enough is enough.
        what = ". ".join(first_line.split(". ")[:2])
        return DeviceError(f"{name}: {what}; give a smaller --micro-batch-size or --device-memory")
    if is_driver_error:
        return DeviceError(
            f"{name} failed: {first_line}; the run goes on from its last commit when it is started again, "
            "and if this comes back, look for the driver's messages in dmesg"
        )
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(". ")


class EventMark(Mark):
    """An event behind what was put into a stream."""

    def __init__(self, device: AcceleratorDevice, stream: str, event: Any, keeps: StreamWork | None) -> None:
        self.stream = stream
        #: The torch module's event, recorded.
        self.event = event
        self.device = device
        #: What the work refers to, until it is known to have ended; see :meth:`AcceleratorStream.put`.
        self._keeps = keeps

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            self.device.fail(error)
        self._keeps = None


class AcceleratorStream(Stream):
    """A stream of the device. Work is called at once, by whoever puts it, and only starts what the device then does."""

    def __init__(self, device: AcceleratorDevice, name: str, stream: Any) -> None:
        self.name = name
        self._device = device
        #: The torch module's stream.
        self._stream = stream

    def put(self, work: StreamWork, *, after: Sequence[Mark] = ()) -> EventMark:
        """As the contract says; raises DeviceError where torch's error is one of the device.

        torch's allocator gives freed memory to later work of the stream that it was allocated for, which is
        ``compute``. So work of other streams must allocate nothing, and what it refers to is kept by the mark until
        that has been waited for.
        """
        try:
            with self._device.entered(self._stream):
                for mark in after:
                    if not isinstance(mark, EventMark) or mark.device is not self._device:
                        mark.wait()
                    elif mark.stream != self.name:
                        self._stream.wait_event(mark.event)
                work()
                event = self._device.new_event()
                event.record(self._stream)
        except RuntimeError as error:
            self._device.fail(error)
        return EventMark(self._device, self.name, event, None if self.name == "compute" else work)


class AcceleratorDevice(Device):
    """A device with memory of its own. None of its streams is torch's default one.

    Others may wait for that without being asked: kvikio's copies do, as CUDA orders what it calls blocking streams.
    Whatever computes must then be put into ``compute`` from its first use on: autograd adds gradients up in the stream
    in which it first met a weight.
    """

    is_separate = True
    counts_allocations = True

    def __init__(self, device: torch.device | str) -> None:
        """``device`` as torch names it, its index too if there are several. Raises DeviceError if it cannot be used."""
        device = torch.device(device)
        self._module: Any = torch.get_device_module(device)
        try:
            if device.type != "cpu" and ":" not in str(device):
                device = torch.device(device.type, self._module.current_device())
            self.torch_device = device
            self._name = str(self.torch_device)
            # The first use makes the context: what is wrong with the device shows here, and not within a step.
            torch.empty(0, device=self.torch_device)
            properties = self._properties()
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
            raise DeviceError(f"{device} cannot be used: {_first_line(error)}; give another --device") from error
        self._lock = threading.Lock()
        self._streams: dict[str, AcceleratorStream] = {}
        #: Regions that are locked: by address; kept, so that they are not unmapped while they are.
        self._pinned: dict[int, torch.Tensor] = {}
        self._node = pinning.numa_node(pinning.pci_address(properties))
        self._description = _describe(self._name, properties, self._node)
        self._closed = False

    def stream(self, name: str) -> AcceleratorStream:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = AcceleratorStream(self, name, self.new_stream())
            return self._streams[name]

    def allocate(self, num_bytes: int, label: str) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free_bytes, total_bytes = self._module.mem_get_info(self.torch_device)
            raise BudgetError(
                f"device memory: {num_bytes} bytes for {label} do not fit on {self._name}: {free_bytes} of "
                f"{total_bytes} bytes are free; give a smaller --device-memory, or end what else uses the device"
            ) from error
        except RuntimeError as error:
            self.fail(error)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    def pin(self, region: torch.Tensor) -> None:
        """Lock the pages, on the device's NUMA node where they have not been touched yet. See `pinning.py`.

        The region must be below 512 GiB, and no copy may begin in one region and end in the next.
        """
        runtime = self._runtime()
        if runtime is None or not region.numel():
            return
        pinning.check_lockable(region)
        with pinning.near_node(self._node):
            code = runtime.cudaHostRegister(region.data_ptr(), region.numel(), 0)
        if code != runtime.cudaError.success:
            self._forget_error()
            raise BudgetError(
                f"host memory: the driver of {self._name} refused to lock {region.numel()} bytes "
                f"({runtime.cudaGetErrorString(code)}); give a smaller --host-memory"
            )
        with self._lock:
            self._pinned[region.data_ptr()] = region

    def unpin(self, region: torch.Tensor) -> None:
        with self._lock:
            pinned = self._pinned.pop(region.data_ptr(), None)
        runtime = self._runtime()
        if pinned is None or runtime is None:
            return
        code = runtime.cudaHostUnregister(pinned.data_ptr())
        if code != runtime.cudaError.success:
            # Of a device that was lost; what is locked is let go with the process.
            self._forget_error()
            why = runtime.cudaGetErrorString(code)
            _log.warning("%s: unlocking %d bytes failed: %s", self._name, pinned.numel(), why)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        for generator in getattr(self._module, "default_generators", ()):
            if generator.device == self.torch_device:
                generator.manual_seed(seed)

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.torch_device)

    def give_back_free(self) -> None:
        empty_cache = getattr(self._module, "empty_cache", None)  # not every kind of device has one
        if empty_cache is None:
            return
        try:
            empty_cache()
        except RuntimeError as error:
            _log.warning("%s, while free memory was given back: %s", self._name, _first_line(error))

    def describe(self) -> str:
        if self._runtime() is None:
            return f"{self._description}, copies are not from locked memory"
        return self._description

    def close(self) -> None:
        """As the contract says. What fails is logged: an error here would hide the one that ended the run."""
        if self._closed:
            return
        self._closed = True
        self.finish()
        for region in list(self._pinned.values()):
            self.unpin(region)

    def finish(self) -> None:
        try:
            self._module.synchronize(self.torch_device)
        except RuntimeError as error:
            _log.warning("%s, while it was waited for: %s", self._name, _first_line(error))

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """Have the calling thread's kernels and copies go to a stream of the torch module, and to its device."""
        entered: AbstractContextManager[Any] = self._module.stream(stream)
        return entered

    def new_stream(self) -> Any:
        """A stream of the torch module, beside ``compute``."""
        return self._module.Stream(device=self.torch_device)

    def new_event(self) -> Any:
        """An event of the torch module that a thread can wait for without taking a processor, where that can be had."""
        return self._module.Event(blocking=True) if self.torch_device.type == "cuda" else self._module.Event()

    def fail(self, error: BaseException) -> NoReturn:
        """Raise an error of torch as DeviceError if it is the device's, else as it is."""
        translated = device_error(self._name, error)
        if translated is None:
            raise error
        raise translated from error

    def _runtime(self) -> Any:
        """The functions that lock memory, by their names in CUDA's runtime; None where torch offers none."""
        return self._module.cudart() if self.torch_device.type in _PINNING_KINDS else None

    def _properties(self) -> Any:
        """What torch tells about the device."""
        return self._module.get_device_properties(self.torch_device)

    def _forget_error(self) -> None:
        """Clear what a failed call of the runtime leaves behind: else the thread's next kernel would be blamed."""
        try:
            torch.ones(1, device=self.torch_device)
        except RuntimeError as error:
            _log.debug("%s: cleared: %s", self._name, error)


def _describe(name: str, properties: Any, node: int | None) -> str:
    where = "" if node is None else f", NUMA node {node}"
    return f"{name} ({properties.name}, {properties.total_memory / 2**30:.1f} GiB{where})"
