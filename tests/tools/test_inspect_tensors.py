"""`hoist inspect --tensor` and `--diff`: numbers equal torch's on the loaded tensors; commits meanwhile; refusals."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hoist.scheduler.errors import ConfigError
from hoist.tiers.errors import StoreFormatError, StoreRefusedError
from hoist.tiers.format import LOCK_NAME, StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.lock import StoreLock
from hoist.tiers.snapshots import take
from hoist.tiers.store import Store
from hoist.tools.inspection.diff import compare, other_side
from hoist.tools.inspection.looking import StageStates
from hoist.tools.inspection.tensors import inspect_tensors
from hoist.tools.inspection.values import Gatherer, Statistics
from hoist.tools.read_tensor import read_tensor
from tests.support.commands import hoist, tree
from tests.support.inspected import many_layouts, status_of, write_status, write_store
from tests.support.models import tiny_config
from tests.support.stores import HARD_NAME, commit, committed, direct_engine, fill
from tests.support.training import Engine, Outcome, Recipe, make_steps, train

NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A store of small chunks, three commits old, and a copy of it from one commit before, called ``before``."""
    store = tmp_path_factory.mktemp("inspected") / "store"
    engine = Engine(max_chunk_elements=4096, commit_every=1)
    train(store, tiny_config("llama"), make_steps(2, 1), Recipe(), engine)
    shutil.copytree(store, store.with_name("before"))
    shutil.rmtree(store)
    return store, train(store, tiny_config("llama"), make_steps(3, 1), Recipe(), engine)


def expected(values: Tensor) -> Statistics:
    flat = values.flatten().to(torch.float64)
    return Statistics(
        num_nan=0,
        num_inf=0,
        min=flat.min().item(),
        max=flat.max().item(),
        mean=flat.mean().item(),
        std=flat.std().item() if len(flat) > 1 else None,
        norm=torch.linalg.vector_norm(flat).item(),
    )


