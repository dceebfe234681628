"""What a run will take, before its first step: bytes in each tier, traffic, seconds of a step, and what they hang on.

The drive is measured through the run's own engine and the stages on its own buffers (`timing.py`); the plan that the
run will follow is then priced by simulation (`simulate.py`). Nothing is kept, and no result of a run depends on it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hoist.scheduler import advice
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.link import LinkedPlan, link
from hoist.scheduler.ops import Kind, Lane
from hoist.scheduler.pricing import Prices, Times
from hoist.scheduler.setup import Setup
from hoist.scheduler.simulate import Costs, Machine, bounds
from hoist.scheduler.stages import StagedModel
from hoist.scheduler.step_plans import steady_plan, step_plan
from hoist.scheduler.timing import Progress, measure
from hoist.tiers.allocation import free_bytes
from hoist.tiers.dealing import measured_bytes
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.probe import measure_steady
from hoist.tiers.layout import round_up

#: Most bytes of the file that a drive is measured with, and what is always measured; in between an eighth of what a
#: slot of the store holds. It is written twice.
DRIVE_BYTES, _LEAST_BYTES = 64 * 2**20, 16 * 2**20
#: It may be told to have less, but not less than this: fewer requests say nothing.
_FEWEST_BYTES = 2**20
#: The file takes no more of what the drive has free than one part in so many.
_ROOM_PARTS = 8
#: Longest that writing it once, writing it again, and reading it take, for all drives together.
_PHASE_SECONDS = 0.4
#: Requests in flight, as many as two optimizer pieces make.
DRIVE_REQUESTS = 8
#: Most of them all together (bytes), and the least of one.
_IN_FLIGHT_BYTES, _LEAST_REQUEST = 32 * 2**20, 64 * 1024
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class DrivePlace:
    """A drive that the store is on, or will be."""

    directory: Path
    """Where a temporary file may be made to measure it."""
    share: float = 1.0
    """Of the store's bytes that lie on it, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveSpeed:
    """What all drives of a store do together, each with its share of the bytes."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    filling_requests: float
    """Requests in flight that it takes to be so fast."""
    latency_seconds: float
    """Of a request of one page: through the engine's threads and back."""
    cpu_seconds_per_byte: float
    """Processor time for a byte that is moved."""
    measured_bytes: int
    """Of the file that it was measured with, written twice and read; with several drives, of the smallest."""
    request_bytes: int
    requests_in_flight: int
    """Of so many bytes each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a prediction rests on: good for any budget and delay on this machine, for the same model and micro-batch."""

    times: Times
    drive: DriveSpeed
    part_bytes: int
    """The engine's: longer requests are cut."""
    parts_at_once: int
    num_cores: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a steady step will take, if every tensor gets a gradient and nothing else runs on the machine.

    Commits, evaluations and a run's first step, which reads what is then kept, are not in it.
    """

    seconds: float
    """Of a step."""
    bound_by: str
    """The lane without whose work a step would be shortest."""
    margin_seconds: float
    """By so much."""
    next_bound: str
    """The lane that is busiest then."""
    without_seconds: Mapping[str, float]
    """Per lane, seconds of a step without its work; lanes that could not bound it are left out."""
    lanes: Mapping[str, float]
    """Per lane, seconds of a step in which it is at work."""
    stalls: Mapping[str, float]
    """Per lane, seconds in which it has work left but waits."""
    read_bytes: int
    """From NVMe, a step."""
    written_bytes: int
    """To NVMe, a step."""
    cold_read_bytes: int
    """From NVMe in the run's first step."""
    read_bytes_per_second: float
    """Measured, of the drives."""
    write_bytes_per_second: float
    compute_seconds: float
    """Computation of a step, alone on the machine."""
    io_seconds: float
    """Its I/O, one byte after the other at the measured bandwidths."""
    limit_seconds: float
    """The larger of the two: what perfect overlap would take."""
    optim_seconds: float
    """Updates, alone on the machine."""
    copy_seconds: float
    """Merging weights, alone on the machine."""
    tokens: int
    """Of a step."""
    advice: str | None
    """What would make steps shorter, in a line; None if nothing simple would."""
    num_simulated_steps: int
    """Steps that were averaged."""

    def to_json(self) -> dict[str, Any]:
        """The prediction as JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens / self.seconds}


def predict(
    model: StagedModel,
    setup: Setup,
    config: TrainerConfig,
    *,
    engine: IoEngine,
    drives: Sequence[DrivePlace],
    progress: Progress = lambda what, done, total: None,
    most_bytes: int = DRIVE_BYTES,
) -> tuple[Prediction, Measured]:
    """Measure, then predict: before a trainer is made on ``model``, and while nothing else runs.

    ``most_bytes``: of the file that a drive is measured with, 1 MiB at least. Takes a few seconds, and no more memory
    than the run. Makes a temporary file in each of ``drives``, and removes it. Raises StoreRefusedError where none can
    be made, what a stage raises, and ConfigError while a trainer is open.
    """
    progress("measuring the drive", 0, 0)
    drive = measure_drives(setup, engine, drives, most_bytes=most_bytes)
    times = measure(model, setup, config, progress=progress)
    measured = Measured(
        times=times,
        drive=drive,
        part_bytes=engine.part_bytes,
        parts_at_once=engine.parts_at_once,
        num_cores=len(os.sched_getaffinity(0)),
    )
    return priced(setup, config, measured, tokens=model.batches.num_tokens(model.batches.largest(config))), measured


def measure_drives(
    setup: Setup, engine: IoEngine, drives: Sequence[DrivePlace], *, most_bytes: int = DRIVE_BYTES
) -> DriveSpeed:
    """How fast the drives are with requests like the plan's, one after another; all together as their shares say.

    The slowest in relation to its share sets the pace. Takes about two seconds at most, on slow drives less than
    ``most_bytes``. Raises StoreRefusedError, TransferError.
    """
    request_bytes = _request_bytes(setup, engine)
    most = max(1, min(_IN_FLIGHT_BYTES, setup.memory.need_bytes // 2) // request_bytes)
    in_flight = min(DRIVE_REQUESTS, most)
    found = []
    for drive in drives:
        room = free_bytes(drive.directory) // _ROOM_PARTS
        speed = measure_steady(
            drive.directory, engine, num_bytes=min(_file_bytes(setup, most_bytes), room), request_bytes=request_bytes,
            in_flight=in_flight, seconds=_PHASE_SECONDS / len(drives),
        )  # fmt: skip
        moving_seconds = max(0.0, request_bytes / speed.alone_read_bytes_per_second - speed.page_read_seconds)
        filling = speed.read_bytes_per_second * moving_seconds / request_bytes
        found.append((drive.share, speed, max(1.0, filling)))
    slowest_read = min(full.read_bytes_per_second / share for share, full, _ in found if share)
    slowest_write = min(full.write_bytes_per_second / share for share, full, _ in found if share)
    return DriveSpeed(
        read_bytes_per_second=slowest_read,
        write_bytes_per_second=slowest_write,
        filling_requests=min(float(in_flight), sum(filling for _, _, filling in found)),
        latency_seconds=max(full.page_read_seconds for _, full, _ in found),
        cpu_seconds_per_byte=sum(share * full.cpu_seconds_per_byte for share, full, _ in found),
        measured_bytes=min(full.measured_bytes for _, full, _ in found),
        request_bytes=request_bytes,
        requests_in_flight=min(in_flight, min(full.measured_bytes for _, full, _ in found) // request_bytes),
    )


def _request_bytes(setup: Setup, engine: IoEngine) -> int:
    return round_up(max(_LEAST_REQUEST, min(engine.part_bytes, 4 * setup.memory.piece_elements)), _PAGE_BYTES)


def _file_bytes(setup: Setup, most_bytes: int) -> int:
    """What a drive is measured with: little beside what a step writes, but enough to be measured."""
    slot_bytes = measured_bytes(setup.layouts, most=8 * DRIVE_BYTES)
    return min(slot_bytes, max(_LEAST_BYTES, slot_bytes // 8), max(most_bytes, _FEWEST_BYTES))


def probed_bytes(setup: Setup, engine: IoEngine, most_bytes: int = DRIVE_BYTES) -> int:
    """The most that :func:`measure_drives` writes to each drive."""
    request_bytes = _request_bytes(setup, engine)
    return 2 * request_bytes * max(1, -(-_file_bytes(setup, most_bytes) // request_bytes))


def step_bytes(setup: Setup, config: TrainerConfig) -> tuple[int, int]:
    """What a steady step reads from the drives and writes to them; nothing is measured for that."""
    return Prices(setup, part_bytes=_LEAST_REQUEST).bytes_of(steady_plan(setup, config).ops)


def priced(setup: Setup, config: TrainerConfig, measured: Measured, *, tokens: int, advise: bool = True) -> Prediction:
    """The prediction for a run with these buffers. ``tokens``: of a micro-batch. Pure, but for the time it takes."""
    linked = link(steady_plan(setup, config))
    prices = Prices(setup, part_bytes=measured.part_bytes)
    costs = prices.costs(linked, measured.times)
    cold_read_bytes, _ = prices.bytes_of(step_plan(setup, config, cold=True, pending=False).ops)
    found = bounds(linked, costs, _machine(costs, measured))
    of_lane = {lane: _lane_seconds(linked, costs, lane) for lane in (Lane.COMPUTE, Lane.OPTIM, Lane.COPY)}
    step = found.step
    drive = measured.drive
    io_seconds = step.read_bytes / drive.read_bytes_per_second + step.written_bytes / drive.write_bytes_per_second
    prediction = Prediction(
        seconds=step.seconds,
        bound_by=found.bound_by.value,
        margin_seconds=found.margin_seconds,
        next_bound=found.next_bound.value,
        without_seconds={lane.value: seconds for lane, seconds in found.without.items()},
        lanes={lane.value: seconds for lane, seconds in step.busy_seconds.items()},
        stalls={lane.value: seconds for lane, seconds in step.stall_seconds.items()},
        read_bytes=step.read_bytes,
        written_bytes=step.written_bytes,
        cold_read_bytes=cold_read_bytes,
        read_bytes_per_second=drive.read_bytes_per_second,
        write_bytes_per_second=drive.write_bytes_per_second,
        compute_seconds=of_lane[Lane.COMPUTE],
        io_seconds=io_seconds,
        limit_seconds=max(of_lane[Lane.COMPUTE], io_seconds),
        optim_seconds=of_lane[Lane.OPTIM],
        copy_seconds=of_lane[Lane.COPY],
        tokens=tokens * config.num_micro_batches,
        advice=None,
        num_simulated_steps=step.num_steps,
    )
    return replace(prediction, advice=_advice(prediction, setup, config, linked)) if advise else prediction


def _machine(costs: Costs, measured: Measured) -> Machine:
    drive, times = measured.drive, measured.times
    read, written = sum(costs.read_bytes), sum(costs.written_bytes)
    drive_seconds = read / drive.read_bytes_per_second + written / drive.write_bytes_per_second
    busy_cores = drive.cpu_seconds_per_byte * (read + written) / drive_seconds if drive_seconds else 0.0
    return Machine(
        read_bytes_per_second=drive.read_bytes_per_second,
        write_bytes_per_second=drive.write_bytes_per_second,
        latency_seconds=drive.latency_seconds,
        parts_at_once=measured.parts_at_once,
        filling_parts=drive.filling_requests,
        capacity=times.capacity,
        compute_share=times.compute_share,
        io_core_share=min(0.9, busy_cores / measured.num_cores),
    )


def _lane_seconds(linked: LinkedPlan, costs: Costs, lane: Lane) -> float:
    return math.fsum(
        seconds for op, seconds in zip(linked.plan.ops, costs.seconds, strict=True) if op.lane is lane
    )


def _advice(prediction: Prediction, setup: Setup, config: TrainerConfig, linked: LinkedPlan) -> str | None:
    """See `advice.py`."""
    drive_bytes = prediction.read_bytes_per_second, prediction.write_bytes_per_second
    spilled = any(op.kind is Kind.SPILL_ACTIVATION for op in linked.plan.ops)
    return advice.line(
        prediction.bound_by,
        compute_seconds=prediction.compute_seconds,
        io_seconds=prediction.io_seconds,
        config=config,
        memory=setup.memory,
        bytes_per_second=drive_bytes,
        spills=spilled,
    )
