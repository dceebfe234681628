"""Writes what a run tells other processes, from a thread of its own: STORE/status.json, the metrics, the timeline.

What is told is made by `collect.py` and `timeline.py`. Nothing here holds a step up or ends a run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hoist.scheduler.metrics_log import MetricsLog
from hoist.scheduler.status import RunStatus
from hoist.scheduler.status_file import write_status
from hoist.tiers.format import STATUS_NAME

_log = logging.getLogger(__name__)
#: A power cut loses at most the metrics of so many seconds, or of the last step.
SYNC_SECONDS = 1.0


class Publisher:
    """Publishes every so often until it is closed. The thread is its own; what it calls must allow any thread.

    A file that cannot be written (a full drive, a directory that has become read-only) is said once through `logging`;
    the run goes on, and so does trying.
    """

    def __init__(
        self,
        directory: Path,
        *,
        interval_seconds: float,
        status: Callable[[], RunStatus],
        metrics: MetricsLog,
    ) -> None:
        """``interval_seconds``: between documents; 0: only when :meth:`publish` is called."""
        self._directory = directory
        self._interval_seconds = interval_seconds
        self._status = status
        self._metrics = metrics
        #: One document at a time: both the thread and callers of :meth:`publish` write some.
        self._gate = threading.Lock()
        self._told = False
        self._wake = threading.Event()
        self._soon = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hoist-status", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Write a document now, in the caller's thread. Raises nothing about the file."""
        with self._gate:
            try:
                write_status(self._directory, self._status())
            except OSError as error:
                if not self._told:
                    self._told = True
                    _log.warning(
                        "%s: cannot be written: %s; the run goes on, and others cannot see how",
                        self._directory / STATUS_NAME,
                        error.strerror or error,
                    )

    def publish_soon(self) -> None:
        """Have the thread write a document as soon as it can."""
        if self._interval_seconds:
            self._soon = True
            self._wake.set()

    def _serve(self) -> None:
        interval = self._interval_seconds
        published = synced = time.monotonic()
        while not self._closing.is_set():
            now = time.monotonic()
            due = synced + SYNC_SECONDS
            if interval:
                due = min(due, published + interval)
            self._wake.wait(max(0.0, due - now))
            if self._closing.is_set():
                return
            now = time.monotonic()
            if self._wake.is_set():
                self._wake.clear()
            if interval and (self._soon or now >= published + interval):
                self._soon, published = False, now
                self.publish()
            if now >= synced + SYNC_SECONDS:
                synced = now
                self._metrics.sync()

    def close(self) -> None:
        """End the thread and write the last document, unless none are wanted. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        self._thread.join()
        if self._interval_seconds:
            self.publish()
        self._metrics.close()
