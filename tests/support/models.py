"""Tiny configs of nine causal LM families: three layers, hidden 64, a prime vocabulary; dropout 0 unless asked for.

The models themselves are transformers'; nothing here builds a stage. Used by the tests of every folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.configuration_utils import PreTrainedConfig

VOCAB_SIZE = 503
HIDDEN = 64
NUM_LAYERS = 3


def tiny_config(family: str, *, tied: bool = False, dropout: float = 0.0) -> PreTrainedConfig:
    """The tiny config of ``family``, one of :data:`FAMILIES`."""
    return FAMILIES[family](tied, dropout)


def reference_model(
    config: PreTrainedConfig, *, seed: int = 0, attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model of ``config`` in memory, float32 by default, in training mode, initialised by transformers."""
    auto: Any = AutoModelForCausalLM  # its methods have no types
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: object = auto.from_config(config, attn_implementation=attention, dtype=dtype)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(model).__name__} is not a PreTrainedModel")
    model.train()
    return model


def batch_of(rows: int = 2, tokens: int = 12, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """input_ids and labels, int64 [rows, tokens], the labels the inputs with the first three of row 0 not counted."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB_SIZE, (rows, tokens), generator=generator)
    labels = input_ids.clone()
    labels[0, :3] = -100
    return {"input_ids": input_ids, "labels": labels}


def num_counted(batch: dict[str, torch.Tensor]) -> int:
    """Labels of ``batch`` that count in the loss: shifted, not -100."""
    return int((batch["labels"][:, 1:] != -100).sum())


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = _COMMON | {"intermediate_size": 96, "num_key_value_heads": 2}


def _gpt2(tied: bool, dropout: float) -> PreTrainedConfig:
    return GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=HIDDEN, n_layer=NUM_LAYERS, n_head=4, n_positions=64, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=tied, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip


def _opt(tied: bool, dropout: float) -> PreTrainedConfig:
    # embeddings narrower than the layers, as in OPT-350m: its projections lie around the stack
    return OPTConfig(
        **_COMMON, ffn_dim=96, word_embed_proj_dim=32, tie_word_embeddings=tied, dropout=dropout,
        attention_dropout=dropout, layerdrop=0.0,
    )  # fmt: skip


def _neox(tied: bool, dropout: float) -> PreTrainedConfig:
    return GPTNeoXConfig(
        **_COMMON, intermediate_size=96, tie_word_embeddings=tied, attention_dropout=dropout, hidden_dropout=dropout
    )


def _phi3(tied: bool, dropout: float) -> PreTrainedConfig:
    return Phi3Config(
        **_GATED, tie_word_embeddings=tied, attention_dropout=dropout, resid_pdrop=dropout, embd_pdrop=dropout
    )


#: Family name -> config from (tied, dropout).
FAMILIES: dict[str, Callable[[bool, float], PreTrainedConfig]] = {
    "llama": lambda tied, drop: LlamaConfig(**_GATED, tie_word_embeddings=tied, attention_dropout=drop),
    "qwen3": lambda tied, drop: Qwen3Config(**_GATED, head_dim=16, tie_word_embeddings=tied, attention_dropout=drop),
    "mistral": lambda tied, drop: MistralConfig(
        **_GATED, sliding_window=5, tie_word_embeddings=tied, attention_dropout=drop
    ),
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _neox,
    "phi3": _phi3,
    "gemma2": lambda tied, drop: Gemma2Config(
        **_GATED, head_dim=16, sliding_window=5, tie_word_embeddings=tied, attention_dropout=drop
    ),
    "mixtral": lambda tied, drop: MixtralConfig(
        **_GATED, num_local_experts=8, sliding_window=None, tie_word_embeddings=tied, attention_dropout=drop
    ),
}
