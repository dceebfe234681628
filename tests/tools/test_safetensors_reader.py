"""Checkpoints are read exactly, one shard at a time, and refused with numbers when they are not whole."""

import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hoist.tiers.io.direct import DirectEngine
from hoist.tools.errors import CheckpointError
from hoist.tools.safetensors_reader import CheckpointReader, match, read_header


def write_raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def save_sharded(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    directory.mkdir()
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    places = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def two_shards(directory: Path) -> Path:
    return save_sharded(
        directory,
        {
            "model-00001-of-00002.safetensors": {"a": torch.arange(5000.0), "b": torch.ones(3, 5)},
            "model-00002-of-00002.safetensors": {"c": torch.arange(7000.0)},
        },
    )


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_range_of_every_float_is_read_as_float32(
    tmp_path: Path, engine: DirectEngine, staging: torch.Tensor, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "first": torch.randn(1, generator=generator).to(dtype),
        "matrix": torch.randn(123, 457, generator=generator).to(dtype),
        "scalar": torch.randn((), generator=generator).to(dtype),
        "empty": torch.zeros(0, 7, dtype=dtype),
        "last": torch.randn(4099, generator=generator).to(dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
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


@pytest.mark.parametrize("shift", range(1, 8))
def test_tensors_at_odd_addresses(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor, shift: int) -> None:
    """Older libraries did not align data: elements then lie across every boundary."""
    values = torch.arange(9000, dtype=torch.float64).sqrt()
    size = 72_000
    header = {"odd": tensor("U8", [shift], 0, shift), "values": tensor("F64", [9000], shift, shift + size)}
    write_raw(tmp_path / "model.safetensors", header, bytes(shift) + values.numpy().tobytes())
    reader = CheckpointReader(tmp_path)
    read = torch.zeros(8999, dtype=torch.float64)
    reader.read_into("values", read, start_element=1, engine=engine, staging=staging)
    assert torch.equal(read, values[1:])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_other_types_are_read_as_they_are(
    tmp_path: Path, engine: DirectEngine, staging: torch.Tensor, dtype: torch.dtype
) -> None:
    values = (torch.arange(3000) % 2).to(dtype)
    save_file({"t": values}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    assert reader.dtype is None
    read = torch.zeros(3000, dtype=dtype)
    reader.read_into("t", read, engine=engine, staging=staging)
    assert torch.equal(read, values)
    with pytest.raises(CheckpointError, match=rf"tensor 't' is {dtype}, which cannot be read as torch.float32"):
        reader.read_into("t", torch.zeros(3000), engine=engine, staging=staging)


def test_nan_is_refused_by_tensor_and_element(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor) -> None:
    values = torch.zeros(9000, dtype=torch.bfloat16)
    values[0], values[1], values[7777] = torch.inf, -torch.inf, torch.nan
    save_file({"w": values}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    read = torch.zeros(9000)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor 'w' is NaN at element 7777 \(and maybe more\)"
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


def test_one_shard_is_open_at_a_time_and_reads_are_aligned(tmp_path: Path, staging: torch.Tensor) -> None:
    reader = CheckpointReader(two_shards(tmp_path / "m"))
    with RecordingEngine() as engine:
        for name in ("a", "c", "b", "c"):
            read = torch.zeros(reader.tensors[name].num_elements)
            reader.read_into(name, read, engine=engine, staging=staging)
            targets = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
            assert {target for target in targets if target.endswith(".safetensors")} == {str(reader.tensors[name].file)}
            assert ".safetensors" not in Path("/proc/self/maps").read_text()
        assert (engine.most_open, len(engine.open)) == (1, 1)
        reader.forget(engine)
        assert (engine.open, engine.unaligned) == (set(), [])


def test_unfit_staging_is_a_bug_of_the_caller(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor) -> None:
    reader = CheckpointReader(two_shards(tmp_path / "m"))
    for unfit in (staging[4096:], staging[1:], staging.view(torch.int32)):
        with pytest.raises(ValueError, match="staging: must be 1-D uint8"):
            reader.read_into("a", torch.zeros(5000), engine=engine, staging=unfit)


@pytest.mark.parametrize("cut", [1, 4096, "half", "header", "length", "all"])
def test_a_truncated_shard_is_named_with_its_sizes(tmp_path: Path, cut: int | str) -> None:
    shard = two_shards(tmp_path / "m") / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    size = len(whole)
    left = {"half": size // 2, "header": 20, "length": 5, "all": 0}[cut] if isinstance(cut, str) else size - cut
    shard.write_bytes(whole[:left])
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(tmp_path / "m")
    message = str(caught.value)
    assert f"{shard}: truncated, " in message
    assert f"found {left}" in message
    numbers = {"length": "expected at least 8 bytes", "all": "expected at least 8 bytes", "header": "ends at byte"}
    assert numbers.get(str(cut), f"expected {size} bytes") in message
    assert caught.value.exit_code == 2


def test_a_shard_that_is_too_long_is_refused(tmp_path: Path) -> None:
    shard = two_shards(tmp_path / "m") / "model-00001-of-00002.safetensors"
    size = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=rf"longer than its header says, expected {size} bytes, found {size + 4}"):
        CheckpointReader(tmp_path / "m")


@pytest.mark.parametrize("bit", range(64))
def test_any_flipped_bit_of_the_header_length_is_refused(tmp_path: Path, bit: int) -> None:
    save_file({"a": torch.arange(100.0), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: (truncated|invalid header|byte 0 promises|longer)"):
        CheckpointReader(tmp_path)


F = 4
BAD_HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "no object": ([], b"", "not a JSON object"),
    "not utf-8": (b'{"\xff":1}', b"", "no UTF-8 at byte 10"),
    "cut json": (b'{"a":', b"", r"no JSON at byte 13"),
    "deep": (b"[" * 100_000, b"", "nested too deep"),
    "repeated": (
        b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        b"x",
        "the key 'a' is there twice",
    ),
    "fields": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(F), "tensor 'a' lacks dtype, shape or data_offsets"),
    "no fields": ({"a": 5}, bytes(F), "tensor 'a' lacks dtype, shape or data_offsets"),
    "dtype": ({"a": tensor("F4", [1], 0, F)}, bytes(F), "tensor 'a' has dtype 'F4', known are F64"),
    "shape": ({"a": tensor("F32", [-1], 0, F)}, bytes(F), r"tensor 'a' has shape \[-1\]"),
    "fraction": ({"a": tensor("F32", [1.0], 0, F)}, bytes(F), r"tensor 'a' has shape \[1\.0\]"),  # type: ignore[list-item]
    "length": (
        {"a": tensor("F32", [2], 0, F)},
        bytes(F),
        r"tensor 'a' of F32 \[2\] needs 8 bytes, its data_offsets give 4",
    ),
    "gap": (
        {"a": tensor("F32", [1], 0, F), "b": tensor("F32", [1], 8, 12)},
        bytes(12),
        "tensor 'b' begins at byte 8 of the data, expected 4: a gap or an overlap",
    ),
    "overlap": (
        {"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)},
        bytes(12),
        "tensor 'b' begins at byte 4 of the data, expected 8: a gap or an overlap",
    ),
    "late": ({"a": tensor("F32", [1], 4, 8)}, bytes(8), "tensor 'a' begins at byte 4 of the data, expected 0"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_are_refused_by_file_and_place(tmp_path: Path, case: str) -> None:
    header, data, message = BAD_HEADERS[case]
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: invalid header, .*{message}") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    directory = two_shards(tmp_path / "m")
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 2 shards are missing: model-00002-of-00002\.safetensors; download"
    ):
        CheckpointReader(directory)


def edit_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = directory / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    change(document["weight_map"])
    index.write_text(json.dumps(document))


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    directory = two_shards(tmp_path / "m")
    index = directory / "model.safetensors.index.json"
    good = index.read_text()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    edit_index(directory, lambda places: places.update(ghost=first))
    with pytest.raises(
        CheckpointError, match=rf"1 tensors are not in the shard that the index names: ghost \({first}\)"
    ):
        CheckpointReader(directory)
    index.write_text(good)
    edit_index(directory, lambda places: places.update(a=second))
    with pytest.raises(CheckpointError, match=rf"not in the shard that the index names: a \({second}\)"):
        CheckpointReader(directory)
    index.write_text(good)
    edit_index(directory, lambda places: places.update(a="../elsewhere.safetensors"))
    with pytest.raises(CheckpointError, match=r"names shards outside its directory: \.\./elsewhere"):
        CheckpointReader(directory)
    for text in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 5}}', '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: not an index of shards"):
            CheckpointReader(directory)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = two_shards(tmp_path / "m")
    save_file({"c": torch.arange(7000.0), "b": torch.ones(3, 5)}, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'b' is in two shards, model-00001-of-00002\.safetensors and model-00002-of-00002\.safetensors",
    ):
        CheckpointReader(directory)


def test_a_tensor_that_the_index_forgot_is_still_there(tmp_path: Path) -> None:
    directory = two_shards(tmp_path / "m")
    edit_index(directory, lambda places: places.__delitem__("b"))
    assert set(CheckpointReader(directory).tensors) == {"a", "b", "c"}


def test_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointReader.find(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        CheckpointReader(tmp_path)


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
def test_what_save_pretrained_wrote_fits(
    tmp_path: Path, engine: DirectEngine, staging: torch.Tensor, tied: bool
) -> None:
    model = tiny_llama(tied=tied)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    reader = CheckpointReader(tmp_path)
    assert len(reader.shards) > 1
    aliases = [("model.embed_tokens.weight", "lm_head.weight")] if tied else []
    found = match(reader, shapes(model), aliases)
    found.require()
    assert set(found.sources) == set(model.state_dict())
    assert (found.sources["lm_head.weight"] == ("model.embed_tokens.weight",)) is tied
    for name, value in model.state_dict().items():
        read = torch.zeros(value.numel())
        reader.read_into(found.sources[name], read, engine=engine, staging=staging)
        assert torch.equal(read, value.flatten())


def test_what_does_not_fit_is_listed_in_one_line(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(2, 3), "b": torch.ones(4), "x": torch.ones(1), "y": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    reader = CheckpointReader(tmp_path)
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


def test_tied_tensors_that_are_there_twice_are_reported(tmp_path: Path) -> None:
    save_file({"embed": torch.ones(2), "head": torch.zeros(2)}, tmp_path / "model.safetensors")
    found = match(CheckpointReader(tmp_path), {"embed": (2,)}, [("embed", "head")])
    found.require()
    assert found.extra_copies == (("embed", "head"),)
    both = match(CheckpointReader(tmp_path), {"embed": (2,), "head": (2,)}, [("embed", "head")])
    assert both.sources == {"embed": ("embed",), "head": ("head",)}
    assert both.extra_copies == ()


def test_several_tensors_are_read_end_to_end(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor) -> None:
    reader = CheckpointReader(two_shards(tmp_path / "m"))
    whole = torch.cat([torch.arange(7000.0), torch.ones(15), torch.arange(5000.0)])
    for start, stop in ((0, 12_015), (6999, 7016), (7003, 7004), (7015, 12_015), (12_015, 12_015)):
        read = torch.zeros(stop - start)
        reader.read_into(("c", "b", "a"), read, start_element=start, engine=engine, staging=staging)
        assert torch.equal(read, whole[start:stop])
