"""Reads an outcome that a benchmark wrote: checks that it is one, and makes the records again.

How it is written is in `outcome.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from hoist.tools.bench.machine import Machine
from hoist.tools.bench.outcome import FORMAT_VERSION, Column, Outcome, Plot
from hoist.tools.errors import OutcomeError

Record = TypeVar("Record", Column, Machine, Outcome, Plot)


def read(path: Path) -> Outcome:
    """What `outcome.write` wrote. Raises OutcomeError, one line, for anything else."""
    try:
        found = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise OutcomeError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise OutcomeError(f"{path}: is no JSON: {str(error).splitlines()[0]}; name what --output wrote") from error
    version = found.get("format_version") if isinstance(found, dict) else None
    if type(version) is not int:
        raise OutcomeError(f"{path}: is no outcome of hoist bench: it has no format_version; name what --output wrote")
    if version > FORMAT_VERSION:
        raise OutcomeError(
            f"{path}: format_version is {version}, and this hoist reads up to {FORMAT_VERSION}; update hoist"
        )
    try:
        return _outcome(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OutcomeError(f"{path}: is no whole outcome of hoist bench: {error}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of it")


def _outcome(found: dict[str, Any]) -> Outcome:
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("rows is no list of objects")
    for name in ("name", "about", "command"):
        if not isinstance(found.get(name), str):
            raise ValueError(f"{name} is no text")
    machine = _record(Machine, found.get("machine"), "machine")
    columns = found.get("columns")
    if not isinstance(columns, list):
        raise ValueError("columns is no list")
    plot = found.get("plot")
    whole = found | {
        "machine": machine,
        "columns": tuple(_record(Column, each, "columns") for each in columns),
        "rows": tuple(rows),
        "notes": tuple(found.get("notes", ())),
        "plot": None if plot is None else _record(Plot, plot, "plot"),
    }
    return _record(Outcome, whole, "the outcome")


def _record(kind: type[Record], found: object, what: str) -> Record:
    """A record of what JSON has; lists become tuples. What it does not know, it leaves out."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} is no object")
    known = {
        each.name: tuple(value) if isinstance(value := found[each.name], list) else value
        for each in fields(kind)
        if each.name in found
    }
    make: Any = kind
    try:
        made: Record = make(**known)
        return made
    except TypeError as error:
        raise ValueError(f"{what}: {str(error).split(' ', 1)[-1]}") from error
