"""The executor with ops that are only issued: marks are reached when the test says so, and nothing else moves time."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoist.scheduler.executor import Done, Executor, Mark
from hoist.scheduler.link import LinkedPlan, join
from hoist.scheduler.ops import Kind, Lane, Op
from tests.scheduler.test_executor import PATIENCE, Caller, Gate, plan_of, wait_until_closed

#: Kinds of the toy device, each with its stream. UNBIND, which is the device's too, only keeps books: it makes no mark.
STREAMS = {
    Kind.FORWARD: "compute",
    Kind.LOSS: "compute",
    Kind.BACKWARD: "compute",
    Kind.MERGE: "up",
    Kind.WIDEN: "down",
}
DEVICE = frozenset({*STREAMS, Kind.UNBIND})
#: Step and number of an op.
Key = tuple[int, int]


@dataclass(eq=False)
class ToyMark:
    """Reached when the test says so."""

    stream: str
    key: Key
    after: Sequence[ToyMark]
    asked: threading.Event = field(default_factory=threading.Event)
    seen: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    _reached: threading.Event = field(default_factory=threading.Event)

    def reach(self, error: BaseException | None = None) -> None:
        self.error = error
        self._reached.set()

    @property
    def is_reached(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        self.asked.set()
        assert self._reached.wait(PATIENCE)
        self.seen.set()
        if self.error is not None:
            raise self.error


class Device:
    """A handler whose device ops end when the test says so; everything else ends at once."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stream_of = dict(STREAMS)
        #: Hold ops that have put their work in a stream, before they return.
        self.gates: dict[Key, Gate] = {}
        self.begun: list[Key] = []
        self.marks: dict[Key, ToyMark] = {}
        self.afters: dict[Key, tuple[Key, ...]] = {}
        self.errors: dict[Key, BaseException] = {}
        self.streams: dict[str, list[ToyMark]] = {}
        #: Per op, all that it comes after: (the op before, itself) is noted if nothing makes sure of it.
        self.predecessors: dict[Key, set[Key]] = {}
        self.too_early: list[tuple[Key, Key]] = []

    def run(self, op: Op, step: int, after: Sequence[Mark] = ()) -> Mark | None:
        key = (step, op.piece)
        marks = [mark for mark in after if isinstance(mark, ToyMark)]
        assert len(marks) == len(after)
        with self.changed:
            self.begun.append(key)
            self.afters[key] = tuple(mark.key for mark in marks)
            stream = self.stream_of.get(op.kind)
            sure = self.behind([*marks, *self.streams.get(stream or "", ())])
            for before in self.predecessors.get(key, ()):
                mark = self.marks.get(before)
                if mark is not None and not mark.is_reached and mark not in sure:
                    self.too_early.append((before, key))
            made = None
            if key not in self.errors and stream is not None:
                made = self.marks[key] = ToyMark(stream, key, marks)
                self.streams.setdefault(stream, []).append(made)
            self.changed.notify_all()
        if key in self.errors:
            raise self.errors[key]
        if key in self.gates:
            self.gates[key].hold()
        return made

    def start(self, op: Op, step: int, done: Done) -> None:
        self.run(op, step)
        done(None)

    def behind(self, marks: Sequence[ToyMark]) -> set[ToyMark]:
        """The marks, and all that are reached before them."""
        found: set[ToyMark] = set()
        left = list(marks)
        while left:
            mark = left.pop()
            if mark not in found:
                found.add(mark)
                stream = self.streams[mark.stream]
                left += [*mark.after, *stream[: stream.index(mark)]]
        return found

    def mark(self, step: int, piece: int) -> ToyMark:
        """The op's mark, once it has been issued."""
        with self.changed:
            assert self.changed.wait_for(lambda: (step, piece) in self.marks, PATIENCE)
            return self.marks[step, piece]

    def wait_begun(self, step: int, piece: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (step, piece) in self.begun, PATIENCE)

    def began(self, step: int, piece: int) -> bool:
        with self.changed:
            return (step, piece) in self.begun

    def reach_all(self) -> None:
        """Also what is issued from now on."""
        with self.changed:
            for mark in self.marks.values():
                mark.reach()


