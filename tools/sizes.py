"""Byte sizes as people write them: ``4GiB``, ``512MiB``, ``1.5GB``, ``65536``."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes that ``text`` means. GB is 10^9, GiB and G are 2^30. Raises ValueError with what is allowed."""
    match = _PATTERN.fullmatch(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write for instance 4GiB, 512MiB or 1.5GB")
    return int(float(match.group(1)) * unit)


def show_bytes(num_bytes: float) -> str:
    """``num_bytes`` in binary units, three significant digits or so."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
