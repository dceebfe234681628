"""The cache of open files, with handles that only remember what happened to them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hoist.tiers.io.files import HandleCache


class Opener:
    """Opens handles and keeps them all, so that a test sees which were closed."""

    def __init__(self) -> None:
        self.opened: list[FakeHandle] = []
        self.failures: list[int] = []

    def __call__(self, path: str, writable: bool) -> FakeHandle:
        if self.failures:
            code = self.failures.pop(0)
            raise OSError(code, os.strerror(code))
        self.opened.append(FakeHandle(path, writable=writable))
        return self.opened[-1]

    @property
    def open_paths(self) -> list[str]:
        return [handle.path for handle in self.opened if handle.num_closes == 0]


class FakeHandle:
    def __init__(self, path: str, *, writable: bool) -> None:
        self.path = path
        self.writable = writable
        self.num_closes = 0
        self.fails_to_close = False

    def close(self) -> None:
        self.num_closes += 1
        if self.fails_to_close:
            raise OSError(errno.EIO, "injected")


@pytest.fixture
def opener() -> Iterator[Opener]:
    opener = Opener()
    yield opener
    assert all(handle.num_closes <= 1 for handle in opener.opened)


def use(cache: HandleCache[FakeHandle], *paths: str, writable: bool = False) -> None:
    for path in paths:
        with cache.lease(path, writable=writable) as handle:
            assert handle.num_closes == 0


def test_a_path_is_opened_once(opener: Opener) -> None:
    cache = HandleCache(open_handle=opener, capacity=2)
    use(cache, "a", "a", "b", "a")
    assert opener.open_paths == ["a", "b"]
    assert len(opener.opened) == len(cache) == 2


def test_the_least_recently_used_is_closed(opener: Opener) -> None:
    cache = HandleCache(open_handle=opener, capacity=2)
    use(cache, "a", "b", "a", "c")
    assert opener.open_paths == ["a", "c"]


def test_leased_handles_stay_open_beyond_the_capacity_and_no_longer(opener: Opener) -> None:
    cache = HandleCache(open_handle=opener, capacity=1)
    with ExitStack() as leases:
        for path in "abc":
            leases.enter_context(cache.lease(path, writable=False))
        assert opener.open_paths == ["a", "b", "c"]
    assert len(opener.open_paths) == len(cache) == 1


def test_a_write_replaces_a_read_only_handle_which_its_readers_keep(opener: Opener) -> None:
    cache = HandleCache(open_handle=opener, capacity=2)
    with cache.lease("a", writable=False) as reader:
        use(cache, "a", writable=True)
        assert reader.num_closes == 0
        use(cache, "a")  # the writable one serves reads too
    assert [handle.writable for handle in opener.opened] == [False, True]
    assert opener.open_paths == ["a"]
    assert reader.num_closes == 1


def test_a_failed_opening_changes_nothing(opener: Opener) -> None:
    cache = HandleCache(open_handle=opener, capacity=2)
    use(cache, "a")
    opener.failures = [errno.EACCES]
    with pytest.raises(PermissionError):
        use(cache, "a", writable=True)
    use(cache, "a")
    assert len(opener.opened) == 1
    assert opener.open_paths == ["a"]


def test_idle_handles_are_given_back_when_descriptors_run_out(opener: Opener) -> None:
    cache = HandleCache(open_handle=opener, capacity=9)
    with cache.lease("a", writable=False):
        use(cache, "b", "c")
        opener.failures = [errno.EMFILE]
        use(cache, "d")
        assert opener.open_paths == ["a", "d"]
        opener.failures = [errno.EMFILE, errno.EMFILE]
        with pytest.raises(OSError, match="Too many open files"):
            use(cache, "e")


def test_forget_closes_now_or_with_the_last_lease(opener: Opener) -> None:
    cache = HandleCache(open_handle=opener, capacity=9)
    use(cache, "a", "b")
    cache.forget("a")
    cache.forget("a")
    assert opener.open_paths == ["b"]
    with cache.lease("b", writable=False) as handle:
        cache.forget("b")
        use(cache, "b")
        assert handle.num_closes == 0
    assert handle.num_closes == 1
    assert opener.open_paths == ["b"]


def test_close_closes_everything_and_reports_what_fails(opener: Opener, caplog: pytest.LogCaptureFixture) -> None:
    cache = HandleCache(open_handle=opener, capacity=9)
    use(cache, "a", "b", "c")
    opener.opened[1].fails_to_close = True
    with caplog.at_level(logging.WARNING):
        cache.close()
    assert opener.open_paths == []
    assert "closing a cached file failed" in caplog.text
