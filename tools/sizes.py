"""Byte sizes as people write them: ``4GiB``, ``512MiB``, ``1.5GB``, ``65536``; and as they are shown, with what they
mean for a drive: shares of its life and days.
"""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str, *, minimum: int = 0) -> int:
    """Bytes that ``text`` means, exactly (rounded down). GB is 10^9, GiB and G are 2^30.

    Raises ValueError with what is allowed, also for less than ``minimum`` bytes.
    """
    match = _PATTERN.fullmatch(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write for instance 4GiB, 512MiB or 1.5GB")
    number = match.group(1)
    num_bytes = int(Fraction(number if number[0] != "." else f"0{number}") * unit)
    if num_bytes < minimum:
        raise ValueError(f"{text!r} is too small; give at least {minimum} bytes, for instance 4GiB")
    return num_bytes


def show_bytes(num_bytes: float) -> str:
    """``num_bytes`` in binary units, with one decimal (two for TiB)."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # what rounds to 1024 is shown in the next unit
        if abs(amount) < (1023.5 if unit == "B" else 1023.95):
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def show_decimal(num_bytes: float) -> str:
    """``num_bytes`` in decimal units, as drives are sold and rated: with a decimal below 100, unless it is 0."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 999.5 or unit == "TB":
            break
        amount /= 1000
    if unit == "B":
        return f"{amount:.0f} B"
    digits = 1 if abs(amount) < 99.95 else 0
    return f"{amount:,.{digits}f}".removesuffix(".0") + f" {unit}"


def show_share(share: float | None) -> str:
    """A share of a drive's life, in percent with two digits that count."""
    percent = 100.0 * (share or 0.0)
    if percent >= 10.0:
        return f"{percent:.0f}%"
    return f"{percent:.2f}%" if percent >= 0.01 else f"{percent:.2g}%"


def show_days(days: float) -> str:
    """A time in days, or in years, hours or minutes where that says more."""
    if days >= 2 * 365.25:
        return f"{days / 365.25:,.1f} years" if days < 100 * 365.25 else "more than 100 years"
    if days >= 10:
        return f"{days:.0f} days"
    if days >= 1:
        return f"{days:.1f} days"
    return f"{24 * days:.1f} hours" if days >= 1 / 24 else f"{24 * 60 * days:.0f} minutes"
