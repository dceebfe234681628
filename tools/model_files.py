"""The small files of a model, kept in the store's `model/`: config, generation config, tokenizer, chat template.

With them an export needs nothing but the store. Weights are not among them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hoist.tiers.errors import StoreFormatError
from hoist.tools.safetensors_writer import sync_path
from hoist.tools.presets import CONFIG_FILE, ModelSource

#: Suffixes of files that belong to a tokenizer or a template.
_SUFFIXES = frozenset({".json", ".model", ".txt", ".jinja", ".tiktoken"})
_WEIGHT_INDEX = ".index.json"


def save_model_files(source: ModelSource, directory: Path) -> None:
    """Write ``source``'s config to ``directory`` and copy its tokenizer files there, if it has a directory."""
    directory.mkdir()
    if source.directory is not None:
        for path in sorted(source.directory.iterdir()):
            if path.is_file() and path.suffix in _SUFFIXES and not path.name.endswith(_WEIGHT_INDEX):
                shutil.copyfile(path, directory / path.name)
        templates = source.directory / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, directory / templates.name)
    source.config.save_pretrained(directory)
    for path in (*directory.rglob("*"), directory):
        sync_path(path)


def load_config(directory: Path) -> PreTrainedConfig:
    """The config kept in a store's `model/`. Raises StoreFormatError if it is missing or unreadable."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise StoreFormatError(f"{directory / CONFIG_FILE}: cannot be read: {str(error).splitlines()[0]}") from error
    return config


def copy_model_files(directory: Path, target: Path, *, dtype: str) -> None:
    """Copy everything in a store's `model/` to ``target``, with the config's dtype set to what is exported there."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)
    config: dict[str, Any] = json.loads((target / CONFIG_FILE).read_text())
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
