"""The small files of a model, kept in the store's `model/`: config, generation config, tokenizer, chat template.

With them an export needs nothing but the store. Weights are not among them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from hoist.tiers.errors import StoreFormatError, StoreRefusedError
from hoist.tiers.store import Store
from hoist.tools.presets import CONFIG_FILE, ModelSource
from hoist.tools.safetensors_writer import sync_path

#: Suffixes of files that belong to a tokenizer or a template, and of code of the model's own, which is never run here.
_SUFFIXES = frozenset(
    {".json", ".model", ".txt", ".jinja", ".tiktoken", ".spm", ".bpe", ".vocab", ".v1", ".v2", ".v3", ".py"}
)
#: The terms that weights come under go with them.
_TERMS = frozenset({"LICENSE", "LICENSE.md", "NOTICE", "NOTICE.md", "USE_POLICY.md"})
_WEIGHT_INDEX = ".index.json"
#: Key of a store's attributes for peft's configuration of its adapters.
ADAPTER_KEY = "adapter"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTypes:
    """The types that weights came in, and go out in by default. The store itself keeps float32 of them all."""

    main: str
    """Of most: float32, bfloat16 or float16."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Of the rest, by the names that they have in files."""

    def of(self, name: str) -> str:
        """Type of one tensor."""
        return self.others.get(name, self.main)

    def to_json(self) -> dict[str, Any]:
        """As the store keeps it."""
        return {"dtype": self.main, "others": dict(self.others)}


def weight_types(source: ModelSource) -> WeightTypes:
    """The types of a source's weights; for weights that are initialised, what the config says."""
    main = _exportable(source.dtype)
    tensors = {} if source.checkpoint is None else source.checkpoint.tensors
    found = {name: _exportable(entry.dtype) for name, entry in tensors.items() if entry.dtype.is_floating_point}
    return WeightTypes(main=main, others={name: dtype for name, dtype in found.items() if dtype != main})


def stored_weight_types(store: Store) -> WeightTypes:
    """What :func:`weight_types` was when the store was made; float32 for a store that does not say."""
    kept = store.attributes.get("model", {}).get("weights", {})
    return WeightTypes(main=kept.get("dtype", "float32"), others=kept.get("others", {}))


def store_attributes(
    source: ModelSource, *, attention: str, dropout: float | None, adapter: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What a new store says of its model. ``adapter``: peft's configuration of its adapters, if it has some."""
    return {
        **({} if adapter is None else {ADAPTER_KEY: adapter}),
        "model": {
            "name": source.name,
            "type": source.config.model_type,
            "attention": attention,
            "dropout": dropout,
            "weights": weight_types(source).to_json(),
        },
        "optimizer": {"kind": "adamw"},
    }


def _exportable(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.") if dtype in (torch.bfloat16, torch.float16) else "float32"


def save_model_files(source: ModelSource, directory: Path) -> None:
    """Write ``source``'s config to ``directory`` and copy its tokenizer files there, if it has a directory."""
    directory.mkdir()
    if source.directory is not None:
        for path in sorted(source.directory.iterdir()):
            if _is_small_file(path):
                shutil.copyfile(path, directory / path.name)
        templates = source.directory / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, directory / templates.name)
    source.config.save_pretrained(directory)
    for path in (*directory.rglob("*"), directory):
        sync_path(path)


def refuse_modules(directory: Path) -> None:
    """Raise StoreRefusedError if a store's `model/` is not there: then it holds modules, which have no config."""
    if not directory.exists():
        raise StoreRefusedError(
            f"{directory.parent}: the store holds modules, no transformers model; train it from Python, with "
            "hoist.open_trainer(..., model=hoist.stage_modules(...)), and read it with hoist.read_tensor"
        )


def load_config(directory: Path) -> PreTrainedConfig:
    """The config kept in a store's `model/`. Raises StoreFormatError if it is missing or unreadable, StoreRefusedError
    if the store never had one."""
    refuse_modules(directory)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise StoreFormatError(f"{directory / CONFIG_FILE}: cannot be read: {str(error).splitlines()[0]}") from error
    return config


def config_difference(config: PreTrainedConfig, stored: PreTrainedConfig) -> str | None:
    """The first setting in which a config differs from a stored one, as ``name is X, stored Y``; None if none does.

    Which transformers wrote it, from where and in which dtype the weights were is not the model's.
    """
    mine, theirs = _settings(config), _settings(stored)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            return f"{name} is {mine.get(name)!r}, stored {theirs.get(name)!r}"
    return None


_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """All settings, as if the config had been written and read again: then tuples are lists, and keys are strings."""
    again = type(config).from_dict(json.loads(config.to_json_string(use_diff=False)))
    settings: dict[str, Any] = json.loads(again.to_json_string(use_diff=False))
    return {name: value for name, value in settings.items() if name not in _NOT_THE_MODEL}


def small_bytes(source: ModelSource) -> int:
    """Bytes that :func:`save_model_files` may take at most."""
    if source.directory is None:
        return 0
    return sum(path.stat().st_size for path in source.directory.iterdir() if _is_small_file(path))


def _is_small_file(path: Path) -> bool:
    wanted = path.suffix in _SUFFIXES or path.name in _TERMS
    return wanted and path.is_file() and not path.name.endswith(_WEIGHT_INDEX)


def copy_model_files(directory: Path, target: Path, *, dtype: str, architecture: str) -> None:
    """Copy everything in a store's `model/` to ``target``, with dtype and class in the config as exported there."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)
    config: dict[str, Any] = json.loads((target / CONFIG_FILE).read_text())
    config["dtype"] = dtype
    config["architectures"] = [architecture]
    config.pop("torch_dtype", None)
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
