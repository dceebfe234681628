"""Runs a trainer's ops in an unlucky order: each waits until a dealer, thread of its own, calls it up.

The order is drawn from a seed: some kinds of ops are starved until nothing else can run. A plan whose dependencies
are complete gives the same bits in any order; one that lacks one does not, or breaks a rule of the residency table.
Late and early use of buffers by the I/O engine is `engines.PoisoningEngine`'s part.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hoist.scheduler.executor import Done, Mark
from hoist.scheduler.link import LinkedPlan, link
from hoist.scheduler.ops import Kind, Lane, Op
from hoist.scheduler.runtime import Runtime
from hoist.scheduler.trainer import Trainer
from hoist.tiers.io.base import IoEngine
from tests.support.engines import PoisoningEngine

#: Ops by what may be starved together.
_GROUPS: dict[Kind, str] = {
    Kind.READ_WEIGHTS: "weights",
    Kind.READ_FROZEN: "weights",
    Kind.READ_KEPT: "kept",
    Kind.MERGE: "merge",
    Kind.READ_STATES: "states",
    Kind.WRITE_STATES: "writes",
    Kind.NORM: "optim",
    Kind.UPDATE: "optim",
    Kind.SPILL_ACTIVATION: "spill",
    Kind.SPILL_GRADIENT: "spill",
    Kind.STASH_GRADIENT: "spill",
    Kind.FETCH_ACTIVATION: "fetch",
    Kind.FETCH_GRADIENT: "fetch",
    Kind.WRITE_KEPT: "commit",
    Kind.COMMIT: "commit",
}
_COMPUTE = "compute"
#: Longest wait for more ops to choose from (seconds). No result depends on it, only how unlucky the order is.
_GATHER_SECONDS = 0.002


class Dealer:
    """Calls up waiting ops one at a time: the least starved group first, now and then any. Close it to let all go."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        groups = [*dict.fromkeys(_GROUPS.values()), _COMPUTE]
        self._random.shuffle(groups)
        #: Group -> rank; the last one waits longest.
        self.ranks = {group: rank for rank, group in enumerate(groups)}
        self._changed = threading.Condition()
        self._waiting: list[tuple[str, Callable[[], None]]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._deal, name="dealer", daemon=True)
        self._thread.start()

    def wait_turn(self, group: str) -> None:
        """Block the calling lane until its op is called up."""
        called = threading.Event()
        self.defer(group, called.set)
        called.wait()

    def defer(self, group: str, go_on: Callable[[], None]) -> None:
        """Have the dealer's thread run ``go_on`` when the op is called up; at once, here, after :meth:`close`."""
        with self._changed:
            if not self._closed:
                self._waiting.append((group, go_on))
                self._changed.notify_all()
                return
        go_on()

    def close(self) -> None:
        """Let everything go, in any order."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _deal(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._closed:
                    # Not a sleep that a result depends on: a chance for more ops to come, so that there is a choice.
                    self._changed.wait(timeout=self._random.choice((0.0, _GATHER_SECONDS / 4, _GATHER_SECONDS)))
                if self._closed:
                    waiting, self._waiting = self._waiting, []
                    break
                _, go_on = self._waiting.pop(self._choose())
            go_on()
        for _, go_on in waiting:
            go_on()

    def _choose(self) -> int:
        if self._random.random() < 0.1:
            return self._random.randrange(len(self._waiting))
        first = min(self.ranks[group] for group, _ in self._waiting)
        return self._random.choice([i for i, (group, _) in enumerate(self._waiting) if self.ranks[group] == first])


class DisorderedRuntime(Runtime):
    """Carries out ops when the dealer calls them up."""

    seed = 0

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.dealer = Dealer(self.seed)

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        if op.lane is not Lane.NONE:  # those are run by whoever ended the op before, and must not block
            self.dealer.wait_turn(_GROUPS.get(op.kind, _COMPUTE))
        return super().run(op, step, after)

    def start(self, op: Op, step: int, done: Done) -> None:
        def begin() -> None:
            try:
                super(DisorderedRuntime, self).start(op, step, done)
            except BaseException as error:
                done(error)

        self.dealer.defer(_GROUPS[op.kind], begin)


class StatePoisoningEngine(PoisoningEngine):
    """Poisons what has been written, but for spills: another op may still read what is spilled."""

    def __init__(self, inner: IoEngine, seed: int) -> None:
        super().__init__(inner, seed, poison_written=True)
        self._sparing = PoisoningEngine(inner, seed)

    def write(self, path: Path, offset: int, buffer: torch.Tensor) -> Future[None]:
        if path.parent.name == "scratch":
            return self._sparing.write(path, offset, buffer)
        return super().write(path, offset, buffer)

    def close(self) -> None:
        self._sparing.close()
        super().close()


#: Changes a plan's op; for dependencies left out on purpose.
Mutation = Callable[[Op], Op]


class DisorderedTrainer(Trainer):
    """A trainer in an unlucky order, on a plan that may have been spoiled."""

    runtime_kind = DisorderedRuntime
    mutation: Mutation | None = None

    def _plan(self, num_micro_batches: int) -> LinkedPlan:
        linked = super()._plan(num_micro_batches)
        mutation = type(self).mutation
        if mutation is None:
            return linked
        key = (num_micro_batches, self._cold, self._pending)
        if key not in self._spoiled:
            ops = tuple(mutation(op) for op in linked.plan.ops)
            assert ops != linked.plan.ops, "the mutation changes nothing"
            self._spoiled[key] = link(replace(linked.plan, ops=ops))
        return self._spoiled[key]

    def __init__(self, **arguments: Any) -> None:
        #: Spoiled plans by (micro-batches, cold, pending).
        self._spoiled: dict[tuple[int, bool, bool], LinkedPlan] = {}
        super().__init__(**arguments)

    def close(self) -> None:
        # The executor waits for its lanes, which may wait for the dealer.
        assert isinstance(self._runtime, DisorderedRuntime)
        self._runtime.dealer.close()
        super().close()


def disordered(seed: int, mutation: Mutation | None = None) -> type[DisorderedTrainer]:
    """A kind of trainer whose ops run in the order of ``seed``."""

    class SeededRuntime(DisorderedRuntime):
        pass

    class SeededTrainer(DisorderedTrainer):
        runtime_kind = SeededRuntime

    SeededRuntime.seed = seed
    SeededTrainer.mutation = None if mutation is None else staticmethod(mutation)
    return SeededTrainer


def without_reads(kinds: Sequence[Kind], keep: Callable[[Any], bool]) -> Mutation:
    """Ops of these kinds don't wait for what they read, but for the resources that ``keep`` is true of."""

    def mutate(op: Op) -> Op:
        return replace(op, reads=tuple(filter(keep, op.reads))) if op.kind in kinds else op

    return mutate


def without_writes(kinds: Sequence[Kind], keep: Callable[[Any], bool]) -> Mutation:
    """Ops of these kinds don't wait for the users of what they write, nor others for them."""

    def mutate(op: Op) -> Op:
        return replace(op, writes=tuple(filter(keep, op.writes))) if op.kind in kinds else op

    return mutate
