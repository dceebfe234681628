"""Spans of time as they are shown: by the clock, in one unit or two, with three digits. Bytes: `sizes.py`."""

from __future__ import annotations


def show_clock(seconds: float, *, days: bool = True) -> str:
    """``5:03``, ``1:02:05``; from 24 hours on with the days in front, or, without ``days``, with as many hours."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    whole_days, hours = divmod(hours, 24) if days else (0, hours)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or whole_days else f"{minutes}:{rest:02}"
    return clock if not whole_days else f"{whole_days} {'day' if whole_days == 1 else 'days'} {clock}"


def show_span(seconds: float) -> str:
    """A span of time in one or two units."""
    if seconds < 100:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 100:
        return f"{minutes:.0f} min"
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"


def show_seconds(seconds: float) -> str:
    """Seconds with three digits, in the unit that suits: ``2.85 s``, ``12.3 ms``, ``1:02:05``."""
    if seconds < 0:
        return f"-{show_seconds(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"
