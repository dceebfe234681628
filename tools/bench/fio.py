"""Runs fio, the yardstick for a drive's bandwidth, where it is installed: one sequential job, direct I/O.

Reads its JSON and nothing else. What hoist's engines reach is measured by `hoist.tiers.io.probe`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hoist.tools.errors import BenchError

#: fio's I/O engines that are tried.
ENGINES = ("libaio", "io_uring")
_TIMEOUT_SECONDS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class FioRates:
    """What one job each way reached, in bytes a second."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    """The final fsync included."""


def installed() -> bool:
    """Whether fio is on the PATH."""
    return shutil.which("fio") is not None


def measure(directory: Path, *, engine: str, num_bytes: int, block_bytes: int, depth: int) -> FioRates:
    """Write a temporary file of ``num_bytes`` in ``directory`` and read it, in blocks, ``depth`` of them in flight.

    The file is always removed. Raises BenchError, in one line, if fio fails: not every kernel has io_uring.
    """
    with tempfile.TemporaryDirectory(dir=directory, prefix=".hoist-fio-") as folder:
        rates = [
            _run(Path(folder) / "file", engine, how, num_bytes, block_bytes, depth) for how in ("write", "read")
        ]
    return FioRates(write_bytes_per_second=rates[0], read_bytes_per_second=rates[1])


def _run(path: Path, engine: str, how: str, num_bytes: int, block_bytes: int, depth: int) -> float:
    command = [
        "fio", "--name=hoist", f"--filename={path}", f"--ioengine={engine}", f"--rw={how}", f"--bs={block_bytes}",
        f"--size={num_bytes}", f"--iodepth={depth}", "--direct=1", "--fallocate=posix", "--randrepeat=1",
        "--output-format=json", *(["--end_fsync=1"] if how == "write" else ["--invalidate=1"]),
    ]  # fmt: skip
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"fio --ioengine={engine}: did not end within {_TIMEOUT_SECONDS} s") from error
    if ended.returncode:
        reason = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        raise BenchError(f"fio --ioengine={engine}: {reason[-1] if reason else f'exit code {ended.returncode}'}")
    # Before the document fio may print warnings.
    document = json.loads(ended.stdout[ended.stdout.index("{") :])
    job = document["jobs"][0]
    if job["error"]:
        raise BenchError(f"fio --ioengine={engine}: error {job['error']}")
    # The job's own runtime counts the fsync; "bw_bytes" of a write may not.
    seconds = job["job_runtime"] / 1000 if how == "write" else job["read"]["runtime"] / 1000
    return float(job[how]["io_bytes"] / max(seconds, 1e-3))
