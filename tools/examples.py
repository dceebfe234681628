"""Records to ids: reads the files' records one by one, tokenizes them and keeps ids and labels in the cache.

Every record becomes one document: ids, and for each whether it counts in the loss. How documents become rows is
`rows.py`'s business; formats are read in `jsonl.py` and `columnar.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hoist.tools.chat import ChatEncoder
from hoist.tools.errors import DataError
from hoist.tools.jsonl import JSON_SUFFIXES, Record, read_json
from hoist.tools.parts import PartWriter, check_ids, find_part, part_paths
from hoist.tools.records import Completion, Conversation, Example, Kind, Text, find_kind, parse
from hoist.tools.text import (
    BLOCK_CHARACTERS,
    ModelTokenizer,
    TextTokenizer,
    append_text,
    cut_of,
    end_text,
    id_dtype,
)
from hoist.tools.tokens import Part, Progress, refuse_os_errors, short_hash

#: Files that hold records.
RECORD_SUFFIXES = JSON_SUFFIXES
#: Raised when the same records would give other ids or labels, so that old caches are not taken.
_CACHE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedRecords:
    """The ids of some files of records, in the cache; each record is a document."""

    part: Part
    num_empty: int
    """Records without any text, which are left out."""
    num_truncated: int
    """Examples that were cut to the longest row."""
    num_dropped: int
    """Examples of which nothing that counts was left then, and which are left out."""
    created: tuple[Path, ...]
    """Cache files that this call made (none when it found them)."""


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, by its ending. Raises DataError with file and line."""
    return read_json(path)


def kind_of(path: Path) -> Kind:
    """What the records of a file are, by the first of them. Raises DataError if there is none."""
    for record in read_records(path):
        return find_kind(record.fields, f"--data {path}: line {record.line}")
    raise DataError(f"--data {path}: the file is empty; it needs at least one record")


