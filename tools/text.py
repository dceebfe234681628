"""Text to token ids: finds the text files, tokenizes them in bounded blocks, and keeps the ids in the cache.

The cache's files are `parts.py`'s, keyed by what went in (paths, sizes, times of change, the tokenizer's files).
Reading ids back is `tokens.py`'s business, records with text in them are `examples.py`'s.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from hoist.tiers.io.requests import drop_cache
from hoist.tools.errors import DataError, ModelSourceError
from hoist.tools.parts import PartWriter, check_ids, find_part, part_paths
from hoist.tools.tokens import Part, Progress, refuse_os_errors, short_hash

#: Files of a folder that are taken as text. Not tables, JSON and web pages, of which most is no text to learn.
TEXT_SUFFIXES = (
    ".c", ".cc", ".cfg", ".cpp", ".cs", ".css", ".go", ".h", ".hpp", ".ini", ".java", ".jl",
    ".js", ".kt", ".lua", ".md", ".php", ".pl", ".py", ".pyi", ".r", ".rb", ".rs", ".rst",
    ".scala", ".sh", ".sql", ".swift", ".tex", ".text", ".toml", ".ts", ".txt", ".xml", ".yaml", ".yml",
)  # fmt: skip
#: Files of a model directory that make its tokenizer; their content is the tokenizer's identity.
TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "sentencepiece.bpe.model",
    "special_tokens_map.json", "spiece.model", "tekken.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
#: Those of them that carry a vocabulary; without one of these there is no tokenizer.
_VOCABULARY_FILES = frozenset(TOKENIZER_FILES) - {
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
}

#: Text is tokenized in blocks of at most this many characters: a tokenizer takes some hundred bytes for each.
BLOCK_CHARACTERS = 128 * 2**10
_READ_BYTES = 64 * 2**10
#: Raised when the same text would give other ids, so that old caches are not taken.
_CACHE_VERSION = 2


class TextTokenizer(ABC):
    """Turns text into ids. ``fingerprint`` is known without loading anything, so that a cached run never loads it."""

    #: Changes whenever the ids of the same text may change.
    fingerprint: str
    #: One line for people: what it is and what it puts after each document.
    description: str

    @abstractmethod
    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of a piece of text, without special tokens around it."""

    @abstractmethod
    def separator(self) -> int | None:
        """Id that follows each document, or None."""

    def opening(self) -> npt.NDArray[np.int64]:
        """Ids that a prompt begins with: the beginning of a text, where the tokenizer puts one."""
        return np.zeros(0, dtype=np.int64)


