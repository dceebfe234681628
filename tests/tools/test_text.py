"""Text files become cached ids: which files, which blocks, which ids, and when again."""

import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoist.tools import text as text_module
from hoist.tools.errors import DataError, ModelSourceError
from hoist.tools.text import (
    BLOCK_CHARACTERS,
    ByteTokenizer,
    ModelTokenizer,
    TextTokenizer,
    TokenizedText,
    find_text_files,
    stdlib_sources,
    text_blocks,
    tokenize,
)
from tests.support.tokenizers import save_tokenizer


def ids_of(found: TokenizedText) -> list[int]:
    part = found.part
    ids: list[int] = np.load(part.ids.path).tolist()
    assert len(ids) == part.ids.num_tokens
    assert (min(ids), max(ids)) == (part.facts.lowest, part.facts.highest)
    return ids


def as_bytes(*files: Path, cache: Path) -> TokenizedText:
    return tokenize(files, tokenizer=ByteTokenizer(), vocab_size=300, cache_directory=cache)


def test_folders_give_text_files_by_relative_path(tmp_path: Path) -> None:
    for name in (
        "b.py", "a/z.txt", "a.md", "a-b/q.rst", "a/image.png", "t.json", "w.html", "Z.TXT", "site-packages/x.py",
        "t.csv", "a/\udcff.txt",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name if "\udcff" not in name else "x")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "b.py")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.txt")
    found = find_text_files(tmp_path, without=frozenset({"site-packages"}))
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        "Z.TXT", "a-b/q.rst", "a.md", "a/z.txt", "a/\udcff.txt", "b.py", "linked.txt",
    ]  # fmt: skip
    assert as_bytes(*found, cache=tmp_path / "cache").num_files == 7


def test_standard_library_is_text_that_every_machine_has() -> None:
    found = stdlib_sources()
    assert len(found) > 100
    assert {path.suffix for path in found} == {".py"}
    assert not any({"site-packages", "dist-packages"} & set(path.parts) for path in found)
    assert "argparse.py" in {path.name for path in found}


def test_bytes_are_separated_by_zero_and_kept_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("h\u00e9\r\n".encode())
    (tmp_path / "b.txt").touch()
    (tmp_path / "c.txt").write_bytes(b"ok")
    found = as_bytes(*(tmp_path / name for name in ("a.txt", "b.txt", "c.txt")), cache=tmp_path / "cache")
    assert bytes(ids_of(found)) == b"h\xc3\xa9\r\n\0ok\0"
    assert (found.part.ids.dtype, found.num_files, found.num_repaired) == ("|u1", 2, 0)


@given(data=st.binary(max_size=60))
def test_bytes_that_are_no_utf8_are_replaced_and_counted(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_bytes(data + b".")
    found = as_bytes(folder / "a.txt", cache=folder / "cache")
    expected = (data + b".").decode("utf-8", errors="replace").encode()
    assert bytes(ids_of(found)) == expected + b"\0"
    assert found.num_repaired == (expected != data + b".")


def test_a_character_across_two_reads_is_whole(tmp_path: Path) -> None:
    content = "a" * (text_module._READ_BYTES - 1) + "\u20ac" * 50_000
    (tmp_path / "a.txt").write_text(content)
    found = as_bytes(tmp_path / "a.txt", cache=tmp_path / "cache")
    assert bytes(ids_of(found)[:-1]).decode() == content
    assert found.num_repaired == 0


@pytest.mark.parametrize("eos", [True, False])
def test_ids_are_the_model_tokenizers(tmp_path: Path, eos: bool) -> None:
    tokenizer = ModelTokenizer.find(save_tokenizer(tmp_path / "model", eos=eos))
    assert tokenizer is not None
    documents = ["the quick brown fox", "self.value \u00e9\u4e2d\n\n    return"]
    paths = [tmp_path / f"{index}.txt" for index in range(2)]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(document)
    found = tokenize(paths, tokenizer=tokenizer, vocab_size=400, cache_directory=tmp_path / "cache")
    reference = tokenizer.load()
    end = [reference.eos_token_id] if eos else []
    assert ids_of(found) == [
        identifier
        for document in documents
        for identifier in [*reference.encode(document, add_special_tokens=False), *end]
    ]
    assert found.part.ids.dtype == "<u2"


def test_large_files_give_the_ids_of_the_whole_text(tmp_path: Path) -> None:
    """Blocks are cut where the pre-tokenizer cuts anyway, so no id differs from tokenizing everything at once."""
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path / "model"))
    words = random.Random(1)
    lines = (" " * words.randrange(9) + "the quick self.value " * words.randrange(5) for _ in range(12_000))
    document = "\n".join(lines)
    assert len(document) > 3 * BLOCK_CHARACTERS
    (tmp_path / "a.py").write_text(document)
    blocks = list(text_blocks(tmp_path / "a.py", text_module._TextFacts()))
    assert "".join(blocks) == document
    assert max(map(len, blocks)) <= BLOCK_CHARACTERS
    found = tokenize([tmp_path / "a.py"], tokenizer=tokenizer, vocab_size=400, cache_directory=tmp_path / "cache")
    whole = tokenizer.load().encode(document, add_special_tokens=False, verbose=False)
    assert ids_of(found) == [*whole, tokenizer.separator()]


