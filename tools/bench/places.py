"""What a benchmark looks at before minutes are spent: the directory, its room, the machine's memory; and its folder.

What a drive does is measured elsewhere; a machine in words is `machine.py`'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hoist.scheduler.errors import ConfigError
from hoist.tools.doctor import file_system_of, look_at_memory
from hoist.tools.sizes import show_bytes

#: File systems whose files are in memory: no drive is ever read.
_IN_MEMORY = ("tmpfs", "ramfs")
#: How the folders of benchmarks begin.
_PREFIX = "hoist-bench-files-"
#: A folder that nobody holds is left over if it is so old; a younger one may be about to be held.
_LEFT_SECONDS = 60.0


@contextmanager
def temporary_folder(directory: Path) -> Iterator[Path]:
    """A folder in ``directory``, held as long as this process lives, and removed afterwards.

    Those of benchmarks that were killed are removed first: they may be as large as the drive.
    """
    _remove_left(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=_PREFIX) as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(folder)
        finally:
            os.close(descriptor)


def _remove_left(directory: Path) -> None:
    for folder in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone, another user's, or held
            if time.time() - folder.stat().st_mtime < _LEFT_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def refuse_place(directory: Path, *, needed_bytes: int = 0, on_drive: bool = False) -> None:
    """Raise ConfigError, with the next step, if nothing can be made in ``directory``, or there is not so much room.

    ``on_drive``: also if its files are in memory, where nothing that is compared would be true.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is not a directory; make it first, on the drive that is to be measured")
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written: {error.strerror}; name a directory that can") from error
    kind = file_system_of(directory, Path("/proc/self/mountinfo"))
    if on_drive and kind in _IN_MEMORY:
        raise ConfigError(f"{directory}: is in memory ({kind}), so no drive would be read; name one on a drive")
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{directory}: has {show_bytes(free_bytes)} free, and about {show_bytes(needed_bytes)} are needed; make "
            "room, or measure something smaller"
        )


def refuse_memory(needed_bytes: int, what: str, instead: str) -> None:
    """Raise ConfigError, naming ``what`` needs so much memory and what to do ``instead``, if so much is not free."""
    free_bytes = look_at_memory().available_bytes
    if needed_bytes > free_bytes:
        raise ConfigError(f"{what}, about {show_bytes(needed_bytes)}, and {show_bytes(free_bytes)} are free: {instead}")
