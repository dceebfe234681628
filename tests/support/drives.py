"""Directories for a store that spans several, with weights that are told instead of measured.

What the drives of a store hold is read here through the file system, not through the store. Not a test itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hoist.tiers.dealing import MeasuredDirectory


def directories(folder: Path, num_drives: int) -> list[Path]:
    """The main directory and further ones in a folder; none is made."""
    return [folder / ("store" if not number else f"drive{number}") for number in range(num_drives)]


def told(places: Sequence[Path], weights: Sequence[float] | None = None) -> tuple[MeasuredDirectory, ...]:
    """The directories as if they had been measured, equally fast by default; none of them if there is only one."""
    return () if len(places) == 1 else speeds(places, weights)


def speeds(places: Sequence[Path], weights: Sequence[float] | None = None) -> tuple[MeasuredDirectory, ...]:
    """The same, whatever their number."""
    return tuple(
        MeasuredDirectory(directory=place, read_bytes_per_second=1e9 * speed, write_bytes_per_second=1e9 * speed)
        for place, speed in zip(places, weights or [1.0] * len(places), strict=True)
    )


def chunk_files(directory: Path) -> list[Path]:
    """The chunk files that really are in a directory, links apart; relative to it."""
    return sorted(
        path.relative_to(directory)
        for path in (directory / "stages").rglob("*")
        if path.is_file() and not path.is_symlink() and path.name != "zarr.json"
    )


def contents(*roots: Path) -> dict[str, str]:
    """Everything below some directories: what links lead to, what files hold."""
    found: dict[str, str] = {}
    for root in roots:
        for path in sorted(root.rglob("*")) if root.exists() else ():
            if path.is_symlink():
                found[str(path)] = f"-> {path.readlink()}"
            else:
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return found