class ByteTokenizer(TextTokenizer):
    """Each byte of the UTF-8 text is an id (0 to 255); documents are separated by the byte 0, which text does not
    contain."""

    #: Smallest vocabulary that bytes fit in.
    VOCABULARY = 256

    fingerprint = "utf-8 bytes"
    description = "UTF-8 bytes, byte 0 after each document"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """The bytes of the text; a lone surrogate (text that is no Unicode) becomes ``?``."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int64)

    def separator(self) -> int | None:
        """Byte 0."""
        return 0


class ModelTokenizer(TextTokenizer):
    """The tokenizer that lies in a model's directory, loaded through transformers when it is first used."""

    def __init__(self, directory: Path) -> None:
        #: Directory of the model.
        self.directory = directory
        #: Its tokenizer files, to be exported with the model.
        self.files = tuple(directory / name for name in TOKENIZER_FILES if (directory / name).is_file())
        digest = hashlib.sha256()
        for file in self.files:
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode())
            digest.update(content)
        self.fingerprint = digest.hexdigest()
        self.description = f"the tokenizer in {directory}"
        self._loaded: Any = None

    @staticmethod
    def find(directory: Path) -> ModelTokenizer | None:
        """The directory's tokenizer, or None if it has no file with a vocabulary."""
        if any((directory / name).is_file() for name in _VOCABULARY_FILES):
            return ModelTokenizer(directory)
        return None

    def load(self) -> Any:
        """The transformers tokenizer. Raises ModelSourceError if transformers cannot read it."""
        if self._loaded is None:
            from transformers import AutoTokenizer  # slow to import; a cached run never needs it

            try:
                self._loaded = AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
            except Exception as error:  # transformers and its backends raise anything here
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ModelSourceError(
                    f"--model {self.directory}: its tokenizer cannot be loaded ({reason}); repair the tokenizer "
                    "files, or give "
                    "--data as token ids (.npy)"
                ) from error
        return self._loaded

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids without the special tokens that the tokenizer would put around a prompt."""
        return np.asarray(self.load().encode(text, add_special_tokens=False, verbose=False), dtype=np.int64)

    def separator(self) -> int | None:
        """The tokenizer's end-of-sequence id, if it has one."""
        identifier = self.load().eos_token_id
        return None if identifier is None else int(identifier)

    def opening(self) -> npt.NDArray[np.int64]:
        """The beginning-of-sequence id, if the tokenizer puts it before what it encodes."""
        loaded = self.load()
        around = loaded.encode("", verbose=False)
        begins = bool(around) and around[0] == loaded.bos_token_id
        return np.asarray(around[:1] if begins else [], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedText:
    """The ids of some text files, in the cache; each file is a document."""

    part: Part
    num_files: int
    """Text files that went in, empty ones not counted."""
    num_repaired: int
    """Of these, how many were not valid UTF-8."""
    created: tuple[Path, ...]
    """Cache files that this call made (none when it found them)."""


def find_text_files(folder: Path, *, without: frozenset[str] = frozenset()) -> tuple[Path, ...]:
    """All regular files below ``folder`` with a text suffix, sorted by relative path; folders named in ``without`` left
    out.

    Links to folders are not followed. Raises :class:`DataError` if there is none.
    """
    found = files_below(folder, TEXT_SUFFIXES, without=without)
    if not found:
        raise DataError(
            f"--data {folder}: no text file in this folder, it needs one ending in "
            f"{', '.join(TEXT_SUFFIXES)}; name a file "
            "to take it whatever its ending"
        )
    return found


def files_below(
    folder: Path, suffixes: Collection[str], *, without: frozenset[str] = frozenset()
) -> tuple[Path, ...]:
    """All regular files below ``folder`` with one of the suffixes, sorted by relative path. Raises as above, if one
    cannot be read."""
    found: list[tuple[str, Path]] = []

    def refuse(error: OSError) -> None:
        raise DataError(f"--data {error.filename}: {error.strerror}; give folders that you may read") from error

    for parent, names, files in os.walk(folder, onerror=refuse):
        names[:] = [name for name in names if name not in without]
        for name in files:
            path = Path(parent, name)
            if path.suffix.lower() in suffixes and path.is_file():
                found.append((path.relative_to(folder).as_posix(), path))
    return tuple(path for _, path in sorted(found, key=lambda entry: os.fsencode(entry[0])))


def stdlib_sources() -> tuple[Path, ...]:
    """The Python files of this interpreter's standard library, without installed packages: text that every machine
    has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    without = frozenset({"site-packages", "dist-packages", "__pycache__"})
    found = find_text_files(folder, without=without)
    return tuple(path for path in found if path.suffix == ".py" and path.stat().st_size)


def tokenize(
    files: Sequence[Path],
    *,
    tokenizer: TextTokenizer,
    vocab_size: int,
    cache_directory: Path,
    progress: Progress | None = None,
) -> TokenizedText:
    """The ids of ``files`` one after another, from the cache or made now; memory does not depend on how much text it
    is.

    Files above 131,072 characters are tokenized in blocks, cut at the start of a line where there is one: no token
    spans a cut. Bytes that are no UTF-8 become U+FFFD. Raises :class:`DataError` if a file cannot be read, if all are
    empty, or if an id is outside the vocabulary; the cache is then as it was.
    """
    listing: list[tuple[str, int, int]] = []  # path (any bytes, as hexadecimal), bytes, time of change
    for path in files:
        with refuse_os_errors(path):
            stat = path.stat()
        listing.append((os.fsencode(path.absolute()).hex(), stat.st_size, stat.st_mtime_ns))
    dtype = id_dtype(tokenizer, vocab_size)
    # The listing by its hash: the note repeats the key, and a hundred thousand paths would be a long note.
    key = {
        "version": _CACHE_VERSION,
        "files": short_hash(listing),
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype,
    }
    target = cache_directory.absolute() / f"text-{short_hash(key)}.npy"
    found = find_part(target, key, dtype, vocab_size=vocab_size, masked=False, whole=False)
    if found is not None:
        part, known = found
        return TokenizedText(part=part, num_files=known["num_files"], num_repaired=known["num_repaired"], created=())
    total_bytes = sum(size for _, size, _ in listing)
    with PartWriter(target, dtype, masked=False) as writer:
        done_bytes = num_files = num_repaired = 0
        for path, (_, size, _) in zip(files, listing, strict=True):
            facts = _TextFacts()
            read = 0
            for block in text_blocks(path, facts):
                append_text(writer, block, tokenizer, f"--data {path}", vocab_size)
                read += len(block)  # characters: at most the bytes
                if progress is not None and read < size:
                    progress(done_bytes + read, total_bytes)
            num_files += end_text(writer, tokenizer, f"--data {path}", vocab_size) > 0
            num_repaired += facts.repaired
            done_bytes += size
            if progress is not None:
                progress(done_bytes, total_bytes)
        if writer.num_tokens == 0:
            raise DataError(f"--data {files[0]}: the file is empty" if len(files) == 1 else _all_empty(files))
        extra = {"num_files": num_files, "num_repaired": num_repaired}
        part = writer.finish(target.with_suffix(".json"), key, extra, whole=False)
    created = part_paths(target, masked=False)
    return TokenizedText(part=part, num_files=num_files, num_repaired=num_repaired, created=created)


def id_dtype(tokenizer: TextTokenizer, vocab_size: int) -> str:
    """The smallest type, as numpy names it, that ids of a vocabulary fit in."""
    if isinstance(tokenizer, ByteTokenizer) or vocab_size <= 2**8:
        return "|u1"
    return "<u4" if vocab_size > 2**16 else "<u2"


def append_text(writer: PartWriter, text: str, tokenizer: TextTokenizer, where: str, vocab_size: int) -> None:
    """Add the ids of a piece of text to a document. ``where`` names file and line in a refusal."""
    writer.append(check_ids(tokenizer.encode(text), where, writer.document_tokens, vocab_size))


def end_text(writer: PartWriter, tokenizer: TextTokenizer, where: str, vocab_size: int) -> int:
    """Add what separates documents, if the document has any id; returns how many it has."""
    separator = tokenizer.separator() if writer.document_tokens else None
    if separator is not None:
        end = np.asarray([separator], dtype=np.int64)
        writer.append(check_ids(end, where, writer.document_tokens, vocab_size))
    return writer.end_document()


def _all_empty(files: Sequence[Path]) -> str:
    return f"--data {files[0].parent}: all {len(files)} text files are empty; give some text"


@dataclass(slots=True)
class _TextFacts:
    #: Some bytes were no UTF-8 and were replaced.
    repaired: bool = False


def text_blocks(path: Path, facts: _TextFacts) -> Iterator[str]:
    """The text of a file in blocks of at most ``BLOCK_CHARACTERS``, line ends as they are. Sets ``facts.repaired`` at
    the end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    seen = kept = 0  # CRCs of the file's bytes and of the decoded text: they differ where something was replaced
    pending = ""
    with refuse_os_errors(path), path.open("rb", buffering=0) as file:
        while True:
            data = file.read(_READ_BYTES)
            text = decoder.decode(data, final=not data)
            seen = google_crc32c.extend(seen, data)
            kept = google_crc32c.extend(kept, text.encode())
            pending += text
            while len(pending) > BLOCK_CHARACTERS:
                cut = cut_of(pending)
                yield pending[:cut]
                pending = pending[cut:]
            if not data:
                break
            drop_cache(file.fileno(), 0, file.tell())
    if pending:
        yield pending
    facts.repaired = seen != kept


def cut_of(text: str) -> int:
    """Where to cut a block off: the last start of an unindented line, else of any line, else at the limit.

    Between a newline and a non-blank character the usual pre-tokenizers cut anyway, so the ids are those of the whole
    text.
    """
    newline = text.rfind("\n", 0, BLOCK_CHARACTERS)
    any_line = newline + 1
    while newline > 0 and text[newline + 1].isspace():
        newline = text.rfind("\n", 0, newline)
    return newline + 1 if newline > 0 else any_line or BLOCK_CHARACTERS
