"""A Python that has imported torch and transformers already: it runs what `python ARGUMENTS` would, in its own fork.

For tests that start many short commands, nearly all of whose time goes into imports. What a fresh interpreter does is
proved by tests that start one (`test_docs.py`'s main job, `test_packaging.py`). Functions: `processes.py`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

#: What commands and examples import that takes long.
_IMPORTS = ("hoist.tools.train", "hoist.tools.export", "tokenizers", "transformers.models.llama.modeling_llama", "zarr")
#: Largest request: arguments, directory and environment.
_MOST_BYTES = 2**20


@contextmanager
def warm_python(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """A program that is called like `python`: ``-m MODULE``, ``-c SCRIPT`` or ``-``, after ``-W error`` or nothing.

    Standard streams, directory, environment and exit code are the caller's. What was imported before it is as imported
    in ``environment``. It lies in ``folder``, and works until the context ends.
    """
    place, program = folder / "warm.sock", folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" "{place}" "$@"\n')
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        listening.listen()
        command = [sys.executable, "-W", "error", "-m", "tests.support.warm", str(listening.fileno())]
        root = Path(__file__).parent.parent.parent
        with subprocess.Popen(command, cwd=root, env=environment, pass_fds=[listening.fileno()]) as server:
            try:
                yield program
            finally:
                server.terminate()


def _serve(listening: socket.socket) -> None:
    """Carry out one request after another, each in a fork."""
    for name in _IMPORTS:
        __import__(name)
    gc.freeze()  # else a fork takes a second to end: garbage is looked for in all that was imported
    while True:
        connection, _ = listening.accept()
        with connection:
            asked, streams, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
            while not asked.endswith(b"\n"):
                asked += connection.recv(_MOST_BYTES)
            child = os.fork()
            if not child:
                listening.close()
                connection.close()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                _run(**json.loads(asked))
            for stream in streams:
                os.close(stream)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            connection.sendall(f"{code}\n".encode())


def _run(arguments: list[str], directory: str, environment: dict[str, str]) -> None:
    """Be the Python that was asked for, in this process. Leaves by SystemExit, or by what the script raised."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[:2] == ["-W", "error"]:
        del arguments[:2]
    else:
        warnings.resetwarnings()
    sys.path[0] = directory
    how, *rest = arguments
    if how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        source, sys.argv = (sys.stdin.read(), ["-", *rest]) if how == "-" else (rest[0], ["-c", *rest[1:]])
        assert how in ("-", "-c"), f"python {how}: not known here"
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(source, "<stdin>" if how == "-" else "<string>", "exec"), main.__dict__)
    sys.exit(0)


def _ask(place: str, arguments: list[str]) -> int:
    """In the program that is called: have it carried out. Returns the exit code."""
    asked = json.dumps({"arguments": arguments, "directory": os.getcwd(), "environment": dict(os.environ)})  # noqa: PTH109
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        sent = socket.send_fds(connection, [first := f"{asked}\n".encode()], [0, 1, 2])
        connection.sendall(first[sent:])
        answer = connection.makefile().readline()
    if not answer:
        sys.exit("the warm python has ended")
    return int(answer) % 256


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        sys.exit(_ask(sys.argv[1], sys.argv[2:]))
