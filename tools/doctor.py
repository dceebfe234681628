"""What this machine offers: facts gathered once, judged by a pure function, shown as lines with advice. Changes
nothing.

The drive is measured by `hoist.tiers.io.probe` (a real write, read and check), ways to a device by `transfers.py`.
Choosing the engine is `hoist.tiers.io.choose`'s business; the command itself is in `cli.py`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hoist.tiers import drive_health
from hoist.tiers.cgroups import cgroup_limit_bytes
from hoist.tiers.device.base import Device
from hoist.tiers.drive_health import BlockDevice, DriveHealth
from hoist.tiers.errors import HoistError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.probe import Bandwidth, measure_bandwidth
from hoist.tools.sizes import show_decimal
from hoist.tools.transfers import DeviceTransfers, measure_transfers

#: Share of a drive's rated life from which on it is pointed out.
WORN_PERCENT = 80
#: Bytes that the bandwidth measurement writes and reads (twice) by default.
PROBE_BYTES = 256 * 2**20
#: Below this the drive, not the computation, sets the pace of nearly every model (bytes a second).
SLOW_BYTES_PER_SECOND = 500e6
#: A run keeps a few files per stage and array open.
ENOUGH_FILES = 1024
#: Baseline of the process and the smallest useful budget (bytes).
ENOUGH_MEMORY_BYTES = 2**30


class Outcome(StrEnum):
    """How one line of a diagnosis ends."""

    PASS = "pass"
    """As hoist wants it."""
    NOTE = "note"
    """hoist works, with something less."""
    FAIL = "fail"
    """A run would fail or be wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of a diagnosis."""

    name: str
    """What was looked at."""
    outcome: Outcome
    """How it ended."""
    found: str
    """What was found, with units."""
    advice: str = ""
    """What to do about it; empty if nothing needs doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageFacts:
    """The directory and its drive, as measured through the engine."""

    directory: str
    """Absolute path."""
    engine: str
    """The engine's own description: which, its mode, and why it was chosen."""
    file_system: str
    """Type of the file system, as the kernel names it; empty if unknown."""
    free_bytes: int | None
    """Free for this user; None if the directory cannot be asked."""
    bandwidth: Bandwidth | None
    """None if measuring failed."""
    error: str
    """Why it failed; else empty."""
    health: DriveHealth | None = None
    """The drive itself, and what it says of its wear; None if it was not looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """Host memory and limits on it."""

    total_bytes: int
    available_bytes: int
    """What can be used without swapping."""
    cgroup_limit_bytes: int | None
    """Tightest limit of the control groups around this process; None if there is none."""
    memlock_bytes: int | None
    """Memory that may be locked by mlock (RLIMIT_MEMLOCK); None: unlimited."""
    numa_nodes: int = 1
    """NUMA nodes that the machine's memory is on."""
    allowed_numa_nodes: int = 1
    """Those of them on whose processors this process may run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeFacts:
    """Processors and accelerators."""

    cpus: int
    """Processors that this process may use."""
    torch_threads: int
    """Threads that torch uses within an operation."""
    open_files: int | None
    """Files that may be open at once (RLIMIT_NOFILE, soft); None: unlimited."""
    accelerators: tuple[str, ...]
    """Names of the devices that torch can use."""
    torch_cuda: str
    """CUDA version that torch was built for; empty for a CPU build."""
    kvikio: str
    """Version of kvikio; empty if it is not installed."""
    gds: str
    """Version of the nvidia-fs driver (GPUDirect Storage); empty if it is not loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that was found, and what it means."""

    storage: StorageFacts
    memory: MemoryFacts
    compute: ComputeFacts
    transfers: DeviceTransfers | None
    """To and from the device's own memory; None: there is no such device."""
    versions: dict[str, str]
    """Versions of Python and of the packages that matter."""
    checks: tuple[Check, ...]
    """One a line, in the order shown."""

    @property
    def healthy(self) -> bool:
        """No check failed."""
        return all(check.outcome is not Outcome.FAIL for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON; bytes and bytes per second as numbers."""
        document = asdict(self)
        document["checks"] = [asdict(check) | {"outcome": check.outcome.value} for check in self.checks]
        document["compute"]["accelerators"] = list(self.compute.accelerators)
        document["healthy"] = self.healthy
        return document


def diagnose(
    directory: Path,
    engine: IoEngine,
    device: Device | None = None,
    *,
    why_no_device: str = "",
    num_bytes: int = PROBE_BYTES,
) -> Diagnosis:
    """Look at this machine and measure ``directory`` through ``engine`` with a temporary file of ``num_bytes``.

    Once more from and to the memory of ``device``, and copies, where it has its own. None is the CPU, or a device that
    cannot be used, as ``why_no_device`` says. Never raises for what it finds: a directory that cannot be used is a
    failed check.
    """
    storage = _look_at_storage(directory, engine, num_bytes)
    memory = look_at_memory()
    compute = _look_at_compute()
    transfers = None
    if device is not None and device.is_separate:
        transfers = measure_transfers(directory, engine, device, num_bytes=num_bytes)
    return Diagnosis(
        storage=storage,
        memory=memory,
        compute=compute,
        transfers=transfers,
        versions=_versions(),
        checks=judge(storage, memory, compute, transfers, why_no_device=why_no_device),
    )


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Show a diagnosis: a line for each check, and its advice below it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {Outcome.PASS: "green", Outcome.NOTE: "yellow", Outcome.FAIL: "bold red"}
    for check in diagnosis.checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", style=styles[check.outcome])
        table.add_row(Text(check.outcome.value, style=styles[check.outcome]), Text(check.name), found)
    console.print(table)
    console.print(Text(", ".join(f"{name} {version}" for name, version in diagnosis.versions.items()), style="dim"))


def judge(
    storage: StorageFacts,
    memory: MemoryFacts,
    compute: ComputeFacts,
    transfers: DeviceTransfers | None = None,
    *,
    why_no_device: str = "",
) -> tuple[Check, ...]:
    """What the facts mean for a run. Pure."""
    return (
        *_judge_storage(storage),
        *_judge_drives(storage.health),
        *_judge_memory(memory),
        *_judge_compute(compute),
        *(_judge_transfers(transfers) if transfers else _without_device(compute, why_no_device)),
    )


def _judge_storage(storage: StorageFacts) -> list[Check]:
    where = f"{storage.file_system or 'unknown'} file system"
    if storage.free_bytes is not None:
        where += f", {storage.free_bytes / 1e9:.1f} GB free"
    checks = [
        Check(name="I/O engine", outcome=Outcome.PASS, found=storage.engine),
        Check(
            name="store directory",
            outcome=Outcome.FAIL if storage.free_bytes is None else Outcome.PASS,
            found=f"{storage.directory}: {where}",
            advice="name a directory that exists and that you may write" if storage.free_bytes is None else "",
        ),
    ]
    if storage.file_system in ("tmpfs", "ramfs"):
        checks.append(
            Check(
                name="drive",
                outcome=Outcome.NOTE,
                found="this directory lies in memory",
                advice="model states in it take the memory that they should save; name a directory on NVMe",
            )
        )
    bandwidth = storage.bandwidth
    if bandwidth is None:
        advice = "no run can work here until a file can be written, read back and compared"
        return [*checks, Check(name="write-read-verify", outcome=Outcome.FAIL, found=storage.error, advice=advice)]
    checks.append(
        Check(
            name="write-read-verify",
            outcome=Outcome.PASS if bandwidth.verified else Outcome.FAIL,
            found="what was read is what was written"
            if bandwidth.verified
            else "what was read differs from what was written",
            advice=""
            if bandwidth.verified
            else "do not train here: the drive, its driver or the file system loses data",
        )
    )
    checks.append(
        Check(
            name="direct I/O",
            outcome=Outcome.PASS if bandwidth.direct else Outcome.NOTE,
            found="works here"
            if bandwidth.direct
            else "refused by this file system: transfers go through the page cache",
            advice="" if bandwidth.direct else "slower, and uses the CPU more; ext4 and xfs on a local drive have it",
        )
    )
    path = "direct I/O" if bandwidth.direct else "through the page cache"
    for name, speed in (
        ("drive to host", bandwidth.read_bytes_per_second),
        ("host to drive", bandwidth.write_bytes_per_second),
    ):
        slow = speed < SLOW_BYTES_PER_SECOND
        checks.append(
            Check(
                name=name,
                outcome=Outcome.NOTE if slow else Outcome.PASS,
                found=f"{speed / 1e9:.2f} GB/s, {path}",
                advice="below 0.5 GB/s the drive sets the pace: more micro-batches a step hide it" if slow else "",
            )
        )
    return checks


def _judge_drives(health: DriveHealth | None) -> list[Check]:
    """The drives themselves: one may be worn out, and what they say of it may be readable."""
    if health is None:
        return []
    if not health.devices:
        return [Check(name="drive", outcome=Outcome.PASS, found=f"not known: {health.why_no_device}")]
    return [_judge_drive(device) for device in health.devices]


def _judge_drive(device: BlockDevice) -> Check:
    found = f"{device.name} {device.model}".rstrip() + (f" ({device.serial})" if device.serial else "")
    smart = device.smart
    if smart is None:
        advice = "hoist train --tbw 600TB, as its data sheet says, shows how much of its life a run takes"
        return Check(
            name="drive", outcome=Outcome.PASS, found=f"{found}; its wear is not known: {device.why_no_smart}",
            advice=advice,
        )  # fmt: skip
    found += f"; {show_decimal(smart.written_bytes)} written in its life, {smart.percentage_used}% of which is used"
    if smart.implied_tbw_bytes is not None:
        found += f", so it is rated for about {show_decimal(smart.implied_tbw_bytes)}"
    worn = smart.percentage_used >= WORN_PERCENT
    return Check(
        name="drive",
        outcome=Outcome.NOTE if worn else Outcome.PASS,
        found=found,
        advice="it is near the end of its rated life: keep copies elsewhere, or train on another" if worn else "",
    )


def _judge_memory(memory: MemoryFacts) -> list[Check]:
    usable = min(memory.available_bytes, memory.cgroup_limit_bytes or memory.available_bytes)
    short = usable < ENOUGH_MEMORY_BYTES
    limit = "none" if memory.cgroup_limit_bytes is None else f"{memory.cgroup_limit_bytes / 2**30:.1f} GiB"
    locked = "unlimited" if memory.memlock_bytes is None else f"{memory.memlock_bytes / 2**20:.1f} MiB"
    return [
        Check(
            name="memory",
            outcome=Outcome.NOTE if short else Outcome.PASS,
            found=(
                f"{memory.total_bytes / 2**30:.1f} GiB, {memory.available_bytes / 2**30:.1f} GiB available, "
                f"cgroup limit {limit}"
            ),
            advice="the process alone takes about 0.4 GiB: give a small --host-memory, or end programs"
            if short
            else "",
        ),
        Check(
            name="locked memory limit",
            outcome=Outcome.PASS,
            found=f"{locked} by mlock (ulimit -l), which hoist does not use: drivers lock pages by themselves",
        ),
        Check(
            name="NUMA",
            outcome=Outcome.PASS,
            found="one node"
            if memory.numa_nodes == 1
            else f"{memory.numa_nodes} nodes; this process may run on processors of {memory.allowed_numa_nodes}",
        ),
    ]


def _judge_compute(compute: ComputeFacts) -> list[Check]:
    few_threads = compute.torch_threads < compute.cpus
    few_files = compute.open_files is not None and compute.open_files < ENOUGH_FILES
    checks = [
        Check(
            name="CPU",
            outcome=Outcome.NOTE if few_threads else Outcome.PASS,
            found=f"{compute.cpus} processors, torch uses {compute.torch_threads} threads",
            advice="the optimizer runs on the CPU: unset OMP_NUM_THREADS, or raise it" if few_threads else "",
        ),
        Check(
            name="open files limit",
            outcome=Outcome.NOTE if few_files else Outcome.PASS,
            found="unlimited" if compute.open_files is None else str(compute.open_files),
            advice=f"ulimit -n {ENOUGH_FILES} saves opening files again and again" if few_files else "",
        ),
    ]
    if compute.accelerators:
        checks.append(Check(name="accelerator", outcome=Outcome.PASS, found=", ".join(compute.accelerators)))
    else:
        none = f"none ({_build(compute)}): everything runs on the CPU"
        checks.append(Check(name="accelerator", outcome=Outcome.PASS, found=none))
    without_gpu = not compute.accelerators
    checks.append(
        Check(
            name="kvikio",
            outcome=Outcome.PASS if compute.kvikio or without_gpu else Outcome.NOTE,
            found=compute.kvikio
            or ("not installed" if compute.accelerators else "not installed, not needed without a GPU"),
            advice=""
            if compute.kvikio or without_gpu
            else "pip install 'hoist-engine[gds]' moves files to the GPU directly",
        )
    )
    checks.append(
        Check(
            name="GPUDirect Storage",
            outcome=Outcome.PASS if compute.gds or without_gpu else Outcome.NOTE,
            found=f"nvidia-fs {compute.gds}" if compute.gds else "nvidia-fs is not loaded",
            advice=""
            if compute.gds or without_gpu
            else "optional: without it transfers to the GPU pass through host memory",
        )
    )
    return checks


def _build(compute: ComputeFacts) -> str:
    return f"torch is built for CUDA {compute.torch_cuda}" if compute.torch_cuda else "torch is a CPU build"


def _without_device(compute: ComputeFacts, why_no_device: str) -> list[Check]:
    """The rows of a device, where a run would use none."""
    if why_no_device:
        advice = "no run can use the device until this works; --device cpu goes without it"
        return [Check(name="device", outcome=Outcome.FAIL, found=why_no_device, advice=advice)]
    why = f"no accelerator: {_build(compute)}"
    if compute.accelerators:
        why = "no accelerator is used: what is measured here computes on the CPU"
    names = ("drive to device", "device to drive", "host to device", "device to host")
    return [Check(name=name, outcome=Outcome.PASS, found=why) for name in names]


def _judge_transfers(transfers: DeviceTransfers) -> list[Check]:
    pinned = not transfers.why_not_pinned
    checks = [
        Check(name="device", outcome=Outcome.PASS, found=transfers.device),
        Check(
            name="pinned memory",
            outcome=Outcome.PASS if pinned else Outcome.NOTE,
            found="host memory can be locked for the device" if pinned else transfers.why_not_pinned,
            advice="" if pinned else "copies are slower and wait for computation, until host memory can be locked",
        ),
    ]
    for transfer in transfers.transfers:
        if transfer.bytes_per_second is None:
            found, advice = transfer.error, "no run can use the device until this works; --device cpu goes without it"
        elif not transfer.verified:
            found = f"what came back differs from what was sent ({transfer.path})"
            advice = "do not train here: the device, its driver or the path loses data"
        else:
            found, advice = f"{transfer.bytes_per_second / 1e9:.2f} GB/s, {transfer.path}", ""
        outcome = Outcome.FAIL if advice else Outcome.PASS
        checks.append(Check(name=transfer.name, outcome=outcome, found=found, advice=advice))
    return checks


def _look_at_storage(directory: Path, engine: IoEngine, num_bytes: int) -> StorageFacts:
    directory = directory.absolute()
    bandwidth: Bandwidth | None = None
    free_bytes: int | None = None
    error = ""
    try:
        free_bytes = shutil.disk_usage(directory).free if directory.is_dir() else None
        bandwidth = measure_bandwidth(directory, engine, num_bytes=num_bytes, request_bytes=4 * 2**20, in_flight=4)
    except (HoistError, OSError) as failure:
        error = str(failure)
    return StorageFacts(
        directory=str(directory),
        engine=engine.describe(),
        file_system=file_system_of(directory, Path("/proc/self/mountinfo")),
        free_bytes=free_bytes,
        bandwidth=bandwidth,
        error=error,
        health=drive_health.look(directory),
    )


def look_at_memory() -> MemoryFacts:
    """The machine's memory, now."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return MemoryFacts(
        total_bytes=int(fields["MemTotal"].split()[0]) * 1024,
        available_bytes=int(fields["MemAvailable"].split()[0]) * 1024,
        cgroup_limit_bytes=cgroup_limit_bytes(),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        allowed_numa_nodes=max(1, len(_allowed_nodes())),
    )


