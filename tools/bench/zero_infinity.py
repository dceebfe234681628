"""`hoist bench zero-infinity`: hoist beside DeepSpeed's ZeRO-3 with parameters and optimizer on NVMe, on the same work.

DeepSpeed is given its best: its knobs are tried first (`sweeping.py`), and its fastest setting is what is compared. The
sides are in `sides/`; results that may not be compared are refused by `sides/judging.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hoist.scheduler.errors import ConfigError
from hoist.tools.bench.machine import Machine, load_note, look
from hoist.tools.bench.outcome import Column, Outcome, shown
from hoist.tools.bench.places import refuse_place, temporary_folder
from hoist.tools.bench.reading import read
from hoist.tools.bench.rounds import Spread, interleaved, ratios
from hoist.tools.bench.sides import environment
from hoist.tools.bench.sides.deepspeed_side import Knobs
from hoist.tools.bench.sides.hoist_side import trainer_config
from hoist.tools.bench.sides.job import Job, SideResult, Work
from hoist.tools.bench.sides.judging import refuse_unless_comparable
from hoist.tools.bench.sides.running import LIMIT_SECONDS, Side, hoist_side, import_tree, run_side
from hoist.tools.bench.sides.work import WorkRequest
from hoist.tools.bench.sweeping import Trial, sweep

COLUMNS = (
    Column(key="measure", title=""),
    Column(key="hoist", title="hoist"),
    Column(key="zero_infinity", title="ZeRO-Infinity"),
    Column(key="ratio", title="times"),
)

#: Of a run that tries a setting; the first is not counted.
_TRIAL_STEPS = 3
#: What tries a setting hangs if it takes so many times hoist's own seconds, and so many at least.
_TRIAL_TIMES, _TRIAL_SECONDS = 20.0, 900.0
#: On the drive, at most: the weights' file (4), DeepSpeed's swap files (16, and 4 of gradients) and its checkpoint of
#: them (20); hoist's store takes less.
_BYTES_PER_PARAMETER = 44

Told = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be compared, and where."""

    directory: Path
    """On the drive; everything is made in a folder below it, which is removed afterwards."""
    environment: Path
    """DeepSpeed's."""
    work: WorkRequest
    num_rounds: int
    host_memory_bytes: int
    """hoist's budget."""
    hoist_options: Mapping[str, Any]
    """Further fields of hoist's `TrainerConfig`."""
    knobs: Mapping[str, Any] | None
    """DeepSpeed's, see `sides.deepspeed_side.Knobs`; what is tried first, or all that is used."""
    sweeps: bool
    """Try DeepSpeed's knobs."""