@given(
    parts=st.lists(st.sampled_from(["\n", " ", "\n\n  ", "x" * 1000, "yy\n", "\n" * 999]), min_size=1, max_size=400),
    repeats=st.integers(1, 3),
)
def test_blocks_lose_nothing_whatever_the_lines(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], repeats: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    document = "".join(parts) * repeats
    path.write_text(document, newline="")
    blocks = list(text_blocks(path, text_module._TextFacts()))
    assert "".join(blocks) == document
    assert all(0 < len(block) <= BLOCK_CHARACTERS for block in blocks)


class CountingTokenizer(ByteTokenizer):
    """Bytes; counts the blocks it was given."""

    blocks = 0

    def encode(self, text: str) -> "np.typing.NDArray[np.int64]":
        self.blocks += 1
        return super().encode(text)


def test_cache_is_taken_until_something_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    tokenizer = CountingTokenizer()

    def run() -> TokenizedText:
        return tokenize([path], tokenizer=tokenizer, vocab_size=300, cache_directory=tmp_path / "cache")

    first = run()
    assert len(first.created) == 3
    again = run()
    assert (tokenizer.blocks, again.created, again.part) == (1, (), first.part)
    path.write_text("hallo")
    os.utime(path, ns=(1, 1))
    assert bytes(ids_of(run())) == b"hallo\0"
    assert tokenizer.blocks == 2
    tokenizer.fingerprint = "another"
    run()
    assert tokenizer.blocks == 3
    for damage in (lambda cached: cached.write_bytes(cached.read_bytes()[:-1]), Path.unlink):
        damage(run().part.ids.path)
        blocks = tokenizer.blocks
        assert bytes(ids_of(run())) == b"hallo\0"
        assert tokenizer.blocks == blocks + 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_cached_run_loads_no_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the quick")
    for loaded in (True, False):
        tokenizer = ModelTokenizer(tmp_path / "model")
        tokenize([tmp_path / "a.txt"], tokenizer=tokenizer, vocab_size=400, cache_directory=tmp_path / "cache")
        assert (tokenizer._loaded is not None) is loaded


def test_ids_outside_the_vocabulary_are_refused_by_place(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path / "model", eos=False))
    (tmp_path / "a.txt").write_text("zzz")
    identifier = tokenizer.load().encode("z")[0]
    with pytest.raises(DataError, match=rf"a\.txt: token 0 is {identifier}, allowed are 0 to 9 .*vocab_size is 10"):
        tokenize([tmp_path / "a.txt"], tokenizer=tokenizer, vocab_size=10, cache_directory=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    assert ModelTokenizer.find(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert ModelTokenizer.find(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    found = ModelTokenizer.find(tmp_path)
    assert found is not None
    with pytest.raises(
        ModelSourceError, match=r"its tokenizer cannot be loaded \(.*\); repair the tokenizer files"
    ) as caught:
        found.load()
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"token cache .*/cache: .*; make room in it or choose another directory"):
        as_bytes(tmp_path / "a.txt", cache=tmp_path / "cache")


class SlowlyGrowing(TextTokenizer):
    """Bytes of a text, as a tokenizer of ours would give them; keeps nothing."""

    fingerprint = "test"
    description = "test"

    def encode(self, text: str) -> "np.typing.NDArray[np.int64]":
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def separator(self) -> int | None:
        return None


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """32 MB of text; a block of 128 Ki characters, its pieces and its ids (8 bytes each, 3 times) are some 4 MiB."""
    with (tmp_path / "a.txt").open("w") as file:
        for _ in range(500):
            file.write("line of text\n" * 5000)
    tracemalloc.start()
    try:
        found = tokenize(
            [tmp_path / "a.txt"], tokenizer=SlowlyGrowing(), vocab_size=300, cache_directory=tmp_path / "cache"
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.part.ids.num_tokens == 32_500_000
    assert peak < 6 * 2**20
