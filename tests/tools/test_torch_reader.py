"""`pytorch_model.bin`: views of every kind are read exactly, and nothing in the file is ever run."""

import itertools
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hoist.tiers.io.direct import DirectEngine
from hoist.tools.errors import CheckpointError
from hoist.tools.torch_reader import TorchReader, read_archive


def save(what: Any, path: Path, **options: Any) -> Path:
    write: Any = torch.save
    write(what, path, **options)
    return path


def views() -> dict[str, Tensor]:
    """Every way to lie in a storage, most of them in the same one."""
    base = torch.arange(30_000, dtype=torch.float32).sqrt()
    matrix = base.view(200, 150)
    return {
        "whole": matrix,
        "tied": matrix,
        "transposed": matrix.t(),
        "columns": matrix[:, 3:8],
        "every third row": matrix[1::3],
        "every seventh": base[5::7],
        "permuted": base.view(10, 30, 100).permute(2, 0, 1),
        "reversed axes": base[:24].view(2, 3, 4).permute(2, 1, 0),
        "expanded": base[7:12].view(5, 1).expand(5, 700),
        "expanded scalar": base[9].expand(40, 300),
        "window": base[11:29_000],
        "scalar": base[77],
        "empty": base[5:5],
        "empty matrix": base[:0].view(0, 9),
        "one row": matrix[7:8, ::2],
    }


