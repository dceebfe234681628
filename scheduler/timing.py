"""Times what a run's lanes will do, on its own buffers and before it has a store: stages, an update, a merge.

Random numbers stand for weights, activations and batches (`stage_bench.py`); stages that are equal are timed once.
Torch's generators and the model are left as they were. What the times are for is `pricing.py`'s business.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from hoist.optim.adamw import PieceUpdater, SegmentUpdate
from hoist.optim.norm import SquareSum
from hoist.scheduler import workspace
from hoist.scheduler.batches import Batch
from hoist.scheduler.boundary import Packed, pack
from hoist.scheduler.compiling import compiled, explained
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.context import Context
from hoist.scheduler.executor import Done, Executor, Mark
from hoist.scheduler.link import link
from hoist.scheduler.memory import STATE_BYTES
from hoist.scheduler.models import private_rng, training_modes
from hoist.scheduler.ops import Op
from hoist.scheduler.places import Places, put_weights
from hoist.scheduler.plan import vertical
from hoist.scheduler.plan_records import Buffers, StageShape
from hoist.scheduler.pricing import StageTimes, Times
from hoist.scheduler.setup import Setup
from hoist.scheduler.stage_bench import DEVIATION, PATTERN_ELEMENTS, StageBench, chill, fill
from hoist.scheduler.stages import HeadStage, Stage, StagedModel
from hoist.tiers import checksum, heap

#: How far the timing is: (what, done, total). It may raise, which ends it.
Progress = Callable[[str, int, int], None]

#: Seconds that one pass of a stage, forward and backward, may take; a longer one is timed on fewer tokens.
PASS_SECONDS = 0.6
#: Passes of each kind of stage: as many as fit in this time, and between these numbers; but no more than this time.
LEAST_PASSES, MOST_PASSES = 3, 5
PASSES_SECONDS, LONGEST_SECONDS = 0.3, 2.0
#: Longer passes need no pass before them to warm up: the first one of few tokens was.
SHORT_SECONDS = 0.1
#: For so long two lanes are let work at once.
BESIDE_SECONDS = 0.4
#: An update is timed so often.
_UPDATES = 5
#: Rows and tokens of the first pass, which warms up and says how many the next may have.
_FIRST_SHAPE = (2, 32)
_SEED = 20_240_229


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """A micro-batch to time stages on, with what layers are called with for it."""

    batch: Batch
    rows: int
    tokens: int
    """Of a row."""
    context: Context

    @property
    def num_tokens(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passes:
    """Seconds of one micro-batch's passes through a stage."""

    forward: float
    first_forward: float
    backward: float
    first_backward: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward

    def to(self, tokens: int, *, own: int, smaller: _Passes, smaller_tokens: int) -> _Passes:
        """For so many tokens: on the straight line through these passes and those over fewer.

        Attention over longer rows takes more than that.
        """
        if own <= smaller_tokens:
            share = tokens / own - 1.0
            other = _Passes(forward=0.0, first_forward=0.0, backward=0.0, first_backward=0.0)
        else:
            share, other = (tokens - own) / (own - smaller_tokens), smaller
        return _Passes(
            forward=self.forward + share * max(0.0, self.forward - other.forward),
            first_forward=self.first_forward + share * max(0.0, self.first_forward - other.first_forward),
            backward=self.backward + share * max(0.0, self.backward - other.backward),
            first_backward=self.first_backward + share * max(0.0, self.first_backward - other.first_backward),
        )


def measure(
    model: StagedModel, setup: Setup, config: TrainerConfig, *, progress: Progress = lambda what, done, total: None
) -> Times:
    """Time a run's ops on buffers like its own, which are freed again: it holds no more memory than the run will.

    Takes a second or two. Where one micro-batch through a stage takes longer than :data:`PASS_SECONDS`, fewer tokens
    are timed. Raises what a stage raises on a micro-batch, CompileError where it cannot be compiled as ``config`` asks,
    and ConfigError while a trainer is open on the model.
    """
    model.check_free()
    heap.settle()
    places = setup.places()
    try:
        with (
            private_rng(),
            training_modes(torch.device("cpu")),
            compiled(model, config.backend_in_force),
            explained(config.backend_in_force),
        ):
            return _Timing(model, setup, config, places, progress).run()
    finally:
        places.close()
        heap.trim()


