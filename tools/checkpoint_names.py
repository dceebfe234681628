"""Which checkpoint tensors make each of a model's tensors, and back: transformers renames and fuses as it loads.

Checkpoints keep the names they were published with (GPT-NeoX's ``embed_out``, one tensor for each expert of Mixtral).
The rules are transformers' own, asked for by model; here they become lists of tensors that lie end to end. No data is
read.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
    revert_weight_conversion,
)

from hoist.tools.checkpoint import CheckpointReader, Match, Parts, match
from hoist.tools.errors import CheckpointError
from hoist.tools.lora import checkpoint_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """One checkpoint tensor that goes into a fused one."""

    name: str
    """Its name in the checkpoint."""
    pattern: int
    """Which of the converter's source patterns it fits."""
    index: tuple[int, ...]
    """The numbers that its name has for the pattern's asterisks: experts sort by them."""
    shape: tuple[int, ...]
    """Its shape."""


def match_model(
    reader: CheckpointReader,
    model: PreTrainedModel,
    names_and_shapes: Mapping[str, tuple[int, ...]],
    aliases: Iterable[Sequence[str]] = (),
) -> Match:
    """Find each of the model's tensors in the checkpoint, under whatever name and cut transformers would find it.

    ``model`` may be on the meta device. Raises :class:`CheckpointError` where transformers would do more than rename
    tensors and lay them end to end. What does not fit is in the answer, see :meth:`Match.require`.
    """
    shapes = {name: entry.shape for name, entry in reader.tensors.items()}
    parts = find_parts(shapes, model, directory=reader.directory)
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ())]
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        patterns.append(r"rotary_emb\.inv_freq")  # older checkpoints have one a layer, which transformers ignores
    return match(reader, names_and_shapes, aliases, parts=parts, ignore_unexpected=patterns)


def published(
    model: PreTrainedModel, names_and_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    """What each of the model's tensors is in files that others read: names and shapes of tensors laid end to end.

    These are the names that save_pretrained writes: one tensor for each expert, for example. Where they are no more
    than other names and cuts of the model's own, as :func:`match_model` reads them back; else the model's own.
    """
    own: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
        name: ((name, tuple(shape)),) for name, shape in names_and_shapes.items()
    }
    described = {name: torch.empty(shape, device="meta") for name, shape in names_and_shapes.items()}
    try:
        written = {name: tuple(value.shape) for name, value in revert_weight_conversion(model, described).items()}
        parts = find_parts(written, model, directory=Path())
    except Exception:  # a conversion that does more, whatever it raises; transformers reads the model's names as well
        logger.info("%s: exported under the names it has in memory", type(model).__name__)
        return own
    fits = {name: part.shape for name, part in parts.items()} == {name: own[name][0][1] for name in own}
    if not fits or sorted(name for part in parts.values() for name in part.names) != sorted(written):
        return own
    return {name: tuple((source, written[source]) for source in parts[name].names) for name in own}


def find_parts(
    shapes: Mapping[str, tuple[int, ...]], model: PreTrainedModel, *, directory: Path
) -> dict[str, Parts]:
    """Every tensor that those of a checkpoint make, by the model's name for it. ``directory`` is for refusals."""
    rules: Sequence[Any] = get_model_conversion_mapping(model)
    renamings: list[Any] = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters: list[Any] = [rule for rule in rules if isinstance(rule, WeightConverter)]
    wanted: dict[str, Any] = {checkpoint_name(name) or name: value for name, value in model.state_dict().items()}
    found: dict[str, Parts] = {}
    fused: dict[str, tuple[Any, list[_Source]]] = {}
    for name, shape in shapes.items():
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if pattern is None:
            if target in found:
                raise CheckpointError(
                    f"checkpoint {directory}: tensors {found[target].names[0]!r} and {name!r} are both "
                    f"{target!r} in the "
                    "model; remove one of them"
                )
            found[target] = Parts(names=(name,), shape=shape)
            continue
        converter = next(rule for rule in converters if pattern in rule.source_patterns)
        index = _wildcards(pattern, apply_renamings(name, renamings))
        source = _Source(name=name, pattern=converter.source_patterns.index(pattern), index=index, shape=shape)
        fused.setdefault(target, (converter, []))[1].append(source)
    for target, (converter, sources) in fused.items():
        found[target] = _lay_end_to_end(directory, target, converter, sources)
    return found


def _wildcards(pattern: str, name: str) -> tuple[int, ...]:
    """The numbers that stand for the asterisks of one of transformers' source patterns, ``.experts.*.w1.weight``."""
    found = re.search(re.escape(pattern.lstrip("^").rstrip("$")).replace(r"\*", r"(\d+)"), name)
    return tuple(int(number) for number in found.groups()) if found else ()


def _lay_end_to_end(directory: Path, target: str, converter: Any, sources: Sequence[_Source]) -> Parts:
    """A fused tensor as parts: stacked experts, each of which may be several tensors joined by rows; or joined rows
    alone."""
    operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
    stacked = operations in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
    joined = operations == [("Concatenate", 0)]
    if not (stacked or joined):
        named = ", ".join(name for name, _ in operations)
        raise CheckpointError(
            f"checkpoint {directory}: tensor {target!r} needs the conversion {named}, allowed are merged "
            "experts and joined "
            "rows; convert with from_pretrained and save_pretrained(..., save_original_format=False)"
        )
    num_patterns = len(converter.source_patterns)
    if stacked and operations == [("MergeModulelist", 0)] and num_patterns != 1:
        raise CheckpointError(
            f"checkpoint {directory}: {target!r} is merged from {num_patterns} kinds of tensors"
        )
    groups: dict[tuple[int, ...], list[_Source]] = {}
    for source in sorted(sources, key=lambda source: (source.index, source.pattern)):
        groups.setdefault(source.index if stacked else (), []).append(source)
    heights = {tuple(source.shape for source in group) for group in groups.values()}
    whole = all([source.pattern for source in group] == list(range(num_patterns)) for group in groups.values())
    tails = {source.shape[1:] for source in sources}
    if len(heights) != 1 or not whole or len(tails) != 1 or not all(source.shape for source in sources):
        raise CheckpointError(
            f"checkpoint {directory}: the {len(sources)} tensors of {target!r} do not fit together (one is "
            "missing, or "
            "of another shape); download the checkpoint again"
        )
    rows = sum(shape[0] for shape in next(iter(heights)))
    shape = (rows, *next(iter(tails)))
    ordered = tuple(source.name for group in groups.values() for source in group)
    assert math.prod(shape) * len(groups) == sum(math.prod(source.shape) for source in sources)
    return Parts(names=ordered, shape=(len(groups), *shape) if stacked else shape)
