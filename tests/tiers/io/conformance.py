"""What every engine must do: subclass :class:`EngineConformance` and give it the fixture ``engine``, and ``memory`` for
buffers that lie elsewhere.

What only one engine does is in the file of its name.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hoist.tiers.errors import TransferError
from hoist.tiers.io import IoEngine
from tests.support.buffers import Memory, buffer_bytes, make_file, num_cached_pages, open_descriptors

#: P003: whole pages and just past them.
SIZES = [pages * 4096 + more for pages in (0, 1, 5) for more in (0, 1, 2, 510, 512, 4095)]


class EngineConformance:
    """The contract of ``base.py``, point by point."""

    @pytest.fixture
    def engine(self) -> Iterator[IoEngine]:
        raise NotImplementedError

    @pytest.fixture
    def memory(self) -> Memory:
        """Where the buffers lie."""
        return Memory()

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_round_trip_of_any_size(self, engine: IoEngine, memory: Memory, tmp_path: Path, num_bytes: int) -> None:
        path = make_file(tmp_path / "file", num_bytes)
        source = memory.random(num_bytes, seed=num_bytes)
        engine.write(path, 0, source).result()
        engine.flush(path).result()
        back = memory.empty(num_bytes)
        engine.read(path, 0, back).result()
        assert torch.equal(back, source)
        assert path.stat().st_size == num_bytes
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(buffer_bytes(source)).digest()

    def test_round_trip_of_bfloat16_with_an_odd_number_of_elements(
        self, engine: IoEngine, memory: Memory, tmp_path: Path
    ) -> None:
        values = torch.randn(6 * 1024 + 333, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        path = make_file(tmp_path / "file", 2 * len(values))
        source, back = (memory.empty(values.nbytes).view(torch.bfloat16) for _ in range(2))
        source.copy_(values)
        engine.write(path, 0, source.view(torch.uint8)).result()
        engine.read(path, 0, back.view(torch.uint8)).result()
        assert torch.equal(back, source)

    @settings(
        max_examples=40,
        deadline=None,
        # One file and one engine serve all examples on purpose, and every subclass runs this same property.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        offset=st.one_of(st.integers(0, 20_000), st.integers(0, 5).map(lambda page: page * 4096)),
        num_bytes=st.one_of(st.integers(0, 20_000), st.sampled_from(SIZES)),
        skew=st.sampled_from([0, 1, 64, 512, 4095]),
    )
    def test_any_range_from_any_address_and_nothing_beside_it(
        self, engine: IoEngine, memory: Memory, tmp_path: Path, offset: int, num_bytes: int, skew: int
    ) -> None:
        before = buffer_bytes(memory.random(45_000, seed=1))
        path = make_file(tmp_path / "file", before)
        engine.forget(path)
        source = memory.random(num_bytes, seed=2, skew=skew)
        engine.write(path, offset, source).result()
        back = memory.empty(num_bytes, skew=skew)
        engine.read(path, offset, back).result()
        assert torch.equal(back, source)
        assert path.read_bytes() == before[:offset] + buffer_bytes(source) + before[offset + num_bytes :]

    def test_many_requests_at_once(self, engine: IoEngine, memory: Memory, tmp_path: Path) -> None:
        paths = [make_file(tmp_path / f"file{index}", 64 * 4096) for index in range(3)]
        places = [(path, page) for path in paths for page in range(0, 64, 4)]
        sources = [memory.random(4 * 4096, seed=index) for index in range(len(places))]
        writes = [
            engine.write(path, page * 4096, source) for (path, page), source in zip(places, sources, strict=True)
        ]
        for future in writes:
            future.result()
        backs = [memory.empty(4 * 4096) for _ in places]
        reads = [engine.read(path, page * 4096, back) for (path, page), back in zip(places, backs, strict=True)]
        for future in reads:
            future.result()
        assert all(torch.equal(back, source) for back, source in zip(backs, sources, strict=True))

    def test_several_threads_may_call(self, engine: IoEngine, memory: Memory, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4 * 8 * 4096)
        equal: list[bool] = []

        def work(lane: int) -> None:
            for step in range(8):
                offset = (lane * 8 + step) * 4096
                source, back = memory.random(4096, seed=offset), memory.empty(4096)
                engine.write(path, offset, source).result()
                engine.read(path, offset, back).result()
                equal.append(torch.equal(back, source))

        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert equal == [True] * 32

    @pytest.mark.parametrize(("file_bytes", "offset", "got"), [(5000, 0, 5000), (8192, 4096, 4096), (4096, 8192, 0)])
    def test_reading_past_the_end_fails_with_wanted_and_got(
        self, engine: IoEngine, memory: Memory, tmp_path: Path, file_bytes: int, offset: int, got: int
    ) -> None:
        path = make_file(tmp_path / "file", file_bytes)
        expected = rf"read of 12288 bytes at offset {offset} of .*file failed: .* wanted 12288 bytes, got {got} "
        with pytest.raises(TransferError, match=expected):
            engine.read(path, offset, memory.empty(12288)).result()

    def test_a_missing_file_is_named_and_not_made(self, engine: IoEngine, memory: Memory, tmp_path: Path) -> None:
        path = tmp_path / "missing"
        for future in (
            engine.read(path, 4096, memory.empty(4096)),
            engine.write(path, 4096, memory.empty(4096)),
            engine.flush(path),
        ):
            with pytest.raises(TransferError, match=rf"^(read|write|flush) of .*{path} failed: No such file") as caught:
                future.result()
            assert caught.value.errno == errno.ENOENT
        assert not path.exists()

    def test_a_failure_does_not_stop_the_engine(self, engine: IoEngine, memory: Memory, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4096)
        before = engine.statistics()
        assert engine.read(path, 4096, memory.empty(4096)).exception() is not None
        engine.read(path, 0, memory.empty(4096)).result()
        after = engine.statistics()
        assert after.reads - before.reads == 2
        assert after.read_bytes - before.read_bytes == 4096

    @pytest.mark.parametrize(
        ("buffer", "offset", "message"),
        [
            (torch.zeros(8, dtype=torch.float32), 0, "got torch.float32"),
            (torch.zeros((2, 8), dtype=torch.uint8), 0, r"shape \(2, 8\)"),
            (torch.zeros(8, dtype=torch.uint8)[::2], 0, "contiguous"),
            (torch.zeros(8, dtype=torch.uint8), -1, "offset: got -1"),
        ],
    )
    def test_a_request_that_breaks_the_contract_is_a_bug_at_once(
        self, engine: IoEngine, tmp_path: Path, buffer: torch.Tensor, offset: int, message: str
    ) -> None:
        path = make_file(tmp_path / "file", 4096)
        with pytest.raises(ValueError, match=message):
            engine.read(path, offset, buffer)
        with pytest.raises(ValueError, match=message):
            engine.write(path, offset, buffer)

    def test_a_relative_path_is_a_bug_at_once(self, engine: IoEngine, memory: Memory) -> None:
        with pytest.raises(ValueError, match="must be absolute"):
            engine.read(Path("file"), 0, memory.empty(4096))
        with pytest.raises(ValueError, match="must be absolute"):
            engine.flush(Path("file"))

    def test_counters_include_a_request_whose_future_is_done(
        self, engine: IoEngine, memory: Memory, tmp_path: Path
    ) -> None:
        path = make_file(tmp_path / "file", 8192)
        engine.write(path, 0, memory.empty(8192)).result()
        engine.flush(path).result()
        engine.read(path, 4096, memory.empty(4096)).result()
        seen = engine.statistics()
        assert (seen.written_bytes, seen.read_bytes) == (8192, 4096)
        assert (seen.writes, seen.reads, seen.flushes) == (1, 1, 1)
        assert seen.busy_seconds > 0
        assert engine.statistics().busy_seconds == seen.busy_seconds

    def test_aligned_transfers_do_not_touch_the_page_cache(
        self, engine: IoEngine, memory: Memory, tmp_path: Path
    ) -> None:
        path = make_file(tmp_path / "file", 64 * 4096)
        engine.write(path, 0, memory.random(64 * 4096, seed=3)).result()
        engine.read(path, 0, memory.empty(64 * 4096)).result()
        assert engine.statistics().buffered_bytes == 0
        assert num_cached_pages(path) == 0

    def test_unaligned_ends_are_counted_and_leave_no_page_cached(
        self, engine: IoEngine, memory: Memory, tmp_path: Path
    ) -> None:
        path = make_file(tmp_path / "file", 64 * 4096)
        engine.write(path, 100, memory.random(8 * 4096, seed=3, skew=100)).result()
        assert engine.statistics().buffered_bytes == 4096
        engine.read(path, 0, memory.empty(8 * 4096 + 10)).result()
        assert engine.statistics().buffered_bytes == 4096 + 10
        assert num_cached_pages(path) == 0

    def test_a_callback_sees_the_bytes_and_may_ask_for_more(
        self, engine: IoEngine, memory: Memory, tmp_path: Path
    ) -> None:
        path = make_file(tmp_path / "file", b"\x07" * 4096 + b"\x09" * 4096)
        first, second = memory.empty(4096), memory.empty(4096)
        seen: list[int] = []
        done = threading.Event()

        def then_read_on(future: object) -> None:
            seen.append(int(first[0]))
            engine.read(path, 4096, second).add_done_callback(finish)

        def finish(future: object) -> None:
            seen.append(int(second[0]))
            done.set()

        engine.read(path, 0, first).add_done_callback(then_read_on)
        done.wait()
        assert seen == [7, 9]

    def test_a_request_cannot_be_cancelled(self, engine: IoEngine, memory: Memory, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", 4096)
        futures = [engine.read(path, 0, memory.empty(4096)) for _ in range(20)]
        assert not any(future.cancel() for future in futures)
        assert all(future.exception() is None for future in futures)

    def test_a_forgotten_path_may_be_replaced(self, engine: IoEngine, memory: Memory, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", b"\x01" * 4096)
        buffer = memory.empty(4096)
        engine.read(path, 0, buffer).result()
        engine.forget(path)
        engine.forget(path)
        path.unlink()
        make_file(path, b"\x02" * 4096)
        engine.read(path, 0, buffer).result()
        assert int(buffer[0]) == 2

    def test_a_file_that_may_only_be_read_can_be_read(self, engine: IoEngine, memory: Memory, tmp_path: Path) -> None:
        path = make_file(tmp_path / "file", b"\x05" * 4096)
        path.chmod(0o444)
        buffer = memory.empty(4096)
        engine.read(path, 0, buffer).result()
        engine.flush(path).result()
        assert int(buffer[0]) == 5

    def test_closing_waits_closes_files_and_ends_threads(
        self, engine: IoEngine, memory: Memory, tmp_path: Path
    ) -> None:
        path = make_file(tmp_path / "file", 64 * 4096)
        futures = [engine.write(path, page * 4096, memory.random(4096, seed=page)) for page in range(64)]
        engine.close()
        assert all(future.done() and future.exception() is None for future in futures)
        assert open_descriptors(tmp_path) == []
        ours = ("hoist-io-", "hoist-wait-")
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)] == []
        engine.close()
        with pytest.raises(ValueError, match="closed"):
            engine.read(path, 0, memory.empty(4096))
        with pytest.raises(ValueError, match="closed"):
            engine.write(path, 0, memory.empty(4096))
        with pytest.raises(ValueError, match="closed"):
            engine.flush(path)

    def test_it_says_what_it_is(self, engine: IoEngine) -> None:
        assert engine.name in engine.describe()
        assert "\n" not in engine.describe()
