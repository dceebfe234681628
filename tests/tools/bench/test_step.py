"""`hoist bench step`, tiny and real: what a row holds, what is refused, and that nothing is left."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from hoist.scheduler.config import Order
from hoist.scheduler.errors import ConfigError
from hoist.tiers.errors import BudgetError
from hoist.tiers.io import DirectEngine
from hoist.tiers.io.mixed import MixedSpeed
from hoist.tools.bench import step
from hoist.tools.bench.lanes import show_lanes
from hoist.tools.bench.losses import LOSS_BOUND, check_losses
from hoist.tools.bench.outcome import show
from hoist.tools.bench.shapes import batches, model_config
from hoist.tools.bench.step_sides import HoistSide, MemorySide, Side, reference_model, weights_of
from hoist.tools.bench.turns import Step, Turn, trainer_config
from hoist.tools.errors import BenchError
from tests.support.commands import hoist
from tests.support.late_device import LateDevice
from tests.support.models import reference_model as other_model
from tests.support.models import tiny_config
from tests.support.training import torch_threads

SHAPE = (16, 1, 2)
SMALL_BYTES = 3 * 2**20


@pytest.fixture
def config() -> LlamaConfig:
    return model_config(hidden=64, layers=2, vocab=256)


def cases(*plans: Order, budget_bytes: int = SMALL_BYTES, micro_batch_size: int = 1) -> list[step.Case]:
    return step.cases_of(
        plans=plans, num_micro_batches=[2], seq_lens=[16], micro_batch_sizes=[micro_batch_size], delays=[0.0],
        host_memory_bytes=[budget_bytes],
    )  # fmt: skip


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both plans; states are on the drive; every number is there, and the whole fits 80 columns."""
    drive = tmp_path / "drive"
    drive.mkdir()
    words = [
        "bench", "step", "--directory", drive, "--hidden", 64, "--layers", 2, "--vocab", 256, "--micro-batches", 2,
        "--seq-len", 16, "--host-memory", "3MiB", "--rounds", 2, "--steps", 1, "--lanes", "--json",
        "--output", tmp_path / "found.json",
    ]  # fmt: skip
    result = hoist(capfd, *words)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert list(drive.iterdir()) == []
    assert [row["plan"] for row in found["rows"]] == ["vertical", "horizontal"]
    for row in found["rows"]:
        assert row["mode"] == step.DIRECT
        assert row["counted_steps"] == 2
        assert row["step_low_seconds"] <= row["step_seconds"] <= row["step_high_seconds"]
        assert row["io_measured_bytes"] >= row["read_bytes"] + row["written_bytes"] > 0
        assert 0 < row["resident_compute_seconds"] <= row["resident_seconds"]
        assert row["io_seconds"] > 0
        for name in ("roofline", "plain", "checkpointing"):
            assert row[f"{name}_ratio"] > 0
        assert [line[:10] for line in row["lanes"]] == [" compute |", "      io |", "   optim |", "    copy |"]
    assert found["settings"]["loss_difference_ratio"] <= LOSS_BOUND
    assert len({row["resident_seconds"] for row in found["rows"]}) == 1  # both beside the same
    assert found["command"] == shlex.join(["hoist", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--plan", "diagonal"], "--plan: 'diagonal' is not one of vertical, horizontal"),
        (["--hidden", "65"], "--hidden: 65 is not a multiple of 64, the width of a head"),
        (["--seq-len", "4097"], "--seq-len: 4097 is longer than the 4096 positions that the model has"),
        (
            ["--device", "cpu", "--device-memory", "1GiB"],
            "--device-memory: 1.0 GiB is not allowed where the CPU computes: its memory is the host's, which "
            "--host-memory bounds; leave it out",
        ),
        (["--host-memory", "lots"], "--host-memory: 'lots' is not a size; write for instance 4GiB, 512MiB or 1.5GB"),
        (["--directory", "nowhere"], "nowhere: is not a directory; make it first, on the drive that is to be measured"),
    ],
)
def test_wrong_words_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], refusal: str
) -> None:
    assert hoist(capfd, "bench", "step", "--directory", tmp_path, *words).refusal() == refusal
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoints_weights_are_what_all_sides_begin_with(tmp_path: Path) -> None:
    """Also where it is stored in another type, and its config asks for dropout."""
    config = tiny_config("gpt2", dropout=0.5)
    saved = other_model(config, seed=7).bfloat16()
    saved.save_pretrained(tmp_path)
    model = reference_model(config, tmp_path)
    assert model.training
    assert model.config.attn_pdrop == 0.0
    expected = saved.state_dict()
    assert {name: value.dtype for name, value in model.state_dict().items()} == dict.fromkeys(expected, torch.float32)
    assert all(torch.equal(value, expected[name].float()) for name, value in model.state_dict().items())
    assert not torch.equal(model.lm_head.weight, reference_model(config).lm_head.weight)


