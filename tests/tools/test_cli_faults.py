"""Bad and full drives under `hoist train`, with delayed updates and with clipping: one line, exit code 1, nothing lost.

When the cause is gone, the same command goes on as if nothing had been; what cannot be gone on from is named. Every
transfer of a run fails once in `tests/scheduler/test_faults.py`; here the command line is what is looked at.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hoist.tiers.format import COMMIT_NAME, LOCK_NAME, SCRATCH_DIRECTORY
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from hoist.tools import preparing
from hoist.tools.errors import RunFailedError
from hoist.tools.train import train
from tests.support.commands import Job, curve, hoist, make_job, process_arguments, tree
from tests.support.damage import chunk_files, flip_a_bit, shorten
from tests.support.engines import Fail, FaultyEngine
from tests.support.faults import Nth
from tests.support.late_device import DeviceFault, LateDevice, NthWork, WorkRule, out_of_memory
from tests.support.processes import mount_small_drive, run_in_process
from tests.support.reporters import Recorder

STEPS = 4
#: On this budget, little more than the smallest, waiting gradients go to scratch.
COMMON = {"host_memory": "1200KiB", "steps": STEPS, "commit_every": 1, "lr_schedule": "cosine", "warmup_steps": 2}
SETTINGS: Mapping[str, Mapping[str, object]] = {"delayed": {"delay": 0.5}, "clipped": {"clip_norm": 0.01}}


@dataclass(kw_only=True, slots=True)
class Runs:
    """Runs of one setting in one folder, and what an undisturbed one gave."""

    job: Job
    capfd: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    setting: Mapping[str, object]
    whole: list[tuple[int, float, float, float]]
    num_calls: int = 0

    def failure(self, *, rule: Nth | None = None, work_rule: WorkRule | None = None) -> str:
        """The one line of `hoist train` that fails, on a drive that fails as ``rule`` says, or a device."""
        with self.monkeypatch.context() as patch:
            if rule is not None:

                def faulty(kind: str) -> IoEngine:
                    return FaultyEngine(DirectEngine(num_threads=2), rule)

                # Which engine a run has is the one thing that is replaced: drives that fail cannot be bought.
                patch.setattr(preparing, "choose_engine", faulty)
            if work_rule is not None:
                # Nor can devices that do: torch finds none here.
                patch.setattr(preparing, "choose_device", lambda name: LateDevice(rule=work_rule))
                return hoist(self.capfd, *self._arguments(), "--device-memory", "2MiB").failure()
            return hoist(self.capfd, *self._arguments()).failure()

    def goes_on(self) -> None:
        """The same command ends well, and its steps are those of an undisturbed run, to the bit."""
        before = self.committed_step()
        ended = hoist(self.capfd, *self._arguments())
        assert (ended.code, ended.err) == (0, "")
        assert curve(self.metrics) == self.whole[before:]
        assert self.committed_step() == STEPS

    def committed_step(self) -> int:
        """Of the store, every committed chunk of which is read."""
        with (
            DirectEngine(num_threads=1) as engine,
            Store.open(self.job.store, engine=engine, writable=False, check="crc") as store,
        ):
            assert store.record is not None
            return store.record.step

    @property
    def metrics(self) -> Path:
        """Of the last call."""
        return self.job.folder / f"metrics-{self.num_calls}.jsonl"

    def _arguments(self) -> list[object]:
        self.num_calls += 1
        return self.job.arguments(metrics=self.metrics, **COMMON, **self.setting)


@dataclass(frozen=True, kw_only=True, slots=True)
class Undisturbed:
    """What a setting gives when nothing happens."""

    curve: list[tuple[int, float, float, float]]
    half: Path
    """A store at step 2."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """Of each setting."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = make_job(folder)
    found = {}
    for name, setting in SETTINGS.items():
        metrics, half = folder / f"{name}.jsonl", folder / f"{name}-half"
        train(job.options(store=folder / name, metrics=metrics, **COMMON, **setting), Recorder())
        train(job.options(**{**COMMON, "steps": 2}, store=half, **setting), Recorder())
        found[name] = Undisturbed(curve=curve(metrics), half=half)
        assert [step for step, *_ in found[name].curve] == list(range(1, STEPS + 1))
    return found


