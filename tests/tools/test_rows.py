"""Rows: windows, whole examples packed in their order, single documents padded; nothing is lost, cut or told twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.tools.data import prepare
from hoist.tools.errors import DataError
from hoist.tools.rows import RowRules, Rows


def rows_of(*paths: Path, rules: RowRules, truncate: bool = False) -> Rows:
    return prepare(
        paths, tokenizer=None, vocab_size=256, cache_directory=paths[0].parent / "cache", rules=rules, truncate=truncate
    )


def pairs(path: Path, lengths: Sequence[tuple[int, int]]) -> Path:
    """Prompts and completions of so many bytes, each of its own letter; a separator follows each."""
    records = [
        {"prompt": chr(97 + n % 26) * prompt, "completion": chr(65 + n % 26) * completion}
        for n, (prompt, completion) in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(path: Path, lengths: Sequence[int]) -> Path:
    path.write_text("".join(json.dumps({"text": chr(97 + n % 26) * length}) + "\n" for n, length in enumerate(lengths)))
    return path


def row(rows: Rows, number: int) -> bytes:
    return bytes(rows.batch([number])["input_ids"][0, : rows.span(number)[1]].tolist())


def labels(batch: dict[str, torch.Tensor]) -> list[str]:
    """Each row's labels as text, with . where none counts and 0 for the separator."""
    found: list[list[int]] = batch["labels"].tolist()
    return ["".join("." if label == -100 else chr(label) if label else "0" for label in line) for line in found]


def test_examples_are_packed_whole_in_their_order(tmp_path: Path) -> None:
    rows = rows_of(pairs(tmp_path / "a.jsonl", [(1, 1), (2, 1), (3, 3), (1, 2)]), rules=RowRules(seq_len=8))
    assert [row(rows, number) for number in range(rows.num_rows)] == [b"aA\0bbB\0", b"cccCCC\0", b"dDD\0"]
    batch = rows.batch([0, 2])
    assert batch.keys() == {"input_ids", "labels"}
    assert labels(batch) == [".A0..B0.", ".DD0...."]
    assert batch["input_ids"][1].tolist() == [*b"dDD\0", 0, 0, 0, 0]


def test_or_padded_one_a_row(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", [(1, 1), (2, 1), (3, 3)])
    rows = rows_of(path, rules=RowRules(seq_len=8, pack=False, pad_id=7))
    assert rows.num_rows == 3
    batch = rows.batch([2, 0])
    assert batch["input_ids"].tolist() == [[*b"cccCCC\0"], [*b"aA\0", 7, 7, 7, 7]]
    assert batch["attention_mask"].tolist() == [[1] * 7, [1, 1, 1, 0, 0, 0, 0]]
    assert labels(batch) == ["...CCC0", ".A0...."]
    assert rows.batch([0])["input_ids"].shape == (1, 3)


def test_text_is_windows_or_split_documents(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", [2, 7, 4])
    windows = rows_of(path, rules=RowRules(seq_len=4))
    assert [row(windows, number) for number in range(windows.num_rows)] == [b"aa\0b", b"bbbb", b"bb\0c", b"ccc\0"]
    assert labels(windows.batch([0])) == ["aa0b"]
    alone = rows_of(path, rules=RowRules(seq_len=4, pack=False))
    # A rest of one token has nothing to tell: "cccc" is followed by a row of the separator alone, which is left out.
    assert [row(alone, number) for number in range(alone.num_rows)] == [b"aa\0", b"bbbb", b"bbb\0", b"cccc"]
    assert windows.fingerprint != alone.fingerprint


def test_documents_kept_apart_begin_at_position_0(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", [2, 7, 4])
    rows = rows_of(path, rules=RowRules(seq_len=6, isolate=True))
    batch = rows.batch([0, 1])
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]]
    assert labels(batch) == [".a0.bb", ".bbb0."]  # a document's first token follows nothing
    assert rows.fingerprint != rows_of(path, rules=RowRules(seq_len=6)).fingerprint


def test_examples_kept_apart(tmp_path: Path) -> None:
    rows = rows_of(pairs(tmp_path / "a.jsonl", [(1, 1), (2, 1), (3, 3)]), rules=RowRules(seq_len=8, isolate=True))
    batch = rows.batch([0, 1])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 0]]
    assert labels(batch) == [".A0..B0.", "...CCC0."]
    # What fills a row up is a document of its own.
    pair = rows_of(pairs(tmp_path / "b.jsonl", [(1, 1), (2, 2)]), rules=RowRules(seq_len=5, isolate=True)).batch([0, 1])
    assert pair["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=40),
    seq_len=st.integers(13, 40),
)
def test_every_example_is_in_one_row_whole(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], seq_len: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    rows = rows_of(pairs(folder / "a.jsonl", lengths), rules=RowRules(seq_len=seq_len))
    packed = [row(rows, number) for number in range(rows.num_rows)]
    assert b"".join(packed).count(b"\0") == len(lengths)
    assert all(0 < len(content) <= seq_len and content.endswith(b"\0") for content in packed)
    examples = [len(prompt) + len(completion) + 1 for prompt, completion in ((b"x" * p, b"y" * c) for p, c in lengths)]
    firsts = np.cumsum([0, *examples]).tolist()
    assert [rows.span(number)[0] for number in range(rows.num_rows)] == sorted(
        {rows.span(number)[0] for number in range(rows.num_rows)} & set(firsts)
    )
    # A row ends only where the next example would not have fitted.
    for first, second in pairwise(packed):
        assert len(first) + second.index(b"\0") + 1 > seq_len


