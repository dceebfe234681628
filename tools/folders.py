"""What of a folder is data: its text, or its files of records. Only names are looked at.

Single files are `data.py`'s business; what counts as text is `text.py`'s.
"""

from __future__ import annotations

from pathlib import Path

from hoist.tools.examples import RECORD_SUFFIXES
from hoist.tools.text import TEXT_SUFFIXES, files_below, find_text_files

#: Of these a folder of source code has many that are no records; name such a file to have it taken.
_AMBIGUOUS = frozenset({".json"})
#: How the names of text files begin that describe a folder of records.
_ABOUT = ("readme", "license", "licence", "notice", "changelog")


def find_data_files(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...], str | None]:
    """Text files and files of records below ``folder``, sorted by relative path, and what people should know of it.

    Where it has text besides a README and a licence, it is a folder of text and its records are left out; else the
    records are taken alone. Links to folders are not followed. Raises :class:`DataError` if there is nothing.
    """
    records = files_below(folder, set(RECORD_SUFFIXES) - _AMBIGUOUS)
    texts = files_below(folder, TEXT_SUFFIXES) if records else find_text_files(folder)
    if records and all(path.name.lower().startswith(_ABOUT) for path in texts):
        return (), records, None
    if not records:
        return texts, (), None
    return texts, (), (
        f"--data {folder}: taken as text; its {len(records)} files of records are left out, name them to train on them"
    )
