"""Makes the status document of a trainer: asks everything that is in it once, and copies what they say.

What is told is `status.py`'s; who asks, and when, is `publish.py`'s. Nothing here changes anything.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from hoist.scheduler.executor import Activity, Executor, Work
from hoist.scheduler.memory import MemoryPlan, promised_bytes
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.ops import Kind, Lane, Op
from hoist.scheduler.status import (
    IoStatus,
    LaneStatus,
    Position,
    RunState,
    RunStatus,
    Speed,
    TierStatus,
)
from hoist.scheduler.whereabouts import Whereabouts
from hoist.tiers import allocation
from hoist.tiers.errors import HoistError
from hoist.tiers.footprint import PeakSampler, anonymous_bytes
from hoist.tiers.format import StateArray
from hoist.tiers.io.base import IoEngine
from hoist.tiers.manager import Manager, Tier
from hoist.tiers.store import Store

#: Steps that speeds are means of.
SPEED_STEPS = 20
#: What an executor's plan is for: a step, an evaluation, or the updates that a step has left.
Doing = Literal["step", "evaluate", "updates"]
_PHASES = {
    Kind.FORWARD: "forward",
    Kind.LOSS: "loss",
    Kind.BACKWARD: "backward",
    Kind.EVALUATE: "evaluate",
}


class Collector:
    """Makes documents. :meth:`note_step` is the trainer's thread's, :meth:`status` may be called from any, by one."""

    def __init__(
        self,
        *,
        store: Store,
        engine: IoEngine,
        manager: Manager,
        executor: Executor,
        sampler: PeakSampler,
        memory: MemoryPlan,
        whereabouts: Whereabouts,
        budget_bytes: int,
        device_budget_bytes: int | None = None,
        scratch_bytes: int,
        num_steps: int,
        interval_seconds: float,
        step: Callable[[], int],
        prediction: Mapping[str, Any] | None,
        wear: Callable[[], Mapping[str, Any] | None] | None,
    ) -> None:
        """``device_budget_bytes``: for a device with memory of its own; None: there is none.

        ``num_steps``: of the whole run; 0: not known. ``step``: steps done so far. ``prediction`` and ``wear``: see
        :class:`RunStatus`.
        """
        self._store = store
        self._engine = engine
        self._manager = manager
        self._executor = executor
        self._sampler = sampler
        self._whereabouts = whereabouts
        self._budget_bytes = budget_bytes
        self._device_budget_bytes = device_budget_bytes
        #: None where the caller alone knows: a schedule without steps.
        self._num_steps = num_steps or None
        self._interval_seconds = interval_seconds
        self._step = step
        self._prediction = prediction
        self._wear = wear
        self._memory_parts = dict(memory.parts())
        self._stage_names = whereabouts.stage_names
        #: What the store's files take, scratch included; chunk files are reserved whole.
        self._store_bytes = scratch_bytes + sum(
            store.num_slots * layout.padded_elements * sum(array.itemsize for array in StateArray)
            + layout.frozen_bytes
            for layout in store.layouts
        )
        self._hostname = socket.gethostname()
        self._started_at = time.time()
        self._sequence = 0
        #: The last step's metrics; replaced as a whole, by the trainer's thread.
        self._last: StepMetrics | None = None
        #: Seconds and tokens of the last steps; replaced as a whole.
        self._history: deque[tuple[float, int]] = deque(maxlen=SPEED_STEPS)
        self._num_noted = 0
        #: What the trainer has given the executor last.
        self.doing: Doing = "step"
        #: Once set, nothing is in memory any more.
        self.closed = False
        #: What ended the run.
        self.error: BaseException | None = None
        #: When the engine's counters were looked at, by time.monotonic(), and what they were.
        moved = engine.statistics()
        self._io_before = (time.monotonic(), moved.read_bytes, moved.written_bytes)

    @property
    def last(self) -> StepMetrics | None:
        """The last step's metrics; from any thread."""
        return self._last

    def note_step(self, metrics: StepMetrics) -> None:
        """A step has ended."""
        self._num_noted += 1
        if self._num_noted > 1:  # the first one reads what others need not
            self._history.append((metrics.seconds, metrics.tokens))
        self._last = metrics

    def status(self) -> RunStatus:
        """A document of this moment."""
        activity = self._executor.activity()
        table = self._manager.snapshot()
        step = self._step()
        record = self._store.record
        self._sequence += 1
        error = self.error or activity.error
        state = RunState.FAILED if error is not None else RunState.ENDED if self.closed else RunState.RUNNING
        last = self._last
        now_bytes = 0 if self.closed else max(0, anonymous_bytes() - self._sampler.baseline_bytes)
        host_peak = self._sampler.peak_bytes
        stages = self._whereabouts.at_rest if self.closed else self._whereabouts.stages(table)
        return RunStatus(
            store_id=self._store.store_id,
            pid=os.getpid(),
            hostname=self._hostname,
            started_at=self._started_at,
            written_at=time.time(),
            sequence=self._sequence,
            interval_seconds=self._interval_seconds,
            state=state,
            error=None if error is None else error_line(error, activity.failed_op, self._stage_names),
            position=self._position(activity, step, 0 if record is None else record.step),
            speed=self._speed(step),
            tiers=self._tiers(table.resident_bytes, table.peak_bytes),
            lanes=self._lanes(activity, last),
            io=self._io(),
            host_bytes=now_bytes,
            host_peak_bytes=host_peak,
            promised_bytes=promised_bytes(self._budget_bytes),
            memory_parts=self._memory_parts,
            stage_names=self._stage_names,
            stages=stages,
            last_step=None if last is None else last.to_json(),
            prediction=self._prediction,
            wear=None if self._wear is None else self._wear(),
        )

    def _position(self, activity: Activity, step: int, committed_step: int) -> Position:
        phase = stage = None
        micro_batch = None
        current_step = None
        runs = not self.closed and activity.error is None
        if runs and activity.turn is not None:
            ahead = activity.ahead
            op = activity.turn.op if ahead is None else ahead.op
            phase = "evaluate" if self.doing == "evaluate" else _PHASES.get(op.kind)
            if phase is not None:
                stage = self._stage_names[op.stage]
                micro_batch = op.micro_batch
            current_step = None if self.doing == "evaluate" else activity.turn.step
        elif runs and activity.steps:
            phase = "updates"
            # What a step has left is done in a plan that has the next one's number.
            current_step = step if self.doing == "updates" else activity.steps[0]
        return Position(
            step=step,
            num_steps=self._num_steps,
            committed_step=committed_step,
            current_step=current_step,
            phase=phase,
            stage=stage,
            micro_batch=micro_batch,
        )

    def _speed(self, step: int) -> Speed:
        history = list(self._history)
        seconds = sum(took for took, _ in history)
        if not history or seconds <= 0.0:
            return Speed()
        mean = seconds / len(history)
        return Speed(
            seconds_per_step=mean,
            tokens_per_second=sum(tokens for _, tokens in history) / seconds,
            eta_seconds=None if self._num_steps is None else mean * max(0, self._num_steps - step),
        )

    def _tiers(self, resident: Mapping[Tier, int], peak: Mapping[Tier, int]) -> dict[str, TierStatus]:
        try:
            nvme_bytes = self._store_bytes + allocation.free_bytes(self._store.directory)
        except OSError:
            nvme_bytes = self._store_bytes
        budgets = {Tier.DEVICE: self._device_budget_bytes, Tier.HOST: self._budget_bytes, Tier.NVME: nvme_bytes}
        return {
            tier.value: TierStatus(
                budget_bytes=budgets[tier],
                resident_bytes=0 if self.closed and tier is not Tier.NVME else resident[tier],
                peak_bytes=peak[tier],
            )
            for tier in Tier
        }

    def _lanes(self, activity: Activity, last: StepMetrics | None) -> dict[str, LaneStatus]:
        lanes = {}
        for lane, work in activity.current.items():
            busy = stall = None
            if last is not None and last.seconds > 0.0:
                busy = min(1.0, last.busy_seconds[lane.value] / last.seconds)
                stall = min(1.0, last.stall_seconds[lane.value] / last.seconds)
            at_work = activity.num_io if lane is Lane.IO else int(work is not None)
            lanes[lane.value] = LaneStatus(
                current=None if work is None else self._describe(work),
                in_flight=at_work,
                busy_share=busy,
                stall_share=stall,
            )
        return lanes

    def _describe(self, work: Work) -> str:
        return op_line(work.op, self._stage_names)

    def _io(self) -> IoStatus:
        statistics = self._engine.statistics()
        now = time.monotonic()
        before, read_bytes, written_bytes = self._io_before
        seconds = now - before
        # Two documents right after one another would tell of nearly no time at all.
        if seconds >= self._interval_seconds / 2:
            self._io_before = (now, statistics.read_bytes, statistics.written_bytes)
        return IoStatus(
            engine=self._engine.describe(),
            read_bytes_per_second=(statistics.read_bytes - read_bytes) / seconds if seconds > 0.0 else 0.0,
            write_bytes_per_second=(statistics.written_bytes - written_bytes) / seconds if seconds > 0.0 else 0.0,
            read_bytes=statistics.read_bytes,
            written_bytes=statistics.written_bytes,
            buffered_bytes=statistics.buffered_bytes,
        )


def op_line(op: Op, stage_names: tuple[str, ...]) -> str:
    """An op for people, with its stage's name: ``backward(layer.3, micro-batch 2)``."""
    where = [stage_names[op.stage]] if op.stage >= 0 else []
    where += [f"micro-batch {op.micro_batch}"] if op.micro_batch >= 0 else []
    where += [f"piece {op.piece}"] if op.piece >= 0 else []
    return f"{op.kind.name.lower()}({', '.join(where)})" if where else op.kind.name.lower()


def error_line(error: BaseException, failed_op: Op | None, stage_names: tuple[str, ...]) -> str:
    """What ended a run, on one line; its kind too, unless hoist raised it on purpose and the text says all."""
    text = " ".join(str(error).split())
    if not isinstance(error, HoistError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if failed_op is None else f"{text} (while executing {op_line(failed_op, stage_names)})"
