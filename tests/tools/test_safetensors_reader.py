"""Safetensors files: any alignment is read, and what is not whole is refused with numbers."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hoist.tiers.io.direct import DirectEngine
from hoist.tools.errors import CheckpointError
from hoist.tools.safetensors_reader import SafetensorsReader, read_header
from tests.support.checkpoints import SAFETENSORS


def write_raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("shift", range(1, 8))
def test_tensors_at_odd_addresses(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor, shift: int) -> None:
    """Older libraries did not align data: elements then lie across every boundary."""
    values = torch.arange(9000, dtype=torch.float64).sqrt()
    size = 72_000
    header = {"odd": tensor("U8", [shift], 0, shift), "values": tensor("F64", [9000], shift, shift + size)}
    write_raw(tmp_path / "model.safetensors", header, bytes(shift) + values.numpy().tobytes())
    reader = SafetensorsReader(tmp_path)
    read = torch.zeros(8999, dtype=torch.float64)
    reader.read_into("values", read, start_element=1, engine=engine, staging=staging)
    assert torch.equal(read, values[1:])


@pytest.mark.parametrize("cut", [1, 4096, "half", "header", "length", "all"])
def test_a_truncated_shard_is_named_with_its_sizes(tmp_path: Path, cut: int | str) -> None:
    shard = SAFETENSORS.two_shards(tmp_path / "m") / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    size = len(whole)
    left = {"half": size // 2, "header": 20, "length": 5, "all": 0}[cut] if isinstance(cut, str) else size - cut
    shard.write_bytes(whole[:left])
    with pytest.raises(CheckpointError) as caught:
        SafetensorsReader(tmp_path / "m")
    message = str(caught.value)
    assert f"{shard}: truncated, " in message
    assert f"found {left}" in message
    numbers = {"length": "expected at least 8 bytes", "all": "expected at least 8 bytes", "header": "ends at byte"}
    assert numbers.get(str(cut), f"expected {size} bytes") in message
    assert caught.value.exit_code == 2


def test_a_shard_that_is_too_long_is_refused(tmp_path: Path) -> None:
    shard = SAFETENSORS.two_shards(tmp_path / "m") / "model-00001-of-00002.safetensors"
    size = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=rf"longer than its header says, expected {size} bytes, found {size + 4}"):
        SafetensorsReader(tmp_path / "m")


@pytest.mark.parametrize("bit", range(64))
def test_any_flipped_bit_of_the_header_length_is_refused(tmp_path: Path, bit: int) -> None:
    save_file({"a": torch.arange(100.0), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: (truncated|invalid header|byte 0 promises|longer)"):
        SafetensorsReader(tmp_path)


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
