"""All that a benchmark prints of an outcome, also when it is read from a file again: its table, and what else it has.

The table is `outcome.py`'s, what follows it that of the modules that measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console

from hoist.tools.bench.lanes import show_lanes
from hoist.tools.bench.outcome import Outcome, show
from hoist.tools.bench.sleep import show_more
from hoist.tools.errors import OutcomeError

#: What follows the table, by the benchmark's name.
_MORE: Mapping[str, Callable[..., None]] = {"step": show_lanes, "sleep": show_more}


def show_all(outcome: Outcome, console: Console) -> None:
    """As on the terminal of whoever measured it. Raises OutcomeError of one that was read and is none of its name."""
    show(outcome, console)
    more = _MORE.get(outcome.name)
    if more is None or not outcome.rows:
        return
    try:
        more(outcome.rows, console)
    except KeyError as error:
        raise OutcomeError(f"its rows have no {error}, as those of hoist bench {outcome.name} have") from error
