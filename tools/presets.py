"""Where a model comes from: `--model` names a preset or a Hugging Face directory, and becomes a :class:`ModelSource`.

Nothing is built or loaded here but small files and the checkpoint's headers. Reading weights is in
`checkpoint.py`, tokenizing in `text.py`, building the model in `hoist.scheduler`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hoist.tools.checkpoint import CheckpointReader
from hoist.tools.checkpoint_files import WEIGHT_FILES, find_checkpoint
from hoist.tools.errors import ModelSourceError
from hoist.tools.text import ModelTokenizer

CONFIG_FILE = "config.json"
#: How models are named on the Hugging Face hub: OWNER/MODEL. Nothing is downloaded here.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
#: How the names of weights begin or end that are not read; a directory that has only these is no config-only model.
_FOREIGN_PREFIXES = ("pytorch_model", "tf_model", "flax_model", "consolidated.")
_FOREIGN_SUFFIXES = (".gguf", ".safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model that can be named instead of a directory; its weights are initialised."""

    description: str
    """One line for ``--help``."""
    make_config: Callable[[], PreTrainedConfig]
    """Its transformers config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """What ``--model`` named. Make one with :func:`load_model_source`."""

    name: str
    """As given."""
    config: PreTrainedConfig
    """transformers' config."""
    directory: Path | None
    """The Hugging Face directory, absolute; None for a preset."""
    tokenizer: ModelTokenizer | None
    """The directory's tokenizer, loaded when it is first used; None if it has none: text is then taken as bytes."""
    checkpoint: CheckpointReader | None
    """The weights, headers checked; None if they are to be initialised."""

    @property
    def shards(self) -> tuple[Path, ...]:
        """The checkpoint's files; empty if the weights are to be initialised."""
        return () if self.checkpoint is None else self.checkpoint.shards

    @property
    def dtype(self) -> torch.dtype | None:
        """Floating-point type of most of the checkpoint's elements; without a checkpoint, what the config says, if
        anything."""
        if self.checkpoint is not None:
            return self.checkpoint.dtype
        return self.config.dtype if isinstance(self.config.dtype, torch.dtype) else None

    @property
    def vocab_size(self) -> int:
        """Ids that the model has an embedding for."""
        return int(self.config.get_text_config(decoder=True).vocab_size)


def _llama(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    length: int,
    theta: float = 1e4,
    tied: bool = False,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        rope_parameters=RopeParameters(rope_type="default", rope_theta=theta),
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def _gpt(hidden: int, layers: int, heads: int, *, length: int, dropout: float) -> GPT2Config:
    return GPT2Config(
        vocab_size=50257,
        n_positions=length,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters=RopeParameters(rope_type="default", rope_theta=1e6),
        tie_word_embeddings=tied,
    )


def _mistral() -> MistralConfig:
    return MistralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        sliding_window=4096,
    )


#: All presets. Shapes are those of the published configs; the two large GPT shapes are the GreedySnake paper's, without
#: dropout (arXiv 2512.17570).
PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        description="Llama for bytes, 13 M parameters: the default job",
        make_config=lambda: _llama(512, 256, 704, 16, 4, 4, length=1024),
    ),
    "smollm2-135m": Preset(
        description="Llama shape, 135 M parameters",
        make_config=lambda: _llama(49152, 576, 1536, 30, 9, 3, length=8192, theta=1e5, tied=True),
    ),
    "gpt2": Preset(
        description="GPT-2, 124 M parameters", make_config=lambda: _gpt(768, 12, 12, length=1024, dropout=0.1)
    ),
    "gpt2-xl": Preset(
        description="GPT-2, 1.6 B parameters", make_config=lambda: _gpt(1600, 48, 25, length=1024, dropout=0.1)
    ),
    "qwen3-0.6b": Preset(
        description="Qwen3, 0.6 B parameters", make_config=lambda: _qwen3(1024, 3072, 28, 16, tied=True)
    ),
    "qwen3-8b": Preset(
        description="Qwen3, 8 B parameters", make_config=lambda: _qwen3(4096, 12288, 36, 32, tied=False)
    ),
    "llama2-7b": Preset(
        description="Llama 2, 7 B parameters", make_config=lambda: _llama(32000, 4096, 11008, 32, 32, 32, length=4096)
    ),
    "llama2-13b": Preset(
        description="Llama 2, 13 B parameters", make_config=lambda: _llama(32000, 5120, 13824, 40, 40, 40, length=4096)
    ),
    "llama2-70b": Preset(
        description="Llama 2, 69 B parameters", make_config=lambda: _llama(32000, 8192, 28672, 80, 64, 8, length=4096)
    ),
    "llama3-8b": Preset(
        description="Llama 3, 8 B parameters",
        make_config=lambda: _llama(128256, 4096, 14336, 32, 32, 8, length=8192, theta=5e5),
    ),
    "llama3-70b": Preset(
        description="Llama 3, 71 B parameters",
        make_config=lambda: _llama(128256, 8192, 28672, 80, 64, 8, length=8192, theta=5e5),
    ),
    "mistral-7b": Preset(description="Mistral 0.1, 7 B parameters", make_config=_mistral),
    "gpt-65b": Preset(
        description="GPT-2 shape, 65 B parameters", make_config=lambda: _gpt(8192, 80, 64, length=2048, dropout=0.0)
    ),
    "gpt-175b": Preset(
        description="GPT-3 shape, 175 B parameters", make_config=lambda: _gpt(12288, 96, 96, length=2048, dropout=0.0)
    ),
}


