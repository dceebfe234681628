"""Which block devices a directory is on, and what they say of their own wear: sysfs, and SMART through nvme-cli.

Asks nobody for a password, waits for nothing long, changes nothing, and never fails: what could not be read, and why,
is in the answer. What the numbers mean is `scheduler/endurance.py`'s business.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: NVMe counts what is written in thousands of 512-byte blocks.
DATA_UNIT_BYTES = 512_000
#: Larger counts are none: drives wear out before, and nothing is counted in so many bits.
_LARGEST = 2**64
#: How long nvme-cli may take.
TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SmartWear:
    """What an NVMe drive says of its own wear."""

    written_bytes: int
    """Ever written to it, by everybody (data_units_written)."""
    read_bytes: int
    percentage_used: int
    """Of its rated life, as its maker reckons; may exceed 100."""

    @property
    def implied_tbw_bytes(self) -> int | None:
        """The rating that the two imply, exact to a percent of the life used; None before the first percent."""
        return None if self.percentage_used < 1 else self.written_bytes * 100 // self.percentage_used


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDevice:
    """A drive that a directory is on."""

    name: str
    """As in /dev: ``nvme0n1``."""
    model: str = ""
    serial: str = ""
    smart: SmartWear | None = None
    why_no_smart: str = ""
    """One line; empty if it could be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveHealth:
    """What is known of the drives below a directory."""

    directory: str
    devices: tuple[BlockDevice, ...] = ()
    """More than one for RAID, or LVM over several."""
    why_no_device: str = ""
    """One line; empty if there is one."""

    @property
    def tbw_bytes(self) -> int | None:
        """The rating that the drive itself implies; None for several drives, whose parts nobody tells, and if it says
        nothing."""
        smart = self.devices[0].smart if len(self.devices) == 1 else None
        return None if smart is None else smart.implied_tbw_bytes

    @property
    def written_bytes(self) -> int | None:
        """Ever written to the drive by everybody; None as above."""
        smart = self.devices[0].smart if len(self.devices) == 1 else None
        return None if smart is None else smart.written_bytes

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return asdict(self)


def look(directory: Path, *, system: Path = Path("/sys")) -> DriveHealth:
    """Find the drives that an existing directory is on, and ask each. ``system``: where sysfs is."""
    try:
        number = directory.stat().st_dev
    except OSError as error:
        return DriveHealth(directory=str(directory), why_no_device=f"cannot be looked at: {error.strerror}")
    names, why = find_devices(os.major(number), os.minor(number), system=system)
    return DriveHealth(
        directory=str(directory), devices=tuple(_ask(name, system) for name in names), why_no_device=why
    )


def find_devices(major: int, minor: int, *, system: Path = Path("/sys")) -> tuple[tuple[str, ...], str]:
    """Names of the whole drives below a device number, and if there are none, why.

    A partition is on its disk; device mapper (LVM, encryption) and md are on what their ``slaves`` are.
    """
    if major == 0:
        return (), "its file system is on no block device that it names (overlay, tmpfs, btrfs, ZFS or a network's)"
    try:
        place = (system / "dev" / "block" / f"{major}:{minor}").resolve(strict=True)
    except OSError:
        return (), f"its device {major}:{minor} is not in {system}/dev/block"
    found = sorted(set(_whole_drives(place)))
    return tuple(found), ""


def _whole_drives(device: Path, depth: int = 0) -> list[str]:
    if (device / "partition").exists():
        device = device.parent
    try:
        below = sorted((device / "slaves").iterdir())
    except OSError:
        below = []
    if not below or depth > 8:
        return [device.name]
    return [name for each in below for name in _whole_drives(each.resolve(), depth + 1)]


def _ask(name: str, system: Path) -> BlockDevice:
    model, serial = (_read(system / "block" / name / "device" / each) for each in ("model", "serial"))
    smart, why = read_smart(name)
    return BlockDevice(name=name, model=model, serial=serial, smart=smart, why_no_smart=why)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_smart(name: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[SmartWear | None, str]:
    """What an NVMe drive says, asked through nvme-cli; and if it says nothing, why."""
    if not re.match(r"nvme\d", name):
        return None, f"{name} is no NVMe drive"
    program = shutil.which("nvme")
    if program is None:
        return None, "nvme-cli is not installed"
    try:
        done = subprocess.run(
            [program, "smart-log", f"/dev/{name}", "-o", "json"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"nvme smart-log did not answer within {timeout_seconds:g} s"
    except OSError as error:
        return None, f"nvme smart-log cannot be run: {error.strerror}"
    if done.returncode:
        told = _first_line(done.stderr) or _first_line(done.stdout) or f"exit code {done.returncode}"
        advice = "" if os.geteuid() == 0 else " (only root may ask a drive)"
        return None, f"nvme smart-log: {told}{advice}"
    try:
        return parse_smart(done.stdout), ""
    except ValueError as error:
        return None, f"nvme smart-log: its answer is not understood: {error}"


def parse_smart(answer: bytes | str) -> SmartWear:
    """The answer of ``nvme smart-log -o json``. Raises ValueError."""
    try:
        document = json.loads(answer)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    # Versions before 2 wrote percent_used; 128-bit counts are numbers in some versions and text in others.
    used = document.get("percentage_used", document.get("percent_used"))
    return SmartWear(
        written_bytes=DATA_UNIT_BYTES * _whole_number("data_units_written", document.get("data_units_written")),
        read_bytes=DATA_UNIT_BYTES * _whole_number("data_units_read", document.get("data_units_read")),
        percentage_used=_whole_number("percentage_used", used),
    )


def _whole_number(name: str, value: Any) -> int:
    text = re.sub(r"[,\s]", "", value) if isinstance(value, str) else value
    if isinstance(text, str) and text.isdecimal() and len(text) < 40:
        text = int(text)
    # A comparison with NaN is false.
    if isinstance(text, (int, float)) and not isinstance(text, bool) and 0 <= text < _LARGEST and text == int(text):
        return int(text)
    raise ValueError(f"{name}: saw {value!r:.60}")


def _first_line(output: bytes) -> str:
    lines: Sequence[str] = output.decode(errors="replace").strip().splitlines()
    return lines[0][:200] if lines else ""