class Ends:
    """Hears of the ends of ops in streams."""

    def __init__(self) -> None:
        self.heard: dict[Key, tuple[str, float, float, BaseException | None]] = {}
        self.order: list[Key] = []
        self._changed = threading.Condition()

    def __call__(
        self, op: Op, step: int, stream: str, start: float, stop: float, error: BaseException | None
    ) -> None:
        with self._changed:
            self.heard[step, op.piece] = (stream, start, stop, error)
            self.order.append((step, op.piece))
            self._changed.notify_all()

    def wait(self, step: int, piece: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: (step, piece) in self.heard, PATIENCE)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def executor(device: Device, ends: Ends) -> Iterator[Executor]:
    executor = Executor(device, device_kinds=DEVICE, ended=ends)
    yield executor
    device.reach_all()
    executor.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hoist-")]


# ---------------------------------------------------------------------- edges


def test_an_op_of_the_device_begins_when_the_one_before_is_issued_and_gets_its_mark(
    device: Device, executor: Executor
) -> None:
    """The caller issues everything and returns, though nothing has been computed."""
    executor.run(plan_of((Kind.MERGE, "", "w"), (Kind.FORWARD, "w", "a"), (Kind.BACKWARD, "aw", "g")), 1)
    assert not any(mark.is_reached for mark in device.marks.values())
    assert device.afters == {(1, 0): (), (1, 1): ((1, 0),), (1, 2): ((1, 0), (1, 1))}


def test_a_mark_that_was_reached_before_is_not_passed(device: Device, ends: Ends, executor: Executor) -> None:
    executor.run(plan_of((Kind.MERGE, "", "w")), 1)
    device.mark(1, 0).reach()
    executor.drain()
    executor.run(plan_of((Kind.FORWARD, "w", "a")), 2)
    assert device.afters[2, 0] == ()


def test_others_wait_for_the_end(device: Device, executor: Executor) -> None:
    """In every lane; what they make may then be used by the device."""
    kinds = (Kind.ACQUIRE, Kind.READ_WEIGHTS, Kind.UPDATE, Kind.COMMIT)
    executor.run(
        plan_of((Kind.FORWARD, "", "a"), *((kind, "a", str(number)) for number, kind in enumerate(kinds))), 1
    )
    mark = device.mark(1, 0)
    assert mark.asked.wait(PATIENCE)
    assert device.begun == [(1, 0)]
    mark.reach()
    executor.drain()
    assert set(device.begun) == {(1, piece) for piece in range(5)}
    assert device.afters[1, 1] == ()


def test_an_op_of_the_device_waits_for_the_end_of_others(device: Device, executor: Executor) -> None:
    plan = plan_of((Kind.FORWARD, "", "a"), (Kind.UPDATE, "a", "w"), (Kind.BACKWARD, "aw", "g"))
    caller = Caller(lambda: executor.run(plan, 1))
    mark = device.mark(1, 0)
    assert not device.began(1, 2)
    mark.reach()
    caller.result()
    assert device.afters[1, 2] == ()


def test_of_one_stream_only_the_last_mark_is_passed(device: Device, executor: Executor) -> None:
    executor.run(
        plan_of(
            (Kind.FORWARD, "", "a"),
            (Kind.FORWARD, "", "b"),
            (Kind.FORWARD, "", "c"),
            (Kind.UNBIND, "", ""),
            (Kind.BACKWARD, "abc", "d"),
        ),
        1,
    )
    assert device.afters[1, 4] == ((1, 2),)


def test_of_two_that_are_put_in_a_stream_at_the_same_time_both_marks_are_passed(
    device: Device, executor: Executor
) -> None:
    """Which of them is the last is not known."""
    device.stream_of[Kind.MERGE] = "compute"
    plan = plan_of(
        (Kind.FORWARD, "", "a"), (Kind.MERGE, "", "b"), (Kind.BACKWARD, "ab", "c"), (Kind.BACKWARD, "abc", "d")
    )
    gates = device.gates[1, 0], device.gates[1, 1] = Gate(), Gate()
    caller = Caller(lambda: executor.run(plan, 1))
    for gate in gates:
        assert gate.begun.wait(PATIENCE)
    for gate in gates:
        gate.open()
    caller.result()
    assert sorted(device.afters[1, 2]) == [(1, 0), (1, 1)]
    assert device.afters[1, 3] == ((1, 2),)


def test_what_only_keeps_books_ends_when_what_it_comes_after_has_ended(
    device: Device, executor: Executor
) -> None:
    """The buffer of an unbound stage is not taken while a kernel reads it; the device gets the kernel's mark."""
    spans = executor.run(
        plan_of(
            (Kind.FORWARD, "w", "a"),
            (Kind.UNBIND, "a", "u"),
            (Kind.ACQUIRE, "u", "x"),
            (Kind.UNBIND, "u", "v"),
            (Kind.BACKWARD, "v", "g"),
        ),
        1,
    )
    assert device.afters == {(1, 0): (), (1, 1): ((1, 0),), (1, 3): ((1, 0),), (1, 4): ((1, 0),)}
    device.mark(1, 0).reach()
    device.wait_begun(1, 2)
    device.mark(1, 4).reach()
    spans += executor.drain()
    assert sorted(span.op.piece for span in spans) == [0, 1, 3, 4]


