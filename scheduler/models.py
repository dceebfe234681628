"""Builds a Hugging Face causal LM whose weights are absent, with every non-persistent buffer real.

Also gives weights their initial values. Cutting the model into stages is `stages.py`; nothing here reads checkpoints.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as hf_initialization
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hoist.scheduler.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

#: Stands in an integer tensor that is absent: as an index it is out of range, so misuse raises.
_ABSENT_INTEGER = -(2**31)
#: Kinds of accelerators with a generator for each device, which torch takes and gives the state of by the device.
_KINDS_WITH_GENERATORS = frozenset({"cuda", "xpu"})


def build_model(
    config: PreTrainedConfig,
    *,
    attention: Literal["sdpa", "eager"] = "sdpa",
    dropout: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The causal LM that ``config`` describes, in training mode, weights absent (see :func:`absent`).

    No memory is spent on weights. Non-persistent buffers are real and equal to those of ordinary construction;
    persistent ones are absent, as they belong to the store. ``config`` itself is not changed; the model has a copy, in
    which dropout, dtype and attention are as asked for here. Export ``config``, not the copy.

    Args:
        attention: attention implementation; where a family has no ``sdpa``, ``eager`` is used and logged.
        dropout: sets every dropout probability, 0 also LayerDrop; None honours the config's.
        dtype: dtype of the computation, which masks and absent weights get. Persistent buffers are built as in
            float32, since a store's contents do not depend on what is computed with.

    Raises:
        ConfigError: ``attention`` or ``dropout`` is not allowed.
        ModelError: transformers knows no causal LM of this config, or a buffer cannot be built without weights.
    """
    if attention not in ("sdpa", "eager"):
        raise ConfigError(f"attention is {attention!r}; allowed are 'sdpa' and 'eager'")
    if dropout is not None and not 0.0 <= dropout < 1.0:
        raise ConfigError(f"dropout is {dropout}; allowed are probabilities from 0 to below 1")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{type(config).__name__}: quantized weights cannot be trained; give the unquantized ones")
    if getattr(config, "is_encoder_decoder", False) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{type(config).__name__}: an encoder-decoder; only decoder-only causal LMs can be staged")
    config = copy.deepcopy(config)
    for flag in ("output_hidden_states", "output_attentions"):
        if getattr(config, flag, False):
            setattr(config, flag, False)
    if dropout is not None:
        set_dropout(config, dropout)
    model = _construct(config, attention, dtype)
    model.train()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            vars(module)["gradient_checkpointing"] = False
        if dropout is not None and isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = dropout
    _materialize_buffers(model, dtype)
    _widen_persistent_buffers(model, dtype)
    make_absent(model)
    return model


