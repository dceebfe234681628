"""The public trainer: a store, a model and a budget; ``step(micro_batches)`` trains one step and returns its metrics.

It sets up buffers, plans and lanes and keeps the books. Ops are carried out in `runtime.py`; creating a store is
`creation.py`'s business.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hoist.scheduler.annotate import Annotated, OpNames
from hoist.scheduler.batches import Batch
from hoist.scheduler.collect import Collector
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.delay import StepTimes, measure
from hoist.scheduler.endurance import judge
from hoist.scheduler.errors import ConfigError, MisuseError, NonFiniteGradientError
from hoist.scheduler.executor import Executor
from hoist.scheduler.link import LinkedPlan, link
from hoist.scheduler.memory import STATE_BYTES, MemoryPlan
from hoist.scheduler.metrics import CommitTotals, EvalMetrics, StepMetrics, TrainerStatistics
from hoist.scheduler.metrics_log import MetricsLog
from hoist.scheduler.models import evaluating, private_rng, training_modes
from hoist.scheduler.op_bytes import Crossing, OpBytes
from hoist.scheduler.ops import DEVICE_KINDS
from hoist.scheduler.plan import evaluation
from hoist.scheduler.publish import Publisher
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.scratch import reserve
from hoist.scheduler.setup import Setup, check_model, check_slots, prepare
from hoist.scheduler.spans import Span, lane_times
from hoist.scheduler.stages import StagedModel
from hoist.scheduler.step_plans import StepPlans
from hoist.scheduler.step_state import StepState
from hoist.scheduler.timeline import Recorder
from hoist.scheduler.trace import Trace
from hoist.scheduler.traced import Traced
from hoist.scheduler.whereabouts import Whereabouts
from hoist.tiers import heap
from hoist.tiers.device import Device, HereDevice
from hoist.tiers.errors import DeviceError, StoreRefusedError
from hoist.tiers.footprint import PeakSampler, anonymous_bytes
from hoist.tiers.format import METRICS_NAME
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.bounce import for_device
from hoist.tiers.manager import ItemKind, Manager, Residency, Tier
from hoist.tiers.store import Store

_log = logging.getLogger(__name__)

#: Key of the trainer's own counters in a commit's run record.
COUNTERS_KEY = "counters"
#: What a commit keeps with a step: JSON, or what makes it of the step's metrics.
RunRecord = Mapping[str, Any] | Callable[[StepMetrics], Mapping[str, Any]]


@dataclass(kw_only=True, slots=True)
class _Counters:
    """What a run counts across resumes."""

    skipped_steps: int = 0
    skipped_in_a_row: int = 0

    def note(self, skipped: bool) -> None:
        """A step has ended."""
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def to_json(self) -> dict[str, int]:
        """For the commit record."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote; what is missing is 0."""
        return cls(**{name: int(document.get(name, 0)) for name in ("skipped_steps", "skipped_in_a_row")})


@dataclass(kw_only=True, slots=True)
class _Position:
    """Where the run stands, as of the end of a step."""

    step: int
    adam_steps: Mapping[str, int]
    run: Mapping[str, Any]


#: What a separate device has.
_DEVICE_KINDS = (ItemKind.WEIGHTS, ItemKind.GRADIENT, ItemKind.ACTIVATION)
#: What people look for in a trainer, and where it is.
_ELSEWHERE: Mapping[str, str] = {
    "backward": "step() runs the forward, the backward and the update of its micro-batches",
    "zero_grad": "every step() begins without gradients",
    "parameters": "weights are in the store: commit(), then hoist.read_tensor",
    "state_dict": "weights are in the store: commit(), then hoist.read_tensor or hoist.export_store",
    "save": "the store is the checkpoint: commit()",
}


