"""What a run trains on: `--data` paths become rows of ids and labels, dealt out to steps and micro-batches.

Token files are in `tokens.py`, text in `text.py`, records in `examples.py`, rows in `rows.py`. Rows are numbered on
endlessly, so any step of any epoch is a pure function of its number: a resumed run takes exactly the rows that an
uninterrupted one would have taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hoist.tools.errors import DataError
from hoist.tools.examples import RECORD_SUFFIXES, count_notices, encode_files
from hoist.tools.folders import find_data_files
from hoist.tools.rows import RowRules, Rows, make_rows
from hoist.tools.split import HeldOut
from hoist.tools.text import ByteTokenizer, TextTokenizer, TokenizedText, tokenize
from hoist.tools.tokens import (
    CacheEntries,
    Part,
    Progress,
    TokenFile,
    TokenSource,
    check_tokens,
    open_bin,
    open_npy,
    refuse_os_errors,
)

#: How rows follow one another.
Order = Literal["sequential", "shuffle"]


def prepare(
    paths: Sequence[Path],
    *,
    tokenizer: TextTokenizer | None,
    vocab_size: int,
    cache_directory: Path,
    rules: RowRules,
    micro_batch_size: int = 1,
    num_micro_batches: int = 1,
    truncate: bool = False,
    token_bytes: int = 2,
    validation_share: float = 0.0,
    seed: int = 0,
    option: str = "--data",
    progress: Progress | None = None,
) -> Rows:
    """Make ``--data`` ready: token files are checked, text and records tokenized, all laid end to end, cut into rows.

    ``tokenizer`` None means UTF-8 bytes, for which the vocabulary must have at least 256 ids. ``truncate`` cuts
    examples that are longer than a row. ``token_bytes`` (2 or 4) is the width of the ids in `.bin` files. What one pass
    over the data finds is kept in ``cache_directory``. ``option`` is what refusals call the paths.

    Raises :class:`DataError` for a path that is missing, unreadable, empty or of the wrong kind, for a wrong record,
    for an id outside the vocabulary, and for data of fewer rows than a step has (``micro_batch_size`` x
    ``num_micro_batches``) besides those held out; what this call put into the cache is then removed.
    """
    if not paths:
        raise DataError(
            f"{option}: nothing given; name text files, folders, records (.jsonl, .json) or token files (.npy, .bin)"
        )
    made = CacheEntries(cache_directory)
    with _called(option), _undone(made):
        preparation = _Preparation(
            tokenizer=tokenizer, vocab_size=vocab_size, cache_directory=cache_directory, rules=rules, made=made,
            truncate=truncate, token_bytes=token_bytes, progress=progress,
        )  # fmt: skip
        rows = make_rows(preparation.source(paths), rules, cache_directory)
        _require_one_step(
            rows, paths, HeldOut(rows.num_rows, share=validation_share, seed=seed).num_training,
            rows_needed=micro_batch_size * num_micro_batches, num_micro_batches=num_micro_batches,
            step="one step" if option == "--data" else "an evaluation",
        )  # fmt: skip
    return rows


@contextmanager
def _called(option: str) -> Iterator[None]:
    """Have refusals name the option that the paths were given with."""
    try:
        yield
    except DataError as error:
        if option == "--data" or not str(error).startswith("--data"):
            raise
        raise DataError(option + str(error).removeprefix("--data")) from error


@contextmanager
def _undone(made: CacheEntries) -> Iterator[None]:
    """Where preparation fails, take back what it has put into the cache."""
    try:
        yield
    except BaseException:
        made.remove()
        raise


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of text, or of records, that are tokenized in one go."""

    paths: tuple[Path, ...]
    are_records: bool


