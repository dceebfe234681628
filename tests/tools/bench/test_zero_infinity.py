"""Sides of a comparison: what is counted of them, and every reason for which their results are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from hoist.tools.bench.shapes import model_config
from hoist.tools.bench.sides import counters, environment, hoist_side
from hoist.tools.bench.sides.job import Job, SideResult, Work, read_result, write_result
from hoist.tools.bench.sides.judging import LEAST_LEARNT, LOSS_TOLERANCE, refuse_other_work, refuse_unless_comparable
from hoist.tools.bench.sides.running import Side, import_tree, plain_side, run_side, variables
from hoist.tools.bench.sides.work import WorkRequest, make_checkpoint, make_tokens, take_tokens
from hoist.tools.bench.sweeping import sweep
from hoist.tools.doctor import file_system_of
from hoist.tools.errors import BenchError, DataError, ModelSourceError, StoppedError
from tests.check_types import ROOT
from tests.support.commands import hoist

#: A shared memory file system: its files are in memory, and no drive is ever read.
SHARED_MEMORY = Path("/dev/shm")
STEPS, MICRO_BATCHES, ROWS, SEQ_LEN = 3, 2, 1, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A tiny work, and what hoist's side made of it."""

    folder: Path
    work: Work
    result: SideResult

    def again(self, name: str, **changed: Any) -> SideResult:
        """hoist's side on a changed work, in this process."""
        return run_hoist(self.folder / name, replace(self.work, **changed))


