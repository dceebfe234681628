"""Commit sequences with one mistake each: what a simulation of power cuts must find. Never used but for that.

The right order, and why it is so, is in `hoist/tiers/commit.py`.
"""

from __future__ import annotations

from typing import Any

from hoist.tiers.allocation import write_durably
from hoist.tiers.commit import CommitSequence
from hoist.tiers.format import COMMIT_NAME, COMMIT_TEMPORARY_NAME


class NoFlush(CommitSequence):
    """Chunks are not made durable."""

    def flush(self, paths: Any) -> None:
        pass


class UnsyncedRecord(CommitSequence):
    """The rename comes before the record's bytes are durable."""

    def write_record(self, data: bytes) -> None:
        (self._directory / COMMIT_TEMPORARY_NAME).write_bytes(data)


class UnsyncedChecksums(CommitSequence):
    def write_checksums(self, name: str, data: bytes) -> None:
        (self._directory / name).write_bytes(data)


class NamelessChecksums(CommitSequence):
    """The name of the CRC file may not outlive the power cut."""

    def sync_checksum_directory(self) -> None:
        pass


class LateSettling(CommitSequence):
    """Freed slots are written before the rename is durable: the directory is synced only by the next commit."""

    def settle(self) -> None:
        pass

    def flush(self, paths: Any) -> None:
        super().settle()
        super().flush(paths)


class EarlyTidying(CommitSequence):
    """The old CRC file goes before the rename is durable."""

    def settle(self) -> None:
        pass

    def tidy(self, superseded: str) -> None:
        super().tidy(superseded)
        self.sync_checksum_directory()
        super().settle()


class InPlace(CommitSequence):
    """COMMIT.json is overwritten where it is."""

    def publish(self) -> None:
        data = (self._directory / COMMIT_TEMPORARY_NAME).read_bytes()
        write_durably(self._directory / COMMIT_NAME, data)


class FlushAfterwards(CommitSequence):
    """The record is published before the chunks that it names are durable."""

    def run(self, **arguments: Any) -> float:
        paths = arguments.pop("paths")
        super().run(paths=[], **arguments)
        self.flush(paths)
        return 0.0


#: All of them.
WRONG: tuple[type[CommitSequence], ...] = (
    NoFlush,
    UnsyncedRecord,
    UnsyncedChecksums,
    NamelessChecksums,
    LateSettling,
    EarlyTidying,
    InPlace,
    FlushAfterwards,
)
