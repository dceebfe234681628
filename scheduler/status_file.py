"""STORE/status.json: writes a run's status, and reads what another process wrote. What is in it: `status.py`.

Who writes it and when is `publish.py`'s business.
"""

from __future__ import annotations

import json
from pathlib import Path

from hoist.scheduler.status import STATUS_VERSION, RunStatus
from hoist.tiers.format import STATUS_NAME
from hoist.tiers.small_files import Unusable, Why, read_object, replace_file, store_id_of


def write_status(directory: Path, status: RunStatus) -> None:
    """Replace the document of a store that is open for writing. Raises OSError; the one before stays then."""
    data = json.dumps(status.to_json(), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    replace_file(directory, STATUS_NAME, [data])


def read_status(directory: str | Path, *, store_id: str | None = None) -> RunStatus | Unusable:
    """The document in a store, or why there is none. Raises nothing, whatever the file holds.

    ``store_id``: what the store is called, for who has opened it; by default what its last commit says is looked up.
    """
    directory = Path(directory)
    path = directory / STATUS_NAME
    document = read_object(path)
    if isinstance(document, Unusable):
        return document
    if document.get("format_version") != STATUS_VERSION:
        seen = document.get("format_version")
        return Unusable(
            why=Why.VERSION,
            detail=f"{path}: format_version: saw {seen!r:.100}, this hoist reads {STATUS_VERSION}",
        )
    try:
        status = RunStatus.from_json(document)
    except (TypeError, ValueError, OverflowError) as error:
        return Unusable(why=Why.TORN, detail=f"{path}: {error}")
    expected = store_id_of(directory) if store_id is None else store_id
    if expected is not None and status.store_id != expected:
        return Unusable(
            why=Why.OTHER_STORE,
            detail=f"{path}: is of the store {status.store_id!r:.100}, this one is {expected!r}",
        )
    return status