def test_rows_are_listed_once(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", [(1, 1)] * 9)
    first = rows_of(path, rules=RowRules(seq_len=8))
    files = sorted((tmp_path / "cache").iterdir())
    again = rows_of(path, rules=RowRules(seq_len=8))
    assert sorted((tmp_path / "cache").iterdir()) == files
    assert (again.num_rows, again.fingerprint) == (first.num_rows, first.fingerprint)
    (table,) = (tmp_path / "cache").glob("rows-*.npy")
    table.write_bytes(table.read_bytes()[:-8])
    assert row(rows_of(path, rules=RowRules(seq_len=8)), 4) == b"iI\0"
    wider = rows_of(path, rules=RowRules(seq_len=9))
    assert (first.num_rows, wider.num_rows) == (5, 3)


def test_labels_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_text('{"prompt": "ab", "completion": "cd"}\n')
    other.write_text('{"prompt": "abc", "completion": "d"}\n')
    first, second = (rows_of(path, rules=RowRules(seq_len=8)) for path in (one, other))
    assert row(first, 0) == row(second, 0)
    assert first.fingerprint != second.fingerprint


def test_what_has_no_documents_cannot_be_padded(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(64, dtype=np.uint8))
    for option, rules in (
        ("--no-pack", RowRules(seq_len=8, pack=False)), ("--isolate-documents", RowRules(seq_len=8, isolate=True))
    ):
        with pytest.raises(DataError, match=rf"t\.npy: token files do not tell documents apart, as {option} needs;"):
            rows_of(tmp_path / "t.npy", rules=rules)


def test_examples_and_text_are_not_trained_on_at_once(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(64, dtype=np.uint8))
    path = pairs(tmp_path / "a.jsonl", [(1, 1)])
    for paths in ((path, tmp_path / "t.npy"), (tmp_path / "t.npy", path)):
        with pytest.raises(DataError, match=r"--data \S*a\.jsonl: holds examples, and \S*t\.npy is text or token ids;"):
            rows_of(*paths, rules=RowRules(seq_len=8))
        assert not (tmp_path / "cache").exists()


def test_too_few_rows_are_told(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", [(3, 3)] * 3)
    with pytest.raises(DataError, match=r"has 3 rows to train on, one step needs 4 \(--micro-batch-size 2 x --mic"):
        prepare(
            [path], tokenizer=None, vocab_size=256, cache_directory=tmp_path / "cache", rules=RowRules(seq_len=8),
            micro_batch_size=2, num_micro_batches=2,
        )  # fmt: skip
    assert not (tmp_path / "cache").exists()


def test_folders_of_records_and_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    pairs(folder / "train.jsonl", [(1, 1)])
    (folder / "README.md").write_text("about it")
    (folder / "infos.json").write_text("[1]")
    rows = rows_of(folder, rules=RowRules(seq_len=3))
    assert (row(rows, 0), rows.source.notices) == (b"aA\0", ())
    (folder / "a.txt").write_text("text")
    rows = rows_of(folder, rules=RowRules(seq_len=3))
    assert row(rows, 0) == b"abo"
    (notice,) = rows.source.notices
    assert notice == f"--data {folder}: taken as text; its 1 files of records are left out, name them to train on them"
