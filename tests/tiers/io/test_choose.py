"""Which engine is chosen and what it says about that."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from hoist.tiers.errors import RefusalError
from hoist.tiers.io import choose_engine
from hoist.tiers.io.choose import why_no_kvikio


def test_auto_takes_direct_where_kvikio_cannot_help_and_says_why() -> None:
    why = why_no_kvikio()
    if why is None:
        pytest.skip("there is a CUDA device and kvikio")
    with choose_engine() as engine:
        assert engine.name == "direct"
        assert f"chosen because {why}" in engine.describe()


def test_direct_can_be_asked_for() -> None:
    with choose_engine("direct") as engine:
        assert engine.name == "direct"
        assert "it was asked for" in engine.describe()


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RefusalError, match="got 'io_uring', must be one of auto, direct, kvikio"):
        choose_engine("io_uring")


def test_kvikio_is_refused_where_it_cannot_be_loaded() -> None:
    if importlib.util.find_spec("kvikio") is not None:
        pytest.skip("kvikio is installed")
    with pytest.raises(RefusalError, match=r"I/O engine kvikio: .* or use the engine 'direct'"):
        choose_engine("kvikio")


def test_importing_the_package_imports_neither_kvikio_nor_cupy() -> None:
    script = "import sys, hoist.tiers.io; print([name for name in ('kvikio', 'cupy') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
