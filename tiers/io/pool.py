"""Threads that run jobs in the order they were put. No futures, no results: the engines' jobs resolve those themselves.

Smaller than concurrent.futures' executor on purpose: a transfer that was asked for can't be cancelled, and an idle
thread keeps no job, so no buffer, alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class WorkerPool:
    """``num_threads`` daemon threads named ``hoist-io-...``, or as asked. A job must not raise."""

    def __init__(self, num_threads: int, name: str = "hoist-io") -> None:
        #: None tells one thread to end.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._threads)

    def put(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the next free thread. Not after :meth:`close`: no thread would run it."""
        self._queue.put(job)

    def close(self) -> None:
        """Run what was put before, then end the threads. Idempotent. A job may call it: its own thread ends later."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job
