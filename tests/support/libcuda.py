"""A libcuda.so.1 without a driver, so that the real kvikio can move host memory on a machine that has none.

Nothing is device memory until a test declares a region of its own (host) memory to be that: kvikio then moves it as it
would a GPU's, through its bounce buffers, with contexts, streams and copies that this library makes believe. Built with
the system's C compiler where there is one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

_NOT_INITIALISED = 3
#: What libkvikio looks up (its headers list them) and never needs here, with and without the suffix of the newer
#: signature: they answer "not initialised".
_UNUSED = (
    "cuCtxCreate", "cuCtxDestroy", "cuCtxGetDevice", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetCount",
    "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRetain", "cuEventCreate", "cuEventDestroy", "cuEventQuery",
    "cuEventRecord", "cuEventSynchronize", "cuInit", "cuLaunchHostFunc",
)  # fmt: skip
#: What device memory needs: signature, body. ``in(at)``: an address lies in the declared region. Not among them is
#: cuMemcpyBatchAsync, whose parameters differ between versions: kvikio takes cuMemcpyAsync where there is none.
_USED = (
    ("cuPointerGetAttributes(unsigned n, int *kinds, void **answers, ull at)",
     "if (!in(at)) return NOT_INITIALISED; for (unsigned i = 0; i < n; i++) tell(answers[i], kinds[i], at); return 0;"),
    ("cuPointerGetAttribute(void *answer, int kind, ull at)",
     "if (!in(at)) return NOT_INITIALISED; return tell(answer, kind, at);"),
    ("cuMemGetAddressRange(ull *start, size_t *bytes, ull at)",
     "if (!in(at)) return 1; *start = region; *bytes = region_bytes; return 0;"),
    ("cuCtxGetCurrent(void **context)", "*context = num_pushed ? CONTEXT : 0; return 0;"),
    ("cuCtxPushCurrent(void *context)", "num_pushed++; return context != CONTEXT;"),
    ("cuCtxPopCurrent(void **context)", "*context = CONTEXT; return num_pushed-- < 1;"),
    ("cuStreamCreate(void **stream, unsigned flags)", "*stream = calloc(1, sizeof(struct copies)); return 0;"),
    ("cuStreamDestroy(void *stream)", "free(stream); return 0;"),
    ("cuStreamSynchronize(struct copies *stream)", "return finish(stream);"),
    ("cuMemcpyAsync(ull to, ull from, size_t bytes, struct copies *stream)", "return later(to, from, bytes, stream);"),
    ("cuMemcpyHtoDAsync(ull to, void *from, size_t bytes, struct copies *stream)",
     "return later(to, (ull)from, bytes, stream);"),
    ("cuMemcpyDtoHAsync(void *to, ull from, size_t bytes, struct copies *stream)",
     "return later((ull)to, from, bytes, stream);"),
    ("cuMemHostAlloc(void **at, size_t bytes, unsigned flags)", "*at = aligned_alloc(4096, bytes); return !*at;"),
    ("cuMemFreeHost(void *at)", "free(at); return 0;"),
    ("cuMemHostRegister(void *at, size_t bytes, unsigned flags)", "return 0;"),
    ("cuMemHostUnregister(void *at)", "return 0;"),
    ("cuGetErrorName(int code, const char **name)", '*name = "CUDA_ERROR_OF_THE_STUB"; return 0;'),
    ("cuGetErrorString(int code, const char **text)", '*text = "the stub says so"; return 0;'),
)  # fmt: skip
#: One copy waits in a stream at a time: it is made when the stream is waited for, or when another comes.
_HEAD = """
#include <stdlib.h>
#include <string.h>
#define NOT_INITIALISED 3
#define CONTEXT ((void *)0xC0)
typedef unsigned long long ull;
struct copies { ull to, from; size_t bytes; };
static ull region; static size_t region_bytes; static int failing;
static __thread int num_pushed;
void stub_declare(ull start, size_t bytes) { region = start; region_bytes = bytes; }
void stub_fail(int code) { failing = code; }
static int in(ull at) { return region_bytes && at >= region && at < region + region_bytes; }
static int tell(void *answer, int kind, ull at) {
    if (kind == 1) *(void **)answer = CONTEXT;
    else if (kind == 2) *(int *)answer = 2; /* device memory */
    else if (kind == 3) *(ull *)answer = at;
    else if (kind == 9) *(int *)answer = 0; /* the device's number */
    else return 1;
    return 0;
}
static int finish(struct copies *stream) {
    if (failing) return failing;
    if (stream && stream->bytes) memcpy((void *)stream->to, (void *)stream->from, stream->bytes);
    if (stream) stream->bytes = 0;
    return 0;
}
static int later(ull to, ull from, size_t bytes, struct copies *stream) {
    if (num_pushed < 1 || !stream) return 201; /* no context, or a stream that everything else waits for */
    if (!in(to) && !in(from)) return 1;
    int failed = finish(stream);
    stream->to = to; stream->from = from; stream->bytes = bytes;
    return failed;
}
int cuDriverGetVersion(int *version) { *version = 12000; return 0; }
"""


def build_stub_libcuda(directory: Path) -> Path | None:
    """Put the library into ``directory``, to be named in LD_LIBRARY_PATH. None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source = directory / "stub.c"
    functions = [
        f"int {name}{suffix}(void) {{ return {_NOT_INITIALISED}; }}\n" for name in _UNUSED for suffix in ("", "_v2")
    ]
    for signature, body in _USED:
        functions += [f"int {signature.replace('(', f'{suffix}(', 1)} {{ {body} }}\n" for suffix in ("", "_v2")]
    source.write_text(_HEAD + "".join(functions))
    library = directory / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    return library


class StubDriver:
    """The stub, where the process has loaded it instead of a driver."""

    def __init__(self) -> None:
        """Raises OSError or AttributeError where there is a real driver, or none."""
        self._library = ctypes.CDLL("libcuda.so.1")
        self._declare, self._fail = self._library.stub_declare, self._library.stub_fail
        self._declare.argtypes = (ctypes.c_ulonglong, ctypes.c_size_t)

    def declare(self, region: torch.Tensor | None) -> None:
        """This host memory (uint8), and no other, is device memory from here on; None: none is."""
        self._declare(0 if region is None else region.data_ptr(), 0 if region is None else region.numel())

    def fail(self, code: int) -> None:
        """Copies end with this CUresult from here on; 0: well."""
        self._fail(code)
