"""The contract of checkpoints, kept by every format: exact reads, one shard at a time, refusals with names.

What only one format can get wrong is in test_safetensors_reader.py and test_torch_reader.py.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hoist.tiers.io.direct import DirectEngine
from hoist.tools.checkpoint import match
from hoist.tools.checkpoint_files import find_checkpoint
from hoist.tools.errors import CheckpointError
from tests.support.checkpoints import FORMATS, SAFETENSORS, TORCH, Format


@pytest.fixture(params=FORMATS, ids=lambda form: str(form.name))
def form(request: pytest.FixtureRequest) -> Iterator[Format]:
    yield request.param


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_range_of_every_float_is_read_as_float32(
    tmp_path: Path, form: Format, engine: DirectEngine, staging: torch.Tensor, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "first": torch.randn(1, generator=generator).to(dtype),
        "matrix": torch.randn(123, 457, generator=generator).to(dtype),
        "scalar": torch.randn((), generator=generator).to(dtype),
        "empty": torch.zeros(0, 7, dtype=dtype),
        "last": torch.randn(4099, generator=generator).to(dtype),
    }
    form.save(tensors, tmp_path)
    reader = form.reader(tmp_path)
    assert reader.dtype == dtype
    assert {name: entry.shape for name, entry in reader.tensors.items()} == {
        name: tuple(value.shape) for name, value in tensors.items()
    }
    for name, value in tensors.items():
        flat = value.flatten()
        for start, stop in {
            (0, flat.numel()),
            (flat.numel() // 3, flat.numel()),
            (flat.numel() // 2, flat.numel() // 2),
        }:
            for wanted in (torch.float32, dtype):
                read = torch.full((stop - start,), torch.nan, dtype=wanted)
                reader.read_into(name, read, start_element=start, engine=engine, staging=staging)
                assert torch.equal(read, flat[start:stop].to(wanted)), (name, start, stop, wanted)
    with pytest.raises(ValueError, match="elements 1 to 2 of the 1 of first"):
        reader.read_into("first", torch.zeros(1), start_element=1, engine=engine, staging=staging)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_other_types_are_read_as_they_are(
    tmp_path: Path, form: Format, engine: DirectEngine, staging: torch.Tensor, dtype: torch.dtype
) -> None:
    values = (torch.arange(3000) % 2).to(dtype)
    form.save({"t": values}, tmp_path)
    reader = form.reader(tmp_path)
    assert reader.dtype is None
    read = torch.zeros(3000, dtype=dtype)
    reader.read_into("t", read, engine=engine, staging=staging)
    assert torch.equal(read, values)
    with pytest.raises(CheckpointError, match=rf"tensor 't' is {dtype}, which cannot be read as torch.float32"):
        reader.read_into("t", torch.zeros(3000), engine=engine, staging=staging)


def test_nan_is_refused_by_tensor_and_element(
    tmp_path: Path, form: Format, engine: DirectEngine, staging: torch.Tensor
) -> None:
    values = torch.zeros(9000, dtype=torch.bfloat16)
    values[0], values[1], values[7777] = torch.inf, -torch.inf, torch.nan
    form.save({"w": values}, tmp_path)
    reader = form.reader(tmp_path)
    read = torch.zeros(9000)
    with pytest.raises(
        CheckpointError, match=rf"{form.single}: tensor 'w' is NaN at element 7777 \(and maybe more\)"
    ):
        reader.read_into("w", read, engine=engine, staging=staging)
    reader.read_into("w", read[:7000], engine=engine, staging=staging)  # infinities are the model's own affair
    reader.read_into("w", read, engine=engine, staging=staging, refuse_nan=False)
    assert read.isnan().nonzero().tolist() == [[7777]]


class RecordingEngine(DirectEngine):
    """Notes which files are open and how each read is cut."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.open: set[Path] = set()
        self.most_open = 0
        self.unaligned: list[tuple[int, int]] = []

    def read(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        self.open.add(path)
        self.most_open = max(self.most_open, len(self.open))
        at_end = offset + buffer.numel() == path.stat().st_size
        if offset % 4096 or buffer.data_ptr() % 4096 or (buffer.numel() % 4096 and not at_end):
            self.unaligned.append((offset, buffer.numel()))
        return super().read(path, offset, buffer)

    def forget(self, path: Path) -> None:
        self.open.discard(path)
        super().forget(path)


def test_one_shard_is_open_at_a_time_and_reads_are_aligned(tmp_path: Path, form: Format, staging: torch.Tensor) -> None:
    reader = form.reader(form.two_shards(tmp_path / "m"))
    with RecordingEngine() as engine:
        for name in ("a", "c", "b", "c"):
            read = torch.zeros(reader.tensors[name].num_elements)
            reader.read_into(name, read, engine=engine, staging=staging)
            targets = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
            assert {target for target in targets if str(tmp_path) in target} == {str(reader.tensors[name].file)}
            assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        assert (engine.most_open, len(engine.open)) == (1, 1)
        reader.forget(engine)
        assert (engine.open, engine.unaligned) == (set(), [])


def test_unfit_staging_is_a_bug_of_the_caller(
    tmp_path: Path, form: Format, engine: DirectEngine, staging: torch.Tensor
) -> None:
    reader = form.reader(form.two_shards(tmp_path / "m"))
    for unfit in (staging[4096:], staging[1:], staging.view(torch.int32)):
        with pytest.raises(ValueError, match="staging: must be 1-D uint8"):
            reader.read_into("a", torch.zeros(5000), engine=engine, staging=unfit)


def test_missing_shards_are_listed(tmp_path: Path, form: Format) -> None:
    directory = form.two_shards(tmp_path / "m")
    (directory / form.shard(2, 2)).unlink()
    with pytest.raises(CheckpointError, match=rf"1 of 2 shards are missing: {form.shard(2, 2)}; download"):
        form.reader(directory)


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, form: Format) -> None:
    directory = form.two_shards(tmp_path / "m")
    index = directory / form.index
    good = index.read_text()
    first, second = form.shard(1, 2), form.shard(2, 2)
    form.edit_index(directory, lambda places: places.update(ghost=first))
    with pytest.raises(
        CheckpointError, match=rf"1 tensors are not in the shard that the index names: ghost \({first}\)"
    ):
        form.reader(directory)
    index.write_text(good)
    form.edit_index(directory, lambda places: places.update(a=second))
    with pytest.raises(CheckpointError, match=rf"not in the shard that the index names: a \({second}\)"):
        form.reader(directory)
    index.write_text(good)
    form.edit_index(directory, lambda places: places.update(a="../elsewhere.safetensors"))
    with pytest.raises(CheckpointError, match=r"names shards outside its directory: \.\./elsewhere"):
        form.reader(directory)
    for text in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 5}}', '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=rf"{form.index}: not an index of shards"):
            form.reader(directory)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, form: Format) -> None:
    directory = form.two_shards(tmp_path / "m")
    form.write({"c": torch.arange(7000.0), "b": torch.ones(3, 5)}, directory / form.shard(2, 2))
    with pytest.raises(
        CheckpointError,
        match=rf"tensor 'b' is in two shards, {form.shard(1, 2)} and {form.shard(2, 2)}",
    ):
        form.reader(directory)


