"""Reads the trace of a run as a viewer does, also one without its end, and checks what holds for every trace."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from hoist.scheduler.ops import Lane

#: Events' categories that ops have.
LANES = frozenset(lane.value for lane in Lane)


def nanoseconds(micros: Decimal | int) -> int:
    """A time or duration of an event, exactly."""
    return int(micros * 1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Something on a track. Times are nanoseconds since the file's base."""

    name: str
    category: str
    track: int
    start: int
    stop: int
    args: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, int]:
        """An op's name and step."""
        return self.name, self.args["step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTrace:
    """What a file holds."""

    slices: list[Slice]
    flows: list[tuple[tuple[int, int], tuple[int, int]]]
    """Track and time of tail and head."""
    counters: dict[str, list[tuple[int, int]]]
    """Time and value."""
    tracks: dict[int, str]
    is_whole: bool
    """The array has an end."""

    @property
    def ops(self) -> list[Slice]:
        """Slices that are ops."""
        return [each for each in self.slices if each.category in LANES]

    def other(self) -> list[Slice]:
        """Slices that are not."""
        return [each for each in self.slices if each.category not in LANES]


def read_trace(path: Path) -> ReadTrace:
    """Read and check it: every event is of a known form, slices of a track nest, arrows have both ends."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        packed = zlib.decompressobj(31)
        data = packed.decompress(data)
    text = data.decode()
    is_whole = text.endswith("\n]\n")
    events: list[dict[str, Any]] = json.loads(text if is_whole else text.rstrip(",\n") + "]", parse_float=Decimal)
    slices: list[Slice] = []
    ends: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    counters: dict[str, list[tuple[int, int]]] = defaultdict(list)
    tracks: dict[int, str] = {}
    processes = {event["pid"] for event in events}
    assert len(processes) == 1
    for event in events:
        match event["ph"]:
            case "X":
                start = nanoseconds(event["ts"])
                slices.append(
                    Slice(
                        name=event["name"], category=event["cat"], track=event["tid"], start=start,
                        stop=start + nanoseconds(event["dur"]), args=event["args"],
                    )
                )  # fmt: skip
            case "s" | "f":
                assert event["ph"] not in ends[event["id"]]
                ends[event["id"]][event["ph"]] = event["tid"], nanoseconds(event["ts"])
            case "C":
                counters[event["name"]].append((nanoseconds(event["ts"]), event["args"]["value"]))
            case "M":
                if event["name"] == "thread_name":
                    tracks[event["tid"]] = event["args"]["name"]
            case other:
                raise AssertionError(f"an event of unknown kind {other}")
    assert all(each.keys() == {"s", "f"} for each in ends.values())
    assert {each.track for each in slices} <= tracks.keys()
    assert_nested(slices)
    return ReadTrace(
        slices=slices,
        flows=[(each["s"], each["f"]) for each in ends.values()],
        counters=dict(counters),
        tracks=tracks,
        is_whole=is_whole,
    )


def assert_nested(slices: Sequence[Slice]) -> None:
    """Slices of a track lie apart or one within the other; ops lie apart."""
    by_track: dict[int, list[Slice]] = defaultdict(list)
    for each in slices:
        by_track[each.track].append(each)
    for on_track in by_track.values():
        around: list[Slice] = []
        for each in sorted(on_track, key=lambda one: (one.start, -one.stop)):
            while around and around[-1].stop <= each.start:
                around.pop()
            if around:
                assert each.stop <= around[-1].stop, (around[-1], each)
                assert not (each.category in LANES and around[-1].category in LANES), (around[-1], each)
            around.append(each)