def read_knobs(path: Path) -> dict[str, Any]:
    """Knobs from a file: an object of them, or the JSON of an earlier outcome. Raises ConfigError if it is neither."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and "settings" in found:
            found = read(path).settings["knobs"]
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, not an object")
        Knobs.of(found)
        for name, usual in asdict(Knobs()).items():
            if type(found.get(name, usual)) is not type(usual):
                raise ValueError(f"{name} is {found[name]!r}, and should be such as {usual!r}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--knobs {path}: holds no knobs of DeepSpeed: {error}") from error
    return found


def run(
    request: Request, *, command: str, told: Told = lambda what, done, total: None, check: Callable[[], None]
) -> Outcome:
    """Compare. ``told`` says what is at work, and how far; ``check`` is called often, and may raise to stop.

    Raises RefusalErrors, which say what cannot be, before anything is made; BenchError if DeepSpeed's environment
    cannot be made, a side fails, or their results may not be compared. Nothing is left behind but the environment.
    """
    request = replace(request, directory=request.directory.absolute())
    hoist_options = {"host_memory_bytes": request.host_memory_bytes, **request.hoist_options}
    _check(request, hoist_options)
    machine = look(request.directory)
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(temporary_folder(request.directory))
        tree = cleanup.enter_context(import_tree(folder))
        told("making the checkpoint", 0, 0)
        work = request.work.make(folder)
        python = environment.prepare(request.environment.absolute(), check=check, told=lambda what: told(what, 0, 0))
        theirs = environment.deepspeed_side(python, tree)
        ours = hoist_side()

        def run_one(
            side: Side, options: Mapping[str, Any], task: Work = work, limit_seconds: float = LIMIT_SECONDS
        ) -> SideResult:
            job = Job(work=task, directory=str(folder / "run"), options=dict(options))
            return run_side(side, job, limit_seconds=limit_seconds, check=check)

        trials: list[Trial] = []
        knobs: Mapping[str, Any] = request.knobs or {}
        if request.sweeps:
            short = replace(work, num_steps=min(_TRIAL_STEPS, work.num_steps))
            # First, as a budget that is too small is refused here; and a setting that trains something else is no
            # setting.
            told("running hoist's side", 0, 0)
            began = time.monotonic()
            right = run_one(ours, hoist_options, short)
            refuse_unless_comparable([right])
            limit_seconds = max(_TRIAL_SECONDS, _TRIAL_TIMES * (time.monotonic() - began))

            def tried(options: Mapping[str, Any]) -> SideResult:
                result = run_one(theirs, options, short, limit_seconds)
                refuse_unless_comparable([right, result])
                return result

            knobs, trials = sweep(tried, knobs, told)
        told("comparing", 0, 2 * request.num_rounds)
        found = interleaved(
            {"hoist": lambda: run_one(ours, hoist_options), "zero_infinity": lambda: run_one(theirs, knobs)},
            request.num_rounds,
            told=lambda done, total: told("comparing", done, total),
        )
    refuse_unless_comparable([*found["hoist"], *found["zero_infinity"]])
    return _outcome(
        request, work, found["hoist"], found["zero_infinity"], knobs, trials, machine=machine, command=command
    )


def _check(request: Request, hoist_options: dict[str, Any]) -> None:
    """Raise RefusalErrors and BenchErrors for what cannot be carried out, as far as can be seen at once."""
    request.work.check()
    trainer_config(request.work.work(model="", tokens=""), hoist_options)
    needed_bytes = _BYTES_PER_PARAMETER * request.work.num_parameters()
    refuse_place(request.directory, needed_bytes=needed_bytes, on_drive=True)
    environment.refuse(request.environment.absolute())


#: What is compared: title, unit as a key's end, and the values of a run.
_MEASURES: tuple[tuple[str, str, Callable[[SideResult], Sequence[float]]], ...] = (
    ("step", "_seconds", lambda one: one.step_seconds[1:]),
    ("memory beyond imports", "_bytes", lambda one: [one.peak_bytes - one.baseline_bytes]),
    ("read a step", "_bytes", lambda one: one.read_bytes[1:]),
    ("written a step", "_bytes", lambda one: one.written_bytes[1:]),
    ("start-up", "_seconds", lambda one: [one.startup_seconds]),
    ("save", "_seconds", lambda one: [] if one.save_seconds is None else [one.save_seconds]),
)


def _outcome(
    request: Request,
    work: Work,
    ours: Sequence[SideResult],
    theirs: Sequence[SideResult],
    knobs: Mapping[str, Any],
    trials: Sequence[Trial],
    *,
    machine: Machine,
    command: str,
) -> Outcome:
    rows = []
    for title, unit, values in _MEASURES:
        spreads = [_spread(values, results) for results in (ours, theirs)]
        rows.append(_row(title, unit, spreads))
        if title == "step":
            rows += [_row(f"  {end}", unit, spreads, end) for end in ("low", "high")]
            tokens = work.num_micro_batches * work.micro_batch_size * work.seq_len
            rates = [
                None if one is None else Spread(
                    median=tokens / one.median, low=tokens / one.high, high=tokens / one.low, count=one.count
                )
                for one in spreads
            ]  # fmt: skip
            rows.append(_row("tokens a second", "_per_second", rates))
    pairs = ratios([one.median_step_seconds for one in theirs], [one.median_step_seconds for one in ours])
    setting = ", ".join(f"{name} {value}" for name, value in knobs.items()) or "those it begins with"
    notes = [
        f"hoist's step is {pairs.median:.2f} times as fast ({pairs.low:.2f} to {pairs.high:.2f} over "
        f"{pairs.count} pairs of runs)",
        f"DeepSpeed's knobs: {setting}" + (f"; the fastest of {len(trials)} settings" if trials else "; not swept"),
        *load_note(machine),
    ]
    refused = next((one.save_refused for one in theirs if one.save_refused is not None), None)
    if refused:
        notes.append(f"ZeRO-Infinity could not save a checkpoint: {refused}")
    what = f"{work.sleep.num_layers} layers that sleep" if work.sleep else "a model"
    return Outcome(
        name="zero-infinity",
        about=(
            f"{what} trained by hoist and by ZeRO-Infinity (DeepSpeed {theirs[0].versions['deepspeed']}) from the same "
            f"weights on the same tokens: seq {work.seq_len}, B {work.micro_batch_size}, M {work.num_micro_batches}, "
            f"float32, {work.num_threads} threads; medians, and lowest to highest, of {request.num_rounds} interleaved "
            f"rounds of {work.num_steps - 1} counted steps; losses agree"
        ),
        command=command,
        machine=machine,
        settings={
            "work": asdict(request.work.described(work)),
            "host_memory_bytes": request.host_memory_bytes,
            "hoist_options": dict(request.hoist_options),
            "knobs": asdict(Knobs.of(dict(knobs))),
            "trials": [asdict(one) for one in trials],
            "runs": {"hoist": request.work.kept(ours), "zero_infinity": request.work.kept(theirs)},
        },
        columns=COLUMNS,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _spread(values: Callable[[SideResult], Sequence[float]], results: Sequence[SideResult]) -> Spread | None:
    found = [value for one in results for value in values(one)]
    return Spread.of(found) if found else None


def _row(title: str, unit: str, spreads: Sequence[Spread | None], end: str = "median") -> dict[str, Any]:
    """A row of the table, ``end`` of the values, and the numbers behind it. ``ratio``: ZeRO-Infinity's over hoist's."""
    ours, theirs = spreads
    mine, other = [None if spread is None else getattr(spread, end) for spread in spreads]
    return {
        "measure": title,
        "hoist": "none" if mine is None else shown(unit, mine),
        "zero_infinity": "none" if other is None else shown(unit, other),
        "ratio": f"{other / mine:.2f}" if mine and other is not None else None,
        "unit": unit.removeprefix("_"),
        "spreads": {
            "hoist": None if ours is None else asdict(ours),
            "zero_infinity": None if theirs is None else asdict(theirs),
        },
    }
