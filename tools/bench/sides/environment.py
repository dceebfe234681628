"""DeepSpeed's own virtual environment: made once, outside hoist's, with the same torch and transformers as here.

What it takes is hoist's extra `bench`; what it is used for is in `deepspeed_side.py`.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hoist.tools.bench.children import run_child
from hoist.tools.bench.sides.running import MAX_CHARACTERS, Side
from hoist.tools.errors import BenchError

#: Packages that both sides must have in the same version.
SHARED = ("torch", "transformers", "safetensors", "numpy")
EXTRA = "bench"
#: The extra's content, for a checkout that is not installed; a test compares them.
DEFAULT_REQUIREMENTS = ("deepspeed==0.19.8", "ninja>=1.11")
#: What DeepSpeed brings that hoist does not: exact versions make the environment the same each time.
_PINNED = (
    "einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "ninja==1.13.2", "py-cpuinfo==9.0.0", "pydantic==2.14.4",
)  # fmt: skip
#: A virtual environment comes with its own.
_UNPINNED = ("pip", "setuptools", "wheel")
#: Written last, so that an environment that was begun and not finished is known as such.
_MARK = "hoist-bench.txt"
#: In the environment: where operations are compiled to. The place that torch has for all environments of a user is
#: compiled anew for each of them in turn, and a lock left there by a process that was killed stops everyone for ever.
_EXTENSIONS = "extensions"
#: DeepSpeed compiles these when they are first used.
_OPERATIONS = ("AsyncIOBuilder", "CPUAdamBuilder", "ShareMemCommBuilder")
#: Of one call of pip, or of the compiler.
_LIMIT_SECONDS = 2 * 3600.0
#: What pip says where there is no network.
_UNREACHABLE = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError")
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
    with, the place cannot be used, another process makes it now, or pip fails; an unfinished environment is made anew
    the next time.
    """
    refuse(directory)
    if not is_made(directory):
        try:
            with _alone(directory):
                if not is_made(directory):
                    _make(directory, check, told)
        except OSError as error:
            raise BenchError(
                f"--environment {directory}: cannot be made: {error.strerror or error}; name another place"
            ) from error
    return directory / "bin" / "python"


def refuse(directory: Path) -> None:
    """Raise BenchError if the environment cannot be made there, as far as can be seen at once."""
    _refuse_foreign(directory)
    lacking = missing_tools()
    if lacking:
        raise BenchError(
            f"DeepSpeed compiles its operations, for which this machine lacks {' and '.join(lacking)}: "
            f"apt-get install {' '.join(lacking)}"
        )


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Nobody else makes the environment meanwhile; the kernel gives the lock back when this process ends."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f".{directory.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BenchError(
                f"--environment {directory}: another process makes it now; wait for that, or name another place"
            ) from None
        yield


def _make(directory: Path, check: Check, told: Told) -> None:
    """From nothing. The mark, empty, comes first, so that what is left of an attempt that was killed is known."""
    told("making an environment for DeepSpeed")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(exist_ok=True)
    (directory / _MARK).touch()
    code, said = _call([sys.executable, "-m", "venv", str(directory)], check)
    if code:
        raise BenchError(f"python -m venv {directory}: {_last_error(said)}; Debian has it in python3-venv")
    python = directory / "bin" / "python"
    told("installing DeepSpeed")
    _install(python, check)
    told("compiling DeepSpeed's operations")
    _compile(python, check)
    _write_mark(directory)


def _wanted() -> str:
    """What an environment must have been made of."""
    lines = [*(f"{name}=={importlib.metadata.version(name)}" for name in SHARED), *requirements()]
    return "\n".join(lines) + "\n"


def is_made(directory: Path) -> bool:
    """Whether the environment is there, finished, of the versions that are wanted now, and of a Python that is still
    there."""
    try:
        made_of = (directory / _MARK).read_text()
        (packages,) = directory.glob("lib/python*")
        interpreter = (directory / "bin" / packages.name).resolve(strict=True)
    except (OSError, ValueError):
        return False
    return interpreter.is_file() and (directory / "bin" / "python").exists() and made_of == _wanted()


def _write_mark(directory: Path) -> None:
    temporary = directory / f"{_MARK}.tmp"
    temporary.write_text(_wanted())
    temporary.replace(directory / _MARK)


def _refuse_foreign(directory: Path) -> None:
    """Only what this module has made is ever removed."""
    if not directory.exists():
        return
    if not directory.is_dir() or (any(directory.iterdir()) and not (directory / _MARK).exists()):
        raise BenchError(
            f"--environment {directory}: is there, and is no environment that hoist made; name another place"
        )


def constraint_lines() -> list[str]:
    """Exact versions for pip: of what is also here, those that are here."""
    found = {
        canonicalize_name(one.name): one.version
        for one in importlib.metadata.distributions()
        if one.name and _is_version(one.version)
    }
    found |= {canonicalize_name(name): version for name, version in (line.split("==") for line in _PINNED)}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in _UNPINNED]


def _is_version(text: str) -> bool:
    """Whether pip takes it: a distribution's own packages may have others."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _install(python: Path, check: Check) -> None:
    with tempfile.TemporaryDirectory(prefix="hoist-bench-") as folder:
        constraints = Path(folder) / "constraints.txt"
        versions = [f"{name}=={importlib.metadata.version(name)}" for name in SHARED]
        constraints.write_text("\n".join(constraint_lines()) + "\n")
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
        unreachable = any(words in said for words in _UNREACHABLE)
        why = "no package index could be reached" if unreachable else _last_error(said)
        raise BenchError(f"pip could not install {' '.join(arguments[2:])}: {why}")


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
        code = run_child(
            command, what="DeepSpeed's environment", output=output, environment=surroundings,
            limit_seconds=_LIMIT_SECONDS, check=check,
        )  # fmt: skip
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "Error:" in line]
    return (errors or lines or ["it said nothing"])[-1][:MAX_CHARACTERS]
