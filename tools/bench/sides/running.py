"""Runs a side of a comparison as a process of its own, in its own environment, and gives back what it found.

What a side does is in its own file; whether results may be compared is `judging.py`'s business.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hoist
from hoist.tools.bench import sides
from hoist.tools.bench.children import run_child
from hoist.tools.bench.sides import counters
from hoist.tools.bench.sides.job import Job, SideResult, read_result, write_job
from hoist.tools.bench.sides.judging import refuse_other_work
from hoist.tools.errors import BenchError

#: A side that has not ended then hangs: the longest comparisons that were made took minutes a run.
LIMIT_SECONDS = 4 * 3600.0
#: Of a line of what a process said: a compiler's has its whole command.
MAX_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A program that does a work."""

    module: str
    """In this folder."""
    python: Path
    """Of its environment."""
    import_path: Path
    """Where `hoist.tools.bench.sides` is found from there."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it has besides those of this process."""
    without: tuple[str, ...] = ()
    """Variables of this process that it does not have."""


def hoist_side() -> Side:
    """hoist's, in this environment."""
    return Side(
        module="hoist_side", python=Path(sys.executable), import_path=Path(hoist.__file__).absolute().parent.parent
    )


def plain_side(module: str, import_path: Path) -> Side:
    """A side in this environment that needs nothing of hoist but this folder, which :func:`import_tree` gives it: what
    hoist tells OpenMP for its own lanes, when it is imported, is not its."""
    return Side(module=module, python=Path(sys.executable), import_path=import_path, without=("GOMP_SPINCOUNT",))


@contextmanager
def import_tree(directory: Path) -> Iterator[Path]:
    """A folder for other environments' import path in which `hoist` is there as far as the sides need it: this folder.

    Neither hoist nor what it requires must be installed there. It is removed afterwards.
    """
    (sources,) = sides.__path__
    with tempfile.TemporaryDirectory(dir=directory, prefix=".hoist-import-") as root:
        package = Path(root, "hoist", "tools", "bench")
        package.mkdir(parents=True)
        for folder in (package.parent.parent, package.parent, package):
            (folder / "__init__.py").touch()
        (package / "sides").symlink_to(Path(sources).absolute(), target_is_directory=True)
        yield Path(root)


def run_side(
    side: Side, job: Job, *, limit_seconds: float = LIMIT_SECONDS, check: Callable[[], None] = lambda: None
) -> SideResult:
    """Run ``job``, whose directory is made, and removed afterwards, whatever happens.

    The checkpoint and the ids are taken out of the page cache first, so that each side reads them from the drive.
    ``check`` is called now and then, and may raise: then the process is killed, with all that it has started. Raises
    BenchError, with the last line of what the side said, if it fails, does not end within ``limit_seconds``, or did
    another work than it was told.
    """
    directory = Path(job.directory)
    directory.mkdir()
    try:
        # A model's files may be links: those of the Hugging Face cache are.
        counters.drop_cache([path for path in Path(job.work.model).iterdir() if path.is_file()])
        counters.drop_cache([Path(job.work.tokens)])
        with tempfile.TemporaryDirectory(prefix="hoist-bench-") as folder:
            write_job(job, Path(folder) / "job.json")
            said = Path(folder) / "said"
            code = _run(side, Path(folder), said, limit_seconds, check)
            path = Path(folder) / "result.json"
            if code or not path.exists():
                raise BenchError(f"{side.module}: {_reason(said, code)}")
            result = read_result(path)
            refuse_other_work(job.work, result)
            return result
    finally:
        shutil.rmtree(directory)


def variables(side: Side) -> dict[str, str]:
    """All that its process has. Not what leaves assertions out: DeepSpeed reads and writes in some of them."""
    found = dict(os.environ)
    for name in ("PYTHONHOME", "PYTHONOPTIMIZE", *side.without):
        found.pop(name, None)
    found |= {"PYTHONPATH": str(side.import_path), **side.environment}
    found["PATH"] = os.pathsep.join((str(side.python.parent), found.get("PATH", os.defpath)))
    return found


def _run(side: Side, folder: Path, said: Path, limit_seconds: float, check: Callable[[], None]) -> int:
    command = [
        str(side.python), "-m", f"hoist.tools.bench.sides.{side.module}",
        str(folder / "job.json"), str(folder / "result.json"),
    ]  # fmt: skip
    with said.open("wb") as output:
        return run_child(
            command, what=side.module, output=output, environment=variables(side), limit_seconds=limit_seconds,
            folder=folder, check=check,
        )  # fmt: skip


def _reason(said: Path, code: int) -> str:
    """The last thing that a side said, in one line; what Python adds below an error is passed over."""
    lines = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":", 1)[0]]
    if code == -signal.SIGKILL:
        return "was ended by SIGKILL, as the kernel does where memory is short: give a smaller model or budget"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return (errors or lines or [f"exit code {code}"])[-1][:MAX_CHARACTERS]