def test_edges_between_steps_are_the_same(device: Device, executor: Executor) -> None:
    """What is issued gives its mark, what is not is waited for, and others wait for the end."""
    first = plan_of((Kind.FORWARD, "", "a"), (Kind.UPDATE, "a", "h"), (Kind.MERGE, "h", "w"), (Kind.UNBIND, "a", "u"))
    second = plan_of((Kind.BACKWARD, "a", "g"), (Kind.READ_STATES, "a", "s"), (Kind.FORWARD, "wu", "z"))
    executor.run(first, 1)
    caller = Caller(lambda: executor.run(second, 2))
    device.wait_begun(2, 0)
    assert device.afters[2, 0] == ((1, 0),)
    assert not device.began(2, 1)
    assert not device.began(2, 2)
    device.mark(1, 0).reach()
    device.mark(1, 2)
    caller.result()
    assert device.afters[2, 2] == ((1, 2),)
    assert device.began(2, 1)


def test_a_step_returns_when_its_losses_are_there(device: Device, executor: Executor) -> None:
    """Also of a plan that measures no gradients; what nobody awaits may be left."""
    plan = plan_of((Kind.LOSS, "", "a"), (Kind.LOSS, "", "b"), (Kind.FORWARD, "", "c"))
    caller = Caller(lambda: executor.run(plan, 1))
    device.mark(1, 2)
    device.mark(1, 0).reach()
    assert device.mark(1, 1).asked.wait(PATIENCE)
    assert not caller.done
    device.mark(1, 1).reach()
    caller.result()
    assert not device.mark(1, 2).is_reached


def test_a_lane_waits_for_a_mark_of_a_kind_that_is_not_the_devices(device: Device) -> None:
    executor = Executor(device, device_kinds=frozenset({Kind.FORWARD}))
    caller = Caller(lambda: executor.run(plan_of((Kind.BACKWARD, "", "a"), (Kind.FORWARD, "a", "b")), 1))
    mark = device.mark(1, 0)
    assert mark.asked.wait(PATIENCE)
    assert not device.began(1, 1)
    mark.reach()
    caller.result()
    device.reach_all()
    executor.close()


# ---------------------------------------------------------------------- any plan


