"""A very small training run with everything that can go wrong in it: spilled activations and gradients, frozen tensors,
several chunks a stage, several pieces a chunk. Runs it in a store under any engine, and says what a store holds.

Engines that do harm are in `engines.py` and `systemcalls.py`; what must hold afterwards is for the tests to say.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import LlamaConfig, PreTrainedModel

from hoist.scheduler.config import Dtype, Order, TrainerConfig
from hoist.scheduler.creation import Source, create_store
from hoist.scheduler.memory import smallest
from hoist.scheduler.setup import Setup, prepare
from hoist.scheduler.stages import StagedModel
from hoist.scheduler.trainer import Trainer
from hoist.tiers.dealing import MeasuredDirectory
from hoist.tiers.device import Device
from hoist.tiers.errors import StoreRefusedError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from tests.support.buffers import open_descriptors
from tests.support.engines import Fail, RecordedRequest
from tests.support.late_device import LateDevice
from tests.support.training import (
    PLENTY_BYTES,
    Engine,
    Recipe,
    Step,
    from_weights,
    initial_weights,
    layouts_of,
    make_steps,
    set_up,
    staged_model,
)

NUM_STEPS = 3
VOCAB_SIZE = 1009


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run: the same for every store and engine it is tried in."""

    config: LlamaConfig
    recipe: Recipe
    steps: Sequence[Step]
    staged: StagedModel
    settings: TrainerConfig
    setup: Setup
    weights: Mapping[str, Any]
    """Initial ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What a store has committed. Equal snapshots: equal bytes of every chunk, whichever slots hold them."""

    step: int
    adam_steps: Mapping[str, int]
    checksums: bytes
    """Of every chunk; they were compared with the chunks when the snapshot was taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How an undisturbed run goes."""

    store: Path
    """A store at step 0, to copy."""
    losses: Sequence[float]
    """Of each step."""
    snapshots: Sequence[Snapshot]
    """At step 0, 1, 2, ..."""


def _freeze_something(model: PreTrainedModel) -> None:
    """A frozen tensor in the embedding and one in a layer, so that there are frozen arrays to read."""
    for name, parameter in model.named_parameters():
        if name.endswith("layers.0.mlp.up_proj.weight"):
            parameter.requires_grad_(False)


