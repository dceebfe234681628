"""For all tests: nothing but what makes them quicker."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """What has been imported is no garbage: torch and transformers need not be searched again and again."""
    gc.collect()
    gc.freeze()
