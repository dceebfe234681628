"""Which engine a run uses: kvikio where it helps, direct everywhere else, and the reason in the engine's `describe()`.

Looks at the machine only (driver, devices, package); what a file system can do the engine finds out per file.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging

from hoist.tiers.errors import RefusalError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.io.kvikio import KvikioEngine

_log = logging.getLogger(__name__)

#: What ``choose_engine`` takes.
ENGINE_KINDS = ("auto", "direct", "kvikio")


def choose_engine(kind: str = "auto") -> IoEngine:
    """Make the engine of that kind; the caller closes it.

    ``auto`` is kvikio where a CUDA device and kvikio are present, else direct. Raises RefusalError for an unknown kind,
    and where ``kvikio`` was asked for and cannot work, with what to install.
    """
    engine = _make(kind)
    _log.info("I/O engine %s", engine.describe())
    return engine


def _make(kind: str) -> IoEngine:
    if kind == "direct":
        return DirectEngine(why="it was asked for")
    if kind == "kvikio":
        return KvikioEngine(why="it was asked for")
    if kind != "auto":
        raise RefusalError(f"I/O engine: got {kind!r}, must be one of {', '.join(ENGINE_KINDS)}")
    why_not = why_no_kvikio()
    if why_not is None:
        try:
            return KvikioEngine(why="a CUDA device and kvikio are present")
        except RefusalError as error:
            why_not = str(error)
    return DirectEngine(why=why_not)


def why_no_kvikio() -> str | None:
    """Why ``auto`` does not take kvikio on this machine; None where it does. Initialises the CUDA driver, if any."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value < 1:
        return "the CUDA driver finds no device"
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed (pip install 'hoist-engine[gds]')"
    return None
