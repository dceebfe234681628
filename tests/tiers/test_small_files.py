"""What runs leave for others is read without trusting it: no pipe holds a reader up, no file fills its memory."""

from __future__ import annotations

import os
from pathlib import Path

from hoist.tiers import small_files
from hoist.tiers.small_files import Unusable, Why, decode_json, read_object


def test_numbers_that_are_none_or_too_large_read_as_null() -> None:
    text = b'{"a": [NaN, Infinity, -Infinity, 1e999, -1e999, 9223372036854775808, -1%s], "b": [1e308, -7, 0.5]}'
    assert decode_json(text % (b"0" * 5000)) == {"a": [None] * 7, "b": [1e308, -7, 0.5]}


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    os.mkfifo(path)
    assert read_object(path) == Unusable(why=Why.MISSING, detail=f"{path}: is no regular file")
    path.unlink()
    with path.open("wb") as file:
        file.truncate(small_files.MAX_BYTES + 1)
    found = read_object(path)
    assert isinstance(found, Unusable) and "is larger than 64 MiB" in found.detail
    path.unlink()
    path.mkdir()
    assert isinstance(read_object(path), Unusable)
