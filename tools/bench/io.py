"""`hoist bench io`: what each engine reads and writes on a directory's drive, beside fio on the same file sizes.

Direct I/O on both sides; what went through the page cache is labelled, and never compared. How one measurement is made
is `hoist.tiers.io.probe`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hoist.tiers.errors import HoistError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.io.probe import Bandwidth, measure_bandwidth
from hoist.tools.bench import fio
from hoist.tools.bench.machine import look
from hoist.tools.bench.outcome import Column, Outcome
from hoist.tools.bench.rounds import Spread, interleaved
from hoist.tools.errors import BenchError

#: hoist's own: what its stores are read and written with.
ENGINES = ("direct", "kvikio")
BLOCK_BYTES = (2**20, 4 * 2**20, 16 * 2**20)
DEPTHS = (1, 4, 8)

COLUMNS = (
    Column(key="engine", title="engine"),
    Column(key="block_bytes", title="block"),
    Column(key="depth", title="in flight"),
    Column(key="read_bytes_per_second", title="read"),
    Column(key="write_bytes_per_second", title="write"),
    Column(key="read_fio_ratio", title="read / fio"),
    Column(key="write_fio_ratio", title="write / fio"),
    Column(key="mode", title="mode"),
)


def run(
    directory: Path,
    *,
    num_bytes: int,
    block_bytes: Sequence[int] = BLOCK_BYTES,
    depths: Sequence[int] = DEPTHS,
    rounds: int = 3,
    command: str = "hoist bench io",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Measure every engine that the machine has, and fio's, for every block size and depth.

    Temporary files of ``num_bytes`` are made in ``directory``, one at a time. A ratio is that of two medians, with the
    better of fio's engines. Raises BenchError if bytes came back wrong, or no engine works.
    """
    notes: list[str] = []
    found: list[dict[str, Any]] = []
    engines: dict[str, IoEngine] = {}
    try:
        for name in ENGINES:
            try:
                engines[name] = choose_engine(name)
            except HoistError as error:
                notes.append(f"{name} is left out: {error}")
        yardsticks = _yardsticks(directory, notes)
        settings = [(block, depth) for block in block_bytes for depth in depths]
        for number, (block, depth) in enumerate(settings):
            sides: dict[str, Callable[[], Bandwidth | fio.FioRates]] = {
                name: partial(
                    measure_bandwidth, directory, engine, num_bytes=num_bytes, request_bytes=block, in_flight=depth
                )
                for name, engine in engines.items()
            }
            sides |= {
                f"fio {name}": partial(
                    fio.measure, directory, engine=name, num_bytes=num_bytes, block_bytes=block, depth=depth
                )
                for name in yardsticks
            }
            base = number * rounds * len(sides)

            def told(done: int, total: int, base: int = base, whole: int = len(settings)) -> None:
                progress(base + done, total * whole)

            found += _rows(interleaved(sides, rounds, told=told), block, depth)
    finally:
        for engine in engines.values():
            engine.close()
    return Outcome(
        name="io",
        about=(
            f"bandwidth of a drive through hoist's engines and fio: files of {num_bytes / 2**20:.0f} MiB, written, "
            f"flushed and read with direct I/O; medians of {rounds} interleaved rounds"
        ),
        command=command,
        machine=look(directory),
        settings={"num_bytes": num_bytes, "rounds": rounds},
        columns=COLUMNS,
        rows=tuple(found),
        notes=tuple(notes),
    )


def _yardsticks(directory: Path, notes: list[str]) -> list[str]:
    """fio's engines that work here."""
    if not fio.installed():
        notes.append("fio is not installed, so there is nothing to compare with: apt-get install fio")
        return []
    works: list[str] = []
    for name in fio.ENGINES:
        try:
            fio.measure(directory, engine=name, num_bytes=2**20, block_bytes=2**20, depth=1)
        except BenchError as error:
            notes.append(f"fio's {name} is left out: {error}")
        else:
            works.append(name)
    return works


def _rows(found: dict[str, list[Bandwidth | fio.FioRates]], block: int, depth: int) -> list[dict[str, Any]]:
    rates = {
        name: (
            Spread.of([one.read_bytes_per_second for one in all_rounds]),
            Spread.of([one.write_bytes_per_second for one in all_rounds]),
        )
        for name, all_rounds in found.items()
    }
    best = [
        max((rates[name][way].median for name in rates if name.startswith("fio ")), default=None) for way in (0, 1)
    ]
    rows = []
    for name, (read, write) in rates.items():
        ours = [one for one in found[name] if isinstance(one, Bandwidth)]
        if any(not one.verified for one in ours):
            raise BenchError(f"{name}: bytes that were read back are not those that were written; look at hoist doctor")
        direct = all(one.direct for one in ours)
        comparable = bool(ours) and direct
        rows.append(
            {
                "engine": name,
                "block_bytes": block,
                "depth": depth,
                "read_bytes_per_second": read.median,
                "write_bytes_per_second": write.median,
                "read_fio_ratio": read.median / best[0] if comparable and best[0] else None,
                "write_fio_ratio": write.median / best[1] if comparable and best[1] else None,
                "mode": "direct" if direct else "page cache: not compared",
                "read_low_bytes_per_second": read.low,
                "read_high_bytes_per_second": read.high,
                "write_low_bytes_per_second": write.low,
                "write_high_bytes_per_second": write.high,
            }
        )
    return rows
