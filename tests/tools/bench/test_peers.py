"""`hoist bench peers`: sides that train in RAM, what is refused of them, and a whole comparison of a tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from hoist.tools.bench.machine import look
from hoist.tools.bench.outcome import show
from hoist.tools.bench.peers import PEERS, Request, outcome_of, refuse_unless_same, run, why_not
from hoist.tools.bench.shapes import model_config
from hoist.tools.bench.sides import fsdp_side, in_memory, torch_side
from hoist.tools.bench.sides.job import Job, SideResult, Sleep, Work
from hoist.tools.bench.sides.sleeping import write_checkpoint
from hoist.tools.bench.sides.work import WorkRequest, make_checkpoint, make_tokens
from hoist.tools.doctor import file_system_of
from hoist.tools.errors import BenchError
from tests.support.commands import hoist
from tests.support.training import torch_threads


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    folder = tmp_path_factory.mktemp("work")
    make_checkpoint(folder / "model", model_config(hidden=64, layers=2, vocab=512))
    make_tokens(folder / "tokens.npy", 3 * 2 * 2 * 8, vocab_size=512)
    with torch_threads(1):
        yield Work(
            model=str(folder / "model"), tokens=str(folder / "tokens.npy"), seq_len=8, micro_batch_size=2,
            num_micro_batches=2, num_steps=3, num_threads=1, weight_decay=0.1,
        )  # fmt: skip


@pytest.fixture(scope="module")
def trained(work: Work) -> SideResult:
    """Its states are saved beside the model."""
    return in_memory.train("torch", Job(work=work, directory=str(Path(work.model).parent)), torch_side.prepare)


def test_every_side_does_the_work_and_says_so(work: Work, trained: SideResult, tmp_path: Path) -> None:
    kept = replace(work, activation_checkpointing=False)
    keeping = in_memory.train("torch-keep", Job(work=kept, directory=str(tmp_path)), torch_side.prepare)
    with fsdp_side.one_rank():
        sharded = in_memory.train("fsdp2", Job(work=work, directory=str(tmp_path)), fsdp_side.prepare)
    assert trained.work == sharded.work == work
    assert keeping.work == kept
    assert trained.losses == keeping.losses == sharded.losses
    assert len(set(trained.losses)) == 3
    refuse_unless_same({"torch": [trained], "torch-keep": [keeping], "fsdp2": [sharded]})


def test_what_is_saved_is_all_that_was_trained(work: Work, trained: SideResult) -> None:
    model = Path(work.model)
    first, saved = load_file(model / "model.safetensors"), load_file(model.parent / "states.safetensors")
    assert saved.keys() == {f"{name}{what}" for name in first for what in ("", ".exp_avg", ".exp_avg_sq", ".step")}
    assert all(not torch.equal(saved[name], first[name]) for name in first)
    assert trained.save_seconds is not None


def test_other_numbers_give_other_losses(work: Work, trained: SideResult, tmp_path: Path) -> None:
    """What the work says reaches the optimizer: the comparison of losses sees each of these."""
    for changed in (
        replace(work, lr=2e-4), replace(work, betas=(0.5, 0.6)), replace(work, eps=1e-3),
        replace(work, weight_decay=10.0), replace(work, clip_norm=1e-9),
    ):  # fmt: skip
        other = in_memory.train("other", Job(work=changed, directory=str(tmp_path)), torch_side.prepare)
        assert other.losses[0] == trained.losses[0]
        with pytest.raises(BenchError, match="losses differ"):
            refuse_unless_same({"torch": [trained], "fsdp2": [replace(other, work=work)]})


def test_layers_that_sleep_are_trained_too(tmp_path: Path) -> None:
    sleep = Sleep(num_layers=2, layer_elements=64 * 64, forward_seconds=0.0, backward_seconds=0.0)
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", sleep)
    np.save(tmp_path / "tokens.npy", np.tile(np.arange(8), 2))  # the same step twice
    asleep = Work(
        model=str(tmp_path / "model"), tokens=str(tmp_path / "tokens.npy"), seq_len=8, micro_batch_size=1,
        num_micro_batches=1, num_steps=2, sleep=sleep, num_threads=torch.get_num_threads(),
    )  # fmt: skip
    result = in_memory.train("torch", Job(work=asleep, directory=str(tmp_path)), torch_side.prepare)
    assert result.work == asleep
    assert result.losses[1] < result.losses[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda one: replace(one, losses=[*one.losses[:2], one.losses[2] * 1.001]), "losses differ"),
        (lambda one: replace(one, work=replace(one.work, lr=1.0)), "settings differ: lr is 0.0001"),
        (lambda one: replace(one, versions=one.versions | {"torch": "0"}), "versions differ"),
        (lambda one: replace(one, work=replace(one.work, activation_checkpointing=False)), "checkpointing is not on"),
        (lambda one: replace(one, work=replace(one.work, attention="eager")), "settings differ: attention is sdpa"),
        (lambda one: replace(one, trained_loss=one.losses[0]), "differ: .* fsdp2 after the last step"),
    ],
)
def test_peers_that_did_something_else_are_refused(
    trained: SideResult, wrong: Callable[[SideResult], SideResult], message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        refuse_unless_same({"torch": [trained], "fsdp2": [wrong(replace(trained, name="fsdp2"))]})


def test_what_does_not_run_here_says_why() -> None:
    missing = replace(PEERS["torchao"], needs="no_such_package")
    assert "no_such_package is not installed" in str(why_not(missing))
    broken = replace(PEERS["fsdp2"], module="no_such_side")
    assert "No module named" in str(why_not(broken))
    assert why_not(PEERS["torch"]) is None


def test_the_table_fits_a_terminal_and_says_what_does_not_run(work: Work, trained: SideResult, tmp_path: Path) -> None:
    large = replace(
        trained, step_seconds=[99.9] * 3, read_bytes=[10**9] * 3, written_bytes=[10**9] * 3, peak_bytes=2 * 10**9
    )
    request = Request(
        directory=tmp_path, num_rounds=1, host_memory_bytes=[2**28], peers=list(PEERS),
        work=WorkRequest(
            hidden=64, num_layers=2, seq_len=8, micro_batch_size=2, num_micro_batches=2, num_steps=3, lr=1e-4
        ),
    )  # fmt: skip
    found = {"hoist, 256.0 MiB": [large], **{name: [large] for name in PEERS if name != "torchao"}}
    outcome = outcome_of(
        request, work, found, PEERS, {"torchao": "it wants a GPU"}, machine=look(tmp_path), command="hoist bench peers"
    )
    console = Console(width=80, file=StringIO())
    show(outcome, console)
    assert isinstance(console.file, StringIO)
    told = console.file.getvalue()
    assert "…" not in told
    assert [row.split()[0] for row in told.splitlines() if row.rstrip().endswith(("  NVMe", "  run"))] == [
        "torch", "torch,", "FSDP2", "torchao",
    ]  # fmt: skip
    assert "torchao does not run here: it wants a GPU" in told
    assert "99.9" in told


def test_a_side_is_a_process_of_its_own(drive: Path) -> None:
    """Real, and alone: the yardstick."""
    asked = WorkRequest(
        hidden=64, num_layers=2, seq_len=8, micro_batch_size=1, num_micro_batches=2, num_steps=3, lr=1e-4
    )
    request = Request(directory=drive, work=asked, num_rounds=1, host_memory_bytes=[], peers=["torch"])
    outcome = json.loads(run(request).to_text())
    (row,) = outcome["rows"]
    assert (row["side"], row["cannot"], row["torch_ratio"]) == ("torch", "NVMe", 1.0)
    assert row["peak_bytes"] > 12 * 180_000  # weights and both moments
    (side,) = outcome["settings"]["runs"]["torch"]
    assert side["losses"][0] > 5.0
    assert str(drive) not in json.dumps(outcome["settings"])  # what was made is gone


@pytest.mark.slow
def test_a_whole_comparison(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real processes: hoist and torch, a round."""
    if file_system_of(tmp_path, Path("/proc/self/mountinfo")) == "tmpfs":
        pytest.skip("temporary files are in memory here: no drive is ever read")
    found = hoist(
        capfd, "bench", "peers", tmp_path, "--hidden", 64, "--layers", 2, "--seq-len", 8, "--micro-batches", 2,
        "--steps", 3, "--rounds", 1, "--host-memory", "64MiB", "--peer", "torch", "--json",
        "--output", tmp_path / "p.json", "--plot", tmp_path / "p.svg",
    )  # fmt: skip
    assert found.code == 0, found.err
    outcome = json.loads(found.out)
    assert [row["side"] for row in outcome["rows"]] == ["hoist, 64.0 MiB", "torch"]
    ours, theirs = outcome["rows"]
    assert theirs["torch_ratio"] == 1.0
    assert ours["torch_ratio"] == pytest.approx(ours["step_seconds"] / theirs["step_seconds"], rel=0.5)
    assert (ours["cannot"], theirs["cannot"]) == (None, "NVMe")
    assert theirs["peak_bytes"] > 12 * 180_000  # weights and both moments
    assert outcome["settings"]["runs"]["torch"][0]["losses"][0] > 5.0
    assert json.loads((tmp_path / "p.json").read_text()) == outcome
    assert "torch" in (tmp_path / "p.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "p.svg"]


def test_unknown_peers_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    line = hoist(capfd, "bench", "peers", "--peer", "fsdp").refusal()
    assert line == "--peer: 'fsdp' is not one of torch, torch-keep, fsdp2, torchao"


def test_what_is_not_there_is_said_in_a_line(work: Work, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        return hoist(capfd, "bench", "peers", *arguments, "--peer", "torch").refusal()

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((Path(work.model) / "config.json").read_bytes())
    assert "is not a directory; make it first" in refused(tmp_path / "none")
    assert "has no model.safetensors" in refused(tmp_path, "--model", tmp_path / "model")
    assert "--hidden: 65 is not a multiple of 64" in refused(tmp_path, "--hidden", 65)
    dropping = _dropping(work, tmp_path)
    assert "asks for dropout (attention_dropout 0.5), which each" in refused(tmp_path, "--model", dropping)
    assert "--seq-len: 5000 is longer than the 4096 positions" in refused(tmp_path, "--seq-len", 5000)
    assert "free, and about" in refused(tmp_path, "--hidden", 2**16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dropping", "model"]


def _dropping(work: Work, folder: Path) -> Path:
    """The work's model, with dropout in its config."""
    shutil.copytree(work.model, folder / "dropping")
    path = folder / "dropping" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.5}))
    return folder / "dropping"
