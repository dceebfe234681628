"""Fixtures that several tests of the scheduler share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import SETTINGS, Course, quick_directory, undisturbed, undisturbed_courses
from tests.support.training import torch_threads


@pytest.fixture(scope="session")
def courses() -> Iterator[dict[str, Course]]:
    """What each setting of `faults.py` gives undisturbed. Its stores are there to be copied."""
    with quick_directory() as folder:
        with torch_threads(1):
            made = undisturbed_courses(folder)
        yield made


@pytest.fixture(scope="session")
def course() -> Iterator[Course]:
    """Of every setting of `faults.py` that does not clip, on the CPU: what a separate device must give, too."""
    with quick_directory() as folder, torch_threads(1):
        yield undisturbed(SETTINGS["vertical"](), folder / "vertical")


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A directory on what is quick, removed at once."""
    with quick_directory() as folder:
        yield folder
