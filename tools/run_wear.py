"""What a run of `hoist train` does to its drives: before it starts, while it goes on, and its budget of writes.

The words are `wear.py`'s, the judgement is `hoist.scheduler.endurance`'s, the count `hoist.tiers.wear`'s.
"""

from __future__ import annotations

from hoist.scheduler import writes
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.endurance import Wear
from hoist.scheduler.setup import Setup
from hoist.scheduler.writes import Writes
from hoist.tiers.store import Store
from hoist.tools.evaluation import Evaluation
from hoist.tools.preparing import Prepared
from hoist.tools.sizes import show_decimal
from hoist.tools.wear import (
    WriteBudget,
    ahead,
    judged,
    lower,
    snapshot_bytes,
)


def wear_ahead(run: Prepared, store: Store, predicted_seconds: float | None) -> tuple[str, ...]:
    """What the run will do to the drive: at the speed that is predicted, or else that it had so far, if it goes on."""
    config, totals = run.config, run.totals
    steps_done = run.step - totals.since_step
    seconds = predicted_seconds
    if seconds is None and steps_done > 0 and totals.seconds > 0.0:
        seconds = totals.seconds / steps_done
    counted = writes.count(run.setup, config, store.record)
    lines = [ahead(judged_run(run, store, config, counted, seconds, run.step), run.options.steps - run.step)]
    budget = run.options.write_budget_bytes()
    if budget is not None and store.wear is not None:
        so_far = show_decimal(store.wear.written_bytes)
        lines.append(f"--write-budget {show_decimal(budget)}, of which {so_far} are written so far")
    less = lower(run.setup, config)
    return (*lines, less) if less else tuple(lines)


def judged_run(
    run: Prepared, store: Store, config: TrainerConfig, counted: Writes, seconds: float | None, step: int
) -> Wear:
    assert store.wear is not None
    return judged(
        store.wear,
        counted,
        config,
        seconds_per_step=seconds,
        steps_left=run.options.steps - step,
        write_budget_bytes=run.options.write_budget_bytes(),
    )


def write_budget(
    run: Prepared, store: Store, config: TrainerConfig, setup: Setup, counted: Writes, evaluation: Evaluation | None
) -> WriteBudget | None:
    """What ``--write-budget`` allows; None without it."""
    budget_bytes = run.options.write_budget_bytes()
    if budget_bytes is None:
        return None
    assert store.wear is not None
    each = 0 if evaluation is None else writes.evaluation_bytes(setup, config)
    rows = config.micro_batch_size * config.num_micro_batches

    def evaluation_bytes(step: int) -> int:
        return 0 if evaluation is None or not evaluation.is_due(step) else -(-evaluation.num_rows // rows) * each

    return WriteBudget(
        budget_bytes=budget_bytes,
        ledger=store.wear,
        counted=counted,
        snapshot_bytes=snapshot_bytes(store) if run.options.snapshot_every else 0,
        snapshot_every=run.options.snapshot_every,
        evaluation_bytes=evaluation_bytes,
    )
