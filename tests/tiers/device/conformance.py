"""What every device must do; each device's test module subclasses this and says how to make one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import pytest
import torch

from hoist.tiers.device import Device, Mark
from tests.support.buffers import empty_buffer

NUM_ELEMENTS = 1024


class DeviceConformance(ABC):
    """Subclass it, name the class ``Test...``."""

    @abstractmethod
    def make(self) -> Device:
        """A new device; the fixture closes it."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.make()
        try:
            yield device
        finally:
            device.close()

    def test_work_of_a_stream_is_done_in_order_and_ends_before_its_mark(self, device: Device) -> None:
        numbers = _floats(device, "numbers")
        stream = device.stream("compute")
        stream.put(lambda: _set(numbers, 0.0))
        marks = [stream.put(_multiply_and_add(numbers, addend)) for addend in range(8)]
        marks[-1].wait()
        expected = 0
        for addend in range(8):
            expected = expected * 2 + addend
        assert numbers.tolist() == [expected] * NUM_ELEMENTS
        for mark in marks:  # an earlier one, and again
            mark.wait()
            assert mark.stream == "compute"

    def test_marks_order_streams(self, device: Device) -> None:
        """Up, compute, down, with one buffer each that every round uses again."""
        up, compute, down = (device.stream(name) for name in ("up", "compute", "down"))
        weights, results = _floats(device, "weights"), _floats(device, "results")
        sources = [torch.full((NUM_ELEMENTS,), float(index)) for index in range(6)]
        targets = [torch.full((NUM_ELEMENTS,), -1.0) for _ in sources]
        computed: list[Mark] = []
        downloaded: list[Mark] = []
        for source, target in zip(sources, targets, strict=True):
            uploaded = up.put(_copy(weights, source), after=computed)
            computed = [compute.put(_square(results, weights), after=[uploaded, *downloaded])]
            downloaded = [down.put(_copy(target, results), after=computed)]
        downloaded[0].wait()
        assert [target.tolist() for target in targets] == [[index**2] * NUM_ELEMENTS for index in range(6)]

    def test_a_stream_is_the_same_by_its_name(self, device: Device) -> None:
        numbers = _floats(device, "numbers")
        device.stream("other").put(lambda: _set(numbers, 1.0))
        device.stream("other").put(_multiply_and_add(numbers, 3)).wait()
        assert numbers.tolist() == [5.0] * NUM_ELEMENTS
        assert device.stream("other").name == "other"

    def test_work_may_be_a_forward_and_a_backward(self, device: Device) -> None:
        weights = _floats(device, "weights")
        gradient = _floats(device, "gradient")

        def train() -> None:
            _set(weights, 3.0)
            leaf = weights.detach().requires_grad_()
            (leaf**2).sum().backward()
            assert leaf.grad is not None
            gradient.copy_(leaf.grad)

        device.stream("compute").put(train).wait()
        assert gradient.tolist() == [6.0] * NUM_ELEMENTS

    def test_several_threads_put_and_wait(self, device: Device) -> None:
        buffers = [_floats(device, f"buffer {index}") for index in range(4)]
        errors: list[BaseException] = []

        def use(index: int) -> None:
            try:
                device.stream("compute").put(lambda: _set(buffers[index], float(index))).wait()
                device.stream(f"own {index}").put(_multiply_and_add(buffers[index], 1)).wait()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert [buffer[0].item() for buffer in buffers] == [1.0, 3.0, 5.0, 7.0]

    def test_what_work_raises_reaches_whoever_puts_or_waits(self, device: Device) -> None:
        def fail() -> None:
            raise ArithmeticError("as asked")

        with pytest.raises(ArithmeticError, match="as asked"):
            device.stream("compute").put(fail).wait()

    def test_memory_is_aligned_and_as_big_as_asked(self, device: Device) -> None:
        for num_bytes in (1, 4096, 5000):
            buffer = device.allocate(num_bytes, "a buffer")
            assert buffer.shape == (num_bytes,)
            assert buffer.dtype is torch.uint8
            assert buffer.device.type == device.torch_device.type
            assert not buffer.data_ptr() % 256 or not device.is_separate
            assert device.owns(buffer) is device.is_separate
            assert device.owns(buffer[num_bytes // 2 :]) is device.is_separate
        assert not device.owns(empty_buffer(4096))

    def test_peak_is_of_what_was_there_at_once_since_the_reset(self, device: Device) -> None:
        if not device.is_separate:
            device.reset_peak()
            assert device.peak_bytes() == 0
            return
        keeps = device.allocate(1 << 20, "keeps")
        device.reset_peak()
        before = device.peak_bytes()
        assert before >= keeps.numel()
        for _ in range(3):
            view = device.allocate(1 << 20, "one at a time")[:16]
            assert device.peak_bytes() == before + (1 << 20)
            del view
        device.reset_peak()
        assert device.peak_bytes() == before

    def test_the_same_seed_gives_the_same_draws(self, device: Device) -> None:
        draws = [_floats(device, "draws") for _ in range(3)]

        def draw(into: torch.Tensor, seed: int) -> Callable[[], None]:
            def work() -> None:
                device.seed(seed)
                into.uniform_()

            return work

        for into, seed in zip(draws, (1, 1, 2), strict=True):
            last = device.stream("compute").put(draw(into, seed))
        last.wait()
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])

    def test_regions_can_be_pinned_and_unpinned_again(self, device: Device) -> None:
        region = empty_buffer(1 << 16)
        device.pin(region)
        device.unpin(region)
        device.unpin(region)
        device.pin(region)  # and what is left, close() unpins

    def test_describe_is_one_line(self, device: Device) -> None:
        assert device.describe()
        assert "\n" not in device.describe()

    def test_close_does_the_work_first_and_may_be_called_again(self) -> None:
        device = self.make()
        target = torch.zeros(NUM_ELEMENTS)
        source = _floats(device, "source")
        written = device.stream("compute").put(lambda: _set(source, 2.0))
        device.stream("down").put(_copy(target, source), after=[written])
        device.close()
        device.close()
        assert target.tolist() == [2.0] * NUM_ELEMENTS


def _floats(device: Device, label: str) -> torch.Tensor:
    return device.allocate(4 * NUM_ELEMENTS, label).view(torch.float32)


def _set(numbers: torch.Tensor, value: float) -> None:
    numbers.fill_(value)


def _multiply_and_add(numbers: torch.Tensor, addend: int) -> Callable[[], None]:
    def work() -> None:
        numbers.mul_(2).add_(addend)

    return work


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        target.copy_(source, non_blocking=True)

    return work


def _square(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        torch.mul(source, source, out=target)

    return work
