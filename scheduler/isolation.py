"""Whether a model keeps the documents of a packed row apart when their positions begin anew: tried, not believed.

Each kind of layer is run on a dozen tokens with made-up weights, once with another document before its own and once
without. `stages.py` runs the layers; what rows are made of is for the tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor

from hoist.scheduler.context import Context, LayerCall, TensorRef
from hoist.scheduler.errors import ModelError
from hoist.scheduler.models import evaluating, private_rng
from hoist.scheduler.stages import Carried, LayerStage, Stage, StagedModel, as_tuple

#: Tokens of the document that must not be seen, and of the one that must not see it.
_OTHER, _OWN = 5, 6
#: Of what the other document changes where nothing keeps it away, so much may be rounding.
_ROUNDING_SHARE = 1e-3
#: And so much of the numbers themselves.
_ROUNDING = 1e-5
_SEED = 20
#: Dimensions of a matrix.
_MATRIX = 2


def check_isolation(model: StagedModel) -> None:
    """Raise ModelError, which names model and layer, unless ``position_ids`` that begin anew separate documents.

    Nothing of the model may be bound. Torch's generators and the model's mode are left as they were. Takes the memory
    of the largest weight, or of a layer's experts, for a moment.
    """
    name = type(model.model).__name__
    if "position_ids" not in inspect.signature(model.model.forward).parameters:
        raise ModelError(f"{name} takes no position_ids, by which documents are told apart")
    with evaluating(model.model), private_rng(_SEED), torch.no_grad():
        _check(model, name)


def _check(model: StagedModel, name: str) -> None:
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.randint(vocab_size, (1, _OTHER + _OWN))
    own = torch.arange(_OWN)[None]
    batches = {
        "apart": {"input_ids": ids, "position_ids": torch.cat([torch.arange(_OTHER)[None], own], dim=1)},
        "together": {"input_ids": ids},
        "alone": {"input_ids": ids[:, _OTHER:], "position_ids": own},
    }
    embed = model.embed
    embed.bind(_made_up(model, embed))
    try:
        started = {key: embed.forward(batch) for key, batch in batches.items()}
    finally:
        embed.unbind(forget=True)
    carried: Mapping[str, Carried] = {key: found for key, (found, _) in started.items()}
    contexts = {key: context for key, (_, context) in started.items()}
    if _leaks(carried):
        raise ModelError(f"{name}: what it makes of a document before its layers depends on the one before")
    boundaries = contexts["together"].boundaries
    one_by_one = all(len(boundary) == 1 for boundary in boundaries)
    seen: set[object] = set()
    for layer in model.layers:
        key = (_signature(model, layer), tuple(_calls(context, layer) for context in contexts.values()))
        if not one_by_one:  # what a layer is given depends on the ones before: run all of them
            carried = _check_layer(model, layer, carried, contexts, name)
        elif key not in seen:
            seen.add(key)
            given = torch.randn_like(carried["together"])
            made_up = {"alone": given[:, _OTHER:].clone(), "apart": given, "together": given.clone()}
            _check_layer(model, layer, made_up, contexts, name)


def _check_layer(
    model: StagedModel, layer: LayerStage, given: Mapping[str, Carried], contexts: Mapping[str, Context], name: str
) -> dict[str, Carried]:
    """What a layer makes of what it is given. Raises ModelError if the other document shows in it."""
    layer.bind(_made_up(model, layer))
    try:
        found = {key: layer.forward(given[key], context) for key, context in contexts.items()}
    except ModelError:
        raise
    except Exception as error:  # whatever a layer raises on so few tokens
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{name}: whether {layer.name} keeps documents apart cannot be tried ({reason})") from error
    finally:
        layer.unbind(forget=True)
    if _leaks(found):
        raise ModelError(f"{name}: {layer.name} mixes the documents of a packed row, wherever positions begin anew")
    return found


def _leaks(found: Mapping[str, Carried]) -> bool:
    """Whether the second document comes out otherwise than without the first one, in any tensor."""
    tensors = (as_tuple(found[key]) for key in ("apart", "together", "alone"))
    return any(
        _differ(apart, together, alone)
        for apart, together, alone in zip(*tensors, strict=True)
        if alone.is_floating_point()
    )


def _differ(apart: Tensor, together: Tensor, alone: Tensor) -> bool:
    """Whether ``apart`` has other numbers for the second document than ``alone``, by more than rounding.

    Dimensions in which they are of different sizes are those of tokens; ``together`` tells what a mixture would do.
    """
    for dimension, size in enumerate(alone.shape):
        apart, together = (
            each.narrow(dimension, each.shape[dimension] - size, size) for each in (apart, together)
        )
    allowed = _ROUNDING_SHARE * (together - alone).abs().max() + _ROUNDING * alone.abs().max()
    return not bool((apart - alone).abs().max() <= allowed)  # numbers that are none differ


def _signature(model: StagedModel, stage: Stage) -> object:
    """Layers that agree in this and in how they are called are one kind."""
    return tuple((name in stage.borrowed, spec.shape, spec.compute_dtype()) for name, spec in model.used_by(stage))


def _calls(context: Context, layer: LayerStage) -> object:
    """What a layer is called with, tensors by their numbers."""
    call: LayerCall = context.calls[layer.index - 1]

    def shown(value: object) -> object:
        if isinstance(value, TensorRef):
            return value
        return tuple(map(shown, value)) if isinstance(value, list | tuple) else repr(value)

    kwargs = tuple((key, shown(value)) for key, value in sorted(call.kwargs.items()))
    return tuple(map(shown, call.args)), kwargs, repr(call.before)


def _made_up(model: StagedModel, stage: Stage) -> dict[str, Tensor]:
    """Values for all that a stage uses: different in every row and column; vectors and matrices take no memory.

    Float32 whatever the model is built for: in bfloat16 rounding would hide a leak, or look like one.
    """
    values: dict[str, Tensor] = {}
    for name, spec in model.used_by(stage):
        dtype: torch.dtype = getattr(torch, spec.compute_dtype())
        if not dtype.is_floating_point or not spec.shape:
            values[name] = torch.ones(spec.shape, dtype=dtype)
            continue
        numbers = torch.randn(sum(spec.shape)) / max(1, spec.shape[-1] if len(spec.shape) > 1 else 1) ** 0.5
        values[name] = numbers.to(dtype).as_strided(spec.shape, (1,) * len(spec.shape))
        if len(spec.shape) > _MATRIX:  # experts' grouped products take no such strides
            values[name] = values[name].contiguous()
    return values