class TestRun:
    def test_what_went_through_the_page_cache_is_labelled_and_compared_with_nothing(
        self, tmp_path: Path, config: LlamaConfig
    ) -> None:
        with DirectEngine(num_threads=2, direct=False) as engine:
            found = step.run(tmp_path, config, cases("vertical"), engine=engine, rounds=1, steps=1, lanes=True)
        (row,) = found.rows
        assert row["mode"] == step.CACHED
        assert [row[f"{name}_ratio"] for name in ("roofline", "plain", "checkpointing")] == [None] * 3
        console = Console(width=80, record=True)
        show(found, console)
        show_lanes(found.rows, console)
        assert "…" not in console.export_text()

    def test_on_a_device_of_its_own_memory_the_bus_is_a_limit_too(
        self, tmp_path: Path, config: LlamaConfig, engine: DirectEngine
    ) -> None:
        """Weights go up, gradients come down; what computes is the device."""
        num_parameters = sum(parameter.numel() for parameter in reference_model(config).parameters())
        with LateDevice(5, late_seconds=0.0) as device:
            wanted = cases("vertical", budget_bytes=4 * 2**20)
            found = step.run(
                tmp_path, config, wanted, engine=engine, rounds=1, steps=1, device=device, device_memory_bytes=2**23
            )
            assert device.num_works > 0
        (row,) = found.rows
        assert row["down_bytes"] >= 4 * num_parameters
        assert row["up_bytes"] >= 4 * num_parameters
        assert row["bus_seconds"] > 0
        assert found.settings["device"] == "late device, order 5"
        with LateDevice(0) as device, pytest.raises(ConfigError, match=r"--device-memory: torch does not tell what is"):
            step.run(tmp_path, config, wanted, engine=engine, rounds=1, steps=1, device=device)

    def test_files_in_memory_are_compared_with_nothing_either(self, in_memory: Path, config: LlamaConfig) -> None:
        """An engine takes them for a drive's, where they accept direct I/O."""
        with DirectEngine(num_threads=2) as engine:
            (row,) = step.run(in_memory, config, cases("vertical"), engine=engine, rounds=1, steps=1).rows
        assert row["mode"] == step.CACHED
        assert row["roofline_ratio"] is None

    def test_a_budget_that_is_too_small_is_refused_before_anything_is_made(
        self, tmp_path: Path, config: LlamaConfig, engine: DirectEngine
    ) -> None:
        wanted = [*cases("vertical"), *cases("vertical", budget_bytes=2**20)]
        with pytest.raises(BudgetError, match=r"--host-memory: 1\.0 MiB is too small"):
            step.run(tmp_path, config, wanted, engine=engine, progress=_never)
        assert list(tmp_path.iterdir()) == []

    def test_a_model_that_memory_cannot_hold_is_refused(self, tmp_path: Path, engine: DirectEngine) -> None:
        huge = model_config(hidden=65536, layers=1, vocab=256)
        with pytest.raises(ConfigError, match=r"holds the model in memory three times, about .* TiB"):
            step.run(tmp_path, huge, cases("vertical"), engine=engine, progress=_never)

    def test_stopping_leaves_nothing(self, tmp_path: Path, config: LlamaConfig, engine: DirectEngine) -> None:
        def stop_at_the_third(done: int, total: int) -> None:
            assert total == 4 * 2
            if done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            step.run(
                tmp_path, config, cases("vertical"), engine=engine, rounds=1, steps=1, progress=stop_at_the_third
            )
        assert list(tmp_path.iterdir()) == []


class TestSidesThatDoNotTrainTheSame:
    """Each side is real and trains; one is fed or told something else."""

    @pytest.mark.parametrize("wrong", ["horizontal", "torch"])
    def test_other_tokens(self, tmp_path: Path, config: LlamaConfig, engine: DirectEngine, wrong: str) -> None:
        with torch_threads(1), ExitStack() as stack:
            model = reference_model(config)
            source = weights_of(model)
            options = trainer_config(
                seq_len=16, micro_batch_size=1, num_micro_batches=2, host_memory_bytes=SMALL_BYTES
            )

            def feed(name: str) -> Iterator[Step]:
                right = batches(config, SHAPE)
                return _one_other_token(right, in_step=2) if name == wrong else right

            def side(plan: Order) -> HoistSide:
                return stack.enter_context(
                    HoistSide(tmp_path / plan, config, replace(options, plan=plan), feed(plan), source=source,
                              engine=engine)
                )  # fmt: skip

            hoists: dict[str, Side] = {"vertical": side("vertical")}
            references: dict[str, Side] = {}
            if wrong == "horizontal":
                hoists["horizontal"] = side("horizontal")
            else:
                references["torch"] = MemorySide(model, feed("torch"), checkpointing=True)
            with pytest.raises(BenchError, match=rf"the loss of step 2 is .* \(vertical\) and .* \({wrong}\), which"):
                step.take_turns(hoists, references, rounds=1, steps=1, bound=LOSS_BOUND, probe=_no_probe)

    def test_a_last_bit_is_a_difference_among_hoists_sides(self) -> None:
        near = 1.0 + 2.0**-23
        with pytest.raises(BenchError, match=r"step 2 is 1\.0 \(a\) and 1\.00000011920\d* \(b\), which must be the sa"):
            check_losses({"a": [2.0, 1.0], "b": [2.0, near]}, {}, bound=LOSS_BOUND)
        assert check_losses({"a": [2.0, 1.0]}, {"torch": [2.0, near]}, bound=LOSS_BOUND) == 2.0**-23
        with pytest.raises(BenchError, match=r"\(torch\), which must be the same bits"):
            check_losses({"a": [2.0, 1.0]}, {"torch": [2.0, near]}, bound=0.0)

    @pytest.mark.parametrize("theirs", [[1.0, 2.0], [float("nan")], [1.00001]])
    def test_what_is_longer_or_no_number_or_far_is_refused(self, theirs: list[float]) -> None:
        with pytest.raises(BenchError, match="torch"):
            check_losses({"a": [1.0]}, {"torch": theirs}, bound=LOSS_BOUND)


def _one_other_token(feed: Iterator[Step], *, in_step: int) -> Iterator[Step]:
    for number, wanted in enumerate(feed, start=1):
        if number == in_step:
            ids = wanted[0]["input_ids"]
            ids[0, 5] = (ids[0, 5] + 1) % 256
        yield wanted


def _no_probe(name: str, turn: Turn) -> MixedSpeed:
    return MixedSpeed(seconds=0.0, scale=1.0, measured_bytes=0, direct=True)


def _never(done: int, total: int) -> None:
    raise AssertionError("a step began")
