"""`hoist bench peers`: hoist beside what trains the same model in RAM on this machine, on the same work.

PyTorch with all states in memory is the limit that a user would love; FSDP2 and torchao offload to RAM. The sides are
in `sides/`; results that may not be compared are refused by `sides/judging.py`.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hoist.tools.bench.children import run_child
from hoist.tools.bench.machine import Machine, load_note, look
from hoist.tools.bench.outcome import Column, Outcome, Plot
from hoist.tools.bench.places import refuse_memory, refuse_place, temporary_folder
from hoist.tools.bench.rounds import Spread, interleaved, ratios
from hoist.tools.bench.sides.job import Job, SideResult, Work
from hoist.tools.bench.sides.judging import refuse_unless_comparable
from hoist.tools.bench.sides.running import hoist_side, import_tree, plain_side, run_side
from hoist.tools.bench.sides.work import WorkRequest
from hoist.tools.errors import BenchError
from hoist.tools.sizes import show_bytes

COLUMNS = (
    Column(key="side", title="side"),
    Column(key="step_seconds", title="step"),
    Column(key="torch_ratio", title="/ torch"),
    Column(key="peak_bytes", title="peak"),
    Column(key="read_bytes", title="read"),
    Column(key="written_bytes", title="written"),
    Column(key="cannot", title="cannot"),
)


#: On the drive, at most: the weights' file, and hoist's store or a peer's checkpoint.
_BYTES_PER_PARAMETER = 40
#: Of a peer's weights, gradients and two moments, at least.
_MEMORY_BYTES_PER_PARAMETER = 16
#: A peer that has not trained a tiny model by then hangs.
_PROBE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Something that trains the same in RAM."""

    title: str
    """In the table."""
    module: str
    """In `sides/`."""
    cannot: str
    """In a word, what hoist can and it cannot."""
    why: str
    """The same, in a sentence."""
    needs: str = ""
    """A package that hoist does not require."""
    tried: bool = False
    """Whether it runs here is found out by trying a tiny model."""
    checkpointing: bool = True
    """Its layers are computed again in the backward."""


