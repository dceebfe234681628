"""Byte sizes are read exactly and shown so that they can be read again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoist.tools.sizes import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0), ("65536", 65536), ("7b", 7), ("4GiB", 4 * 2**30), ("4G", 4 * 2**30), ("4gb", 4 * 10**9),
        (" 512 MiB ", 512 * 2**20), ("1.5GB", 1_500_000_000), ("0.1kB", 100), ("0.7kb", 700), (".5KiB", 512),
        ("2.T", 2 * 2**40), ("1.0000001GB", 1_000_000_100), ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_parsed(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 gigs", "-1", "1e9", "1,5GB", "1.5.2GB", "4GiB2", "٣GiB", ".", "inf"])
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write for instance 4GiB, 512MiB or 1.5GB"):
        parse_bytes(text)


def test_minimum() -> None:
    assert parse_bytes("1KiB", minimum=1024) == 1024
    with pytest.raises(ValueError, match=r"'1KiB' is too small; give at least 1025 bytes"):
        parse_bytes("1KiB", minimum=1025)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 - 1, "1.0 MiB"), (163_800_000, "156.2 MiB"),
        (2**30, "1.0 GiB"), (3 * 2**40, "3.00 TiB"), (-2048, "-2.0 KiB"),
    ],
)  # fmt: skip
def test_shown(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text


@given(st.integers(0, 2**49))
def test_what_is_shown_can_be_read(num_bytes: int) -> None:
    again = parse_bytes(show_bytes(num_bytes))
    assert abs(again - num_bytes) <= max(1, num_bytes) * 0.06
    assert len(show_bytes(num_bytes)) <= 10
