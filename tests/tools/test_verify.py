"""`hoist verify`: every bad chunk on a line of its own, exit code 1; no false alarm beside a run that commits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store
from hoist.tools.train import train
from hoist.tools.verify import verify_store
from tests.support.commands import Job, hoist, make_job, tree
from tests.support.reporters import Recorder
from tests.support.stores import HARD_NAME, commit, committed, fill


@pytest.fixture
def directory(tmp_path: Path, engine: IoEngine) -> Path:
    with committed(tmp_path / "store", engine):
        pass
    return tmp_path / "store"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "stages/000-embed/exp_avg/c/0/1": (flip, "checksum: committed "),
    "stages/001-layer.0/weight_hi/c/0/0": (shorten, "has 8191 bytes, expected 8192"),
    "stages/001-layer.0/weight_lo/c/0/0": (Path.unlink, "is missing"),
    "stages/002-head/buffers/c/0": (flip, "checksum: committed "),
}


def test_a_whole_store(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = tree(directory)
    result = hoist(capfd, "verify", directory)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("step 0: all 14 chunk files are as they were committed (248.0 KiB in ")
    assert tree(directory) == before


def test_every_bad_chunk_has_a_line(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, (damage, _) in DAMAGES.items():
        damage(directory / name)
    before = tree(directory)
    result = hoist(capfd, "verify", directory)
    assert "4 of 14 chunk files are not as they were committed at step 0" in result.failure()
    assert "hoist restore" in result.failure()
    lines = result.out.splitlines()
    assert len(lines) == 4
    for line, (name, (_, reason)) in zip(lines, DAMAGES.items(), strict=True):
        _, stage, array, _, *slot_and_chunk = name.split("/")
        assert line.startswith(f"bad: stage {stage.partition('-')[2]}, array {array}, chunk {slot_and_chunk[-1]}, ")
        assert reason in line
        assert f"; file {directory / name}; tensors: " in line
    assert lines[0].endswith(f"tensors: {HARD_NAME!a}, scalar")
    assert lines[1].endswith("tensors: w")
    assert lines[3].endswith("tensors: f")
    assert tree(directory) == before


def test_json(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = hoist(capfd, "verify", directory, "--json")
    assert whole.code == 0
    document = json.loads(whole.out)
    assert document["ok"] is True
    assert (document["step"], document["generation"], document["num_files"]) == (0, 1, 14)
    assert document["bad"] == []
    flip(directory / "stages/001-layer.0/exp_avg_sq/c/0/0")
    broken = hoist(capfd, "verify", directory, "--json")
    assert broken.code == 1
    document = json.loads(broken.out)
    assert document["ok"] is False
    (bad,) = document["bad"]
    assert (bad["stage"], bad["array"], bad["chunk"], bad["slot"]) == ("layer.0", "exp_avg_sq", 0, 0)
    assert bad["tensors"] == ["w"]
    assert bad["file"] == str(directory / "stages/001-layer.0/exp_avg_sq/c/0/0")


@pytest.mark.parametrize("name", ["COMMIT.json", "crc/1.bin", "zarr.json", "stages/001-layer.0/zarr.json"])
@pytest.mark.parametrize("damage", [flip, shorten, Path.unlink])
def test_damaged_small_files(
    directory: Path, capfd: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    damage(directory / name)
    result = hoist(capfd, "verify", directory)
    if name == "COMMIT.json" and damage is Path.unlink:
        assert "the store's creation never finished" in result.refusal()
        return
    assert str(directory) in result.failure()
    assert result.out == ""
    as_json = hoist(capfd, "verify", directory, "--json")
    assert as_json.code == 1
    assert json.loads(as_json.out)["error"] == as_json.line()


def test_no_store(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in hoist(capfd, "verify", tmp_path / "none").refusal()
    assert "holds no hoist store" in hoist(capfd, "verify", tmp_path).refusal()


@pytest.mark.parametrize("every", [1, 2, 5])
def test_commits_meanwhile_are_no_damage(directory: Path, engine: IoEngine, every: int) -> None:
    """A writer holds the lock and commits all chunks anew, twice, at every so many chunks that are read."""
    with Store.open(directory, engine=engine) as writer:
        calls = step = 0

        def progress(done: int, total: int) -> None:
            nonlocal calls, step
            assert 0 <= done <= total
            calls += 1
            if calls % every == 0 and calls < 60:
                for _ in range(2):  # the second overwrites what the reader's commit names
                    step += 1
                    fill(writer, engine, step)
                    commit(writer, step)

        verdict = verify_store(directory, engine=engine, progress=progress)
        assert verdict.bad == ()
        assert verdict.step > 0
        assert calls >= 14
        flip(directory / "stages/002-head/buffers/c/0")  # damage beside commits is still found
        calls = 0
        assert [bad.array for bad in verify_store(directory, engine=engine, progress=progress).bad] == ["buffers"]


def test_a_store_that_is_replaced_meanwhile(directory: Path, engine: IoEngine) -> None:
    """It ends with a line that says what is there now."""

    def progress(done: int, total: int) -> None:
        if directory.exists():
            shutil.rmtree(directory)

    with pytest.raises(OSError, match="does not exist; create the store first"):
        verify_store(directory, engine=engine, progress=progress)


# --- hoist train --verify -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = make_job(tmp_path_factory.mktemp("trained"))
    train(job.options(steps=2), Recorder())
    return job


@pytest.mark.parametrize("verify", ["resume", "always", "never", None])
def test_what_a_resume_checks(
    verify: str | None, trained: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(trained.store, store)
    good = hoist(capfd, *trained.arguments(store=store, verify=verify))
    assert good.code == 0, good.err
    assert json.loads((store / "COMMIT.json").read_text())["run"]["options"].get("verify") is None
    slots = json.loads((store / "COMMIT.json").read_text())["slots"]
    flip(next(store.glob(f"stages/001-*/exp_avg/c/{slots[1][0]}/0")))
    result = hoist(capfd, *trained.arguments(store=store, verify=verify, steps=4))
    if verify == "never":
        assert result.code == 0
    else:
        assert "array exp_avg chunk 0 slot" in result.failure()
        assert "checksum: committed" in result.failure()


def test_never_still_looks_at_sizes(trained: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    shutil.copytree(trained.store, store)
    next(store.glob("stages/001-*/exp_avg/c/0/0")).unlink()
    assert "is missing" in hoist(capfd, *trained.arguments(store=store, verify="never")).failure()


def test_another_word(trained: Job, capfd: pytest.CaptureFixture[str]) -> None:
    message = hoist(capfd, *trained.arguments(verify="sometimes")).refusal()
    assert message == "--verify: 'sometimes' is not one of resume, always, never"