@pytest.fixture(params=SETTINGS)
def runs(
    request: pytest.FixtureRequest,
    undisturbed: dict[str, Undisturbed],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    """With a store at step 2."""
    expected = undisturbed[request.param]
    job = make_job(tmp_path)
    shutil.copytree(expected.half, job.store)
    return Runs(
        job=job, capfd=capfd, monkeypatch=monkeypatch, setting=SETTINGS[request.param], whole=expected.curve
    )


# ---------------------------------------------------------------------- drives that fail in the run


TRANSFERS = (
    ("write", "scratch/waiting-gradients", errno.ENOSPC, 2),
    ("read", "scratch/waiting-gradients", errno.EIO, 2),
    ("read", "/stages/", errno.EIO, 200),
    ("write", "/stages/", errno.EIO, 30),
    ("write", "/stages/", errno.ENOSPC, 90),
    ("flush", "/stages/", errno.EIO, 5),
)


@pytest.mark.parametrize(
    ("runs", "operation", "where", "code", "number"),
    [
        pytest.param(name, *transfer, marks=pytest.mark.slow if (place + row) % 2 else [])
        for row, transfer in enumerate(TRANSFERS)
        for place, name in enumerate(SETTINGS)
    ],
    indirect=["runs"],
)
def test_a_transfer_fails(operation: str, where: str, code: int, number: int, runs: Runs) -> None:
    rule = Nth(operation, number, Fail(code=code), where=where)
    line = runs.failure(rule=rule)
    (failed,) = rule.failed
    assert f"{operation} of {failed.num_bytes} bytes at offset {failed.offset} of {failed.path} failed" in line
    assert errno.errorcode[code] in line
    step = runs.committed_step()
    assert f"--store {runs.job.store} stays at its last commit, step {step}: remove the cause and go on with " in line
    assert line.endswith(f"train --store {runs.job.store}")
    runs.goes_on()


@pytest.mark.parametrize(
    ("fault", "stream", "what"),
    [
        (DeviceFault(), "down", "failed: CUDA error: unspecified launch failure; the run goes on from its last commit"),
        (DeviceFault(error=out_of_memory), "compute", "2.00 GiB; give a smaller --micro-batch-size or --device-memory"),
    ],
    ids=["lost", "out of memory"],
)
def test_the_device_fails(fault: DeviceFault, stream: str, what: str, runs: Runs) -> None:
    """The run goes on where the CPU computes."""
    line = runs.failure(work_rule=NthWork(stream, 8, fault))
    assert what in line
    step = runs.committed_step()
    assert f"--store {runs.job.store} stays at its last commit, step {step}: remove the cause and go on with " in line
    runs.goes_on()


@pytest.mark.parametrize("how", ["shortened", "deleted"])
def test_files_that_are_damaged_in_the_run(how: str, runs: Runs) -> None:
    """All of them cut, or those that the next commit would name deleted: no commit names what is not there."""

    def damage(moment: str) -> None:
        if moment != "step 3":
            return
        for path in chunk_files(runs.job.store, committed=False):
            if how == "deleted":
                path.unlink()
            else:
                for slot in ("0", "1"):
                    os.truncate(path.parent.with_name(slot) / path.name, 0)

    options = runs.job.options(**COMMON, **runs.setting)
    with pytest.raises(RunFailedError, match=rf"{re.escape(str(runs.job.store))}/stages/\S+/c/\d/\d+") as raised:
        train(options, Recorder(at=damage))
    assert raised.value.exit_code == 1
    assert "\n" not in str(raised.value)
    assert re.search(r"stays at its last commit, step [23]: ", str(raised.value))


def train_on_small_drive(job: Job, origin: Path, arguments: list[object], num_bytes: int) -> tuple[int, str] | None:
    """In a process of its own: the store is on a drive with ``num_bytes`` left. Exit code and what stderr got."""
    shutil.rmtree(origin / SCRATCH_DIRECTORY)  # the next run would empty it
    (origin / SCRATCH_DIRECTORY).mkdir()
    store_bytes = sum(path.stat().st_blocks * 512 for path in origin.rglob("*") if path.is_file())
    if not mount_small_drive(job.store, store_bytes + num_bytes):
        return None
    shutil.copytree(origin, job.store, dirs_exist_ok=True)

    def kept() -> dict[str, object]:
        """All but who holds the lock, and scratch, which a run may fill."""
        scratch = str(job.store / SCRATCH_DIRECTORY)
        return {path: what for path, what in tree(job.store).items() if not path.startswith(scratch)}

    before = kept()
    ended = subprocess.run(process_arguments(arguments), capture_output=True, text=True, timeout=200, check=False)
    before.pop(str(job.store / LOCK_NAME))
    after = kept()
    after.pop(str(job.store / LOCK_NAME))
    assert after == before
    return ended.returncode, ended.stderr


def test_a_drive_without_room_for_scratch(runs: Runs) -> None:
    """Really full: refused before the first step, with numbers, and nothing is changed."""
    origin = runs.job.store.rename(runs.job.folder / "origin")
    runs.job.store.mkdir()
    arguments = runs._arguments()
    _, answer = run_in_process(train_on_small_drive, runs.job, origin, arguments, 64 * 1024)
    if answer is None:
        pytest.skip("no small file system can be mounted here")
    code, text = answer
    assert code == 2
    assert text.count("\n") == 1
    assert re.search(r"scratch/\S+: cannot reserve \d+ bytes: No space left on device; \d+ bytes are free", text)
    runs.job.store.rmdir()
    origin.rename(runs.job.store)
    runs.goes_on()


# ---------------------------------------------------------------------- stores that are damaged


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip_a_bit, r"checksum: committed [0-9a-f]{8}, the file gives [0-9a-f]{8}"),
    "a short file": (shorten, r"has \d+ bytes, expected \d+"),
    "a missing file": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_chunk_is_named(what: str, runs: Runs) -> None:
    """What is lost is said to the chunk; put back, the run goes on."""
    damage, message = DAMAGE[what]
    path = chunk_files(runs.job.store, committed=True)[6]
    content = path.read_bytes()
    damage(path)
    record = (runs.job.store / COMMIT_NAME).read_bytes()
    line = runs.failure()
    assert re.search(message, line)
    assert str(path) in line
    assert re.search(r"stage '\S+' array exp_avg chunk \d", line)
    assert (runs.job.store / COMMIT_NAME).read_bytes() == record
    path.write_bytes(content)
    runs.goes_on()