class Trainer:
    """Trains a staged model whose states live in a store. Close it when done; use it as a context manager.

    A step's updates may still be under way when :meth:`step` returns; :meth:`commit` and :meth:`close` wait for them.
    After any error the trainer cannot go on: close it and open the store again, which is at its last commit.
    """

    #: What carries out ops; tests put a kind here that does so in an unlucky order.
    runtime_kind: ClassVar[type[Runtime]] = Runtime

    def __init__(
        self,
        *,
        model: StagedModel,
        store: Store,
        engine: IoEngine,
        config: TrainerConfig,
        baseline_bytes: int | None = None,
        setup: Setup | None = None,
        prediction: Mapping[str, Any] | None = None,
        wear: Callable[[], Mapping[str, Any] | None] | None = None,
        trace: Trace | None = None,
        device: Device | None = None,
    ) -> None:
        """``device`` is what computes, by default the CPU; it stays open. ``setup`` must have been made for it.

        ``baseline_bytes``: memory of the warmed-up process, from :func:`hoist.tiers.footprint.warm_up`; now if None.
        ``trace`` notes what every op does; it stays open.

        ``prediction`` is what was predicted of a step, and ``wear`` says what the drive has suffered so far: the status
        document has them as they are. Metrics tell the prediction's ``seconds``.

        Raises BudgetError if the budget is too small, StoreRefusedError if the store is another model's; nothing is
        changed then.
        """
        heap.settle()
        check_model(store.directory, model, store.layouts)
        if store.record is None:
            raise StoreRefusedError(f"{store.directory}: nothing was ever committed; create the store again")
        check_slots(store.directory, store.num_slots, config)
        self.config = config
        self._model = model
        self._store = store
        self._engine = store.counted(engine)
        self._device = HereDevice() if device is None else device
        with training_modes(self._device.torch_device):
            self._setup = setup or prepare(model, store.layouts, config, device=self._device)
        self._predicted_seconds = None if prediction is None else float(prediction["seconds"])
        #: What :meth:`close` ends, in the reverse of the order in which it was begun.
        self._open = ExitStack()
        try:
            with training_modes(self._device.torch_device):  # buffers made in inference mode would take no gradient
                self._begin(baseline_bytes, prediction, wear, trace)
        except BaseException:
            self._open.close()
            raise

    def _begin(
        self,
        baseline_bytes: int | None,
        prediction: Mapping[str, Any] | None,
        wear: Callable[[], Mapping[str, Any] | None] | None,
        trace: Trace | None,
    ) -> None:
        """The part of the constructor that makes what must be closed again."""
        config, store, engine = self.config, self._store, self._engine
        record = store.record
        assert record is not None  # refused before
        self._places = self._setup.places(self._device)
        self._open.callback(self._places.close)
        self._shapes = self._setup.shapes()
        self._op_bytes = OpBytes(self._setup)
        scratch = reserve(store, self._setup, num_micro_batches=config.num_micro_batches)
        tiers = dict.fromkeys(ItemKind, Tier.HOST)
        if self._device.is_separate:
            tiers |= dict.fromkeys(_DEVICE_KINDS, Tier.DEVICE)
        #: Takes buffers of the device too. Closed with the trainer where it is a wrapper around what was given.
        self._moving = for_device(
            self._engine,
            self._device,
            ring=self._places.bounce,
            part_bytes=self._setup.memory.bounce_slot_bytes,
        )
        if self._moving is not self._engine:
            self._open.callback(self._moving.close)
        self._manager = Manager(tiers=tiers, stored_bytes=_stored_bytes(store), validate=config.validate)
        self._runtime = self.runtime_kind(
            model=self._model,
            store=store,
            engine=self._moving,
            places=self._places,
            device=self._device,
            scratch=scratch,
            manager=self._manager,
            buffers=self._setup.buffers(),
            piece_elements=self._setup.memory.piece_elements,
            optimizer=config.optimizer,
            no_decay_norms=config.no_decay_norms,
            clip_norm=config.clip_norm,
            seed=config.seed,
            adam_steps=record.adam_steps,
            verify_reads=config.verify_reads,
            loss_slice_tokens=config.loss_slice_tokens,
            compile_backend=config.backend_in_force,
        )
        self._open.callback(self._runtime.release)
        # What an op that failed had put there before may use the memory that is freed then.
        self._open.callback(self._device.finish)
        names = OpNames([stage.name for stage in store.layouts], self._runtime.pieces)
        annotated = Annotated(self._runtime, names)
        #: Notes what is executed; None without a trace.
        self._traced = None
        if trace is not None:
            self._traced = Traced(
                trace, annotated, names=names, io_bytes=self._op_bytes.num_bytes, held=self._manager.held_bytes
            )
        self._executor = Executor(
            self._traced or annotated,
            device_kinds=DEVICE_KINDS if self._device.is_separate else frozenset(),
            ended=None if self._traced is None else self._traced.ended,
        )
        self._open.callback(self._executor.close)
        self._plans = StepPlans(self._setup, config)
        #: Updates of the last step are delayed into the next one.
        self._pending = False
        self._counters = _Counters.from_json(record.run.get(COUNTERS_KEY, {}))
        self._position = _Position(step=record.step, adam_steps=record.adam_steps, run=record.run)
        #: Steps whose state the runtime still keeps.
        self._open_steps: list[int] = []
        self._cold = True
        self._last_spans: list[Span] = []
        self._last_state: StepState | None = None
        #: What the last step ran; None before the first.
        self._last_plan: LinkedPlan | None = None
        self._commits = CommitTotals()
        #: When the last commit fell due, by time.monotonic().
        self._last_due_at = time.monotonic()
        #: Some states change in memory alone, until a commit writes them.
        self._keeps_states = self._setup.memory.kept.is_dirty_between_commits
        self._sampler = PeakSampler(anonymous_bytes() if baseline_bytes is None else baseline_bytes)
        self._open.callback(self._sampler.close)
        self._read_bytes = engine.statistics().read_bytes
        self._written_bytes = engine.statistics().written_bytes
        #: Bytes that need not be read and written, up to the last step's end.
        self._saved_bytes = (0, 0)
        self._metrics_log = MetricsLog(store.directory / METRICS_NAME)
        #: The last step's timeline; None if nobody is to be told.
        self._recorder = Recorder(self._manager) if config.status_seconds else None
        whereabouts = Whereabouts(
            store.layouts,
            self._runtime.pieces,
            tiers,
        )
        self._collector = Collector(
            store=store,
            engine=engine,
            manager=self._manager,
            executor=self._executor,
            sampler=self._sampler,
            memory=self._setup.memory,
            whereabouts=whereabouts,
            budget_bytes=config.host_memory_bytes,
            device_budget_bytes=config.device_memory_bytes,
            scratch_bytes=self._setup.scratch_bytes,
            num_steps=config.schedule.num_steps,
            interval_seconds=config.status_seconds,
            step=lambda: self._position.step,
            prediction=prediction,
            wear=self._wear if wear is None else wear,
        )
        self._closed = False
        #: Held by the thread that is in the trainer.
        self._entered = threading.Lock()
        try:
            self._publisher = Publisher(
                store.directory,
                interval_seconds=config.status_seconds,
                status=self._collector.status,
                timeline=lambda: None if self._recorder is None else self._recorder.last,
                whereabouts=whereabouts,
                metrics=self._metrics_log,
            )
        except BaseException:
            self._metrics_log.close()  # which the publisher does otherwise, as it writes there
            raise
        self._publisher.publish_soon()

    def _wear(self) -> Mapping[str, Any] | None:
        """What the drive has suffered, by what the last step wrote; and the store's own count is brought up to date."""
        ledger, last = self._store.wear, self._collector.last
        if ledger is None:
            return None
        ledger.save()
        num_steps = self.config.schedule.num_steps
        return judge(
            ledger.record(),
            bytes_per_step=0.0 if last is None else last.nvme_written_bytes,
            seconds_per_step=None if last is None else last.seconds,
            steps_left=max(0, num_steps - self._position.step) if num_steps else None,
        ).to_json()

    if not TYPE_CHECKING:  # a type checker shall know what is not there

        def __getattr__(self, name):
            """Say where what is not here is."""
            where = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise MisuseError(f"a Trainer has no {name!r}{where}")

    @property
    def step_number(self) -> int:
        """Steps done so far, those of earlier runs of the store included."""
        return self._position.step

    @property
    def committed_step(self) -> int:
        """The last of them that is committed: what a crash now would leave."""
        return 0 if self._store.record is None else self._store.record.step

    @property
    def memory(self) -> MemoryPlan:
        """How the budget is divided."""
        return self._setup.memory

    def statistics(self) -> TrainerStatistics:
        """A snapshot of what is where and of what has moved so far; may be called from any thread, at any time."""
        return TrainerStatistics(
            step=self._position.step,
            residency=self._manager.statistics(),
            nvme=self._engine.statistics(),
            commits=replace(self._commits),
            host_peak_bytes=self._sampler.peak_bytes,
        )

    def residency(self) -> tuple[Residency, ...]:
        """What is in host buffers or in scratch now, item by item; from any thread."""
        return self._manager.table()

    def publish(self) -> None:
        """Write STORE/status.json now, beside what is written every ``status_seconds``; from any thread, also from
        within a step. A file that cannot be written is said once through `logging`, and no error.
        """
        self._publisher.publish()

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to STORE/metrics.jsonl, beside those that steps write: an evaluation, with ``step`` and
        ``eval_loss``. Raises ValueError on what is not JSON, nothing about the file (see :class:`MetricsLog`).
        """
        self._metrics_log.write(record)

    @property
    def last_spans(self) -> list[Span]:
        """When each op ran that ended between the last two returns of :meth:`step`: the timeline of a step."""
        return self._last_spans

    def bus_bytes(self) -> tuple[int, int]:
        """Bytes that the ops of :attr:`last_spans` brought over the bus to a separate device, and from it."""
        crossed = sum((self._op_bytes.crossing(span.op) for span in self._last_spans), Crossing())
        return crossed.up, crossed.down

    def step_times(self) -> StepTimes:
        """How long the lanes worked for the parts of the last full step: what the choice of a delay rests on.

        Of a step without a delay, and not the first, whose reads others would not need. Raises ConfigError otherwise.
        """
        linked = self._last_plan
        full = linked is not None and linked.plan.num_micro_batches == self.config.num_micro_batches
        if linked is None or not full or linked.plan.cold or self.config.delay_in_force:
            raise ConfigError("step_times: needs a full step without a delay, after the first")
        return measure(linked.plan.ops, self._last_spans, self._op_bytes.num_bytes)

    def step(
        self, micro_batches: Sequence[Batch], *, lr: float | None = None, run: RunRecord | None = None
    ) -> StepMetrics:
        """Train one step on 1 to ``num_micro_batches`` micro-batches.

        A micro-batch is a mapping with ``input_ids`` and ``labels``, int64 [B, S], and optionally ``attention_mask``
        or ``position_ids`` [B, S], for whose masks the budget has room if the configuration's ``extra_inputs`` name
        them; B and S at most the configured ones. The model shifts the labels; -100 is not counted. The loss is the
        mean over all counted labels of the step, however they fall into micro-batches.

        ``lr`` is the learning rate of this step's updates, instead of the schedule's; the schedule then does not end
        the run either. Modules (:func:`stage_modules`) take ``inputs`` and ``targets`` instead of ids and labels.

        ``run`` is JSON that a commit keeps with this step (data position and the like), or makes it of the step's
        metrics; :attr:`Store.record` returns it.

        The caller's gradient, inference and autocast modes do not matter. One thread at a time may be in the trainer.

        Raises ConfigError, with nothing done, on batches that do not fit, past the schedule's last step, once closed,
        and to a second thread; TransferError when a drive fails; whatever the model raises. After the latter two, only
        :meth:`close` may be called.
        """
        with self._turn(), self._noted(f"step {self._position.step + 1}") as notes:
            started = time.perf_counter()
            num_items = self._check(micro_batches)
            step = self._position.step + 1
            if lr is not None and not (math.isfinite(lr) and lr >= 0.0):
                raise ConfigError(f"lr: {lr!r} is not a finite number of at least 0")
            if lr is None and step > self.config.schedule.num_steps:
                raise ConfigError(
                    f"step: the schedule's step must be 1 to {self.config.schedule.num_steps}, got {step}; a longer "
                    "run needs a schedule with more num_steps"
                )
            lr = self.config.schedule.at(step) if lr is None else float(lr)
            metrics = self._step(step, micro_batches, num_items, lr, started, run)
            notes.update(loss=metrics.loss, tokens=metrics.tokens)
            return metrics

    def evaluate(self, micro_batches: Sequence[Batch]) -> EvalMetrics:
        """The loss of 1 to ``num_micro_batches`` micro-batches under the weights after the last step.

        Forward alone, each stage's weights read once, without dropout; results of later steps are not changed by it,
        not by a bit. First finishes the updates of the last step, as :meth:`wait` does. Micro-batches are as in
        :meth:`step`. Raises as that does.
        """
        with self._turn(), self._noted(f"evaluation after step {self._position.step}") as notes:
            started = time.perf_counter()
            num_items = self._check(micro_batches)
            self._finish_updates()
            moved, saved = self._engine.statistics(), self._saved()
            # No step has this number yet; the one that will have it begins with a state of its own.
            step = self._position.step + 1
            state = StepState(
                step=step, batches=[_usable(batch) for batch in micro_batches], num_items=num_items, lr=0.0
            )
            plan = link(
                evaluation(
                    self._shapes, len(micro_batches), self._setup.buffers(), cold=self._cold, order=self.config.plan
                )
            )
            self._runtime.begin_evaluation(state)
            if self._collector.doing != "evaluate":  # an evaluation may take many calls
                self._collector.doing = "evaluate"
                self._publisher.publish_soon()
            try:
                with evaluating(self._model.model), private_rng():
                    self._execute(plan, step)
                    self._executor.drain()
                loss = self._runtime.read_loss(state)
            finally:
                self._runtime.end(step)
            self._cold = False
            now, saved_now = self._engine.statistics(), self._saved()
            # The next step's metrics say what that step moved.
            self._read_bytes += now.read_bytes - moved.read_bytes
            self._written_bytes += now.written_bytes - moved.written_bytes
            self._saved_bytes = (
                self._saved_bytes[0] + saved_now[0] - saved[0], self._saved_bytes[1] + saved_now[1] - saved[1]
            )
            found = EvalMetrics(
                loss=loss,
                counted=num_items,
                tokens=sum(map(self._model.batches.num_tokens, micro_batches)),
                seconds=time.perf_counter() - started,
                nvme_read_bytes=now.read_bytes - moved.read_bytes,
                nvme_written_bytes=now.written_bytes - moved.written_bytes,
            )
            notes.update(loss=found.loss, tokens=found.tokens)
            return found

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time, on an open trainer, in the modes that training needs whatever the caller's are."""
        if not self._entered.acquire(blocking=False):
            raise ConfigError("another thread is using this trainer; call it from one thread at a time")
        try:
            if self._closed:
                raise ConfigError("this trainer is closed; open the store with a new one")
            self._executor.check()
            with training_modes(self._device.torch_device):
                yield
        except ConfigError:
            raise  # nothing was done
        except BaseException as error:
            if isinstance(error, DeviceError):  # perhaps of what was put there beside the executor
                self._executor.abandon(error)
            self._fail(error)
            raise
        finally:
            self._entered.release()

    def _noted(self, name: str, *, whole: bool = True) -> AbstractContextManager[dict[str, object]]:
        """What the caller waits for, or a part of it, is in a trace, if there is one, with what the dictionary gets."""
        if self._traced is None:
            return nullcontext({})
        return self._traced.whole(name) if whole else self._traced.part(name)

    def _execute(self, linked: LinkedPlan, step: int) -> list[Span]:
        if self._traced is not None:
            self._traced.begin(linked, step)
        return self._executor.run(linked, step)

    def _step(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        num_items: int,
        lr: float,
        started: float,
        run: RunRecord | None,
    ) -> StepMetrics:
        state = StepState(
            step=step,
            batches=[_usable(batch) for batch in micro_batches],
            num_items=num_items,
            lr=lr,
            commit_due=self._commit_is_due(step),
        )
        self._collector.doing = "step"
        if self._recorder is not None:
            self._recorder.begin()
        self._runtime.begin(state)
        self._last_state = state
        self._open_steps.append(step)
        with private_rng():
            self._last_plan = self._plan(len(micro_batches))
            spans = self._execute(self._last_plan, step)
        self._cold = False
        self._pending = self._setup.leaves_updates
        self._forget_finished()
        stopped = time.perf_counter()
        self._last_spans = spans
        if self._recorder is not None:
            self._recorder.end(step, started, stopped, spans, self._executor.unfinished())
        self._counters.note(state.skipped)
        metrics = self._metrics(state, spans, started, stopped)
        self._metrics_log.write(metrics.to_json())
        # The state stays until its updates are done, and the budgets have room for two steps' batches, and for one
        # step's on a separate device. Whatever needs them has ended: gradients were measured.
        state.batches = state.inputs = ()
        kept = run(metrics) if callable(run) else run or {}
        self._position = _Position(
            step=step, adam_steps=state.adam_steps or {}, run={**kept, COUNTERS_KEY: self._counters.to_json()}
        )
        self._collector.note_step(metrics)
        if state.commit_due:
            state.commit = partial(self._commit, self._position)
        if self._counters.skipped_in_a_row >= self.config.max_skipped_steps:
            self._executor.drain()  # what was begun, a commit perhaps, is over before the error says where the store is
            raise NonFiniteGradientError(
                f"step {step}: the gradients were not finite in {self._counters.skipped_in_a_row} steps in a row; each "
                "was skipped and the weights are as before; lower --lr, look at the data of these steps, or raise "
                "--warmup-steps"
            )
        return metrics

    def wait(self) -> None:
        """Finish every update of the steps so far, delayed ones too (not yet committed). Raises what a lane raised."""
        with self._turn(), self._noted("finish updates"):
            self._finish_updates()

    def commit(self) -> None:
        """Finish every update and make the store's state that of the last step, durably. Does nothing if it is so."""
        with self._turn(), self._noted(f"finish updates and commit step {self._position.step}"):
            if self._last_state is not None:
                self._last_state.commit_due = True
            self._finish_updates()
            self._commit(self._position)
            self._last_due_at = time.monotonic()

    def _commit_is_due(self, step: int) -> bool:
        """Whether a step that begins now is to be committed. Decided before it, as what is kept is written after it."""
        every, minutes = self.config.commit_rule(keeps_states=self._keeps_states)
        due = every is not None and step % every == 0
        due = due or (minutes is not None and time.monotonic() - self._last_due_at >= 60.0 * minutes)
        if due:
            self._last_due_at = time.monotonic()
        return due

    def _commit(self, position: _Position) -> None:
        """Commit, unless that was done meanwhile."""
        record = self._store.record
        if record is None or record.step < position.step:
            with self._noted(f"commit of step {position.step}", whole=False) as notes:
                done = self._store.commit(step=position.step, adam_steps=position.adam_steps, run=position.run)
                notes.update(generation=done.generation, flush_seconds=done.flush_seconds)
            self._commits.add(done)

    def close(self) -> None:
        """Stop the lanes and free the memory. What was not committed is lost. Idempotent. Store and engine stay."""
        if self._closed:
            return
        self._closed = True
        try:
            self._open.close()
        finally:
            self._collector.closed = True
            self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and isinstance(error, Exception | KeyboardInterrupt):
            self._fail(error)
        self.close()

    def _fail(self, error: BaseException) -> None:
        """The run has ended with an error, the first one if there are several; whoever looks on is told at once."""
        if self._collector.error is None and not self._closed:
            self._collector.error = error
            self._publisher.publish_soon()

    # ------------------------------------------------------------------

    def _check(self, micro_batches: Sequence[Batch]) -> int:
        """Number of counted labels of the step. Raises ConfigError on what buffers or model were not made for."""
        config = self.config
        if not 1 <= len(micro_batches) <= config.num_micro_batches:
            raise ConfigError(
                f"micro_batches: {len(micro_batches)} given, "
                f"1 to {config.num_micro_batches} (num_micro_batches) allowed"
            )
        return self._model.batches.check(micro_batches, config)

    def _plan(self, num_micro_batches: int) -> LinkedPlan:
        return self._plans.of(num_micro_batches, cold=self._cold, pending=self._pending)

    def _finish_updates(self) -> None:
        """Do the delayed updates of the last step now, and wait until everything is written.

        What is kept in memory is written only if the last step is to be committed.
        """
        last = self._last_state
        keeps = last is not None and last.commit_due and self._keeps_states
        if self._pending or keeps:
            self._collector.doing = "updates"
            with private_rng():
                self._execute(self._plan(0), self._position.step + 1)
            self._pending = False
        self._executor.drain()

    def _forget_finished(self) -> None:
        """The executor starts a step only when the one before the last has ended, and that may do a step's updates."""
        while len(self._open_steps) > 3:
            self._runtime.end(self._open_steps.pop(0))

    def _saved(self) -> tuple[int, int]:
        """Bytes that did not have to be read and written so far, as they were kept."""
        kinds = self._manager.statistics().kinds.values()
        return sum(kind.saved_read_bytes for kind in kinds), sum(kind.saved_written_bytes for kind in kinds)

    def _metrics(self, state: StepState, spans: list[Span], started: float, stopped: float) -> StepMetrics:
        statistics = self._engine.statistics()
        read, written = statistics.read_bytes, statistics.written_bytes
        saved = self._saved()
        times = lane_times(spans, started, stopped)
        predicted = self._predicted_seconds
        metrics = StepMetrics(
            step=state.step,
            loss=self._runtime.read_loss(state),
            grad_norm=state.grad_norm(),
            clip_scale=0.0 if state.skipped else state.scale,
            skipped_steps=self._counters.skipped_steps,
            lr=state.lr,
            tokens=sum(map(self._model.batches.num_tokens, state.batches)),
            seconds=stopped - started,
            predicted_seconds=predicted,
            prediction_error=None if predicted is None else predicted / (stopped - started) - 1.0,
            nvme_read_bytes=read - self._read_bytes,
            nvme_written_bytes=written - self._written_bytes,
            nvme_read_saved_bytes=saved[0] - self._saved_bytes[0],
            nvme_written_saved_bytes=saved[1] - self._saved_bytes[1],
            busy_seconds={lane.value: times[lane].busy_seconds for lane in times},
            stall_seconds={lane.value: times[lane].stall_seconds for lane in times},
            host_peak_bytes=self._sampler.peak_bytes,
            device_peak_bytes=self._device.peak_bytes(),
        )
        self._read_bytes, self._written_bytes, self._saved_bytes = read, written, saved
        return metrics


def _stored_bytes(store: Store) -> int:
    """Bytes of the store's arrays, all slots of a chunk counted as one."""
    return sum(STATE_BYTES * layout.padded_elements + layout.frozen_bytes for layout in store.layouts)


def _usable(batch: Batch) -> Batch:
    """The batch with tensors that autograd accepts: those made in inference mode are copied."""
    return {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in batch.items()}

