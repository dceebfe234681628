"""What `hoist train` and `hoist export` refuse: one line that says what to do, exit code 2, and nothing is changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hoist.tiers.io.choose import why_no_kvikio
from hoist.tools.commands import train as train_command
from hoist.tools.errors import RunFailedError
from hoist.tools.exits import describe
from hoist.tools.train import train
from tests.support.commands import (
    TOKENS_PER_STEP,
    Job,
    Result,
    hoist,
    make_job,
    read_metrics,
    save_model,
    tree,
)
from tests.support.reporters import Recorder
from tests.support.traces import read_trace


@dataclass(kw_only=True, slots=True)
class Shell:
    """Runs commands and checks that a refusal leaves the job's folder as it was."""

    job: Job
    capfd: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Result:
        return hoist(self.capfd, *arguments)

    def refused(self, *arguments: object) -> str:
        before = tree(self.job.folder)
        line = self(*arguments).refusal()
        assert tree(self.job.folder) == before
        return line

    def train(self, *more: object, **changed: object) -> Result:
        result = self(*self.job.arguments(*more, **changed))
        assert result.code == 0, result.err
        return result

    def train_refused(self, *more: object, **changed: object) -> str:
        return self.refused(*self.job.arguments(*more, **changed))


@pytest.fixture
def shell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(job=make_job(tmp_path), capfd=capfd)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["train", "--steps", "many"], r"--steps: 'many' is not a whole number"),
        (["train", "--stepz", "3"], r"No such option.*--stepz.*--help$"),
        (["train", "--learning_rate", "1"], r"No such option: --learning_rate; here it is --lr; see hoist train --h"),
        (["train", "--epochs=3"], r"No such option: --epochs; here it is --steps; a run shows .* --help$"),
        (["export", "--epochs=3"], r"No such option: --epochs; see hoist export --help$"),
        (["train", "extra"], r"extra.*; every option has its name before it, like --model DIR .*hoist train --help$"),
        (["export", "store"], r"(?i:Missing argument 'directory'); see hoist export --help$"),
        (["fly"], r"No such command 'fly'; see hoist --help$"),
        (["train", "--betas", "0.9"], r"--betas: '0.9' is not two numbers"),
        (["train", "--betas", "0.9,1.5"], r"--betas: betas\[1\] must be at least 0 and below 1, got 1.5"),
        (["train", "--lr", "nan"], r"--lr: lr must be a finite number"),
        (["train", "--eps", "-1"], r"--eps: eps must be"),
        (["train", "--host-memory", "4 gigs"], r"--host-memory: '4 gigs' is not a size; write for instance 4GiB"),
        (["train", "--host-memory", "4"], r"--host-memory: 4 is a number of bytes; write its unit, as in 4GiB"),
        (["train", "--host-memory", "0"], r"--host-memory: '0' is too small"),
        (["train", "--device-memory", "4"], r"--device-memory: 4 is a number of bytes; write its unit, as in 4GiB"),
        (["train", "--device-memory", "lots"], r"--device-memory: 'lots' is not a size"),
        (["train", "--device", ""], r"--device: '' is not allowed; give auto, cpu, or a device like cuda:1"),
        (["train", "--device", "gpu"], r"--device: got 'gpu', must be auto"),
        (["train", "--optim-device", "gpuu"], "--optim-device: 'gpuu' is not allowed; give cpu, device, or the name"),
        (["train", "--device", "cpu", "--device-memory", "2GiB"], r"--device-memory: 2.0 GiB is not allowed where "),
        (["train", "--device", "cpu", "--optim-device", "cuda"], r"--optim-device: cuda is not allowed where the CPU "),
        (["train", "--compile", "--compile-backend", "gcc"], r"--compile-backend: 'gcc' is none of torch's backends: "),
        (["train", "--micro-batches", "0"], r"--micro-batches: 0 is not allowed; give at least 1"),
        (["train", "--seq-len", "1"], r"--seq-len: 1 is not allowed; give at least 2"),
        (["train", "--order", "random"], r"--order: 'random' is not one of sequential, shuffle"),
        (["train", "--dtype", "float16"], r"--dtype: 'float16' is not one of auto, float32, bfloat16"),
        (["train", "--dropout", "1"], r"--dropout: 1.0 is not allowed; give a probability from 0 to below 1"),
        (["train", "--max-chunk-elements", "5000"], r"--max-chunk-elements: 5000 .* multiple of 4096"),
        (["train", "--model", "tiny2"], r"--model tiny2: no such directory, and no preset; .* tiny, smollm2-135m"),
        (["train", "--store", ""], r"--store: '' is not allowed"),
        (["export", "store", "out", "--dtype", "int8"], r"--dtype: 'int8' is not one of float32, bfloat16, float16"),
        (["export", "store", "out", "--max-shard-size", "0"], r"--max-shard-size: '0' is too small"),
        (["export", "store", "out"], r"store: does not exist"),
    ],
)
def test_bad_usage(
    arguments: list[str],
    pattern: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(pattern, hoist(capfd, *arguments).refusal())
    assert list(tmp_path.iterdir()) == []


def test_config_file(shell: Shell) -> None:
    path = shell.job.folder / "run.toml"
    path.write_text('stepz = 3\nlr = "high"\n')
    assert "unknown key 'stepz' (did you mean steps?); known are attention, " in shell.train_refused("--config", path)
    path.write_text('lr = "high"\n')
    assert "lr is 'high'; it must be a finite number" in shell.train_refused("--config", path)
    path.write_text("lr = \n")
    assert re.search(r"run.toml: is not TOML \(.*line 1", shell.train_refused("--config", path))
    assert "No such file" in shell.train_refused("--config", shell.job.folder / "absent.toml")


# --- the store's place ------------------------------------------------------------------------------------------------


def test_place(shell: Shell) -> None:
    folder = shell.job.folder
    missing = folder / "no" / "such" / "store"
    line = shell.train_refused(store=missing)
    assert line == (
        f"--store {missing}: cannot create the store: {missing.parent} does not exist; create it, or name another place"
    )
    assert f"--store {shell.job.data}: is not a directory; name" in shell.train_refused(store=shell.job.data)
    assert "is not empty and holds no hoist store" in shell.train_refused(store=shell.job.model)
    assert "is not empty and holds no hoist store" in shell.train_refused("--fresh", store=shell.job.model)
    (folder / "dangling").symlink_to(folder / "nowhere")
    assert "dangling: is not a directory" in shell.train_refused(store=folder / "dangling")
    below = shell.job.data / "store"
    assert f"{shell.job.data} is not a directory" in shell.train_refused(store=below)


def test_names_with_spaces_links_and_relative_paths_work(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shell.job.folder)
    real = shell.job.folder / "a drive" / "real"
    real.mkdir(parents=True)
    (shell.job.folder / "link").symlink_to(real, target_is_directory=True)
    for name in ("a store", "link"):
        done = shell.train(store=name, steps=1)
        quoted = f"'{name}'" if " " in name else name
        assert f"hoist train --store {quoted} --steps 2\n" in done.out
        assert shell("export", name, f"{name}-model").code == 0
    assert (real / "COMMIT.json").exists()


@pytest.fixture
def namespaces() -> None:
    """Skips where a process may not have mounts of its own."""
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("unshare -rm is not permitted here")


@pytest.mark.usefixtures("namespaces")
def test_read_only_and_full_places(shell: Shell) -> None:
    read_only, full = shell.job.folder / "read-only", shell.job.folder / "full"
    read_only.mkdir()
    full.mkdir()
    before = tree(shell.job.folder)
    # one process for both, whose imports take the time; the mounts are gone with it, so it also lists what is there
    mounts = (
        f"mount --bind '{read_only}' '{read_only}'; mount -o remount,ro,bind '{read_only}'; "
        f"mount -t tmpfs -o size=1m none '{full}'"
    )
    program = f"""
import os
from hoist.tools import cli
for place in {str(read_only)!r}, {str(full)!r}:
    print(cli.run([*{[str(word) for word in shell.job.arguments(store=None)]!r}, "--store", place + "/store"]))
    print(os.listdir(place))
"""
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-ec", f'{mounts}\nexec "$@"', "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.split("\n") == ["2", "[]", "2", "[]", ""], ended.stderr
    first, second = ended.stderr.splitlines()
    assert first == (
        f"hoist: --store {read_only}/store: {read_only}: cannot be written: its file system is mounted read-only; "
        "name another place for the store"
    )
    assert re.match(
        rf"hoist: --store {re.escape(str(full))}/store: too little free space: the store needs (\d+) bytes .*, "
        r"(\d+) bytes \(0.00 GiB\) are free; free some, or name a place on a larger drive$",
        second,
    )
    assert tree(shell.job.folder) == before


# --- other runs, other models -----------------------------------------------------------------------------------------


def test_another_writer(shell: Shell) -> None:
    shell.train(steps=1)
    shutil.rmtree(f"{shell.job.store}.tokens")
    with locked_by_another(shell.job.store) as pid:
        for more in ([], ["--fresh"]):
            line = shell.train_refused(*more, steps=2)
            assert f"--store {shell.job.store}: process {pid} on " in line
            assert line.endswith("is writing to this store; wait for it to end, or stop it")
    shell.train(steps=2)


@contextmanager
def locked_by_another(store: Path) -> Iterator[int]:
    """Another process holds the store's lock; gives its id."""
    program = "import sys; from pathlib import Path; from hoist.tiers.lock import StoreLock; "
    program += "lock = StoreLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read(); lock.release()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(store / "LOCK")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process.pid


def test_a_store_of_another_model(shell: Shell, tmp_path: Path) -> None:
    shell.train(steps=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    # The same tensors, another model: only the configuration tells.
    other = make_job(tmp_path / "b", rms_norm_eps=0.25)
    assert (
        f"--model {other.model}: not the model of --store {shell.job.store}: rms_norm_eps is 0.25, stored 1e-06"
    ) in shell.train_refused(model=other.model, steps=2)
    family = make_job(tmp_path / "c", family="gpt2")
    line = shell.train_refused(model=family.model, steps=2)
    assert "not the model of" in line
    assert line.endswith("leave --model out, name another --store, or start over with --fresh")
    assert "stored" in shell.train_refused(model="tiny", data=None, steps=2)
    shell.train(steps=2)
    shell.train("--fresh", model=family.model, steps=1)


# --- model ------------------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_trained(shell: Shell) -> None:
    config = shell.job.model / "config.json"
    document = json.loads(config.read_text())
    config.write_text(json.dumps(document | {"model_type": "lama"}))
    assert "model_type 'lama' is not a causal language model" in shell.train_refused()
    config.write_text(json.dumps({"model_type": "t5"}))
    assert "model_type 't5' is not a causal language model" in shell.train_refused()
    # a causal LM without a list of layers: its blocks share one set of weights, or there is only one
    small = {"model_type": "openai-gpt", "n_layer": 0, "vocab_size": 503, "n_embd": 8, "n_head": 2}
    config.write_text(json.dumps(small))
    assert re.match(r"--model .*: OpenAIGPT.*: no list of decoder layers", shell.train_refused())
    config.write_text(json.dumps(document | {"num_attention_heads": 5}))
    shell.train_refused()
    config.write_text("{")
    assert "no JSON at line 1" in shell.train_refused()
    config.unlink()
    assert "has no config.json" in shell.train_refused()


def test_checkpoints_that_are_not_whole(shell: Shell) -> None:
    save_model(shell.job.model, "llama", max_shard_size="80KB")
    shards = sorted(shell.job.model.glob("*.safetensors"))
    assert len(shards) > 3
    whole = shards[1].read_bytes()
    for cut in (1, 4096, len(whole) // 2):
        shards[1].write_bytes(whole[:-cut])
        line = shell.train_refused()
        assert shards[1].name in line
        assert str(len(whole)) in line and str(len(whole) - cut) in line
    shards[1].unlink()
    line = shell.train_refused()
    assert shards[1].name in line and "missing" in line
    shards[1].write_bytes(whole)
    shell.train(steps=1)


def test_weights_of_another_shape(shell: Shell) -> None:
    save_model(shell.job.model, "llama")
    path = shell.job.model / "model.safetensors"
    tensors = load_file(path)
    lost = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    assert "1 missing (model.norm.weight)" in shell.train_refused()
    save_file(tensors | {"model.norm.weight": lost[:-1].clone(), "what": lost}, path)
    line = shell.train_refused()
    assert "1 of another shape (model.norm.weight is [63], the model has [64])" in line
    assert "1 unknown to the model (what)" in line


def test_weights_that_are_no_numbers(shell: Shell) -> None:
    save_model(shell.job.model, "llama")
    path = shell.job.model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = torch.nan
    save_file(tensors, path)
    text = shell.job.folder / "text.txt"
    text.write_text("some text, for a cache of ids to be made\n" * 100)
    for data in (shell.job.data, text):
        line = shell.train_refused(data=data)
        assert re.match(r"checkpoint .*: tensor 'model.layers.2.mlp.up_proj.weight' is NaN at element 327", line)


def test_starting_over_from_weights_that_are_no_numbers_keeps_the_store(shell: Shell) -> None:
    save_model(shell.job.model, "llama")
    shell.train(steps=1)
    path = shell.job.model / "model.safetensors"
    tensors = load_file(path)
    for value, told in ((torch.nan, "is NaN at element 327"), (torch.inf, "holds NaN or infinity")):
        tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = value
        save_file(tensors, path)
        assert told in shell.train_refused("--fresh", steps=1)
    shell.train(steps=2)


# --- data and metrics -------------------------------------------------------------------------------------------------


def test_data(shell: Shell) -> None:
    np.save(shell.job.data, np.ones(TOKENS_PER_STEP - 1, np.uint16))
    assert f"has {TOKENS_PER_STEP - 1} tokens, one step needs {TOKENS_PER_STEP}" in shell.train_refused()
    text = shell.job.folder / "short.txt"
    text.write_text("too short")
    assert "has 10 tokens, one step needs 64" in shell.train_refused(data=text)
    assert "there is no such file" in shell.train_refused(data=shell.job.folder / "absent.npy")
    assert "--data: nothing given" in shell.train_refused(data=None)
    np.save(shell.job.data, np.full(TOKENS_PER_STEP, 503, np.uint16))
    assert "token 0 is 503, allowed are 0 to 502" in shell.train_refused()


def test_metrics_path(shell: Shell) -> None:
    folder = shell.job.folder
    assert f"--metrics {folder}: is a directory" in shell.train_refused(metrics=folder)
    assert "is not a directory; make it first" in shell.train_refused(metrics=folder / "no" / "m.jsonl")
    assert "is not a directory; make it first" in shell.train_refused(metrics=shell.job.data / "m.jsonl")
    shell.train(steps=1, metrics=folder / "m.jsonl")
    assert len(read_metrics(folder / "m.jsonl")) == 1


def test_trace_path(shell: Shell) -> None:
    folder = shell.job.folder
    assert f"--trace {folder}: is a directory" in shell.train_refused(trace=folder)
    assert "is not a directory; make it first" in shell.train_refused(trace=folder / "no" / "t.json")
    shell.train(steps=1, trace=folder / "t.json")
    assert "step 1" in {each.name for each in read_trace(folder / "t.json").other()}


# --- memory and I/O ---------------------------------------------------------------------------------------------------


def test_budget(shell: Shell) -> None:
    line = shell.train_refused(host_memory="100KiB")
    found = re.match(
        r"--host-memory: 0\.1 MiB is too small; at least ([\d.]+) MiB are needed \(weight buffers .*\); "
        r"give --host-memory (\d+)MiB or more, or a smaller --micro-batch-size or --seq-len$",
        line,
    )
    assert found
    smallest = int(found[2])
    assert float(found[1]) <= smallest < float(found[1]) + 1.05
    assert "is too small" in shell.train_refused(host_memory=f"{smallest - 1}MiB") or smallest == 1
    shell.train(host_memory=f"{smallest}MiB", steps=2)
    assert "is too small" in shell.train_refused(host_memory="100KiB", steps=3)  # a resume is refused alike


def test_kvikio_where_it_cannot_work(shell: Shell) -> None:
    assert "--io: 'cuFile' is not one of auto, direct, kvikio" in shell.train_refused(io="cuFile")
    if why_no_kvikio() is None:
        pytest.skip("kvikio works on this machine")
    line = shell.train_refused(io="kvikio")
    assert line.startswith("--io kvikio")


# --- export -----------------------------------------------------------------------------------------------------------


def test_export(shell: Shell) -> None:
    folder = shell.job.folder
    shell.train(steps=0, data=None)
    line = shell.refused("export", shell.job.store, shell.job.model)
    assert "it exists, allowed is a new or an empty directory" in line
    assert "File exists" in shell.refused("export", shell.job.store, shell.job.data / "out")
    assert "holds no hoist store" in shell.refused("export", shell.job.model, folder / "out")
    (folder / "empty").mkdir()
    assert shell("export", shell.job.store, folder / "empty").code == 0
    for inside in ("out", "snapshots/out", "stages/new/out"):
        line = shell.refused("export", shell.job.store, shell.job.store / inside)
        assert f"lies inside the store {shell.job.store}; name a directory outside it" in line
    (shell.job.store / "COMMIT.json").unlink()
    assert "never finished; create it again" in shell.refused("export", shell.job.store, folder / "out")


# --- what is no refusal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(5, "Input/output error", "/drive/x"), "/drive/x: Input/output error; run with HOIST_TRACEBACK=1 for"),
        (MemoryError(), "out of memory: the system gave no more; free some, or give a smaller --host-memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: DefaultCPUAllocator: can't"),
        (ZeroDivisionError("by zero"), "internal error: ZeroDivisionError: by zero; run with HOIST_TRACEBACK=1 for"),
    ],
)
def test_unexpected_errors(error: Exception, line: str) -> None:
    told = describe(error)
    assert told is not None
    assert told[0].startswith(line)
    assert told[1] == 1


def test_a_drive_that_fails_in_the_run(shell: Shell) -> None:
    """A file of the store is cut while it is in use: the run ends with the file named and the last commit whole."""

    def cut(moment: str) -> None:
        if moment == "step 2":
            for path in shell.job.store.glob("stages/*/*/c/*/*"):
                os.truncate(path, 0)

    with pytest.raises(RunFailedError) as raised:
        train(shell.job.options(steps=9, commit_every=100, host_memory="2MiB"), Recorder(at=cut))
    assert re.search(rf"{re.escape(str(shell.job.store))}/stages/.*/c/\d/\d+", str(raised.value))
    assert f"--store {shell.job.store} stays at its last commit, step 0: remove the cause and go on with " in str(
        raised.value
    )
    assert raised.value.exit_code == 1


def test_a_bug_is_one_line_too(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(given: object, config: object, *, as_json: bool) -> int:
        raise KeyError("layer.7\nand more")

    monkeypatch.setattr(train_command, "_train", broken)
    line = hoist(capfd, "train").failure()
    assert line.startswith("internal error: KeyError: ")
    assert line.endswith("run with HOIST_TRACEBACK=1 for the traceback")
    monkeypatch.setenv("HOIST_TRACEBACK", "1")
    shown = hoist(capfd, "train")
    assert shown.code == 1
    assert "in broken" in shown.err


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of at most 256 KiB from here on, as on a disk that fills up during the run."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_metrics_file_that_fills_up(shell: Shell) -> None:
    path = shell.job.folder / "metrics.jsonl"
    line = '{"step": 0}\n'
    path.write_text(line * (256 * 1024 // len(line) - 20))  # room for no whole line of ours, or for one
    lines = path.read_text().count("\n")
    failure = shell(*shell.job.arguments(metrics=path, commit_every=100)).failure()
    assert failure.startswith(f"--metrics {path}: cannot be written: File too large; step ")
    steps = len(read_metrics(path)) - lines + 1  # every line in the file is whole
    assert f"step {steps} is committed" in failure
    assert failure.endswith(f"go on with hoist train --store {shell.job.store}")
    shell.train(steps=steps + 1)


def test_weights_that_diverge_are_not_committed(shell: Shell) -> None:
    shell.train(steps=2)
    failure = shell(*shell.job.arguments(steps=9, lr=1e30, commit_every=1)).failure()
    assert re.search(r"step \d: the (loss|gradient norm) is (nan|inf); a lower --lr may help", failure)
    assert "stays at its last commit, step " in failure
    shell.train(steps=3, lr=0.01)
