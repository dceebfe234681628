"""Whether sides that run in one process have trained the same: their losses, step by step.

Sides in processes of their own, which may be other programs, are compared by `sides/judging.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hoist.tools.errors import BenchError

#: Largest relative difference of a step's loss between hoist and PyTorch where sums may be made in different parts:
#: with several threads, or with a loss in slices. Seen: none with two threads and one slice (hidden 64 to 1024), the
#: last bit of float32 (9.2e-8) with slices; this is some eleven of it. See :func:`check_losses`.
LOSS_BOUND = 1e-6


def check_losses(
    losses: Mapping[str, Sequence[float]], reference: Mapping[str, Sequence[float]], *, bound: float
) -> float:
    """Refuse sides that did not train the same: raise BenchError naming the first step, both sides and both losses.

    ``losses`` are those of hoist's sides, which must be equal bit for bit, whatever the plan, the delay and the budget.
    Those of each ``reference`` must be within ``bound``, a share of the loss; 0: equal bit for bit. NaN equals nothing.
    Returns the largest difference, likewise a share.
    """
    largest = 0.0
    (first, expected), *others = losses.items()
    pairs = [(name, theirs, 0.0) for name, theirs in others]
    pairs += [(name, theirs, bound) for name, theirs in reference.items()]
    for name, theirs, allowed in pairs:
        if len(theirs) != len(expected):
            raise BenchError(f"{name} took {len(theirs)} steps and {first} {len(expected)}: not the same work")
        for number, (loss, other) in enumerate(zip(expected, theirs, strict=True), start=1):
            if not abs(loss - other) <= allowed * abs(loss):
                bits = f"differ by more than {allowed:g} of it" if allowed else "must be the same bits"
                raise BenchError(
                    f"the sides do not train the same, so nothing is compared: the loss of step {number} is {loss!r} "
                    f"({first}) and {other!r} ({name}), which {bits}; this is a fault of hoist's: please tell its "
                    "authors"
                )
            if loss != other:
                largest = max(largest, abs(loss - other) / abs(loss))
    return largest
