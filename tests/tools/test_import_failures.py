"""An import that fails or is killed, wherever: no store that opens is left, and the same import again makes it.

What is refused before anything is written is in test_cli_refusals.py; creation without a checkpoint in
tests/scheduler/test_kill.py.
"""

import errno
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hoist.tiers.errors import StoreRefusedError, TransferError
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from hoist.tools.checkpoint_files import find_checkpoint
from hoist.tools.import_weights import checkpoint_weights
from tests.support.checkpoints import FORMATS, Format
from tests.support.engines import Fail, FaultyEngine, RecordedRequest
from tests.support.faults import create, job, snapshot
from tests.support.kills import Death, TickingEngine, ticking
from tests.support.models import reference_model
from tests.support.processes import run_forked, run_in_process
from tests.support.watch import watching


def save(form: Format, directory: Path) -> list[Path]:
    """The job's model with weights in three shards; returns those."""
    state = dict(reference_model(job("vertical").config, seed=5).state_dict())
    names = sorted(state)
    form.save_shards(directory, *({name: state[name] for name in names[first::3]} for first in range(3)))
    return [directory / form.shard(number, 3) for number in (1, 2, 3)]


def import_all(checkpoint: Path, store: Path, engine: IoEngine) -> None:
    what = job("vertical")
    reader = find_checkpoint(checkpoint)
    assert reader is not None
    create(what, store, engine, source=checkpoint_weights(reader, what.staged, engine))


def require_no_store(directory: Path) -> None:
    with DirectEngine(num_threads=1) as engine, pytest.raises(StoreRefusedError):
        Store.open(directory, engine=engine, check="crc")


def counted(operation: str, suffixes: tuple[str, ...], number: int) -> Callable[[RecordedRequest], Fail | None]:
    """Fails the ``number``-th request of a kind (from 0) on files with an ending."""
    seen = 0

    def rule(request: RecordedRequest) -> Fail | None:
        nonlocal seen
        if request.operation != operation or request.path.suffix not in suffixes:
            return None
        seen += 1
        return Fail(code=errno.EIO if operation == "read" else errno.ENOSPC) if seen == number + 1 else None

    return rule


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: str(form.name))
def test_a_failure_anywhere_leaves_no_store(tmp_path: Path, form: Format) -> None:
    """A read fails in the middle of each shard, at its first and last read; a write at several places."""
    shards = save(form, tmp_path / "model")
    store = tmp_path / "store"
    with DirectEngine(num_threads=2) as engine:
        import_all(tmp_path / "model", tmp_path / "whole", engine)
    expected = snapshot(tmp_path / "whole")
    reads: list[Path] = []
    writes: list[Path] = []

    def note(request: RecordedRequest) -> None:
        {"read": reads, "write": writes, "flush": []}[request.operation].append(request.path)

    with FaultyEngine(DirectEngine(num_threads=2), note) as noting:
        import_all(tmp_path / "model", tmp_path / "counting", noting)
    assert set(shards) <= set(reads) and len(writes) > 10
    of_shards = [path for path in reads if path in shards]
    places = {0, len(of_shards) - 1}
    for shard in shards:
        found = [number for number, path in enumerate(of_shards) if path == shard]
        places |= {found[0], found[len(found) // 2], found[-1]}
    rules = [counted("read", (".safetensors", ".bin"), number) for number in sorted(places)]
    rules += [counted("write", ("",), number) for number in (0, len(writes) // 2, len(writes) - 1)]
    for rule in rules:
        with FaultyEngine(DirectEngine(num_threads=2), rule) as faulty, pytest.raises(TransferError):
            import_all(tmp_path / "model", store, faulty)
        require_no_store(store)
    with DirectEngine(num_threads=2) as engine:
        import_all(tmp_path / "model", store, engine)
    assert snapshot(store) == expected


def test_a_shard_that_shrinks_meanwhile(tmp_path: Path) -> None:
    """Its header was whole when the import began."""
    what = job("vertical")
    shards = save(FORMATS[0], tmp_path / "model")
    reader = find_checkpoint(tmp_path / "model")
    assert reader is not None
    with DirectEngine(num_threads=1) as engine:
        source = checkpoint_weights(reader, what.staged, engine)
        shards[1].write_bytes(shards[1].read_bytes()[: 3 * 4096])
        with pytest.raises(TransferError, match=shards[1].name):
            create(what, tmp_path / "store", engine, source=source)
    require_no_store(tmp_path / "store")


def import_until_killed(checkpoint: Path, directory: Path, death: Death) -> None:
    """In a process of its own."""
    deadline, watcher = ticking(directory, death)
    with watching(directory, watcher.seen), TickingEngine(DirectEngine(num_threads=2), deadline) as engine:
        import_all(checkpoint, directory, engine)


def killed_in_turn(checkpoint: Path, directory: Path, deaths: list[Death]) -> list[int]:
    """In a process of its own: an import is begun and killed again and again. Exit codes; a store that opens raises."""
    job("vertical")  # made once
    codes = []
    for death in deaths:
        codes.append(run_forked(import_until_killed, checkpoint, directory, death))
        require_no_store(directory)
    return codes


FEW = [("before a read", 9), ("inside a chunk's write", 5)]
MANY = [("before a read", 1), *FEW, ("before a read", 23), ("between a chunk's bytes and its fsync", 12),
        ("before all is synced", 1)]  # fmt: skip


@pytest.mark.parametrize("moments", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_killed_anywhere(tmp_path: Path, moments: list[tuple[str, int]]) -> None:
    save(FORMATS[0], tmp_path / "model")
    deaths = [Death(moment=moment, occurrence=occurrence) for moment, occurrence in moments]
    _, codes = run_in_process(killed_in_turn, tmp_path / "model", tmp_path / "store", deaths)
    assert codes == [-signal.SIGKILL] * len(deaths)
    with DirectEngine(num_threads=2) as engine:
        import_all(tmp_path / "model", tmp_path / "whole", engine)
        import_all(tmp_path / "model", tmp_path / "store", engine)
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "whole")
