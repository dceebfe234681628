"""`hoist report`: a run as a page, or as a picture, made of what its store holds. The door: gather, say, write.

What is gathered is in `facts.py`, what is said of it in `run.py`, `_bytes` and `_step`. Needs the
extra ``report``; changes nothing in the store.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

from hoist._version import __version__
from hoist.tools.durations import show_seconds
from hoist.tools.run_report.bound import bound, roofline
from hoist.tools.run_report.bytes import memory, traffic, wear
from hoist.tools.run_report.facts import RunFacts
from hoist.tools.run_report.parts import Report, middle, show_rate, steady, times
from hoist.tools.run_report.run import speed, training
from hoist.tools.run_report.step import lanes, residency
from hoist.tools.sizes import show_bytes

#: Options that say nothing of a run.
_UNTOLD = frozenset({"config", "metrics", "fresh", "store"})


def report_of(facts: RunFacts) -> Report:
    """Everything that is said of a run."""
    store = facts.store
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(facts.made_at))
    return Report(
        title=f"{store.model}: {facts.directory}",
        subtitle=f"{times(store.num_parameters, 'parameter')} in {times(len(store.stage_names), 'stage')}, "
        f"committed at step {store.step:,}; {facts.state}; report of {when} by hoist {__version__}",
        cards=_cards(facts),
        about=_about(facts, when),
        sections=(
            training(facts),
            speed(facts),
            residency(facts),
            lanes(facts),
            roofline(facts),
            traffic(facts),
            memory(facts),
            wear(facts),
        ),
    )


def _cards(facts: RunFacts) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    cards = [("state", facts.state)]
    last = facts.last
    if last is not None:
        total = facts.store.num_steps
        cards.append(("step", f"{last.step:,} of {total:,}" if total else f"{last.step:,}"))
        if last.loss is not None:
            cards.append(("loss", f"{last.loss:.4f}"))
        recent = steady(facts)
        rate, seconds = middle([step.tokens_per_second for step in recent]), middle([step.seconds for step in recent])
        if rate is not None and seconds is not None:
            cards += [("tokens/s", show_rate(rate)), ("a step", show_seconds(seconds))]
    if (found := bound(facts)) is not None:
        cards.append(("bound by", "compute" if found.compute_seconds >= found.fixed_seconds else found.fixed_by))
    if last is not None and last.host_peak_bytes is not None:
        cards.append(("host peak", show_bytes(last.host_peak_bytes)))
    if last is not None and last.device_peak_bytes:
        cards.append(("device peak", show_bytes(last.device_peak_bytes)))
    return cards


def _about(facts: RunFacts, when: str) -> list[tuple[str, str]]:
    store, status = facts.store, facts.status
    about = [
        ("model", store.model),
        ("parameters", f"{store.num_parameters:,} trained, {store.num_frozen:,} frozen"),
        ("stages", f"{len(store.stage_names):,}: {_ends(store.stage_names)}"),
        ("store", f"{facts.directory} ({store.store_id})"),
        ("made by", f"{store.created_by}, on {times(store.num_drives, 'drive')}"),
        ("committed step", f"{store.step:,}"),
        ("state", facts.message),
    ]
    if status is not None:
        started, written = (_clock(at) for at in (status.started_at, status.written_at))
        about.append(("ran", f"on {status.hostname}, from {started}; last sign {written}"))
        if status.io.engine:
            about.append(("i/o", status.io.engine))
        if status.error:
            about.append(("error", status.error))
    about += [("this report", f"{when}, hoist {__version__}, made on {socket.gethostname()}: {_machine()}")]
    options = ", ".join(f"{name} {_option(value)}" for name, value in store.options.items() if _is_told(name, value))
    about.append(("settings", options or "not known: this run was not made by hoist train"))
    about += [(name, problem) for name, problem in facts.problems.items()]
    return about


def _is_told(name: str, value: Any) -> bool:
    return name not in _UNTOLD and value not in (None, [], (), "", False)


def _option(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    if isinstance(value, Mapping):
        return "+".join(f"{key}={one}" for key, one in value.items())
    return str(value)


def _ends(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} ... {names[-1]}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at > 0 else "an unknown time"


def _machine() -> str:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{platform.machine()}, {times(os.cpu_count() or 1, 'core')}, {show_bytes(memory_bytes)} of memory, " + (
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )
