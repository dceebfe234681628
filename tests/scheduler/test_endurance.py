"""What writing means for a drive's life, in numbers that can be checked by hand."""

from __future__ import annotations

import json

import pytest

from hoist.scheduler.endurance import judge
from hoist.tiers.wear import DirectoryWear, WearRecord

TB = 10**12


def record(*directories: DirectoryWear) -> WearRecord:
    return WearRecord(store_id="a", since=0.0, updated=1.0, directories=directories)


def test_one_drive_of_known_rating() -> None:
    found = judge(
        record(DirectoryWear(directory="/a", written_bytes=6 * TB, tbw_bytes=600 * TB, tbw_source="--tbw")),
        bytes_per_step=1.4e9, seconds_per_step=43.2, steps_left=1000,
    )  # fmt: skip
    assert found.run_bytes == pytest.approx(1.4 * TB)
    worst = found.worst
    assert worst is not None
    assert worst.used_share == pytest.approx(0.01)
    assert worst.run_share == pytest.approx(0.0023333, rel=1e-4)
    # 2,000 steps a day, 2.8 TB
    assert worst.days_in_all == pytest.approx(600 / 2.8)
    assert worst.days_left == pytest.approx(594 / 2.8)


def test_what_others_wrote_counts_if_the_drive_says_so() -> None:
    each = DirectoryWear(
        directory="/a", written_bytes=TB, tbw_bytes=100 * TB, tbw_source="smart", drive_written_bytes=99 * TB
    )
    worst = judge(record(each), bytes_per_step=TB, seconds_per_step=86400.0).worst
    assert worst is not None
    assert worst.used_share == pytest.approx(0.99)
    assert worst.days_left == pytest.approx(1.0)
    assert worst.run_share is None
    over = judge(
        record(DirectoryWear(directory="/a", written_bytes=2 * TB, tbw_bytes=TB)), bytes_per_step=1.0,
        seconds_per_step=1.0,
    ).worst  # fmt: skip
    assert over is not None
    assert over.days_left == 0.0


def test_nothing_is_made_up() -> None:
    unrated = judge(record(DirectoryWear(directory="/a", written_bytes=5)), bytes_per_step=7.0)
    assert unrated.worst is None
    document = unrated.to_json()
    unknown = ("tbw_bytes", "source", "used_share", "run_share", "days_left", "run_bytes")
    assert [document[name] for name in unknown] == [None] * len(unknown)
    assert document["written_bytes"] == 5
    idle = judge(record(DirectoryWear(directory="/a", tbw_bytes=TB)), bytes_per_step=0.0, seconds_per_step=1.0)
    assert idle.drives[0].days_left is None
    json.dumps(document)


def test_the_drive_that_is_used_up_first_is_told() -> None:
    found = judge(
        record(
            DirectoryWear(directory="/a", written_bytes=3 * TB, tbw_bytes=600 * TB, tbw_source="--tbw"),
            DirectoryWear(directory="/b", written_bytes=TB, tbw_bytes=100 * TB, tbw_source="smart"),
            DirectoryWear(directory="/c", written_bytes=TB, in_use=False),
        ),
        bytes_per_step=4e9, seconds_per_step=1.0, steps_left=10,
    )  # fmt: skip
    assert [drive.written_bytes_per_step for drive in found.drives] == [3e9, 1e9]
    assert found.written_bytes == 5 * TB
    worst = found.worst
    assert worst is not None
    assert worst.directory == "/b"
    assert found.to_json()["tbw_bytes"] == 100 * TB
