"""Writes a safetensors checkpoint of any size in bounded memory: plans the shards, then takes the tensors piece by
piece.

Everything is written by aligned direct I/O under a temporary directory beside the target, which gets its name when all
is durable: the target is there whole or not at all. Reading is in `safetensors_reader.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from hoist.tiers.errors import HoistError
from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine
from hoist.tiers.layout import round_up
from hoist.tools.checkpoint import check_staging
from hoist.tools.errors import ExportError, ExportRefusedError
from hoist.tools.safetensors_reader import DTYPES, INDEX_FILE, SINGLE_FILE

#: Shards are at most this large, unless one tensor alone is larger (what save_pretrained does by default).
MAX_SHARD_BYTES = 5 * 10**9
#: Left free on the target's disk beyond the shards: config, tokenizer, directories.
_SPARE_BYTES = 64 * 2**20
_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """A tensor with its place in the checkpoint."""

    name: str
    """Name in the checkpoint."""
    dtype: torch.dtype
    """Type of the elements in the file."""
    shape: tuple[int, ...]
    """Shape; ``()`` is a 0-d tensor."""
    shard: int
    """Number of the shard, from 0."""
    begin: int
    """First byte, counted in the shard's data."""

    @property
    def num_elements(self) -> int:
        """Number of elements; 0 for an empty tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_elements * self.dtype.itemsize

    @property
    def end(self) -> int:
        """One past the last byte, counted in the shard's data."""
        return self.begin + self.num_bytes


def plan_shards(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], max_shard_bytes: int
) -> tuple[PlannedTensor, ...]:
    """Give each tensor its place, in the order given except that larger element types come first.

    The format allows no gaps, and readers want every tensor aligned to its element type: by descending type they all
    are. Raises ValueError on duplicate names, a type that the format lacks, or nothing to write.
    """
    names = [name for name, _, _ in tensors]
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"tensors: need at least one, with different names, got {len(names)} and {len(set(names))} names"
        )
    unknown = [f"{name} ({dtype})" for name, dtype, _ in tensors if dtype not in _TYPE_NAMES]
    if unknown:
        raise ValueError(f"safetensors has no type for {', '.join(unknown)}")
    planned: list[PlannedTensor] = []
    shard = position = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        num_bytes = math.prod(shape) * dtype.itemsize
        if position and position + num_bytes > max_shard_bytes:
            shard, position = shard + 1, 0
        planned.append(PlannedTensor(name=name, dtype=dtype, shape=tuple(shape), shard=shard, begin=position))
        position += num_bytes
    return tuple(planned)


