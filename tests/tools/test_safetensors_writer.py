"""What the streaming writer leaves is what safetensors and transformers read, bit for bit; or it leaves nothing."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hoist.tiers.errors import TransferError
from hoist.tiers.io.direct import DirectEngine
from hoist.tools.errors import ExportError, ExportRefusedError
from hoist.tools.safetensors_reader import SafetensorsReader
from hoist.tools.safetensors_writer import StreamingWriter, plan_shards

Tensors = dict[str, torch.Tensor]


def declared(tensors: Tensors) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]


def stream(writer: StreamingWriter, tensors: Tensors, piece: int) -> None:
    for planned in writer.plan:
        flat = tensors[planned.name].flatten()
        for start in range(0, flat.numel(), piece):
            writer.write(planned.name, flat[start : start + piece])


def some_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "flags": torch.tensor([True, False, True]),
        "prime": torch.randn(101, 103, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "half": torch.randn(4099, generator=generator).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "counter": torch.arange(7),
        "n\u00e4me/with \u4e2d.weight" + "x" * 300: torch.randn(1, generator=generator).to(torch.float16),
    }


@pytest.mark.parametrize("piece", [1000, 4096, 10**6])
@pytest.mark.parametrize("max_shard_bytes", [1, 9000, 10**9])
def test_reloads_bit_equal(
    tmp_path: Path, engine: DirectEngine, staging: torch.Tensor, piece: int, max_shard_bytes: int
) -> None:
    tensors = some_tensors()
    with StreamingWriter(
        tmp_path / "out", declared(tensors), max_shard_bytes, engine=engine, staging=staging
    ) as writer:
        stream(writer, tensors, piece)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    loaded: Tensors = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        loaded |= load_file(file)
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() is (len(files) > 1)
    if max_shard_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        document = json.loads(index.read_text())
        assert document["metadata"]["total_size"] == sum(value.numel() * value.itemsize for value in tensors.values())
        assert set(document["weight_map"].values()) == {file.name for file in files}
    ours = SafetensorsReader(tmp_path / "out")
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in ours.tensors.values())


def test_transformers_loads_it(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor) -> None:
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    tensors = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    with StreamingWriter(tmp_path / "out", declared(tensors), 8000, engine=engine, staging=staging) as writer:
        stream(writer, tensors, 100)
        model.config.save_pretrained(writer.temporary_directory)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True, dtype="auto")
    again, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert (tmp_path / "out" / "config.json").is_file()


def test_pieces_are_converted_to_the_planned_type(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor) -> None:
    values = torch.randn(9999, generator=torch.Generator().manual_seed(0))
    with StreamingWriter(tmp_path / "out", [("w", torch.bfloat16, (9999,))], engine=engine, staging=staging) as writer:
        writer.write("w", values[:5000])
        writer.write("w", values[5000:].to(torch.bfloat16))
        with pytest.raises(ValueError, match="piece of 'w': expected no more tensors"):
            writer.write("w", values[:1])
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], values.to(torch.bfloat16))


def test_plan_orders_by_type_and_cuts_by_size() -> None:
    plan = plan_shards(
        [("a", torch.uint8, (3,)), ("b", torch.float32, (4,)), ("c", torch.float32, (5,)), ("d", torch.float64, (1,))],
        24,
    )
    assert [(tensor.name, tensor.shard, tensor.begin, tensor.end) for tensor in plan] == [
        ("d", 0, 0, 8), ("b", 0, 8, 24), ("c", 1, 0, 20), ("a", 1, 20, 23),
    ]  # fmt: skip
    assert [tensor.shard for tensor in plan_shards([("a", torch.uint8, (30,)), ("b", torch.uint8, (1,))], 5)] == [0, 1]
    with pytest.raises(ValueError, match="different names, got 2 and 1 names"):
        plan_shards([("a", torch.uint8, (3,)), ("a", torch.uint8, (3,))], 5)
    with pytest.raises(ValueError, match="need at least one"):
        plan_shards([], 5)
    with pytest.raises(ValueError, match=r"no type for z \(torch\.complex64\)"):
        plan_shards([("z", torch.complex64, (3,))], 5)


def test_order_and_completeness_are_checked_and_nothing_is_left(
    tmp_path: Path, engine: DirectEngine, staging: torch.Tensor
) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(2)}

    def writer() -> StreamingWriter:
        return StreamingWriter(tmp_path / "deep" / "er" / "out", declared(tensors), engine=engine, staging=staging)

    with pytest.raises(ValueError, match=r"piece of 'b': expected 'a'"), writer() as made:
        made.write("b", tensors["b"])
    with pytest.raises(ValueError, match=r"piece of 'a': shape \(4,\) after 0 of 3 elements"), writer() as made:
        made.write("a", torch.ones(4))
    with pytest.raises(ValueError, match=r"piece of 'a': is torch\.int64, planned as torch\.float32"), writer() as made:
        made.write("a", torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 tensors are not written, 'b' is next"), writer() as made:
        made.write("a", tensors["a"])
    with pytest.raises(KeyboardInterrupt), writer() as made:
        made.write("a", tensors["a"])
        assert made.temporary_directory.is_dir()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_targets_that_cannot_be_used_are_refused(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor) -> None:
    def attempt(target: Path, elements: int = 3) -> None:
        StreamingWriter(target, [("a", torch.float32, (elements,))], engine=engine, staging=staging)

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for target in ("full", "full/x", "link", "/"):
        with pytest.raises(
            ExportRefusedError, match="it exists, allowed is a new or an empty directory; name another or remove"
        ):
            attempt(tmp_path / target)
    with pytest.raises(
        ExportRefusedError, match=r"needs \d+ bytes, \d+ are free; make room or name a directory on another disk"
    ):
        attempt(tmp_path / "new" / "out", elements=10**15)
    with pytest.raises(ExportRefusedError, match=r"File exists \(.*/full/x\); name a directory that you may write"):
        attempt(tmp_path / "full" / "x" / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_is_filled(tmp_path: Path, engine: DirectEngine, staging: torch.Tensor) -> None:
    (tmp_path / "out").mkdir()
    with StreamingWriter(tmp_path / "out", [("a", torch.float32, (3,))], engine=engine, staging=staging) as writer:
        assert list((tmp_path / "out").iterdir()) == []
        writer.write("a", torch.ones(3))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_target_that_appears_meanwhile_is_not_touched(
    tmp_path: Path, engine: DirectEngine, staging: torch.Tensor
) -> None:
    with (
        pytest.raises(ExportError, match=r"Directory not empty .*; nothing is left of it, export again"),
        StreamingWriter(tmp_path / "out", [("a", torch.float32, (3,))], engine=engine, staging=staging) as writer,
    ):
        writer.write("a", torch.ones(3))
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "out"]


class FailingEngine(DirectEngine):
    """Fails the n-th write, as a drive would; notes what is not aligned."""

    def __init__(self, fail_at: int) -> None:
        super().__init__(num_threads=1)
        self.fail_at = fail_at
        self.seen = 0
        self.unaligned = 0

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        self.seen += 1
        self.unaligned += bool(offset % 4096 or buffer.numel() % 4096 or buffer.data_ptr() % 4096)
        if self.seen == self.fail_at:
            broken: Future[None] = Future()
            broken.set_exception(TransferError(f"write of {path}: no space"))
            return broken
        return super().write(path, offset, buffer)


@pytest.fixture(params=[1, 2, 5, 6])
def failing(request: pytest.FixtureRequest) -> Iterator[FailingEngine]:
    with FailingEngine(request.param) as engine:
        yield engine


def test_a_failed_write_ends_the_export_and_leaves_nothing(
    tmp_path: Path, failing: FailingEngine, staging: torch.Tensor
) -> None:
    """20,000 bytes behind a page of header are three buffers of two pages and a rest, twice."""
    tensors = {"a": torch.ones(5000), "b": torch.ones(5000)}
    with (
        pytest.raises(TransferError, match="no space"),
        StreamingWriter(tmp_path / "out", declared(tensors), 20_000, engine=failing, staging=staging) as writer,
    ):
        stream(writer, tensors, 1000)
    assert list(tmp_path.iterdir()) == []


def test_every_write_is_aligned(tmp_path: Path, staging: torch.Tensor) -> None:
    tensors = some_tensors()
    with FailingEngine(-1) as engine:
        with StreamingWriter(tmp_path / "out", declared(tensors), 9000, engine=engine, staging=staging) as writer:
            stream(writer, tensors, 777)
        assert engine.seen > 5
        assert engine.unaligned == 0
        assert engine.statistics().buffered_bytes == 0 or "buffered" in engine.describe()
