"""Fixtures that several tests of the scheduler share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.faults import Course, quick_directory, undisturbed_courses
from tests.support.training import torch_threads


@pytest.fixture(scope="session")
def courses() -> Iterator[dict[str, Course]]:
    """What each setting of `faults.py` gives undisturbed. Its stores are there to be copied."""
    with quick_directory() as folder:
        with torch_threads(1):
            made = undisturbed_courses(folder)
        yield made