class _Timing:
    """One measurement."""

    def __init__(
        self, model: StagedModel, setup: Setup, config: TrainerConfig, places: Places, progress: Progress
    ) -> None:
        self._model = model
        self._setup = setup
        self._config = config
        self._places = places
        self._progress = progress
        self._generator = torch.Generator().manual_seed(_SEED)
        self._pattern = torch.empty(PATTERN_ELEMENTS).normal_(0.0, DEVIATION, generator=self._generator)
        self._first_trained = model.first_trained
        #: Every micro-batch that may be timed: all there is of the largest, and the rows and tokens of each.
        self._largest, self._sizes = self._found_sizes()
        self._shapes: dict[tuple[int, int], _Shape] = {}

    def run(self) -> Times:
        found: dict[object, tuple[StageTimes, tuple[Packed, ...]]] = {}
        times: list[StageTimes] = []
        entering: tuple[Packed, ...] = ()
        given: list[tuple[Packed, ...]] = []
        for stage in self._model.stages:
            self._progress("timing the parts of a step", stage.index, len(self._model.stages) + 1)
            passes = (stage.index > self._first_trained) - (stage.index < self._first_trained)
            signature = workspace.signature(self._model, stage, self._shape(self._sizes[0]).context)
            key = (passes, signature, tuple((place.shape, place.dtype) for place in entering))
            if key not in found:
                found[key] = self._time_stage(stage, entering, passes)
            given.append(entering)
            measured, entering = found[key]
            times.append(measured)
        heaviest = max(self._model.stages, key=lambda stage: times[stage.index].backward)
        rates = self._rates()
        seconds = times[heaviest.index].backward
        capacity, share = self._beside(heaviest, given[heaviest.index], seconds, rates)
        return replace(rates, stages=tuple(times), capacity=capacity, compute_share=share)

    # ------------------------------------------------------------------ micro-batches

    def _found_sizes(self) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
        """A micro-batch of random ids; rows and tokens of what may be timed of it: few first, all of it last."""
        largest = self._model.batches.largest(self._config)
        first = next(iter(largest.values()))
        rows, tokens = first.shape[0], first.shape[1] if first.dim() > 1 else 1
        if "input_ids" not in largest:
            return largest, [(rows, tokens)]
        vocab_size = int(self._model.config.get_text_config(decoder=True).vocab_size)
        for name in ("input_ids", "labels"):
            largest[name] = torch.randint(0, vocab_size, (rows, tokens), generator=self._generator)
        few = min(rows, _FIRST_SHAPE[0]), min(tokens, _FIRST_SHAPE[1])
        sizes = {(rows, tokens), (1, tokens)}
        part = 2 * _FIRST_SHAPE[1]
        while part < tokens:
            sizes.add((1, part))
            part *= 2
        more = sorted((size for size in sizes if math.prod(size) > math.prod(few)), key=math.prod)
        return largest, [few, *more]

    def _shape(self, size: tuple[int, int]) -> _Shape:
        """Made when it is first needed: the embed stage runs once, on real memory."""
        if size not in self._shapes:
            rows, tokens = size
            batch = self._largest if size == self._sizes[-1] else _cut(self._largest, rows, tokens)
            embed = self._model.embed
            with StageBench(embed, self._places, self._pattern, passes=-1), torch.no_grad():
                _, context = embed.forward(batch)
            self._shapes[size] = _Shape(batch=batch, rows=rows, tokens=tokens, context=context)
        return self._shapes[size]

    def _scaled(self, places: Sequence[Packed], shape: _Shape) -> tuple[Packed, ...]:
        """What lies between two stages for another micro-batch than the smallest, for which it was seen."""
        smallest = self._shape(self._sizes[0])

        def size(place: Packed) -> tuple[int, ...]:
            if place.shape[:2] == (smallest.rows, smallest.tokens):
                return (shape.rows, shape.tokens, *place.shape[2:])
            return place.shape

        return pack([torch.empty(size(place), dtype=place.dtype, device="meta") for place in places])

    # ------------------------------------------------------------------ stages

    def _time_stage(
        self, stage: Stage, entering: tuple[Packed, ...], passes: int
    ) -> tuple[StageTimes, tuple[Packed, ...]]:
        """Time a stage on as many tokens as there is time for.

        ``entering``, and what is returned with the times: between stages, for the smallest micro-batch.
        """
        smallest = self._shape(self._sizes[0])
        few, all_tokens = smallest.num_tokens, math.prod(self._sizes[-1])
        size = self._sizes[0]
        with self._bench(stage, passes) as bench:
            began = time.perf_counter()
            bench.rebind()
            bind = time.perf_counter() - began
            leaving = bench.forward(entering, smallest.batch, smallest.context)
            small = passed = self._passes(bench, entering, leaving, smallest, 0.0)
            for wanted in reversed(self._sizes[1:]):
                expected = small.whole * math.prod(wanted) / few
                if expected <= PASS_SECONDS:
                    break
            else:
                wanted = size
        if wanted != size:
            size = wanted
            shape = self._shape(size)  # which binds the embed stage, perhaps this one
            with self._bench(stage, passes) as bench:
                given, handed = self._scaled(entering, shape), self._scaled(leaving, shape)
                passed = self._passes(bench, given, handed, shape, expected)
        if size != self._sizes[-1]:
            passed = passed.to(all_tokens, own=math.prod(size), smaller=small, smaller_tokens=few)
        return (
            StageTimes(
                forward=0.0 if isinstance(stage, HeadStage) else passed.forward,
                first_forward=0.0 if isinstance(stage, HeadStage) else passed.first_forward,
                backward=passed.backward,
                first_backward=passed.first_backward,
                bind=bind,
            ),
            leaving,
        )

    def _bench(self, stage: Stage, passes: int) -> StageBench:
        return StageBench(
            stage, self._places, self._pattern, passes=passes, loss_slice_tokens=self._config.loss_slice_tokens,
            layers_compiled=self._config.compile,
        )

    def _passes(
        self,
        bench: StageBench,
        entering: Sequence[Packed],
        leaving: Sequence[Packed],
        shape: _Shape,
        expected_seconds: float,
    ) -> _Passes:
        """Medians over some passes; before short ones, one of each warms up."""

        def forward() -> float:
            bench.load(entering)
            started = time.perf_counter()
            bench.forward(entering, shape.batch, shape.context)
            return time.perf_counter() - started

        def backward() -> float:
            bench.load(entering)
            started = time.perf_counter()
            bench.backward(entering, leaving, shape.batch, shape.context)
            return time.perf_counter() - started

        began = time.perf_counter()
        if expected_seconds < SHORT_SECONDS:
            forward()
            backward()
        forwards, first_forwards, backwards, first_backwards = [], [], [], []
        for number in range(MOST_PASSES):
            chill(self._places)
            first_forwards.append(forward())
            forwards.append(forward())
            bench.begin_step()
            chill(self._places)
            first_backwards.append(backward())
            backwards.append(backward())
            taken = time.perf_counter() - began
            if (taken > PASSES_SECONDS and number + 1 >= LEAST_PASSES) or taken > LONGEST_SECONDS:
                break
        return _Passes(
            forward=statistics.median(forwards),
            first_forward=statistics.median(first_forwards),
            backward=statistics.median(backwards),
            first_backward=statistics.median(first_backwards),
        )

    # ------------------------------------------------------------------ the other lanes

    def _rates(self) -> Times:
        """What an element takes; the stages' times and what depends on them are filled in later."""
        update = _Update(self._setup, self._config, self._places, self._pattern)
        count = update.num_elements
        update_seconds = statistics.median(self._cold(update.run) for _ in range(_UPDATES))
        written = update.written
        checksum_seconds = statistics.median(
            _timed(lambda: checksum.extend(0, written)) for _ in range(_UPDATES)
        )
        norm = SquareSum()
        norm_seconds = statistics.median(self._cold(lambda: norm.square_sum(update.gradient)) for _ in range(_UPDATES))
        merge_seconds = statistics.median(self._cold(update.merge) for _ in range(_UPDATES))
        return Times(
            stages=(),
            update_seconds=update_seconds / count,
            checksum_seconds=checksum_seconds / written.nbytes,
            norm_seconds=norm_seconds / count,
            merge_seconds=merge_seconds / count,
            op_seconds=hand_over_seconds(),
            capacity=1.0,
            compute_share=0.5,
        )

    def _cold(self, work: Callable[[], object]) -> float:
        """Seconds of something whose data comes from memory, as in a run."""
        chill(self._places)
        return _timed(work)

    def _beside(
        self, stage: Stage, entering: tuple[Packed, ...], seconds: float, rates: Times
    ) -> tuple[float, float]:
        """What computation and updates do at once: in relation to one alone, and computation's share of it.

        ``seconds``: what the stage's backward takes for the largest micro-batch.
        """
        update = _Update(self._setup, self._config, self._places, self._pattern)
        alone = (rates.update_seconds + rates.checksum_seconds * update.bytes_each) * update.num_elements
        per_token = seconds / math.prod(self._sizes[-1])
        size = next(
            (size for size in reversed(self._sizes) if per_token * math.prod(size) < BESIDE_SECONDS / 2), self._sizes[0]
        )
        smallest, own = self._shape(self._sizes[0]), self._shape(size)
        passes = (stage.index > self._first_trained) - (stage.index < self._first_trained)
        with self._bench(stage, passes) as bench:
            leaving = bench.forward(entering, smallest.batch, smallest.context)
            given, handed = self._scaled(entering, own), self._scaled(leaving, own)

            def compute() -> None:
                bench.load(given)
                bench.backward(given, handed, own.batch, own.context)

            compute()
            compute_alone = statistics.median(_timed(compute) for _ in range(3))
            with _Looping(update.run_and_sum) as other:
                began = time.perf_counter()
                num_passes = 0
                while num_passes < 2 or (
                    time.perf_counter() - began < BESIDE_SECONDS and (num_passes < 5 or other.count < 5)
                ):
                    compute()
                    num_passes += 1
                passed = time.perf_counter() - began
                updates = other.count
        compute_rate = min(1.0, num_passes * compute_alone / passed)
        update_rate = min(1.0, updates * alone / passed)
        capacity = compute_rate + update_rate
        return capacity, compute_rate / capacity


