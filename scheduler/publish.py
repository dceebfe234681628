"""Writes what a run tells other processes, from a thread of its own: STORE/status.json, the metrics, the timeline.

What is told is made by `collect.py` and `timeline.py`. Nothing here holds a step up or ends a run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hoist.scheduler.metrics_log import MetricsLog
from hoist.scheduler.status import RunStatus
from hoist.scheduler.status_file import write_status
from hoist.scheduler.timeline import StepTimeline, write_timeline
from hoist.scheduler.whereabouts import Whereabouts
from hoist.tiers.format import STATUS_NAME, TIMELINE_NAME

_log = logging.getLogger(__name__)
#: A power cut loses at most the metrics of so many seconds, or of the last step.
SYNC_SECONDS = 1.0
#: Most of a core's time that the thread's documents take; they come less often where the interval would need more.
MOST_SHARE = 0.01
#: Between two timelines, at least.
TIMELINE_SECONDS = 10.0


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
        timeline: Callable[[], StepTimeline | None],
        whereabouts: Whereabouts,
        metrics: MetricsLog,
    ) -> None:
        """``interval_seconds``: between two documents; 0: none but where :meth:`publish` is called.

        ``timeline`` gives the last step's, None before the first. ``metrics`` is closed with the publisher.
        """
        self._directory = directory
        self._interval_seconds = interval_seconds
        self._status = status
        self._timeline = timeline
        self._whereabouts = whereabouts
        self._metrics = metrics
        #: One document at a time: both the thread and callers of :meth:`publish` write some.
        self._gate = threading.Lock()
        #: Names of files that could not be written.
        self._told: set[str] = set()
        #: Step whose timeline was written last; the thread's, and after it :meth:`close`'s.
        self._written_step = 0
        #: Only this process speaks for the run: a forked child that ends closes what it got a copy of.
        self._pid = os.getpid()
        #: A document of this run is there, which must not be the last word once it has ended.
        self._has_told = False
        if not interval_seconds:  # an earlier run's would be taken for this one's
            with self._telling(STATUS_NAME), suppress(FileNotFoundError):
                (directory / STATUS_NAME).unlink()
        self._wake = threading.Event()
        self._soon = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hoist-status", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Write a document now, in the caller's thread. Raises nothing about the file. In a forked child: nothing."""
        if os.getpid() != self._pid:
            return
        self._has_told = True
        with self._gate, self._telling(STATUS_NAME):
            write_status(self._directory, self._status())

    def publish_soon(self) -> None:
        """Have the thread write a document as soon as it can."""
        if self._interval_seconds:
            self._soon = True
            self._wake.set()

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if name not in self._told:
                self._told.add(name)
                _log.warning(
                    "%s: cannot be written: %s; the run goes on, and others cannot see how",
                    self._directory / name,
                    error.strerror or error,
                )

    def _publish_timeline(self) -> None:
        timeline = self._timeline()
        if timeline is not None and timeline.step != self._written_step:
            self._written_step = timeline.step
            with self._telling(TIMELINE_NAME):
                write_timeline(self._directory, timeline, self._whereabouts)

    def _serve(self) -> None:
        interval = self._interval_seconds
        published = synced = time.monotonic()
        drawn = -TIMELINE_SECONDS
        while True:
            due = synced + SYNC_SECONDS
            if interval:
                due = min(due, published + interval)
            self._wake.wait(max(0.0, due - time.monotonic()))
            if self._closing.is_set():
                return
            self._wake.clear()
            now = time.monotonic()
            if interval and (self._soon or now >= published + interval):
                self._soon = False
                before = time.thread_time()
                self.publish()
                # A thousand stages take longer to tell: then less often.
                published = now + max(0.0, (time.thread_time() - before) / MOST_SHARE - interval)
            if now >= synced + SYNC_SECONDS:
                synced = now
                self._metrics.sync()
            if interval and now >= drawn + TIMELINE_SECONDS and self._timeline() is not None:
                drawn = now
                self._publish_timeline()

    def close(self) -> None:
        """End the thread and write the last documents, unless none are wanted. Idempotent. In a forked child: nothing.

        Where documents are written only when asked for, and one was, the last says that the run has ended.
        """
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        self._wake.set()
        self._thread.join()
        if self._interval_seconds:
            self._publish_timeline()
        if self._interval_seconds or self._has_told:
            self.publish()
        self._metrics.close()
