"""Accelerators: on torch's own stand-in for streams on the CPU anywhere, and on a real one where there is one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hoist.tiers.device import AcceleratorDevice, Device, HereDevice
from hoist.tiers.device.accelerator import device_error
from hoist.tiers.errors import BudgetError, DeviceError, TransferError
from tests.support.buffers import empty_buffer
from tests.tiers.device.conformance import DeviceConformance

needs_gpu = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no GPU")


class Runtime:
    """Locks nothing, and notes what it was asked to; refuses what is bigger than a page."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if num_bytes > 4096:
            return 2
        assert address not in self.locked, "CUDA refuses that"
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}[code]


class OnCpu(AcceleratorDevice):
    """All of the accelerator's code but for what torch.cpu does not have."""

    is_separate = False

    def __init__(self, runtime: Runtime | None = None) -> None:
        self.runtime = runtime
        super().__init__("cpu")

    def owns(self, tensor: torch.Tensor) -> bool:
        return False

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def new_stream(self) -> Any:
        return torch.cpu.Stream()

    def _properties(self) -> Any:
        return SimpleNamespace(name="stand-in", total_memory=3 * 2**29)

    def _runtime(self) -> Any:
        return self.runtime


class TestOnCpuConforms(DeviceConformance):
    def make(self) -> Device:
        return OnCpu()


@pytest.fixture
def on_cpu() -> Iterator[OnCpu]:
    with closing(OnCpu(Runtime())) as device:
        yield device


def test_describe_names_memory_and_says_where_copies_are_slow(on_cpu: OnCpu) -> None:
    assert on_cpu.describe() == "cpu (stand-in, 1.5 GiB)"
    with closing(OnCpu()) as unpinned:
        assert unpinned.describe() == "cpu (stand-in, 1.5 GiB), copies are not from locked memory"


def test_what_is_locked_is_unlocked_once(on_cpu: OnCpu) -> None:
    runtime = on_cpu.runtime
    assert runtime is not None
    first, second = empty_buffer(4096), empty_buffer(4096)
    on_cpu.pin(first)
    on_cpu.pin(second)
    assert runtime.locked == {first.data_ptr(): 4096, second.data_ptr(): 4096}
    on_cpu.unpin(first)
    on_cpu.unpin(first)
    assert runtime.locked == {second.data_ptr(): 4096}
    on_cpu.close()
    assert not runtime.locked


def test_a_lost_device_is_closed_without_an_error_that_would_hide_the_first(
    on_cpu: OnCpu, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    region, runtime = empty_buffer(4096), on_cpu.runtime
    assert runtime is not None
    on_cpu.pin(region)
    on_cpu._module = SimpleNamespace(synchronize=lost, empty_cache=lost)
    on_cpu.give_back_free()
    on_cpu.close()
    assert not runtime.locked
    assert caplog.text.count("an illegal memory access") == 2


def test_a_driver_that_refuses_to_lock_is_quoted(on_cpu: OnCpu) -> None:
    with pytest.raises(BudgetError, match=r"cpu refused to lock 8192 bytes \(out of memory\); give a smaller"):
        on_cpu.pin(empty_buffer(8192))
    on_cpu.close()  # has nothing to unlock


def test_marks_of_another_device_are_waited_for(on_cpu: OnCpu) -> None:
    order: list[str] = []
    mark = HereDevice().stream("down").put(lambda: order.append("first"))
    on_cpu.stream("compute").put(lambda: order.append("second"), after=[mark]).wait()
    assert order == ["first", "second"]


def test_what_work_of_other_streams_uses_lives_until_its_mark_is_waited_for(on_cpu: OnCpu) -> None:
    """torch's allocator would give it to later kernels."""

    def mark_behind(stream: str) -> Any:
        return on_cpu.stream(stream).put(lambda: None)

    copied, computed = mark_behind("down"), mark_behind("compute")
    assert copied._keeps is not None
    assert computed._keeps is None
    copied.wait()
    assert copied._keeps is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79"),
            r"cuda:0: CUDA out of memory. Tried to allocate 2.00 GiB; give a smaller --micro-batch-size or --device-",
        ),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"),
            r"cuda:0 failed: CUDA error: an illegal memory access was encountered; .*last commit.*dmesg",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            r"cuda:0: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when .*; give a smaller --micro-batch-size or --device-",
        ),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), "cuda:0: CUDA error: out of memory; give"),
        (RuntimeError("CUDA error: unspecified launch failure"), "cuda:0 failed: CUDA error: unspecified launch"),
        (RuntimeError("HIP error: invalid device function"), "cuda:0 failed: HIP error: invalid device function"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "cuda:0 failed: cuDNN error"),
    ],
)
def test_errors_of_devices_are_said_in_one_line(on_cpu: OnCpu, error: RuntimeError, message: str) -> None:
    translated = device_error("cuda:0", error)
    assert translated is not None
    assert "\n" not in str(translated)
    with pytest.raises(DeviceError, match=message):
        raise translated

    def fail() -> None:
        raise error

    with pytest.raises(DeviceError, match="cpu"):
        on_cpu.stream("compute").put(fail)


