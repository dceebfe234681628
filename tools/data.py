"""What a run trains on: `--data` paths become one sequence of ids, cut into windows, dealt out to steps and
micro-batches.

Token files are in `tokens.py`, text in `text.py`. Windows are numbered on endlessly, so any step of any epoch is a pure
function of its number: a resumed run takes exactly the windows that an uninterrupted one would have taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from hoist.tools.errors import DataError
from hoist.tools.text import ByteTokenizer, TextTokenizer, TokenizedText, find_text_files, tokenize
from hoist.tools.tokens import (
    CacheEntries,
    Progress,
    TokenFacts,
    TokenFile,
    TokenSource,
    check_tokens,
    open_bin,
    open_npy,
    refuse_os_errors,
)

#: Files that would be taken as text, markup and all, or for no text at all; people mean their content.
UNREAD_FORMATS: Mapping[str, str] = {
    ".json": "JSON files", ".jsonl": "JSON lines", ".ndjson": "JSON lines", ".parquet": "Parquet files",
    ".arrow": "Arrow files",
}  # fmt: skip

#: How windows follow one another.
Order = Literal["sequential", "shuffle"]


def prepare(
    paths: Sequence[Path],
    *,
    tokenizer: TextTokenizer | None,
    vocab_size: int,
    cache_directory: Path,
    seq_len: int,
    micro_batch_size: int,
    num_micro_batches: int,
    token_bytes: int = 2,
    progress: Progress | None = None,
) -> TokenSource:
    """Make ``--data`` ready: token files are checked, text files and folders tokenized, all laid end to end as given.

    ``tokenizer`` None means UTF-8 bytes, for which the vocabulary must have at least 256 ids. ``token_bytes`` (2 or 4)
    is the width of the ids in `.bin` files. What one pass over the data finds is kept in ``cache_directory``.

    Raises :class:`DataError` for a path that is missing, unreadable, empty or of the wrong kind, for an id outside the
    vocabulary, and for data shorter than one step; what this call put into the cache is then removed.
    """
    if not paths:
        raise DataError("--data: nothing given; name .npy or .bin token files, text files or folders of text")
    sources = [_look(path, token_bytes) for path in paths]
    files: list[TokenFile] = []
    facts: list[TokenFacts] = []
    notices: list[str] = []
    text_as: str | None = None
    made = CacheEntries(cache_directory)
    try:
        for source in _merge_text(sources):
            if isinstance(source, TokenFile):
                found, notes = check_tokens(
                    source, vocab_size=vocab_size, cache_directory=cache_directory, progress=progress
                )
                files.append(source)
                facts.append(found)
                made.files.extend(notes)
                continue
            if tokenizer is None and vocab_size < ByteTokenizer.VOCABULARY:
                raise DataError(
                    f"--data {source[0]}: the model has no tokenizer and a vocabulary of {vocab_size}; text as bytes "
                    "needs "
                    f"{ByteTokenizer.VOCABULARY}: give token ids (.npy) or a model with a tokenizer"
                )
            chosen = tokenizer or ByteTokenizer()
            text_as = chosen.description
            text = tokenize(
                source,
                tokenizer=chosen,
                vocab_size=vocab_size,
                cache_directory=cache_directory,
                progress=progress,
            )
            made.files.extend(text.created)
            files.append(text.file)
            facts.append(text.facts)
            notices.extend(_text_notices(text))
        result = TokenSource(files, facts, notices=notices, made=made, tokenizer=text_as)
        _require_one_step(
            result, paths, seq_len=seq_len, micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches
        )
    except BaseException:
        made.remove()
        raise
    return result


def _look(path: Path, token_bytes: int) -> TokenFile | tuple[Path, ...]:
    """What one ``--data`` path is: a token file, or text files."""
    with refuse_os_errors(path):
        stat = path.stat()
    if path.is_dir():
        return find_text_files(path)
    if not path.is_file():
        raise DataError(
            f"--data {path}: neither a file nor a folder; give .npy or .bin token files, text files or folders"
        )
    if path.suffix == ".npy":
        return open_npy(path)
    if path.suffix == ".bin":
        return open_bin(path, token_bytes=token_bytes)
    unread = UNREAD_FORMATS.get(path.suffix.lower())
    if unread is not None:
        raise DataError(
            f"--data {path}: {unread} come with a later version; make text (.txt) or token ids (.npy) of it"
        )
    if stat.st_size == 0:
        raise DataError(f"--data {path}: the file is empty; give some text")
    with refuse_os_errors(path), path.open("rb") as file:
        if b"\0" in file.read(4096):
            raise DataError(
                f"--data {path}: is not text in UTF-8 (it has zero bytes); convert it, or name token files *.npy or "
                "*.bin"
            )
    return (path,)


def _merge_text(sources: Sequence[TokenFile | tuple[Path, ...]]) -> list[TokenFile | tuple[Path, ...]]:
    """The same, with text that follows text as one run, so that it has one cache file."""
    merged: list[TokenFile | tuple[Path, ...]] = []
    for source in sources:
        if merged and isinstance(source, tuple) and isinstance(merged[-1], tuple):
            merged[-1] = (*merged[-1], *source)
        else:
            merged.append(source)
    return merged


def _text_notices(text: TokenizedText) -> list[str]:
    if not text.num_repaired:
        return []
    return [
        f"{text.num_repaired} of {text.num_files} text files are not valid UTF-8: wrong bytes were replaced by U+FFFD"
    ]


def _require_one_step(
    source: TokenSource, paths: Sequence[Path], *, seq_len: int, micro_batch_size: int, num_micro_batches: int
) -> None:
    needed = seq_len * micro_batch_size * num_micro_batches
    windows = source.num_tokens // seq_len
    if windows < micro_batch_size * num_micro_batches:
        named = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        raise DataError(
            f"--data {named}: has {source.num_tokens} tokens, one step needs {needed} (--seq-len {seq_len} x "
            f"--micro-batch-size {micro_batch_size} x --micro-batches {num_micro_batches}); give more data or lower "
            "one of these"
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
    """Identity of the ids, see :attr:`TokenSource.fingerprint`."""
    seq_len: int
    """Tokens of a window."""
    num_windows: int
    """Windows of the data."""

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
        }


class StepData:
    """The micro-batches of every step: row r of micro-batch m of step s (all from 0) is window ``(s*M + m)*B + r``."""

    def __init__(
        self,
        source: TokenSource,
        sampler: WindowSampler,
        *,
        seq_len: int,
        micro_batch_size: int,
        num_micro_batches: int,
        after: DataPosition | None = None,
    ) -> None:
        """``after`` is where an earlier run stopped: its next step begins there, even if M or B is now another."""
        if sampler.num_windows != source.num_tokens // seq_len:
            raise ValueError(f"sampler has {sampler.num_windows} windows, the data {source.num_tokens // seq_len}")
        self._source = source
        self._sampler = sampler
        self._seq_len = seq_len
        self._micro_batch_size = micro_batch_size
        self._num_micro_batches = num_micro_batches
        #: Steps and windows that were taken before this object's formula begins to count.
        self._first_step = 0 if after is None else after.step
        self._first_place = 0 if after is None else after.place

    def step(self, step: int) -> list[dict[str, torch.Tensor]]:
        """The M micro-batches of a step (from 1): ``input_ids`` and ``labels``, int64 [B, S], with equal values.

        The model shifts the labels itself. Raises :class:`DataReadError` if a token file cannot be read any more.
        """
        place = self._place(step - 1)
        batches = []
        for _ in range(self._num_micro_batches):
            ids = np.empty((self._micro_batch_size, self._seq_len), dtype=np.int64)
            for row in ids:
                self._source.read(self._sampler.window(place) * self._seq_len, row)
                place += 1
            tensor = torch.from_numpy(ids)
            batches.append({"input_ids": tensor, "labels": tensor.clone()})
        return batches

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
            fingerprint=self._source.fingerprint,
            seq_len=self._seq_len,
            num_windows=self._sampler.num_windows,
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
            ("--seed (of the shuffle)", now.shuffle_seed, committed.shuffle_seed),
        ):
            if mine != theirs and not (flag.startswith("--seed") and now.order == committed.order == "sequential"):
                found.append(f"{flag}: {mine}, stored {theirs}; windows are numbered anew from place {committed.place}")
        return tuple(found)

    def _place(self, steps_done: int) -> int:
        """Windows taken when this many steps are done."""
        if steps_done < self._first_step:
            raise ValueError(f"step {steps_done}: data begins after step {self._first_step}")
        per_step = self._num_micro_batches * self._micro_batch_size
        return self._first_place + (steps_done - self._first_step) * per_step
