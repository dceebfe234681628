"""Linux calls that Python's os module lacks: what direct I/O must be aligned to, write-back of a file range.

Nothing here keeps state or decides; `alignment.py` and `direct.py` do. Where the C library lacks a call, the answer is
the one that is always right, only slower or less exact.
"""

from __future__ import annotations

import ctypes
import os

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
#: Byte places in struct statx (include/uapi/linux/stat.h): stx_mask, stx_dio_mem_align, stx_dio_offset_align.
_STATX_MASK_AT, _STATX_MEMORY_ALIGN_AT, _STATX_OFFSET_ALIGN_AT, _STATX_BYTES = 0x00, 0x98, 0x9C, 0x100
#: SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER
_SYNC_WRITE_AND_WAIT = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)
_sync_file_range = getattr(_libc, "sync_file_range", None)
if _statx is not None:
    _statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def direct_io_alignment(fd: int) -> tuple[int, int] | None:
    """What the kernel says about direct I/O on the open file ``fd``: alignment of (memory address, file offset), bytes.

    (0, 0) says that this file does not support direct I/O. None says that the kernel (before 6.1), the C library or
    the file system (tmpfs, overlay, most network file systems) does not tell.
    """
    if _statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None

    def field(at: int) -> int:
        return ctypes.c_uint32.from_buffer(answer, at).value

    if not field(_STATX_MASK_AT) & _STATX_DIOALIGN:
        return None
    return field(_STATX_MEMORY_ALIGN_AT), field(_STATX_OFFSET_ALIGN_AT)


def write_back_range(fd: int, offset: int, num_bytes: int) -> None:
    """Wait until the cached pages of a range (bytes) have been written, so that the cache can drop them.

    Not durability: the drive's own cache is not flushed, fdatasync does that. Raises OSError where write-back failed.
    """
    if _sync_file_range is None:
        os.fdatasync(fd)
    elif _sync_file_range(fd, offset, num_bytes, _SYNC_WRITE_AND_WAIT) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
