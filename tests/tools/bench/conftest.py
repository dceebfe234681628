"""Places for benchmarks: a directory on a drive, in which nothing is left, and one in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hoist.tools.doctor import file_system_of
from tests.support.training import torch_threads

_SHARED_MEMORY = Path("/dev/shm")


def _kind(directory: Path) -> str:
    return file_system_of(directory, Path("/proc/self/mountinfo"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Everything here is tiny: threads would only wait for each other."""
    with torch_threads(1):
        yield


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    if _kind(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("the temporary directory is in memory")
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A new directory, which nothing may be left in either."""
    if _kind(_SHARED_MEMORY) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    folder = Path(tempfile.mkdtemp(dir=_SHARED_MEMORY, prefix="hoist-test-"))
    try:
        yield folder
        assert list(folder.iterdir()) == []
    finally:
        shutil.rmtree(folder)