class StreamingWriter:
    """Writes the tensors of one checkpoint, in the order of :attr:`plan`. A context manager: leaving it finishes or
    aborts.

    ``staging`` is 1-D uint8, its address and length multiples of 4 KiB, at least 16 KiB; it belongs to the writer until
    it ends. One half is filled while the other is on its way to the file. One thread writes.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        *,
        engine: IoEngine,
        staging: torch.Tensor,
        single_file: str = SINGLE_FILE,
    ) -> None:
        """Plan, check the target, and make the temporary directory. One shard alone is called ``single_file``.

        Raises :class:`ExportRefusedError`, with nothing left behind, if the target exists and is not an empty
        directory, or its parent cannot be written or has too little room.
        """
        check_staging(staging)
        #: The tensors in the order in which they must be written.
        self.plan = plan_shards(tensors, max_shard_bytes)
        self._target = directory.absolute()
        self._engine = engine
        self._single_file = single_file
        half = staging.numel() // 2 // IO_ALIGN_BYTES * IO_ALIGN_BYTES
        #: The two halves of the staging buffer, and the write that each is the source of, if any.
        self._buffers = (staging[:half], staging[half : 2 * half])
        self._writes: list[Future[None] | None] = [None, None]
        #: Half that is being filled, and bytes in it.
        self._current = 0
        self._filled = 0
        self._num_shards = self.plan[-1].shard + 1
        #: Number of the tensor that is being written, and elements of it that are.
        self._tensor = 0
        self._element = 0
        #: Shard that is open (-1: none yet), and where the buffer being filled goes.
        self._shard = -1
        self._offset = 0
        self._complete = False
        self._made = [path for path in reversed(self._target.parents) if not path.exists()]
        #: Where everything is written until the end; config and tokenizer files may be saved here too.
        self.temporary_directory = self._target.parent / f".{self._target.name}.{secrets.token_hex(4)}.tmp"
        #: Open directory with a lock on it, so that others see that its writer lives; -1 if there is none.
        self._lock = -1
        self._prepare()

    def _prepare(self) -> None:
        target = self._target
        needed = sum(tensor.num_bytes for tensor in self.plan) + _SPARE_BYTES
        try:
            if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
                raise ExportRefusedError(
                    f"export to {target}: it exists, allowed is a new or an empty directory; name another or remove it"
                )
            existing = next(path for path in target.parents if path.exists())
            free = shutil.disk_usage(existing).free
            if free < needed:
                raise ExportRefusedError(
                    f"export to {target}: needs {needed} bytes, {free} are free; make room or name a directory on "
                    "another disk"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(target)
            self.temporary_directory.mkdir()
            self._lock = _try_lock(self.temporary_directory)
        except ExportRefusedError:
            raise
        except OSError as error:
            self._remove()
            raise ExportRefusedError(
                f"export to {target}: {error.strerror or error} ({error.filename}); name a directory that you may write"
            ) from error

    def write(self, name: str, piece: torch.Tensor) -> None:
        """Append a 1-D contiguous piece of the tensor ``name``, which must be the next that is not complete.

        A floating-point piece is converted to the planned type. Raises ValueError for a piece out of order or too long,
        TransferError if the disk fails (abort then). The piece may be changed as soon as the call returns.
        """
        self._skip_complete()
        if self._tensor == len(self.plan) or self.plan[self._tensor].name != name:
            expected = "no more tensors" if self._tensor == len(self.plan) else repr(self.plan[self._tensor].name)
            raise ValueError(f"piece of {name!r}: expected {expected}, see StreamingWriter.plan")
        tensor = self.plan[self._tensor]
        if piece.dim() != 1 or self._element + piece.numel() > tensor.num_elements:
            raise ValueError(
                f"piece of {name!r}: shape {tuple(piece.shape)} after {self._element} of {tensor.num_elements} elements"
            )
        if piece.dtype != tensor.dtype and not (piece.dtype.is_floating_point and tensor.dtype.is_floating_point):
            raise ValueError(f"piece of {name!r}: is {piece.dtype}, planned as {tensor.dtype}")
        with self._failures():
            while self._shard < tensor.shard:
                self._open_shard(self._shard + 1)
        self._append(piece, tensor.dtype)
        self._element += piece.numel()

    def complete(self) -> None:
        """Write the last shard's rest and the index, all still under the temporary name; the staging is free then.

        Raises ValueError if tensors are missing. Idempotent.
        """
        if self._complete:
            return
        self._skip_complete()
        if self._tensor < len(self.plan):
            raise ValueError(
                f"{len(self.plan) - self._tensor} tensors are not written, {self.plan[self._tensor].name!r} is next"
            )
        with self._failures():
            while self._shard < self._num_shards - 1:
                self._open_shard(self._shard + 1)  # shards of empty tensors only
            self._close_shard()
            if self._num_shards > 1:
                self._write_index()
        self._complete = True

    def finish(self) -> None:
        """:meth:`complete`, then make everything durable and give the directory its name.

        On any failure the temporary directory is still there until :meth:`abort`.
        """
        self.complete()
        with self._failures():
            for path in sorted(self.temporary_directory.rglob("*"), reverse=True):
                sync_path(path)
            sync_path(self.temporary_directory)
            self.temporary_directory.rename(self._target)  # replaces an empty directory, fails on anything else
            for path in (self._target.parent, *(made.parent for made in self._made)):
                sync_path(path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Give what the system refuses in the middle of the work a line of its own."""
        try:
            yield
        except HoistError:
            raise
        except OSError as error:
            raise ExportError(
                f"export to {self._target}: {error.strerror or error} ({error.filename}); nothing is left of it, "
                "export again"
            ) from error

    def abort(self) -> None:
        """Wait for what is being written and remove every trace. Idempotent; does nothing to a finished export."""
        for index, write in enumerate(self._writes):
            if write is not None:
                write.exception()
                self._writes[index] = None
        if self._shard >= 0:
            self._engine.forget(self._shard_path(self._shard))
        self._remove()

    def _remove(self) -> None:
        self._unlock()
        shutil.rmtree(self.temporary_directory, ignore_errors=True)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty, the export is done; or it was never made
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise

    def _skip_complete(self) -> None:
        """Go on to the next tensor once all elements of this one are written (at once, for empty tensors)."""
        while self._tensor < len(self.plan) and self._element == self.plan[self._tensor].num_elements:
            self._tensor += 1
            self._element = 0

    def _shard_path(self, shard: int) -> Path:
        if self._num_shards == 1:
            return self.temporary_directory / self._single_file
        return self.temporary_directory / f"model-{shard + 1:05d}-of-{self._num_shards:05d}.safetensors"

    def _open_shard(self, shard: int) -> None:
        """Begin a shard: a file of its final length (rounded up to a page), and its header in the buffer."""
        if self._shard >= 0:
            self._close_shard()
        self._shard = shard
        self._offset = self._filled = 0
        header = _header([tensor for tensor in self.plan if tensor.shard == shard])
        path = self._shard_path(shard)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            length = round_up(len(header) + self._data_bytes(shard), IO_ALIGN_BYTES)
            with contextlib.suppress(OSError):  # not every file system allocates ahead; then writes find out
                os.posix_fallocate(descriptor, 0, length)
            os.ftruncate(descriptor, length)
        finally:
            os.close(descriptor)
        self._append(torch.frombuffer(header, dtype=torch.uint8), torch.uint8)

    def _data_bytes(self, shard: int) -> int:
        return max(tensor.end for tensor in self.plan if tensor.shard == shard)

    def _append(self, piece: torch.Tensor, dtype: torch.dtype) -> None:
        """Put elements into the buffers, sending each buffer off when it is full. No element spans two: all is
        aligned."""
        done = 0
        while done < piece.numel():
            buffer = self._buffers[self._current]
            count = min(piece.numel() - done, (buffer.numel() - self._filled) // dtype.itemsize)
            stop = self._filled + count * dtype.itemsize
            buffer[self._filled : stop].view(dtype).copy_(piece[done : done + count])
            self._filled = stop
            done += count
            if self._filled == buffer.numel():
                self._send(buffer.numel())

    def _send(self, num_bytes: int) -> None:
        """Start writing the first bytes of the current half, and wait until the other can be filled."""
        self._writes[self._current] = self._engine.write(
            self._shard_path(self._shard), self._offset, self._buffers[self._current][:num_bytes]
        )
        self._offset += num_bytes
        self._filled = 0
        self._current = 1 - self._current
        self._wait(self._current)

    def _wait(self, half: int) -> None:
        write, self._writes[half] = self._writes[half], None
        if write is not None:
            write.result()

    def _close_shard(self) -> None:
        """Write what is left, zeros up to a page, and cut the file to its exact length, durably."""
        path = self._shard_path(self._shard)
        length = self._offset + self._filled
        if self._filled:
            padded = round_up(self._filled, IO_ALIGN_BYTES)
            self._buffers[self._current][self._filled : padded].zero_()
            self._send(padded)
        self._wait(0)
        self._wait(1)
        self._engine.flush(path).result()
        self._engine.forget(path)
        os.truncate(path, length)

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in self.plan)},
            "weight_map": {tensor.name: self._shard_path(tensor.shard).name for tensor in self.plan},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.temporary_directory / INDEX_FILE).write_text(text, encoding="utf-8")


def _header(tensors: Sequence[PlannedTensor]) -> bytearray:
    """Length and JSON, filled up with spaces so that the data begins on a page: readers can then read it directly."""
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    length = round_up(8 + len(text), IO_ALIGN_BYTES) - 8
    return bytearray(length.to_bytes(8, "little") + text.ljust(length))


def _try_lock(directory: Path) -> int:
    """A directory opened and locked; -1 where another holds it, or the file system has no locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _remove_abandoned(target: Path) -> None:
    """Remove what an export to the same target left that was killed: no living writer holds it."""
    temporary = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp")
    for path in target.parent.iterdir():
        if not temporary.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):  # another has removed it
            lock = _try_lock(path)
            if lock >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, durable (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