def test_a_damaged_commit_record(runs: Runs) -> None:
    path = runs.job.store / COMMIT_NAME
    content = path.read_bytes()
    for damage, message in (
        (content[: len(content) // 2], r"COMMIT\.json"),
        (b"", r"COMMIT\.json"),
        (content.replace(b'"step":2', b'"step":1'), "checksum: the file states"),
    ):
        assert damage != content
        path.write_bytes(damage)
        before = tree(runs.job.store)
        line = runs.failure()
        assert line.startswith(f"{path}: ")
        assert re.search(message, line)
        assert "put back a copy of it" in line
        assert tree(runs.job.store) == before
    path.write_bytes(content)
    runs.goes_on()


@pytest.mark.parametrize("content", [None, b"", b"\0" * 40, b"{"])
def test_the_lock_of_a_dead_process_is_no_obstacle(content: bytes | None, runs: Runs) -> None:
    """What it says of its holder does not matter: a process that is killed has let go."""
    lock = runs.job.store / LOCK_NAME
    if content is None:
        script = (
            "import os, signal, sys\nfrom pathlib import Path\nfrom hoist.tiers.lock import StoreLock\n"
            "lock = StoreLock(Path(sys.argv[1]))\nos.kill(os.getpid(), signal.SIGKILL)"
        )
        ended = subprocess.run([process_arguments([])[0], "-c", script, str(lock)], check=False)
        assert ended.returncode == -signal.SIGKILL
        assert json.loads(lock.read_bytes())["pid"] != os.getpid()
    else:
        lock.write_bytes(content)
    runs.goes_on()
