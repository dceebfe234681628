"""The commit sequence: the only place that moves a store from one committed state to the next.

What a record says is `format.py`'s business, which chunks were written `store.py`'s. The order is the contract:

1. flush    fdatasync every chunk file written since the last commit: their bytes are on the drive;
2. checksums  write crc/GENERATION.bin, fsync it and its directory;
3. record   write COMMIT.json.tmp and fsync it;
4. publish  rename it over COMMIT.json: the commit takes place here;
5. settle   fsync the directory: the commit outlives a power cut; only now may slots that became free be written;
6. tidy     remove the CRC file that the record before named.

A crash before 4 leaves the old commit, after 5 the new one, between them one of the two; each is whole, as nothing that
either names is touched before 5 is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from hoist.tiers.allocation import sync_directory, write_durably
from hoist.tiers.format import COMMIT_NAME, COMMIT_TEMPORARY_NAME, CRC_DIRECTORY
from hoist.tiers.io.base import IoEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitStatistics:
    """What one commit took."""

    generation: int
    step: int
    num_files: int
    """Chunk files made durable."""
    record_bytes: int
    """COMMIT.json and the CRC file."""
    flush_seconds: float
    """Step 1 alone."""
    seconds: float
    """The whole sequence."""


class CommitSequence:
    """Runs the six steps for one store, each a method of its own so that a test can stop there.

    After an error from :meth:`run` the store on the drive is at the old or the new commit; which one shows on opening
    it. The caller must not write chunks any more.
    """

    def __init__(self, directory: Path, engine: IoEngine) -> None:
        self._directory = directory
        self._engine = engine

    def run(
        self,
        *,
        paths: Sequence[Path],
        checksum_file: str,
        checksums: bytes,
        record: bytes,
        superseded: str | None,
    ) -> float:
        """Carry out the steps in order. Returns the seconds that step 1 took."""
        started = time.perf_counter()
        self.flush(paths)
        flush_seconds = time.perf_counter() - started
        self.write_checksums(checksum_file, checksums)
        self.sync_checksum_directory()
        self.write_record(record)
        self.publish()
        self.settle()
        if superseded is not None:
            self.tidy(superseded)
        return flush_seconds

    def flush(self, paths: Sequence[Path]) -> None:
        """Step 1. Waits for every flush, then raises the first failure (TransferError)."""
        futures: list[Future[None]] = [self._engine.flush(path) for path in paths]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def write_checksums(self, name: str, data: bytes) -> None:
        """Step 2, first half."""
        write_durably(self._directory / name, data)

    def sync_checksum_directory(self) -> None:
        """Step 2, second half."""
        sync_directory(self._directory / CRC_DIRECTORY)

    def write_record(self, data: bytes) -> None:
        """Step 3."""
        write_durably(self._directory / COMMIT_TEMPORARY_NAME, data)

    def publish(self) -> None:
        """Step 4."""
        (self._directory / COMMIT_TEMPORARY_NAME).replace(self._directory / COMMIT_NAME)

    def settle(self) -> None:
        """Step 5."""
        sync_directory(self._directory)

    def tidy(self, superseded: str) -> None:
        """Step 6. What it leaves after a crash, the next opening removes."""
        (self._directory / superseded).unlink(missing_ok=True)
