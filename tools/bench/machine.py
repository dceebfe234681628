"""What a measurement was made on, for people who want to make it again: processor, memory, drive, versions, load.

Facts alone; what a machine lacks for hoist is `hoist.tools.doctor`'s business.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from hoist._version import __version__
from hoist.tiers import drive_health
from hoist.tools.doctor import file_system_of

#: Packages whose versions decide a result.
_PACKAGES = ("torch", "transformers", "zarr", "numpy")
#: Up to this load average a machine counts as quiet.
_QUIET_LOAD = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine at the time of a measurement."""

    processor: str
    cores: int
    """Those that this process may use."""
    threads: int
    """torch's, within an operation."""
    memory_bytes: int
    accelerators: tuple[str, ...]
    kernel: str
    directory: str
    """Where files were made."""
    file_system: str
    drives: tuple[str, ...]
    """Below the directory: name, and model where the kernel knows it. Empty where it names none (overlay, tmpfs)."""
    versions: dict[str, str]
    load: float
    """Load average of the minute before: much above 0 means that others were at work."""
    made: str
    """Date and time, UTC, of the beginning."""

    @property
    def in_words(self) -> str:
        """One line."""
        with_gpu = f", {', '.join(self.accelerators)}" if self.accelerators else ", no accelerator"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        on = f" on {', '.join(self.drives)}" if self.drives else ""
        return (
            f"{self.processor}, {self.cores} cores ({self.threads} threads), {self.memory_bytes / 2**30:.0f} GiB"
            f"{with_gpu}; {self.file_system}{on}; Linux {self.kernel}; {versions}; load {self.load:.1f}; "
            f"{self.made}"
        )


def look(directory: Path) -> Machine:
    """This machine, and the drive below ``directory``."""
    versions = {"hoist": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    names = tuple(torch.cuda.get_device_name(number) for number in range(count)) if torch.cuda.is_available() else ()
    health = drive_health.look(directory)
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        accelerators=names,
        kernel=platform.release(),
        directory=str(directory.absolute()),
        file_system=file_system_of(directory, Path("/proc/self/mountinfo")),
        drives=tuple(f"{drive.name} ({drive.model})" if drive.model else drive.name for drive in health.devices),
        versions=versions,
        load=os.getloadavg()[0],
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def load_note(machine: Machine) -> list[str]:
    """What a reader must know of the load before a measurement; nothing of a quiet machine."""
    if machine.load <= _QUIET_LOAD:
        return []
    return [f"others were at work before: load {machine.load:.1f} in the last minute; measure again on a quiet machine"]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