def absent(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the shape of ``like`` that needs no memory and shows misuse: one real NaN, expanded.

    A meta tensor would not do: ``F.linear`` of a CPU tensor with a meta weight returns finite numbers. Integer tensors
    hold a number that is out of range as an index. Each call has a storage of its own, which identifies the tensor.
    """
    dtype = dtype or like.dtype
    if dtype.is_floating_point or dtype.is_complex:
        scalar = torch.full((), math.nan, dtype=dtype)
    elif dtype == torch.bool:
        scalar = torch.zeros((), dtype=dtype)
    else:
        scalar = torch.full((), max(torch.iinfo(dtype).min, _ABSENT_INTEGER), dtype=dtype)
    return scalar.expand(like.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A place in the model that holds a tensor."""

    name: str
    """Name in ``state_dict()``."""
    module: nn.Module
    attribute: str
    is_parameter: bool

    def get(self) -> torch.Tensor:
        """The tensor that is there now."""
        module = self.module
        table: Mapping[str, torch.Tensor | None] = module._parameters if self.is_parameter else module._buffers
        tensor = table[self.attribute]
        if tensor is None:
            raise KeyError(self.name)
        return tensor

    def set(self, tensor: torch.Tensor) -> None:
        """Put ``tensor`` there; a parameter's place takes a Parameter."""
        if self.is_parameter:
            self.module._parameters[self.attribute] = _as_parameter(tensor)
        else:
            self.module._buffers[self.attribute] = tensor


def locations(model: nn.Module) -> Iterator[Location]:
    """Every place of a parameter or persistent buffer, shared ones under each of their names, in model order."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield Location(name=dot + attribute, module=module, attribute=attribute, is_parameter=True)
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                yield Location(name=dot + attribute, module=module, attribute=attribute, is_parameter=False)


def shared_locations(model: nn.Module) -> list[list[Location]]:
    """The places of every parameter and persistent buffer, one list for each tensor, in model order."""
    groups: dict[int, list[Location]] = {}
    # ids are those of living tensors: nothing is replaced before all have been seen
    for place in locations(model):
        groups.setdefault(id(place.get()), []).append(place)
    return list(groups.values())


def stage_seed(seed: int, stage: str) -> int:
    """The seed of a stage's initial values: 63 bits that depend on ``seed`` and the stage's name alone."""
    digest = hashlib.blake2b(f"{seed}\0{stage}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def private_rng(seed: int | None = None) -> Iterator[None]:
    """Run with torch's random generators set apart, seeded if ``seed`` is given; the caller's stay as they were."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    has_generators = kind in _KINDS_WITH_GENERATORS and torch.accelerator.is_available()
    devices = range(torch.accelerator.device_count() if has_generators else 0)
    with torch.random.fork_rng(devices=devices, device_type=kind):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextmanager
def training_modes(device: torch.device) -> Iterator[None]:
    """Gradients on, no inference mode, no autocast on the host or on ``device``: whatever the caller's modes are."""
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast(device.type, enabled=False),
    ):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Around a forward without dropout; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def initialize_tensors(model: PreTrainedModel, targets: Mapping[str, Location], *, seed: int) -> None:
    """Fill the tensors at ``targets`` (real, in place) with the distributions that transformers gives them.

    Every other weight must be absent; it is not touched. The owning model's ``_init_weights`` is called on each module
    that holds a target, inner modules first, as transformers does; some models set a weight of an inner module from an
    outer one. What it leaves alone gets torch's own ``reset_parameters``.

    Raises:
        ModelError: neither gives a tensor its value; the contents of ``targets`` are then undefined.
    """
    holders = {id(location.module) for location in targets.values()}
    order = [entry for entry in _modules_with_owner(model) if any(id(m) in holders for m in entry[0].modules())]
    with private_rng(seed), torch.no_grad(), _only(model, targets), hf_initialization.guard_torch_init_functions():
        for location in targets.values():
            location.get().copy_(absent(location.get()))
        for module, owner in order:
            _init_weights(owner, module)
        missing = {name for name, location in targets.items() if is_unfilled(location.get())}
        for module in {id(targets[name].module): targets[name].module for name in sorted(missing)}.values():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                for name, location in targets.items():
                    if name not in missing:
                        _flag(location.get(), True)
                reset()
        missing = {name for name in missing if is_unfilled(targets[name].get())}
    if missing:
        raise ModelError(
            f"{type(model).__name__}: transformers' _init_weights gives no initial value to "
            f"{', '.join(sorted(missing)[:4])}; start from a checkpoint instead of a config"
        )


