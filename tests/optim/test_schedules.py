"""The learning rate of each step is the documented formula, exactly, and senseless settings are refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoist.optim import SCHEDULE_KINDS, HyperparameterError, Schedule, ScheduleKind

kinds = st.sampled_from(SCHEDULE_KINDS)


@given(kind=kinds, lr=st.floats(0.0, 10.0), warmup=st.integers(0, 30), steps=st.integers(1, 60))
def test_the_formula(kind: ScheduleKind, lr: float, warmup: int, steps: int) -> None:
    schedule = Schedule(kind=kind, lr=lr, warmup_steps=warmup, num_steps=steps)
    for step in range(1, steps + 1):
        if step <= warmup:
            expected = lr * step / warmup
        else:
            p = (step - warmup) / (steps - warmup + 1)
            curves = {"constant": lr, "linear": lr * (1 - p), "cosine": lr * (1 + math.cos(math.pi * p)) / 2}
            expected = curves[kind]
        assert schedule.at(step) == expected


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 0.8535533905932737, 0.5, 0.1464466094067262]),
    ],
)
def test_known_rates(kind: ScheduleKind, rates: list[float]) -> None:
    schedule = Schedule(kind=kind, lr=1.0, warmup_steps=2, num_steps=5)
    assert [schedule.at(step) for step in range(1, 6)] == pytest.approx(rates, rel=1e-14)


@given(kind=kinds, warmup=st.integers(0, 20), steps=st.integers(1, 60))
def test_the_peak_is_never_passed_and_no_step_is_wasted(kind: ScheduleKind, warmup: int, steps: int) -> None:
    schedule = Schedule(kind=kind, lr=0.125, warmup_steps=warmup, num_steps=steps)
    rates = [schedule.at(step) for step in range(1, steps + 1)]
    assert all(0.0 < rate <= 0.125 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_a_warmup_longer_than_the_run_just_rises() -> None:
    schedule = Schedule(kind="cosine", lr=1.0, warmup_steps=10, num_steps=4)
    assert [schedule.at(step) for step in (1, 4)] == [0.1, 0.4]


@pytest.mark.parametrize("step", [-1, 0, 11])
def test_steps_outside_the_run_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=rf"step must be 1 to 10, got {step}"):
        Schedule(kind="linear", lr=1.0, num_steps=10).at(step)


def test_a_run_of_no_steps_can_be_described() -> None:
    with pytest.raises(ValueError, match="got 1"):
        Schedule(kind="linear", lr=1.0, num_steps=0).at(1)


@pytest.mark.parametrize(
    ("kind", "lr", "warmup", "steps", "message"),
    [
        ("step", 1.0, 0, 1, "lr schedule 'step' is not one of constant, linear, cosine"),
        ("linear", -1.0, 0, 1, "lr must be a finite number of at least 0, got -1.0"),
        ("linear", math.nan, 0, 1, "lr must be a finite number of at least 0, got nan"),
        ("linear", math.inf, 0, 1, "lr must be a finite number of at least 0, got inf"),
        ("linear", 1.0, -1, 1, "warmup_steps must be at least 0, got -1"),
        ("linear", 1.0, 0, -2, "num_steps must be at least 0, got -2"),
    ],
)
def test_senseless_settings_are_refused(kind: ScheduleKind, lr: float, warmup: int, steps: int, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message) as caught:
        Schedule(kind=kind, lr=lr, warmup_steps=warmup, num_steps=steps)
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == 2
