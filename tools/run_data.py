"""The data of a run of `hoist train`: its rows, what is held out, evaluations, and where a resumed run goes on.

How files become ids and rows is `data.py`'s business; what can be refused before the data is `preparing.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hoist.scheduler.errors import ConfigError
from hoist.tiers.errors import RefusalError, StoreLockedError
from hoist.tools import data as token_data
from hoist.tools.evaluation import Evaluation, validation_numbers
from hoist.tools.preparing import Prepared, checked
from hoist.tools.presets import PRESETS, ModelSource
from hoist.tools.report import Reporter
from hoist.tools.rows import Rows
from hoist.tools.stop import Stop
from hoist.tools.text import ByteTokenizer, stdlib_sources

#: Where the ids of tokenized text are kept: next to the store, named after it.
CACHE_SUFFIX = ".tokens"
#: A vocabulary beyond this was made for a tokenizer: bytes would leave nearly all of it unused.
_MANY_IDS = 1024


def training_rows(run: Prepared, report: Reporter, stop: Stop) -> Rows | None:
    """The rows, ready; None for a run of no steps, which needs none. What a refusal has made is removed again."""
    options = run.options
    paths = tuple(Path(path) for path in options.data)
    if not options.steps and not paths:
        return None
    if not paths:
        if options.model != "tiny":
            raise ConfigError(
                "--data: nothing given; name text files, folders, records (.jsonl, .json, .parquet) or ids (.npy, .bin)"
            )
        paths = stdlib_sources()
    cache = _cache(run)
    writable = cache if cache.exists() else cache.parent
    if not os.access(writable, os.W_OK | os.X_OK):
        raise RefusalError(
            f"--store {options.main_store}: the ids of --data are kept beside it, in {cache}, and {writable} cannot be "
            "written; put the store into a folder that you may write"
        )
    rows = _rows(
        run, paths, checked("reading data", report, stop), micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.micro_batches, validation_share=options.validation_split, seed=options.seed,
    )  # fmt: skip
    if options.data:  # that a few of Python's own files are no UTF-8 concerns nobody
        for notice in rows.source.notices:
            report.notice(notice)
    vocab_size = run.source.vocab_size
    if rows.source.tokenizer is not None and run.source.tokenizer is None and vocab_size > _MANY_IDS:
        report.notice(
            f"text is taken as bytes, which use {ByteTokenizer.VOCABULARY} of the model's {vocab_size:,} ids; "
            "otherwise name a model directory with a tokenizer, or give token ids (.npy)"
        )
    return rows


def _rows(
    run: Prepared, paths: Sequence[Path], progress: Callable[[int, int], None], option: str = "--data", **more: Any
) -> Rows:
    """The rows of some data, made as the options say."""
    options = run.options
    return token_data.prepare(
        paths,
        tokenizer=run.source.tokenizer,
        vocab_size=run.source.vocab_size,
        cache_directory=_cache(run),
        rules=options.row_rules(pad_id=_pad_id(run.source)),
        truncate=options.truncate,
        token_bytes=options.token_bytes,
        option=option,
        progress=progress,
        **more,
    )


def _cache(run: Prepared) -> Path:
    return run.directory.with_name(run.directory.name + CACHE_SUFFIX)


def validation_rows(run: Prepared, rows: Rows, report: Reporter, stop: Stop) -> Rows | None:
    """Rows of ``--validation-data``; None without it. A refusal takes back what ``rows`` has put into the cache."""
    paths = tuple(Path(path) for path in run.options.validation_data)
    if not paths:
        return None
    with undone([rows]):
        found = _rows(run, paths, checked("reading validation data", report, stop), option="--validation-data")
    for notice in found.source.notices:
        report.notice(notice)
    return found


def evaluation_of(
    run: Prepared, rows: Rows, validation: Rows | None, data: token_data.StepData
) -> Evaluation | None:
    """Evaluations as the options say; None where there is nothing to evaluate with."""
    options = run.options
    held_out = data.held_out if validation is None else None
    if held_out is not None and not held_out.num_validation:
        return None
    batches = options.micro_batches if options.eval_batches is None else options.eval_batches
    source = rows if validation is None else validation
    return Evaluation(
        source,
        validation_numbers(held_out, source, batches * options.micro_batch_size),
        every=options.eval_every,
        last_step=options.steps,
        num_rows_there=len(validation_numbers(held_out, source, 0)),
        micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.micro_batches,
    )


def _pad_id(source: ModelSource) -> int:
    """The id that fills rows up: the model's own, if it has one."""
    found = getattr(source.config.get_text_config(decoder=True), "pad_token_id", None)
    return found if isinstance(found, int) and 0 <= found < source.vocab_size else 0


def text_as(run: Prepared, rows: Rows) -> str | None:
    """How text became ids, for people; None if the data is all ids."""
    if rows.source.tokenizer is None:
        return None
    if run.source.tokenizer is not None:
        return f"with {rows.source.tokenizer}"
    return "as bytes" if run.options.model in PRESETS else "as bytes (the model directory has no tokenizer)"


def step_data(run: Prepared, rows: Rows, report: Reporter) -> token_data.StepData:
    """The data from where the store's last commit stands."""
    options = run.options
    recorded = None if run.found is None else run.found.run.get("data")
    after = None if recorded is None else token_data.DataPosition.from_json(recorded)
    data = token_data.StepData(
        rows,
        order=options.order,
        seed=options.seed,
        micro_batch_size=options.micro_batch_size,
        num_micro_batches=options.micro_batches,
        validation_share=options.validation_split,
        after=after,
    )
    if after is not None:
        for difference in data.differences(after):
            report.notice(difference)
    return data


@contextmanager
def undone(rows: Sequence[Rows]) -> Iterator[None]:
    """Where a store cannot be made or opened, take back what its data put into the cache."""
    try:
        yield
    except StoreLockedError:
        raise  # whoever has the lock may be using the cache
    except RefusalError:
        for each in rows:
            if each.source.made is not None:
                each.source.made.remove()
        raise