def _allowed_nodes() -> set[str]:
    """Names of the NUMA nodes of the processors that this process may run on; none where the kernel does not tell."""
    cpus = Path("/sys/devices/system/cpu")
    return {node.name for cpu in os.sched_getaffinity(0) for node in (cpus / f"cpu{cpu}").glob("node[0-9]*")}


def _look_at_compute() -> ComputeFacts:
    accelerators: tuple[str, ...] = ()
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        if kind is not None and kind.type == "cuda":
            accelerators = tuple(torch.cuda.get_device_name(index) for index in range(count))
        elif kind is not None:
            accelerators = tuple(f"{kind.type}:{index}" for index in range(count))
    return ComputeFacts(
        cpus=len(os.sched_getaffinity(0)),
        torch_threads=torch.get_num_threads(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        accelerators=accelerators,
        torch_cuda=torch.version.cuda or "",
        kvikio=_version("kvikio-cu12") or _version("kvikio-cu13") or _version("kvikio"),
        gds=_gds_version(Path("/proc/driver/nvidia-fs/version")),
    )


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def file_system_of(directory: Path, mounts: Path) -> str:
    """Type of the file system that holds a path: that of the longest mount point above it, the last one mounted
    there."""
    try:
        resolved = directory.resolve()
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), before.split()[4])
        if resolved.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), after.split()[0]
    return kind


def _gds_version(path: Path) -> str:
    """The nvidia-fs driver's version from its proc file; empty if the driver is not loaded."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    found = re.search(r"\d+(\.\d+)+", text)
    return found.group(0) if found else "of unknown version"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in ("hoist-engine", "torch", "transformers", "zarr", "safetensors"):
        versions[package] = _version(package) or "not installed"
    return versions
