"""What `hoist train` does about wear: the drives' ratings, the budget of writes, and what is said of both.

Counting is `hoist.tiers.wear`'s business, what a step writes `hoist.scheduler.writes`', what it means
`hoist.scheduler.endurance`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hoist.scheduler import endurance, writes
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.endurance import Wear
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.memory import STATE_BYTES
from hoist.scheduler.preflight import DRIVE_BYTES, probed_bytes
from hoist.scheduler.setup import Setup
from hoist.scheduler.trainer import Trainer
from hoist.scheduler.writes import Saving, Writes
from hoist.tiers import drive_health, drives
from hoist.tiers.format import COMMIT_NAME, CRC_DIRECTORY, WEAR_NAME, CommitRecord
from hoist.tiers.io.base import IoEngine
from hoist.tiers.store import Store
from hoist.tiers.wear import DirectoryWear, WearLedger, WearRecord, read_wear
from hoist.tools.options import TrainOptions
from hoist.tools.sizes import show_days, show_decimal, show_share

#: What the most that a step can write has on top, for small files: of snapshots, and the ledger itself.
SMALL_BYTES = 2**20
#: Measuring a drive takes about one part in so many of what is left of a budget of writes, for each of two writes.
_BUDGET_PARTS = 200
_FROM_OPTION, _FROM_DRIVE = "--tbw", "smart"


# --- before a run -----------------------------------------------------------------------------------------------------


def check_tbw(options: TrainOptions, directory: Path, found: CommitRecord | None) -> None:
    """Raise ConfigError unless ``--tbw`` is there once, or once for each of the store's drives."""
    count = _num_drives(options, directory, found)
    given = len(options.tbw)
    if given not in (0, 1, count):
        allowed = "once" if count == 1 else f"once, or {count} times in the drives' order"
        raise ConfigError(
            f"--tbw: given {given} times, and the store has {count} drive{'s' * (count != 1)}; give it {allowed}"
        )


def _num_drives(options: TrainOptions, directory: Path, found: CommitRecord | None) -> int:
    return len(options.store) if found is None else len(drives.registered(found, directory))


def known_bytes(directory: Path, found: CommitRecord | None) -> int:
    """Ever written to the drives of the store at a directory, as far as is known; never raises."""
    try:
        record = read_wear(directory)
    except (OSError, ValueError):
        record = None
    return _committed_bytes(found) if record is None else record.written_bytes


def _committed_bytes(found: CommitRecord | None) -> int:
    """What the last commit knows was written, by `hoist train`."""
    totals = {} if found is None else found.run.get("totals")
    written = totals.get("nvme_written_bytes", 0) if isinstance(totals, dict) else 0
    return written if isinstance(written, int) else 0


