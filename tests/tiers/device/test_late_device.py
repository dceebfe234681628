"""The late device is a device, and hides no missing mark."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
import torch

from hoist.tiers.device import Device, HereDevice, Mark
from hoist.tiers.errors import BudgetError, DeviceError
from tests.support.buffers import empty_buffer
from tests.support.late_device import LateDevice
from tests.tiers.device.conformance import DeviceConformance

SEEDS = range(6)


class TestLateConforms(DeviceConformance):
    def make(self) -> Device:
        return LateDevice(seed=1)


class TestLateConformsWithPlacementChecked(DeviceConformance):
    def make(self) -> Device:
        return LateDevice(seed=2, checks_placement=True)


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with closing(LateDevice()) as device:
        yield device


def run_chain(seed: int, *, without: str = "") -> list[float]:
    """Rounds of up, compute, down through one buffer each; what came down. One kind of order is left out."""
    with closing(LateDevice(seed)) as device:
        up, compute, down = (device.stream(name) for name in ("up", "compute", "down"))
        weight, result = (device.allocate(4, label).view(torch.float32) for label in ("weight", "result"))
        targets = [torch.zeros(1) for _ in range(4)]
        computed: list[Mark] = []
        downloaded: list[Mark] = []

        def order(name: str, marks: Sequence[Mark]) -> Sequence[Mark]:
            return () if name == without else marks

        for index, target in enumerate(targets):
            source = torch.full((1,), float(index + 1))
            uploaded = [up.put(_copying(weight, source), after=order("weight is used", computed))]
            after = [*order("weight is there", uploaded), *order("result is used", downloaded)]
            computed = [compute.put(_adding(result, weight), after=after)]
            downloaded = [down.put(_copying(target, result), after=order("result is there", computed))]
        if without != "all is down":
            downloaded[0].wait()
        return [target.item() for target in targets]


def _copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    return lambda: _ignore(target.copy_(source))


def _adding(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    return lambda: _ignore(torch.add(source, 10, out=target))


def _ignore(result: torch.Tensor) -> None:
    """A lambda that gives nothing."""


def test_with_all_marks_every_order_gives_the_same() -> None:
    assert all(run_chain(seed) == [11, 12, 13, 14] for seed in SEEDS)


@pytest.mark.parametrize(
    "without", ["weight is there", "weight is used", "result is there", "result is used", "all is down"]
)
def test_each_missing_mark_shows_for_some_seed(without: str) -> None:
    assert any(run_chain(seed, without=without) != [11, 12, 13, 14] for seed in SEEDS)


def test_what_the_host_does_too_early_shows() -> None:
    """It overwrites a source before the copy that was put has ended."""
    seen = set()
    for seed in SEEDS:
        with closing(LateDevice(seed)) as device:
            target = device.allocate(4, "target").view(torch.float32)
            for _ in range(4):
                source = torch.ones(1)
                mark = device.stream("up").put(_copying(target, source))
                source.fill_(2)
                mark.wait()
                seen.add(target.item())
    assert 2.0 in seen


def test_new_memory_is_not_a_number(device: LateDevice) -> None:
    buffer = device.allocate(8192, "a buffer")
    assert not buffer.data_ptr() % 4096
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert buffer.view(dtype).isnan().all()


def test_capacity_counts_what_lives() -> None:
    with closing(LateDevice(capacity_bytes=10_000)) as device:
        keeps = device.allocate(6_000, "weights")
        with pytest.raises(BudgetError, match="4001 bytes for gradients do not fit: 6000 of 10000 bytes"):
            device.allocate(4_001, "gradients")
        view = device.allocate(4_000, "gradients").view(torch.float32)[5:]
        assert (device.allocated_bytes, device.peak_bytes()) == (10_000, 10_000)
        address = view.data_ptr()
        assert device.owns(view)
        del view
        assert (device.allocated_bytes, device.peak_bytes()) == (6_000, 10_000)
        assert address not in range(keeps.data_ptr(), keeps.data_ptr() + 6_000)
        device.reset_peak()
        assert device.peak_bytes() == 6_000


def test_after_a_failure_nothing_is_carried_out(device: LateDevice) -> None:
    done: list[str] = []

    def fail() -> None:
        raise ArithmeticError("as asked")

    device.stream("up").put(lambda: done.append("before")).wait()
    failed = device.stream("compute").put(fail)
    behind = device.stream("down").put(lambda: done.append("behind"), after=[failed])
    with pytest.raises(DeviceError, match=r"late device, order 0 failed earlier: ArithmeticError\('as asked'\)"):
        behind.wait()
    with pytest.raises(ArithmeticError, match="as asked"):
        failed.wait()
    with pytest.raises(DeviceError, match="failed earlier"):
        device.stream("up").put(lambda: done.append("later")).wait()
    assert done == ["before"]
    assert device.num_works == 1


def test_work_runs_as_the_creator_would_run_it(device: LateDevice) -> None:
    seen: list[tuple[int, bool, bool]] = []

    def look() -> None:
        seen.append((torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    with torch.no_grad():
        device.stream("compute").put(look).wait()
    assert seen == [(torch.get_num_threads(), True, False)]


def test_only_waits_that_hold_up_the_host_are_counted(device: LateDevice) -> None:
    mark = device.stream("compute").put(lambda: None)
    watcher = threading.Thread(target=mark.wait, name="hoist-wait-compute")
    watcher.start()
    watcher.join()
    assert device.num_waits == 0
    mark.wait()
    assert device.num_waits == 1


def test_close_ends_the_thread_and_refuses_more() -> None:
    before = threading.active_count()
    device = LateDevice()
    stream = device.stream("compute")
    device.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="is closed"):
        stream.put(lambda: None)


def test_misuse_is_not_let_pass(device: LateDevice) -> None:
    stranger = HereDevice().stream("up").put(lambda: None)
    with pytest.raises(AssertionError, match="another device's"):
        device.stream("compute").put(lambda: None, after=[stranger])
    with pytest.raises(AssertionError, match="within work"):
        device.seed(1)
    with pytest.raises(AssertionError, match="page-aligned"):
        device.pin(empty_buffer(4096, skew=256))
    with pytest.raises(AssertionError, match="needs no pinning"):
        device.pin(device.allocate(4096, "a buffer"))
    first = device.stream("compute").put(lambda: None)
    with pytest.raises(AssertionError, match="must not wait"):
        device.stream("compute").put(first.wait).wait()