def load_model_source(model: str) -> ModelSource:
    """Find what ``--model`` names: a preset by its exact name, else a Hugging Face directory with or without weights.

    The config is read, the checkpoint's shards are looked at and their headers checked. Raises
    :class:`ModelSourceError` or :class:`CheckpointError`, one line each.
    """
    if model in PRESETS:
        return ModelSource(
            name=model, config=PRESETS[model].make_config(), directory=None, tokenizer=None, checkpoint=None
        )
    directory = Path(model)
    if directory.is_file():
        raise ModelSourceError(f"--model {model}: is a file; name the directory that holds its {CONFIG_FILE}")
    if not directory.is_dir():
        hub = ""
        if _HUB_NAME.fullmatch(model):
            folder = model.rpartition("/")[2]
            hub = f"; if it is on the Hugging Face hub, get it with: hf download {model} --local-dir {folder}"
        raise ModelSourceError(
            f"--model {model}: no such directory, and no preset; name a Hugging Face directory or one of "
            f"{', '.join(PRESETS)}{hub}"
        )
    directory = directory.absolute()
    config = _read_config(directory)
    try:
        checkpoint = find_checkpoint(directory)
        if checkpoint is None:
            _refuse_foreign_weights(directory)
        tokenizer = ModelTokenizer.find(directory)
    except OSError as error:
        raise ModelSourceError(
            f"--model {model}: {error.strerror or error} ({error.filename}); make it readable"
        ) from error
    return ModelSource(name=model, config=config, directory=directory, tokenizer=tokenizer, checkpoint=checkpoint)


def _read_config(directory: Path) -> PreTrainedConfig:
    """The directory's config, of a causal LM that transformers knows."""
    path = directory / CONFIG_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelSourceError(
            f"--model {directory}: has no {CONFIG_FILE}; name a directory written by save_pretrained, or one of "
            f"{', '.join(PRESETS)}"
        ) from None
    except OSError as error:
        raise ModelSourceError(f"--model {path}: {error.strerror or error}; make it readable") from error
    except UnicodeDecodeError as error:
        raise ModelSourceError(f"--model {path}: no UTF-8 at byte {error.start}; copy the file again") from None
    except json.JSONDecodeError as error:
        raise ModelSourceError(
            f"--model {path}: no JSON at line {error.lineno}, column {error.colno} ({error.msg}); correct it or copy "
            "it again"
        ) from None
    if not isinstance(document, dict):
        raise ModelSourceError(
            f"--model {path}: must be a JSON object, is a {type(document).__name__}; copy the file again"
        )
    model_type = document.get("model_type")
    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model_type not in known:
        near = difflib.get_close_matches(str(model_type), known, n=3)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ModelSourceError(
            f"--model {path}: model_type {model_type!r} is not a causal language model that this transformers "
            f"knows{hint}; allowed "
            f"are {', '.join(known)}"
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # config classes raise whatever their checks do
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelSourceError(f"--model {path}: the {model_type} config is refused ({reason}); correct it") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _refuse_foreign_weights(directory: Path) -> None:
    """Weights in a format that is not read, or shards whose index is missing, must not be replaced by new ones
    silently."""
    foreign = sorted(
        path.name
        for path in directory.iterdir()
        if path.name.startswith(_FOREIGN_PREFIXES) or path.suffix in _FOREIGN_SUFFIXES
    )
    if foreign:
        raise ModelSourceError(
            f"--model {directory}: its weights ({', '.join(foreign[:3])}) are not read; allowed are "
            f"{', '.join(WEIGHT_FILES)}: convert with from_pretrained and save_pretrained, or keep {CONFIG_FILE} alone "
            "for new weights"
        )
