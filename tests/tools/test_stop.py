"""The first Ctrl-C is answered at once, with the step after which the run ends, and that is where it ends."""

from __future__ import annotations

import signal

import pytest

from hoist.tools.errors import StoppedError
from hoist.tools.stop import Stop


@pytest.mark.parametrize(("step", "told"), [(0, "stopping;"), (3, "stopping after step 3;")])
def test_ctrl_c_is_answered(capfd: pytest.CaptureFixture[str], step: int, told: str) -> None:
    with Stop() as stop:
        if step:
            assert not stop.before(step)
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == f"hoist: {told} press again to end at once\n"
        assert not step or not stop.before(step)  # it came before the step began: what was told holds
        assert stop.before(step + 1)
        with pytest.raises(StoppedError):
            stop.check()


def test_sigterm_is_heeded_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    with Stop() as stop:
        assert not stop.before(1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.before(2)
    assert capfd.readouterr().err == ""