def check_write_budget(
    options: TrainOptions,
    directory: Path,
    found: CommitRecord | None,
    setup: Setup,
    engine: IoEngine,
    *,
    further_bytes: int,
) -> int:
    """Raise ConfigError if the budget of writes is used up, or too small for one step and its commit.

    ``further_bytes``: small files that a new store gets, and what measuring its drives writes. Returns how many bytes
    the file may have with which a drive is then measured for the prediction: of a budget of writes a small part.
    """
    budget = options.write_budget_bytes()
    step = 0 if found is None else found.step
    if budget is None or (found is not None and step >= options.steps):
        return DRIVE_BYTES
    num_drives = _num_drives(options, directory, found)
    written = known_bytes(directory, found)
    needed = written
    if found is None:
        needed += writes.creation_bytes(setup) + further_bytes + SMALL_BYTES
    if step < options.steps:
        needed += probed_bytes(setup, engine, most_bytes=0) * num_drives  # at the least
        needed += writes.count(setup, options.trainer_config(), found).most_bytes() + SMALL_BYTES
    if written > budget:
        raise ConfigError(
            f"--write-budget: {options.write_budget} is exceeded: {show_decimal(written)} ({written} bytes) were "
            f"written to the store's drives so far; give at least {needed} bytes, or 0 for no limit"
        )
    if needed > budget:
        what = "a step and its commit" if found is not None else "making the store, a step and its commit"
        raise ConfigError(
            f"--write-budget: {options.write_budget} is too little: {show_decimal(written)} were written to the "
            f"store's drives so far, and {what} may write {show_decimal(needed - written)}; give at least {needed} "
            "bytes, or 0 for no limit"
        )
    return min(DRIVE_BYTES, (budget - needed) // (_BUDGET_PARTS * num_drives))


def count_measuring(store: Store, *, read_bytes: int, written_bytes: int) -> None:
    """What was measured on the store's drives, on each as much, before the store was open counts, too."""
    assert store.wear is not None
    numbers = [number for number, each in enumerate(store.wear.record().directories) if each.in_use]
    for number in numbers:
        store.wear.add(
            number, written_bytes=written_bytes // len(numbers), read_bytes=read_bytes // len(numbers)
        )


def rate_drives(options: TrainOptions, store: Store, found: CommitRecord | None, notice: Callable[[str], None]) -> None:
    """Tell the store's ledger what its drives are rated for, and what was written before it began to count."""
    ledger = store.wear
    assert ledger is not None, "a store that is open for writing counts"
    known = _committed_bytes(found)
    if ledger.began_anew and known:
        ledger.add(written_bytes=known)
        notice(
            f"{store.directory / WEAR_NAME} is missing or torn; what was written so far is taken from the last "
            f"commit: {show_decimal(known)}, snapshots and moves between drives not among it"
        )
    told = options.tbw_bytes()
    for number, each in enumerate(ledger.record().directories):
        if not each.in_use:
            continue
        health = drive_health.look(Path(each.directory))
        ledger.note_drive(number, written_bytes=health.written_bytes)
        if told:
            tbw = told[number if len(told) > 1 else 0]
            ledger.rate(number, tbw_bytes=tbw or None, source=_FROM_OPTION)
            each = ledger.record().directories[number]
        if each.tbw_source != _FROM_OPTION:
            ledger.rate(number, tbw_bytes=health.tbw_bytes, source=_FROM_DRIVE)


# --- what is said -----------------------------------------------------------------------------------------------------


def judged(
    ledger: WearLedger,
    counted: Writes,
    config: TrainerConfig,
    *,
    seconds_per_step: float | None,
    steps_left: int,
    write_budget_bytes: int | None,
) -> Wear:
    """What the run does to the drives, as of now."""
    return endurance.judge(
        ledger.record(),
        bytes_per_step=counted.per_step(config, seconds_per_step),
        seconds_per_step=seconds_per_step,
        steps_left=steps_left,
        write_budget_bytes=write_budget_bytes,
    )


def foreseen(
    options: TrainOptions,
    directory: Path,
    found: CommitRecord | None,
    setup: Setup,
    *,
    predicted_seconds: float | None,
) -> tuple[str, ...]:
    """:func:`ahead` and :func:`lower` of a run that is not begun, from what the store counts, if it is there. Changes
    nothing.
    """
    try:
        record = read_wear(directory)
    except (OSError, ValueError):
        record = None
    if record is None or not any(each.in_use for each in record.directories):
        places = [DirectoryWear(directory=str(Path(place).absolute())) for place in options.store]
        record = WearRecord(directories=tuple(places))
    told = options.tbw_bytes()
    if told:
        rated = [
            replace(each, tbw_bytes=told[min(number, len(told) - 1)] or None, tbw_source=_FROM_OPTION)
            for number, each in enumerate(record.directories)
        ]
        record = replace(record, directories=tuple(rated))
    config = options.trainer_config()
    steps = max(0, options.steps - (0 if found is None else found.step))
    bytes_per_step = writes.count(setup, config, found).per_step(config, predicted_seconds)
    wear = endurance.judge(
        record, bytes_per_step=bytes_per_step, seconds_per_step=predicted_seconds, steps_left=steps
    )
    return tuple(line for line in (ahead(wear, steps), lower(setup, config)) if line)


def ahead(wear: Wear, steps: int) -> str:
    """One line on what is to come: ``writes 1.4 GB a step, 1.4 TB in 1,000 steps: 0.23% of 600 TB; ...``."""
    text = f"writes {show_decimal(wear.written_bytes_per_step)} a step"
    if wear.run_bytes is not None:
        text += f", {show_decimal(wear.run_bytes)} in {steps:,} step{'s' * (steps != 1)}"
    return text + _rating(wear)


def behind(wear: Wear) -> str:
    """One line on what was: bytes ever written, and what is left of the drive's life at this speed."""
    worst = wear.worst
    text = f"{show_decimal(wear.written_bytes)} ever written to the store's drive{'s' * (len(wear.drives) > 1)}"
    if worst is None:
        return f"{text}, {show_decimal(wear.written_bytes_per_step)} a step"
    assert worst.tbw_bytes is not None
    share = worst.written_bytes / worst.tbw_bytes
    return f"{text}: {show_share(share)} of {_rated(worst.tbw_bytes, worst.source)}{_lasting(wear)}"


def _rating(wear: Wear) -> str:
    worst = wear.worst
    if worst is None or worst.tbw_bytes is None:
        return "; what the drive is rated for is not known: --tbw 600TB, say"
    text = f": {show_share(worst.run_share)} of {_rated(worst.tbw_bytes, worst.source)}" if worst.run_share else ""
    return text + (f" ({worst.directory})" if len(wear.drives) > 1 else "") + _lasting(wear)


def _rated(tbw_bytes: int, source: str | None) -> str:
    return show_decimal(tbw_bytes) + (" (as the drive itself implies)" if source == _FROM_DRIVE else "")


def _lasting(wear: Wear) -> str:
    worst = wear.worst
    if worst is None or worst.tbw_bytes is None or worst.days_in_all is None or worst.days_left is None:
        return ""
    text = f"; at this speed {show_decimal(worst.tbw_bytes)} last {show_days(worst.days_in_all)}"
    # What others wrote is known only where the drive says so.
    if worst.used_share is not None and worst.used_share >= 0.01:
        text += f", what is left of it {show_days(worst.days_left)}"
    return text


def lower(setup: Setup, config: TrainerConfig) -> str:
    """One line on what would lower it, as `memory.divide` and the plans say; empty if nothing would."""
    frozen = any(placed.spec.frozen_weight for layout in setup.layouts for placed in layout.frozen)
    found = writes.savings(setup, config, frozen_possible=not frozen)
    return "" if not found else f"fewer bytes for the same tokens: {'; '.join(map(_saving, found))}"


def _saving(saving: Saving) -> str:
    saved = show_decimal(saving.saved_bytes)
    if saving.what == "memory":
        return f"--host-memory {_as_option(saving.value)} saves {saved} a step"
    if saving.what == "micro_batches":
        return f"--micro-batches {saving.value} in half the steps saves {saved} for each of these steps"
    return f"--lora or --freeze saves up to {saved} a step"


def _as_option(num_bytes: int) -> str:
    """A size as the command line takes it, exactly."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)


# --- the budget -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetEnd:
    """A run stopped because of its budget of writes."""

    written_bytes: int
    """Before the last commit."""
    budget_bytes: int
    next_bytes: int
    """The most that the next step and what comes with it could have written."""


class WriteBudget:
    """Says before each step whether it, its commit and what comes with it stay within the budget, at their most.

    What was promised for a step that is begun still holds for the commit after it: a run that stops here commits what
    it has, within the budget.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        ledger: WearLedger,
        counted: Writes,
        snapshot_bytes: int = 0,
        snapshot_every: int = 0,
        evaluation_bytes: Callable[[int], int] = lambda step: 0,
    ) -> None:
        """``evaluation_bytes``: what evaluations after a step write at most."""
        self._budget_bytes = budget_bytes
        self._ledger = ledger
        self._counted = counted
        self._snapshot_bytes = snapshot_bytes
        self._snapshot_every = snapshot_every
        self._evaluation_bytes = evaluation_bytes
        #: What the step that was begun last may write.
        self._begun_bytes = 0

    def most_bytes(self, step: int) -> int:
        """The most that step ``step`` writes, with all that comes after it until the next is asked for."""
        snapshot = self._snapshot_bytes if self._snapshot_every and step % self._snapshot_every == 0 else 0
        return self._counted.most_bytes() + self._evaluation_bytes(step) + snapshot + SMALL_BYTES

    def stops(self, trainer: Trainer) -> BudgetEnd | None:
        """None if the next step may begin. Near the end of the budget, waits until the one before is all done."""
        most = self.most_bytes(trainer.step_number + 1)
        if self._ledger.written_bytes + self._begun_bytes + most > self._budget_bytes:
            trainer.wait()
            # What it keeps in memory is still to be written, by the commit that is counted with the next step, too.
            self._begun_bytes = 0
            written = self._ledger.written_bytes
            if written + most > self._budget_bytes:
                return BudgetEnd(written_bytes=written, budget_bytes=self._budget_bytes, next_bytes=most)
        self._begun_bytes = most
        return None


def snapshot_bytes(store: Store) -> int:
    """The most that a snapshot writes: its small files, and copies of what lies on other drives than its own."""
    record = store.record
    copied = 0
    spans = record is not None and len(drives.registered(record, store.directory)) > 1
    if spans or not _links(store.directory):
        copied = sum(STATE_BYTES * layout.padded_elements + layout.frozen_bytes for layout in store.layouts)
    return copied + (store.directory / COMMIT_NAME).stat().st_size + _tree_bytes(store.directory / CRC_DIRECTORY)


def _links(directory: Path) -> bool:
    """The file system there makes hard links."""
    link = directory / ".hoist-link"
    try:
        link.unlink(missing_ok=True)
        os.link(directory / COMMIT_NAME, link)
        link.unlink()
    except OSError:
        return False
    return True


def _tree_bytes(directory: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(directory))
