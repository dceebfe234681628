"""LoRA: adapters around a frozen base, made by peft in the model before it is cut into stages.

Their initial values, and how tensors of such a model are called in its checkpoint. Options are in `lora_options.py`,
that adapters stay in host memory is `TrainerConfig.pin_trained`, writing them out is `adapter_export.py`'s business.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hoist.scheduler.creation import Source
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.freezing import near, train_only
from hoist.scheduler.models import private_rng, shared_locations, stage_seed
from hoist.scheduler.stages import Stage
from hoist.tools.invoked import install_command
from hoist.tools.lora_options import ALL_LINEAR, LoraOptions

#: What peft calls the one adapter that a model has here.
_ADAPTER = "default"
_BASE = ".base_layer."
_PARAMETER = re.compile(rf"^(?P<module>.*)\.lora_(?P<part>[AB])\.{_ADAPTER}\.weight$")


def add_adapters(model: PreTrainedModel, options: LoraOptions, *, base: str) -> dict[str, Any]:
    """Put adapters into a model whose weights are absent, and freeze all but them.

    Returns peft's configuration of them as JSON, with ``base`` as the name of the model that they belong to.

    Raises:
        ConfigError: peft is not installed, a target names no linear layer, or one whose weight is shared.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ConfigError(f"--lora: needs peft ({error}); install it: {install_command('peft')}") from None
    targets = _targets(model, options)
    alpha: Any = int(options.alpha) if options.alpha.is_integer() else options.alpha  # its type says int alone
    config: Any = LoraConfig(
        r=options.r,
        lora_alpha=alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        # GPT-2's linear layers have their weights the other way round.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of patterns for older checkpoints that this model has no use for
            inject_adapter_in_model(config, model, adapter_name=_ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"--lora: targets={'+'.join(options.targets)}: {str(error).splitlines()[0]}") from error
    scaling = config.lora_alpha / config.r
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and (type(module) is not Linear or module.scaling[_ADAPTER] != scaling):
            raise ConfigError(
                f"--lora: targets={'+'.join(options.targets)} reaches {name}, which is no linear layer of its own; "
                "name the linear layers, like targets=q_proj+v_proj"
            )
    train_only(model, {name for name, _ in model.named_parameters() if is_adapter(name)})
    document = config.to_dict() | {"inference_mode": True}
    return dict(json.loads(json.dumps(document, default=sorted)))


def is_adapter(name: str) -> bool:
    """Whether a tensor of such a model belongs to an adapter, by its name."""
    return _PARAMETER.match(name) is not None


def checkpoint_name(name: str) -> str | None:
    """What a tensor is called in the checkpoint of the model without adapters; None if it belongs to one."""
    return None if is_adapter(name) else name.replace(_BASE, ".")


def adapter_name(name: str) -> str:
    """What an adapter's tensor is called in peft's files."""
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.weight', '.weight')}"


def adapter_of(name: str) -> tuple[str, str] | None:
    """The names of A and B of the adapter around a frozen weight; None if ``name`` can have none."""
    if not name.endswith(f"{_BASE}weight"):
        return None
    module = name.removesuffix(f"{_BASE}weight")
    return f"{module}.lora_A.{_ADAPTER}.weight", f"{module}.lora_B.{_ADAPTER}.weight"


def with_adapters(base: Source, seed: int) -> Source:
    """A source that fills the adapters as peft does, deterministic in ``seed``, and the rest from ``base``.

    A is uniform between plus and minus 1/sqrt(inputs), B zero: at first the model computes what its base does.
    """

    def fill(stage: Stage, values: Mapping[str, Tensor], staging: Tensor) -> None:
        base(stage, {name: value for name, value in values.items() if not is_adapter(name)}, staging)
        for name, value in values.items():
            found = _PARAMETER.match(name)
            if found is None:
                continue
            if found["part"] == "B":
                value.zero_()
            else:
                with private_rng(stage_seed(seed, name)):
                    nn.init.kaiming_uniform_(value, a=math.sqrt(5))

    return fill


def _targets(model: PreTrainedModel, options: LoraOptions) -> list[str]:
    """What peft puts adapters around; refuses a name of no linear layer, and that of one whose weight is shared."""
    shared = {place.name for places in shared_locations(model) if len(places) > 1 for place in places}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) or _is_conv1d(module)}
    if ALL_LINEAR in options.targets:
        if len(options.targets) > 1:
            raise ConfigError(f"--lora: targets={'+'.join(options.targets)}: all-linear stands alone; name no others")
        head = model.get_output_embeddings()
        wanted = {name for name in linear if model.get_submodule(name) is not head and f"{name}.weight" not in shared}
        return _shortened(wanted, [name for name, _ in model.named_modules() if name not in wanted])
    for target in options.targets:
        matched = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matched:
            hint = near(target, sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(f"--lora: targets={target} names no linear layer of the model; {hint}")
        tied = sorted(name for name in matched if f"{name}.weight" in shared)
        if tied:
            raise ConfigError(
                f"--lora: targets={target}: the weight of {tied[0]} is shared (tied), and an adapter would be for one "
                "of its places alone; leave it out"
            )
    return sorted(options.targets)


def _shortened(wanted: set[str], others: Sequence[str]) -> list[str]:
    """Names by their last parts, where no other module ends so."""
    taken = {name.rpartition(".")[2] for name in others}
    last_parts = {name: name.rpartition(".")[2] for name in wanted}
    return sorted({name if last in taken or last.isdigit() else last for name, last in last_parts.items()})


def _is_conv1d(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"
