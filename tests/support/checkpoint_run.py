"""A process that imports a checkpoint and exports it again under a host-memory budget, and says what it used.

Run as `python -m tests.support.checkpoint_run JSON`; prints one JSON object last. Like `memory_run.py`, whose control
group it uses, but through the command line. tests/test_memory_promise.py has the tests.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.memory_run import MIB, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportTask:
    """What the process does."""

    directory: str
    """Holds the checkpoint in `model`; store and export go there too."""
    budget_mib: int
    group: str
    """Directory of a memory control group of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What it used, in bytes, and how its commands ended."""

    exit_codes: list[int]
    baseline: int
    """Anonymous and shared memory of the warm process."""
    allowed: int
    """1.1 times the budget and 32 MiB, the most beyond the baseline."""
    group_limit: int
    group_peak: int
    group_at_limit: int
    """How often the group was at its limit, so that page cache had to go."""
    most_open_shards: int
    """Files of the checkpoint that were open at a time, as far as was seen."""


class OpenShards:
    """Looks at the open files of this process all the time. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="looking")
        self.most = 0

    def __enter__(self) -> OpenShards:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.002):
            found = set()
            for link in Path("/proc/self/fd").iterdir():
                try:
                    target = link.readlink()
                except OSError:  # closed meanwhile
                    continue
                if str(target.parent) == self._directory and target.suffix in (".bin", ".safetensors"):
                    found.add(target)
            self.most = max(self.most, len(found))


def main(task: ImportTask) -> Imported:
    """Carry out a task."""
    group = Group(Path(task.group))
    group.join()
    # Only now: what imports take belongs to the group too.
    for module in ("torch._subclasses.fake_tensor", "hoist.tools.train", "hoist.tools.export", "hoist.tools.show"):
        importlib.import_module(module)
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hoist.tiers.footprint import warm_up
    from hoist.tools import cli

    mapping: Any = AutoModelForCausalLM._model_mapping  # its module is imported on demand
    assert mapping[LlamaConfig]
    directory = Path(task.directory)
    baseline = warm_up()
    allowed = task.budget_mib * MIB * 11 // 10 + 32 * MIB
    limit = group.working_set_bytes() + allowed
    group.limit(limit)
    shard_bytes = max(path.stat().st_size for path in (directory / "model").iterdir())
    with OpenShards(directory / "model") as shards:
        codes = [
            cli.run([
                "train", "--model", str(directory / "model"), "--store", str(directory / "store"), "--steps", "0",
                "--host-memory", f"{task.budget_mib}MiB", "--seq-len", "16", "--micro-batch-size", "1",
                "--micro-batches", "1",
            ]),
            cli.run([
                "export", str(directory / "store"), str(directory / "export"), "--verify",
                "--max-shard-size", f"{shard_bytes}B",
            ]),
        ]  # fmt: skip
    return Imported(
        exit_codes=codes,
        baseline=baseline,
        allowed=allowed,
        group_limit=limit,
        group_peak=group.peak_bytes(),
        group_at_limit=group.times_at_limit(),
        most_open_shards=shards.most,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(main(ImportTask(**json.loads(sys.argv[1]))))))