class _Update:
    """An update of one piece, in a state slot of the run's."""

    def __init__(self, setup: Setup, config: TrainerConfig, places: Places, pattern: Tensor) -> None:
        largest = max(layout.num_elements for layout in setup.layouts)
        count = min(setup.memory.piece_elements, -(-largest // 4096) * 4096)
        self.num_elements = count
        self.bytes_each = STATE_BYTES
        #: Slots take turns, as in a run: what is updated has just come from the drive, not from a cache.
        self._slots = cycle([slot.arrays(count) for slot in places.states])
        for hi, lo, exp_avg, exp_avg_sq in (slot.arrays(count) for slot in places.states):
            for target in (exp_avg, exp_avg_sq):
                fill(target, pattern)
            exp_avg_sq.square_()
            hi.copy_(exp_avg.bfloat16().view(torch.int16))
            lo.zero_()
        #: uint8: as much as an update writes.
        self.written = places.ring[: self.bytes_each * count]
        stage = max(range(len(setup.layouts)), key=lambda index: places.stages[index].gradients.numel())
        self.gradient = places.stages[stage].gradients[:count]
        fill(self.gradient, pattern)
        #: Without weights an update begins with both halves, as it does where weights are computed with in bfloat16.
        self._weights = places.stages[stage].weights[:count]
        self._loaded = None if setup.memory.demand.straight else self._weights
        self._updater = PieceUpdater(config.optimizer)
        decay = config.optimizer.weight_decay
        self._segments = [SegmentUpdate(start=0, stop=count, adam_step=10, lr=1e-6, weight_decay=decay)]

    def run(self) -> None:
        """AdamW on the piece in the next slot, whose weights are loaded if a run's are."""
        hi, lo, exp_avg, exp_avg_sq = next(self._slots)
        self._updater.update(
            weight_hi=hi,
            weight_lo=lo,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            gradient=self.gradient,
            segments=self._segments,
            weights=self._loaded,
        )

    def run_and_sum(self) -> None:
        """The same, and the checksum of what is then written."""
        self.run()
        checksum.extend(0, self.written)

    def merge(self) -> None:
        """A piece's weights from a slot into a weight buffer."""
        hi, lo, _, _ = next(self._slots)
        put_weights(hi, lo, self._weights)


class _Looping:
    """A thread that does something over and over, as long as the context lasts; leaving it raises what that raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._stop = threading.Event()
        self._error: BaseException | None = None
        #: How often it has been done.
        self.count = 0
        self._thread = threading.Thread(target=self._loop, name="hoist-timing", daemon=True)

    def _loop(self) -> None:
        try:
            with torch.no_grad():
                while not self._stop.is_set():
                    self._work()
                    self.count += 1
        except BaseException as error:
            self._error = error

    def __enter__(self) -> _Looping:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _cut(batch: Batch, rows: int, tokens: int) -> dict[str, Tensor]:
    """Its first rows and tokens. Positions of rows that are cut are those of one document."""
    cut = {name: tensor[:rows, :tokens].contiguous() for name, tensor in batch.items()}
    if "position_ids" in cut and tokens < batch["position_ids"].shape[1]:
        cut["position_ids"] = torch.arange(tokens).expand(rows, tokens).contiguous()
    return cut


class _Nothing:
    """Ops that do nothing, for the executor."""

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> None:
        return

    def start(self, op: Op, step: int, done: Done) -> None:
        done(None)


def hand_over_seconds() -> float:
    """What the executor takes for an op that does nothing, as seconds of a step over its number of ops."""
    shapes = (StageShape(chunks=(0, 1, 2, 3)),) * 6
    buffers = Buffers(
        weights=tuple(index % 2 for index in range(6)),
        gradients=tuple(index % 2 for index in range(6)),
        num_staging=2,
        num_states=2,
        num_activations=24,
    )
    linked = link(vertical(shapes, 4, buffers, cold=False))
    executor = Executor(_Nothing())
    try:
        executor.run(linked, 1)
        began = time.perf_counter()
        for step in (2, 3, 4):
            executor.run(linked, step)
        executor.drain()
        return (time.perf_counter() - began) / (3 * len(linked.plan.ops))
    finally:
        executor.close()
