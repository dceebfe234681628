"""`hoist bench sleep`, tiny and whole: what it counts and refuses, and that it trains as plain PyTorch does."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hoist.scheduler.errors import ConfigError
from hoist.tools.bench.losses import LOSS_BOUND, check_losses
from hoist.tools.bench.outcome import Outcome, write
from hoist.tools.bench.showing import show_all
from hoist.tools.bench.sides.job import Sleep
from hoist.tools.bench.sleep import (
    ALWAYS,
    Run,
    clipping_runs,
    losses_in_memory,
    run,
    sleep_seconds,
)
from hoist.tools.bench.sleep_presets import PRESETS, bytes_here
from hoist.tools.errors import BenchError, StoppedError
from tests.support.commands import hoist

TINY = Sleep(num_layers=2, layer_elements=65536, forward_seconds=0.001, backward_seconds=0.002)
#: In which weights are read and written, and in which nothing is.
BUDGET, PLENTY = 3 * 2**20, 64 * 2**20
LANES = ("compute", "io", "optim", "copy")


def _text(outcome: Outcome) -> str:
    """As on a terminal of 80 columns."""
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        show_all(outcome, console)
    return captured.get()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two sizes of a step, two budgets."""
    directory = tmp_path_factory.mktemp("drive")
    told: list[tuple[int, int]] = []
    found = run(
        directory, TINY, micro_batches=[1, 2], runs=[Run(delay=0.5)], rounds=1, num_steps=1, lanes=True,
        host_memory_bytes=[BUDGET, PLENTY], progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(done, 8) for done in range(9)]
    assert not list(directory.iterdir())
    return found


