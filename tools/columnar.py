"""Records out of Parquet and Arrow files, some rows at a time, with pyarrow, which the extra `data` brings.

Only the columns that records can have are read. What is in a record is `records.py`'s business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hoist.tools.errors import DataError
from hoist.tools.invoked import install_command
from hoist.tools.jsonl import Record
from hoist.tools.records import FIELDS
from hoist.tools.tokens import refuse_os_errors

#: Files that are tables.
TABLE_SUFFIXES = (".parquet", ".arrow")
#: Rows that are taken out of a file at a time.
_ROWS_AT_ONCE = 64
#: Bytes of a column that are read at a time; whole columns of a row group would be a large part of the file.
_BUFFER_BYTES = 2**20


def read_table(path: Path) -> Iterator[Record]:
    """The records of a table, in order; their numbers are those of rows, from 1.

    Raises :class:`DataError` without pyarrow, for a file that it cannot read, and for one without a known column.
    """
    try:
        import pyarrow  # large, and needed for such files alone
    except ImportError:
        raise DataError(
            f"--data {path}: {path.suffix} files are read with pyarrow, which is not here; install it "
            f"({install_command('pyarrow')}), or write JSON lines"
        ) from None
    size = 0
    with refuse_os_errors(path):
        size = path.stat().st_size
    number = 0
    try:
        for fields, share in _parquet(path) if path.suffix.lower() == ".parquet" else _arrow(path, size):
            number += 1
            yield Record(number, fields, int(share * size))
    except UnicodeDecodeError as error:
        raise DataError(
            f"--data {path}: has text after row {number} that is no UTF-8 (byte {error.object[error.start]:#04x}); "
            "write it again"
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, DataError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        after = f" after row {number}" if number else ""
        raise DataError(f"--data {path}: cannot be read{after} ({reason}); write it again") from error
    finally:
        with contextlib.suppress(NotImplementedError):  # not every allocator can
            pyarrow.default_memory_pool().release_unused()


def _parquet(path: Path) -> Iterator[tuple[dict[str, Any], float]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        columns = _columns(path, file.schema_arrow.names)
        done = 0
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns, use_threads=False):
            rows: list[dict[str, Any]] = batch.to_pylist()
            for fields in rows:
                done += 1
                yield fields, done / file.metadata.num_rows


def _arrow(path: Path, size: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Arrow's file format, or its stream format, which `datasets` writes."""
    import pyarrow

    with pyarrow.OSFile(str(path)) as file:
        try:
            reader = pyarrow.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            file.seek(0)
            reader = pyarrow.ipc.open_stream(file)
            batches = iter(reader)
        columns = _columns(path, reader.schema.names)
        for batch in batches:
            chosen = batch.select(columns)
            for first in range(0, chosen.num_rows, _ROWS_AT_ONCE):
                rows: list[dict[str, Any]] = chosen.slice(first, _ROWS_AT_ONCE).to_pylist()
                for fields in rows:
                    yield fields, min(1.0, file.tell() / max(1, size))


def _columns(path: Path, names: list[str]) -> list[str]:
    """The columns to read."""
    found = [name for name in names if name in FIELDS]
    if not found:
        raise DataError(
            f"--data {path}: has the columns {', '.join(names) or 'none'}; a record needs some of {', '.join(FIELDS)}"
        )
    return found
