"""All that can be said of hoist on a GPU, with one command: python -m hoist.tools.bench.gpu --directory /nvme

Parity with PyTorch, the memory promises, a resume after SIGKILL, waits in a step, and steps of a 1.16B Llama beside
what limits them. Every part has a process and a time of its own: one that fails or runs over takes nothing from the
others. What the parts do is in `on_device/`. All of it takes at most eight minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from hoist.tiers.device import choose_device
from hoist.tools.bench.machine import load_note, look
from hoist.tools.bench.on_device import parity, promises, speed
from hoist.tools.bench.on_device.request import LARGE, SMALL, MakeDevice, Part, Request, Row
from hoist.tools.bench.outcome import Column, Outcome, show, write
from hoist.tools.bench.places import refuse_place, temporary_folder
from hoist.tools.exits import TRACEBACK_VARIABLE, describe, guarded

#: All parts together end after this.
ALL_SECONDS = 470.0
#: On the drive: two slots of 12 bytes a parameter, and what else the parts make.
_BYTES_PER_PARAMETER = 27
_OTHER_BYTES = 12 * 2**30
COLUMNS = (
    Column(key="part", title="part"),
    Column(key="what", title="what"),
    Column(key="found", title="found"),
    Column(key="holds", title="holds"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A part in its turn."""

    name: str
    do: Part
    limit_seconds: float
    """It is stopped then."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its process has besides."""


#: What is least likely to fit into the time comes last.
TASKS = (
    Task(name="parity", do=parity.parity, limit_seconds=90.0, environment=parity.EXACT),
    Task(name="memory", do=promises.peaks, limit_seconds=75.0),
    Task(name="resume", do=promises.resuming, limit_seconds=90.0, environment=parity.EXACT),
    Task(name="waits", do=promises.waits, limit_seconds=40.0),
    Task(name="limits", do=speed.limits, limit_seconds=60.0),
    Task(name="store", do=speed.making, limit_seconds=120.0),
    Task(name="drive", do=speed.on_drive, limit_seconds=120.0),
    Task(name="DRAM", do=speed.in_memory, limit_seconds=120.0),
    Task(name="kvikio", do=speed.through_kvikio, limit_seconds=120.0),
    Task(name="no GDS", do=speed.through_copies, limit_seconds=120.0, environment={"KVIKIO_COMPAT_MODE": "ON"}),
    Task(name="optim", do=speed.updated_there, limit_seconds=120.0),
    Task(name="delay", do=speed.on_drive_delayed, limit_seconds=120.0),
)

#: Runs one part to its end, or to the end of its time.
Launch = Callable[[Task, Request, MakeDevice, float], Iterator[Row]]


def in_process(task: Task, request: Request, make_device: MakeDevice, limit_seconds: float) -> Iterator[Row]:
    """Run a part in a process of its own, which is killed with all that it has started when its time is over."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(task, request, make_device, theirs, os.getpid()))
    until = time.monotonic() + limit_seconds
    process.start()
    theirs.close()
    try:
        while True:
            if not ours.poll(max(0.0, until - time.monotonic())):
                yield Row(what=task.name, found=f"stopped: it ran over its {limit_seconds:.0f} s", ok=False)
                return
            try:
                row = ours.recv()
            except EOFError:
                break
            if row is None:
                return
            yield row
        process.join()
        yield Row(what=task.name, found=f"its process ended with code {process.exitcode}", ok=False)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or has no group of its own yet
            if os.getpgid(process.pid or 0) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()


def _child(task: Task, request: Request, make_device: MakeDevice, told: Connection, parent: int) -> None:
    """A part's process: it ends with its parent (PR_SET_PDEATHSIG), and so does what it starts with it."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.environ.update(task.environment)
    for row in here(task, request, make_device, 0.0):
        told.send(row)
    told.send(None)


def here(task: Task, request: Request, make_device: MakeDevice, limit_seconds: float) -> Iterator[Row]:
    """Run a part in this process; an error is its last row. Nothing stops it."""
    try:
        yield from task.do(request, make_device)
    except Exception as error:  # of one part; the others are told of separately
        line, _ = describe(error) or (str(error), 1)
        if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exception(error)
        yield Row(what=task.name, found=f"failed: {' '.join(line.split())}", ok=False)