class TestOutcome:
    def test_a_row_for_each_combination(self, outcome: Outcome) -> None:
        rows = [(row["micro_batches"], row["host_memory_bytes"]) for row in outcome.rows]
        assert rows == [(count, budget) for count in (1, 2) for budget in (BUDGET, PLENTY)]

    def test_sleep_is_a_lower_bound(self, outcome: Outcome) -> None:
        for row in outcome.rows:
            asleep = sleep_seconds(TINY, row["micro_batches"])
            assert row["sleep_seconds"] == asleep == pytest.approx(2 * row["micro_batches"] * 0.004)
            assert row["calls"] == 2 * row["micro_batches"] * 3
            assert asleep <= row["in_layers_seconds"] <= row["step_high_seconds"]
            assert asleep <= row["step_low_seconds"] <= row["step_seconds"] <= row["step_high_seconds"]
            assert row["step_ratio"] >= 1.0
            assert row["tokens_per_second"] == pytest.approx(8 * row["micro_batches"] / row["step_seconds"])

    def test_what_is_kept_is_not_moved(self, outcome: Outcome) -> None:
        for row in outcome.rows:
            if row["host_memory_bytes"] == PLENTY:
                assert row["read_bytes"] == row["written_bytes"] == row["io_seconds"] == 0
            else:
                assert row["read_bytes"] > 0
                assert row["written_bytes"] > 0
                assert 0.0 < row["io_seconds"] <= row["io_busy_seconds"]

    def test_losses_are_the_same_whatever_the_budget(self, outcome: Outcome) -> None:
        losses = [row["losses"] for row in outcome.rows]
        assert losses[0] == losses[1] != losses[2] == losses[3]

    def test_guesses_do_what_exact_clipping_does(self, tmp_path: Path) -> None:
        """At the widest: all the columns that there are fit a terminal."""
        found = run(
            tmp_path, TINY, micro_batches=[2], runs=[Run(delay=1.0, clip_norm=ALWAYS), *clipping_runs([0.25])],
            rounds=1, num_steps=1,
        )  # fmt: skip
        assert [row["clipping"] for row in found.rows] == ["exact", "exact", "guess right", "guess wrong"]
        clipped, never, right, wrong = (row["losses"] for row in found.rows)
        assert clipped == wrong != never == right
        lines = [line for line in _text(found).splitlines() if line.startswith("2  0.250  guess wrong")]
        assert len(lines) == 1
        assert len(lines[0].split()) == 11

    def test_it_fits_80_columns_whole(self, outcome: Outcome) -> None:
        text = _text(outcome)
        assert "…" not in text
        for lane in LANES:
            assert f"{lane} |" in text
        for title in ("M", "delay", "budget", "step", "low", "high", "sleep", "I/O", "ratio"):
            assert title in text

    def test_it_is_plain_data(self, outcome: Outcome) -> None:
        assert json.loads(json.dumps(outcome.to_json()))["rows"][0]["micro_batches"] == 1

    def test_it_is_shown_again_as_it_was(
        self, outcome: Outcome, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        write(outcome, tmp_path / "outcome.json")
        assert hoist(capfd, "bench", "show", tmp_path / "outcome.json").out == _text(outcome)

    def test_what_has_no_limit_has_no_ratio(self, tmp_path: Path) -> None:
        at_once = replace(TINY, forward_seconds=0.0, backward_seconds=0.0)
        (row,) = run(
            tmp_path, at_once, micro_batches=[1], runs=[Run()], rounds=1, num_steps=1, host_memory_bytes=[PLENTY]
        ).rows  # fmt: skip
        assert (row["sleep_seconds"], row["io_seconds"], row["step_ratio"]) == (0.0, 0.0, None)

    def test_files_in_memory_are_compared_with_nothing(self, in_memory: Path) -> None:
        found = run(
            in_memory, TINY, micro_batches=[1], runs=[Run()], rounds=1, num_steps=1, host_memory_bytes=[BUDGET]
        )  # fmt: skip
        assert [(row["direct"], row["step_ratio"]) for row in found.rows] == [(False, None)]
        assert any("page cache" in note for note in found.notes)
        with pytest.raises(BenchError, match="--preset: I/O goes through the page cache here"):
            run(in_memory, TINY, micro_batches=[1], runs=[Run()], preset=next(iter(PRESETS.items())))


class TestLosses:
    def test_they_are_those_of_pytorch_bit_for_bit(self, tmp_path: Path) -> None:
        (row,) = run(tmp_path, TINY, micro_batches=[2], runs=[Run(delay=0.5)], rounds=2, num_steps=3).rows
        assert row["losses"] == losses_in_memory(TINY, 2, 4)
        assert row["calls"] == 2 * 2 * 3 * 3 * 2

    def test_another_training_is_refused(self) -> None:
        right = losses_in_memory(TINY, 2, 3)
        assert check_losses({"a row": right}, {"torch": right}, bound=LOSS_BOUND) == 0.0
        # 1% off in the learning rate, or clipped
        for wrong in (losses_in_memory(TINY, 2, 3, lr=1.01e-2), losses_in_memory(TINY, 2, 3, clip_norm=1e-9)):
            with pytest.raises(BenchError, match=r"the loss of step [23] is .* \(a row\) and .* \(torch\)"):
                check_losses({"a row": wrong}, {"torch": right}, bound=LOSS_BOUND)
        with pytest.raises(BenchError, match="step 1 is nan"):
            check_losses({"a row": [float("nan")]}, {"torch": right[:1]}, bound=LOSS_BOUND)


class TestPreset:
    def test_sleep_follows_from_the_drive(self, tmp_path: Path) -> None:
        name = "4090-1drive"
        found = run(
            tmp_path, replace(TINY, layer_elements=4096), micro_batches=[1], runs=[Run()], rounds=1, num_steps=1,
            preset=(name, PRESETS[name]),
        )  # fmt: skip
        told = found.settings["preset"]
        here = told["here"]
        assert found.settings["forward_seconds"] == here["forward_seconds"]
        ratio = told["forward_seconds"] / told["io_seconds"]
        assert here["forward_seconds"] / here["io_seconds"] == pytest.approx(ratio)
        assert here["layer_elements"] == 4096
        assert sum(bytes_here(4096)) == 32 * 4096
        assert any(note.startswith(f"{name}: NVIDIA GeForce RTX 4090") for note in found.notes)


class TestCommand:
    def test_json_and_the_command_that_makes_it_again(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        words = ["bench", "sleep", "--directory", tmp_path, "--layers", 1, "--layer-elements", 4096]
        words += ["--forward-ms", 0.5, "--backward-ms", 1, "--micro-batches", 2, "--delay", 1]
        words += ["--rounds", 1, "--steps", 1, "--json", "--output", tmp_path / "outcome.json"]
        ended = hoist(capfd, *words)
        assert ended.code == 0, ended.err
        found = json.loads(ended.out)
        assert found == json.loads((tmp_path / "outcome.json").read_text())
        assert [row["delay"] for row in found["rows"]] == [1.0]
        assert found["command"] == shlex.join(["hoist", *map(str, words)])

    def test_presets_are_listed_with_their_figures(self, capfd: pytest.CaptureFixture[str]) -> None:
        ended = hoist(capfd, "bench", "sleep", "--list-presets")
        assert ended.code == 0
        assert [line.partition(":")[0] for line in ended.out.splitlines()] == list(PRESETS)
        assert "312 TFLOP/s of dense bf16 (NVIDIA A100 data sheet) at 50%" in ended.out

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (["--preset", "h100"], "--preset: 'h100' is not one of a100-2drives, 4090-1drive"),
            (["--preset", "4090-1drive", "--forward-ms", 1], "--preset: gives layers their times"),
            (["--layer-elements", 100], "--layer-elements: 100 is not a positive multiple of 64"),
            (["--layer-elements", 4096, "--layers", 1, "--host-memory", "4KiB"], "--host-memory: 0.0 MiB is too small"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[object], line: str
    ) -> None:
        assert line in hoist(capfd, "bench", "sleep", "--directory", tmp_path, *options).refusal()
        assert not list(tmp_path.iterdir())

    def test_a_stop_leaves_nothing(self, tmp_path: Path) -> None:
        def stop(done: int, total: int) -> None:
            raise StoppedError(2)

        with pytest.raises(StoppedError):
            run(tmp_path, TINY, micro_batches=[1], runs=[Run(delay=1.0)], rounds=1, num_steps=1, progress=stop)
        assert not list(tmp_path.iterdir())

    def test_layers_that_cannot_be_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--layer-elements"):
            run(tmp_path, replace(TINY, layer_elements=0), micro_batches=[1], runs=[Run()])
