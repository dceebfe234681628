"""What writing means for a drive's life: shares of its rated endurance, and days that are left at a speed. Numbers.

What was written is `tiers/wear.py`'s, what a step writes `writes.py`'s business; `RunStatus.wear` is made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hoist.tiers.wear import DirectoryWear, WearRecord

_DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveWear:
    """One of a store's drives."""

    directory: str
    written_bytes: int
    """Ever written to it for this store."""
    written_bytes_per_step: float
    """Its part of what a step writes, as its part was so far."""
    tbw_bytes: int | None
    """What it is rated for in its whole life; None: not known."""
    source: str | None
    """Who says so: ``--tbw`` or ``smart``."""
    used_share: float | None
    """Share of that which is used: by everybody if the drive says so, else by this store."""
    run_share: float | None
    """Share of it that the steps which are left will use."""
    days_left: float | None
    """Days until all of it is used, at this speed; None if speed or rating is not known, or nothing is written."""
    days_in_all: float | None
    """Days in which all of it would be used from the first byte on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wear:
    """What a run does to its drives. ``RunStatus.wear`` is :meth:`to_json`."""

    written_bytes: int
    """Ever written to the store's drives, those that it has left included."""
    read_bytes: int
    written_bytes_per_step: float
    run_bytes: float | None
    """What the steps that are left will write; None if their number is not known."""
    write_budget_bytes: int | None
    """--write-budget; None: there is none."""
    drives: tuple[DriveWear, ...]
    """In the order of COMMIT.json."""

    @property
    def worst(self) -> DriveWear | None:
        """The drive of known rating that is used up first; None if no rating is known."""
        rated = [drive for drive in self.drives if drive.tbw_bytes is not None]
        return max(rated, key=lambda drive: (drive.run_share or 0.0, drive.used_share or 0.0), default=None)

    def to_json(self) -> dict[str, Any]:
        """As JSON: the numbers of the drive that is used up first beside those of all."""
        worst = self.worst
        return {
            "written_bytes": self.written_bytes,
            "read_bytes": self.read_bytes,
            "written_bytes_per_step": self.written_bytes_per_step,
            "run_bytes": self.run_bytes,
            "write_budget_bytes": self.write_budget_bytes,
            "tbw_bytes": None if worst is None else worst.tbw_bytes,
            "source": None if worst is None else worst.source,
            "used_share": None if worst is None else worst.used_share,
            "run_share": None if worst is None else worst.run_share,
            "days_left": None if worst is None else worst.days_left,
            "drives": [asdict(drive) for drive in self.drives],
        }


def judge(
    record: WearRecord,
    *,
    bytes_per_step: float,
    seconds_per_step: float | None = None,
    steps_left: int | None = None,
    write_budget_bytes: int | None = None,
    weights: Mapping[str, float] | None = None,
) -> Wear:
    """What a run does to the drives that ``record`` has in use.

    ``weights``: each drive's part of the writes, by its directory; by default as it was so far.
    """
    used = [each for each in record.directories if each.in_use]
    parts = [float(each.written_bytes) for each in used] if weights is None else [weights[e.directory] for e in used]
    total = sum(parts)
    shares = [part / total if total else 1.0 / len(used) for part in parts]
    drives = tuple(
        _drive(each, share * bytes_per_step, seconds_per_step, steps_left)
        for each, share in zip(used, shares, strict=True)
    )
    return Wear(
        written_bytes=record.written_bytes,
        read_bytes=record.read_bytes,
        written_bytes_per_step=bytes_per_step,
        run_bytes=None if steps_left is None else steps_left * bytes_per_step,
        write_budget_bytes=write_budget_bytes,
        drives=drives,
    )


def _drive(
    each: DirectoryWear, bytes_per_step: float, seconds_per_step: float | None, steps_left: int | None
) -> DriveWear:
    tbw = each.tbw_bytes
    known = each.written_bytes if each.drive_written_bytes is None else each.drive_written_bytes
    a_day = _DAY_SECONDS * bytes_per_step / seconds_per_step if seconds_per_step else 0.0
    return DriveWear(
        directory=each.directory,
        written_bytes=each.written_bytes,
        written_bytes_per_step=bytes_per_step,
        tbw_bytes=tbw,
        source=each.tbw_source,
        used_share=None if not tbw else known / tbw,
        run_share=None if not tbw or steps_left is None else steps_left * bytes_per_step / tbw,
        days_left=None if not tbw or not a_day else max(0.0, tbw - known) / a_day,
        days_in_all=None if not tbw or not a_day else tbw / a_day,
    )
