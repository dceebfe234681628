"""How an I/O op ends: once, when all of its transfers have, with the first error. Starts no transfer by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from hoist.scheduler.executor import Done


def then(done: Done, note: Callable[[], None]) -> Done:
    """A ``done`` that first notes the success; an error of the noting is the op's error."""

    def finish(error: BaseException | None) -> None:
        if error is None:
            try:
                note()
            except BaseException as raised:
                error = raised
        done(error)

    return finish


class Join:
    """Calls ``done`` once when ``count`` futures have ended, with the first error."""

    def __init__(self, count: int, done: Done) -> None:
        self._left = count
        self._error: BaseException | None = None
        self._done = done
        self._lock = threading.Lock()

    def start(self, request: Callable[[], Future[None]]) -> None:
        """Make one of the requests. Raises nothing: what making it raises ends its part, and the others still count."""
        try:
            future = request()
        except BaseException as error:
            self._end(error)
        else:
            future.add_done_callback(self.part)

    def part(self, future: Future[None]) -> None:
        self._end(future.exception())

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
            self._left -= 1
            if self._left:
                return
        self._done(self._error)
