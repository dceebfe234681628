"""A training step as data: the plans there are, layer-major and micro-batch-major steps, evaluations, flushes.

Pure functions of sizes: no torch, no files, no threads. `plan_builder.py` writes a plan's ops; `link.py` finds their
dependencies; `executor.py` runs any plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from hoist.scheduler.plan_builder import PlanBuilder
from hoist.scheduler.plan_records import Buffers, Plan, StageShape, first_trained
from hoist.scheduler.visits import Visit, forward_visits, horizontal_visits, vertical_visits


def vertical(
    stages: Sequence[StageShape], num_micro_batches: int, buffers: Buffers, *, cold: bool, pending: bool = False
) -> Plan:
    """The plan of a layer-major step. Raises ValueError if the buffers cannot serve it.

    ``cold`` and ``pending`` say what the step before left, see :class:`Plan`.
    """
    visits = vertical_visits(len(stages), num_micro_batches, first_trained(stages))
    return _build("vertical", stages, buffers, visits, cold, pending)


def horizontal(
    stages: Sequence[StageShape], num_micro_batches: int, buffers: Buffers, *, cold: bool, pending: bool = False
) -> Plan:
    """The plan of a micro-batch-major step: the same results, more traffic. Arguments, errors as :func:`vertical`."""
    visits = horizontal_visits(len(stages), num_micro_batches, first_trained(stages))
    return _build("horizontal", stages, buffers, visits, cold, pending)


def evaluation(
    stages: Sequence[StageShape], num_micro_batches: int, buffers: Buffers, *, cold: bool, order: str = "vertical"
) -> Plan:
    """The plan of a forward alone, between steps: nothing is written but activations that do not fit.

    The delayed updates of the step before must have been done. Weight buffers are left as a step leaves them, so that
    the next step's plan is the one that would have followed without this. ``order``: "vertical" reads each stage once;
    "horizontal" takes one micro-batch after another, as it keeps only one's activations.
    """
    visits = forward_visits(len(stages), num_micro_batches)
    if order == "horizontal":
        visits = tuple(
            Visit(visit.stage, visit.phase, (micro_batch,))
            for micro_batch in range(num_micro_batches)
            for visit in visits
        )
    held = _held_at_end(stages, buffers)
    return PlanBuilder("evaluation", stages, buffers, visits, held=None if cold else held).build_evaluation(held)


def flush(stages: Sequence[StageShape], buffers: Buffers, *, pending: bool = True) -> Plan:
    """What a commit between steps needs: the delayed updates of the last step, then what is kept in memory written.

    Weight buffers are left as the last step left them, with the new weights where they are kept. Without ``pending``
    the delayed updates have been done.
    """
    held = _held_at_end(stages, buffers)
    visits = vertical_visits(len(stages), 1, first_trained(stages))
    builder = PlanBuilder("flush", stages, buffers, visits, held=held, pending=pending)
    return builder.build_flush()


def _held_at_end(stages: Sequence[StageShape], buffers: Buffers) -> dict[int, int]:
    """What weight buffers hold after a step: the same for every plan, as each ends with the same backward visits."""
    first = PlanBuilder("", stages, buffers, vertical_visits(len(stages), 1, first_trained(stages)), held=None)
    first.build()
    return first.held


def _build(
    name: str,
    stages: Sequence[StageShape],
    buffers: Buffers,
    visits: tuple[Visit, ...],
    cold: bool,
    pending: bool,
) -> Plan:
    if cold and pending:
        raise ValueError("cold: delayed updates cannot be pending where nothing has run yet")
    held = None
    if not cold:
        first = PlanBuilder(name, stages, buffers, visits, held=None)
        first.build()
        held = first.held
    return PlanBuilder(name, stages, buffers, visits, held=held, pending=pending).build()
