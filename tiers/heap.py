"""How the C library's heap treats what autograd and kernels take and give back: settings made once, and trimming.

It allocates nothing itself; the run's own buffers are `arena.py`'s. docs/tuning.md has the measurements behind the
numbers. Only glibc is told anything; elsewhere this says once that the peak may be higher, and does nothing.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Blocks from this size on get a mapping of their own, which goes back to the system when they are freed. Fixed: by
#: default glibc raises it up to 32 MiB as blocks are freed, and then logits break up the heap.
OWN_MAPPING_BYTES = 4 * 2**20
#: The heap's free end stays until :func:`trim`: giving it back at each free would fault the same pages in again.
KEPT_END_BYTES = 256 * 2**20
#: Arenas of the heap: the main thread's and one for all others, whose requests are few and small.
NUM_ARENAS = 2

#: Parameters of mallopt(3), from glibc's malloc.h.
_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = 1, -1, -3, -8
_SETTINGS = (
    # No bins of small blocks that are not merged when freed: each keeps the space on both sides of it apart.
    (_M_MXFAST, 0),
    (_M_TRIM_THRESHOLD, KEPT_END_BYTES),
    (_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES),
    (_M_ARENA_MAX, NUM_ARENAS),
)

_lock = threading.Lock()
#: glibc's malloc_trim once :func:`settle` has run; None before, and with another C library.
_malloc_trim: Callable[[int], int] | None = None
_settled = False


def settle() -> bool:
    """Make the heap's settings for this process, once; whether the C library takes them. Later calls do nothing."""
    global _malloc_trim, _settled
    with _lock:
        if not _settled:
            _settled = True
            library = ctypes.CDLL(None)
            if hasattr(library, "gnu_get_libc_version"):
                refused = [parameter for parameter, value in _SETTINGS if library.mallopt(parameter, value) != 1]
                if refused:
                    logger.warning("glibc refuses mallopt parameters %s: memory may peak higher than planned", refused)
                _malloc_trim = library.malloc_trim
            else:
                logger.warning(
                    "the C library is not glibc: hoist cannot limit what its heap keeps, so memory may peak higher "
                    "than planned; leave room beside --host-memory"
                )
        return _malloc_trim is not None


def trim() -> None:
    """Give the heap's free pages back to the system; takes milliseconds. Does nothing before :func:`settle`."""
    if _malloc_trim is not None:
        _malloc_trim(0)
