"""`hoist bench io`: what each engine of hoist's reads and writes on a directory's drive, beside fio doing the same.

Direct I/O on both sides; what went through the page cache is said, and never compared. The work of a pass is
`passes.py`'s business, fio is run by `fio.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hoist.scheduler.errors import ConfigError
from hoist.tiers.errors import HoistError
from hoist.tiers.io.base import IO_ALIGN_BYTES, IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tools.bench import fio
from hoist.tools.bench.machine import load_note, look
from hoist.tools.bench.outcome import Column, Outcome
from hoist.tools.bench.passes import DriveWork, Way, measure_engine
from hoist.tools.bench.rounds import Spread, interleaved, ratios
from hoist.tools.errors import BenchError
from hoist.tools.sizes import show_bytes

#: hoist's own: what its stores are read and written with.
ENGINES = ("direct", "kvikio")
BLOCK_BYTES = (2**20, 4 * 2**20, 16 * 2**20)
DEPTHS = (1, 8)
#: A pass over less ends before fio's clock of milliseconds tells it exactly.
_EXACT_BYTES = 64 * 2**20

COLUMNS = (
    Column(key="way", title="pass"),
    Column(key="block_bytes", title="block"),
    Column(key="depth", title="depth"),
    Column(key="engine", title="engine"),
    Column(key="bytes_per_second", title="hoist"),
    Column(key="fio_bytes_per_second", title="fio"),
    Column(key="fio_engine", title="by"),
    Column(key="fio_ratio", title="/fio"),
    Column(key="fio_low_ratio", title="from"),
    Column(key="fio_high_ratio", title="to"),
)

#: Bytes a second of each pass, round by round, of one side.
_Rounds = list[dict[Way, float]]


def run(
    directory: Path,
    *,
    num_bytes: int,
    block_bytes: Sequence[int] = BLOCK_BYTES,
    depths: Sequence[int] = DEPTHS,
    rounds: int = 3,
    engines: Sequence[str] = ENGINES,
    fio_engines: Sequence[str] = fio.ENGINES,
    command: str = "hoist bench io",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Measure every engine that the machine has, and fio's, for every block size and depth.

    Temporary files of about ``num_bytes`` are made in ``directory``, one at a time. A ratio is the median over rounds,
    against that engine of fio's which was the faster one over all of them. Raises ConfigError for settings that cannot
    be, StoreRefusedError where no file can be made, BenchError if bytes came back wrong or from a cache, or no engine
    works.
    """
    works = _works(num_bytes, block_bytes, depths)
    machine = look(directory)
    notes = load_note(machine)
    if num_bytes < _EXACT_BYTES:
        notes.append(f"passes over {show_bytes(num_bytes)} are too short to be exact: --size 512MiB")
    rows: list[dict[str, Any]] = []
    made: dict[str, IoEngine] = {}
    try:
        for name in engines:
            try:
                made[name] = choose_engine(name)
            except HoistError as error:
                notes.append(f"{name} is left out: {error}")
        if not made:
            raise BenchError(f"no engine works here: {'; '.join(notes)}")
        # Small passes of each first, so that what cannot work says so at once.
        small = DriveWork(num_blocks=2, block_bytes=IO_ALIGN_BYTES, depth=1)
        for engine in made.values():
            measure_engine(directory, engine, small)
        yardsticks = _yardsticks(directory, fio_engines, notes)
        for number, work in enumerate(works):
            sides: dict[str, Callable[[], dict[Way, float]]] = {
                name: partial(measure_engine, directory, engine, work) for name, engine in made.items()
            }
            sides |= {
                f"fio {name}": partial(fio.measure, directory, engine=name, work=work) for name in yardsticks
            }
            buffered = {name: engine.statistics().buffered_bytes for name, engine in made.items()}

            def told(done: int, total: int, number: int = number) -> None:
                progress(number * total + done, total * len(works))

            found = interleaved(sides, rounds, told=told)
            for name, engine in made.items():
                direct = engine.statistics().buffered_bytes == buffered[name]
                rows += _rows(name, found, work, direct=direct)
    finally:
        for engine in made.values():
            engine.close()
    if any(row["mode"] != "direct" for row in rows):
        notes.append("this file system has no direct I/O: what went through the page cache is not compared with fio")
    return Outcome(
        name="io",
        about=(
            f"Bandwidth of a drive through hoist's engines, and fio's in the same passes over the same kind of file "
            f"(about {show_bytes(num_bytes)}, space reserved before, flushed after each write): direct I/O, "
            f"interleaved, {rounds} rounds, medians; every byte that hoist reads is checked."
        ),
        command=command,
        machine=machine,
        settings={"num_bytes": num_bytes, "rounds": rounds},
        columns=COLUMNS,
        rows=tuple(sorted(rows, key=lambda row: (list(Way).index(row["way"]), row["block_bytes"], row["depth"]))),
        notes=tuple(notes),
    )


