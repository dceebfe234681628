"""Runs fio, the yardstick for a drive's bandwidth, where it is installed: the passes of `passes.py`, direct I/O.

Reads its JSON and nothing else. hoist's side is in `passes.py`, which also says what is counted as the drive's work.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hoist.tiers.io.base import IO_ALIGN_BYTES
from hoist.tools.bench.children import in_words
from hoist.tools.bench.passes import DriveWork, KernelCount, Way, reserved_file
from hoist.tools.errors import BenchError

#: fio's I/O engines that are tried.
ENGINES = ("libaio", "io_uring")
#: It hangs if it takes longer, and longer than a very slow drive.
_TIMEOUT_SECONDS, _SLOW_BYTES_PER_SECOND = 300, 10e6


def installed() -> bool:
    """Whether fio is on the PATH."""
    return shutil.which("fio") is not None


def try_out(directory: Path, *, engine: str) -> None:
    """Raise BenchError, in one line, if fio cannot write a page with its ``engine`` and direct I/O."""
    work = DriveWork(num_blocks=2, block_bytes=IO_ALIGN_BYTES, depth=1)
    with reserved_file(directory, work) as path:
        _run(path, engine, work, write=(0, work.num_bytes))


def measure(directory: Path, *, engine: str, work: DriveWork) -> dict[Way, float]:
    """Bytes a second of each pass through fio's ``engine``, over a file like that of hoist's side; always removed.

    fio counts in milliseconds, and flushes with fsync where hoist takes fdatasync. Raises BenchError, in one line, if
    fio fails (not every kernel has io_uring) or less went to and from the drive than it says; StoreRefusedError where
    the file cannot be made.
    """
    half = work.num_bytes // 2
    with reserved_file(directory, work) as path:
        return {
            Way.FIRST_WRITE: _run(path, engine, work, write=(0, work.num_bytes)),
            Way.REWRITE: _run(path, engine, work, write=(0, work.num_bytes)),
            Way.READ: _run(path, engine, work, read=(0, work.num_bytes)),
            Way.BOTH: _run(path, engine, work, read=(0, half), write=(half, half)),
        }


def _run(
    path: Path,
    engine: str,
    work: DriveWork,
    *,
    read: tuple[int, int] | None = None,
    write: tuple[int, int] | None = None,
) -> float:
    """One process of fio with a job for each (offset, length in bytes) given; bytes a second of all together."""
    command = [
        "fio", "--output-format=json", f"--filename={path}", f"--ioengine={engine}", f"--bs={work.block_bytes}",
        f"--iodepth={work.depth}", "--direct=1", "--fallocate=none", "--allow_file_create=0",
        "--clocksource=clock_gettime",
    ]  # fmt: skip
    for how, extent, more in (("read", read, []), ("write", write, ["--end_fsync=1"])):
        if extent is not None:
            offset, num_bytes = extent
            command += [f"--name={how}", f"--rw={how}", f"--offset={offset}", f"--size={num_bytes}", *more]
    counted = KernelCount(children=True)
    jobs = _jobs(command, engine, limit_seconds=_TIMEOUT_SECONDS + work.num_bytes / _SLOW_BYTES_PER_SECOND)
    moved = {how: sum(int(job[how]["io_bytes"]) for job in jobs) for how in ("read", "write")}
    asked = (read[1] if read else 0, write[1] if write else 0)
    if (moved["read"], moved["write"]) != asked:
        raise BenchError(f"fio --ioengine={engine}: moved {moved} bytes, was to read {asked[0]}, write {asked[1]}")
    counted.check(f"fio --ioengine={engine}", read_bytes=asked[0], written_bytes=asked[1])
    # A job's own runtime counts its fsync; "bw_bytes" of a write may not.
    return sum(asked) / (max(1, *(int(job["job_runtime"]) for job in jobs)) / 1000)


def _jobs(command: list[str], engine: str, *, limit_seconds: float) -> list[dict[str, Any]]:
    try:
        # In a session of its own, Ctrl-C leaves it to end by itself, in a second or so, and hoist tells of the stop.
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"fio --ioengine={engine}: did not end within {in_words(limit_seconds)}") from error
    if ended.returncode:
        reason = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        raise BenchError(f"fio --ioengine={engine}: {reason[-1] if reason else f'exit code {ended.returncode}'}")
    # Before the document fio may print warnings.
    jobs: list[dict[str, Any]] = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"]
    for job in jobs:
        if job["error"]:
            raise BenchError(f"fio --ioengine={engine}: error {job['error']}")
    return jobs
