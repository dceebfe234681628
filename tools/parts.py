"""Tokenized documents in the cache: ids, which of them count in the loss, and where each document begins.

Written in bounded memory under temporary names and renamed; each file is a `.npy` that `numpy.load` opens. What makes
ids is in `text.py` and `examples.py`, reading them back is `tokens.py`'s business.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from hoist.tools.errors import DataError
from hoist.tools.tokens import Part, TokenFacts, TokenFile, read_note, write_note

#: Bytes of ids that may be in the page cache before they are written back and dropped.
_FLUSH_BYTES = 4 * 2**20
#: Bytes of our `.npy` header: fixed, so that it can be written when the number of ids is known, at the end.
HEADER_BYTES = 128
#: Documents whose beginnings are kept back before they are written.
_DOCUMENTS_AT_ONCE = 8192


class IdWriter:
    """Writes numbers to a `.npy` under a temporary name, in bounded memory. Leaving the block unfinished removes every
    trace."""

    def __init__(self, target: Path, dtype: str) -> None:
        self.num_tokens = 0
        self._target = target
        self._dtype = np.dtype(dtype)
        self._temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        #: Bytes written since the page cache was last cleared of them.
        self._cached_bytes = 0
        self._lowest, self._highest, self._crc = 2**64, -1, 0
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.lseek(self._descriptor, HEADER_BYTES, os.SEEK_SET)
        except OSError as error:
            raise self._refusal(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:  # not finished
            os.close(self._descriptor)
            self._descriptor = None
            self._temporary.unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> DataError:
        return DataError(
            f"token cache {self._target.parent}: {error.strerror or error}; make room in it or choose another directory"
        )

    def append(self, ids: npt.NDArray[np.int64]) -> None:
        """Add ids, which fit the dtype."""
        assert self._descriptor is not None
        if not ids.size:
            return
        self._lowest = min(self._lowest, int(ids.min()))
        self._highest = max(self._highest, int(ids.max()))
        self.num_tokens += ids.size
        data = ids.astype(self._dtype).tobytes()
        self._crc = google_crc32c.extend(self._crc, data)
        self._cached_bytes += len(data)
        try:
            _write_all(self._descriptor, data)
            if self._cached_bytes >= _FLUSH_BYTES:
                self._clear_cache()
        except OSError as error:
            raise self._refusal(error) from error

    def _clear_cache(self) -> None:
        assert self._descriptor is not None
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._cached_bytes = 0

    def finish(self) -> tuple[TokenFile, TokenFacts]:
        """Write the rest and the header, make it durable, give it its name."""
        assert self._descriptor is not None
        head = f"{{'descr': '{self._dtype.str}', 'fortran_order': False, 'shape': ({self.num_tokens},), }}"
        header = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
        header += head.encode().ljust(HEADER_BYTES - len(header) - 1) + b"\n"
        try:
            os.pwrite(self._descriptor, header, 0)
            self._clear_cache()
            self._temporary.replace(self._target)
        except OSError as error:
            raise self._refusal(error) from error
        os.close(self._descriptor)
        self._descriptor = None
        file = cached_file(self._target, self._dtype.str, self.num_tokens)
        return file, TokenFacts(lowest=self._lowest, highest=self._highest, crc32c=self._crc)


def cached_file(path: Path, dtype: str, num_tokens: int) -> TokenFile:
    """A file that :class:`IdWriter` has written."""
    return TokenFile(path=path, offset_bytes=HEADER_BYTES, dtype=dtype, num_tokens=num_tokens)


class PartWriter:
    """Writes documents one after another into the cache. Leaving the block unfinished removes every trace."""

    def __init__(self, target: Path, dtype: str, *, masked: bool) -> None:
        """``target`` is the file of ids, ``X.npy``; the others lie beside it. ``masked``: some ids do not count."""
        self._target = target
        self._stack = ExitStack()
        self._ids = IdWriter(target, dtype)
        self._counted = IdWriter(counted_path(target), "|u1") if masked else None
        self._documents = IdWriter(documents_path(target), "<i8")
        #: Beginnings of documents that are still to be written.
        self._begun: list[int] = []
        self._start = 0

    def __enter__(self) -> Self:
        for writer in (self._ids, self._counted, self._documents):
            if writer is not None:
                self._stack.enter_context(writer)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def num_tokens(self) -> int:
        """Ids so far."""
        return self._ids.num_tokens

    @property
    def document_tokens(self) -> int:
        """Ids of the document that is being written."""
        return self._ids.num_tokens - self._start

    def append(self, ids: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_] | None = None) -> None:
        """Add ids to the document; with ``masked``, and which of them count."""
        self._ids.append(ids)
        if self._counted is not None:
            assert counted is not None
            self._counted.append(counted.astype(np.int64))

    def end_document(self) -> int:
        """Returns its number of ids; one without any is none."""
        length = self.document_tokens
        if length:
            self._begun.append(self._start)
            self._start = self._ids.num_tokens
            if len(self._begun) >= _DOCUMENTS_AT_ONCE:
                self._write_documents()
        return length

    def _write_documents(self) -> None:
        self._documents.append(np.asarray(self._begun, dtype=np.int64))
        self._begun.clear()

    def finish(self, note: Path, key: Any, extra: Mapping[str, Any], *, whole: bool) -> Part:
        """Write the rest, make it durable, name it, and keep the note by which it is found again.

        There must be at least one id. If that fails, nothing is left.
        """
        self._begun.append(self._ids.num_tokens)
        self._write_documents()
        made: list[Path] = []
        try:
            ids, facts = self._ids.finish()
            made.append(ids.path)
            counted = counted_crc = None
            if self._counted is not None:
                counted, counted_facts = self._counted.finish()
                counted_crc = counted_facts.crc32c
                made.append(counted.path)
            documents, document_facts = self._documents.finish()
            made.append(documents.path)
            value = {
                "facts": asdict(facts),
                "num_tokens": ids.num_tokens,
                "counted_crc32c": counted_crc,
                "num_documents": documents.num_tokens - 1,
                "documents_crc32c": document_facts.crc32c,
                **extra,
            }
            write_note(note, key, value)
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            raise
        return Part(
            ids=ids,
            facts=facts,
            counted=counted,
            counted_crc32c=counted_crc,
            documents=documents,
            documents_crc32c=document_facts.crc32c,
            whole=whole,
        )


def counted_path(target: Path) -> Path:
    """Beside the ids in ``target``: one byte an id, 1 where it counts."""
    return target.with_name(f"{target.stem}-counted.npy")


def documents_path(target: Path) -> Path:
    """Beside the ids in ``target``: where each document begins, and where the last one ends."""
    return target.with_name(f"{target.stem}-documents.npy")


def part_paths(target: Path, *, masked: bool) -> tuple[Path, ...]:
    """The files of a part, its note last."""
    counted = (counted_path(target),) if masked else ()
    return (target, *counted, documents_path(target), target.with_suffix(".json"))


def find_part(
    target: Path, key: Any, dtype: str, *, vocab_size: int, masked: bool, whole: bool
) -> tuple[Part, dict[str, Any]] | None:
    """What the cache has under a key, with what was noted besides; None if that is missing, damaged or does not fit."""
    known = read_note(target.with_suffix(".json"), key)
    if known is None or known["facts"]["highest"] >= vocab_size:
        return None
    ids = cached_file(target, dtype, known["num_tokens"])
    counted = cached_file(counted_path(target), "|u1", known["num_tokens"]) if masked else None
    documents = cached_file(documents_path(target), "<i8", known["num_documents"] + 1)
    for file in (ids, counted, documents):
        if file is not None and not _is_whole(file):
            return None
    part = Part(
        ids=ids,
        facts=TokenFacts(**known["facts"]),
        counted=counted,
        counted_crc32c=known["counted_crc32c"],
        documents=documents,
        documents_crc32c=known["documents_crc32c"],
        whole=whole,
    )
    return part, known


def _is_whole(file: TokenFile) -> bool:
    with contextlib.suppress(OSError):
        return file.path.is_file() and file.path.stat().st_size == HEADER_BYTES + file.num_bytes
    return False


def check_ids(
    ids: npt.NDArray[np.int64], where: str, position: int, vocab_size: int
) -> npt.NDArray[np.int64]:
    """The same ids, if all are in the vocabulary. ``where`` names file and line, ``position`` is the first's number."""
    if ids.size and int(ids.max()) >= vocab_size:
        first = int(np.argmax(ids >= vocab_size))
        raise DataError(
            f"{where}: token {position + first} is {int(ids[first])}, allowed are 0 to {vocab_size - 1} (the model's "
            f"vocab_size is {vocab_size}); its tokenizer belongs to another model"
        )
    return ids


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
