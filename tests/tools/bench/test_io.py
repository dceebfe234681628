"""`hoist bench io`, small: both sides do the same work, wrong bytes and cached ones are refused, and so is what cannot
be measured.

The stream of requests and the file are tested in `tests/tiers/io/test_probe.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hoist.scheduler.errors import ConfigError
from hoist.tiers.io.direct import DirectEngine
from hoist.tools.bench import fio, io
from hoist.tools.bench.passes import DriveWork, KernelCount, Way, measure_engine
from hoist.tools.errors import BenchError
from tests.support.commands import hoist
from tests.support.engines import RecordingEngine

MIB = 2**20
WORK = DriveWork(num_blocks=4, block_bytes=MIB, depth=2)

needs_fio = pytest.mark.skipif(not fio.installed(), reason="fio is not installed")


def test_every_pass_moves_what_it_says(drive: Path) -> None:
    with RecordingEngine(DirectEngine(num_threads=2)) as engine:
        rates = measure_engine(drive, engine, WORK)
        moved = {
            operation: sum(one.num_bytes for one in engine.requests if one.operation == operation)
            for operation in ("read", "write")
        }
        assert engine.unaligned == []
        assert engine.statistics().flushes == 3
        assert engine.statistics().buffered_bytes == 0
    assert list(rates) == list(Way)
    assert min(rates.values()) > 0
    # Read: a whole pass, half of one beside writes, and the check of every byte.
    assert moved == {"read": 2.5 * WORK.num_bytes, "write": 2.5 * WORK.num_bytes}


class _LosesRewrites(DirectEngine):
    """The first write of each block arrives, later ones are said to."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self._written: set[int] = set()

    def _pwrite(self, descriptor: int, view: memoryview, offset: int) -> int:
        target = offset if offset not in self._written else (WORK.num_blocks - 1) * MIB
        self._written.add(offset)
        return super()._pwrite(descriptor, view, target)


class _FlipsABit(DirectEngine):
    """The last bit of a page that is read."""

    def _pread(self, descriptor: int, view: memoryview, offset: int) -> int:
        moved = super()._pread(descriptor, view, offset)
        if offset == MIB:
            view[4095] ^= 1
        return moved


@pytest.mark.parametrize("kind", [_LosesRewrites, _FlipsABit])
def test_wrong_bytes_are_refused(drive: Path, kind: type[DirectEngine]) -> None:
    with kind() as engine, pytest.raises(BenchError, match="blocks that were read are not what was written"):
        measure_engine(drive, engine, WORK)


class _Cached(DirectEngine):
    """Through the page cache, which is warm when it comes to read."""

    def __init__(self) -> None:
        super().__init__(num_threads=2, direct=False)

    def _drop_cache(self, descriptor: int, offset: int, num_bytes: int) -> None:
        pass


def test_what_the_page_cache_answers_is_refused(drive: Path) -> None:
    with _Cached() as engine, pytest.raises(BenchError, match=r"direct, read: 4\.0 MiB were to be read from a drive"):
        measure_engine(drive, engine, WORK)


def test_bytes_that_drives_moved_are_counted(drive: Path) -> None:
    counted = KernelCount()
    counted.check("nobody", read_bytes=0, written_bytes=0)
    with pytest.raises(BenchError, match=r"somebody: 1024\.0 MiB were to be written to a drive"):
        counted.check("somebody", read_bytes=0, written_bytes=2**30)


def test_memory_is_no_drive(in_memory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = hoist(capfd, "bench", "io", in_memory, "--size", "4MiB", "--block", "1MiB", "--depth", 1).failure()
    assert "the page cache or a file system in memory did the rest; give a directory on a local drive" in line


@needs_fio
def test_fio_is_compared_over_the_same_passes(drive: Path) -> None:
    found = io.run(
        drive, num_bytes=4 * MIB, block_bytes=[MIB], depths=[2], rounds=1, engines=["direct"], fio_engines=["libaio"]
    )
    assert [row["way"] for row in found.rows] == list(Way)
    for row in found.rows:
        assert row["engine"] == "direct"
        assert row["mode"] == "direct"
        assert row["bytes_per_second"] > 0
        if row["fio_engine"] is not None:  # else a note says why
            assert row["fio_ratio"] == pytest.approx(row["bytes_per_second"] / row["fio_bytes_per_second"])
    assert ("libaio" in " ".join(found.notes)) == (found.rows[0]["fio_engine"] is None)


@needs_fio
def test_fio_that_fails_is_told_in_one_line(drive: Path) -> None:
    with pytest.raises(BenchError, match=r"^fio --ioengine=nonsense: [^\n]+$"):
        fio.measure(drive, engine="nonsense", work=WORK)


def test_without_fio_there_is_a_note(
    drive: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert shutil.which("fio") is None
    output = tmp_path_factory.mktemp("output") / "io.json"
    asked = ("--size", "4MiB", "--block", "1MiB", "--depth", 2, "--rounds", 1)
    result = hoist(capfd, "bench", "io", drive, *asked, "--output", output)
    assert result.code == 0
    assert "fio is not installed, so there is nothing to compare with" in " ".join(result.out.split())
    assert max(len(line) for line in result.out.splitlines()) <= 80
    document = json.loads(output.read_text())
    asked_again = f"hoist bench io {drive} --size 4MiB --block 1MiB --depth 2 --rounds 1 --output {output}"
    assert document["command"] == asked_again
    assert [row["fio_ratio"] for row in document["rows"]] == [None] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_bytes": [5000]}, "--block: got 5000 bytes, must be a multiple of 4096"),
        ({"depths": [0]}, "--depth: got 0, must be at least 1"),
        ({"depths": [4]}, "--size: got 4.0 MiB, must be at least 8.0 MiB, twice what is in flight with --block"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        io.run(tmp_path, **{"num_bytes": 4 * MIB, "block_bytes": [MIB], "depths": [1]} | settings)  # type: ignore[arg-type]


def test_a_directory_or_a_file_that_cannot_be_used_is_refused_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert "missing: is not a directory; make it first" in hoist(capfd, "bench", "io", missing).refusal()
    assert "missing is not a directory" in hoist(capfd, "bench", "io", tmp_path, "--output", missing / "x").refusal()
    line = hoist(capfd, "bench", "io", tmp_path, "--size", "100000GiB", "--rounds", 1).refusal()
    assert "cannot allocate" in line
    assert "No space left" in line or "too large" in line
