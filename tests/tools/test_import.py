"""From a Hugging Face directory into a store and out again, through the command line: every bit comes back.

The checkpoints are written by transformers, and what comes out is read by transformers; the store between them is new.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.checkpoints import TORCH
from tests.support.commands import MICRO_BATCHES, ROWS, SEQ_LEN, curve, hoist, make_job, save_model
from tests.support.models import FAMILIES, batch_of, num_counted
from tests.support.training import same_bits


def load(directory: Path) -> PreTrainedModel:
    """The model of a directory, in the type it is stored in. Fails unless every key fits."""
    auto: Any = AutoModelForCausalLM  # its methods have no types
    model, info = auto.from_pretrained(directory, output_loading_info=True, local_files_only=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """Everything in a directory's safetensors files."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.float()(input_ids=batch_of()["input_ids"], use_cache=False).logits
    return output


def round_trip(source: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """Import a directory, train no step, export."""
    store, target = folder / "store", folder / "exported"
    made = hoist(
        capfd, "train", "--model", source, "--store", store, "--steps", 0, "--host-memory", "8MiB", "--seq-len", 16,
        "--micro-batch-size", 1, "--micro-batches", 1, "--max-chunk-elements", 8192,
    )  # fmt: skip
    assert made.code == 0, made.err
    exported = hoist(capfd, "export", store, target, "--verify")
    assert exported.code == 0, exported.err
    return target


def assert_same_tensors(mine: PreTrainedModel, theirs: PreTrainedModel) -> None:
    """Parameters and buffers are equal, after the upcast to float32, and so are logits."""
    expected = dict(theirs.float().state_dict())
    found = dict(mine.float().state_dict())
    assert found.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing
    assert same_bits(logits(mine), logits(theirs))


#: For each family one of the combinations; all of them in the slow set.
SAMPLE = [
    ("llama", torch.float32, True, False),
    ("qwen3", torch.bfloat16, False, True),
    ("mistral", torch.float16, True, False),
    ("gpt2", torch.float16, False, True),
    ("opt", torch.bfloat16, True, True),
    ("gpt_neox", torch.float32, False, False),
    ("phi3", torch.float16, False, False),
    ("gemma2", torch.float32, True, True),
    ("mixtral", torch.bfloat16, True, False),
]
ALL = [
    (family, dtype, sharded, tied)
    for family in FAMILIES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for sharded in (False, True)
    for tied in (False, True)
]


@pytest.mark.parametrize(
    ("family", "dtype", "sharded", "tied"),
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in SAMPLE)],
)
def test_every_bit_comes_back(
    family: str, dtype: torch.dtype, sharded: bool, tied: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    save_model(source, family, dtype=dtype, tied=tied, max_shard_size="60KB" if sharded else "5GB")
    assert (len(list(source.glob("*.safetensors"))) > 1) == sharded
    target = round_trip(source, tmp_path, capfd)
    assert_same_tensors(load(target), load(source))
    written = tensors_in(target)
    assert {value.dtype for value in written.values()} == {dtype}
    # tied weights are written once: as many elements as there are unique parameters and persistent buffers
    state = {value.data_ptr(): value.numel() for value in load(source).state_dict().values()}
    assert sum(value.numel() for value in written.values()) == sum(state.values())


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
def test_names_of_memory_and_of_older_files(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Checkpoints are read under the names that transformers writes and under those that it has in memory."""
    results = []
    for original in (True, False):
        folder = tmp_path / str(original)
        save_model(folder / "source", family, save_original_format=original)
        results.append(tensors_in(round_trip(folder / "source", folder, capfd)))
    first, second = results
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("sharded", [False, True])
def test_pytorch_model_bin(sharded: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same tensors as from safetensors; with a tensor that is saved as the transposed view that it was."""
    model = save_model(tmp_path / "source", "llama", dtype=torch.bfloat16)
    expected = tensors_in(round_trip(tmp_path / "source", tmp_path, capfd))
    other = tmp_path / "other" / "source"
    shutil.copytree(tmp_path / "source", other, ignore=shutil.ignore_patterns("*.safetensors*"))
    state = dict(model.state_dict())
    turned = next(name for name in state if name.endswith("q_proj.weight"))
    state[turned] = state[turned].t().contiguous().t()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # as older transformers saved
    if sharded:
        shutil.rmtree(other)
        names = sorted(state)
        TORCH.save_shards(other, *({name: state[name] for name in names[first::3]} for first in range(3)))
        shutil.copyfile(tmp_path / "source" / "config.json", other / "config.json")
    else:
        TORCH.save(state, other)
    found = tensors_in(round_trip(other, other.parent, capfd))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_training_from_a_checkpoint_equals_torch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole way: weights and tokens from files, three steps, weights to files; bit for bit a plain loop's."""
    job = make_job(tmp_path)
    model = save_model(job.model, "llama")
    metrics = tmp_path / "metrics.jsonl"
    trained = hoist(
        capfd, *job.arguments(steps=3, lr=0.01, betas="0.9,0.95", weight_decay=0.1, metrics=metrics, host_memory="2MiB")
    )
    assert trained.code == 0, trained.err
    exported = hoist(capfd, "export", job.store, tmp_path / "exported")
    assert exported.code == 0, exported.err

    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    windows = torch.from_numpy(np.load(job.data).astype(np.int64)).view(-1, SEQ_LEN)
    losses = []
    for step in range(3):
        batches = []
        for micro_batch in range(MICRO_BATCHES):
            first = (step * MICRO_BATCHES + micro_batch) * ROWS  # DESIGN's formula: row r is window (s*M + m)*B + r
            rows = windows[first : first + ROWS]
            batches.append({"input_ids": rows, "labels": rows})
        counted = sum(num_counted(batch) for batch in batches)
        optimizer.zero_grad()
        parts = []
        for batch in batches:
            loss: Tensor = model(**batch, num_items_in_batch=counted, use_cache=False).loss
            torch.autograd.backward(loss)
            parts.append(loss.detach())
        losses.append(float(torch.stack(parts).sum()))
        optimizer.step()
    assert [loss for _, loss, _, _ in curve(metrics)] == losses
    written = tensors_in(tmp_path / "exported")
    expected = dict(model.named_parameters())
    assert written.keys() == expected.keys()
    differing = [name for name in expected if not same_bits(written[name], expected[name].detach())]
    assert not differing