class _Preparation:
    """One call of :func:`prepare`."""

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer | None,
        vocab_size: int,
        cache_directory: Path,
        rules: RowRules,
        made: CacheEntries,
        truncate: bool,
        token_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._cache_directory = cache_directory
        self._rules = rules
        self._made = made
        self._truncate = truncate
        self._token_bytes = token_bytes
        self._progress = progress
        self._notices: list[str] = []
        self._text_as: str | None = None

    def source(self, paths: Sequence[Path]) -> TokenSource:
        """The ids of all paths, in order."""
        parts: list[Part] = []
        first: dict[bool, Path] = {}
        for entry in _merge([found for path in paths for found in self._look(path)]):
            parts.append(self._part(entry))
            first.setdefault(parts[-1].whole, entry.path if isinstance(entry, TokenFile) else entry.paths[0])
            if len(first) > 1:
                raise DataError(
                    f"--data {first[True]}: holds examples, and {first[False]} is text or token ids; train on one or "
                    "the other"
                )
        return TokenSource(parts, notices=self._notices, made=self._made, tokenizer=self._text_as)

    def _look(self, path: Path) -> list[TokenFile | _Files]:
        """What one ``--data`` path is: a token file, text or records; a folder may hold several."""
        with refuse_os_errors(path):
            stat = path.stat()
        if path.is_dir():
            texts, records, notice = find_data_files(path)
            self._notices += [] if notice is None else [notice]
            return [_Files(found, kind) for found, kind in ((texts, False), (records, True)) if found]
        if not path.is_file():
            raise DataError(
                f"--data {path}: neither a file nor a folder; give .npy or .bin token files, text files or folders"
            )
        if path.suffix == ".npy":
            return [open_npy(path)]
        if path.suffix == ".bin":
            return [open_bin(path, token_bytes=self._token_bytes)]
        if stat.st_size == 0:
            what = "it needs at least one record" if path.suffix.lower() in RECORD_SUFFIXES else "give some text"
            raise DataError(f"--data {path}: the file is empty; {what}")
        if path.suffix.lower() in RECORD_SUFFIXES:
            return [_Files((path,), True)]
        with refuse_os_errors(path), path.open("rb") as file:
            if b"\0" in file.read(4096):
                raise DataError(
                    f"--data {path}: is not text in UTF-8 (it has zero bytes); convert it, or name token files *.npy "
                    "or *.bin"
                )
        return [_Files((path,), False)]

    def _part(self, entry: TokenFile | _Files) -> Part:
        if isinstance(entry, TokenFile):
            facts, notes = check_tokens(
                entry, vocab_size=self._vocab_size, cache_directory=self._cache_directory, progress=self._progress
            )
            self._made.files.extend(notes)
            return Part(ids=entry, facts=facts)
        if self._tokenizer is None and self._vocab_size < ByteTokenizer.VOCABULARY:
            raise DataError(
                f"--data {entry.paths[0]}: the model has no tokenizer and a vocabulary of {self._vocab_size}; text as "
                f"bytes needs {ByteTokenizer.VOCABULARY}: give token ids (.npy) or a model with a tokenizer"
            )
        tokenizer = self._tokenizer or ByteTokenizer()
        self._text_as = tokenizer.description
        if not entry.are_records:
            text = tokenize(
                entry.paths,
                tokenizer=tokenizer,
                vocab_size=self._vocab_size,
                cache_directory=self._cache_directory,
                progress=self._progress,
            )
            self._made.files.extend(text.created)
            self._notices.extend(_text_notices(text))
            return text.part
        records = encode_files(
            entry.paths,
            tokenizer=tokenizer,
            vocab_size=self._vocab_size,
            cache_directory=self._cache_directory,
            longest=self._rules.seq_len,
            truncate=self._truncate,
            progress=self._progress,
        )
        self._made.files.extend(records.created)
        self._notices.extend(count_notices(records))
        return records.part


def _merge(entries: Sequence[TokenFile | _Files]) -> list[TokenFile | _Files]:
    """The same, with text that follows text, and records that follow records, as one run, so that it has one cache."""
    merged: list[TokenFile | _Files] = []
    for entry in entries:
        last = merged[-1] if merged else None
        if isinstance(entry, _Files) and isinstance(last, _Files) and last.are_records is entry.are_records:
            merged[-1] = _Files((*last.paths, *entry.paths), entry.are_records)
        else:
            merged.append(entry)
    return merged


def _text_notices(text: TokenizedText) -> list[str]:
    if not text.num_repaired:
        return []
    return [
        f"{text.num_repaired} of {text.num_files} text files are not valid UTF-8: wrong bytes were replaced by U+FFFD"
    ]