def test_errors_of_others_stay_as_they_are(on_cpu: OnCpu) -> None:
    for error in (RuntimeError("shape [3] is invalid"), TransferError("a CUDA error"), DeviceError("cuda:0 failed: x")):
        assert device_error("cuda:0", error) is None

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            on_cpu.stream("compute").put(fail)
        assert caught.value is error


def test_a_device_that_is_not_there_cannot_be_made() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeviceError, match=r"cuda:0 cannot be used: .*; give another --device"):
        AcceleratorDevice("cuda:0")


def _filling(numbers: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        numbers.fill_(7)

    return work


def real_device() -> AcceleratorDevice:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return AcceleratorDevice(accelerator)


@pytest.mark.gpu
@needs_gpu
class TestAcceleratorConforms(DeviceConformance):
    def make(self) -> Device:
        return real_device()


@pytest.fixture
def device() -> Iterator[AcceleratorDevice]:
    with closing(real_device()) as device:
        yield device


@pytest.mark.gpu
@needs_gpu
class TestOnRealDevice:
    def test_put_does_not_wait(self, device: AcceleratorDevice) -> None:
        matrix = device.allocate(4 * 8192**2, "matrix").view(torch.float32).view(8192, 8192)

        def multiply() -> None:
            matrix.fill_(0.0)
            for _ in range(20):
                torch.mm(matrix, matrix)

        device.stream("compute").put(multiply).wait()  # the first time there is more to do
        mark = device.stream("compute").put(multiply)
        assert not mark.event.query()
        mark.wait()
        assert mark.event.query()

    def test_locked_memory_is_known_to_torch(self, device: AcceleratorDevice) -> None:
        if "not from locked memory" in device.describe():
            pytest.skip("nothing can be locked")
        region = empty_buffer(1 << 20)
        assert not region.is_pinned()
        device.pin(region)
        assert region.is_pinned()
        device.unpin(region)
        assert not region.is_pinned()

    def test_a_refused_lock_spoils_nothing_that_follows(self, device: AcceleratorDevice) -> None:
        if "not from locked memory" in device.describe():
            pytest.skip("nothing can be locked")
        region = empty_buffer(1 << 20)
        device.pin(region)
        with pytest.raises(BudgetError, match="refused to lock"):
            device.pin(region)
        numbers = device.allocate(64, "numbers")
        device.stream("compute").put(_filling(numbers)).wait()
        assert numbers.tolist() == [7] * 64

    def test_memory_that_there_is_not_is_refused(self, device: AcceleratorDevice) -> None:
        with pytest.raises(BudgetError, match=r"device memory: .* bytes for everything do not fit"):
            device.allocate(2**45, "everything")

    def test_a_work_that_finds_no_memory_says_what_to_lower(self, device: AcceleratorDevice) -> None:
        def take_too_much() -> None:
            torch.empty(2**45, dtype=torch.uint8, device=device.torch_device)

        with pytest.raises(DeviceError, match="--micro-batch-size"):
            device.stream("compute").put(take_too_much)
        device.stream("compute").put(lambda: None).wait()  # and the device is as well as before

    def test_a_kernel_that_fails_is_a_device_error_at_the_mark(self) -> None:
        """In a process of its own: its device is lost to it."""
        script = (
            "import torch; from hoist.tiers.device import AcceleratorDevice, list_devices\n"
            "device = AcceleratorDevice(list_devices()[0].name)\n"
            "table = torch.zeros(4, device=device.torch_device); index = torch.full((4,), 9, device=table.device)\n"
            "try: device.stream('compute').put(lambda: table[index].sum() and None).wait()\n"
            "except Exception as error: print(type(error).__name__, error)\n"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert run.stdout.startswith("DeviceError ")
        assert "last commit" in run.stdout
