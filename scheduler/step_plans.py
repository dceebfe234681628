"""The plans of a run's steps, from its setup: of full steps and shorter ones, and of what is left after the last one.

What a plan holds is `plan.py`'s business, what is done with it the trainer's, or that of those who predict what it will
do.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.link import LinkedPlan, link
from hoist.scheduler.plan import flush, horizontal, vertical
from hoist.scheduler.plan_records import Buffers, Plan
from hoist.scheduler.setup import Setup

_log = logging.getLogger(__name__)


def step_plan(
    setup: Setup, config: TrainerConfig, *, cold: bool, pending: bool, num_micro_batches: int | None = None
) -> Plan:
    """A step's plan; ``num_micro_batches``: by default as many as a full step has.

    ``cold``: nothing is in memory yet. ``pending``: the step before has left updates to this one.
    """
    make = vertical if config.plan == "vertical" else horizontal
    count = config.num_micro_batches if num_micro_batches is None else num_micro_batches
    return make(setup.shapes(), count, _buffers(setup, config), cold=cold, pending=pending)


def _buffers(setup: Setup, config: TrainerConfig) -> Buffers:
    buffers = setup.buffers()
    return replace(buffers, rereads_weights=buffers.rereads_weights or config.verify_reads)


def steady_plan(setup: Setup, config: TrainerConfig) -> Plan:
    """The plan of every full step but a run's first."""
    return step_plan(setup, config, cold=False, pending=setup.leaves_updates)


class StepPlans:
    """The linked plans of one run, made when they are first wanted and kept. One thread at a time."""

    def __init__(self, setup: Setup, config: TrainerConfig) -> None:
        self._setup = setup
        self._config = config
        #: Those that find weights in memory, by (micro-batches, pending); 0 micro-batches: the flush.
        self._kept: dict[tuple[int, bool], LinkedPlan] = {}

    def of(self, num_micro_batches: int, *, cold: bool, pending: bool) -> LinkedPlan:
        """The plan of a step with so many micro-batches; with 0, of what is left to do and to write after the last."""
        kept = None if cold else self._kept.get((num_micro_batches, pending))
        if kept is not None:
            return kept
        if num_micro_batches:
            plan = step_plan(
                self._setup, self._config, cold=cold, pending=pending, num_micro_batches=num_micro_batches
            )
        else:
            plan = flush(self._setup.shapes(), _buffers(self._setup, self._config), pending=pending)
        _log.debug(
            "plan %s of %d micro-batches%s%s: %d ops",
            plan.name,
            num_micro_batches,
            ", cold" if cold else "",
            ", with updates of the step before" if pending else "",
            len(plan.ops),
        )
        linked = link(plan)
        if not cold:  # the cold one serves once, and a plan takes some 0.4 KB an op
            self._kept[num_micro_batches, pending] = linked
        return linked