def run_hoist(directory: Path, work: Work) -> SideResult:
    """hoist's side, in this process, with all states on the drive."""
    directory.mkdir()
    options = {"host_memory_bytes": 16 * 2**20, "residency": 0.0}
    return hoist_side.run(Job(work=work, directory=str(directory), options=options))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The right result, which the others are compared with."""
    folder = tmp_path_factory.mktemp("bench")
    if file_system_of(folder, Path("/proc/self/mountinfo")) == "tmpfs":
        pytest.skip("temporary files are in memory here: no drive is ever read")
    make_checkpoint(folder / "model", model_config(hidden=64, layers=2, vocab=512))
    make_tokens(folder / "tokens.npy", STEPS * MICRO_BATCHES * ROWS * SEQ_LEN, vocab_size=512)
    work = Work(
        model=str(folder / "model"), tokens=str(folder / "tokens.npy"), seq_len=SEQ_LEN, micro_batch_size=ROWS,
        num_micro_batches=MICRO_BATCHES, num_steps=STEPS, lr=1e-3, num_threads=1,
    )  # fmt: skip
    return Bench(folder=folder, work=work, result=run_hoist(folder / "first", work))


class TestJudging:
    def test_the_same_work_is_comparable(self, bench: Bench) -> None:
        again = bench.again("same")
        refuse_unless_comparable([bench.result, again])
        assert again.losses == bench.result.losses
        assert len(set(again.losses)) == STEPS

    @pytest.mark.parametrize(
        "changed", [{"lr": 1.1e-3}, {"weight_decay": 0.1}, {"betas": (0.9, 0.999)}, {"clip_norm": 0.1}],
        ids=lambda changed: str(*changed),
    )  # fmt: skip
    def test_other_settings_are_refused(self, bench: Bench, changed: dict[str, Any]) -> None:
        """By what the trainer says it has; and if it said nothing, by the losses."""
        (name,) = changed
        other = bench.again(f"other-{name}", **changed)
        with pytest.raises(BenchError, match=rf"settings differ: {name} is"):
            refuse_unless_comparable([bench.result, other])
        with pytest.raises(BenchError, match=r"losses differ: .* at step [23], .*did not train the same"):
            refuse_unless_comparable([bench.result, replace(other, work=bench.work)])

    def test_another_weight_is_refused(self, bench: Bench) -> None:
        other = bench.folder / "other-model"
        other.mkdir()
        (other / "config.json").write_bytes((Path(bench.work.model) / "config.json").read_bytes())
        weights = load_file(Path(bench.work.model) / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"][0] += 0.1
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        result = bench.again("other-weight", model=str(other))
        with pytest.raises(BenchError, match=r"losses differ: .* at step 1"):
            refuse_unless_comparable([bench.result, replace(result, work=bench.work)])

    def test_another_token_is_refused(self, bench: Bench) -> None:
        ids = np.load(bench.work.tokens)
        ids[-SEQ_LEN] += 1  # of the last micro-batch
        np.save(bench.folder / "other.npy", ids)
        result = bench.again("other-token", tokens=str(bench.folder / "other.npy"))
        assert result.losses[:-1] == bench.result.losses[:-1]
        with pytest.raises(BenchError, match=rf"losses differ: .* at step {STEPS}"):
            refuse_unless_comparable([bench.result, replace(result, work=bench.work)])

    def test_what_rounding_does_is_allowed(self, bench: Bench) -> None:
        near = [loss * (1 + 0.9 * LOSS_TOLERANCE) for loss in bench.result.losses]
        refuse_unless_comparable([bench.result, replace(bench.result, losses=near)])

    @pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a file system in memory")
    def test_files_in_memory_are_refused(self, bench: Bench, tmp_path: Path) -> None:
        """A side whose drive is none, as with a page cache that holds all of it."""
        place = SHARED_MEMORY / f"hoist-test-{os.getpid()}"
        try:
            result = run_hoist(place, bench.work)
        finally:
            for path in sorted(place.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            place.rmdir()
        assert result.losses == bench.result.losses
        with pytest.raises(BenchError, match="page cache was warm: it held"):
            refuse_unless_comparable([bench.result, result])
        with pytest.raises(BenchError, match="page cache was warm: the kernel counts 0 bytes"):
            refuse_unless_comparable([bench.result, replace(result, cached_bytes=0, least_read_bytes=10**6)])

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda one: replace(one, losses=one.losses[:-1]), "losses of 2 steps, 3 were to be made"),
            (lambda one: replace(one, step_seconds=[*one.step_seconds, 1.0]), "step_seconds of 4 steps"),
            (lambda one: replace(one, losses=[*one.losses[:-1], float("nan")]), "at step 3 the loss is"),
            (lambda one: replace(one, versions={**one.versions, "torch": "1.0"}), "torch is .* 1.0 in"),
            (lambda one: replace(one, work=replace(one.work, dtype="bfloat16")), "dtype is float32 in .* bfloat16 in"),
            (lambda one: replace(one, work=replace(one.work, num_steps=2)), "losses of 3 steps, 2 were"),
            (lambda one: replace(one, trained_loss=one.losses[0]), "losses differ: .* after the last step"),
            (lambda one: replace(one, layer_calls=8), "slept None times in hoist, 8 times"),
            (lambda one: replace(one, trained_loss=float("nan")), "after the last step the loss is"),
        ],
        ids=["losses", "steps", "nan", "versions", "dtype", "count", "update", "calls", "silent"],
    )
    def test_other_results_are_refused(
        self, bench: Bench, change: Callable[[SideResult], SideResult], match: str
    ) -> None:
        with pytest.raises(BenchError, match=match):
            refuse_unless_comparable([bench.result, change(bench.result)])

    def test_a_work_that_teaches_nothing_is_refused(self, bench: Bench) -> None:
        """Any optimizer would have given the same losses."""
        result = bench.again("unlearnt", lr=1e-7)
        assert result.trained_loss == pytest.approx(result.losses[0], rel=LEAST_LEARNT)
        with pytest.raises(BenchError, match=r"training moved the loss of the first step's ids by .* more --st"):
            refuse_unless_comparable([result])
        with pytest.raises(BenchError, match="does not say what the loss is after the last step"):
            refuse_unless_comparable([replace(bench.result, trained_loss=None)])

    def test_another_work_than_was_told_is_refused(self, bench: Bench) -> None:
        refuse_other_work(bench.work, bench.result)
        with pytest.raises(BenchError, match="hoist did another work: num_steps is 3, and it was told 4"):
            refuse_other_work(replace(bench.work, num_steps=4), bench.result)


class TestResult:
    def test_is_the_kernels(self, bench: Bench) -> None:
        result = bench.result
        assert sum(result.written_bytes) > 0
        assert 0 < result.baseline_bytes < result.peak_bytes
        assert result.cached_bytes <= 2**20 < result.stored_bytes
        assert result.startup_seconds > 0 and result.save_seconds is not None

    def test_survives_its_file(self, bench: Bench, tmp_path: Path) -> None:
        write_result(bench.result, tmp_path / "result.json")
        assert read_result(tmp_path / "result.json") == bench.result


class TestCounters:
    def test_page_cache(self, tmp_path: Path) -> None:
        if file_system_of(tmp_path, Path("/proc/self/mountinfo")) == "tmpfs":
            pytest.skip("a file in memory cannot be dropped")
        path, empty = tmp_path / "file", tmp_path / "empty"
        path.write_bytes(bytes(10 * 4096 + 7))
        empty.touch()
        files = [path, empty, tmp_path / "gone"]
        assert counters.cached_bytes(files) == counters.stored_bytes(files) == 10 * 4096 + 7
        counters.drop_cache(files)
        assert counters.cached_bytes(files) == 0

    def test_memory(self) -> None:
        with counters.PeakMemory() as memory:
            before = counters.resident_bytes()
            held = np.ones(2**24, dtype=np.float32)
        assert memory.peak_bytes - before >= held.nbytes

    def test_a_process_begins_before_its_code(self) -> None:
        assert counters.process_seconds() > 0


class TestWork:
    def test_ids_of_the_users(self, tmp_path: Path) -> None:
        np.save(tmp_path / "ids.npy", np.arange(5, dtype=np.uint16))
        take_tokens(tmp_path / "taken.npy", tmp_path / "ids.npy", 8, vocab_size=5)
        assert np.load(tmp_path / "taken.npy").tolist() == [0, 1, 2, 3, 4, 0, 1, 2]

    @pytest.mark.parametrize(
        ("ids", "match"),
        [
            (np.zeros((2, 2), dtype=np.int64), "one-dimensional"),
            (np.zeros(4), "float64"),
            (np.zeros(0, dtype=np.int64), "shape"),
            (np.array([0, 7]), "ids from 0 to 7; the model has 5"),
        ],
        ids=["shape", "type", "empty", "vocabulary"],
    )
    def test_others_are_refused(self, tmp_path: Path, ids: Any, match: str) -> None:
        np.save(tmp_path / "ids.npy", ids)
        with pytest.raises(DataError, match=match):
            take_tokens(tmp_path / "taken.npy", tmp_path / "ids.npy", 8, vocab_size=5)


    def test_files_of_another_kind_are_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "several.npz", first=np.zeros(4, dtype=np.int64))
        (tmp_path / "empty.npy").touch()
        for name, match in (("several.npz", "holds several arrays"), ("empty.npy", "cannot be"), ("no", "cannot be")):
            with pytest.raises(DataError, match=match):
                take_tokens(tmp_path / "taken.npy", tmp_path / name, 8, vocab_size=5)
        with pytest.raises(ModelSourceError, match="has 99 ids, and UTF-8 bytes"):
            make_tokens(tmp_path / "taken.npy", 1000, vocab_size=99)

    def test_results_that_are_kept_name_no_files_that_are_gone(self, bench: Bench) -> None:
        asked = WorkRequest(
            hidden=64, num_layers=2, seq_len=SEQ_LEN, micro_batch_size=ROWS, num_micro_batches=MICRO_BATCHES,
            num_steps=STEPS, lr=1e-3,
        )  # fmt: skip
        (kept,) = asked.kept([bench.result])
        assert str(bench.folder) not in json.dumps(kept)
        assert kept["work"]["model"] == "Llama of 2 layers, hidden 64, random weights"
        assert kept["losses"] == bench.result.losses
        assert asked.num_parameters() == sum(
            value.numel() for value in load_file(Path(bench.work.model) / "model.safetensors").values()
        )


class TestRunning:
    def test_a_failing_side_is_one_line(self, bench: Bench, tmp_path: Path) -> None:
        """DeepSpeed's, where there is none; it needs nothing of hoist but the folder of the sides."""
        job = Job(work=replace(bench.work, dtype="float16"), directory=str(tmp_path / "run"))
        with (
            import_tree(tmp_path) as tree,
            pytest.raises(BenchError, match=r"^deepspeed_side: ValueError: DeepSpeed's side computes in float32$"),
        ):
            run_side(Side(module="deepspeed_side", python=Path(sys.executable), import_path=tree), job)
        assert list(tmp_path.iterdir()) == []

    def test_openmp_is_as_it_is_for_sides_that_are_not_hoists(self, tmp_path: Path) -> None:
        assert os.environ["GOMP_SPINCOUNT"]  # hoist has told it for its own lanes
        with import_tree(tmp_path) as tree:
            side = plain_side("torch_side", tree)
            program = "import os, hoist.tools.bench.sides.job; print(os.environ.get('GOMP_SPINCOUNT'))"
            said = subprocess.run(
                [side.python, "-c", program], env=variables(side), cwd=tmp_path, capture_output=True, check=True
            )  # fmt: skip
        assert said.stdout == b"None\n"

    def test_stopping_ends_it(self, bench: Bench, tmp_path: Path) -> None:
        def check() -> None:
            raise StoppedError(2)

        job = Job(work=bench.work, directory=str(tmp_path / "run"), options={"host_memory_bytes": 16 * 2**20})
        side = Side(module="hoist_side", python=Path(sys.executable), import_path=ROOT)
        with pytest.raises(StoppedError):
            run_side(side, job, check=check)
        assert list(tmp_path.iterdir()) == []


