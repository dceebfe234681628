"""The kvikio engine: conformance through the real kvikio, its thread pool and its direct I/O, with host memory.

Where there is no CUDA driver, the suite runs itself once more in a process that has a stub of libcuda.so.1
(`tests/support/libcuda.py`). GPU memory is tested where there is a GPU.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hoist.tiers.errors import TransferError
from hoist.tiers.io import IoEngine, KvikioEngine, choose_engine
from hoist.tiers.io.kvikio import _CuHandle
from hoist.tiers.io.requests import Operation
from tests.support.buffers import (
    PAGE_BYTES,
    Memory,
    empty_buffer,
    make_file,
    num_cached_pages,
    open_descriptors,
    random_buffer,
)
from tests.support.libcuda import StubDriver, build_stub_libcuda
from tests.tiers.io.conformance import EngineConformance


def _driver_loads() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


needs_kvikio = pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed")
def _is_stub() -> bool:
    try:
        StubDriver()
    except (OSError, AttributeError):
        return False
    return True


needs_stub = pytest.mark.skipif(not _is_stub(), reason="libcuda.so.1 is a driver's: what is device memory is no choice")
needs_driver = pytest.mark.skipif(not _driver_loads(), reason="no libcuda.so.1 here; runs again on a stub of it")


@needs_kvikio
@pytest.mark.skipif(_driver_loads(), reason="there is a CUDA driver: the suite runs on it")
def test_conformance_on_a_stub_of_the_driver(tmp_path: Path) -> None:
    if build_stub_libcuda(tmp_path) is None:
        pytest.skip("no C compiler to build the stub with")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "--basetemp", tmp_path / "inner"],
        env={**os.environ, "LD_LIBRARY_PATH": paths},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d\d passed, [12] skipped", run.stdout), run.stdout  # this test there, and GPU memory


@needs_kvikio
@needs_driver
class TestKvikioConforms(EngineConformance):
    @pytest.fixture
    def engine(self) -> Iterator[IoEngine]:
        with KvikioEngine(num_threads=4, max_requests=4) as engine:
            yield engine


class _DeclaredMemory(Memory):
    """Host memory that the stub calls a device's; cut anew from the front when it is used up."""

    def __init__(self, driver: StubDriver) -> None:
        self._region = empty_buffer(32 * 2**20)
        self._used_bytes = 0
        driver.declare(self._region)

    def empty(self, num_bytes: int, *, skew: int = 0) -> torch.Tensor:
        need = -(-(num_bytes + skew) // PAGE_BYTES) * PAGE_BYTES
        if self._used_bytes + need > len(self._region):
            self._used_bytes = 0
        start = self._used_bytes + skew
        self._used_bytes += need
        return self._region[start : start + num_bytes].fill_(0x55)


@needs_kvikio
@needs_driver
@needs_stub
class TestDeviceMemoryConforms(EngineConformance):
    """kvikio's compatibility mode: its bounce buffers, its streams, copies that are made when they are waited for."""

    @pytest.fixture
    def driver(self) -> Iterator[StubDriver]:
        driver = StubDriver()
        yield driver
        driver.fail(0)
        driver.declare(None)

    @pytest.fixture
    def memory(self, driver: StubDriver) -> Memory:
        return _DeclaredMemory(driver)

    @pytest.fixture
    def engine(self, driver: StubDriver) -> Iterator[IoEngine]:
        with KvikioEngine(num_threads=4, max_requests=4) as engine:
            yield engine

    @pytest.mark.parametrize(("file_offset", "skew"), [(0, 0), (100, 64)])
    def test_more_than_a_task(
        self, engine: IoEngine, memory: Memory, tmp_path: Path, file_offset: int, skew: int
    ) -> None:
        num_bytes = 9 * 2**20 + 4097
        path = make_file(tmp_path / "file", file_offset + num_bytes)
        source, back = memory.random(num_bytes, seed=0, skew=skew), memory.empty(num_bytes, skew=skew)
        engine.write(path, file_offset, source).result()
        engine.read(path, file_offset, back).result()
        assert torch.equal(back, source)
        assert num_cached_pages(path) == 0

    def test_a_driver_that_fails_ends_the_request_with_one_line(
        self, engine: IoEngine, memory: Memory, driver: StubDriver, tmp_path: Path
    ) -> None:
        path = make_file(tmp_path / "file", 2**20)
        buffer = memory.empty(2**20)
        driver.fail(700)
        for operation, future in (("read", engine.read(path, 0, buffer)), ("write", engine.write(path, 0, buffer))):
            expected = rf"^{operation} of {2**20} bytes at offset 0 of {path} failed: CUDA error: CUDA_ERROR_OF_THE_"
            with pytest.raises(TransferError, match=expected):
                future.result()
        driver.fail(0)
        engine.read(path, 0, buffer).result()


class _Weather(KvikioEngine):
    """Runs ``before`` ahead of each transfer; it may raise what kvikio would."""

    before: Callable[[bool], None] = staticmethod(lambda direct: None)

    def _transfer(self, operation: Operation, file: _CuHandle, offset: int, buffer: torch.Tensor) -> int:
        self.before(bool(self._kvikio.defaults.get("auto_direct_io_write")))
        return super()._transfer(operation, file, offset, buffer)


@needs_kvikio
@needs_driver
class TestKvikioAlone:
    def test_choosing_it_says_why(self) -> None:
        with choose_engine("kvikio") as engine:
            assert engine.name == "kvikio"
            assert "chosen because it was asked for" in engine.describe()
            assert "GDS" in engine.describe() or "compatibility mode" in engine.describe()

    def test_compatibility_can_be_asked_for(self, tmp_path: Path) -> None:
        with KvikioEngine(compat_mode="ON") as engine:
            assert "compatibility mode" in engine.describe()
            assert engine.mode_of(make_file(tmp_path / "file", 4096)) == "direct, aligned to 4096 bytes"

    def test_requests_above_the_task_size_are_whole(self, tmp_path: Path) -> None:
        num_bytes = 9 * 2**20 + 4097
        path = make_file(tmp_path / "file", num_bytes)
        source, back = random_buffer(num_bytes, seed=0), empty_buffer(num_bytes)
        with KvikioEngine() as engine:
            engine.write(path, 0, source).result()
            engine.read(path, 0, back).result()
            assert engine.statistics().buffered_bytes == 2
        assert torch.equal(back, source)

    def test_open_files_are_bounded(self, tmp_path: Path) -> None:
        paths = [make_file(tmp_path / f"file{index}", 4096) for index in range(12)]
        with KvikioEngine(max_open_files=3, max_requests=1) as engine:
            for path in paths:
                engine.read(path, 0, empty_buffer(4096)).result()
            assert len(open_descriptors(tmp_path)) <= 2 * 3

    def test_a_refusal_of_direct_io_is_said_once_and_survived(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(direct: bool) -> None:
            if direct:
                raise RuntimeError("POSIX error on pwrite: Invalid argument")

        path = make_file(tmp_path / "file", 64 * 4096)
        source, back = random_buffer(64 * 4096, seed=0), empty_buffer(64 * 4096)
        with caplog.at_level(logging.WARNING), _Weather() as engine:
            engine.before = refuse
            engine.write(path, 0, source).result()
            engine.read(path, 0, back).result()
            assert engine.statistics().buffered_bytes == 2 * 64 * 4096
            assert "buffered: write of" in engine.describe()
            assert engine.mode_of(path).startswith("buffered: write of")
        assert torch.equal(back, source)
        assert len(caplog.records) == 1
        assert num_cached_pages(path) == 0

    def test_an_interruption_is_tried_again_and_other_errors_are_named(self, tmp_path: Path) -> None:
        texts = ["POSIX error on pread: Interrupted system call"] * 2 + ["POSIX error on pread: Input/output error"]

        def fail(direct: bool) -> None:
            if texts:
                raise RuntimeError(texts.pop(0))

        path = make_file(tmp_path / "file", 4096)
        with _Weather() as engine:
            engine.before = fail
            with pytest.raises(TransferError, match=r"read of 4096 bytes at offset 0 of .*EIO") as caught:
                engine.read(path, 0, empty_buffer(4096)).result()
            assert caught.value.errno == errno.EIO
            engine.read(path, 0, empty_buffer(4096)).result()

    def test_without_the_kernel_module_cufile_is_left_out(self) -> None:
        with KvikioEngine() as engine:
            if Path("/proc/driver/nvidia-fs").exists():
                assert "GDS (" in engine.describe()
            else:
                assert re.search("compatibility mode .*, because (the nvidia-fs|libcufile was)", engine.describe())

    def test_what_gds_says_is_one_line_with_advice(self, tmp_path: Path) -> None:
        def fail(direct: bool) -> None:
            raise RuntimeError("cuFile error at: /src/cpp/file_handle.cpp:197: GPUDirect Storage driver lost\n")

        path = make_file(tmp_path / "file", 4096)
        with _Weather() as engine:
            engine.before = fail
            expected = (
                rf"^read of 4096 bytes at offset 0 of {path} failed: cuFile error: GPUDirect Storage driver lost; "
                r"KVIKIO_COMPAT_MODE=ON goes without GPUDirect Storage$"
            )
            with pytest.raises(TransferError, match=expected):
                engine.read(path, 0, empty_buffer(4096)).result()

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    def test_gpu_memory_round_trip(self, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 2**20)
        source = random_buffer(2**20, seed=0).cuda()
        back = torch.empty_like(source)
        torch.cuda.synchronize()
        with KvikioEngine() as engine:
            engine.write(path, 0, source).result()
            engine.read(path, 0, back).result()
        assert torch.equal(back, source)
