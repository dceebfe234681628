"""Parquet and Arrow files are read like JSON lines, a few rows at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hoist.tools.columnar import read_table
from hoist.tools.errors import DataError
from hoist.tools.examples import encode_files
from hoist.tools.text import ByteTokenizer, ModelTokenizer, TextTokenizer
from tests.support.tokenizers import CHATML, VOCABULARY, save_tokenizer

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)

ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"the {n}"}, {"role": "assistant", "content": "fox " * (n % 5 + 1)}],
        "score": n / 2,
    }
    for n in range(300)
]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=70)
    return path


def write_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    return _write(path, rows, pyarrow.ipc.new_file)


def write_stream(path: Path, rows: list[dict[str, Any]]) -> Path:
    return _write(path, rows, pyarrow.ipc.new_stream)


def _write(path: Path, rows: list[dict[str, Any]], make: Callable[..., Any]) -> Path:
    path = path.with_suffix(".arrow")
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


WRITERS = [write_parquet, write_file, write_stream]


@pytest.mark.parametrize("write", WRITERS)
def test_the_same_ids_and_labels_as_from_json(tmp_path: Path, write: Callable[..., Path]) -> None:
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path / "model", template=CHATML))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def encode(path: Path) -> Any:
        return encode_files(
            [path], tokenizer=tokenizer, vocab_size=VOCABULARY, cache_directory=tmp_path / "cache", longest=99,
            truncate=False,
        ).part  # fmt: skip

    table, lines = encode(write(tmp_path / "a", ROWS)), encode(tmp_path / "a.jsonl")
    assert (table.facts, table.counted_crc32c, table.documents_crc32c) == (
        lines.facts, lines.counted_crc32c, lines.documents_crc32c,
    )  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
def test_only_columns_of_records_are_read(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(tmp_path / "a", ROWS)
    found = list(read_table(path))
    assert [record.line for record in found] == list(range(1, 301))
    assert [record.fields for record in found] == [{"messages": row["messages"]} for row in ROWS]
    done = [record.done_bytes for record in found]
    assert sorted(done) == done
    assert done[-1] <= path.stat().st_size


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_wrong_is_told_by_row(tmp_path: Path, write: Callable[..., Path]) -> None:
    def refused(rows: list[dict[str, Any]], tokenizer: TextTokenizer | None = None) -> str:
        path = write(tmp_path / "a", rows)
        with pytest.raises(DataError) as caught:
            encode_files(
                [path], tokenizer=tokenizer or ByteTokenizer(), vocab_size=VOCABULARY,
                cache_directory=tmp_path / "cache", longest=20, truncate=False,
            )  # fmt: skip
        line = str(caught.value)
        assert line.startswith(f"--data {path}: ")
        assert "\n" not in line
        return line.removeprefix(f"--data {path}: ")

    assert refused([{"text": "a"}, {"text": None}]) == "row 2: text is null, must be a string"
    assert refused([{"a": 1, "b": 2}]).startswith("has the columns a, b; a record needs some of messages, conv")
    assert refused([{"prompt": "a"}]).startswith("row 1: has the fields prompt; a record needs one of messages, conver")
    pairs = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 30}]
    assert refused(pairs).startswith("row 2: has 32 tokens, --seq-len 20 allows 20;")


@pytest.mark.parametrize("write", WRITERS)
def test_damaged_and_empty_files(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(tmp_path / "a", ROWS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"^--data {path}: cannot be read.* \(.*\); write it again$"):
        list(read_table(path))
    path.write_bytes(b"no table at all")
    with pytest.raises(DataError, match=rf"^--data {path}: cannot be read \(.*\); write it again$"):
        list(read_table(path))


def test_text_that_is_no_text(tmp_path: Path) -> None:
    """Bytes, and a column of strings that are no UTF-8, which pyarrow does not look at."""
    raw = pyarrow.array([b"a", b"\xff"])
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": raw}), path)
    with pytest.raises(DataError, match=r"a\.parquet: row 1: text is bytes, must be a string$"):
        encode_files(
            [path], tokenizer=ByteTokenizer(), vocab_size=VOCABULARY, cache_directory=tmp_path / "cache", longest=20,
            truncate=False,
        )  # fmt: skip
    parquet.write_table(pyarrow.table({"text": pyarrow.StringArray.from_buffers(2, *raw.buffers()[1:])}), path)
    with pytest.raises(
        DataError, match=r"a\.parquet: has text after row 0 that is no UTF-8 \(byte 0xff\); write it again$"
    ):
        list(read_table(path))


def test_a_table_without_rows(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: the file is empty; it needs at least one record"):
        encode_files(
            [tmp_path / "a.parquet"], tokenizer=ByteTokenizer(), vocab_size=256, cache_directory=tmp_path / "cache",
            longest=20, truncate=False,
        )  # fmt: skip


def test_what_datasets_has_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}]).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    assert [record.fields for record in read_table(path)] == [{"text": "a"}, {"text": "b"}]


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\.parquet: \.parquet files are read with pyarrow, which is not here;"):
        list(read_table(path))
