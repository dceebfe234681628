"""Memory that a real device could not use is found on the fake one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from torch import nn

from tests.support.late_device import LateDevice
from tests.support.placement import MisplacedError


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with closing(LateDevice(checks_placement=True, late_seconds=0)) as device:
        yield device


def weights_of(device: LateDevice) -> torch.Tensor:
    return device.allocate(4 * 16, "weights").view(torch.float32).view(4, 4)


def run(device: LateDevice, work: Callable[[], object]) -> None:
    def whole() -> None:
        work()

    device.stream("compute").put(whole).wait()


def test_a_whole_training_of_device_memory_is_let_pass(device: LateDevice) -> None:
    weights, gradient = weights_of(device), weights_of(device)
    tokens = torch.tensor([[1, 2, 3]])
    uploaded = device.allocate(24, "tokens").view(torch.int64).view(1, 3)

    def train() -> None:
        uploaded.copy_(tokens)
        weights.copy_(torch.ones(4, 4))
        weight = nn.Parameter(weights)
        positions = torch.arange(3, device=uploaded.device)
        hidden = nn.functional.embedding(uploaded, weight) + positions[:, None]
        mask = torch.full((3, 3), float("-inf"), device=hidden.device).triu(1)
        out = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)
        loss = nn.functional.cross_entropy(out.flatten(0, 1), uploaded.flatten()) * 0.5
        loss.backward()
        assert weight.grad is not None
        gradient.copy_(weight.grad)

    run(device, train)
    assert gradient.isfinite().all()


def test_what_one_work_made_the_next_may_use(device: LateDevice) -> None:
    weights = weights_of(device)
    kept: list[torch.Tensor] = []
    run(device, lambda: kept.extend((weights * 2, torch.tensor([1.0, 2, 3, 4], device=device.torch_device))))
    run(device, lambda: weights.add_(kept[0]).add_(kept[1]))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.ones(4, 4), id="made without a device"),
        pytest.param(lambda: torch.ones(4, 4) * 2, id="computed on the host"),
        pytest.param(lambda: torch.ones(4, 4, device="cpu").cpu(), id="brought to the host"),
    ],
)
def test_host_memory_made_within_work_is_found(device: LateDevice, make: Callable[[], torch.Tensor]) -> None:
    weights = weights_of(device)
    with pytest.raises(MisplacedError, match=r"aten.mul.Tensor: memories are mixed: device \[4, 4\], HOST \[4, 4\]"):
        run(device, lambda: weights * make())


def test_host_memory_from_outside_is_found_unless_it_is_moved(device: LateDevice) -> None:
    weights, host = weights_of(device), torch.ones(4, 4)
    run(device, lambda: weights * host.to(device.torch_device))
    run(device, lambda: weights * host.to(device.torch_device, torch.float64))
    run(device, lambda: weights * torch.tensor(2.0))  # a number may stand beside
    run(device, lambda: weights[torch.tensor([0, 1])])  # and so may an index
    with pytest.raises(MisplacedError, match="memories are mixed"):
        run(device, lambda: weights * host.to(torch.float64))


def test_host_memory_is_found_in_a_backward(device: LateDevice) -> None:
    weights, host = weights_of(device), torch.ones(4, 4)

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, given: torch.Tensor) -> torch.Tensor:
            return given * 2

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * host

    def train() -> None:
        leaf = weights.detach().requires_grad_()
        result: torch.Tensor = Doubles.apply(leaf)  # type: ignore[no-untyped-call]
        result.sum().backward()

    with pytest.raises(MisplacedError, match="memories are mixed"):
        run(device, train)


def test_the_host_may_view_device_memory_and_nothing_else(device: LateDevice) -> None:
    weights, made = weights_of(device), list[torch.Tensor]()
    run(device, lambda: made.append(weights + 1))
    host = torch.ones(4)
    with device.placement.on_host():
        row = weights.view(-1)[:4].detach()
        host.add_(1)
        for touch in (lambda: row.sum(), lambda: host.copy_(row), lambda: made[0].zero_(), lambda: row[0].item()):
            with pytest.raises(MisplacedError, match="the host touches device memory"):
                touch()
