"""Executes plans on symbolic contents in any order that their dependencies allow, and complains about wrong content.

Every op begins and ends at times of the test's choosing, so that ops without a dependency really overlap: what an op
writes is torn in between, and what it read must still be the same at its end. Nothing of `executor.py` is used.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hoist.scheduler.link import LinkedPlan, join
from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.plan_records import Buffers, StageShape
from hoist.tiers.slots import SlotTable

#: What a buffer holds while something is being put into it.
TORN = "torn"
#: A name of a place -> what is there.
Place = tuple[object, ...]


class WrongContentError(AssertionError):
    """An op found something else than what it needs."""


@dataclass(slots=True)
class InFlight:
    """An op between its begin and its end."""

    step: int
    op: Op
    reads: dict[Place, object]
    writes: dict[Place, object]


@dataclass(slots=True)
class _Step:
    """A step of which some ops have not ended."""

    number: int
    linked: LinkedPlan
    waiting: list[int]
    left: int
    later: dict[int, list[tuple[_Step, int]]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class Simulation:
    """Steps 0, 1, 2 ...; the weights that step t computes with have version t, its updates make version t + 1.

    Delayed updates run in the plan of the step after theirs, or in a flush, which is no step of its own: it has the
    number of the step that follows it; so has an evaluation. With speculative updates some steps, by chance, turn out
    to need scaling: what their updates have made at once is a guess, and nobody may use it before it has been made
    again.
    """

    def __init__(self, shapes: Sequence[StageShape], buffers: Buffers, *, seed: int, num_slots: int = 2) -> None:
        self.shapes = shapes
        self.buffers = buffers
        self.random = random.Random(seed)
        #: Stages with something to train: all of them have a norm, and the backward ends at the first.
        self.trained = frozenset(index for index, shape in enumerate(shapes) if shape.num_pieces)
        self.first_trained = min(self.trained)
        #: What is where: buffers, files, scratch.
        self.content: dict[Place, object] = {}
        counts = [len(set(shape.chunks)) for shape in shapes]
        #: The real rule; `tests/tiers/test_store_slots.py` checks it.
        self.slots = SlotTable(counts, ["0" * count for count in counts], num_slots=num_slots)
        #: Chunks of which kept arrays have changed since they were last written.
        self.dirty: set[tuple[int, int]] = set()
        #: Chunks whose newest version lacks its weights, which are kept.
        self.lacking: set[tuple[int, int]] = set()
        #: Pieces of a chunk that are written but not yet all, by chunk.
        self.turning: dict[tuple[int, int], set[int]] = {}
        for stage, shape in enumerate(shapes):
            for piece, chunk in enumerate(shape.chunks):
                for part in ("weights", "moments"):
                    self.content["file", part, stage, piece, 0] = 0
                    if chunk in self._kept(part, stage):
                        self.content["kept", part, stage, piece] = None
        #: Ops that have ended, by the step that they belong to, kind and stage.
        self.counts: Counter[tuple[int, Kind, int]] = Counter()
        #: Versions that are to be committed, at the turn or after the plans at hand.
        self.due: set[int] = set()
        #: Whether the gradients of a step turned out to need scaling.
        self.scaled: dict[int, bool] = {}
        #: The step that comes next.
        self.number = 0

    def run(self, plans: Sequence[LinkedPlan], *, commits: Sequence[bool] | None = None) -> None:
        """Execute consecutive plans in a random order that dependencies allow; at most two at once. Ends drained.

        ``commits`` says of each plan whether its COMMIT op, if it has one, really commits; all do by default.
        """
        runnable: list[tuple[_Step, int]] = []
        running: list[tuple[_Step, int, InFlight]] = []
        steps: list[_Step] = []
        upcoming: list[tuple[int, LinkedPlan]] = []
        for linked, commit in zip(plans, commits or [True] * len(plans), strict=True):
            upcoming.append((self.number, linked))
            if linked.plan.name not in ("flush", "evaluation"):
                self.due |= {self.number} if commit else set()
                self.scaled[self.number] = self.random.random() < 0.5
                self.number += 1
        if plans and plans[-1].plan.name == "flush":
            self.due.add(self.number)
        while upcoming or steps:
            if upcoming and len(steps) < 2:
                runnable += self._enter(steps, *upcoming.pop(0))
                continue
            if runnable and (not running or self.random.random() < 0.6):
                step, index = runnable.pop(self.random.randrange(len(runnable)))
                running.append((step, index, self.begin(step.linked, step.number, step.linked.plan.ops[index])))
            elif running:
                step, index, flight = running.pop(self.random.randrange(len(running)))
                self.end(flight)
                runnable += self._release(step, index)
                steps = [step for step in steps if step.left]
            else:
                raise WrongContentError("nothing can run: the plan waits for itself")

    def commit(self) -> None:
        """Commit between steps, when everything has ended and no update is delayed any more."""
        self._check_committable(self.number)
        self.slots.published()

    def _check_committable(self, version: int) -> None:
        if self.turning:
            raise WrongContentError(f"version {version}: chunks {sorted(self.turning)} are written in part")
        if self.lacking or self.dirty:
            parts = sorted(self.lacking | self.dirty)
            raise WrongContentError(f"version {version}: of {parts} a part is in memory only")
        for place in self._newest_files():
            if self.content[place] != version:
                raise WrongContentError(f"a commit of version {version}: {place} has {self.content[place]}")

    def _newest_files(self) -> list[Place]:
        return [
            ("file", part, stage, piece, self.slots.read_slot(stage, chunk))
            for stage, shape in enumerate(self.shapes)
            for piece, chunk in enumerate(shape.chunks)
            for part in ("weights", "moments")
        ]

    def _kept(self, part: str, stage: int) -> frozenset[int]:
        kept = self.buffers.kept_weights if part == "weights" else self.buffers.kept_moments
        return kept[stage] if kept else frozenset()

    def _stored(self, op: Op) -> list[str]:
        """The arrays of the op's piece that are not kept."""
        chunk = self.shapes[op.stage].chunks[op.piece]
        return [part for part in ("weights", "moments") if chunk not in self._kept(part, op.stage)]

    def _version(self, op: Op, step: int) -> object:
        """What an update makes."""
        made = step - op.delayed
        guessed = self.buffers.speculative and not op.delayed and self.scaled[made]
        return f"a guess at {made + 1}" if guessed else made + 1

    def _is_idle(self, op: Op, step: int) -> bool:
        """An update that need not be made again."""
        return op.redo and not self.scaled[step - 1]

    def _enter(self, steps: list[_Step], number: int, linked: LinkedPlan) -> list[tuple[_Step, int]]:
        step = _Step(number, linked, list(linked.num_dependencies), len(linked.plan.ops))
        for previous in steps[-1:]:
            for earlier, later in join(previous.linked, linked):
                if earlier not in previous.done:
                    previous.later.setdefault(earlier, []).append((step, later))
                    step.waiting[later] += 1
        steps.append(step)
        return [(step, index) for index, count in enumerate(step.waiting) if not count]

    def _release(self, step: _Step, index: int) -> list[tuple[_Step, int]]:
        step.left -= 1
        step.done.add(index)
        ready = []
        for other, later in [*((step, later) for later in step.linked.dependents[index]), *step.later.pop(index, ())]:
            other.waiting[later] -= 1
            if not other.waiting[later]:
                ready.append((other, later))
        return ready

    # ------------------------------------------------------------------ begin and end

    def begin(self, linked: LinkedPlan, step: int, op: Op) -> InFlight:
        """Begin an op of a step's plan: take note of what it reads and tear what it writes."""
        flight = InFlight(step, op, {}, {})
        self._plan_of = linked
        getattr(self, f"_{op.kind.name.lower()}")(op, step, flight)
        for place in flight.writes:
            self.content[place] = TORN
        return flight

    def end(self, flight: InFlight) -> None:
        """End an op: what it read must still be there, what it writes is there from now on."""
        for place, content in flight.reads.items():
            if place not in flight.writes and self.content.get(place) != content:
                raise WrongContentError(
                    f"{flight.op}: {place} changed from {content} to {self.content.get(place)} under it"
                )
        for place in flight.writes:
            if self.content.get(place) != TORN:
                raise WrongContentError(f"{flight.op}: another op wrote {place} at the same time")
        for place, content in flight.writes.items():
            self.content[place] = content
        op = flight.op
        if not op.redo:
            self.counts[flight.step - op.delayed, op.kind, op.stage] += 1
        if op.kind is Kind.WRITE_STATES and flight.writes:
            self._turn(op)
        elif op.kind is Kind.WRITE_KEPT and flight.writes:
            chunk = self.shapes[op.stage].chunks[op.piece]
            self.slots.end_write(op.stage, chunk)
            self.dirty.discard((op.stage, chunk))
            self.lacking.discard((op.stage, chunk))
        elif op.kind is Kind.COMMIT and flight.step in self.due:
            self.slots.published()

    def _turn(self, op: Op) -> None:
        chunks = self.shapes[op.stage].chunks
        key = op.stage, chunks[op.piece]
        written = self.turning.setdefault(key, set())
        written.add(op.piece)
        if len(written) == chunks.count(key[1]):
            del self.turning[key]
            self.slots.end_write(*key)
            if key[1] in self._kept("weights", op.stage):
                self.lacking.add(key)

    def _see(self, flight: InFlight, place: Place, wanted: object) -> None:
        """The op reads a place, where this must be."""
        found = self.content.get(place)
        if found != wanted:
            raise WrongContentError(f"step {flight.step}, {flight.op}: {place} holds {found}, not {wanted}")
        flight.reads[place] = found

    # ------------------------------------------------------------------ weights

    def _parts(self, stage: int) -> list[tuple[int, int]]:
        shape = self.shapes[stage]
        return [*((stage, piece) for piece in range(shape.num_pieces)), *shape.borrowed]

    def _acquire(self, op: Op, step: int, flight: InFlight) -> None:
        buffer = self.buffers.weights[op.stage]
        if self.content.get(("bound", buffer)) not in (None, False):
            raise WrongContentError(f"{op}: buffer {buffer} is bound")
        flight.writes["holder", buffer] = op.stage
        taken = [buffer]
        # The other buffer of the shared region overlaps, unless a neighbour is in it.
        holder = self.content.get(("holder", 1 - buffer))
        if buffer in (0, 1) and isinstance(holder, int) and abs(holder - op.stage) > 1:
            if self.content.get(("bound", 1 - buffer)) not in (None, False):
                raise WrongContentError(f"{op}: stage {holder} is bound where it would lie")
            taken.append(1 - buffer)
            flight.writes["holder", 1 - buffer] = None
        for place in [place for place in self.content if place[0] == "weights" and place[1] in taken]:
            flight.writes[place] = None

    def _read_weights(self, op: Op, step: int, flight: InFlight) -> None:
        slot = self.slots.read_slot(op.owner, self.shapes[op.owner].chunks[op.piece])
        place = ("file", "weights", op.owner, op.piece, slot)
        version = self.content[place]
        flight.reads[place] = version
        flight.writes["staging", op.slot] = (op.owner, op.piece, version)

    def _merge(self, op: Op, step: int, flight: InFlight) -> None:
        buffer = self.buffers.weights[op.stage]
        self._see(flight, ("holder", buffer), op.stage)
        if op.slot < 0:
            kept = ("kept", "weights", op.owner, op.piece)
            flight.reads[kept] = self.content[kept]
            flight.writes["weights", buffer, op.owner, op.piece] = self.content[kept]
            return
        staged = self.content.get(("staging", op.slot))
        if not isinstance(staged, tuple) or staged[:2] != (op.owner, op.piece):
            raise WrongContentError(f"{op}: staging slot {op.slot} holds {staged}")
        flight.reads["staging", op.slot] = staged
        flight.writes["weights", buffer, op.owner, op.piece] = staged[2]

    def _read_kept(self, op: Op, step: int, flight: InFlight) -> None:
        chunk = self.shapes[op.stage].chunks[op.piece]
        for part in ("weights", "moments"):
            if chunk in self._kept(part, op.stage):
                place = ("file", part, op.stage, op.piece, self.slots.read_slot(op.stage, chunk))
                self._see(flight, place, 0)
                self._see(flight, ("kept", part, op.stage, op.piece), None)
                flight.writes["kept", part, op.stage, op.piece] = 0

    def _read_frozen(self, op: Op, step: int, flight: InFlight) -> None:
        buffer = self.buffers.weights[op.stage]
        self._see(flight, ("holder", buffer), op.stage)
        stored = self.shapes[op.stage].widens and op.stage not in self.buffers.kept_frozen
        flight.writes[self._frozen_place(op.stage)] = ("stored", op.stage) if stored else op.stage

    def _widen(self, op: Op, step: int, flight: InFlight) -> None:
        buffer = self.buffers.weights[op.stage]
        self._see(flight, ("holder", buffer), op.stage)
        kept = op.stage in self.buffers.kept_frozen
        self._see(flight, self._frozen_place(op.stage), op.stage if kept else ("stored", op.stage))
        flight.writes["weights", buffer, "frozen"] = ("widened", op.stage)

    def _frozen_place(self, stage: int) -> Place:
        if stage in self.buffers.kept_frozen:
            return "kept", "frozen", stage
        return "weights", self.buffers.weights[stage], "frozen"

    def _bind(self, op: Op, step: int, flight: InFlight) -> None:
        buffer = self.buffers.weights[op.stage]
        flight.writes["bound", buffer] = op.stage
        self._see_weights(op, step, flight)

    def _unbind(self, op: Op, step: int, flight: InFlight) -> None:
        flight.writes["bound", self.buffers.weights[op.stage]] = False

    def _see_weights(self, op: Op, step: int, flight: InFlight) -> None:
        buffer = self.buffers.weights[op.stage]
        self._see(flight, ("holder", buffer), op.stage)
        for owner, piece in self._parts(op.stage):
            self._see(flight, ("weights", buffer, owner, piece), step)
        if self.shapes[op.stage].widens:
            self._see(flight, ("weights", buffer, "frozen"), ("widened", op.stage))
        elif self.shapes[op.stage].has_frozen:
            self._see(flight, self._frozen_place(op.stage), op.stage)

    # ------------------------------------------------------------------ computation

    def _forward(self, op: Op, step: int, flight: InFlight) -> None:
        self._see(flight, ("bound", self.buffers.weights[op.stage]), op.stage)
        self._see_weights(op, step, flight)
        if op.stage:
            self._see(flight, ("activation", op.slot), ("value", op.stage - 1, op.micro_batch, step))
        flight.writes["activation", op.output_slot] = ("value", op.stage, op.micro_batch, step)

    def _evaluate(self, op: Op, step: int, flight: InFlight) -> None:
        self._see(flight, ("bound", self.buffers.weights[op.stage]), op.stage)
        self._see_weights(op, step, flight)
        self._see(flight, ("activation", op.slot), ("value", op.stage - 1, op.micro_batch, step))

    def _loss(self, op: Op, step: int, flight: InFlight) -> None:
        self._see(flight, ("bound", self.buffers.weights[op.stage]), op.stage)
        self._see_weights(op, step, flight)
        self._see(flight, ("activation", op.slot), ("value", op.stage - 1, op.micro_batch, step))
        self._hand_down(op, step, flight)
        self._accumulate(op, step, flight)

    def _hand_down(self, op: Op, step: int, flight: InFlight) -> None:
        """The gradient of the input takes its place, unless the backward ends here."""
        if op.ends_input != (op.stage == self.first_trained):
            raise WrongContentError(f"{op}: what it says of its input's gradient is wrong")
        if not op.ends_input:
            flight.writes["activation", op.slot] = ("gradient", op.stage - 1, op.micro_batch, step)

    def _backward(self, op: Op, step: int, flight: InFlight) -> None:
        self._see(flight, ("bound", self.buffers.weights[op.stage]), op.stage)
        self._see_weights(op, step, flight)
        self._see(flight, ("activation", op.output_slot), ("gradient", op.stage, op.micro_batch, step))
        if op.stage:
            self._see(flight, ("activation", op.slot), ("value", op.stage - 1, op.micro_batch, step))
            self._hand_down(op, step, flight)
        self._accumulate(op, step, flight)

    def _accumulate(self, op: Op, step: int, flight: InFlight) -> None:
        """Sums grow in the order 0..M-1; the first replaces what was there."""
        if self.shapes[op.stage].num_pieces:
            place = ("gradient", self.buffers.gradients[op.stage])
            if op.micro_batch:
                self._see(flight, place, ("sum", op.stage, step, op.micro_batch))
            flight.writes[place] = ("sum", op.stage, step, op.micro_batch + 1)
        for owner in {owner for owner, _ in self.shapes[op.stage].borrowed}:
            # Sums of different borrowers go into one loan: the order they come in has to be the plan's.
            before = self.content.get(("loan", owner), ())
            if not isinstance(before, tuple):
                raise WrongContentError(f"{op}: the loan of {owner} is {before}")
            flight.reads["loan", owner] = before
            flight.writes["loan", owner] = (*before, (op.stage, step, op.micro_batch))

    # ------------------------------------------------------------------ optimizer

    def _waiting(self, stage: int) -> Place:
        """Where a stage's gradients are for norms and updates."""
        part = "host gradient" if self.buffers.separate else "gradient"
        return part, self.buffers.waiting_gradients[stage]

    def _download(self, op: Op, step: int, flight: InFlight) -> None:
        gradient = ("gradient", self.buffers.gradients[op.stage])
        final = ("sum", op.stage, step, self._plan_of.plan.num_micro_batches)
        self._see(flight, gradient, final)
        flight.writes[self._waiting(op.stage)] = final
        self._take_loan(op, step, flight)

    def _norm(self, op: Op, step: int, flight: InFlight) -> None:
        place = self._waiting(op.stage)
        num_micro_batches = self._plan_of.plan.num_micro_batches
        self._see(flight, place, ("sum", op.stage, step, num_micro_batches))
        flight.writes[place] = ("final", op.stage, step)
        before = self.content.get(("norm",))
        if not isinstance(before, tuple) or before[0] != step:
            before = (step, frozenset())
        flight.writes["norm",] = (step, before[1] | {op.stage})
        if not self.buffers.separate:
            self._take_loan(op, step, flight)

    def _take_loan(self, op: Op, step: int, flight: InFlight) -> None:
        """What borrowers of the stage's tensors have left for it, in the plan's order."""
        if any(owner == op.stage for shape in self.shapes for owner, _ in shape.borrowed):
            lent = tuple(
                (earlier.stage, step, earlier.micro_batch)
                for earlier in self._plan_of.plan.ops
                if earlier.kind in (Kind.LOSS, Kind.BACKWARD)
                and any(owner == op.stage for owner, _ in self.shapes[earlier.stage].borrowed)
            )
            self._see(flight, ("loan", op.stage), lent)
            flight.writes["loan", op.stage] = ()

    def _open_chunk(self, op: Op, step: int, flight: InFlight) -> None:
        pass

    def _read_states(self, op: Op, step: int, flight: InFlight) -> None:
        before = step - op.delayed
        if op.redo:
            self._see(flight, ("norm",), (before, self.trained))
        if self._is_idle(op, step):
            return
        find = self.slots.previous_slot if op.redo else self.slots.read_slot
        slot = find(op.stage, self.shapes[op.stage].chunks[op.piece])
        for part in self._stored(op):
            if not (op.loaded and part == "weights"):
                self._see(flight, ("file", part, op.stage, op.piece, slot), before)
        flight.writes["states", op.slot] = (op.stage, op.piece, before)
        if op.stashed:
            self._see(flight, ("stash", op.stage, op.piece), ("final", op.stage, before))
            flight.writes["state gradient", op.slot] = ("final", op.stage, before)

    def _update(self, op: Op, step: int, flight: InFlight) -> None:
        before = step - op.delayed
        if self._is_idle(op, step):
            return
        made = self._version(op, step)
        gradient = ("state gradient", op.slot) if op.stashed else self._waiting(op.stage)
        self._see(flight, gradient, ("final", op.stage, before))
        if op.loaded:  # updated in the weight buffer, whose stage must not be computing
            buffer = self.buffers.weights[op.stage]
            self._see(flight, ("holder", buffer), op.stage)
            self._see(flight, ("weights", buffer, op.stage, op.piece), before)
            self._see(flight, ("bound", buffer), False)
            flight.writes["weights", buffer, op.stage, op.piece] = made
        if op.slot >= 0:
            self._see(flight, ("states", op.slot), (op.stage, op.piece, before))
            flight.writes["states", op.slot] = (op.stage, op.piece, made)
        chunk = self.shapes[op.stage].chunks[op.piece]
        for part in ("weights", "moments"):
            if chunk in self._kept(part, op.stage):
                self._see(flight, ("kept", part, op.stage, op.piece), before)
                flight.writes["kept", part, op.stage, op.piece] = made
                self.dirty.add((op.stage, chunk))
        if op.delayed:  # it may have to be scaled: all gradients of its step must have been measured
            self._see(flight, ("norm",), (before, self.trained))
        for keeper in () if self.buffers.separate else op.refresh:
            self._renew(op, keeper, op.stage, step, flight)
        if op.fill:
            buffer = self.buffers.weights[op.stage]
            self._see(flight, ("holder", buffer), op.stage)
            self._see(flight, ("weights", buffer, op.stage, op.piece), None)
            flight.writes["weights", buffer, op.stage, op.piece] = made

    def _renew(self, op: Op, keeper: int, owner: int, step: int, flight: InFlight) -> None:
        """A weight buffer that still holds a stage gets the new weights of a piece."""
        buffer = self.buffers.weights[keeper]
        self._see(flight, ("holder", buffer), keeper)
        if self.content.get(("bound", buffer)) is not False:
            raise WrongContentError(f"{op}: {keeper} computes with the weights that it changes")
        before = step - op.delayed
        held = f"a guess at {before + 1}" if op.redo else before
        self._see(flight, ("weights", buffer, owner, op.piece), held)
        flight.writes["weights", buffer, owner, op.piece] = self._version(op, step)

    def _refresh(self, op: Op, step: int, flight: InFlight) -> None:
        if self._is_idle(op, step):
            return
        made = self._version(op, step)
        if op.slot < 0:
            self._see(flight, ("kept", "weights", op.owner, op.piece), made)
        else:
            self._see(flight, ("states", op.slot), (op.owner, op.piece, made))
        if not op.fill:
            self._renew(op, op.stage, op.owner, step, flight)
            return
        buffer = self.buffers.weights[op.stage]
        self._see(flight, ("holder", buffer), op.stage)
        self._see(flight, ("weights", buffer, op.owner, op.piece), None)
        flight.writes["weights", buffer, op.owner, op.piece] = made

    def _write_states(self, op: Op, step: int, flight: InFlight) -> None:
        if self._is_idle(op, step):
            return
        made = self._version(op, step)
        self._see(flight, ("states", op.slot), (op.stage, op.piece, made))
        key = op.stage, self.shapes[op.stage].chunks[op.piece]
        if op.piece in self.turning.get(key, ()):
            raise WrongContentError(f"{op}: it is written twice before its chunk has turned")
        slot = self.slots.begin_write(*key, again=op.redo)
        for part in self._stored(op):
            flight.writes["file", part, op.stage, op.piece, slot] = made

    def _write_kept(self, op: Op, step: int, flight: InFlight) -> None:
        chunks = self.shapes[op.stage].chunks
        key = op.stage, chunks[op.piece]
        version = step - op.delayed + 1
        if version not in self.due or key not in self.dirty:
            return
        if key in self.turning:
            raise WrongContentError(f"{op}: the moments are still being written")
        slot = self.slots.begin_write(*key, again=key[1] not in self._kept("moments", op.stage))
        for piece in (piece for piece, chunk in enumerate(chunks) if chunk == key[1]):
            for part in ("weights", "moments"):
                place = ("file", part, op.stage, piece, slot)
                if key[1] in self._kept(part, op.stage):
                    self._see(flight, ("kept", part, op.stage, piece), version)
                    flight.writes[place] = version
                else:
                    self._see(flight, place, version)

    def _commit(self, op: Op, step: int, flight: InFlight) -> None:
        if step not in self.due:
            return
        self._check_committable(step)
        for place in self._newest_files():
            self._see(flight, place, step)

    # ------------------------------------------------------------------ scratch

    def _copy(self, flight: InFlight, source: Place, target: Place, wanted: tuple[object, ...]) -> None:
        content = self.content.get(source)
        if not isinstance(content, tuple) or content[1 : 1 + len(wanted)] != wanted:
            raise WrongContentError(f"step {flight.step}, {flight.op}: {source} holds {content}")
        flight.reads[source] = content
        flight.writes[target] = content

    def _spill_activation(self, op: Op, step: int, flight: InFlight) -> None:
        scratch = ("scratch", op.stage, op.micro_batch)
        self._copy(flight, ("activation", op.slot), scratch, (op.stage, op.micro_batch, step))

    def _fetch_activation(self, op: Op, step: int, flight: InFlight) -> None:
        scratch = ("scratch", op.stage, op.micro_batch)
        self._copy(flight, scratch, ("activation", op.slot), (op.stage, op.micro_batch, step))

    def _lower_activation(self, op: Op, step: int, flight: InFlight) -> None:
        self._copy(flight, ("activation", op.slot), self._host_slot(op), (op.stage, op.micro_batch, step))

    def _raise_activation(self, op: Op, step: int, flight: InFlight) -> None:
        self._copy(flight, self._host_slot(op), ("activation", op.slot), (op.stage, op.micro_batch, step))

    def _host_slot(self, op: Op) -> Place:
        if not 0 <= op.host_slot < self.buffers.num_host_activations:
            raise WrongContentError(f"{op}: there is no slot {op.host_slot} in host memory")
        return "host activation", op.host_slot

    def _stash_gradient(self, op: Op, step: int, flight: InFlight) -> None:
        final = ("final", op.stage, step)
        self._see(flight, self._waiting(op.stage), final)
        flight.writes["stash", op.stage, op.piece] = final

    def _spill_gradient(self, op: Op, step: int, flight: InFlight) -> None:
        place = ("gradient", self.buffers.gradients[op.stage])
        self._copy(flight, place, ("scratch gradient", op.stage), (op.stage, step))

    def _fetch_gradient(self, op: Op, step: int, flight: InFlight) -> None:
        place = ("gradient", self.buffers.gradients[op.stage])
        self._copy(flight, ("scratch gradient", op.stage), place, (op.stage, step))