class TestEnvironment:
    def test_the_extra_is_what_is_installed(self) -> None:
        setup = ConfigParser()
        setup.read(ROOT / "setup.cfg")
        asked = tuple(setup["options.extras_require"]["bench"].split())
        assert asked == environment.DEFAULT_REQUIREMENTS

    def test_a_compiler_is_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(BenchError, match=r"lacks .*g\+\+.*: apt-get install .*g\+\+"):
            environment.prepare(tmp_path / "environment")
        assert not (tmp_path / "environment").exists()

    def test_one_that_was_interrupted_is_made_anew(self, tmp_path: Path) -> None:
        def stop() -> None:
            raise StoppedError(2)

        place = tmp_path / "environment"
        for _ in range(2):
            with pytest.raises(StoppedError):
                environment._make(place, stop, print)
            environment._refuse_foreign(place)
            assert not environment.is_made(place)

    def test_two_at_once_are_not_made(self, tmp_path: Path) -> None:
        with (
            environment._alone(tmp_path / "environment"),
            pytest.raises(BenchError, match="another process makes it now"),
            environment._alone(tmp_path / "environment"),
        ):
            raise AssertionError("both make it")

    def test_a_place_that_cannot_be_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "missing_tools", tuple)  # those of this machine are another test's
        (tmp_path / "file").touch()
        with pytest.raises(BenchError, match=r"--environment .*file/environment: cannot be made: .*; name another pla"):
            environment.prepare(tmp_path / "file" / "environment")
        with pytest.raises(BenchError, match="is no environment that hoist made"):
            environment.prepare(tmp_path / "file")

    def test_pip_is_told_exact_versions(self) -> None:
        lines = environment.constraint_lines()
        assert {f"{name}=={version(name)}" for name in environment.SHARED} <= set(lines)
        assert "ninja==1.13.2" in lines
        assert len({line.split("==")[0] for line in lines}) == len(lines)

    def test_what_is_not_hoists_stays(self, tmp_path: Path) -> None:
        (tmp_path / "letter").touch()
        with pytest.raises(BenchError, match="is no environment that hoist made"):
            environment.prepare(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["letter"]


class TestCommand:
    def test_refuses_before_anything_is_made(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        command = ("bench", "zero-infinity", tmp_path, "--environment", tmp_path / "environment")
        assert "--layer-elements: 100 is not" in hoist(capfd, *command, "--sleep", "--layer-elements", 100).refusal()
        assert "has no model.safetensors" in hoist(capfd, *command, "--model", tmp_path).refusal()
        assert "leave --model out" in hoist(capfd, *command, "--model", tmp_path, "--sleep").refusal()
        for option, value, match in (
            ("--lr", 0, "--lr: got 0.0, must be above 0"),
            ("--delay", 2, "--delay"),
            ("--residency", -1, "--residency"),
            ("--hidden", 100, "--hidden: 100 is not a multiple of 64"),
            ("--seq-len", 5000, "--seq-len: 5000 is longer than the 4096 positions"),
            ("--hidden", 2**16, "free, and about"),
        ):
            assert match in hoist(capfd, *command, option, value).refusal()
        assert list(tmp_path.iterdir()) == []

    def test_memory_is_no_drive(self, capfd: pytest.CaptureFixture[str], in_memory: Path) -> None:
        assert "is in memory (tmpfs)" in hoist(capfd, "bench", "zero-infinity", in_memory).refusal()

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ('{"speed": 11}', "no knobs of DeepSpeed's side: speed"),
            ("[1]", "a list, not an object"),
            ("{", "Expecting property name"),
            ('{"aio_threads": "2"}', "aio_threads is '2', and should be such as 1"),
            ('{"format_version": 9, "settings": {}}', "format_version is 9, and this hoist reads up to"),
            (None, "No such file"),
        ],
    )
    def test_knobs_that_are_none_are_refused(
        self, capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, match: str
    ) -> None:
        path = tmp_path / "knobs.json"
        if text is not None:
            path.write_text(text)
        line = hoist(capfd, "bench", "zero-infinity", tmp_path, "--knobs", path).refusal()
        assert line.startswith(f"--knobs {path}: holds no knobs of DeepSpeed: ")
        assert match in line

    @pytest.mark.slow
    def test_both_sides_agree(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """The whole comparison, with layers that sleep, whose checkpoint is made for them."""
        if not environment.is_made(environment.default_directory()):
            pytest.skip("DeepSpeed's environment is not made: run hoist bench zero-infinity once")
        told = hoist(
            capfd, "bench", "zero-infinity", tmp_path, "--sleep", "--layers", 3, "--layer-elements", 2**20, "--seq-len",
            8, "--host-memory", "32MiB", "--steps", 3, "--rounds", 1, "--no-sweep", "--json",
        )  # fmt: skip
        assert told.code == 0, told.err
        runs = json.loads(told.out)["settings"]["runs"]
        assert runs["hoist"][0]["losses"] == pytest.approx(runs["zero_infinity"][0]["losses"], rel=LOSS_TOLERANCE)
        assert list(tmp_path.iterdir()) == []


class TestSweep:
    def run(self, bench: Bench, seconds: Callable[[Any], float | None]) -> Callable[[Any], SideResult]:
        def run(knobs: Any) -> SideResult:
            found = seconds(knobs)
            if found is None:
                raise BenchError("deepspeed_side: AssertionError: Not enough buffers")
            return replace(bench.result, step_seconds=[9.0, found, found])

        return run

    def test_keeps_what_is_fastest(self, bench: Bench) -> None:
        def seconds(knobs: Any) -> float | None:
            if knobs.get("param_buffers", 12) < 24 or knobs.get("a") == 2:
                return None
            slower = {4: 0.2, 5: -0.2}.get(knobs.get("b"), 0.0)
            return 1.0 - 0.1 * float(knobs.get("a", 0)) + slower

        best, trials = sweep(
            self.run(bench, seconds), {"kept": 1}, alternatives=[({"a": 1}, {"a": 2}), ({"b": 4}, {"b": 5})]
        )
        assert best == {"kept": 1, "param_buffers": 24, "a": 1, "b": 5}
        assert [trial.step_seconds is None for trial in trials] == [True, False, False, True, False, False]
        assert trials[0].failure is not None and "Not enough buffers" in trials[0].failure

    def test_none_works(self, bench: Bench) -> None:
        with pytest.raises(BenchError, match=r"none of DeepSpeed's settings works here; the last said: .*Not enough"):
            sweep(self.run(bench, lambda knobs: None), {})