def _require_one_step(
    rows: Rows, paths: Sequence[Path], available: int, *, rows_needed: int, num_micro_batches: int, step: str
) -> None:
    if available >= rows_needed:
        return
    named = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    seq_len = rows.rules.seq_len
    has, needs, lengths = f"{rows.source.num_tokens} tokens", rows_needed * seq_len, f"--seq-len {seq_len} x "
    if rows.is_listed or available < rows.num_rows:
        has, needs, lengths = f"{available} rows to train on", rows_needed, ""
    factors = f"--micro-batch-size {rows_needed // num_micro_batches} x --micro-batches {num_micro_batches}"
    raise DataError(
        f"--data {named}: has {has}, {step} needs {needs} ({lengths}{factors}); give more data or lower one of these"
    )


class WindowSampler:
    """Which window of the data comes at which place of an endless sequence. Pure arithmetic, no memory, safe in
    threads.

    ``sequential`` takes windows 0 .. n-1 over and over; ``shuffle`` takes every window once an epoch, in an order that
    depends on seed and epoch alone (not on a library's random generator, whose streams may change with its version).
    """

    def __init__(self, num_windows: int, *, order: Order, seed: int) -> None:
        if num_windows < 1:
            raise ValueError(f"num_windows: {num_windows} is not allowed; it must be at least 1")
        if order not in get_args(Order):
            raise DataError(f"--order: {order!r} is not allowed; choose one of {', '.join(get_args(Order))}")
        #: Windows of the data.
        self.num_windows = num_windows
        #: ``sequential`` or ``shuffle``.
        self.order: Order = order
        #: Seed of the shuffle; sequential ignores it.
        self.seed = seed
        #: Keys of the epoch that was asked for last: (epoch, keys). Replaced as a whole, so threads see a matching
        #: pair.
        self._keys: tuple[int, tuple[int, ...]] = (-1, ())
        #: Bits of each half of the Feistel network: its domain, 4 to this power, is the first that holds all windows.
        self._half_bits = max(_MIN_HALF_BITS, -(-(num_windows - 1).bit_length() // 2))

    def window(self, place: int) -> int:
        """The window (0 .. num_windows-1) at a place (from 0, endless)."""
        epoch, index = divmod(place, self.num_windows)
        if self.order == "sequential":
            return index
        keys = self._epoch_keys(epoch)
        value = index
        while True:  # cycle walking: the network permutes a larger domain, so step on until back inside
            value = _feistel(value, keys, self._half_bits)
            if value < self.num_windows:
                return value

    def epoch(self, place: int) -> int:
        """How many times all windows have been taken before this place."""
        return place // self.num_windows

    def _epoch_keys(self, epoch: int) -> tuple[int, ...]:
        known, keys = self._keys
        if known != epoch:
            name = f"hoist window order 1, seed {self.seed}, epoch {epoch}"
            digest = hashlib.blake2b(name.encode(), digest_size=64).digest()
            keys = tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))
            self._keys = (epoch, keys)
        return keys


#: Rounds of the Feistel network, one 64-bit key each.
_ROUNDS = 8
#: Smaller domains than 4**3 leave too few different permutations.
_MIN_HALF_BITS = 3
_MASK_64 = 2**64 - 1


def _feistel(value: int, keys: tuple[int, ...], half_bits: int) -> int:
    """A keyed permutation of 0 .. 4**half_bits - 1 (Luby and Rackoff 1988; the round function is splitmix64's
    finalizer)."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        mixed = (right ^ key) & _MASK_64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
        left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
    return (left << half_bits) | right


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """Where the data stands after a step; part of the commit record."""

    step: int
    """Steps done."""
    place: int
    """Windows taken by them, endless numbering: the next step begins here."""
    epoch: int
    """Epoch of that place, from 0."""
    window: int
    """Windows of that epoch that are already taken."""
    order: str
    """``sequential`` or ``shuffle``."""
    shuffle_seed: int
    """Seed of the shuffle."""
    fingerprint: str
    """Identity of what the rows hold, see :attr:`Rows.fingerprint`."""
    seq_len: int
    """Most tokens of a row."""
    num_windows: int
    """Rows of the data that are for training."""
    validation_share: float = 0.0
    """Share of the rows that are held out."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> DataPosition:
        """Read what :meth:`StepData.position` wrote. Raises KeyError, TypeError or ValueError on anything else."""
        return cls(
            step=int(document["step"]),
            place=int(document["place"]),
            epoch=int(document["epoch"]),
            window=int(document["window"]),
            order=str(document["order"]),
            shuffle_seed=int(document["shuffle_seed"]),
            fingerprint=str(document["data_fingerprint"]),
            seq_len=int(document["seq_len"]),
            num_windows=int(document["num_windows"]),
            validation_share=float(document.get("validation_share", 0.0)),
        )

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return {
            "step": self.step,
            "place": self.place,
            "epoch": self.epoch,
            "window": self.window,
            "order": self.order,
            "shuffle_seed": self.shuffle_seed,
            "data_fingerprint": self.fingerprint,
            "seq_len": self.seq_len,
            "num_windows": self.num_windows,
            "validation_share": self.validation_share,
        }


