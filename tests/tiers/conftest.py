"""Fixtures that several tests of the tiers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hoist.tiers.io.base import IoEngine
from tests.support.stores import direct_engine


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    """The direct engine, closed afterwards."""
    with direct_engine() as engine:
        yield engine