#: Kinds to choose from, of every lane but I/O's peers more than once.
_KINDS = (*STREAMS, Kind.UNBIND, Kind.UNBIND, Kind.UPDATE, Kind.READ_WEIGHTS, Kind.ACQUIRE, Kind.COMMIT, Kind.NORM)
_OPS = st.lists(
    st.tuples(
        st.sampled_from(_KINDS), st.text("abcde", max_size=2).map(set), st.text("abcde", max_size=2).map(set)
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(plans=st.lists(_OPS, min_size=1, max_size=3), seed=st.integers(0, 2**16))
def test_marks_cover_what_the_device_depends_on_and_others_wait_for_them(
    plans: list[list[tuple[Kind, set[str], set[str]]]], seed: int
) -> None:
    """Marks are reached in an unlucky order that streams and marks allow: no other is to be relied on."""
    linked = [
        plan_of(*((kind, "".join(sorted(reads)), "".join(sorted(writes))) for kind, reads, writes in ops))
        for ops in plans
    ]
    device = Device()
    device.predecessors = predecessors(linked)
    executor = Executor(device, device_kinds=DEVICE)
    stopping = threading.Event()
    reaching = Caller(lambda: reach_in_disorder(device, random.Random(seed), stopping))
    try:
        for step, plan in enumerate(linked):
            executor.run(plan, step)
        executor.drain()
    finally:
        with device.changed:
            stopping.set()
            device.changed.notify_all()
        reaching.result()
        device.reach_all()
        executor.close()
    assert sorted(device.begun) == sorted(device.predecessors)
    assert not device.too_early
    for afters in device.afters.values():
        streams = [device.marks[key].stream for key in afters]
        assert len(streams) == len(set(streams))


def reach_in_disorder(device: Device, chance: random.Random, stopping: threading.Event) -> None:
    """Reach marks, one after another, in any order that streams and marks allow."""
    while True:
        with device.changed:
            while not stopping.is_set():
                left = [mark for mark in device.marks.values() if not mark.is_reached]
                free = [mark for mark in left if device.behind([mark]).isdisjoint({*left} - {mark})]
                if free:
                    break
                device.changed.wait(PATIENCE)
            else:
                return
            chance.choice(free).reach()


def predecessors(linked: Sequence[LinkedPlan]) -> dict[Key, set[Key]]:
    """Of every op all that it comes after, in earlier steps too."""
    found: dict[Key, set[Key]] = {}
    for step, plan in enumerate(linked):
        direct: dict[int, set[Key]] = {number: set() for number in range(len(plan.plan.ops))}
        for earlier, dependents in enumerate(plan.dependents):
            for later in dependents:
                direct[later].add((step, earlier))
        if step:
            for earlier, later in join(linked[step - 1], plan):
                direct[later].add((step - 1, earlier))
        for number, keys in direct.items():
            found[step, number] = keys.union(*(found[key] for key in keys))
    return found


# ---------------------------------------------------------------------- errors


def test_a_mark_that_fails_is_an_error_of_its_op_and_nothing_new_is_issued(
    device: Device, ends: Ends, executor: Executor
) -> None:
    plan = plan_of((Kind.FORWARD, "", "a"), (Kind.UPDATE, "a", "b"), (Kind.BACKWARD, "b", "c"), (Kind.NORM, "c", "d"))
    caller = Caller(lambda: executor.run(plan, 1))
    device.mark(1, 0).reach(RuntimeError("an illegal address"))
    with pytest.raises(RuntimeError, match="an illegal address") as caught:
        caller.result()
    assert caught.value.__notes__ == ["while executing forward(stage 0, piece 0)"]
    with pytest.raises(RuntimeError, match="an illegal address"):
        executor.run(plan, 2)
    executor.close()
    assert device.begun == [(1, 0)]
    assert ends.heard[1, 0][3] is caught.value


def test_the_first_of_several_errors_is_told(device: Device, executor: Executor) -> None:
    executor.run(plan_of((Kind.FORWARD, "", "a"), (Kind.MERGE, "", "b"), (Kind.BACKWARD, "", "c")), 1)
    device.mark(1, 1).reach(RuntimeError("first"))
    with pytest.raises(RuntimeError, match="first"):
        executor.drain()
    device.mark(1, 0).reach(RuntimeError("second"))
    device.mark(1, 2).reach(RuntimeError("third"))
    executor.close()
    with pytest.raises(RuntimeError, match="first") as caught:
        executor.drain()
    assert caught.value.__notes__ == ["while executing merge(stage 0, piece 1)"]


def test_after_an_error_at_issue_what_was_issued_is_waited_for(device: Device, executor: Executor) -> None:
    device.errors[1, 1] = MemoryError("no room on the device")
    with pytest.raises(MemoryError, match="no room on the device") as caught:
        executor.run(plan_of((Kind.FORWARD, "", "a"), (Kind.BACKWARD, "", "b"), (Kind.LOSS, "", "c")), 1)
    assert caught.value.__notes__ == ["while executing backward(stage 0, piece 1)"]
    closing = Caller(executor.close)
    assert device.mark(1, 0).asked.wait(PATIENCE)
    assert not closing.done
    device.mark(1, 0).reach()
    closing.result()
    assert not device.began(1, 2)


def test_who_hears_of_ends_may_fail(device: Device) -> None:
    def ended(*_: object) -> None:
        raise OSError("no room for notes")

    executor = Executor(device, device_kinds=DEVICE, ended=ended)
    executor.run(plan_of((Kind.FORWARD, "", "a")), 1)
    device.mark(1, 0).reach()
    with pytest.raises(OSError, match="no room for notes"):
        executor.drain()
    executor.close()


def test_an_interrupt_while_a_loss_is_waited_for_leaves_the_device_to_close(device: Device, executor: Executor) -> None:
    main = threading.get_ident()
    caught = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if not caught.is_set():
            caught.set()
            raise KeyboardInterrupt

    def send() -> None:
        assert device.mark(1, 0).asked.wait(PATIENCE)
        # A signal that comes just before the thread blocks is seen when it wakes: send until it has been.
        while not caught.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        sending = Caller(send)
        with pytest.raises(KeyboardInterrupt):
            executor.run(plan_of((Kind.LOSS, "", "a"), (Kind.UPDATE, "a", "b")), 1)
        sending.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    closing = Caller(executor.close)
    assert not closing.done
    device.mark(1, 0).reach()
    closing.result()
    assert not device.began(1, 1)


# ---------------------------------------------------------------------- close


def test_close_waits_for_what_was_issued_and_starts_nothing(device: Device, executor: Executor) -> None:
    executor.run(
        plan_of((Kind.FORWARD, "", "a"), (Kind.BACKWARD, "", "b"), (Kind.MERGE, "", "c"), (Kind.UPDATE, "abc", "d")), 1
    )
    device.mark(1, 2)
    closing = Caller(executor.close)
    wait_until_closed(executor)
    device.mark(1, 0).reach()
    for piece in (1, 2):
        assert device.mark(1, piece).asked.wait(PATIENCE)
        assert not closing.done
        device.mark(1, piece).reach()
    closing.result()
    assert not device.began(1, 3)


def test_each_stream_has_a_thread_from_its_first_op_until_close(device: Device, executor: Executor) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("hoist-wait-")}

    assert not names()
    executor.run(plan_of((Kind.FORWARD, "", "a"), (Kind.BACKWARD, "", "b"), (Kind.MERGE, "", "c")), 1)
    device.mark(1, 2)
    device.reach_all()
    executor.drain()
    assert names() == {"hoist-wait-compute", "hoist-wait-up"}
    executor.close()
    assert not names()


# ---------------------------------------------------------------------- spans


def test_the_span_of_an_op_that_was_issued_ahead_begins_when_those_before_it_have_ended(
    device: Device, ends: Ends, executor: Executor
) -> None:
    plan = plan_of((Kind.MERGE, "", "w"), (Kind.FORWARD, "", "a"), (Kind.FORWARD, "", "b"), (Kind.BACKWARD, "w", "c"))
    spans = executor.run(plan, 1)
    device.mark(1, 1).reach()
    ends.wait(1, 1)
    device.mark(1, 2).reach()
    ends.wait(1, 2)
    device.mark(1, 0).reach()
    ends.wait(1, 0)
    device.mark(1, 3).reach()
    spans += executor.drain()
    found = {span.op.piece: span for span in spans}
    assert found[2].start == found[1].stop < found[2].stop
    assert found[3].start == found[0].stop > found[2].stop
    assert {piece: ends.heard[1, piece] for piece in range(4)} == {
        piece: (STREAMS[span.op.kind], span.start, span.stop, None) for piece, span in found.items()
    }


def test_an_end_is_told_after_those_that_it_came_after(device: Device, ends: Ends, executor: Executor) -> None:
    """Even if its own mark is seen first."""
    executor.run(plan_of((Kind.MERGE, "", "w"), (Kind.FORWARD, "w", "a"), (Kind.WIDEN, "a", "b")), 1)
    assert all(device.mark(1, piece).asked.wait(PATIENCE) for piece in range(3))
    for piece in (2, 1, 0):
        device.mark(1, piece).reach()
        assert device.mark(1, piece).seen.wait(PATIENCE)
    executor.drain()
    assert ends.order == [(1, 0), (1, 1), (1, 2)]


def test_the_oldest_op_that_has_not_ended_is_what_a_lane_is_at(device: Device, executor: Executor) -> None:
    plan = plan_of(
        (Kind.MERGE, "", "w"),
        (Kind.FORWARD, "", "a"),
        (Kind.BACKWARD, "w", "c"),
        (Kind.UNBIND, "c", "u"),
        (Kind.ACQUIRE, "w", ""),  # shows that the merge has ended
        (Kind.ACQUIRE, "a", ""),
    )

    def at(lane: Lane) -> int | None:
        work = executor.activity().current[lane]
        return None if work is None else work.op.piece

    def unfinished() -> list[int]:
        return sorted(span.op.piece for span in executor.unfinished())

    executor.run(plan, 7)
    assert (at(Lane.COPY), at(Lane.COMPUTE), unfinished()) == (0, 1, [0, 1])
    device.mark(7, 1).reach()
    device.wait_begun(7, 5)
    activity = executor.activity()
    assert activity.turn is not None and activity.ahead is not None
    assert (activity.turn.op.piece, activity.turn.step, activity.ahead.op.piece) == (2, 7, 2)
    assert (at(Lane.COMPUTE), unfinished()) == (2, [0])  # the backward waits for the merge
    device.mark(7, 0).reach()
    device.wait_begun(7, 4)
    assert (at(Lane.COPY), unfinished()) == (None, [2])
    device.mark(7, 2).reach()
    executor.drain()
    assert (at(Lane.COMPUTE), unfinished(), executor.activity().turn) == (None, [], None)
