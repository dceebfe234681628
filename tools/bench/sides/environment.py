"""DeepSpeed's own virtual environment: made once, outside hoist's, with the same torch and transformers as here.

What it takes is hoist's extra `bench`; what it is used for is in `deepspeed_side.py`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hoist.tools.bench.sides.running import MAX_CHARACTERS, Side, wait_for
from hoist.tools.errors import BenchError

#: Packages that both sides must have in the same version.
SHARED = ("torch", "transformers", "safetensors", "numpy")
EXTRA = "bench"
#: The extra's content, for a checkout that is not installed; a test compares them.
DEFAULT_REQUIREMENTS = ("deepspeed==0.19.8", "ninja>=1.11")
#: Written last, so that an environment that was begun and not finished is known as such.
_MARK = "hoist-bench.txt"
#: In the environment: where operations are compiled to. The place that torch has for all environments of a user is
#: compiled anew for each of them in turn, and a lock left there by a process that was killed stops everyone for ever.
_EXTENSIONS = "extensions"
#: DeepSpeed compiles these when they are first used.
_OPERATIONS = ("AsyncIOBuilder", "CPUAdamBuilder", "ShareMemCommBuilder")
_LIBAIO = Path("/usr/include/libaio.h")

Check = Callable[[], None]
Told = Callable[[str], None]


def requirements() -> tuple[str, ...]:
    """What the extra `bench` asks for. Raises BenchError if hoist is not installed, and its metadata nowhere."""
    try:
        found = importlib.metadata.requires("hoist-engine") or []
    except importlib.metadata.PackageNotFoundError:
        return DEFAULT_REQUIREMENTS
    marked = [line for line in found if f'extra == "{EXTRA}"' in line or f"extra == '{EXTRA}'" in line]
    return tuple(line.split(";", 1)[0].strip() for line in marked) or DEFAULT_REQUIREMENTS


def default_directory() -> Path:
    """Where the environment is made unless the user names a place: below the user's cache, named for what is in it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    deepspeed = requirements()[0].replace("==", "-")
    return base / "hoist" / f"bench-{deepspeed}-torch-{importlib.metadata.version('torch')}"


def missing_tools() -> tuple[str, ...]:
    """What the machine lacks to compile DeepSpeed's operations, as Debian's packages. ninja comes with the extra."""
    lacking = []
    if not _LIBAIO.exists() and not list(Path("/usr/include").glob("*/libaio.h")):
        lacking.append("libaio-dev")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        lacking.append("g++")
    return tuple(lacking)


def deepspeed_side(python: Path, import_path: Path) -> Side:
    """ZeRO-Infinity's side, in an environment that was made."""
    # What hoist tells OpenMP for its own lanes, when it is imported, is not DeepSpeed's.
    return Side(
        module="deepspeed_side", python=python, import_path=import_path, environment=_variables(python.parent.parent),
        without=("GOMP_SPINCOUNT",),
    )  # fmt: skip


def _variables(directory: Path) -> dict[str, str]:
    """Of every process in the environment."""
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(directory / _EXTENSIONS)}


def prepare(directory: Path, *, check: Check = lambda: None, told: Told = lambda what: None) -> Path:
    """The environment's Python: made if it is not there, or was left unfinished, or has other versions.

    ``told`` says what is being done. Raises BenchError, in one line, if the machine lacks what DeepSpeed is compiled
    with, or pip fails; an unfinished environment is made anew the next time.
    """
    _refuse_foreign(directory)
    lacking = missing_tools()
    if lacking:
        raise BenchError(
            f"DeepSpeed compiles its operations, for which this machine lacks {' and '.join(lacking)}: "
            f"apt-get install {' '.join(lacking)}"
        )
    python = directory / "bin" / "python"
    if is_made(directory):
        return python
    told("making an environment for DeepSpeed")
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    venv.EnvBuilder(with_pip=True, symlinks=True).create(directory)
    (directory / _MARK).touch()
    told("installing DeepSpeed")
    _install(python, check)
    told("compiling DeepSpeed's operations")
    _compile(python, check)
    _write_mark(directory)
    return python


def _wanted() -> str:
    """What an environment must have been made of."""
    lines = [*(f"{name}=={importlib.metadata.version(name)}" for name in SHARED), *requirements()]
    return "\n".join(lines) + "\n"


def is_made(directory: Path) -> bool:
    """Whether the environment is there, finished, and of the versions that are wanted now."""
    mark = directory / _MARK
    return (directory / "bin" / "python").exists() and mark.exists() and mark.read_text() == _wanted()


def _write_mark(directory: Path) -> None:
    temporary = directory / f"{_MARK}.tmp"
    temporary.write_text(_wanted())
    temporary.replace(directory / _MARK)


def _refuse_foreign(directory: Path) -> None:
    """Only what this module has made is ever removed."""
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARK).exists():
        raise BenchError(
            f"--environment {directory}: is there, and is no environment that hoist made; name another place"
        )


def _install(python: Path, check: Check) -> None:
    with tempfile.TemporaryDirectory(prefix="hoist-bench-") as folder:
        constraints = Path(folder) / "constraints.txt"
        versions = [f"{name}=={importlib.metadata.version(name)}" for name in SHARED]
        constraints.write_text("\n".join(versions) + "\n")
        # DeepSpeed's own build looks at torch, so that comes first.
        for packages in (versions, list(requirements())):
            _pip(python, ["-c", str(constraints), *packages], check)


def _pip(python: Path, arguments: Sequence[str], check: Check) -> None:
    """Install, from where pip is told to look; then also where torch's own builds (2.13.0+cpu) are."""
    command = [str(python), "-m", "pip", "install", "--no-input", *arguments]
    code, said = _call(command, check)
    build = importlib.metadata.version("torch").partition("+")[2]
    if code and build:
        code, said = _call([*command, "--extra-index-url", f"https://download.pytorch.org/whl/{build}"], check)
    if code:
        raise BenchError(f"pip could not install {' '.join(arguments[2:])}: {_last_error(said)}")


def _compile(python: Path, check: Check) -> None:
    program = "import deepspeed.ops.op_builder as builders\n" + "".join(
        f"builders.{name}().load()\n" for name in _OPERATIONS
    )
    code, said = _call([str(python), "-c", program], check, _variables(python.parent.parent))
    if code:
        raise BenchError(f"DeepSpeed's operations could not be compiled: {_last_error(said)}")


def _call(
    command: Sequence[str], check: Check, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code, and what was said. ``check`` may raise; then the process is killed."""
    path = os.pathsep.join((str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)))
    surroundings = {**os.environ, "PATH": path, **(environment or {})}
    surroundings.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile(prefix="hoist-bench-") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=surroundings,
            start_new_session=True,
        )  # fmt: skip
        code = wait_for(process, check)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "Error:" in line]
    return (errors or lines or ["it said nothing"])[-1][:MAX_CHARACTERS]