def test_a_tensor_that_the_index_forgot_is_still_there(tmp_path: Path, form: Format) -> None:
    directory = form.two_shards(tmp_path / "m")
    form.edit_index(directory, lambda places: places.__delitem__("b"))
    assert set(form.reader(directory).tensors) == {"a", "b", "c"}


def test_no_checkpoint(tmp_path: Path, form: Format) -> None:
    assert find_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match=rf"has neither {form.single} nor {form.index}"):
        form.reader(tmp_path)


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def tiny_llama(*, tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_a_models_weights_fit(
    tmp_path: Path, form: Format, engine: DirectEngine, staging: torch.Tensor, tied: bool
) -> None:
    model = tiny_llama(tied=tied)
    state = dict(model.state_dict())
    if tied and form is SAFETENSORS:
        del state["lm_head.weight"]  # this format has no tensors that share memory
    names = sorted(state)
    parts = [{name: state[name] for name in names[first::3]} for first in range(3)]
    reader = form.reader(form.save_shards(tmp_path / "m", *parts))
    assert len(reader.shards) == 3
    aliases = [("model.embed_tokens.weight", "lm_head.weight")] if tied else []
    found = match(reader, shapes(model), aliases)
    found.require()
    assert set(found.sources) == set(model.state_dict())
    assert (found.sources["lm_head.weight"] == ("model.embed_tokens.weight",)) is (tied and form is SAFETENSORS)
    for name, value in model.state_dict().items():
        read = torch.zeros(value.numel())
        reader.read_into(found.sources[name], read, engine=engine, staging=staging)
        assert torch.equal(read, value.flatten())


def test_many_tensors_with_long_names(
    tmp_path: Path, form: Format, engine: DirectEngine, staging: torch.Tensor
) -> None:
    names = [f"{'nested.' * 50}{number}/n\u00e4me \u4e2d.weight" for number in range(2000)]
    tensors = {name: torch.full((number % 5 + 1,), float(number)) for number, name in enumerate(names)}
    form.save(tensors, tmp_path)
    reader = form.reader(tmp_path)
    assert reader.tensors.keys() == tensors.keys()
    for name in names[::97]:
        read = torch.zeros(tensors[name].numel())
        reader.read_into(name, read, engine=engine, staging=staging)
        assert torch.equal(read, tensors[name])


def test_safetensors_come_first(tmp_path: Path) -> None:
    TORCH.save({"old": torch.zeros(1)}, tmp_path)
    found = find_checkpoint(tmp_path)
    assert found is not None and found.format_name == "pytorch_model.bin"
    SAFETENSORS.save({"new": torch.zeros(1)}, tmp_path)
    found = find_checkpoint(tmp_path)
    assert found is not None and set(found.tensors) == {"new"}


def test_a_git_lfs_pointer_is_named(tmp_path: Path, form: Format) -> None:
    (tmp_path / form.single).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match=rf"{form.single}: is a Git LFS pointer, not the weights; get them with"):
        form.reader(tmp_path)


