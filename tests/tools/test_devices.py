"""What `hoist train` and Python are told of devices and compiled layers, and what they say; all of it on the CPU.

Which devices there are, and what is said of one that is not there, is tested with `hoist.tiers.device`.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hoist.optim import Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.errors import ConfigError
from hoist.tiers.device import HereDevice
from hoist.tools import devices
from hoist.tools.forecasting import NO_DEVICE_PREDICTION, by_kind
from hoist.tools.opening import open_trainer
from hoist.tools.preflight_view import lines
from hoist.tools.preparing import DEVICE_KEY, _resolved
from hoist.tools.show import Display
from hoist.tools.sizes import show_bytes
from hoist.tools.train import train
from tests.support.commands import Job, hoist, make_job, read_metrics
from tests.support.reporters import Recorder


class SeparateDevice(HereDevice):
    """Says that its memory is its own."""

    is_separate = True

    def describe(self) -> str:
        return "far:0 (a machine, 2.0 GiB)"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def recorder(job: Job) -> Recorder:
    """What a run of the job told."""
    return trained(job)


def trained(job: Job, *, steps: int = 2, **changed: object) -> Recorder:
    recorder = Recorder()
    train(job.options(steps=steps, **changed), recorder)
    return recorder


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_the_budget_of_a_device() -> None:
    assert devices.budget_bytes(HereDevice(), None) is None
    with pytest.raises(ConfigError, match=r"--device-memory: 1.0 GiB is not allowed where the CPU computes"):
        devices.budget_bytes(HereDevice(), 2**30)
    assert devices.budget_bytes(SeparateDevice(), 2**30) == 2**30
    with pytest.raises(ConfigError, match="torch does not tell what is free on cpu; give a budget, like 20GiB"):
        devices.budget_bytes(SeparateDevice(), None)
    assert devices.within(10 * 2**30, None, name="far:0") == 9 * 2**30
    assert devices.within(10 * 2**30, 10 * 2**30, name="far:0") == 10 * 2**30
    with pytest.raises(ConfigError, match=r"10.0 GiB is more than the 10.0 GiB that are free on far:0; give less"):
        devices.within(10 * 2**30, 10 * 2**30 + 1, name="far:0")


def test_what_torch_keeps_for_later_is_free() -> None:
    class Keeping(SeparateDevice):
        kept = True

        def give_back_free(self) -> None:
            self.kept = False

    device = Keeping()
    devices.budget_bytes(device, 2**30)
    assert not device.kept


def test_a_device_is_closed_by_whoever_made_it() -> None:
    class Closing(HereDevice):
        closed = False

        def close(self) -> None:
            self.closed = True

    device = Closing()
    with devices.opened(device) as found:
        assert found is device
    assert not device.closed
    with devices.opened("auto") as found:
        assert found.torch_device == torch.device("cpu") or found.is_separate


def test_a_budget_that_the_store_remembers_is_for_an_accelerator_alone(tmp_path: Path) -> None:
    options = Job.at(tmp_path).options()
    remembered = {**options.remembered(), "device_memory": "20GiB"}
    resumed, changed = replace(options, given=frozenset()).resuming(remembered)
    assert (resumed.device_memory, changed) == ("20GiB", ())
    _, changed = replace(options, device_memory="1GiB", given=frozenset({"device_memory"})).resuming(remembered)
    assert changed == ("--device-memory 1GiB (was 20GiB)",)


# --- what is told -----------------------------------------------------------------------------------------------------


def test_what_a_run_says_of_a_device_with_memory_of_its_own(recorder: Recorder) -> None:
    (start,), (forecast,), step = recorder.starts, recorder.forecasts, recorder.steps[-1]
    text = "\n".join(lines(forecast, 0))
    assert "the CPU computes: no device" in text
    assert sum(forecast.host.values()) == start.setup.memory.need_bytes

    far = replace(
        forecast, prediction=None, measured=None, why_not=NO_DEVICE_PREDICTION, step_bytes=(10**9, 2 * 10**9),
        device={"weights": 2**20, "scratch": 2**20}, device_name="far:0", device_budget_bytes=2**31,
    )  # fmt: skip
    text = "\n".join(lines(far, 80))
    assert "device       1.0 MiB           -           -           -     1.0 MiB     2.0 MiB" in text
    assert f"host is within the budget of {show_bytes(far.host_budget_bytes)}, far:0 within 2.0 GiB" in text
    assert "traffic  a step reads 953.7 MiB and writes 1.9 GiB" in text
    assert f"a step   nothing is predicted: {NO_DEVICE_PREDICTION}" in text
    assert max(map(len, text.splitlines())) <= 80

    out = Console(file=io.StringIO(), width=200)
    with Display(out, quiet=False) as display:
        display.plan(replace(start, device=SeparateDevice().describe(), device_budget_bytes=2**31))
        display.step(replace(step, device_peak_bytes=3 * 2**20), start)
    assert isinstance(out.file, io.StringIO)
    shown = out.file.getvalue()
    assert "device   far:0 (a machine, 2.0 GiB); budget 2.0 GiB of its memory\n" in shown
    assert [line.split()[-1] for line in shown.splitlines()[-2:]] == ["peak", "MiB"]
    assert "3.0 MiB" in shown.splitlines()[-1]


def test_parts_of_a_budget_by_kind(recorder: Recorder) -> None:
    (start,) = recorder.starts
    memory = start.setup.memory
    assert sum(by_kind(memory.parts(), memory).values()) == memory.need_bytes
    labels = ("weight buffers", "gradients of tied tensors", "boundary activations", "workspace of a stage")
    found = by_kind([(label, 2**number) for number, label in enumerate(labels)], memory)
    assert found == {"weights": 1, "moments": 0, "gradients": 2, "activations": 4, "scratch": 8}
    assert by_kind([("states kept from step to step", memory.kept_bytes)], memory)["moments"] <= memory.kept_bytes


@pytest.mark.usefixtures("recorder")
def test_going_on_on_another_device_is_said(job: Job) -> None:
    assert devices.moved(None, HereDevice()) is None
    assert devices.moved("cpu", HereDevice()) is None
    assert devices.moved("cuda:0", HereDevice()) == (
        "computed on cuda:0 up to the last commit, now on cpu: results differ in rounding"
    )
    assert json.loads((job.store / "COMMIT.json").read_text())["run"][DEVICE_KEY] == "cpu"


def _config() -> TrainerConfig:
    return TrainerConfig(
        host_memory_bytes=64 * 2**20, micro_batch_size=2, num_micro_batches=2, seq_len=16,
        schedule=Schedule(kind="constant", lr=1e-3, num_steps=10),
    )  # fmt: skip


def test_python_refuses_a_budget_where_the_cpu_computes(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    config = replace(_config(), device_memory_bytes=2**30)
    with (
        pytest.raises(ConfigError, match=r"--device-memory: 1.0 GiB is not allowed where the CPU computes"),
        open_trainer(job.store, model=job.model, config=config, device="cpu"),
    ):
        pass
    assert not job.store.exists()


# --- updates on a device ----------------------------------------------------------------------------------------------


def test_what_updates_run_on() -> None:
    class Far(SeparateDevice):
        torch_device = torch.device("meta:0")

    with Far() as far:
        assert devices.optim_device("cpu", far) == "cpu"
        assert {devices.optim_device(name, far) for name in ("device", "meta", "meta:0")} == {"device"}
        with pytest.raises(ConfigError, match="--optim-device: meta:1 is not meta:0, which computes; give"):
            devices.optim_device("meta:1", far)
    assert devices.optim_device("cpu", HereDevice()) == "cpu"
    with pytest.raises(ConfigError, match="--optim-device: device is not allowed where the CPU computes: there is no"):
        devices.optim_device("device", HereDevice())


def test_what_updates_ran_on_is_remembered_and_a_change_is_told() -> None:
    options = replace(Job.at(Path("somewhere")).options(optim_device="device"), given=frozenset())
    assert options.trainer_config(device_memory_bytes=2**30).optim_device == "device"
    remembered = options.remembered()
    resumed, changed = replace(options, optim_device="cpu").resuming(remembered)
    assert (resumed.optim_device, changed) == ("device", ())
    assert _resolved(resumed, SeparateDevice()).optim_device == "device"
    assert _resolved(resumed, HereDevice()).optim_device == "cpu", "where there is none, that is told of the device"
    _, changed = replace(options, optim_device="cpu", given=frozenset({"optim_device"})).resuming(remembered)
    assert changed == ("--optim-device cpu (was device)",)
    with pytest.raises(ConfigError, match="--optim-device: '' is not allowed; give cpu, device, or the name"):
        replace(options, optim_device="")


# --- compiled layers --------------------------------------------------------------------------------------------------


def test_what_compiles_is_remembered() -> None:
    job = Job.at(Path("somewhere"))
    options = replace(job.options(compile_backend="aot_eager"), compile=True)
    assert options.trainer_config().backend_in_force == "aot_eager"
    resumed, _ = replace(job.options(), given=frozenset()).resuming(options.remembered())
    assert resumed.trainer_config().backend_in_force == "aot_eager"
    _, changed = replace(job.options(), given=frozenset({"compile"})).resuming(options.remembered())
    assert changed == ("--compile off (was on)",)


@pytest.mark.slow
def test_layers_are_compiled_where_that_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With kernels that are not compiled: the same losses, and the run remembers it."""
    torch._dynamo.reset()
    job = make_job(tmp_path)
    told = hoist(
        capfd,
        *job.arguments("--compile", "--metrics", tmp_path / "m", compile_backend="aot_eager", host_memory="192MiB"),
    )
    assert told.code == 0, told.err
    assert "device   cpu; decoder layers are compiled when they first run" in told.out
    plain = Job.at(tmp_path)
    recorder = trained(replace(plain, store=tmp_path / "plain"), steps=3)
    assert [line["loss"] for line in read_metrics(tmp_path / "m")] == [step.loss for step in recorder.steps]
    torch._dynamo.reset()