def _works(num_bytes: int, block_bytes: Sequence[int], depths: Sequence[int]) -> list[DriveWork]:
    """Raises ConfigError."""
    works = []
    for block in block_bytes:
        if block < IO_ALIGN_BYTES or block % IO_ALIGN_BYTES:
            raise ConfigError(f"--block: got {block} bytes, must be a multiple of {IO_ALIGN_BYTES}")
        for depth in depths:
            if depth < 1:
                raise ConfigError(f"--depth: got {depth}, must be at least 1")
            if num_bytes < 2 * block * depth:
                raise ConfigError(
                    f"--size: got {show_bytes(num_bytes)}, must be at least {show_bytes(2 * block * depth)}, twice "
                    f"what is in flight with --block {show_bytes(block)} and --depth {depth}; smaller ones need less"
                )
            works.append(DriveWork(num_blocks=2 * (num_bytes // (2 * block)), block_bytes=block, depth=depth))
    return works


def _yardsticks(directory: Path, engines: Sequence[str], notes: list[str]) -> list[str]:
    """fio's engines that work here; what does not is noted."""
    if not fio.installed():
        notes.append("fio is not installed, so there is nothing to compare with: apt-get install fio")
        return []
    works: list[str] = []
    for name in engines:
        try:
            fio.try_out(directory, engine=name)
        except BenchError as error:
            notes.append(f"fio's {name} is left out: {error}")
        else:
            works.append(name)
    return works


def _rows(name: str, found: dict[str, _Rounds], work: DriveWork, *, direct: bool) -> list[dict[str, Any]]:
    """A row a pass of one engine of hoist's; not compared where it went through the page cache."""
    rows: list[dict[str, Any]] = []
    for way in Way:
        rates = {side: [one[way] for one in all_rounds] for side, all_rounds in found.items()}
        ours = Spread.of(rates[name])
        theirs = {side: Spread.of(rates[side]) for side in rates if side.startswith("fio ")} if direct else {}
        best = max(theirs, key=lambda side: theirs[side].median, default=None)
        ratio = None if best is None else ratios(rates[name], rates[best])
        rows.append(
            {
                "way": str(way),
                "block_bytes": work.block_bytes,
                "depth": work.depth,
                "engine": name,
                "mode": "direct" if direct else "page cache",
                "bytes_per_second": ours.median,
                "low_bytes_per_second": ours.low,
                "high_bytes_per_second": ours.high,
                "fio_engine": None if best is None else best.removeprefix("fio "),
                "fio_bytes_per_second": None if best is None else theirs[best].median,
                "fio_low_bytes_per_second": None if best is None else theirs[best].low,
                "fio_high_bytes_per_second": None if best is None else theirs[best].high,
                "fio_ratio": None if ratio is None else ratio.median,
                "fio_low_ratio": None if ratio is None else ratio.low,
                "fio_high_ratio": None if ratio is None else ratio.high,
            }
        )
    return rows