@cache
def job(plan: Order, num_micro_batches: int = 3, *, dtype: Dtype = "float32") -> Job:
    """The job in vertical or horizontal order, on the smallest budget that works."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    recipe = Recipe(alter=_freeze_something, dtype=dtype)
    steps = make_steps(NUM_STEPS, num_micro_batches, rows=1, tokens=8, vocab_size=VOCAB_SIZE)
    staged = staged_model(config, recipe)
    engine = Engine(plan=plan, commit_every=1)
    settings, setup = set_up(staged, layouts_of(staged, engine), recipe, engine, steps)
    assert bool(setup.scratch_activation_bytes) == (plan == "vertical")
    assert bool(setup.scratch_gradient_bytes) == (plan == "horizontal")
    assert max(layout.num_chunks for layout in setup.layouts) > 1
    assert any(layout.frozen_bytes for layout in setup.layouts)
    return Job(
        config=config,
        recipe=recipe,
        steps=steps,
        staged=staged,
        settings=settings,
        setup=setup,
        weights=initial_weights(config, recipe),
    )


@cache
def delayed_job(plan: Order, delay: float, *, kept: bool, clip_norm: float = 0.0) -> Job:
    """The same with delayed updates, whose gradients wait in scratch, or (``kept``) in memory; and with clipping."""
    what = job(plan)
    settings = replace(
        what.settings, delay=delay, clip_norm=clip_norm, host_memory_bytes=PLENTY_BYTES, resident_weights=False
    )
    setup = prepare(what.staged, what.setup.layouts, settings)
    if not kept:
        settings = replace(settings, host_memory_bytes=smallest(setup.memory.demand).need_bytes)
        setup = prepare(what.staged, what.setup.layouts, settings)
    assert bool(setup.stash_bytes) == (not kept)
    return replace(what, settings=settings, setup=setup)


@cache
def resident_job(share: float, *, delay: float = 0.0) -> Job:
    """The same with ``share`` of the states, frozen ones included, in memory from step to step."""
    what = job("vertical")
    settings = replace(
        what.settings, delay=delay, residency=share, host_memory_bytes=PLENTY_BYTES, resident_weights=False
    )
    setup = prepare(what.staged, what.setup.layouts, settings)
    kept = setup.memory.kept
    assert any(kept.weights)
    assert (kept.weights == kept.moments) == (share == 1.0)
    assert bool(kept.frozen) == (share == 1.0)
    return replace(what, settings=settings, setup=setup)


@cache
def guessing_job(*, kept: bool, commit_every: int = 1) -> Job:
    """The same with updates before the norm is known, all of them wrong; in a store of two or of three slots."""
    what = delayed_job("vertical", 0.25, kept=kept, clip_norm=CLIP_NORM)
    settings = replace(what.settings, clip_mode="speculative", commit_every=commit_every)
    setup = prepare(what.staged, what.setup.layouts, settings)
    assert setup.num_slots == (2 if commit_every == 1 else 3)
    assert any(first > 0 for first in setup.delayed_from)
    return replace(what, settings=settings, setup=setup)


@cache
def late_job(name: str) -> Job:
    """A setting of SETTINGS with a device that has memory of its own: on the smallest budgets, if it has such a one."""
    what = SETTINGS[name]()
    smallest_host = what.settings.host_memory_bytes < PLENTY_BYTES
    settings = replace(what.settings, host_memory_bytes=PLENTY_BYTES, device_memory_bytes=PLENTY_BYTES)
    with LateDevice() as device:
        least = smallest(prepare(what.staged, what.setup.layouts, settings, device=device).memory.demand)
        settings = replace(settings, device_memory_bytes=least.device_need_bytes)
        if smallest_host:
            settings = replace(settings, host_memory_bytes=least.need_bytes)
        setup = prepare(what.staged, what.setup.layouts, settings, device=device)
    return replace(what, settings=settings, setup=setup)


#: Small enough that every step of the job is clipped.
CLIP_NORM = 0.01

#: The kinds of run that faults, kills and power cuts are tried on, by name. Another setting is one more entry.
SETTINGS: Mapping[str, Callable[[], Job]] = {
    "vertical": partial(job, "vertical"),
    "horizontal": partial(job, "horizontal"),
    "delayed": partial(delayed_job, "vertical", 0.5, kept=False),
    "delayed, kept": partial(delayed_job, "vertical", 0.5, kept=True),
    "delayed, horizontal": partial(delayed_job, "horizontal", 0.5, kept=False),
    "clipped": partial(delayed_job, "vertical", 0.0, kept=False, clip_norm=CLIP_NORM),
    "clipped, kept": partial(delayed_job, "vertical", 0.0, kept=True, clip_norm=CLIP_NORM),
    "clipped, guessed": partial(guessing_job, kept=False),
    "clipped, guessed, three slots": partial(guessing_job, kept=True, commit_every=2),
    "resident": partial(resident_job, 1.0),
    "resident in part": partial(resident_job, 0.3, delay=0.5),
}
#: Those that are left to a longer run where all would take long: each is much like another one.
RARE = ("delayed, horizontal", "delayed, kept", "clipped, kept")
#: Those that take another course than the rest, whose results must all be the same bits.
CLIPPED = frozenset(name for name in SETTINGS if name.startswith("clipped"))


def create(
    what: Job,
    directory: Path,
    engine: IoEngine,
    *,
    source: Source | None = None,
    drives: Sequence[MeasuredDirectory] = (),
) -> None:
    """Make the job's store, at step 0, and close it. ``source``: other weights than the job's."""
    create_store(
        directory,
        model=what.staged,
        setup=what.setup,
        engine=engine,
        source=source or from_weights(what.weights),
        attributes={"test": True},
        drives=drives,
    ).close()


def go_on(
    what: Job,
    directory: Path,
    engine: IoEngine,
    losses: list[float] | None = None,
    *,
    upto: int = NUM_STEPS,
    trainer_kind: type[Trainer] = Trainer,
    store_kind: type[Store] = Store,
    validate: bool = False,
    device: Device | None = None,
) -> list[float]:
    """Open the store, train to the end of step ``upto``, commit. ``losses`` gets each step's as it ends.

    ``device``: for a job that was made for one; it stays open.
    """
    losses = [] if losses is None else losses
    settings = replace(what.settings, validate=validate)
    with (
        store_kind.open(directory, engine=engine) as store,
        trainer_kind(
            model=what.staged, store=store, engine=engine, config=settings, baseline_bytes=0, setup=what.setup,
            device=device,
        ) as trainer,
    ):  # fmt: skip
        for step in what.steps[trainer.step_number : upto]:
            losses.append(trainer.step(step).loss)
        trainer.commit()
    return losses


def check_refusal(what: Job, directory: Path) -> str:
    """A trainer for the store cannot be made: StoreRefusedError, and nothing of it stays. Returns the message."""
    with (
        nothing_left_behind(directory),
        DirectEngine(num_threads=1) as engine,
        Store.open(directory, engine=engine) as store,
    ):
        try:
            Trainer(
                model=what.staged, store=store, engine=engine, config=what.settings, baseline_bytes=0, setup=what.setup
            ).close()
        except StoreRefusedError as error:
            return str(error)
    raise AssertionError("the trainer was made")


def snapshot(directory: Path) -> Snapshot:
    """Open the store as a writer would, re-read everything that is committed, and note it."""
    with DirectEngine(num_threads=2) as engine, Store.open(directory, engine=engine, check="crc") as store:
        assert store.record is not None
        return Snapshot(
            step=store.record.step,
            adam_steps=store.record.adam_steps,
            checksums=(directory / store.record.checksum_file).read_bytes(),
        )


def undisturbed(what: Job, directory: Path) -> Course:
    """Run the job once, committing and looking after every step."""
    directory.mkdir()
    origin, store = directory / "origin", directory / "undisturbed"
    losses: list[float] = []
    snapshots: list[Snapshot] = []
    with DirectEngine(num_threads=2) as engine:
        create(what, origin, engine)
        copy_store(origin, store)
        snapshots.append(snapshot(store))
        for number in range(1, NUM_STEPS + 1):
            go_on(what, store, engine, losses, upto=number)
            snapshots.append(snapshot(store))
    assert len({taken.checksums for taken in snapshots}) == NUM_STEPS + 1
    return Course(store=origin, losses=losses, snapshots=snapshots)


def undisturbed_courses(directory: Path) -> dict[str, Course]:
    """Of all settings: one course for those that do not clip, one for those that do."""
    courses = {name: undisturbed(make(), directory / name) for name, make in SETTINGS.items()}
    for clips in (False, True):
        same = [course for name, course in courses.items() if (name in CLIPPED) == clips]
        assert all(course.losses == same[0].losses and course.snapshots == same[0].snapshots for course in same)
    assert courses["clipped"].losses[1:] != courses["vertical"].losses[1:]
    return courses


def copy_store(source: Path, target: Path) -> Path:
    """A copy of a closed store."""
    for parent, _, names in os.walk(source):
        copied = target / Path(parent).relative_to(source)
        copied.mkdir()
        for name in names:
            (copied / name).write_bytes((Path(parent) / name).read_bytes())
    return target


class Nth:
    """A rule for FaultyEngine: the ``number``-th request of an operation fails (from 1), or that one and all later.

    ``where``: only requests whose path contains it are counted.
    """

    def __init__(self, operation: str, number: int, fail: Fail, *, for_good: bool = False, where: str = "") -> None:
        self._operation = operation
        self._number = number
        self._fail = fail
        self._for_good = for_good
        self._where = where
        self._lock = threading.Lock()
        self._count = 0
        #: The requests that failed.
        self.failed: list[RecordedRequest] = []

    def __call__(self, request: RecordedRequest) -> Fail | None:
        if request.operation != self._operation or self._where not in str(request.path):
            return None
        with self._lock:
            self._count += 1
            if self._count != self._number and not (self._for_good and self._count > self._number):
                return None
            self.failed.append(request)
        return self._fail


@contextmanager
def quick_directory() -> Iterator[Path]:
    """A directory in memory, where a flush costs nothing: for tests that are not about the file system."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="hoist-test-", dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


@contextmanager
def nothing_left_behind(directory: Path) -> Iterator[None]:
    """Around something that may fail: no thread of it lives on, no file under ``directory`` stays open."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not left, f"threads that live on: {left}"
    assert open_descriptors(directory) == []
