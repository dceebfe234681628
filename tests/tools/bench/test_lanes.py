"""Drawings of a step's timeline and the share of it in which nothing that limits a step was at work."""

from __future__ import annotations

import pytest

from hoist.scheduler.ops import Kind, Op
from hoist.scheduler.spans import Span
from hoist.tools.bench.lanes import draw_timeline, idle_share


def span(kind: Kind, start: float, stop: float) -> Span:
    return Span(Op(kind=kind, reads=(), writes=()), start, stop)


#: A step from 0 to 10 whose neighbours reach into it; the lanes overlap each other and themselves.
SPANS = [
    span(Kind.READ_WEIGHTS, -2.0, 1.0),
    span(Kind.READ_WEIGHTS, 0.5, 2.0),
    span(Kind.FORWARD, 4.0, 6.0),
    span(Kind.UPDATE, 6.5, 7.0),
    span(Kind.BACKWARD, 9.0, 12.0),
]


def test_idle_is_when_neither_computing_nor_io_was_at_work() -> None:
    assert idle_share(SPANS, 0.0, 10.0) == pytest.approx(0.5)
    assert idle_share([], 0.0, 10.0) == 1.0


def test_a_drawing() -> None:
    assert draw_timeline(SPANS, 0.0, 10.0, columns=10) == [
        " compute |    ##   #|",
        "      io |##        |",
        "   optim |      .   |",
        "    copy |          |",
    ]
