"""The doctor really measures, and its judgement is a function of the facts."""

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hoist.tiers.drive_health import BlockDevice, DriveHealth, SmartWear
from hoist.tiers.errors import BudgetError
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.io.probe import Bandwidth
from hoist.tools.doctor import (
    Check,
    ComputeFacts,
    MemoryFacts,
    Outcome,
    StorageFacts,
    diagnose,
    judge,
    render,
)
from hoist.tools.transfers import DeviceTransfers, measure_transfers
from tests.support.late_device import LateDevice

GOOD_STORAGE = StorageFacts(
    directory="/store",
    engine="direct: O_DIRECT",
    file_system="ext4",
    free_bytes=10**12,
    bandwidth=Bandwidth(read_bytes_per_second=3e9, write_bytes_per_second=1e9, verified=True, direct=True),
    error="",
)
GOOD_MEMORY = MemoryFacts(
    total_bytes=64 * 2**30, available_bytes=60 * 2**30, cgroup_limit_bytes=None, memlock_bytes=8 * 2**20
)
GOOD_COMPUTE = ComputeFacts(
    cpus=8, torch_threads=8, open_files=20_000, accelerators=(), torch_cuda="", kvikio="", gds=""
)


DEVICE_ROWS = ["drive to device", "device to drive", "host to device", "device to host"]


def outcomes(
    storage: StorageFacts = GOOD_STORAGE,
    memory: MemoryFacts = GOOD_MEMORY,
    compute: ComputeFacts = GOOD_COMPUTE,
    transfers: DeviceTransfers | None = None,
) -> dict[str, tuple[Outcome, str]]:
    """Every check that did not pass, with its advice."""
    checks = judge(storage, memory, compute, transfers)
    assert all(bool(check.advice) == (check.outcome is not Outcome.PASS) for check in checks)
    return {check.name: (check.outcome, check.advice) for check in checks if check.outcome is not Outcome.PASS}


def with_bandwidth(
    *, read: float = 3e9, write: float = 1e9, verified: bool = True, direct: bool = True
) -> StorageFacts:
    bandwidth = Bandwidth(read_bytes_per_second=read, write_bytes_per_second=write, verified=verified, direct=direct)
    return dataclasses.replace(GOOD_STORAGE, bandwidth=bandwidth)


def test_a_real_directory_is_measured(tmp_path: Path, engine: DirectEngine) -> None:
    diagnosis = diagnose(tmp_path, engine, num_bytes=8 * 2**20)
    assert diagnosis.healthy
    storage = diagnosis.storage
    assert storage.bandwidth is not None
    assert storage.bandwidth.verified
    assert storage.bandwidth.read_bytes_per_second > 0
    assert storage.bandwidth.write_bytes_per_second > 0
    assert engine.statistics().written_bytes >= 8 * 2**20
    assert storage.file_system
    assert list(tmp_path.iterdir()) == []
    assert diagnosis.compute.torch_threads == torch.get_num_threads()
    assert diagnosis.memory.total_bytes >= diagnosis.memory.available_bytes > 0
    document = json.loads(json.dumps(diagnosis.to_json()))
    assert document["healthy"] is True
    assert document["storage"]["bandwidth"]["verified"] is True
    assert document["transfers"] is None
    rows = {check.name: check.found for check in diagnosis.checks}
    assert [name for name, found in rows.items() if found.startswith("no accelerator: ")] == DEVICE_ROWS
    assert {check["outcome"] for check in document["checks"]} <= {"pass", "note"}


