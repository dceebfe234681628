"""Which share of the updates to delay, from what the lanes did in steps without a delay. Pure arithmetic on spans.

The rule: a step is a forward and a backward, and each takes as long as its busiest lane. What updates cost the drive
and the optim lane moves from the backward to the forward with the share that is delayed; gradients that then wait in
scratch cost the drive a write in the backward and a read in the forward. The share with the shortest sum is taken; a
smaller one if it is as good within 2%, as waiting gradients take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hoist.scheduler.ops import Kind, Lane, Op
from hoist.scheduler.spans import Span, busy_seconds

#: Shares that are weighed against each other.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: A larger share must be better by this part of the step.
WORTHWHILE = 0.02

_STATES = (Kind.READ_STATES, Kind.WRITE_STATES)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds that the lanes work for the parts of one step without a delay."""

    forward_seconds: float
    """Computation of the forward."""
    backward_seconds: float
    """Computation of the backward, recomputation and the last stage's visit included."""
    forward_io_seconds: float
    """I/O for the forward: weights, activations."""
    backward_io_seconds: float
    """I/O for the backward that is not the optimizer's."""
    states_io_seconds: float
    """I/O of all updates."""
    updates_seconds: float
    """The optim lane's work for all updates."""
    bytes_per_second: float
    """Bandwidth of the drive in these steps, reads and writes together."""

    def estimate(self, share: float, stash_bytes: int) -> float:
        """Seconds of a step of which ``share`` of the updates is delayed; ``stash_bytes``: gradients in scratch."""
        stash_seconds = share * stash_bytes / self.bytes_per_second
        forward = max(
            self.forward_seconds,
            self.forward_io_seconds + share * self.states_io_seconds + stash_seconds,
            share * self.updates_seconds,
        )
        backward = max(
            self.backward_seconds,
            self.backward_io_seconds + (1.0 - share) * self.states_io_seconds + stash_seconds,
            (1.0 - share) * self.updates_seconds,
        )
        return forward + backward


def measure(ops: Sequence[Op], spans: Sequence[Span], bytes_of: Callable[[Op], int]) -> StepTimes:
    """Times of one step: its plan's ``ops``, their spans, and what each I/O op moves (in bytes).

    I/O counts as the time during which the drive had something to do, shared out by bytes, since requests that are in
    flight together wait for one another. Spans of other plans' ops are passed over, and of updates that are there to be
    made again.
    """
    turn = next(index for index, op in enumerate(ops) if op.kind is Kind.LOSS)
    in_forward = {id(op) for op in ops[:turn] if not op.redo}
    of_step = in_forward | {id(op) for op in ops[turn:]}
    io = [span for span in spans if span.op.lane is Lane.IO and id(span.op) in of_step]
    moved = {id(span.op): bytes_of(span.op) for span in io}
    rate = max(1, sum(moved.values())) / max(1e-9, busy_seconds(io))
    states = {id(span.op) for span in io if span.op.kind in _STATES}

    def io_seconds(wanted: set[int]) -> float:
        return sum(num_bytes for op, num_bytes in moved.items() if op in wanted) / rate

    def seconds(*kinds: Kind) -> float:
        return busy_seconds([span for span in spans if span.op.kind in kinds and id(span.op) in of_step])

    return StepTimes(
        forward_seconds=seconds(Kind.FORWARD),
        backward_seconds=seconds(Kind.LOSS, Kind.BACKWARD),
        forward_io_seconds=io_seconds(in_forward - states),
        backward_io_seconds=io_seconds(of_step - in_forward - states),
        states_io_seconds=io_seconds(states),
        updates_seconds=seconds(Kind.DEVICE_UPDATE, Kind.UPDATE, Kind.NORM),
        bytes_per_second=rate,
    )


def choose(times: StepTimes, stash_bytes: Mapping[float, int]) -> float:
    """The share to delay. ``stash_bytes``: for each share that the budget allows, gradients that wait in scratch.

    Raises ValueError if no share is allowed.
    """
    best: float | None = None
    for share in sorted(stash_bytes):
        if best is None or times.estimate(share, stash_bytes[share]) < (1.0 - WORTHWHILE) * times.estimate(
            best, stash_bytes[best]
        ):
            best = share
    if best is None:
        raise ValueError("stash_bytes: no share is allowed")
    return best
