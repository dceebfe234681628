"""Runs a function in a process of its own that has hoist imported already, and waits for it.

A server process imports once and forks: a child costs milliseconds instead of the seconds that importing torch takes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.faults"])


def run_in_process(function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """The exit code (negative: the signal that ended it) and what the function returned, None if it did not.

    ``function`` must be importable by name. Raises AssertionError with the child's traceback if it raised.
    """
    receiver, sender = _context.Pipe(duplex=False)
    child = _context.Process(target=_run, args=(sender, function, arguments))
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = None
    child.join()
    receiver.close()
    code = child.exitcode
    child.close()
    assert code is not None
    if isinstance(answer, _Failure):
        raise AssertionError(f"in the child process:\n{answer.text}")
    return code, answer


def run_forked(function: Callable[..., Any], *arguments: Any) -> int:
    """Run it in a fork of this process, which has one thread and what ``function`` needs. Returns the exit code.

    For processes of their own, to try many times what takes long to prepare: 1 if ``function`` raised, told on stderr.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:  # told, whatever it is
        traceback.print_exc()
    finally:
        os._exit(code)


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answer = function(*arguments)
    except BaseException:  # reported, whatever it is
        answer = _Failure(traceback.format_exc())
    sender.send(answer)
    sender.close()


def mount_small_drive(directory: Path, num_bytes: int) -> bool:
    """In a process of its own: put a tmpfs of ``num_bytes`` at ``directory``, seen by this process alone.

    False where the system does not let us.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def fill_up(path: Path) -> None:
    """A file that takes every byte of the drive that is left."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    size = 0
    for step in (2**16, 2**12):
        while True:
            try:
                os.posix_fallocate(descriptor, size, step)
            except OSError:
                break
            size += step
    os.close(descriptor)
