"""How documents become rows of a batch: windows of one long text, whole examples packed, or one document padded.

A row is a run of ids of a :class:`TokenSource`; which row a step takes is `data.py`'s business. Rows that are not all
windows of one length are listed once, in the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from hoist.tools.errors import DataError
from hoist.tools.parts import HEADER_BYTES, IdWriter, cached_file
from hoist.tools.tokens import TokenFile, TokenSource, read_ids, read_note, scan, short_hash, write_note

#: A label that does not count.
IGNORED_LABEL = -100
#: A row needs a token to be told and one before it.
_LEAST_TOKENS = 2
#: Rows whose places are kept back before they are written.
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRules:
    """How rows are made."""

    seq_len: int
    """Most tokens of a row."""
    pack: bool = True
    """Rows are as full as can be; else each has one document, or a part of one, and is padded."""
    isolate: bool = False
    """Attention does not cross from one document of a row to another: positions begin anew in each."""
    pad_id: int = 0
    """Id that fills rows up; never learned, never looked at."""


def extra_inputs(rules: RowRules) -> tuple[str, ...]:
    """What the model is given besides ids. Packed rows need no mask: what fills them up comes after all that counts."""
    if rules.isolate:
        return ("position_ids",)
    return () if rules.pack else ("attention_mask",)


class Rows:
    """The rows of some data, numbered from 0. Safe to use from threads."""

    def __init__(self, source: TokenSource, rules: RowRules, table: TokenFile | None) -> None:
        """``table``: first id and length of each row, from :func:`make_rows`; None: windows of ``seq_len`` ids."""
        #: Rules that the rows were made by.
        self.rules = rules
        #: Where the ids come from.
        self.source = source
        self._table = table
        #: How many there are; may be 0.
        self.num_rows = source.num_tokens // rules.seq_len if table is None else table.num_tokens // 2
        #: Identity of what rows hold and of how they are made.
        self.fingerprint = source.fingerprint
        if table is not None or rules.isolate:
            documents = [part.documents_crc32c for part in source.parts]
            about = [source.fingerprint, documents, rules.pack, rules.isolate]
            self.fingerprint = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]

    @property
    def is_listed(self) -> bool:
        """The rows are not windows of one length."""
        return self._table is not None

    @property
    def extra_inputs(self) -> tuple[str, ...]:
        """What the model is given besides ids."""
        return extra_inputs(self.rules)

    def batch(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """A micro-batch of these rows: ``input_ids`` and ``labels``, int64 [B, S], the model shifts labels itself.

        S is ``seq_len``, so that micro-batches share what layers are called with; not packed it is that of the longest
        row, and there is also ``attention_mask`` (1 where there is a token). With documents kept apart there are
        ``position_ids``, which begin anew in each and in what fills the row up. Raises :class:`DataReadError` if a
        token file cannot be read any more.
        """
        spans = [self.span(number) for number in numbers]
        longest = max(length for _, length in spans)
        shape = (len(spans), self.rules.seq_len if self.rules.pack else longest)
        ids = np.full(shape, self.rules.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for row, (start, length) in enumerate(spans):
            self.source.read(start, ids[row, :length])
            counted = np.empty(length, dtype=np.bool_)
            self.source.read_counted(start, counted)
            if self.rules.isolate:
                begins = [0, *self.source.document_starts(start, length).tolist(), length]
                for first, last in zip(begins, [*begins[1:], shape[1]], strict=True):
                    positions[row, first:last] = np.arange(last - first)
                counted[begins[1:-1]] = False
                counted[:1] = False
            np.copyto(labels[row, :length], ids[row, :length], where=counted)
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.rules.isolate:
            batch["position_ids"] = torch.from_numpy(positions)
        elif not self.rules.pack:
            mask = np.zeros(shape, dtype=np.int64)
            for row, (_, length) in enumerate(spans):
                mask[row, :length] = 1
            batch["attention_mask"] = torch.from_numpy(mask)
        return batch

    def span(self, number: int) -> tuple[int, int]:
        """The first id of a row, and how many it has."""
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        if self._table is None:
            return number * self.rules.seq_len, self.rules.seq_len
        start, length = read_ids(self._table, 2 * number, 2)
        return int(start), int(length)


def make_rows(source: TokenSource, rules: RowRules, cache_directory: Path) -> Rows:
    """The rows of ``source``. What lists them is put into the cache, and into ``source.made``.

    Raises DataError where the rules need documents and the data has none.
    """
    if (rules.isolate or not rules.pack) and any(part.documents is None for part in source.parts):
        path = next(part.ids.path for part in source.parts if part.documents is None)
        option = "--isolate-documents" if rules.pack else "--no-pack"
        raise DataError(f"--data {path}: token files do not tell documents apart, as {option} needs; leave it out")
    if rules.pack and not source.whole:
        return Rows(source, rules, None)
    key = {
        "version": 1,
        "documents": [[part.ids.num_tokens, part.documents_crc32c] for part in source.parts],
        "seq_len": rules.seq_len,
        "pack": rules.pack,
        "split": not source.whole,
    }
    target = cache_directory.absolute() / f"rows-{short_hash(key)}.npy"
    note = target.with_suffix(".json")
    known = read_note(note, key)
    if known is not None:
        table = cached_file(target, "<i8", known["num_numbers"])
        if target.is_file() and target.stat().st_size == HEADER_BYTES + table.num_bytes:
            return Rows(source, rules, table)
    with IdWriter(target, "<i8") as writer:
        pending: list[int] = []
        for start, length in _spans(source, rules):
            pending += (start, length)
            if len(pending) >= 2 * _ROWS_AT_ONCE:
                writer.append(np.asarray(pending, dtype=np.int64))
                pending.clear()
        writer.append(np.asarray(pending, dtype=np.int64))
        table, facts = writer.finish()
    if source.made is not None:
        source.made.files.extend((target, note))
    write_note(note, key, {"num_numbers": table.num_tokens, "facts": asdict(facts)})
    return Rows(source, rules, table)


def _spans(source: TokenSource, rules: RowRules) -> Iterator[tuple[int, int]]:
    """First id and length of each row that is no window: whole documents packed in their order, or each on its own."""
    if rules.pack:
        start, length = 0, 0
        for begin, tokens in _documents(source):
            if length and length + tokens > rules.seq_len:
                yield start, length
                length = 0
            if not length:
                start = begin
            length += tokens
        if length:
            yield start, length
        return
    for begin, tokens in _documents(source):
        for offset in range(0, tokens, rules.seq_len):
            length = min(rules.seq_len, tokens - offset)
            if length >= _LEAST_TOKENS:
                yield begin + offset, length


def _documents(source: TokenSource) -> Iterator[tuple[int, int]]:
    """First id and length of each document, in order."""
    for part, offset in zip(source.parts, source.starts, strict=False):
        assert part.documents is not None
        last: int | None = None
        for numbers in scan(part.documents):
            for first in range(0, len(numbers), _ROWS_AT_ONCE):
                few: list[int] = numbers[first : first + _ROWS_AT_ONCE].tolist()
                for number in few:
                    if last is not None:
                        yield offset + last, number - last
                    last = number
