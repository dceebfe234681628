"""The simulator's rules once more, written without an eye on speed: what `test_simulate.py` compares it with.

Every moment everything is looked at anew: which ops may run, how fast each of them goes, what ends first.
"""

from __future__ import annotations

from collections.abc import Sequence

from hoist.scheduler.link import LinkedPlan, join
from hoist.scheduler.ops import Kind, Lane
from hoist.scheduler.simulate import Costs, Machine

#: A step and the number of an op in it.
Task = tuple[int, int]


class SlowSimulation:
    """Runs ``num_steps`` steps of one plan; :attr:`returns` says when each was over."""

    def __init__(self, linked: LinkedPlan, costs: Costs, machine: Machine, num_steps: int) -> None:
        self.ops = linked.plan.ops
        self.costs = costs
        self.machine = machine
        self.num_steps = num_steps
        self.needs: dict[Task, set[Task]] = {}
        joined = join(linked, linked)
        for step in range(num_steps + 1):
            for index in range(len(self.ops)):
                self.needs[step, index] = set()
            for index, later in enumerate(linked.dependents):
                for other in later:
                    self.needs[step, other].add((step, index))
            if step:
                for earlier, other in joined:
                    self.needs[step, other].add((step - 1, earlier))
        self.done: set[Task] = set()
        #: Tasks that may run, in the order in which they became so.
        self.ready: list[Task] = []
        self.left: dict[Task, float] = {}
        self.registered = 0
        self.returns: list[float] = []
        self.now = 0.0
        self._run()

    def lane(self, task: Task) -> Lane:
        return self.ops[task[1]].lane

    def is_over(self, step: int) -> bool:
        return all((step, index) in self.done for index in range(len(self.ops)))

    def _find_ready(self, after: Sequence[Task]) -> None:
        """Note what may run now that these have ended."""
        for ended in after:
            for step in (ended[0], ended[0] + 1):
                for index in range(len(self.ops)):
                    task = (step, index)
                    if ended in self.needs.get(task, ()) and step < self.registered:
                        self._note(task)

    def _note(self, task: Task) -> None:
        if task not in self.ready and task not in self.done and self.needs[task] <= self.done:
            self.ready.append(task)
            index = task[1]
            read, written = self.costs.read_bytes[index], self.costs.written_bytes[index]
            self.left[task] = self.costs.seconds[index] + (
                read / self.machine.read_bytes_per_second + written / self.machine.write_bytes_per_second
            )

    def _call(self) -> bool:
        """Let steps return and begin."""
        current = len(self.returns)
        if current < self.registered:
            awaited = [
                (current, index)
                for index, op in enumerate(self.ops)
                if op.lane is Lane.COMPUTE or op.kind is Kind.NORM
            ]
            if all(task in self.done for task in awaited):
                self.returns.append(self.now)
                return True
            return False
        unfinished = [step for step in range(self.registered) if not self.is_over(step)]
        if current == self.num_steps or len(unfinished) > 1:
            return False
        self.registered += 1
        for index in range(len(self.ops)):
            self._note((current, index))
        return True

    def _running(self) -> list[Task]:
        """What is at work now."""
        found: list[Task] = []
        for lane in (Lane.COMPUTE, Lane.COPY, Lane.OPTIM, Lane.COMMIT):
            begun = [task for task in self.begun if self.lane(task) is lane]
            found += begun or self._next(lane)
        taken = 0
        for task in (task for task in self.ready if self.lane(task) is Lane.IO):
            if taken < self.machine.parts_at_once:
                taken += min(self.costs.parts[task[1]], self.machine.parts_at_once)
                found.append(task)
        return found

    def _next(self, lane: Lane) -> list[Task]:
        ready = [task for task in self.ready if self.lane(task) is lane]
        if lane is Lane.COMPUTE:
            order = [(step, index) for step in range(self.registered) for index in range(len(self.ops))]
            first = next((task for task in order if self.lane(task) is lane and task not in self.done), None)
            return [first] if first in ready and first[0] == len(self.returns) else []
        if lane is Lane.OPTIM:
            norms = [task for task in ready if self.ops[task[1]].kind is Kind.NORM]
            order = [(step, index) for step in range(self.registered) for index in range(len(self.ops))]
            updates = (
                task
                for task in order
                if self.lane(task) is lane and self.ops[task[1]].kind is not Kind.NORM and task not in self.done
            )
            first = next(updates, None)
            return norms[:1] or ([first] if first in ready else [])
        return ready[:1]

    def _rate(self, task: Task, running: Sequence[Task]) -> float:
        machine = self.machine
        flowing = {
            task: min(self.costs.parts[task[1]], machine.parts_at_once)
            for task in running
            if self.lane(task) is Lane.IO
        }
        used = min(1.0, sum(flowing.values()) / machine.filling_parts)
        if task in flowing:
            return used * flowing[task] / sum(flowing.values())
        if not machine.shares_cores:
            return 1.0
        free = 1.0 - machine.io_core_share * used
        working = [other for other in running if other not in flowing]
        if len(working) == 1:
            return free
        shares = {
            other: machine.compute_share if self.lane(other) is Lane.COMPUTE else 1.0 - machine.compute_share
            for other in working
        }
        return free * min(1.0, machine.capacity * shares[task] / sum(shares.values()))

    def _run(self) -> None:
        self.begun: set[Task] = set()
        while len(self.returns) < self.num_steps:
            if self._call():
                continue
            at_once = [
                task
                for task in self.ready
                if self.left[task] == 0.0
                and (self.lane(task) in (Lane.NONE, Lane.IO) or task in self._running())
            ]
            if at_once:
                self._end(at_once[:1])
                continue
            running = self._running()
            self.begun |= set(running)
            rates = {task: self._rate(task, running) for task in running}
            passed = min(self.left[task] / rate for task, rate in rates.items())
            self.now += passed
            for task, rate in rates.items():
                self.left[task] -= passed * rate
            self._end([task for task in running if self.left[task] <= 1e-12])

    def _end(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self.ready.remove(task)
            self.done.add(task)
            self.begun.discard(task)
        self._find_ready(tasks)
