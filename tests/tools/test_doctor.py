"""The doctor really measures, and its judgement is a function of the facts."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hoist.tiers.drive_health import BlockDevice, DriveHealth, SmartWear
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


def outcomes(
    storage: StorageFacts = GOOD_STORAGE, memory: MemoryFacts = GOOD_MEMORY, compute: ComputeFacts = GOOD_COMPUTE
) -> dict[str, tuple[Outcome, str]]:
    """Every check that did not pass, with its advice."""
    checks = judge(storage, memory, compute)
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
        (with_bandwidth(read=4e8), "read bandwidth", Outcome.NOTE, "more micro-batches"),
        (with_bandwidth(write=4e8), "write bandwidth", Outcome.NOTE, "more micro-batches"),
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
    assert outcomes(compute=bare_gpu).keys() == {"locked memory limit", "kvikio", "GPUDirect Storage"}


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
