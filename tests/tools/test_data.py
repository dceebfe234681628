"""Windows, steps and what is refused before the first of them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hoist.tools.data import DataPosition, Order, StepData, WindowSampler, prepare
from hoist.tools.errors import DataError
from hoist.tools.rows import RowRules, Rows
from hoist.tools.tokens import TokenSource, read_note, write_note


def source_of(
    paths: Sequence[Path], cache: Path, *, vocab_size: int = 512, step: tuple[int, int, int] = (4, 1, 1)
) -> TokenSource:
    """Prepared data with windows of step[0] tokens, B step[1], M step[2]."""
    return rows_of(paths, cache, vocab_size=vocab_size, step=step).source


def rows_of(
    paths: Sequence[Path], cache: Path, *, vocab_size: int = 512, step: tuple[int, int, int] = (4, 1, 1)
) -> Rows:
    """The same, as rows."""
    return prepare(
        paths,
        tokenizer=None,
        vocab_size=vocab_size,
        cache_directory=cache,
        rules=RowRules(seq_len=step[0]),
        micro_batch_size=step[1],
        num_micro_batches=step[2],
    )


def numbers(path: Path, count: int) -> Path:
    np.save(path, np.arange(count, dtype=np.int64) % 512)
    return path


EPOCH_3_OF_SEED_7 = [1, 8, 13, 12, 6, 2, 11, 5, 14, 3, 15, 4, 19, 9, 18, 16, 17, 0, 10, 7]
orders = st.sampled_from(("sequential", "shuffle"))


@given(num_windows=st.integers(1, 300), order=orders, seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**9))
def test_every_window_comes_once_an_epoch(num_windows: int, order: Order, seed: int, epoch: int) -> None:
    sampler = WindowSampler(num_windows, order=order, seed=seed)
    first = epoch * num_windows
    seen = [sampler.window(place) for place in range(first, first + num_windows)]
    assert sorted(seen) == list(range(num_windows))
    assert [sampler.epoch(place) for place in (first, first + num_windows - 1, first + num_windows)] == [
        epoch,
        epoch,
        epoch + 1,
    ]


@given(num_windows=st.integers(1, 2**50), order=orders, seed=st.integers(0, 10), place=st.integers(0, 2**60))
def test_any_place_is_found_without_the_ones_before(num_windows: int, order: Order, seed: int, place: int) -> None:
    sampler = WindowSampler(num_windows, order=order, seed=seed)
    sampler.window(place // 2)  # whatever was asked for before changes nothing
    window = sampler.window(place)
    assert 0 <= window < num_windows
    assert window == WindowSampler(num_windows, order=order, seed=seed).window(place)


def test_sequential_is_modulo_the_data() -> None:
    sampler = WindowSampler(5, order="sequential", seed=0)
    assert [sampler.window(place) for place in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_shuffles_differ_by_epoch_and_seed_and_stay_as_they_are() -> None:
    def epoch_of(seed: int, epoch: int) -> list[int]:
        sampler = WindowSampler(20, order="shuffle", seed=seed)
        return [sampler.window(20 * epoch + place) for place in range(20)]

    assert len({tuple(epoch_of(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25
    # Stored runs rely on this order: changing it needs a new version of the commit record.
    assert epoch_of(7, 3) == EPOCH_3_OF_SEED_7


def test_shuffle_favours_no_place() -> None:
    """Of 2000 permutations of 4 windows each of the 24 is expected 83 times; 40 and 140 are 5 standard deviations
    off."""
    counts: dict[tuple[int, ...], int] = {}
    sampler = WindowSampler(4, order="shuffle", seed=1)
    for epoch in range(2000):
        order = tuple(sampler.window(4 * epoch + place) for place in range(4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert min(counts.values()) > 40
    assert max(counts.values()) < 140


def test_unknown_order_is_refused() -> None:
    with pytest.raises(DataError, match=r"--order: 'random' is not allowed; choose one of sequential, shuffle"):
        WindowSampler(5, order="random", seed=0)  # type: ignore[arg-type]


def test_rows_follow_the_published_formula(tmp_path: Path) -> None:
    """Row r of micro-batch m of step s is window (s*M + m)*B + r, and labels are the inputs."""
    tokens = numbers(tmp_path / "t.npy", 400)
    length, rows, batches = 5, 2, 3
    data = StepData(
        rows_of([tokens], tmp_path, step=(length, rows, batches)),
        order="sequential",
        seed=0,
        micro_batch_size=rows,
        num_micro_batches=batches,
    )
    ids = torch.arange(400)
    for s in range(20):  # past the end: 80 windows are 13 steps and a third
        step = data.step(s + 1)
        assert len(step) == batches
        for m, batch in enumerate(step):
            assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
            assert torch.equal(batch["input_ids"], batch["labels"])
            assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
            for r in range(rows):
                window = ((s * batches + m) * rows + r) % 80
                assert torch.equal(batch["input_ids"][r], ids[window * length : (window + 1) * length])


@pytest.mark.parametrize("order", ["sequential", "shuffle"])
def test_a_resumed_run_takes_the_same_windows(tmp_path: Path, order: Order) -> None:
    prepared = rows_of([numbers(tmp_path / "t.npy", 103)], tmp_path, step=(3, 2, 2))

    def data(rows: int = 2, batches: int = 2, after: DataPosition | None = None) -> StepData:
        return StepData(
            prepared, order=order, seed=9, micro_batch_size=rows, num_micro_batches=batches, after=after
        )

    whole = data()
    position = DataPosition.from_json(json.loads(json.dumps(whole.position(11))))
    assert (position.step, position.place, position.epoch, position.window) == (11, 44, 1, 10)
    resumed = data(after=position)
    assert resumed.differences(position) == ()
    for step in range(12, 20):
        for mine, theirs in zip(resumed.step(step), whole.step(step), strict=True):
            assert torch.equal(mine["input_ids"], theirs["input_ids"])
    with pytest.raises(ValueError, match="step 10: data begins after step 11"):
        resumed.step(11)
    # One micro-batch of four rows: the same windows in the same order, though the formula alone would jump.
    wide = data(rows=4, batches=1, after=position)
    assert torch.equal(wide.step(12)[0]["input_ids"], torch.cat([batch["input_ids"] for batch in whole.step(12)]))
    narrow = data(rows=1, batches=1, after=position)
    assert torch.equal(narrow.step(13)[0]["input_ids"][0], whole.step(12)[0]["input_ids"][1])


def test_other_data_on_resume_is_told(tmp_path: Path) -> None:
    one = numbers(tmp_path / "a.npy", 100)
    other = tmp_path / "b.npy"
    np.save(other, np.zeros(100, dtype=np.int64))

    def data(path: Path, seq_len: int = 4, order: Order = "shuffle", seed: int = 0) -> StepData:
        rows = rows_of([path], tmp_path, step=(seq_len, 1, 1))
        return StepData(rows, order=order, seed=seed, micro_batch_size=1, num_micro_batches=1)

    position = DataPosition.from_json(data(one).position(3))
    (message,) = data(other).differences(position)
    assert message.startswith("--data: not the data of the stored run (fingerprint ")
    assert [text.split(":")[0] for text in data(one, 5, "sequential", 1).differences(position)] == [
        "--seq-len",
        "--order",
        "--seed (of the shuffle)",
    ]
    assert (
        data(one, order="sequential", seed=5).differences(
            DataPosition.from_json(data(one, order="sequential").position(3))
        )
        == ()
    )


def test_moved_or_touched_data_is_the_same_data(tmp_path: Path) -> None:
    first = source_of([numbers(tmp_path / "a.npy", 100)], tmp_path / "c")
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    assert source_of([tmp_path / "b.npy"], tmp_path / "c").fingerprint == first.fingerprint


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", ">i8", "|u1", "<u8"])
def test_npy_of_any_integer_type(tmp_path: Path, dtype: str) -> None:
    ids = np.arange(250, dtype=dtype)
    np.save(tmp_path / "t.npy", ids)
    source = source_of([tmp_path / "t.npy"], tmp_path)
    read = np.empty(93, dtype=np.int64)
    source.read(77, read)
    assert read.tolist() == list(range(77, 170))


@pytest.mark.parametrize(("name", "dtype", "token_bytes"), [
    ("t.bin", "<u2", 2), ("t.bin", "<u4", 4), ("t.u32.bin", "<u4", 2), ("t.u16.bin", "<u2", 4),
])  # fmt: skip
def test_bin_of_two_or_four_bytes(tmp_path: Path, name: str, dtype: str, token_bytes: int) -> None:
    np.arange(100, dtype=dtype).tofile(tmp_path / name)
    source = prepare(
        [tmp_path / name], tokenizer=None, vocab_size=100, cache_directory=tmp_path / "c", token_bytes=token_bytes,
        rules=RowRules(seq_len=4),
    ).source  # fmt: skip
    read = np.empty(100, dtype=np.int64)
    source.read(0, read)
    assert read.tolist() == list(range(100))


def test_windows_run_on_from_file_to_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(0, 10, dtype=np.uint16))
    np.arange(10, 13, dtype="<u2").tofile(tmp_path / "b.bin")
    np.save(tmp_path / "c.npy", np.arange(13, 30, dtype=np.int64))
    source = source_of([tmp_path / "a.npy", tmp_path / "b.bin", tmp_path / "c.npy"], tmp_path / "cache")
    read = np.empty(30, dtype=np.int64)
    source.read(0, read)
    assert read.tolist() == list(range(30))
    with pytest.raises(IndexError, match="tokens 29 to 31 of 30"):
        source.read(29, np.empty(2, dtype=np.int64))


def test_refusals_name_the_file_and_leave_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "float.npy", np.zeros(100))
    np.save(data / "matrix.npy", np.zeros((10, 10), dtype=np.int32))
    np.save(data / "none.npy", np.zeros(0, dtype=np.int32))
    np.save(data / "bool.npy", np.zeros(100, dtype=bool))
    (data / "text.npy").write_text("hello, this is no array")
    (data / "empty.npy").touch()
    (data / "empty.bin").touch()
    (data / "empty.txt").touch()
    (data / "odd.bin").write_bytes(bytes(7))
    (data / "image.png").write_bytes(b"\x89PNG\0\0\0")
    np.save(data / "cut.npy", np.zeros(100, dtype=np.int64))
    (data / "cut.npy").write_bytes((data / "cut.npy").read_bytes()[:-1])
    np.save(data / "short.npy", np.zeros(7, dtype=np.int64))
    big = np.zeros(2_000_000, dtype=np.uint16)
    big[1_500_000] = 512
    np.save(data / "big.npy", big)
    np.save(data / "minus.npy", np.asarray([1, 2, -100, 600]))
    (data / "folder").mkdir()
    (data / "folder" / "picture.jpg").write_bytes(b"jpg")
    (data / "blank").mkdir()
    (data / "blank" / "a.py").touch()
    (data / "blank" / "b.py").touch()
    before = sorted(tmp_path.rglob("*"))
    for name, message in {
        "absent.npy": "there is no such file or folder; look at its name",
        "float.npy": "holds float64, token ids must be integers; save the ids as uint16 or uint32",
        "bool.npy": "holds bool, token ids must be integers",
        "matrix.npy": r"has shape \(10, 10\), must have one dimension; save array.reshape\(-1\)",
        "none.npy": "the array is empty",
        "text.npy": r"not a numpy array file \(.*\); write it with numpy.save",
        "empty.npy": "the file is empty",
        "empty.bin": "the file is empty",
        "empty.txt": "the file is empty; give some text",
        "odd.bin": r"7 bytes are not a whole number of 2-byte ids; copy it again, or name it \*.u32.bin if",
        "image.png": r"is not text in UTF-8 \(it has zero bytes\)",
        "cut.npy": "truncated, its header promises 928 bytes but the file has 927; copy it again",
        "short.npy": r"has 7 tokens, one step needs 8 \(--seq-len 4 x --micro-batch-size 1 x --micro-batches 2\);",
        "big.npy": r"token 1500000 is 512, allowed are 0 to 511 \(the model's vocab_size is 512\); tokenize with",
        "minus.npy": "token 2 is -100, allowed are 0 to 511",
        "folder": r"no text file in this folder, it needs one ending in \.c, .*; name a file to take it",
        "blank": "all 2 text files are empty; give some text",
    }.items():
        with pytest.raises(DataError, match=message) as caught:
            source_of([data / name], tmp_path / "cache", step=(4, 1, 2))
        assert str(caught.value).startswith(f"--data {data / name}: ")
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2
        assert sorted(tmp_path.rglob("*")) == before, name
    with pytest.raises(DataError, match="--data: nothing given"):
        source_of([], tmp_path / "cache")


def test_text_that_is_too_short_leaves_no_cache(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"a\.txt: has 6 tokens, one step needs 8"):
        source_of([tmp_path / "a.txt"], tmp_path / "cache", step=(8, 1, 1))
    assert list(tmp_path.rglob("*.npy")) == list(tmp_path.rglob("*.json")) == []


def test_text_needs_a_tokenizer_or_256_ids(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(
        DataError, match="no tokenizer and a vocabulary of 255; text as bytes needs 256: give token ids"
    ):
        source_of([tmp_path / "a.txt"], tmp_path / "cache", vocab_size=255)
    assert not (tmp_path / "cache").exists()


def test_the_check_of_the_ids_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    tokens = numbers(tmp_path / "t.npy", 100)
    passes: list[int] = []

    def check(vocab_size: int) -> TokenSource:
        return prepare(
            [tokens], tokenizer=None, vocab_size=vocab_size, cache_directory=tmp_path / "cache",
            rules=RowRules(seq_len=4), progress=lambda done, total: passes.append(total),
        ).source  # fmt: skip

    first = check(512)
    assert passes == [800]
    assert check(100).fingerprint == first.fingerprint
    assert passes == [800]
    with pytest.raises(DataError, match="token 99 is 99"):
        check(99)
    np.save(tokens, np.full(100, 7, dtype=np.int64))
    passes.clear()
    assert check(99).fingerprint != first.fingerprint
    assert passes == [800]
    (note, other) = sorted((tmp_path / "cache").glob("scan-*.json"))
    note.write_text("{")
    other.write_text("[]")
    assert check(99).num_tokens == 100


def test_a_damaged_note_says_nothing(tmp_path: Path) -> None:
    """Whichever byte is another: it is either no note any more, or it still says what was written."""
    note, key, value = tmp_path / "a.json", ["a", 1], {"facts": {"lowest": 3, "highest": 212}, "num_tokens": 100}
    write_note(note, key, value)
    written = note.read_bytes()
    assert read_note(note, key) == value
    assert read_note(note, ["a", 2]) is None
    found = []
    for position in range(len(written)):
        for bit in (1, 0x10):
            damaged = bytearray(written)
            damaged[position] ^= bit
            note.write_bytes(damaged)
            found.append(read_note(note, key))
    assert all(each in (None, value) for each in found)
    assert found.count(None) > 0.8 * len(found)


def test_a_file_cut_during_the_run_is_told(tmp_path: Path) -> None:
    tokens = numbers(tmp_path / "t.npy", 100)
    source = source_of([tokens], tmp_path / "c")
    tokens.write_bytes(tokens.read_bytes()[:500])
    with pytest.raises(OSError, match=r"t\.npy: it ended at byte 500, 428 bytes before the window does") as caught:
        source.read(0, np.empty(100, dtype=np.int64))
    assert not isinstance(caught.value, DataError)
    tokens.unlink()
    with pytest.raises(OSError, match="No such file or directory at byte 128, 800 bytes"):
        source.read(0, np.empty(100, dtype=np.int64))


def test_what_text_was_read_as_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("named, so it is text\n")
    np.save(tmp_path / "b.npy", np.arange(64, dtype=np.uint16))

    def tokenizer(*names: str) -> str | None:
        return prepare(
            [tmp_path / name for name in names], tokenizer=None, vocab_size=256, cache_directory=tmp_path / "cache",
            rules=RowRules(seq_len=4),
        ).source.tokenizer  # fmt: skip

    assert tokenizer("b.npy") is None
    assert tokenizer("b.npy", "a.csv") == "UTF-8 bytes, byte 0 after each document"
