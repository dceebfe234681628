"""How much memory the control groups around this process allow, and how much of that is left; both versions.

Pure readings of files under given roots. The machine's own memory is in /proc/meminfo, and nobody's business here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: What the kernel says about this process.
MEMBERSHIP = Path("/proc/self/cgroup")
#: Where control groups are mounted.
ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """Files of a group, by version."""

    limit: str
    used: str
    reclaimable: str
    """Field of memory.stat with the cache that gives way before a limit hurts."""


_VERSION_1 = _Names(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", reclaimable="total_inactive_file")
_VERSION_2 = _Names(limit="memory.max", used="memory.current", reclaimable="inactive_file")


def cgroup_limit_bytes(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int | None:
    """The tightest memory limit of the control groups that ``membership`` names; None if there is none."""
    return min((limit for limit, _, _ in _limits(membership, root)), default=None)


def cgroup_free_bytes(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int | None:
    """What the tightest of the groups still lets be used (0 or more); None if none has a limit."""
    free: list[int] = []
    for limit, folder, names in _limits(membership, root):
        used = _number(folder / names.used)
        if used is None:
            continue
        reclaimable = 0
        with contextlib.suppress(OSError):
            for line in (folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == names.reclaimable:
                    reclaimable = int(value)
        free.append(max(0, limit - max(0, used - reclaimable)))
    return min(free, default=None)


def _limits(membership: Path, root: Path) -> Iterator[tuple[int, Path, _Names]]:
    """Every limit there is, with the group that has it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            top, names = root, _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "memory", _VERSION_1
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):  # every group above limits, too
            if not folder.is_relative_to(top):
                break
            limit = _number(folder / names.limit)
            # Version 1 says "no limit" as the largest multiple of the page size.
            if limit is not None and limit < 2**60:
                yield limit, folder, names


def _number(path: Path) -> int | None:
    """What the file says; None if that is no number, or there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
