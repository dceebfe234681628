"""Memory control groups for tests: where new ones can be made, if anywhere."""

from __future__ import annotations

import os
from pathlib import Path

#: Where controllers are mounted.
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def memory_controller() -> Path | None:
    """The group under which memory groups can be made, of version 1 or 2; None where they cannot."""
    version_1 = CONTROL_GROUPS / "memory"
    controllers = CONTROL_GROUPS / "cgroup.controllers"
    if version_1.is_dir():
        parent = version_1
    elif controllers.exists() and "memory" in controllers.read_text().split():
        parent = CONTROL_GROUPS
    else:
        return None
    probe = parent / f"hoist-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return None
    limits = any((probe / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
    probe.rmdir()
    return parent if limits else None