def test_a_directory_that_is_not_there_is_a_failed_line(tmp_path: Path, engine: DirectEngine) -> None:
    (tmp_path / "file").touch()
    for name in ("absent", "file"):
        diagnosis = diagnose(tmp_path / name, engine)
        assert not diagnosis.healthy
        assert diagnosis.storage.bandwidth is None
        failed = [check.name for check in diagnosis.checks if check.outcome is Outcome.FAIL]
        assert failed == ["store directory", "write-read-verify"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_line_is_shown(tmp_path: Path, engine: DirectEngine) -> None:
    diagnosis = diagnose(tmp_path / "absent", engine)
    output = io.StringIO()
    render(diagnosis, Console(file=output, width=400))
    text = output.getvalue()
    for check in diagnosis.checks:
        assert check.name in text
        assert check.found in text
        assert check.advice in text
    assert f"torch {torch.__version__}" in text


def test_nothing_is_wrong_with_a_good_machine() -> None:
    assert outcomes() == {}
    gpu = dataclasses.replace(GOOD_COMPUTE, accelerators=("H200",), torch_cuda="13.0", kvikio="26.10", gds="2.26")
    assert outcomes(memory=dataclasses.replace(GOOD_MEMORY, memlock_bytes=None), compute=gpu) == {}


@pytest.mark.parametrize(
    ("storage", "name", "outcome", "advice"),
    [
        (with_bandwidth(verified=False), "write-read-verify", Outcome.FAIL, "do not train here"),
        (with_bandwidth(direct=False), "direct I/O", Outcome.NOTE, "ext4 and xfs"),
        (with_bandwidth(read=4e8), "drive to host", Outcome.NOTE, "more micro-batches"),
        (with_bandwidth(write=4e8), "host to drive", Outcome.NOTE, "more micro-batches"),
        (dataclasses.replace(GOOD_STORAGE, bandwidth=None, error="EIO"), "write-read-verify", Outcome.FAIL, "no run"),
        (dataclasses.replace(GOOD_STORAGE, file_system="tmpfs"), "drive", Outcome.NOTE, "name a directory on NVMe"),
    ],
)
def test_faults_of_the_drive(storage: StorageFacts, name: str, outcome: Outcome, advice: str) -> None:
    found = outcomes(storage=storage)
    assert found.keys() == {name}
    assert found[name][0] is outcome
    assert advice in found[name][1]


def test_limits_are_noted() -> None:
    assert "memory" in outcomes(memory=dataclasses.replace(GOOD_MEMORY, cgroup_limit_bytes=2**29))
    assert "memory" in outcomes(memory=dataclasses.replace(GOOD_MEMORY, available_bytes=2**29))
    assert "OMP_NUM_THREADS" in outcomes(compute=dataclasses.replace(GOOD_COMPUTE, torch_threads=1))["CPU"][1]
    assert "ulimit -n" in outcomes(compute=dataclasses.replace(GOOD_COMPUTE, open_files=256))["open files limit"][1]
    assert outcomes(compute=dataclasses.replace(GOOD_COMPUTE, open_files=None)) == {}
    bare_gpu = dataclasses.replace(GOOD_COMPUTE, accelerators=("H200",))
    assert outcomes(compute=bare_gpu).keys() == {"kvikio", "GPUDirect Storage"}


class TestDevice:
    """Every way to a device with memory of its own is gone, and what comes back is compared."""

    @pytest.fixture
    def device(self) -> Iterator[LateDevice]:
        device = LateDevice(seed=1, late_seconds=0)
        yield device
        device.close()

    def test_each_way_is_measured(self, tmp_path: Path, engine: DirectEngine, device: LateDevice) -> None:
        diagnosis = diagnose(tmp_path, engine, device, num_bytes=2**20)
        assert diagnosis.healthy
        assert diagnosis.transfers is not None
        assert [transfer.name for transfer in diagnosis.transfers.transfers] == DEVICE_ROWS
        assert all(transfer.verified and transfer.bytes_per_second for transfer in diagnosis.transfers.transfers)
        found = {check.name: check.found for check in diagnosis.checks}
        assert found["device"] == device.describe()
        ring = "through 8 host buffers of 4 MiB, because the engine direct takes host memory only"
        assert found["drive to device"].endswith(f" GB/s, {ring}")
        assert found["host to device"].endswith(" GB/s, copies of pinned host memory")
        assert engine.statistics().written_bytes >= 2 * 2**20
        assert device.pinned == {}
        assert device.allocated_bytes == 0
        assert list(tmp_path.iterdir()) == []
        assert json.loads(json.dumps(diagnosis.to_json()))["transfers"]["device"] == device.describe()

    def test_bytes_that_change_on_their_way_are_seen(
        self, tmp_path: Path, engine: DirectEngine, device: LateDevice
    ) -> None:
        class Leaky(DirectEngine):
            def _pwrite(self, descriptor: int, view: memoryview, offset: int) -> int:
                torch.frombuffer(view, dtype=torch.uint8)[4095] ^= 1
                return super()._pwrite(descriptor, view, offset)

        with Leaky(num_threads=1) as leaky:
            seen = measure_transfers(tmp_path, leaky, device, num_bytes=2**20)
        assert [transfer.verified for transfer in seen.transfers] == [False, False, True, True]
        assert {name: outcome for name, (outcome, _) in outcomes(transfers=seen).items()} == {
            "drive to device": Outcome.FAIL,
            "device to drive": Outcome.FAIL,
        }

    def test_memory_that_cannot_be_locked_is_noted(self, tmp_path: Path, engine: DirectEngine) -> None:
        class Unlockable(LateDevice):
            def pin(self, region: torch.Tensor) -> None:
                raise BudgetError("host memory: the driver refused to lock it")

        device = Unlockable(late_seconds=0)
        seen = measure_transfers(tmp_path, engine, device, num_bytes=2**20)
        device.close()
        assert seen.transfers[-1].path == "copies of unpinned host memory"
        assert outcomes(transfers=seen).keys() == {"pinned memory"}

    def test_a_device_that_fails_is_a_failed_line(self, tmp_path: Path, engine: DirectEngine) -> None:
        class Full(LateDevice):
            def allocate(self, num_bytes: int, label: str) -> torch.Tensor:
                raise BudgetError("device memory: 4096 bytes do not fit")

        device = Full(late_seconds=0)
        seen = measure_transfers(tmp_path, engine, device, num_bytes=2**20)
        device.close()
        assert {transfer.error for transfer in seen.transfers} == {"device memory: 4096 bytes do not fit"}
        found = outcomes(transfers=seen)
        assert list(found) == DEVICE_ROWS
        assert all(outcome is Outcome.FAIL and "--device cpu" in advice for outcome, advice in found.values())
        assert list(tmp_path.iterdir()) == []

    def test_a_device_that_cannot_be_used_is_a_failed_line(self) -> None:
        checks = judge(GOOD_STORAGE, GOOD_MEMORY, GOOD_COMPUTE, why_no_device="cuda:0 cannot be used: it was lost")
        (failed,) = (check for check in checks if check.outcome is Outcome.FAIL)
        assert (failed.name, failed.found) == ("device", "cuda:0 cannot be used: it was lost")


class TestDrive:
    """What is said of the drive itself; finding and asking it are `test_drive_health.py`'s."""

    @staticmethod
    def checks(health: DriveHealth | None) -> list[Check]:
        storage = dataclasses.replace(GOOD_STORAGE, health=health)
        return [check for check in judge(storage, GOOD_MEMORY, GOOD_COMPUTE) if check.name == "drive"]

    @pytest.mark.parametrize(
        ("smart", "outcome", "found"),
        [
            (None, Outcome.PASS, "nvme0n1 MAKER (S1); its wear is not known: nvme-cli is not installed"),
            (
                SmartWear(written_bytes=24 * 10**12, read_bytes=0, percentage_used=4),
                Outcome.PASS,
                "nvme0n1 MAKER (S1); 24 TB written in its life, 4% of which is used, so it is rated for about 600 TB",
            ),
            (
                SmartWear(written_bytes=24 * 10**12, read_bytes=0, percentage_used=90),
                Outcome.NOTE,
                "nvme0n1 MAKER (S1); 24 TB written in its life, 90% of which is used, so it is rated for about 26.7 TB",
            ),
        ],
    )
    def test_its_wear(self, smart: SmartWear | None, outcome: Outcome, found: str) -> None:
        why = "" if smart else "nvme-cli is not installed"
        device = BlockDevice(name="nvme0n1", model="MAKER", serial="S1", smart=smart, why_no_smart=why)
        (check,) = self.checks(DriveHealth(directory="/a", devices=(device,)))
        assert (check.name, check.outcome, check.found) == ("drive", outcome, found)
        assert bool(check.advice) == (smart is None or outcome is Outcome.NOTE)

    def test_none(self) -> None:
        (check,) = self.checks(DriveHealth(directory="/a", why_no_device="its file system is on none"))
        assert check.found == "not known: its file system is on none"
        assert self.checks(None) == []