_IN_RAM = "weights, gradients and both moments must fit in RAM"
#: By the name of ``--peer``. The first is what ratios are to.
PEERS: Mapping[str, Peer] = {
    "torch": Peer(
        title="torch", module="torch_side", cannot="NVMe",
        why=f"all states in memory, activation checkpointing, fused AdamW: {_IN_RAM}",
    ),
    "torch-keep": Peer(
        title="torch, keeps all", module="torch_side", cannot="NVMe", checkpointing=False,
        why=f"the same without activation checkpointing: {_IN_RAM}, and a micro-batch's activations with them",
    ),
    "fsdp2": Peer(
        title="FSDP2", module="fsdp_side", cannot="NVMe", tried=True,
        why=f"fully_shard with CPUOffloadPolicy, one rank: {_IN_RAM}; the policy knows no NVMe",
    ),
    "torchao": Peer(
        title="torchao", module="torchao_side", cannot="NVMe", needs="torchao", tried=True,
        why=f"CPUOffloadOptimizer: {_IN_RAM}, and weights once more in device memory",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be compared, and where."""

    directory: Path
    """On the drive; everything is made in a folder below it, which is removed afterwards."""
    work: WorkRequest
    num_rounds: int
    host_memory_bytes: Sequence[int]
    """hoist's budgets: a row each."""
    peers: Sequence[str]
    """Of :data:`PEERS`; ``torch``, to which ratios are, is always among them."""


def run(
    request: Request,
    *,
    command: str = "hoist bench peers",
    told: Callable[[str, int, int], None] = lambda what, done, total: None,
    check: Callable[[], None] = lambda: None,
) -> Outcome:
    """Compare. ``told`` says what is at work, and how far; ``check`` is called often, and may raise to stop.

    Raises RefusalErrors, which say what cannot be, before anything is made; BenchError if a side fails, or results may
    not be compared. A peer that does not run on this machine has a row that says so. Nothing is left behind.
    """
    request = replace(request, directory=request.directory.absolute())
    request.work.check()
    num_parameters = request.work.num_parameters()
    refuse_place(request.directory, needed_bytes=_BYTES_PER_PARAMETER * num_parameters, on_drive=True)
    refuse_memory(
        _MEMORY_BYTES_PER_PARAMETER * num_parameters, "peers hold all states in memory", "give a smaller model"
    )  # fmt: skip
    machine = look(request.directory)
    chosen = {name: peer for name, peer in PEERS.items() if name in request.peers or name == "torch"}
    told("trying the peers", 0, 0)
    absent = {name: why for name, peer in chosen.items() if (why := why_not(peer, check=check)) is not None}
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(temporary_folder(request.directory))
        tree = cleanup.enter_context(import_tree(folder))
        told("making the checkpoint", 0, 0)
        work = request.work.make(folder)
        sides: dict[str, Callable[[], SideResult]] = {}
        for budget in request.host_memory_bytes:
            job = Job(work=work, directory=str(folder / "run"), options={"host_memory_bytes": budget})
            sides[_named(budget)] = partial(run_side, hoist_side(), job, check=check)
        for name, peer in chosen.items():
            if name not in absent:
                job = Job(
                    work=replace(work, activation_checkpointing=peer.checkpointing), directory=str(folder / "run")
                )
                sides[name] = partial(run_side, plain_side(peer.module, tree), job, check=check)
        told("comparing", 0, request.num_rounds * len(sides))
        found = interleaved(sides, request.num_rounds, told=partial(told, "comparing"))
    refuse_unless_same(found)
    return outcome_of(request, work, found, chosen, absent, machine=machine, command=command)


def refuse_unless_same(found: Mapping[str, Sequence[SideResult]]) -> None:
    """Raise BenchError unless all results are of one work. Whether activations are kept is what peers differ in."""
    results = [one for each in found.values() for one in each]
    refuse_unless_comparable(
        [replace(one, work=replace(one.work, activation_checkpointing=True)) for one in results]
    )
    for name, each in found.items():
        wanted = PEERS[name].checkpointing if name in PEERS else True
        for one in each:
            if one.work.activation_checkpointing is not wanted:
                raise BenchError(f"{name}: activation checkpointing is not {'on' if wanted else 'off'}")


def why_not(peer: Peer, *, check: Callable[[], None] = lambda: None) -> str | None:
    """Why a peer does not run on this machine, in its own words; None if it does. Outcomes are kept, so no paths.

    ``check`` is called now and then, and may raise.
    """
    if peer.needs and importlib.util.find_spec(peer.needs) is None:
        return f"{peer.needs} is not installed; pip install {peer.needs}"
    if not peer.tried:
        return None
    side = hoist_side()
    with tempfile.TemporaryFile(prefix="hoist-bench-") as output:
        try:
            code = run_child(
                [str(side.python), "-m", f"hoist.tools.bench.sides.{peer.module}", "--probe"],
                what=f"trying {peer.title}", output=output, limit_seconds=_PROBE_SECONDS, check=check,
                environment={**os.environ, "PYTHONPATH": str(side.import_path)},
            )  # fmt: skip
        except BenchError as error:
            return str(error)
        output.seek(0)
        said = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return None if code == 0 else (said or [f"exit code {code}"])[-1]


def _named(budget: int) -> str:
    return f"hoist, {show_bytes(budget)}"


def outcome_of(
    request: Request,
    work: Work,
    found: Mapping[str, Sequence[SideResult]],
    chosen: Mapping[str, Peer],
    absent: Mapping[str, str],
    *,
    machine: Machine,
    command: str,
) -> Outcome:
    """The table of results that may be compared. ``absent``: why a peer does not run, by its name."""
    yardstick = [one.median_step_seconds for one in found["torch"]]
    rows = [
        _row(chosen[name].title if name in chosen else name, chosen.get(name), results, yardstick)
        for name, results in found.items()
    ]
    rows += [
        {column.key: None for column in COLUMNS} | {"side": chosen[name].title, "cannot": "run"} for name in absent
    ]
    return Outcome(
        name="peers",
        about=(
            "the same model trained by hoist and in RAM, from the same weights on the same tokens: seq "
            f"{work.seq_len}, B {work.micro_batch_size}, M {work.num_micro_batches}, {work.dtype}, {work.num_threads} "
            f"threads; medians of {request.num_rounds} interleaved rounds of {work.num_steps - 1} counted steps; "
            "losses agree"
        ),
        command=command,
        machine=machine,
        settings={
            "work": asdict(request.work.described(work)),
            "host_memory_bytes": list(request.host_memory_bytes),
            "rounds": request.num_rounds,
            "runs": {name: request.work.kept(results) for name, results in found.items()},
        },
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(
            "peak: anonymous and shared memory above that of a warmed-up process; read, written: a step's bytes on the "
            "drive, by the kernel's count",
            *(f"{peer.title}: {peer.why}" for peer in chosen.values()),
            *(f"{chosen[name].title} does not run here: {why}" for name, why in absent.items()),
            *load_note(machine),
        ),
        plot=Plot(y=("step_seconds", "peak_bytes", "read_bytes"), series=("side",)),
    )


def _row(title: str, peer: Peer | None, results: Sequence[SideResult], yardstick: Sequence[float]) -> dict[str, Any]:
    """What was measured of a side; ``yardstick``: a torch step's seconds in the same rounds."""
    measured: dict[str, Spread] = {
        "step_seconds": Spread.of([value for one in results for value in one.step_seconds[1:]]),
        "torch_ratio": ratios([one.median_step_seconds for one in results], yardstick),
        "peak_bytes": Spread.of([one.peak_bytes - one.baseline_bytes for one in results]),
        "read_bytes": Spread.of([value for one in results for value in one.read_bytes[1:]]),
        "written_bytes": Spread.of([value for one in results for value in one.written_bytes[1:]]),
        "startup_seconds": Spread.of([one.startup_seconds for one in results]),
    }
    saved = [one.save_seconds for one in results if one.save_seconds is not None]
    if saved:
        measured["save_seconds"] = Spread.of(saved)
    row: dict[str, Any] = {"side": title, "cannot": None if peer is None else peer.cannot}
    for key, spread in measured.items():
        what, _, unit = key.rpartition("_")
        row |= {key: spread.median, f"{what}_low_{unit}": spread.low, f"{what}_high_{unit}": spread.high}
    return row