def same(one: Statistics, other: Statistics) -> None:
    assert (one.num_nan, one.num_inf, one.min, one.max) == (other.num_nan, other.num_inf, other.min, other.max)
    for name in ("mean", "std", "norm"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or mine == pytest.approx(theirs, rel=1e-9, abs=1e-15), name


# --- statistics -----------------------------------------------------------------------------------------------------


def test_every_tensor_has_torchs_numbers(trained: tuple[Path, Outcome], engine: IoEngine) -> None:
    store, outcome = trained
    before = tree(store)
    reports = inspect_tensors(store, ["*"], engine=engine)
    assert tree(store) == before
    assert {report.name for report in reports} >= outcome.states.weights.keys()
    for report in reports:
        if report.kind != "trained":
            continue
        assert report.step == 3
        assert report.shape == tuple(outcome.states.weights[report.name].shape)
        same(report.statistics["weight"], expected(outcome.states.weights[report.name]))
        same(report.statistics["exp_avg"], expected(outcome.states.exp_avg[report.name]))
        same(report.statistics["exp_avg_sq"], expected(outcome.states.exp_avg_sq[report.name]))
        assert report.adam_steps == 3


def test_where_a_tensor_lies(trained: tuple[Path, Outcome], engine: IoEngine) -> None:
    """Its files, read as they are named, hold its values; here, the first moment's."""
    store, outcome = trained
    name = "model.embed_tokens.weight"
    (report,) = inspect_tensors(store, [name], engine=engine)
    assert (report.stage, report.kind, report.dtype) == ("embed", "trained", "float32")
    files = [file for file in report.files if file.array == StateArray.EXP_AVG.value]
    assert len(files) > 2
    found = torch.empty(report.num_elements)
    for file in files:
        assert file.drive == str(store)
        assert f"/c/{file.slot}/{file.chunk}" in file.file
        values = torch.from_numpy(np.fromfile(store / file.file, np.float32))
        first = max(0, report.start - file.chunk * 4096)
        found[file.start : file.stop] = values[first : first + file.stop - file.start]
    assert torch.equal(found.view(report.shape), outcome.states.exp_avg[name])


def test_patterns_names_and_misses(
    trained: tuple[Path, Outcome], engine: IoEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    store, _ = trained
    names = [report.name for report in inspect_tensors(store, ["model.layers.1.*", NAME], engine=engine)]
    assert NAME in names
    assert len(names) == len(set(names))
    assert all(name.startswith("model.layers.1.") for name in names)
    with pytest.raises(ConfigError, match=r"has no tensor 'model\.norm'; it has, for example, model\.norm\.weight"):
        inspect_tensors(store, ["model.norm"], engine=engine)
    assert "has no tensor 'nothing*'" in hoist(capfd, "inspect", store, "--tensor", "nothing*").refusal()


def test_names_of_tied_weights(tmp_path: Path, engine: IoEngine) -> None:
    store = tmp_path / "store"
    config = tiny_config("llama", tied=True)
    train(store, config, make_steps(1, 1), Recipe(), Engine(commit_every=1))
    config.save_pretrained(store / "model")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        (report,) = inspect_tensors(store, [name], engine=engine)
        assert (report.name, report.tied_names) == ("model.embed_tokens.weight", ("lm_head.weight",))


def test_small_and_frozen_tensors(tmp_path: Path, engine: IoEngine) -> None:
    with committed(tmp_path / "store", engine):
        pass
    reports = {report.name: report for report in inspect_tensors(tmp_path / "store", ["*"], engine=engine)}
    assert set(reports) == {HARD_NAME, "scalar", "empty", "router.bias", "w", "f"}
    assert reports["empty"].statistics["weight"].min is None
    assert reports["empty"].files == ()
    assert reports["scalar"].statistics["weight"].std is None
    assert (reports["router.bias"].kind, reports["router.bias"].dtype) == ("buffer", "int64")
    bias = read_tensor(tmp_path / "store", "router.bias")
    same(reports["router.bias"].statistics["weight"], expected(torch.from_numpy(bias)))
    assert list(reports["f"].statistics) == ["weight"]
    f = torch.from_numpy(read_tensor(tmp_path / "store", "f").view(np.int16)).view(torch.bfloat16)
    same(reports["f"].statistics["weight"], expected(f))


@given(
    parts=st.lists(
        st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=20), min_size=1, max_size=5
    )
)
def test_windows_add_up(parts: list[list[float]]) -> None:
    gatherer = Gatherer()
    for part in parts:
        gatherer.add(torch.tensor(part, dtype=torch.float32))
    every = torch.tensor([value for part in parts for value in part], dtype=torch.float32)
    found, numbers = gatherer.finish(), every[every.isfinite()]
    assert (found.num_nan, found.num_inf) == (int(every.isnan().sum()), int(every.isinf().sum()))
    if not len(numbers):
        assert found == Statistics(
            num_nan=found.num_nan, num_inf=found.num_inf, min=None, max=None, mean=None, std=None, norm=None
        )
        return
    wanted = expected(numbers)
    assert (found.min, found.max) == (wanted.min, wanted.max)
    scale = float(numbers.abs().max())
    assert found.mean == pytest.approx(wanted.mean, abs=1e-12 * scale)
    assert found.norm == pytest.approx(wanted.norm, rel=1e-12)
    assert (found.std is None) == (len(numbers) == 1)
    assert found.std is None or found.std == pytest.approx(wanted.std, abs=1e-7 * scale)


def test_a_commit_meanwhile_is_read_again(tmp_path: Path, engine: IoEngine) -> None:
    with committed(tmp_path / "store", engine) as writer:
        step = 0

        def progress(done: int, total: int) -> None:
            nonlocal step
            assert 0 <= done <= total
            if step < 8:
                for _ in range(2):  # the second overwrites what the reader's commit names
                    step += 1
                    fill(writer, engine, step)
                    commit(writer, step)

        (report,) = inspect_tensors(tmp_path / "store", ["w"], engine=engine, progress=progress)
        assert report.step == step
        values = read_tensor(tmp_path / "store", "w")
    finite = values[np.isfinite(values)]
    assert report.statistics["weight"].max == finite.max()

    with Store.open(tmp_path / "store", engine=engine) as writer:

        def always(done: int, total: int) -> None:
            nonlocal step
            step += 1
            fill(writer, engine, step)
            commit(writer, step)

        with pytest.raises(StoreFormatError, match=r"a run commits faster than w can be read; keep a commit"):
            inspect_tensors(tmp_path / "store", ["w"], engine=engine, progress=always)


def test_a_damaged_file_is_named_and_the_others_are_shown(
    trained: tuple[Path, Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained[0], copy)
    (report,) = inspect_tensors(copy, [NAME], engine=direct_engine())
    (copy / report.files[0].file).write_bytes(b"")
    result = hoist(capfd, "inspect", copy, "--tensor", NAME, "--tensor", "model.norm.weight")
    assert str(copy / report.files[0].file) in result.failure()
    assert "DAMAGED" in result.out
    assert "model.norm.weight" in result.out
    assert "exp_avg_sq" in result.out


def test_the_view_and_json_of_a_tensor(trained: tuple[Path, Outcome], capfd: pytest.CaptureFixture[str]) -> None:
    store, _ = trained
    shown = hoist(capfd, "inspect", store, "--tensor", NAME)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"{NAME}\n  is         trained, float32, ")
    assert "Adam has updated it 3 times" in shown.out
    assert "/{weight_hi,weight_lo,exp_avg,exp_avg_sq}/c/" in shown.out
    document = json.loads(hoist(capfd, "inspect", store, "--tensor", NAME, "--json").out)
    (tensor,) = document["tensors"]
    assert tensor["name"] == NAME
    assert tensor["statistics"]["weight"]["num_nan"] == 0


def test_where_its_stage_is_while_a_run_trains(
    tmp_path: Path, engine: IoEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the run that tells; statistics stay those of the commit. Once nobody holds the store, all is on NVMe."""
    layouts = many_layouts(3)
    status = status_of(layouts, stage=2)
    write_store(tmp_path / "store", layouts)
    write_status(tmp_path / "store", status)
    name = "model.layer.1.weight"
    lock = StoreLock(tmp_path / "store" / LOCK_NAME)
    try:
        (report,) = inspect_tensors(tmp_path / "store", [name], engine=engine)
        shown = hoist(capfd, "inspect", tmp_path / "store", "--tensor", name)
        told = json.loads(hoist(capfd, "inspect", tmp_path / "store", "--tensor", name, "--json").out)
    finally:
        lock.release()
    assert report.now == StageStates(name="layer.1", kinds=status.stages[2])
    where = "weights H 16.0 KiB+ N 16.0 KiB, moments H 16.0 KiB*> N 16.0 KiB, gradients H 16.0 KiB*, activations "
    assert f"  now        the stage has {where}H 4.0 KiB N 4.0 KiB\n" in shown.out
    assert told["tensors"][0]["now"]["moments"] == asdict(status.stages[2][1])
    (report,) = inspect_tensors(tmp_path / "store", [name], engine=engine)
    assert (report.now, report.to_json()["now"]) == (None, None)


# --- differences ----------------------------------------------------------------------------------------------------


def test_two_commits_differ_as_torch_says(trained: tuple[Path, Outcome], engine: IoEngine) -> None:
    store, outcome = trained
    other = store.with_name("before")
    trees = tree(store), tree(other)
    found = compare(store, other, engine=engine)
    assert (tree(store), tree(other)) == trees
    assert (found.store.step, found.other.step) == (3, 2)
    assert (found.only_store, found.only_other, found.other_shape) == ((), (), ())
    assert not found.is_same
    differences = squares = 0.0
    for tensor in found.tensors:
        if tensor.name not in outcome.states.weights:
            continue
        for state in tensor.states:
            what: str = state
            one = torch.from_numpy(read_tensor(store, tensor.name, what=what))  # type: ignore[arg-type]  # one of them
            two = torch.from_numpy(read_tensor(other, tensor.name, what=what))  # type: ignore[arg-type]  # one of them
            difference = tensor.states[state]
            assert difference.num_differing == int((one != two).sum())
            change = one.double() - two.double()
            assert difference.max_abs == change.abs().max().item()
            relative = float(change.norm() / two.double().norm())
            assert difference.relative_l2 == pytest.approx(relative, rel=1e-9)
            if state == "weight":
                differences += float(change.square().sum())
                squares += float(two.double().square().sum())
    assert found.relative_l2 == pytest.approx(math.sqrt(differences / squares), rel=1e-9)


def test_a_store_is_the_same_as_itself(trained: tuple[Path, Outcome], capfd: pytest.CaptureFixture[str]) -> None:
    store, _ = trained
    result = hoist(capfd, "inspect", store, "--diff", store)
    assert result.code == 0
    assert result.out.splitlines()[-1].startswith("the same: all ")
    document = json.loads(hoist(capfd, "inspect", store, "--diff", store, "--json").out)
    assert document["same"] is True
    assert document["num_same"] == len(document["tensors"])


def test_a_snapshot_by_its_name(tmp_path: Path, engine: IoEngine, capfd: pytest.CaptureFixture[str]) -> None:
    with committed(tmp_path / "store", engine) as store:
        take(store, "kept", engine=engine)
        fill(store, engine, 2)
        commit(store, 5, run={"options": {"lr": 0.1}})
    result = hoist(capfd, "inspect", tmp_path / "store", "--diff", "kept", "--all")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].startswith(f"store    {tmp_path / 'store'}, step 5")
    assert lines[1].startswith(f"other    {tmp_path / 'store' / 'snapshots' / 'kept'}, step 0")
    assert "options  lr: 0.1, the other has nothing" in lines
    assert lines[-1].startswith("3 of 6 tensors have the same bits; 3 differ")  # empty and frozen ones are
    assert any(line.endswith("  w") for line in lines)
    assert "there are: kept" in hoist(capfd, "inspect", tmp_path / "store", "--diff", "other").refusal()
    with pytest.raises(StoreRefusedError):
        other_side(tmp_path / "store", str(tmp_path))


def test_stores_of_different_models(trained: tuple[Path, Outcome], tmp_path: Path, engine: IoEngine) -> None:
    with committed(tmp_path / "store", engine):
        pass
    found = compare(trained[0], tmp_path / "store", engine=engine)
    assert found.tensors == ()
    assert "w" in found.only_other
    assert NAME in found.only_store
    assert not found.is_same
    assert found.relative_l2 == 0.0


def test_one_of_these_at_a_time(trained: tuple[Path, Outcome], capfd: pytest.CaptureFixture[str]) -> None:
    message = hoist(capfd, "inspect", trained[0], "--diff", "x", "--watch").refusal()
    assert message == "inspect: give one of --tensor, --diff, --watch and --svg"