def _construct(config: PreTrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device, with ``eager`` attention where ``attention`` is not to be had."""
    name = type(config).__name__
    auto: Any = AutoModelForCausalLM  # its methods have no types
    for implementation in dict.fromkeys((attention, "eager")):
        try:
            with private_rng(), torch.device("meta"):
                # copied: a refused attempt leaves its attention implementation in the config
                model: object = auto.from_config(copy.deepcopy(config), attn_implementation=implementation, dtype=dtype)
        except (ValueError, ImportError) as error:
            if "Unrecognized configuration class" in str(error):
                raise ModelError(f"{name}: transformers has no causal LM of this kind; only those train") from None
            if implementation == "eager":
                raise ModelError(f"{name}: transformers cannot build the model: {_first_line(error)}") from error
            logger.info("%s has no %s attention, using eager", name, implementation)
            continue
        if not isinstance(model, PreTrainedModel):
            raise ModelError(f"{name}: {type(model).__name__} is not a transformers PreTrainedModel")
        return model
    raise AssertionError("the last implementation either returns or raises")


def set_dropout(config: PreTrainedConfig, probability: float) -> None:
    """Set every dropout probability of ``config`` and of the configs within it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            set_dropout(value, probability)
        elif isinstance(value, int | float) and not isinstance(value, bool) and "drop" in name:
            skips_layers = "layerdrop" in name or "layer_drop" in name or "drop_path" in name
            if probability == 0.0 or not skips_layers:
                # some configs declare a probability as an integer, and check it
                setattr(config, name, type(value)(probability) if probability == 0.0 else probability)


def _modules_with_owner(model: PreTrainedModel) -> list[tuple[nn.Module, PreTrainedModel]]:
    """Every module, inner ones first, with the transformers model whose ``_init_weights`` knows it."""
    found: list[tuple[nn.Module, PreTrainedModel]] = []
    seen: set[int] = set()

    def visit(module: nn.Module, owner: PreTrainedModel) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            visit(child, owner)
        found.append((module, owner))

    visit(model, model)
    return found


def _widen_persistent_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make float32 ones, on meta, of persistent buffers that were made in a 16-bit ``dtype``."""
    if dtype.itemsize >= torch.float32.itemsize:
        return
    for places in shared_locations(model):
        buffer = places[0].get()
        if not places[0].is_parameter and buffer.dtype == dtype:
            for place in places:
                place.set(buffer.float())


def _materialize_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give every non-persistent buffer on meta its value, by the owning model's ``_init_weights``.

    Weights are still on meta, where writing to them is harmless. Each buffer is filled twice, over different contents:
    what then differs, or is NaN, nobody has filled.
    """
    names = {id(module): name for name, module in model.named_modules()}
    unfilled: list[tuple[nn.Module, str, str]] = []
    for module, owner in _modules_with_owner(model):
        buffers = {name: module._buffers.get(name) for name in sorted(module._non_persistent_buffers_set)}
        mine = {name: buffer for name, buffer in buffers.items() if buffer is not None and buffer.is_meta}
        if not mine:
            continue
        results: list[dict[str, torch.Tensor]] = []
        with private_rng(), torch.no_grad(), hf_initialization.guard_torch_init_functions():
            for fill_high in (False, True):
                for name, buffer in mine.items():
                    module._buffers[name] = _filled(buffer, fill_high)
                _init_weights(owner, module)
                results.append({name: _real(module, name) for name in mine})
        for name, first in results[0].items():
            if not torch.equal(first, results[1][name]):
                unfilled.append((module, names[id(module)], name))
    if unfilled:
        constructed = dict(_with_real_buffers(model, dtype).named_modules())
        for module, path, name in unfilled:
            module._buffers[name] = constructed[path]._buffers[name]


def _with_real_buffers(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model constructed once more, each parameter put on meta as soon as it is made: its buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    patched: Any = nn.Module  # what nn.Module calls for each parameter
    patched.register_parameter = on_meta
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with private_rng(), hf_initialization.no_init_weights():
            made: PreTrainedModel = type(model)(copy.deepcopy(model.config))
            return made
    finally:
        patched.register_parameter = register
        torch.set_default_dtype(default)


def _filled(like: torch.Tensor, fill_high: bool) -> torch.Tensor:
    if like.dtype == torch.bool:
        value: float | int = int(fill_high)
    elif like.dtype.is_floating_point or like.dtype.is_complex:
        value = math.nan
    else:
        limits = torch.iinfo(like.dtype)
        value = limits.max if fill_high else limits.min
    return torch.full(like.shape, value, dtype=like.dtype, device="cpu")


def _real(module: nn.Module, name: str) -> torch.Tensor:
    buffer = module._buffers[name]
    if buffer is None:
        raise AssertionError(f"_init_weights removed the buffer {name}")
    return buffer


def make_absent(model: PreTrainedModel) -> None:
    """Replace every parameter and persistent buffer by an absent one; shared ones stay shared."""
    for places in shared_locations(model):
        old = places[0].get()
        new = absent(old)
        if places[0].is_parameter:
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        for place in places:
            place.set(new)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{type(model).__name__}: {name} is not registered as a parameter of its module")


def other_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The buffers that are not in ``state_dict()`` (rotary frequencies and the like): module, name there, tensor."""
    for module in model.modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield module, name, buffer


def is_unfilled(tensor: torch.Tensor) -> bool:
    """Whether a tensor that was filled with what :func:`absent` holds still has some of it.

    A floating-point one is looked at by its sum, which needs no temporary. A bool one cannot tell.
    """
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() > 0 and bool(torch.isnan(tensor.sum()))
    return tensor.dtype != torch.bool and bool((tensor == absent(tensor)).any())


@contextmanager
def _only(model: nn.Module, targets: Mapping[str, Location]) -> Iterator[None]:
    """Mark every other weight as initialised already, which makes transformers' init functions pass over it."""
    real = {id(location.get()) for location in targets.values()}
    flagged = {id(tensor): tensor for place in locations(model) if id(tensor := place.get()) not in real}
    # a buffer that is no weight was filled when the model was built
    flagged |= {id(buffer): buffer for buffer in model.buffers() if id(buffer) not in real}
    for tensor in flagged.values():
        _flag(tensor, True)
    try:
        yield
    finally:
        for tensor in [*flagged.values(), *(location.get() for location in targets.values())]:
            _flag(tensor, False)


def _flag(tensor: torch.Tensor, initialized: bool) -> None:
    marked: Any = tensor
    if initialized:
        marked._is_hf_initialized = True
    elif hasattr(tensor, "_is_hf_initialized"):
        del marked._is_hf_initialized


def _as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    if not isinstance(tensor, nn.Parameter):
        raise TypeError(f"a parameter's place takes a Parameter, not {type(tensor).__name__}")
    return tensor


def _init_weights(owner: PreTrainedModel, module: nn.Module) -> None:
    """Have ``owner`` fill what ``module`` holds."""
    untyped: Any = owner
    untyped._init_weights(module)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
