"""Which drive a directory is on, in trees as sysfs has them; what it says of itself, from a stand-in of nvme-cli.

No real NVMe drive is asked here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hoist.tiers.drive_health import SmartWear, find_devices, look, parse_smart, read_smart

#: As nvme-cli prints it, most keys left out.
ANSWER = {
    "critical_warning": 0, "temperature": 311, "avail_spare": 100, "spare_thresh": 10, "percent_used": 4,
    "data_units_read": 1_250_000, "data_units_written": 46_875_000, "host_read_commands": 3, "power_on_hours": 900,
}  # fmt: skip


def sysfs(root: Path, devices: dict[str, str], slaves: dict[str, list[str]]) -> Path:
    """A tree like /sys: ``devices`` has number by path below /sys/devices, ``slaves`` what lies below a device."""
    links = {path.rpartition("/")[2]: root / "devices" / path for path in devices}
    for path, number in devices.items():
        place = root / "devices" / path
        (place / "slaves").mkdir(parents=True, exist_ok=True)
        (root / "dev" / "block").mkdir(parents=True, exist_ok=True)
        (root / "dev" / "block" / number).symlink_to(place)
        if path.count("/") and path.rpartition("/")[0] in devices:
            (place / "partition").write_text("1\n")
    for name, below in slaves.items():
        for each in below:
            (links[name] / "slaves" / each).symlink_to(links[each])
    return root


def test_partitions_lvm_encryption_and_raid_lead_to_whole_drives(tmp_path: Path) -> None:
    devices = {
        "pci/nvme0n1": "259:0",
        "pci/nvme0n1/nvme0n1p2": "259:2",
        "pci/nvme1n1": "259:5",
        "pci/nvme1n1/nvme1n1p1": "259:6",
        "virtual/md0": "9:0",
        "virtual/dm-0": "253:0",
        "virtual/dm-1": "253:1",
    }
    slaves = {"md0": ["nvme0n1p2", "nvme1n1p1"], "dm-0": ["nvme1n1p1"], "dm-1": ["md0"]}
    system = sysfs(tmp_path, devices, slaves)
    found = {
        number: find_devices(*map(int, number.split(":")), system=system) for number in devices.values()
    }
    assert found == {
        "259:0": (("nvme0n1",), ""),
        "259:2": (("nvme0n1",), ""),
        "259:5": (("nvme1n1",), ""),
        "259:6": (("nvme1n1",), ""),
        "9:0": (("nvme0n1", "nvme1n1"), ""),
        "253:0": (("nvme1n1",), ""),
        "253:1": (("nvme0n1", "nvme1n1"), ""),
    }
    names, why = find_devices(0, 41, system=system)
    assert names == ()
    assert "overlay, tmpfs" in why
    assert find_devices(8, 1, system=system)[1] == f"its device 8:1 is not in {system}/dev/block"


def test_a_loop_of_devices_ends(tmp_path: Path) -> None:
    system = sysfs(tmp_path, {"virtual/dm-0": "253:0"}, {"dm-0": ["dm-0"]})
    assert find_devices(253, 0, system=system) == (("dm-0",), "")


def test_a_directory_on_this_machine_and_one_that_is_not_there(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert bool(found.devices) != bool(found.why_no_device)
    assert all(device.smart or device.why_no_smart for device in found.devices)
    assert look(tmp_path / "none").why_no_device == "cannot be looked at: No such file or directory"


def test_model_serial_and_rating_of_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = tmp_path.stat().st_dev
    system = sysfs(tmp_path / "sys", {"pci/nvme3n1": f"{number >> 8 & 0xFFF}:{number & 0xFF}"}, {})
    folder = system / "block" / "nvme3n1" / "device"
    folder.mkdir(parents=True)
    (folder / "model").write_text("MAKER 2TB   \n")
    (folder / "serial").write_text("S1\n")
    stand_in(tmp_path, monkeypatch, f"cat <<END\n{json.dumps(ANSWER)}\nEND\n")
    found = look(tmp_path, system=system)
    assert [(device.name, device.model, device.serial) for device in found.devices] == [("nvme3n1", "MAKER 2TB", "S1")]
    assert found.written_bytes == 24 * 10**12
    assert found.tbw_bytes == 600 * 10**12


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An ``nvme`` on PATH that runs a shell script."""
    program = folder / "bin" / "nvme"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.parametrize("used", [{"percent_used": 4}, {"percentage_used": 4}])
@pytest.mark.parametrize("as_text", [False, True])
def test_answers_of_all_versions(used: dict[str, int], as_text: bool) -> None:
    numbers = {name: value for name, value in ANSWER.items() if name != "percent_used"} | used
    answer = {name: f"{value:,}" for name, value in numbers.items()} if as_text else numbers
    found = parse_smart(json.dumps(answer))
    assert found == SmartWear(written_bytes=24 * 10**12, read_bytes=640 * 10**9, percentage_used=4)
    assert found.implied_tbw_bytes == 600 * 10**12


def test_a_young_drive_implies_no_rating() -> None:
    assert parse_smart(json.dumps(ANSWER | {"percent_used": 0})).implied_tbw_bytes is None


@pytest.mark.parametrize(
    "answer", ["", "[]", "{}", json.dumps(ANSWER | {"data_units_written": "many"}),
               json.dumps(ANSWER | {"data_units_written": -1}), json.dumps(ANSWER | {"percent_used": True}),
               json.dumps(ANSWER | {"data_units_written": float("inf")}),
               json.dumps(ANSWER | {"data_units_written": "9" * 6000}), "[" * 100_000],
    ids=lambda answer: answer[:12],
)  # fmt: skip
def test_answers_that_are_none(answer: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_smart(answer)


def test_the_program_is_asked_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/told\ncat <<END\n{json.dumps(ANSWER)}\nEND\n')
    found, why = read_smart("nvme0n1")
    assert found is not None
    assert why == ""
    assert found.percentage_used == 4
    assert (tmp_path / "told").read_text() == "smart-log /dev/nvme0n1 -o json\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Permission denied' >&2\nexit 1\n", "nvme smart-log: Permission denied"),
        ("exit 3\n", "nvme smart-log: exit code 3"),
        ("echo hello\n", "nvme smart-log: its answer is not understood"),
        ("cat\necho '{}'\n", "nvme smart-log: its answer is not understood"),  # it may ask, and gets no answer
    ],
)
def test_why_nothing_could_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    stand_in(tmp_path, monkeypatch, script)
    found, told = read_smart("nvme0n1")
    assert found is None
    assert told.startswith(why)


def test_a_program_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "exec sleep 600\n")
    assert read_smart("nvme0n1", timeout_seconds=0.05) == (None, "nvme smart-log did not answer within 0.05 s")


def test_without_the_program_and_for_other_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_smart("nvme0n1") == (None, "nvme-cli is not installed")
    assert read_smart("vda") == (None, "vda is no NVMe drive")