@pytest.mark.parametrize("name", list(views()))
def test_every_view_is_read_in_every_range(
    tmp_path: Path, engine: DirectEngine, staging: Tensor, name: str
) -> None:
    tensors = views()
    save(tensors, tmp_path / "pytorch_model.bin")
    reader = TorchReader(tmp_path)
    assert reader.tensors.keys() == tensors.keys()
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 150_000  # one storage for all
    expected = tensors[name].reshape(-1)
    count = expected.numel()
    assert reader.tensors[name].shape == tuple(tensors[name].shape)
    for start, stop in {(0, count), (0, count // 2), (count // 3, count), (count // 3, count // 3 + min(count, 7))}:
        read = torch.full((stop - start,), torch.nan)
        reader.read_into(name, read, start_element=start, engine=engine, staging=staging)
        assert torch.equal(read, expected[start:stop]), (start, stop)


def test_small_views_in_all_ranges(tmp_path: Path, engine: DirectEngine, staging: Tensor) -> None:
    base = torch.arange(120, dtype=torch.bfloat16)
    cubes = {
        f"{order}": base.view(4, 5, 6).permute(order)[:, 1:] for order in itertools.permutations(range(3))
    }
    save(cubes, tmp_path / "pytorch_model.bin")
    reader = TorchReader(tmp_path)
    for name, value in cubes.items():
        flat = value.reshape(-1)
        for start in range(0, flat.numel(), 13):
            for stop in range(start, flat.numel() + 1, 7):
                read = torch.zeros(stop - start)
                reader.read_into(name, read, start_element=start, engine=engine, staging=staging)
                assert torch.equal(read, flat[start:stop].float())


def test_what_modules_save(tmp_path: Path, engine: DirectEngine, staging: Tensor) -> None:
    """A state_dict with its metadata, parameters, and types that have no storage class of their own."""
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    state: Any = module.state_dict()
    assert isinstance(state, OrderedDict) and hasattr(state, "_metadata")
    state["parameter"] = nn.Parameter(torch.randn(4))
    state["with state"] = nn.Parameter(torch.randn(4))
    state["with state"].note = "kept by torch"
    state["unsigned"] = torch.tensor([1, 60_000], dtype=torch.uint16)
    state["eight bits"] = torch.ones(3).to(torch.float8_e4m3fn)
    save(state, tmp_path / "pytorch_model.bin")
    reader = TorchReader(tmp_path)
    assert reader.tensors.keys() == state.keys()
    for name, value in state.items():
        read = torch.zeros(value.numel(), dtype=value.dtype)
        reader.read_into(name, read, engine=engine, staging=staging)
        assert read.view(torch.uint8).tolist() == value.detach().reshape(-1).view(torch.uint8).tolist()


class Evil:
    """Would make a file if it were unpickled as usual."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


class Inherited(OrderedDict[str, Tensor]):
    """A class of somebody's own."""


def calls(function: str) -> bytes:
    """A pickle that calls a function by name with no arguments, protocol 2."""
    module, name = function.rsplit(".", 1)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b")R."


def with_pickle(path: Path, text: bytes) -> Path:
    """An archive of torch's whose pickle is another."""
    save({"a": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(name, text if name.endswith("/data.pkl") else data)
    return path


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    path = save({"a": torch.ones(3), "evil": Evil(target)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: its pickle asks for posix\.mkdir, which") as at:
        read_archive(path)
    assert not target.exists()
    assert at.value.exit_code == 2
    assert "\n" not in str(at.value)
    pickle.loads(pickle.dumps(Evil(target)))
    assert target.exists()  # as it would have been


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "builtins.getattr", "os.system", "torch.load", "torch.hub.load", "torch.serialization.load",
     "torch.storage._load_from_bytes", "torch.nn.Module", "torch._utils._rebuild_sparse_tensor", "functools.partial",
     "collections.defaultdict", "torch.jit.load", "builtins.bytearray"],
)  # fmt: skip
def test_every_other_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"asks for {re.escape(name)}, which plain weights never"):
        read_archive(with_pickle(tmp_path / "x.bin", calls(name)))


def test_classes_and_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"asks for .*Inherited"):
        read_archive(save(Inherited(a=torch.ones(1)), tmp_path / "x.bin"))
    with pytest.raises(CheckpointError, match=r"holds 2 things that are no tensors \(epoch, optimizer\), as training"):
        read_archive(save({"epoch": 3, "w": torch.ones(2), "optimizer": {"lr": torch.ones(1)}}, tmp_path / "x.bin"))
    others: list[object] = [[torch.ones(1)], {}, torch.ones(3)]
    for nothing in others:
        with pytest.raises(CheckpointError, match="expected a table of tensors"):
            read_archive(save(nothing, tmp_path / "x.bin"))
    with pytest.raises(CheckpointError, match=r"asks for torch\._utils\._rebuild_sparse"):
        read_archive(save({"a": torch.ones(2, 2).to_sparse()}, tmp_path / "x.bin"))
    with pytest.raises(CheckpointError, match="flags"):
        read_archive(save({"a": torch._neg_view(torch.ones(2))}, tmp_path / "x.bin"))


PICKLES = {
    "empty": b"",
    "cut": b"\x80\x02}q",
    "no pickle": b"\xff\xfe\x00",
    "no stack": b".",
    "persistent": b"\x80\x02K\x05Q.",
    "endless frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "instance": b"(ios\nsystem\n.",
    "build": b"\x80\x02ccollections\nOrderedDict\nq\x00(U\x01aK\x01tb.",
}


@pytest.mark.parametrize("case", PICKLES)
def test_bytes_that_are_no_table(tmp_path: Path, case: str) -> None:
    with pytest.raises(CheckpointError, match=r"x\.bin: ") as caught:
        read_archive(with_pickle(tmp_path / "x.bin", PICKLES[case]))
    assert "\n" not in str(caught.value)


def replaced(
    path: Path, change: Callable[[str, bytes], tuple[str, bytes] | None], how: int = zipfile.ZIP_STORED
) -> Path:
    """An archive with changed records."""
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in content.items():
            changed = change(name, data)
            if changed is not None:
                archive.writestr(*changed)
    return path


def test_records_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"

    def fresh() -> Path:
        return save({"a": torch.arange(1000.0), "b": torch.ones(7)}, path)

    with pytest.raises(CheckpointError, match=r"record x/data\.pkl is compressed or encrypted"):
        read_archive(replaced(fresh(), lambda name, data: (name, data), zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="the data of tensor 'a', record data/0, is missing; copy the file again"):
        read_archive(replaced(fresh(), lambda name, data: None if name.endswith("data/0") else (name, data)))
    with pytest.raises(CheckpointError, match="record data/0, has 3999 bytes, expected 4000"):
        read_archive(
            replaced(fresh(), lambda name, data: (name, data[:-1] if name.endswith("data/0") else data))
        )
    with pytest.raises(CheckpointError, match="big-endian"):
        read_archive(replaced(fresh(), lambda name, data: (name, b"big" if name.endswith("byteorder") else data)))
    with pytest.raises(CheckpointError, match=r"is a zip file, but not one of torch\.save's weights"):
        read_archive(replaced(fresh(), lambda name, data: None if name.endswith("data.pkl") else (name, data)))
    with pytest.raises(CheckpointError, match=r"tensor 'a' ends at byte 8000 of the 4000 of record data/0"):
        read_archive(
            replaced(fresh(), lambda name, data: (name, data.replace(b"K\x00M\xe8\x03\x85", b"M\xe8\x03M\xe8\x03\x85")))
        )


@pytest.mark.parametrize("cut", [1, 22, 4096, "half", "all but 3"])
def test_a_truncated_file_is_named_with_its_size(tmp_path: Path, cut: int | str) -> None:
    path = save({"a": torch.arange(5000.0)}, tmp_path / "x.bin")
    whole = path.read_bytes()
    left = {"half": len(whole) // 2, "all but 3": 3}[cut] if isinstance(cut, str) else len(whole) - cut
    path.write_bytes(whole[:left])
    with pytest.raises(CheckpointError, match=rf"x\.bin: (truncated or damaged, .*found {left} bytes|is no zip file)"):
        read_archive(path)


def test_files_of_old_torch_are_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(3)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(
        CheckpointError, match=r"is no zip file, which torch\.save writes since version 1\.6, or a damaged one; load it"
    ):
        read_archive(path)


def test_random_damage_is_refused_or_harmless(tmp_path: Path, engine: DirectEngine, staging: Tensor) -> None:
    """Any byte outside of the data changed: one line, or the same tensors."""
    path = save({"a": torch.arange(10.0), "b": torch.arange(50.0).view(5, 10).t()}, tmp_path / "pytorch_model.bin")
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(3)
    for _ in range(300):
        place, value = (int(torch.randint(0, limit, (), generator=generator)) for limit in (len(whole), 256))
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        try:
            reader = TorchReader(tmp_path)
        except CheckpointError as error:
            assert str(path) in str(error)
            assert "\n" not in str(error)
            continue
        for name, entry in reader.tensors.items():
            read = torch.zeros(entry.num_elements, dtype=entry.dtype)
            reader.read_into(name, read, engine=engine, staging=staging, refuse_nan=False)
