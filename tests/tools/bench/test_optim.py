"""`hoist bench optim`, small: every side ends with the same bits, or nothing is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from hoist.optim import AdamWHyperparameters
from hoist.optim.adamw import PieceReport, PieceUpdater
from hoist.tools.bench import optim
from hoist.tools.errors import BenchError
from tests.support.commands import hoist

ELEMENTS = 2**16


def test_it_measures_all_sides_and_leaves_threads_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    result = hoist(
        capfd, "bench", "optim", "--elements", "64KiB", "--threads", 1, "--threads", 2, "--block", 4096, "--rounds", 2,
        "--json",
    )  # fmt: skip
    assert result.code == 0
    assert torch.get_num_threads() == before
    document = json.loads(result.out)
    sides = [
        ("copy", None), ("fused AdamW", None), ("fused AdamW", 4096), ("hoist, split", 4096), ("hoist, loaded", 4096),
    ]  # fmt: skip
    assert [(row["threads"], row["what"], row["block_elements"]) for row in document["rows"]] == [
        (threads, *side) for threads in (1, 2) for side in sides
    ]
    for row in document["rows"]:
        assert row["moved_bytes_per_second"] > 0
        assert (row["plain_ratio"] is None) == (row["what"] == "copy" or row["block_elements"] is None)


def test_the_table_fits_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    result = hoist(capfd, "bench", "optim", "--elements", "64KiB", "--threads", 1, "--rounds", 1)
    assert result.code == 0
    assert max(len(line) for line in result.out.splitlines()) <= 80
    assert "1,048,576" in result.out


class _Careless(PieceUpdater):
    """Its updates end with one weight's last bit flipped."""

    def update(self, *, weight_lo: Tensor, **rest: Any) -> PieceReport:
        report = super().update(weight_lo=weight_lo, **rest)
        weight_lo[7] ^= 1
        return report


def test_a_bit_that_differs_is_refused() -> None:
    def careless(block_elements: int) -> PieceUpdater:
        return _Careless(AdamWHyperparameters(lr=1e-3, weight_decay=0.1), block_elements=block_elements)

    with pytest.raises(BenchError, match="hoist, split, blocks of 4096: states are not plain AdamW's after 2 updates"):
        optim.run(num_elements=ELEMENTS, threads=[1], block_elements=[4096], rounds=1, make_updater=careless)


def test_memory_that_is_not_there_is_refused_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    line = hoist(capfd, "bench", "optim", "--elements", "100TiB").refusal()
    assert line.startswith("--elements: 7 sides of 109,951,162,777,600 parameters, about ")
    assert line.endswith(" are free: give fewer --elements")


def test_a_block_that_cannot_be_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    line = hoist(capfd, "bench", "optim", "--elements", "64KiB", "--block", 100).refusal()
    assert line == "--block: got 100, must be a multiple of 64 elements"