def test_what_does_not_fit_is_listed_in_one_line(tmp_path: Path, form: Format) -> None:
    form.save(
        {"a": torch.ones(2, 3), "b": torch.ones(4), "x": torch.ones(1), "y": torch.ones(1)}, tmp_path
    )
    reader = form.reader(tmp_path)
    found = match(reader, {"a": (3, 2), "b": (4,), "c": (5,)}, ignore_unexpected=["^y$"])
    assert (found.missing, found.unexpected, found.wrong_shape) == (("c",), ("x",), (("a", (3, 2), (2, 3)),))
    with pytest.raises(
        CheckpointError,
        match=r"not fit the config: 1 missing \(c\); 1 of another shape \(a is \[2, 3\], the model has \[3, 2\]\); 1 "
        r"unknown to the model \(x\); use the config\.json that the weights were saved with",
    ):
        found.require()
    extra = match(reader, {"a": (2, 3), "b": (4,)})
    extra.require(allow_unexpected=True)
    with pytest.raises(CheckpointError, match=r"2 unknown to the model \(x, y\)"):
        extra.require()


def test_tied_tensors_that_are_there_twice_are_reported(tmp_path: Path, form: Format) -> None:
    form.save({"embed": torch.ones(2), "head": torch.zeros(2)}, tmp_path)
    found = match(form.reader(tmp_path), {"embed": (2,)}, [("embed", "head")])
    found.require()
    assert found.extra_copies == (("embed", "head"),)
    both = match(form.reader(tmp_path), {"embed": (2,), "head": (2,)}, [("embed", "head")])
    assert both.sources == {"embed": ("embed",), "head": ("head",)}
    assert both.extra_copies == ()


def test_several_tensors_are_read_end_to_end(
    tmp_path: Path, form: Format, engine: DirectEngine, staging: torch.Tensor
) -> None:
    reader = form.reader(form.two_shards(tmp_path / "m"))
    whole = torch.cat([torch.arange(7000.0), torch.ones(15), torch.arange(5000.0)])
    for start, stop in ((0, 12_015), (6999, 7016), (7003, 7004), (7015, 12_015), (12_015, 12_015)):
        read = torch.zeros(stop - start)
        reader.read_into(("c", "b", "a"), read, start_element=start, engine=engine, staging=staging)
        assert torch.equal(read, whole[start:stop])