def run(
    request: Request,
    make_device: MakeDevice,
    *,
    tasks: Sequence[Task] = TASKS,
    launch: Launch = in_process,
    all_seconds: float = ALL_SECONDS,
    command: str = "python -m hoist.tools.bench.gpu",
    told: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run all parts, one after another, in a folder of ``request.directory`` that is removed afterwards.

    ``told`` hears of each row as it comes. Raises ConfigError, with nothing made, if the directory is no drive's or too
    full. What the parts raise is in their rows.
    """
    shape = request.scale.whole
    needed_bytes = _BYTES_PER_PARAMETER * shape.num_parameters + (_OTHER_BYTES if request.scale is LARGE else 0)
    refuse_place(request.directory, needed_bytes=needed_bytes, on_drive=True)
    machine = look(request.directory)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    began = time.monotonic()
    with temporary_folder(request.directory.absolute()) as folder:
        for task in tasks:
            left = all_seconds - (time.monotonic() - began)
            part_began = time.monotonic()
            if left < 1.0:
                given: Iterator[Row] = iter([Row(what=task.name, found="not begun: no time was left", ok=False)])
            else:
                # Numbers of steps are of use to no other part.
                given = launch(
                    task, replace(request, directory=folder, found=dict(found)), make_device,
                    min(left, task.limit_seconds),
                )  # fmt: skip
            for row in given:
                rows.append(_entry(task, row))
                told(f"{task.name}: {row.what}: {row.found}")
                found |= row.numbers
            rows[-1]["part_seconds"] = time.monotonic() - part_began
    seconds = time.monotonic() - began
    failed = [row["what"].strip() for row in rows if row["ok"] is False]
    return Outcome(
        name="gpu",
        about=f"hoist on a device: what must hold there, and how fast it is ({shape.num_parameters / 1e9:.3f}B "
        f"parameters, seq {shape.seq_len}, B {shape.rows}, M {shape.num_micro_batches}, {shape.dtype})",
        command=command,
        machine=machine,
        settings={"io": request.io, "peak_flops": request.peak_flops, "seconds": seconds},
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(
            f"{len(failed)} of {sum(row['ok'] is not None for row in rows)} things that must hold do not"
            if failed
            else "everything holds that must, as far as it was looked at",
            f"all of it took {seconds:.0f} s",
            *load_note(machine),
        ),
    )


def _entry(task: Task, row: Row) -> dict[str, Any]:
    holds = {True: "yes", False: "NO", None: ""}[row.ok]
    return {"part": task.name, "what": row.what, "found": row.found, "holds": holds, "ok": row.ok, **row.numbers}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hoist.tools.bench.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--directory", type=Path, default=Path(), help="on the drive, with 45 GB free; default: here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where gpu.json is written; default: --directory")
    parser.add_argument("--device", default="cuda", help="as of hoist train, default cuda; cpu tries what it can")
    parser.add_argument("--io", default="auto", help="engine of the parts that do not time one: auto, direct, kvikio")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does everything run? Times say nothing")
    parser.add_argument("--part", action="append", choices=[task.name for task in TASKS], help="this one alone; repeat")
    parser.add_argument(
        "--peak-flops", type=float, metavar="N", help="of the device in bfloat16, dense; default: known, else measured"
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Parse, run, write, print: the table last. 1 if something that must hold does not."""
    told = _parse(words)
    make_device = partial(choose_device, told.device)
    with make_device():
        pass  # refused here, before anything is made
    request = Request(
        directory=told.directory, scale=SMALL if told.small else LARGE, io=told.io, peak_flops=told.peak_flops
    )
    tasks = [task for task in TASKS if not told.part or task.name in told.part]
    command = shlex.join(["python", "-m", "hoist.tools.bench.gpu", *words])
    outcome = run(
        request, make_device, tasks=tasks, command=command, told=lambda line: print(line, file=sys.stderr, flush=True)
    )
    write(outcome, (told.out or told.directory) / "gpu.json")
    show(outcome, Console())
    return int(any(row["ok"] is False for row in outcome.rows))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