class ExampleEncoder:
    """Turns examples into ids, and says which of them count."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatEncoder(tokenizer) if isinstance(tokenizer, ModelTokenizer) else None

    def encode(
        self, example: Completion | Conversation, where: str
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Ids, and whether each counts. The first never does, as nothing of its own comes before it."""
        ids, counted = self._encode(example, where)
        counted[:1] = False
        return ids, counted

    def _encode(
        self, example: Completion | Conversation, where: str
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        if isinstance(example, Completion):
            return self._completion(example)
        if example.fallback is not None and (self._chat is None or not self._chat.has_template):
            return self._completion(example.fallback)
        if self._chat is None:
            raise DataError(
                f"{where}: messages need a tokenizer with a chat template, and text is read as bytes here; name a "
                "model directory that has one, or write prompt/completion records"
            )
        return self._chat.encode(example, where)

    def _completion(self, example: Completion) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The two are encoded apart, as they are when the model is asked to go on; then the end of the text."""
        prompt = np.concatenate([self._tokenizer.opening(), self._tokenizer.encode(example.prompt)])
        separator = self._tokenizer.separator()
        end = np.asarray([] if separator is None else [separator], dtype=np.int64)
        completion = np.concatenate([self._tokenizer.encode(example.completion), end])
        counted = np.ones(len(prompt) + len(completion), dtype=np.bool_)
        counted[: len(prompt)] = False
        return np.concatenate([prompt, completion]), counted


def encode_files(
    files: Sequence[Path],
    *,
    tokenizer: TextTokenizer,
    vocab_size: int,
    cache_directory: Path,
    longest: int,
    truncate: bool,
    progress: Progress | None = None,
) -> EncodedRecords:
    """Ids and labels of ``files`` one after another, from the cache or made now; one record at a time is in memory.

    Examples longer than ``longest`` ids are cut there with ``truncate``. All files hold text, or all hold examples.

    Raises :class:`DataError`, with file and line, for whatever is wrong with a record, for one that is too long, and if
    there is nothing at all; the cache is then as it was.
    """
    listing: list[tuple[str, int, int]] = []
    for path in files:
        with refuse_os_errors(path):
            stat = path.stat()
        listing.append((os.fsencode(path.absolute()).hex(), stat.st_size, stat.st_mtime_ns))
    kind = kind_of(files[0])
    dtype = id_dtype(tokenizer, vocab_size)
    whole = not kind.is_text
    key = {
        "version": _CACHE_VERSION,
        "records": short_hash(listing),
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype,
        "truncate": longest if truncate and whole else None,
    }
    target = cache_directory.absolute() / f"records-{short_hash(key)}.npy"
    found = find_part(target, key, dtype, vocab_size=vocab_size, masked=whole, whole=whole)
    if found is not None:
        part, known = found
        tokens, index, line = known["longest"]
        if whole:
            _check_length(tokens, longest, f"--data {files[index]}: line {line}")
        counts = {name: known[name] for name in ("num_empty", "num_truncated", "num_dropped")}
        return EncodedRecords(part=part, created=(), **counts)
    run = _Run(tokenizer, vocab_size, longest if whole else 0, truncate)
    total_bytes = sum(size for _, size, _ in listing)
    done_bytes = 0
    with PartWriter(target, dtype, masked=whole) as writer:
        for index, path in enumerate(files):
            for record, example in _examples(path, kind):
                run.add(writer, example, index, path, record.line)
                if progress is not None:
                    progress(min(total_bytes, done_bytes + record.done_bytes), total_bytes)
            done_bytes += listing[index][1]
        if writer.num_tokens == 0:
            raise DataError(f"--data {files[0]}: has no record with anything to learn; give more data")
        extra = {
            "longest": run.longest_found, "num_empty": run.num_empty, "num_truncated": run.num_truncated,
            "num_dropped": run.num_dropped,
        }  # fmt: skip
        part = writer.finish(target.with_suffix(".json"), key, extra, whole=whole)
    return EncodedRecords(
        part=part,
        num_empty=run.num_empty,
        num_truncated=run.num_truncated,
        num_dropped=run.num_dropped,
        created=part_paths(target, masked=whole),
    )


def _examples(path: Path, kind: Kind) -> Iterator[tuple[Record, Example]]:
    """The examples of a file, whose first record says of what kind they are."""
    own: Kind | None = None
    first_line = 0
    for record in read_records(path):
        where = f"--data {path}: line {record.line}"
        if own is None:
            own, first_line = find_kind(record.fields, where), record.line
            if own.is_text is not kind.is_text:
                raise DataError(
                    f"{where}: holds {'/'.join(own.value)} records, the files before it {'/'.join(kind.value)}; train "
                    "on text or on examples, not on both at once"
                )
        yield record, parse(record.fields, own, where, first_line)
    if own is None:
        raise DataError(f"--data {path}: the file is empty; it needs at least one record")


class _Run:
    """What one pass over the records has found so far."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, longest: int, truncate: bool) -> None:
        self.num_empty = self.num_truncated = self.num_dropped = 0
        #: Tokens of the longest document, and which file and line it is in.
        self.longest_found = (0, 0, 0)
        self._tokenizer = tokenizer
        self._encoder = ExampleEncoder(tokenizer)
        self._vocab_size = vocab_size
        #: Most ids of an example; 0: text, which has no limit.
        self._longest = longest
        self._truncate = truncate

    def add(self, writer: PartWriter, example: Example, index: int, path: Path, line: int) -> None:
        """Write one document, unless nothing is in it."""
        where = f"--data {path}: line {line}"
        if isinstance(example, Text):
            rest = example.text
            while len(rest) > BLOCK_CHARACTERS:
                cut = cut_of(rest)
                append_text(writer, rest[:cut], self._tokenizer, where, self._vocab_size)
                rest = rest[cut:]
            append_text(writer, rest, self._tokenizer, where, self._vocab_size)
            length = end_text(writer, self._tokenizer, where, self._vocab_size)
            self.num_empty += length == 0
        else:
            ids, counted = self._encoder.encode(example, where)
            check_ids(ids, where, 0, self._vocab_size)
            if not counted.any():
                raise DataError(f"{where}: no token of it counts in the loss, so nothing to learn; leave it out")
            if len(ids) > self._longest and self._truncate:
                ids, counted = ids[: self._longest], counted[: self._longest]
                self.num_truncated += 1
                if not counted.any():
                    self.num_dropped += 1
                    return
            _check_length(len(ids), self._longest, where)
            writer.append(ids, counted)
            length = writer.end_document()
        if length > self.longest_found[0]:
            self.longest_found = (length, index, line)


def _check_length(tokens: int, longest: int, where: str) -> None:
    if tokens > longest:
        raise DataError(
            f"{where}: has {tokens} tokens, --seq-len {longest} allows {longest}; raise --seq-len, cut such examples "
            "with --truncate, or leave the record out"
        )


def count_notices(found: EncodedRecords) -> list[str]:
    """What people should know of records that were changed or left out, one line each."""
    notices = []
    if found.num_empty:
        notices.append(f"{found.num_empty} records without text are left out")
    if found.num_truncated:
        dropped = f"; {found.num_dropped} of them had nothing to learn left, and are left out" * bool(found.num_dropped)
        notices.append(f"--truncate: {found.num_truncated} examples were cut to --seq-len tokens{dropped}")
    return notices
