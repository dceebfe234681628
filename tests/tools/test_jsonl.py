"""Records are read one by one, with the number of their line, however long the file is; what is no JSON is told."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.tools import jsonl
from hoist.tools.errors import DataError
from hoist.tools.jsonl import read_json


def records(path: Path, content: str | bytes) -> list[tuple[int, object]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(record.line, record.fields) for record in read_json(path)]


def test_lines_and_their_numbers(tmp_path: Path) -> None:
    content = '{"a": 1}\n\n  {"a": "\u00e9\\n"}\r\n\ufeff'.removesuffix("\ufeff") + '{"b": []}'
    expected = [(1, {"a": 1}), (3, {"a": "\u00e9\n"}), (4, {"b": []})]
    assert records(tmp_path / "a.jsonl", content) == expected
    assert records(tmp_path / "b.json", "\ufeff" + content) == expected


def test_arrays_and_the_lines_that_their_records_begin_in(tmp_path: Path) -> None:
    content = '\ufeff \n[\n {"a": 1,\n  "b": [{}]},\n\n {"a": "x\\ny"}\n, {}]\n \n'
    assert records(tmp_path / "a.json", content) == [(3, {"a": 1, "b": [{}]}), (6, {"a": "x\ny"}), (7, {})]
    assert records(tmp_path / "a.json", " [ ] ") == []


documents = st.lists(
    st.dictionaries(st.text(max_size=3), st.text(max_size=30) | st.integers() | st.lists(st.floats(0, 1)), max_size=3),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(values=documents, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans(), block=st.integers(1, 40))
def test_arrays_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, values: list[object], indent: int | None, ascii_only: bool, block: int
) -> None:
    """Whatever the reads are cut into, characters and values come out whole."""
    path = tmp_path_factory.mktemp("json") / "a.json"
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_READ_BYTES", block)
        found = records(path, text)
        assert [fields for _, fields in found] == values
        lines = "".join(json.dumps(value, ensure_ascii=ascii_only) + "\n" for value in values)
        assert records(path.with_suffix(".jsonl"), lines) == [(n, value) for n, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": }\n', r"line 2: no JSON at column 7 \(Expecting value\); correct the line"),
        ('{"a": 1}\n{"a": 1', r"line 2: no JSON at column 8 "),
        ('{"a": 1} {"a": 2}\n', r"line 1: no JSON at column 10 \(Extra data\)"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"line 2: no UTF-8 at byte 8 \(0xff\); convert the file"),
        (b'{"a": 1}\n{"a": "\xc3', r"line 2: no UTF-8 at byte 8 \(0xc3\)"),
        ('{"a": 1}\n\n7\n', r"line 3: is a number, not a JSON object; write records like \{\"text\": \"\.\.\.\"\}"),
        ('{"a": ' + "[" * 100_000, r"line 1: no JSON at column 1 \(nested too deeply\)"),
        ('{"a": 1}\n{"a": ' + "9" * 5000 + "}", r"line 2: no JSON at column 1 \(a whole number of too many digits\)"),
        ('[{"a": 1},\n{"a": ' + "9" * 5000 + "}]", r"line 2: no JSON at column 1 \(a whole number of too many"),
        ('[\n{"a": 1},\n{"a": ]}\n]', r"line 3: no JSON at column 7 \(Expecting value\)"),
        ('[\n{"a": 1}\n{"a": 2}]', r"line 3: no JSON at column 1 \(expecting ',' or '\]' after a record\)"),
        ('[{"a": 1},\n{"a": "b', r"line 2: no JSON at column 7 \(Unterminated string"),
        ('[{"a": 1}', r"line 1: no JSON at column 10 \(expecting ','"),
        ('[{"a": 1}]\n{}', r"line 2: no JSON at column 1 \(more after the array's end\)"),
        (b'[{"a": 1},\n{"a": "\xff"}]', r"line 2: no UTF-8 at byte 8 \(0xff\)"),
        ('[\n"a"]', r"line 2: is a string, not a JSON object"),
        ("[[" * 100_000, r"line 1: no JSON at column 2 \(nested too deeply\)"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_told_by_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"^--data \S*a\.json: {message}") as caught:
        records(tmp_path / "a.json", content)
    assert "\n" not in str(caught.value)


def test_records_are_not_collected(tmp_path: Path) -> None:
    """8 MB either way; what is held at once are two blocks, and the longest record."""
    line = json.dumps({"text": "x" * 2000}) + ",\n"
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text(line.replace(",\n", "\n") * 4000)
    array.write_text("[" + (line * 4000).removesuffix(",\n") + "]")
    for path in (lines, array):
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_json(path)) == 4000
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 3 * 2**20, path


def test_a_file_without_lines_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_RECORD_BYTES", 2**20)
    for content in ('{"a": "', '[{"a": "'):
        with pytest.raises(DataError, match=r"line 1: a record of more than 1 MiB; cut it"):
            records(tmp_path / "a.json", content + "x" * 3 * 2**20)
