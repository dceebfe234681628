"""Names for ops, and ranges with these names for the profilers of others: PyTorch's, and NVIDIA's through NVTX.

What hoist itself records of ops is `trace.py`'s; it uses the same names. Ops are carried out in `runtime.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import profiler

from hoist.scheduler.executor import Done, Handler, Mark
from hoist.scheduler.ops import Kind, Op
from hoist.tiers.layout import Piece

#: Kinds whose ``piece`` is the last of the chunk that they are about.
_WHOLE_CHUNK = frozenset({Kind.OPEN_CHUNK, Kind.WRITE_KEPT})


class OpNames:
    """What ops are called: their kind, then stage, micro-batch or chunk and piece, as in ``backward layer.3 mb 2``."""

    def __init__(self, stages: Sequence[str], pieces: Sequence[Sequence[Piece]]) -> None:
        """``stages``: their names; ``pieces``: per stage, the pieces that ops count."""
        self._stages = stages
        self._pieces = pieces

    def __call__(self, op: Op) -> str:
        """The op's name. Of a piece it is its number within the stage."""
        words = [op.kind.name.lower()]
        if op.stage >= 0:
            words.append(self._stages[op.stage])
        owner = op.stage if op.owner < 0 else op.owner
        if owner != op.stage:
            words.append(f"from {self._stages[owner]}")
        if op.micro_batch >= 0:
            words.append(f"mb {op.micro_batch}")
        if op.piece >= 0:
            words.append(f"chunk {self._pieces[owner][op.piece].chunk}")
            if op.kind not in _WHOLE_CHUNK:
                words.append(f"piece {op.piece}")
        if op.redo:
            words.append("again")
        return " ".join(words)


class Annotated:
    """A handler that wraps another's ops in ranges while a profiler looks, and else only asks whether one does.

    The range of an op that is put in a stream is that of putting it there; what the device does a profiler sees itself.

    PyTorch's profiler sees the ops of its own thread, and with ``profile_all_threads`` in its experimental
    configuration those of every lane. It has no ranges from one thread to another: of an I/O op it sees the request.
    NVTX has: its range of an I/O op ends with the op. NVTX ranges are made where CUDA is.
    """

    def __init__(self, handler: Handler, names: OpNames) -> None:
        self._handler = handler
        self._names = names
        self._marks_nvtx = torch.cuda.is_available()

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        """Carry out or issue an op in a range of its name."""
        if not (self._marks_nvtx or profiler._is_profiler_enabled):
            return self._handler.run(op, step, after)
        name = self._names(op)
        if self._marks_nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            with profiler.record_function(name):
                return self._handler.run(op, step, after)
        finally:
            if self._marks_nvtx:
                torch.cuda.nvtx.range_pop()

    def start(self, op: Op, step: int, done: Done) -> None:
        """Begin an I/O op in a range of its name."""
        if not (self._marks_nvtx or profiler._is_profiler_enabled):
            self._handler.start(op, step, done)
            return
        name = self._names(op)
        ended = self._ending_range(name, done) if self._marks_nvtx else done
        with profiler.record_function(name):
            self._handler.start(op, step, ended)

    @staticmethod
    def _ending_range(name: str, done: Done) -> Done:
        """Open an NVTX range that may end on another thread; the returned ``done`` ends it."""
        number = torch.cuda.nvtx.range_start(name)

        def ended(error: BaseException | None) -> None:
            torch.cuda.nvtx.range_end(number)
            done(error)

        return ended
