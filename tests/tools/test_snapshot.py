"""`hoist snapshot`, `hoist restore`, and the snapshots that a run makes on its own: training goes on bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hoist.scheduler.trainer import Trainer
from hoist.tiers.errors import CorruptChunkError
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.snapshots import list_snapshots
from hoist.tiers.store import Store
from hoist.tools.snapshot import AutomaticSnapshots, check_space_for_run, num_made
from hoist.tools.train import train
from tests.support import faults
from tests.support.commands import Job, curve, hoist, make_job, tree
from tests.support.faults import quick_directory
from tests.support.processes import fill_up, mount_small_drive, run_in_process
from tests.support.reporters import Recorder
from tests.support.training import torch_threads


@pytest.fixture
def job() -> Iterator[Job]:
    with torch_threads(1), quick_directory() as folder:
        yield make_job(folder)


def run(job: Job, **changed: object) -> Recorder:
    report = Recorder()
    train(job.options(**changed), report)
    return report


def names(store: Path) -> list[str]:
    found, damaged = list_snapshots(store)
    assert not damaged
    return [info.name for info in found]


def checksums(store: Path) -> tuple[int, bytes]:
    """Step and checksums of what is committed, all compared with the chunks."""
    with DirectEngine(num_threads=1) as engine, Store.open(store, engine=engine, writable=False, check="crc") as opened:
        assert opened.record is not None
        return opened.record.step, (store / opened.record.checksum_file).read_bytes()


@pytest.mark.parametrize("settings", [{}, {"delay": 0.5}, {"clip_norm": 0.5, "dropout": 0.1, "order": "shuffle"}])
def test_restored_training_repeats_itself(
    job: Job, settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = job.folder / "first.jsonl", job.folder / "second.jsonl"
    run(job, steps=2, **settings)
    kept = checksums(job.store)
    made = hoist(capfd, "snapshot", job.store, "two")
    assert made.code == 0
    assert made.out.splitlines() == [
        f"snapshot two of step 2 is in {job.store / 'snapshots' / 'two'}",
        f"go back to it: hoist restore {job.store} two",
    ]
    run(job, steps=4, metrics=first, **settings)
    after = checksums(job.store)
    result = hoist(capfd, "restore", job.store, "two")
    assert result.code == 0
    assert result.out.splitlines() == [
        f"{job.store} was at step 4 and is now at step 2, as snapshot two kept it",
        f"go on: hoist train --store {job.store} --steps 4",  # the snapshot's own run was to end there
    ]
    assert checksums(job.store) == kept
    run(job, steps=4, metrics=second, **settings)
    assert checksums(job.store) == after
    assert curve(second) == curve(first)
    assert [line[0] for line in curve(first)] == [3, 4]
    assert checksums(job.store / "snapshots" / "two") == kept


def test_a_run_makes_its_own(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """Every two steps, whatever --commit-every says; the last two stay, and the one with a name of its own."""
    plain = Job.at(job.folder)
    run(plain, store=job.folder / "plain", steps=7)
    run(job, steps=1)
    assert hoist(capfd, "snapshot", job.store, "step-000001").code == 0
    report = run(job, steps=7, snapshot_every=2, keep_snapshots=2, commit_every=5)
    assert report.notices == ["changed since the last commit: --steps 7 (was 1)"]
    assert names(job.store) == ["step-000001", "step-000004", "step-000006"]
    assert [checksums(job.store / "snapshots" / name)[0] for name in names(job.store)] == [1, 4, 6]
    assert checksums(job.store) == checksums(job.folder / "plain")
    found, _ = list_snapshots(job.store)
    assert [info.automatic for info in found] == [False, True, True]
    listed = hoist(capfd, "snapshot", job.store, "--list")
    assert [line.split("  ")[:2] for line in listed.out.splitlines()] == [
        ["step-000001", "step 1"], ["step-000004", "step 4"], ["step-000006", "step 6"],
    ]  # fmt: skip
    assert [line.endswith("automatic") for line in listed.out.splitlines()] == [False, True, True]
    assert [info["name"] for info in json.loads(hoist(capfd, "snapshot", job.store, "--list", "--json").out)[
        "snapshots"]] == names(job.store)  # fmt: skip
    run(job, steps=9)  # remembered, as other options are
    assert names(job.store) == ["step-000001", "step-000006", "step-000008"]


def test_the_same_step_twice(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """After going back, the run comes to the step again; nothing is replaced."""
    run(job, steps=3, snapshot_every=1)
    assert hoist(capfd, "restore", job.store, "step-000001").code == 0
    run(job, steps=2)
    assert names(job.store) == ["step-000001", "step-000002", "step-000003", "step-000002-2"]
    two, again = (checksums(job.store / "snapshots" / name) for name in ("step-000002", "step-000002-2"))
    assert two == again


def test_export_and_verify_read_a_snapshot(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    run(job, steps=2)
    assert hoist(capfd, "export", job.store, job.folder / "then").code == 0
    assert hoist(capfd, "snapshot", job.store, "two").code == 0
    run(job, steps=3)
    snapshot = job.store / "snapshots" / "two"
    assert hoist(capfd, "verify", snapshot).code == 0
    assert hoist(capfd, "export", snapshot, job.folder / "kept").code == 0
    then, kept = (load_file(job.folder / name / "model.safetensors") for name in ("then", "kept"))
    assert then.keys() == kept.keys()
    assert all(bool((then[name] == kept[name]).all()) for name in then)


def test_removal(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    run(job, steps=1)
    assert hoist(capfd, "snapshot", job.store, "--list").out == "no snapshots\n"
    assert hoist(capfd, "snapshot", job.store, "one", "--json").code == 0
    assert hoist(capfd, "snapshot", job.store, "one", "--remove").out == "snapshot one is removed\n"
    assert names(job.store) == []
    assert "has no snapshot 'one'; there are: none" in hoist(capfd, "restore", job.store, "one").refusal()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_while_a_run_goes_on(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    run(job, steps=1, snapshot_every=1)
    before = tree(job.store / "snapshots")
    with DirectEngine(num_threads=1) as engine, Store.open(job.store, engine=engine):
        for arguments in (("snapshot", job.store, "x"), ("snapshot", job.store, "step-000001", "--remove")):
            line = hoist(capfd, *arguments).refusal()
            assert "is writing to this store" in line
            assert "a run makes snapshots itself with hoist train --snapshot-every N" in line
        assert "is writing to this store" in hoist(capfd, "restore", job.store, "step-000001").refusal()
        assert hoist(capfd, "snapshot", job.store, "--list").code == 0
    assert tree(job.store / "snapshots") == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either the NAME of a snapshot or --list"),
        (("a", "--list"), "give either the NAME of a snapshot or --list"),
        (("--list", "--remove"), "give either the NAME of a snapshot or --list"),
        (("--remove",), "give either the NAME of a snapshot or --list"),
        (("a/b",), "snapshot name 'a/b': give at most 200 letters"),
    ],
)
def test_bad_usage(job: Job, arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    run(job, steps=0)
    before = tree(job.store)
    assert message in hoist(capfd, "snapshot", job.store, *arguments).refusal()
    assert tree(job.store) == before


def test_no_store(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (("snapshot", tmp_path, "a"), ("snapshot", tmp_path, "--list")):
        assert "holds no hoist store" in hoist(capfd, *arguments).refusal()
    assert "has no snapshot 'a'" in hoist(capfd, "restore", tmp_path, "a").refusal()


def test_training_neither_in_nor_over_snapshots(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    run(job, steps=1, snapshot_every=1)
    before = tree(job.store)
    inside = job.store / "snapshots" / "step-000001"
    for more in ((), ("--fresh",)):
        line = hoist(capfd, *job.arguments(*more, store=inside)).refusal()
        assert "is a snapshot, which can be exported and verified but not trained in" in line
    line = hoist(capfd, *job.arguments("--fresh")).refusal()
    assert "holds snapshots (step-000001)" in line
    assert "--remove, or name another place" in line
    assert tree(job.store) == before


def test_options(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    line = hoist(capfd, *job.arguments(keep_snapshots=2)).refusal()
    assert line == "--keep-snapshots: 2 is not allowed without --snapshot-every; give both"
    assert "--snapshot-every: -1" in hoist(capfd, *job.arguments(snapshot_every=-1)).refusal()
    (job.folder / "run.toml").write_text("snapshot-every = 1\nkeep-snapshots = 1\n")
    assert hoist(capfd, *job.arguments(config=job.folder / "run.toml")).code == 0
    assert names(job.store) == ["step-000003"]


@pytest.mark.parametrize(
    ("every", "step", "steps", "made"), [(0, 0, 9, 0), (2, 0, 9, 4), (2, 2, 9, 3), (3, 8, 9, 1), (10, 0, 9, 0)]
)
def test_how_many_are_made(every: int, step: int, steps: int, made: int) -> None:
    assert num_made(every=every, step=step, steps=steps) == made


def test_snapshots_that_do_not_fit_are_refused_before_the_first_step(job: Job) -> None:
    def check(keep: int) -> None:
        check_space_for_run(
            job.store, every=2, keep=keep, step=0, steps=9, bytes_each=2**59, leave_bytes=7
        )

    with pytest.raises(OSError, match=r"--snapshot-every 2: 4 snapshots of \d+ bytes at a time \(fewer with --keep-"):
        check(0)
    with pytest.raises(OSError, match=r"--snapshot-every 2: 3 snapshots of \d+ bytes at a time needs \d+ bytes .*left"):
        check(2)
    job.store.mkdir()
    check_space_for_run(job.store, every=10, keep=0, step=0, steps=9, bytes_each=2**59, leave_bytes=0)


def test_a_run_with_too_many_is_refused(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    line = hoist(capfd, *job.arguments(steps=10**12, snapshot_every=1)).refusal()
    assert "--snapshot-every 1: 1000000000000 snapshots of" in line
    assert not job.store.exists()
    run(job, steps=1)
    before = tree(job.store)
    line = hoist(capfd, *job.arguments(steps=10**12, snapshot_every=1)).refusal()
    assert "--snapshot-every 1: 999999999999 snapshots of" in line
    assert tree(job.store) == before


def train_on_a_drive_that_fills_up(folder: Path, drive: Path) -> tuple[list[str], list[str], int] | None:
    """In a process of its own: what was told, the snapshots, and the step that was reached."""
    job = Job.at(folder)
    if not mount_small_drive(drive, 64 * 2**20):
        return None

    def fill(moment: str) -> None:
        if moment == "step 2":
            (drive / "small").write_bytes(bytes(2**18))  # room for CRC files and COMMIT.json alone
            fill_up(drive / "filler")
            (drive / "small").unlink()

    report = Recorder(at=fill)
    store = drive / "store"
    end = train(job.options(store=store, steps=5, snapshot_every=1, commit_every=1), report)
    assert checksums(store)[0] == end.step
    return report.notices, names(store), end.step


def test_a_full_drive_costs_snapshots_and_no_step(job: Job, tmp_path: Path) -> None:
    code, answer = run_in_process(train_on_a_drive_that_fills_up, job.folder, tmp_path)
    if answer is None:
        pytest.skip("no small file system can be mounted here")
    assert code == 0
    notices, kept, step = answer
    assert step == 5
    assert kept == ["step-000001"]
    told = [notice for notice in notices if "no snapshot of step" in notice]
    assert [notice.partition(":")[0] for notice in told] == [
        f"no snapshot of step {number} was made" for number in (2, 3, 4, 5)
    ]
    assert "too little free space: a snapshot needs" in told[0]


def test_a_chunk_that_goes_bad_ends_the_run() -> None:
    """The commit that a snapshot is to keep is damaged right after it was made: loud, and no such snapshot."""
    what = faults.job("vertical")
    with quick_directory() as folder, torch_threads(1), DirectEngine(num_threads=2) as engine:
        faults.create(what, folder / "store", engine)
        with (
            Store.open(folder / "store", engine=engine) as store,
            Trainer(
                model=what.staged, store=store, engine=engine, config=what.settings, baseline_bytes=0, setup=what.setup
            ) as trainer,
            AutomaticSnapshots(store, every=1, keep=1, notice=pytest.fail) as snapshots,
        ):
            trainer.step(what.steps[0])
            snapshots.after_step(trainer)
            snapshots.wait()
            assert names(store.directory) == ["step-000001"]
            trainer.step(what.steps[1])
            trainer.commit()
            path = store.committed_chunks()[6].path
            data = bytearray(path.read_bytes())
            data[5] ^= 1
            path.write_bytes(data)
            snapshots.after_step(trainer)
            with pytest.raises(CorruptChunkError, match=r"no snapshot 'step-000002' was made: stage .* is not as it"):
                snapshots.wait()
            assert names(store.directory) == ["step-000001"]
