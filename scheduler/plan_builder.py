"""Walks a step's visits once and writes down its ops: what is read, computed, updated and written, with which buffers.

No torch, no files, no threads. `plan.py` says which plans there are; the order of stages and micro-batches is
`visits.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from hoist.scheduler.activation_slots import Move, schedule
from hoist.scheduler.ops import Kind, Op, Part, Resource
from hoist.scheduler.plan_records import FROZEN_PIECE, Buffers, Plan, StageShape
from hoist.scheduler.visits import Phase, Visit


class _Numbers(TypedDict, total=False):
    """The fields of an :class:`Op` that say to what it does something, and on which terms."""

    stage: int
    micro_batch: int
    piece: int
    slot: int
    output_slot: int
    host_slot: int
    owner: int
    delayed: bool
    fill: bool
    loaded: bool
    stashed: bool
    redo: bool
    ends_input: bool


class PlanBuilder:
    """Walks the visits once and writes down the ops."""

    def __init__(
        self,
        name: str,
        stages: Sequence[StageShape],
        buffers: Buffers,
        visits: tuple[Visit, ...],
        held: dict[int, int] | None,
        pending: bool = False,
    ) -> None:
        self.name = name
        self.stages = stages
        self.buffers = buffers
        self.visits = visits
        self.cold = held is None
        self.ops: list[Op] = []
        #: Every resource once: a plan has far more ops than resources, and its memory counts against the budget.
        self.shared: dict[Resource, Resource] = {}
        #: What becomes of activations, computation by computation, and how many computations have been written down.
        self.turns = schedule(visits, buffers.num_activations, buffers.num_host_activations)
        self.position = 0
        #: Boundary activations that are spilled at some time.
        self.scratch_activations: set[tuple[int, int]] = set()
        self.next_staging = 0
        self.next_state = 0
        #: Stage that each weight buffer holds, at this point of the plan.
        self.held: dict[int, int] = dict(held or {})
        #: Stage that each buffer of the shared region was last used by: -1 if an earlier plan says nothing of it.
        self.occupants: dict[int, int] = {} if held is None else {buffer: held.get(buffer, -1) for buffer in (0, 1)}
        self.scratch_gradients: set[int] = set()
        self.stashed: list[tuple[int, int]] = []
        #: Per stage, its first delayed piece.
        self.delayed_from = buffers.delayed_from or tuple(stage.num_pieces for stage in stages)
        none: tuple[frozenset[int], ...] = (frozenset(),) * len(stages)
        self.kept_weights = buffers.kept_weights or none
        self.kept_moments = buffers.kept_moments or none
        #: Pieces (stage, piece) whose kept arrays have been read, in a cold plan; piece -1: the frozen tensors.
        self.kept_read: set[tuple[int, int]] = set()
        self.was_pending = pending
        #: Stages whose delayed updates of the step before are still to be done, at this point of the plan.
        self.pending = {index for index, stage in enumerate(stages) if pending and self.is_delayed(index)}
        #: Stages that lend tensors to others, whose borrowed gradients wait in the loan.
        self.lenders = {owner for stage in stages for owner, _ in stage.borrowed}
        #: Last visit to each stage in this step, where its gradients are complete.
        self.final_visit = {visit.stage: index for index, visit in enumerate(visits)}
        self.pieces_of_chunk: list[dict[int, tuple[Resource, ...]]] = []
        for index, stage in enumerate(stages):
            of_chunk: dict[int, list[Resource]] = {}
            for piece, chunk in enumerate(stage.chunks):
                of_chunk.setdefault(chunk, []).append(Resource(Part.STATE, index, piece))
            self.pieces_of_chunk.append({chunk: tuple(pieces) for chunk, pieces in of_chunk.items()})

    def build(self) -> Plan:
        self.load(self.visits[0].stage)
        turn = next(index for index, visit in enumerate(self.visits) if visit.phase is Phase.LOSS)
        for index, visit in enumerate(self.visits):
            if self.held.get(self.buffers.weights[visit.stage]) != visit.stage:
                self.load(visit.stage)  # the visit before needed the buffer
            for following in self.next_other_stages(index):
                self.load(following)
            if index == turn:
                self.emit(Kind.COMMIT, writes=(Resource(Part.COMMIT, 0),))
            self.visit(index, visit)
        return Plan(
            name=self.name,
            ops=tuple(self.ops),
            num_micro_batches=len({micro_batch for visit in self.visits for micro_batch in visit.micro_batches}),
            cold=self.cold,
            pending=self.was_pending,
            scratch_activations=tuple(sorted(self.scratch_activations)),
            scratch_gradients=tuple(sorted(self.scratch_gradients)),
            stashed_gradients=tuple(self.stashed),
        )

    def build_flush(self) -> Plan:
        for stage in range(len(self.stages)):
            if stage in self.pending:
                self.update_delayed(stage, fill=False)
        for stage, chunks in enumerate(self.kept_weights):
            for chunk in sorted(chunks):
                self.write_kept(stage, chunk, delayed=True)
        return Plan(
            name=self.name,
            ops=tuple(self.ops),
            num_micro_batches=0,
            cold=False,
            pending=self.was_pending,
            scratch_activations=(),
            scratch_gradients=(),
            stashed_gradients=(),
        )

    def build_evaluation(self, held_at_end: dict[int, int]) -> Plan:
        self.load(self.visits[0].stage)
        for index, visit in enumerate(self.visits):
            following = self.visits[index + 1].stage if index + 1 < len(self.visits) else visit.stage
            # The first stage may follow the last one, which it does not fit beside: only after the visit.
            beside = self.fit_together(following, visit.stage)
            if beside:
                self.load(following)
            self.visit(index, visit)
            if not beside and following != visit.stage:
                self.load(following)
        for buffer, stage in sorted(held_at_end.items()):
            if self.held.get(buffer) != stage:
                self.load(stage)
        return Plan(
            name=self.name,
            ops=tuple(self.ops),
            num_micro_batches=len({micro_batch for visit in self.visits for micro_batch in visit.micro_batches}),
            cold=self.cold,
            pending=False,
            scratch_activations=tuple(sorted(self.scratch_activations)),
            scratch_gradients=(),
            stashed_gradients=(),
        )

    def is_delayed(self, stage: int) -> bool:
        """Some pieces of the stage are, or may have to be, updated in the next step's forward."""
        shape = self.stages[stage]
        return self.delayed_from[stage] < shape.num_pieces or (self.buffers.speculative and bool(shape.num_pieces))

    def shares(self, buffers: Sequence[int], stage: int) -> bool:
        """Another stage takes its gradient buffer, of those given per stage."""
        takers = [own for own, shape in zip(buffers, self.stages, strict=True) if shape.num_pieces]
        return takers.count(buffers[stage]) > 1

    def stashes_gradient(self, stage: int) -> bool:
        """Gradients that must wait for the next step do so in scratch."""
        return self.shares(self.buffers.waiting_gradients, stage)

    def fit_together(self, stage: int, other: int) -> bool:
        """Both stages' weights can be in their buffers at once."""
        buffers = self.buffers.weights[stage], self.buffers.weights[other]
        return stage == other or (buffers[0] != buffers[1] and (max(buffers) > 1 or abs(stage - other) == 1))

    def belongs_to_next_step(self, index: int, stage: int) -> bool:
        """The stage's next visit is in the next step and its delayed updates come first: it is loaded there."""
        return self.is_delayed(stage) and all(visit.stage != stage for visit in self.visits[index:])

    def next_other_stages(self, index: int) -> Sequence[int]:
        """The stages visited next after the run of visits to this one, whose weights are loaded meanwhile.

        Wraps into the next step. Ends before one that would take the place of another that is needed sooner.
        """
        stage = self.visits[index].stage
        if index and self.visits[index - 1].stage == stage:
            return ()  # loaded when the run began
        found: list[int] = []
        for visit in self.visits[index:] + self.visits:
            if visit.stage == stage or visit.stage in found:
                continue
            if (
                len(found) == self.buffers.stages_ahead
                or not all(self.fit_together(visit.stage, sooner) for sooner in (stage, *found))
                or self.belongs_to_next_step(index, visit.stage)
            ):
                break
            found.append(visit.stage)
        return found

    def emit(
        self,
        kind: Kind,
        common: _Numbers | None = None,
        *,
        reads: Sequence[Resource] = (),
        writes: Sequence[Resource] = (),
        refresh: tuple[int, ...] = (),
        **fields: Unpack[_Numbers],
    ) -> None:
        """Append an op. ``common`` and ``fields`` are its numbers, by the names that :class:`Op` gives them."""
        numbers: _Numbers = {**(common or {}), **fields}
        read, written = (tuple(self.shared.setdefault(each, each) for each in group) for group in (reads, writes))
        self.ops.append(Op(kind, read, written, refresh=refresh, **numbers))

    def load(self, stage: int) -> None:
        """Have a stage's weights in its buffer: its delayed updates first, then whatever the buffer does not hold."""
        buffer = self.buffers.weights[stage]
        held = self.held.get(buffer) == stage
        weights = Resource(Part.WEIGHTS, buffer)
        if not held:
            self.held[buffer] = stage
            self.acquire(stage, buffer)
        filled = range(0)
        if stage in self.pending:
            self.update_delayed(stage, fill=not held)
            filled = range(self.delayed_from[stage], self.stages[stage].num_pieces)
        if held:
            return
        shape = self.stages[stage]
        # What is kept in host memory must be copied to a separate device also where it is computed with as it is.
        widens = shape.widens or (self.buffers.separate and stage in self.buffers.kept_frozen)
        frozen = (Resource(Part.FROZEN, stage),) if widens else ()
        if shape.has_frozen and (stage not in self.buffers.kept_frozen or self.is_to_be_read(stage, FROZEN_PIECE)):
            self.emit(Kind.READ_FROZEN, reads=(weights,), writes=frozen, stage=stage)
        if widens:
            self.emit(Kind.WIDEN, reads=(*frozen, weights), stage=stage)
        own = [(stage, piece) for piece in range(shape.num_pieces) if piece not in filled]
        for owner, piece in (*own, *shape.borrowed):
            if self.stages[owner].chunks[piece] in self.kept_weights[owner]:
                kept = Resource(Part.KEPT, owner, piece)
                if self.is_to_be_read(owner, piece):
                    # It would not need the buffer, but must not come before what the stages before this one wait for.
                    self.emit(Kind.READ_KEPT, reads=(weights,), writes=(kept,), stage=owner, piece=piece)
                self.emit(Kind.MERGE, reads=(kept, weights), stage=stage, owner=owner, piece=piece)
                continue
            # A chunk turns to its new slot as a whole, so a piece may be read once all of its chunk has been written.
            # That is one op's to wait for: if every piece waited for every other, dependencies would be quadratic.
            stored = (Resource(Part.STATE, owner, piece), Resource(Part.CHUNK, owner, self.stages[owner].chunks[piece]))
            if self.buffers.straight_weights:
                # Like the frozen tensors: loads of one stage fill different parts of its buffer, in any order.
                self.emit(Kind.READ_WEIGHTS, reads=(*stored, weights), stage=stage, owner=owner, piece=piece)
                continue
            slot = self.next_staging
            self.next_staging = (slot + 1) % self.buffers.num_staging
            staging = Resource(Part.STAGING, slot)
            common: _Numbers = {"stage": stage, "owner": owner, "piece": piece, "slot": slot}
            self.emit(Kind.READ_WEIGHTS, common, reads=stored, writes=(staging,))
            self.emit(Kind.MERGE, common, reads=(staging, weights))

    def acquire(self, stage: int, buffer: int) -> None:
        """Have a stage's buffer for it, and what overlaps it."""
        weights, other = Resource(Part.WEIGHTS, buffer), Resource(Part.WEIGHTS, 1 - buffer)
        room, other_room = Resource(Part.ROOM, buffer), Resource(Part.ROOM, 1 - buffer)
        occupant = self.occupants.get(1 - buffer, stage)
        if buffer not in (0, 1):
            self.emit(Kind.ACQUIRE, writes=(weights,), stage=stage)
            return
        if occupant >= 0 and abs(occupant - stage) <= 1:
            # It fits beside that neighbour, which may still be waiting for the place of one that would be in the way.
            self.emit(Kind.ACQUIRE, reads=(other_room,), writes=(weights, room), stage=stage)
        else:
            self.emit(Kind.ACQUIRE, writes=(weights, other, room, other_room), stage=stage)
            self.held.pop(1 - buffer, None)
            self.occupants[1 - buffer] = stage
        self.occupants[buffer] = stage

    def is_to_be_read(self, stage: int, piece: int) -> bool:
        """What is kept of a piece (-1: of the frozen tensors) has not been read yet; from now on it has."""
        wanted = self.cold and (stage, piece) not in self.kept_read
        self.kept_read.add((stage, piece))
        return wanted

    def visit(self, index: int, visit: Visit) -> None:
        stage = visit.stage
        weights = Resource(Part.WEIGHTS, self.buffers.weights[stage])
        self.emit(Kind.BIND, writes=(weights,), stage=stage)
        trains = visit.phase in (Phase.LOSS, Phase.BACKWARD) and bool(self.stages[stage].num_pieces)
        if trains:
            self.fetch_gradient(index, stage)
        for micro_batch in visit.micro_batches:
            self.compute(visit, micro_batch, weights)
        # The stage's updates, which wait for its gradient, may make weights out of date that nobody keeps: only once
        # its modules have let go of them.
        self.emit(Kind.UNBIND, writes=(weights, *(self.gradient(stage) if trains else ())), stage=stage)
        if trains:
            if index == self.final_visit[stage]:
                self.update(index, stage)
            else:
                self.spill_gradient(index, stage)

    def weights_of(self, stage: int) -> Resource:
        """The stage's weight buffer."""
        return Resource(Part.WEIGHTS, self.buffers.weights[stage])

    def waiting_gradient(self, stage: int) -> Resource:
        """Where the stage's gradients are for norms and updates."""
        part = Part.HOST_GRADIENT if self.buffers.separate else Part.GRADIENT
        return Resource(part, self.buffers.waiting_gradients[stage])

    def gradient(self, stage: int) -> tuple[Resource, ...]:
        """The stage's gradient buffer; nothing if none of its own tensors is trained."""
        return (Resource(Part.GRADIENT, self.buffers.gradients[stage]),) if self.stages[stage].num_pieces else ()

    def compute(self, visit: Visit, micro_batch: int, weights: Resource) -> None:
        stage = visit.stage
        turn = self.turns[self.position]
        self.position += 1
        for move in turn.moves:
            self.move_activation(move)
        resources = [Resource(Part.ACTIVATION, slot) for slot in turn.slots]
        common: _Numbers = {
            "stage": stage,
            "micro_batch": micro_batch,
            "slot": turn.slots[0] if stage > 0 else -1,
            "output_slot": turn.slots[-1] if visit.phase in (Phase.FORWARD, Phase.BACKWARD) else -1,
            "ends_input": turn.ends_input,
        }
        if visit.phase is Phase.FORWARD:
            self.emit(Kind.FORWARD, common, reads=(weights, *resources[:-1]), writes=resources[-1:])
        elif visit.phase is Phase.EVALUATE:
            self.emit(Kind.EVALUATE, common, reads=(weights, *resources))
        else:
            lenders = sorted({owner for owner, _ in self.stages[stage].borrowed})
            loans = [Resource(Part.LOAN, owner) for owner in lenders]
            kind = Kind.LOSS if visit.phase is Phase.LOSS else Kind.BACKWARD
            # The gradient of a stage's input takes the place of that input.
            changed = resources[: 1 if stage > 0 and not turn.ends_input else 0]
            self.emit(kind, common, reads=(weights, *resources), writes=(*self.gradient(stage), *loans, *changed))

    def move_activation(self, move: Move) -> None:
        """Between an activation slot and host memory or scratch."""
        slot = Resource(Part.ACTIVATION, move.slot)
        if move.host_slot >= 0:
            kind = Kind.RAISE_ACTIVATION if move.comes else Kind.LOWER_ACTIVATION
            below = Resource(Part.HOST_ACTIVATION, move.host_slot)
        else:
            kind = Kind.FETCH_ACTIVATION if move.comes else Kind.SPILL_ACTIVATION
            below = Resource(Part.SCRATCH_ACTIVATION, *move.boundary)
            self.scratch_activations.add(move.boundary)
        source, target = (below, slot) if move.comes else (slot, below)
        self.emit(
            kind,
            reads=(source,),
            writes=(target,),
            stage=move.boundary[0],
            micro_batch=move.boundary[1],
            slot=move.slot,
            host_slot=move.host_slot,
        )

    def fetch_gradient(self, index: int, stage: int) -> None:
        if any(visit.stage == stage and visit.phase is not Phase.FORWARD for visit in self.visits[:index]) and (
            stage in self.scratch_gradients
        ):
            buffer = Resource(Part.GRADIENT, self.buffers.gradients[stage])
            self.emit(
                Kind.FETCH_GRADIENT, reads=(Resource(Part.SCRATCH_GRADIENT, stage),), writes=(buffer,), stage=stage
            )

    def spill_gradient(self, index: int, stage: int) -> None:
        """Between two visits the gradient stays, unless another stage has the same buffer."""
        buffer = self.buffers.gradients[stage]
        if self.shares(self.buffers.gradients, stage):
            self.scratch_gradients.add(stage)
            self.emit(
                Kind.SPILL_GRADIENT,
                reads=(Resource(Part.GRADIENT, buffer),),
                writes=(Resource(Part.SCRATCH_GRADIENT, stage),),
                stage=stage,
            )

    def update(self, index: int, stage: int) -> None:
        """The optimizer's ops of a stage whose gradients are complete: at once, or kept for the next step."""
        gradient = self.waiting_gradient(stage)
        waiting_from = 0 if self.buffers.speculative else self.delayed_from[stage]
        keepers = self.keepers(index, stage)
        loans = (Resource(Part.LOAN, stage),) if stage in self.lenders else ()
        if self.buffers.separate:
            self.emit(Kind.DOWNLOAD, writes=(*self.gradient(stage), gradient, *loans), stage=stage)
            loans = ()
        self.emit(Kind.NORM, writes=(gradient, Resource(Part.NORM, 0), *loans), stage=stage)
        if self.stashes_gradient(stage):
            for piece in range(waiting_from, self.stages[stage].num_pieces):
                self.stashed.append((stage, piece))
                stash = Resource(Part.STASHED_GRADIENT, stage, piece)
                self.emit(Kind.STASH_GRADIENT, reads=(gradient,), writes=(stash,), stage=stage, piece=piece)
        # The backward has just been, so its weights are still there, even where the buffer is given up now: whoever
        # takes it waits for these updates.
        loaded = self.buffers.updates_in_buffers
        self.update_pieces(stage, range(self.delayed_from[stage]), keepers, loaded=loaded)

    def update_delayed(self, stage: int, *, fill: bool) -> None:
        """The updates that the step before left for this one. ``fill``: they also fill the stage's new buffer."""
        self.pending.remove(stage)
        pieces = range(self.delayed_from[stage], self.stages[stage].num_pieces)
        keepers = tuple(
            user
            for user in self.users(stage)
            if not (fill and user == stage) and self.held.get(self.buffers.weights[user]) == user
        )
        stashed = self.stashes_gradient(stage)
        if self.buffers.speculative:
            self.update_pieces(stage, range(pieces.start), keepers, delayed=True, stashed=stashed, redo=True)
        # What is made again starts from the version before, which is on NVMe alone; these from what the buffer holds.
        held = self.held.get(self.buffers.weights[stage]) == stage
        loaded = self.buffers.updates_in_buffers and held and not fill
        self.update_pieces(stage, pieces, keepers, delayed=True, fill=fill, loaded=loaded, stashed=stashed)

    def update_pieces(
        self,
        stage: int,
        pieces: range,
        keepers: tuple[int, ...],
        *,
        delayed: bool = False,
        fill: bool = False,
        loaded: bool = False,
        stashed: bool = False,
        redo: bool = False,
    ) -> None:
        """Read, update and write some pieces of a stage.

        ``loaded``: its weight buffer holds the weights before, and the update is made there. That counts as a read of
        the buffer unless the stage keeps it: nobody else looks into it before it is acquired again.
        """
        gradient = self.waiting_gradient(stage)
        buffer = (Resource(Part.WEIGHTS, self.buffers.weights[stage]),)
        separate = self.buffers.separate
        chunks = self.stages[stage].chunks
        for piece in pieces:
            chunk = chunks[piece]
            kept = chunk in self.kept_weights[stage]
            is_stored = chunk not in self.kept_moments[stage]
            stored = Resource(Part.STATE, stage, piece)
            newest = Resource(Part.CHUNK, stage, chunk)
            stash = (Resource(Part.STASHED_GRADIENT, stage, piece),) if stashed else ()
            slot = -1
            states: tuple[Resource, ...] = ()
            if is_stored or stashed:
                slot = self.next_state
                self.next_state = (slot + 1) % self.buffers.num_states
                states = (Resource(Part.STATE_SLOT, slot),)
            # A delayed update may need the norm of the whole step before: all of its gradients were measured then.
            norm = (Resource(Part.NORM, 0),) if delayed else ()
            filled_here = fill and not separate
            needs = (*(() if stashed else (gradient,)), *norm, *(buffer if filled_here or loaded else ()))
            refresh = tuple(
                keeper for keeper in keepers if keeper == stage or (stage, piece) in self.stages[keeper].borrowed
            )
            refreshed = () if separate else tuple(self.weights_of(keeper) for keeper in refresh)
            keeping = (Resource(Part.KEPT, stage, piece),) if kept else ()
            common: _Numbers = {"stage": stage, "piece": piece, "slot": slot}
            if states:
                self.emit(
                    Kind.READ_STATES,
                    common,
                    # Only the norm tells whether an update is made again at all.
                    reads=(*((stored, newest) if is_stored else ()), *stash, *(norm if redo else ())),
                    writes=states,
                    delayed=delayed,
                    loaded=loaded,
                    stashed=stashed,
                    redo=redo,
                )
            if self.buffers.updates_on_device:
                # What the update is, and whether there is one at all, is known before it is put into a stream.
                self.emit(
                    Kind.DEVICE_UPDATE, common, reads=needs, writes=(*states, *keeping), delayed=delayed,
                    stashed=stashed, redo=redo,
                )
            self.emit(
                Kind.UPDATE,
                common,
                reads=needs,
                writes=(*states, *keeping, *refreshed),
                refresh=refresh,
                delayed=delayed,
                fill=filled_here,
                loaded=loaded,
                stashed=stashed,
                redo=redo,
            )
            if separate:
                common_refresh: _Numbers = {"owner": stage, "piece": piece, "slot": -1 if kept else slot}
                sources = keeping or states
                if fill:
                    # Like a MERGE, it fills a part of the buffer, which nobody uses before all parts are there.
                    self.emit(
                        Kind.REFRESH, common_refresh, reads=(*sources, *buffer), stage=stage, delayed=delayed,
                        fill=True, redo=redo,
                    )
                for keeper in refresh:
                    self.emit(
                        Kind.REFRESH, common_refresh, reads=sources, writes=(self.weights_of(keeper),), stage=keeper,
                        delayed=delayed, redo=redo,
                    )
            if is_stored:
                self.emit(
                    Kind.WRITE_STATES,
                    common,
                    reads=(*states, Resource(Part.COMMIT, 0)),
                    writes=(stored,),
                    delayed=delayed,
                    redo=redo,
                )
            if piece + 1 == len(chunks) or chunks[piece + 1] != chunk:
                written = self.pieces_of_chunk[stage][chunk]
                if is_stored:
                    self.emit(
                        Kind.OPEN_CHUNK, reads=written, writes=(newest,), stage=stage, piece=piece, delayed=delayed
                    )
                if kept:
                    self.write_kept(stage, chunk, delayed=delayed)

    def write_kept(self, stage: int, chunk: int, *, delayed: bool) -> None:
        """Write what is kept of a chunk, all of whose pieces have been updated; for a commit, if one is due.

        Where only the weights are kept, they join the moments that have just been written, into the same slot: nobody
        may write there before they are done.
        """
        written = self.pieces_of_chunk[stage][chunk]
        stored = () if chunk in self.kept_moments[stage] else (*written, Resource(Part.CHUNK, stage, chunk))
        self.emit(
            Kind.WRITE_KEPT,
            reads=(
                *(Resource(Part.KEPT, stage, resource.second) for resource in written),
                *stored,
                Resource(Part.COMMIT, 0),
            ),
            writes=(Resource(Part.KEPT_COPY, stage, chunk),),
            stage=stage,
            piece=written[-1].second,
            delayed=delayed,
        )

    def users(self, stage: int) -> list[int]:
        """Stages whose weight buffers have weights of ``stage``: itself, and borrowers of its tensors."""
        return [
            user
            for user, shape in enumerate(self.stages)
            if user == stage or any(owner == stage for owner, _ in shape.borrowed)
        ]

    def keepers(self, index: int, stage: int) -> tuple[int, ...]:
        """Stages in whose buffers the weights of ``stage`` stay for the next visit: itself, borrowers of its tensors.

        A buffer that is taken by another stage before that loses them now: they will be read again.
        """
        held = [user for user in self.users(stage) if self.held.get(self.buffers.weights[user]) == user]
        kept = tuple(user for user in held if self.next_holder(index, self.buffers.weights[user]) == user)
        for user in held:
            if user not in kept:
                del self.held[self.buffers.weights[user]]
        return kept

    def next_holder(self, index: int, buffer: int) -> int:
        """The stage that uses a weight buffer next, this step or the next one."""
        cycle = self.visits[index + 1 :] + self.visits
        return next(visit.stage for visit in cycle if self.buffers.weights[visit.stage] == buffer)
