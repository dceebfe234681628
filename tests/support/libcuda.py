"""A libcuda.so.1 without a driver, so that the real kvikio can move host memory on a machine that has none.

Every function answers "not initialised", which kvikio takes for "this is host memory". Built with the system's C
compiler where there is one.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_NOT_INITIALISED = 3
#: What libkvikio looks up (its headers list them), with and without the suffix of the newer signature.
_NAMES = (
    "cuCtxCreate", "cuCtxDestroy", "cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxPopCurrent", "cuCtxPushCurrent",
    "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetCount", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRetain",
    "cuEventCreate", "cuEventDestroy", "cuEventQuery", "cuEventRecord", "cuEventSynchronize", "cuGetErrorName",
    "cuGetErrorString", "cuInit", "cuLaunchHostFunc", "cuMemFreeHost", "cuMemGetAddressRange", "cuMemHostAlloc",
    "cuMemHostRegister", "cuMemHostUnregister", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync", "cuPointerGetAttribute", "cuPointerGetAttributes", "cuStreamCreate", "cuStreamDestroy",
    "cuStreamSynchronize",
)  # fmt: skip


def build_stub_libcuda(directory: Path) -> Path | None:
    """Put the library into ``directory``, to be named in LD_LIBRARY_PATH. None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source = directory / "stub.c"
    functions = [
        f"int {name}{suffix}(void) {{ return {_NOT_INITIALISED}; }}\n" for name in _NAMES for suffix in ("", "_v2")
    ]
    functions.append("int cuDriverGetVersion(int *version) { *version = 12000; return 0; }\n")
    source.write_text("".join(functions))
    library = directory / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    return library
