"""Directories for benchmarks: what is refused at once, and folders that killed ones have left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hoist.scheduler.errors import ConfigError
from hoist.tools.bench.places import refuse_memory, refuse_place, temporary_folder
from hoist.tools.doctor import look_at_memory


def test_a_place_without_room_or_without_a_drive_is_refused(tmp_path: Path, in_memory: Path) -> None:
    refuse_place(tmp_path, needed_bytes=4096)
    with pytest.raises(ConfigError, match=r"nowhere: is not a directory; make it first"):
        refuse_place(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"/proc: cannot be written: .*; name a directory that can"):
        refuse_place(Path("/proc"))
    with pytest.raises(ConfigError, match=r"has .* free, and about 1048576.* TiB are needed; make room"):
        refuse_place(tmp_path, needed_bytes=2**60)
    refuse_place(in_memory)
    with pytest.raises(ConfigError, match=r"is in memory \(tmpfs\), so no drive would be read; name one on a drive"):
        refuse_place(in_memory, on_drive=True)


def test_memory_that_is_not_there_is_refused() -> None:
    refuse_memory(look_at_memory().available_bytes // 2, "it is large", "less")
    with pytest.raises(ConfigError, match=r"^it is large, about .* TiB, and .* are free: give less$"):
        refuse_memory(2**60, "it is large", "give less")


def test_folders_of_killed_benchmarks_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as held:
        left = tmp_path / held.name[:-3].ljust(len(held.name), "x")
        young = tmp_path / held.name[:-3].ljust(len(held.name), "y")
        for folder in (left, young):
            folder.mkdir()
            (folder / "states").write_bytes(b"large")
        for folder in (held, left):
            os.utime(folder, (0, 0))
        with temporary_folder(tmp_path) as other:
            assert sorted(tmp_path.iterdir()) == sorted([held, other, young])
    assert list(tmp_path.iterdir()) == [young]
