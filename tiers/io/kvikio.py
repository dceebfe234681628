"""The engine for machines with a CUDA driver: kvikio moves file bytes to and from GPU memory, or host memory.

GPUDirect Storage where the system has it, kvikio's own bounce buffers where not. kvikio is imported when an engine is
made, never before; `choose.py` says when it is used, `direct.py` is the engine that needs none of this.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import logging
import os
import re
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hoist.tiers.errors import RefusalError, TransferError
from hoist.tiers.io import syscalls
from hoist.tiers.io.alignment import DirectAlignment, direct_range
from hoist.tiers.io.base import IoEngine, IoStatistics
from hoist.tiers.io.files import HandleCache, descriptor_capacity
from hoist.tiers.io.pool import WorkerPool
from hoist.tiers.io.requests import (
    Counters,
    Operation,
    check_path,
    check_request,
    drop_cache,
    no_readahead,
    short_file_error,
    started_future,
    transfer_error,
)

_log = logging.getLogger(__name__)

#: CuFile opens every file twice, with and without O_DIRECT.
_DESCRIPTORS_PER_FILE = 2
#: kvikio takes any address: what is not page-aligned goes through its aligned bounce buffers, still by direct I/O.
_ANY_ADDRESS = DirectAlignment(memory_bytes=1)
#: Where kvikio's errors name the line of its source that noticed.
_SOURCE_LINE = re.compile(r" at: \S+:\d+(?=: )")
_CODES_BY_TEXT = {os.strerror(code): code for code in errno.errorcode}


class KvikioEngine(IoEngine):
    """kvikio's ``CuFile.pread`` and ``pwrite``; buffers are CPU or CUDA tensors, from any place in an allocation.

    A CUDA buffer must be ready when a request is made (wait for the mark of what fills it): kvikio pushes the context
    that the memory belongs to, and copies in streams of its own. Those, as cuFile, wait for the legacy default stream
    of the device: kernels that run there hold up transfers, those in other streams do not.

    GPUDirect Storage moves what begins and ends at multiples of 4096 bytes; ends that do not, requests shorter than
    kvikio's ``gds_threshold`` (16 KiB) and files that cuFile refuses go through host memory, with the same result.
    kvikio's settings, its thread pool and its bounce buffers belong to the process, not to one engine: there are as
    many buffers of 4 MiB, pinned, as transfers have been in them at once, ``num_threads`` and the short ones.
    """

    name = "kvikio"
    takes_device_memory = True

    def __init__(
        self,
        *,
        num_threads: int = 8,
        max_requests: int = 16,
        max_open_files: int = 512,
        compat_mode: str | None = None,
        why: str = "",
    ) -> None:
        """Import kvikio and set its defaults: thread count, and direct I/O in both directions (it reads buffered else).

        ``max_requests`` requests are with kvikio at once, later ones wait. ``compat_mode`` is ON, OFF or AUTO as kvikio
        defines them; None leaves what the environment (KVIKIO_COMPAT_MODE) says. ``why`` is for :meth:`describe`.
        Raises RefusalError where kvikio or libcuda.so.1 cannot be loaded, with what to install.
        """
        for label, value in (
            ("num_threads", num_threads),
            ("max_requests", max_requests),
            ("max_open_files", max_open_files),
        ):
            if value < 1:
                raise ValueError(f"{label}: got {value}, must be at least 1")
        self._kvikio: Any = _load_kvikio()
        modes, defaults = self._kvikio.CompatMode, self._kvikio.defaults
        self._task_bytes: int = defaults.get("task_size")
        settings: dict[str, object] = {
            "num_threads": num_threads,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
            # A buffer holds one task, however large it is.
            "bounce_buffer_size": self._task_bytes,
        }
        #: Why there is no GPUDirect Storage where nobody asked that there be none.
        self._why_compat = ""
        if compat_mode is not None:
            settings["compat_mode"] = modes[compat_mode]
        elif "KVIKIO_COMPAT_MODE" not in os.environ:
            # Without the kernel module cuFile itself would copy, in ways that nothing here measures or bounds.
            self._why_compat = _why_no_gds()
            settings["compat_mode"] = modes.ON if self._why_compat else modes.AUTO
        defaults.set(settings)
        self._why = why
        self._counters = Counters()
        #: Guards _closed against a submit, and _refused.
        self._lock = threading.Lock()
        self._closed = False
        #: Why direct I/O was turned off; kvikio knows one switch for all file systems.
        self._refused: str | None = None
        capacity = descriptor_capacity(max_open_files, descriptors_each=_DESCRIPTORS_PER_FILE)
        self._files: HandleCache[_CuHandle] = HandleCache(open_handle=self._open_file, capacity=capacity)
        self._pool = WorkerPool(max_requests)

    # The contract

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        check_request(path, offset, buffer)
        return self._enqueue("read", str(path), offset, buffer)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        check_request(path, offset, buffer)
        return self._enqueue("write", str(path), offset, buffer)

    def flush(self, path: Path) -> Future[None]:
        check_path(path)
        return self._enqueue("flush", str(path), 0, None)

    def forget(self, path: Path) -> None:
        self._files.forget(str(path))

    def describe(self) -> str:
        defaults = self._kvikio.defaults
        says = [f"kvikio {self._kvikio.__version__}: {self.describe_device_path()}"]
        says.append(f"{defaults.get('num_threads')} threads, tasks of {self._task_bytes / 2**20:g} MiB")
        if self._why:
            says.append(f"chosen because {self._why}")
        if self._refused:
            says.append(f"buffered: {self._refused}")
        return "; ".join(says)

    def describe_device_path(self) -> str:
        if self._uses_gds():
            says = "GDS (GPUDirect Storage, file to GPU memory without a copy in host memory)"
            why_no_gds = _why_no_gds()
            if why_no_gds:
                says += f" as asked for, but {why_no_gds}, so cuFile may copy all the same"
            return says
        asked = self._kvikio.defaults.get("compat_mode") == self._kvikio.CompatMode.ON
        why = self._why_compat or ("it was asked for" if asked else "kvikio found GDS not usable here")
        return f"compatibility mode (POSIX direct I/O, bounce buffers for GPU memory), because {why}"

    def mode_of(self, path: Path) -> str:
        """How host memory moves to and from a file: ``direct, ...`` or ``buffered: `` and why. Raises OSError."""
        check_path(path)
        with self._files.lease(str(path), writable=False) as file:
            if self._refused:
                return f"buffered: {self._refused}"
            if not file.direct:
                return "buffered: the file system refused to open the file with O_DIRECT"
            return "direct, aligned to 4096 bytes"

    def statistics(self) -> IoStatistics:
        return self._counters.snapshot()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._counters.wait_idle()
        self._pool.close()
        self._files.close()

    # Submission, and execution on the pool's threads: each sees one request through

    def _enqueue(self, operation: Operation, path: str, offset: int, buffer: torch.Tensor | None) -> Future[None]:
        future = started_future()
        with self._lock:
            if self._closed:
                raise ValueError(f"{operation} of {path}: this I/O engine is closed")
            self._counters.begin()
            self._pool.put(partial(self._run, operation, path, offset, buffer, future))
        return future

    def _run(
        self, operation: Operation, path: str, offset: int, buffer: torch.Tensor | None, future: Future[None]
    ) -> None:
        num_bytes = 0 if buffer is None else buffer.numel()
        buffered_bytes = 0
        failure: TransferError | None = None
        try:
            if buffer is None:
                with self._files.lease(path, writable=False) as file:
                    os.fdatasync(file.descriptor)
            elif num_bytes:
                buffered_bytes = self._move(operation, path, offset, buffer)
        except TransferError as error:
            failure = error
        except Exception as error:
            failure = transfer_error(operation, path, offset, num_bytes, cause=_with_errno(error))
        del buffer
        self._counters.end(operation, num_bytes=num_bytes, buffered_bytes=buffered_bytes, failed=failure is not None)
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)

    def _move(self, operation: Operation, path: str, offset: int, buffer: torch.Tensor) -> int:
        """Transfer a request completely; how many of its bytes went through the page cache."""
        num_bytes = buffer.numel()
        with self._files.lease(path, writable=operation == "write") as file:
            while True:
                by_gds = self._uses_gds() and buffer.device.type != "cpu" and num_bytes >= self._gds_bytes()
                direct = file.direct and not self._refused
                try:
                    moved = self._transfer(operation, file, offset, buffer)
                    break
                except RuntimeError as error:
                    cause = _with_errno(error)
                    code = cause.errno if isinstance(cause, OSError) else None
                    if code == errno.EINVAL and direct and not by_gds:
                        self._refuse(f"{operation} of {path} with O_DIRECT: {os.strerror(errno.EINVAL)}")
                    elif code != errno.EINTR:
                        file_bytes = os.fstat(file.descriptor).st_size
                        if operation == "read" and code is None and offset + num_bytes > file_bytes:
                            raise short_file_error(path, offset, num_bytes, file_bytes) from error
                        raise
            if moved != num_bytes:
                raise OSError(errno.EIO, f"kvikio moved {moved} of {num_bytes} bytes")
            if by_gds:
                return 0
            buffered_bytes = self._buffered_bytes(offset, num_bytes, direct=direct)
            if buffered_bytes:
                if operation == "write":
                    syscalls.write_back_range(file.descriptor, offset, num_bytes)
                drop_cache(file.descriptor, offset, num_bytes)
            return buffered_bytes

    def _uses_gds(self) -> bool:
        """Whether GPUDirect Storage is what kvikio tries for GPU memory: of single files it may yet think otherwise."""
        return not self._kvikio.defaults.is_compat_mode_preferred()

    def _gds_bytes(self) -> int:
        """What shorter requests than this go without GDS."""
        threshold: int = self._kvikio.defaults.get("gds_threshold")
        return threshold

    def _transfer(self, operation: Operation, file: _CuHandle, offset: int, buffer: torch.Tensor) -> int:
        """One request to kvikio, waited for; bytes moved. RuntimeError is how kvikio fails."""
        array: object = buffer.numpy() if buffer.device.type == "cpu" else buffer
        call = file.cufile.pread if operation == "read" else file.cufile.pwrite
        moved: int = call(array, size=buffer.numel(), file_offset=offset).get()
        return moved

    def _buffered_bytes(self, offset: int, num_bytes: int, *, direct: bool) -> int:
        """What kvikio's POSIX path sends through the page cache: each task's ends that do not fill a page."""
        if not direct:
            return num_bytes
        total = num_bytes
        for start in range(0, num_bytes, self._task_bytes):
            task_bytes = min(self._task_bytes, num_bytes - start)
            first, last = direct_range(offset + start, task_bytes, 0, _ANY_ADDRESS)
            total -= last - first
        return total

    def _open_file(self, path: str, writable: bool) -> _CuHandle:
        try:
            return _CuHandle(self._kvikio.CuFile(path, "r+" if writable else "r"), writable=writable)
        except RuntimeError as error:
            raise _with_errno(error) from error

    def _refuse(self, why: str) -> None:
        with self._lock:
            if self._refused:
                return
            self._refused = why
        self._kvikio.defaults.set({"auto_direct_io_read": False, "auto_direct_io_write": False})
        _log.warning("no direct I/O, kvikio uses buffered I/O from here on: %s", why)


class _CuHandle:
    """A CuFile in the cache of open files."""

    def __init__(self, cufile: Any, *, writable: bool) -> None:
        self.cufile = cufile
        self.writable = writable
        #: Whether the file system let it be opened with O_DIRECT.
        self.direct: bool = cufile.is_direct_io_supported()
        no_readahead(self.descriptor)

    @property
    def descriptor(self) -> int:
        """Of the file opened without O_DIRECT."""
        descriptor: int = self.cufile.fileno()
        return descriptor

    def close(self) -> None:
        self.cufile.close()


def _load_kvikio() -> Any:
    try:
        # kvikio's host path asks the driver library where a pointer lies and fails in the first transfer without it.
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RefusalError(
            f"I/O engine kvikio: the CUDA driver cannot be loaded ({error}); "
            "install an NVIDIA driver or use the engine 'direct'"
        ) from error
    try:
        module = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")
        importlib.import_module("kvikio.cufile_driver")
    except (ImportError, OSError) as error:  # OSError: its own library cannot be loaded
        raise RefusalError(
            f"I/O engine kvikio: kvikio cannot be imported ({error}); "
            "pip install 'hoist-engine[gds]' or use the engine 'direct'"
        ) from error
    return module


def _why_no_gds() -> str:
    """What GPUDirect Storage lacks here; empty where nothing is known to be missing."""
    driver: Any = importlib.import_module("kvikio.cufile_driver")
    if driver.libcufile_version() == (0, 0):
        return "libcufile was not found"
    if not Path("/proc/driver/nvidia-fs").exists():
        return "the nvidia-fs kernel module is not loaded"
    return ""


def _with_errno(error: Exception) -> Exception:
    """kvikio's RuntimeError as the OSError that it reports in text, else without its source line and with advice."""
    if not isinstance(error, RuntimeError):
        return error
    text = _SOURCE_LINE.sub("", str(error).strip())
    codes = [code for words, code in _CODES_BY_TEXT.items() if text.endswith(f": {words}")]
    if codes:
        return OSError(codes[0], os.strerror(codes[0]))
    if text.startswith("cuFile error"):
        text += "; KVIKIO_COMPAT_MODE=ON goes without GPUDirect Storage"
    return RuntimeError(text)
