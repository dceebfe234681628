"""Which device is meant on which machine, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hoist.tiers.device import HereDevice, choose_device, list_devices
from hoist.tiers.device.choose import Machine, _capability, look_at_machine, resolve
from hoist.tiers.errors import RefusalError

CPU_BUILD = Machine(torch_version="2.13.0+cpu", built_for=None, models=())
CPU_BUILD_ON_GPU = Machine(torch_version="2.13.0+cpu", built_for=None, models=(), drivers=("NVIDIA",))
CUDA_BUILD = Machine(torch_version="2.13.0+cu130", built_for="cuda", models=())
TWO_GPUS = Machine(torch_version="2.13.0+cu130", built_for="cuda", models=("H200", "L4"))
ARC = Machine(torch_version="2.13.0+xpu", built_for="xpu", models=("Arc B580",))
MAC = Machine(torch_version="2.13.0", built_for="mps", models=("Apple M4",))


@pytest.mark.parametrize(
    ("name", "machine", "chosen"),
    [
        ("auto", CPU_BUILD, "cpu"),
        ("auto", CPU_BUILD_ON_GPU, "cpu"),
        ("auto", CUDA_BUILD, "cpu"),
        ("auto", TWO_GPUS, "cuda:0"),
        ("auto", ARC, "xpu:0"),
        ("auto", MAC, "cpu"),
        ("cpu", TWO_GPUS, "cpu"),
        ("cuda", TWO_GPUS, "cuda:0"),
        ("cuda:1", TWO_GPUS, "cuda:1"),
        ("xpu:0", ARC, "xpu:0"),
    ],
)
def test_what_is_meant(name: str, machine: Machine, chosen: str) -> None:
    assert resolve(name, machine) == chosen


@pytest.mark.parametrize(
    ("name", "machine", "message"),
    [
        ("gpu", CPU_BUILD, "--device: got 'gpu', must be auto or cpu"),
        ("cuda:one", TWO_GPUS, r"got 'cuda:one', must be auto or cpu or cuda:0 \(H200\) or cuda:1 \(L4\)"),
        ("cuda:2", TWO_GPUS, r"--device cuda:2: there is none of that number; give cpu or cuda:0 \(H200\) or cuda:1"),
        ("cuda", CPU_BUILD, r"--device cuda: this torch build \(2.13.0\+cpu\) has no CUDA: install one .* or give cpu"),
        ("cuda", CPU_BUILD_ON_GPU, "has no CUDA, though a driver of NVIDIA is loaded: install one that has"),
        ("cuda", CUDA_BUILD, r"torch \(2.13.0\+cu130\) finds no such device: .*CUDA_VISIBLE_DEVICES"),
        ("xpu", TWO_GPUS, r"this torch build \(2.13.0\+cu130\) has no XPU"),
        ("mps", MAC, "--device mps: its memory is the host's"),
    ],
)
def test_what_there_is_not_is_refused(name: str, machine: Machine, message: str) -> None:
    with pytest.raises(RefusalError, match=message) as caught:
        resolve(name, machine)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_the_machine_is_looked_at(tmp_path: Path) -> None:
    assert look_at_machine(tmp_path).drivers == ()
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.touch()
    machine = look_at_machine(tmp_path)
    assert machine.drivers == ("NVIDIA",)
    assert machine.torch_version == torch.__version__
    assert len(machine.models) == len(list_devices()) == torch.accelerator.device_count()


def test_the_cpu_can_be_asked_for_and_is_taken_without_an_accelerator() -> None:
    assert isinstance(choose_device("cpu"), HereDevice)
    if not torch.accelerator.is_available():
        assert isinstance(choose_device(), HereDevice)


def test_capability_is_what_torch_tells() -> None:
    assert _capability(SimpleNamespace(major=9, minor=0, gcnArchName="NVIDIA H200")) == "9.0"
    assert _capability(SimpleNamespace(name="Arc")) == ""