class StepData:
    """The micro-batches of every step: row r of micro-batch m of step s (from 0) is at place ``(s*M + m)*B + r``."""

    def __init__(
        self,
        rows: Rows,
        *,
        order: Order,
        seed: int,
        micro_batch_size: int,
        num_micro_batches: int,
        validation_share: float = 0.0,
        after: DataPosition | None = None,
    ) -> None:
        """``after`` is where an earlier run stopped: its next step begins there, even if M or B is now another."""
        self._rows = rows
        self._share = validation_share
        #: Which rows are held out.
        self.held_out = HeldOut(rows.num_rows, share=validation_share, seed=seed)
        self._sampler = WindowSampler(self.held_out.num_training, order=order, seed=seed)
        self._micro_batch_size = micro_batch_size
        self._num_micro_batches = num_micro_batches
        #: Steps and rows that were taken before this object's formula begins to count.
        self._first_step = 0 if after is None else after.step
        self._first_place = 0 if after is None else after.place

    def step(self, step: int) -> list[dict[str, torch.Tensor]]:
        """The M micro-batches of a step (from 1), see :meth:`Rows.batch`.

        Raises :class:`DataReadError` if a token file cannot be read any more.
        """
        numbers = self.row_numbers(step)
        size = self._micro_batch_size
        return [self._rows.batch(numbers[first : first + size]) for first in range(0, len(numbers), size)]

    def row_numbers(self, step: int) -> list[int]:
        """The rows of a step (from 1), by their numbers in the data."""
        place = self._place(step - 1)
        return [
            self.held_out.training(self._sampler.window(place + offset))
            for offset in range(self._num_micro_batches * self._micro_batch_size)
        ]

    def position(self, step: int) -> dict[str, Any]:
        """What the commit of a step (0: before the first) says about the data, as JSON."""
        place = self._place(step)
        return DataPosition(
            step=step,
            place=place,
            epoch=self._sampler.epoch(place),
            window=place % self._sampler.num_windows,
            order=self._sampler.order,
            shuffle_seed=self._sampler.seed,
            fingerprint=self._rows.fingerprint,
            seq_len=self._rows.rules.seq_len,
            num_windows=self._sampler.num_windows,
            validation_share=self._share,
        ).to_json()

    def differences(self, committed: DataPosition) -> tuple[str, ...]:
        """What is not as it was in the run that is resumed, one line each; empty if the same windows follow on."""
        now = DataPosition.from_json(self.position(committed.step))
        found = []
        if now.fingerprint != committed.fingerprint:
            found.append(
                f"--data: not the data of the stored run (fingerprint {now.fingerprint[:12]}, stored "
                f"{committed.fingerprint[:12]}; "
                f"{now.num_windows} windows, stored {committed.num_windows}); give the same data, or expect other "
                "losses"
            )
        for flag, mine, theirs in (
            ("--seq-len", now.seq_len, committed.seq_len),
            ("--order", now.order, committed.order),
            ("--validation-split", now.validation_share, committed.validation_share),
            ("--seed (of the shuffle)", now.shuffle_seed, committed.shuffle_seed),
        ):
            seed_matters = now.validation_share or not now.order == committed.order == "sequential"
            if mine != theirs and (seed_matters or not flag.startswith("--seed")):
                found.append(f"{flag}: {mine}, stored {theirs}; windows are numbered anew from place {committed.place}")
        return tuple(found)

    def _place(self, steps_done: int) -> int:
        """Windows taken when this many steps are done."""
        if steps_done < self._first_step:
            raise ValueError(f"step {steps_done}: data begins after step {self._first_step}")
        per_step = self._num_micro_batches * self._micro_batch_size
        return self._first_place + (steps_done - self._first_step) * per_step
