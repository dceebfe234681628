"""The promise of --host-memory, from outside the process: in a control group that would kill it, and by sampling.

What is promised: anonymous and shared memory beyond that of the warm process stays below 1.1 times the budget and 32 MiB,
for making a store, training, committing, resuming and exporting, however many layers there are. The arithmetic of the
budget is tested in tests/scheduler/test_memory.py.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.memory_run import MIB, Task, Used

ROOT = Path(__file__).resolve().parent.parent
#: Seconds between two looks at the child.
INTERVAL_SECONDS = 0.01
TIMEOUT_SECONDS = 280


def anonymous_bytes(pid: int) -> int:
    """Anonymous and shared memory of another process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def run(task: Task) -> tuple[Used, int]:
    """What a process of its own says that it used, and the most memory it was seen with beyond its baseline."""
    command = [sys.executable, "-m", "tests.support.memory_run", json.dumps(asdict(task))]
    peak = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            for _ in range(math.ceil(TIMEOUT_SECONDS / INTERVAL_SECONDS)):
                peak = max(peak, anonymous_bytes(child.pid))
                try:
                    child.wait(INTERVAL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            child.kill()
        out, err = child.communicate()
    assert child.returncode == 0, f"exit code {child.returncode} (-9: killed)\n{err[-3000:]}"
    used = Used(**json.loads(out))
    return used, peak - used.baseline


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory that is emptied at once: these stores are large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group, of version 1 or 2."""
    version_1 = Path("/sys/fs/cgroup/memory")
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    if version_1.is_dir():
        parent = version_1
    elif controllers.exists() and "memory" in controllers.read_text().split():
        parent = controllers.parent
    else:
        pytest.skip("no memory controller is mounted at /sys/fs/cgroup")
    made = parent / f"hoist-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error.strerror}")
    try:
        if not any((made / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            pytest.skip(f"{parent} does not hand its memory controller on")
        yield made
    finally:
        made.rmdir()


@pytest.mark.cgroup
def test_a_model_of_many_budgets_lives_in_a_control_group(directory: Path, group: Path) -> None:
    """Page cache counts there as well. Creation, three steps, resume, another step and export; nothing is killed."""
    task = Task(directory=str(directory), hidden=512, layers=32, vocab=2048, budget_mib=128, resumed_steps=1, export=True)
    used, peak = run(replace(task, group=str(group)))
    print(f"{used}, sampled {peak / MIB:.1f} MiB")
    assert used.states >= 8 * used.budget
    assert 0 < used.group_peak <= used.group_limit
    assert peak <= used.allowed
    assert len(used.losses) == 4
    assert all(math.isfinite(loss) for loss in used.losses)
    exported = sum(path.stat().st_size for path in (directory / "export").glob("*.safetensors"))
    assert exported >= used.states // 3  # float32 weights


@pytest.mark.parametrize(
    ("rows", "tokens", "vocab", "budget_mib"),
    [pytest.param(1, 64, 2048, 96, id="small-batches"), pytest.param(2, 256, 8192, 192, id="large-workspace")],
)
def test_the_peak_stays_below_the_line(directory: Path, rows: int, tokens: int, vocab: int, budget_mib: int) -> None:
    """Without any limit, and what the metrics say is what was seen."""
    task = Task(directory=str(directory), hidden=512, layers=6, vocab=vocab, budget_mib=budget_mib, rows=rows, tokens=tokens)
    used, peak = run(replace(task, steps=2, resumed_steps=1, export=True))
    print(f"{used}, sampled {peak / MIB:.1f} MiB")
    assert peak <= used.allowed
    assert used.reported_peak == pytest.approx(peak, rel=0.10)


def test_the_smallest_budget_works_and_does_not_depend_on_the_number_of_layers(directory: Path) -> None:
    """4, 16 and 64 layers are refused below, and run at, the same budget, with the same peak."""
    peaks: dict[int, int] = {}
    budgets: dict[int, int] = {}
    for layers in (4, 16, 64):
        place = directory / str(layers)
        place.mkdir()
        used, peaks[layers] = run(Task(directory=str(place), hidden=256, layers=layers, vocab=4096, steps=2))
        shutil.rmtree(place)
        print(f"{layers} layers: {used}, sampled {peaks[layers] / MIB:.1f} MiB")
        budgets[layers] = used.budget
        assert used.need <= used.budget
        assert peaks[layers] <= used.allowed
    assert len(set(budgets.values())) == 1
    assert max(peaks.values()) <= 1.05 * min(peaks.values())
